"""Gradient estimators for E_q[L(Z)], a sum over 2^K subsets, in q and in the model's parameters.

Each estimator turns a process q and a function that scores subsets into an `Estimate`: a scalar
whose value estimates the expectation and whose `backward()` estimates its gradient, for the logits
of q and for all parameters that the scores depend on.

=================  ==============================  ============================
estimator          bias                            cost per step
=================  ==============================  ============================
``Enumeration``    none, and no variance           2^K scores, K ≤ 12
``ScoreFunction``  none                            S scores of sampled subsets
``Relaxed``        decreases with the temperature  S scores of all K candidates
=================  ==============================  ============================
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar, final

import torch

from winnowgp.errors import InputError
from winnowgp.point_processes import Bernoulli
from winnowgp.point_processes.bernoulli import PointProcess
from winnowgp.typing import Masks, Nats, Scalar, ScoreMasks, ScoreWeights, Weights

__all__ = [
    "DecayingAverage",
    "Enumeration",
    "LeaveOneOut",
    "Relaxed",
    "ScoreFunction",
    "Temperature",
    "all_masks",
]

State = TypeVar("State")

MAX_CANDIDATES = 12


@dataclass(frozen=True, slots=True)
class Estimate(Generic[State]):
    """An estimate of E_q[L(Z)] that carries an estimate of its gradient."""

    surrogate: Scalar
    """Scalar in nats whose value estimates the expectation and whose `backward()` its gradient."""
    values: Nats
    """The scores of the subsets, detached."""
    state: State
    """State for the next step."""


class Gradient(ABC, Generic[State]):
    """Interface of gradient estimators: call `init` once, then `step` with the returned state."""

    scores_weights: ClassVar[bool]
    """Whether `score` takes weights in [0, 1] (`ScoreWeights`) or masks (`ScoreMasks`)."""

    @abstractmethod
    def init(self) -> State:
        """Return the state before the first step."""

    @abstractmethod
    def step(
        self,
        q: PointProcess,
        score: ScoreMasks | ScoreWeights,
        *,
        state: State,
        generator: torch.Generator | None = None,
    ) -> Estimate[State]:
        """Return one estimate of E_q[score] and of its gradient."""


class Baseline(ABC, Generic[State]):
    """A control variate, subtracted from each score before it multiplies ∇ log q.

    Any number that does not depend on the same draw leaves the gradient unbiased; a good one
    removes most of its variance. Call `init` once, then `step` with the returned state.
    """

    @abstractmethod
    def init(self) -> State:
        """Return the state before the first step."""

    @abstractmethod
    def step(self, values: Nats, state: State) -> tuple[Nats, State]:
        """Return the baseline of each of S scores, and the next state."""


@final
@dataclass(frozen=True, slots=True)
class LeaveOneOut(Baseline[None]):
    """The mean of the other S − 1 scores of the same step; zero if S = 1."""

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
    """The paper's baseline: b ← decay · b + (1 − decay) · mean of the scores of a step.

    A step uses the average of the previous steps and not its own scores, so that the gradient stays
    unbiased. The first step uses `LeaveOneOut`.
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


@final
@dataclass(frozen=True, slots=True)
class ScoreFunction(Gradient[Any]):
    """The score-function estimator of the paper (section 3.1, equation 3), with a baseline.

        ∇ E_q[L] ≈ (1/S) Σ_s [(L(Z_s) − b_s) ∇ log q(Z_s) + ∇ L(Z_s)],  Z_s ~ q

    It is unbiased in the logits and in the parameters of L. Empty subsets are valid draws:
    rejecting them would change q. The state is that of the baseline.
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
        q: PointProcess,
        score: ScoreMasks,
        *,
        state: Any,
        generator: torch.Generator | None = None,
    ) -> Estimate[Any]:
        masks = q.sample(self.samples, generator=generator)
        values = score(masks)
        baseline, state = self.baseline.step(values.detach(), state)
        log_prob = q.log_prob(masks)
        # log q − stop_gradient(log q) has value zero and gradient ∇ log q.
        score_term = (values.detach() - baseline) * (log_prob - log_prob.detach())
        return Estimate((values + score_term).mean(), values.detach(), state)


def all_masks(K: int, *, device: torch.device | None = None) -> Masks:
    """Return all 2^K subsets of K ≤ 12 candidates, in binary order.

    >>> all_masks(2).int().tolist()
    [[0, 0], [1, 0], [0, 1], [1, 1]]
    """
    if not 0 <= K <= MAX_CANDIDATES:
        raise InputError(
            f"`K` must be at most {MAX_CANDIDATES} to enumerate all 2^K subsets; got {K}. "
            "Use ScoreFunction instead."
        )
    number = torch.arange(2**K, device=device)
    return (number[:, None] >> torch.arange(K, device=device)) % 2 == 1


@final
@dataclass(frozen=True, slots=True)
class Enumeration(Gradient[None]):
    """The exact sum E_q[L(Z)] = Σ_Z q(Z) L(Z), for K ≤ 12 candidates."""

    scores_weights: ClassVar[bool] = False

    def init(self) -> None:
        return None

    def step(
        self,
        q: PointProcess,
        score: ScoreMasks,
        *,
        state: None = None,
        generator: torch.Generator | None = None,
    ) -> Estimate[None]:
        masks = all_masks(q.K, device=q.logits.device)
        values = score(masks)
        surrogate = (q.log_prob(masks).exp() * values).sum()
        return Estimate(surrogate, values.detach(), None)


@final
@dataclass(frozen=True, slots=True)
class Temperature:
    """A temperature that decreases geometrically from `start` to `end` in `steps` steps.

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
        """Return the temperature of a step, counted from zero."""
        return self.start * (self.end / self.start) ** min(step / self.steps, 1.0)


@final
@dataclass(frozen=True, slots=True)
class Relaxed(Gradient[int]):
    """Reparametrised gradient of a continuous relaxation of the masks (appendix B of the paper).

        ∇ E[L̂(Z*; b)],  b_k = sigmoid((logit λ_k + logit u_k) / τ),  u_k ~ U(0, 1)

    The masks have the binary Concrete distribution of Maddison et al. (2017), and the masked bound
    scores them. The gradient is biased: it is that of E[L̂] under the relaxed draws, which tends to
    E_q[L] as τ → 0 while the variance of the gradient grows. The state counts steps, for the
    temperature.
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
        q: PointProcess,
        score: ScoreWeights,
        *,
        state: int,
        generator: torch.Generator | None = None,
    ) -> Estimate[int]:
        if not isinstance(q, Bernoulli):
            raise InputError(
                "`Relaxed` needs a Bernoulli process, of independent inclusions; got a "
                f"{type(q).__name__}. Use ScoreFunction instead."
            )
        values = score(self._draw(q, self.temperature.at(state), generator))
        return Estimate(values.mean(), values.detach(), state + 1)

    def _draw(self, q: Bernoulli, tau: float, generator: torch.Generator | None) -> Weights:
        uniform = torch.rand(
            (self.samples, q.K), generator=generator, dtype=q.logits.dtype, device=q.logits.device
        )
        # logit 0 = −∞ would give a NaN gradient.
        tiny = torch.finfo(uniform.dtype).tiny
        return torch.sigmoid((q.logits + torch.logit(uniform, eps=tiny)) / tau)
