"""Chains of fidelities against the dense NARGP and against quadrature."""

import pytest
import torch
from gpytorch.kernels import Kernel, RBFKernel
from numpy.polynomial.hermite_e import hermegauss
from torch import Tensor

from winnowgp.data import Dataset
from winnowgp.errors import InputError
from winnowgp.models import MultiOutputGP
from winnowgp.models.fidelity_posterior import NonlinearFidelityPosterior, chain_inputs
from winnowgp.models.multi_output_posterior import ProcessMixture

X_LOW = torch.linspace(0, 3, 8).double()[:, None]
X_HIGH = torch.tensor([[0.2], [1.1], [1.7], [2.6]]).double()
NEW = torch.linspace(0.1, 2.9, 15).double()[:, None]
KERNEL = RBFKernel(ard_num_dims=1).double().initialize(lengthscale=0.8)
# k_x · k_f + k_δ, of the columns x and f.
CHAIN = RBFKernel(active_dims=(0,)).double().initialize(lengthscale=2.0) * RBFKernel(
    active_dims=(1,)
).double().initialize(lengthscale=1.2) + RBFKernel(active_dims=(0,)).double().initialize(
    lengthscale=1.5
)


def level(kernel: Kernel, X: Tensor, y: Tensor, noise: float) -> ProcessMixture:
    """Return the posterior with all rows as inducing points: that of the exact GP."""
    one = torch.ones(1, 1, dtype=torch.float64)
    gp = MultiOutputGP([kernel], [X], mixing=one, noise=noise * one[0])
    mode = gp.posterior(Dataset.of(X, y))
    return ProcessMixture(mode, [mode])


@torch.no_grad()
def exact(kernel: Kernel, X: Tensor, y: Tensor, noise: float, new: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and variance of the dense GP."""
    K = kernel(X).to_dense() + noise * torch.eye(len(X))
    cross = kernel(X, new).to_dense()
    A = torch.linalg.solve(K, cross)
    return A.mT @ y, kernel(new).to_dense().diagonal() - (cross * A).sum(0)


def chain(noise: float) -> tuple[NonlinearFidelityPosterior, Tensor, Tensor, Tensor]:
    """Return two fidelities, the targets of both, and f_0 at the rows of the higher one."""
    low, high = torch.sin(2 * X_LOW[:, 0]), torch.sin(2 * X_HIGH[:, 0]) ** 2
    first = level(KERNEL, X_LOW, low, noise)
    inputs = chain_inputs([first], X_HIGH)
    posterior = NonlinearFidelityPosterior(
        [first, level(CHAIN, inputs, (high - 0.5) / 2, 0.01)],
        column=1,
        levels=torch.tensor([0.0, 1.0]).double(),
        shift=torch.tensor([0.0, 0.5]).double(),
        scale=torch.tensor([1.0, 2.0]).double(),
    )
    return posterior, low, (high - 0.5) / 2, inputs[:, 1]


@pytest.mark.parametrize("noise", [1e-5, 0.2])
def test_chain_equals_dense_nargp_integrated_by_quadrature(noise: float) -> None:
    posterior, low, high, below = chain(noise)
    m, v = exact(KERNEL, X_LOW, low, noise, X_HIGH)
    # 64 draws of the fidelity below, whose standard deviation is up to 0.3.
    torch.testing.assert_close(below, m, atol=0.02 * float(v.max().sqrt()) + 1e-6, rtol=0)
    inputs = torch.cat([X_HIGH, below[:, None]], 1)
    m, v = exact(KERNEL, X_LOW, low, noise, NEW)
    nodes, weights = (torch.from_numpy(each) for each in hermegauss(60))
    weights = weights / weights.sum()
    f = m + v.clamp_min(0).sqrt() * nodes[:, None]
    each = [exact(CHAIN, inputs, high, 0.01, torch.cat([NEW, row[:, None]], 1)) for row in f]
    means, variances = (torch.stack(parts) for parts in zip(*each, strict=True))
    mean = weights @ means
    variance = weights @ (variances + (means - mean) ** 2)
    rows = torch.cat([NEW, torch.ones_like(NEW)], 1)
    predicted = posterior.predict(rows)
    error = 0.02 * float(v.max().sqrt()) + 1e-5
    torch.testing.assert_close(predicted.mean[:, 0], 0.5 + 2 * mean, atol=2 * error, rtol=0)
    torch.testing.assert_close(predicted.variance[:, 0], 4 * variance, atol=4 * error, rtol=0)
    noisy = posterior.predict(rows, observed=True).variance - predicted.variance
    torch.testing.assert_close(noisy, torch.full_like(noisy, 4 * 0.01))


def test_lowest_fidelity_is_the_exact_gp() -> None:
    posterior, low, _, _ = chain(0.2)
    rows = torch.cat([NEW, torch.zeros_like(NEW)], 1)
    predicted = posterior.predict(rows)
    mean, variance = exact(KERNEL, X_LOW, low, 0.2, NEW)
    torch.testing.assert_close(predicted.mean[:, 0], mean, atol=1e-6, rtol=0)
    torch.testing.assert_close(predicted.variance[:, 0], variance, atol=1e-6, rtol=0)


@pytest.mark.parametrize("below", [1, 2])
def test_three_fidelities_match_nested_samples(below: int) -> None:
    posterior, _, _, _ = chain(0.2)
    two = posterior.functions
    # The third fidelity depends on both of the lower ones, or on the next one alone.
    kernel = CHAIN
    if below == 2:
        kernel = CHAIN + RBFKernel(active_dims=(2,)).double().initialize(lengthscale=0.7)
    X = chain_inputs(two, X_HIGH)[:, [0, *range(3 - below, 3)]]
    third = level(kernel, X, torch.tensor([0.3, -1.0, 0.5, 1.0]).double(), 0.05)
    whole = NonlinearFidelityPosterior(
        [*two, third],
        column=1,
        levels=torch.arange(3).double(),
        shift=torch.zeros(3).double(),
        scale=torch.ones(3).double(),
    )
    g = torch.Generator().manual_seed(0)
    S, x = 4000, NEW[:5]
    values: list[Tensor] = []
    for t, function in enumerate(whole.functions):
        lower = values[t - below if t == 2 else 0 :]
        inputs = torch.cat([x.expand(S, -1, -1), *(f[..., None] for f in lower)], 2)
        y = function.mode.predict(inputs.flatten(0, 1))
        mean, sd = y.mean.view(S, -1), y.variance.view(S, -1).sqrt()
        values.append(mean + sd * torch.randn(S, 5, generator=g, dtype=torch.float64))
    f = values[-1]
    predicted = whole.predict(torch.cat([x, torch.full_like(x, 2.0)], 1))
    sd = f.std(0)
    # 64 quasi-random draws against 4,000 random ones.
    torch.testing.assert_close(predicted.mean[:, 0] / sd, f.mean(0) / sd, atol=0.1, rtol=0)
    torch.testing.assert_close(predicted.variance[:, 0].sqrt() / sd, sd / sd, atol=0.1, rtol=0)


def test_mixture_refuses_members_with_other_points() -> None:
    posterior, *_ = chain(0.2)
    first, second = posterior.modes
    with pytest.raises(InputError, match="inducing points of `mode`"):
        ProcessMixture(first, [second])
    with pytest.raises(InputError, match="at least one posterior"):
        ProcessMixture(first, [])
