"""Both optimisers, resumed from every state that they write."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from winnowgp.io.registry import State, deserialise, serialise
from winnowgp.training import EndPhase
from winnowgp.training.adam import Adam
from winnowgp.training.checkpoint import NO_CHECKPOINT_LOG, CheckpointLog
from winnowgp.training.lbfgs import Stop, maximise


def from_every_state(run: Callable[[CheckpointLog], Any]) -> int:
    """Run without interruption, then from each state written; return the number of states."""
    expected = run(NO_CHECKPOINT_LOG)
    states: list[State] = []

    def write(state: State) -> None:
        states.append(deserialise(serialise("State", state)))

    assert run(CheckpointLog(write)) == expected
    for state in states:
        assert run(CheckpointLog(lambda _: None, entries=state["entries"])) == expected
    return len(states)


class Banana:
    """−(1 − x)² − 10 (y − x²)², with an error of the gradient that depends on the last call.

    A resumed optimisation that forgets the last call ends elsewhere.
    """

    def __init__(self, fails_beyond: float) -> None:
        self._last, self._fails_beyond = 0.0, fails_beyond

    def __call__(self, at: Tensor) -> tuple[float, Tensor] | None:
        x, y = at.tolist()
        if abs(y) > self._fails_beyond:
            return None
        value = -((1 - x) ** 2) - 10 * (y - x * x) ** 2
        slope = [2 * (1 - x) + 40 * x * (y - x * x) + 1e-3 * self._last, -20 * (y - x * x)]
        self._last = x
        return value, torch.tensor(slope, dtype=at.dtype)

    def state_dict(self) -> dict[str, Any]:
        return {"last": self._last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._last = state["last"]


@pytest.mark.parametrize(
    "stop",
    [
        Stop(gain=1e-9, window=3, iterations=100),
        Stop(gain=1.0, window=2, iterations=100),
        Stop(gain=0.5, window=5, iterations=100),
        Stop(gain=1e-9, window=3, iterations=7),
        Stop(gain=1e-9, window=3, iterations=0),
    ],
    ids=["summit", "level", "soon", "iterations", "none"],
)
@pytest.mark.parametrize("fails_beyond", [1e9, 1.05])
def test_lbfgs_resumes_from_every_state(stop: Stop, fails_beyond: float) -> None:
    def run(checkpoint_log: CheckpointLog) -> Any:
        banana, told = Banana(fails_beyond), list[int]()
        start = torch.tensor([-1.2, 1.0], dtype=torch.float64)
        found = maximise(
            banana,
            start,
            stop=stop,
            memory=4,
            on_step=lambda step, _: told.append(step),
            checkpoint_log=checkpoint_log,
            scratch={"objective": banana},
        )
        # Every step is reported once, in the run that takes it.
        assert told == list(range(found.iterations - len(told) + 1, found.iterations + 1))
        return found.x.tolist(), found.value, found.iterations, found.rejected

    # One state per step and one at the end, unless the last step ends the optimisation.
    assert from_every_state(run) - run(NO_CHECKPOINT_LOG)[2] in (0, 1)


def test_lbfgs_resumes_around_a_failed_start() -> None:
    from winnowgp.errors import TrainingError

    def run(checkpoint_log: CheckpointLog) -> Any:
        start = torch.tensor([-1.2, 1.0], dtype=torch.float64)
        found = []
        for fails_beyond in (9.0, 0.5, 9.0):
            banana = Banana(fails_beyond)
            try:
                found.append(
                    maximise(
                        banana,
                        start,
                        stop=Stop(1e-2, 3, 20),
                        checkpoint_log=checkpoint_log,
                        scratch={"objective": banana},
                    ).x
                )
                start = found[-1] + 0.3
            except TrainingError:
                found.append(start)
        return [x.tolist() for x in found]

    assert from_every_state(run) > 5


class Noise:
    """Random numbers of an objective, one per call."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(3)

    def next(self) -> float:
        return float(torch.randn((), generator=self.generator))

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["state"])


