"""Upgrades of files of earlier format versions, one version at a time.

Upgrades change the outline only; names of tensors stay. What an earlier version did not compute
becomes None, NaN or empty.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

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
        outline = {"kind": "Model", "value": _without_nodes(outline, list(tensors), "")}
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
    kind = outline.get("$object", "")
    # A kind that no winnowgp writes is refused where the value is decoded.
    upgrade = upgrades.get(kind) if isinstance(kind, str) else None
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


def _column_9(column: Json) -> Json:
    """Return the encoding or the summary of a column, whose categories were called words."""
    column = dict(column)
    if "words" in column:
        column["categories"] = column.pop("words")
    return {**column, "kind": "category"} if column["kind"] == "words" else column


def _encoder_9(state: _State) -> _State:
    config = state["config"]
    return {"config": {**config, "columns": [_column_9(each) for each in config["columns"]]}}


def _gap_9(choice: Json) -> Json:
    """Return a choice or an allocation, whose ELBO gap was called `given_up`."""
    rest = {name: value for name, value in choice.items() if name != "given_up"}
    return {**rest, "elbo_gap": choice["given_up"]}


def _tabular_model_9(state: _State) -> _State:
    summary = dict(state["summary"])
    for name in ("columns", "effects", "terms"):
        summary[name] = [_column_9(each) for each in summary[name]]
    summary["target_summary"] = _column_9(summary["target_summary"])
    summary["choice"] = _gap_9(summary["choice"])
    if "allocations" in summary["choice"]:
        summary["choice"]["allocations"] = [
            _gap_9(each) for each in summary["choice"]["allocations"]
        ]
    return {**state, "summary": summary}


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
    # Members of mixtures had equal weights, deep estimators had no smaller models, and all targets
    # of a stream had the same noise.
    7: {
        "MixturePosterior": _adding(member_weights=None),
        "Memory": _adding(counts=None),
        **dict.fromkeys(
            ("DeepGPRegressor", "DeepGPClassifier"),
            _adding(_sized={"$tuple": []}, allocations_={"$tuple": []}),
        ),
    },
    # Categories and ELBO gaps had other names.
    8: {"TableEncoder": _encoder_9, "TabularModel": _tabular_model_9},
    # The gap of the earlier batches of a stream, the steps of its hyper-parameters, and alarms of
    # several targets were not recorded.
    9: {
        "SizeFrontier": lambda state: {"earlier_gap": 0.0, **state},
        "StreamRecord": _adding(steps=None),
        "MultiOutputTable": lambda state: {"alarms": [], **state},
    },
    # Streams did not record which part of the noise is variance of the function.
    10: {"Memory": _adding(lost=None), "StreamRecord": _adding(noise_share=None)},
}


# Version 1 kept a tree of nodes instead of nested values. A node had a kind, plain JSON under
# "about", inner nodes under "parts", and tensors whose names began with its path.


def _without_nodes(outline: Json, names: list[str], path: str) -> Json:
    """Return the outline of a node of a version 1 file as version 2 wrote it."""
    own = [name.removeprefix(path) for name in names if name.startswith(path)]
    state = dict(outline["about"])
    state |= {name: {"$tensor": path + name} for name in own if "/" not in name}
    for name, part in outline["parts"].items():
        state[name] = _without_nodes(part, names, f"{path}{name}/")
    kind = outline["kind"]
    if kind == "Settings":
        plain = outline["about"]
        return {
            _PARAMETERS.get(name, name): _parameter(name, value, state)
            for name, value in plain.items()
        }
    if kind == "Units":
        single = state.pop("single", None)
        scaler = _object("Standardiser", state)
        return scaler if single is None else _object("TargetScaler", columns=scaler, single=single)
    return _object(kind, _STATES.get(kind, dict)(state))


def _object(kind: str, state: _State | None = None, **entries: Json) -> Json:
    return {"$object": kind, "state": entries if state is None else state}


def _array(tensor: Json) -> Json:
    return {"$array": tensor["$tensor"]}


def _component(state: _State) -> _State:
    frozen = state.pop("frozen", [])
    tensors = {
        name: value
        for name, value in state.items()
        if isinstance(value, dict) and value.keys() == {"$tensor"}
    }
    config = {name: value for name, value in state.items() if name not in tensors}
    return {"config": config, "state": tensors, "frozen": frozen}


def _shallow(state: _State) -> _State:
    return state | {"frozen": ["candidates"] if state["frozen"] else []}


def _deep(state: _State) -> _State:
    layers = [state.pop(f"layer.{n}") for n in range(state["layers"])]
    if "samples" in state:
        state["factors"] = [layer["state"].pop("L") for layer in layers]
    return state | {"layers": layers, "skip_connections": state.pop("connected")}


def _latent(state: _State) -> _State:
    latents = {name: state.pop(name) for name in ("mean", "log_variance")}
    return state | {"latents": _object("Latents", latents)}


def _parameter(name: str, value: Json, settings: _State) -> Json:
    """Return a parameter of an estimator; what was not plain JSON was a dictionary of one entry."""
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == "tuple":
        return {"$tuple": [_parameter(f"{name}.{i}", v, settings) for i, v in enumerate(inner)]}
    if kind == "array":
        return _array(settings[name])
    if kind == "random_state":
        numbers = {"position": int(inner[0]), "has_gauss": int(inner[1]), "gauss": inner[2]}
        return _object("RandomState", key=_array(settings[name]), **numbers)
    return settings[name]  # a kernel or a likelihood


_PARAMETERS = {"connected": "skip_connections"}
_ATTRIBUTES = {
    "settings": "parameters",
    "posterior": "posterior_",
    "frontier": "frontier_",
    "x_units": "_x_scaler",
    "y_units": "_y_scaler",
    "units": "_x_scaler",
    "classes_": "_labels",
    "varies": "_varies",
    "given_up_": "elbo_gap_",
}
_NUMBERS = ("elbo_", "elbo_gap_", "alpha_", "evidence_gap_")
_ARRAYS = ("candidates_", "inclusion_", "embedding_", "embedding_std_")


def _estimator(state: _State) -> _State:
    state = {_ATTRIBUTES.get(name, name): value for name, value in state.items()}
    for name in _NUMBERS:
        if isinstance(state.get(name), str):
            state[name] = {"$float": state[name]}
    for name in _ARRAYS:
        if name in state:
            state[name] = _array(state[name])
    if "_labels" in state:
        state["_labels"] = _object("ClassLabels", state["_labels"])
    return state


def _shallow_estimator(state: _State) -> _State:
    return {"frontier_": None} | _estimator(state)


def _deep_estimator(state: _State) -> _State:
    state = _estimator(state)
    numbers = range(len(state["alpha_"]))
    layers = {
        "alpha_": [None if text is None else {"$float": text} for text in state["alpha_"]],
        "candidates_": [_array(state.pop(f"candidates_{n}")) for n in numbers],
        "inclusion_": [_array(state.pop(f"inclusion_{n}")) for n in numbers],
        "frontiers_": [state.pop(f"frontier.{n}", None) for n in numbers],
    }
    return state | {name: {"$tuple": entries} for name, entries in layers.items()}


def _gplvm(state: _State) -> _State:
    anchors = [state.pop("anchor_mean"), state.pop("anchor_variance")]
    return _shallow_estimator(state) | {"_anchors": {"$tuple": anchors}}


def _tabular_model(state: _State) -> _State:
    encoder = _object("TableEncoder", config=state["encoder"])
    summary = state.pop("findings")
    return state | {"encoder": encoder, "summary": summary}


_STATES: dict[str, _Upgrade] = {
    "Kernel": _component,
    "Mean": _component,
    "Likelihood": _component,
    "SparseGP": _shallow,
    "VariationalGP": _shallow,
    "DeepGP": _deep,
    "DeepPosterior": _deep,
    "LatentVariableGP": _latent,
    "SampledLatentGP": _latent,
    "SparseGPRegressor": _shallow_estimator,
    "SparseGPClassifier": _shallow_estimator,
    "DeepGPRegressor": _deep_estimator,
    "DeepGPClassifier": _deep_estimator,
    "GPLVM": _gplvm,
    "TabularModel": _tabular_model,
}
