"""A fit remembered as a short film, whatever its length."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray

from winnowgp.data import Standardiser
from winnowgp.report.findings import Moment
from winnowgp.training import OnProgress, Progress, Remembered, decided_by

MOST_MOMENTS = 60


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    """One step."""

    number: int
    phase: str
    objective: float
    points: NDArray[np.float64]
    begins: bool
    """Whether it is the first of its phase."""

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {**asdict(self), "points": torch.from_numpy(self.points)}

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> "_Kept":
        """From a checkpoint."""
        return cls(**{**state, "points": state["points"].numpy()})


@final
class Film:
    """A watcher that keeps about `MOST_MOMENTS` moments and passes all on.

    The first step of each phase is always kept: there the number of points changes.
    """

    def __init__(self, on_progress: OnProgress) -> None:
        self._on_progress = on_progress
        self._kept: list[_Kept] = []
        self._seen, self._stride, self._phase = 0, 1, ""
        self._last: _Kept | None = None

    def __call__(self, progress: Progress) -> None:
        """Remember this step, perhaps."""
        points = progress.candidates.detach().cpu().numpy().copy()
        begins = progress.phase != self._phase
        self._last = _Kept(self._seen, progress.phase, progress.objective, points, begins)
        self._phase = progress.phase
        if begins or self._seen % self._stride == 0:
            self._kept.append(self._last)
        if sum(not kept.begins for kept in self._kept) > MOST_MOMENTS:
            self._stride *= 2
            self._kept = [k for k in self._kept if k.begins or k.number % self._stride == 0]
        self._seen += 1
        self._on_progress(progress)

    def decides(self) -> str:
        """What the next watcher decides by."""
        return decided_by(self._on_progress)

    def state_dict(self) -> dict[str, Any]:
        """All that was kept, and what the next watcher remembers."""
        return {
            "kept": [kept.state_dict() for kept in self._kept],
            "last": None if self._last is None else self._last.state_dict(),
            "place": (self._seen, self._stride, self._phase),
            "watcher": Remembered(self._on_progress).state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another film stood."""
        self._kept = [_Kept.of(kept) for kept in state["kept"]]
        self._last = None if state["last"] is None else _Kept.of(state["last"])
        if self._last is not None and self._kept and self._kept[-1].number == self._last.number:
            self._last = self._kept[-1]
        self._seen, self._stride, self._phase = state["place"]
        Remembered(self._on_progress).load_state_dict(state["watcher"])

    def moments(self, units: Standardiser, features: list[int]) -> list[Moment]:
        """What was kept, and the last step, seen along one or two features in the user's units."""
        kept = list(self._kept)
        if self._last is not None and self._last not in kept[-1:]:
            kept.append(self._last)
        shift, scale = units.shift.numpy(), units.scale.numpy()
        return [
            {
                "phase": moment.phase,
                "step": moment.number + 1,
                "objective": (
                    float(f"{moment.objective:.8g}") if isfinite(moment.objective) else None
                ),
                "x": _short(moment.points, shift, scale, features[0]),
                "y": _short(moment.points, shift, scale, features[1]) if features[1:] else [],
            }
            for moment in kept
        ]


def _short(
    points: NDArray[np.float64],
    shift: NDArray[np.float64],
    scale: NDArray[np.float64],
    feature: int,
) -> list[float]:
    """Coordinates with five digits: a film is looked at, not computed with."""
    values = points[:, feature] * scale[feature] + shift[feature]
    return [float(f"{value:.5g}") for value in values]