@pytest.mark.parametrize("options", [{}, {"cooling": 0.1}, {"max_norm_ratio": 1.5}])
@pytest.mark.parametrize("ends_at", [None, 1, 6])
def test_adam_resumes_from_every_state(options: dict[str, Any], ends_at: int | None) -> None:
    """Steps beyond x = 0.6 fail, and are reverted."""

    def run(checkpoint_log: CheckpointLog) -> Any:
        x = torch.zeros(2, dtype=torch.float64, requires_grad=True)
        noise = Noise()

        def objective() -> Tensor:
            factor = 1 + noise.next()
            return x.sum() * (factor if bool((x < 0.6).all()) else float("nan"))

        def on_step(step: int, value: float) -> None:
            if step == ends_at:
                raise EndPhase

        groups = [([x], 0.2)]
        Adam(12, **options).maximise(
            objective,
            groups,
            scale=1.0,
            on_step=on_step,
            checkpoint_log=checkpoint_log,
            memory={"noise": noise},
        )
        return x.tolist(), noise.next()

    # The step at which the phase ends is not taken.
    assert from_every_state(run) == (13 if ends_at is None else ends_at)


def test_once_returns_the_first_value() -> None:
    chances = iter([3, 4, 5, 6])

    def run(checkpoint_log: CheckpointLog) -> Any:
        return checkpoint_log.once(lambda: next(chances)), checkpoint_log.once(
            lambda: next(chances)
        )

    states: list[State] = []
    assert run(CheckpointLog(states.append)) == (3, 4)
    assert run(CheckpointLog(states.append, entries=states[-1]["entries"])) == (3, 4)
    assert run(NO_CHECKPOINT_LOG) == (5, 6)


def with_memory_of_falls(
    steps: int, objective: Callable[[Tensor, Noise], Tensor]
) -> Callable[[CheckpointLog], Any]:
    """Return a run of Adam from x = 0 that rolls back after divergence."""

    def run(checkpoint_log: CheckpointLog) -> Any:
        x, noise = torch.zeros((), dtype=torch.float64, requires_grad=True), Noise()
        Adam(steps, rollback_threshold=1.0).maximise(
            lambda: objective(x, noise),
            [([x], 0.05)],
            scale=1.0,
            on_step=lambda *_: None,
            checkpoint_log=checkpoint_log,
            memory={"noise": noise},
        )
        return x.item(), noise.next()

    return run


@pytest.mark.parametrize("steps", [12, 13, 40])
def test_adam_resumes_during_divergence(steps: int) -> None:
    """After twelve or thirteen steps it ends during divergence."""
    run = with_memory_of_falls(
        steps, lambda x, noise: x * (1 + 0.1 * noise.next()) - 100 * (x > 0.52)
    )
    assert from_every_state(run) == steps + 1
    assert run(NO_CHECKPOINT_LOG)[0] < 0.52


def test_adam_resumes_in_large_noise() -> None:
    """A run that lost its noise estimate would see divergence where there is none."""
    run = with_memory_of_falls(60, lambda x, noise: x + 4 * noise.next())
    assert from_every_state(run) == 61


def test_passed_ignores_stages_that_could_not_begin() -> None:
    """A step is passed as soon as a later entry was written."""
    entries = {1: {"ended": True, "value": 0}, 3: {"ended": True, "value": 0}}
    checkpoint_log = CheckpointLog(lambda _: None, entries=entries)
    passed = []
    for _ in range(3):
        passed.append(checkpoint_log.passed)
        checkpoint_log.next_entry()
    assert [*passed, checkpoint_log.passed] == [True, True, True, False]


def test_stage_copies_states_with_named_tuples() -> None:
    """The copy does not change with its source."""

    class Pair(NamedTuple):
        best: Tensor
        seen: list[int]

    class Memory:
        def __init__(self) -> None:
            self.pair = Pair(torch.zeros(2), [1])

        def state_dict(self) -> dict[str, Any]:
            return {"pair": self.pair}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.pair = Pair(*state["pair"])

    states: list[State] = []
    memory = Memory()
    stage = CheckpointLog(states.append).stage({"memory": memory})
    stage.save()
    memory.pair.best.add_(1)
    memory.pair.seen.append(2)
    (best, seen) = states[0]["entries"][1]["memory"]["memory"]["pair"]
    assert (best.tolist(), seen) == ([0.0, 0.0], [1])
