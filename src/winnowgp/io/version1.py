"""Upgrade of files of format version 1, which kept a tree of nodes instead of nested values.

A node had a kind, plain JSON under "about", inner nodes under "parts", and tensors whose names
began with its path. Only the outline changes; names of tensors stay.
"""

from collections.abc import Callable, Iterable
from typing import Any

Json = Any
_State = dict[str, Json]


def upgraded(outline: Json, tensors: Iterable[str]) -> Json:
    """Return the outline of a version 1 file as version 2 wrote it.

    Raises:
        LookupError, TypeError, ValueError: this is not the outline of a version 1 file.
    """
    return _upgraded(outline, list(tensors), "")


def _upgraded(outline: Json, names: list[str], path: str) -> Json:
    own = [name.removeprefix(path) for name in names if name.startswith(path)]
    state = dict(outline["about"])
    state |= {name: {"$tensor": path + name} for name in own if "/" not in name}
    for name, part in outline["parts"].items():
        state[name] = _upgraded(part, names, f"{path}{name}/")
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


_STATES: dict[str, Callable[[_State], _State]] = {
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
