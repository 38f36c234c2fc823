"""SparseGPModel against dense Gaussians, and in BoTorch's own optimisation loop."""

import math
import sys
from copy import deepcopy
from importlib import import_module
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
from botorch.acquisition.objective import ScalarizedPosteriorTransform
from botorch.acquisition.thompson_sampling import PathwiseThompsonSampling
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskVariationalGP
from botorch.models.model import Model
from botorch.optim import optimize_acqf
from botorch.sampling import SobolQMCNormalSampler
from botorch.sampling.pathwise import draw_matheron_paths, get_matheron_path_model
from gpytorch.kernels import Kernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import StudentTLikelihood
from gpytorch.mlls import VariationalELBO
from sklearn.exceptions import NotFittedError
from torch import Tensor

from winnowgp import Dataset, SparseGP, SparseGPRegressor, fit
from winnowgp.data import Standardiser
from winnowgp.errors import InputError, MissingExtraError
from winnowgp.integrations.botorch import SparseGPModel, WinnowingAllocator
from winnowgp.models import Posterior

BOX = torch.tensor([[10.0, -5.0], [20.0, -3.0]], dtype=torch.float64)


def rows(*shape: int, seed: int = 0) -> Tensor:
    """Return rows that are uniform in the box."""
    g = torch.Generator().manual_seed(seed)
    unit = torch.rand(*shape, 2, generator=g, dtype=torch.float64)
    return BOX[0] + (BOX[1] - BOX[0]) * unit


def outcomes(X: Tensor, P: int) -> Tensor:
    columns = [7 + 3 * torch.sin(X[..., 0]), 0.02 * X[..., 1] ** 2]
    return torch.stack(columns[:P], -1)


def regressor(P: int) -> SparseGPRegressor:
    X = rows(30)
    Y = outcomes(X, P)
    Y = Y + 0.05 * Y.std(0) * torch.randn(Y.shape, generator=torch.Generator().manual_seed(1))
    return SparseGPRegressor(tolerance=0.1, random_state=0).fit(
        X.numpy(), Y[:, 0].numpy() if P == 1 else Y.numpy()
    )


@pytest.fixture(scope="module")
def single() -> SparseGPRegressor:
    return regressor(1)


@pytest.fixture(scope="module")
def double() -> SparseGPRegressor:
    return regressor(2)


def joint(found: SparseGPRegressor, X: Tensor, *, observed: bool = False) -> tuple[Tensor, Tensor]:
    """Return the regressor's mean `[n P]` and covariances `[P n n]` of the rows."""
    mean, cov = found.predict(X.numpy(), return_cov=True, observed=observed)
    mean, cov = torch.from_numpy(mean), torch.from_numpy(cov)
    if mean.dim() == 1:
        return mean[:, None], cov[None]
    return mean, cov.permute(2, 0, 1)


def each(posterior: Any, P: int) -> Tensor:
    """Covariance of each outcome, `[*b P q q]`, of a joint normal with independent outcomes."""
    dense = posterior.distribution.covariance_matrix
    if P == 1:
        return dense[..., None, :, :]
    q = dense.shape[-1] // P
    blocks = dense.reshape(*dense.shape[:-2], q, P, q, P)
    for a in range(P):
        for b in range(P):
            assert a == b or bool((blocks[..., a, :, b] == 0).all())
    return torch.stack([blocks[..., p, :, p] for p in range(P)], -3)


@pytest.mark.parametrize("P", [1, 2])
@pytest.mark.parametrize("observed", [False, True])
@pytest.mark.parametrize("q", [1, 3])
def test_posterior_batches_equal_regressor(
    P: int, observed: bool, q: int, single: SparseGPRegressor, double: SparseGPRegressor
) -> None:
    found = single if P == 1 else double
    X = rows(2, 3, q, seed=4)
    posterior = SparseGPModel.of(found).posterior(X, observation_noise=observed)
    assert posterior.mean.shape == posterior.variance.shape == (2, 3, q, P)
    for i, j in ((0, 0), (1, 2)):
        mean, cov = joint(found, X[i, j], observed=observed)
        torch.testing.assert_close(posterior.mean[i, j], mean)
        torch.testing.assert_close(each(posterior, P)[i, j], cov)


