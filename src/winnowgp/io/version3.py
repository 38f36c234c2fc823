"""Upgrade of files of format version 3, whose posteriors had no cached factor for variances.

It is computed when such a file is loaded. Names of tensors stay.
"""

from typing import Any

Json = Any


def upgraded(outline: Json) -> Json:
    """Return the outline of a version 3 file as `winnowgp.io.registry.serialise` writes it.

    Raises:
        LookupError, TypeError, ValueError: this is not the outline of a version 3 file.
    """
    if isinstance(outline, list):
        return [upgraded(entry) for entry in outline]
    if not isinstance(outline, dict):
        return outline
    inner = {key: upgraded(entry) for key, entry in outline.items()}
    if outline.get("$object") == "Posterior":
        return {**inner, "state": {**inner["state"], "gain": None, "signs": None}}
    return inner
