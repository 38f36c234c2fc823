"""Upgrade of files of format version 2, whose estimators knew one frontier and one model.

Since version 3 the frontier of a sparse estimator is the envelope over hyper-parameters and has no
subsets; estimators also have the evidence, the growth of their candidates and models of other
sizes. What an earlier version did not compute is None, NaN or empty. Names of tensors stay.
"""

from winnowgp.io.upgrades import Json, with_states

_NAN: Json = {"$float": "nan"}
# Fields that the estimators of version 3 have in addition.
_ESTIMATOR: dict[str, Json] = {
    "evidence_": None,
    "kernel_evidence_": {},
    "predictive_gap_": _NAN,
    "predictive_gap_se_": _NAN,
    "growth_limit_": None,
    "last_doubling_gain_": _NAN,
    "_sized": {"$tuple": []},
}
# Entries that the summary of a selection has in addition.
_CHOICE: dict[str, Json] = {
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


def upgraded(outline: Json) -> Json:
    """Return the outline of a version 2 file as `winnowgp.io.registry.serialise` writes it.

    Raises:
        LookupError, TypeError, ValueError: this is not the outline of a version 2 file.
    """
    return with_states(
        outline,
        {
            "SparseGPRegressor": _estimator,
            "SparseGPClassifier": _estimator,
            "TabularModel": _tabular_model,
        },
    )


def _estimator(state: dict[str, Json]) -> dict[str, Json]:
    state.pop("evidence_gap_", None)
    frontier = state["frontier_"]
    return {**state, **_ESTIMATOR, "frontier_": None if frontier is None else _envelope(frontier)}


def _envelope(frontier: Json) -> Json:
    """Return the frontier at fixed hyper-parameters as the only one of an envelope."""
    bounds = {"elbos": frontier["state"]["bounds"], "N": frontier["state"]["N"]}
    unknown = {"length": None, "log_densities": [], "evidence": None, "exact_log_density": None}
    return {"$object": "SizeFrontier", "state": bounds | unknown}


def _tabular_model(state: dict[str, Json]) -> dict[str, Json]:
    summary = dict(state["summary"])
    choice = {**summary["choice"], **_CHOICE, "sizes": [summary["choice"]["points"]]}
    choice.pop("evidence_gap", None)
    return {**state, "summary": {**summary, "choice": choice}}
