"""Rows with classes for targets, from arrays or from a source."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.utils.validation import validate_data

from winnowgp.data import Dataset, Source
from winnowgp.errors import InputError
from winnowgp.estimators.class_labels import ClassLabels, check_missing
from winnowgp.estimators.counted_rows import counted_rows
from winnowgp.estimators.source_rows import held_rows, note_source
from winnowgp.estimators.tensors import tensor


def labelled_rows(estimator: Any, X: Any, y: Any, sample_weight: Any) -> tuple[ClassLabels, Source]:
    """The classes, and merged rows whose targets are their numbers; shared as a source was."""
    if isinstance(X, Source):
        note_source(estimator, X, y, sample_weight)
        given = held_rows(X, "classification")
        labels, index = ClassLabels.of(_whole(given))
        return labels, X.alike(Dataset.of(given.X, tensor(index), weights=given.weights).merged())
    check_missing(y)
    X, y = validate_data(estimator, X, y, dtype=np.float64, ensure_min_samples=1)
    X, y, weights = counted_rows(X, y, sample_weight)
    labels, index = ClassLabels.of(y)
    return labels, Dataset.of(tensor(X), tensor(index), weights=weights).merged()


def _whole(rows: Dataset) -> NDArray[np.int64]:
    """The one target of each row, `[N]`."""
    labels = rows.Y.numpy()
    if rows.P != 1:
        raise InputError(f"a source of classes must have one target; got {rows.P}.")
    # Beyond that two whole numbers can be one float64.
    odd = labels[(labels != labels.round()) | (np.abs(labels) >= 2**53)]
    if len(odd):
        raise InputError(
            f"classes in a source must be whole numbers below 2**53; got {odd[0]:g}. Number them: "
            "`np.unique(y, return_inverse=True)`."
        )
    return labels[:, 0].astype(np.int64)
