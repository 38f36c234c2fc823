"""The task and the likelihood of a table's target, and what its values suggest."""

import numpy as np
from numpy.typing import NDArray

from winnowgp.errors import InputError, LikelihoodWarning
from winnowgp.estimators.validation import HETEROSCEDASTIC, LIKELIHOODS

COUNT_LIKELIHOODS = ("poisson", "negative-binomial")

Values = NDArray[np.float64]

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
            f"{y[first]:g} in row {number[first]}, and {int(wrong.sum())} such rows in all. Leave "
            "them out, add a constant to the target, or fit without the logarithm."
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


def _look_like_counts(y: Values) -> bool:
    return bool(
        (y == np.round(y)).all()
        and 0 <= y.min() <= 1
        and len(np.unique(y)) > 2
        and np.median(y) <= _LARGEST_MEDIAN_COUNT
        and y.var() >= 0.5 * y.mean()
        and ((y - y.mean()) ** 3).mean() > _LEAST_SKEWNESS * y.std() ** 3
    )
