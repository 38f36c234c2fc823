"""Models, likelihoods and data that `winnow` rejects, with messages that name the reason."""

from threading import Lock
from typing import Any

import numpy as np
import pytest
import torch
from gpytorch import settings
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.kernels import MultitaskKernel, RBFKernel
from gpytorch.likelihoods import (
    BetaLikelihood,
    FixedNoiseGaussianLikelihood,
    SoftmaxLikelihood,
)
from gpytorch.means import ConstantMean, MultitaskMean
from gpytorch.models import ApproximateGP, ExactGP
from gpytorch.models.deep_gps import DeepGP
from gpytorch.models.deep_gps.dspp import DSPP
from gpytorch.variational import (
    CholeskyVariationalDistribution,
    CiqVariationalStrategy,
    DeltaVariationalDistribution,
    GridInterpolationVariationalStrategy,
    LMCVariationalStrategy,
    MeanFieldVariationalDistribution,
    NaturalVariationalDistribution,
    NNVariationalStrategy,
    OrthogonallyDecoupledVariationalStrategy,
    VariationalStrategy,
)
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from helpers.gpytorch_models import (
    Deep,
    Latent,
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


class Wrapped(ApproximateGP):
    mean_module: Any
    covar_module: Any

    def __init__(self, made: Any) -> None:
        super().__init__(made(self))
        self.mean_module, self.covar_module = ConstantMean(), RBFKernel()

    def forward(self, x: Tensor) -> MultivariateNormal:
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


class OwnStrategy(VariationalStrategy):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


class OwnDivergence(VariationalStrategy):
    def kl_divergence(self) -> Tensor:
        return 0.1 * super().kl_divergence()


class OwnDistribution(CholeskyVariationalDistribution):
    def forward(self) -> Any:
        return super().forward()


def q(count: int = 8) -> CholeskyVariationalDistribution:
    return CholeskyVariationalDistribution(count)


REFUSED: dict[str, Any] = {
    "CiqVariationalStrategy": lambda m: CiqVariationalStrategy(
        m, points(8), NaturalVariationalDistribution(8)
    ),
    "GridInterpolationVariationalStrategy": lambda m: GridInterpolationVariationalStrategy(
        m, 8, [(0.0, 6.0)], q()
    ),
    "NNVariationalStrategy": lambda m: NNVariationalStrategy(
        m, points(8), MeanFieldVariationalDistribution(8), k=2, training_batch_size=4
    ),
    "OrthogonallyDecoupledVariationalStrategy": lambda m: OrthogonallyDecoupledVariationalStrategy(
        VariationalStrategy(m, points(8), q()), points(8), DeltaVariationalDistribution(8)
    ),
    "OwnStrategy": lambda m: OwnStrategy(m, points(8), q()),
    "OwnDivergence": lambda m: OwnDivergence(m, points(8), q()),
    "OwnDistribution": lambda m: VariationalStrategy(m, points(8), OwnDistribution(8)),
}


@pytest.mark.filterwarnings("ignore:Tried to import faiss")
@pytest.mark.parametrize("name", REFUSED)
def test_strategy_unsupported_raises_with_name(name: str) -> None:
    with pytest.raises(InputError, match=rf"`variational_strategy` must .*got {name}"):
        winnow(Wrapped(REFUSED[name]), gaussian(), curve(20))


def test_model_without_strategy_raises_with_name() -> None:
    class Exact(ExactGP):
        pass

    class Mixture(DSPP):
        pass

    class Empty(DeepGP):
        pass

    x, y = curve(20)
    models: list[tuple[Any, str]] = [
        (Exact(x, y, gaussian()), "Exact is an ExactGP.*winnowgp.SparseGP"),
        (Mixture(3), "Mixture is a DSPP"),
        (Empty(), "Empty holds no DeepGPLayer"),
        (torch.nn.Sequential(Model(points(8))), r"got Sequential. Pass `model\.0`"),
        (torch.nn.Linear(1, 1), "`model` must be an ApproximateGP or a DeepGP.*got Linear"),
    ]
    for model, kwargs in models:
        with pytest.raises(InputError, match=kwargs):
            winnow(model, gaussian(), (x, y))


def test_functions_without_own_q_raise() -> None:
    x, Y = tasks(20)
    with pytest.raises(InputError, match=r"batch_shape=torch.Size\(\[3\]\)"):
        winnow(Model(points(8), prior=[3]), gaussian(), (x, Y.mT))
    with pytest.raises(InputError, match=r"batch_shape=torch.Size\(\[3\]\)"):
        winnow(Model(points(8).repeat(3, 1, 1)), gaussian(), (x, Y.mT))


@pytest.mark.parametrize(
    ("data", "kwargs"),
    [
        (torch.zeros(3), "two tensors"),
        ((torch.zeros(3, 1), torch.zeros(4)), "as many rows"),
        ((torch.zeros(0, 1), torch.zeros(0)), "has no rows"),
        ((torch.full((3, 1), torch.nan), torch.zeros(3)), "`train_x` has entries that are NaN"),
        ((torch.zeros(3, 1), torch.full((3,), torch.inf)), "`train_y` has entries"),
        (([1.0], [2.0]), "two tensors"),
        (([1.0], np.zeros(1)), r"a tuple of \[list, ndarray\]"),
        (DataLoader(TensorDataset(*curve(3))), r"a DataLoader. .*`loader.dataset.tensors`"),
        ((curve(9)[0], curve(9)[1][:, None]), r"`train_y` must be \[9\].*got \[9, 1\]"),
        ((curve(9)[0], tasks(9)[1].mT), r"`train_y` must be \[9\].*got \[3, 9\]"),
        ((curve(9)[0].repeat(1, 2), curve(9)[1]), r"`train_x` \[9, 2\] and targets \[9\]: Run"),
    ],
)
def test_data_invalid_raises(data: Any, kwargs: str) -> None:
    with pytest.raises(InputError, match=kwargs):
        winnow(Model(points(8)), gaussian(), data)


def test_tasks_without_column_each_raise() -> None:
    x, Y = tasks(20)
    model = Model(points(8), batch=[3], around=independent)
    with pytest.raises(InputError, match=r"`train_y` must be \[20 T\].*got \[3, 20\]"):
        winnow(model, task_noise(), (x, Y.mT))
    with pytest.raises(InputError, match=r"of targets for each function.*got \[2, 3, 20\]"):
        winnow(Model(points(8), batch=[3]), gaussian(), (x, Y.mT.expand(2, 3, 20)))


def test_likelihood_of_wrong_type_raises() -> None:
    model: Any = Model(points(8))
    with pytest.raises(InputError, match=r"`likelihood` must be a Likelihood.*got VariationalELBO"):
        winnow(model, elbo(gaussian(), model, 20), curve(20))


def test_model_that_stores_losses_raises() -> None:
    x, y = curve(20)
    model: Any = Model(points(8))
    model.losses = [elbo(gaussian(), model, 20)(model(x), y)]
    with pytest.raises(InputError, match=r"Model cannot be copied.*list of losses"):
        winnow(model, gaussian(), (x, y))


def test_latent_model_needs_its_table_only() -> None:
    x, Y = tasks(20)
    model = Latent(x / 3 - 1, 3, 6)
    with pytest.raises(InputError, match="each of the model's 20 latent inputs; got 15 rows"):
        winnow(model, gaussian(), Y[:15])
    with pytest.raises(InputError, match=r"must be its table, a tensor \[N P\]"):
        winnow(model, gaussian(), (x, Y))


@pytest.mark.parametrize(
    ("request_", "kwargs"),
    [
        ({"alpha": "much"}, "`alpha` must be positive or 'auto'"),
        ({"alpha": -1.0}, "`alpha` must be positive or 'auto'"),
        ({"tolerance": 0.0}, "`tolerance` must be positive"),
        ({"max_points": 0}, "`max_points` must be at least 1"),
        ({"max_points": 3, "alpha": 0.1}, "exclude each other"),
        ({"max_points": 3.5}, "`max_points` must be a whole number.*got 3.5"),
        ({"alpha": None}, "`alpha` must be positive or 'auto'; got None"),
        ({"tolerance": "small"}, "`tolerance` must be positive nats.*got 'small'"),
    ],
)
def test_winnow_invalid_parameters_raise(request_: Any, kwargs: str) -> None:
    with pytest.raises(InputError, match=kwargs):
        winnow(Model(points(8)), gaussian(), curve(20), **request_)


pytestmark = pytest.mark.unchecked


@pytest.mark.parametrize("generator", [0, 1.5, "seed", np.random.default_rng(0)])
def test_generator_of_wrong_type_raises(generator: Any) -> None:
    with pytest.raises(InputError, match=r"`generator` must be a torch\.Generator.*manual_seed"):
        winnow(Model(points(8)), gaussian(), curve(20), generator=generator)


class OwnNumber(Deep):
    """A model that sets the number of samples itself."""

    def forward(self, x: Tensor) -> Any:
        with settings.num_likelihood_samples(4):
            return super().forward(x)


class OwnDraws(Deep):
    """A model that draws samples itself."""

    def forward(self, x: Tensor) -> Any:
        h = self.hidden(x)
        q = torch.distributions.Normal(h.mean[0], h.variance[0].sqrt())
        return self.last(q.rsample(torch.Size([4])), are_samples=True)


@pytest.mark.parametrize("kind", [OwnNumber, OwnDraws])
def test_deep_model_with_own_sample_number_raises(kind: Any) -> None:
    kwargs = (
        r"`last.variational_strategy` must be evaluated at one.*shape \[4\].*num_likelihood_samples"
    )
    with pytest.raises(InputError, match=kwargs):
        winnow(kind(4), gaussian(), curve(20))


class OwnCall(VariationalStrategy):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs) * 2


