"""Updates of several processes by more rows against the bounds of all rows."""

import pytest
import torch
from gpytorch.kernels import MaternKernel, RBFKernel

from winnowgp.bounds.collapsed import moment_bound
from winnowgp.data import Dataset
from winnowgp.gradients import all_masks
from winnowgp.models import MultiOutputGP
from winnowgp.models.process_stream import ProcessStream

MIXING = torch.tensor([[1.0, 0.3], [-0.5, 1.2], [0.8, 0.0]], dtype=torch.float64)
NOISE = torch.tensor([0.1, 0.3, 0.05], dtype=torch.float64)
X = torch.linspace(0, 4, 16, dtype=torch.float64)[:, None]
Y = torch.sin(X + torch.arange(3))
Y[::3, 0], Y[1::4, 2] = torch.nan, torch.nan
FIRST = Dataset.of(X[:9], Y[:9], missing=True)
SECOND = Dataset.of(X[9:], Y[9:], missing=True)
ALL = Dataset.of(X, Y, missing=True)


def model(*Z: torch.Tensor) -> MultiOutputGP:
    kernels = [RBFKernel().double(), MaternKernel(1.5).double()]
    return MultiOutputGP(kernels, Z, mixing=MIXING, noise=NOISE)


def test_without_candidates_an_update_conditions_the_posterior() -> None:
    posterior = model(X[:3], X[4:8]).posterior(FIRST)
    none = [X[:0], X[:0]]
    stream = ProcessStream.of(posterior, SECOND, none)
    updated = stream.selected(torch.ones(7, dtype=torch.bool))
    expected = posterior.condition_on(SECOND)
    for new, old in zip(updated.processes(X), expected.processes(X), strict=True):
        torch.testing.assert_close(new, old, rtol=1e-7, atol=1e-8)


def test_with_all_rows_as_points_an_update_is_the_exact_posterior() -> None:
    # All earlier rows are inducing points: nothing about them is lost.
    posterior = model(X[:9], X[:9]).posterior(FIRST)
    stream = ProcessStream.of(posterior, SECOND, [X[9:], X[9:]])
    updated = stream.selected(torch.ones(32, dtype=torch.bool))
    exact = model(X, X).posterior(ALL)
    for new, old in zip(updated.processes(X + 0.1), exact.processes(X + 0.1), strict=True):
        torch.testing.assert_close(new, old, rtol=1e-4, atol=1e-5)


def test_statistics_are_streaming_bounds_of_all_subsets() -> None:
    """The dense streaming bound: earlier rows are Gaussian pseudo-observations of old values."""
    posterior = model(X[:2], X[6:8]).posterior(FIRST)
    stream = ProcessStream.of(posterior, SECOND, [X[10:11], X[13:14]])
    values = stream.statistics().value(all_masks(6))
    sizes = [3, 3]
    L_old = torch.block_diag(*posterior.factors)
    S = L_old @ posterior.q_factor @ posterior.q_factor.mT @ L_old.mT
    prior = L_old @ L_old.mT
    # p̃(u) ∝ q(u)/p(u) = N(u; centre, D_a), and D_a⁻¹ = S⁻¹ − K⁻¹.
    precision = torch.linalg.inv(S) - torch.linalg.inv(prior)
    linear = torch.linalg.solve(S, L_old @ posterior.q_mean)
    # ∫ p(u) exp(−½ uᵀ D_a⁻¹ u + linearᵀ u) du, which bounds of the new rows are divided by.
    remembered = 0.5 * (torch.logdet(S) - torch.logdet(prior) + linear @ S @ linear)
    for mask, value in zip(all_masks(6), values, strict=True):
        keep = mask.split(sizes)
        gp = model(*(Z[k] for Z, k in zip(stream.candidates, keep, strict=True)))
        pairs = list(zip(gp.kernels, gp.candidate_sets, strict=True))
        old = list(zip(gp.kernels, posterior.inducing_points, strict=True))
        Kua = torch.block_diag(
            *(k(Z, a).to_dense() for (k, Z), (_, a) in zip(pairs, old, strict=True))
        ).detach()
        L, moments = gp.moments(SECOND)
        Lu = torch.block_diag(*L)
        V = torch.linalg.solve_triangular(Lu, Kua, upper=False)
        C, D = moments.C + V @ precision @ V.mT, moments.D[:, 0] + V @ linear
        B = torch.eye(len(C), dtype=C.dtype) + C
        trace = moments.diagonal - moments.C.diagonal().sum()
        trace = trace + ((prior - V.mT @ V) * precision).sum()
        expected = moments.constant - 0.5 * (
            torch.logdet(B) + moments.square - D @ torch.linalg.solve(B, D) + trace
        )
        assert value.item() == pytest.approx((expected - remembered).item(), abs=1e-4)
    whole = moment_bound(stream.moments).item()
    assert values[-1].item() == pytest.approx(whole, abs=1e-8)
    density = stream.posterior.log_predictive(SECOND).item()
    assert values[-1].item() == pytest.approx(density, abs=1e-6)
