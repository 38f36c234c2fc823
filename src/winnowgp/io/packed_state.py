"""Nested states, as `state_dict` gives them, in words and tensors."""

from collections.abc import Mapping
from math import isfinite
from typing import Any, TypeAlias

from torch import Tensor

from winnowgp.errors import NotSaveableError
from winnowgp.io.packed import Packed

State: TypeAlias = Any
"""None, a truth value, number, string or tensor, or lists, tuples and dictionaries of these."""


def packed_state(kind: str, state: State) -> Packed:
    """A state taken apart.

    >>> state_from(packed_state("State", {"bound": float("-inf"), "sizes": (3, [4, None])}))
    {'bound': -inf, 'sizes': (3, [4, None])}

    Raises:
        NotSaveableError: it holds something else than a `State` may.
    """
    tensors: dict[str, Tensor] = {}
    return Packed(kind, {"state": _outline(state, tensors)}, tensors)


def state_from(packed: Packed) -> State:
    """The way back."""
    return _filled(packed.about["state"], packed.tensors)


def _outline(state: State, tensors: dict[str, Tensor]) -> Any:
    if isinstance(state, float) and not isfinite(state):
        return {"float": str(state)}
    if state is None or type(state) in (bool, int, float, str):
        return state
    if isinstance(state, Tensor):
        name = str(len(tensors))
        tensors[name] = state
        return {"tensor": name}
    if isinstance(state, Mapping):
        if all(type(key) is str for key in state):
            return {"dict": {key: _outline(value, tensors) for key, value in state.items()}}
        # JSON would turn 0 into "0", and optimisers count their parameters.
        return {"pairs": [[_outline(part, tensors) for part in pair] for pair in state.items()]}
    if isinstance(state, list | tuple):
        kind = "list" if isinstance(state, list) else "tuple"
        return {kind: [_outline(value, tensors) for value in state]}
    raise NotSaveableError(
        f"a state may hold numbers, strings, tensors, and lists, tuples and dictionaries of these; "
        f"got {type(state).__name__}. Turn it into one of them in `state_dict`."
    )


def _filled(outline: Any, tensors: Mapping[str, Tensor]) -> State:
    if not isinstance(outline, dict):
        return outline
    ((kind, value),) = outline.items()
    if kind == "float":
        return float(value)
    if kind == "tensor":
        # A copy: where in a file a tensor lay must not decide how it is aligned, and so rounded.
        return tensors[value].clone()
    if kind == "dict":
        return {key: _filled(part, tensors) for key, part in value.items()}
    if kind == "pairs":
        return {_filled(key, tensors): _filled(part, tensors) for key, part in value}
    parts = [_filled(part, tensors) for part in value]
    return parts if kind == "list" else tuple(parts)
