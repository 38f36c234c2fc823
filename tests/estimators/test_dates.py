"""Dates as inputs of estimators: days since 1970, as on the command line."""

from typing import Any

import numpy as np
import pandas
import pytest

from winnowgp import GPLVM, SparseGPClassifier, SparseGPRegressor

DATES = np.datetime64("2024-01-01") + np.arange(40)
Y = np.sin(np.arange(40) / 6)
DAYS = 19_723.0 + np.arange(40)
QUICK: dict[str, Any] = {
    "schedule": "paper",
    "alpha": 0.01,
    "epochs": (20, 5, 10),
    "n_candidates": 6,
    "random_state": 0,
}


@pytest.fixture(scope="module")
def model() -> SparseGPRegressor:
    """A model of days as numbers."""
    return SparseGPRegressor("rbf", **QUICK).fit(DAYS[:, None], Y)


@pytest.mark.parametrize(
    "X",
    [
        DATES[:, None],
        DATES.astype("datetime64[ns]")[:, None],
        pandas.DataFrame({"day": DATES}),
        pandas.DataFrame({"day": pandas.Series(DATES).dt.tz_localize("UTC")}),
        pandas.DataFrame({"day": DATES}).to_numpy(dtype=object),
    ],
    ids=["days", "nanoseconds", "frame", "frame with time zone", "objects"],
)
@pytest.mark.filterwarnings("ignore:X has feature names")
def test_prediction_at_dates_is_that_at_days(X: Any, model: SparseGPRegressor) -> None:
    np.testing.assert_array_equal(model.predict(X), model.predict(DAYS[:, None]))


def test_fit_to_dates_is_the_fit_to_days(model: SparseGPRegressor) -> None:
    frame = pandas.DataFrame({"day": DATES})
    dated = SparseGPRegressor("rbf", **QUICK).fit(frame, Y)
    assert dated.feature_names_in_.tolist() == ["day"]
    np.testing.assert_array_equal(dated.predict(frame), model.predict(DAYS[:, None]))
    points = np.sort(dated.inducing_points_[:, 0])
    np.testing.assert_array_equal(points, np.sort(model.inducing_points_[:, 0]))


def test_classifier_takes_dates_beside_numbers() -> None:
    frame = pandas.DataFrame({"day": DATES, "x": Y})
    classifier = SparseGPClassifier("rbf", **QUICK).fit(frame, Y > 0)
    numbers = pandas.DataFrame({"day": DAYS, "x": Y})
    np.testing.assert_array_equal(
        classifier.predict_proba(frame), classifier.predict_proba(numbers)
    )


def test_missing_date_is_refused(model: SparseGPRegressor) -> None:
    dates = DATES[:, None].copy()
    dates[3] = "NaT"
    with pytest.raises(ValueError, match="NaN"):
        model.predict(dates)


def test_gplvm_reads_dates_as_days() -> None:
    frames = [pandas.DataFrame({"day": day[:12], "x": Y[:12]}) for day in (DATES, DAYS)]
    dated, numbers = (
        GPLVM(n_components=1, max_points=2, max_iter=2, random_state=0).fit_transform(frame)
        for frame in frames
    )
    np.testing.assert_array_equal(dated, numbers)
