"""A user's data, checked."""

from dataclasses import dataclass
from typing import Any, final

import torch
from gpytorch.models.gplvm import BayesianGPLVM
from torch import Tensor

from winnowgp.errors import InputError


@final
@dataclass(frozen=True, slots=True)
class Rows:
    """Inputs and targets as GPyTorch's bound takes them, in float64 where they are numbers."""

    x: Tensor | None
    """`[N D]`, or None where the model has latent inputs."""
    y: Tensor
    """`[N]`, `[N T]` of several tasks, or `[batch N]` of a batch of functions."""

    @property
    def N(self) -> int:
        """Number of rows."""
        return self.y.shape[-1] if self.x is None else len(self.x)

    @classmethod
    def of(cls, model: Any, data: tuple[Tensor, Tensor] | Tensor) -> "Rows":
        """Check what was given."""
        if isinstance(model, BayesianGPLVM):
            if not isinstance(data, Tensor) or data.dim() != 2:
                raise InputError(
                    "`data` of a BayesianGPLVM must be its table, a tensor [N P]; got "
                    f"{_described(data)}."
                )
            # Its functions are the columns: their batch comes first.
            return cls(None, _checked("data", data).mT)
        pair = isinstance(data, tuple | list) and len(data) == 2
        if not pair or not all(isinstance(part, Tensor) for part in data):
            raise InputError(
                f"`data` must be two tensors, (train_x, train_y); got {_described(data)}. Those of "
                "a DataLoader of a TensorDataset are `loader.dataset.tensors`."
            )
        x, y = _checked("train_x", data[0]), _checked("train_y", data[1])
        x = x[:, None] if x.dim() == 1 else x
        if x.dim() != 2 or y.dim() == 0 or len(x) not in (y.shape[0], y.shape[-1]):
            raise InputError(
                "`train_x` must be [N D] and `train_y` have as many rows; got shapes "
                f"{list(data[0].shape)} and {list(data[1].shape)}."
            )
        return cls(x, y)


def _checked(name: str, values: Tensor) -> Tensor:
    if values.numel() == 0:
        raise InputError(f"`{name}` has no rows; choosing needs at least one.")
    # Sites are gradients, which tensors of inference mode can take no part in.
    values = values.clone() if values.is_inference() else values
    if not values.dtype.is_floating_point:
        return values if name != "train_x" else values.double()
    if not bool(torch.isfinite(values).all()):
        raise InputError(f"`{name}` has entries that are NaN or infinite; drop those rows.")
    return values.double()


def _described(data: object) -> str:
    if isinstance(data, Tensor):
        return f"a tensor of shape {list(data.shape)}"
    if isinstance(data, tuple | list):
        return f"a {type(data).__name__} of [{', '.join(type(part).__name__ for part in data)}]"
    return f"a {type(data).__name__}"
