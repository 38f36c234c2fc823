"""Quality on held-out rows, compared with a constant prediction."""

import numpy as np
import pytest
from scipy.stats import norm

from winnowgp import SparseGPRegressor
from winnowgp.errors import NoInducingPointsWarning
from winnowgp.tabular.quality import regression_quality

X = np.linspace(0, 6, 24)[:, None]


@pytest.mark.parametrize("units", [1.0, 1e-9, 1e6])
def test_baseline_is_one_gaussian(units: float) -> None:
    y = units * (np.sin(X[:, 0]) + 3)
    model = SparseGPRegressor(schedule="paper", alpha=0.1, epochs=(3, 3, 3), random_state=0)
    model.fit(X[::2], y[::2])
    found = regression_quality(model, X[1::2], y[1::2], y_train=y[::2])
    (density,) = [m for m in found["metrics"] if m["name"] == "log density per observation"]
    expected = norm.logpdf(y[1::2], y[::2].mean(), y[::2].std()).mean()
    assert density["baseline"] == pytest.approx(expected)


@pytest.mark.usefixtures("quickly")
def test_constant_target_has_a_finite_baseline() -> None:
    """Both are as narrow as noise may be, a thousandth of the target's unit."""
    y = np.full(24, 7.0)
    with pytest.warns(NoInducingPointsWarning, match="same value"):
        model = SparseGPRegressor(max_points=2, random_state=0).fit(X, y)
    found = regression_quality(model, X, y, y_train=y)
    (density,) = [m for m in found["metrics"] if m["name"] == "log density per observation"]
    assert density["baseline"] == pytest.approx(norm.logpdf(0, scale=1e-3))
    assert density["value"] <= density["baseline"] + 1e-6
    assert density["value"] > density["baseline"] - 8
