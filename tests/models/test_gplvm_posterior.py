import math

import pytest
import torch
from gpytorch.kernels import MaternKernel, ScaleKernel
from gpytorch.likelihoods import PoissonLikelihood

from helpers.latent_problems import latent, linear, quadrature
from winnowgp.bounds.gplvm import latent_kl
from winnowgp.data import MaskedMatrix
from winnowgp.models import SampledLatentGP, VariationalGP
from winnowgp.models.gplvm_posterior import LatentPosterior, SampledPosterior
from winnowgp.models.observations import gaussian_noise

ROWS = torch.arange(7)
NOISE = torch.tensor([0.3, 0.1, 0.9], dtype=torch.float64)


@pytest.mark.parametrize("kind", ["rbf", "linear"])
def test_latent_posterior_predictions_are_expectations(kind) -> None:
    p = latent(linear(), M=2) if kind == "linear" else latent()
    posterior = p.model(noise=NOISE).posterior(p.table)
    found = posterior.predict(p.mean, p.variance, observed=True)
    for i in range(7):
        X, w = quadrature(p.mean[i], p.variance[i])
        f = posterior.function.predict(X)
        mean = w @ f.mean
        variance = w @ (f.variance + f.mean.square()) - mean.square() + NOISE
        torch.testing.assert_close(found.mean[i], mean, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(found.variance[i], variance, rtol=1e-5, atol=1e-6)


def test_row_elbo_is_expected_log_likelihood_less_kl() -> None:
    p = latent(missing=True)
    posterior = p.model(noise=NOISE).posterior(p.table)
    bound = posterior.row_elbo(p.table)
    found = bound(ROWS, p.mean, p.variance)
    for i in range(7):
        X, w = quadrature(p.mean[i], p.variance[i])
        f = posterior.function.predict(X)
        square = (p.Y[i] - f.mean).square() + f.variance
        nats = w @ (-0.5 * ((2 * math.pi * NOISE).log() + square / NOISE))
        kl = 0.5 * (p.variance[i] + p.mean[i] ** 2 - 1 - p.variance[i].log()).sum()
        expected = nats[p.table.observed[i]].sum() - kl
        torch.testing.assert_close(found[i], expected, rtol=1e-6, atol=1e-6)
    grid = bound.everywhere(p.mean, p.variance)
    torch.testing.assert_close(grid.diagonal(), found)
    torch.testing.assert_close(bound.of(ROWS[2:4]).everywhere(p.mean, p.variance), grid[2:4])


def test_row_elbo_gradient_at_training_row_equals_model() -> None:
    """q(u) is optimal, so that its change with q(x) has no first-order effect."""
    p = latent(missing=True)
    model = p.model(noise=NOISE)
    model.bound(p.table).backward()
    mean, variance = p.mean.clone().requires_grad_(), p.variance.clone().requires_grad_()
    model.posterior(p.table).row_elbo(p.table)(ROWS, mean, variance).sum().backward()
    assert mean.grad is not None
    assert variance.grad is not None
    torch.testing.assert_close(mean.grad, model.latents.mean.grad, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(
        variance.grad * p.variance, model.latents.log_variance.grad, rtol=1e-6, atol=1e-6
    )


def test_latent_posterior_densities_integrate_to_one() -> None:
    p = latent()
    posterior = p.model().posterior(p.table)
    y = torch.linspace(-8, 8, 800, dtype=torch.float64)
    mean, variance = p.mean[:1].expand(800, 2), p.variance[:1].expand(800, 2)
    density = posterior.log_density(y[:, None].expand(800, 3), mean, variance).exp()
    torch.testing.assert_close(density.sum(0) * (y[1] - y[0]), torch.ones(3, dtype=y.dtype))
    # Its mean equals the closed form, to the accuracy of 128 nodes.
    found = (density * y[:, None]).sum(0) * (y[1] - y[0])
    torch.testing.assert_close(
        found, posterior.predict(p.mean[:1], p.variance[:1]).mean[0], rtol=0.02, atol=0.02
    )


def sampled(likelihood, Y: torch.Tensor) -> tuple[SampledLatentGP, MaskedMatrix]:
    p = latent()
    function = VariationalGP(p.kernel, p.Z, likelihood=likelihood, targets=3)
    g = torch.Generator().manual_seed(5)
    function.q_mean.data.normal_(generator=g)
    function.q_factor.data.mul_(0.4)
    return SampledLatentGP(function, p.model().latents), MaskedMatrix.of(Y)


def test_row_elbo_sampled_and_expected_agree() -> None:
    """The same functions, noise and rows, by quasi-random nodes and by psi statistics."""
    p = latent(missing=True)
    expected: LatentPosterior = p.model(noise=NOISE).posterior(p.table)
    twin = SampledPosterior(expected.function)
    small = 0.01 * p.variance
    torch.testing.assert_close(
        twin.row_elbo(p.table)(ROWS, p.mean, small),
        expected.row_elbo(p.table)(ROWS, p.mean, small),
        rtol=1e-3,
        atol=1e-3,
    )
    a, b = (m.predict(p.mean, small, observed=True) for m in (twin, expected))
    torch.testing.assert_close(a.mean, b.mean, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(a.variance, b.variance, rtol=1e-3, atol=1e-3)
    # `everywhere` evaluates at the means of q(x), less the KL of each.
    tiny = torch.full_like(small, 1e-14)
    centres = twin.row_elbo(p.table)(ROWS, p.mean, tiny) + latent_kl(p.mean, tiny)
    grid = twin.row_elbo(p.table).everywhere(p.mean, small)
    torch.testing.assert_close(grid.diagonal(), centres - latent_kl(p.mean, small))
    torch.testing.assert_close(
        twin.row_elbo(p.table).of(ROWS[1:3]).everywhere(p.mean, small), grid[1:3]
    )


@pytest.mark.parametrize("rows", [None, torch.tensor([0, 2, 5])], ids=["all", "some"])
def test_sampled_bound_is_unbiased_with_gaussian_noise(rows) -> None:
    """Against the closed form: E[(y − f)²] by psi statistics, at the model's own q(u)."""
    p = latent(missing=True)
    model, table = sampled(gaussian_noise(NOISE), p.Y)
    model.function.mean.requires_grad_(False)
    posterior = model.posterior(table).function
    total, chosen = [], ROWS if rows is None else rows
    for i in chosen:
        X, w = quadrature(p.mean[i], p.variance[i])
        f = posterior.predict(X)
        square = (p.Y[i] - f.mean).square() + f.variance
        nats = w @ (-0.5 * ((2 * math.pi * NOISE).log() + square / NOISE))
        kl = 0.5 * (p.variance[i] + p.mean[i] ** 2 - 1 - p.variance[i].log()).sum()
        total.append(nats[table.observed[i]].sum() - kl)
    m, F = model.function.q_mean.detach(), model.function.q_factor.detach().tril()
    kl_u = 0.5 * (
        F.square().sum() + m.square().sum() - 15 - 2 * F.diagonal(dim1=1, dim2=2).abs().log().sum()
    )
    expected = 7 / len(chosen) * torch.stack(total).sum() - kl_u
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        draws = torch.stack([model.bound(table, rows=rows, generator=g) for _ in range(500)])
    z = (draws.mean() - expected) / (draws.std() / 500**0.5)
    assert abs(z.item()) < 4


def test_sampled_latent_gp_accepts_counts() -> None:
    p = latent()
    counts = (2 * p.Y + 2).round()
    counts[1, 1] = float("nan")
    model, table = sampled(PoissonLikelihood(), counts)
    pruned = model.prune(torch.tensor([True, True, False, True, False]))
    assert pruned.K == 3
    value = pruned.bound(table)
    value.backward()
    assert pruned.latents.mean.grad is not None
    assert pruned.function.q_mean.grad is not None
    nats = model.posterior(table).row_elbo(table)(ROWS, p.mean, p.variance)
    assert torch.isfinite(nats).all()
    # The marginal q(u) of a subset is not a sub-vector of whitened coordinates.
    every = torch.ones(1, 5, dtype=torch.bool)
    g = [torch.Generator().manual_seed(1) for _ in range(2)]
    whole = model.subset_objective(table, generator=g[0]).value(every)[0]
    torch.testing.assert_close(whole, model.bound(table, generator=g[1]))


def test_sampled_latent_gp_accepts_kernels_without_psi() -> None:
    p = latent()
    function = VariationalGP(
        ScaleKernel(MaternKernel()), p.Z, likelihood=gaussian_noise(NOISE), targets=3
    )
    assert torch.isfinite(SampledLatentGP(function, p.mean).bound(p.table))
