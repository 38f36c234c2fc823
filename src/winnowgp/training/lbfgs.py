"""L-BFGS with a line search that rejects failed evaluations.

The inverse Hessian is stored in its compact form (Byrd, Nocedal and Schnabel 1994): a direction
costs four thin products and two small triangular solves. It starts from a diagonal matrix that is
updated in every step (Gilbert and Lemaréchal 1989), because curvatures differ between parameters;
with 100 pairs instead of 50 and a multiple of the identity, inducing points and hyper-parameters of
kin8nm take three quarters of the evaluations. SciPy's L-BFGS-B can neither reject a failed
evaluation nor stop by a gain in nats.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, final

import torch
from jaxtyping import Float
from torch import Tensor

from winnowgp.data.distributed import SINGLE_PROCESS, ProcessGroup
from winnowgp.errors import NotPositiveDefiniteError, TrainingError
from winnowgp.models.base import InducingModel
from winnowgp.models.gplvm import LatentModel
from winnowgp.models.multi_output import MultiOutputGP
from winnowgp.models.priors import log_prior_of
from winnowgp.training.callbacks import EndPhase, Stateful
from winnowgp.training.checkpoint import NO_CHECKPOINT_LOG, CheckpointLog
from winnowgp.training.closed_objective import closed_objective
from winnowgp.training.coordinates import Coordinates
from winnowgp.typing import Scalar

# Number of pairs from which the curvature estimate is used to stop.
_RELIABLE = 5
# Iterations of `Maximum.recent_gain`.
_RECENT = 4
# Pairs that are stored, and the elements of their steps at most.
_MEMORY, _ELEMENTS = 100, 2**24
# Largest ratio of an entry of the diagonal to the mean curvature along the last step.
_SPREAD = 1e3
# Parameters of a model on a GPU up to which the steps are computed on the CPU. Each iteration reads
# some ten numbers, and the GPU waits for each of them.
_ON_CPU = 4096

Objective: TypeAlias = Callable[[Tensor], tuple[float, Tensor] | None]

"""A function of a vector that returns nats and their gradient, or None if it fails there."""


@dataclass(frozen=True, slots=True)
class Stop:
    """A stopping rule: stop once `window` iterations together gained less than `gain` nats.

    Stop earlier where the curvature so far predicts a gain of less than `expected` nats.
    """

    gain: float = 1e-2
    window: int = 20
    iterations: int = 500
    """Largest number of iterations."""
    expected: float | None = None
    """Nats that the next iteration must be expected to gain; if None, a tenth of what it must gain
    on average."""

    @property
    def least(self) -> float:
        """Nats that the next iteration must be expected to gain."""
        return self.gain / (10 * self.window) if self.expected is None else self.expected


@dataclass(frozen=True, slots=True)
class Maximum:
    """The result of an optimisation."""

    x: Float[Tensor, " n"]
    value: float
    """Objective in nats."""
    iterations: int
    rejected: int
    """Number of evaluations that failed or were not finite."""
    last_gain: float = 0.0
    """Nats that the last `Stop.window` iterations gained, if the largest number of iterations ended
    the optimisation; 0 if it converged."""
    recent_gain: float = 0.0
    """Nats that the last iterations gained, four of L-BFGS."""
    converged: bool = True
    """Whether the optimisation ended before its largest number of iterations."""


@dataclass(frozen=True, slots=True)
class _Point:
    x: Float[Tensor, " n"]
    value: float
    gradient: Float[Tensor, " n"]


def maximise(
    objective: Objective,
    start: Float[Tensor, " n"],
    *,
    stop: Stop,
    memory: int | None = None,
    on_step: Callable[[int, float], None] = lambda step, value: None,
    checkpoint_log: CheckpointLog = NO_CHECKPOINT_LOG,
    scratch: Mapping[str, Stateful] | None = None,
    curvature: "Curvature | None" = None,
) -> Maximum:
    """Return a local maximum that is no lower than the objective at `start`.

    Args:
        memory: number of pairs of steps and gradient changes that are stored; 100 by default, fewer
            for more than 168,000 parameters.
        on_step: called with the number of each iteration and the nats after it; may raise
            `EndPhase`.
        checkpoint_log: log in which this optimisation is recorded.
        scratch: state of the objective between calls.
        curvature: pairs of an earlier optimisation of the same objective, to which those of this
            one are added; none by default.

    Raises:
        TrainingError: the objective cannot be computed at `start`.
    """
    line = _Line(objective, checkpoint_log.process_group)
    memory = memory or max(1, min(_MEMORY, _ELEMENTS // max(len(start), 1)))
    path = _Path(start)
    pairs = Curvature() if curvature is None else curvature
    pairs.hold(memory, start.device)
    results, scratch = {"path": path, "line": line}, {"pairs": pairs, **(scratch or {})}
    if curvature is not None:
        results["pairs"] = scratch.pop("pairs")
    stage = checkpoint_log.stage(results, start=[start], scratch=scratch)
    if not path.trace:
        point = line.evaluate(start)
        if point is None:
            raise TrainingError(
                "the ELBO cannot be computed at the initial parameters; standardise the inputs, "
                "and check that kernel parameters have a sensible size."
            )
        path.add(point)
    while not stage.ended and len(path.trace) <= stop.iterations and len(start):
        point, trace = path.point, path.trace
        direction = pairs.direction(point.gradient)
        # A quasi-Newton step gains about ½ gᵀHg nats; far below the stopping gain, stop.
        expected = 0.5 * float(direction @ point.gradient)
        if len(pairs) >= _RELIABLE and expected < stop.least:
            break
        better = line.search(point, direction, fresh=len(pairs) == 0)
        if better is None and len(pairs) == 0:
            break
        if better is None:
            pairs.clear()
            continue
        pairs.add(better.x - point.x, point.gradient - better.gradient)
        path.add(better)
        try:
            on_step(len(trace) - 1, better.value)
        except EndPhase:
            break
        if len(trace) > stop.window and better.value - trace[-1 - stop.window] < stop.gain:
            break
        stage.save()
    stage.end()
    trace, last_gain = path.trace, 0.0
    if len(trace) > max(stop.iterations, 1):
        last_gain = trace[-1] - trace[max(0, len(trace) - 1 - stop.window)]
    recent = trace[-1] - trace[max(0, len(trace) - 1 - _RECENT)]
    return Maximum(
        path.point.x,
        path.point.value,
        iterations=len(trace) - 1,
        rejected=line.rejected,
        last_gain=last_gain,
        recent_gain=recent,
        converged=len(trace) <= stop.iterations,
    )


@final
class _Path:
    """The current point, and the objective of all points before it."""

    def __init__(self, start: Float[Tensor, " n"]) -> None:
        self.point = _Point(start, -math.inf, start)
        self.trace: list[float] = []

    def add(self, point: _Point) -> None:
        self.point = point
        self.trace.append(point.value)

    def state_dict(self) -> dict[str, Any]:
        return {"x": self.point.x, "gradient": self.point.gradient, "trace": self.trace}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        x, gradient = (state[name].to(self.point.x) for name in ("x", "gradient"))
        self.trace = list(state["trace"])
        self.point = _Point(x, self.trace[-1], gradient)


@final
class _Line:
    """Evaluations, a count of the failed ones, and the line search.

    Processes that share the optimisation all use the point, value and gradient of the first of
    them: where machines round differently, their paths would soon diverge.
    """

    def __init__(self, objective: Objective, process_group: ProcessGroup = SINGLE_PROCESS) -> None:
        self._objective, self._process_group = objective, process_group
        self.rejected = 0

    def state_dict(self) -> dict[str, Any]:
        return {"rejected": self.rejected}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.rejected = state["rejected"]

    def evaluate(self, x: Float[Tensor, " n"]) -> _Point | None:
        value, gradient = self._objective(x) or (math.nan, torch.zeros_like(x))
        if self._process_group.world_size > 1:
            first, x, gradient = self._process_group.broadcast(x.new_tensor(value), x, gradient)
            value = first.item()
        if math.isfinite(value) and bool(gradient.isfinite().all()):
            return _Point(x, value, gradient)
        self.rejected += 1
        return None

    def search(self, at: _Point, direction: Float[Tensor, " n"], *, fresh: bool) -> _Point | None:
        """Return a point that satisfies the weak Wolfe conditions, else the best gain."""
        slope = float(direction @ at.gradient)
        if not slope > 0:
            return None
        step = min(1.0, 1.0 / float(at.gradient.norm())) if fresh else 1.0
        low, low_value, low_slope, high = 0.0, at.value, slope, math.inf
        best: _Point | None = None
        for _ in range(12):
            point = self.evaluate(at.x + step * direction)
            if point is None:
                high, step = step, low + 0.2 * (step - low)
                continue
            new_slope = float(direction @ point.gradient)
            trial = _cubic((low, low_value, low_slope), (step, point.value, new_slope))
            if point.value < at.value + 1e-4 * step * slope:
                high, step = step, _inside(trial, low, step)
                if best is not None and high - low < 1e-3 * low:
                    break
            elif new_slope > 0.9 * slope:
                best, low_value, low_slope = point, point.value, new_slope
                low, step = step, _beyond(trial, step, high)
            else:
                return point
            if high < 1e-12:
                break
        return best


def _cubic(a: tuple[float, float, float], b: tuple[float, float, float]) -> float:
    """Return the maximiser of the cubic through two (step, value, slope); NaN if it has none."""
    if a[0] == b[0]:
        return math.nan
    # The minimiser of −f, Nocedal and Wright (3.59).
    d1 = -a[2] - b[2] + 3 * (a[1] - b[1]) / (a[0] - b[0])
    root = d1 * d1 - a[2] * b[2]
    if root < 0:
        return math.nan
    d2 = math.copysign(math.sqrt(root), b[0] - a[0])
    bottom = a[2] - b[2] + 2 * d2
    return b[0] - (b[0] - a[0]) * (d2 - d1 - b[2]) / bottom if bottom else math.nan


def _inside(trial: float, low: float, high: float) -> float:
    """Return `trial` clamped away from both ends; the middle if it is NaN."""
    width = high - low
    if math.isnan(trial):
        return low + 0.5 * width
    return min(max(trial, low + 0.1 * width), low + 0.7 * width)


def _beyond(trial: float, step: float, high: float) -> float:
    """Return a longer step: towards `high` if that failed, else the maximiser of the cubic."""
    if math.isfinite(high):
        return 0.5 * (step + high)
    return min(max(trial, 1.5 * step), 10 * step) if trial > step else 3 * step


@final
class Curvature:
    """Steps s and gradient changes y, newest last, and the diagonal that the update starts from."""

    def __init__(self, memory: int = _MEMORY) -> None:
        self._memory, self._device = memory, torch.device("cpu")
        self.clear()

    @classmethod
    def of(cls, pairs: Float[Tensor, "m 2 n"], *, memory: int = _MEMORY) -> "Curvature":
        """Return the curvature along some steps, of which each has the gradient change beside it.

        The diagonal is that of these pairs alone.
        """
        curvature = cls(memory)
        for s, y in pairs:
            curvature.add(s, y)
        return curvature

    def pairs(self) -> Float[Tensor, "m 2 n"]:
        """Return the steps and the gradient changes, newest last."""
        return torch.stack([self._S, self._Y], 1)

    def hold(self, memory: int, device: torch.device) -> None:
        """Store at most so many pairs, on a device, to which those of a checkpoint move too."""
        self._memory, self._device = min(self._memory, memory), device
        self.load_state_dict(self.state_dict())

    def __len__(self) -> int:
        return len(self._S)

    def clear(self) -> None:
        self._S = self._Y = self._SY = torch.zeros(0, 0)
        self._diagonal = torch.ones(())

    def state_dict(self) -> dict[str, Any]:
        return {"S": self._S, "Y": self._Y, "SY": self._SY, "diagonal": self._diagonal}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        names = ("S", "Y", "SY", "diagonal")
        self._S, self._Y, self._SY, self._diagonal = (
            state[name].to(device=self._device) for name in names
        )

    def add(self, s: Float[Tensor, " n"], y: Float[Tensor, " n"]) -> None:
        """Store a step if the curvature along it is positive."""
        sy = float(s @ y)
        if not sy > 1e-10 * float(s.norm() * y.norm()):
            return
        if not len(self):
            self._S = self._Y = s.new_zeros(0, len(s))
            self._SY, self._diagonal = s.new_zeros(0, 0), torch.ones_like(s)
        old = max(len(self) + 1 - self._memory, 0)
        self._S = torch.cat([self._S[old:], s[None]])
        self._Y = torch.cat([self._Y[old:], y[None]])
        self._SY = _bordered(self._SY[old:, old:], self._S @ y)
        self._diagonal = _updated_diagonal(self._diagonal, s, y)

    def direction(self, gradient: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        """Return the ascent direction H g, with H the compact inverse Hessian."""
        if not len(self):
            return gradient
        D, R = self._diagonal, self._SY.triu()
        p = torch.linalg.solve_triangular(R, (self._S @ gradient)[:, None], upper=True)[:, 0]
        rest = D * (gradient - p @ self._Y)
        inner = self._SY.diagonal() * p - self._Y @ rest
        q = torch.linalg.solve_triangular(R.mT, inner[:, None], upper=False)[:, 0]
        return rest + q @ self._S


def _updated_diagonal(
    D: Float[Tensor, " n"], s: Float[Tensor, " n"], y: Float[Tensor, " n"]
) -> Float[Tensor, " n"]:
    """Return the inverse of the diagonal of the BFGS update of D⁻¹.

    D ← D · sᵀy / yᵀDy,   then   D⁻¹ ← D⁻¹ + y²/sᵀy − (D⁻¹s)²/sᵀD⁻¹s
    """
    sy = s @ y
    D = D * (sy / (y @ (D * y)))
    scaled = s / D
    updated = (D.reciprocal() + y.square() / sy - scaled.square() / (s @ scaled)).reciprocal()
    # The inverse Hessian along the last step.
    gamma = sy / (y @ y)
    # Positive in exact arithmetic.
    return torch.where(updated > 0, updated, D).clamp(gamma / _SPREAD, gamma * _SPREAD)


def _bordered(A: Float[Tensor, "m m"], column: Float[Tensor, " k"]) -> Float[Tensor, "k k"]:
    """Return `A` with one more row and column; only the upper triangle of S Yᵀ is used."""
    grown = column.new_empty(len(column), len(column))
    grown[:-1, :-1] = A
    grown[:, -1] = column
    grown[-1] = column
    return grown


def maximise_elbo(
    model: InducingModel | LatentModel | MultiOutputGP,
    X: Float[Tensor, "N D"],
    *,
    objective: Callable[[], Scalar],
    stop: Stop,
    on_step: Callable[[int, float], None] = lambda step, value: None,
    checkpoint_log: CheckpointLog = NO_CHECKPOINT_LOG,
    curvature: Curvature | None = None,
) -> Maximum:
    """Optimise hyper-parameters, noise and locations of a model by L-BFGS, in place.

    Priors of the hyper-parameters are added to the objective, and not to the value of the result.
    Parameters at which the objective cannot be computed shorten the step, and are not an error.

    Args:
        X: inputs, by which locations are scaled; the means of the latents for a GP-LVM.
        objective: nats as a function of the model's parameters. If it has state between calls, it
            should define `state_dict` and `load_state_dict`.
        on_step: called with the number of each iteration and the nats after it; may raise
            `EndPhase`.
        checkpoint_log: log in which this optimisation is recorded.
        curvature: as in `maximise`.
    """
    coordinates, log_prior = Coordinates(model, X), log_prior_of(model)
    start = coordinates.read()
    single = checkpoint_log.process_group.world_size == 1
    device = start.device
    if single and len(start) <= _ON_CPU:
        start = start.cpu()
    closed = closed_objective(model, objective, coordinates)

    def evaluate(x: Tensor) -> tuple[float, Tensor] | None:
        if not coordinates.in_range(x):
            return None
        coordinates.write(x.to(device))
        try:
            if closed is not None:
                return closed(x)
            coordinates.clear_gradient()
            value = objective() + log_prior()
            if value.requires_grad:
                value.backward()
        except NotPositiveDefiniteError:
            return None
        gradient = coordinates.gradient()
        if gradient.device == x.device:
            return value.item(), gradient
        # Value and gradient in one transfer.
        numbers = torch.cat([value.detach().reshape(1).double(), gradient.double()]).to(x.device)
        return numbers[0].item(), numbers[1:].to(x.dtype)

    with torch.enable_grad():
        maximum = maximise(
            evaluate,
            start,
            stop=stop,
            on_step=on_step,
            checkpoint_log=checkpoint_log,
            scratch={"objective": objective} if isinstance(objective, Stateful) else None,
            curvature=curvature,
        )
    coordinates.write(maximum.x.to(device))
    model.zero_grad(set_to_none=True)
    with torch.no_grad():
        return replace(maximum, value=maximum.value - log_prior().item())
