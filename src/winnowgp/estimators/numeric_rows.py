"""Rows with numbers for targets, from arrays."""

from typing import Any

import numpy as np
from sklearn.utils.validation import validate_data

from winnowgp.data import Dataset
from winnowgp.estimators.counted_rows import counted_rows
from winnowgp.estimators.tensors import tensor


def numeric_rows(estimator: Any, X: Any, y: Any, sample_weight: Any) -> tuple[Dataset, bool]:
    """Checked rows, merged, and whether targets came as `[N]` rather than `[N P]`."""
    X, y = validate_data(
        estimator, X, y, dtype=np.float64, multi_output=True, y_numeric=True, ensure_min_samples=1
    )
    X, y, weights = counted_rows(X, y, sample_weight)
    return Dataset.of(tensor(X), tensor(y), weights=weights).merged(), np.ndim(y) == 1
