"""Upgrade of files of format version 4, whose summaries had neither alarms nor importances.

What an earlier version did not compute is None or empty. Names of tensors stay.
"""

from winnowgp.io.upgrades import Json, with_states

# Entries that the summary of a table model and the effects of its columns have in addition.
_SUMMARY: dict[str, Json] = {"alarms": [], "importance": None, "terms": []}
_EFFECT: dict[str, Json] = {"counts": [], "term": "", "note": ""}


def upgraded(outline: Json) -> Json:
    """Return the outline of a version 4 file as `winnowgp.io.registry.serialise` writes it.

    Raises:
        LookupError, TypeError, ValueError: this is not the outline of a version 4 file.
    """
    return with_states(outline, {"TabularModel": _tabular_model})


def _tabular_model(state: dict[str, Json]) -> dict[str, Json]:
    effects = [{**effect, **_EFFECT} for effect in state["summary"]["effects"]]
    summary = {**state["summary"], **_SUMMARY, "effects": effects}
    return {**state, "summary": summary}
