"""Natural-gradient fit of inclusion probabilities against the sum over all subsets."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from helpers.selection_problems import problem
from winnowgp.errors import InputError
from winnowgp.gradients import all_masks
from winnowgp.point_processes import (
    Bernoulli,
    Budget,
    CardinalityPrior,
    SquaredCardinality,
    kl_divergence,
)
from winnowgp.selection import SubsetStatistics, fit_inclusion
from winnowgp.selection.natural import fixed_point, inclusion_start, inclusion_step


def sizes(K: int) -> Tensor:
    return torch.arange(K + 1, dtype=torch.float64)


PRIORS: dict[str, Callable[[int, float], CardinalityPrior]] = {
    "squared": lambda K, strength: SquaredCardinality(K, 0.07 * strength),
    "poisson": lambda K, strength: Budget(strength * (0.4 * sizes(K) - (sizes(K) + 1).lgamma())),
    "cubic": lambda K, strength: Budget(strength * (0.3 * sizes(K) - 0.01 * sizes(K) ** 3)),
}


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_process(K: int, *, seed: int, spread: float = 1.0) -> Bernoulli:
    return Bernoulli(spread * torch.randn(K, generator=seeded(seed), dtype=torch.float64))


def all_gains(statistics: SubsetStatistics) -> Tensor:
    return torch.stack([statistics.marginal_gains(mask) for mask in all_masks(statistics.K)])


def expected_gains(statistics: SubsetStatistics, q: Bernoulli) -> Tensor:
    return q.log_prob(all_masks(q.K)).exp() @ all_gains(statistics)


def test_expected_marginal_gains_equal_gradient_of_expected_bound() -> None:
    s = problem(20, noise=0.5).statistics
    q = random_process(8, seed=1)
    inclusion = q.inclusion.requires_grad_(True)
    masks = all_masks(8)
    probability = torch.where(masks, inclusion, 1 - inclusion).prod(dim=1)
    (gradient,) = torch.autograd.grad(probability @ s.value(masks), inclusion)
    torch.testing.assert_close(expected_gains(s, q), gradient, rtol=1e-7, atol=1e-7)


def test_sampled_marginal_gains_are_unbiased() -> None:
    s = problem(21, noise=0.5).statistics
    q = random_process(8, seed=1, spread=0.5)
    # 4,000 draws, |z| < 4
    masks = q.sample(4000, generator=seeded(2))
    sampled = all_gains(s)[(masks.long() << torch.arange(8)).sum(dim=1)]
    z = (sampled.mean(dim=0) - expected_gains(s, q)) / (sampled.std(dim=0) / 4000**0.5)
    assert z.abs().max().item() < 4


def test_inclusion_step_averages_in_marginal_gains_of_sample() -> None:
    s, prior = problem(25, noise=3.0).statistics, SquaredCardinality(8, 0.3)
    state = inclusion_start(s, torch.arange(8) < 5, prior=prior)
    after, draw = inclusion_step(s, state, prior=prior, generator=seeded(3))
    mask = state.q.sample(1, generator=seeded(3))[0]
    expected = state.gains + 5**-0.75 * (s.marginal_gains(mask) - state.gains)
    torch.testing.assert_close(after.gains, expected)
    torch.testing.assert_close(after.q.logits, fixed_point(after.gains, prior, at=state.q).logits)
    torch.testing.assert_close(draw, s.value(mask[None])[0] - kl_divergence(state.q, prior))
    assert after.step == 1


@pytest.mark.parametrize("name", PRIORS)
def test_fixed_point_satisfies_stationarity_equation(name: str) -> None:
    prior = PRIORS[name](8, 1.0)
    gains = random_process(8, seed=4, spread=2.0).logits
    q = target = Bernoulli(torch.zeros(8, dtype=torch.float64))
    for _ in range(200):
        target = fixed_point(gains, prior, at=q)
        q = Bernoulli.from_inclusion(0.5 * q.inclusion + 0.5 * target.inclusion)
    slopes = prior.expected_slope(q)
    torch.testing.assert_close(target.logits, gains + slopes, rtol=1e-5, atol=1e-5)


def test_fixed_point_uses_prior_at_implied_size() -> None:
    gains = torch.linspace(5, 25, 100, dtype=torch.float64)
    full = Bernoulli(torch.full((100,), 30.0, dtype=torch.float64))
    # At the current size of a hundred the prior costs 99.5 nats per point and would remove all.
    q = fixed_point(gains, SquaredCardinality(100, 0.5), at=full)
    slopes = -0.5 * (1 + 2 * (q.mean_count() - full.inclusion))
    torch.testing.assert_close(q.logits, gains + slopes, rtol=0, atol=1e-5)
    assert q.mean_count().item() > 15


def best_by_gradient_ascent(values: Tensor, prior: CardinalityPrior) -> float:
    """The highest of six ascents of Σ_Z q(Z) (L(Z) + log p(Z) − log q(Z))."""
    masks = all_masks(8)
    log_joint = values + prior.log_prob(masks, like=values)
    starts = [random_process(8, seed=seed, spread=2.0).logits for seed in range(6)]
    logits = torch.stack(starts)[:, None].requires_grad_(True)
    optimiser = torch.optim.Adam([logits], lr=0.1)
    reached = torch.zeros(6)
    for _ in range(400):
        log_q = torch.where(masks, logsigmoid(logits), logsigmoid(-logits)).sum(-1)
        reached = (log_q.exp() * (log_joint - log_q)).sum(-1)
        optimiser.zero_grad()
        reached.sum().neg().backward()
        optimiser.step()
    return reached.max().item()


@pytest.mark.parametrize("name", ["squared", "poisson"])
def test_fit_inclusion_reaches_optimum_of_gradient_ascent(name: str) -> None:
    s, prior = problem(22, noise=1.0).statistics, PRIORS[name](8, 10.0)
    values = s.value(all_masks(8))
    fitted = fit_inclusion(s, prior=prior, generator=seeded(0), max_steps=400)
    best = best_by_gradient_ascent(values, prior)
    expected = fitted.q.log_prob(all_masks(8)).exp() @ values
    assert (expected - kl_divergence(fitted.q, prior)).item() > best - 0.3


def test_fit_inclusion_strong_prior_does_not_empty_set() -> None:
    s = problem(23, K=60, N=200, noise=0.05, lengthscale=0.7).statistics
    fitted = fit_inclusion(s, prior=SquaredCardinality(60, 0.5), generator=seeded(0))
    assert fitted.q.mean_count().item() > 3


def test_inclusion_step_from_half_of_candidates_does_not_empty_set() -> None:
    s = problem(23, K=60, N=200, noise=0.05, lengthscale=0.7).statistics
    prior, generator = SquaredCardinality(60, 0.5), seeded(0)
    state = inclusion_start(s, torch.arange(60) % 2 == 0, prior=prior)
    for _ in range(30):
        state, _ = inclusion_step(s, state, prior=prior, generator=generator)
    assert state.q.mean_count().item() > 3


def test_fit_inclusion_same_seed_same_result() -> None:
    s, prior = problem(24, noise=3.0).statistics, SquaredCardinality(8, 0.3)
    first, second = (fit_inclusion(s, prior=prior, generator=seeded(7)) for _ in "ab")
    assert torch.equal(first.q.logits, second.q.logits)
    assert torch.equal(first.trace, second.trace)


@pytest.mark.parametrize("steps", [0, 1, 39])
def test_fit_inclusion_stops_at_max_steps_unconverged(steps: int) -> None:
    s, prior = problem(24, noise=3.0).statistics, SquaredCardinality(8, 0.3)
    fitted = fit_inclusion(s, prior=prior, generator=seeded(7), max_steps=steps)
    assert fitted.trace.shape == (steps,)
    assert not fitted.converged


def test_fit_inclusion_converges_before_max_steps() -> None:
    s, prior = problem(24, noise=3.0).statistics, SquaredCardinality(8, 0.3)
    fitted = fit_inclusion(s, prior=prior, generator=seeded(7), max_steps=1000)
    assert fitted.converged
    assert 40 <= len(fitted.trace) < 1000


def test_fit_inclusion_prior_with_forbidden_sizes_raises() -> None:
    p = problem(24)
    hard = Budget(torch.tensor([0.0] * 4 + [float("-inf")] * 5, dtype=torch.float64))
    with pytest.raises(InputError, match="large finite penalty"):
        fit_inclusion(p.statistics, prior=hard, generator=torch.Generator().manual_seed(0))
