"""Expected bounds for targets from the prior, against the dense expectation and samples."""

import math

import pytest
import torch
from torch import Tensor

from helpers import oracles
from helpers.problems import Problem, problem
from helpers.selection_problems import chunked_moments
from winnowgp.bounds.collapsed import Moments, moment_bound, prior_moments
from winnowgp.gradients import all_masks
from winnowgp.linalg import cholesky
from winnowgp.selection.objective import subset_statistics

noises = pytest.mark.parametrize("per_row", [False, True])


def whitened(p: Problem, Y: Tensor) -> tuple[Tensor, Moments]:
    L = cholesky(p.Kuu).L
    return L, chunked_moments(L, [(p.Kuf, p.kff, Y, 1 / p.noise.expand(len(Y)))])


def expected(p: Problem, mask: Tensor) -> Tensor:
    """E[log N(y | 0, Q_Z + Σ)] − ½ tr Σ⁻¹(K − Q_Z) over y ~ N(0, Q_** + Σ)."""
    Sigma = torch.diag(p.noise.expand(len(p.X)))
    truth = oracles.explained(p.Kuu, p.Kuf) + Sigma
    Q = oracles.explained(p.Kuu[mask][:, mask], p.Kuf[mask])
    fit = torch.linalg.solve(Q + Sigma, truth).trace()
    normal = -0.5 * (len(p.X) * math.log(2 * math.pi) + torch.logdet(Q + Sigma) + fit)
    return normal - 0.5 * ((p.Kff - Q) @ Sigma.inverse()).trace()


@noises
@pytest.mark.parametrize("P", [1, 3])
def test_prior_moments_give_expected_bound_of_every_subset(per_row: bool, P: int) -> None:
    p = problem(K=5, P=P, per_row=per_row)
    L, moments = whitened(p, p.Y)
    masks = all_masks(5, device=p.X.device)
    values = subset_statistics(L, prior_moments(moments)).value(masks) / 5
    dense = torch.stack([expected(p, mask) for mask in masks])
    torch.testing.assert_close(values, dense, rtol=1e-8, atol=1e-8)


@noises
def test_prior_moments_equal_average_over_prior_draws(per_row: bool) -> None:
    """40,000 draws as outputs of one problem; 4 standard errors are less than 0.1 nats."""
    p, S = problem(K=5, per_row=per_row), 40_000
    g = torch.Generator().manual_seed(1)
    truth = oracles.explained(p.Kuu, p.Kuf) + torch.diag(p.noise.expand(len(p.X)))
    normal = torch.randn(len(p.X), S, generator=g, dtype=torch.float64)
    Y = torch.linalg.cholesky(truth) @ normal
    drawn = moment_bound(whitened(p, Y)[1]).item() / S
    expected_bound = moment_bound(prior_moments(whitened(p, p.Y)[1])).item() / 5
    # ½ χ² with N degrees of freedom: variance N/2 per draw.
    error = math.sqrt(len(p.X) / 2 / S)
    assert abs(drawn - expected_bound) < 4 * error < 0.1


def test_prior_moments_have_non_negative_marginal_gains() -> None:
    p = problem(K=5)
    L, moments = whitened(p, p.Y)
    statistics = subset_statistics(L, prior_moments(moments))
    for mask in all_masks(5, device=p.X.device):
        assert bool((statistics.marginal_gains(mask) > -1e-8).all())
