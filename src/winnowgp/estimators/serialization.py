"""Serialisation of estimators."""

from typing import Any, TypeVar

import numpy as np
import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood
from numpy.typing import NDArray
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_is_fitted

from winnowgp.data import Standardiser, TableEncoder
from winnowgp.errors import ModelFileError, NotSaveableError
from winnowgp.estimators.classification import ClassLabels, SparseGPClassifier
from winnowgp.estimators.deep import (
    DeepEstimator,
    DeepGPClassifier,
    DeepGPRegressor,
    layer_locations,
)
from winnowgp.estimators.gplvm import GPLVM
from winnowgp.estimators.gplvm_initialization import relevance
from winnowgp.estimators.regression import SparseGPRegressor, TargetScaler
from winnowgp.estimators.sparse import SparseEstimator
from winnowgp.estimators.tables import TASKS, TabularModel, prediction_names
from winnowgp.estimators.validation import LIKELIHOODS
from winnowgp.io import Packed, Packing
from winnowgp.io.components import (
    kernel_from_packed,
    likelihood_from,
    packed_kernel,
    packed_likelihood,
)
from winnowgp.io.models import (
    deep_posterior_from,
    latent_posterior_from,
    packed,
    packed_deep_posterior,
    packed_latent_posterior,
    packed_posterior,
    posterior_from,
    unpacked,
)
from winnowgp.report import validated_summary
from winnowgp.selection import Frontier

# What an estimator was asked for, as a file keeps it.


# Who watches a fit and where it is kept on the way belong to the machine, not to the model.
_LEFT_OUT = ("callbacks", "checkpoint")

_ARRAYS = ("candidates", "start")


def packed_settings(model: BaseEstimator) -> Packed:
    """Constructor arguments. What JSON cannot say is a dictionary of one entry, its kind."""
    found = Packed("Settings")
    for name, value in model.get_params(deep=False).items():
        if name not in _LEFT_OUT:
            found.about[name] = _packed(name, value, found)
    return found


def settings_from(found: Packed) -> dict[str, Any]:
    """The way back; lists come back as tuples."""
    if set(found.about) & set(_LEFT_OUT):
        raise ModelFileError("has settings that no winnowgp writes")
    return {name: _unpacked(name, value, found) for name, value in found.about.items()}


def _packed(name: str, value: Any, into: Packed) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if name in _ARRAYS:
        into.tensors[name] = torch.from_numpy(np.array(value, dtype=np.float64))
        return {"array": name}
    if isinstance(value, tuple | list):
        return {"tuple": [_packed(f"{name}.{i}", v, into) for i, v in enumerate(value)]}
    if isinstance(value, np.random.RandomState):
        _, key, *rest = value.get_state(legacy=True)
        into.tensors[name] = torch.from_numpy(np.asarray(key).astype(np.int64))
        return {"random_state": [float(r) for r in rest]}
    if isinstance(value, Kernel):
        into.parts[name] = packed_kernel(value)
        return {"kernel": name}
    if isinstance(value, Likelihood):
        into.parts[name] = packed_likelihood(value)
        return {"likelihood": name}
    raise NotSaveableError(f"`{name}` is a {type(value).__name__}, which cannot be saved.")


def _unpacked(name: str, value: Any, found: Packed) -> Any:
    if isinstance(value, list):
        raise ModelFileError(f"has a setting {name!r} that no winnowgp writes")
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == "array":
        return found.tensors[name].numpy()
    if kind == "tuple":
        return tuple(_unpacked(f"{name}.{i}", v, found) for i, v in enumerate(inner))
    if kind == "random_state":
        place, has_gauss, cached = inner
        state = np.random.RandomState()
        key = found.tensors[name].numpy().astype(np.uint32)
        state.set_state(("MT19937", key, int(place), int(has_gauss), cached))
        return state
    if kind == "kernel":
        return kernel_from_packed(found.parts[name])
    if kind == "likelihood":
        return likelihood_from(found.parts[name])
    raise ModelFileError(f"has a setting {name!r} of an unknown kind {kind!r}")


