"""Upgrades of files of earlier format versions: the walk over an outline that they share."""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

Json = Any
Upgrades: TypeAlias = Mapping[str, Callable[[dict[str, Json]], dict[str, Json]]]


def with_states(outline: Json, upgrades: Upgrades) -> Json:
    """Return an outline with other states of some kinds of objects, inner objects first.

    Args:
        upgrades: for each kind of object, the new state as a function of the old one.
    """
    if isinstance(outline, list):
        return [with_states(entry, upgrades) for entry in outline]
    if not isinstance(outline, dict):
        return outline
    inner = {key: with_states(entry, upgrades) for key, entry in outline.items()}
    upgrade = upgrades.get(outline.get("$object", ""))
    return inner if upgrade is None else {**inner, "state": upgrade(dict(inner["state"]))}
