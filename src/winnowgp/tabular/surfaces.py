"""Predictions on a grid, for models of tables with two numeric inputs."""

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from winnowgp.data import DataTable
from winnowgp.errors import InputError
from winnowgp.estimators.base import first_points
from winnowgp.estimators.classification import ClassTargets
from winnowgp.plots.predictions import ClassMap, Surface
from winnowgp.tabular.model import TabularModel

SIDE = 80


def surface(model: TabularModel, *, side: int = SIDE) -> Surface | ClassMap:
    """Return predictions on a grid over the range of the table's two inputs, numbers or dates.

    They are means, or probabilities of the second of two classes.

    Args:
        side: number of grid points along each input.
    """
    first, second = numeric_inputs(model)
    axes = [_axis(model, name, side) for name in (first, second)]
    x, y = np.meshgrid(*axes)
    features = [model.encoder.features.index(name) for name in (first, second)]
    # Columns with missing values have another feature, which is zero where a value is known.
    X = np.zeros((x.size, len(model.encoder.features)))
    X[:, features] = np.stack([x.ravel(), y.ravel()], 1)
    grid = [torch.from_numpy(axis) for axis in axes]
    points = torch.from_numpy(first_points(model.estimator)[:, features])
    if isinstance(model.estimator, ClassTargets):
        probability = torch.from_numpy(model.estimator.predict_proba(X)[:, 1].reshape(x.shape))
        return ClassMap(grid[0], grid[1], probability, points[:0], points)
    mean = torch.from_numpy(model.estimator.predict(X).reshape(x.shape))
    return Surface(grid[0], grid[1], mean, points)


def surface_rows(
    model: TabularModel, table: DataTable
) -> tuple[Float[Tensor, "N 2"], Float[Tensor, " N"]]:
    """Return rows of a table for the plot: inputs, and targets or class numbers.

    Rows with a missing value or an unknown class are left out.
    """
    names = numeric_inputs(model)
    table.require_columns([*names, model.target], argument="the table of the plot")
    columns = [column.values(table) for column in model.encoder.columns]
    columns.append(_targets(model, table))
    rows = np.stack(columns, 1)
    rows = torch.from_numpy(rows[np.isfinite(rows).all(1)])
    return rows[:, :2], rows[:, 2]


def numeric_inputs(model: TabularModel) -> tuple[str, str]:
    """Return the names of the two inputs, numbers or dates.

    Raises:
        InputError: the model has other inputs, or more than two classes.
    """
    columns = model.encoder.columns
    if len(columns) != 2 or any(column.kind == "category" for column in columns):
        kinds = ", ".join(
            f"{column.name!r} ({'categorical' if column.kind == 'category' else column.kind})"
            for column in columns[:6]
        )
        raise InputError(
            f"a surface needs a model with two numeric inputs; this model has {kinds}"
            f"{' and more' if len(columns) > 6 else ''}. Plot effects instead."
        )
    estimator = model.estimator
    if isinstance(estimator, ClassTargets) and len(estimator.classes_) > 2:
        raise InputError(
            f"a surface needs a numeric target or two classes; this model has "
            f"{len(estimator.classes_)}. Plot effects instead."
        )
    return columns[0].name, columns[1].name


def _axis(model: TabularModel, name: str, side: int) -> NDArray[np.float64]:
    (spread,) = [c["spread"] for c in model.summary["columns"] if c["name"] == name]
    low, high = spread[0], spread[-1]
    if low == high:
        low, high = low - 0.5, high + 0.5
    return np.linspace(low, high, side)


def _targets(model: TabularModel, table: DataTable) -> NDArray[np.float64]:
    if isinstance(model.estimator, ClassTargets):
        number = {str(c): float(i) for i, c in enumerate(model.estimator.classes_)}
        return np.array([number.get(str(w), np.nan) for w in table.strings(model.target)])
    values = table.numbers(model.target, model.encoder.target)
    if values is None:
        raise InputError(
            f"column {model.target!r} must be numeric to be plotted; it has strings. Correct them."
        )
    return values
