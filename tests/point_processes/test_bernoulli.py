from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from winnowgp.errors import InputError
from winnowgp.gradients import all_masks
from winnowgp.point_processes import Bernoulli, poisson_binomial

LOGITS = st.lists(st.floats(-30, 30), min_size=0, max_size=8)


def process(logits: list[float]) -> Bernoulli:
    return Bernoulli(torch.tensor(logits, dtype=torch.float64))


@settings(max_examples=60, deadline=None)
@given(LOGITS)
def test_log_prob_of_all_subsets_sums_to_one(logits: list[float]) -> None:
    q = process(logits)
    total = q.log_prob(all_masks(q.K)).exp().sum()
    torch.testing.assert_close(total, torch.ones_like(total), rtol=1e-12, atol=0)


@settings(max_examples=60, deadline=None)
@given(LOGITS)
def test_entropy_and_moments_match_enumeration(logits: list[float]) -> None:
    q = process(logits)
    masks = all_masks(q.K)
    log_q = q.log_prob(masks)
    probs, count = log_q.exp(), masks.sum(-1).to(log_q)
    close: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-12}
    torch.testing.assert_close(q.entropy(), -(probs * log_q).sum(), **close)
    torch.testing.assert_close(q.mean_count(), (probs * count).sum(), **close)
    variance = (probs * (count - (probs * count).sum()) ** 2).sum()
    torch.testing.assert_close(q.variance_count(), variance, **close)


@settings(max_examples=60, deadline=None)
@given(LOGITS)
def test_count_probs_match_enumeration_to_relative_accuracy(logits: list[float]) -> None:
    q = process(logits)
    masks = all_masks(q.K)
    probs = q.log_prob(masks).exp()
    expected = torch.stack([probs[masks.sum(-1) == m].sum() for m in range(q.K + 1)])
    torch.testing.assert_close(q.count_probs(), expected, rtol=1e-10, atol=1e-300)


def test_poisson_binomial_equal_logits_is_binomial() -> None:
    probs = poisson_binomial(torch.full((200,), 0.3, dtype=torch.float64).logit())
    m = torch.arange(201, dtype=torch.float64)
    binomial = torch.distributions.Binomial(200, torch.tensor(0.3, dtype=torch.float64))
    torch.testing.assert_close(probs, binomial.log_prob(m).exp(), rtol=1e-9, atol=0)


def test_poisson_binomial_gradient_matches_finite_differences() -> None:
    logits = torch.randn(5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(poisson_binomial, (logits,))


def test_bernoulli_saturated_logits_are_exact_and_finite() -> None:
    logits = torch.tensor([1e3, -1e3, 50.0], dtype=torch.float64, requires_grad=True)
    q = Bernoulli(logits)
    mask = torch.tensor([[True, False, True], [True, False, False]])
    log_prob = q.log_prob(mask)
    # log(1 − sigmoid(50)) = −50 to 1e-22, where 1 − sigmoid(50) rounds to zero.
    torch.testing.assert_close(log_prob[1], torch.tensor(-50.0, dtype=torch.float64))
    (q.entropy() + log_prob.sum() + q.variance_count()).backward()
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()


def test_sample_is_repeatable_with_correct_frequencies() -> None:
    inclusion = torch.tensor([0.0, 0.1, 0.5, 0.93, 1.0], dtype=torch.float64)
    q = Bernoulli.from_inclusion(inclusion)
    first, second = (q.sample(40_000, generator=torch.Generator().manual_seed(3)) for _ in "ab")
    assert torch.equal(first, second)
    # 40,000 draws: a standard error of at most 0.0025; |z| < 4.
    error = (first.double().mean(0) - inclusion).abs()
    assert (error <= 4 * (inclusion * (1 - inclusion) / 40_000).sqrt()).all()


def test_prune_keeps_probabilities() -> None:
    q = process([1.0, 2.0, -3.0])
    pruned = q.prune(torch.tensor([True, False, True]))
    assert pruned.logits.tolist() == [1.0, -3.0]
    assert q.mode().tolist() == [True, True, False]


def test_counts_are_invariant_to_permuted_candidates() -> None:
    q, order = process([0.3, -1.0, 2.0, 0.7]), torch.tensor([2, 0, 3, 1])
    permuted = Bernoulli(q.logits[order])
    torch.testing.assert_close(q.count_probs(), permuted.count_probs())
    torch.testing.assert_close(q.entropy(), permuted.entropy())


def test_from_inclusion_outside_unit_interval_raises() -> None:
    with pytest.raises(InputError, match="within"):
        Bernoulli.from_inclusion(torch.tensor([0.2, 1.3]))
