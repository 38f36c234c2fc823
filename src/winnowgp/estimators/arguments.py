"""Numbers that users give, checked."""

from math import inf
from numbers import Integral, Real
from typing import Any

from winnowgp.errors import InputError


def positive(name: str, value: Any, *, hint: str = "") -> float:
    """A positive, finite number."""
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 < float(value) < inf:
        raise InputError(f"`{name}` must be a positive number; got {value!r}. {hint}".strip())
    return float(value)


def whole(name: str, value: Any) -> int:
    """A whole number of at least one."""
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < 1:
        raise InputError(f"`{name}` must be a whole number of at least 1; got {value!r}.")
    return int(value)
