"""The bound of VariationalGP with the optimal q(u), its gradient and its optimum."""

from math import inf

import numpy as np
import pytest
import torch
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import (
    BernoulliLikelihood,
    PoissonLikelihood,
)
from gpytorch.means import ConstantMean
from scipy.optimize import minimize
from scipy.special import log_ndtr

import winnowgp.models.svgp as variational_gp
from helpers.site_problems import CASES, N, built, regression
from winnowgp.data import Dataset
from winnowgp.errors import NotPositiveDefiniteError
from winnowgp.models import VariationalGP


def test_profiled_bound_gaussian_gradient_equals_regression() -> None:
    sparse, gp, data = regression()
    for model in (sparse, gp):
        model.chunked_bound(data)().backward()
    theirs = dict(sparse.named_parameters())
    for name, parameter in gp.named_parameters():
        if name in ("q_mean", "q_factor"):
            assert parameter.grad is None
        else:
            ours, expected = parameter.grad, theirs[name].grad
            torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-6, msg=name)


PROFILED = {
    **{case: (case, lambda: ScaleKernel(RBFKernel())) for case in CASES},
    "matern": ("bernoulli", lambda: ScaleKernel(MaternKernel(nu=2.5))),
}


@pytest.mark.parametrize(("case", "kernel"), PROFILED.values(), ids=PROFILED.keys())
def test_profiled_bound_gradient_equals_central_differences(
    case: str, kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(variational_gp, "TRAINING_GAIN", 1e-13)
    gp, data = built(case, K=3, kernel=kernel())
    bound = gp.chunked_bound(data)
    bound().backward()
    h = 1e-4
    for name, parameter in gp.named_parameters():
        if name in ("q_mean", "q_factor"):
            assert parameter.grad is None
            continue
        flat = parameter.data.view(-1)
        expected = torch.empty_like(flat)
        for i in range(len(flat)):
            at = flat[i].item()
            ends = []
            for step in (h, -h):
                flat[i] = at + step
                ends.append(bound().item())
            flat[i] = at
            expected[i] = (ends[0] - ends[1]) / (2 * h)
        assert parameter.grad is not None, name
        ours = parameter.grad.view(-1)
        torch.testing.assert_close(ours, expected, rtol=2e-5, atol=2e-5, msg=f"{name}: {ours}")


def test_profiled_bound_moving_values_equal_fresh_values() -> None:
    """Values depend on previous calls by at most 1e-5 nats per row."""
    gp, data = built("softmax")
    bound = gp.chunked_bound(data)
    bound()
    with torch.no_grad():
        gp.kernel.initialize(outputscale=1.5)
    assert bound().item() == pytest.approx(gp.fixed_bound(data), abs=1e-5 * N)
    with torch.no_grad():
        gp.kernel.initialize(outputscale=40.0)
    assert bound().item() == pytest.approx(gp.fixed_bound(data), abs=1e-5 * N)


def test_profiled_bound_moving_gradients_equal_fresh_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(variational_gp, "TRAINING_GAIN", 1e-13)
    gp, data = built("bernoulli")
    moving = gp.chunked_bound(data)
    moving()
    with torch.no_grad():
        gp.kernel.initialize(outputscale=3.0)
    parameters = [*gp.kernel.parameters(), *gp.mean.parameters(), gp.candidates]
    ours = torch.autograd.grad(moving(), parameters)
    fresh = torch.autograd.grad(gp.chunked_bound(data)(), parameters)
    for a, b in zip(ours, fresh, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def two_rows() -> tuple[VariationalGP, Dataset]:
    X = torch.tensor([[0.0], [0.7]], dtype=torch.float64)
    data = Dataset.of(X, torch.tensor([1.0, 0.0], dtype=torch.float64))
    kernel = ScaleKernel(RBFKernel())
    kernel.outputscale = 2.0
    mean = ConstantMean()
    mean.constant = 0.4
    gp = VariationalGP(kernel, X[:1], likelihood=BernoulliLikelihood(), mean=mean)
    return gp, data


def prior(gp: VariationalGP, data: Dataset) -> tuple[np.ndarray, np.ndarray]:
    """Covariance of two rows, and which sign each has."""
    K = gp.kernel(data.X).to_dense().detach().numpy()
    return K, 2 * data.Y[:, 0].numpy() - 1


def test_dense_bound_is_optimum_over_gaussians(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two rows: a maximum over mean and covariance, with expectations on a grid."""
    monkeypatch.setattr(variational_gp, "INITIAL_GAIN", 1e-9)
    gp, data = two_rows()
    K, sign = prior(gp, data)
    z = np.linspace(-9, 9, 4001)
    weight = np.exp(-0.5 * z**2)
    weight /= weight.sum()

    def loss(theta: np.ndarray) -> float:
        m = theta[:2]
        F = np.array([[np.exp(theta[2]), 0.0], [theta[3], np.exp(theta[4])]])
        S = F @ F.T
        f = 0.4 + m + np.sqrt(S.diagonal()) * z[:, None]
        nats = (weight[:, None] * log_ndtr(sign * f)).sum()
        inside = np.linalg.solve(K, S).trace() + m @ np.linalg.solve(K, m) - 2
        kl = 0.5 * (inside + np.linalg.slogdet(K)[1] - np.linalg.slogdet(S)[1])
        return kl - nats

    best = -minimize(loss, np.zeros(5), method="BFGS", options={"gtol": 1e-7}).fun
    assert gp.dense_bound(data)().item() == pytest.approx(best, abs=1e-5)
    assert gp.with_candidates(data.X).fixed_bound(data) == pytest.approx(best, abs=1e-7)


def test_dense_bound_is_below_grid_evidence() -> None:
    gp, data = two_rows()
    K, sign = prior(gp, data)
    axis = np.linspace(-12, 12, 801)
    f = np.stack(np.meshgrid(axis, axis, indexing="ij"), -1)
    log_p = -0.5 * np.einsum("abi,ij,abj->ab", f, np.linalg.inv(K), f)
    p = np.exp(log_p) / np.exp(log_p).sum()
    evidence = np.log((p * np.exp(log_ndtr(sign * (0.4 + f)).sum(-1))).sum())
    gap = evidence - gp.dense_bound(data)().item()
    assert 0 < gap < 0.05
    assert gp.fixed_bound(data) < gp.dense_bound(data)().item()


@pytest.mark.parametrize("draw", range(4))
def test_profiled_bound_kernel_overflow_shortens_step(draw: int) -> None:
    """Exponents of an RBF kernel are differences of numbers as large as x²/ℓ²: here 1e19."""
    g = torch.Generator().manual_seed(draw)
    X = 4 * torch.rand(20, 1, generator=g, dtype=torch.float64) - 2
    data = Dataset.of(X, torch.poisson(50 * (1.5 + torch.sin(3 * X)), generator=g))
    kernel, mean = ScaleKernel(RBFKernel()), ConstantMean()
    kernel.initialize(outputscale=1e3)
    mean.initialize(constant=75.0)
    gp = VariationalGP(kernel, X[:0], likelihood=PoissonLikelihood(), mean=mean)
    bound = gp.dense_bound(data)
    start = bound().item()
    gp.kernel.initialize(**{"base_kernel.lengthscale": 2e-10})
    try:
        value = bound().item()
    except NotPositiveDefiniteError:
        # With most seeds an entry, and with it q(f), is infinite.
        value = -inf
    assert value < start
    # The previous sites are still valid at the previous parameters.
    gp.kernel.initialize(**{"base_kernel.lengthscale": 0.6931})
    assert bound().item() == pytest.approx(start, abs=1e-2)
