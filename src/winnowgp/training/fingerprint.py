"""Fingerprints: short descriptions of the values that determine the result of a fit.

A checkpoint stores the fingerprint of its fit, so that another fit is refused with a message that
names what differs.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from winnowgp import __version__
from winnowgp.data import Source, standardise
from winnowgp.data.scaling import StandardisedSource

FIRST = 1000
_PACKAGES = ("torch", "gpytorch", "numpy", "scikit-learn")
# Attributes in which PyTorch stores parameters, submodules and hooks of a module.
_INTERNAL = vars(nn.Module()).keys() - {"training"}


def fingerprint(**values: Any) -> dict[str, str]:
    """Return a description of each value, and of the software, which determines rounding.

    >>> fingerprint(rows=torch.zeros(2, 3))["rows"]
    'torch.float32 [2, 3] on cpu, sha256 bb40f2a9421065bf'
    """
    versions = {name: version(name) for name in _PACKAGES}
    environment = {"winnowgp": __version__, **versions, "threads": str(torch.get_num_threads())}
    return {name: described(value) for name, value in values.items()} | environment


def row_identity(data: Source, *, saved: bool) -> dict[str, Any]:
    """Return values that identify the rows of a fit: the rows themselves if they are in memory.

    Otherwise these are their number, the first rows, and the mean and standard deviation of every
    column, which depend on all rows. They are known for a standardised source; other sources are
    read once.

    Args:
        saved: whether the fit has a checkpoint, which may belong to other rows. Without one, and
            in a single process, no row is read.
    """
    dataset = data.as_dataset()
    if dataset is not None:
        rows = {"inputs": dataset.X, "targets": dataset.Y, "weights": dataset.weights}
        return rows if dataset.noise is None else {**rows, "noise": dataset.noise}
    if not saved and data.process_group.world_size == 1:
        return {"rows": data.N}
    first = data.part(torch.arange(min(data.N, FIRST)))
    if saved and not isinstance(data, StandardisedSource):
        data = standardise(data)
    scalers = (data.x_scaler, data.y_scaler) if isinstance(data, StandardisedSource) else ()
    rows = {"inputs": first.X, "targets": first.Y, "weights": None}
    return {"rows": data.N, **rows, "scalers": scalers}


def described(part: Any) -> str:
    """Return a short description of a value; it differs if and only if the value does."""
    if isinstance(part, np.generic):
        part = part.item()
    if isinstance(part, list | tuple):
        # A list and a tuple of the same items mean the same.
        return f"({', '.join(described(each) for each in part)})"
    if isinstance(part, set | frozenset):
        # The order of a set depends on the process.
        return f"{{{', '.join(sorted(described(each) for each in part))}}}"
    if isinstance(part, Mapping):
        return f"{{{', '.join(f'{k!r}: {described(v)}' for k, v in part.items())}}}"
    if isinstance(part, np.ndarray) and part.dtype.kind in "biuf":
        part = torch.from_numpy(np.ascontiguousarray(part))
    if isinstance(part, Tensor):
        layout = f"{part.dtype} {list(part.shape)} on {part.device.type}"
        return f"{layout}, sha256 {digest([part])}"
    if isinstance(part, torch.Generator):
        return f"in the state with sha256 {digest([part.get_state()])}"
    if isinstance(part, np.random.RandomState):
        return f"in a state with sha256 {_sha256(repr(part.get_state()))}"
    if isinstance(part, nn.Module):
        return _described_module(part)
    if is_dataclass(part) and not isinstance(part, type):
        values = {field.name: getattr(part, field.name) for field in fields(part)}
        items = ", ".join(f"{name}={described(value)}" for name, value in values.items())
        return f"{type(part).__name__}({items})"
    if type(part).__repr__ is object.__repr__ and hasattr(part, "__dict__"):
        return f"{type(part).__name__}{described(vars(part))}"
    # The address of an object does not identify it.
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(part))


def digest(tensors: Iterable[Tensor]) -> str:
    """Return the first 16 hexadecimal digits of the SHA-256 of tensors, their types and shapes."""
    checksum = hashlib.sha256()
    for tensor in tensors:
        plain = tensor.detach().cpu().contiguous()
        checksum.update(f"{plain.dtype} {list(plain.shape)} ".encode())
        checksum.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
    return checksum.hexdigest()[:16]


def _described_module(module: nn.Module) -> str:
    """Describe a module by its classes, parameters, other attributes and what is trainable."""
    tensors = [value for _, value in sorted(module.state_dict().items())]
    structure = [
        (
            name,
            type(part).__name__,
            {k: described(v) for k, v in vars(part).items() if k not in _INTERNAL},
        )
        for name, part in module.named_modules()
    ]
    trainable = [name for name, value in module.named_parameters() if value.requires_grad]
    sha256 = _sha256(f"{[structure, trainable]} {digest(tensors)}")
    numbers = sum(tensor.numel() for tensor in tensors)
    return f"{type(module).__name__} with {numbers} numbers, sha256 {sha256}"


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
