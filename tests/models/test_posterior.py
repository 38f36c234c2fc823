from copy import deepcopy
from typing import Any

import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.means import ConstantMean, ZeroMean
from torch import Tensor

from winnowgp.data import Dataset
from winnowgp.errors import InputError
from winnowgp.models import Posterior, SparseGP
from winnowgp.models.kernels import covariance, cross_covariance, prior_variance


def data(P: int) -> Dataset:
    g = torch.Generator().manual_seed(4)
    X = 6 * torch.rand(15, 1, generator=g, dtype=torch.float64)
    return Dataset.of(X, torch.cos(X + torch.arange(P)))


def fitted(P: int = 1, K: int = 15) -> tuple[SparseGP, Dataset, Posterior]:
    rows = data(P)
    mean = ConstantMean()
    mean.initialize(constant=0.7)
    gp = SparseGP(ScaleKernel(RBFKernel()), rows.X[:K], mean=mean, noise=0.05)
    return gp, rows, gp.posterior(rows)


def exact_prediction(gp: SparseGP, rows: Dataset, X: Tensor) -> tuple[Tensor, Tensor]:
    """The dense GP's posterior mean `[N P]` and covariance `[N N]`."""
    with torch.no_grad():
        K, k = gp.kernel(rows.X).to_dense(), gp.kernel(X, rows.X).to_dense()
        gain = k @ (K + gp.noise * torch.eye(rows.N)).inverse()
        return 0.7 + gain @ (rows.Y - 0.7), gp.kernel(X).to_dense() - gain @ k.mT


