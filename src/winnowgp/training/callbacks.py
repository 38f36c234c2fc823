"""Callbacks and what they are called with."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, final, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

# What a fit tells whoever is watching.


@dataclass(frozen=True, slots=True)
class Progress:
    """One step of one phase."""

    phase: str
    step: int
    """Counted from one."""
    steps: int
    """How many the phase has at the most."""
    objective: float
    """In nats, larger is better; an estimate where subsets are sampled."""
    inclusion: Float[Tensor, " K"] | None
    """λ, in phases that learn it."""
    candidates: Float[Tensor, "K D"]
    """Where the points stand."""
    latents: Float[Tensor, "N Q"] | None = None
    """Where the rows stand, in models that learn it."""


OnProgress: TypeAlias = Callable[[Progress], None]

"""A watcher. It may raise `EndPhase` to end the phase early, anything else to end the fit.

One with a memory may be `Stateful`, to be reminded when a fit goes on from a checkpoint.
"""


class EndPhase(Exception):
    """Raised by a watcher: the phase under way has gone far enough.

    The fit goes on with the next phase from where this one is. A phase of a single step has ended
    already, and takes no notice.
    """


def silent(progress: Progress) -> None:
    """The watcher that looks away."""


# Things with a memory that can be written down.


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


def decided_by(callback: object) -> str:
    """What of a watcher decides the answer, in words; nothing for most."""
    return callback.decides() if isinstance(callback, Deciding) else ""


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

    def __init__(self, callback: object) -> None:
        self._callback = callback

    def state_dict(self) -> dict[str, Any]:
        """What the watcher remembers, and what kind it is."""
        if not isinstance(self._callback, Stateful):
            return {}
        return {type(self._callback).__qualname__: self._callback.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Remind the watcher, if it is of the kind that this was."""
        memory = state.get(type(self._callback).__qualname__)
        if memory is not None and isinstance(self._callback, Stateful):
            self._callback.load_state_dict(memory)


# Several watchers as one.


@final
class CallbackList:
    """Tells each of several watchers, in order; all of them, even if one wants to end the phase.

    >>> told = []
    >>> both = CallbackList(told.append, lambda progress: told.append(progress))
    >>> both("step")
    >>> told
    ['step', 'step']
    """

    def __init__(self, *callbacks: Callable[[Any], None]) -> None:
        self.callbacks = callbacks

    def __call__(self, progress: Any) -> None:
        """Pass a step on, a `Progress` or a `DeepProgress`."""
        enough: EndPhase | None = None
        for callback in self.callbacks:
            try:
                callback(progress)
            except EndPhase as end:
                enough = end
        if enough is not None:
            raise enough

    def decides(self) -> str:
        """What those among them that end phases decide by."""
        return ", ".join(filter(None, map(decided_by, self.callbacks)))

    def state_dict(self) -> dict[str, Any]:
        """What each remembers."""
        return {"watchers": [Remembered(callback).state_dict() for callback in self.callbacks]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Remind each, as far as they are the same kinds in the same order."""
        for callback, memory in zip(self.callbacks, state["watchers"], strict=False):
            Remembered(callback).load_state_dict(memory)
