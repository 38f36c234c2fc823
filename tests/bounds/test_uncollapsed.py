from typing import Any

import pytest
import torch
from torch import Tensor

import oracles
from problems import Problem, problem
from winnowgp.bounds import (
    collapsed_bound,
    collapsed_posterior,
    gaussian_expected_log_prob,
    subset_marginal,
    uncollapsed_bound,
    whitened_kl,
)
from winnowgp.gradients import all_masks

close: dict[str, Any] = {"rtol": 1e-8, "atol": 1e-8}


def random_q(K: int, P: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    """A mean and one covariance an output, in u-space."""
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
        expected_log_prob=lambda m, v: gaussian_expected_log_prob(p.Y, m, v, noise=p.noise),
    )


@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("P", [1, 3])
def test_equals_the_dense_oracle(P: int, per_row: bool) -> None:
    p = problem(P=P, per_row=per_row)
    mean_u, cov_u = random_q(6, P)
    value = bound(p, *oracles.whiten(p.Kuu, mean_u, cov_u))
    expected = oracles.uncollapsed(p.Kuu, p.Kuf, p.Kff, p.Y, p.noise, mean_u, cov_u)
    torch.testing.assert_close(value, expected, **close)


def test_equals_the_collapsed_bound_at_the_optimal_q_and_is_below_elsewhere() -> None:
    p = problem()
    best = collapsed_bound(p.Kuu, p.Kuf, kff=p.kff, Y=p.Y, noise=p.noise)
    q_mean, q_factor = collapsed_posterior(p.Kuu, p.Kuf, Y=p.Y, noise=p.noise)
    torch.testing.assert_close(bound(p, q_mean, q_factor), best, **close)
    assert bound(p, q_mean + 0.01, q_factor) < best
    assert bound(p, q_mean, 1.01 * q_factor) < best


@pytest.mark.parametrize("shared", [False, True])
def test_a_subset_uses_the_marginal_of_q_in_u_space(shared: bool) -> None:
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


def test_padding_adds_nothing_to_the_kl() -> None:
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


def test_indexing_whitened_coordinates_would_be_another_model() -> None:
    """Slip 9 of the text: the tempting shortcut gives another number."""
    p = problem(K=4)
    q_mean, q_factor = oracles.whiten(p.Kuu, *random_q(4, 2))
    mask = torch.tensor([False, True, False, True])
    mean, factor = subset_marginal(p.Kuu, q_mean, q_factor, mask=mask[None])
    right = bound(p, mean[0], factor[0], mask)
    shortcut = bound(p, q_mean[mask], q_factor[:, mask][:, :, mask], mask)
    assert (right - shortcut).abs() > 0.1


def test_a_minibatch_is_unbiased_over_all_minibatches() -> None:
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
            expected_log_prob=lambda m, v, r=rows: gaussian_expected_log_prob(
                p.Y[r], m, v, noise=p.noise
            ),
            scale=6 / 2,
        )
        for rows in pairs
    ]
    torch.testing.assert_close(torch.stack(values).mean(), bound(p, q_mean, q_factor), **close)
