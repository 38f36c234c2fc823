"""What makes a fit this fit and no other, in words short enough for an error message."""

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

_PACKAGES = ("torch", "gpytorch", "numpy", "scikit-learn")
# Where PyTorch keeps parameters, parts and hooks of a module.
_OWN = vars(nn.Module()).keys() - {"training"}


def fingerprint(**parts: Any) -> dict[str, str]:
    """Words for each part, and for what decides the last digits of whatever is computed.

    >>> fingerprint(rows=torch.zeros(2, 3))["rows"]
    'torch.float32 [2, 3] on cpu, sha256 bb40f2a9421065bf'
    """
    versions = {name: version(name) for name in _PACKAGES}
    here = {"winnowgp": __version__, **versions, "threads": str(torch.get_num_threads())}
    return {name: described(part) for name, part in parts.items()} | here


def described(part: Any) -> str:
    """A part in words; equal ones in the same words, others in others."""
    if isinstance(part, np.generic):
        part = part.item()
    if isinstance(part, list | tuple):
        # Lists and tuples of the same things ask for the same.
        return f"({', '.join(described(each) for each in part)})"
    if isinstance(part, set | frozenset):
        # In an order that does not depend on the process.
        return f"{{{', '.join(sorted(described(each) for each in part))}}}"
    if isinstance(part, Mapping):
        return f"{{{', '.join(f'{k!r}: {described(v)}' for k, v in part.items())}}}"
    if isinstance(part, np.ndarray) and part.dtype.kind in "biuf":
        part = torch.from_numpy(np.ascontiguousarray(part))
    if isinstance(part, Tensor):
        where = f"{part.dtype} {list(part.shape)} on {part.device.type}"
        return f"{where}, sha256 {digest([part])}"
    if isinstance(part, torch.Generator):
        return f"in the state with sha256 {digest([part.get_state()])}"
    if isinstance(part, np.random.RandomState):
        return f"in a state with sha256 {_short(repr(part.get_state()).encode())}"
    if isinstance(part, nn.Module):
        tensors = [value for _, value in sorted(part.state_dict().items())]
        words = _short(f"{_structure(part)} {digest(tensors)}".encode())
        return (
            f"{type(part).__name__} with {sum(t.numel() for t in tensors)} numbers, sha256 {words}"
        )
    if is_dataclass(part) and not isinstance(part, type):
        held = {field.name: getattr(part, field.name) for field in fields(part)}
        return f"{type(part).__name__}({', '.join(f'{k}={described(v)}' for k, v in held.items())})"
    if type(part).__repr__ is object.__repr__ and hasattr(part, "__dict__"):
        return f"{type(part).__name__}{described(vars(part))}"
    # Where an object lies in memory says nothing about it.
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(part))


def digest(tensors: Iterable[Tensor]) -> str:
    """The beginning of the SHA-256 of some tensors, their types and shapes."""
    found = hashlib.sha256()
    for tensor in tensors:
        plain = tensor.detach().cpu().contiguous()
        found.update(f"{plain.dtype} {list(plain.shape)} ".encode())
        found.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def _structure(module: nn.Module) -> list[Any]:
    """Kinds of modules with all they hold besides tensors and parts, and what is learnt."""
    parts = [
        (
            name,
            type(part).__name__,
            {k: described(v) for k, v in vars(part).items() if k not in _OWN},
        )
        for name, part in module.named_modules()
    ]
    learnt = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    return [parts, learnt]


def _short(words: bytes) -> str:
    return hashlib.sha256(words).hexdigest()[:16]
