"""Upgrade of files of format version 1, which kept a tree of nodes instead of nested values.

A node had a kind, plain JSON under "about", inner nodes under "parts", and tensors whose names
began with its path. Only the outline changes; names of tensors stay.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

Json = Any


def upgraded(outline: Json, tensors: Iterable[str]) -> Json:
    """Return the outline of a version 1 file as `winnowgp.io.registry.serialise` writes it.

    Raises:
        LookupError, TypeError, ValueError: this is not the outline of a version 1 file.
    """
    return _upgraded(outline, list(tensors), "")


class _Node(NamedTuple):
    about: dict[str, Json]
    tensors: dict[str, Json]
    parts: dict[str, Json]
    """Inner nodes, already upgraded."""
    path: str

    def state(self) -> dict[str, Json]:
        return {**self.about, **self.tensors, **self.parts}

    def array(self, name: str) -> Json:
        return {"$array": self.tensors[name]["$tensor"]}


def _upgraded(outline: Json, names: list[str], path: str) -> Json:
    kind = outline["kind"]
    own = [name.removeprefix(path) for name in names if name.startswith(path)]
    node = _Node(
        dict(outline["about"]),
        {name: {"$tensor": path + name} for name in own if "/" not in name},
        {name: _upgraded(part, names, f"{path}{name}/") for name, part in outline["parts"].items()},
        path,
    )
    if kind == "Settings":
        return {name: _parameter(name, value, node) for name, value in node.about.items()}
    if kind == "Units":
        return _scaler(node)
    return {"$object": kind, "state": _STATES.get(kind, _Node.state)(node)}


def _component(node: _Node) -> Json:
    frozen = node.about.pop("frozen", [])
    return {"config": node.about, "state": node.tensors, "frozen": frozen}


def _shallow(node: _Node) -> Json:
    return node.state() | {"frozen": ["candidates"] if node.about["frozen"] else []}


def _deep(node: _Node) -> Json:
    numbers = range(node.about["layers"])
    layers = [node.parts[f"layer.{n}"] for n in numbers]
    state = node.about | {"likelihood": node.parts["likelihood"], "layers": layers}
    if "samples" in state:
        state["factors"] = [layer["state"].pop("L") for layer in layers]
    return state


def _latent(node: _Node) -> Json:
    state = node.state()
    latents = {name: state.pop(name) for name in ("mean", "log_variance")}
    return state | {"latents": {"$object": "Latents", "state": latents}}


def _scaler(node: _Node) -> Json:
    scaler = {"$object": "Standardiser", "state": node.tensors}
    if "single" not in node.about:
        return scaler
    return {"$object": "TargetScaler", "state": {"columns": scaler, **node.about}}


def _parameter(name: str, value: Json, settings: _Node) -> Json:
    """Return a parameter of an estimator; what was not plain JSON was a dictionary of one entry."""
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == "array":
        return settings.array(name)
    if kind == "tuple":
        return {"$tuple": [_parameter(f"{name}.{i}", v, settings) for i, v in enumerate(inner)]}
    if kind == "random_state":
        position, has_gauss, gauss = inner
        state = {"position": int(position), "has_gauss": int(has_gauss), "gauss": gauss}
        return {"$object": "RandomState", "state": {"key": settings.array(name), **state}}
    return settings.parts[name]  # a kernel or a likelihood


def _number(text: str | None) -> Json:
    return None if text is None else {"$float": text}


def _estimator(node: _Node) -> dict[str, Json]:
    """Return what the state of every estimator has."""
    about = node.about
    state = {
        "parameters": node.parts["settings"],
        "n_features_in_": about["n_features_in_"],
        "feature_names_in_": about["feature_names_in_"],
        "posterior_": node.parts["posterior"],
        "elbo_": _number(about["elbo_"]),
        "elbo_gap_": _number(about["given_up_"]),
    }
    if "evidence_gap_" in about:
        state["evidence_gap_"] = _number(about["evidence_gap_"])
    if "classes_" in about:
        state["_labels"] = {"$object": "ClassLabels", "state": about["classes_"]}
    scalers = {"x_units": "_x_scaler", "y_units": "_y_scaler", "units": "_units"}
    return state | {scalers[name]: node.parts[name] for name in scalers if name in node.parts}


def _shallow_estimator(node: _Node) -> Json:
    return _estimator(node) | {
        "alpha_": _number(node.about["alpha_"]),
        "candidates_": node.array("candidates_"),
        "inclusion_": node.array("inclusion_"),
        "frontier_": node.parts.get("frontier"),
    }


def _deep_estimator(node: _Node) -> Json:
    numbers = range(len(node.about["alpha_"]))
    return _estimator(node) | {
        "alpha_": {"$tuple": [_number(alpha) for alpha in node.about["alpha_"]]},
        "candidates_": {"$tuple": [node.array(f"candidates_{n}") for n in numbers]},
        "inclusion_": {"$tuple": [node.array(f"inclusion_{n}") for n in numbers]},
        "frontiers_": {"$tuple": [node.parts.get(f"frontier.{n}") for n in numbers]},
    }


def _gplvm(node: _Node) -> Json:
    return _shallow_estimator(node) | {
        "n_iter_": node.about["n_iter_"],
        "embedding_": node.array("embedding_"),
        "embedding_std_": node.array("embedding_std_"),
        "_varies": node.tensors["varies"],
        "_anchors": {"$tuple": [node.tensors["anchor_mean"], node.tensors["anchor_variance"]]},
    }


def _tabular_model(node: _Node) -> Json:
    return {
        "encoder": {"$object": "TableEncoder", "state": {"config": node.about["encoder"]}},
        "estimator": node.parts["estimator"],
        "id_column": node.about["id_column"],
        "summary": node.about["findings"],
    }


_STATES: dict[str, Callable[[_Node], Json]] = {
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
