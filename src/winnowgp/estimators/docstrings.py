"""Docstrings of estimators, completed with what their base classes document."""

import re
from inspect import cleandoc
from typing import Any, TypeVar

Estimator = TypeVar("Estimator", bound=type)

_SECTION = re.compile(r"^(Args|Attributes):\n((?:    .*\n|\n(?=    ))+)\n*", re.MULTILINE)
_ENTRY = re.compile(r"^    (\w+): (?:.*\n(?:     .*\n)*)", re.MULTILINE)
_EXAMPLES = re.compile(r"^>>> ", re.MULTILINE)


def documented(cls: Estimator) -> Estimator:
    """Complete the docstring of an estimator with those of its base classes.

    Each class documents the arguments and fitted attributes that it declares itself. Those of its
    bases follow, unless the class describes them anew.

    >>> class Base:
    ...     '''A base.
    ...
    ...     Args:
    ...         a: a number.
    ...     '''
    >>> @documented
    ... class Derived(Base):
    ...     '''A derived class.
    ...
    ...     Args:
    ...         b: another number.
    ...     '''
    >>> print(Derived.__doc__)
    A derived class.
    <BLANKLINE>
    Args:
        b: another number.
        a: a number.
    """
    description, examples = _SECTION.sub("", _own_docstring(cls)), ""
    if begin := _EXAMPLES.search(description):
        description, examples = description[: begin.start()], description[begin.start() :]
    blocks = [description.strip()]
    for title in ("Args", "Attributes"):
        entries: dict[str, str] = {}
        for base in cls.__mro__:
            for name, text in _entries(base, title).items():
                entries.setdefault(name, text)
        if entries:
            blocks.append(f"{title}:\n{''.join(entries.values())}".rstrip())
    cls.__doc__ = "\n\n".join([*blocks, *([examples.strip()] if examples else [])])
    return cls


def _own_docstring(cls: type[Any]) -> str:
    return cleandoc(vars(cls).get("__doc__") or "") + "\n"


def _entries(cls: type[Any], title: str) -> dict[str, str]:
    """Return the entries of a section in a class's own docstring, by name."""
    return {
        entry.group(1): entry.group()
        for section in _SECTION.finditer(_own_docstring(cls))
        if section.group(1) == title
        for entry in _ENTRY.finditer(section.group(2))
    }
