"""A deep copy of a GPyTorch model that was trained a moment ago."""

from copy import deepcopy
from typing import Any, TypeVar

from gpytorch.module import Module
from torch import Tensor

from winnowgp.errors import InputError

_Same = TypeVar("_Same", bound=Module)


def copied(module: _Same) -> _Same:
    """The module without what it has remembered of its last evaluation.

    GPyTorch keeps intermediate results on its modules, and PyTorch refuses to copy a tensor that
    has a history. They are left behind, and the module that was given keeps its own.
    """
    memo: dict[int, Any] = {}
    for part in module.modules():
        for name, value in vars(part).items():
            if name == "_memoize_cache":
                memo[id(value)] = {}
            elif isinstance(value, Tensor) and value.grad_fn is not None:
                memo[id(value)] = value.detach().clone()
        if isinstance(part, Module):
            memo |= {id(term): None for term in part._added_loss_terms.values() if term is not None}
    try:
        return deepcopy(module, memo)
    except (RuntimeError, TypeError) as error:
        raise InputError(
            f"{type(module).__name__} cannot be copied: {error} Does it hold a list of losses, "
            "what it has returned, a file or a lock? Keep these elsewhere, or `detach` them."
        ) from error
