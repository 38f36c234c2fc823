"""Regression problems for selection, and two reference implementations of a subset's bound."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from helpers import oracles
from winnowgp.bounds.collapsed import Moments, grouped_sums
from winnowgp.linalg import Cholesky, cholesky
from winnowgp.selection import SubsetStatistics
from winnowgp.selection.objective import subset_statistics


def chunked_moments(L: Tensor, chunks: Iterable[tuple[Tensor, Tensor, Tensor, Tensor]]) -> Moments:
    """Return the moments of chunks of K_*f, the diagonal of K_ff, targets and noise precisions."""
    chunks = list(chunks)
    C, D, square, diagonal = grouped_sums(L, ((Kuf, kff, [(Y, w)]) for Kuf, kff, Y, w in chunks))
    precisions = torch.cat([w for *_, w in chunks])
    constant = 0.5 * (precisions / (2 * math.pi)).log().sum()
    return Moments(C, D, square.sum(), diagonal, constant, len(precisions))


@dataclass(frozen=True)
class Problem:
    X: Tensor
    Y: Tensor
    Z: Tensor
    weights: Tensor
    lengthscale: float
    variance: float
    chunk: int

    def kernel(self, A: Tensor, B: Tensor) -> Tensor:
        squared = ((A[:, None] - B[None]) / self.lengthscale).square().sum(-1)
        return self.variance * torch.exp(-0.5 * squared)

    @cached_property
    def factor(self) -> Cholesky:
        return cholesky(self.kernel(self.Z, self.Z))

    @property
    def jitter(self) -> float:
        """Absolute jitter that the factorisation of K_** added to its diagonal."""
        return self.factor.jitter.item() * self.variance

    @cached_property
    def statistics(self) -> SubsetStatistics:
        return subset_statistics(self.factor.L, self.moments)

    @property
    def moments(self) -> Moments:
        chunks = zip(*(a.split(self.chunk) for a in (self.X, self.Y, self.weights)), strict=True)
        return chunked_moments(
            self.factor.L,
            (
                (self.kernel(self.Z, X), torch.full_like(X[:, 0], self.variance), Y, weights)
                for X, Y, weights in chunks
            ),
        )

    def blocks(self, mask: Tensor) -> tuple[Tensor, Tensor]:
        """K_uu with the jitter of K_** and K_uf of one subset."""
        Z = self.Z[mask]
        Kuu = self.kernel(Z, Z) + self.jitter * torch.eye(len(Z), dtype=Z.dtype)
        return Kuu, self.kernel(Z, self.X)

    def dense(self, mask: Tensor) -> Tensor:
        """The bound of one subset computed with N by N matrices."""
        Kff = self.kernel(self.X, self.X)
        return oracles.collapsed(*self.blocks(mask), Kff, self.Y, 1 / self.weights)

    def precise(self, mask: Tensor) -> float:
        """The same bound in extended precision, for blocks too ill-conditioned for float64.

        The blocks themselves are computed in float64, which defines the problem; the jitter is
        added in extended precision, since float64 would round it.
        """
        Z = self.Z[mask]
        Kuu = extended(self.kernel(Z, Z)) + np.longdouble(self.jitter) * np.eye(len(Z))
        V = extended_solve_lower(extended_cholesky(Kuu), extended(self.kernel(Z, self.X)))
        Y, weights = extended(self.Y), extended(self.weights)
        Q, (N, P) = V.T @ V, Y.shape
        L = extended_cholesky(Q + np.diag(1 / weights))
        log_det = 2 * np.log(L.diagonal()).sum()
        quadratic = np.square(extended_solve_lower(L, Y)).sum()
        slack = (weights * (np.longdouble(self.variance) - Q.diagonal())).sum()
        # log 2π in float64 has a relative error of 1e-16, which does not matter here.
        return float(-0.5 * (P * (N * math.log(2 * math.pi) + log_det + slack) + quadratic))


def extended(A: Tensor) -> np.ndarray:
    return A.numpy().astype(np.longdouble)


def extended_cholesky(A: np.ndarray) -> np.ndarray:
    """The lower factor, column by column, in the precision of `A`."""
    L = np.zeros_like(A)
    for j in range(len(A)):
        column = A[j:, j] - L[j:, :j] @ L[j, :j]
        L[j:, j] = column / np.sqrt(column[0])
    return L


def extended_solve_lower(L: np.ndarray, B: np.ndarray) -> np.ndarray:
    """L⁻¹ B by forward substitution, in the precision of its arguments."""
    X = np.zeros_like(B)
    for i in range(len(L)):
        X[i] = (B[i] - L[i, :i] @ X[:i]) / L[i, i]
    return X


def problem(
    seed: int = 0,
    *,
    N: int = 60,
    K: int = 8,
    P: int = 1,
    noise: float = 0.05,
    lengthscale: float = 1.0,
    variance: float = 1.7,
    duplicates: int = 0,
    heteroscedastic: bool = True,
    chunk: int = 17,
    dtype: torch.dtype = torch.float64,
    order: Tensor | None = None,
) -> Problem:
    """Random rows and candidates in a square; the last `duplicates` candidates repeat the first."""
    g = torch.Generator().manual_seed(seed)
    X = torch.rand(N, 2, generator=g, dtype=torch.float64) * 4 - 2
    Y = torch.stack([torch.sin((1.5 + p) * X[:, 0]) + X[:, 1] for p in range(P)], dim=1)
    Y = Y + noise**0.5 * torch.randn(N, P, generator=g, dtype=torch.float64)
    Z = torch.rand(K, 2, generator=g, dtype=torch.float64) * 4 - 2
    if duplicates:
        Z[-duplicates:] = Z[:duplicates]
    Z = Z if order is None else Z[order]
    spread = torch.rand(N, generator=g, dtype=torch.float64) if heteroscedastic else 0.5
    weights = (0.5 + spread) / noise * torch.ones(N, dtype=torch.float64)
    X, Y, Z, weights = (t.to(dtype) for t in (X, Y, Z, weights))
    return Problem(X, Y, Z, weights, lengthscale, variance, chunk)


def line_problem() -> Problem:
    """60 candidates on a line, nearly all redundant to 1e-18, with a noise variance of 1e-4.

    The targets are rougher than the kernel, so that directions whose prior variance is close to the
    jitter still matter to the bound.
    """
    g = torch.Generator().manual_seed(60)
    X = torch.rand(100, 1, generator=g, dtype=torch.float64) * 4 - 2
    Y = torch.sin(3 * X) + 0.01 * torch.randn(100, 1, generator=g, dtype=torch.float64)
    Z = torch.linspace(-2, 2, 60, dtype=torch.float64)[:, None]
    return Problem(X, Y, Z, torch.full_like(X[:, 0], 1e4), lengthscale=1.0, variance=1.0, chunk=17)


def neighbours(mask: Tensor) -> tuple[Tensor, Tensor]:
    """The subset with each candidate in turn added, and with each in turn removed."""
    up, down = mask.repeat(len(mask), 1), mask.repeat(len(mask), 1)
    return up.fill_diagonal_(True), down.fill_diagonal_(False)


SEARCHED: list[dict[str, Any]] = [
    {},
    {"P": 2},
    {"K": 10, "duplicates": 3},
    {"noise": 1e-3, "lengthscale": 2.0},
]
"""Arguments of `problem` with few enough candidates for enumeration."""
