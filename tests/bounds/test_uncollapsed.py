from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import oracles
from helpers.problems import Problem, problem
from winnowgp.bounds import (
    collapsed_bound,
    subset_blocks,
    uncollapsed_bound,
)
from winnowgp.bounds.collapsed import masked_blocks
from winnowgp.bounds.uncollapsed import marginals, masked_marginal, subset_marginal, whitened_kl
from winnowgp.gradients import all_masks
from winnowgp.typing import Masks, Weights

close: dict[str, Any] = {"rtol": 1e-8, "atol": 1e-8}


def random_q(K: int, P: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    """A mean and one covariance per output, in u-space."""
    g = torch.Generator().manual_seed(seed)
    mean = torch.randn(K, P, generator=g, dtype=torch.float64)
    A = torch.randn(P, K, K, generator=g, dtype=torch.float64)
    return mean, A @ A.mT / K + 0.1 * torch.eye(K, dtype=torch.float64)


def bound(p: Problem, q_mean: Tensor, q_factor: Tensor, mask: Tensor | None = None) -> Tensor:
    keep = torch.ones(p.Z.shape[0], dtype=torch.bool) if mask is None else mask
    return uncollapsed_bound(
        p.Kuu[keep][:, keep],
        p.Kuf[keep],
        kff=p.kff,
        q_mean=q_mean,
        q_factor=q_factor,
        expected_log_prob=lambda m, v: oracles.gaussian_expected_log_prob(p.Y, m, v, p.noise),
    )


@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("P", [1, 3])
def test_uncollapsed_bound_equals_dense_oracle(P: int, per_row: bool) -> None:
    p = problem(P=P, per_row=per_row)
    mean_u, cov_u = random_q(6, P)
    value = bound(p, *oracles.whiten(p.Kuu, mean_u, cov_u))
    expected = oracles.uncollapsed(p.Kuu, p.Kuf, p.Kff, p.Y, p.noise, mean_u, cov_u)
    torch.testing.assert_close(value, expected, **close)


def test_uncollapsed_bound_at_optimal_q_equals_collapsed_bound() -> None:
    p = problem()
    best = collapsed_bound(p.Kuu, p.Kuf, kff=p.kff, Y=p.Y, noise=p.noise)
    q_mean, q_factor = oracles.optimal_q(p.Kuu, p.Kuf, p.Y, p.noise)
    torch.testing.assert_close(bound(p, q_mean, q_factor), best, **close)
    assert bound(p, q_mean + 0.01, q_factor) < best
    assert bound(p, q_mean, 1.01 * q_factor) < best


@pytest.mark.parametrize("shared", [False, True])
def test_subset_marginal_equals_marginal_in_u_space(shared: bool) -> None:
    p = problem(K=4)
    mean_u, cov_u = random_q(4, 2)
    cov_u = cov_u[:1].expand(2, -1, -1) if shared else cov_u
    q_mean, q_factor = oracles.whiten(p.Kuu, mean_u, cov_u)
    masks = all_masks(4)
    means, factors = subset_marginal(
        p.Kuu, q_mean, q_factor[:1] if shared else q_factor, mask=masks
    )
    for mask, mean, factor in zip(masks, means, factors, strict=True):
        M = int(mask.sum())
        value = bound(p, mean[:M], factor[:, :M, :M], mask)
        if M == 0:
            expected = collapsed_bound(p.Kuu[:0, :0], p.Kuf[:0], kff=p.kff, Y=p.Y, noise=p.noise)
        else:
            sub = cov_u[:, mask][:, :, mask]
            expected = oracles.uncollapsed(
                p.Kuu[mask][:, mask], p.Kuf[mask], p.Kff, p.Y, p.noise, mean_u[mask], sub
            )
        torch.testing.assert_close(value, expected, **close)


def test_subset_marginal_padding_adds_nothing_to_kl() -> None:
    p = problem(K=4)
    q_mean, q_factor = oracles.whiten(p.Kuu, *random_q(4, 2))
    masks = torch.tensor([[True, False, True, False], [True, True, True, True]])
    means, factors = subset_marginal(p.Kuu, q_mean, q_factor, mask=masks)
    alone_mean, alone_factor = subset_marginal(p.Kuu, q_mean, q_factor, mask=masks[:1])
    assert alone_mean.shape[1] == 2
    assert means.shape[1] == 4
    torch.testing.assert_close(
        whitened_kl(means[0], factors[0]), whitened_kl(alone_mean[0], alone_factor[0]), **close
    )


def test_subset_marginal_differs_from_indexing_whitened_q() -> None:
    """Indexing the whitened coordinates instead of u gives a different bound."""
    p = problem(K=4)
    q_mean, q_factor = oracles.whiten(p.Kuu, *random_q(4, 2))
    mask = torch.tensor([False, True, False, True])
    mean, factor = subset_marginal(p.Kuu, q_mean, q_factor, mask=mask[None])
    right = bound(p, mean[0], factor[0], mask)
    shortcut = bound(p, q_mean[mask], q_factor[:, mask][:, :, mask], mask)
    assert (right - shortcut).abs() > 0.1


def test_uncollapsed_bound_minibatch_is_unbiased() -> None:
    p = problem(N=6)
    q_mean, q_factor = oracles.whiten(p.Kuu, *random_q(6, 2))
    pairs = torch.combinations(torch.arange(6), 2)
    values = [
        uncollapsed_bound(
            p.Kuu,
            p.Kuf[:, rows],
            kff=p.kff[rows],
            q_mean=q_mean,
            q_factor=q_factor,
            expected_log_prob=lambda m, v, r=rows: oracles.gaussian_expected_log_prob(
                p.Y[r], m, v, noise=p.noise
            ),
            scale=6 / 2,
        )
        for rows in pairs
    ]
    torch.testing.assert_close(torch.stack(values).mean(), bound(p, q_mean, q_factor), **close)


def gaussian(p: Problem):
    """The expected log-likelihood of a problem with noise shared by all rows, for any batch."""

    def expected(mean: Tensor, variance: Tensor) -> Tensor:
        square = (p.Y - mean).square() + variance
        return -0.5 * (torch.log(2 * torch.pi * p.noise) + square / p.noise)

    return expected


def dense_batch(S: int, M: int, P: int, shared: bool) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(5)
    mean = torch.randn(S, M, P, generator=g, dtype=torch.float64)
    factor = torch.randn(S, 1 if shared else P, M, M, generator=g, dtype=torch.float64)
    return mean, factor + 2 * torch.eye(M, dtype=torch.float64)


@pytest.mark.parametrize("shared", [False, True])
def test_uncollapsed_bound_batch_equals_loop(shared: bool) -> None:
    p, masks = problem(K=5, P=3), all_masks(5)[[31, 7, 22]]
    Kuu, Kuf = subset_blocks(p.Kuu, p.Kuf, masks)
    q_mean, q_factor = dense_batch(3, 5, 3, shared)
    V = torch.linalg.solve(torch.linalg.cholesky(Kuu), Kuf)
    means, variances = marginals(V, kff=p.kff, q_mean=q_mean, q_factor=q_factor)
    assert means.shape == variances.shape == (3, 25, 3)
    kls = whitened_kl(q_mean, q_factor)
    together = uncollapsed_bound(
        Kuu, Kuf, kff=p.kff, q_mean=q_mean, q_factor=q_factor, expected_log_prob=gaussian(p)
    )
    for s in range(3):
        mean, variance = marginals(V[s], kff=p.kff, q_mean=q_mean[s], q_factor=q_factor[s])
        torch.testing.assert_close(means[s], mean, **close)
        torch.testing.assert_close(variances[s], variance, **close)
        torch.testing.assert_close(kls[s], whitened_kl(q_mean[s], q_factor[s]), **close)
        alone = uncollapsed_bound(
            Kuu[s],
            Kuf[s],
            kff=p.kff,
            q_mean=q_mean[s],
            q_factor=q_factor[s],
            expected_log_prob=gaussian(p),
        )
        torch.testing.assert_close(together[s], alone, **close)


@pytest.mark.parametrize("shared", [False, True])
def test_whitened_kl_matches_torch(shared: bool) -> None:
    (q_mean, q_factor), P = dense_batch(2, 4, 3, shared), 3
    eye = torch.eye(4, dtype=torch.float64)
    prior = torch.distributions.MultivariateNormal(torch.zeros_like(eye[0]), eye)
    for s, kl in enumerate(whitened_kl(q_mean, q_factor)):
        F = q_factor[s].expand(P, -1, -1)
        q = torch.distributions.MultivariateNormal(q_mean[s].mT, F @ F.mT)
        torch.testing.assert_close(kl, torch.distributions.kl_divergence(q, prior).sum(), **close)


@pytest.mark.parametrize("shared", [False, True])
def test_marginals_equal_dense_diagonal(shared: bool) -> None:
    p = problem(P=2)
    mean_u, cov_u = random_q(6, 2)
    cov_u = cov_u[:1].expand(2, -1, -1) if shared else cov_u
    q_mean, q_factor = oracles.whiten(p.Kuu, mean_u, cov_u)
    V = torch.linalg.solve(torch.linalg.cholesky(p.Kuu), p.Kuf)
    mean, variance = marginals(
        V, kff=p.kff, q_mean=q_mean, q_factor=q_factor[:1] if shared else q_factor
    )
    A = p.Kuf.mT @ p.Kuu.inverse()
    torch.testing.assert_close(mean, A @ mean_u, **close)
    dense = p.Kff - A @ (p.Kuu - cov_u) @ A.mT
    torch.testing.assert_close(variance, dense.diagonal(dim1=1, dim2=2).mT, **close)


def subset_value(p: Problem, q_mean: Tensor, q_factor: Tensor, masks: Masks) -> Tensor:
    """The bounds of a batch of padded subsets, as a model computes them."""
    Kuu, Kuf = subset_blocks(p.Kuu, p.Kuf, masks)
    mean, factor = subset_marginal(p.Kuu, q_mean, q_factor, mask=masks)
    return uncollapsed_bound(
        Kuu, Kuf, kff=p.kff, q_mean=mean, q_factor=factor, expected_log_prob=gaussian(p)
    )


def masked_value(p: Problem, q_mean: Tensor, q_factor: Tensor, weights: Weights) -> Tensor:
    Kuu, Kuf = masked_blocks(p.Kuu, p.Kuf, weights)
    mean, factor = masked_marginal(p.Kuu, q_mean, q_factor, weights=weights)
    return uncollapsed_bound(
        Kuu, Kuf, kff=p.kff, q_mean=mean, q_factor=factor, expected_log_prob=gaussian(p)
    )


@pytest.mark.parametrize("shared", [False, True])
def test_masked_marginal_with_mask_equals_subset_marginal(shared: bool) -> None:
    p, masks = problem(K=4), all_masks(4)
    q_mean, q_factor = oracles.whiten(p.Kuu, *random_q(4, 2))
    q_factor = q_factor[:1] if shared else q_factor
    weighted = masked_value(p, q_mean, q_factor, masks.double())
    torch.testing.assert_close(weighted, subset_value(p, q_mean, q_factor, masks), **close)


@pytest.mark.parametrize("shared", [False, True])
def test_masked_marginal_with_weights_equals_dense_definition(shared: bool) -> None:
    """m̂ = b ∘ m*, Ŝ = b bᵀ ∘ S* + diag((1 − b)(b κ + s)) under the weighted prior."""
    p = problem(K=4)
    mean_u, cov_u = random_q(4, 2)
    cov_u = cov_u[:1].expand(2, -1, -1) if shared else cov_u
    q_mean, q_factor = oracles.whiten(p.Kuu, mean_u, cov_u)
    g = torch.Generator().manual_seed(2)
    weights = torch.rand(5, 4, generator=g, dtype=torch.float64)
    weights[3, 1:3], weights[4] = torch.tensor([0.0, 1.0], dtype=torch.float64), 0.5
    values = masked_value(p, q_mean, q_factor[:1] if shared else q_factor, weights)
    s = p.Kuu.diagonal().mean()
    for b, value in zip(weights, values, strict=True):
        outer = b[:, None] * b
        added = ((1 - b) * (b * p.Kuu.diagonal() + s)).diag()
        expected = oracles.uncollapsed(
            outer * p.Kuu + added,
            b[:, None] * p.Kuf,
            p.Kff,
            p.Y,
            p.noise,
            b[:, None] * mean_u,
            outer * cov_u + added,
        )
        torch.testing.assert_close(value, expected, **close)


def moved(p: Problem, Z: Tensor) -> Problem:
    return Problem(Z, p.X, p.Y, p.noise, p.lengthscale)


def learnt(K: int) -> tuple[Problem, tuple[Tensor, Tensor, Tensor]]:
    p = problem(N=6, K=K)
    q_mean, q_factor = oracles.whiten(p.Kuu, *random_q(K, 2))
    return p, (p.Z.clone().requires_grad_(), q_mean.requires_grad_(), q_factor.requires_grad_())


def test_subset_marginal_gradients_match_finite_differences() -> None:
    """Gradients in locations, means and factors, for an empty, a full and two padded subsets."""
    p, inputs = learnt(3)
    masks = all_masks(3)[[0, 7, 2, 5]]
    assert torch.autograd.gradcheck(
        lambda Z, m, F: subset_value(moved(p, Z), m, F, masks), inputs, atol=1e-6, rtol=1e-5
    )


def test_masked_marginal_gradients_match_finite_differences() -> None:
    p, inputs = learnt(3)
    corners = torch.tensor(
        [[0.0, 0.0, 0.0], [1.0, 1.0, 1.0], [0.0, 1.0, 0.4], [0.3, 0.9, 0.6]], dtype=torch.float64
    ).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda Z, m, F, b: masked_value(moved(p, Z), m, F, b),
        (*inputs, corners),
        atol=1e-6,
        rtol=1e-5,
    )
