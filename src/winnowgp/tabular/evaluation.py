"""Quality of fitted table models on labelled rows, comparisons, and cross-validation."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import sqrt
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from winnowgp.data import DataTable
from winnowgp.data.columns import check_finite
from winnowgp.data.tables import TableLike
from winnowgp.errors import FitWarning, InputError, WorseThanConstantWarning
from winnowgp.estimators.classification import ClassTargets
from winnowgp.report.summary import Confusion, Metric, Quality, Reliability, Residuals
from winnowgp.tabular.diagnostics import coverage_alarm
from winnowgp.tabular.fitting import fit_table
from winnowgp.tabular.model import TabularModel
from winnowgp.tabular.quality import (
    BINS,
    MOST_RESIDUALS,
    class_densities,
    held_out_quality,
)
from winnowgp.tabular.splits import cross_validation_splits, random_split_warning
from winnowgp.tabular.table_summary import alarm_summary

Values = NDArray[np.float64]


def evaluate_model(model: TabularModel, table: TableLike) -> Quality:
    """Return the quality of a model on rows whose target is known.

    Rows without a target are left out. The baseline of each metric is the best constant prediction
    for these rows, since the model does not keep those it was fitted to.

    Args:
        model: a fitted model.
        table: rows with the columns of the training table.

    Returns: metrics beside those of the baseline; coverage of intervals and residuals, or the
        calibration and the confusion matrix of classes.
    """
    rows = labelled_rows(model, table)
    if rows.N < 2:
        raise InputError(f"an evaluation needs at least 2 rows with a target; got {rows.N}.")
    X, y = model.encoder.encode(rows), observed_targets(model, rows)
    _warn_of_extrapolation(model, rows, X)
    noise = model.noise_variance(rows)
    return held_out_quality(model.estimator, X, y, y_train=y, noise_variance=noise)


@final
@dataclass(frozen=True, slots=True)
class PairedDifference:
    """A measure of two models on the same rows, and the mean of its differences row by row."""

    name: str
    rows: int
    first: float
    second: float
    difference: float
    """Mean over the rows of the second model's value less the first one's."""
    standard_error: float
    """Standard error of that mean, for independent rows: the deviation of the differences / √N."""
    better: str
    """"higher" or "lower"."""


def compare_models(
    first: TabularModel, second: TabularModel, table: TableLike
) -> tuple[PairedDifference, ...]:
    """Return how much better a second model predicts labelled rows than a first one.

    Differences are paired: most of the spread of log densities is that of the rows, which both
    models share. Densities are in the units of the target, so that models of its logarithm compare
    with models of the target itself. Rows without a target are left out.

    Args:
        first: a fitted model.
        second: another model of the same target.
        table: rows with the target that neither model was fitted to.

    Returns: the log density and the absolute error, or the log probability and the accuracy.
    """
    _check_comparable(first, second)
    rows = labelled_rows(first, table)
    if rows.N < 2:
        raise InputError(f"a comparison needs at least 2 rows with a target; got {rows.N}.")
    y = observed_targets(first, rows)
    _warn_of_extrapolation(first, rows, first.encoder.encode(rows))
    values = [_row_measures(model, rows, y) for model in (first, second)]
    return tuple(
        _paired(name, values[0][name][0], values[1][name][0], better=better)
        for name, (_, better) in values[0].items()
    )


@final
@dataclass(frozen=True, slots=True)
class CrossValidation:
    """The quality of each fold, and the model that was fitted to all rows."""

    folds: tuple[Quality, ...]
    model: TabularModel
    """Its quality is that of all folds together."""

    def mean(self, metric: str) -> tuple[float, float]:
        """Return the mean of a metric over the folds, and its standard error.

        Folds share training rows, so that the standard error is a little too small.

        Args:
            metric: name of the metric, such as "RMSE".
        """
        values = [m["value"] for fold in self.folds for m in fold["metrics"] if m["name"] == metric]
        return float(np.mean(values)), float(np.std(values, ddof=1) / sqrt(len(values)))


def cross_validate_table(
    table: TableLike,
    target: str,
    *,
    folds: int = 5,
    split_by: str | None = None,
    seed: int = 0,
    **options: Any,
) -> CrossValidation:
    """Fit a model to all rows, and measure its quality by cross-validation.

    Args:
        table: rows with the target; those without it are left out of the folds.
        target: the column to predict.
        folds: number of folds. Each one takes a fit to the other rows.
        split_by: a column of groups that stay together, or of times: then each fold is predicted
            from earlier rows only. By default folds are drawn at random.
        seed: seed of the folds and of every fit.
        options: further arguments of `fit_table`.

    Returns: the quality of each fold; and the model of all rows, with the quality of all folds.
    """
    given = sorted({"test_size", "test_table", "checkpoint", "process_group"} & options.keys())
    if given:
        raise InputError(f"`{given[0]}` must be left out of a cross-validation.")
    table = DataTable.of(table)
    table.require_columns([target], argument="`target`")
    labelled = table.part(~table.missing(target))
    dates = options.get("dates", "auto")
    splits = cross_validation_splits(labelled, folds, split_by=split_by, seed=seed, dates=dates)
    # First, so that an error about a cell gives its row in the whole table.
    model = fit_table(table, target, test_size=0, seed=seed, **options)
    alarms = list(model.summary["alarms"])
    if split_by is None:
        warning = random_split_warning(table.without([target]), model.encoder.dates)
        if warning is not None:
            warnings.warn(warning, stacklevel=2)
            alarms.append(alarm_summary(warning))
    options = options | {"task": model.task, "settings": None}
    qualities = []
    for train, test in splits:
        with warnings.catch_warnings():
            # The fit to all rows has issued the warnings about the table.
            warnings.simplefilter("ignore", UserWarning)
            part = fit_table(
                labelled.part(train), target, test_table=labelled.part(test), seed=seed, **options
            )
        quality = part.summary["quality"]
        assert quality is not None
        qualities.append(quality)
    pooled = pooled_quality(qualities)
    for alarm in _fold_alarms(pooled, model):
        warnings.warn(alarm, stacklevel=2)
        alarms.append(alarm_summary(alarm))
    settings = {"folds": str(folds)} | ({} if split_by is None else {"split_by": split_by})
    summary = model.summary
    model = replace(
        model,
        summary={
            **summary,
            "alarms": alarms,
            "quality": pooled,
            "settings": {**summary["settings"], **settings},
        },
    )
    return CrossValidation(tuple(qualities), model)


def _fold_alarms(quality: Quality, model: TabularModel) -> list[FitWarning]:
    """Return alarms about the quality on the rows of all folds together."""
    alarms: list[FitWarning] = []
    densities = [m for m in quality["metrics"] if m["name"].startswith("log ")]
    for metric in densities:
        if metric["value"] <= metric["baseline"]:
            alarms.append(
                WorseThanConstantWarning(
                    f"the {metric['name']} of the folds, {metric['value']:.3g}, is not above that "
                    f"of a constant prediction, {metric['baseline']:.3g}. Check that the inputs "
                    "have to do with the target, add columns or rows, or name another kernel."
                )
            )
    likelihood = getattr(model.estimator, "likelihood", None)
    for level, share in quality["coverage"]:
        if level == 0.95 and isinstance(likelihood, str):
            inside = np.arange(quality["rows"]) < round(share * quality["rows"])
            alarm = coverage_alarm(inside, likelihood=likelihood)
            alarms += [] if alarm is None else [alarm]
    return alarms


def pooled_quality(folds: Sequence[Quality]) -> Quality:
    """Return the quality on the rows of all folds together.

    Means over rows are averaged with the numbers of rows. R² is relative to the mean of each fold.
    """
    N = np.array([fold["rows"] for fold in folds], dtype=float)
    residuals = [fold["residuals"] for fold in folds if fold["residuals"] is not None]
    return {
        "rows": int(N.sum()),
        "metrics": [
            _pooled_metric(name, folds, N) for name in [m["name"] for m in folds[0]["metrics"]]
        ],
        "coverage": [
            (level, float(N @ [fold["coverage"][i][1] for fold in folds] / N.sum()))
            for i, (level, _) in enumerate(folds[0]["coverage"])
        ],
        "pit": np.sum([fold["pit"] for fold in folds], axis=0).astype(int).tolist(),
        "residuals": _pooled_residuals(residuals) if residuals else None,
        "reliability": _pooled_reliability(folds),
        "confusion": _pooled_confusion([c for fold in folds if (c := fold["confusion"])]),
    }


def _pooled_metric(name: str, folds: Sequence[Quality], N: Values) -> Metric:
    each = [{m["name"]: m for m in fold["metrics"]} for fold in folds]
    pooled: Metric = {**each[0][name]}
    for side in ("value", "baseline"):
        values = np.array([metrics[name][side] for metrics in each])
        if name == "RMSE":
            pooled[side] = float(np.sqrt(N @ values**2 / N.sum()))
        elif name == "R²":
            # 1 − R² = mean square error / variance; the variance is that of the other side, too.
            square = np.array([metrics["RMSE"][side] ** 2 for metrics in each])
            model = np.array([metrics["RMSE"]["value"] ** 2 for metrics in each])
            rest = np.array([1 - metrics["R²"]["value"] for metrics in each])
            variance = np.divide(model, rest, out=np.zeros(len(rest)), where=rest > 0)
            total = N @ variance
            pooled[side] = float(1 - N @ square / total) if total > 0 else 0.0
        else:
            pooled[side] = float(N @ values / N.sum())
    return pooled


def _pooled_residuals(folds: list[Residuals]) -> Residuals:
    columns = {key: [value for fold in folds for value in fold[key]] for key in folds[0]}
    count = len(columns["actual"])
    shown = np.linspace(0, count - 1, min(count, MOST_RESIDUALS)).astype(int)
    actual, predicted, sd = (
        [columns[key][i] for i in shown] for key in ("actual", "predicted", "sd")
    )
    return {"actual": actual, "predicted": predicted, "sd": sd}


def _pooled_reliability(folds: Sequence[Quality]) -> list[Reliability]:
    bins: dict[int, list[Reliability]] = {}
    for fold in folds:
        for entry in fold["reliability"]:
            bins.setdefault(min(int(entry["probability"] * BINS), BINS - 1), []).append(entry)
    pooled: list[Reliability] = []
    for _, entries in sorted(bins.items()):
        rows = np.array([entry["rows"] for entry in entries])
        probability, frequency = (
            float(rows @ [entry[key] for entry in entries] / rows.sum())
            for key in ("probability", "frequency")
        )
        pooled.append({"probability": probability, "frequency": frequency, "rows": int(rows.sum())})
    return pooled


def _pooled_confusion(folds: list[Confusion]) -> Confusion | None:
    if not folds:
        return None
    labels = sorted({label for fold in folds for label in fold["labels"]})
    counts = np.zeros((len(labels), len(labels)), dtype=int)
    for fold in folds:
        places = [labels.index(label) for label in fold["labels"]]
        counts[np.ix_(places, places)] += np.array(fold["counts"])
    return {"labels": labels, "counts": counts.tolist()}


def _warn_of_extrapolation(model: TabularModel, rows: DataTable, X: Values) -> None:
    """Warn of rows that are unlike the training rows, as predictions of them do."""
    extrapolation = model.extrapolation()
    extrapolation.add(rows, X)
    for warning in extrapolation.warnings():
        warnings.warn(warning, stacklevel=3)


def labelled_rows(model: TabularModel, table: TableLike) -> DataTable:
    table = DataTable.of(table)
    if model.target not in table.values:
        raise InputError(
            f"the table must have the target {model.target!r} of the model, to be compared with "
            f"predictions; it has {', '.join(map(repr, table.names[:12]))}."
        )
    rows = table.part(~table.missing(model.target))
    if not rows.N:
        raise InputError(
            f"the table must have rows with a target; {model.target!r} is empty. Pass labelled "
            "rows."
        )
    return rows


def observed_targets(model: TabularModel, rows: DataTable) -> NDArray[Any]:
    """Return the labels or numbers of new rows, which predictions are compared with.

    Raises:
        InputError: the model does not know a class, or the target is not numeric.
    """
    if isinstance(model.estimator, ClassTargets):
        labels = rows.strings(model.target).astype(str)
        classes = model.estimator.classes_.tolist()
        unknown = sorted(set(labels.tolist()) - set(classes))
        if unknown:
            raise InputError(
                f"the target {model.target!r} has classes that the model does not know: "
                f"{', '.join(map(repr, unknown[:5]))}; it was fitted to "
                f"{', '.join(map(repr, classes[:5]))}. Leave such rows out."
            )
        return labels
    values = rows.numbers(model.target, model.encoder.target)
    if values is None:
        raise InputError(
            f"the target {model.target!r} must be numeric, as in the training table; it has "
            "strings. Correct them."
        )
    check_finite(rows, model.target, values)
    return values


def _check_comparable(first: TabularModel, second: TabularModel) -> None:
    if first.target != second.target:
        raise InputError(
            f"the models must predict the same column; got {first.target!r} and {second.target!r}."
        )
    tasks = {isinstance(model.estimator, ClassTargets) for model in (first, second)}
    if len(tasks) > 1:
        raise InputError(
            "the models must both be classifiers, or neither of them: probabilities of classes do "
            "not compare with densities of numbers."
        )


def _row_measures(
    model: TabularModel, rows: DataTable, y: NDArray[Any]
) -> dict[str, tuple[Values, str]]:
    """Return measures of each row, and whether they are better if higher or lower."""
    X, estimator = model.encoder.encode(rows), model.estimator
    if isinstance(estimator, ClassTargets):
        observed_targets(model, rows)
        nats = class_densities(estimator, X, y)
        hits = (estimator.predict(X) == y).astype(float)
        return {"log probability": (nats, "higher"), "accuracy": (hits, "higher")}
    error = np.abs(estimator.predict(X) - y)
    densities = estimator.log_density(X, y, noise_variance=model.noise_variance(rows))
    return {
        "log density": (densities, "higher"),
        "absolute error": (error, "lower"),
    }


def _paired(name: str, first: Values, second: Values, *, better: str) -> PairedDifference:
    differences = second - first
    return PairedDifference(
        name,
        len(differences),
        float(first.mean()),
        float(second.mean()),
        float(differences.mean()),
        float(differences.std(ddof=1) / sqrt(len(differences))),
        better,
    )
