"""The search with a fixed number of points."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel

from winnowgp.data import Dataset
from winnowgp.models import SparseGP
from winnowgp.training import FastSchedule, MaxPoints, Progress, fit
from winnowgp.training.fast_steps import FastSteps
from winnowgp.training.fixed_size import best_of_size
from winnowgp.training.initialization import scaled
from winnowgp.training.lbfgs import Curvature, Stop
from winnowgp.training.optima import Optimum
from winnowgp.training.schedules import TrainingContext

pytestmark = pytest.mark.usefixtures("one_size")


def waves(N: int = 120) -> Dataset:
    """A function that varies rapidly along the second of two columns."""
    X = torch.randn(N, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return Dataset.of(X, torch.sin(6 * X[:, 1]) + 0.1 * torch.cos(X[:, 0]))


def steps_of(rows: Dataset, **settings: Any) -> FastSteps[SparseGP]:
    gp = SparseGP(ScaleKernel(RBFKernel(ard_num_dims=2)), rows.X[:0], noise=0.1)
    context = TrainingContext(torch.Generator().manual_seed(0))
    return FastSteps(gp, rows, rows=4000, context=context, **settings)


def phases(gp: SparseGP, **settings: Any) -> list[str]:
    events: list[Progress] = []
    schedule = FastSchedule(MaxPoints(8), rounds=1, iterations=20, **settings)
    fit(gp, waves(), schedule=schedule, callbacks=events.append)
    return [event.phase for event in events]


def test_max_points_optimises_on_all_rows_before_the_search() -> None:
    gp = SparseGP(ScaleKernel(RBFKernel(ard_num_dims=2)), waves().X[:0], noise=0.1)
    order = phases(gp)
    assert order.index("optimisation") < order.index("initialisation")


def test_max_points_few_rows_per_point_begins_with_the_evidence_of_all_rows() -> None:
    rows, M = waves(), 60
    gp = SparseGP(ScaleKernel(RBFKernel(ard_num_dims=2)), rows.X[:0], noise=0.1)
    events: list[Progress] = []
    schedule = FastSchedule(MaxPoints(M), rounds=1)
    result = fit(gp, rows, schedule=schedule, callbacks=events.append)
    assert events[0].phase == "initialisation"
    assert result.evidence is not None
    # Points at cluster centres with a smooth function end 500 nats below.
    assert result.elbo > result.evidence.lower - 3.0


def test_optimise_with_earlier_curvature_gains_more() -> None:
    steps, stop = steps_of(waves()), Stop(1e-6, 20, 5)
    curvature = Curvature()
    start = steps.centres(steps.model, 20)
    start, elbo = steps.optimise(start, stop=Stop(1e-6, 20, 8), curvature=curvature)
    _, anew = steps.optimise(start, stop=stop)
    _, continued = steps.optimise(start, stop=stop, curvature=curvature)
    assert continued - elbo > 1.3 * (anew - elbo) > 0


@pytest.mark.parametrize("candidates", [0, 30])
def test_max_points_searches_first_where_kernels_or_candidates_are_given(candidates: int) -> None:
    gp = SparseGP(ScaleKernel(RBFKernel(ard_num_dims=2)), waves().X[:candidates], noise=0.1)
    other = () if candidates else (ScaleKernel(RBFKernel()),)
    order = phases(gp, kernels=other)
    assert order[0] == "initialisation"


def test_best_of_size_is_no_lower_than_any_start(monkeypatch: pytest.MonkeyPatch) -> None:
    steps, stop = steps_of(waves()), Stop(1e-3, 20, 60)
    tried: list[float] = []
    optimise = steps.optimise

    def recorded(model: SparseGP, **settings: Any) -> tuple[SparseGP, float]:
        result = optimise(model, **settings)
        if settings.get("stop") is stop:
            tried.append(steps.objective(*result))
        return result

    monkeypatch.setattr(steps, "optimise", recorded)
    best = best_of_size(steps, 10, rounds=1, stop=stop)
    assert len(tried) == 2
    assert steps.objective(*best) == pytest.approx(max(tried))
    assert max(tried) > min(tried) + 1.0


def test_best_of_size_few_points_start_at_an_optimum_that_they_represent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows, M, stop = waves(), 12, Stop(1e-3, 20, 60)
    steps = steps_of(rows, kernels=(ScaleKernel(RBFKernel()),))
    smooth = steps.initialise(rows.N).best
    # The evidence may be higher where so few points represent nothing.
    rough, rougher = (scaled(smooth, lengthscale=s, noise=1e-4) for s in (0.02, 0.01))
    optima = [Optimum(m, -i, rows.N, 0) for i, m in enumerate((rough, rougher, smooth))]
    assert steps.initialization is not None
    initial = replace(steps.initialization, optima=tuple(optima))
    monkeypatch.setattr(steps, "starts", lambda M: [steps.eliminated(rough, M)])
    steps.initialization = replace(initial, optima=initial.optima[:1])
    _, worse = best_of_size(steps, M, rounds=1, stop=stop)
    steps.initialization = initial
    _, elbo = best_of_size(steps, M, rounds=1, stop=stop)
    assert elbo > worse + 0.1 * rows.N
    assert elbo >= steps.eliminated(smooth, M).fixed_bound(rows)


@pytest.mark.parametrize("behind", [True, False])
def test_best_of_size_many_rows_continues_only_a_promising_start(
    behind: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, stop = steps_of(waves()), Stop(1e-3, 20, 300)
    monkeypatch.setattr(steps, "precision", lambda M: "mixed")
    monkeypatch.setattr("winnowgp.training.fixed_size._BEHIND", -1e3 if behind else 1e3)
    counts: list[int] = []
    optimise = steps.optimise

    def recorded(model: SparseGP, **settings: Any) -> tuple[SparseGP, float]:
        own = settings["stop"]
        assert isinstance(own, Stop)
        if settings.get("on") is None:
            counts.append(own.iterations)
        return optimise(model, **settings)

    monkeypatch.setattr(steps, "optimise", recorded)
    best_of_size(steps, 10, rounds=1, stop=stop)
    # The first start to the end, a trial of the other, that to the end if it is not far behind, and
    # some more iterations in double precision.
    assert counts == ([300, 200, 90] if behind else [300, 200, 300, 90])


def test_best_of_size_little_work_optimises_the_best_start_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps, stop = steps_of(waves()), Stop(1e-3, 20, 300)
    cost = steps.model.chunked_cost_of(steps.data, 10)
    steps.budget.spent = steps.budget.work_limit - 250 * cost
    runs: list[tuple[int, float]] = []
    optimise = steps.optimise

    def recorded(model: SparseGP, **settings: Any) -> tuple[SparseGP, float]:
        own = settings["stop"]
        assert isinstance(own, Stop)
        if own.iterations == stop.iterations:
            runs.append((model.K, settings["share"]))
        return optimise(model, **settings)

    monkeypatch.setattr(steps, "optimise", recorded)
    best, elbo = best_of_size(steps, 10, rounds=1, stop=stop)
    assert runs == [(10, 0.95)]
    assert elbo == pytest.approx(best.fixed_bound(steps.data))


def test_max_points_that_represent_nothing_report_the_gap_to_a_larger_model() -> None:
    g = torch.Generator().manual_seed(0)
    X = 10 * torch.rand(400, 1, generator=g, dtype=torch.float64)
    noise = torch.randn(400, generator=g, dtype=torch.float64)
    data = Dataset.of(X, torch.sin(10 * X[:, 0]) + 0.1 * noise)
    gp = SparseGP(ScaleKernel(RBFKernel()), X[:0], noise=0.1)
    result = fit(gp, data, schedule=FastSchedule(MaxPoints(2), rounds=1, iterations=20))
    assert result.posterior.M <= 2
    # The 400 rows were not all searched, and twice as many points gain next to nothing.
    assert result.growth is not None
    assert result.growth.limit == "max_points"
    assert result.growth.last_gain < 0.01
    # Two points cannot represent sixteen periods, and all rows can.
    truth = SparseGP(ScaleKernel(RBFKernel()), X[:0], noise=0.01)
    truth.kernel.initialize(**{"base_kernel.lengthscale": 0.1})
    evidence = truth.dense_bound(data)().item()
    assert result.elbo < evidence - 400
    assert result.elbo_gap > evidence - result.elbo
