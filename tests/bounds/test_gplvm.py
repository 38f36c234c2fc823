"""Psi statistics against Monte Carlo and quadrature, and the bound of the GP-LVM."""

import pytest
import torch
from gpytorch.kernels import Kernel
from torch.autograd import gradcheck
from torch.distributions import Normal, kl_divergence

from helpers.latent_problems import dense_bound, latent, linear, quadrature, rbf
from winnowgp.bounds import collapsed_bound
from winnowgp.bounds.collapsed import moment_bound, moment_posterior
from winnowgp.bounds.gplvm import (
    LinearPsi,
    RBFPsi,
    WeightedExponentials,
    from_pairs,
    gplvm_moments,
    latent_kl,
    pair_weights,
    whitening_factor,
)
from winnowgp.bounds.row_blocks import JITTER
from winnowgp.models import LatentVariableGP
from winnowgp.models.gplvm import Latents
from winnowgp.models.kernels import expected_kernel

kernels = pytest.mark.parametrize("kernel", [rbf(), linear()], ids=["rbf", "linear"])
WEIGHTS = torch.tensor([[1.0] * 7, [0, 1, 1, 0, 2.5, 1, 1]], dtype=torch.float64)


@kernels
def test_psi_statistics_match_quadrature(kernel: Kernel) -> None:
    p = latent(kernel)
    psi = expected_kernel(kernel, 2).psi(p.mean, p.variance, Z=p.Z, weights=WEIGHTS)
    rows = expected_kernel(kernel, 2).psi2_rows(p.mean, p.variance, Z=p.Z)
    total = torch.zeros(2, 5, 5, dtype=torch.float64)
    for i in range(7):
        X, w = quadrature(p.mean[i], p.variance[i], nodes=80)
        Kuf = p.k(p.Z, X)
        second = (Kuf * w) @ Kuf.mT
        prior = p.kernel(X, diag=True).detach() @ w
        torch.testing.assert_close(psi.psi0[i], prior, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(psi.psi1[:, i], Kuf @ w, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(from_pairs(rows, 5)[i], second, rtol=1e-9, atol=1e-12)
        total += WEIGHTS[:, i, None, None] * second
    torch.testing.assert_close(psi.psi2, total, rtol=1e-9, atol=1e-12)


@kernels
def test_psi_statistics_match_monte_carlo(kernel: Kernel, generator) -> None:
    p = latent(kernel, N=2)
    psi = expected_kernel(kernel, 2).psi(
        p.mean, p.variance, Z=p.Z, weights=torch.eye(2, dtype=torch.float64)
    )
    draws = 100_000
    for i in range(2):
        X = p.mean[i] + p.variance[i].sqrt() * torch.randn(
            draws, 2, generator=generator, dtype=torch.float64
        )
        Kuf = p.k(p.Z, X)
        products = Kuf[:, None] * Kuf
        for expected, sampled in ((psi.psi1[:, i], Kuf), (psi.psi2[i], products)):
            z = (sampled.mean(-1) - expected) / (sampled.std(-1) / draws**0.5)
            assert z.abs().max() < 4.5


@kernels
def test_expected_kernel_uu_equals_kernel(kernel: Kernel) -> None:
    p = latent(kernel)
    torch.testing.assert_close(expected_kernel(kernel, 2).uu(p.Z), p.k(p.Z, p.Z))


def test_psi_statistics_zero_variance_equal_kernel_blocks() -> None:
    p = latent()
    zero = torch.zeros_like(p.mean)
    psi = expected_kernel(p.kernel, 2).psi(p.mean, zero, Z=p.Z, weights=WEIGHTS)
    Kuf = p.k(p.Z, p.mean)
    torch.testing.assert_close(psi.psi1, Kuf)
    torch.testing.assert_close(psi.psi2[1], (Kuf * WEIGHTS[1]) @ Kuf.mT)


def test_psi2_gradients_match_finite_differences() -> None:
    p = latent(N=4, M=3)
    weights = torch.tensor([[1.0, 1, 0, 1], [0, 2, 1, 1]], dtype=torch.float64)

    def psi2(mean, variance, Z, scale, lengthscales):
        return RBFPsi(scale, lengthscales).psi2(mean, variance, Z=Z, weights=weights)

    scale = torch.tensor(1.3, dtype=torch.float64)
    lengthscales = torch.tensor([0.7, 1.9], dtype=torch.float64)
    inputs = [x.clone().requires_grad_() for x in (p.mean, p.variance, p.Z, scale, lengthscales)]
    assert gradcheck(psi2, inputs)

    def linear_psi2(mean, variance, Z, variances):
        return LinearPsi(variances).psi2(mean, variance, Z=Z, weights=weights)

    assert gradcheck(linear_psi2, [*inputs[:3], inputs[4]])


@pytest.mark.parametrize("keep", [0, 2**25], ids=["computed twice", "kept"])
def test_weighted_exponentials_are_independent_of_chunk_size(
    keep: int, monkeypatch, generator
) -> None:
    monkeypatch.setattr("winnowgp.bounds.gplvm.CHUNK", 12)
    monkeypatch.setattr("winnowgp.bounds.gplvm.KEEP", keep)
    A, B, W, G = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((4, 3), (3, 10), (2, 4), (2, 10))
    )
    A.requires_grad_()
    B.requires_grad_()
    value = WeightedExponentials.apply(A, B, W)
    expected = W @ torch.exp(A @ B)
    torch.testing.assert_close(value, expected)
    gradients = torch.autograd.grad(value, [A, B], G)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected, [A, B], G))


