"""The paper's gradient: sampled subsets, scored, weighted by ∇ log q (section 3.1)."""

from dataclasses import dataclass, field
from typing import Any, ClassVar, final

import torch

from winnowgp.errors import InputError
from winnowgp.gradients.baselines import Baseline, DecayingAverage
from winnowgp.gradients.gradient import Estimate, Gradient
from winnowgp.point_processes import Bernoulli
from winnowgp.typing import ScoreMasks


@final
@dataclass(frozen=True, slots=True)
class ScoreFunction(Gradient[Any]):
    """∇ E_q[L] ≈ (1/S) Σ_s [(L(Z_s) − b_s) ∇ log q(Z_s) + ∇ L(Z_s)],  Z_s ~ q.

    Unbiased in the logits and in the parameters of L. The state is the baseline's.
    """

    samples: int = 4
    baseline: Baseline[Any] = field(default_factory=DecayingAverage)
    scores_weights: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise InputError(f"`samples` must be at least 1; got {self.samples}.")

    def init(self) -> Any:
        return self.baseline.init()

    def step(
        self,
        q: Bernoulli,
        score: ScoreMasks,
        *,
        state: Any,
        generator: torch.Generator | None = None,
    ) -> Estimate[Any]:
        masks = q.sample(self.samples, generator=generator)
        values = score(masks)
        baseline, state = self.baseline.step(values.detach(), state)
        log_prob = q.log_prob(masks)
        # log q − sg(log q) is zero in value and ∇ log q in gradient.
        score_term = (values.detach() - baseline) * (log_prob - log_prob.detach())
        return Estimate((values + score_term).mean(), values.detach(), state)
