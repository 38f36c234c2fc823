"""Surfaces equal `predict` on their grid."""

from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from helpers.short_fits import shortest_fits
from winnowgp import DataTable, SparseGPRegressor, fit_table
from winnowgp.errors import InputError
from winnowgp.plots.predictions import ClassMap, Surface, date_axis
from winnowgp.tabular.surfaces import surface, surface_rows

rng = np.random.default_rng(0)
x, z = rng.uniform(0, 6, 40), rng.uniform(10, 20, 40)
height = np.sin(x) + 0.3 * z + 0.1 * rng.normal(size=40)


def test_surface_equals_predict() -> None:
    holes = np.where(np.arange(40) == 3, np.nan, x)
    table = DataTable.of({"z": z, "x": holes, "height": height})
    with shortest_fits():
        model = fit_table(table, "height", missing="impute", tolerance=0.5, test_size=0)
    found = surface(model, side=5)
    assert isinstance(found, Surface)
    assert (found.x[0], found.x[-1]) == (z.min(), z.max())
    at = DataTable.of({"z": [found.x[1].item()], "x": [found.y[3].item()]})
    assert found.mean[3, 1].item() == pytest.approx(model.predict(at)["mean"][0])
    # A hole in training made a third column, which says where: not one of the picture.
    assert model.encoder.features == ("z", "x", "x missing")
    assert isinstance(model.estimator, SparseGPRegressor)
    np.testing.assert_array_equal(found.points, model.estimator.inducing_points_[:, :2])
    X, targets = surface_rows(model, table)
    np.testing.assert_array_equal(X, np.stack([z, x], 1)[np.arange(40) != 3])
    np.testing.assert_array_equal(targets, height[np.arange(40) != 3])


# Half of the labels are noise.
@pytest.mark.filterwarnings("ignore::winnowgp.errors.NoInducingPointsWarning")
@pytest.mark.usefixtures("quickly")
def test_surface_of_two_classes_is_a_probability_three_are_refused() -> None:
    sides = np.where(height + np.random.default_rng(1).normal(size=40) > 4.5, "over", "under")
    table = DataTable.of({"x": x, "z": z, "side": sides})
    model = fit_table(table, "side", tolerance=0.5, kernel="rbf")
    found = surface(model, side=4)
    assert isinstance(found, ClassMap)
    at = DataTable.of({"x": [found.x[2].item()], "z": [found.y[0].item()]})
    assert found.probability[0, 2].item() == pytest.approx(model.predict(at)["p_under"][0])
    _, numbers = surface_rows(model, DataTable({**table.values, "side": table.strings("side")}))
    np.testing.assert_array_equal(numbers, sides == "under")
    estimator: Any = copy(model.estimator)
    estimator.classes_ = np.array(["east", "over", "under"])
    with pytest.raises(InputError, match="two classes; this model has 3"):
        surface(replace(model, estimator=estimator))


def test_surface_of_a_date_has_days() -> None:
    days = [str(np.datetime64("2024-03-01") + np.timedelta64(i, "D")) for i in range(40)]
    table = DataTable.of({"day": days, "z": z, "height": height})
    with shortest_fits():
        model = fit_table(table, "height", kernel="rbf", max_points=4, test_size=0)
    found = surface(model, side=5)
    first = float((np.datetime64("2024-03-01") - np.datetime64("1970-01-01")).astype(int))
    assert (found.x[0], found.x[-1]) == (first, first + 39)
    X, _ = surface_rows(model, table)
    np.testing.assert_array_equal(X[:, 0], first + np.arange(40))
    ax = Figure().subplots()
    ax.plot(found.x, found.x)
    date_axis(ax.xaxis)
    labels = [ax.xaxis.get_major_formatter()(tick) for tick in ax.get_xticks()]
    assert any("Mar" in label or label.isdigit() for label in labels)