def test_posterior_accepts_given_noise(double: SparseGPRegressor) -> None:
    X, model = rows(3, 4), SparseGPModel.of(double)
    noise = rows(3, 4, seed=3).abs()
    difference = model.posterior(X, observation_noise=noise).variance - model.posterior(X).variance
    torch.testing.assert_close(difference, noise)


def test_posterior_output_indices_and_transforms(double: SparseGPRegressor) -> None:
    X, model = rows(3, 4), SparseGPModel.of(double)
    both = model.posterior(X)
    for posterior in (
        model.posterior(X, output_indices=[1]),
        model.subset_output([1]).posterior(X),
    ):
        torch.testing.assert_close(posterior.mean, both.mean[..., 1:])
        torch.testing.assert_close(posterior.variance, both.variance[..., 1:])
    weights = torch.tensor([2.0, -3.0], dtype=torch.float64)
    mixed = model.posterior(X, posterior_transform=ScalarizedPosteriorTransform(weights))
    torch.testing.assert_close(mixed.mean[..., 0], both.mean @ weights)
    torch.testing.assert_close(mixed.variance[..., 0], both.variance @ weights.square())
    swapped = model.subset_output([1, 0]).posterior(X)
    torch.testing.assert_close(swapped.mean, both.mean.flip(-1))
    seen = model.condition_on_observations(X[0], outcomes(X[0], 2))
    torch.testing.assert_close(
        seen.subset_output([1]).posterior(X).variance, seen.posterior(X).variance[..., 1:]
    )


def test_updated_with_points_equals_condition_on_observations(double: SparseGPRegressor) -> None:
    X, model = rows(3, 4), SparseGPModel.of(double)
    seen = model.condition_on_observations(X[0], outcomes(X[0], 2)).posterior(X)
    updated = model.updated(X[0], outcomes(X[0], 2), add_points=True)
    torch.testing.assert_close(updated.posterior(X).mean, seen.mean)
    torch.testing.assert_close(updated.posterior(X).variance, seen.variance, atol=1e-8, rtol=1e-5)
    # It can be updated again.
    again = updated.updated(X[1], outcomes(X[1], 2), add_points=True)
    assert again.joint.posterior.M > updated.joint.posterior.M > model.joint.posterior.M


def test_posterior_has_gradients_in_rows(single: SparseGPRegressor) -> None:
    model = SparseGPModel.of(single)

    def moments(X: Tensor) -> tuple[Tensor, Tensor]:
        posterior: Any = model.posterior(X)
        return posterior.mean, posterior.distribution.covariance_matrix

    assert torch.autograd.gradcheck(moments, rows(2, 3).requires_grad_(), atol=1e-6)


@pytest.mark.parametrize("P", [1, 2])
def test_condition_equals_joint_prediction(
    P: int, single: SparseGPRegressor, double: SparseGPRegressor
) -> None:
    found = single if P == 1 else double
    X, seen = rows(3, seed=5), rows(4, seed=6)
    Y = outcomes(seen, P) + 0.3
    mean, cov = joint(found, torch.cat([seen, X]))
    for noise in (None, torch.full((4, P), 0.7, dtype=torch.float64)):
        settings = {} if noise is None else {"noise": noise}
        model = SparseGPModel.of(found).condition_on_observations(seen, Y, **settings)
        posterior = model.posterior(X)
        for p in range(P):
            variance = found.noise_[p] if noise is None else 0.7
            S = cov[p, :4, :4] + variance * torch.eye(4, dtype=torch.float64)
            gain = cov[p, 4:, :4] @ S.inverse()
            new = mean[4:, p] + gain @ (Y[:, p] - mean[:4, p])
            torch.testing.assert_close(posterior.mean[:, p], new)
            left = cov[p, 4:, 4:] - gain @ cov[p, :4, 4:]
            torch.testing.assert_close(each(posterior, P)[p], left, rtol=1e-6, atol=1e-9)


