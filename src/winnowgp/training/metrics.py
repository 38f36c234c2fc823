"""Metrics of a step, and early stopping."""

from collections.abc import Collection, Mapping
from math import isfinite
from typing import Any, final

from torch import Tensor

from winnowgp.errors import InputError
from winnowgp.training.callbacks import EndPhase, Progress
from winnowgp.training.schedules import DeepProgress

# The numbers that a step can be plotted by.


def step_metrics(progress: Progress | DeepProgress) -> dict[str, float]:
    """The objective, the number of points, and the expected number where that is learnt.

    Of a deep model, points of each layer. Numbers that are not finite are left out.
    """
    found = {f"objective/{progress.phase}": progress.objective}
    if isinstance(progress, DeepProgress):
        sizes = enumerate(progress.model.sizes, start=1)
        found |= {f"points/layer {number}": float(size) for number, size in sizes}
    else:
        found["points"] = float(len(progress.candidates))
    for name, inclusion in inclusions(progress).items():
        found[name.replace("inclusion", "expected points")] = inclusion.sum().item()
    return {name: value for name, value in found.items() if isfinite(value)}


def inclusions(progress: Progress | DeepProgress) -> dict[str, Tensor]:
    """λ, of each layer for a deep model; empty in phases that do not learn it."""
    found = progress.inclusion
    if found is None:
        return {}
    if isinstance(found, Tensor):
        return {"inclusion": found}
    return {f"inclusion/layer {number}": each for number, each in enumerate(found, start=1)}


# A watcher that ends phases which gain no more.


@final
class EarlyStopping:
    """Ends a phase, not the fit, once its objective has stopped rising.

    That is when the mean objective of the last `patience` steps is less than `least_gain` nats
    above that of the `patience` steps before them. Means, because most objectives are estimates:
    the best step so far is the luckiest one. What the phase reached is kept, the next one begins.

    >>> from winnowgp import SparseGPRegressor
    >>> model = SparseGPRegressor(
    ...     schedule="paper",
    ...     alpha=0.1,
    ...     epochs=(200, 5, 5),
    ...     on_progress=EarlyStopping(patience=5, least_gain=2.0),
    ... ).fit([[0.0], [1.0], [2.0], [3.0]], [0.0, 1.0, 4.0, 9.0])

    Args:
        patience: steps that are compared with as many before them.
        least_gain: nats, of all rows together.
        phases: which to watch, such as {"pre-train", "post-train"}; all if None.
    """

    def __init__(
        self,
        patience: int = 50,
        least_gain: float = 0.1,
        *,
        phases: Collection[str] | None = None,
    ) -> None:
        if patience < 1 or not least_gain >= 0:
            raise InputError(
                "`patience` must be at least 1 step and `least_gain` zero or more nats; "
                f"got {patience} and {least_gain}."
            )
        self.patience, self.least_gain, self.phases = patience, least_gain, phases
        self._phase, self._seen = "", list[float]()

    def __call__(self, progress: Progress | DeepProgress) -> None:
        """Raise `EndPhase` if this is enough."""
        if progress.phase != self._phase or progress.step == 1:
            self._phase, self._seen = progress.phase, []
        if self.phases is not None and progress.phase not in self.phases:
            return
        self._seen = [*self._seen, progress.objective][-2 * self.patience :]
        if len(self._seen) < 2 * self.patience:
            return
        before, now = sum(self._seen[: self.patience]), sum(self._seen[self.patience :])
        if now - before < self.patience * self.least_gain:
            raise EndPhase

    def decides(self) -> str:
        """Patience, gain and phases."""
        phases = None if self.phases is None else sorted(self.phases)
        return f"EarlyStopping({self.patience}, {self.least_gain}, phases={phases})"

    def state_dict(self) -> dict[str, Any]:
        """The phase, and the steps that are still compared."""
        return {"phase": self._phase, "seen": self._seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Compare with those."""
        self._phase, self._seen = state["phase"], list(state["seen"])
