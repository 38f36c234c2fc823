"""Small regression problems and their kernel blocks."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Problem:
    Z: Tensor
    X: Tensor
    Y: Tensor
    noise: Tensor
    lengthscale: float

    def kernel(self, A: Tensor, B: Tensor) -> Tensor:
        """1.7 · exp(−‖a − b‖² / 2ℓ²)."""
        squared = (A[:, None] - B[None]).square().sum(-1)
        return 1.7 * torch.exp(-0.5 * squared / self.lengthscale**2)

    @property
    def Kuu(self) -> Tensor:
        return self.kernel(self.Z, self.Z)

    @property
    def Kuf(self) -> Tensor:
        return self.kernel(self.Z, self.X)

    @property
    def Kff(self) -> Tensor:
        return self.kernel(self.X, self.X)

    @property
    def kff(self) -> Tensor:
        return self.Kff.diagonal()


def problem(
    *,
    N: int = 25,
    K: int = 6,
    P: int = 2,
    D: int = 2,
    lengthscale: float = 0.8,
    per_row: bool = False,
    seed: int = 0,
) -> Problem:
    """Random rows and candidates in a square, targets from a smooth function plus noise."""
    g = torch.Generator().manual_seed(seed)
    X = 4 * torch.rand(N, D, generator=g, dtype=torch.float64)
    Z = 4 * torch.rand(K, D, generator=g, dtype=torch.float64)
    weights = torch.randn(D, P, generator=g, dtype=torch.float64)
    Y = torch.sin(X @ weights) + 0.3 * torch.randn(N, P, generator=g, dtype=torch.float64)
    noise = torch.tensor(0.2, dtype=torch.float64)
    if per_row:
        noise = 0.05 + torch.rand(N, generator=g, dtype=torch.float64)
    return Problem(Z, X, Y, noise, lengthscale)
