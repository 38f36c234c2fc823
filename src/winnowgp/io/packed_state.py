"""Nested states, as `state_dict` gives them, in words and tensors."""

from collections.abc import Mapping
from math import isfinite
from typing import Any, TypeAlias

import numpy as np
from torch import Tensor

from winnowgp.errors import NotSaveableError
from winnowgp.io.packed import Packed

State: TypeAlias = Any
"""None, a truth value, number, string or tensor, or lists, tuples and dictionaries of these.

A scalar of NumPy's comes back as the plain number that it is, a tensor of no dimensions as itself.
"""


def packed_state(kind: str, state: State) -> Packed:
    """A state taken apart.

    >>> state_from(packed_state("State", {"bound": float("-inf"), "sizes": (3, [4, None])}))
    {'bound': -inf, 'sizes': (3, [4, None])}

    Raises:
        NotSaveableError: it holds something else than a `State` may.
    """
    tensors: dict[str, Tensor] = {}
    return Packed(kind, {"state": _outline(state, tensors, "")}, tensors)


def state_from(packed: Packed) -> State:
    """The way back.

    Raises:
        KeyError: it says something that `packed_state` does not, or asks for a tensor twice, which
            would let a small file fill memory.
    """
    return _filled(packed.about["state"], dict(packed.tensors))


def _outline(state: State, tensors: dict[str, Tensor], at: str) -> Any:
    """What JSON can say of the part of a state that is found at a path."""
    if isinstance(state, np.generic):
        state = state.item()
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
            parts = {key: _outline(value, tensors, f"{at}.{key}") for key, value in state.items()}
            return {"dict": parts}
        # JSON would turn 0 into "0", and optimisers count their parameters.
        pairs = [(f"{at}.{key}", (key, value)) for key, value in state.items()]
        return {"pairs": [[_outline(part, tensors, p) for part in pair] for p, pair in pairs]}
    if isinstance(state, list | tuple):
        kind = "list" if isinstance(state, list) else "tuple"
        return {kind: [_outline(v, tensors, f"{at}.{i}") for i, v in enumerate(state)]}
    where = f" for `{at.removeprefix('.')}`" if at else ""
    raise NotSaveableError(
        f"a state may hold numbers, strings, tensors, and lists, tuples and dictionaries of these; "
        f"got {type(state).__name__}{where}. Turn it into one of them in `state_dict`."
    )


def _filled(outline: Any, tensors: dict[str, Tensor]) -> State:
    if not isinstance(outline, dict):
        return outline
    ((kind, value),) = outline.items()
    if kind == "float":
        return float(value)
    if kind == "tensor":
        # A copy: where in a file a tensor lay must not decide how it is aligned, and so rounded.
        return tensors.pop(value).clone()
    if kind == "dict":
        return {key: _filled(part, tensors) for key, part in value.items()}
    if kind == "pairs":
        return {_filled(key, tensors): _filled(part, tensors) for key, part in value}
    made = {"list": list, "tuple": tuple}[kind]
    return made(_filled(part, tensors) for part in value)
