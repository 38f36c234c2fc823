"""What estimators learn besides a posterior, as a file keeps it: names, units, labels, bounds."""

from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_is_fitted

from winnowgp.data import Standardiser
from winnowgp.errors import ModelFileError
from winnowgp.estimators.class_labels import ClassLabels
from winnowgp.estimators.packed_settings import packed_settings, settings_from
from winnowgp.estimators.target_units import TargetUnits
from winnowgp.io import Packed
from winnowgp.selection import Frontier

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


def packed_target_units(units: TargetUnits) -> Packed:
    """Those of the columns, and whether there is an axis of them."""
    found = packed_units(units.columns)
    found.about["single"] = units.single
    return found


def target_units_from(found: Packed, P: int) -> TargetUnits:
    """The way back."""
    single = found.said("single", bool)
    if single and P != 1:
        raise ModelFileError(f"says that there is a single target and has {P}")
    return TargetUnits(units_from(found, P), single)


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
