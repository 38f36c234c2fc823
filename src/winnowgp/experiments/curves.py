"""Numbers of figures as rows hold them: short, and made of lists."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from winnowgp.experiments.runs import Row
from winnowgp.plots.posterior_1d import Curve

_COLUMNS = ("grid", "mean", "sd", "points", "heights")


def rounded(values: Float[Tensor, "..."], digits: int = 3) -> list[Any]:
    """Nested lists of numbers with a few decimals.

    >>> rounded(torch.tensor([[1.23456, 2.0]], dtype=torch.float64))
    [[1.235, 2.0]]
    """
    # Not torch.round(decimals=...): 1.235 must be the double nearest to it, and short in JSON.
    if values.dim() > 1:
        return [rounded(part, digits) for part in values]
    return [round(value, digits) for value in values.tolist()]


def numbers(values: Sequence[Any]) -> Float[Tensor, "..."]:
    """The way back."""
    return torch.tensor(values, dtype=torch.float64)


def curve_row(curve: Curve) -> Row:
    """A curve for a row."""
    return {name: rounded(getattr(curve, name)) for name in _COLUMNS}


def curve_of(row: Row) -> Curve:
    """The curve that a row holds."""
    return Curve(**{name: numbers(row[name]) for name in _COLUMNS})
