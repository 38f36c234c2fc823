"""Inclusions on their way up: the objective after so many steps, and what they cost."""

from collections.abc import Callable, Sequence
from time import process_time
from typing import Any, final

import torch

from winnowgp.gradients import Gradient
from winnowgp.point_processes import Bernoulli, CardinalityPrior, kl_divergence
from winnowgp.selection import SubsetStatistics, select_naturally
from winnowgp.training import Adam
from winnowgp.typing import Scalar, ScoreMasks, ScoreWeights

LEARNING_RATE = 0.2
"""The paper's, of the logits of λ."""


def objective_of(
    statistics: SubsetStatistics, prior: CardinalityPrior, *, draws: int
) -> Callable[[Bernoulli], float]:
    """E_q[L(Z)] − KL[q ‖ p] in nats, from draws that do not depend on how q came about."""

    def value(q: Bernoulli) -> float:
        generator = torch.Generator(device=q.logits.device).manual_seed(12345)
        masks = q.sample(draws, generator=generator)
        return (statistics.value(masks).mean() - kl_divergence(q, prior)).item()

    return value


@final
class InclusionPath:
    """Steps, CPU seconds and objective at a few marks. Looking takes no time that is counted.

    Args:
        objective: what is looked at.
        marks: numbers of steps after which to look.
    """

    def __init__(self, objective: Callable[[Bernoulli], float], marks: Sequence[int]) -> None:
        self._objective, self.marks = objective, marks
        self.steps: list[int] = []
        self.seconds: list[float] = []
        self.objective: list[float] = []
        self.last: Bernoulli | None = None
        self.restart()

    def restart(self) -> None:
        """Begin to count time anew."""
        self._spent, self._since = 0.0, process_time()

    def look(self, step: int, q: Bernoulli) -> None:
        """At q, reached after so many steps, if that is a mark."""
        if step not in self.marks:
            return
        self._spent += process_time() - self._since
        self.steps.append(step)
        self.seconds.append(self._spent)
        self.objective.append(self._objective(q))
        self.last, self._since = q, process_time()


def climb_gradient(
    path: InclusionPath,
    gradient: Gradient[Any],
    score: Callable[[], ScoreMasks | ScoreWeights],
    *,
    prior: CardinalityPrior,
    like: torch.Tensor,
    generator: torch.Generator,
    learning_rate: float = LEARNING_RATE,
) -> None:
    """From λ = ½ by Adam, as the paper does, up to the last mark.

    Args:
        score: makes what scores subsets; part of what is timed.
        like: for dtype and device.
    """
    logits = like.new_zeros(prior.K).requires_grad_()
    state, step = gradient.init(), 0
    # A process's first optimiser loads modules for a second.
    torch.optim.Adam([logits])
    path.restart()
    answer = score()

    def surrogate() -> Scalar:
        nonlocal state, step
        path.look(step, Bernoulli(logits.detach().clone()))
        estimate = gradient.step(Bernoulli(logits), answer, state=state, generator=generator)
        state, step = estimate.state, step + 1
        return estimate.surrogate - kl_divergence(Bernoulli(logits), prior)

    most = max(path.marks)
    groups = [([logits], learning_rate)]
    Adam(most).maximise(surrogate, groups, scale=1.0, on_step=lambda step, value: None)
    path.look(most, Bernoulli(logits.detach()))


def climb_naturally(
    path: InclusionPath,
    statistics: Callable[[], SubsetStatistics],
    *,
    prior: CardinalityPrior,
    generator: Callable[[], torch.Generator],
) -> None:
    """By natural all-flip updates, a run of its own to each mark: what a caller would wait for.

    Args:
        statistics: makes them; part of what is timed.
        generator: makes one, the same for every run.
    """
    for steps in path.marks:
        path.restart()
        found = select_naturally(statistics(), prior=prior, generator=generator(), max_steps=steps)
        path.look(steps, found.q)
        if found.settled:
            return