def test_fantasize_equals_conditioning_on_samples(single: SparseGPRegressor) -> None:
    model = SparseGPModel.of(single)
    X, T = rows(5, 2, seed=7), rows(4, 5, 3, seed=8)
    sampler = SobolQMCNormalSampler(torch.Size([4]), seed=1)
    fantasy = model.fantasize(X, sampler)
    assert fantasy.batch_shape == (4, 5)
    drawn = sampler(model.posterior(X, observation_noise=True))
    alone = model.condition_on_observations(X[2], drawn[3, 2])
    posterior = fantasy.posterior(T)
    assert posterior.mean.shape == (4, 5, 3, 1)
    torch.testing.assert_close(posterior.mean[3, 2], alone.posterior(T[3, 2]).mean)
    torch.testing.assert_close(posterior.variance[3, 2], alone.posterior(T[3, 2]).variance)
    assert fantasy.posterior(T[0, 0]).mean.shape == (4, 5, 3, 1)
    assert model.fantasize(X[:, :0], sampler).posterior(T).mean.shape == (4, 5, 3, 1)


def test_condition_far_from_points_takes_effect(single: SparseGPRegressor) -> None:
    model = SparseGPModel.of(single)
    far = torch.tensor([[60.0, -4.0]], dtype=torch.float64)
    conditioned = model.condition_on_observations(far, torch.tensor([[40.0]], dtype=torch.float64))
    assert abs(conditioned.posterior(far).mean.item() - 40) < 1
    # An update through the same inducing points has no effect there.
    updated = model.updated(far, torch.tensor([[40.0]], dtype=torch.float64))
    assert abs(updated.posterior(far).mean.item() - model.posterior(far).mean.item()) < 1e-6


def test_updated_equals_fit_of_all_rows() -> None:
    X = rows(40)
    Y = outcomes(X, 1)
    x_scaler, y_scaler = Standardiser.of(X), Standardiser.of(Y)
    data = Dataset(x_scaler.forward(X), y_scaler.forward(Y))
    gp = SparseGP(ScaleKernel(RBFKernel()), data.X[:9] + 0.1, noise=0.02)
    first = gp.posterior(Dataset(data.X[:25], data.Y[:25]))
    model = SparseGPModel(first, inputs=x_scaler, targets=y_scaler).updated(X[25:], Y[25:])
    whole = SparseGPModel(gp.posterior(data), inputs=x_scaler, targets=y_scaler)
    T = rows(3, 4, seed=9)
    torch.testing.assert_close(model.posterior(T).mean, whole.posterior(T).mean)
    torch.testing.assert_close(model.posterior(T).variance, whole.posterior(T).variance)


def test_model_without_scalers_is_in_posterior_units() -> None:
    X = rows(30) / 10
    data = Dataset.of(X, torch.sin(3 * X[:, 0]))
    fitted = fit(SparseGP(ScaleKernel(RBFKernel()), X[:8], noise=0.1), data)
    posterior = SparseGPModel(fitted.posterior).posterior(X)
    wanted = fitted.posterior.predict(X)
    torch.testing.assert_close(posterior.mean, wanted.mean)
    torch.testing.assert_close(posterior.variance, wanted.variance)


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


def test_student_t_has_function_but_no_gaussian_noise(single: SparseGPRegressor) -> None:
    X, q = rows(6), single.posterior_
    heavy = Posterior(
        q.kernel,
        q.Z,
        mean=q.mean,
        likelihood=StudentTLikelihood(),
        q_mean=q.q_mean,
        q_factor=q.q_factor,
    )
    model, units = SparseGPModel(heavy), SparseGPModel.of(single)
    assert model.posterior(X).mean.shape == units.posterior(X).mean.shape
    with pytest.raises(InputError, match="StudentTLikelihood has no Gaussian noise"):
        model.posterior(X, observation_noise=True)
    with pytest.raises(InputError, match="StudentTLikelihood"):
        model.condition_on_observations(X, outcomes(X, 1))
    noise = torch.full((6, 1), 0.1, dtype=torch.float64)
    conditioned = model.condition_on_observations(X, outcomes(X, 1), noise=noise).posterior(X)
    assert bool((conditioned.variance < 0.1 + 1e-9).all())


