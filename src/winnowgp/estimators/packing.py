"""How estimators are packed: what they were asked, what they learnt."""

from typing import Any

import numpy as np
import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood
from numpy.typing import NDArray
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from winnowgp.data import Standardiser, TableEncoder
from winnowgp.errors import ModelFileError
from winnowgp.estimators.class_labels import ClassLabels
from winnowgp.estimators.inducing_estimator import InducingEstimator
from winnowgp.estimators.sparse_gp_classifier import SparseGPClassifier
from winnowgp.estimators.sparse_gp_regressor import SparseGPRegressor
from winnowgp.estimators.tabular_model import TabularModel
from winnowgp.estimators.target_units import TargetUnits
from winnowgp.io import Packed, Packing
from winnowgp.io.gpytorch_parts import (
    kernel_from_packed,
    likelihood_from,
    packed_kernel,
    packed_likelihood,
)
from winnowgp.io.models import packed_posterior, posterior_from
from winnowgp.io.save import packed, unpacked
from winnowgp.report import checked_findings
from winnowgp.selection import Frontier

# Numbers of a fit that may be infinite or absent, and so are written as text.
_NUMBERS = ("elbo_", "given_up_", "alpha_")


def _packed_regressor(model: SparseGPRegressor) -> Packed:
    found = _packed_estimator(model)
    found.about["single_target"] = model._y_units.single
    found.about["evidence_gap_"] = repr(model.evidence_gap_)
    found.tensors["y_shift"] = model._y_units.columns.shift
    found.tensors["y_scale"] = model._y_units.columns.scale
    found.tensors["noise_"] = torch.from_numpy(model.noise_)
    return found


def _regressor_from(found: Packed) -> SparseGPRegressor:
    model = SparseGPRegressor(**_parameters_from(found))
    _learnt_from(model, found)
    columns = Standardiser(found.tensors["y_shift"], found.tensors["y_scale"])
    model._y_units = TargetUnits(columns, found.about["single_target"])
    model.evidence_gap_ = float(found.about["evidence_gap_"])
    model.noise_ = found.tensors["noise_"].numpy()
    model.likelihood_ = model.posterior_.likelihood
    return model


def _packed_classifier(model: SparseGPClassifier) -> Packed:
    found = _packed_estimator(model)
    found.about["classes_"] = _packed_labels(model.classes_)
    return found


def _classifier_from(found: Packed) -> SparseGPClassifier:
    model = SparseGPClassifier(**_parameters_from(found))
    _learnt_from(model, found)
    model.classes_ = _labels_from(found.about["classes_"])
    model._labels = ClassLabels(model.classes_)
    return model


def _packed_estimator(model: InducingEstimator) -> Packed:
    """What every estimator has."""
    check_is_fitted(model)
    parameters, tensors, parts = _packed_parameters(model)
    names = getattr(model, "feature_names_in_", None)
    about = {
        "parameters": parameters,
        "n_features_in_": int(model.n_features_in_),
        "feature_names_in_": None if names is None else [str(name) for name in names],
        "learnt": {name: repr(getattr(model, name)) for name in _NUMBERS},
        "frontier_rows": None if model.frontier_ is None else model.frontier_.N,
    }
    tensors |= {
        "x_shift": model._x_units.shift,
        "x_scale": model._x_units.scale,
        "candidates_": torch.from_numpy(model.candidates_),
        "inclusion_": torch.from_numpy(model.inclusion_),
    }
    if model.frontier_ is not None:
        tensors["frontier_bounds"] = model.frontier_.bounds
        tensors["frontier_masks"] = model.frontier_.masks
    parts["posterior"] = packed_posterior(model.posterior_)
    return Packed(type(model).__name__, about, tensors, parts)


def _learnt_from(model: InducingEstimator, found: Packed) -> None:
    posterior = posterior_from(found.parts["posterior"])
    model._x_units = Standardiser(found.tensors["x_shift"], found.tensors["x_scale"])
    model.n_features_in_ = found.about["n_features_in_"]
    if found.about["feature_names_in_"] is not None:
        model.feature_names_in_ = np.array(found.about["feature_names_in_"], dtype=object)
    model.posterior_, model.kernel_ = posterior, posterior.kernel
    for name in _NUMBERS:
        text = found.about["learnt"][name]
        setattr(model, name, None if text == "None" else float(text))
    model.n_inducing_ = posterior.M
    model.inducing_points_ = model._x_units.inverse(posterior.Z).numpy()
    model.candidates_ = found.tensors["candidates_"].numpy()
    model.inclusion_ = found.tensors["inclusion_"].numpy()
    rows = found.about["frontier_rows"]
    model.frontier_ = (
        None
        if rows is None
        else Frontier(found.tensors["frontier_bounds"], found.tensors["frontier_masks"], rows)
    )


