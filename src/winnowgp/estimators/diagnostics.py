"""`diagnose`: what a fitted model's predictions of held-out rows say about the fit."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm

from winnowgp.data import DataTable, TableEncoder
from winnowgp.errors import (
    DependentResidualsWarning,
    FitWarning,
    HeavyTailsWarning,
    PeriodicResidualsWarning,
)
from winnowgp.estimators.alarms import (
    COUNTS,
    constant_alarm,
    coverage_alarm,
    leakage_alarm,
    selection_alarms,
)
from winnowgp.estimators.base import total_points
from winnowgp.estimators.classification import ClassTargets
from winnowgp.estimators.deep import DeepEstimator
from winnowgp.estimators.quality import (
    TableEstimator,
    class_densities,
    constant_class_densities,
    constant_densities,
    predictive,
    r_squared,
)
from winnowgp.estimators.residuals import Column, class_alarm, residual_alarms

Values = NDArray[np.float64]

_LARGEST_SCORE = 8.0
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
        if column.kind == "words":
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
