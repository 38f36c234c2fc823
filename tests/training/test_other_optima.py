"""Fewer points at an optimum of the evidence that is not the best, but within the tolerance."""

from dataclasses import replace

import pytest
import torch
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel

from helpers import oracles
from helpers.short_fits import smaller_sizes
from winnowgp import fit
from winnowgp.data import Dataset
from winnowgp.models import SparseGP
from winnowgp.models.exact_gp import exact_log_density
from winnowgp.training import FastSchedule, FitResult, Tolerance
from winnowgp.training.budget import Budget
from winnowgp.training.fast_steps import FastSteps
from winnowgp.training.hyperparameters import Initialization
from winnowgp.training.optima import Optimum
from winnowgp.training.other_optima import Choice, with_other_optimum
from winnowgp.training.schedules import TrainingContext

pytestmark = pytest.mark.unchecked

N, NOISE = 120, 0.02


def rows() -> Dataset:
    """Return a draw from a GP with a Matérn-1/2 kernel, which is rough."""
    g = torch.Generator().manual_seed(3)
    X = 4 * torch.rand(N, 1, generator=g, dtype=torch.float64)
    K = torch.exp(-(X - X.T).abs() / 2)
    eps = torch.randn(2, N, generator=g, dtype=torch.float64)
    return Dataset.of(X, torch.linalg.cholesky(K) @ eps[0] + NOISE**0.5 * eps[1])


def fitted(nats: float, *, both: bool = True) -> FitResult[SparseGP]:
    data = rows()
    gp = SparseGP(ScaleKernel(MaternKernel(nu=0.5)), data.X[:0], noise=0.1)
    kernels = (ScaleKernel(RBFKernel()),) if both else ()
    schedule = FastSchedule(Tolerance(nats), kernels=kernels, inclusion_steps=5, rounds=2)
    with smaller_sizes(0):
        return fit(gp, data, schedule=schedule, generator=torch.Generator().manual_seed(0))


def test_smooth_optimum_within_the_tolerance_needs_fewer_points() -> None:
    rough, best, result = fitted(0.2, both=False), fitted(0.01), fitted(0.2)
    # So many points are not moved: hyper-parameters are those of the best evidence.
    assert isinstance(best.model.kernel.base_kernel, MaternKernel)
    with torch.no_grad():
        K = best.model.kernel(rows().X).to_dense()
        evidence = oracles.log_normal(rows().Y, K + best.model.noise * torch.eye(N)).item()
    assert isinstance(result.model.kernel.base_kernel, RBFKernel)
    assert 0 < result.posterior.M <= 0.75 * rough.posterior.M
    # The tolerance is that of the best evidence, not of the optimum that was selected.
    assert result.elbo >= evidence - 0.2 * N
    assert result.elbo_gap == pytest.approx(evidence - result.elbo, abs=1e-3)


def test_optimum_beyond_the_tolerance_is_not_selected() -> None:
    rough, result = fitted(0.01, both=False), fitted(0.01)
    assert result.posterior.M == rough.posterior.M
    assert result.elbo == pytest.approx(rough.elbo, abs=0.1)


