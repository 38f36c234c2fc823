"""Something possible where an entry is missing, for likelihoods that must see a number."""

from jaxtyping import Float
from torch import Tensor

from winnowgp.data import Entries


def valid(table: Entries) -> Float[Tensor, "N P"]:
    """The table with missing entries replaced by one that was observed."""
    some = table.Y[table.observed]
    return table.filled(some[0].item() if len(some) else 0.0)
