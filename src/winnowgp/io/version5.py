"""Upgrade of files of format version 5, whose estimators did not record the batches they had seen.

The number of rows is that of the frontier. Names of tensors stay.
"""

from winnowgp.io.upgrades import Json, with_states


def upgraded(outline: Json) -> Json:
    """Return the outline of a version 5 file as `winnowgp.io.registry.serialise` writes it.

    Raises:
        LookupError, TypeError, ValueError: this is not the outline of a version 5 file.
    """

    def unrecorded(state: dict[str, Json]) -> dict[str, Json]:
        return {**state, "_stream": None}

    kinds = ("SparseGPRegressor", "SparseGPClassifier")
    return with_states(outline, dict.fromkeys(kinds, unrecorded))
