"""Initial hyper-parameters: several starts, of which the best mode is found."""

import pytest
import torch
from gpytorch.constraints import Interval
from gpytorch.kernels import Kernel, LinearKernel, MaternKernel, RBFKernel, ScaleKernel
from gpytorch.means import ConstantMean
from torch import Tensor

from helpers import oracles
from winnowgp.data import Dataset, Standardiser, load_table
from winnowgp.models import SparseGP
from winnowgp.training.budget import Budget
from winnowgp.training.hyperparameters import maximise_evidence, starting_points
from winnowgp.training.lbfgs import Stop, maximise_elbo


def data(N: int = 50, D: int = 1, seed: int = 0) -> Dataset:
    """A fast oscillation with little noise in the first column; the others are irrelevant."""
    g = torch.Generator().manual_seed(seed)
    X = 2 * torch.rand(N, D, generator=g, dtype=torch.float64) - 1
    y = torch.sin(9 * X[:, 0]) + 0.1 * torch.randn(N, generator=g, dtype=torch.float64)
    return Dataset.of(X, y)


def model(rows: Dataset, kernel: Kernel | None = None, noise: float = 1.0) -> SparseGP:
    return SparseGP(kernel or ScaleKernel(RBFKernel()), rows.X[:3], noise=noise)


def warm(gp: SparseGP, rows: Dataset, seed: int = 0, most: int = 1000) -> SparseGP:
    order = torch.randperm(rows.N, generator=torch.Generator().manual_seed(seed))
    budget = Budget(rows.X.device)
    return maximise_evidence([gp], rows, order=order, rows=most, budget=budget).best


def smooth_start(rows: Dataset) -> SparseGP:
    """A model near the mode that explains the oscillation as noise."""
    kernel = ScaleKernel(RBFKernel()).initialize(**{"base_kernel.lengthscale": 30.0})
    return model(rows, kernel, noise=1.0)


def test_initialise_finds_the_better_mode() -> None:
    rows = data()
    alone = smooth_start(rows).with_candidates(rows.X[:0])
    worse = maximise_elbo(
        alone, rows.X, objective=alone.dense_bound(rows), stop=Stop(1e-6, 10, 300)
    ).value
    found = warm(smooth_start(rows), rows)
    assert alone.noise > 0.3
    assert found.noise < 0.03
    evidence = found.dense_bound(rows)().item()
    assert evidence > worse + 20

    def dense(variance: float, lengthscale: float, noise: float) -> float:
        K = variance * torch.exp(-0.5 * (rows.X - rows.X.mT).square() / lengthscale**2)
        return oracles.log_normal(rows.Y, K + noise * torch.eye(rows.N)).item()

    grid = [
        dense(v, s, n)
        for v in (0.3, 0.5, 1.0, 2.0)
        for s in torch.logspace(-2, 1.5, 30).tolist()
        for n in (0.003, 0.01, 0.03, 0.3, 1.0)
    ]
    # The stopping rule leaves 1e-3 nats per row and ten iterations.
    assert evidence > max(grid) - 1e-3 * rows.N


@pytest.mark.parametrize("seed", range(3))
def test_initialise_energy_finds_low_noise_mode(paper_data: None, seed: int) -> None:
    raw = load_table("energy").dataset()
    rows = Dataset(Standardiser.of(raw.X).forward(raw.X), Standardiser.of(raw.Y).forward(raw.Y))
    gp = SparseGP(ScaleKernel(RBFKernel(ard_num_dims=rows.D)), rows.X[:0])
    assert warm(gp, rows, seed, most=240).noise < 0.01


def test_initialise_returns_no_candidates_and_keeps_input() -> None:
    rows = data()
    gp = model(rows)
    before = {name: p.detach().clone() for name, p in gp.named_parameters()}
    found = warm(gp, rows)
    assert found.K == 0
    assert gp.K == 3
    for name, parameter in gp.named_parameters():
        assert torch.equal(parameter, before[name]), name


KERNELS = {
    "rbf": lambda: ScaleKernel(RBFKernel()),
    "ard": lambda: ScaleKernel(RBFKernel(ard_num_dims=2)),
    "matern": lambda: ScaleKernel(MaternKernel(nu=1.5)),
    "sum": lambda: ScaleKernel(RBFKernel(active_dims=(0,))) + LinearKernel(),
    "linear": lambda: LinearKernel(),
}


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS.keys())
def test_initialise_any_kernel_does_not_lower_evidence(kernel) -> None:
    rows = data(N=30, D=2)
    gp = model(rows, kernel())
    assert warm(gp, rows).dense_bound(rows)() >= gp.dense_bound(rows)()


