"""Things with a memory that can be written down."""

from collections.abc import Mapping
from typing import Any, Protocol, final, runtime_checkable

import torch


@runtime_checkable
class Stateful(Protocol):
    """What PyTorch's modules and optimisers have: a state that can be taken and given back.

    A watcher or an objective with a memory that has these two methods is brought back to where it
    was when a fit goes on from a checkpoint. A state holds numbers, strings, tensors, and lists,
    tuples and dictionaries of these.
    """

    def state_dict(self) -> Mapping[str, Any]:
        """All that it remembers."""
        ...

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Remember that instead."""
        ...


@runtime_checkable
class Deciding(Protocol):
    """A watcher that ends phases: what it decides by is part of what is asked for."""

    def decides(self) -> str:
        """Its settings in words; nothing if it only looks on."""
        ...


def decided_by(watcher: object) -> str:
    """What of a watcher decides the answer, in words; nothing for most."""
    return watcher.decides() if isinstance(watcher, Deciding) else ""


@final
class Randomness:
    """A generator, seen as something stateful."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def state_dict(self) -> dict[str, Any]:
        """Where its stream of numbers stands."""
        return {"state": self._generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Stand there."""
        self._generator.set_state(state["state"])


@final
class Remembered:
    """A watcher of any kind, seen as something stateful.

    Whoever watches a fit go on need not be who watched it begin: only a watcher of the same kind is
    given the memory.
    """

    def __init__(self, watcher: object) -> None:
        self._watcher = watcher

    def state_dict(self) -> dict[str, Any]:
        """What the watcher remembers, and what kind it is."""
        if not isinstance(self._watcher, Stateful):
            return {}
        return {type(self._watcher).__qualname__: self._watcher.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Remind the watcher, if it is of the kind that this was."""
        memory = state.get(type(self._watcher).__qualname__)
        if memory is not None and isinstance(self._watcher, Stateful):
            self._watcher.load_state_dict(memory)