def _packed_parameters(
    model: InducingEstimator,
) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Packed]]:
    """Constructor arguments; who watched the fit, and where it was kept, are not among them."""
    watching = ("on_progress", "checkpoint")
    asked = model.get_params(deep=False)
    parameters = {name: value for name, value in asked.items() if name not in watching}
    tensors: dict[str, Tensor] = {}
    parts: dict[str, Packed] = {}
    for name, value in parameters.items():
        if isinstance(value, Kernel):
            parts[name], parameters[name] = packed_kernel(value), {"part": name}
        elif isinstance(value, Likelihood):
            parts[name], parameters[name] = packed_likelihood(value), {"part": name}
        elif isinstance(value, np.random.RandomState):
            _, key, *rest = value.get_state(legacy=True)
            tensors[name] = torch.from_numpy(np.asarray(key).astype(np.int64))
            parameters[name] = {"random_state": [float(r) for r in rest]}
        elif name == "candidates" and not isinstance(value, str):
            tensors[name] = torch.from_numpy(np.asarray(value, dtype=np.float64))
            parameters[name] = {"tensor": name}
        elif isinstance(value, np.generic):
            parameters[name] = value.item()
    return parameters, tensors, parts


def _parameters_from(found: Packed) -> dict[str, Any]:
    parameters = dict(found.about["parameters"])
    for name, value in parameters.items():
        if not isinstance(value, dict):
            continue
        if "part" in value:
            make = kernel_from_packed if name == "kernel" else likelihood_from
            parameters[name] = make(found.parts[name])
        elif "tensor" in value:
            parameters[name] = found.tensors[name].numpy()
        else:
            place, has_gauss, cached = value["random_state"]
            state = np.random.RandomState()
            key = found.tensors[name].numpy().astype(np.uint32)
            state.set_state(("MT19937", key, int(place), int(has_gauss), cached))
            parameters[name] = state
    parameters["epochs"] = tuple(parameters["epochs"])
    return parameters


def _packed_labels(labels: NDArray[Any]) -> dict[str, Any]:
    return {"dtype": labels.dtype.str, "values": labels.tolist()}


def _labels_from(about: dict[str, Any]) -> NDArray[Any]:
    dtype = np.dtype(about["dtype"])
    values = about["values"]
    longest = max((len(v) for v in values if isinstance(v, str)), default=0)
    # A width that no label has would only fill memory.
    if dtype.kind not in "biufUO" or (dtype.kind == "U" and dtype.itemsize > 4 * max(longest, 1)):
        raise ModelFileError(f"holds labels of type {dtype}, which this winnowgp does not know")
    return np.array(values, dtype=dtype)


def _packed_tabular(model: TabularModel) -> Packed:
    about = {
        "encoder": model.encoder.about(),
        "id_column": model.id_column,
        "findings": dict(model.findings),
    }
    return Packed("TabularModel", about, parts={"estimator": packed(model.estimator)})


def _tabular_from(found: Packed) -> TabularModel:
    encoder = TableEncoder.from_about(found.about["encoder"])
    estimator = unpacked(found.parts["estimator"])
    findings = checked_findings(found.about["findings"])
    choice, name = findings["choice"], found.about["id_column"]
    consistent = (
        isinstance(estimator, SparseGPRegressor | SparseGPClassifier)
        and len(encoder.features) == estimator.n_features_in_
        and choice["points"] == estimator.n_inducing_
        and (choice["frontier"] is None or len(choice["frontier"]) > choice["points"])
        and len(findings["columns"]) > 0
        and (name is None or isinstance(name, str))
    )
    if not consistent:
        raise ModelFileError("its parts do not belong together")
    return TabularModel(encoder, estimator, name, findings)


PACKINGS = {
    "SparseGPRegressor": Packing(_packed_regressor, _regressor_from),
    "SparseGPClassifier": Packing(_packed_classifier, _classifier_from),
    "TabularModel": Packing(_packed_tabular, _tabular_from),
}
