"""Estimates of E_q[L(Z)], one after another, and what they leave behind."""

from collections.abc import Mapping
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor

from winnowgp.gradients import Gradient
from winnowgp.point_processes import Bernoulli
from winnowgp.typing import Scalar, ScoreMasks, ScoreWeights


@final
class Estimates:
    """A gradient with its memory, and the trace of the objective.

    Args:
        generator: where subsets come from.
    """

    def __init__(self, gradient: Gradient[Any], generator: torch.Generator) -> None:
        self._gradient, self._generator = gradient, generator
        self._state = gradient.init()
        self._trace: list[float] = []

    def next(self, q: Bernoulli, score: ScoreMasks | ScoreWeights) -> Scalar:
        """One more estimate, to be differentiated."""
        found = self._gradient.step(q, score, state=self._state, generator=self._generator)
        if bool(torch.isfinite(found.surrogate)):
            # Otherwise the step is taken back, and must not be remembered.
            self._state = found.state
        return found.surrogate

    def record(self, value: float) -> None:
        """The objective of a step, in nats."""
        self._trace.append(value)

    def trace(self, like: Tensor) -> Float[Tensor, " T"]:
        """The objective of every step."""
        return torch.tensor(self._trace, dtype=like.dtype)

    def state_dict(self) -> dict[str, Any]:
        """The gradient's memory and the trace."""
        return {"state": self._state, "trace": self._trace}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where others stood."""
        memory, device = state["state"], self._generator.device
        self._state = memory.to(device=device) if isinstance(memory, Tensor) else memory
        self._trace = list(state["trace"])
