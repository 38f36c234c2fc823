"""Tests of a fit's result, each of which returns a warning or None.

They look at rows that were not used for training, so that a well-specified model sets each of them
off in at most a few fits of a thousand: a p-value, corrected for the number of columns, must be
below `SIGNIFICANT`, and the effect must be large enough to matter. `benchmarks/alarms.py` measures
how often well-specified fits set one off. `residuals` tests residuals, and `tabular_model`
rows to predict.
"""

from collections.abc import Sequence
from math import lgamma, log, sqrt
from typing import Any

import numpy as np
from gpytorch.means import ConstantMean, ZeroMean
from numpy.typing import NDArray
from scipy.stats import binomtest, rankdata

from winnowgp.errors import (
    AllCandidatesWarning,
    CoverageWarning,
    FitWarning,
    LeakageWarning,
    NoInducingPointsWarning,
    WorseThanConstantWarning,
)
from winnowgp.estimators.residuals import FEWEST, SIGNIFICANT, Column

Values = NDArray[np.float64]

PERFECT = 0.999
"""R², accuracy and rank correlation from which predictions are suspiciously good."""

COUNTS = ("poisson", "negative-binomial")
"""Likelihoods of counts."""

_FEW_ROWS, _MANY_ROWS = 10, 50


def selection_alarms(estimator: Any) -> list[FitWarning]:
    """Return the alarms about the number of inducing points of a fitted sparse estimator."""
    M, frontier = estimator.n_inducing_, estimator.frontier_
    few = frontier is not None and frontier.N < _FEW_ROWS
    if M == 0 and (few or _has_no_noise(estimator)):
        return []  # Of so few rows, or of a constant target, a constant is the model to expect.
    if M == 0 and not isinstance(estimator.posterior_.mean, ZeroMean | ConstantMean):
        return []  # The mean alone explains the target.
    if M == 0:
        constant = "no inducing points were selected: the model predicts the same for every row"
        if estimator.alpha != "auto":
            return [
                NoInducingPointsWarning(
                    f"{constant}, because the prior outweighs what they gain. Lower `alpha` "
                    f"(`--alpha`), which is {estimator.alpha:g}."
                )
            ]
        kernel = "name a kernel such as `kernel='rbf + linear'` (`--kernel`)"
        if estimator.kernel != "auto":
            kernel = "compare kernels with `kernel='auto'`"
        reason = "gain no more than they would by chance"
        if estimator.growth_limit_ == "held_out":
            reason = "predict held-out rows no better than a constant"
        return [
            NoInducingPointsWarning(
                f"{constant}, because models with inducing points {reason}. Check that the inputs "
                f"have to do with the target, add columns or rows, or {kernel}."
            )
        ]
    goals = (estimator.max_points, estimator.max_predict_us)
    if any(goal is not None for goal in goals):
        return []
    given = estimator.candidates if not isinstance(estimator.candidates, str) else None
    offered = estimator.n_candidates if given is None else len(given)
    # With a tolerance, a `GrowthLimitWarning` says so where more candidates would pay.
    if estimator.alpha != "auto" and offered is not None and offered <= M:
        return [
            AllCandidatesWarning(
                f"all {M} candidates were selected, so more inducing points may pay. Raise "
                "`n_candidates`, or give more `candidates`."
            )
        ]
    rows = 0 if frontier is None else frontier.N
    if rows >= _MANY_ROWS and 0.95 * rows <= M:
        return [
            AllCandidatesWarning(
                f"{M} of {rows:g} training rows became inducing points: the model is hardly "
                "smaller than an exact Gaussian process. Leave out columns that identify rows "
                "with `drop` (`--drop`), or accept fewer points with a larger `tolerance` "
                "(`--tolerance`) or `max_points` (`--max-points`)."
            )
        ]
    return []


def _has_no_noise(estimator: Any) -> bool:
    """Return whether a constant explains standardised targets without noise: they are constant."""
    noise = getattr(estimator.posterior_.likelihood, "noise", None)
    return noise is not None and bool(noise.max() < 0.01)


def constant_alarm(nats: Values, constant: Values) -> FitWarning | None:
    """Return an alarm if the mean log density is not above that of a constant prediction.

    Args:
        nats: log density of each held-out row.
        constant: log density of the same rows under one distribution for all.
    """
    gain, n = nats - constant, len(nats)
    if n < 2 or gain.mean() > 0:
        return None
    error = gain.std(ddof=1) / sqrt(n)
    return WorseThanConstantWarning(
        f"the held-out log density, {nats.mean():.3g} nats per observation, is not above that of "
        f"a constant prediction, {constant.mean():.3g} (difference {gain.mean():.2g} ± "
        f"{error:.2g}, one standard error). Do not rely on these predictions: look for outliers "
        "among the residuals, add columns or rows, or name another `kernel` (`--kernel`)."
    )


