"""Upgrade of files of format version 6, whose streams did not number their inducing points.

Estimators number them when they are loaded. There was no window of batches, and no rows were
kept. Inclusion was independent. Names of tensors stay.
"""

from winnowgp.io.upgrades import Json, with_states


def upgraded(outline: Json) -> Json:
    """Return the outline of a version 6 file as `winnowgp.io.registry.serialise` writes it.

    Raises:
        LookupError, TypeError, ValueError: this is not the outline of a version 6 file.
    """

    def unnumbered(state: dict[str, Json]) -> dict[str, Json]:
        new = {"points": {"$tuple": []}, "arrived": 0, "window": {"$tuple": []}, "first": None}
        return {**state, **new}

    def independent(state: dict[str, Json]) -> dict[str, Json]:
        return {**state, "_subset_posterior": None}

    sparse = dict.fromkeys(("SparseGPRegressor", "SparseGPClassifier"), independent)
    return with_states(outline, {"StreamRecord": unnumbered, **sparse})
