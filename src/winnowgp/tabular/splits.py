"""Which rows of a table are held out: at random, the last ones in time, or whole groups."""

from collections.abc import Iterable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from winnowgp.data import DataTable
from winnowgp.data.columns import column_kinds
from winnowgp.errors import (
    CopiedRowsWarning,
    InputError,
    RandomSplitWarning,
    UnseenGroupsWarning,
)

Rows: TypeAlias = NDArray[np.intp]
Split: TypeAlias = tuple[Rows, Rows]
"""Row numbers for training and for testing, each in ascending order."""

# Names of columns that hold times, if the rows are in their order.
_TIMES = frozenset(
    ("time", "t", "timestamp", "date", "datetime", "day", "week", "month", "year", "hour", "minute")
)


def held_out_split(
    table: DataTable,
    test_size: float,
    *,
    split_by: str | None = None,
    seed: int = 0,
    dates: str = "auto",
) -> Split:
    """Return training and test rows.

    Args:
        test_size: share of the rows to hold out, at least 0 and below 1.
        split_by: None for rows at random. Dates or numbers: the rows with the largest ones. Strings
            are groups, and whole groups are held out, drawn with `seed`. Rows with equal values
            stay together.
        dates: order of day and month in dates, as for `fit_table`.
    """
    if not 0 <= test_size < 1:
        raise InputError(f"`test_size` must be at least 0 and below 1; got {test_size}.")
    if round(table.N * test_size) >= table.N:
        raise InputError(
            f"`test_size` must leave rows for training; got {test_size:g} of {table.N}."
        )
    if split_by is None:
        order = np.random.default_rng(seed).permutation(table.N)
        held_out = round(table.N * test_size)
        return np.sort(order[held_out:]), np.sort(order[:held_out])
    blocks = _blocks(table, split_by, seed=seed, dates=dates)
    if test_size == 0:
        return np.arange(table.N), np.arange(0)
    rows_before = np.cumsum([0, *(len(block) for block in blocks)])[1:-1]
    if not len(rows_before):
        raise InputError(
            f"`split_by` must name a column with at least two different values; {split_by!r} has "
            "one."
        )
    # The cut between two values that is closest to the requested share.
    cut = int(np.abs(rows_before - (1 - test_size) * table.N).argmin()) + 1
    return _joined(blocks[:cut]), _joined(blocks[cut:])


def cross_validation_splits(
    table: DataTable,
    folds: int,
    *,
    split_by: str | None = None,
    seed: int = 0,
    dates: str = "auto",
) -> list[Split]:
    """Return one split per fold.

    Rows at random, and groups, are each held out once. In time, the rows are divided into one more
    part than there are folds, and each part but the first is predicted from all earlier ones.

    Args:
        folds: number of folds, at least two.
        split_by: as for `held_out_split`.
        dates: as for `held_out_split`.
    """
    if folds < 2:
        raise InputError(f"`folds` must be at least 2; got {folds}. Use 5 or 10.")
    if split_by is None:
        order = np.random.default_rng(seed).permutation(table.N)
        blocks = [np.array([row]) for row in order]
    else:
        blocks = _blocks(table, split_by, seed=seed, dates=dates)
    ordered = split_by is not None and _times(table, split_by, dates=dates) is not None
    parts = folds + 1 if ordered else folds
    if len(blocks) < parts:
        what = "rows" if split_by is None else f"different values of {split_by!r}"
        raise InputError(
            f"{folds} folds need at least {parts} {what}; the table has {len(blocks)}. Use fewer "
            "folds."
        )
    groups = _consecutive(blocks, parts) if ordered else _balanced(blocks, parts)
    if ordered:
        return [(_joined(groups[:k]), groups[k]) for k in range(1, parts)]
    everything = np.arange(table.N)
    return [(np.setdiff1d(everything, group), group) for group in groups]


def time_column(table: DataTable, dates: Iterable[str]) -> str | None:
    """Return a column that makes the table a series: a date, or a sorted column of times.

    Args:
        dates: names of columns that hold dates.
    """
    for name in dates:
        return name
    for name in table.names:
        values = table.numbers(name) if name.strip().lower() in _TIMES else None
        if values is not None and len(values) > 2 and bool((np.diff(values) >= 0).all()):
            return name
    return None


def has_groups(table: DataTable, name: str, *, dates: str = "auto") -> bool:
    """Return whether a column of `split_by` holds groups, rather than numbers or dates."""
    return _times(table, name, dates=dates) is None


