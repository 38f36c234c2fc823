"""`save` and `load`: from a model to a file and back."""

import os
from importlib import import_module
from pathlib import Path
from typing import Any

from winnowgp.errors import ModelFileError, NotSaveableError, WinnowError
from winnowgp.io.model_file import read_packed, unreadable, write_packed
from winnowgp.io.packed import Packed
from winnowgp.io.packing import Packing

# Which module keeps the `PACKINGS` of a kind. Only these are ever imported, whatever a file says.
_HOMES = {
    "Posterior": "winnowgp.io.models",
    "SparseGP": "winnowgp.io.models",
    "VariationalGP": "winnowgp.io.models",
    "DeepPosterior": "winnowgp.io.deep_models",
    "DeepGP": "winnowgp.io.deep_models",
    "ExpectedPosterior": "winnowgp.io.latent_models",
    "SampledPosterior": "winnowgp.io.latent_models",
    "LatentVariableGP": "winnowgp.io.latent_models",
    "SampledLatentGP": "winnowgp.io.latent_models",
    "SparseGPRegressor": "winnowgp.estimators.packing",
    "SparseGPClassifier": "winnowgp.estimators.packing",
    "DeepGPRegressor": "winnowgp.estimators.deep_packing",
    "DeepGPClassifier": "winnowgp.estimators.deep_packing",
    "GPLVM": "winnowgp.estimators.latent_packing",
    "TabularModel": "winnowgp.estimators.packing",
}


def save(model: Any, path: str | os.PathLike[str]) -> Path:
    """Write a model to a file, whole or not at all.

    Its size grows with M, not with N; but a latent-variable model is also where each row is, N · Q
    numbers twice.

    Args:
        model: a fitted estimator, a model, its posterior, or a `TabularModel`.

    Raises:
        NotSaveableError: the model has a part, such as a kernel of your own, that a file has no
            words for.
    """
    return write_packed(packed(model), Path(path))


def load(path: str | os.PathLike[str]) -> Any:
    """What `save` wrote, as it was; on the CPU.

    Raises:
        ModelFileError: the file is not ours, cut short, damaged, or from a newer winnowgp.
    """
    found = read_packed(Path(path))
    try:
        return unpacked(found)
    except ModelFileError as error:
        raise ModelFileError(f"{path}: {error}") from error
    except (
        WinnowError,
        KeyError,
        TypeError,
        ValueError,
        IndexError,
        AttributeError,
        RuntimeError,
        OverflowError,
    ) as error:
        # The checksum holds, so this is no accident.
        raise unreadable(Path(path)) from error


def packed(thing: Any) -> Packed:
    """Take a thing apart."""
    kind = type(thing).__name__
    if kind not in _HOMES or not type(thing).__module__.startswith("winnowgp."):
        raise NotSaveableError(
            f"a {kind} cannot be saved; give one of {', '.join(_HOMES)}. "
            "For anything else there is pickle, if you trust whoever wrote the file."
        )
    return _packing(kind).pack(thing)


def unpacked(found: Packed) -> Any:
    """Put a thing together again."""
    if found.kind not in _HOMES:
        raise ModelFileError(f"holds a {found.kind!r}, which this winnowgp does not know")
    return _packing(found.kind).unpack(found)


def _packing(kind: str) -> Packing:
    return import_module(_HOMES[kind]).PACKINGS[kind]
