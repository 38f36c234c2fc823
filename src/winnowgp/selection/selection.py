"""What a selector found."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from winnowgp.selection.frontier import Frontier
from winnowgp.typing import Mask


@dataclass(frozen=True, slots=True)
class Selection:
    """Which of the K candidates to keep, and how sure the process is of each."""

    inclusion: Float[Tensor, " K"]
    """λ, the probability that q(Z) gives each candidate."""
    mask: Mask
    """The chosen set."""
    trace: Float[Tensor, " T"]
    """The objective E_q[L(Z)] − KL[q ‖ p] after each step, in nats; an estimate where sampled."""

    alpha: float | None
    """Strength of the prior exp(−α M²) behind the choice; None under another prior."""
    frontier: Frontier | None
    """What other numbers of points would have bought, if that is known."""

    @property
    def K(self) -> int:
        """Number of candidates chosen from."""
        return self.mask.shape[0]

    @property
    def M(self) -> int:
        """Number of points chosen."""
        return int(self.mask.sum())
