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
        raise InputError(f"`y` must be numbers; {error}. Labels are for a classifier.") from error
    return torch.tensor(numbers)
