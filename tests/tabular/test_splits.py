"""Rows that are held out: at random, in time, and by groups."""

import numpy as np
import pytest

from winnowgp import DataTable, fit_table
from winnowgp.errors import InputError, UnseenGroupsWarning
from winnowgp.tabular.splits import (
    copied_rows_warning,
    cross_validation_splits,
    held_out_split,
    time_column,
)

N = 40
DAYS = [f"2024-{1 + (7 * i) % 12:02d}-{1 + i % 28:02d}" for i in range(N)]
TABLE = DataTable.of(
    {
        "day": DAYS,
        "year": [2000 + (3 * i) % 10 for i in range(N)],
        "site": [f"s{(5 * i) % 8}" for i in range(N)],
        "one": ["a"] * N,
        "gap": [None if i == 4 else float(i) for i in range(N)],
    }
)


def ordered(name: str) -> np.ndarray:
    """The column as numbers."""
    if name == "day":
        return np.array(DAYS, dtype="datetime64[D]").astype(float)
    values = TABLE.numbers(name)
    assert values is not None
    return values


def test_random_split_is_that_of_the_seed() -> None:
    train, test = held_out_split(TABLE, 0.25, seed=3)
    assert len(test) == 10
    assert sorted([*train, *test]) == list(range(N))
    assert not np.array_equal(test, held_out_split(TABLE, 0.25, seed=4)[1])


@pytest.mark.parametrize("name", ["day", "year"])
def test_split_by_time_holds_out_the_last_rows(name: str) -> None:
    train, test = held_out_split(TABLE, 0.25, split_by=name)
    values = ordered(name)
    # No value is on both sides.
    assert values[train].max() < values[test].min()
    assert 8 <= len(test) <= 12
    assert sorted([*train, *test]) == list(range(N))


def test_split_by_group_holds_out_whole_groups() -> None:
    sites = TABLE.strings("site")
    seen = set()
    for seed in range(4):
        train, test = held_out_split(TABLE, 0.25, split_by="site", seed=seed)
        assert not set(sites[train]) & set(sites[test])
        assert len(test) == 10
        seen.add(tuple(test))
    assert len(seen) > 1


def test_folds_at_random_and_by_group_hold_out_each_row_once() -> None:
    sites = TABLE.strings("site")
    for split_by in (None, "site"):
        splits = cross_validation_splits(TABLE, 4, split_by=split_by, seed=1)
        assert sorted(np.concatenate([test for _, test in splits])) == list(range(N))
        for train, test in splits:
            assert sorted([*train, *test]) == list(range(N))
            assert len(test) == 10
            assert split_by is None or not set(sites[train]) & set(sites[test])


@pytest.mark.parametrize(("name", "folds"), [("day", 4), ("year", 9), ("year", 3)])
def test_folds_in_time_predict_later_rows_from_all_earlier_ones(name: str, folds: int) -> None:
    values = ordered(name)
    splits = cross_validation_splits(TABLE, folds, split_by=name)
    assert len(splits) == folds
    for number, (train, test) in enumerate(splits):
        assert len(test)
        assert values[train].max() < values[test].min()
        if number:
            before = splits[number - 1]
            np.testing.assert_array_equal(train, np.sort(np.concatenate(before)))
    assert len(np.concatenate(splits[-1])) == N


def test_folds_in_time_of_very_unequal_days_are_not_empty() -> None:
    table = DataTable.of({"day": np.repeat([1.0, 2.0, 3.0, 4.0], [1, 100, 1, 1])})
    splits = cross_validation_splits(table, 2, split_by="day")
    assert [len(test) for _, test in splits] == [1, 1]


def test_time_column_is_a_date_or_sorted_times() -> None:
    rising = DataTable.of({"x": [1.0, 2.0, 3.0], "Year": [1.0, 1.0, 2.0]})
    assert time_column(rising, []) == "Year"
    assert time_column(TABLE, ["day"]) == "day"
    assert time_column(TABLE, []) is None
    assert time_column(DataTable.of({"x": [1.0, 2.0, 3.0]}), []) is None


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: held_out_split(TABLE, 1.0), "`test_size` must be at least 0"),
        (lambda: held_out_split(TABLE, 0.999), "must leave rows for training"),
        (lambda: held_out_split(TABLE, 0.2, split_by="sit"), "'sit' is not among"),
        (lambda: held_out_split(TABLE, 0.2, split_by="one"), "two different values; 'one' has one"),
        (lambda: held_out_split(TABLE, 0.2, split_by="gap"), "in 1 rows, first in row 5"),
        (lambda: cross_validation_splits(TABLE, 1), "`folds` must be at least 2; got 1"),
        (lambda: cross_validation_splits(TABLE, 41), "at least 41 rows; the table has 40"),
        (lambda: cross_validation_splits(TABLE, 9, split_by="site"), "different values of 'site'"),
        (lambda: cross_validation_splits(TABLE, 10, split_by="year"), "11 different values"),
    ],
)
def test_impossible_splits_are_refused(call, message: str) -> None:
    with pytest.raises(InputError, match=message):
        call()


def test_copied_rows_are_counted() -> None:
    X = np.array([[0.5], [1.5], [0.5], [2.5], [1.5]])
    y = np.array([0.1, 0.2, 0.1, 0.3, 0.9])
    train, test = np.array([0, 1]), np.array([2, 3, 4])
    warning = copied_rows_warning(X, y, train, test)
    assert warning is not None
    assert "1 of 3 held-out rows are copies of training rows" in str(warning)
    assert copied_rows_warning(X, y, train, test[1:]) is None
    # Integers are often equal by chance.
    assert copied_rows_warning(X.round(), y, train, test) is None


# The levels of groups that were not seen cannot be predicted.
@pytest.mark.filterwarnings("ignore::winnowgp.errors.WorseThanConstantWarning")
@pytest.mark.usefixtures("quickly")
def test_groups_that_are_an_input_are_noted() -> None:
    rng = np.random.default_rng(0)
    group = np.repeat([f"p{i}" for i in range(12)], 10)
    level = np.repeat(rng.normal(size=12), 10)
    table = {"patient": group, "x": rng.uniform(size=120), "y": level + rng.normal(size=120)}
    settings = {"split_by": "patient", "kernel": "rbf", "max_points": 3}
    with pytest.warns(UnseenGroupsWarning, match="no held-out value of it was seen"):
        fit_table(table, "y", **settings)
    # Rows of a group are neighbours in the table: their order is not tested for periods.
    dropped = fit_table(table, "y", drop=("patient",), **settings)
    assert "PeriodicResidualsWarning" not in str(dropped.summary["alarms"])
