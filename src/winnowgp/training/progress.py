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
"""A watcher. It may raise to end the fit early."""


def silent(progress: Progress) -> None:
    """The watcher that looks away."""
