"""Upgrade of files of format version 5, whose estimators did not record the batches they had seen.

The number of rows is that of the frontier. Names of tensors stay.
"""

from typing import Any

Json = Any


def upgraded(outline: Json) -> Json:
    """Return the outline of a version 5 file as `winnowgp.io.registry.serialise` writes it.

    Raises:
        LookupError, TypeError, ValueError: this is not the outline of a version 5 file.
    """
    if isinstance(outline, list):
        return [upgraded(entry) for entry in outline]
    if not isinstance(outline, dict):
        return outline
    inner = {key: upgraded(entry) for key, entry in outline.items()}
    if outline.get("$object") in ("SparseGPRegressor", "SparseGPClassifier"):
        return {**inner, "state": {**inner["state"], "_stream": None}}
    return inner
