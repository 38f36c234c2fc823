"""SparseGPModel against dense Gaussians."""

import sys
from copy import deepcopy
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from botorch.acquisition.objective import ScalarizedPosteriorTransform
from botorch.sampling import SobolQMCNormalSampler
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import StudentTLikelihood
from sklearn.exceptions import NotFittedError
from torch import Tensor

from helpers.botorch_problems import outcomes, regressor, rows
from winnowgp import Dataset, SparseGP, SparseGPRegressor, fit
from winnowgp.data import Standardiser
from winnowgp.errors import InputError, MissingExtraError, NoInducingPointsWarning
from winnowgp.integrations.botorch import SparseGPModel
from winnowgp.integrations.botorch.model import condition_with_points
from winnowgp.models import Posterior
from winnowgp.models.posterior import JointPosterior


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


def test_updated_with_points_equals_condition_on_observations() -> None:
    X, model = rows(3, 4), SparseGPModel.of(regressor(2, noise="shared"))
    seen = model.condition_on_observations(X[0], outcomes(X[0], 2)).posterior(X)
    updated = model.updated(X[0], outcomes(X[0], 2), add_points=True)
    torch.testing.assert_close(updated.posterior(X).mean, seen.mean)
    torch.testing.assert_close(updated.posterior(X).variance, seen.variance, atol=1e-8, rtol=1e-5)
    # It can be updated again.
    again = updated.updated(X[1], outcomes(X[1], 2), add_points=True)
    assert again.joint.posterior.M > updated.joint.posterior.M > model.joint.posterior.M


def test_updated_with_points_of_own_noise_is_refused(double: SparseGPRegressor) -> None:
    X = rows(2)
    with pytest.raises(InputError, match="one covariance for all outputs"):
        SparseGPModel.of(double).updated(X, outcomes(X, 2), add_points=True)


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
    linear: Any = torch.nn.Linear(1, 1)
    with pytest.raises(InputError, match="must be a SparseGPRegressor; got Linear"):
        SparseGPModel.of(linear)


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


def test_posterior_of_a_constant_model_has_a_zero_gradient() -> None:
    """Optimisers of acquisition functions ask for the gradient of every model."""
    X = rows(8)
    with pytest.warns(NoInducingPointsWarning, match="same value"):
        constant = SparseGPRegressor("rbf", random_state=0).fit(X.numpy(), np.zeros(8))
    assert constant.n_inducing_ == 0
    new = rows(3, seed=1).requires_grad_()
    mean = SparseGPModel.of(constant).posterior(new).mean
    (gradient,) = torch.autograd.grad(mean.sum(), new)
    assert gradient.count_nonzero() == 0


@pytest.mark.parametrize("P", [1, 2])
def test_condition_with_points_equals_exact_conditional(P: int) -> None:
    X = torch.linspace(0, 4, 30, dtype=torch.float64)[:, None]
    data = Dataset.of(X, torch.cat([torch.sin(X + p) for p in range(P)], 1))
    model = SparseGP(ScaleKernel(RBFKernel()), X[1:10:3], noise=0.05)
    posterior, second = model.posterior(data.part(slice(0, 13))), data.part(slice(13, 30))
    # One of the rows is an inducing point already, and one comes twice.
    X = torch.cat([posterior.Z[:1], second.X, second.X[:1]])
    Y = torch.cat([second.Y[:1], second.Y, second.Y[1:2]])
    conditioned = condition_with_points(posterior, Dataset(X, Y))
    noise = model.noise.detach().expand(len(X), P)
    mean, covariance = JointPosterior(posterior).condition_on(X, Y, noise=noise)(data.X)
    prediction = conditioned.predict(data.X)
    torch.testing.assert_close(prediction.mean, mean.mT, atol=1e-7, rtol=1e-7)
    variance = covariance.diagonal(dim1=-2, dim2=-1).mT
    torch.testing.assert_close(prediction.variance, variance, atol=1e-7, rtol=1e-6)
    other = Posterior(
        posterior.kernel,
        posterior.Z,
        mean=posterior.mean,
        likelihood=StudentTLikelihood(),
        q_mean=posterior.q_mean,
        q_factor=posterior.q_factor,
    )
    with pytest.raises(InputError, match="GaussianLikelihood"):
        condition_with_points(other, Dataset(X, Y))


def test_model_of_an_estimator_says_what_to_pass() -> None:
    with pytest.raises(InputError, match=r"must be a Posterior; got SparseGPRegressor.*\.of`"):
        SparseGPModel(SparseGPRegressor())  # pyright: ignore[reportArgumentType]
