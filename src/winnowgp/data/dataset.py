"""Inputs and targets as tensors, checked."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from winnowgp.errors import InputError


@dataclass(frozen=True, slots=True)
class Dataset:
    """N rows of D inputs and P targets.

    >>> Dataset.of(torch.zeros(3, 2), torch.zeros(3)).P
    1
    """

    X: Float[Tensor, "N D"]
    Y: Float[Tensor, "N P"]

    @classmethod
    def of(cls, X: Tensor, y: Tensor) -> "Dataset":
        """Check and pair inputs `[N D]` with targets `[N]` or `[N P]`; one dtype, all finite."""
        if X.dim() != 2 or y.dim() not in (1, 2):
            raise InputError(
                "`X` must be [N D] and `y` [N] or [N P]; "
                f"got shapes {list(X.shape)} and {list(y.shape)}."
            )
        if X.shape[0] != y.shape[0]:
            raise InputError(f"`X` has {X.shape[0]} rows and `y` has {y.shape[0]}; pair them.")
        if X.shape[0] == 0:
            raise InputError("`X` has no rows; a fit needs at least one.")
        if not (X.dtype.is_floating_point and y.dtype == X.dtype):
            raise InputError(f"`X` and `y` must share a float dtype; got {X.dtype} and {y.dtype}.")
        for name, values in (("X", X), ("y", y)):
            bad = int((~torch.isfinite(values)).sum())
            if bad:
                raise InputError(
                    f"`{name}` has {bad} entries that are NaN or infinite; drop or impute those "
                    "rows."
                )
        return cls(X, y if y.dim() == 2 else y[:, None])

    @property
    def N(self) -> int:
        """Number of rows."""
        return self.X.shape[0]

    @property
    def D(self) -> int:
        """Number of input columns."""
        return self.X.shape[1]

    @property
    def P(self) -> int:
        """Number of target columns."""
        return self.Y.shape[1]
