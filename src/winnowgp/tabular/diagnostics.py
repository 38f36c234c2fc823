"""`diagnose`: tests of a fit on rows that were not used for training.

Each test returns a warning or None. A well-specified model sets each of them off in at most a few
fits of a thousand: a p-value, corrected for the number of columns, must be below `SIGNIFICANT`, and
the effect must be large enough to matter. `benchmarks/alarms.py` measures how often well-specified
fits set one off. `residuals` tests residuals, and `model` rows to predict.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import lgamma, log, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binomtest, norm, rankdata

from winnowgp.data import DataTable
from winnowgp.data.encoding import TableEncoder
from winnowgp.errors import (
    CoverageWarning,
    DependentResidualsWarning,
    FitWarning,
    HeavyTailsWarning,
    LeakageWarning,
    PeriodicResidualsWarning,
    WorseThanConstantWarning,
)
from winnowgp.estimators.base import total_points
from winnowgp.estimators.classification import ClassTargets
from winnowgp.estimators.deep import DeepEstimator
from winnowgp.estimators.selection import selection_alarms
from winnowgp.tabular.quality import (
    TableEstimator,
    class_densities,
    constant_class_densities,
    constant_densities,
    predictive,
    r_squared,
)
from winnowgp.tabular.residuals import (
    FEWEST,
    SIGNIFICANT,
    Column,
    class_alarm,
    periodic_alarm,
    residual_alarms,
)

Values = NDArray[np.float64]

PERFECT = 0.999
"""R², accuracy and rank correlation from which predictions are suspiciously good."""

COUNTS = ("poisson", "negative-binomial")
"""Likelihoods of counts."""

_LARGEST_SCORE = 8.0
# Nats per observation that a model must gain over a constant to be more than one.
_LEAST_GAIN = 1e-3
_OF_RESIDUALS = (DependentResidualsWarning, HeavyTailsWarning, PeriodicResidualsWarning)


def diagnose(
    model: TableEstimator,
    X: Values,
    y: NDArray[Any],
    *,
    held_out: NDArray[np.intp],
    columns: Sequence[Column] | None = None,
    ordered: bool = True,
    noise_variance: Values | None = None,
) -> list[FitWarning]:
    """Return warnings about a fitted model, from rows that were not used for training.

    They say that predictions are no better than a constant, that 95 % intervals hold far fewer or
    more rows, that one column determines the target, that residuals depend on a column or on the
    order of the rows, repeat with a period, or have heavy tails; and that no inducing points or all
    candidates were selected. `fit_table` does this after every fit. At most one well-specified fit
    in twenty has a warning.

    Args:
        X: inputs of all rows, in their order.
        y: their targets.
        held_out: numbers of the rows that were not used for training.
        columns: columns to test residuals against; by default the columns of X.
        ordered: whether residuals are tested against the order of the rows, too.
        noise_variance: known noise variances of all rows, if there are any.

    >>> from winnowgp import SparseGPRegressor
    >>> X = np.linspace(0, 6, 120)[:, None]
    >>> y = np.sin(X[:, 0]) + 0.1 * np.random.default_rng(0).normal(size=120)
    >>> model = SparseGPRegressor("rbf", random_state=0).fit(X[::2], y[::2])
    >>> diagnose(model, X, y, held_out=np.arange(1, 120, 2))
    []
    """
    X, y = np.asarray(X, dtype=np.float64), np.asarray(y)
    if columns is None:
        names = getattr(model, "feature_names_in_", range(X.shape[1]))
        columns = [Column(str(name), "number", v) for name, v in zip(names, X.T, strict=True)]
    used = np.ones(len(y), dtype=bool)
    used[held_out] = False
    tested = [replace(column, values=column.values[held_out]) for column in columns]
    if ordered:
        tested.append(Column("", "order", held_out.astype(np.float64)))
    classes = isinstance(model, ClassTargets)
    alarms_of = _class_alarms if classes else _regression_alarms
    known = None if noise_variance is None else noise_variance[held_out]
    score, more = alarms_of(model, X[held_out], y[held_out], y[used], tested, known)
    deep = isinstance(model, DeepEstimator)
    found = more if deep else [*selection_alarms(model), *more]
    leak = leakage_alarm(columns, y.astype(str if classes else np.float64), score)
    if leak is not None:
        # What residuals of nearly perfect predictions look like is of no interest.
        found = [a for a in found if not isinstance(a, _OF_RESIDUALS)]
        found.append(leak)
    return found


def table_columns(encoder: TableEncoder, inputs: DataTable) -> list[Column]:
    """Return the columns of a table, for `diagnose`."""
    columns = []
    for column in encoder.columns:
        if column.kind == "category":
            values = np.array([str(s) for s in inputs.strings(column.name)])
        else:
            values = column.encode(inputs, impute=True)[:, 0]
        columns.append(Column(column.name, column.kind, values))
    return columns


@contextmanager
def recorded_alarms() -> Iterator[list[FitWarning]]:
    """Yield a list that has the alarms which the block has issued, once it ends.

    They are issued by the caller; other warnings are issued when the block ends.
    """
    found: list[FitWarning] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", FitWarning)
        yield found
    for each in caught:
        if isinstance(each.message, FitWarning):
            found.append(each.message)
        else:
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)


def _regression_alarms(
    model: Any,
    X: Values,
    y: Values,
    y_train: Values,
    columns: Sequence[Column],
    noise_variance: Values | None,
) -> tuple[float, list[FitWarning]]:
    """Return R² on held-out rows, and alarms."""
    observation = predictive(model, X, noise_variance=noise_variance)
    likelihood = model.likelihood
    lower, upper = observation.interval(0.95)
    coverage = coverage_alarm((y >= lower) & (y <= upper), likelihood=likelihood)
    found = [] if coverage is None else [coverage]
    if total_points(model) > 0:
        constant = constant_densities(model, y, y_train)
        densities = model.log_density(X, y, noise_variance=noise_variance)
        worse = constant_alarm(densities, constant)
        found += [] if worse is None else [worse]
        # Normal scores: standard normal if the predictive distributions are right.
        z = norm.ppf(observation.cdf(y)).clip(-_LARGEST_SCORE, _LARGEST_SCORE)
        positive = bool((y > 0).all() and (y_train > 0).all()) and likelihood not in COUNTS
        found += residual_alarms(
            z, columns, predicted=observation.mean, positive=positive, likelihood=likelihood
        )
    elif np.ptp(y) > 0:
        # Stationary kernels may see nothing in a series whose period is as short as its gaps.
        periodic = periodic_alarm(y, columns)
        found += [] if periodic is None else [periodic]
    return r_squared(y, observation.mean), found


def _class_alarms(
    model: Any,
    X: Values,
    labels: NDArray[Any],
    train_labels: NDArray[Any],
    columns: Sequence[Column],
    noise_variance: Values | None,
) -> tuple[float, list[FitWarning]]:
    """Return the accuracy on held-out rows, and alarms."""
    del noise_variance  # classes have none
    classes, probability = model.classes_, model.predict_proba(X)
    accuracy = float((classes[probability.argmax(1)] == labels).mean())
    if total_points(model) == 0:
        return accuracy, []
    constant = constant_class_densities(classes, labels, train_labels)
    truth, names = labels[:, None] == classes, [str(c) for c in classes]
    found = [
        constant_alarm(class_densities(model, X, labels), constant),
        class_alarm(probability, truth, names, columns),
    ]
    return accuracy, [alarm for alarm in found if alarm is not None]


def constant_alarm(nats: Values, constant: Values) -> FitWarning | None:
    """Return an alarm if the mean log density is not above that of a constant prediction.

    Args:
        nats: log density of each held-out row.
        constant: log density of the same rows under one distribution for all.
    """
    gain, n = nats - constant, len(nats)
    if n < 2 or gain.mean() > _LEAST_GAIN:
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
            "student-t": "Noise may depend on the inputs: try `likelihood='heteroscedastic'` "
            "(`--likelihood heteroscedastic`), or more rows.",
            "beta": "Look for outliers among the proportions, or add columns or rows.",
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
        advice = {
            "student-t": "Try `likelihood='gaussian'` (`--likelihood gaussian`).",
            "beta": "Add columns or rows.",
        }.get(
            likelihood,
            "A few extreme targets may have raised the noise: try `likelihood='student-t'` "
            "(`--likelihood student-t`) or the logarithm of the target.",
        )
        return CoverageWarning(f"{held}: they are too wide. {advice}")
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
