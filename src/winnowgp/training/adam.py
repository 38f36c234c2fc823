"""Adam that treats a failed factorisation as a rejected step."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf
from typing import final

import torch
from torch import Tensor

from winnowgp.errors import NotPositiveDefiniteError, TrainingError
from winnowgp.typing import Scalar

MOST_REJECTIONS = 20


@final
@dataclass(frozen=True, slots=True)
class Adam:
    """Maximise an objective in nats by Adam, group by group of parameters.

    A step after which the objective or its gradient cannot be computed is taken back, and all
    learning rates are halved.
    """

    steps: int
    cooling: float = 1.0
    """What share of them the learning rates fall to, geometrically, over the last third."""
    longest: float = inf
    """Times the running average of its length that a gradient may be; it is shortened beyond.

    Gradients through sampled layers have heavy tails where functions are steep, and one step along
    such a one can undo hundreds.
    """

    def maximise(
        self,
        objective: Callable[[], Scalar],
        groups: Iterable[tuple[Iterable[Tensor], float]],
        *,
        scale: float,
        on_step: Callable[[int, float], None],
    ) -> None:
        """Take `steps` steps.

        Args:
            objective: nats, larger is better; called once a step.
            groups: parameters with their learning rate.
            scale: what the objective is divided by before it is differentiated, the number of rows.
            on_step: told the number of the step, from one, and the objective before it.
        """
        listed = [{"params": list(p), "lr": lr} for p, lr in groups]
        learnt = [group for group in listed if group["params"]]
        if not learnt:
            return
        optimiser = torch.optim.Adam(learnt)
        parameters = [p for group in optimiser.param_groups for p in group["params"]]
        good = [p.detach().clone() for p in parameters]
        rates = [group["lr"] for group in optimiser.param_groups]
        rejections, average = 0, None
        step = 0
        while step < self.steps:
            for group, rate in zip(optimiser.param_groups, rates, strict=True):
                group["lr"] = rate * self._share(step)
            value = _differentiate(optimiser, objective, parameters, scale)
            if value is None:
                rejections += 1
                if rejections > MOST_REJECTIONS:
                    raise TrainingError(
                        f"{rejections} steps in a row failed, however short; the data may be "
                        "scaled badly (standardise them), or the kernel cannot be evaluated there."
                    )
                _restore(parameters, good)
                rates = [0.5 * rate for rate in rates]
                continue
            rejections = 0
            good = [p.detach().clone() for p in parameters]
            step += 1
            on_step(step, value)
            if self.longest < inf:
                average = self._shortened(parameters, average)
            optimiser.step()

    def _shortened(self, parameters: list[Tensor], average: float | None) -> float:
        """Hold a gradient's length against the average so far; return the next average."""
        limit = inf if average is None else self.longest * average
        length = torch.nn.utils.clip_grad_norm_(parameters, limit).item()
        length = min(length, limit)
        return length if average is None else 0.95 * average + 0.05 * length

    def _share(self, step: int) -> float:
        late = max(0.0, 3 * step / self.steps - 2)
        return self.cooling**late


def _differentiate(
    optimiser: torch.optim.Adam,
    objective: Callable[[], Scalar],
    parameters: list[Tensor],
    scale: float,
) -> float | None:
    """Fill in gradients and return the objective; None if either is unusable."""
    optimiser.zero_grad()
    try:
        value = objective()
        (-value / scale).backward()
    except NotPositiveDefiniteError:
        return None
    usable = torch.isfinite(value) and all(
        p.grad is None or bool(torch.isfinite(p.grad).all()) for p in parameters
    )
    return value.item() if usable else None


@torch.no_grad()
def _restore(parameters: list[Tensor], good: list[Tensor]) -> None:
    for parameter, saved in zip(parameters, good, strict=True):
        parameter.copy_(saved)