# What estimators learn besides a posterior, as a file keeps it: names, units, labels, bounds.


_Estimator = TypeVar("_Estimator", bound=BaseEstimator)


def packed_estimator(model: Any) -> Packed:
    """What every estimator has: settings, and names of the columns it was fitted to."""
    check_is_fitted(model)
    names = getattr(model, "feature_names_in_", None)
    about = {
        "n_features_in_": int(model.n_features_in_),
        "feature_names_in_": None if names is None else [str(name) for name in names],
    }
    return Packed(type(model).__name__, about, parts={"settings": packed_settings(model)})


def estimator_from(made: type[_Estimator], found: Packed) -> _Estimator:
    """The way back."""
    model: Any = made(**settings_from(found.parts["settings"]))
    model.n_features_in_ = found.said("n_features_in_", int)
    if found.about["feature_names_in_"] is not None:
        names = found.said("feature_names_in_", list)
        if len(names) != model.n_features_in_ or not all(isinstance(n, str) for n in names):
            raise ModelFileError("its names of columns are not one for each")
        model.feature_names_in_ = np.array(names, dtype=object)
    return model


def packed_number(value: float | None) -> str | None:
    """As text, which may be infinite."""
    return None if value is None else repr(float(value))


def number_from(text: str | None) -> float | None:
    """The way back."""
    return None if text is None else float(text)


def packed_units(units: Standardiser) -> Packed:
    """Shift and scale of each column."""
    return Packed("Units", tensors={"shift": units.shift, "scale": units.scale})


def units_from(found: Packed, columns: int) -> Standardiser:
    """The way back."""
    scale = found.numbers("scale", columns)
    if not bool((scale > 0).all()):
        raise ModelFileError("has units whose scale is not positive")
    return Standardiser(found.numbers("shift", columns), scale)


def packed_target_units(units: TargetScaler) -> Packed:
    """Those of the columns, and whether there is an axis of them."""
    found = packed_units(units.columns)
    found.about["single"] = units.single
    return found


def target_units_from(found: Packed, P: int) -> TargetScaler:
    """The way back."""
    single = found.said("single", bool)
    if single and P != 1:
        raise ModelFileError(f"says that there is a single target and has {P}")
    return TargetScaler(units_from(found, P), single)


def packed_labels(labels: ClassLabels) -> dict[str, Any]:
    """As JSON."""
    return {"dtype": labels.classes.dtype.str, "values": labels.classes.tolist()}


def labels_from(about: dict[str, Any], *, functions: int, likelihood: Any) -> ClassLabels:
    """The way back, for a model of so many latent functions."""
    dtype = np.dtype(about["dtype"])
    values = about["values"]
    longest = max((len(v) for v in values if isinstance(v, str)), default=0)
    # A width that no label has would only fill memory.
    if dtype.kind not in "biufUO" or (dtype.kind == "U" and dtype.itemsize > 4 * max(longest, 1)):
        raise ModelFileError(f"holds labels of type {dtype}, which this winnowgp does not know")
    labels = ClassLabels(_array(values, dtype))
    C = len(labels.classes)
    sorted_once = np.array_equal(np.unique(labels.classes), labels.classes)
    if C < 2 or not sorted_once or functions != (1 if C == 2 else C):
        raise ModelFileError("its classes do not belong to its functions")
    if type(labels.likelihood()) is not type(likelihood):
        raise ModelFileError("its likelihood is not one of classes")
    return labels


