"""Callbacks: early stopping, notification, saved states, and metrics."""

from typing import Any

import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel

from winnowgp import Dataset, DeepGPRegressor, SparseGP, fit
from winnowgp.data import hills
from winnowgp.errors import InputError
from winnowgp.point_processes import SquaredCardinality
from winnowgp.training import (
    Callback,
    EarlyStopping,
    EndPhase,
    FastSchedule,
    PaperSchedule,
    Progress,
    Tolerance,
)
from winnowgp.training.callbacks import CallbackStates, inclusions, notify, step_metrics


def step(number: int, objective: float, phase: str = "pre-train", **changes: Any) -> Progress:
    settings: dict[str, Any] = {"inclusion": None, "candidates": (torch.zeros(3, 1),), **changes}
    return Progress(phase, number, 100, objective, **settings)


def stopped_at(callback: Callback, objectives: list[float], phase: str = "pre-train") -> int | None:
    for number, value in enumerate(objectives, start=1):
        try:
            callback(step(number, value, phase))
        except EndPhase:
            return number
    return None


@pytest.mark.parametrize(
    ("gain", "ends"),
    # With patience 3, two windows of 3 differ by 3 gains per step.
    [(1.0, None), (0.34, None), (0.33, 6), (0.0, 6), (-5.0, 6)],
)
def test_early_stopping_small_gain_ends_phase(gain: float, ends: int | None) -> None:
    objectives = [gain * number for number in range(20)]
    assert stopped_at(EarlyStopping(3, least_gain=1.0), objectives) == ends


def test_early_stopping_ignores_single_outliers() -> None:
    rising = [float(number) for number in range(10)]
    # Means of two windows of 4: equal to within 0.5 once seven of eight are level.
    level = rising + 10 * [9.0]
    sums = [(sum(level[i - 8 : i - 4]), sum(level[i - 4 : i])) for i in range(8, 21)]
    expected = next(8 + i for i, (a, b) in enumerate(sums) if b - a < 4 * 0.5)
    assert stopped_at(EarlyStopping(4, 0.5), level) == expected
    lucky = list(rising)
    lucky[2] = 5.0
    assert stopped_at(EarlyStopping(4, 0.5), lucky) is None


def test_early_stopping_judges_each_phase_alone() -> None:
    callback = EarlyStopping(2, 1.0)
    assert stopped_at(callback, [0.0, 0.0, 0.0], "a") is None
    assert stopped_at(callback, [0.0, 0.0, 0.0], "b") is None
    # The same phase again begins with its first step.
    assert stopped_at(callback, [0.0, 0.0, 0.0], "b") is None
    assert stopped_at(callback, [0.0, 0.0, 0.0, 0.0], "b") == 4
    picky = EarlyStopping(2, 1.0, phases={"a"})
    assert stopped_at(picky, 9 * [0.0], "b") is None
    assert stopped_at(picky, 9 * [0.0], "a") == 4


def test_early_stopping_state_is_restored() -> None:
    first, second = EarlyStopping(2, 1.0), EarlyStopping(2, 1.0)
    assert stopped_at(first, [0.0, 0.0, 0.0]) is None
    second.load_state_dict(first.state_dict())
    with pytest.raises(EndPhase):
        second(step(4, 0.0))


@pytest.mark.parametrize(("patience", "gain"), [(0, 1.0), (3, -1.0), (3, float("nan"))])
def test_early_stopping_invalid_patience_raises(patience: int, gain: float) -> None:
    with pytest.raises(InputError, match="`patience` must be at least 1"):
        EarlyStopping(patience, gain)


def end(phase: str, at: int, events: list[tuple[str, int]]) -> Callback:
    def watch(progress: Progress) -> None:
        events.append((progress.phase, progress.step))
        if progress.phase == phase and progress.step >= at:
            raise EndPhase

    return watch


def data() -> Dataset:
    rows = hills()
    return Dataset(rows.X[::4], rows.Y[::4])


