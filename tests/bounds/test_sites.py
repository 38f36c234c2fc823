"""Sites against Gaussian integrals over u with dense matrices, and gradients against autograd."""

from typing import Any

import pytest
import torch
from gpytorch.kernels import MaternKernel, ScaleKernel
from torch import Tensor

from helpers import oracles
from helpers.problems import Problem, problem
from winnowgp.bounds import collapsed_bound
from winnowgp.bounds.row_blocks import JITTER, RowBlocks, WhitenedChunks
from winnowgp.bounds.sites import (
    Sites,
    exact_site_gradient,
    site_gradient,
    site_moments,
    site_sums,
)
from winnowgp.data import Dataset
from winnowgp.errors import NotPositiveDefiniteError
from winnowgp.gradients import all_masks
from winnowgp.models.chunked_kernels import AutogradChunks
from winnowgp.models.kernels import kernel_blocks
from winnowgp.models.stationary import RBFProfile, StationaryChunks
from winnowgp.selection.objective import subset_statistics

close: dict[str, Any] = {"rtol": 1e-8, "atol": 1e-8}
CHUNKS: list[dict[str, int]] = [{}, {"chunk": 7, "keep": 0}, {"chunk": 1, "keep": 10**9}]
cut = pytest.mark.parametrize("how", CHUNKS, ids=str)


def rows_of(p: Problem, chunk: int | None = None) -> RowBlocks:
    return RowBlocks.of(Dataset(p.X, p.Y), size=chunk)


def whitened(p: Problem, *, chunk: int | None = None, keep: int | None = None) -> WhitenedChunks:
    blocks = rows_of(p, chunk)
    kernel = StationaryChunks(
        RBFProfile(),
        Z=p.Z - blocks.centre,
        variance=torch.tensor(1.7, dtype=torch.float64),
        lengthscales=torch.full((p.X.shape[1],), p.lengthscale, dtype=torch.float64),
    )
    return WhitenedChunks.for_values(kernel, blocks, keep=keep)


def random_sites(N: int, P: int = 2, seed: int = 3) -> Sites:
    """Different sites for each latent function; a fifth of the precisions are negative."""
    g = torch.Generator().manual_seed(seed)
    linear = torch.randn(N, P, generator=g, dtype=torch.float64)
    precision = 2 * torch.rand(N, P, generator=g, dtype=torch.float64) * (1 + torch.arange(P))
    precision[::5] *= -0.2
    return Sites(linear, precision)


def dense_q(Kuu: Tensor, Kuf: Tensor, sites: Sites) -> list[tuple[Tensor, Tensor]]:
    """q(u) ∝ N(u | 0, K_uu) exp(λᵀ A u − ½ uᵀ Aᵀ W A u), A = K_fu K_uu⁻¹: means and covariances."""
    A = Kuf.mT @ Kuu.inverse()
    result = []
    for linear, w in zip(sites.linear.mT, sites.precision.mT, strict=True):
        covariance = (Kuu.inverse() + A.mT @ w.diag() @ A).inverse()
        result.append((covariance @ A.mT @ linear, covariance))
    return result


def dense_evidence(Kuu: Tensor, Kuf: Tensor, kff: Tensor, sites: Sites) -> Tensor:
    """Σ_p log ∫ N(u | 0, K_uu) Π_i exp E[λ_i f_i − ½ w_i f_i² | u] du, with u-space matrices."""
    if len(Kuu) == 0:
        return -0.5 * (sites.precision.mT @ kff).sum()
    A = Kuf.mT @ Kuu.inverse()
    open_variance = kff - (A * Kuf.mT).sum(1)
    total = Kuu.new_zeros(())
    for p, (mean, covariance) in enumerate(dense_q(Kuu, Kuf, sites)):
        fit = mean @ A.mT @ sites.linear[:, p]
        volume = torch.logdet(covariance) - torch.logdet(Kuu)
        total = total + 0.5 * (fit + volume - sites.precision[:, p] @ open_variance)
    return total


@cut
@pytest.mark.parametrize("P", [1, 2, 3])
def test_site_evidence_equals_dense_gaussian_integral(P: int, how: dict[str, int]) -> None:
    p, sites = problem(), random_sites(25, P)
    assert (sites.precision < 0).any()
    sums = site_sums(whitened(p, **how), sites)
    torch.testing.assert_close(sums.evidence(), dense_evidence(p.Kuu, p.Kuf, p.kff, sites), **close)


