"""L-BFGS with a line search that rejects failed evaluations."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import torch
from jaxtyping import Float
from torch import Tensor

from winnowgp.data import ProcessGroup
from winnowgp.errors import NotPositiveDefiniteError, TrainingError
from winnowgp.models.base import InducingModel
from winnowgp.models.gplvm import LatentModel
from winnowgp.training.callbacks import EndPhase, Stateful
from winnowgp.training.checkpoint import NO_CHECKPOINT_LOG, CheckpointLog
from winnowgp.training.parameters import Coordinates
from winnowgp.typing import Scalar

# L-BFGS that treats a failed evaluation as a step too long, and stops when it gains no more nats.
#
# The inverse Hessian is kept in its compact form (Byrd, Nocedal and Schnabel 1994): a direction
# costs
# four thin products and two small triangular solves whatever the memory. SciPy's L-BFGS-B cannot be
# told that a step failed, nor to stop by nats.


_ALONE = ProcessGroup.alone()
# Pairs after which the curvature is believed.
_TRUSTED = 5

Objective: TypeAlias = Callable[[Tensor], tuple[float, Tensor] | None]

"""From a vector to nats and their gradient; None where they cannot be computed."""


@dataclass(frozen=True, slots=True)
class Stop:
    """When to stop: once `window` iterations together gained less than `gain` nats.

    Sooner where the curvature seen so far promises less than a tenth of that pace.
    """

    gain: float = 1e-2
    window: int = 20
    iterations: int = 500
    """At the most."""


@dataclass(frozen=True, slots=True)
class Maximum:
    """Where a search ended."""

    x: Float[Tensor, " n"]
    value: float
    """In nats."""
    iterations: int
    rejected: int
    """Evaluations that failed or were not finite."""


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
    memory: int = 50,
    on_step: Callable[[int, float], None] = lambda step, value: None,
    checkpoint_log: CheckpointLog = NO_CHECKPOINT_LOG,
    scratch: Mapping[str, Stateful] | None = None,
) -> Maximum:
    """Climb from `start`, never ending lower than there.

    Args:
        memory: pairs of steps and changes of the gradient that are remembered.
        on_step: told the number of each iteration and the nats after it; may raise `EndPhase`.
        journal: where this is a stage of.
        scratch: what the objective remembers from call to call.

    Raises:
        TrainingError: the objective cannot be computed at `start`.
    """
    line = _Line(objective, checkpoint_log.process_group)
    pairs, way = _Pairs(memory, start.device), _Way(start)
    stage = checkpoint_log.stage(
        {"way": way, "line": line}, start=[start], scratch={"pairs": pairs, **(scratch or {})}
    )
    if not way.trace:
        point = line.evaluate(start)
        if point is None:
            raise TrainingError(
                "the bound cannot be computed at the starting point; are inputs standardised and "
                "kernel parameters of a sensible size?"
            )
        way.add(point)
    while not stage.ended and len(way.trace) <= stop.iterations and len(start):
        point, trace = way.point, way.trace
        direction = pairs.direction(point.gradient)
        # A quasi-Newton step expects ½ gᵀHg nats; far below what would count, it is the summit.
        expected = 0.5 * float(direction @ point.gradient)
        if len(pairs) >= _TRUSTED and expected < stop.gain / (10 * stop.window):
            break
        found = line.search(point, direction, fresh=len(pairs) == 0)
        if found is None and len(pairs) == 0:
            break
        if found is None:
            pairs.clear()
            continue
        pairs.add(found.x - point.x, point.gradient - found.gradient)
        way.add(found)
        try:
            on_step(len(trace) - 1, found.value)
        except EndPhase:
            break
        if len(trace) > stop.window and found.value - trace[-1 - stop.window] < stop.gain:
            break
        stage.save()
    stage.end()
    return Maximum(way.point.x, way.point.value, len(way.trace) - 1, line.rejected)


@final
class _Way:
    """Where a climb is, and how it got there."""

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
    """Evaluations, with the failed ones counted, and the line search over them.

    Processes that share the climb all take where the first of them is for the place, and see what
    it sees: on machines that round differently each would soon be on a way of its own.
    """

    def __init__(self, objective: Objective, process_group: ProcessGroup = _ALONE) -> None:
        self._objective, self._process_group = objective, process_group
        self.rejected = 0

    def state_dict(self) -> dict[str, Any]:
        return {"rejected": self.rejected}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.rejected = state["rejected"]

    def evaluate(self, x: Float[Tensor, " n"]) -> _Point | None:
        value, gradient = self._objective(x) or (math.nan, torch.zeros_like(x))
        if self._process_group.world_size > 1:
            seen, x, gradient = self._process_group.broadcast(x.new_tensor(value), x, gradient)
            value = seen.item()
        if math.isfinite(value) and bool(gradient.isfinite().all()):
            return _Point(x, value, gradient)
        self.rejected += 1
        return None

    def search(self, at: _Point, direction: Float[Tensor, " n"], *, fresh: bool) -> _Point | None:
        """A step that gains enough and whose slope has fallen (weak Wolfe), or the best gain."""
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
    """Maximiser of the cubic through two (step, value, slope); NaN when it has none."""
    if a[0] == b[0]:
        return math.nan
    # Of −f this is the usual minimiser, Nocedal and Wright (3.59).
    d1 = -a[2] - b[2] + 3 * (a[1] - b[1]) / (a[0] - b[0])
    root = d1 * d1 - a[2] * b[2]
    if root < 0:
        return math.nan
    d2 = math.copysign(math.sqrt(root), b[0] - a[0])
    bottom = a[2] - b[2] + 2 * d2
    return b[0] - (b[0] - a[0]) * (d2 - d1 - b[2]) / bottom if bottom else math.nan


def _inside(trial: float, low: float, high: float) -> float:
    """`trial`, kept away from both ends; the middle when it is not a number."""
    width = high - low
    if math.isnan(trial):
        return low + 0.5 * width
    return min(max(trial, low + 0.1 * width), low + 0.7 * width)


def _beyond(trial: float, step: float, high: float) -> float:
    """A longer step: towards `high` if something failed there, else where the cubic points."""
    if math.isfinite(high):
        return 0.5 * (step + high)
    return min(max(trial, 1.5 * step), 10 * step) if trial > step else 3 * step


@final
class _Pairs:
    """Steps s and changes y of the descent gradient, newest last, with their inner products."""

    def __init__(self, memory: int, device: torch.device | None = None) -> None:
        self._memory, self._device = memory, device
        self.clear()

    def __len__(self) -> int:
        return len(self._S)

    def clear(self) -> None:
        self._S = self._Y = self._SY = self._YY = torch.zeros(0, 0)
        self._gamma = 1.0

    def state_dict(self) -> dict[str, Any]:
        tensors = {"S": self._S, "Y": self._Y, "SY": self._SY, "YY": self._YY}
        return {**tensors, "gamma": self._gamma}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        names = ("S", "Y", "SY", "YY")
        self._S, self._Y, self._SY, self._YY = (
            state[name].to(device=self._device) for name in names
        )
        self._gamma = state["gamma"]

    def add(self, s: Float[Tensor, " n"], y: Float[Tensor, " n"]) -> None:
        """Remember a step, if the curvature along it is positive."""
        sy = float(s @ y)
        if not sy > 1e-10 * float(s.norm() * y.norm()):
            return
        if not len(self):
            self._S = self._Y = s.new_zeros(0, len(s))
            self._SY = self._YY = s.new_zeros(0, 0)
        old = 1 if len(self) == self._memory else 0
        self._S = torch.cat([self._S[old:], s[None]])
        self._Y = torch.cat([self._Y[old:], y[None]])
        self._SY = _bordered(self._SY[old:, old:], self._S @ y)
        self._YY = _bordered(self._YY[old:, old:], self._Y @ y)
        self._gamma = sy / float(y @ y)

    def direction(self, gradient: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        """H g with H the compact inverse Hessian; uphill."""
        if not len(self):
            return gradient
        gamma, R = self._gamma, self._SY.triu()
        p = torch.linalg.solve_triangular(R, (self._S @ gradient)[:, None], upper=True)[:, 0]
        inner = self._SY.diagonal() * p + gamma * (self._YY @ p - self._Y @ gradient)
        q = torch.linalg.solve_triangular(R.mT, inner[:, None], upper=False)[:, 0]
        return gamma * gradient + q @ self._S - (gamma * p) @ self._Y


def _bordered(A: Float[Tensor, "m m"], column: Float[Tensor, " k"]) -> Float[Tensor, "k k"]:
    """`A` with one more row and column, both `column`; of S Yᵀ only the upper triangle is read."""
    grown = column.new_empty(len(column), len(column))
    grown[:-1, :-1] = A
    grown[:, -1] = column
    grown[-1] = column
    return grown


# L-BFGS on a model: hyper-parameters, noise and locations at once.


def climb(
    model: InducingModel | LatentModel,
    X: Float[Tensor, "N D"],
    *,
    objective: Callable[[], Scalar],
    stop: Stop,
    on_step: Callable[[int, float], None] = lambda step, value: None,
    checkpoint_log: CheckpointLog = NO_CHECKPOINT_LOG,
) -> Maximum:
    """Maximise `objective`, nats as a function of the model's parameters; leave the model there.

    A parameter setting at which the objective cannot be computed is a step too long, never an
    error.

    Args:
        objective: if it remembers something from call to call, it should be `Stateful`.
        on_step: told the number of each iteration and the nats after it; may raise `EndPhase`.
        journal: where this is a stage of.
    """
    coordinates = Coordinates(model, X)

    def evaluate(x: Tensor) -> tuple[float, Tensor] | None:
        if not coordinates.sensible(x):
            return None
        coordinates.write(x)
        model.zero_grad(set_to_none=True)
        try:
            value = objective()
            if value.requires_grad:
                value.backward()
        except NotPositiveDefiniteError:
            return None
        return value.item(), coordinates.gradient()

    with torch.enable_grad():
        found = maximise(
            evaluate,
            coordinates.read(),
            stop=stop,
            on_step=on_step,
            checkpoint_log=checkpoint_log,
            scratch={"objective": objective} if isinstance(objective, Stateful) else None,
        )
    coordinates.write(found.x)
    model.zero_grad(set_to_none=True)
    return found
