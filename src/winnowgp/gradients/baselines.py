"""What to subtract from a score before it multiplies ∇ log q: any number that does not depend on
the same draw leaves the gradient unbiased, and a good one takes most of its variance away."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic, TypeVar, final

import torch

from winnowgp.errors import InputError
from winnowgp.typing import Nats, Scalar

State = TypeVar("State")


class Baseline(ABC, Generic[State]):
    """A baseline with a memory: `init` once, then `step` with the state it returned."""

    @abstractmethod
    def init(self) -> State:
        """The memory before the first step."""

    @abstractmethod
    def step(self, values: Nats, state: State) -> tuple[Nats, State]:
        """The baseline of each of S scores, and the memory after them."""


@final
@dataclass(frozen=True, slots=True)
class NoBaseline(Baseline[None]):
    """Zero. Bounds of hundreds of nats then multiply ∇ log q as they are: for comparison only."""

    def init(self) -> None:
        return None

    def step(self, values: Nats, state: None) -> tuple[Nats, None]:
        return torch.zeros_like(values), None


@final
@dataclass(frozen=True, slots=True)
class LeaveOneOut(Baseline[None]):
    """b_s = mean of the other S − 1 scores of the same step (zero if there is none)."""

    def init(self) -> None:
        return None

    def step(self, values: Nats, state: None) -> tuple[Nats, None]:
        S = values.shape[0]
        if S == 1:
            return torch.zeros_like(values), None
        return (values.sum() - values) / (S - 1), None


@final
@dataclass(frozen=True, slots=True)
class DecayingAverage(Baseline[Scalar | None]):
    """The paper's baseline: b ← decay · b + (1 − decay) · mean of a step's scores.

    A step is given the average of the steps before it, never its own scores, so the gradient stays
    unbiased. The first step has no past and uses `LeaveOneOut`.
    """

    decay: float = 0.9

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise InputError(f"`decay` must lie within [0, 1); got {self.decay}.")

    def init(self) -> None:
        return None

    def step(self, values: Nats, state: Scalar | None) -> tuple[Nats, Scalar]:
        if state is None:
            return LeaveOneOut().step(values, None)[0], values.mean()
        return state.expand_as(values), self.decay * state + (1 - self.decay) * values.mean()
