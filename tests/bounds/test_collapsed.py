"""Collapsed, upper and exact: each against its dense oracle, then against each other."""

from typing import Any

import pytest
import torch

from helpers import oracles
from helpers.problems import problem
from winnowgp.bounds import (
    collapsed_bound,
    exact_log_marginal,
    masked_bound,
    project,
    subset_blocks,
    upper_bound,
)
from winnowgp.bounds.collapsed import optimal_posterior
from winnowgp.gradients import all_masks

BOUNDS = {
    "collapsed": (collapsed_bound, oracles.collapsed),
    "upper": (upper_bound, oracles.upper),
}
battery = pytest.mark.parametrize(("bound", "oracle"), BOUNDS.values(), ids=BOUNDS.keys())
close: dict[str, Any] = {"rtol": 1e-8, "atol": 1e-8}


@battery
@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("P", [1, 3])
@pytest.mark.parametrize("K", [0, 1, 6])
def test_bound_equals_dense_oracle(bound, oracle, K: int, P: int, per_row: bool) -> None:
    p = problem(K=K, P=P, per_row=per_row)
    value = bound(p.Kuu, p.Kuf, kff=p.kff, Y=p.Y, noise=p.noise)
    torch.testing.assert_close(value, oracle(p.Kuu, p.Kuf, p.Kff, p.Y, p.noise), **close)


@battery
def test_bound_of_batch_equals_bound_of_each_subset(bound, oracle) -> None:
    p, masks = problem(K=5), all_masks(5)
    blocks = subset_blocks(p.Kuu, p.Kuf, masks)
    values = bound(*blocks, kff=p.kff, Y=p.Y, noise=p.noise)
    for mask, value in zip(masks, values, strict=True):
        expected = oracle(p.Kuu[mask][:, mask], p.Kuf[mask], p.Kff, p.Y, p.noise)
        torch.testing.assert_close(value, expected, **close)


