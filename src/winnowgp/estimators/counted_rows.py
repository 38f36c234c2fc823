"""Sample weights as scikit-learn's users give them: how often each row counts."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from winnowgp.errors import InputError


def counted_rows(
    X: NDArray[np.float64], y: NDArray[Any], sample_weight: Any
) -> tuple[NDArray[np.float64], NDArray[Any], Tensor | None]:
    """The rows that count at all, and their weights `[N]`; None if all count once.

    A row of weight w counts as w rows, and one of weight zero is left out.

    >>> X, y, weights = counted_rows(np.eye(3), np.arange(3), [2, 0, 1])
    >>> y.tolist(), weights.tolist()
    ([0, 2], [2.0, 1.0])
    """
    if sample_weight is None:
        return X, y, None
    weights = _numbers(sample_weight, len(X))
    counts = weights > 0
    if not counts.any():
        raise InputError(
            "`sample_weight` must be positive for at least one row; all of them are zero."
        )
    return X[counts], y[counts], torch.tensor(weights[counts])


def _numbers(sample_weight: Any, N: int) -> NDArray[np.float64]:
    try:
        weights = np.asarray(sample_weight, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise InputError(f"`sample_weight` must be numbers; {error}.") from error
    if weights.ndim == 0:
        weights = np.full(N, float(weights))
    if weights.shape != (N,):
        raise InputError(
            f"`sample_weight` must be one number a row, [{N}]; got shape {list(weights.shape)}."
        )
    bad = int((~np.isfinite(weights) | (weights < 0)).sum())
    if bad:
        raise InputError(
            f"`sample_weight` must be finite and not negative; {bad} of {N} are not. A row of "
            "weight 2 counts as two rows, one of weight 0 is left out."
        )
    return weights
