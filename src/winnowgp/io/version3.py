"""Upgrade of files of format version 3, whose posteriors had no cached factor for variances.

It is computed when such a file is loaded. Names of tensors stay.
"""

from winnowgp.io.upgrades import Json, with_states


def upgraded(outline: Json) -> Json:
    """Return the outline of a version 3 file as `winnowgp.io.registry.serialise` writes it.

    Raises:
        LookupError, TypeError, ValueError: this is not the outline of a version 3 file.
    """
    return with_states(outline, {"Posterior": lambda state: {**state, "gain": None, "signs": None}})
