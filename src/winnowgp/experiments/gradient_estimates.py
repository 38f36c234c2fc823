"""Gradients of E_q[L(Z)] in the logits of λ: their variance and bias, and optimisation by them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import process_time
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor

from winnowgp.gradients import Gradient
from winnowgp.point_processes import Bernoulli, CardinalityPrior, kl_divergence
from winnowgp.selection import SubsetStatistics
from winnowgp.training.adam import Adam
from winnowgp.typing import Scalar, ScoreMasks, ScoreWeights

LEARNING_RATE = 0.2
"""The paper's learning rate of the logits of λ."""
BURN_IN = 50
"""Number of estimates after which a baseline does not depend on its initial value."""


@dataclass(frozen=True, slots=True)
class GradientNoise:
    """Variance and bias of R estimates of the gradient in the logits of λ, in nats²."""

    variance: float
    """Σ_k Var[g_k]."""
    bias: float
    """‖mean g − reference‖² minus its expectation without bias; about zero without a bias."""

    @classmethod
    def of(cls, draws: Float[Tensor, "R K"], reference: Float[Tensor, "T K"]) -> "GradientNoise":
        """Compare estimates with unbiased ones."""
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
    """Return successive estimates of ∂E_q[L]/∂logit λ at the same q."""
    logits = q.logits.clone().requires_grad_()
    state, draws = gradient.init(), []
    for _ in range(BURN_IN + repeats):
        estimate = gradient.step(Bernoulli(logits), score, state=state, generator=generator)
        state = estimate.state
        draws.append(torch.autograd.grad(estimate.surrogate, logits)[0])
    return torch.stack(draws[BURN_IN:])


def marginal_gain_draws(
    statistics: SubsetStatistics,
    q: Bernoulli,
    *,
    samples: int,
    repeats: int,
    generator: torch.Generator,
) -> Float[Tensor, "R K"]:
    """Return estimates by marginal gains: ∂E_q[L]/∂logit λ_k = λ_k (1 − λ_k) E[ΔL_k].

    ΔL_k = L(Z ∪ k) − L(Z \\ k) does not depend on whether k is in Z, so that one draw of Z serves
    every k.
    """
    weight = q.inclusion * torch.sigmoid(-q.logits)
    masks = q.sample(repeats * samples, generator=generator)
    marginal_gains = torch.stack([statistics.marginal_gains(mask) for mask in masks])
    return weight * marginal_gains.reshape(repeats, samples, q.K).mean(1)


def objective_of(
    statistics: SubsetStatistics, prior: CardinalityPrior, *, draws: int
) -> Callable[[Bernoulli], float]:
    """Return a function that estimates E_q[L(Z)] − KL[q ‖ p] in nats, with a seed of its own."""

    def value(q: Bernoulli) -> float:
        generator = torch.Generator(device=q.logits.device).manual_seed(12345)
        masks = q.sample(draws, generator=generator)
        return (statistics.value(masks).mean() - kl_divergence(q, prior)).item()

    return value


@final
class OptimisationPath:
    """Steps, CPU seconds and objective at some steps; evaluating the objective is not timed.

    Args:
        objective: evaluated at the marks.
        marks: numbers of steps after which the objective is evaluated.
    """

    def __init__(self, objective: Callable[[Bernoulli], float], marks: Sequence[int]) -> None:
        self._objective, self.marks = objective, marks
        self.steps: list[int] = []
        self.seconds: list[float] = []
        self.objective: list[float] = []
        self.last: Bernoulli | None = None
        self.restart_clock()

    def restart_clock(self) -> None:
        """Count CPU time from now on."""
        self._spent, self._since = 0.0, process_time()

    def record(self, step: int, q: Bernoulli) -> None:
        """Record q after a number of steps, if that is a mark."""
        if step not in self.marks:
            return
        self._spent += process_time() - self._since
        self.steps.append(step)
        self.seconds.append(self._spent)
        self.objective.append(self._objective(q))
        self.last, self._since = q, process_time()


def optimise_by_gradient(
    path: OptimisationPath,
    gradient: Gradient[Any],
    make_score: Callable[[], ScoreMasks | ScoreWeights],
    *,
    prior: CardinalityPrior,
    like: torch.Tensor,
    generator: torch.Generator,
    learning_rate: float = LEARNING_RATE,
) -> None:
    """Optimise λ from ½ with Adam, as the paper does, up to the last mark.

    Args:
        make_score: makes the function that scores subsets; its time counts.
        like: a tensor with the dtype and device of λ.
    """
    logits = like.new_zeros(prior.K).requires_grad_()
    state, step = gradient.init(), 0
    # The first optimiser of a process imports modules for a second.
    torch.optim.Adam([logits])
    path.restart_clock()
    score = make_score()

    def surrogate() -> Scalar:
        nonlocal state, step
        path.record(step, Bernoulli(logits.detach().clone()))
        estimate = gradient.step(Bernoulli(logits), score, state=state, generator=generator)
        state, step = estimate.state, step + 1
        return estimate.surrogate - kl_divergence(Bernoulli(logits), prior)

    steps = max(path.marks)
    groups = [([logits], learning_rate)]
    Adam(steps).maximise(surrogate, groups, scale=1.0, on_step=lambda step, value: None)
    path.record(steps, Bernoulli(logits.detach()))
