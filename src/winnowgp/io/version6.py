"""Upgrade of files of format version 6, whose streams did not number their inducing points.

Estimators number them when they are loaded. The posterior was all that they remembered. Names of
tensors stay.
"""

from winnowgp.io.upgrades import Json, with_states


def upgraded(outline: Json) -> Json:
    """Return the outline of a version 6 file as `winnowgp.io.registry.serialise` writes it.

    Raises:
        LookupError, TypeError, ValueError: this is not the outline of a version 6 file.
    """

    def unnumbered(state: dict[str, Json]) -> dict[str, Json]:
        names = ("points", "memory_points", "memories")
        return {
            **state,
            **{key: {"$tuple": []} for key in names},
            "arrived": 0,
            "first": None,
            "waiting": 0.0,
        }

    return with_states(outline, {"StreamRecord": unnumbered})
