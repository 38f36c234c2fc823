"""Moments against bounds and posteriors computed from the rows, and their use in a model."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from gpytorch.kernels import LinearKernel, MaternKernel, RBFKernel, ScaleKernel
from gpytorch.means import ConstantMean
from torch import Tensor

from helpers import oracles
from helpers.problems import Problem, problem
from helpers.selection_problems import chunked_moments
from winnowgp.bounds import collapsed_bound, upper_bound
from winnowgp.bounds.collapsed import Moments, moment_bound, moment_posterior, moment_upper_bound
from winnowgp.data import Dataset
from winnowgp.gradients import all_masks
from winnowgp.linalg import cholesky
from winnowgp.models import SparseGP
from winnowgp.models.kernels import kernel_blocks

close: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-9}
sizes = pytest.mark.parametrize("K", [0, 1, 6])
outputs = pytest.mark.parametrize("P", [1, 3])
noises = pytest.mark.parametrize("per_row", [False, True])


def moments(p: Problem, *, chunk: int = 7) -> Moments:
    weights = 1 / p.noise.expand(len(p.Y))
    rows = zip(*(a.split(chunk) for a in (p.Kuf.mT, p.kff, p.Y, weights)), strict=True)
    return chunked_moments(cholesky(p.Kuu).L, ((Kfu.mT, *others) for Kfu, *others in rows))


@sizes
@outputs
@noises
def test_moment_bound_equals_collapsed_bound(K: int, P: int, per_row: bool) -> None:
    p = problem(K=K, P=P, per_row=per_row)
    value = moment_bound(moments(p))
    direct = collapsed_bound(p.Kuu, p.Kuf, kff=p.kff, Y=p.Y, noise=p.noise)
    torch.testing.assert_close(value, direct, **close)
    dense = oracles.collapsed(p.Kuu, p.Kuf, p.Kff, p.Y, p.noise)
    torch.testing.assert_close(value, dense, rtol=1e-8, atol=1e-8)


@sizes
@outputs
def test_moment_upper_bound_equals_upper_bound(K: int, P: int) -> None:
    p = problem(K=K, P=P)
    value = moment_upper_bound(moments(p))
    direct = upper_bound(p.Kuu, p.Kuf, kff=p.kff, Y=p.Y, noise=p.noise)
    torch.testing.assert_close(value, direct, **close)
    dense = oracles.upper(p.Kuu, p.Kuf, p.Kff, p.Y, p.noise)
    torch.testing.assert_close(value, dense, rtol=1e-8, atol=1e-8)


@sizes
@outputs
@noises
def test_moment_posterior_equals_dense_posterior(K: int, P: int, per_row: bool) -> None:
    p = problem(K=K, P=P, per_row=per_row)
    mean, factor = moment_posterior(moments(p))
    dense_mean, dense_factor = oracles.optimal_q(p.Kuu, p.Kuf, p.Y, p.noise)
    torch.testing.assert_close(mean, dense_mean, **close)
    torch.testing.assert_close(factor @ factor.mT, dense_factor @ dense_factor.mT, **close)


@pytest.mark.parametrize("chunk", [1, 8, 25, 100])
def test_grouped_sums_are_independent_of_chunk_size(chunk: int) -> None:
    p = problem(per_row=True)
    whole, chunked = moments(p, chunk=1000), moments(p, chunk=chunk)
    assert chunked.N == whole.N == 25
    for name in ("C", "D", "square", "diagonal", "constant"):
        torch.testing.assert_close(getattr(chunked, name), getattr(whole, name), **close)


@pytest.mark.parametrize("K", [6, 110])  # 110 candidates are three panels of C
def test_grouped_sums_equal_their_definitions(K: int) -> None:
    p = problem(K=K, per_row=True, lengthscale=0.3 if K == 6 else 0.05)
    sums, W = moments(p), torch.diag(1 / p.noise)
    V = torch.linalg.cholesky(p.Kuu).inverse() @ p.Kuf
    torch.testing.assert_close(sums.C, V @ W @ V.mT, **close)
    torch.testing.assert_close(sums.D, V @ W @ p.Y, **close)
    torch.testing.assert_close(sums.square, (p.Y.mT @ W @ p.Y).trace(), **close)
    torch.testing.assert_close(sums.diagonal, (W @ p.Kff).trace(), **close)
    constant = 0.5 * (W / (2 * torch.pi)).diagonal().log().sum()
    torch.testing.assert_close(sums.constant, constant, **close)


def test_moments_of_two_sets_of_rows_add_up() -> None:
    p = problem(per_row=True)

    def of(rows: slice) -> Moments:
        return moments(replace(p, X=p.X[rows], Y=p.Y[rows], noise=p.noise[rows]))

    total, whole = of(slice(0, 9)) + of(slice(9, 25)), moments(p)
    assert total.N == whole.N == 25
    for name in ("C", "D", "square", "diagonal", "constant"):
        torch.testing.assert_close(getattr(total, name), getattr(whole, name), **close)


KERNELS = {
    "rbf": lambda: ScaleKernel(RBFKernel()),
    "matern": lambda: ScaleKernel(MaternKernel(nu=0.5)),
    "sum": lambda: ScaleKernel(MaternKernel(nu=1.5)) + LinearKernel(),
}
kernels = pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS.keys())


def data(N: int = 25, P: int = 2) -> Dataset:
    p = problem(N=N, P=P)
    return Dataset.of(p.X, p.Y)


def model(kernel, Z: Tensor) -> SparseGP:
    mean = ConstantMean()
    mean.constant = 0.3
    return SparseGP(kernel(), Z, mean=mean, noise=0.2)


@kernels
def test_model_moments_give_its_bounds(kernel) -> None:
    rows = data()
    gp = model(kernel, rows.X[:6] + 0.1)
    # With gradients enabled GPyTorch keeps Matérn distances about 1e-8 away from zero.
    value = moment_bound(gp.moments(rows)[1][0])
    torch.testing.assert_close(value, gp.bound(rows), rtol=1e-7, atol=0)
    blocks = kernel_blocks(gp.kernel, gp.candidates, rows.X)
    Y = rows.Y - 0.3
    direct = upper_bound(blocks.Kuu, blocks.Kuf, kff=blocks.kff, Y=Y, noise=gp.noise)
    # GPyTorch stored 0.3 in float32.
    assert gp.upper_bound(rows) == pytest.approx(direct.item(), rel=1e-6)
    assert gp.bound(rows) < gp.dense_bound(rows)() < gp.upper_bound(rows)


def test_fixed_bound_is_invariant_to_shifted_inputs() -> None:
    near = data()
    # A shift by 2¹⁰ does not round the differences of these inputs.
    X = (near.X * 2**30).round() / 2**30
    bounds = [
        model(KERNELS["rbf"], X[:6] + shift).fixed_bound(Dataset.of(X + shift, near.Y))
        for shift in (0.0, 1024.0)
    ]
    assert bounds[1] == pytest.approx(bounds[0], rel=1e-12)


@kernels
def test_model_subset_statistics_equal_subset_objective(kernel) -> None:
    rows = data()
    gp, masks = model(kernel, rows.X[:5] + 0.1), all_masks(5)
    statistics = gp.subset_statistics(rows)
    assert (statistics.K, statistics.N) == (5, 25)
    expected = gp.subset_objective(rows).value(masks).detach()
    torch.testing.assert_close(statistics.value(masks), expected, rtol=1e-7, atol=0)


@kernels
def test_model_posterior_at_data_equals_exact_posterior(kernel) -> None:
    rows = data(N=12)
    gp = model(kernel, rows.X)
    new = 4 * torch.rand(5, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with torch.no_grad():
        K, Kx = gp.kernel(rows.X).to_dense(), gp.kernel(new, rows.X).to_dense()
        centre = gp.mean.get_parameter("raw_constant")
        gain = Kx @ (K + gp.noise * torch.eye(12)).inverse()
        mean = centre + gain @ (rows.Y - centre)
        variance = (gp.kernel(new).to_dense() - gain @ Kx.mT).diagonal()[:, None].expand(5, 2)
    predicted = gp.posterior(rows).predict(new)
    torch.testing.assert_close(predicted.mean, mean, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(predicted.variance, variance, rtol=1e-6, atol=1e-7)
    assert gp.upper_bound(rows) == pytest.approx(gp.bound(rows).item(), rel=1e-6)


def test_with_candidates_keeps_parameters_and_original_unchanged() -> None:
    rows = data()
    gp = model(KERNELS["rbf"], rows.X[:4])
    locations = rows.X[10:13].clone()
    for learnt in (True, False):
        gp.candidates.requires_grad_(learnt)
        other = gp.with_candidates(locations)
        assert other.K == 3
        assert other.candidates.requires_grad is learnt
        assert torch.equal(other.candidates, locations)
        for name, parameter in gp.named_parameters():
            if name != "candidates":
                assert torch.equal(other.get_parameter(name), parameter), name
        with torch.no_grad():
            other.candidates.add_(1)
            other.get_parameter("likelihood.noise_covar.raw_noise").add_(1)
        assert torch.equal(locations, rows.X[10:13])
        assert torch.equal(gp.candidates, rows.X[:4])
        assert gp.noise.item() == pytest.approx(0.2)
    assert gp.with_candidates(rows.X[:0]).K == 0