@pytest.mark.parametrize("P", [1, 3])
def test_points_at_the_data_give_the_exact_posterior(P: int) -> None:
    gp, rows, posterior = fitted(P)
    X = torch.linspace(-1, 7, 20, dtype=torch.float64)[:, None]
    mean, covariance = exact_prediction(gp, rows, X)
    prediction = posterior.predict(X)
    torch.testing.assert_close(prediction.mean, mean, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(posterior.predict_mean(X), mean, rtol=1e-6, atol=1e-7)
    variance = covariance.diagonal()[:, None].expand(-1, P)
    torch.testing.assert_close(prediction.variance, variance, rtol=1e-6, atol=1e-7)
    full = posterior.covariance(X)
    assert full.shape == (P, 20, 20)
    torch.testing.assert_close(full[-1], covariance, rtol=1e-6, atol=1e-7)


def test_an_observation_has_the_noise_on_top() -> None:
    gp, rows, posterior = fitted(K=6)
    latent, observed = posterior.predict(rows.X), posterior.predict(rows.X, observed=True)
    torch.testing.assert_close(observed.variance - latent.variance, gp.noise.expand(15, 1))
    full = posterior.covariance(rows.X, observed=True)[0].diagonal()
    torch.testing.assert_close(full[:, None], observed.variance)


def test_log_density_is_that_of_a_normal() -> None:
    _, rows, posterior = fitted(P=2, K=6)
    p = posterior.predict(rows.X, observed=True)
    expected = torch.distributions.Normal(p.mean, p.variance.sqrt()).log_prob(rows.Y)
    torch.testing.assert_close(posterior.log_density(rows.X, rows.Y), expected)


def test_samples_have_the_posteriors_moments(generator: torch.Generator) -> None:
    _, _, posterior = fitted(P=2, K=6)
    X = torch.tensor([[0.5], [2.0], [9.0]], dtype=torch.float64)
    draws = posterior.sample(X, 20_000, generator=generator)
    p, covariance = posterior.predict(X), posterior.covariance(X)
    # 20,000 draws, |z| < 4 for six means; covariances to 5 %.
    z = (draws.mean(0) - p.mean) / (p.variance / 20_000).sqrt()
    assert (z.abs() < 4).all()
    for output in range(2):
        torch.testing.assert_close(
            draws[..., output].mT.cov(), covariance[output], rtol=0.05, atol=0.01
        )


def test_it_owns_what_it_needs() -> None:
    gp, rows, posterior = fitted(K=6)
    before = posterior.predict(rows.X).mean
    with torch.no_grad():
        for parameter in gp.parameters():
            parameter.add_(1.0)
    torch.testing.assert_close(posterior.predict(rows.X).mean, before)
    assert not any(p.requires_grad for p in posterior.parameters())


def test_train_and_eval_mode_make_no_difference() -> None:
    _, rows, posterior = fitted(K=6)
    first = posterior.train().predict(rows.X)
    second = posterior.eval().predict(rows.X)
    assert torch.equal(first.mean, second.mean)
    assert torch.equal(first.variance, second.variance)


def test_gradients_with_respect_to_inputs_are_there() -> None:
    _, _, posterior = fitted(K=6)
    X = torch.tensor([[0.5], [2.0]], dtype=torch.float64, requires_grad=True)
    posterior.predict(X).variance.sum().backward()
    assert X.grad is not None
    assert X.grad.abs().sum() > 0


def test_no_points_at_all_give_the_prior() -> None:
    gp, rows, _ = fitted()
    empty = gp.prune(torch.zeros(15, dtype=torch.bool)).posterior(rows)
    p = empty.predict(rows.X)
    torch.testing.assert_close(p.mean, torch.full_like(p.mean, 0.7))
    variance = prior_variance(gp.kernel, rows.X)[:, None].detach()
    torch.testing.assert_close(p.variance, variance)
    assert torch.isfinite(empty.sample(rows.X, 2)).all()


def test_variances_are_clipped_by_rounding_alone() -> None:
    """Thirty points on a short line: k − ‖V‖² + ‖FᵀV‖² is negative by rounding at the most."""
    X = torch.linspace(0, 1, 30, dtype=torch.float64)[:, None]
    gp = SparseGP(RBFKernel(), X, noise=1e-4)
    posterior = gp.posterior(Dataset.of(X, torch.sin(X[:, 0])))
    raw = posterior.covariance(X)[0].diagonal()
    assert raw.min() > -1e-9
    assert (posterior.predict(X).variance >= 0).all()


def test_wrong_columns_are_named() -> None:
    _, _, posterior = fitted()
    with pytest.raises(InputError, match="1 columns"):
        posterior.predict(torch.zeros(3, 2, dtype=torch.float64))


@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_the_quick_covariance_is_the_kernel_s_own(offset: float) -> None:
    kernel: Any = ScaleKernel(RBFKernel(ard_num_dims=3)).double()
    starts: Any = {"outputscale": 2.5, "base_kernel.lengthscale": torch.tensor([[0.6, 0.8, 1.1]])}
    kernel.initialize(**starts)
    generator = torch.Generator().manual_seed(0)
    rows, points = (
        offset + torch.randn(n, 3, dtype=torch.float64, generator=generator) for n in (9, 5)
    )
    scaled = (rows[:, None] - points) / kernel.base_kernel.lengthscale
    dense = 2.5 * torch.exp(-0.5 * scaled.square().sum(-1))
    k, kff = cross_covariance(kernel, points)(rows)
    # Differences of numbers around 1e4 carry twelve digits.
    torch.testing.assert_close(k, dense, rtol=1e-12 if offset == 0 else 1e-9, atol=0)
    torch.testing.assert_close(kff, torch.full((9,), 2.5, dtype=torch.float64))
    other, _ = cross_covariance(kernel, points)(rows.requires_grad_())
    torch.testing.assert_close(other, dense)
    assert torch.autograd.grad(other.sum(), rows)[0].abs().sum() > 0


@pytest.mark.parametrize("wide", [0.1, 1.7])
def test_variances_are_those_of_the_definition_even_if_q_is_wider_than_the_prior(
    wide: float,
) -> None:
    generator = torch.Generator().manual_seed(1)
    Z, new = (torch.randn(n, 2, dtype=torch.float64, generator=generator) for n in (6, 11))
    factor = wide * torch.randn(3, 6, 6, dtype=torch.float64, generator=generator)
    kernel: Any = ScaleKernel(RBFKernel()).double()
    posterior = Posterior(
        kernel,
        Z,
        mean=ZeroMean(),
        likelihood=GaussianLikelihood(),
        q_mean=torch.randn(6, 3, dtype=torch.float64, generator=generator),
        q_factor=factor,
    )
    V = torch.linalg.solve_triangular(posterior.L, covariance(kernel, Z, new), upper=False)
    expected = torch.stack(
        [
            kernel.outputscale - V.square().sum(0) + (F.mT @ V).square().sum(0)
            for F in posterior.q_factor
        ],
        1,
    )
    found = posterior.predict(new)
    torch.testing.assert_close(found.variance, expected)
    torch.testing.assert_close(found.mean, V.mT @ posterior.q_mean)
    assert bool((posterior.signs < 0).any()) == (wide > 1)


@pytest.mark.parametrize(("D", "lengthscale", "noise"), [(1, 1.0, 1e-2), (2, 1.0, 1e-4)])
def test_one_product_is_as_accurate_as_a_solve_in_single_precision(
    D: int, lengthscale: float, noise: float
) -> None:
    """128 points so close that cond(K_uu) is 1e13: what limits both is k(x, Z) in seven digits.

    The truth is the same numbers in double precision.
    """
    generator = torch.Generator().manual_seed(0)
    X = 4 * torch.rand(600, D, dtype=torch.float64, generator=generator) - 2
    kernel: Any = ScaleKernel(RBFKernel())
    kernel.initialize(**{"base_kernel.lengthscale": lengthscale, "outputscale": 1.0})
    rows = Dataset.of(X.float(), torch.sin(2 * X[:, 0]).float())
    single = SparseGP(kernel, rows.X[:128], noise=noise).posterior(rows)
    new = (4 * torch.rand(500, D, dtype=torch.float64, generator=generator) - 2).float()
    double = deepcopy(single).double()
    parts: Any = {n: getattr(double, n) for n in ("mean", "likelihood", "q_mean", "q_factor", "L")}
    truth = Posterior(double.kernel, double.Z, **parts).predict(new.double())
    V = torch.linalg.solve_triangular(
        single.L, covariance(single.kernel, single.Z, new), upper=False
    )
    FV = single.q_factor.mT @ V
    solved = prior_variance(single.kernel, new) - V.square().sum(0) + FV.square().sum(1)[0]
    found = single.predict(new)
    errors = [
        (a.double() - truth.variance[:, 0]).abs().max().item()
        for a in (found.variance[:, 0], solved)
    ]
    assert errors[0] < 5 * errors[1]
    assert errors[0] < 2e-5
    assert (found.mean.double() - truth.mean).abs().max() < 3e-3
