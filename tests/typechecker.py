"""beartype, except that an int is a float as it is for every type checker."""

from collections.abc import Callable
from inspect import CO_NESTED
from types import FunctionType
from typing import Any

import jaxtyping
from beartype import BeartypeConf, beartype

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))

_jaxtyped = jaxtyping.jaxtyped


def leave_inner_functions() -> None:
    """Have the import hook pass over functions that are made inside others.

    They are made anew at every call, and each time their checks were compiled anew, whether checks
    are on or off: a quarter of the time of a checked fit. Their signatures name no shapes.
    """

    def jaxtyped(*, typechecker: Any) -> Callable[[Any], Any]:
        def decorated(made: Any) -> Any:
            if isinstance(made, FunctionType) and made.__code__.co_flags & CO_NESTED:
                return made
            return _jaxtyped(made, typechecker=typechecker)

        return decorated

    # What the hook writes above every function is `@jaxtyping.jaxtyped(typechecker=...)`.
    jaxtyping.jaxtyped = jaxtyped
