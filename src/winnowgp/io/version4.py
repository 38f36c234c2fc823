"""Upgrade of files of format version 4, whose summaries had neither alarms nor importances.

What an earlier version did not compute is None or empty. Names of tensors stay.
"""

from typing import Any

Json = Any
# Entries that the summary of a table model and the effects of its columns have in addition.
_SUMMARY: dict[str, Json] = {"alarms": [], "importance": None, "terms": []}
_EFFECT: dict[str, Json] = {"counts": [], "term": "", "note": ""}


def upgraded(outline: Json) -> Json:
    """Return the outline of a version 4 file as `winnowgp.io.registry.serialise` writes it.

    Raises:
        LookupError, TypeError, ValueError: this is not the outline of a version 4 file.
    """
    if isinstance(outline, list):
        return [upgraded(entry) for entry in outline]
    if not isinstance(outline, dict):
        return outline
    inner = {key: upgraded(entry) for key, entry in outline.items()}
    if outline.get("$object") != "TabularModel":
        return inner
    state = inner["state"]
    effects = [{**effect, **_EFFECT} for effect in state["summary"]["effects"]]
    summary = {**state["summary"], **_SUMMARY, "effects": effects}
    return {**inner, "state": {**state, "summary": summary}}
