"""Products and solves in panels against dense ones."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from helpers.problems import problem
from winnowgp.bounds.collapsed import exact_log_marginal, grouped_sums
from winnowgp.bounds.panels import (
    PANEL,
    TriangleInverses,
    add_gram,
    congruence,
    from_panels,
    inverse_in_panels,
    inverse_of_factor,
    invert_by_halves,
    inverted,
    lower_product,
    panels,
    solve_in_panels,
    squared_columns,
    triangle_inverses,
    triangular_gram,
    triangular_product,
    upper_product,
    whiten,
)
from winnowgp.linalg import cholesky, solve_lower

SIZES = [1, 5, PANEL, 100, 200]
"""Numbers of rows: one panel or triangle, whole ones, and a shorter last one."""


def triangle(M: int) -> Tensor:
    A = torch.randn(M, M, dtype=torch.float64, generator=torch.Generator().manual_seed(M))
    return A.tril(-1) / M + torch.diag(1 + A.diagonal().square())


def columns(M: int, count: int = 7) -> Tensor:
    return torch.randn(M, count, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("M", [0, 1, 47, 48, 49, 95, 96, 97, 200])
def test_panels_cover_rows_in_order(M: int) -> None:
    covered = [row for panel in panels(M) for row in range(M)[panel]]
    assert covered == list(range(M))


@pytest.mark.parametrize("M", SIZES)
def test_add_gram_sums_equal_dense_product(M: int) -> None:
    g = torch.Generator().manual_seed(0)
    V = torch.randn(M, 9, generator=g, dtype=torch.float64)
    w = torch.randn(9, generator=g, dtype=torch.float64)
    total = torch.zeros(M, M, dtype=torch.float64)
    for rows in (slice(0, 4), slice(4, 9)):
        add_gram(total, V[:, rows] * w[rows], V[:, rows])
    torch.testing.assert_close(from_panels(total), V @ w.diag() @ V.mT)


@pytest.mark.parametrize("M", SIZES)
def test_triangular_products_equal_dense_ones(M: int) -> None:
    L, A = triangle(M), columns(M)
    torch.testing.assert_close(lower_product(L, A), L @ A)
    torch.testing.assert_close(upper_product(L, A), L.mT @ A)
    torch.testing.assert_close(upper_product(L, columns(7, M).mT), L.mT @ columns(7, M).mT)


@pytest.mark.parametrize("M", SIZES)
def test_inverse_in_panels_equals_dense_inverse(M: int) -> None:
    L = triangle(M)
    expected = torch.linalg.inv(L @ L.mT)
    torch.testing.assert_close(inverse_in_panels(L), expected)
    torch.testing.assert_close(inverse_of_factor(L), expected)
    assert torch.equal(inverse_in_panels(L), inverse_in_panels(L).mT)
    for inverse in (inverse_in_panels, inverse_of_factor):
        # Stored by columns, as factors are.
        stored = L.mT.clone(memory_format=torch.contiguous_format).mT
        result = inverse(stored, overwrite=True)
        torch.testing.assert_close(result, expected)
        assert result.is_contiguous()
        assert result.data_ptr() == stored.data_ptr()


@pytest.mark.parametrize("M", [0, *SIZES])
def test_congruence_equals_dense_product(M: int) -> None:
    W, A = triangle(M), columns(M, M)
    S = A + A.mT
    product = congruence(W, S)
    torch.testing.assert_close(product, W.mT @ S @ W)
    assert torch.equal(product, product.mT)


@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("M", [1, 64, 100, 300, 513])
def test_invert_by_halves_equals_dense_inverse(M: int, size: int) -> None:
    L = triangle(M)
    expected = torch.linalg.inv(L)
    torch.testing.assert_close(invert_by_halves(L, size), expected)
    torch.testing.assert_close(inverted(L), expected)


@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("M", [*SIZES, 128, 300])
def test_solve_in_panels_equals_dense_solve(M: int, size: int) -> None:
    L, A = triangle(M), columns(M)
    expected = torch.linalg.solve(L, A)
    torch.testing.assert_close(whiten(L, A.clone()), expected)
    torch.testing.assert_close(solve_in_panels(L, A.clone(), size=size), expected)


@pytest.mark.parametrize("M", [100, 300])
@pytest.mark.parametrize("uniform", [True, False])
def test_grouped_sums_with_triangle_inverses_equals_solves(
    M: int, uniform: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As on a GPU, where inverses are computed once and scaled for each chunk.
    L, A = triangle(M), columns(M)
    B = A.shape[1]
    precision = torch.full((), 2.5, dtype=A.dtype).expand(B)
    precision = precision if uniform else 2.5 + torch.arange(B, dtype=A.dtype)
    Y = torch.linspace(-1, 1, B, dtype=A.dtype)[:, None]

    def sums() -> tuple[Tensor, ...]:
        chunk = (A.clone(), torch.ones(B, dtype=A.dtype), [(Y, precision)])
        return grouped_sums(L, [chunk, (2 * A, *chunk[1:])])

    expected = sums()
    monkeypatch.setattr("winnowgp.bounds.collapsed.triangle_inverses", TriangleInverses.of)
    torch.testing.assert_close(sums(), expected)


def test_solve_in_panels_singular_covariance_keeps_the_bound() -> None:
    # Two hundred candidates on a line, and a noise small enough for the bound to see every digit.
    p = problem(N=300, K=200, D=1, lengthscale=0.3)
    L, noise = cholesky(p.Kuu).L, 1e-6 * p.noise
    assert torch.linalg.cond(p.Kuu) > 1e17
    assert TriangleInverses.of(L).refined
    bounds = []
    for V in (solve_lower(L, p.Kuf), solve_in_panels(L, p.Kuf.clone())):
        trace = (p.kff - squared_columns(V)).sum() / (2 * noise)
        value = exact_log_marginal(V.mT @ V, Y=p.Y, noise=noise)
        bounds.append(value - p.Y.shape[1] * trace)
    # Without refinement they differ by 5e-5.
    torch.testing.assert_close(bounds[1], bounds[0], rtol=1e-8, atol=0)


def test_solve_in_panels_close_candidates_need_no_refinement() -> None:
    # Triangles are well conditioned although the covariance is not.
    p = problem(N=400, K=200, D=1, lengthscale=0.01)
    L, noise = cholesky(p.Kuu).L, 1e-6 * p.noise
    assert torch.linalg.cond(p.Kuu) > 1e10
    assert not TriangleInverses.of(L).refined
    bounds = []
    for V in (solve_lower(L, p.Kuf), solve_in_panels(L, p.Kuf.clone())):
        trace = (p.kff - squared_columns(V)).sum() / (2 * noise)
        bounds.append(exact_log_marginal(V.mT @ V, Y=p.Y, noise=noise) - p.Y.shape[1] * trace)
    torch.testing.assert_close(bounds[1], bounds[0], rtol=1e-8, atol=0)


@pytest.mark.parametrize("size", [0, 1, 47, 96, 97, 401])
def test_products_of_upper_triangles_equal_dense_ones(size: int) -> None:
    g = torch.Generator().manual_seed(size)
    U, W = torch.randn(2, size, size, generator=g, dtype=torch.float64).triu()
    torch.testing.assert_close(triangular_product(U, W), U @ W)
    torch.testing.assert_close(triangular_product(U.mT.contiguous().mT, W), U @ W)
    torch.testing.assert_close(triangular_gram(U), U @ U.mT)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("M", [1100, 2100])
def test_products_and_solves_on_gpu_equal_dense_ones(M: int) -> None:
    L, A = triangle(M).cuda(), columns(M, 70).cuda()
    inverses = triangle_inverses(L)
    assert inverses is not None
    expected = torch.linalg.solve_triangular(L, A, upper=False)
    torch.testing.assert_close(whiten(L, A.clone(), inverses=inverses), expected)
    refined = replace(inverses, refined=True)
    torch.testing.assert_close(whiten(L, A.clone(), inverses=refined), expected)
    torch.testing.assert_close(lower_product(L, A), L @ A)
    inverse = torch.cholesky_inverse(L)
    torch.testing.assert_close(inverse_of_factor(L), inverse)
    stored = L.mT.clone(memory_format=torch.contiguous_format).mT
    torch.testing.assert_close(inverse_of_factor(stored, overwrite=True), inverse)
    torch.testing.assert_close(congruence(L, inverse), L.mT @ inverse @ L)
