"""The fast schedule of models with one candidate set."""

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from gpytorch.kernels import Kernel, MaternKernel, RBFKernel, ScaleKernel

from helpers import oracles
from helpers.short_fits import short_fits, smaller_sizes
from winnowgp import fit
from winnowgp.data import Dataset, hills
from winnowgp.errors import InputError
from winnowgp.models import SparseGP
from winnowgp.selection import Frontier
from winnowgp.training import (
    FastSchedule,
    FitResult,
    FixedAlpha,
    Goal,
    MaxPoints,
    Progress,
    Tolerance,
    fast_sparse,
    fast_steps,
)
from winnowgp.training.callbacks import SMALLER_MODEL
from winnowgp.training.fast_steps import FastSteps
from winnowgp.training.lbfgs import Stop, maximise_elbo
from winnowgp.training.schedules import TrainingContext

pytestmark = pytest.mark.usefixtures("one_size")

TOLERANCE = 0.02


def data(every: int = 1) -> Dataset:
    rows = hills()
    return Dataset(rows.X[::every], rows.Y[::every])


def model(rows: Dataset, kernel: Kernel | None = None, K: int = 0) -> SparseGP:
    places = rows.X[:: max(rows.N // max(K, 1), 1)][:K]
    return SparseGP(kernel or ScaleKernel(RBFKernel()), places, noise=0.1)


def dense_evidence(gp: SparseGP, rows: Dataset) -> float:
    """log N(y | 0, K + σ² I) by dense matrices."""
    with torch.no_grad():
        K = gp.kernel(rows.X).to_dense()
        return oracles.log_normal(rows.Y, K + gp.noise * torch.eye(rows.N)).item()


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def fast(goal: Any = None, **arguments: Any) -> FastSchedule:
    """A schedule for small data."""
    return FastSchedule(goal or Tolerance(TOLERANCE), n_candidates=40, **arguments)


@cache
def on_hills() -> tuple[FitResult, list[Progress]]:
    events: list[Progress] = []
    settings: dict[str, Any] = {"generator": seeded(), "callbacks": events.append}
    with smaller_sizes(3):
        return fit(model(data()), data(), schedule=fast(), **settings), events


@cache
def capped(M: int) -> FitResult:
    rows = data(every=4)
    schedule = fast(MaxPoints(M), rounds=2, iterations=60)
    with short_fits():
        return fit(model(rows), rows, schedule=schedule, generator=seeded())


@cache
def priced(alpha: float) -> FitResult:
    rows = data(every=2)
    schedule = fast(FixedAlpha(alpha), rounds=2)
    with short_fits():
        return fit(model(rows), rows, schedule=schedule, generator=seeded())


def all_fits() -> list[FitResult]:
    return [on_hills()[0], capped(4), priced(0.1), priced(1e6)]


def test_fast_tolerance_holds_against_exact_evidence() -> None:
    rows, (fitted, _) = data(), on_hills()
    exact = fitted.model.with_candidates(rows.X[:0])
    best = maximise_elbo(exact, rows.X, objective=exact.dense_bound(rows), stop=Stop(1e-4)).value
    # L-BFGS stops at 3e-4 nats per row and twenty iterations.
    assert best - (TOLERANCE + 1e-3) * rows.N < fitted.elbo < best + 1e-6
    assert fitted.posterior.M < 20


def test_fast_elbo_gap_is_within_tolerance() -> None:
    fitted, _ = on_hills()
    assert 0 <= fitted.elbo_gap <= TOLERANCE * data().N


def test_fast_fit_whose_time_is_over_leaves_out_what_is_only_reported() -> None:
    rows = data(every=4)
    with short_fits():
        fitted = fit(model(rows), rows, schedule=fast(max_seconds=1e-6), generator=seeded())
    assert fitted.evidence is None
    assert fitted.predictive_gap is None
    assert fitted.sized == ()
    # The steps that have to be taken are, if shortened: it is a model, not a constant.
    assert fitted.elbo == pytest.approx(fitted.model.fixed_bound(rows))
    assert fitted.posterior.M > 0


def test_fast_fit_without_report_searches_and_learns_as_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows, starts, steps = data(every=4), [], []
    search, learn = fast_steps.maximise_evidence, fast_sparse.learn_inclusion

    def searched(*arguments: Any, **settings: Any) -> Any:
        starts.append(settings["max_starts"])
        return search(*arguments, **settings)

    def learnt(*arguments: Any, **settings: Any) -> Any:
        steps.append(settings["max_steps"])
        return learn(*arguments, **settings)

    monkeypatch.setattr(fast_steps, "maximise_evidence", searched)
    monkeypatch.setattr(fast_sparse, "learn_inclusion", learnt)
    with short_fits():
        for schedule in (fast(reported=False), fast(reported=False, max_starts=2)):
            fit(model(rows), rows, schedule=schedule, generator=seeded())
    assert starts == [None, 2]
    assert steps == [60, 60]


class Noted(Goal):
    """A tolerance that records its calls."""

    def __init__(self) -> None:
        self._tolerance = Tolerance(TOLERANCE)
        self.asked: list[tuple[Frontier, float]] = []

    def size(self, frontier: Frontier, *, reference: float) -> int:
        self.asked.append((frontier, reference))
        return self._tolerance.size(frontier, reference=reference)

    def best(self, fits: Sequence[tuple[int, float]], *, N: int | float) -> int:
        return self._tolerance.best(fits, N=N)

    def alphas(
        self, frontiers: Sequence[Frontier], prices: Sequence[float] | None = None
    ) -> tuple[float, ...]:
        return self._tolerance.alphas(frontiers, prices)


def sizes(events: list[Progress]) -> list[int]:
    return [len(step.candidates[0]) for step in events if step.phase == "selection"]


@pytest.mark.unchecked
def test_fast_rounds_select_fewest_points_until_settled() -> None:
    rows, goal, events = data(every=2), Noted(), []
    fit(model(rows), rows, schedule=fast(goal), generator=seeded(), callbacks=events.append)
    for (frontier, reference), M in zip(goal.asked, sizes(events), strict=True):
        assert reference >= frontier.bounds.max()
        assert frontier.bounds[M] >= reference - TOLERANCE * rows.N > frontier.bounds[:M].max()
    # The number has settled if it changes by less than 3%; the third round is the last.
    # A smaller model that keeps the tolerance may follow.
    for found in (sizes(events), sizes(on_hills()[1])[:2]):
        *before, last = (abs(b - a) <= 0.03 * a for a, b in pairwise(found))
        assert not any(before)
        assert last or len(found) == 3


def test_fast_smaller_tolerance_selects_more_points() -> None:
    rows = data()
    close = fit(model(rows), rows, schedule=fast(Tolerance(1e-3)), generator=seeded())
    fitted, _ = on_hills()
    assert close.posterior.M > fitted.posterior.M
    assert close.elbo > fitted.elbo


@pytest.mark.parametrize("M", [4, *(pytest.param(M, marks=pytest.mark.unchecked) for M in (8, 16))])
def test_fast_max_points_selects_as_many(M: int) -> None:
    assert capped(M).posterior.M == M


def test_fast_more_points_have_higher_elbo() -> None:
    assert all(b > a + 1 for a, b in pairwise(capped(M).elbo for M in (4, 8, 16)))


@pytest.mark.unchecked
def test_fast_stronger_prior_selects_fewer_points() -> None:
    sizes = [priced(alpha).posterior.M for alpha in (0.05, 0.3, 1e6)]
    assert sizes[0] > sizes[1] > sizes[2] == 0
    assert torch.isfinite(priced(1e6).posterior.predict(data().X).variance).all()


def test_fast_fixed_alpha_is_reported() -> None:
    assert priced(0.1).selection.alpha == 0.1


def test_fast_evidence_is_exact_and_not_below_elbo() -> None:
    for fitted, rows in (
        (on_hills()[0], data()),
        (capped(4), data(every=4)),
        (priced(0.1), data(every=2)),
        (priced(1e6), data(every=2)),
    ):
        assert fitted.elbo == pytest.approx(fitted.model.bound(rows).item(), abs=1e-4)
        assert fitted.evidence is not None
        assert fitted.evidence.exact
        expected = dense_evidence(fitted.model, rows)
        for end in (fitted.evidence.lower, fitted.evidence.upper):
            assert end == pytest.approx(expected, abs=1e-5)
        assert fitted.elbo <= expected + 1e-6


def left_to_gain(fitted: FitResult, rows: Dataset, *, tighter: bool = False) -> float:
    """Return the nats that L-BFGS still gains from the fitted model."""
    again = fitted.model.with_candidates(fitted.posterior.Z)
    objective = again.chunked_bound(rows)
    before = objective().item()
    return (
        maximise_elbo(again, rows.X, objective=objective, stop=Stop(1e-4, 20, 200)).value - before
    )


def test_fast_result_is_a_local_optimum() -> None:
    assert left_to_gain(on_hills()[0], data()) < 1e-4 * data().N


def test_fast_selection_matches_model() -> None:
    for fitted in all_fits():
        selection, M = fitted.selection, fitted.posterior.M
        assert selection.M == M == fitted.model.K
        (candidates,) = fitted.candidates
        assert len(candidates) == selection.K == len(selection.inclusion)
        assert torch.equal(candidates[selection.mask], fitted.posterior.Z)
        assert torch.equal(fitted.model.candidates, fitted.posterior.Z)
        assert ((selection.inclusion >= 0) & (selection.inclusion <= 1)).all()
        assert selection.alpha is not None
        assert selection.alpha > 0
        assert torch.isfinite(selection.trace).all()


def test_fast_inclusion_is_higher_for_selected_points() -> None:
    fitted, _ = on_hills()
    inclusion, mask = fitted.selection.inclusion, fitted.selection.mask
    assert inclusion[mask].mean() > 0.7
    assert inclusion[mask].mean() > inclusion[~mask].mean() + 0.3


def test_fast_frontier_covers_all_sizes() -> None:
    rows, (fitted, _) = data(), on_hills()
    frontier = fitted.selection.frontier
    assert frontier is not None
    assert frontier.N == rows.N
    assert frontier.masks.sum(1).tolist() == list(range(fitted.selection.K + 1))
    pool = fitted.model.with_candidates(fitted.candidates[0])
    for M in (0, 1, fitted.selection.K):
        expected = pool.prune(frontier.masks[M]).bound(rows).item()
        assert frontier.bounds[M].item() == pytest.approx(expected, abs=1e-3)


@pytest.mark.unchecked
@pytest.mark.usefixtures("quickly")
def test_fast_same_seed_same_result_and_input_unchanged() -> None:
    rows = data(every=3)
    gp = model(rows)
    before = {name: p.detach().clone() for name, p in gp.named_parameters()}
    schedule = fast(rounds=1)
    first, second = (fit(gp, rows, schedule=schedule, generator=seeded(3)) for _ in range(2))
    assert first.elbo == second.elbo
    assert torch.equal(first.candidates[0], second.candidates[0])
    assert torch.equal(first.selection.inclusion, second.selection.inclusion)
    for name, parameter in gp.named_parameters():
        assert torch.equal(parameter, before[name]), name


@pytest.mark.parametrize(
    "goal",
    [
        pytest.param(Tolerance(TOLERANCE), id="tolerance"),
        pytest.param(MaxPoints(5), id="capped", marks=pytest.mark.unchecked),
    ],
)
def test_fast_frozen_candidates_stay(goal) -> None:
    rows = data(every=3)
    # Twenty would not be within the tolerance of the exact evidence.
    gp = model(rows, K=33)
    gp.candidates.requires_grad_(False)
    fitted = fit(gp, rows, schedule=fast(goal, rounds=2, iterations=50), generator=seeded())
    given = {tuple(z) for z in gp.candidates.tolist()}
    assert {tuple(z) for z in fitted.candidates[0].tolist()} <= given
    assert {tuple(z) for z in fitted.posterior.Z.tolist()} <= given
    assert 0 < fitted.posterior.M < 33
    assert not fitted.model.candidates.requires_grad


def test_fast_starts_of_frozen_candidates_are_candidates() -> None:
    rows = data(every=3)
    gp = model(rows, K=20)
    gp.candidates.requires_grad_(False)
    steps = FastSteps(gp, rows, rows=4000, context=TrainingContext(seeded()))
    given = {tuple(z) for z in gp.candidates.tolist()}
    for start in steps.starts(5):
        assert {tuple(z) for z in start.candidates.tolist()} <= given


def test_fast_starts_have_at_most_requested_points() -> None:
    rows = data(every=3)
    steps = FastSteps(model(rows), rows, rows=4000, context=TrainingContext(seeded()))
    for M in (3, 20, 40, 70):
        starts = steps.starts(M)
        assert all(start.K <= M for start in starts)
        # With a smooth kernel, few rows have conditional variance given the others.
        assert max(start.K for start in starts) >= min(M, 40)


def test_fast_trainable_candidates_move() -> None:
    rows = data(every=3)
    gp = model(rows, K=20)
    fitted = fit(gp, rows, schedule=fast(rounds=1), generator=seeded())
    given = {tuple(z) for z in gp.candidates.tolist()}
    assert not given & {tuple(z) for z in fitted.posterior.Z.tolist()}


def test_fast_two_outputs_share_points() -> None:
    rows = data(every=3)
    both = Dataset(rows.X, torch.cat([rows.Y, rows.X.cos()], dim=1))
    fitted = fit(model(both), both, schedule=fast(rounds=2), generator=seeded())
    assert fitted.posterior.P == 2
    assert fitted.elbo_gap <= TOLERANCE * both.N
    error = (fitted.posterior.predict_mean(both.X) - both.Y).square().mean(0)
    assert (error < 0.1 * both.Y.var(0)).all()


def test_fast_duplicate_rows() -> None:
    rows = data(every=6)
    twice = Dataset(rows.X.repeat(2, 1), torch.cat([rows.Y, rows.Y + 0.05]))
    fitted = fit(model(twice), twice, schedule=fast(rounds=2), generator=seeded())
    assert 0 < fitted.posterior.M <= rows.N
    assert fitted.elbo_gap <= TOLERANCE * twice.N


@pytest.mark.parametrize("goal", [Tolerance(), FixedAlpha(0.1)], ids=["tolerance", "alpha"])
@pytest.mark.parametrize("N", [1, 3])
def test_fast_few_rows(N: int, goal) -> None:
    rows = Dataset(data().X[:N], data().Y[:N])
    fitted = fit(model(rows), rows, schedule=fast(goal), generator=seeded())
    assert fitted.posterior.M <= N
    assert torch.isfinite(fitted.posterior.predict(data().X).mean).all()
    assert fitted.evidence is not None
    assert fitted.evidence.exact
    assert fitted.elbo <= fitted.evidence.upper + 1e-6


def test_fast_constant_target_needs_no_points() -> None:
    rows = data(every=6)
    zero = Dataset(rows.X, torch.zeros_like(rows.Y))
    fitted = fit(model(zero), zero, schedule=fast(rounds=1), generator=seeded())
    assert fitted.posterior.M == 0
    assert fitted.posterior.predict_mean(rows.X).abs().max() < 1e-6


def test_fast_matern_kernel_meets_tolerance() -> None:
    rows = data(every=3)
    gp = model(rows, ScaleKernel(MaternKernel(nu=2.5)))
    fitted = fit(gp, rows, schedule=fast(rounds=2), generator=seeded())
    assert fitted.posterior.M < 40
    assert fitted.elbo_gap <= TOLERANCE * rows.N
    assert fitted.elbo > fitted.model.dense_bound(rows)().item() - 2 * TOLERANCE * rows.N


def test_fast_reports_phases_in_order() -> None:
    fitted, events = on_hills()
    phases = [p.phase for p in events]
    assert set(phases) == {"initialisation", "selection", "optimisation", SMALLER_MODEL}
    assert phases[0] == "initialisation"
    # Before the first selection only the constant model is optimised.
    first = phases.index("selection")
    assert set(phases[1:first]) <= {"optimisation"}
    assert all(len(p.candidates[0]) == 0 for p in events[1:first])
    assert 1 <= phases.count("selection") <= 3
    assert all(1 <= p.step <= p.steps and p.inclusion is None for p in events)
    for before, after in pairwise(events):
        if before.phase == after.phase == "optimisation" and after.step == before.step + 1:
            assert after.objective >= before.objective
    # The best of several rounds is selected, and models of other sizes are optimised last.
    assert phases[-1] == SMALLER_MODEL
    found = [p for p in events if p.phase != SMALLER_MODEL]
    selected = [p for p in found if torch.equal(p.candidates[0], fitted.posterior.Z)]
    assert selected[-1].objective == pytest.approx(fitted.elbo, abs=0.05)
    assert len(events[-1].candidates[0]) == fitted.sized[-1].posterior.M


def test_fast_callback_exception_ends_fit() -> None:
    def enough(progress: Progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(model(data(every=6)), data(every=6), schedule=fast(), callbacks=enough)


@pytest.mark.parametrize("bad", [{"n_candidates": 0}, {"rounds": 0}])
def test_fast_invalid_settings_raise(bad: dict[str, Any]) -> None:
    with pytest.raises(
        InputError, match=r"`n_candidates`, `rounds` and `iterations` must be at least 1; got"
    ):
        FastSchedule(**bad)


def test_fast_fewer_than_two_starts_raise() -> None:
    with pytest.raises(InputError, match="`max_starts` must be at least 2, or None for all; got 1"):
        FastSchedule(max_starts=1)


def test_fit_fixed_alpha_optimises_points_of_a_pool_that_is_too_small() -> None:
    generator = seeded(1)
    X = torch.randn(200, 5, generator=generator, dtype=torch.float64)
    noise = 0.1 * torch.randn(200, generator=generator, dtype=torch.float64)
    y = torch.sin(2 * X).sum(1) + noise
    rows = Dataset.of(X, (y - y.mean()) / y.std())
    start = model(rows, ScaleKernel(RBFKernel(ard_num_dims=5)))
    schedule = FastSchedule(FixedAlpha(1e-3), n_candidates=30)
    fitted = fit(start, rows, schedule=schedule, generator=seeded())
    gp = fitted.model
    further = maximise_elbo(gp, X, objective=gp.chunked_bound(rows), stop=Stop(0.1, 20, 200))
    # Points at rows with the hyper-parameters of the exact GP are 0.08 nats per observation below.
    assert fitted.elbo > further.value - 0.03 * rows.N