def test_optimum_of_large_weights_has_the_noise_of_unit_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The exact evidence of rows that count ten times each has no maximum in the noise."""
    noises: list[float] = []
    fresh = FastSteps.with_fresh

    def spied(self: FastSteps, model: SparseGP, count: int) -> SparseGP:
        noises.append(model.noise.item())
        return fresh(self, model, count)

    monkeypatch.setattr(FastSteps, "with_fresh", spied)
    g = torch.Generator().manual_seed(0)
    X = 6 * torch.rand(60, 1, generator=g, dtype=torch.float64)
    y = torch.sin(2 * X) + 0.3 * torch.randn(60, 1, generator=g, dtype=torch.float64)
    for weight in (1.0, 10.0):
        data = Dataset.of(X, y, weights=torch.full((60,), weight, dtype=torch.float64))
        gp = SparseGP(ScaleKernel(RBFKernel()), X[:0], noise=0.1)
        budget = Budget(X.device)
        steps = FastSteps(gp, data, rows=60, context=TrainingContext(g), budget=budget)
        optima = (
            Optimum(gp, -40.0, 60, 0, converged=True),
            Optimum(gp.with_candidates(X[:0]), -40.0, 60, 0),
        )
        steps.initialization = Initialization(optima, 60, True, (-40.0 / 60,))
        chosen = Choice(
            gp.with_candidates(X[::3]), -40.0 * weight, None, exact=True, goal=Tolerance(0.1)
        )
        with_other_optimum(steps, chosen)
    unit, heavy = noises
    assert 0.05 < unit < 0.15
    assert heavy == pytest.approx(unit, rel=1e-6)


@pytest.mark.parametrize("weight", [1.0, 10.0])
def test_optimum_beyond_the_tolerance_of_unit_weights_is_not_tried(
    monkeypatch: pytest.MonkeyPatch, weight: float
) -> None:
    """Optima are those of unit weights, and so is the tolerance that they may be below the best."""
    tried: list[int] = []
    fresh = FastSteps.with_fresh

    def spied(self: FastSteps, model: SparseGP, count: int) -> SparseGP:
        tried.append(count)
        return fresh(self, model, count)

    monkeypatch.setattr(FastSteps, "with_fresh", spied)
    data = replace(rows(), weights=torch.full((N,), weight, dtype=torch.float64))
    gp = SparseGP(ScaleKernel(RBFKernel()), data.X[:0], noise=0.1)
    g = torch.Generator().manual_seed(0)
    steps = FastSteps(gp, data, rows=N, context=TrainingContext(g), budget=Budget(data.X.device))
    # The others are 1 and 3 times the tolerance of 0.1 below the best.
    optima = tuple(Optimum(gp, -nats * N, N, 0, converged=True) for nats in (1.0, 1.1, 1.3))
    steps.initialization = Initialization(optima, N, True, (-1.0,))
    chosen = Choice(
        gp.with_candidates(data.X[::2]), -1.0 * N * weight, None, exact=True, goal=Tolerance(0.1)
    )
    with_other_optimum(steps, chosen)
    assert len(tried) == 1


@pytest.mark.parametrize(("lost", "tried"), [(0.09, 1), (0.11, 0)])
def test_optimum_that_predicts_left_out_rows_beyond_the_tolerance_worse_is_not_tried(
    monkeypatch: pytest.MonkeyPatch, lost: float, tried: int
) -> None:
    sizes: list[int] = []
    fresh = FastSteps.with_fresh

    def spied(self: FastSteps, model: SparseGP, count: int) -> SparseGP:
        sizes.append(count)
        return fresh(self, model, count)

    monkeypatch.setattr(FastSteps, "with_fresh", spied)
    data = rows()
    rough = SparseGP(ScaleKernel(MaternKernel(nu=0.5)), data.X[:0], noise=0.02)
    smooth = SparseGP(ScaleKernel(RBFKernel()), data.X[:0], noise=0.1)
    densities = [_left_out(gp, data) for gp in (rough, smooth)]
    assert densities[0] > densities[1]
    tolerance = 0.1 * (densities[0] - densities[1]) / lost
    g = torch.Generator().manual_seed(0)
    steps = FastSteps(rough, data, rows=N, context=TrainingContext(g), budget=Budget(data.X.device))
    optima = tuple(Optimum(gp, -1.0 * N, N, 0, converged=True) for gp in (rough, smooth))
    steps.initialization = Initialization(optima, N, True, (-1.0,))
    chosen = Choice(
        rough.with_candidates(data.X[::2]), -1.0 * N, None, exact=True, goal=Tolerance(tolerance)
    )
    with_other_optimum(steps, chosen)
    assert len(sizes) == tried


def _left_out(gp: SparseGP, data: Dataset) -> float:
    """Return the mean log density of each row given the others, row by row."""
    numbers, nats = torch.arange(N), 0.0
    for i in range(N):
        rest, row = data.part(numbers[numbers != i]), data.part(numbers[numbers == i])
        nats += exact_log_density(
            gp.kernel, data=rest, mean=gp.mean, noise=gp.noise, rows=row
        ).item()
    return nats / N
