"""Quality on labelled rows, paired comparisons and cross-validation, against hand computations."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy.stats import lognorm, norm

from helpers.short_fits import short_fits, shortest_fits
from winnowgp import DataTable, SparseGPClassifier, SparseGPRegressor, TabularModel, fit_table
from winnowgp.errors import (
    InputError,
    LikelihoodWarning,
    RandomSplitWarning,
    WorseThanConstantWarning,
)
from winnowgp.report.summary import Quality
from winnowgp.tabular import compare_models, cross_validate_table, evaluate_model
from winnowgp.tabular.evaluation import pooled_quality
from winnowgp.tabular.targets import implied_task, likelihood_warning

RNG = np.random.default_rng(1)
QUICK: dict[str, Any] = {"kernel": "rbf", "tolerance": 1.0, "hyper": "point"}
BRIEF: dict[str, Any] = {
    "schedule": "paper",
    "alpha": 0.01,
    "epochs": (40, 5, 5),
    "n_candidates": 6,
    "random_state": 0,
}


def made(N: int) -> DataTable:
    x = RNG.uniform(0, 6, N)
    y = np.exp(3 + np.sin(x) + 0.2 * RNG.normal(size=N))
    return DataTable.of({"x": x, "y": y, "up": np.where(y > 20, "yes", "no"), "row": np.arange(N)})


TRAIN, TEST = made(40), made(30)


@pytest.fixture(scope="module")
def fits() -> dict[str, TabularModel]:
    """Models of y, of its logarithm and of a class, the last two fitted briefly."""
    with short_fits():
        plain = fit_table(TRAIN, "y", drop=("up", "row"), test_size=0, **QUICK)
    X, y = plain.encoder.encode(TRAIN), column(TRAIN, "y")
    log = SparseGPRegressor("rbf", log_target=True, **BRIEF).fit(X, y)
    classes = SparseGPClassifier("rbf", **BRIEF).fit(X, TRAIN.strings("up").astype(str))
    summary: Any = {**plain.summary, "target": "up", "task": "classification"}
    return {
        "plain": plain,
        "log": replace(plain, estimator=log),
        "classes": replace(plain, estimator=classes, summary=summary),
    }


def column(table: DataTable, name: str) -> np.ndarray:
    values = table.numbers(name)
    assert values is not None
    return values


def densities(model: TabularModel, table: DataTable) -> np.ndarray:
    """Log density of each row, from SciPy and the model's own mean and deviation."""
    predicted, y = model.predict(table), column(table, "y")
    mean, sd = predicted["mean"], predicted["sd"]
    if not getattr(model.estimator, "log_target", False):
        return norm.logpdf(y, mean, sd)
    s2 = np.log1p((sd / mean) ** 2)
    return lognorm.logpdf(y, np.sqrt(s2), scale=mean * np.exp(-s2 / 2))


def metrics(quality: Quality, key: str = "value") -> dict[str, float]:
    return {metric["name"]: metric[key] for metric in quality["metrics"]}


@pytest.mark.parametrize("name", ["plain", "log"])
def test_evaluation_of_regression_by_hand(fits: dict[str, TabularModel], name: str) -> None:
    model, y = fits[name], column(TEST, "y")
    quality, predicted = evaluate_model(model, TEST), model.predict(TEST)
    found, constant = metrics(quality), metrics(quality, "baseline")
    assert quality["rows"] == 30
    rmse = np.sqrt(np.mean((y - predicted["mean"]) ** 2))
    assert found["RMSE"] == pytest.approx(rmse)
    assert found["R²"] == pytest.approx(1 - rmse**2 / y.var())
    density = "log density per observation"
    assert found[density] == pytest.approx(densities(model, TEST).mean())
    assert constant[density] == pytest.approx(norm.logpdf(y, y.mean(), y.std()).mean())
    inside = ((y >= predicted["lower"]) & (y <= predicted["upper"])).mean()
    assert dict(quality["coverage"])[0.95] == pytest.approx(inside)


def test_evaluation_leaves_out_rows_without_target(fits: dict[str, TabularModel]) -> None:
    values = TEST.values["y"].copy()
    values[:5] = np.nan
    partly = DataTable({**TEST.values, "y": values})
    expected = evaluate_model(fits["plain"], TEST.part(slice(5, None)))
    assert evaluate_model(fits["plain"], partly) == expected


def test_comparison_has_paired_standard_errors(fits: dict[str, TabularModel]) -> None:
    density, error_of_mean = compare_models(fits["plain"], fits["log"], TEST)
    first, second = (densities(fits[name], TEST) for name in ("plain", "log"))
    assert (density.rows, density.name, density.better) == (30, "log density", "higher")
    assert (error_of_mean.name, error_of_mean.better) == ("absolute error", "lower")
    assert density.first == pytest.approx(first.mean())
    assert density.second == pytest.approx(second.mean())
    assert density.difference == pytest.approx((second - first).mean())
    # √(Σ (d − d̄)² / (N − 1) / N)
    d = second - first
    error = np.sqrt(((d - d.mean()) ** 2).sum() / 29 / 30)
    assert density.standard_error == pytest.approx(error)
    # Unpaired, the error would be that of the rows.
    assert error < 0.9 * np.sqrt((first.var() + second.var()) / 30)
    same = compare_models(fits["log"], fits["log"], TEST)[0]
    assert (same.difference, same.standard_error) == (0, 0)


