"""Rows in a box, two outcomes of them, and a regressor that was fitted shortly."""

from typing import Any

import torch
from torch import Tensor

from helpers.short_fits import shortest_fits
from winnowgp import SparseGPRegressor

BOX = torch.tensor([[10.0, -5.0], [20.0, -3.0]], dtype=torch.float64)


def rows(*shape: int, seed: int = 0) -> Tensor:
    """Return rows that are uniform in the box."""
    g = torch.Generator().manual_seed(seed)
    unit = torch.rand(*shape, 2, generator=g, dtype=torch.float64)
    return BOX[0] + (BOX[1] - BOX[0]) * unit


def outcomes(X: Tensor, P: int) -> Tensor:
    columns = [7 + 3 * torch.sin(X[..., 0]), 0.02 * X[..., 1] ** 2]
    return torch.stack(columns[:P], -1)


def regressor(P: int, **settings: Any) -> SparseGPRegressor:
    X = rows(30)
    Y = outcomes(X, P)
    Y = Y + 0.05 * Y.std(0) * torch.randn(Y.shape, generator=torch.Generator().manual_seed(1))
    with shortest_fits():
        return SparseGPRegressor(tolerance=0.1, random_state=0, hyper="point", **settings).fit(
            X.numpy(), Y[:, 0].numpy() if P == 1 else Y.numpy()
        )
