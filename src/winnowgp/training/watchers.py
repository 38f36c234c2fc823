"""Several watchers as one."""

from collections.abc import Callable, Mapping
from typing import Any, final

from winnowgp.training.progress import EndPhase
from winnowgp.training.stateful import Remembered, decided_by


@final
class Watchers:
    """Tells each of several watchers, in order; all of them, even if one wants to end the phase.

    >>> told = []
    >>> both = Watchers(told.append, lambda progress: told.append(progress))
    >>> both("step")
    >>> told
    ['step', 'step']
    """

    def __init__(self, *watchers: Callable[[Any], None]) -> None:
        self.watchers = watchers

    def __call__(self, progress: Any) -> None:
        """Pass a step on, a `Progress` or a `DeepProgress`."""
        enough: EndPhase | None = None
        for watcher in self.watchers:
            try:
                watcher(progress)
            except EndPhase as end:
                enough = end
        if enough is not None:
            raise enough

    def decides(self) -> str:
        """What those among them that end phases decide by."""
        return ", ".join(filter(None, map(decided_by, self.watchers)))

    def state_dict(self) -> dict[str, Any]:
        """What each remembers."""
        return {"watchers": [Remembered(watcher).state_dict() for watcher in self.watchers]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Remind each, as far as they are the same kinds in the same order."""
        for watcher, memory in zip(self.watchers, state["watchers"], strict=False):
            Remembered(watcher).load_state_dict(memory)
