"""How noisy a gradient of E_q[L(Z)] is, at one q."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from winnowgp.gradients import Gradient
from winnowgp.point_processes import Bernoulli
from winnowgp.selection import SubsetStatistics
from winnowgp.typing import ScoreMasks, ScoreWeights

FORGOTTEN = 50
"""Estimates after which a baseline has forgotten how it began."""


@dataclass(frozen=True, slots=True)
class GradientNoise:
    """Of R estimates of the gradient with respect to the logits of λ, in nats²."""

    variance: float
    """Σ_k Var[g_k]."""
    bias: float
    """‖mean g − reference‖² less what variance alone makes of it; about zero without a bias."""

    @classmethod
    def of(cls, draws: Float[Tensor, "R K"], reference: Float[Tensor, "T K"]) -> "GradientNoise":
        """Of estimates, against others that have no bias."""
        variance = draws.var(0).sum()
        chance = variance / len(draws) + reference.var(0).sum() / len(reference)
        distance = (draws.mean(0) - reference.mean(0)).square().sum()
        return cls(variance.item(), (distance - chance).item())


def gradient_draws(
    gradient: Gradient[Any],
    score: ScoreMasks | ScoreWeights,
    q: Bernoulli,
    *,
    repeats: int,
    generator: torch.Generator,
) -> Float[Tensor, "R K"]:
    """Estimates of ∂E_q[L]/∂logit λ, one after the other at the same q."""
    logits = q.logits.clone().requires_grad_()
    state, draws = gradient.init(), []
    for _ in range(FORGOTTEN + repeats):
        estimate = gradient.step(Bernoulli(logits), score, state=state, generator=generator)
        state = estimate.state
        draws.append(torch.autograd.grad(estimate.surrogate, logits)[0])
    return torch.stack(draws[FORGOTTEN:])


def flip_draws(
    statistics: SubsetStatistics,
    q: Bernoulli,
    *,
    samples: int,
    repeats: int,
    generator: torch.Generator,
) -> Float[Tensor, "R K"]:
    """The same from all flips of S sampled subsets: ∂E_q[L]/∂logit λ_k = λ_k (1 − λ_k) E[ΔL_k].

    ΔL_k = L(Z ∪ k) − L(Z without k) does not depend on whether k was drawn, so a subset from q
    serves every k.
    """
    weight = q.inclusion * torch.sigmoid(-q.logits)
    masks = q.sample(repeats * samples, generator=generator)
    flips = torch.stack([statistics.flips(mask) for mask in masks])
    return weight * flips.reshape(repeats, samples, q.K).mean(1)
