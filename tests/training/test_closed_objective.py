"""Bounds with known gradients in the coordinates of L-BFGS, against dense oracles."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from gpytorch.constraints import Interval
from gpytorch.kernels import (
    AdditiveKernel,
    Kernel,
    LinearKernel,
    MaternKernel,
    PeriodicKernel,
    RBFKernel,
    ScaleKernel,
)
from gpytorch.means import ConstantMean, Mean, ZeroMean
from gpytorch.priors import GammaPrior
from torch import Tensor

from helpers import oracles
from winnowgp.bounds import row_blocks
from winnowgp.bounds.collapsed import moment_bound
from winnowgp.data import Dataset
from winnowgp.models import SparseGP
from winnowgp.models.kernels import covariance
from winnowgp.models.online import OnlineGP
from winnowgp.models.priors import add_weak_priors, log_prior
from winnowgp.training.closed_objective import ClosedObjective, closed_objective
from winnowgp.training.coordinates import Coordinates

KERNELS: dict[str, Callable[[], Kernel]] = {
    "rbf": lambda: ScaleKernel(RBFKernel(ard_num_dims=2)),
    "one lengthscale": lambda: ScaleKernel(RBFKernel()),
    "unscaled": lambda: MaternKernel(nu=1.5, ard_num_dims=2),
    "matern12": lambda: ScaleKernel(MaternKernel(nu=0.5)),
    "matern52": lambda: ScaleKernel(MaternKernel(nu=2.5, ard_num_dims=2)),
    "rbf + linear": lambda: ScaleKernel(RBFKernel()) + LinearKernel(ard_num_dims=2),
}


def rows(P: int = 1) -> Dataset:
    g = torch.Generator().manual_seed(0)
    X = 3 * torch.rand(30, 2, generator=g, dtype=torch.float64)
    noise = 0.3 * torch.randn(30, P, generator=g, dtype=torch.float64)
    return Dataset.of(X, torch.sin(X @ torch.ones(2, P, dtype=torch.float64)) + noise)


def model(kernel: Kernel, data: Dataset, mean: Mean | None = None) -> SparseGP:
    gp = SparseGP(kernel, data.X[:5] + 0.1, mean=mean, noise=0.2)
    add_weak_priors(gp)
    return gp


def closed(gp: SparseGP, data: Dataset, *, exact: bool) -> ClosedObjective | None:
    objective = gp.dense_bound(data) if exact else gp.chunked_bound(data)
    return closed_objective(gp, objective, Coordinates(gp, data.X))


@torch.no_grad()
def dense(gp: SparseGP, data: Dataset, *, exact: bool) -> float:
    """Return the dense bound with the jitter of the optimiser, or the evidence, and the priors."""
    X, Z, eye = data.X, gp.candidates, torch.eye(data.N, dtype=torch.float64)
    Kff = covariance(gp.kernel, X, X)
    w = torch.ones_like(X[:, 0]) if data.weights is None else data.weights
    if exact:
        nats = oracles.log_normal(data.Y, Kff + gp.noise * eye / w)
        correction = 0.5 * (torch.log(1 / w) - (w - 1) * torch.log(2 * torch.pi * gp.noise)).sum()
        nats = nats + data.P * correction
    else:
        Kuu = covariance(gp.kernel, Z, Z)
        jitter = row_blocks.JITTER * Kuu.diagonal().mean() * torch.eye(gp.K, dtype=torch.float64)
        Kuf = covariance(gp.kernel, Z, X)
        nats = oracles.collapsed(Kuu + jitter, Kuf, Kff, data.Y, gp.noise)
    return (nats + log_prior(gp)).item()


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("P", [1, 2])
@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS.keys())
def test_closed_objective_equals_dense_oracle_and_its_differences(
    kernel: Callable[[], Kernel], P: int, frozen: bool, exact: bool
) -> None:
    data = rows(P)
    gp = model(kernel(), data)
    if frozen:
        next(gp.kernel.parameters()).requires_grad_(False)
        gp.candidates.requires_grad_(False)
    coordinates, objective = Coordinates(gp, data.X), closed(gp, data, exact=exact)
    assert objective is not None
    x = coordinates.read() + 0.1

    def oracle(at: Tensor) -> float:
        coordinates.write(at)
        return dense(gp, data, exact=exact)

    expected = oracle(x)
    value, gradient = objective(x)
    assert value == pytest.approx(expected, rel=1e-8)
    steps = 1e-5 * torch.eye(len(x), dtype=x.dtype)
    slopes = [(oracle(x + h) - oracle(x - h)) / 2e-5 for h in steps]
    torch.testing.assert_close(gradient, x.new_tensor(slopes), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS.keys())
def test_closed_objective_of_a_stream_equals_autograd(kernel: Callable[[], Kernel]) -> None:
    data = rows()
    first, later = data.part(slice(0, 18)), data.part(slice(18, 30))
    online = OnlineGP.start(model(kernel(), data)).after(first)
    online = online.with_candidates(torch.cat([online.memory.Z, later.X[:4]]))
    gp = online.model
    gp.candidates.requires_grad_(False)
    coordinates = Coordinates(gp, data.X)
    x = coordinates.read() + 0.1
    coordinates.write(x)
    objective = closed_objective(gp, online.objective(later), coordinates)
    assert objective is not None
    value, gradient = objective(x)
    coordinates.clear_gradient()
    moments = online._gaussian(later, online._jittered())
    nats = torch.stack([moment_bound(m) for m in moments]).sum() + log_prior(gp)
    nats.backward()
    assert value == pytest.approx(nats.item(), rel=1e-8)
    torch.testing.assert_close(gradient, coordinates.gradient(), rtol=1e-6, atol=1e-6)


def test_closed_objective_with_weights_equals_autograd() -> None:
    data = rows()
    data = replace(data, weights=torch.linspace(0.5, 3, data.N, dtype=torch.float64))
    gp = model(KERNELS["rbf"](), data)
    for exact in (False, True):
        coordinates, objective = Coordinates(gp, data.X), closed(gp, data, exact=exact)
        assert objective is not None
        gp.zero_grad()
        expected = (gp.dense_bound if exact else gp.chunked_bound)(data)() + log_prior(gp)
        expected.backward()
        value, gradient = objective(coordinates.read())
        assert value == pytest.approx(expected.item(), rel=1e-9)
        torch.testing.assert_close(gradient, coordinates.gradient(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "kernel",
    [
        ScaleKernel(PeriodicKernel()),
        ScaleKernel(RBFKernel(active_dims=(0,))),
        RBFKernel() * LinearKernel(),
        AdditiveKernel(ScaleKernel(RBFKernel()), PeriodicKernel()),
        ScaleKernel(RBFKernel(lengthscale_prior=GammaPrior(3.0, 1.0))),
        ScaleKernel(RBFKernel(lengthscale_constraint=Interval(0.1, 10.0))),
    ],
)
def test_closed_objective_of_other_kernels_and_priors_is_none(kernel: Kernel) -> None:
    data = rows()
    assert closed(model(kernel, data), data, exact=False) is None


def test_closed_objective_of_terms_with_common_parameters_is_none() -> None:
    data, base = rows(), RBFKernel()
    gp = model(ScaleKernel(base) + ScaleKernel(base), data)
    assert closed(gp, data, exact=False) is None


def test_closed_objective_of_other_means_and_noise_is_none() -> None:
    data = rows(2)
    kernel = KERNELS["rbf"]()
    assert closed(model(kernel, data, ConstantMean()), data, exact=False) is None
    assert closed(model(kernel, data, ZeroMean()), data, exact=False) is not None
    each = SparseGP(kernel, data.X[:5], noise=torch.tensor([0.1, 0.2]))
    assert closed(each, data, exact=False) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("kernel", KERNELS)
def test_closed_objective_on_gpu_equals_that_on_cpu(kernel: str, *, exact: bool) -> None:
    results = []
    for device in ("cpu", "cuda"):
        data = rows().to(torch.device(device))
        gp = model(KERNELS[kernel](), data.to(torch.device("cpu"))).to(device)
        function = closed(gp, data, exact=exact)
        assert function is not None
        x = Coordinates(gp, data.X).read().cpu()
        results.append(function.informed(x + 0.1 * torch.cos(torch.arange(len(x))).to(x)))
        assert results[-1][1].device == x.device
    (value, gradient, information), other = results
    assert other[0] == pytest.approx(value, rel=1e-9)
    torch.testing.assert_close(other[1], gradient, rtol=1e-6, atol=1e-6)
    assert (information is not None) == exact
    if exact:
        torch.testing.assert_close(other[2], information, rtol=1e-6, atol=1e-6)
