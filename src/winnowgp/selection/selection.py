"""What a selector found."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

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

    @property
    def K(self) -> int:
        """Number of candidates chosen from."""
        return self.mask.shape[0]

    @property
    def M(self) -> int:
        """Number of points chosen."""
        return int(self.mask.sum())
