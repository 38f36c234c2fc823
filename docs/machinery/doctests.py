"""Examples in docstrings become blocks of code, wherever in the docstring they stand."""

import re
from typing import Any

import griffe

# Prompts and what they print, up to an empty line; not within a list or a table.
EXAMPLE = re.compile(r"^( *)>>> .*?(?=\n[ \t]*\n|\Z)", re.M | re.S)


def with_examples(docstring: str) -> str:
    """The docstring with every doctest in a fence."""
    return EXAMPLE.sub(
        lambda found: f"{found[1]}```pycon\n{found.group()}\n{found[1]}```", docstring
    )


class Doctests(griffe.Extension):
    """Fences for mkdocstrings."""

    def on_instance(self, *, obj: Any, **_: Any) -> None:
        """Every object that was just read."""
        if obj.docstring is not None:
            obj.docstring.value = with_examples(obj.docstring.value)
