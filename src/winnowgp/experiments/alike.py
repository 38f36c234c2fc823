"""Rows of a kind."""

from collections.abc import Sequence

from winnowgp.experiments.runs import Row


def alike(rows: Sequence[Row], *columns: str) -> list[list[Row]]:
    """Rows that agree in some columns, in the order in which they came.

    >>> alike([{"a": 1, "b": 0}, {"a": 2}, {"a": 1, "b": 5}], "a")
    [[{'a': 1, 'b': 0}, {'a': 1, 'b': 5}], [{'a': 2}]]
    """
    found: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row.get(column) for column in columns), []).append(row)
    return list(found.values())
