"""Tables of which a map is made, checked."""

from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from sklearn.utils.validation import validate_data
from torch import Tensor

from winnowgp.data import Entries, Source
from winnowgp.errors import InputError
from winnowgp.estimators.tensors import tensor


def checked_table(estimator: Any, X: Any, *, reset: bool) -> Float[Tensor, "N P"]:
    """A table in which entries may be missing.

    Args:
        reset: whether its columns are to be remembered, and there must be two rows; else they must
            be those of before.
    """
    if isinstance(X, Source):
        raise InputError(
            f"`X` must be a table [N P]; got a {type(X).__name__}. A map takes rows that are in "
            "memory, and they are not shared."
        )
    return tensor(
        validate_data(
            estimator,
            X,
            dtype=np.float64,
            ensure_all_finite="allow-nan",
            ensure_min_samples=2 if reset else 1,
            reset=reset,
        )
    )


def varying_columns(raw: Entries) -> Bool[Tensor, " P"]:
    """Which columns of a table take more than one value.

    Raises:
        InputError: some column has no entry at all, or none varies.
    """
    never = torch.nonzero(~raw.observed.any(0))[:, 0].tolist()
    if never:
        raise InputError(
            f"every column of `X` must have an entry that is observed; columns {never[:10]} have "
            "none. Leave them out."
        )
    low = torch.where(raw.observed, raw.Y, torch.inf).amin(0)
    high = torch.where(raw.observed, raw.Y, -torch.inf).amax(0)
    if not bool((low < high).any()):
        raise InputError("some column of `X` must vary; all of them are constant.")
    return low < high
