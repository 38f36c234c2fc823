"""Odd models that cannot go through the door hear why, and what to do."""

from threading import Lock
from typing import Any

import numpy as np
import pytest
import torch
from gpytorch import settings
from gpytorch.distributions import MultitaskMultivariateNormal
from gpytorch.kernels import MultitaskKernel, RBFKernel
from gpytorch.likelihoods import (
    BetaLikelihood,
    FixedNoiseGaussianLikelihood,
    SoftmaxLikelihood,
)
from gpytorch.means import ConstantMean, MultitaskMean
from gpytorch.variational import LMCVariationalStrategy, VariationalStrategy
from torch import Tensor

from helpers.gpytorch_models import (
    Deep,
    Model,
    curve,
    elbo,
    gaussian,
    independent,
    points,
    task_noise,
    tasks,
)
from winnowgp.errors import InputError
from winnowgp.integrations.gpytorch import subset_objective, winnow

pytestmark = pytest.mark.unchecked


@pytest.mark.parametrize("generator", [0, 1.5, "seed", np.random.default_rng(0)])
def test_a_generator_is_torchs(generator: Any) -> None:
    with pytest.raises(InputError, match=r"`generator` must be a torch\.Generator.*manual_seed"):
        winnow(Model(points(8)), gaussian(), curve(20), generator=generator)


class OwnNumber(Deep):
    """Says by itself how many samples are drawn."""

    def forward(self, x: Tensor) -> Any:
        with settings.num_likelihood_samples(4):
            return super().forward(x)


class OwnDraws(Deep):
    """Draws them by itself."""

    def forward(self, x: Tensor) -> Any:
        h = self.hidden(x)
        q = torch.distributions.Normal(h.mean[0], h.variance[0].sqrt())
        return self.last(q.rsample(torch.Size([4])), are_samples=True)


@pytest.mark.parametrize("kind", [OwnNumber, OwnDraws])
def test_a_deep_model_must_leave_the_number_of_samples_to_gpytorch(kind: Any) -> None:
    words = r"`last.variational_strategy` must see one sample.*shape \[4\].*num_likelihood_samples"
    with pytest.raises(InputError, match=words):
        winnow(kind(4), gaussian(), curve(20))


class OwnCall(VariationalStrategy):
    def __call__(self, *args: Any, **words: Any) -> Any:
        return super().__call__(*args, **words) * 2


class OwnFactor(VariationalStrategy):
    def _cholesky_factor(self, induc_induc_covar: Any) -> Any:
        return super()._cholesky_factor(induc_induc_covar.add_jitter(0.5))


class OwnUpdates(VariationalStrategy):
    def _compute_predictive_updates(self, *args: Any, **words: Any) -> Any:
        mean, covariance = super()._compute_predictive_updates(*args, **words)
        return 0.5 * mean, covariance


class OwnPrior(VariationalStrategy):
    @property
    def prior_distribution(self) -> Any:
        return super().prior_distribution


class GrandChild(OwnPrior):
    """Inherits what its parent does in its own way."""


class OwnSum(LMCVariationalStrategy):
    def kl_divergence(self) -> Tensor:
        return 0.1 * super().kl_divergence()


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        (OwnCall, "__call__"),
        (OwnFactor, "_cholesky_factor"),
        (OwnUpdates, "_compute_predictive_updates"),
        (OwnPrior, "prior_distribution"),
        (GrandChild, "prior_distribution"),
    ],
)
def test_a_strategy_with_a_way_of_its_own_hears_which(kind: Any, method: str) -> None:
    words = rf"`variational_strategy` must .* got {kind.__name__}, which has its own `{method}`"
    with pytest.raises(InputError, match=words):
        winnow(Model(points(8), strategy=kind), gaussian(), curve(20))


def test_a_multitask_strategy_with_a_kl_of_its_own_hears_so() -> None:
    def around(strategy: Any) -> OwnSum:
        return OwnSum(strategy, num_tasks=3, num_latents=2)

    with pytest.raises(InputError, match=r"`variational_strategy` .*LMC.* own `kl_divergence`"):
        winnow(Model(points(8), batch=[2], around=around), task_noise(), tasks(20))


class Correlated(Model):
    """Tasks in the kernel, as an exact GP has them."""

    def __init__(self, Z: Tensor) -> None:
        super().__init__(Z)
        self.mean_module = MultitaskMean(ConstantMean(), num_tasks=3).double()
        self.covar_module = MultitaskKernel(RBFKernel(), num_tasks=3).double()

    def forward(self, x: Tensor) -> Any:
        return MultitaskMultivariateNormal(self.mean_module(x), self.covar_module(x))


def test_tasks_belong_into_the_strategy() -> None:
    with pytest.raises(InputError, match=r"got MultitaskMultivariateNormal.*LMCVariationalStrat"):
        winnow(Correlated(points(8)), task_noise(), tasks(20))


def test_noise_that_is_known_is_that_of_the_rows() -> None:
    likelihood = FixedNoiseGaussianLikelihood(torch.full((15,), 0.1).double())
    with pytest.raises(InputError, match=r"noise for each of the 20 rows; got 15"):
        winnow(Model(points(8)), likelihood, curve(20))


def test_classes_need_a_function_each() -> None:
    x, y = curve(20)
    data = (x, (y > 0).long())
    softmax = SoftmaxLikelihood(num_features=4, num_classes=3)
    with pytest.raises(InputError, match=r"each of the 4 features.*got a MultivariateNormal"):
        winnow(Model(points(8)), softmax, data)
    with pytest.raises(InputError, match=r"each of the 4 features.*got 3 tasks"):
        winnow(Model(points(8), batch=[3], around=independent), softmax, data)


def test_targets_that_the_likelihood_cannot_have_are_refused_in_one_line() -> None:
    with pytest.raises(InputError, match=r"ValueError: .* within the support.*Beta") as refused:
        winnow(Model(points(8)), BetaLikelihood().double(), curve(20))
    assert "\n" not in str(refused.value)


def test_what_cannot_be_copied_is_refused() -> None:
    model: Any = Model(points(8))
    model.lock = Lock()
    with pytest.raises(InputError, match=r"Model cannot be copied.*lock"):
        winnow(model, gaussian(), curve(20))


def test_an_objective_wants_a_likelihood_too() -> None:
    model: Any = Model(points(8))
    with pytest.raises(InputError, match=r"`likelihood` must be a Likelihood.*got VariationalELBO"):
        subset_objective(model, elbo(gaussian(), model, 20), curve(20))