def unseen_groups_warning(name: str) -> UnseenGroupsWarning:
    """Return a warning that the groups which are held out are also an input."""
    return UnseenGroupsWarning(
        f"column {name!r} is an input, and no held-out value of it was seen in training: it says "
        "nothing about new groups, and their intervals are too narrow. Leave it out of the inputs "
        f"with `drop` (`--drop {name}`); rows are still split by it."
    )


def copied_rows_warning(
    X: NDArray[np.float64], y: NDArray[np.float64], train: Rows, test: Rows
) -> CopiedRowsWarning | None:
    """Return a warning if at least a tenth of the test rows equal training rows.

    Integers and categories alone are often equal by chance, and are not tested.
    """
    fractional = [bool((v != np.round(v)).any()) for v in (X, y)]
    if not len(test) or not all(fractional):
        return None
    known = {row.tobytes() for row in np.column_stack([X[train], y[train]])}
    copies = sum(row.tobytes() in known for row in np.column_stack([X[test], y[test]]))
    if copies < 0.1 * len(test):
        return None
    return CopiedRowsWarning(
        f"{copies} of {len(test)} held-out rows are copies of training rows, so that the quality "
        "is better than that of new rows. Remove copies from the table, or hold them out together "
        "with a column of groups and `split_by` (`--split-by`)."
    )


def random_split_warning(table: DataTable, dates: Iterable[str]) -> RandomSplitWarning | None:
    """Return a warning if rows that are held out at random belong to a series.

    Args:
        dates: names of columns that hold dates.
    """
    if (name := time_column(table, dates)) is None:
        return None
    return RandomSplitWarning(
        f"rows were held out at random, and column {name!r} says when they were observed: most "
        "have training rows just before and after them, so that the quality is that of filling "
        f"gaps. For the quality of predicting later rows, use `split_by={name!r}` "
        f"(`--split-by {name!r}`)."
    )


def _blocks(table: DataTable, name: str, *, seed: int, dates: str) -> list[Rows]:
    """Return the rows of each value of a column: in its order, or groups in random order."""
    table.require_columns([name], argument="`split_by`")
    missing = table.missing(name)
    if missing.any():
        raise InputError(
            f"the column {name!r} of `split_by` must not be missing; it is in "
            f"{int(missing.sum())} rows, first in row {int(missing.argmax()) + 1}."
        )
    values = _times(table, name, dates=dates)
    keys = table.strings(name).astype(str) if values is None else values
    inverse = np.unique(keys, return_inverse=True)[1]
    order = np.argsort(inverse, kind="stable")
    blocks = np.split(order, np.flatnonzero(np.diff(inverse[order])) + 1)
    if values is None:
        blocks = [blocks[i] for i in np.random.default_rng(seed).permutation(len(blocks))]
    return blocks


def _times(table: DataTable, name: str, *, dates: str) -> NDArray[np.float64] | None:
    """Return a column of numbers or dates as numbers; None for groups."""
    kind = column_kinds(table, [name], dates=dates)[name]
    if kind.kind == "number":
        return table.numbers(name, kind.notation)
    return kind.notation.values(table.strings(name), "date") if kind.kind == "date" else None


def _consecutive(blocks: list[Rows], parts: int) -> list[Rows]:
    """Divide blocks in order into parts of about equal numbers of rows, none of them empty."""
    groups: list[list[Rows]] = [[] for _ in range(parts)]
    number, before, total = 0, 0, sum(len(block) for block in blocks)
    for i, block in enumerate(blocks):
        if i:
            # At least so far that the blocks that are left suffice, and no part is skipped.
            wanted = max(before * parts // total, parts - (len(blocks) - i), number)
            number = min(wanted, number + 1)
        groups[number].append(block)
        before += len(block)
    return [_joined(group) for group in groups]


def _balanced(blocks: list[Rows], parts: int) -> list[Rows]:
    """Divide blocks into parts of about equal numbers of rows, the largest blocks first."""
    groups: list[list[Rows]] = [[] for _ in range(parts)]
    sizes = np.zeros(parts)
    for block in sorted(blocks, key=len, reverse=True):
        least = int(sizes.argmin())
        groups[least].append(block)
        sizes[least] += len(block)
    return [_joined(group) for group in groups]


def _joined(blocks: list[Rows]) -> Rows:
    return np.sort(np.concatenate(blocks))
