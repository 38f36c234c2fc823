"""What an estimator was asked for, as a file keeps it."""

from typing import Any

import numpy as np
import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood
from sklearn.base import BaseEstimator

from winnowgp.errors import ModelFileError, NotSaveableError
from winnowgp.io import Packed
from winnowgp.io.gpytorch_parts import (
    kernel_from_packed,
    likelihood_from,
    packed_kernel,
    packed_likelihood,
)

# Who watches a fit and where it is kept on the way belong to the machine, not to the model.
_LEFT_OUT = ("on_progress", "checkpoint")
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
