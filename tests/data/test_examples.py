"""The synthetic tables."""

import numpy as np
import pytest

from winnowgp.data import example_table
from winnowgp.data.catalogue import EXAMPLES
from winnowgp.errors import InputError


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_table_has_the_same_rows_each_time(name: str) -> None:
    first, second = example_table(name), example_table(name)
    assert first.N >= 300
    for column in first.names:
        assert first.strings(column).tolist() == second.strings(column).tolist()


def test_example_table_unknown_name_raises() -> None:
    with pytest.raises(InputError, match=r"must be one of houses, .*; got 'boston'"):
        example_table("boston")


def test_churn_has_four_per_cent_and_a_column_that_knows() -> None:
    table = example_table("churn")
    left, fee = table.strings("churned") == "yes", table.numbers("closing_fee")
    assert fee is not None
    assert 0.035 < left.mean() < 0.045
    assert ((fee > 0) == left).all()


def test_sensor_has_gaps_and_empty_cells() -> None:
    table = example_table("sensor")
    hours = np.diff(np.array(table.strings("time"), dtype="datetime64[h]")).astype(int)
    assert (hours > 24).sum() == 2
    assert table.missing("temperature").any()


def test_visits_are_counts_with_outliers() -> None:
    visitors = example_table("visits").numbers("visitors")
    assert visitors is not None
    assert (visitors == np.round(visitors)).all()
    assert (visitors >= 0).all()
    assert visitors.max() > 10 * np.median(visitors)
