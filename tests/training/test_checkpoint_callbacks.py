"""Callbacks of interrupted fits: saved and restored states."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.stopped_fits import Stopped, fitted, same, stop_at
from winnowgp import Checkpoint
from winnowgp.errors import CheckpointError, NotSaveableError
from winnowgp.training import EndPhase, Progress


class Counter:
    """A callback with state."""

    def __init__(self) -> None:
        self.steps = 0

    def __call__(self, progress: Progress) -> None:
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


def test_callback_state_numpy_scalars_are_restored(tmp_path: Path) -> None:
    class Best(Counter):
        best, lucky = np.float64(-np.inf), np.bool_(False)

        def __call__(self, progress: Progress) -> None:
            super().__call__(progress)
            self.best = max(self.best, np.float64(progress.objective))
            stop_at(4)(progress)

        def state_dict(self) -> dict[str, Any]:
            return {"best": self.best, "lucky": self.lucky, "steps": np.int64(self.steps)}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.best, self.steps = state["best"], state["steps"]

    values: list[float] = []
    fitted(None, callbacks=lambda p: values.append(p.objective))
    with pytest.raises(Stopped):
        fitted(Checkpoint(tmp_path, 0), callbacks=Best())
    callback = Best()
    # It stops once more at the step that was not taken.
    with pytest.raises(Stopped):
        fitted(Checkpoint(tmp_path, 0), callbacks=callback)
    assert (callback.steps, callback.best) == (7, max(values[:7]))


def test_callback_state_unsaveable_raises_before_any_step(
    tmp_path: Path,
) -> None:
    class Album(Counter):
        def state_dict(self) -> dict[str, Any]:
            return {"pictures": [object()]}

    callback = Album()
    with pytest.raises(NotSaveableError, match=r"`callbacks\.0\.1\.pictures\.0` must .*got object"):
        fitted(Checkpoint(tmp_path), callbacks=callback)
    assert callback.steps == 0
    assert list(tmp_path.iterdir()) == []


def test_callback_decides_is_part_of_the_fingerprint(
    tmp_path: Path,
) -> None:
    """A callback that raises `EndPhase` ends its phase, as documented."""

    class Ends:
        def __init__(self, at: int) -> None:
            self.at = at

        def __call__(self, progress: Progress) -> None:
            stop_at(5)(progress)
            if progress.phase == "post-train" and progress.step == self.at:
                raise EndPhase

    class Says(Ends):
        def decides(self) -> str:
            return f"post-train ends at {self.at}"

    for kind, folder in ((Says, tmp_path / "says"), (Ends, tmp_path / "silent")):
        with pytest.raises(Stopped):
            fitted(Checkpoint(folder, 0), callbacks=kind(2))
    with pytest.raises(CheckpointError, match="ends at 2' and is 'post-train ends at 3'"):
        fitted(Checkpoint(tmp_path / "says", 0), callbacks=Says(3))
    gone_on = fitted(Checkpoint(tmp_path / "silent", 0), callbacks=end_at(3))
    assert same(gone_on, fitted(None, callbacks=end_at(3)))


def end_at(step: int) -> Callable[[Progress], None]:
    def watch(progress: Progress) -> None:
        if (progress.phase, progress.step) == ("post-train", step):
            raise EndPhase

    return watch


def test_callback_with_state_is_restored(tmp_path: Path) -> None:
    class Impatient(Counter):
        def __call__(self, progress: Progress) -> None:
            super().__call__(progress)
            stop_at(4)(progress)

    Impatient.__qualname__ = Counter.__qualname__
    with pytest.raises(Stopped):
        fitted(Checkpoint(tmp_path, 0), callbacks=Impatient())
    counter = Counter()
    fitted(Checkpoint(tmp_path, 0), callbacks=counter)
    assert counter.steps == 12
    other: list[Progress] = []
    fitted(Checkpoint(tmp_path, 0), callbacks=other.append)
    assert other == []
