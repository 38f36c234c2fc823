"""Names of the columns of a file."""

from collections.abc import Iterable
from pathlib import Path

from winnowgp.errors import InputError


def distinct_names(header: Iterable[str], path: Path) -> list[str]:
    """Without blanks around them; an error if one is empty or there twice."""
    names = [name.strip() for name in header]
    for place, name in enumerate(names, start=1):
        if not name:
            raise InputError(
                f"{path}: column {place} has no name; give every column one "
                "(pandas: `to_csv(..., index=False)`)."
            )
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        shown = ", ".join(repr(name[:60]) for name in twice[:5])
        raise InputError(f"{path}: more than one column is called {shown}; rename them.")
    return names