def constant(N: int) -> Dataset:
    rows = data(N=N)
    return Dataset(rows.X, torch.zeros_like(rows.Y))


@pytest.mark.parametrize(
    "rows",
    [
        data(N=1),
        data(N=2),
        constant(1),
        constant(20),
        Dataset(torch.ones_like(data().X), data().Y),
        Dataset(data().X.repeat(2, 1), data().Y.repeat(2, 1)),
    ],
    ids=["N=1", "N=2", "N=1, zero", "zeros", "one place", "rows twice"],
)
def test_initialise_degenerate_data_is_finite(rows: Dataset) -> None:
    gp = model(rows)
    found = warm(gp, rows)
    assert all(p.isfinite().all() for p in found.parameters())
    assert found.dense_bound(rows)().isfinite()
    assert found.dense_bound(rows)() >= gp.dense_bound(rows)()


def test_initialise_frozen_parameters_stay() -> None:
    rows = data()
    gp = model(rows)
    frozen = gp.kernel.get_parameter("base_kernel.raw_lengthscale").requires_grad_(False)
    gp.likelihood.raw_noise.requires_grad_(False)
    for found in (warm(gp, rows), *starting_points(gp, rows)):
        assert torch.equal(found.kernel.get_parameter("base_kernel.raw_lengthscale"), frozen)
        assert torch.equal(found.noise, gp.noise)


def lengthscale(gp: SparseGP) -> Tensor:
    base = gp.kernel.get_submodule("base_kernel")
    assert isinstance(base, Kernel)
    return base.lengthscale.detach().flatten()


@pytest.mark.parametrize(
    ("D", "factors"), [(1, (1.0, 0.1)), (3, (3**0.5, 1.0, 0.1)), (4, (2.0, 1.0))]
)
def test_starting_points_include_model_and_scaled_variants(
    D: int, factors: tuple[float, ...]
) -> None:
    rows = data(D=D)
    X = rows.X * torch.tensor([1.0, 10.0, 0.0, 2.0], dtype=torch.float64)[:D]
    rows = Dataset(X, 5 * rows.Y)
    gp = model(rows, ScaleKernel(RBFKernel(ard_num_dims=D)), noise=0.7)
    given, *others = starting_points(gp, rows)
    assert torch.equal(lengthscale(given), lengthscale(gp))
    assert given.noise.item() == pytest.approx(0.7)
    spread = X.std(0, correction=0)
    spread[2:3] = 1.0  # a constant column
    variance = rows.Y.square().mean().item()
    wanted = [(f, n) for f in factors for n in (0.1, 0.01)]
    for (factor, noise), start in zip(wanted, others, strict=True):
        torch.testing.assert_close(lengthscale(start), factor * spread, rtol=1e-9, atol=0)
        assert start.noise.item() == pytest.approx(noise * variance)
        assert start.K == 0


def test_starting_points_shared_lengthscale_uses_mean_spread() -> None:
    rows = data(D=3)
    rows = Dataset(rows.X * torch.tensor([1.0, 4.0, 100.0], dtype=torch.float64), rows.Y)
    gp = model(rows, ScaleKernel(RBFKernel(active_dims=(0, 1))))
    spread = rows.X.std(0, correction=0)[:2].mean()
    torch.testing.assert_close(lengthscale(starting_points(gp, rows)[4])[0], spread)


def test_initialise_learns_mean() -> None:
    rows = data()
    rows = Dataset(rows.X, rows.Y + 5)
    gp = SparseGP(ScaleKernel(RBFKernel()), rows.X[:0], mean=ConstantMean())
    gp.kernel.get_parameter("raw_outputscale").requires_grad_(False)
    mean = warm(gp, rows).mean.get_parameter("raw_constant")
    assert abs(mean.item() - 5) < 0.7


def test_starting_points_respect_lengthscale_constraint() -> None:
    rows = data()
    base = RBFKernel(lengthscale_constraint=Interval(0.01, 0.3))
    found = warm(model(rows, ScaleKernel(base)), rows)
    assert 0.01 < lengthscale(found).item() < 0.3


def test_starting_points_nested_active_dims() -> None:
    rows = data(N=20, D=3)
    gp = model(rows, ScaleKernel(RBFKernel(ard_num_dims=2), active_dims=(0, 1)))
    assert warm(gp, rows).dense_bound(rows)() > gp.dense_bound(rows)()
