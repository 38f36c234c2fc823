import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from winnowgp.errors import NotPositiveDefiniteError
from winnowgp.linalg import (
    cholesky,
    definite_cholesky,
    half_log_det,
    jitter_ladder,
    solve_lower,
)


def random_matrix(rank: int, size: int, seed: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    A = torch.randn(size, rank, generator=g, dtype=torch.float64)
    return A @ A.mT


@settings(max_examples=50, deadline=None)
@given(size=st.integers(1, 12), rank=st.integers(1, 12), seed=st.integers(0, 10**6))
def test_cholesky_factor_reproduces_matrix_plus_reported_jitter(
    size: int, rank: int, seed: int
) -> None:
    A = random_matrix(rank, size, seed)
    factor = cholesky(A)
    jittered = A + factor.jitter * A.diagonal().mean() * torch.eye(size, dtype=A.dtype)
    torch.testing.assert_close(factor.L @ factor.L.mT, jittered, rtol=1e-10, atol=1e-10)


def test_cholesky_zero_matrix_raises() -> None:
    with pytest.raises(NotPositiveDefiniteError):
        cholesky(torch.zeros(3, 3, dtype=torch.float64))


def test_cholesky_well_conditioned_matrix_uses_smallest_jitter() -> None:
    factor = cholesky(torch.eye(4, dtype=torch.float64))
    assert factor.jitter.item() == jitter_ladder(torch.float64)[0]


def test_cholesky_batch_increases_jitter_only_where_it_fails() -> None:
    good = torch.eye(3, dtype=torch.float64)
    bad = good.clone()
    bad[2, 2] = -1e-9
    factor = cholesky(torch.stack([good, bad]))
    assert factor.jitter[0] == jitter_ladder(torch.float64)[0]
    assert factor.jitter[1] > 1e-9
    assert torch.isfinite(factor.L).all()


@pytest.mark.parametrize("entry", [float("nan"), float("inf")])
def test_cholesky_non_finite_entries_raise(entry: float) -> None:
    A = torch.eye(3, dtype=torch.float64)
    A[1, 1] = entry
    with pytest.raises(NotPositiveDefiniteError, match="NaN or infinite entries"):
        cholesky(A)


def test_cholesky_indefinite_matrix_raises_after_largest_jitter() -> None:
    with pytest.raises(NotPositiveDefiniteError, match="jitter"):
        cholesky(torch.diag(torch.tensor([1.0, -1.0], dtype=torch.float64)))
    with pytest.raises(NotPositiveDefiniteError):
        definite_cholesky(torch.diag(torch.tensor([1.0, -1.0], dtype=torch.float64)))


@pytest.mark.parametrize("entry", [torch.nan, torch.inf, -1.0])
def test_definite_cholesky_one_bad_matrix_of_batch_raises(entry: float) -> None:
    A = torch.eye(3, dtype=torch.float64).repeat(2, 1, 1)
    A[1, 1, 1] = entry
    with pytest.raises(NotPositiveDefiniteError):
        definite_cholesky(A)


def test_cholesky_empty_matrix_returns_empty_factor() -> None:
    assert cholesky(torch.zeros(4, 0, 0, dtype=torch.float64)).L.shape == (4, 0, 0)


def test_cholesky_condition_1e18_is_finite_in_both_precisions() -> None:
    x = torch.linspace(0, 1, 60, dtype=torch.float64)
    A = torch.exp(-0.5 * (x[:, None] - x[None]) ** 2)
    assert torch.linalg.cond(A) > 1e17
    for dtype in (torch.float64, torch.float32):
        assert torch.isfinite(cholesky(A.to(dtype)).L).all()


def test_half_log_det_and_solve_lower_match_dense() -> None:
    A = random_matrix(6, 5, 3) + torch.eye(5, dtype=torch.float64)
    L = definite_cholesky(A)
    torch.testing.assert_close(2 * half_log_det(L), torch.logdet(A))
    torch.testing.assert_close(L @ solve_lower(L, A), A)


def test_cholesky_gradient_matches_finite_differences() -> None:
    A = (random_matrix(5, 4, 1) + torch.eye(4, dtype=torch.float64)).requires_grad_()
    assert torch.autograd.gradcheck(lambda A: cholesky((A + A.mT) / 2).L, (A,))


def test_definite_cholesky_overwrites_a_matrix_stored_by_columns() -> None:
    A = random_matrix(8, 5, 0).mT
    expected = definite_cholesky(A.clone())
    L = definite_cholesky(A, overwrite=True)
    assert L.data_ptr() == A.data_ptr()
    torch.testing.assert_close(L, expected, rtol=1e-12, atol=0)
    with pytest.raises(NotPositiveDefiniteError):
        definite_cholesky(-random_matrix(8, 5, 1).mT, overwrite=True)
