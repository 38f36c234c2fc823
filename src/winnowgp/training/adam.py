"""Adam on minibatches, with rollback after divergence."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from math import inf
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor

from winnowgp.data import Dataset
from winnowgp.data.distributed import SINGLE_PROCESS, ProcessGroup
from winnowgp.data.sources import RowBatches
from winnowgp.errors import InputError, NotPositiveDefiniteError, TrainingError
from winnowgp.training.callbacks import EndPhase, Stateful
from winnowgp.training.checkpoint import NO_CHECKPOINT_LOG, CheckpointLog
from winnowgp.training.context import warn_not_sharded
from winnowgp.typing import Scalar

# What each step of a stochastic optimiser sees of the data.


@final
class Parts:
    """A minibatch a step, or all rows every time.

    Processes that share a fit draw the same minibatches, and each one looks at its part of them;
    all rows are looked at by each. Either way they take the same steps.

    Args:
        size: rows of a minibatch, of all processes together; all of them if None.
        ranks: the processes that share the fit.
    """

    def __init__(
        self,
        data: Dataset,
        size: int | None,
        generator: torch.Generator,
        *,
        process_group: ProcessGroup = SINGLE_PROCESS,
    ) -> None:
        whole = size is None or size >= data.N
        self.process_group = process_group
        """Those that take the same steps."""
        if size is not None and not whole and size % process_group.world_size:
            raise InputError(
                "`batch_size` must be a multiple of the number of processes, "
                f"{process_group.world_size}; got {size}."
            )
        if whole:
            warn_not_sharded(
                process_group, "minibatches are shared, with a `batch_size` below all rows"
            )
        self.total = None if whole else data.N
        """What a bound is told that the rows are a part of."""
        self.scale = float(data.observations * data.P)
        """What nats are divided by before they are differentiated."""
        self.data = data
        """All rows."""
        self.rows = data.N if size is None or whole else size
        """Of a minibatch, of all processes together."""
        self._size, self._generator = size, generator
        self._batches = RowBatches(
            data.N, size or data.N, generator=generator, device=data.X.device
        )

    def next(self) -> Dataset:
        """The rows of the next step that this process looks at."""
        if self.total is None:
            return self.data
        rows = next(self._batches).tensor_split(self.process_group.world_size)[
            self.process_group.rank
        ]
        return self.data.part(rows)

    def own(self, drawn: Sequence[Float[Tensor, "T B _"]]) -> list[Float[Tensor, "T b _"]]:
        """Of what was drawn for each row of the whole minibatch, that of this process's rows.

        So that a row meets the same numbers whoever looks at it.
        """
        if self.total is None:
            return list(drawn)
        return [
            each.tensor_split(self.process_group.world_size, dim=1)[self.process_group.rank]
            for each in drawn
        ]

    def together(
        self, nats: Callable[[], Float[Tensor, "*S"]], shape: tuple[int, ...] = ()
    ) -> Float[Tensor, "*S"]:
        """Nats of the whole minibatch, from what this process makes of its part of it.

        The mean over processes, the same digits in each. The gradient is that of this process
        alone: the mean over processes of what follows from it is the gradient of the whole
        minibatch, also where other terms are added that each process has.

        Args:
            shape: of the nats.

        Raises:
            NotPositiveDefiniteError: some process cannot compute its part; raised in all of them,
                or the others would wait for it.
        """
        if self.process_group.world_size == 1:
            return nats()
        found, failure = None, None
        try:
            found = nats()
        except NotPositiveDefiniteError as error:
            failure = error
        # In one message, for which all must know how long it is.
        failed = self.data.X.new_tensor(0.0 if failure is None else 1.0)
        part = self.data.X.new_zeros(shape) if found is None else found
        failed, total = self.process_group.all_reduce(failed, part)
        if found is None or failed:
            raise failure or NotPositiveDefiniteError("another process cannot compute its part")
        # The latter is zero, and has the gradient.
        return total / self.process_group.world_size + (found - found.detach())

    def alike(self, data: Dataset) -> "Parts":
        """Of other rows, as many at a time and from the same generator."""
        return Parts(data, self._size, self._generator, process_group=self.process_group)

    def state_dict(self) -> dict[str, Any]:
        """Which rows were seen."""
        return self._batches.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another one stood."""
        self._batches.load_state_dict(state)


