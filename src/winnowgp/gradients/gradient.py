"""The interface of a gradient of E_q[L(Z)]."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

import torch

from winnowgp.point_processes import Bernoulli
from winnowgp.typing import Nats, Scalar, ScoreMasks, ScoreWeights

State = TypeVar("State")


@dataclass(frozen=True, slots=True)
class Estimate(Generic[State]):
    """An estimate of E_q[L(Z)] that carries an estimate of its gradient."""

    surrogate: Scalar
    """Its value estimates the expectation, its `backward()` the gradient; nats, to be maximised."""
    values: Nats
    """The scores behind it, detached."""
    state: State
    """What the next step remembers of this one."""


class Gradient(ABC, Generic[State]):
    """A way to differentiate E_q[L(Z)]: `init` once, then `step` with the state it returned."""

    scores_weights: ClassVar[bool]
    """Whether `score` is asked about weights in [0, 1] (`ScoreWeights`) or masks (`ScoreMasks`)."""

    @abstractmethod
    def init(self) -> State:
        """The memory before the first step."""

    @abstractmethod
    def step(
        self,
        q: Bernoulli,
        score: ScoreMasks | ScoreWeights,
        *,
        state: State,
        generator: torch.Generator | None = None,
    ) -> Estimate[State]:
        """One estimate of E_q[score] and of its gradient."""
