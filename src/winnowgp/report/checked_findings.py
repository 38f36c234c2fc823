"""Whether JSON from a file has the shape of `Findings`."""

from math import isfinite
from types import NoneType, UnionType
from typing import Any, Union, cast, get_args, get_origin, get_type_hints, is_typeddict

from winnowgp.errors import ModelFileError
from winnowgp.report.findings import Findings


def checked_findings(value: Any) -> Findings:
    """The value itself, if every field is there and of its type; an error that names it if not."""
    _check(value, Findings, "findings")
    return cast(Findings, value)


def _check(value: Any, kind: Any, where: str) -> None:
    if not _fits(value, kind, where):
        raise ModelFileError(f"{where} is not what winnowgp writes there")


def _fits(value: Any, kind: Any, where: str) -> bool:
    """Whether a value is of a type; parts of it that are not raise an error of their own."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        if value is None:
            return NoneType in inner
        others = [k for k in inner if k is not NoneType]
        return any(_quietly(value, k, where) for k in others[1:]) or _fits(value, others[0], where)
    if is_typeddict(kind):
        hints = get_type_hints(kind)
        if not isinstance(value, dict) or value.keys() != hints.keys():
            return False
        for name, hint in hints.items():
            _check(value[name], hint, f"{where}.{name}")
        return True
    if origin is list:
        return isinstance(value, list) and all(_fits(v, inner[0], where) for v in value)
    if origin is tuple:
        # JSON has no tuples.
        return (
            isinstance(value, list | tuple)
            and len(value) == len(inner)
            and all(_fits(v, k, where) for v, k in zip(value, inner, strict=True))
        )
    if origin is dict:
        return isinstance(value, dict) and all(
            isinstance(k, str) and _fits(v, inner[1], where) for k, v in value.items()
        )
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
    return type(value) is kind


def _quietly(value: Any, kind: Any, where: str) -> bool:
    try:
        return _fits(value, kind, where)
    except ModelFileError:
        return False
