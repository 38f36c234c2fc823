"""Fit of a determinantal q(Z) by exact marginal gains, from an independent one.

For fixed features a determinantal process is an exponential family in its logits a, and the
objective E_q[L] − KL[q ‖ p] = E_q[f] with f = L + log p − log q is stationary where
Cov(k ∈ Z, f) = 0 for every k. By the law of total covariance this is

    E[Cov(k ∈ Z, f | Z₋ₖ)] + Cov(P(k ∈ Z | Z₋ₖ), E[f | Z₋ₖ]).

The first term is E[p_k (1 − p_k) (L(Z ∪ k) − L(Z \\ k) + w(|Z₋ₖ| + 1) − w(|Z₋ₖ|) − logit p_k)] with
p_k = q(k ∈ Z | Z₋ₖ), known for all candidates from one sampled subset. The second is zero for
independent candidates and for q = q*. The fit solves for the first term alone: steps that also
estimate the second were unbiased, but noisier, and ended lower (1026 against 1029 nats on energy).
For independent candidates the steps are the natural-gradient steps of `natural`.

Features are those of a similarity matrix, such as the correlations of the kernel, raised to a power
element by element, which makes the similarity more local, and scaled.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from winnowgp.errors import InputError
from winnowgp.point_processes import (
    Bernoulli,
    CardinalityPrior,
    Determinantal,
    sampled_kl_divergence,
)
from winnowgp.selection.objective import SubsetStatistics
from winnowgp.typing import Masks, SizeTable

# From inclusion probabilities of q* the fit of energy ended at 1044 nats, from the mean field at
# 1042 (errors 0.8); the mean field itself has 1006.
_OFFSET, _POWER = 5.0, 0.75  # of the step size (step + offset)^−power, as in `natural`
_SAMPLES = 2  # subsets per step
_MAX_STEP = 5.0  # nats; gains are heavy-tailed
_MATCHES = 60
# Larger logits take long to change. From those of the mean field as they are, the fit of energy
# ended at 1036 nats instead of 1042.
_SATURATED = 7.0
_TRIAL = 0.25  # share of the steps after which the features are chosen


@final
@dataclass(frozen=True, slots=True)
class DeterminantalFit:
    """A determinantal process and estimates of its objective E_q[L] − KL[q ‖ p] in nats.

    Attributes:
        q: the process; without features if none of those tried had a higher objective.
        objective: estimate of its objective.
        error: standard error of the estimate.
        start: estimate of the objective of the independent process it started from.
    """

    q: Determinantal
    objective: float
    error: float
    start: float


@dataclass(frozen=True, slots=True)
class _State:
    """Logits and running averages of E[p_k (1 − p_k)] during the fit."""

    q: Determinantal
    spread: Float[Tensor, " K"]
    step: int = 0


def fit_determinantal(
    statistics: SubsetStatistics,
    *,
    prior: CardinalityPrior,
    start: Bernoulli,
    similarity: Float[Tensor, "K K"],
    generator: torch.Generator,
    inclusion: Float[Tensor, " K"] | None = None,
    rank: int = 64,
    powers: Sequence[float] = (2.0, 16.0, 128.0),
    scales: Sequence[float] = (3.0, 30.0),
    steps: int = 100,
    draws: int = 200,
) -> DeterminantalFit:
    """Fit a process with repulsion between similar candidates, from an independent one.

    Every power and scale of the similarity is tried for a quarter of the steps, from logits with
    given inclusion probabilities; the features with the highest objective are fitted to the end.
    The result is the best of `start`, the trials and the end by estimates from `draws` subsets
    each, so that it is not lower than `start` beyond their error. The time is that of
    2 · steps · (1 + number of features tried / 4) marginal gains, O(K² M) each.

    A mean-field q may include one of two candidates that can replace each other and exclude the
    other, which the fit may not undo. Inclusion probabilities of q* (`SubsetSamples.inclusion`)
    treat both alike and are the better `inclusion` to begin with.

    Args:
        statistics: statistics of the data.
        prior: prior over subsets; every size must have a finite log weight.
        start: independent process, such as the q of `fit_inclusion`; the result if all else is
            worse.
        similarity: positive semi-definite matrix with unit diagonal, such as the correlations of
            the kernel (`SubsetStatistics.correlations`).
        generator: source of randomness.
        inclusion: marginal inclusion probabilities to begin with; those of `start` if not given.
        rank: number of features; at most K are used.
        powers: powers of the similarity, element by element.
        scales: lengths of the feature vectors.
        steps: number of steps, of two sampled subsets each.
        draws: number of subsets for each estimate of the objective.
    """
    log_weights = prior.log_weights(statistics.empty)
    _check(statistics, log_weights, start=start, similarity=similarity)
    independent = Determinantal.independent(Bernoulli(start.logits.detach()))

    def objective(q: Determinantal) -> Float[Tensor, " S"]:
        mask = q.sample(draws, generator=generator)
        return statistics.value(mask) - sampled_kl_divergence(q, prior, mask)

    def advance(state: _State, until: int) -> _State:
        while state.step < until:
            state = _step(statistics, state, log_weights=log_weights, generator=generator)
        return state

    given = start if inclusion is None else Bernoulli.from_inclusion(inclusion)
    first = objective(independent)
    results = [(independent, first)]
    trials: list[tuple[float, _State]] = []
    for power, scale in product(powers, scales):
        features = scale * _features(similarity, power=power, rank=rank)
        q = _with_inclusion(given.logits.detach(), features)
        state = advance(_State(q, torch.ones_like(q.logits)), int(_TRIAL * steps))
        values = objective(state.q)
        results.append((state.q, values))
        trials.append((values.mean().item(), state))
    if trials:
        end = advance(max(trials, key=lambda trial: trial[0])[1], steps).q
        results.append((end, objective(end)))
    q, values = max(results, key=lambda result: result[1].mean().item())
    error = (values.std() / len(values) ** 0.5).item()
    return DeterminantalFit(q, values.mean().item(), error, first.mean().item())


def conditional_covariance(
    statistics: SubsetStatistics, q: Determinantal, mask: Masks, *, log_weights: SizeTable
) -> tuple[Float[Tensor, "S K"], Float[Tensor, "S K"]]:
    """Return Cov(k ∈ Z, f | Z₋ₖ) and p_k (1 − p_k) at each subset; O(K² M) each."""
    gains = torch.stack([statistics.marginal_gains(subset) for subset in mask])
    size = mask.sum(1, keepdim=True)
    slopes = log_weights.diff()
    # w(m + 1) − w(m) with m = |Z₋ₖ|: |Z| − 1 inside, |Z| outside.
    slope = slopes[torch.where(mask, size - 1, size.clamp_max(q.K - 1))]
    logits = q.conditional_logits(mask)
    spread = torch.sigmoid(logits) * torch.sigmoid(-logits)
    return spread * (gains + slope - logits), spread


def _step(
    statistics: SubsetStatistics,
    state: _State,
    *,
    log_weights: SizeTable,
    generator: torch.Generator,
) -> _State:
    """Move the logits by E[Cov(k ∈ Z, f | Z₋ₖ)] / E[p_k (1 − p_k)], damped."""
    mask = state.q.sample(_SAMPLES, generator=generator)
    covariance, spread = conditional_covariance(statistics, state.q, mask, log_weights=log_weights)
    rate = (state.step + _OFFSET) ** -_POWER
    now = spread.mean(0)
    average = now if state.step == 0 else state.spread + rate * (now - state.spread)
    tiny = torch.finfo(now.dtype).eps
    change = (covariance.mean(0) / average.clamp_min(tiny)).clamp(-_MAX_STEP, _MAX_STEP)
    q = Determinantal(state.q.logits + rate * change, state.q.features)
    return _State(q, average, state.step + 1)


def _features(similarity: Float[Tensor, "K K"], *, power: float, rank: int) -> Float[Tensor, "K R"]:
    """Return the leading features of a similarity raised to a power; O(K³).

    Integer powers of a positive semi-definite matrix, element by element, are positive
    semi-definite again (Schur); negative eigenvalues of others are set to zero.
    """
    values, vectors = torch.linalg.eigh(similarity.abs() ** power * similarity.sign())
    return vectors[:, -rank:] * values[-rank:].clamp_min(0).sqrt()


def _with_inclusion(target: Float[Tensor, " K"], features: Float[Tensor, "K R"]) -> Determinantal:
    """Return the process with given features and about the given logits of inclusion."""
    target = target.clamp(-_SATURATED, _SATURATED)
    tiny = torch.finfo(target.dtype).eps
    result = Determinantal(target, features)
    for _ in range(_MATCHES):
        logits = result.inclusion.clamp(tiny, 1 - tiny).logit()
        change = (target - logits).clamp(-_MAX_STEP, _MAX_STEP)
        result = Determinantal(result.logits + 0.5 * change, features)
    return result


def _check(
    statistics: SubsetStatistics,
    log_weights: SizeTable,
    *,
    start: Bernoulli,
    similarity: Float[Tensor, "K K"],
) -> None:
    if len(log_weights) != statistics.K + 1 or start.K != statistics.K:
        raise InputError(
            f"`prior` and `start` must be over the {statistics.K} candidates of `statistics`; got "
            f"{len(log_weights) - 1} and {start.K}."
        )
    if not torch.isfinite(log_weights).all():
        raise InputError(
            "`prior` must give every size a finite log weight, since q gives every subset positive "
            "probability; got one that forbids some sizes. Use a large finite penalty instead."
        )
    unit = (similarity.diagonal() - 1).abs().max().item() if statistics.K else 0.0
    if similarity.shape[0] != statistics.K or unit > 1e-3:
        raise InputError(
            f"`similarity` must be a {statistics.K} by {statistics.K} matrix with unit diagonal; "
            f"got shape {list(similarity.shape)} and a diagonal that differs from one by "
            f"{unit:.3g}. Pass correlations, such as those of `SubsetStatistics.correlations`."
        )
