"""Samples of inducing points at arbitrary locations, against quadrature in one dimension."""

import math
from functools import cache

import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from torch import Tensor

from winnowgp.bounds.collapsed import Moments
from winnowgp.data import Dataset
from winnowgp.errors import InputError
from winnowgp.models import ModelLocations, SparseGP
from winnowgp.selection import SubsetStatistics
from winnowgp.selection.continuous import (
    Box,
    LocationDensity,
    RowDensity,
    birth_and_death,
    langevin_move,
    sample_locations,
)
from winnowgp.selection.objective import subset_statistics

WEIGHTS = torch.tensor([0.0, -0.5, -3.0], dtype=torch.float64)  # at most two points
INTENSITY, GRID, DRAWS = 3.0, 120, 300
ONE = torch.ones(1, dtype=torch.float64)
DENSITIES: dict[str, LocationDensity] = {
    "box": Box(0 * ONE, 2 * ONE),
    "rows": RowDensity(torch.tensor([[0.4], [1.2], [1.5]], dtype=torch.float64), 0.3 * ONE),
}


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Dense:
    """The collapsed bound of eight rows under an RBF kernel, from dense matrices."""

    def __init__(self) -> None:
        self.x = torch.linspace(0, 2, 8, dtype=torch.float64)[:, None]
        self.y, self.noise = torch.sin(3 * self.x), 0.5

    def kernel(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.exp(-0.5 * ((a - b.mT) / 0.5).square())

    def statistics(self, Z: Tensor) -> SubsetStatistics:
        L = torch.linalg.cholesky(self.kernel(Z, Z) + 1e-8 * torch.eye(len(Z)).double())
        V = torch.linalg.solve_triangular(L, self.kernel(Z, self.x), upper=False)
        constant = torch.tensor(-4 * math.log(2 * math.pi * self.noise), dtype=torch.float64)
        N = torch.tensor(8 / self.noise, dtype=torch.float64)
        square = self.y.square().sum() / self.noise
        C, D = V @ V.mT / self.noise, V @ self.y / self.noise
        return subset_statistics(L, Moments(C, D, square, N, constant, 8))

    def bound(self, Z: Tensor) -> Tensor:
        Kuf = self.kernel(Z, self.x)
        Kuu = self.kernel(Z, Z) + 1e-8 * torch.eye(len(Z)).double()
        Q = Kuf.mT @ torch.linalg.solve(Kuu, Kuf)
        root = torch.linalg.cholesky(Q + self.noise * torch.eye(8).double())
        fit = torch.linalg.solve_triangular(root, self.y, upper=False).square().sum()
        log_normal = -0.5 * fit - root.diagonal().log().sum() - 4 * math.log(2 * math.pi)
        return log_normal - 0.5 * (8 - Q.trace()) / self.noise

    def bound_and_gradient(self, Z: Tensor) -> tuple[Tensor, Tensor]:
        leaf = Z.detach().clone().requires_grad_(True)
        bound = self.bound(leaf)
        (gradient,) = torch.autograd.grad(bound, leaf, allow_unused=True)
        return bound.detach(), torch.zeros_like(Z) if gradient is None else gradient


OBJECTIVE = Dense()


@cache
def quadrature(name: str) -> tuple[Tensor, Tensor, Tensor]:
    """P(m) of 0, 1 and 2 points, the centres of the cells, and π of a cell for one point.

    π(z_1..z_m) = κ^m/m! Π h(z_i) exp(w(m) + L(Z)), summed over a grid.
    """
    density = DENSITIES[name]
    low, high = (0.0, 2.0) if name == "box" else (-0.8, 2.7)
    width = (high - low) / GRID
    z = low + width * (torch.arange(GRID, dtype=torch.float64) + 0.5)
    statistics = OBJECTIVE.statistics(z[:, None])
    eye = torch.eye(GRID, dtype=torch.bool)
    pairs = (eye[:, None] | eye[None]).flatten(0, 1)
    # Both points in one cell count as one: the bound is continuous.
    bounds = statistics.value(pairs).reshape(GRID, GRID)
    single = statistics.value(eye)
    h = density.log_density(z[:, None]).exp() * width
    one = INTENSITY * h * (single + WEIGHTS[1]).exp()
    two = INTENSITY**2 / 2 * h[:, None] * h * (bounds + WEIGHTS[2]).exp()
    none = statistics.empty.exp()[None]
    masses = torch.stack([none.sum(), one.sum(), two.sum()])
    position = (one + 2 * two.sum(1)) / masses.sum()  # expected number of points in each cell
    return masses / masses.sum(), z, position


def z_scores(samples: list[Tensor], name: str) -> Tensor:
    """z-scores of the sizes and of sums over points, of independent samples."""
    sizes, z, intensity = quadrature(name)
    functions = [torch.ones_like, lambda t: t, lambda t: t**2, lambda t: torch.sin(4 * t)]
    values = [torch.tensor([float(len(Z) == m) for Z in samples]).double() for m in range(3)]
    expected = list(sizes)
    for f in functions:
        values.append(torch.stack([f(Z[:, 0]).sum() for Z in samples]))
        expected.append((intensity * f(z)).sum())
    each = torch.stack(values)
    return (each.mean(1) - torch.stack(expected)) / (each.std(1) / len(samples) ** 0.5)


def exact_draws(name: str, n: int) -> list[Tensor]:
    """Draws of q* from the grid, each point uniform in its cell."""
    density, generator = DENSITIES[name], seeded(1)
    sizes, z, _ = quadrature(name)
    statistics = OBJECTIVE.statistics(z[:, None])
    eye = torch.eye(GRID, dtype=torch.bool)
    log_h = density.log_density(z[:, None])
    one = (statistics.value(eye) + log_h).softmax(0)
    pairs = (
        statistics.value((eye[:, None] | eye[None]).flatten(0, 1))
        + (log_h[:, None] + log_h).flatten()
    )
    two = pairs.softmax(0)
    width = (z[1] - z[0]).item()
    result = []
    for m in torch.multinomial(sizes, n, True, generator=generator).tolist():
        cells = torch.zeros(0, dtype=torch.long)
        if m == 1:
            cells = torch.multinomial(one, 1, generator=generator)
        elif m == 2:
            pair = int(torch.multinomial(two, 1, generator=generator))
            cells = torch.tensor([pair // GRID, pair % GRID])
        jitter = width * (torch.rand(m, generator=generator, dtype=torch.float64) - 0.5)
        result.append((z[cells] + jitter)[:, None])
    return result


def born(Z: Tensor, name: str, generator: torch.Generator, *, log_ratio: float) -> Tensor:
    return birth_and_death(
        OBJECTIVE,
        Z,
        density=DENSITIES[name],
        log_ratio=log_ratio,
        fresh=2.0,
        log_weights=WEIGHTS,
        generator=generator,
    )


RATIO = torch.tensor(INTENSITY / 2.0).log().item()


@pytest.mark.unchecked
@pytest.mark.parametrize("name", list(DENSITIES))
def test_birth_and_death_leaves_distribution_unchanged(name: str) -> None:
    generator = seeded(2)
    after = [born(Z, name, generator, log_ratio=RATIO) for Z in exact_draws(name, DRAWS)]
    assert z_scores(after, name).abs().max() < 4


@pytest.mark.unchecked
def test_birth_and_death_of_another_intensity_fails_the_same_check() -> None:
    generator = seeded(2)
    after = [born(Z, "box", generator, log_ratio=RATIO + 1) for Z in exact_draws("box", DRAWS)]
    assert z_scores(after, "box").abs().max() > 4


@pytest.mark.unchecked
@pytest.mark.parametrize("name", list(DENSITIES))
def test_langevin_moves_leave_distribution_unchanged(name: str) -> None:
    generator, after, accepted = seeded(3), [], 0
    for Z in exact_draws(name, DRAWS):
        moved, ok = langevin_move(
            OBJECTIVE, Z, density=DENSITIES[name], step=0.4, generator=generator
        )
        after.append(moved)
        accepted += ok
    assert 0.2 < accepted / DRAWS < 0.95
    assert z_scores(after, name).abs().max() < 4


@pytest.mark.unchecked
def test_langevin_moves_without_rejection_fail_the_same_check(monkeypatch) -> None:
    generator = seeded(3)
    monkeypatch.setattr(torch, "rand", lambda *_, **__: torch.zeros((), dtype=torch.float64))
    draws = [
        langevin_move(OBJECTIVE, Z, density=DENSITIES["rows"], step=1.0, generator=generator)[0]
        for Z in exact_draws_before_patch()
    ]
    assert z_scores(draws, "rows").abs().max() > 4


@cache
def exact_draws_before_patch() -> list[Tensor]:
    return exact_draws("rows", DRAWS)


@pytest.mark.unchecked
def test_sample_locations_matches_quadrature() -> None:
    samples = sample_locations(
        OBJECTIVE,
        density=DENSITIES["box"],
        intensity=INTENSITY,
        log_weights=WEIGHTS,
        generator=seeded(0),
        chains=2,
        sweeps=100,
        fresh=4.0,
        step=0.3,
    )
    sizes = quadrature("box")[0]
    assert min(samples.effective_samples.values()) > 80
    assert max(samples.r_hat.values()) < 1.05
    assert 0 < samples.acceptance < 1
    # Standard errors of a probability from 80 independent samples: at most 0.056.
    share = torch.bincount(samples.sizes.flatten(), minlength=3) / 200
    assert (share - sizes).abs().max() < 0.17
    best = samples.bounds.argmax()
    assert (
        samples.bounds.flatten()[best]
        == OBJECTIVE.bound_and_gradient(samples.locations[int(best)])[0]
    )


def test_model_locations_match_dense_bound_and_gradient() -> None:
    stationary = RBFKernel()
    kernel = ScaleKernel(stationary)
    kernel.initialize(outputscale=1.0)
    stationary.initialize(lengthscale=0.5)
    model = SparseGP(kernel, OBJECTIVE.x[:1], noise=OBJECTIVE.noise)
    locations = ModelLocations(model, Dataset(OBJECTIVE.x, OBJECTIVE.y))
    Z = torch.tensor([[0.3], [1.4]], dtype=torch.float64)
    for points in (Z, Z[:0]):
        bound, gradient = locations.bound_and_gradient(points)
        expected = OBJECTIVE.bound_and_gradient(points)
        torch.testing.assert_close((bound, gradient), expected, rtol=1e-6, atol=1e-6)
        mask = torch.ones(1, len(points), dtype=torch.bool)
        torch.testing.assert_close(locations.statistics(points).value(mask)[0], expected[0])


@pytest.mark.parametrize("name", list(DENSITIES))
def test_densities_integrate_to_one_and_samples_follow_them(name: str) -> None:
    density = DENSITIES[name]
    x = torch.linspace(-2, 4, 4001, dtype=torch.float64)
    h = density.log_density(x[:, None]).exp()
    assert torch.trapezoid(h, x).item() == pytest.approx(1.0, abs=2e-3)
    drawn = density.sample(4000, generator=seeded(0))[:, 0]
    error = drawn.std() / 4000**0.5
    assert abs(drawn.mean() - torch.trapezoid(h * x, x)) < 4 * error


def test_bad_arguments_raise() -> None:
    given = {"density": DENSITIES["box"], "log_weights": WEIGHTS, "generator": seeded(0)}
    with pytest.raises(InputError, match="positive"):
        sample_locations(OBJECTIVE, intensity=0.0, **given)
    with pytest.raises(InputError, match="`sweeps`"):
        sample_locations(OBJECTIVE, intensity=1.0, sweeps=2, **given)
    with pytest.raises(InputError, match="below `high`"):
        Box(ONE, ONE)
    with pytest.raises(InputError, match="`rows`"):
        RowDensity(torch.zeros(0, 1).double(), ONE)
