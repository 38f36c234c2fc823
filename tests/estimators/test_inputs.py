"""Inputs that are no numbers, or missing: the error says where, and what reads them."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
import pandas as pd
import pytest

from winnowgp import GPLVM, SparseGPClassifier, SparseGPRegressor
from winnowgp.errors import InputError

X = np.linspace(0, 6, 20)[:, None]
FRAME = pd.DataFrame({"size": X[:, 0], "colour": ["red", "blue"] * 10})
NAMES = ("regression", "classification")
FITS: list[Callable[[Any], Any]] = [
    lambda X: SparseGPRegressor().fit(X, np.arange(20.0)),
    lambda X: SparseGPClassifier().fit(X, [0, 1] * 10),
]


@pytest.mark.parametrize("fit", [*FITS, lambda X: GPLVM().fit(X)], ids=[*NAMES, "gplvm"])
@pytest.mark.parametrize("dtype", [object, "category"], ids=str)
def test_strings_name_their_column_and_what_reads_them(
    fit: Callable[[Any], Any], dtype: Any
) -> None:
    message = r"`X` must be numbers; column 'colour' has 'red' in row 0.*OneHotEncoder.*fit_table"
    with pytest.raises(InputError, match=message):
        fit(FRAME.astype({"colour": dtype}))


def test_strings_of_an_array_name_their_column_by_number() -> None:
    table = np.array([["1", "2"], ["3", "x"]])
    with pytest.raises(InputError, match="`X` must be numbers; column 1 has 'x' in row 1"):
        SparseGPRegressor().fit(table, [1, 2])
    with pytest.raises(InputError, match="column 0 has 'a' in row 0"):
        SparseGPRegressor().fit([["a"], ["b"]], [1, 2])


@pytest.mark.parametrize(
    "y", [["a", "b"] * 10, pd.Series(["a", "b"] * 10), pd.DataFrame({"y": ["a", "b"] * 10})]
)
def test_strings_among_targets_are_no_inputs(y: Any) -> None:
    with pytest.raises(InputError, match=r"`y` must be numbers; .*Use a classifier for labels"):
        SparseGPRegressor().fit(X, y)


@pytest.mark.parametrize("inputs", ["abc", ["a", "b"], [[["a"]], [["b"]]]])
def test_strings_of_another_shape_keep_the_error_of_the_shape(inputs: Any) -> None:
    with pytest.raises(ValueError, match=r"could not convert string to float|dim 3"):
        SparseGPRegressor().fit(inputs, [1, 2])


@pytest.mark.parametrize("fit", FITS, ids=NAMES)
def test_missing_inputs_name_the_first_and_what_imputes_them(fit: Callable[[Any], Any]) -> None:
    frame = FRAME[["size"]].assign(age=[1.0] * 7 + [np.nan] * 2 + [2.0] * 11)
    message = r"`X` contains NaN: column 'age' has 2, first in row 7.*fit_table.*missing='impute'"
    with pytest.raises(InputError, match=message):
        fit(frame)
    with pytest.raises(InputError, match="`X` contains NaN: column 1 has 2, first in row 7"):
        fit(frame.to_numpy())


def test_prediction_of_strings_and_missing_inputs_is_explained() -> None:
    model = SparseGPRegressor("rbf", max_points=2, hyper="point").fit(X, np.sin(X[:, 0]))
    with pytest.raises(InputError, match="column 0 has 'a' in row 1"):
        model.predict([["1"], ["a"]])
    with pytest.raises(InputError, match="`X` contains NaN: column 0 has 1, first in row 1"):
        model.predict([[1.0], [np.nan]])


@pytest.mark.parametrize("package", ["pandas", "polars"])
def test_series_as_inputs_is_refused(package: str) -> None:
    column = import_module(package).Series(np.linspace(0, 1, 8))
    with pytest.raises(ValueError, match=r"Expected (2D array|a 2-dimensional container)"):
        SparseGPRegressor("rbf").fit(column, np.arange(8.0))
