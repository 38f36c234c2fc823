"""Upgrades of files of earlier format versions, one version at a time.

Upgrades change the outline only; names of tensors stay. What an earlier version did not compute
becomes None, NaN or empty.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

from winnowgp.io import version1

Json = Any
_State: TypeAlias = dict[str, Json]
_Upgrade: TypeAlias = Callable[[_State], _State]


def upgraded(outline: Json, version: int, tensors: Iterable[str]) -> Json:
    """Return the outline of a file of an earlier version as the present version writes it.

    Args:
        version: format version of the file.
        tensors: names of the tensors in the file.

    Raises:
        LookupError, TypeError, ValueError: this is not the outline of a file of that version.
    """
    if version == 1:
        outline = {"kind": "Model", "value": version1.upgraded(outline, tensors)}
    value = outline["value"]
    for since, upgrades in _UPGRADES.items():
        if version <= since:
            value = _with_states(value, upgrades)
    return {**outline, "value": value}


def _with_states(outline: Json, upgrades: Mapping[str, _Upgrade]) -> Json:
    """Return an outline with other states of some kinds of objects, inner objects first."""
    if isinstance(outline, list):
        return [_with_states(entry, upgrades) for entry in outline]
    if not isinstance(outline, dict):
        return outline
    inner = {key: _with_states(entry, upgrades) for key, entry in outline.items()}
    upgrade = upgrades.get(outline.get("$object", ""))
    return inner if upgrade is None else {**inner, "state": upgrade(dict(inner["state"]))}


def _adding(**entries: Json) -> _Upgrade:
    """Return an upgrade that adds entries to a state."""
    return lambda state: {**state, **entries}


_NAN: Json = {"$float": "nan"}
# Version 3: the frontier of a sparse estimator is the envelope over hyper-parameters and has no
# subsets; estimators have the evidence, the growth of their candidates and models of other sizes.
_ESTIMATOR_3: _State = {
    "evidence_": None,
    "kernel_evidence_": {},
    "predictive_gap_": _NAN,
    "predictive_gap_se_": _NAN,
    "growth_limit_": None,
    "last_doubling_gain_": _NAN,
    "_sized": {"$tuple": []},
}
_CHOICE_3: _State = {
    "log_densities": None,
    "exact_evidence": None,
    "exact_log_density": None,
    "resized_from": None,
    "kernel": None,
    "kernel_evidence": {},
    "evidence": None,
    "evidence_method": None,
    "kl": None,
    "growth_limit": None,
    "last_gain": None,
    "predictive_gap": None,
    "predictive_gap_se": None,
}


def _estimator_3(state: _State) -> _State:
    state.pop("evidence_gap_", None)
    frontier = state["frontier_"]
    return {**state, **_ESTIMATOR_3, "frontier_": None if frontier is None else _envelope(frontier)}


def _envelope(frontier: Json) -> Json:
    """Return the frontier at fixed hyper-parameters as the only one of an envelope."""
    bounds = {"elbos": frontier["state"]["bounds"], "N": frontier["state"]["N"]}
    unknown = {"length": None, "log_densities": [], "evidence": None, "exact_log_density": None}
    return {"$object": "SizeFrontier", "state": bounds | unknown}


def _tabular_model_3(state: _State) -> _State:
    summary = dict(state["summary"])
    choice = {**summary["choice"], **_CHOICE_3, "sizes": [summary["choice"]["points"]]}
    choice.pop("evidence_gap", None)
    return {**state, "summary": {**summary, "choice": choice}}


def _tabular_model_5(state: _State) -> _State:
    effects = [
        {**effect, "counts": [], "term": "", "note": ""} for effect in state["summary"]["effects"]
    ]
    added = {"alarms": [], "importance": None, "terms": [], "effects": effects}
    return {**state, "summary": {**state["summary"], **added}}


# For each version, the new state of each kind of object in the next one.
_UPGRADES: dict[int, dict[str, _Upgrade]] = {
    2: {
        "SparseGPRegressor": _estimator_3,
        "SparseGPClassifier": _estimator_3,
        "TabularModel": _tabular_model_3,
    },
    # The cached factor of a posterior for variances is computed when the file is loaded.
    3: {"Posterior": _adding(gain=None, signs=None)},
    # Summaries had neither alarms nor importances.
    4: {"TabularModel": _tabular_model_5},
    # Estimators did not record the batches that they had seen; the frontier has the rows.
    5: dict.fromkeys(("SparseGPRegressor", "SparseGPClassifier"), _adding(_stream=None)),
    # Streams did not number their inducing points, which estimators do when they are loaded; the
    # posterior was all that they remembered. Inclusion was independent.
    6: {
        **dict.fromkeys(
            ("SparseGPRegressor", "SparseGPClassifier"), _adding(_subset_posterior=None)
        ),
        "StreamRecord": _adding(
            **{key: {"$tuple": []} for key in ("points", "memory_points", "memories")},
            arrived=0,
            first=None,
            waiting=0.0,
        ),
    },
}
