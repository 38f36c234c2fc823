"""SparseGPModel in the acquisition functions, sampled paths and loops of BoTorch."""

import math
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from botorch.acquisition import UpperConfidenceBound
from botorch.acquisition.analytic import LogExpectedImprovement
from botorch.acquisition.knowledge_gradient import qKnowledgeGradient
from botorch.acquisition.logei import qLogExpectedImprovement, qLogNoisyExpectedImprovement
from botorch.acquisition.max_value_entropy_search import (
    qLowerBoundMaxValueEntropy,
    qMaxValueEntropy,
)
from botorch.acquisition.thompson_sampling import PathwiseThompsonSampling
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskVariationalGP
from botorch.models.model import Model
from botorch.optim import optimize_acqf
from botorch.sampling import SobolQMCNormalSampler
from botorch.sampling.pathwise import draw_matheron_paths, get_matheron_path_model
from gpytorch.kernels import Kernel
from gpytorch.mlls import VariationalELBO
from torch import Tensor

from helpers.botorch_problems import BOX, outcomes, regressor, rows
from winnowgp import SparseGP, SparseGPRegressor
from winnowgp.errors import InputError
from winnowgp.integrations.botorch import SparseGPModel, WinnowingAllocator


@pytest.fixture(scope="module")
def single() -> SparseGPRegressor:
    return regressor(1)


def test_analytic_acquisitions_have_textbook_values(
    single: SparseGPRegressor,
) -> None:
    X, model = rows(60, 1, seed=11), SparseGPModel.of(single)
    mean, sd = single.predict(X[:, 0].numpy(), return_std=True, observed=False)
    best = 8.0
    z = (mean - best) / sd
    density = np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)
    tail = np.array([0.5 * math.erfc(-v / math.sqrt(2)) for v in z])
    improvement = sd * (density + z * tail)
    seen = improvement > 1e-4 * sd  # the textbook's own cancellation spoils smaller ones
    assert seen.sum() >= 3
    found = LogExpectedImprovement(model, best)(X).detach().numpy()
    np.testing.assert_allclose(found[seen], np.log(improvement[seen]), rtol=1e-6)
    upper = UpperConfidenceBound(model, beta=4.0)(X).detach().numpy()
    np.testing.assert_allclose(upper, mean + 2 * sd, rtol=1e-8)


ACQUISITIONS = {
    "LogEI": (1, lambda model: LogExpectedImprovement(model, 8.0)),
    "UCB": (1, lambda model: UpperConfidenceBound(model, beta=4.0)),
    "qLogEI": (2, lambda model: qLogExpectedImprovement(model, 8.0)),
    "qLogNEI": (2, lambda model: qLogNoisyExpectedImprovement(model, rows(10))),
    "qKG": (1, lambda model: qKnowledgeGradient(model, num_fantasies=4)),
    "qMES": (1, lambda model: qMaxValueEntropy(model, rows(50))),
    "qMES pending": (1, lambda model: qMaxValueEntropy(model, rows(50), X_pending=rows(2))),
    "qLowerBoundMES": (1, lambda model: qLowerBoundMaxValueEntropy(model, rows(50))),
}


@pytest.mark.parametrize(("q", "acquisition"), ACQUISITIONS.values(), ids=ACQUISITIONS.keys())
def test_acquisitions_can_be_optimised(q: int, acquisition: Any, single: SparseGPRegressor) -> None:
    torch.manual_seed(0)
    function = acquisition(SparseGPModel.of(single))
    X, value = optimize_acqf(
        function, BOX, q=q, num_restarts=2, raw_samples=16, options={"maxiter": 20}
    )
    assert value is not None
    assert X.shape == (q, 2)
    assert torch.equal(X.clamp(*BOX), X)
    drawn = rows(20, q, seed=12)
    if isinstance(function, qKnowledgeGradient):
        drawn = rows(20, q + 4, seed=12)
    with torch.no_grad():
        assert value.item() >= function(drawn).median().item()