class OwnFactor(VariationalStrategy):
    def _cholesky_factor(self, induc_induc_covar: Any) -> Any:
        return super()._cholesky_factor(induc_induc_covar.add_jitter(0.5))


class OwnUpdates(VariationalStrategy):
    def _compute_predictive_updates(self, *args: Any, **kwargs: Any) -> Any:
        mean, covariance = super()._compute_predictive_updates(*args, **kwargs)
        return 0.5 * mean, covariance


class OwnPrior(VariationalStrategy):
    @property
    def prior_distribution(self) -> Any:
        return super().prior_distribution


class GrandChild(OwnPrior):
    """A strategy that inherits an overridden method."""


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
def test_strategy_with_overridden_methods_raises(kind: Any, method: str) -> None:
    kwargs = rf"`variational_strategy` must .* got {kind.__name__}, which has its own `{method}`"
    with pytest.raises(InputError, match=kwargs):
        winnow(Model(points(8), strategy=kind), gaussian(), curve(20))


def test_multitask_strategy_with_own_kl_raises() -> None:
    def around(strategy: Any) -> OwnSum:
        return OwnSum(strategy, num_tasks=3, num_latents=2)

    with pytest.raises(InputError, match=r"`variational_strategy` .*LMC.* own `kl_divergence`"):
        winnow(Model(points(8), batch=[2], around=around), task_noise(), tasks(20))