@battery
def test_bound_at_data_equals_evidence(bound, oracle) -> None:
    p = problem(N=12, lengthscale=0.3)
    evidence = exact_log_marginal(p.Kff, Y=p.Y, noise=p.noise)
    torch.testing.assert_close(evidence, oracles.log_normal(p.Y, p.Kff + p.noise * torch.eye(12)))
    value = bound(p.Kff, p.Kff, kff=p.kff, Y=p.Y, noise=p.noise)
    torch.testing.assert_close(value, evidence, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("seed", range(5))
def test_evidence_lies_between_collapsed_and_upper_bound(seed: int) -> None:
    p = problem(seed=seed)
    args: dict[str, Any] = {"kff": p.kff, "Y": p.Y, "noise": p.noise}
    evidence = exact_log_marginal(p.Kff, Y=p.Y, noise=p.noise)
    lower, upper = (bound(p.Kuu, p.Kuf, **args) for bound in (collapsed_bound, upper_bound))
    assert lower < evidence < upper


@battery
def test_bound_is_invariant_to_permuted_candidates(bound, oracle) -> None:
    p, order = problem(), torch.tensor([3, 1, 5, 0, 2, 4])
    value = bound(p.Kuu, p.Kuf, kff=p.kff, Y=p.Y, noise=p.noise)
    permuted = bound(p.Kuu[order][:, order], p.Kuf[order], kff=p.kff, Y=p.Y, noise=p.noise)
    torch.testing.assert_close(value, permuted, rtol=1e-10, atol=0)


@battery
def test_bound_is_invariant_to_duplicated_candidates(bound, oracle) -> None:
    p = problem()
    twice = torch.arange(6).repeat(2)
    value = bound(p.Kuu, p.Kuf, kff=p.kff, Y=p.Y, noise=p.noise)
    doubled = bound(p.Kuu[twice][:, twice], p.Kuf[twice], kff=p.kff, Y=p.Y, noise=p.noise)
    torch.testing.assert_close(value, doubled, rtol=1e-8, atol=1e-8)


@battery
def test_bound_condition_1e18_equals_evidence(bound, oracle) -> None:
    p = problem(N=60, K=60, D=1, lengthscale=2.0)
    assert torch.linalg.cond(p.Kuu) > 1e17
    value = bound(p.Kuu, p.Kuf, kff=p.kff, Y=p.Y, noise=p.noise)
    evidence = exact_log_marginal(p.Kff, Y=p.Y, noise=p.noise)
    # Sixty inducing points on a line determine so smooth a function completely.
    torch.testing.assert_close(value, evidence, rtol=1e-6, atol=0)


@battery
def test_bound_float32_agrees_to_its_precision(bound, oracle) -> None:
    p = problem()
    single = [t.float() for t in (p.Kuu, p.Kuf, p.kff, p.Y, p.noise)]
    value = bound(single[0], single[1], kff=single[2], Y=single[3], noise=single[4])
    assert value.dtype == torch.float32
    torch.testing.assert_close(
        value.double(), oracle(p.Kuu, p.Kuf, p.Kff, p.Y, p.noise), rtol=1e-4, atol=1e-3
    )


@battery
def test_bound_gradients_match_finite_differences(bound, oracle) -> None:
    p = problem(N=8, K=3)
    inputs = (p.Kuu.requires_grad_(), p.Kuf.requires_grad_(), p.noise.clone().requires_grad_())

    def value(Kuu, Kuf, noise):
        return bound((Kuu + Kuu.mT) / 2, Kuf, kff=p.kff, Y=p.Y, noise=noise)

    assert torch.autograd.gradcheck(value, inputs)


def test_collapsed_bound_empty_subset_equals_closed_form() -> None:
    p = problem(K=0, P=1)
    value = collapsed_bound(p.Kuu, p.Kuf, kff=p.kff, Y=p.Y, noise=p.noise)
    noise_only = torch.distributions.Normal(0.0, p.noise.sqrt()).log_prob(p.Y).sum()
    torch.testing.assert_close(value, noise_only - p.kff.sum() / (2 * p.noise))


def test_masked_bound_with_mask_equals_bound_of_subset() -> None:
    p, masks = problem(K=5), all_masks(5)
    args: dict[str, Any] = {"kff": p.kff, "Y": p.Y, "noise": p.noise}
    masked = masked_bound(p.Kuu, p.Kuf, weights=masks.double(), **args)
    direct = collapsed_bound(*subset_blocks(p.Kuu, p.Kuf, masks), **args)
    torch.testing.assert_close(masked, direct, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(
        masked[-1], collapsed_bound(p.Kuu, p.Kuf, **args), rtol=1e-10, atol=0
    )


def test_masked_bound_with_weights_equals_weighted_kernel_bound() -> None:
    """Appendix B.1 of the paper, entry by entry, with the mean prior variance instead of 1."""
    p = problem(K=4)
    b = torch.tensor([0.3, 0.9, 0.0, 0.6], dtype=torch.float64)
    s = p.Kuu.diagonal().mean()
    Kuu = torch.empty_like(p.Kuu)
    for j in range(4):
        for k in range(4):
            Kuu[j, k] = b[k] * (p.Kuu[k, k] - s) + s if j == k else b[j] * b[k] * p.Kuu[j, k]
    Kuf = torch.stack([b[k] * p.Kuf[k] for k in range(4)])
    value = masked_bound(p.Kuu, p.Kuf, weights=b[None], kff=p.kff, Y=p.Y, noise=p.noise)
    torch.testing.assert_close(value[0], oracles.collapsed(Kuu, Kuf, p.Kff, p.Y, p.noise), **close)


def test_masked_bound_with_weights_is_differentiable() -> None:
    p = problem(N=8, K=3)
    weights = torch.rand(2, 3, dtype=torch.float64, requires_grad=True)
    args: dict[str, Any] = {"kff": p.kff, "Y": p.Y, "noise": p.noise}
    assert torch.autograd.gradcheck(
        lambda w: masked_bound(p.Kuu, p.Kuf, weights=w, **args), (weights,)
    )


@pytest.mark.parametrize("per_row", [False, True])
def test_optimal_posterior_at_data_equals_exact_posterior(per_row: bool) -> None:
    """With Z = X the optimal q(u) is the exact GP posterior at the data."""
    p = problem(N=10, lengthscale=0.3, per_row=per_row)
    projection = project(p.Kff, p.Kff, p.Y, p.noise.expand(10))
    D = projection.V @ (p.Y / p.noise.expand(10)[:, None])
    mean, factor = optimal_posterior(projection.LB, D)
    L = torch.linalg.cholesky(p.Kff)
    gain = p.Kff @ (p.Kff + torch.diag(p.noise.expand(10))).inverse()
    torch.testing.assert_close(L @ mean, gain @ p.Y, rtol=1e-7, atol=1e-9)
    covariance = L @ factor @ factor.mT @ L.mT
    torch.testing.assert_close(covariance, p.Kff - gain @ p.Kff, rtol=1e-6, atol=1e-9)
