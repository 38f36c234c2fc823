"""One set of checks for every prior over subsets."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from winnowgp.errors import InputError
from winnowgp.gradients import all_masks
from winnowgp.point_processes import (
    Bernoulli,
    Budget,
    CardinalityPrior,
    LinearCardinality,
    SquaredCardinality,
    Uniform,
    kl_divergence,
)

PRIORS = {
    "squared": lambda K: SquaredCardinality(K, alpha=0.3),
    "linear": lambda K: LinearCardinality(K, alpha=1.2),
    "budget": lambda K: Budget(torch.cos(torch.arange(K + 1, dtype=torch.float64)) * 3),
    "uniform": Uniform,
}
battery = pytest.mark.parametrize("prior", PRIORS.values(), ids=PRIORS.keys())
LOGITS = st.lists(st.floats(-20, 20), min_size=0, max_size=8)
LIKE = torch.zeros((), dtype=torch.float64)


@battery
@pytest.mark.parametrize("K", [0, 1, 5, 10])
def test_prior_log_prob_of_all_subsets_sums_to_one(prior, K: int) -> None:
    total = prior(K).log_prob(all_masks(K), like=LIKE).exp().sum()
    torch.testing.assert_close(total, torch.ones_like(total), rtol=1e-12, atol=0)


@battery
@settings(max_examples=40, deadline=None)
@given(logits=LOGITS)
def test_kl_divergence_matches_enumeration(prior, logits: list[float]) -> None:
    q = Bernoulli(torch.tensor(logits, dtype=torch.float64))
    p: CardinalityPrior = prior(q.K)
    masks = all_masks(q.K)
    log_q = q.log_prob(masks)
    expected = (log_q.exp() * (log_q - p.log_prob(masks, like=LIKE))).sum()
    kl = kl_divergence(q, p)
    torch.testing.assert_close(kl, expected, rtol=1e-9, atol=1e-9)
    assert kl > -1e-9


@battery
def test_expected_log_weight_matches_count_distribution(prior) -> None:
    q = Bernoulli(torch.linspace(-4, 3, 60, dtype=torch.float64))
    p = prior(60)
    through_count = (q.count_probs() * p.log_weights(LIKE)).sum()
    torch.testing.assert_close(p.expected_log_weight(q), through_count, rtol=1e-10, atol=0)


@battery
def test_kl_divergence_gradient_matches_finite_differences(prior) -> None:
    logits = torch.randn(6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a: kl_divergence(Bernoulli(a), prior(6)), (logits,))


@battery
@pytest.mark.parametrize("K", [1, 2, 5, 8])
def test_expected_slope_matches_enumeration(prior, K: int) -> None:
    g = torch.Generator().manual_seed(K)
    q = Bernoulli(2 * torch.randn(K, generator=g, dtype=torch.float64))
    p: CardinalityPrior = prior(K)
    steps = p.log_weights(LIKE).diff()
    rest = all_masks(K - 1)
    for k in range(K):
        others = q.prune(torch.arange(K) != k)
        expected = others.log_prob(rest).exp() @ steps[rest.sum(-1)]
        torch.testing.assert_close(p.expected_slope(q)[k], expected, rtol=1e-10, atol=1e-12)


@battery
@pytest.mark.parametrize("K", [0, 1, 2, 5, 8, 60])
def test_expected_slope_equals_derivative_in_inclusion(prior, K: int) -> None:
    g = torch.Generator().manual_seed(K)
    inclusion = torch.rand(K, generator=g, dtype=torch.float64)
    p: CardinalityPrior = prior(K)
    derivative = torch.autograd.functional.jacobian(
        lambda a: p.expected_log_weight(Bernoulli.from_inclusion(a)), inclusion
    )
    slope = p.expected_slope(Bernoulli.from_inclusion(inclusion))
    torch.testing.assert_close(slope, derivative, rtol=1e-9, atol=1e-9)


@battery
def test_saturated_inclusion_keeps_kl_and_slope_finite(prior) -> None:
    for logits in ([800.0, -800.0, 0.0], [float("inf"), float("-inf"), 0.0]):
        q = Bernoulli(torch.tensor(logits, dtype=torch.float64))
        assert torch.isfinite(kl_divergence(q, prior(3)))
        assert torch.isfinite(prior(3).expected_slope(q)).all()


def test_expected_slope_forbidden_size_affects_only_reachable_points() -> None:
    hard = Budget(torch.tensor([0.0, 0.5, float("-inf")], dtype=torch.float64))
    one = Bernoulli(torch.tensor([0.0, float("-inf")], dtype=torch.float64))
    # The second candidate is never included, so only its own inclusion could reach size 2.
    slope = hard.expected_slope(one)
    assert slope[0].item() == 0.5
    assert slope[1].item() < -1e200
    either = hard.expected_slope(Bernoulli(torch.zeros(2, dtype=torch.float64)))
    assert (either < -1e200).all()


@pytest.mark.parametrize("alpha", [0.01, 0.5, 3.0])
def test_kl_divergence_of_prior_to_itself_is_zero(alpha: float) -> None:
    q = Bernoulli(torch.full((40,), -alpha, dtype=torch.float64))
    assert abs(kl_divergence(q, LinearCardinality(40, alpha)).item()) < 1e-10
    even = Bernoulli(torch.zeros(40, dtype=torch.float64))
    assert abs(kl_divergence(even, Uniform(40)).item()) < 1e-10


def test_log_normaliser_many_candidates_does_not_overflow() -> None:
    q = Bernoulli(torch.zeros(5_000, dtype=torch.float64))
    assert torch.isfinite(kl_divergence(q, SquaredCardinality(5_000, 1e-6)))


def test_budget_hard_limit_forbids_larger_sets() -> None:
    hard = Budget(torch.tensor([0.0, 0.0, float("-inf")], dtype=torch.float64))
    allowed = hard.log_prob(all_masks(2), like=LIKE).exp()
    torch.testing.assert_close(allowed, torch.tensor([1, 1, 1, 0], dtype=torch.float64) / 3)
    one = Bernoulli(torch.tensor([0.0, float("-inf")], dtype=torch.float64))
    assert torch.isfinite(kl_divergence(one, hard))
    assert torch.isinf(kl_divergence(Bernoulli(torch.zeros(2, dtype=torch.float64)), hard))


@pytest.mark.parametrize("alpha", [0.0, -0.1, float("nan"), float("inf")])
@pytest.mark.parametrize("kind", [SquaredCardinality, LinearCardinality])
def test_prior_non_positive_alpha_raises(kind, alpha: float) -> None:
    with pytest.raises(InputError, match="`alpha` must be a positive number"):
        kind(5, alpha)


@pytest.mark.parametrize(
    "table", [[], [float("nan"), 0.0], [float("inf")], [float("-inf"), float("-inf")]]
)
def test_budget_invalid_table_raises(table: list[float]) -> None:
    with pytest.raises(InputError, match="`table`"):
        Budget(torch.tensor(table, dtype=torch.float64))


def test_kl_divergence_different_candidates_raises() -> None:
    with pytest.raises(InputError, match="Build the prior with K=3"):
        kl_divergence(Bernoulli(torch.zeros(3)), Uniform(4))
    with pytest.raises(InputError, match="zero or more"):
        Uniform(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_expected_slope_hard_budget_is_not_nan(dtype: torch.dtype) -> None:
    hard = Budget(torch.tensor([0.0, 0.5, float("-inf")], dtype=dtype))
    slope = hard.expected_slope(Bernoulli(torch.zeros(2, dtype=dtype)))
    assert torch.isfinite(slope).all()
    assert (slope < -1e30).all()