def test_knowledge_gradient_equals_mean_of_fantasy_maxima(
    single: SparseGPRegressor,
) -> None:
    model = SparseGPModel.of(single)
    sampler = SobolQMCNormalSampler(torch.Size([3]), seed=2)
    function = qKnowledgeGradient(model, num_fantasies=3, sampler=sampler)
    X = rows(4, seed=13)  # one candidate, and where each of three fantasies is judged
    drawn = sampler(model.posterior(X[:1], observation_noise=True))
    values = [
        model.condition_on_observations(X[:1], drawn[i]).posterior(X[i + 1 : i + 2]).mean.item()
        for i in range(3)
    ]
    assert function(X[None]).item() == pytest.approx(np.mean(values), rel=1e-8)


def hill(X: Tensor) -> Tensor:
    """Highest, with value 1, at (0.7, 0.2); a lower hill is elsewhere.

    Too low a hill to stay on, by chance of the last digits, for as long as the loops below last.
    """
    top = X.new_tensor([0.7, 0.2])
    low = X.new_tensor([0.2, 0.8])
    return torch.exp(-6 * (X - top).square().sum(-1)) + 0.3 * torch.exp(
        -12 * (X - low).square().sum(-1)
    )


def proposed(model: Model, best: Tensor) -> Tensor:
    function = qLogExpectedImprovement(
        model, best, sampler=SobolQMCNormalSampler(torch.Size([32]), seed=0)
    )
    cube = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
    return optimize_acqf(function, cube, q=2, num_restarts=3, raw_samples=32)[0]


def start() -> tuple[Tensor, Tensor]:
    """Rows around the lower hill and in the corners, none near the top."""
    sobol = torch.quasirandom.SobolEngine(2, scramble=True, seed=3)
    X = sobol.draw(64, dtype=torch.float64)
    X = X[(X - X.new_tensor([0.7, 0.2])).norm(dim=-1) > 0.35][:10]
    assert hill(X).max() < 0.7
    return X, hill(X)


@pytest.mark.slow
def test_loop_with_fitted_regressor_finds_maximum() -> None:
    torch.manual_seed(0)
    X, y = start()
    for _ in range(5):
        # Outcomes are far from zero and in thousands.
        model = SparseGPModel.of(
            SparseGPRegressor(random_state=0).fit(X.numpy(), 5e3 + 1e3 * y.numpy())
        )
        new = proposed(model, 5e3 + 1e3 * y.max())
        X, y = torch.cat([X, new]), torch.cat([y, hill(new)])
    assert y.max() > 0.98


@pytest.mark.slow
def test_loop_with_allocator_finds_maximum() -> None:
    torch.manual_seed(0)
    X, y = start()
    kernel: Kernel | None = None
    noise: float | None = None
    for _ in range(5):
        z = (y - y.mean()) / y.std()
        model: Any = SingleTaskVariationalGP(
            X,
            z[:, None],
            covar_module=deepcopy(kernel),
            learn_inducing_points=False,
            inducing_points=len(X) - 2,
            inducing_point_allocator=WinnowingAllocator(targets=z, noise=noise),
        )
        assert len(model.model.variational_strategy.inducing_points) <= len(X) - 2
        elbo = VariationalELBO(model.likelihood, model.model, num_data=len(X))
        fit_gpytorch_mll(elbo, optimizer_kwargs={"options": {"maxiter": 100}})
        kernel, noise = model.model.covar_module, model.likelihood.noise.item()
        new = proposed(model, z.max())
        X, y = torch.cat([X, new]), torch.cat([y, hill(new)])
    assert y.max() > 0.95


@pytest.fixture(scope="module", params=[1, 2])
def small(request: pytest.FixtureRequest) -> SparseGPRegressor:
    """A fit with few inducing points, whose functions vary."""
    X = rows(20)
    Y = outcomes(X, request.param) + 0.1 * torch.randn(20, 1, generator=torch.Generator())
    points = rows(3, seed=4).numpy()
    model = SparseGPRegressor("rbf", inducing_points=points, hyper="point")
    return model.fit(X.numpy(), Y.squeeze(-1).numpy())


