"""Options that say how a table is read."""

from typing import Any

import pytest

from winnowgp import DataTable, fit_table
from winnowgp.errors import InputError
from winnowgp.tabular import fit_outputs_table
from winnowgp.tabular.reading import Reading

TABLE = DataTable.of(
    {"a": [1.0, 2.0], "b": [2.0, 1.0], "ab": [0.0, 1.0], "y": [1.0, 3.0], "z": [1.0, 2.0]}
)


@pytest.mark.parametrize("option", ["drop", "categorical"])
def test_one_string_of_columns_is_refused(option: str) -> None:
    # Its characters are columns, too: without an error "a" and "b" would be left out.
    columns: dict[str, Any] = {option: "ab"}
    message = rf"`{option}` must be a sequence of column names, such as \('ab',\); got the string"
    with pytest.raises(InputError, match=message):
        fit_table(TABLE, "y", **columns)
    with pytest.raises(InputError, match=message):
        fit_outputs_table(TABLE, ["y", "z"], **columns)


def test_columns_may_be_given_by_an_iterator() -> None:
    columns: dict[str, Any] = {"drop": iter(["b"]), "categorical": iter(["a"])}
    reading = Reading(
        test_size=0.2,
        split_by=None,
        id_column=None,
        decimal="auto",
        dates="auto",
        missing="error",
        max_categories=10,
        seed=0,
        **columns,
    )
    for _ in range(2):
        assert reading.ignored == ("b",)
        assert reading.categorical == ("a",)
