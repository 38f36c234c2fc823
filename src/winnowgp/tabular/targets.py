"""The target of a table: its rows, task, values and likelihood, and what its values suggest."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from winnowgp.data import DataTable
from winnowgp.data.columns import ColumnKind
from winnowgp.errors import (
    FewRowsWarning,
    InputError,
    LikelihoodWarning,
    NoInducingPointsWarning,
)
from winnowgp.estimators.validation import HETEROSCEDASTIC, LIKELIHOODS
from winnowgp.report.summary import counted

TASKS = ("regression", "classification", "counts")

COUNT_LIKELIHOODS = ("poisson", "negative-binomial")

Values = NDArray[np.float64]

FEW_ROWS = 10
"""Rows below which a model is fitted with a warning."""

_MOST_CLASSES = 50
# Robust standard deviations from the median, and the largest share of rows, of outliers.
_FAR, _FEW = 10.0, 0.05
# Ratings and years are integers that are not skewed; large counts are nearly Gaussian.
_LARGEST_MEDIAN_COUNT, _LEAST_SKEWNESS = 30, 0.25


def implied_task(task: str, likelihood: str, *, log_target: bool) -> str:
    """Return the task that a likelihood or a logarithm implies; `task` if neither is given."""
    names = ("auto", *LIKELIHOODS, HETEROSCEDASTIC)
    if likelihood not in names:
        raise InputError(f"`likelihood` must be one of {', '.join(names)}; got {likelihood!r}.")
    if log_target and likelihood not in ("auto", "gaussian"):
        raise InputError(
            f"`log_target` needs Gaussian noise of log y; got `likelihood` {likelihood!r}. Leave "
            "one of them out."
        )
    if likelihood == "auto" and not log_target:
        return task
    implied = "counts" if likelihood in COUNT_LIKELIHOODS else "regression"
    if task not in ("auto", implied):
        what = "`log_target`" if log_target else f"`likelihood` {likelihood!r}"
        raise InputError(
            f"{what} is for {implied}; got `task` {task!r} as well. Leave one of them out."
        )
    return implied


def rows_with_target(
    table: DataTable, target: str, *, missing: str
) -> tuple[DataTable, NDArray[np.intp]]:
    """Return the rows that have a target, and their row numbers in the table, from 1."""
    absent = table.missing(target)
    if absent.any() and missing == "error":
        raise InputError(
            f"the target {target!r} must not be missing; it is in "
            f"{counted(int(absent.sum()), 'row')}, first in row {int(absent.argmax()) + 1}. Fill "
            "it in, or leave such rows out with missing='impute' (`--missing impute`)."
        )
    rows = table.part(~absent)
    if not rows.N:
        raise InputError("the table must have at least one row with a target; got none.")
    return rows, np.flatnonzero(~absent) + 1


def numeric_target_kind(
    kind: ColumnKind | None, table: DataTable, target: str
) -> dict[str, ColumnKind]:
    """Return how a numeric target is read, by its name; empty for classes and plain numbers.

    A plain target may have two values, which are classes as they are written.
    """
    if kind is None or kind.kind != "number" or table.numbers(target) is not None:
        return {}
    return {target: kind}


def task_of(table: DataTable, target: str, task: str) -> tuple[str, str]:
    """Return the task, and the reason for it."""
    if task == "auto":
        if table.numbers(target) is None:
            return _checked_task("classification", table, target), "the target is categorical"
        if table.n_unique(target) == 2:
            return "classification", "the target has two different values"
        return "regression", "the target is numeric"
    if task not in TASKS:
        raise InputError(f"`task` must be one of auto, {', '.join(TASKS)}; got {task!r}.")
    return _checked_task(task, table, target), "as specified"


def _checked_task(task: str, table: DataTable, target: str) -> str:
    values = table.numbers(target)
    if task == "classification":
        different = table.n_unique(target)
        if not 2 <= different <= _MOST_CLASSES:
            raise InputError(
                f"the target must have 2 to {_MOST_CLASSES} different values for classification; "
                f"{target!r} has {different}. Choose another target or task."
            )
    elif values is None:
        raise InputError(
            f"the target {target!r} must be numeric for {task}; it has strings. Use "
            "task='classification' (`--task classification`), or choose another target."
        )
    elif task == "counts" and not (counts := (values >= 0) & (values == np.round(values))).all():
        row = int(counts.argmin())
        raise InputError(
            f"the target {target!r} must have integers of at least 0 for counts; it has "
            f"{values[row]:g} in {table.describe_row(row)}. Correct such rows, or use "
            "task='regression' (`--task regression`)."
        )
    return task


def training_targets(
    table: DataTable, target: str, task: str, train: NDArray[Any], number: NDArray[np.intp]
) -> NDArray[Any]:
    """Return the labels or numbers that a model is to be fitted to.

    Args:
        train: indices of the training rows.
        number: row number of each target in its table, from 1.

    Raises:
        InputError: the training rows have one class only, or a number is too large or infinite.
    """
    if task == "classification":
        labels = table.strings(target).astype(str)
        if len(set(labels[train])) < 2:
            raise InputError(
                f"the {len(train)} training rows must have at least two classes of {target!r}; got "
                "one. Use more rows, or another `seed` (`--seed`)."
            )
        return labels
    values = table.numbers(target)
    assert values is not None
    bad = ~(np.abs(values) < 1e150)
    if bad.any():
        raise InputError(
            f"the target {target!r} must be finite and below 1e150; got {values[bad][0]:g} in row "
            f"{number[bad.argmax()]}. Correct that row, or rescale the target."
        )
    return values


def likelihood_for(task: str, likelihood: str) -> str:
    """Return the likelihood by name; "auto" is Gaussian, or Poisson for counts."""
    if likelihood != "auto":
        return likelihood
    return "poisson" if task == "counts" else "gaussian"


def check_positive(y: Values, target: str, number: NDArray[np.intp]) -> None:
    """Raise an `InputError` that names the first row whose target has no logarithm.

    Args:
        number: row number of each target in its table, from 1.
    """
    wrong = ~(y > 0)
    if wrong.any():
        first = int(wrong.argmax())
        raise InputError(
            f"the target {target!r} must be positive for `log_target` (`--log-target`); got "
            f"{y[first]:g} in row {number[first]}, and {counted(int(wrong.sum()), 'such row')} in "
            "all. Leave them out, add a constant to the target, or fit without the logarithm."
        )


def check_proportions(y: Values, target: str, number: NDArray[np.intp], *, percent: bool) -> None:
    """Raise an `InputError` that names the first row whose target is no proportion.

    Args:
        number: row number of each target in its table, from 1.
        percent: whether the target is written with per cent signs.
    """
    wrong = ~((y > 0) & (y < 1))
    if wrong.any():
        first = int(wrong.argmax())
        advice = "Move 0 and 1 inwards, to 0.001 and 0.999 for example, or leave such rows out."
        if percent or y[first] > 1:
            advice = "Divide per cents by 100: write 0.35 instead of 35 %."
        raise InputError(
            f"the target {target!r} must be between 0 and 1, and neither of them, for "
            f"`likelihood='beta'` (`--likelihood beta`); got {y[first]:g}{' %' * percent} in row "
            f"{number[first]}, and {counted(int(wrong.sum()), 'such row')} in all. {advice}"
        )


def likelihood_warning(y: Values, target: str) -> LikelihoodWarning | None:
    """Return a suggestion if a target that is fitted with Gaussian noise has counts or outliers.

    Counts are integers that begin at 0 or 1, are small and skewed to the right, and vary about as
    much as Poisson counts or more. Outliers are few rows, ten or more robust standard deviations
    from the median.
    """
    median, spread = np.median(y), np.subtract(*np.quantile(y, [0.75, 0.25])) / 1.349
    if _look_like_counts(y):
        return LikelihoodWarning(
            f"the target {target!r} has integers from {y.min():g} to {y.max():g}. If they are "
            "counts, fit `likelihood='poisson'` (`--likelihood poisson`), or 'negative-binomial' "
            "if they vary more than Poisson counts do."
        )
    distance = np.abs(y - median) / spread if spread > 0 else np.zeros(len(y))
    far = distance > _FAR
    if not 0 < far.sum() <= _FEW * len(y):
        return None
    furthest = int(distance.argmax())
    skewed = bool((y > 0).all() and (y[far] > median).all())
    remedy = (
        "a model of the logarithm, `log_target=True` (`--log-target`), suits positive targets that "
        "span orders of magnitude, and `likelihood='student-t'` (`--likelihood student-t`) outliers"
        if skewed
        else "`likelihood='student-t'` (`--likelihood student-t`) is robust to outliers"
    )
    return LikelihoodWarning(
        f"{int(far.sum())} of {len(y)} targets are far from the others: {target!r} is "
        f"{y[furthest]:g} in one row, {distance[furthest]:.0f} robust standard deviations from the "
        f"median. Correct them if they are errors; {remedy}."
    )


def few_rows_warning(rows: int) -> FewRowsWarning | None:
    """Return a warning if the model is fitted to so few rows that priors decide."""
    if rows >= FEW_ROWS:
        return None
    return FewRowsWarning(
        f"the model was fitted to {rows} row{'' if rows == 1 else 's'}: priors, rather than rows, "
        "decide what it predicts, and neither intervals nor quality can be relied on. Add rows: at "
        f"least {FEW_ROWS}, and more if there are many columns."
    )


def constant_target_warning(y: Values, target: str) -> NoInducingPointsWarning | None:
    """Return a warning if the target has one value in all training rows that have it."""
    known = y[~np.isnan(y)]
    if len(known) < 2 or np.ptp(known) > 0:
        return None
    return NoInducingPointsWarning(
        f"the target {target!r} is {known[0]:g} in all {len(known)} training rows: the model "
        "predicts the same for every row. Check the column, or add rows with other values."
    )


def _look_like_counts(y: Values) -> bool:
    return bool(
        (y == np.round(y)).all()
        and 0 <= y.min() <= 1
        and len(np.unique(y)) > 2
        and np.median(y) <= _LARGEST_MEDIAN_COUNT
        and y.var() >= 0.5 * y.mean()
        and ((y - y.mean()) ** 3).mean() > _LEAST_SKEWNESS * y.std() ** 3
    )


def known_noise(
    table: DataTable, column: str, number: NDArray[np.intp] | None = None
) -> NDArray[np.float64]:
    """Return the noise variances in a column of a table.

    Args:
        number: numbers of the rows, from 1, for error messages; those of their file by default.
    """
    values = table.numbers(column)
    if values is None:
        raise InputError(
            f"the noise column {column!r} must have numbers, with a decimal point; it has strings."
        )
    bad = ~(np.isfinite(values) & (values >= 0))
    if bad.any():
        row = int(bad.argmax())
        where = table.describe_row(row) if number is None else f"row {int(number[row])}"
        raise InputError(
            f"the noise column {column!r} must have a variance of at least 0 in every row; got "
            f"{values[row]:g} in {where}. Variances are squares of standard deviations."
        )
    return values