# Adam that treats a failed factorisation as a rejected step.


MOST_REJECTIONS = 20
# Steps beyond the limit that are a fall, and how often a place to go back to is remembered.
CLIFF, ANCHORED = 3, 10
# Times the average dip below the running average that chance may explain: 3.2 standard deviations
# of normal noise.
CHANCE = 8.0


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
    deepest: float = inf
    """How far the objective, divided by `scale`, may fall below its running average; further where
    it has always been so noisy that chance explains more.

    Three steps in a row beyond that, and training goes back to where it was some steps before the
    fall, with half the learning rates and no momentum. A phase whose last steps are beyond it looks
    again, without a step, until there are three or it was chance.
    """

    def maximise(
        self,
        objective: Callable[[], Scalar],
        groups: Iterable[tuple[Iterable[Tensor], float]],
        *,
        scale: float,
        on_step: Callable[[int, float], None],
        checkpoint_log: CheckpointLog = NO_CHECKPOINT_LOG,
        memory: Mapping[str, Stateful] | None = None,
        process_group: ProcessGroup = SINGLE_PROCESS,
    ) -> None:
        """Take `steps` steps.

        Args:
            objective: nats, larger is better; called once a step, and again where a phase ends in
                what may be a fall.
            groups: parameters with their learning rate.
            scale: what the objective is divided by before it is differentiated, the number of rows.
            on_step: told the number of the step, from one, and the objective before it, but not of
                those that are spent on going back; may raise `EndPhase`.
            journal: where this is a stage of.
            memory: what objective and `on_step` change besides the parameters.
            ranks: processes that take the same steps, along the mean of their gradients; the
                objective must be the same number in each.
        """
        listed = [{"params": list(p), "lr": lr} for p, lr in groups]
        learnt = [group for group in listed if group["params"]]
        if not learnt:
            return
        loop = _Loop(torch.optim.Adam(learnt))
        parameters = loop.parameters
        kept = {"parameters": _Parameters(parameters), **(memory or {})}
        stage = checkpoint_log.stage(kept, start=parameters, scratch={"loop": loop})
        while loop.step < self.steps and not stage.ended:
            loop.set_rates(self._share(loop.step))
            value = _differentiate(loop.optimiser, objective, parameters, scale, process_group)
            if value is None:
                loop.reject()
                continue
            loop.accept()
            if self.deepest < inf and loop.fell(value / scale, self.deepest, kept):
                stage.save()
                continue
            try:
                on_step(loop.step, value)
            except EndPhase:
                break
            if self.longest < inf:
                loop.average = self._shortened(parameters, loop.average)
            loop.optimiser.step()
            stage.save()
        while loop.falling:
            value = _differentiate(loop.optimiser, objective, parameters, scale, process_group)
            loop.fell(-inf if value is None else value / scale, self.deepest, kept)
        stage.end()

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
    process_group: ProcessGroup,
) -> float | None:
    """Fill in gradients, the mean over processes, and return the objective; None if either is
    unusable."""
    optimiser.zero_grad()
    try:
        value = objective()
        (-value / scale).backward()
    except NotPositiveDefiniteError:
        return None
    if process_group.world_size > 1:
        gradients = [p.grad for p in parameters if p.grad is not None]
        for mine, total in zip(gradients, process_group.all_reduce(*gradients), strict=True):
            mine.copy_(total / process_group.world_size)
    usable = torch.isfinite(value) and all(
        p.grad is None or bool(torch.isfinite(p.grad).all()) for p in parameters
    )
    return value.item() if usable else None