def test_site_evidence_equals_integral_over_grid() -> None:
    """Numerical integration of the definition, with two inducing points."""
    p, sites = problem(N=6, K=2), random_sites(6, 1)
    axis = torch.linspace(-12, 12, 601, dtype=torch.float64)
    u = torch.cartesian_prod(axis, axis)
    A = p.Kuf.mT @ p.Kuu.inverse()
    t = p.kff - (A * p.Kuf.mT).sum(1)
    f = u @ A.mT
    exponent = f @ sites.linear[:, 0] - 0.5 * (f.square() + t) @ sites.precision[:, 0]
    zero = torch.zeros(2, dtype=torch.float64)
    prior = torch.distributions.MultivariateNormal(zero, p.Kuu).log_prob(u)
    integral = (prior + exponent).logsumexp(0) + 2 * (axis[1] - axis[0]).log()
    sums = site_sums(whitened(p), sites)
    torch.testing.assert_close(sums.evidence(), integral, **close)


@cut
def test_site_posterior_equals_dense_posterior(how: dict[str, int]) -> None:
    p, sites = problem(), random_sites(25)
    chunks = whitened(p, **how)
    q_mean, F = site_sums(chunks, sites).posterior()
    for i, (mean, covariance) in enumerate(dense_q(p.Kuu, p.Kuf, sites)):
        torch.testing.assert_close(chunks.L @ q_mean[:, i], mean, **close)
        LF = chunks.L @ F[i]
        torch.testing.assert_close(LF @ LF.mT, covariance, **close)


@cut
@pytest.mark.parametrize("rows", [0, 25])
def test_site_variance_equals_dense_posterior_variance(rows: int, how: dict[str, int]) -> None:
    """Few rows use solves, many rows use products with an inverse."""
    p, sites = problem(), random_sites(25)
    chunks = whitened(p, **how)
    sums = site_sums(chunks, sites)
    inverse = sums.inverse(rows)
    assert (inverse is None) == (rows == 0)
    ours = torch.cat([sums.variance(part, inverse) for part in chunks])
    A = p.Kuf.mT @ p.Kuu.inverse()
    for i, (_, covariance) in enumerate(dense_q(p.Kuu, p.Kuf, sites)):
        expected = p.kff + ((A @ covariance) * A).sum(1) - (A * p.Kuf.mT).sum(1)
        torch.testing.assert_close(ours[:, i], expected, **close)


def test_sites_of_gaussian_noise_equal_regression() -> None:
    """λ = y/σ², w = 1/σ²: G is the collapsed bound minus the terms of the density without f."""
    p = problem(per_row=True)
    w = (1 / p.noise)[:, None].expand(-1, 2)
    sums = site_sums(whitened(p), Sites(w * p.Y, w.contiguous()))
    constant = -0.5 * (torch.log(2 * torch.pi * p.noise)[:, None] + w * p.Y.square()).sum()
    bound = collapsed_bound(p.Kuu, p.Kuf, kff=p.kff, Y=p.Y, noise=p.noise)
    torch.testing.assert_close(sums.evidence() + constant, bound, **close)
    q_mean, F = sums.posterior()
    mean, factor = oracles.optimal_q(p.Kuu, p.Kuf, p.Y, p.noise)
    torch.testing.assert_close(q_mean, mean, **close)
    torch.testing.assert_close(F @ F.mT, (factor @ factor.mT).expand(2, -1, -1), **close)


def test_site_sums_indefinite_sites_raise() -> None:
    p = problem()
    flat = torch.full((25, 2), -5.0, dtype=torch.float64)
    with pytest.raises(NotPositiveDefiniteError):
        site_sums(whitened(p), Sites(flat, flat))


def jittered_evidence(Kuu: Tensor, Kuf: Tensor, kff: Tensor, sites: Sites) -> Tensor:
    """The dense evidence with the jitter that the gradient includes."""
    shift = JITTER * Kuu.diagonal().mean() * torch.eye(len(Kuu), dtype=Kuu.dtype)
    return dense_evidence(Kuu + shift, Kuf, kff, sites)


