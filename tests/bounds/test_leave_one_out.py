"""Leave-one-out densities, against posteriors computed without each row."""

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal

from helpers.oracles import explained
from helpers.problems import Problem, problem
from winnowgp.bounds import PredictiveGap, evidence
from winnowgp.bounds.chunked import KernelChunk, chunked_moments
from winnowgp.bounds.evidence import GaussianRows
from winnowgp.bounds.leave_one_out import Cavity, collapsed_leave_one_out, exact_leave_one_out
from winnowgp.errors import InputError

N = 12
WEIGHTS = 0.3 + torch.arange(N).remainder(4).double()
weighted = pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["plain", "weighted"])


def densities_without_each_row(p: Problem, prior: Tensor, weights: Tensor | None) -> Tensor:
    """Condition N(0, `prior`) on all rows but one, for each row, and add what Q_ff leaves out.

    `prior` is Q_ff or K_ff; the variance of the row that is left out is always k_ii.
    """
    noise = p.noise.expand(N) if weights is None else p.noise / weights
    result = []
    for i in range(N):
        others = torch.arange(N) != i
        K = prior[others][:, others] + torch.diag(noise[others])
        k = prior[i, others]
        mean = k @ torch.linalg.solve(K, p.Y[others])
        variance = p.kff[i] - k @ torch.linalg.solve(K, k) + p.noise
        result.append(Normal(mean, variance.sqrt()).log_prob(p.Y[i]).sum())
    return torch.stack(result)


def collapsed(p: Problem, weights: Tensor | None) -> Tensor:
    precision = (1 / p.noise).expand(N) if weights is None else weights / p.noise

    def chunks() -> Iterator[KernelChunk]:
        for c in (slice(0, 5), slice(5, 10), slice(10, N)):
            yield p.Kuf[:, c], p.kff[c], p.Y[c], precision[c]

    L = torch.linalg.cholesky(p.Kuu)
    moments = chunked_moments(L, chunks())
    return collapsed_leave_one_out(L, moments, chunks=chunks(), noise=p.noise)


@weighted
@pytest.mark.parametrize("K", [0, 1, 5])
@pytest.mark.parametrize("P", [1, 3])
def test_collapsed_leave_one_out_equals_posteriors_without_each_row(
    K: int, P: int, weights: Tensor | None
) -> None:
    p = problem(N=N, K=K, P=P)
    expected = densities_without_each_row(p, explained(p.Kuu, p.Kuf), weights)
    torch.testing.assert_close(collapsed(p, weights), expected, rtol=1e-9, atol=1e-9)


@weighted
@pytest.mark.parametrize("P", [1, 3])
def test_exact_leave_one_out_equals_posteriors_without_each_row(
    P: int, weights: Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evidence, "_ELEMENTS", {"cpu": 60})
    p = problem(N=N, P=P)
    rows = GaussianRows(p.X, p.Y, p.kff, p.noise, covariance=p.kernel, weights=weights)
    expected = densities_without_each_row(p, p.Kff, weights)
    torch.testing.assert_close(exact_leave_one_out(rows), expected, rtol=1e-9, atol=1e-9)


@weighted
def test_leave_one_out_with_all_rows_as_points_is_exact(weights: Tensor | None) -> None:
    p = problem(N=N)
    p = Problem(p.X, p.X, p.Y, p.noise, p.lengthscale)
    rows = GaussianRows(p.X, p.Y, p.kff, p.noise, covariance=p.kernel, weights=weights)
    torch.testing.assert_close(
        collapsed(p, weights), exact_leave_one_out(rows), rtol=1e-8, atol=1e-8
    )


def test_leave_one_out_with_little_noise_equals_posteriors_without_each_row() -> None:
    """Each row nearly determines its own posterior: w_i s_i is close to one."""
    p = problem(N=N, lengthscale=0.3)
    p = Problem(p.X, p.X, p.Y, torch.tensor(1e-6).double(), 0.3)
    expected = densities_without_each_row(p, p.Kff, None)
    torch.testing.assert_close(collapsed(p, None), expected, rtol=1e-6, atol=1e-6)