def _array(values: list[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    array = np.empty(len(values), dtype=dtype)
    array[:] = values
    return array


def packed_frontier(frontier: Frontier) -> Packed:
    """The best bound of each number of points, and which points."""
    tensors = {"bounds": frontier.bounds, "masks": frontier.masks}
    return Packed("Frontier", {"N": frontier.N}, tensors)


def frontier_from(found: Packed) -> Frontier:
    """The way back."""
    bounds, masks = found.numbers("bounds", None, finite=False), found.tensors["masks"]
    J = len(bounds)
    if masks.dtype != torch.bool or not torch.equal(masks.sum(1), torch.arange(J)):
        raise ModelFileError("has a frontier whose sets are not of 0, 1, 2, … points")
    # Whole unless rows had weights.
    number = float if type(found.about.get("N")) is float else int
    return Frontier(bounds, masks, found.said("N", number))


def candidates_from(
    found: Packed, D: int, suffix: str = ""
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Candidates `[K D]` and their probabilities of inclusion `[K]`."""
    candidates = found.numbers(f"candidates_{suffix}", None, D)
    inclusion = found.numbers(f"inclusion_{suffix}", len(candidates))
    if not bool(((inclusion >= 0) & (inclusion <= 1)).all()):
        raise ModelFileError("has probabilities of inclusion outside 0 to 1")
    return candidates.numpy(), inclusion.numpy()


# What regressors and classifiers learn of their targets, shallow or deep, as a file keeps it.


def pack_numbers(model: Any, found: Packed) -> Packed:
    """Add what a regressor knows of numbers: their units."""
    found.parts["y_scaler"] = packed_target_units(model._y_scaler)
    return found


def take_numbers(model: Any, found: Packed) -> Any:
    """The way back, for a regressor that has its posterior."""
    learnt = model.posterior_.likelihood
    check_likelihood(model.likelihood, learnt)
    model._y_scaler = target_units_from(found.parts["y_scaler"], model.posterior_.P)
    model.likelihood_, model.noise_ = learnt, model._y_scaler.noise(learnt)
    return model


def pack_classes(model: Any, found: Packed) -> Packed:
    """Add what a classifier knows of classes: their labels."""
    found.about["classes_"] = packed_labels(model._labels)
    return found


def take_classes(model: Any, found: Packed) -> Any:
    """The way back, for a classifier that has its posterior."""
    posterior = model.posterior_
    about, likelihood = found.about["classes_"], posterior.likelihood
    model._labels = labels_from(about, functions=posterior.P, likelihood=likelihood)
    model.classes_ = model._labels.classes
    return model


def check_likelihood(asked: Any, learnt: Any) -> None:
    """Whether a likelihood asked for by name is the one that was learnt."""
    if isinstance(asked, str) and LIKELIHOODS.get(asked) is not type(learnt):
        raise ModelFileError("its likelihood is not the one it says it was asked for")


# How shallow estimators and models of tables are packed.


# Of a fit; may be infinite or absent.
# Names in a file, and the attributes they are of.
_NUMBERS = {"elbo_": "elbo_", "given_up_": "elbo_gap_", "alpha_": "alpha_"}


def _packed_regressor(model: SparseGPRegressor) -> Packed:
    found = pack_numbers(model, _packed_inducing(model))
    found.about["evidence_gap_"] = packed_number(model.evidence_gap_)
    return found


def _regressor_from(found: Packed) -> SparseGPRegressor:
    model = take_numbers(_inducing_from(SparseGPRegressor, found), found)
    model.evidence_gap_ = float(found.about["evidence_gap_"])
    return model


def _packed_inducing(model: SparseEstimator) -> Packed:
    """What both shallow estimators have."""
    found = packed_estimator(model)
    found.about.update({key: packed_number(getattr(model, name)) for key, name in _NUMBERS.items()})
    found.tensors["candidates_"] = torch.from_numpy(model.candidates_)
    found.tensors["inclusion_"] = torch.from_numpy(model.inclusion_)
    found.parts["x_scaler"] = packed_units(model._x_scaler)
    found.parts["posterior"] = packed_posterior(model.posterior_)
    if model.frontier_ is not None:
        found.parts["frontier"] = packed_frontier(model.frontier_)
    return found


def _inducing_from(made: Any, found: Packed) -> Any:
    model = estimator_from(made, found)
    D, posterior = model.n_features_in_, posterior_from(found.parts["posterior"])
    if posterior.Z.shape[1] != D:
        raise ModelFileError(f"has {D} inputs and points of {posterior.Z.shape[1]}")
    model._x_scaler = units_from(found.parts["x_scaler"], D)
    model.posterior_, model.kernel_ = posterior, posterior.kernel
    for key, name in _NUMBERS.items():
        setattr(model, name, number_from(found.about[key]))
    model.n_inducing_ = posterior.M
    model.inducing_points_ = model._x_scaler.inverse(posterior.Z).numpy()
    model.candidates_, model.inclusion_ = candidates_from(found, D)
    frontier = found.parts.get("frontier")
    model.frontier_ = None if frontier is None else frontier_from(frontier)
    return model


def _packed_tabular(model: TabularModel) -> Packed:
    about = {
        "encoder": model.encoder.about(),
        "id_column": model.id_column,
        "findings": dict(model.summary),
    }
    return Packed("TabularModel", about, parts={"estimator": packed(model.estimator)})


def _tabular_from(found: Packed) -> TabularModel:
    encoder = TableEncoder.from_about(found.about["encoder"])
    estimator = unpacked(found.parts["estimator"])
    summary = validated_summary(found.about["findings"])
    choice, name = summary["choice"], found.about["id_column"]
    consistent = (
        isinstance(estimator, SparseGPRegressor | SparseGPClassifier)
        and len(encoder.features) == estimator.n_features_in_
        and choice["points"] == estimator.n_inducing_
        and (choice["frontier"] is None or len(choice["frontier"]) > choice["points"])
        and len(summary["columns"]) > 0
        and summary["task"] in TASKS
        and (summary["task"] == "classification") == isinstance(estimator, SparseGPClassifier)
        and (name is None or isinstance(name, str))
        and name not in prediction_names(summary["task"], summary["classes"])
    )
    if not consistent:
        raise ModelFileError("its parts do not belong together")
    return TabularModel(encoder, estimator, name, summary)


PACKINGS = {
    "SparseGPRegressor": Packing(_packed_regressor, _regressor_from),
    "SparseGPClassifier": Packing(
        lambda model: pack_classes(model, _packed_inducing(model)),
        lambda found: take_classes(_inducing_from(SparseGPClassifier, found), found),
    ),
    "TabularModel": Packing(_packed_tabular, _tabular_from),
}


# How deep estimators are packed.


def _packed_deep(model: DeepEstimator) -> Packed:
    """What both deep estimators have."""
    found = packed_estimator(model)
    found.about["elbo_"] = packed_number(model.elbo_)
    found.about["given_up_"] = packed_number(model.elbo_gap_)
    found.about["alpha_"] = [packed_number(alpha) for alpha in model.alpha_]
    found.parts["x_scaler"] = packed_units(model._x_scaler)
    found.parts["posterior"] = packed_deep_posterior(model.posterior_)
    for number, points in enumerate(model.candidates_):
        found.tensors[f"candidates_{number}"] = torch.from_numpy(points)
        found.tensors[f"inclusion_{number}"] = torch.from_numpy(model.inclusion_[number])
    for number, frontier in enumerate(model.frontiers_):
        if frontier is not None:
            found.parts[f"frontier.{number}"] = packed_frontier(frontier)
    return found


def _deep_from(made: Any, found: Packed) -> Any:
    model = estimator_from(made, found)
    D, posterior = model.n_features_in_, deep_posterior_from(found.parts["posterior"])
    layers = posterior.layers
    if layers[0].D != D or model.layers != len(layers):
        raise ModelFileError("its layers are not those it says it was asked for")
    model._x_scaler = units_from(found.parts["x_scaler"], D)
    model.posterior_, model.n_inducing_ = posterior, posterior.M
    kept = [layer.candidates.detach().clone() for layer in layers]
    model.inducing_points_ = layer_locations(kept, model._x_scaler)
    model.elbo_ = number_from(found.about["elbo_"])
    model.elbo_gap_ = number_from(found.about["given_up_"])
    model.alpha_ = tuple(number_from(text) for text in found.said("alpha_", list))
    pairs = [candidates_from(found, layer.D, str(n)) for n, layer in enumerate(layers)]
    model.candidates_, model.inclusion_ = zip(*pairs, strict=True)
    parts = [found.parts.get(f"frontier.{number}") for number in range(len(layers))]
    model.frontiers_ = tuple(None if part is None else frontier_from(part) for part in parts)
    if len(model.alpha_) != len(layers):
        raise ModelFileError("has other strengths of its prior than one a layer")
    return model


PACKINGS |= {
    "DeepGPRegressor": Packing(
        lambda model: pack_numbers(model, _packed_deep(model)),
        lambda found: take_numbers(_deep_from(DeepGPRegressor, found), found),
    ),
    "DeepGPClassifier": Packing(
        lambda model: pack_classes(model, _packed_deep(model)),
        lambda found: take_classes(_deep_from(DeepGPClassifier, found), found),
    ),
}


# How a map of the rows of a table is packed; the rows' places are part of it.


_LATENT_PACKING_ARRAYS = ("candidates_", "inclusion_", "embedding_", "embedding_std_")


def _packed_gplvm(model: GPLVM) -> Packed:
    found = packed_estimator(model)
    found.about.update({key: packed_number(getattr(model, name)) for key, name in _NUMBERS.items()})
    found.about["n_iter_"] = int(model.n_iter_)
    found.tensors.update(
        {name: torch.from_numpy(getattr(model, name)) for name in _LATENT_PACKING_ARRAYS}
    )
    found.tensors["varies"] = model._varies
    found.tensors["anchor_mean"], found.tensors["anchor_variance"] = model._anchors
    found.parts["units"] = packed_units(model._x_scaler)
    found.parts["posterior"] = packed_latent_posterior(model.posterior_)
    if model.frontier_ is not None:
        found.parts["frontier"] = packed_frontier(model.frontier_)
    return found


def _gplvm_from(found: Packed) -> GPLVM:
    model = estimator_from(GPLVM, found)
    P = found.said("n_features_in_", int)
    posterior = latent_posterior_from(found.parts["posterior"])
    function, Q = posterior.function, posterior.Q
    varies = found.tensors["varies"]
    if function.P != P or varies.dtype != torch.bool or varies.shape != (P,):
        raise ModelFileError(f"has {P} columns and a map to {function.P}")
    check_likelihood(model.likelihood, function.likelihood)
    model._varies, model._x_scaler = varies, units_from(found.parts["units"], P)
    anchors = found.numbers("anchor_mean", None, Q)
    model._anchors = anchors, found.numbers("anchor_variance", *anchors.shape)
    if not bool((model._anchors[1] > 0).all()):
        raise ModelFileError("has places of rows whose variance is not positive")
    model.posterior_, model.kernel_ = posterior, function.kernel
    model.relevance_ = relevance(model.kernel_, Q)
    model.n_inducing_, model.inducing_points_ = function.M, function.Z.numpy()
    model.candidates_, model.inclusion_ = candidates_from(found, Q)
    model.embedding_ = found.numbers("embedding_", None, Q).numpy()
    model.embedding_std_ = found.numbers("embedding_std_", *model.embedding_.shape).numpy()
    model.elbo_, model.elbo_gap_ = float(found.about["elbo_"]), float(found.about["given_up_"])
    model.alpha_ = number_from(found.about["alpha_"])
    model.n_iter_ = found.said("n_iter_", int)
    frontier = found.parts.get("frontier")
    model.frontier_ = None if frontier is None else frontier_from(frontier)
    model.noise_ = model._noise(P)
    return model


PACKINGS |= {"GPLVM": Packing(_packed_gplvm, _gplvm_from)}