def coverage_alarm(inside: NDArray[np.bool_], *, likelihood: str) -> FitWarning | None:
    """Return an alarm if 95 % intervals hold far fewer or more rows, by a binomial test.

    "Far" is a share of rows outside that is above 10 % or below 2.5 %.

    Args:
        inside: whether each held-out row lies in its interval.
        likelihood: of the model. Intervals of counts end at integers, and so hold at least 95 %.
    """
    counts = likelihood in COUNTS
    n, within = len(inside), int(inside.sum())
    outside = 1 - within / n
    if binomtest(within, n, 0.95).pvalue >= 2.5 * SIGNIFICANT:
        return None
    held = f"the 95 % intervals hold {within} of {n} held-out rows ({100 * (1 - outside):.0f} %)"
    if outside > 0.1:
        advice = {
            "poisson": "Counts vary more than Poisson counts do: fit "
            "`likelihood='negative-binomial'` (`--likelihood negative-binomial`).",
            "negative-binomial": "Look for outliers among the counts, or add columns or rows.",
            "heteroscedastic": "Add rows, or columns that the noise depends on.",
        }.get(
            likelihood,
            "Noise may depend on the inputs or have outliers: try `likelihood='heteroscedastic'` "
            "(`--likelihood heteroscedastic`), 'student-t' or the logarithm of the target, or more "
            "rows.",
        )
        return CoverageWarning(
            f"{held}: they are too narrow, and predictions too certain. {advice}"
        )
    if outside < 0.025 and not counts:
        return CoverageWarning(
            f"{held}: they are too wide. A few extreme targets may have raised the noise: try "
            "`likelihood='student-t'` (`--likelihood student-t`) or the logarithm of the target."
        )
    return None


def leakage_alarm(columns: Sequence[Column], y: NDArray[Any], score: float) -> FitWarning | None:
    """Return an alarm if predictions are nearly perfect and one of several columns suffices.

    Args:
        columns: at least two inputs; with one, it is no surprise that it determines the target.
        y: targets of all rows: numbers, or class labels as strings.
        score: R² or accuracy on held-out rows.
    """
    if score < PERFECT or len(columns) < 2 or len(y) < FEWEST:
        return None
    classes = y.dtype.kind == "U"
    for column in columns:
        determines = _separates if classes else _explains
        if determines(column, y):
            measure = "accuracy" if classes else "R²"
            return LeakageWarning(
                f"{measure} on held-out rows is {score:.4g}, and {column.text} alone determines "
                "the target. If its values are computed from the target, or known only after it, "
                f"leave it out with `drop` (`--drop {column.name!r}`)."
            )
    return None


def _explains(column: Column, y: Values) -> bool:
    """Return whether a numeric target is a monotone function of a column, or constant within it."""
    if column.is_categorical:
        kinds, rows = np.unique(column.values, return_inverse=True)
        if len(kinds) > len(y) / 4:
            return False
        means = np.bincount(rows, y) / np.bincount(rows)
        return bool(((y - means[rows]) ** 2).sum() <= (1 - PERFECT) * ((y - y.mean()) ** 2).sum())
    if np.ptp(column.values) == 0 or np.ptp(y) == 0:
        return False
    correlation = np.corrcoef(rankdata(column.values), rankdata(y))[0, 1]
    return bool(abs(correlation) >= PERFECT)


def _separates(column: Column, labels: NDArray[Any]) -> bool:
    """Return whether each category, or each of as many intervals as classes, has one class.

    The chance that labels in random order are separated so is K! Π n_k! / n! for K classes.
    """
    classes, sizes = np.unique(labels, return_counts=True)
    chance = lgamma(len(classes) + 1) + sum(lgamma(k + 1) for k in sizes) - lgamma(len(labels) + 1)
    if chance > log(1e-4):
        return False
    order = np.argsort(column.values, kind="stable")
    values, ordered = column.values[order], labels[order]
    changes = ordered[1:] != ordered[:-1]
    if (changes & (values[1:] == values[:-1])).any():
        return False
    if column.is_categorical:
        return len(np.unique(values)) <= len(labels) / 4
    return int(changes.sum()) == len(classes) - 1