def test_model_invalid_arguments_raise(single: SparseGPRegressor) -> None:
    model, X = SparseGPModel.of(single), rows(4)
    with pytest.raises(InputError, match=r"must be \[..., q, 2\] of torch.float64.* got \[4, 1\]"):
        model.posterior(X[:, :1])
    with pytest.raises(InputError, match=r"got .* of torch.float32"):
        model.posterior(X.float())
    with pytest.raises(InputError, match=r"`Y` must be \[..., 4, 1\].* got \[4, 2\]"):
        model.condition_on_observations(X, X)
    with pytest.raises(InputError, match=r"accepts `noise` only; got \['strict'\]"):
        model.condition_on_observations(X, outcomes(X, 1), strict=True)
    with pytest.raises(InputError, match="cannot be updated; call `updated` first"):
        model.condition_on_observations(X, outcomes(X, 1)).updated(X, outcomes(X, 1))
    with pytest.raises(NotFittedError):
        SparseGPModel.of(SparseGPRegressor())
    with pytest.raises(InputError, match="must be a SparseGPRegressor; got Linear"):
        SparseGPModel.of(torch.nn.Linear(1, 1))  # pyright: ignore[reportArgumentType]


def test_import_without_botorch_names_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("winnowgp.integrations.botorch")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "botorch", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'winnowgp\[botorch\]'"):
        import_module("winnowgp.integrations.botorch")


def test_model_to_dtype_leaves_regressor(single: SparseGPRegressor) -> None:
    before, X = SparseGPModel.of(single), rows(3)
    expected, mean = single.predict(X.numpy()), before.posterior(X).mean
    SparseGPModel.of(single).float()
    np.testing.assert_array_equal(single.predict(X.numpy()), expected)
    assert torch.equal(before.posterior(X).mean, mean)


@pytest.mark.parametrize(
    "noise", [torch.zeros(3, 5, 1), torch.tensor(-0.1), torch.zeros(4, 3)], ids=str
)
def test_noise_of_wrong_shape_raises(single: SparseGPRegressor, noise: Tensor) -> None:
    with pytest.raises(InputError, match="the noise must be variances"):
        SparseGPModel.of(single).posterior(rows(4), observation_noise=noise)


def test_noise_number_is_accepted_and_missing_outcomes_raise(single: SparseGPRegressor) -> None:
    model, X = SparseGPModel.of(single), rows(2)
    Y = outcomes(X, 1)
    one, each = (model.condition_on_observations(X, Y, noise=n) for n in (0.1, 0 * Y + 0.1))
    assert torch.equal(one.posterior(rows(3)).mean, each.posterior(rows(3)).mean)
    with pytest.raises(InputError, match="`Y` has entries that are NaN"):
        model.condition_on_observations(X, Y * torch.nan)


def test_conditioned_model_to_dtype_leaves_parent(single: SparseGPRegressor) -> None:
    X, model = rows(3), SparseGPModel.of(single)
    before = model.posterior(X)
    child = model.condition_on_observations(X, outcomes(X, 1)).float()
    assert child.posterior(X.float()).mean.dtype == torch.float32
    after = model.posterior(X)
    assert torch.equal(after.mean, before.mean)
    assert torch.equal(after.variance, before.variance)


def test_conditioned_model_with_history_can_be_copied(
    double: SparseGPRegressor,
) -> None:
    X, new = rows(3).requires_grad_(), rows(4, seed=5)
    model = SparseGPModel.of(double).condition_on_observations(2 * X - X, outcomes(X.detach(), 2))
    copy = deepcopy(model)
    torch.testing.assert_close(copy.posterior(new).mean, model.posterior(new).mean.detach())
    assert copy.likelihood is copy.joint.posterior.likelihood
    assert copy.likelihood is not model.likelihood
    assert not copy.posterior(new).mean.requires_grad
    (slope,) = torch.autograd.grad(model.posterior(new).mean.sum(), X)
    assert slope.abs().max() > 0


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
    return SparseGPRegressor("rbf", inducing_points=points).fit(X.numpy(), Y.squeeze(-1).numpy())


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


def test_repeated_steps_with_warm_start_reuse_the_last_fit() -> None:
    """The exact evidence is evaluated for one start instead of many."""
    X = rows(24)
    Y = outcomes(X, 1)[:, 0]
    counts, bound = [0, 0], SparseGP.dense_bound
    regressor = SparseGPRegressor("rbf", random_state=0, warm_start=True, tolerance=0.1)
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
