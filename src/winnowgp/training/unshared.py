"""What is said where several processes do the same work."""

import warnings

from winnowgp.data import Ranks
from winnowgp.errors import UnsharedWarning


def warn_unshared(ranks: Ranks, why: str) -> None:
    """Say, in the first of several processes, that each does all the work of a fit.

    Args:
        why: and what to do, a clause.
    """
    if ranks.of > 1 and ranks.first:
        warnings.warn(
            f"each of {ranks.of} processes does all the work of this fit by itself: {why}.",
            UnsharedWarning,
            stacklevel=3,
        )
