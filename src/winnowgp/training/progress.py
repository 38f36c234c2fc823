"""What a fit tells whoever is watching."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from jaxtyping import Float
from torch import Tensor


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
