"""Any price list: what a subset of each size costs, as a table."""

from dataclasses import dataclass, field
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from winnowgp.errors import InputError
from winnowgp.point_processes.bernoulli import Bernoulli
from winnowgp.point_processes.cardinality import CardinalityPrior
from winnowgp.point_processes.count import count_distribution
from winnowgp.typing import Scalar, SizeTable


@final
@dataclass(frozen=True, eq=False)
class Budget(CardinalityPrior):
    """p(Z) = C · exp(table[|Z|]) for a table of K + 1 log weights.

    −∞ forbids a size: a table that is 0 up to m and −∞ beyond is a hard budget of m points. Under
    a hard budget KL[q ‖ p] is infinite for every q that can exceed it.

    >>> Budget(torch.tensor([0.0, -1.0, -4.0])).K
    2
    """

    table: SizeTable
    K: int = field(init=False)

    def __post_init__(self) -> None:
        bad = torch.isnan(self.table) | (self.table == float("inf"))
        if self.table.numel() == 0 or bad.any() or torch.isinf(self.table).all():
            raise InputError(
                "`table` must hold K + 1 log weights, each finite or -inf and at least one finite; "
                f"got {self.table.tolist()}."
            )
        object.__setattr__(self, "K", self.table.shape[0] - 1)

    def log_weights(self, like: Tensor) -> SizeTable:
        return self.table.to(like)

    def expected_log_weight(self, q: Bernoulli) -> Scalar:
        """Σ_m P(|Z| = m) table[m] through the exact distribution of the count, O(K²)."""
        probs, table = q.count_probs(), self.log_weights(q.logits)
        # 0 · (−∞) counts as 0: a size that cannot occur costs nothing, and has no gradient.
        return (probs * torch.where(probs > 0, table, 0.0)).sum()

    def expected_slope(self, q: Bernoulli) -> Float[Tensor, " K"]:
        """The derivative of the distribution of the count, against the table, O(K²)."""
        with torch.enable_grad():
            off, on = (torch.sigmoid(s * q.logits.detach()).requires_grad_(True) for s in (-1, 1))
            probs = count_distribution(off, on)
            # A size that cannot occur even with k switched is not paid for; −∞ · 0 would be NaN.
            forbidden = torch.finfo(q.logits.dtype).min / (4 * (self.K + 1))
            table = self.log_weights(q.logits).clamp_min(forbidden)
            d_off, d_on = torch.autograd.grad(probs @ table, (off, on))
        return d_on - d_off