def test_comparison_of_classes(fits: dict[str, TabularModel]) -> None:
    model = fits["classes"]
    density, accuracy = compare_models(model, model, TEST)
    probability = model.predict(TEST)["p_yes"]
    up = TEST.strings("up") == "yes"
    nats = np.log(np.where(up, probability, 1 - probability)).mean()
    assert density.first == pytest.approx(nats)
    assert accuracy.first == pytest.approx(((probability > 0.5) == up).mean())


def test_impossible_evaluations_are_refused(fits: dict[str, TabularModel]) -> None:
    with pytest.raises(InputError, match="same column; got 'y' and 'up'"):
        compare_models(fits["plain"], fits["classes"], TEST)
    with pytest.raises(InputError, match="at least 2 rows"):
        compare_models(fits["plain"], fits["log"], TEST.part(slice(0, 1)))
    with pytest.raises(InputError, match=r"must have the target 'y'.*it has 'x'"):
        evaluate_model(fits["plain"], TEST.without(["y"]))
    other = DataTable({**TEST.values, "up": np.array(["maybe"] * 30, dtype=object)})
    with pytest.raises(InputError, match=r"does not know: 'maybe'; it was fitted to 'no', 'yes'"):
        evaluate_model(fits["classes"], other)
    words = DataTable({**TEST.values, "y": np.array(["much"] * 30, dtype=object)})
    with pytest.raises(InputError, match="must be numeric"):
        evaluate_model(fits["plain"], words)


@pytest.mark.usefixtures("quickly")
def test_cross_validation_measures_rows_that_no_fold_saw() -> None:
    some = TRAIN.part(slice(0, 24))
    result = cross_validate_table(some, "y", folds=2, drop=("up", "row"), seed=3, **QUICK)
    assert [fold["rows"] for fold in result.folds] == [12, 12]
    assert result.model.summary["train_rows"] == 24
    pooled = result.model.summary["quality"]
    assert pooled is not None
    assert pooled["rows"] == 24
    residuals = pooled["residuals"]
    assert residuals is not None
    # Each row is held out once.
    assert sorted(residuals["actual"]) == pytest.approx(sorted(column(some, "y")))
    actual, predicted = np.array(residuals["actual"]), np.array(residuals["predicted"])
    found = metrics(pooled)
    assert found["RMSE"] == pytest.approx(np.sqrt(np.mean((actual - predicted) ** 2)))
    variance = np.mean([actual[:12].var(), actual[12:].var()])
    assert found["R²"] == pytest.approx(1 - np.mean((actual - predicted) ** 2) / variance)
    density = [metrics(fold)["log density per observation"] for fold in result.folds]
    mean, error = result.mean("log density per observation")
    assert found["log density per observation"] == pytest.approx(np.mean(density))
    assert mean == pytest.approx(np.mean(density))
    assert error == pytest.approx(abs(density[0] - density[1]) / 2)


def test_pooled_classes_add_up() -> None:
    def fold(rows: int, accuracy: float, label: str) -> Quality:
        return {
            "rows": rows,
            "metrics": [
                {"name": "accuracy", "value": accuracy, "baseline": 0.5, "better": "higher"}
            ],
            "coverage": [],
            "pit": [],
            "residuals": None,
            "reliability": [{"probability": 0.31, "frequency": accuracy, "rows": rows}],
            "confusion": {"labels": ["a", label], "counts": [[rows, 0], [1, 2]]},
        }

    pooled = pooled_quality([fold(10, 0.4, "b"), fold(30, 0.8, "c")])
    assert metrics(pooled) == {"accuracy": pytest.approx(0.7)}
    assert pooled["reliability"] == [
        {"probability": pytest.approx(0.31), "frequency": pytest.approx(0.7), "rows": 40}
    ]
    assert pooled["confusion"] == {
        "labels": ["a", "b", "c"],
        "counts": [[40, 0, 0], [1, 2, 0], [1, 0, 2]],
    }


@pytest.mark.filterwarnings("ignore::winnowgp.errors.FitWarning")
@pytest.mark.usefixtures("quickly")
def test_test_table_and_split_by_decide_what_is_held_out() -> None:
    model = fit_table(TRAIN, "y", drop=("up", "row"), test_table=TEST.without(["up"]), **QUICK)
    summary = model.summary
    assert (summary["rows"], summary["train_rows"]) == (70, 40)
    assert summary["quality"] is not None
    y, predicted = column(TEST, "y"), model.predict(TEST)["mean"]
    rmse = np.sqrt(np.mean((y - predicted) ** 2))
    assert metrics(summary["quality"])["RMSE"] == pytest.approx(rmse)
    # The column of the split may be one that the model does not see.
    last = fit_table(TRAIN, "y", drop=("up", "row"), split_by="row", test_size=0.25, **QUICK)
    quality = last.summary["quality"]
    assert quality is not None
    assert quality["residuals"] is not None
    assert quality["residuals"]["actual"] == pytest.approx(column(TRAIN, "y")[30:])


