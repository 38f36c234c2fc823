"""beartype for the first calls of every function in every test.

A fit calls some functions ten thousand times, with shapes that repeat: checking every call would
take more than half of the time of all tests. A check is generated at the first call that needs it,
because generating one takes long too.
"""

from dataclasses import is_dataclass
from functools import wraps
from inspect import CO_NESTED
from types import FunctionType
from typing import Any

import jaxtyping
from beartype import BeartypeConf, beartype

ENOUGH = 2
"""Calls of a function that are checked in one test."""

# An int is a float, as it is for every type checker.
checked = beartype(conf=BeartypeConf(is_pep484_tower=True))

_jaxtyped = jaxtyping.jaxtyped
_wanted, _test = True, 0


def begin_test(*, wanted: bool) -> None:
    """Reset the number of calls, and switch the checks on or off."""
    global _wanted, _test
    _wanted, _test = wanted, _test + 1


def check_first_calls() -> None:
    """Make the import hook check the first calls, and skip functions defined inside others.

    Those are defined anew at every call, and so would be their checks. Their signatures name no
    shapes.
    """

    def jaxtyped(fn: Any = None, *, typechecker: Any = None) -> Any:
        if fn is not None:  # `with jaxtyped("context")` is not a decorator
            return _jaxtyped(fn)

        def decorated(made: Any) -> Any:
            if is_dataclass(made):
                made.__init__ = _checked_at_first(made.__init__, typechecker)
            elif isinstance(made, FunctionType) and not made.__code__.co_flags & CO_NESTED:
                return _checked_at_first(made, typechecker)
            return made

        return decorated

    # What the hook writes above every function is `@jaxtyping.jaxtyped(typechecker=...)`.
    jaxtyping.jaxtyped = jaxtyped


def _checked_at_first(made: Any, typechecker: Any) -> Any:
    checks, test, calls = None, -1, 0

    @wraps(made)
    def called(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        nonlocal checks, test, calls
        if not _wanted:
            return made(*args, **kwargs)
        if test != _test:
            test, calls = _test, 0
        calls += 1
        if calls > ENOUGH:
            return made(*args, **kwargs)
        if checks is None:
            checks = _jaxtyped(made, typechecker=typechecker)
        return checks(*args, **kwargs)

    return called