class Correlated(Model):
    """A model with tasks in the kernel, as in an exact GP."""

    def __init__(self, Z: Tensor) -> None:
        super().__init__(Z)
        self.mean_module = MultitaskMean(ConstantMean(), num_tasks=3).double()
        self.covar_module = MultitaskKernel(RBFKernel(), num_tasks=3).double()

    def forward(self, x: Tensor) -> Any:
        return MultitaskMultivariateNormal(self.mean_module(x), self.covar_module(x))


def test_tasks_in_forward_raise() -> None:
    with pytest.raises(InputError, match=r"got MultitaskMultivariateNormal.*LMCVariationalStrat"):
        winnow(Correlated(points(8)), task_noise(), tasks(20))


def test_fixed_noise_of_other_rows_raises() -> None:
    likelihood = FixedNoiseGaussianLikelihood(torch.full((15,), 0.1).double())
    with pytest.raises(InputError, match=r"noise for each of the 20 rows; got 15"):
        winnow(Model(points(8)), likelihood, curve(20))


def test_softmax_without_function_per_class_raises() -> None:
    x, y = curve(20)
    data = (x, (y > 0).long())
    softmax = SoftmaxLikelihood(num_features=4, num_classes=3)
    with pytest.raises(InputError, match=r"each of the 4 features.*got a MultivariateNormal"):
        winnow(Model(points(8)), softmax, data)
    with pytest.raises(InputError, match=r"each of the 4 features.*got 3 tasks"):
        winnow(Model(points(8), batch=[3], around=independent), softmax, data)


def test_impossible_targets_raise_in_one_line() -> None:
    with pytest.raises(InputError, match=r"ValueError: .* within the support.*Beta") as refused:
        winnow(Model(points(8)), BetaLikelihood().double(), curve(20))
    assert "\n" not in str(refused.value)


def test_model_that_cannot_be_copied_raises() -> None:
    model: Any = Model(points(8))
    model.lock = Lock()
    with pytest.raises(InputError, match=r"Model cannot be copied.*lock"):
        winnow(model, gaussian(), curve(20))


def test_subset_objective_likelihood_of_wrong_type_raises() -> None:
    model: Any = Model(points(8))
    with pytest.raises(InputError, match=r"`likelihood` must be a Likelihood.*got VariationalELBO"):
        subset_objective(model, elbo(gaussian(), model, 20), curve(20))