@cut
@pytest.mark.parametrize("P", [1, 2])
def test_site_gradient_scaled_rbf_matches_dense_evidence(P: int, how: dict[str, int]) -> None:
    p, sites = problem(), random_sites(25, P)
    inputs = [
        torch.tensor(1.7, dtype=torch.float64),
        torch.tensor([0.8, 1.1], dtype=torch.float64),
        p.Z,
    ]
    variance, lengthscales, Z = (t.clone().requires_grad_() for t in inputs)

    def kernel(A: Tensor, B: Tensor) -> Tensor:
        squared = ((A[:, None] - B[None]) / lengthscales).square().sum(-1)
        return variance * torch.exp(-0.5 * squared)

    G = jittered_evidence(kernel(Z, Z), kernel(Z, p.X), kernel(p.X, p.X).diagonal(), sites)
    expected = torch.autograd.grad(G, (variance, lengthscales, Z))
    blocks = rows_of(p, how.get("chunk"))
    scaled = StationaryChunks(
        RBFProfile(), Z=inputs[2] - blocks.centre, variance=inputs[0], lengthscales=inputs[1]
    )
    chunks = WhitenedChunks.for_gradients(scaled, blocks, keep=how.get("keep"))
    sums = site_sums(chunks, sites)
    torch.testing.assert_close(sums.evidence(), G.detach(), **close)
    for ours, theirs in zip(site_gradient(chunks, sites, sums), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


@cut
@pytest.mark.parametrize("M", [6, 0])
def test_site_gradient_any_kernel_matches_dense_evidence(M: int, how: dict[str, int]) -> None:
    p, sites = problem(K=M), random_sites(25)
    kernel = ScaleKernel(MaternKernel(nu=2.5, ard_num_dims=2)).double()
    Z = p.Z.clone().requires_grad_()
    parameters = [*kernel.parameters(), Z]
    blocks = kernel_blocks(kernel, Z, p.X)
    G = (jittered_evidence if M else dense_evidence)(blocks.Kuu, blocks.Kuf, blocks.kff, sites)
    expected = torch.autograd.grad(G, parameters, allow_unused=True)
    chunked = AutogradChunks(kernel, Z=Z, parameters=parameters)
    chunks = WhitenedChunks.for_gradients(
        chunked, rows_of(p, how.get("chunk")), keep=how.get("keep")
    )
    for ours, theirs in zip(
        site_gradient(chunks, sites, site_sums(chunks, sites)), expected, strict=True
    ):
        theirs = torch.zeros_like(ours) if theirs is None else theirs
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_site_gradient_includes_the_jitter(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large jitter: it is relative to the mean of diag K_uu, which depends on the parameters."""
    monkeypatch.setattr("winnowgp.bounds.row_blocks.JITTER", 0.3)
    p, sites = problem(), random_sites(25)
    kernel = ScaleKernel(MaternKernel(nu=2.5, ard_num_dims=2)).double()
    parameters = list(kernel.parameters())
    blocks = kernel_blocks(kernel, p.Z, p.X)
    shift = 0.3 * blocks.Kuu.diagonal().mean() * torch.eye(6, dtype=torch.float64)
    G = dense_evidence(blocks.Kuu + shift, blocks.Kuf, blocks.kff, sites)
    expected = torch.autograd.grad(G, parameters)
    chunked = AutogradChunks(kernel, Z=p.Z, parameters=parameters)
    chunks = WhitenedChunks.for_gradients(chunked, rows_of(p))
    ours = site_gradient(chunks, sites, site_sums(chunks, sites))
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("P", [1, 2])
@pytest.mark.parametrize("jitter", [JITTER, 0.3])
def test_exact_site_gradient_matches_dense_evidence(
    P: int, jitter: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("winnowgp.bounds.row_blocks.JITTER", jitter)
    p, sites = problem(), random_sites(25, P)
    kernel = ScaleKernel(MaternKernel(nu=2.5, ard_num_dims=2)).double()
    parameters = list(kernel.parameters())
    K = kernel_blocks(kernel, p.X, p.X).Kuu
    K = K + jitter * K.diagonal().mean() * torch.eye(25, dtype=torch.float64)
    G = dense_evidence(K, K, K.diagonal(), sites)
    expected = torch.autograd.grad(G, parameters)
    chunks = WhitenedChunks.for_all_rows(
        AutogradChunks(kernel, Z=p.X, parameters=parameters), rows_of(p)
    )
    sums = site_sums(chunks, sites)
    torch.testing.assert_close(sums.evidence(), G.detach(), rtol=1e-6, atol=1e-6)
    for ours, theirs in zip(exact_site_gradient(chunks, sites, sums), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("P", [1, 2])
def test_site_moments_give_dense_evidence_of_every_subset(P: int) -> None:
    p, sites, masks = problem(K=5), random_sites(25, P), all_masks(5)
    chunks = whitened(p)
    moments = site_moments(site_sums(chunks, sites), constant=-3.7, N=25)
    assert len(moments) == P
    statistics = subset_statistics(chunks.L, *moments)
    assert statistics.N == 25
    dense = [
        dense_evidence(p.Kuu[mask][:, mask], p.Kuf[mask], p.kff, sites) - 3.7 for mask in masks
    ]
    torch.testing.assert_close(statistics.value(masks), torch.stack(dense), **close)
    value = dict(zip([tuple(mask.tolist()) for mask in masks], dense, strict=True))
    for mask in masks:
        gains = []
        for k in range(5):
            up, down = mask.tolist(), mask.tolist()
            up[k], down[k] = True, False
            gains.append(value[tuple(up)] - value[tuple(down)])
        torch.testing.assert_close(
            statistics.marginal_gains(mask), torch.stack(gains), rtol=1e-7, atol=1e-7
        )
