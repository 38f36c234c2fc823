"""How many steps a fit took."""

from collections.abc import Mapping
from typing import Any, final

from winnowgp.training import OnProgress, Progress, Remembered, decided_by


@final
class CountedSteps:
    """A watcher that counts the steps of some phases and passes all on."""

    def __init__(self, on_progress: OnProgress, phases: tuple[str, ...]) -> None:
        self._on_progress, self._phases = on_progress, phases
        self.count = 0

    def __call__(self, progress: Progress) -> None:
        """One more, perhaps."""
        self.count += progress.phase in self._phases
        self._on_progress(progress)

    def decides(self) -> str:
        """What the next watcher decides by."""
        return decided_by(self._on_progress)

    def state_dict(self) -> dict[str, Any]:
        """The count, and what the next watcher remembers."""
        return {"count": self.count, "watcher": Remembered(self._on_progress).state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Count on from there."""
        self.count = state["count"]
        Remembered(self._on_progress).load_state_dict(state["watcher"])
