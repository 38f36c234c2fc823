"""The training history of a table model: where inducing points were during the fit."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray

from winnowgp.data import Standardiser
from winnowgp.data.encoding import TableEncoder
from winnowgp.report.summary import Moment, Training
from winnowgp.training import Progress
from winnowgp.training.callbacks import SMALLER_MODEL

MOST_SNAPSHOTS = 60


@final
class TrainingHistory:
    """A callback that records about `MOST_SNAPSHOTS` steps of a fit, whatever its length.

    The first step of each phase is always recorded, because the number of points changes there.
    """

    def __init__(self) -> None:
        self._snapshots: list[_Snapshot] = []
        self._seen, self._stride, self._phase = 0, 1, ""
        self._last: _Snapshot | None = None

    def __call__(self, progress: Progress) -> None:
        """Record the step if it is due; those of smaller models are left out."""
        if progress.phase == SMALLER_MODEL:
            return
        points = progress.candidates[0].detach().cpu().numpy().copy()
        first = progress.phase != self._phase
        self._last = _Snapshot(self._seen, progress.phase, progress.objective, points, first)
        self._phase = progress.phase
        if first or self._seen % self._stride == 0:
            self._snapshots.append(self._last)
        if sum(not snapshot.begins for snapshot in self._snapshots) > MOST_SNAPSHOTS:
            self._stride *= 2
            self._snapshots = [
                each for each in self._snapshots if each.begins or each.number % self._stride == 0
            ]
        self._seen += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the recorded steps, for a checkpoint."""
        return {
            "kept": [snapshot.state_dict() for snapshot in self._snapshots],
            "last": None if self._last is None else self._last.state_dict(),
            "place": (self._seen, self._stride, self._phase),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the recorded steps from a checkpoint."""
        self._snapshots = [_Snapshot.of(snapshot) for snapshot in state["kept"]]
        self._last = None if state["last"] is None else _Snapshot.of(state["last"])
        last = self._snapshots[-1:]
        if self._last is not None and last and last[0].number == self._last.number:
            self._last = last[0]
        self._seen, self._stride, self._phase = state["place"]

    def moments(self, x_scaler: Standardiser, features: list[int]) -> list[Moment]:
        """Return the recorded steps and the last one, with points along one or two features.

        Args:
            x_scaler: scaler of the inputs; locations are in the user's units.
        """
        snapshots = list(self._snapshots)
        if self._last is not None and self._last not in snapshots[-1:]:
            snapshots.append(self._last)
        shift, scale = x_scaler.shift.numpy(), x_scaler.scale.numpy()
        return [
            {
                "phase": each.phase,
                "step": each.number + 1,
                "objective": float(f"{each.objective:.8g}") if isfinite(each.objective) else None,
                "x": _short(each.points, shift, scale, features[0]),
                "y": _short(each.points, shift, scale, features[1]) if features[1:] else [],
            }
            for each in snapshots
        ]


def training_summary(
    history: TrainingHistory,
    estimator: Any,
    encoder: TableEncoder,
    relevant: dict[str, float] | None,
) -> Training:
    """Return the training history along the two most relevant features."""
    owners = [column.name for column in encoder.columns for _ in column.features]
    weights = [0.0 if relevant is None else relevant[name] for name in owners]
    best: list[int] = []
    for feature in sorted(range(len(owners)), key=lambda i: -weights[i]):
        if owners[feature] not in [owners[b] for b in best]:
            best.append(feature)
    return {
        "inputs": [encoder.features[i] for i in best[:2]],
        "moments": history.moments(estimator._x_scaler, best[:2]),
    }


@dataclass(frozen=True, slots=True, eq=False)
class _Snapshot:
    """A recorded step of a fit."""

    number: int
    phase: str
    objective: float
    points: NDArray[np.float64]
    begins: bool
    """Whether the step is the first one of its phase."""

    def state_dict(self) -> dict[str, Any]:
        return {**asdict(self), "points": torch.from_numpy(self.points)}

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> "_Snapshot":
        return cls(**{**state, "points": state["points"].numpy()})


def _short(
    points: NDArray[np.float64],
    shift: NDArray[np.float64],
    scale: NDArray[np.float64],
    feature: int,
) -> list[float]:
    """Return coordinates with seven digits, which is enough for a plot of dates and hours."""
    values = points[:, feature] * scale[feature] + shift[feature]
    return [float(f"{value:.7g}") for value in values]