@pytest.mark.parametrize("phase", ["pre-train", "inclusion", "post-train"])
def test_end_phase_adam_keeps_parameters_so_far(phase: str) -> None:
    """The step at which a phase ends is not taken: two steps are reported, one is taken."""
    model = SparseGP(ScaleKernel(RBFKernel()), data().X[:8], noise=0.1)
    prior = SquaredCardinality(8, 0.1)
    steps: dict[str, Any] = {"pre": 4, "joint": 4, "post": 4}
    events: list[tuple[str, int]] = []
    found = fit(
        model, data(), schedule=PaperSchedule(prior, **steps), callbacks=end(phase, 2, events)
    )
    phases = ["pre-train", "inclusion", "post-train"]
    assert events == [(p, n) for p in phases for n in range(1, 3 if p == phase else 5)]
    if phase != "inclusion":
        # (After inclusion the generator has drawn one subset more.)
        short = {**steps, phase.removesuffix("-train"): 1}
        expected = fit(model, data(), schedule=PaperSchedule(prior, **short))
        for a, b in zip(found.model.parameters(), expected.model.parameters(), strict=True):
            assert torch.equal(a, b)


@pytest.mark.usefixtures("one_size")
@pytest.mark.parametrize("phase", ["initialisation", "selection", "optimisation"])
def test_end_phase_fast_schedule_continues(phase: str) -> None:
    rows = data()
    events: list[tuple[str, int]] = []
    found = fit(
        SparseGP(ScaleKernel(RBFKernel()), rows.X[:0]),
        rows,
        schedule=FastSchedule(Tolerance(0.1), n_candidates=16),
        callbacks=end(phase, 1, events),
    )
    assert found.posterior.M > 0
    assert {p for p, _ in events} == {"initialisation", "selection", "optimisation"}
    assert (max(n for p, n in events if p == "optimisation") == 1) is (phase == "optimisation")


def test_notify_calls_all_callbacks_before_end_phase() -> None:
    first: list[tuple[str, int]] = []
    last: list[Progress] = []
    with pytest.raises(EndPhase):
        notify([end("pre-train", 1, first), last.append], step(1, 0.0))
    assert len(first) == len(last) == 1


def test_callback_states_restore_matching_callbacks() -> None:
    callbacks = [EarlyStopping(2, 1.0), print, EarlyStopping(3, 1.0)]
    for number in (1, 2, 3):
        callbacks[2](step(number, float(number)))
    a = CallbackStates(callbacks)
    b = CallbackStates([EarlyStopping(2, 1.0), print, EarlyStopping(3, 1.0)])
    b.load_state_dict(a.state_dict())
    assert b.state_dict() == a.state_dict()
    kind, state = b.state_dict()["callbacks"][2]
    assert (kind, state["objectives"]) == ("EarlyStopping", [1.0, 2.0, 3.0])
    # Callbacks of other classes are not changed.
    other = EarlyStopping()
    CallbackStates([print, print, print, other]).load_state_dict(a.state_dict())
    CallbackStates([print, other]).load_state_dict(a.state_dict())
    assert other.state_dict() == EarlyStopping().state_dict()


def test_step_metrics_of_one_candidate_set() -> None:
    inclusion = torch.tensor([0.25, 0.5, 1.0])
    events = step(1, -3.0, "inclusion", inclusion=(inclusion,))
    assert step_metrics(events) == {
        "objective/inclusion": -3.0,
        "points": 3.0,
        "expected points": 1.75,
    }
    assert step_metrics(step(1, float("-inf"), "initialisation")) == {"points": 3.0}
    assert list(inclusions(events)) == ["inclusion"]
    assert inclusions(step(1, 0.0)) == {}


def test_step_metrics_of_deep_model() -> None:
    events: list[Progress] = []
    y = data().Y[:, 0].numpy()
    DeepGPRegressor(
        2,
        schedule="paper",
        alpha=0.5,
        epochs=(0, 1, 1, 1),
        n_candidates=6,
        hidden_mean="zero",
        random_state=0,
        callbacks=events.append,
    ).fit(data().X.numpy(), y)
    pre, inclusion, _ = (step_metrics(each) for each in events)
    assert pre == {
        "objective/pre-train": events[0].objective,
        "points/layer 1": 6.0,
        "points/layer 2": 6.0,
    }
    assert inclusion["expected points/layer 2"] == pytest.approx(3.0)
    assert list(inclusions(events[1])) == ["inclusion/layer 1", "inclusion/layer 2"]
