"""From what users bring to tensors."""

from typing import Any

import numpy as np
import torch
from torch import Tensor


def tensor(values: Any) -> Tensor:
    """A copy in float64, whatever the strides of the array were."""
    return torch.tensor(np.ascontiguousarray(values, dtype=np.float64))