def test_pair_weights_give_inner_products(generator) -> None:
    A, B = torch.randn(2, 4, 4, generator=generator, dtype=torch.float64)
    A, B = A + A.mT, B + B.mT
    first, second = torch.triu_indices(4, 4)
    torch.testing.assert_close((pair_weights(A[None])[0] * B[first, second]).sum(), (A * B).sum())


def test_latent_kl_matches_torch() -> None:
    p = latent()
    prior = Normal(torch.zeros_like(p.mean), torch.ones_like(p.mean))
    expected = kl_divergence(Normal(p.mean, p.variance.sqrt()), prior).sum(1)
    torch.testing.assert_close(latent_kl(p.mean, p.variance), expected)


noises = pytest.mark.parametrize(
    "noise", [0.3, torch.tensor([0.3, 0.1, 0.9], dtype=torch.float64)], ids=["shared", "a column"]
)
tables = pytest.mark.parametrize("missing", [False, True], ids=["complete", "missing"])


@noises
@tables
@pytest.mark.parametrize("kind", ["rbf", "linear"])
def test_gplvm_bound_equals_dense_bound_of_each_column(noise, missing, kind) -> None:
    p = latent(linear(), M=2, missing=missing) if kind == "linear" else latent(missing=missing)
    model = p.model(noise=noise)
    jitter = JITTER * p.k(p.Z, p.Z).diagonal().mean().item()
    variances = torch.as_tensor(noise, dtype=torch.float64).expand(3).tolist()
    expected = -model.latents.kl()
    for column in range(3):
        rows = p.table.observed[:, column]
        expected = expected + dense_bound(
            p, y=p.Y[:, column], rows=rows, noise=variances[column], jitter=jitter
        )
    torch.testing.assert_close(model.bound(p.table), expected, rtol=1e-7, atol=1e-6)


@noises
@tables
def test_gplvm_moments_give_the_same_bound(noise, missing) -> None:
    p = latent(missing=missing)
    model = p.model(noise=noise)
    objective = model.subset_objective(p.table)
    moments = gplvm_moments(whitening_factor(objective.Kuu), objective.psi, objective.columns)
    assert len(moments) == (1 if isinstance(noise, float) and not missing else 3)
    total = torch.stack([moment_bound(m) for m in moments]).sum() - model.latents.kl()
    torch.testing.assert_close(total, model.bound(p.table))


def test_gplvm_bound_zero_variance_equals_collapsed_bound() -> None:
    p = latent()
    latents = Latents(p.mean, variance=1e-14)
    model = LatentVariableGP(p.kernel, latents, candidates=p.Z, noise=0.3)
    Kuu = p.k(p.Z, p.Z)
    Kuu += JITTER * Kuu.diagonal().mean() * torch.eye(5, dtype=torch.float64)
    kff = p.k(p.mean, p.mean).diagonal()
    noise = torch.tensor(0.3, dtype=torch.float64)
    expected = collapsed_bound(Kuu, p.k(p.Z, p.mean), kff=kff, Y=p.Y, noise=noise)
    torch.testing.assert_close(model.bound(p.table) + latents.kl(), expected, rtol=1e-9, atol=1e-8)


@noises
def test_moment_posterior_equals_dense_solution_of_each_column(noise) -> None:
    p = latent(missing=True)
    objective = p.model(noise=noise).subset_objective(p.table)
    moments = gplvm_moments(whitening_factor(objective.Kuu), objective.psi, objective.columns)
    mean, factor = moment_posterior(*moments)
    for column, m in enumerate(moments):
        B = m.C + torch.eye(5, dtype=torch.float64)
        torch.testing.assert_close(mean[:, column], torch.linalg.solve(B, m.D[:, 0]))
        torch.testing.assert_close(factor[column] @ factor[column].mT, B.inverse())
