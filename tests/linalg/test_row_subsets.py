"""Residuals and duals of row subsets against the pseudo-inverse, and their rank-one updates."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from winnowgp.linalg import rank_one_update, residual, residuals_and_duals, subset_factors

CLOSE: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-9}


def random_factor(K: int, seed: int) -> Tensor:
    """Lower triangular and well conditioned: the diagonal is at least one."""
    g = torch.Generator().manual_seed(seed)
    L = torch.randn(K, K, generator=g, dtype=torch.float64).tril(-1) / K**0.5
    return L + torch.diag(1 + torch.rand(K, generator=g, dtype=torch.float64))


def random_mask(K: int, seed: int) -> Tensor:
    return torch.rand(K, generator=torch.Generator().manual_seed(seed)) < 0.5


def dense_rows(L: Tensor, mask: Tensor) -> Tensor:
    """Duals (G⁺)ᵀ inside the subset and residuals l − l G⁺G outside, with G the rows inside."""
    inverse = torch.linalg.pinv(L[mask])
    return torch.where(mask[:, None], 0.0, L - L @ inverse @ L[mask]).index_put((mask,), inverse.mT)


def nearly_parallel(gap: float) -> Tensor:
    """Three rows; the last is the second plus `gap` along a new axis."""
    L = torch.tensor([[1.0, 0.0, 0.0], [0.6, 0.7, 0.0], [0.6, 0.7, 0.0]], dtype=torch.float64)
    L[2, 2] = gap
    return L


cases = given(K=st.integers(1, 9), seed=st.integers(0, 10**6))


@settings(max_examples=50, deadline=None)
@cases
def test_subset_factors_reproduce_sub_matrices_with_identity_padding(K: int, seed: int) -> None:
    L = random_factor(K, seed)
    order = torch.randperm(K, generator=torch.Generator().manual_seed(seed))
    indices = torch.stack([order, order.flip(0)])
    real = torch.stack([torch.arange(K) < K // 2, torch.ones(K, dtype=torch.bool)])
    targets = torch.randn(K, 2, generator=torch.Generator().manual_seed(seed), dtype=L.dtype)
    T, projected = subset_factors(L, indices, real=real, targets=targets)
    G = L[indices] * real[:, :, None]
    torch.testing.assert_close(T @ T.mT, G @ G.mT + torch.diag_embed((~real).to(L)), **CLOSE)
    assert torch.equal(T, T.tril())
    # G = T Qᵀ, so T Qᵀ targets = G targets
    torch.testing.assert_close(T @ projected, G @ targets, **CLOSE)
    assert (projected[~real] == 0).all()


def test_subset_factors_without_rows_are_empty() -> None:
    none = torch.zeros(2, 0, dtype=torch.long)
    T, projected = subset_factors(random_factor(3, 0), none, real=none.bool())
    assert T.shape == (2, 0, 0)
    assert projected.shape == (2, 0, 0)


def test_subset_factors_small_pivot_is_accurate_to_eps_over_pivot() -> None:
    # A Cholesky factor of the sub-matrix would have 1e-16, its own rounding error, as pivot.
    L, indices = nearly_parallel(1e-8), torch.tensor([[1, 2]])
    T, _ = subset_factors(L, indices, real=torch.ones(1, 2, dtype=torch.bool))
    pivot = T[0, 1, 1].abs()
    torch.testing.assert_close(pivot, torch.full_like(pivot, 1e-8), rtol=1e-7, atol=0)


@settings(max_examples=50, deadline=None)
@cases
def test_residuals_and_duals_match_pseudo_inverse(K: int, seed: int) -> None:
    L, mask = random_factor(K, seed), random_mask(K, seed)
    E, Q = residuals_and_duals(L, mask)
    torch.testing.assert_close(E, dense_rows(L, mask), **CLOSE)
    torch.testing.assert_close(Q @ Q.mT, torch.eye(len(Q), dtype=L.dtype), **CLOSE)
    torch.testing.assert_close(E[mask] @ L[mask].mT, torch.eye(len(Q), dtype=L.dtype), **CLOSE)


@pytest.mark.parametrize("M", [0, 1, 4, 7])
def test_residuals_and_duals_of_first_rows_match_pseudo_inverse(M: int) -> None:
    L, mask = random_factor(7, M), torch.arange(7) < M
    E, Q = residuals_and_duals(L, mask)
    torch.testing.assert_close(E, dense_rows(L, mask), **CLOSE)
    torch.testing.assert_close(Q, torch.eye(M, 7, dtype=L.dtype))


@settings(max_examples=50, deadline=None)
@cases
def test_residuals_and_duals_norms_are_variances_and_precisions(K: int, seed: int) -> None:
    L, mask = random_factor(K, seed), random_mask(K, seed)
    A, E = L @ L.mT, residuals_and_duals(L, mask)[0]
    precision = A[mask][:, mask].inverse()
    across = A[~mask][:, mask]
    variance = A[~mask][:, ~mask] - across @ precision @ across.mT
    squares = E.square().sum(dim=1)
    torch.testing.assert_close(squares[mask], precision.diagonal(), **CLOSE)
    torch.testing.assert_close(squares[~mask], variance.diagonal(), **CLOSE)


def test_residual_of_row_near_span_is_orthogonal_to_it() -> None:
    g = torch.Generator().manual_seed(1)
    Q = torch.linalg.qr(torch.randn(20, 8, generator=g, dtype=torch.float64)).Q.mT
    combination = torch.randn(5, 8, generator=g, dtype=torch.float64) @ Q
    rows = combination + 1e-10 * torch.randn(5, 20, generator=g, dtype=torch.float64)
    off = residual(rows, Q)
    # One subtraction leaves 1e-16 of the row inside the span: 1e-6 of the residual.
    inside = torch.linalg.vector_norm(off @ Q.mT, dim=1) / torch.linalg.vector_norm(off, dim=1)
    assert inside.max().item() < 1e-12


def sides(included: Tensor, at: int) -> dict[str, Any]:
    leaves = bool(included[at])
    same = included == leaves
    return {"same": None if same.all() else same, "leaves": leaves}


@settings(max_examples=50, deadline=None)
@cases
def test_rank_one_update_matches_recomputed_rows(K: int, seed: int) -> None:
    L, mask = random_factor(K, seed), random_mask(K, seed)
    E, rows = residuals_and_duals(L, mask)[0], torch.arange(K)
    for at in range(K):
        a, q = rank_one_update(L, E, rows=rows, at=at, **sides(mask, at))
        changed = mask ^ (rows == at)
        torch.testing.assert_close(E + a[:, None] * q, dense_rows(L, changed), **CLOSE)


@settings(max_examples=50, deadline=None)
@cases
def test_rank_one_update_of_some_rows_matches_update_of_all(K: int, seed: int) -> None:
    L, mask = random_factor(K, seed), random_mask(K, seed)
    E = residuals_and_duals(L, mask)[0]
    rows = torch.randperm(K, generator=torch.Generator().manual_seed(seed))[: K // 2 + 1]
    for at, k in enumerate(rows.tolist()):
        a, q = rank_one_update(L, E[rows], rows=rows, at=at, **sides(mask[rows], at))
        changed = mask ^ (torch.arange(K) == k)
        torch.testing.assert_close(E[rows] + a[:, None] * q, dense_rows(L, changed)[rows], **CLOSE)


def test_rank_one_update_filling_then_emptying_restores_rows() -> None:
    L, rows = random_factor(6, 3), torch.arange(6)
    included, E = torch.zeros(6, dtype=torch.bool), L
    for at in [*range(6), *range(6)]:
        a, q = rank_one_update(L, E, rows=rows, at=at, **sides(included, at))
        E, included = E + a[:, None] * q, included ^ (rows == at)
        if included.all():
            torch.testing.assert_close(E, L.inverse().mT, **CLOSE)
    torch.testing.assert_close(E, L, **CLOSE)
