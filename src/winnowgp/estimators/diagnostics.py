"""`diagnose`: what a fitted model's predictions of held-out rows say about the fit."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm

from winnowgp.data import DataTable, TableEncoder
from winnowgp.errors import FitWarning
from winnowgp.estimators import alarms
from winnowgp.estimators.alarms import Column
from winnowgp.estimators.classification import SparseGPClassifier
from winnowgp.estimators.quality import (
    class_densities,
    constant_class_densities,
    constant_densities,
    predictive,
    r_squared,
)
from winnowgp.estimators.regression import SparseGPRegressor

Values = NDArray[np.float64]

_LARGEST_SCORE = 8.0


def diagnose(
    model: SparseGPRegressor | SparseGPClassifier,
    X: Values,
    y: NDArray[Any],
    *,
    y_train: NDArray[Any],
    columns: Sequence[Column] | None = None,
) -> list[FitWarning]:
    """Return warnings about a fitted model, from rows that were not used for training.

    They say that predictions are no better than a constant, that 95 % intervals hold far fewer or
    more rows, that one column determines the target, that residuals depend on a column or on the
    order of the rows, repeat with a period, or have heavy tails; and that no inducing points or all
    candidates were selected. `fit_table` does this after every fit. At most one well-specified fit
    in twenty has a warning.

    Args:
        X: inputs of the held-out rows.
        y: their targets.
        y_train: targets of the training rows, for the constant prediction.
        columns: columns to test residuals against; by default the columns of X and the row number.

    >>> X = np.linspace(0, 6, 120)[:, None]
    >>> y = np.sin(X[:, 0]) + 0.1 * np.random.default_rng(0).normal(size=120)
    >>> model = SparseGPRegressor(max_points=12, random_state=0).fit(X[::2], y[::2])
    >>> diagnose(model, X[1::2], y[1::2], y_train=y[::2])
    []
    """
    X, y = np.asarray(X, dtype=np.float64), np.asarray(y)
    if columns is None:
        names = getattr(model, "feature_names_in_", range(X.shape[1]))
        columns = [Column(str(name), "number", v) for name, v in zip(names, X.T, strict=True)]
        columns = [*columns, Column("", "order", np.arange(len(X), dtype=np.float64))]
    found = alarms.selection_alarms(model)
    if isinstance(model, SparseGPClassifier):
        return [*found, *_class_alarms(model, X, y, y_train, columns)]
    return [*found, *_regression_alarms(model, X, y, y_train, columns)]


def table_columns(encoder: TableEncoder, inputs: DataTable, rows: NDArray[np.intp]) -> list[Column]:
    """Return the columns of some rows of a table, for `diagnose`, and the order of the rows."""
    part = inputs.part(rows)
    columns = []
    for column in encoder.columns:
        if column.kind == "words":
            values = np.array([str(s) for s in part.strings(column.name)])
        else:
            values = column.encode(part, impute=True)[:, 0]
        columns.append(Column(column.name, column.kind, values))
    return [*columns, Column("", "order", rows.astype(np.float64))]


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
    model: SparseGPRegressor, X: Values, y: Values, y_train: Values, columns: Sequence[Column]
) -> list[FitWarning]:
    observation = predictive(model, X)
    nats = model.log_density(X, y)
    lower, upper = observation.interval(0.95)
    counts = model.likelihood == "poisson"
    # Normal scores: standard normal if the predictive distributions are right.
    z = norm.ppf(observation.cdf(y)).clip(-_LARGEST_SCORE, _LARGEST_SCORE)
    inputs = [column for column in columns if column.kind != "order"]
    score = r_squared(y, observation.mean)
    leak = alarms.leakage_alarm(inputs, y.astype(np.float64), score)
    single = [
        None
        if model.n_inducing_ == 0
        else alarms.constant_alarm(nats, constant_densities(model, y, y_train)),
        alarms.coverage_alarm((y >= lower) & (y <= upper), counts=counts),
        leak,
    ]
    found = [alarm for alarm in single if alarm is not None]
    if leak is None and model.n_inducing_ > 0:
        positive = bool((y > 0).all() and (y_train > 0).all())
        found += alarms.residual_alarms(
            z, columns, predicted=observation.mean, positive=positive and not counts
        )
    return found


def _class_alarms(
    model: SparseGPClassifier,
    X: Values,
    labels: NDArray[Any],
    train_labels: NDArray[Any],
    columns: Sequence[Column],
) -> list[FitWarning]:
    classes, probability = model.classes_, model.predict_proba(X)
    accuracy = float((classes[probability.argmax(1)] == labels).mean())
    nats = class_densities(model, X, labels)
    constant = constant_class_densities(classes, labels, train_labels)
    inputs = [column for column in columns if column.kind != "order"]
    names = [str(c) for c in classes]
    found = [
        None if model.n_inducing_ == 0 else alarms.constant_alarm(nats, constant),
        alarms.leakage_alarm(inputs, labels.astype(str), accuracy),
        None
        if model.n_inducing_ == 0
        else alarms.class_alarm(probability, labels[:, None] == classes, names, columns),
    ]
    return [alarm for alarm in found if alarm is not None]
