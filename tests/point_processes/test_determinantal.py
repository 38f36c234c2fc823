"""The determinantal process against dense determinants and the sum over all subsets."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from winnowgp.errors import InputError
from winnowgp.gradients import all_masks
from winnowgp.point_processes import (
    Bernoulli,
    Budget,
    CardinalityPrior,
    Determinantal,
    LinearCardinality,
    SquaredCardinality,
    Uniform,
    kl_divergence,
    sampled_kl_divergence,
)

K = 6
CODES = 2 ** torch.arange(K)


def process(
    seed: int = 0, *, candidates: int = K, features: int = 3, scale: float = 1.5
) -> Determinantal:
    g = torch.Generator().manual_seed(seed)
    logits = 1.5 * torch.randn(candidates, generator=g, dtype=torch.float64)
    V = torch.randn(candidates, features, generator=g, dtype=torch.float64)
    return Determinantal(logits, scale * V)


def dense_probabilities(q: Determinantal) -> Tensor:
    """det(A_ZZ) / det(I + A) of every subset, by dense determinants."""
    eye = torch.eye(q.K, dtype=torch.float64)
    root = torch.diag(torch.exp(q.logits / 2))
    A = root @ (eye + q.features @ q.features.mT) @ root
    minors = [A[mask][:, mask].det() for mask in all_masks(q.K)]
    return torch.stack(minors) / (eye + A).det()


SEEDS = st.integers(0, 10_000)


@settings(max_examples=20, deadline=None)
@given(SEEDS, st.integers(0, 6), st.integers(0, 8), st.floats(0, 30))
def test_log_prob_matches_dense_determinants(
    seed: int, candidates: int, features: int, scale: float
) -> None:
    q = process(seed, candidates=candidates, features=features, scale=scale)
    probabilities = q.log_prob(all_masks(candidates)).exp()
    torch.testing.assert_close(probabilities, dense_probabilities(q), rtol=1e-6, atol=1e-12)
    torch.testing.assert_close(probabilities.sum().item(), 1.0)


@settings(max_examples=20, deadline=None)
@given(SEEDS, st.integers(0, 8))
def test_moments_match_enumeration(seed: int, features: int) -> None:
    q, masks = process(seed, features=features), all_masks(K).double()
    probabilities, count = dense_probabilities(q), masks.sum(1)
    torch.testing.assert_close(q.inclusion, probabilities @ masks)
    pairs = masks.mT @ (probabilities[:, None] * masks)
    torch.testing.assert_close(q.pairwise_inclusion(), pairs)
    mean = probabilities @ count
    torch.testing.assert_close(q.mean_count(), mean)
    torch.testing.assert_close(q.variance_count(), probabilities @ (count - mean).square())
    sizes = torch.stack([probabilities[count == m].sum() for m in range(K + 1)])
    torch.testing.assert_close(q.count_probs(), sizes)


@settings(max_examples=20, deadline=None)
@given(SEEDS)
def test_conditional_logits_are_differences_of_log_prob(seed: int) -> None:
    q, masks = process(seed), all_masks(K)
    eye, log_q = torch.eye(K, dtype=torch.bool), q.log_prob(all_masks(K))
    with_k, without_k = (masks[:, None] | eye).long(), (masks[:, None] & ~eye).long()
    expected = log_q[with_k @ CODES] - log_q[without_k @ CODES]
    torch.testing.assert_close(q.conditional_logits(masks), expected, rtol=1e-8, atol=1e-8)


def largest_z(drawn: Tensor, probabilities: Tensor) -> float:
    """The largest |z| of the frequencies of all 2^K subsets."""
    frequency = torch.bincount(drawn.long() @ CODES, minlength=2**K).double() / len(drawn)
    error = (probabilities * (1 - probabilities) / len(drawn)).sqrt()
    return ((frequency - probabilities).abs() / error).max().item()


def test_samples_have_probabilities_of_subsets() -> None:
    # 20,000 draws and 64 frequencies, |z| < 4.5; a process of equal marginals fails.
    q, g = process(3), torch.Generator().manual_seed(1)
    drawn = q.sample(20_000, generator=g)
    assert largest_z(drawn, dense_probabilities(q)) < 4.5
    independent = Bernoulli.from_inclusion(q.inclusion).sample(20_000, generator=g)
    assert largest_z(independent, dense_probabilities(q)) > 6


def test_without_features_equals_bernoulli() -> None:
    q = Bernoulli(torch.tensor([-2.0, 0.3, 40.0, -800.0, 1.0], dtype=torch.float64))
    same, masks = Determinantal.independent(q), all_masks(5)
    torch.testing.assert_close(same.log_prob(masks), q.log_prob(masks))
    torch.testing.assert_close(same.inclusion, q.inclusion)
    torch.testing.assert_close(same.variance_count(), q.variance_count())
    torch.testing.assert_close(same.count_probs(), q.count_probs(), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(same.conditional_logits(masks), q.conditional_logits(masks))
    prior = SquaredCardinality(5, 0.3)
    kl = sampled_kl_divergence(same, prior, masks[:1])
    torch.testing.assert_close(kl[0], kl_divergence(q, prior))
    g = [torch.Generator().manual_seed(2) for _ in "ab"]
    assert torch.equal(same.sample(50, generator=g[0]), q.sample(50, generator=g[1]))


PRIORS: list[CardinalityPrior] = [
    Uniform(K),
    LinearCardinality(K, 0.4),
    SquaredCardinality(K, 0.2),
    Budget(torch.linspace(0, -2, K + 1, dtype=torch.float64) ** 3),
]


@pytest.mark.parametrize("prior", PRIORS, ids=lambda p: type(p).__name__)
def test_sampled_kl_divergence_has_expectation_of_enumeration(prior: CardinalityPrior) -> None:
    q, masks = process(4), all_masks(K)
    probabilities = dense_probabilities(q)
    exact = probabilities @ (probabilities.log() - prior.log_prob(masks, like=q.logits))
    expected = probabilities @ sampled_kl_divergence(q, prior, masks)
    torch.testing.assert_close(expected, exact, rtol=1e-9, atol=1e-9)


def test_gradients_match_finite_differences() -> None:
    q = process(5, candidates=4, features=2)
    inputs = (q.logits.clone().requires_grad_(True), q.features.clone().requires_grad_(True))
    masks = all_masks(4)[[0, 5, 15]]

    def outputs(a: Tensor, V: Tensor) -> tuple[Tensor, ...]:
        p = Determinantal(a, V)
        return p.log_prob(masks), p.conditional_logits(masks), p.variance_count()

    assert torch.autograd.gradcheck(outputs, inputs)


@pytest.mark.unchecked
def test_features_of_other_length_raise() -> None:
    with pytest.raises(InputError, match="3 candidates"):
        Determinantal(torch.zeros(3), torch.zeros(2, 4))
    with pytest.raises(InputError, match="K=6"):
        sampled_kl_divergence(process(), Uniform(5), all_masks(K))
