"""Adam on minibatches, with rollback after divergence."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor

from winnowgp.data import Dataset
from winnowgp.data.distributed import SINGLE_PROCESS, ProcessGroup
from winnowgp.data.row_indices import RowBatches
from winnowgp.errors import InputError, NotPositiveDefiniteError, TrainingError
from winnowgp.training.callbacks import EndPhase, Stateful
from winnowgp.training.checkpoint import NO_CHECKPOINT_LOG, CheckpointLog
from winnowgp.training.schedules import warn_not_sharded
from winnowgp.typing import Scalar


@final
class Minibatches:
    """The rows that each step of a stochastic optimiser uses: a random minibatch, or all rows.

    Processes that share a fit draw the same minibatches, and each uses its part of them; without
    minibatches each uses all rows. Either way they take the same steps.

    Args:
        size: number of rows of a minibatch, over all processes; all rows if None.
        process_group: the processes that share the fit.
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
        """The processes that take the same steps."""
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
        """Number of rows that minibatches are drawn from; None if every step uses all rows."""
        self.scale = float(data.observations * data.P)
        """Divisor of the objective before differentiation: observations times targets."""
        self.data = data
        """All rows."""
        self.rows = data.N if size is None or whole else size
        """Number of rows of a minibatch, over all processes."""
        self._size, self._generator = size, generator
        self._batches = RowBatches(
            data.N, size or data.N, generator=generator, device=data.X.device
        )

    def next(self) -> Dataset:
        """Return this process's rows of the next minibatch."""
        if self.total is None:
            return self.data
        rows = next(self._batches).tensor_split(self.process_group.world_size)
        return self.data.part(rows[self.process_group.rank])

    def local(self, drawn: Sequence[Float[Tensor, "T B _"]]) -> list[Float[Tensor, "T b _"]]:
        """Return those of the numbers drawn for a minibatch that belong to this process's rows.

        Each row then receives the same numbers, whichever process it belongs to.
        """
        if self.total is None:
            return list(drawn)
        return [
            each.tensor_split(self.process_group.world_size, dim=1)[self.process_group.rank]
            for each in drawn
        ]

    def mean_over_processes(
        self, nats: Callable[[], Float[Tensor, "*S"]], shape: tuple[int, ...] = ()
    ) -> Float[Tensor, "*S"]:
        """Return the mean over processes of the nats that each computes from its own rows.

        All processes receive the same value. Its gradient is that of this process's rows alone;
        the mean of these gradients over processes is the gradient of the whole minibatch.

        Args:
            nats: computes the nats of this process's rows.
            shape: shape of the result.

        Raises:
            NotPositiveDefiniteError: a process cannot compute its nats. All processes raise it, so
                that none waits for another.
        """
        if self.process_group.world_size == 1:
            return nats()
        value, failure = None, None
        try:
            value = nats()
        except NotPositiveDefiniteError as error:
            failure = error
        # One message, whose length all processes must know.
        failed = self.data.X.new_tensor(0.0 if failure is None else 1.0)
        part = self.data.X.new_zeros(shape) if value is None else value
        failed, total = self.process_group.all_reduce(failed, part)
        if value is None or failed:
            raise failure or NotPositiveDefiniteError("another process cannot compute its nats")
        # The second term is zero, and carries the gradient.
        return total / self.process_group.world_size + (value - value.detach())

    def with_data(self, data: Dataset) -> "Minibatches":
        """Return minibatches of other rows, of the same size and from the same generator."""
        return Minibatches(data, self._size, self._generator, process_group=self.process_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the order of the rows, and the position in it."""
        return self._batches.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` returned."""
        self._batches.load_state_dict(state)


@final
@dataclass(frozen=True, slots=True)
class Gradient:
    """An objective in nats that has been differentiated already."""

    value: float
    norm: float
    """Norm of all gradients together."""
    gradients: Sequence[Tensor]
    """Gradients of −value / scale in the parameters, in the order of `groups` of `Adam`."""


MOST_REJECTIONS = 20
# Number of steps below the rollback threshold that count as divergence, and number of steps between
# two snapshots to roll back to.
DIVERGED, SNAPSHOT_EVERY = 3, 10
# Number of good steps after which a halved learning rate is doubled, up to its initial value.
RECOVERED = 25
# Multiple of the average drop below the running average that noise can explain: 3.2 standard
# deviations of normal noise.
CHANCE = 8.0


@final
@dataclass(frozen=True, slots=True)
class Adam:
    """Maximise an objective in nats by Adam, with rejected steps and rollback after divergence.

    A step after which the objective or its gradient cannot be computed is reverted, and all
    learning rates are halved. They recover while steps succeed.

    Attributes:
        steps: number of steps.
        warm_up: number of first steps over which the learning rates increase linearly. Adam's first
            steps are equally long in all entries, however small their gradient: at the full rate
            they can undo what an earlier phase has learnt.
        cooling: factor that the learning rates decrease to, geometrically, over the last third.
        max_norm_ratio: largest norm of a gradient relative to its running average; longer ones are
            clipped. Gradients through sampled layers are heavy-tailed where functions are steep,
            and one step along such a gradient can undo hundreds.
        rollback_threshold: largest drop of the objective, divided by `scale`, below its running
            average; more where the objective has always been so noisy that chance explains it.
            After three steps in a row beyond it, training rolls back to a snapshot from before the
            drop, with half the learning rates and no momentum. A phase that ends in such a drop
            evaluates the objective again, without a step, until there are three or it was chance.
    """

    steps: int
    warm_up: int = 0
    cooling: float = 1.0
    max_norm_ratio: float = inf
    rollback_threshold: float = inf

    def maximise(
        self,
        objective: Callable[[], Scalar | Gradient],
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
            objective: nats, larger is better, to differentiate or with their gradient; called once
                per step, and again where a phase ends in a drop.
            groups: parameters with their learning rate.
            scale: divisor of the objective before differentiation, the number of observations.
            on_step: called with the number of each step, from one, and the objective before it,
                except for steps that are rolled back; may raise `EndPhase`.
            checkpoint_log: log in which this optimisation is recorded.
            memory: objects that `objective` and `on_step` change besides the parameters.
            process_group: processes that take the same steps, along the mean of their gradients;
                the objective must be the same number in each.
        """
        listed = [{"params": list(p), "lr": lr} for p, lr in groups]
        trainable = [group for group in listed if group["params"]]
        if not trainable:
            return
        on_gpu = all(p.is_cuda for group in trainable for p in group["params"])
        loop = _Loop(torch.optim.Adam(trainable, fused=on_gpu or None))
        parameters = loop.parameters
        results = {"parameters": _Parameters(parameters), **(memory or {})}
        stage = checkpoint_log.stage(results, start=parameters, scratch={"loop": loop})
        while loop.step < self.steps and not stage.ended:
            loop.set_rates(self.rate_factor(loop.step))
            evaluated = _differentiate(loop.optimiser, objective, parameters, scale, process_group)
            if evaluated is None:
                loop.reject()
                continue
            value, norm = evaluated
            loop.accept()
            if self.rollback_threshold < inf and loop.roll_back(
                value / scale, self.rollback_threshold, results
            ):
                stage.save()
                continue
            try:
                on_step(loop.step, value)
            except EndPhase:
                break
            if self.max_norm_ratio < inf:
                loop.norm = self._clip(parameters, norm, loop.norm)
            loop.optimiser.step()
            stage.save()
        while loop.dropped:
            evaluated = _differentiate(loop.optimiser, objective, parameters, scale, process_group)
            value = -inf if evaluated is None else evaluated[0] / scale
            loop.roll_back(value, self.rollback_threshold, results)
        stage.end()

    def _clip(self, parameters: list[Tensor], norm: float, average: float | None) -> float:
        """Clip the gradient's norm by its running average, and return the next average."""
        limit = inf if average is None else self.max_norm_ratio * average
        if norm > limit:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(limit / (norm + 1e-6))
        norm = min(norm, limit)
        return norm if average is None else 0.95 * average + 0.05 * norm

    def rate_factor(self, step: int) -> float:
        """Return the factor of the learning rates after `step` steps."""
        late = max(0.0, 3 * step / self.steps - 2)
        return min(1.0, (step + 1) / (self.warm_up + 1)) * self.cooling**late


def _differentiate(
    optimiser: torch.optim.Adam,
    objective: Callable[[], Scalar | Gradient],
    parameters: list[Tensor],
    scale: float,
    process_group: ProcessGroup,
) -> tuple[float, float] | None:
    """Set the gradients, averaged over processes; return objective and norm, None on failure."""
    optimiser.zero_grad()
    try:
        value = objective()
        if isinstance(value, Gradient):
            for parameter, gradient in zip(parameters, value.gradients, strict=True):
                parameter.grad = gradient
            return value.value, value.norm
        (-value / scale).backward()
    except NotPositiveDefiniteError:
        return None
    if process_group.world_size > 1:
        gradients = [p.grad for p in parameters if p.grad is not None]
        for own, total in zip(gradients, process_group.all_reduce(*gradients), strict=True):
            own.copy_(total / process_group.world_size)
    gradients = [p.grad for p in parameters if p.grad is not None]
    # One read: each synchronises with a GPU.
    norm = torch.nn.utils.get_total_norm(gradients)
    nats, length = torch.stack([value.detach(), norm.to(value)]).tolist()
    return (nats, length) if isfinite(nats) and isfinite(length) else None


@final
class _Parameters:
    """Parameters as a stateful object."""

    def __init__(self, parameters: list[Tensor]) -> None:
        self._parameters = parameters

    def state_dict(self) -> dict[str, Any]:
        return {"values": self._parameters}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        _set(self._parameters, state["values"])


@final
class _Loop:
    """The state of the optimisation between steps."""

    def __init__(self, optimiser: torch.optim.Adam) -> None:
        self.optimiser = optimiser
        self.parameters: list[Tensor] = [p for g in optimiser.param_groups for p in g["params"]]
        self.step = 0
        self.norm: float | None = None
        self._good = [p.detach().clone() for p in self.parameters]
        self._rates: list[float] = [group["lr"] for group in optimiser.param_groups]
        # Number of times that the rates have been halved, and of good steps since then.
        self._halvings, self._since = 0, 0
        self._rejections = 0
        self._level: float | None = None
        self._drop = 0.0
        self._low = 0
        self._snapshot: dict[str, Any] = {}

    def set_rates(self, factor: float) -> None:
        for group, rate in zip(self.optimiser.param_groups, self._rates, strict=True):
            group["lr"] = rate * factor * 0.5**self._halvings

    def accept(self) -> None:
        """Count a step whose objective and gradient could be computed."""
        self._good = [p.detach().clone() for p in self.parameters]
        self._rejections = 0
        self.step += 1
        self._since += 1
        if self._since >= RECOVERED:
            self._halvings, self._since = max(self._halvings - 1, 0), 0

    def reject(self) -> None:
        """Revert the last step, and halve the learning rates."""
        self._rejections += 1
        if self._rejections > MOST_REJECTIONS:
            raise TrainingError(
                f"{self._rejections} steps in a row failed at ever smaller learning rates; "
                "standardise the data, or use another kernel: this one cannot be evaluated there."
            )
        _set(self.parameters, self._good)
        self._halve()

    def _halve(self) -> None:
        self._halvings, self._since = self._halvings + 1, 0

    def roll_back(self, value: float, threshold: float, results: Mapping[str, Stateful]) -> bool:
        """Return whether the objective diverged; if so, restore `results` from a snapshot."""
        level = value if self._level is None else self._level
        limit = max(threshold, CHANCE * self._drop)
        if value >= level - limit:
            # Drops that the objective recovered from by itself were noise, up to the limit.
            for drop in (*self._low * [limit], max(level - value, 0.0)):
                self._drop += max(0.02, 1 / (10 + self.step)) * (drop - self._drop)
            self._low = 0
            self._level = value if self._level is None else 0.9 * level + 0.1 * value
            if value >= self._level and self.step % SNAPSHOT_EVERY == 1:
                self._snapshot = {
                    name: deepcopy(result.state_dict()) for name, result in results.items()
                }
            return False
        self._low += 1
        if self._low < DIVERGED:
            return False
        for name, result in results.items():
            result.load_state_dict(self._snapshot[name])
        self.optimiser.state.clear()
        self._good = [p.detach().clone() for p in self.parameters]
        self._halve()
        # A running average that was too high by chance must not make every later step a drop.
        self._level, self._low = level - limit, 0
        return True

    @property
    def dropped(self) -> bool:
        """Whether the last objective was too low, but too few in a row were to roll back."""
        return self._low > 0

    def state_dict(self) -> dict[str, Any]:
        return {
            "moments": self.optimiser.state_dict()["state"],
            "step": self.step,
            "norm": self.norm,
            "good": self._good,
            "halvings": self._halvings,
            "since": self._since,
            "level": self._level,
            "drop": self._drop,
            "low": self._low,
            "snapshot": self._snapshot,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.optimiser.load_state_dict({**self.optimiser.state_dict(), "state": state["moments"]})
        self.step, self.norm = state["step"], state["norm"]
        self._halvings, self._since = state["halvings"], state["since"]
        self._level, self._drop = state["level"], state["drop"]
        self._low, self._snapshot = state["low"], state["snapshot"]
        good = zip(state["good"], self.parameters, strict=True)
        self._good = [saved.to(p.device) for saved, p in good]


@torch.no_grad()
def _set(parameters: list[Tensor], values: Iterable[Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)
