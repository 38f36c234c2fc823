"""From what users bring to tensors."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from winnowgp.errors import InputError


def tensor(values: Any) -> Tensor:
    """A copy in float64, whatever the strides of the array were.

    Inputs have been made numbers before; what cannot be is among the targets.
    """
    try:
        numbers = np.ascontiguousarray(values, dtype=np.float64)
    except ValueError as error:
        word = next(str(v) for v in np.ravel(values) if not _is_number(v))
        raise InputError(
            f"`y` must be numbers; got {word!r}. Labels are for a classifier."
        ) from error
    return torch.tensor(numbers)


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except ValueError:
        return False
    return True