def z_scores(values: Tensor, mean: Tensor, cov: Tensor) -> Tensor:
    """Return those of means and second moments of draws `[S N]`."""
    errors = values - mean
    second = errors[:, :, None] * errors[:, None, :]
    root = len(values) ** 0.5
    first = root * errors.mean(0) / errors.std(0)
    return torch.cat([first, (root * (second.mean(0) - cov) / second.std(0)).flatten()])


def test_matheron_paths_have_the_moments_of_the_posterior(small: SparseGPRegressor) -> None:
    torch.manual_seed(0)
    model: Any = SparseGPModel.of(small)
    X = rows(3, seed=9)
    values = get_matheron_path_model(model, torch.Size([2000]))(X)
    assert values.shape == (2000, 3, model.num_outputs)
    for outcome in range(model.num_outputs):
        expected: Any = model.subset_output([outcome]).posterior(X)
        cov = expected.distribution.covariance_matrix
        assert z_scores(values[..., outcome], expected.mean[:, 0], cov).abs().max() < 4.5


def test_matheron_paths_have_the_shapes_of_botorch(small: SparseGPRegressor) -> None:
    model: Any = SparseGPModel.of(small)
    m = model.num_outputs
    one, five = (get_matheron_path_model(model, shape) for shape in (None, torch.Size([5])))
    assert one(rows(4)).shape == (4, m)
    assert one(rows(7, 4)).shape == (7, 4, m)
    assert five(rows(4)).shape == (5, 4, m)
    # Each function at rows of its own.
    X = rows(7, 5, 4)
    values = five(X)
    assert values.shape == (7, 5, 4, m)
    torch.testing.assert_close(five(X[2, 3])[3], values[2, 3])
    paths: Any = draw_matheron_paths(model, sample_shape=torch.Size([2, 3]))
    assert paths(rows(4)).shape == ((2, 3, 4) if m == 1 else (2, 3, 2, 4))


def test_pathwise_thompson_sampling_climbs_a_function(
    small: SparseGPRegressor,
) -> None:
    torch.manual_seed(0)
    model = SparseGPModel.of(small).subset_output([0])
    thompson = PathwiseThompsonSampling(model)
    best, value = list[Any](optimize_acqf(thompson, BOX, q=1, num_restarts=3, raw_samples=32))
    # The same function in every call; the optimiser finds one of its local maxima.
    assert thompson(best) == pytest.approx(value.item())
    assert thompson(rows(200)[:, None]).quantile(0.9) < value


def test_matheron_paths_of_a_conditioned_model_are_refused(small: SparseGPRegressor) -> None:
    model = SparseGPModel.of(small)
    X = rows(1)
    conditioned: Any = model.condition_on_observations(X, outcomes(X, model.num_outputs))
    with pytest.raises(InputError, match="conditioned on observations"):
        get_matheron_path_model(conditioned)


@pytest.mark.usefixtures("one_size")
def test_repeated_steps_with_warm_start_reuse_the_last_fit() -> None:
    """The exact evidence is evaluated for one start instead of many."""
    X = rows(24)
    Y = outcomes(X, 1)[:, 0]
    counts, bound = [0, 0], SparseGP.dense_bound
    regressor = SparseGPRegressor(
        "rbf", random_state=0, warm_start=True, tolerance=0.1, hyper="point"
    )
    for step in range(2):

        def counted(self: Any, data: Any, step: int = step) -> Any:
            value = bound(self, data)

            def call() -> Tensor:
                counts[step] += 1
                return value()

            return call

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SparseGP, "dense_bound", counted)
            model = SparseGPModel.of(regressor.fit(X[: 20 + step].numpy(), Y[: 20 + step].numpy()))
        assert model.posterior(X).mean.isfinite().all()
    assert 3 * counts[1] < counts[0]
