"""Each gradient of E_q[L(Z)] against the full sum over subsets.

The scored problem is real: the collapsed bound of K = 5 candidates, with a parameter of the model
(a log noise) next to the logits of q.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.problems import Problem, problem
from winnowgp.bounds import collapsed_bound, masked_bound, subset_blocks
from winnowgp.errors import InputError
from winnowgp.gradients import (
    Baseline,
    DecayingAverage,
    Enumeration,
    LeaveOneOut,
    Relaxed,
    ScoreFunction,
    Temperature,
    all_masks,
)
from winnowgp.point_processes import Bernoulli, Determinantal

K = 5
DRAWS = 1_500


@dataclass(frozen=True)
class Scores:
    p: Problem
    log_noise: Tensor

    def value(self, mask: Tensor) -> Tensor:
        blocks = subset_blocks(self.p.Kuu, self.p.Kuf, mask)
        return collapsed_bound(*blocks, kff=self.p.kff, Y=self.p.Y, noise=self.log_noise.exp())

    def relaxed_value(self, weights: Tensor) -> Tensor:
        return masked_bound(
            self.p.Kuu,
            self.p.Kuf,
            weights=weights,
            kff=self.p.kff,
            Y=self.p.Y,
            noise=self.log_noise.exp(),
        )


def setting() -> tuple[Scores, Tensor]:
    log_noise = torch.tensor(math.log(0.3), dtype=torch.float64, requires_grad=True)
    logits = torch.tensor([0.4, -1.0, 1.5, 0.0, -0.3], dtype=torch.float64, requires_grad=True)
    return Scores(problem(N=12, K=K, P=1), log_noise), logits


def exact() -> tuple[float, Tensor]:
    """E_q[L] and its gradient in (logits, log noise)."""
    scores, logits = setting()
    surrogate = Enumeration().step(Bernoulli(logits), scores.value).surrogate
    gradient = torch.autograd.grad(surrogate, [logits, scores.log_noise])
    return surrogate.item(), torch.cat([g.reshape(-1) for g in gradient])


def estimates(gradient: Any, draws: int = DRAWS) -> tuple[Tensor, Tensor]:
    """Values `[T]` and gradients `[T K+1]` of `draws` consecutive steps."""
    scores, logits = setting()
    score = scores.relaxed_value if gradient.scores_weights else scores.value
    state, g = gradient.init(), torch.Generator().manual_seed(5)
    values, gradients = [], []
    for _ in range(draws):
        estimate = gradient.step(Bernoulli(logits), score, state=state, generator=g)
        state = estimate.state
        parts = torch.autograd.grad(estimate.surrogate, [logits, scores.log_noise])
        values.append(estimate.surrogate.detach())
        gradients.append(torch.cat([part.reshape(-1) for part in parts]))
    return torch.stack(values), torch.stack(gradients)


def z_scores(samples: Tensor, mean: Tensor | float) -> Tensor:
    return (samples.mean(0) - mean) / (samples.std(0) / math.sqrt(samples.shape[0]))


def test_enumeration_equals_sum_over_all_subsets() -> None:
    scores, logits = setting()
    q = Bernoulli(logits)
    by_hand = sum(
        (q.log_prob(mask[None]).exp() * scores.value(mask[None])).item() for mask in all_masks(K)
    )
    assert exact()[0] == pytest.approx(by_hand, rel=1e-12)


def test_all_masks_too_many_candidates_raises() -> None:
    with pytest.raises(InputError, match="ScoreFunction"):
        all_masks(13)


@dataclass(frozen=True, slots=True)
class NoBaseline(Baseline[None]):
    """Zero, for comparison."""

    def init(self) -> None:
        return None

    def step(self, values: Tensor, state: None) -> tuple[Tensor, None]:
        return torch.zeros_like(values), None


BASELINES = {"none": NoBaseline(), "decaying": DecayingAverage(), "held-out": LeaveOneOut()}


@cache
def scored(baseline: Baseline) -> tuple[Tensor, Tensor]:
    """Values and gradients of 1,500 steps of 4 samples."""
    return estimates(ScoreFunction(samples=4, baseline=baseline))


@pytest.mark.unchecked
@pytest.mark.parametrize("baseline", BASELINES.values(), ids=BASELINES.keys())
def test_score_function_is_unbiased(baseline: Baseline) -> None:
    values, gradients = scored(baseline)
    mean, gradient = exact()
    # Seven numbers, |z| < 4 each.
    assert abs(z_scores(values, mean)) < 4
    assert (z_scores(gradients, gradient).abs() < 4).all()


@dataclass(frozen=True, slots=True)
class OwnMean(Baseline[None]):
    """A biased baseline: it contains the score that it is subtracted from."""

    def init(self) -> None:
        return None

    def step(self, values: Tensor, state: None) -> tuple[Tensor, None]:
        return values.mean().expand_as(values), None


@pytest.mark.unchecked
def test_score_function_biased_baseline_fails_the_same_check() -> None:
    _, gradients = estimates(ScoreFunction(samples=4, baseline=OwnMean()))
    assert (z_scores(gradients, exact()[1])[:K].abs() > 4).any()


def determinantal_gradients(baseline: Baseline, draws: int) -> tuple[Tensor, Tensor]:
    """The gradient of E_q[L] in logits and features: exact, and `draws` estimates of it."""
    g = torch.Generator().manual_seed(5)
    logits = torch.linspace(-1, 1, K, dtype=torch.float64).requires_grad_(True)
    features = torch.randn(K, 2, generator=g, dtype=torch.float64).requires_grad_(True)
    table = torch.randn(2**K, generator=g, dtype=torch.float64)

    def gradient(estimate: Any) -> Tensor:
        parts = torch.autograd.grad(estimate.surrogate, [logits, features])
        return torch.cat([part.reshape(-1) for part in parts])

    def score(mask: Tensor) -> Tensor:
        return table[mask.long() @ (2 ** torch.arange(K))]

    estimator = ScoreFunction(samples=4, baseline=baseline)
    state, estimates = estimator.init(), []
    for _ in range(draws):
        q = Determinantal(logits, features)
        estimate = estimator.step(q, score, state=state, generator=g)
        state = estimate.state
        estimates.append(gradient(estimate))
    q = Determinantal(logits, features)
    return gradient(Enumeration().step(q, score)), torch.stack(estimates)


@pytest.mark.unchecked
def test_score_function_of_determinantal_process_is_unbiased() -> None:
    exact_gradient, drawn = determinantal_gradients(LeaveOneOut(), 500)
    # Fifteen numbers, |z| < 4 each.
    assert (z_scores(drawn, exact_gradient).abs() < 4).all()
    exact_gradient, biased = determinantal_gradients(OwnMean(), 500)
    assert (z_scores(biased, exact_gradient).abs() > 4).any()


def test_relaxed_determinantal_process_raises() -> None:
    q = Determinantal(torch.zeros(2), torch.zeros(2, 1))
    with pytest.raises(InputError, match="ScoreFunction"):
        Relaxed().step(q, lambda weights: weights.sum(1), state=0)


@pytest.mark.unchecked
def test_baselines_reduce_variance() -> None:
    spread = {name: scored(b)[1][100:400, :K].var(0).sum() for name, b in BASELINES.items()}
    assert spread["decaying"] < spread["none"] / 2
    assert spread["held-out"] < spread["none"] / 2


@pytest.mark.parametrize("baseline", BASELINES.values(), ids=BASELINES.keys())
def test_score_function_one_sample_gradient_is_finite(baseline: Baseline) -> None:
    _, gradients = estimates(ScoreFunction(samples=1, baseline=baseline), 3)
    assert torch.isfinite(gradients).all()


def test_relaxed_is_unbiased_for_relaxed_expectation() -> None:
    """Compare with finite differences of the expected masked bound, with common random numbers."""
    scores, logits = setting()
    gradient = Relaxed(samples=64, temperature=Temperature(0.5, 0.5, 1))

    def value(a: Tensor) -> Tensor:
        g = torch.Generator().manual_seed(0)
        return gradient.step(Bernoulli(a), scores.relaxed_value, state=0, generator=g).surrogate

    assert torch.autograd.gradcheck(value, (logits,))


def relaxed_error(temperature: float) -> Tensor:
    """Norm of the bias in the logits' gradient, with 100 × 128 draws."""
    gradient = Relaxed(samples=128, temperature=Temperature(temperature, temperature, 1))
    _, gradients = estimates(gradient, 100)
    return (gradients.mean(0) - exact()[1])[:K].norm()


@pytest.mark.unchecked
def test_relaxed_bias_decreases_with_temperature() -> None:
    size = exact()[1][:K].norm()
    hot, cold = relaxed_error(1.0), relaxed_error(0.1)
    assert cold < hot / 2
    assert cold < 0.1 * size


def test_temperature_increasing_raises() -> None:
    with pytest.raises(InputError, match="start ≥ end > 0"):
        Temperature(start=0.1, end=1.0)
    with pytest.raises(InputError, match="`samples`"):
        Relaxed(samples=0)
    with pytest.raises(InputError, match="`samples`"):
        ScoreFunction(samples=0)
    with pytest.raises(InputError, match="`decay`"):
        DecayingAverage(decay=1.0)