@final
class _Parameters:
    """Parameters as something stateful."""

    def __init__(self, parameters: list[Tensor]) -> None:
        self._parameters = parameters

    def state_dict(self) -> dict[str, Any]:
        return {"values": self._parameters}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        _set(self._parameters, state["values"])


@final
class _Loop:
    """What Adam remembers from step to step."""

    def __init__(self, optimiser: torch.optim.Adam) -> None:
        self.optimiser = optimiser
        self.parameters: list[Tensor] = [p for g in optimiser.param_groups for p in g["params"]]
        self.step = 0
        self.average: float | None = None
        self._good = [p.detach().clone() for p in self.parameters]
        self._rates: list[float] = [group["lr"] for group in optimiser.param_groups]
        self._rejections = 0
        self._level: float | None = None
        self._dip = 0.0
        self._low = 0
        self._anchor: dict[str, Any] = {}

    def set_rates(self, share: float) -> None:
        for group, rate in zip(self.optimiser.param_groups, self._rates, strict=True):
            group["lr"] = rate * share

    def accept(self) -> None:
        """The parameters are good, and a step will be taken from here."""
        self._good = [p.detach().clone() for p in self.parameters]
        self._rejections = 0
        self.step += 1

    def reject(self) -> None:
        """Back to where the parameters were good last, to take a shorter step."""
        self._rejections += 1
        if self._rejections > MOST_REJECTIONS:
            raise TrainingError(
                f"{self._rejections} steps in a row failed, however short; the data may be "
                "scaled badly (standardise them), or the kernel cannot be evaluated there."
            )
        _set(self.parameters, self._good)
        self._rates = [0.5 * rate for rate in self._rates]

    def fell(self, value: float, deepest: float, kept: Mapping[str, Stateful]) -> bool:
        """Whether the objective fell off a cliff; if so, all that is kept is back before it."""
        level = value if self._level is None else self._level
        limit = max(deepest, CHANCE * self._dip)
        if value >= level - limit:
            # What it came back from by itself was chance: dips to the limit, or beyond.
            for dip in (*self._low * [limit], max(level - value, 0.0)):
                self._dip += max(0.02, 1 / (10 + self.step)) * (dip - self._dip)
            self._low = 0
            self._level = value if self._level is None else 0.9 * level + 0.1 * value
            if value >= self._level and self.step % ANCHORED == 1:
                self._anchor = {name: deepcopy(part.state_dict()) for name, part in kept.items()}
            return False
        self._low += 1
        if self._low < CLIFF:
            return False
        for name, part in kept.items():
            part.load_state_dict(self._anchor[name])
        self.optimiser.state.clear()
        self._good = [p.detach().clone() for p in self.parameters]
        self._rates = [0.5 * rate for rate in self._rates]
        # An average that was lucky must not make everything after it a fall.
        self._level, self._low = level - limit, 0
        return True

    @property
    def falling(self) -> bool:
        """Whether the objective was too low last time, and not yet often enough to go back."""
        return self._low > 0

    def state_dict(self) -> dict[str, Any]:
        return {
            "moments": self.optimiser.state_dict()["state"],
            "step": self.step,
            "average": self.average,
            "good": self._good,
            "rates": self._rates,
            "level": self._level,
            "dip": self._dip,
            "low": self._low,
            "anchor": self._anchor,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.optimiser.load_state_dict({**self.optimiser.state_dict(), "state": state["moments"]})
        self.step, self.average = state["step"], state["average"]
        self._rates = list(state["rates"])
        self._level, self._dip = state["level"], state["dip"]
        self._low, self._anchor = state["low"], state["anchor"]
        good = zip(state["good"], self.parameters, strict=True)
        self._good = [saved.to(p.device) for saved, p in good]


@torch.no_grad()
def _set(parameters: list[Tensor], values: Iterable[Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)