def test_test_table_without_an_input_is_refused() -> None:
    with pytest.raises(InputError, match=r"`test_table` .*it lacks 'x'"):
        fit_table(TRAIN, "y", test_table=TEST.without(["x"]))
    with pytest.raises(InputError, match="`split_by` must be left out"):
        fit_table(TRAIN, "y", test_table=TEST, split_by="row")
    with pytest.raises(InputError, match="`test_size` must be left out"):
        cross_validate_table(TRAIN, "y", test_size=0.2)


@pytest.mark.usefixtures("quickly")
def test_random_split_of_series_warns() -> None:
    days = [f"2024-01-{day:02d}" for day in range(1, 25)]
    series = DataTable.of({"day": days, "y": np.sin(np.arange(24.0))})
    # Warnings are errors here: they come before the fit.
    with pytest.raises(RandomSplitWarning, match=r"'day' says when.*--split-by 'day'"):
        fit_table(series, "y")


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (RNG.poisson(3, 200).astype(float), "integers from 0 to .*--likelihood poisson"),
        (np.r_[RNG.normal(size=199), -40.0], "1 of 200 targets.*is -40 in one row.*student-t"),
        (np.exp(1.5 * RNG.normal(size=500)), "--log-target"),
        (RNG.normal(size=200), None),
        (RNG.integers(1, 6, 200).astype(float), None),  # ratings
        (RNG.integers(1900, 2024, 200).astype(float), None),  # years
        (np.full(20, 3.0), None),
        (np.r_[np.zeros(150), np.ones(50)], None),
    ],
)
def test_suggestions_for_counts_and_outliers(y: np.ndarray, message: str | None) -> None:
    found = likelihood_warning(y, "y")
    if message is None:
        assert found is None
    else:
        with pytest.raises(LikelihoodWarning, match=message):
            raise found or AssertionError("no warning")


@pytest.mark.usefixtures("quickly")
def test_fit_suggests_a_likelihood_for_counts() -> None:
    table = DataTable.of({"x": np.arange(30.0), "n": RNG.poisson(3, 30).astype(float)})
    with pytest.raises(LikelihoodWarning, match="'n' has integers"):
        fit_table(table, "n")


def test_likelihood_implies_the_task() -> None:
    assert implied_task("auto", "auto", log_target=False) == "auto"
    assert implied_task("auto", "poisson", log_target=False) == "counts"
    assert implied_task("auto", "beta", log_target=False) == "regression"
    assert implied_task("auto", "auto", log_target=True) == "regression"
    for task, likelihood, log, message in [
        ("auto", "normal", False, "must be one of auto, gaussian"),
        ("counts", "student-t", False, "'student-t' is for regression; got `task` 'counts'"),
        ("classification", "auto", True, "`log_target` is for regression"),
        ("auto", "poisson", True, "needs Gaussian noise of log y"),
    ]:
        with pytest.raises(InputError, match=message):
            implied_task(task, likelihood, log_target=log)


def test_log_target_that_is_not_positive_names_the_row() -> None:
    y = column(TRAIN, "y").copy()
    y[[3, 8]] = -2.0
    table = DataTable({**TRAIN.values, "y": y})
    with pytest.raises(InputError, match="got -2 in row 4, and 2 such rows"):
        fit_table(table, "y", log_target=True)


def test_quantiles_of_predictions(fits: dict[str, TabularModel]) -> None:
    levels = (0.05, 0.5, 0.975)
    found = fits["log"].predict(TEST, quantiles=levels)
    assert list(found) == ["mean", "sd", "lower", "upper", "q0.05", "q0.5", "q0.975"]
    s2 = np.log1p((found["sd"] / found["mean"]) ** 2)
    expected = lognorm(np.sqrt(s2), scale=found["mean"] * np.exp(-s2 / 2))
    for p in levels:
        np.testing.assert_allclose(found[f"q{p:g}"], expected.ppf(p), rtol=1e-8)
    np.testing.assert_allclose(found["q0.975"], found["upper"], rtol=1e-12)
    with pytest.raises(InputError, match="classes have no quantiles"):
        fits["classes"].predict(TEST, quantiles=levels)
    with pytest.raises(InputError, match="`quantiles` must differ"):
        fits["log"].predict(TEST, quantiles=(0.5, 0.5))


@pytest.mark.filterwarnings("ignore::winnowgp.errors.CoverageWarning")
def test_cross_validation_notes_that_folds_are_worse_than_a_constant() -> None:
    t = np.arange(45.0)
    table = {"t": t, "y": 2 * np.sin(t / 3) + t / 5}
    settings: dict[str, Any] = {"kernel": "rbf", "max_points": 4}
    worse = "log density per observation of the folds"
    with shortest_fits(), pytest.warns(WorseThanConstantWarning, match=worse):
        result = cross_validate_table(table, "y", folds=3, split_by="t", **settings)
    assert "WorseThanConstantWarning" in str(result.model.summary["alarms"])
