"""Fit of a determinantal q(Z) against the sum over all subsets."""

from functools import cache

import pytest
import torch
from torch import Tensor

from helpers.selection_problems import problem
from winnowgp.errors import InputError
from winnowgp.gradients import all_masks
from winnowgp.point_processes import Bernoulli, Budget, Determinantal, SquaredCardinality
from winnowgp.point_processes.bernoulli import PointProcess
from winnowgp.selection import SubsetStatistics, fit_determinantal, fit_inclusion
from winnowgp.selection.determinantal_fit import DeterminantalFit, conditional_covariance

K = 8
PRIOR = SquaredCardinality(K, 0.5)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@cache
def statistics() -> SubsetStatistics:
    """Four locations, twice each: either copy can replace the other."""
    return problem(22, K=K, noise=0.3, duplicates=4).statistics


@cache
def log_joint() -> Tensor:
    masks = all_masks(K)
    return statistics().value(masks) + PRIOR.log_prob(masks, like=statistics().empty)


def objective(q: PointProcess) -> float:
    """E_q[L] − KL[q ‖ p] by enumeration."""
    log_q = q.log_prob(all_masks(K))
    return (log_q.exp() @ (log_joint() - log_q)).item()


def test_conditional_covariance_matches_enumeration() -> None:
    g = seeded(0)
    logits = torch.randn(K, generator=g, dtype=torch.float64)
    q = Determinantal(logits, torch.randn(K, 2, generator=g, dtype=torch.float64))
    masks = all_masks(K)[::5]
    log_weights = PRIOR.log_weights(logits)
    covariance, _ = conditional_covariance(statistics(), q, masks, log_weights=log_weights)
    eye, codes = torch.eye(K, dtype=torch.bool), 2 ** torch.arange(K)
    log_q = q.log_prob(all_masks(K))
    f = log_joint() - log_q
    on, off = (masks[:, None] | eye).long() @ codes, (masks[:, None] & ~eye).long() @ codes
    p = (log_q[on] - log_q[off]).sigmoid()
    mean = p * f[on] + (1 - p) * f[off]
    # E[b f] − E[b] E[f] of the two subsets with and without k.
    torch.testing.assert_close(covariance, p * f[on] - p * mean, rtol=1e-6, atol=1e-6)


def fitted(inclusion: Tensor | None = None) -> DeterminantalFit:
    return fit_determinantal(
        statistics(),
        prior=PRIOR,
        start=mean_field(),
        similarity=statistics().correlations(),
        generator=seeded(1),
        inclusion=inclusion,
        powers=(16.0,),
        steps=60,
    )


@cache
def mean_field() -> Bernoulli:
    return fit_inclusion(statistics(), prior=PRIOR, generator=seeded(0)).q


def test_fit_determinantal_from_mean_field_is_not_lower() -> None:
    fit = fitted()
    assert objective(mean_field()) < objective(fit.q) < log_joint().logsumexp(0).item()
    assert abs(fit.objective - objective(fit.q)) < 4 * fit.error


def test_fit_determinantal_from_marginals_closes_half_of_gap() -> None:
    """The mean field has chosen between copies; the marginals of q* have not."""
    marginals = log_joint().softmax(0) @ all_masks(K).double()
    q = fitted(marginals).q
    evidence, independent = log_joint().logsumexp(0).item(), objective(mean_field())
    assert 0.5 * (independent + evidence) < objective(q) < evidence
    # One of two copies is needed, never both.
    pairs, inclusion = q.pairwise_inclusion(), q.inclusion
    at = int((inclusion[:4] * inclusion[4:]).argmax())
    assert pairs[at, at + 4] < 0.5 * inclusion[at] * inclusion[at + 4]


def test_fit_determinantal_from_certain_inclusion_is_finite() -> None:
    fit = fitted(torch.tensor([1.0, 0.0, 1.0, 0.5, 0.5, 0.0, 1.0, 0.0], dtype=torch.float64))
    assert torch.isfinite(fit.q.logits).all()
    with pytest.raises(InputError, match=r"within \[0, 1\]"):
        fitted(torch.full((K,), 1 + 1e-9, dtype=torch.float64))


def test_fit_determinantal_without_features_returns_start() -> None:
    start = Bernoulli(torch.linspace(-1, 1, K, dtype=torch.float64))
    fitted = fit_determinantal(
        statistics(),
        prior=PRIOR,
        start=start,
        similarity=statistics().correlations(),
        generator=seeded(1),
        powers=(),
    )
    masks = all_masks(K)
    torch.testing.assert_close(fitted.q.log_prob(masks), start.log_prob(masks))
    assert fitted.objective == fitted.start


def test_correlations_are_those_of_the_kernel() -> None:
    p = problem(5)
    expected = p.kernel(p.Z, p.Z) / p.variance
    torch.testing.assert_close(p.statistics.correlations(), expected, rtol=0, atol=1e-9)


def test_fit_determinantal_bad_arguments_raise() -> None:
    start = Bernoulli(torch.zeros(K, dtype=torch.float64))
    similarity, g = torch.eye(K, dtype=torch.float64), seeded(0)
    hard = Budget(torch.tensor([0.0] * 4 + [float("-inf")] * 5, dtype=torch.float64))

    def fit(**changed: object) -> None:
        given = {"prior": PRIOR, "start": start, "similarity": similarity, "generator": g}
        fit_determinantal(statistics(), **{**given, **changed})

    with pytest.raises(InputError, match="finite penalty"):
        fit(prior=hard)
    with pytest.raises(InputError, match="unit diagonal"):
        fit(similarity=3 * similarity)
    with pytest.raises(InputError, match="8 candidates"):
        fit(start=Bernoulli(start.logits[1:]))
