"""Appendix B of the paper: reparametrise a continuous relaxation of the Bernoulli draws."""

from dataclasses import dataclass, field
from typing import ClassVar, final

import torch

from winnowgp.errors import InputError
from winnowgp.gradients.gradient import Estimate, Gradient
from winnowgp.point_processes import Bernoulli
from winnowgp.typing import ScoreWeights, Weights


@final
@dataclass(frozen=True, slots=True)
class Temperature:
    """A geometric path from `start` to `end` in `steps` steps, then constant.

    >>> cooling = Temperature(start=1.0, end=0.25, steps=2)
    >>> cooling.at(0), cooling.at(1), cooling.at(2), cooling.at(3)
    (1.0, 0.5, 0.25, 0.25)
    """

    start: float = 1.0
    end: float = 0.1
    steps: int = 500

    def __post_init__(self) -> None:
        if not (self.start >= self.end > 0 and self.steps >= 1):
            raise InputError(
                "`Temperature` needs start ≥ end > 0 and steps ≥ 1; "
                f"got start={self.start}, end={self.end}, steps={self.steps}."
            )

    def at(self, step: int) -> float:
        """The temperature of a step, counted from zero."""
        return self.start * (self.end / self.start) ** min(step / self.steps, 1.0)


@final
@dataclass(frozen=True, slots=True)
class Relaxed(Gradient[int]):
    """∇ E[L̂(Z*; b)] with b_k = sigmoid((logit λ_k + logit u_k) / τ),  u_k ~ U(0, 1).

    The binary Concrete distribution of Maddison et al. (2017) on the masked bound. Biased: what is
    differentiated is the expectation of L̂ under the relaxed draws, which tends to E_q[L] as τ → 0
    while the variance of the gradient grows. The state counts steps, for the temperature.
    """

    samples: int = 1
    temperature: Temperature = field(default_factory=Temperature)
    scores_weights: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise InputError(f"`samples` must be at least 1; got {self.samples}.")

    def init(self) -> int:
        return 0

    def step(
        self,
        q: Bernoulli,
        score: ScoreWeights,
        *,
        state: int,
        generator: torch.Generator | None = None,
    ) -> Estimate[int]:
        values = score(self._draw(q, self.temperature.at(state), generator))
        return Estimate(values.mean(), values.detach(), state + 1)

    def _draw(self, q: Bernoulli, tau: float, generator: torch.Generator | None) -> Weights:
        uniform = torch.rand(
            (self.samples, q.K), generator=generator, dtype=q.logits.dtype, device=q.logits.device
        )
        # logit 0 = −∞ would make a gradient of NaN.
        tiny = torch.finfo(uniform.dtype).tiny
        return torch.sigmoid((q.logits + torch.logit(uniform, eps=tiny)) / tau)