def test_cavity_of_sites_equals_posterior_without_each_site() -> None:
    """Two latent functions with sites of their own, some of negative precision."""
    p = problem(N=N, K=5)
    g = torch.Generator().manual_seed(3)
    precision = 0.1 + torch.rand(N, 2, generator=g).double()
    precision[::5] = -0.05
    linear = torch.randn(N, 2, generator=g).double()
    V = torch.linalg.solve(torch.linalg.cholesky(p.Kuu), p.Kuf)
    q = V.square().sum(0)
    eye = torch.eye(5).double()
    mean, spread, expected_mean, expected_variance = torch.empty(4, N, 2).double()
    for j in range(2):
        w, lam = precision[:, j], linear[:, j]
        inverse = torch.linalg.inv(eye + (V * w) @ V.mT)
        mean[:, j] = V.mT @ inverse @ (V @ lam)
        spread[:, j] = (V * (inverse @ V)).sum(0)
        for i in range(N):
            others = torch.arange(N) != i
            U = V[:, others]
            inverse = torch.linalg.inv(eye + (U * w[others]) @ U.mT)
            expected_mean[i, j] = V[:, i] @ inverse @ U @ lam[others]
            expected_variance[i, j] = p.kff[i] - q[i] + V[:, i] @ inverse @ V[:, i]
    cavity = Cavity.of(
        mean, spread, unexplained=p.kff - q, explained=q, precision=precision, linear=linear
    )
    torch.testing.assert_close(cavity.mean, expected_mean, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(cavity.variance, expected_variance, rtol=1e-9, atol=1e-9)


def test_cavity_without_posterior_is_prior() -> None:
    row = torch.ones(1, 1).double()
    cavity = Cavity.of(
        0.7 * row,
        2 * row,
        unexplained=0.25 * row[0],
        explained=1.5 * row[0],
        precision=0.6 * row,
        linear=row,
    )
    assert (cavity.mean.item(), cavity.variance.item()) == (0.0, 1.75)


def test_predictive_gap_is_paired_mean_and_standard_error() -> None:
    g = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 50, generator=g, dtype=torch.float64)
    gap = PredictiveGap.of(a, b)
    assert gap.nats == pytest.approx((a - b).mean().item())
    assert gap.standard_error == pytest.approx((a - b).std().item() / math.sqrt(50))
    assert PredictiveGap.of(b, a).nats == pytest.approx(-gap.nats)


def test_predictive_gap_with_weights_is_weighted_mean() -> None:
    a, b = torch.tensor([1.0, 4.0, 2.0]).double(), torch.tensor([0.0, 1.0, 2.0]).double()
    weights = torch.tensor([2.0, 1.0, 1.0]).double()
    gap = PredictiveGap.of(a, b, weights=weights)
    assert gap.nats == pytest.approx(5 / 4)
    # N/(N − 1) Σ w² (d − mean)² / (Σ w)²
    scatter = 4 * (1 - 1.25) ** 2 + (3 - 1.25) ** 2 + (0 - 1.25) ** 2
    assert gap.standard_error == pytest.approx(math.sqrt(1.5 * scatter / 16))
    scaled = PredictiveGap.of(a, b, weights=7 * weights)
    assert (scaled.nats, scaled.standard_error) == pytest.approx((gap.nats, gap.standard_error))


def test_predictive_gap_of_one_row_has_no_standard_error() -> None:
    one = torch.ones(1).double()
    assert PredictiveGap.of(2 * one, one) == PredictiveGap(1.0, math.inf)


def test_predictive_gap_without_rows_raises() -> None:
    nothing = torch.ones(0).double()
    with pytest.raises(InputError, match=r"same rows, at least one; got \[0\] and \[0\]"):
        PredictiveGap.of(nothing, nothing)
