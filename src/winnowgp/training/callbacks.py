"""Callbacks: what a fit reports after every step, and early stopping."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, Protocol, TypeAlias, final, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from winnowgp.errors import InputError
from winnowgp.models import DeepGP, MultiOutputGP
from winnowgp.models.base import InducingModel
from winnowgp.models.gplvm import LatentModel
from winnowgp.models.heteroscedastic import HeteroscedasticGP

AnyModel: TypeAlias = InducingModel | DeepGP | LatentModel | HeteroscedasticGP | MultiOutputGP

"""A model that `fit` can train."""


SMALLER_MODEL = "smaller model"

"""Phase that trains models of the frontier with fewer inducing points than the selected one."""


@final
@dataclass(frozen=True, slots=True)
class Progress:
    """A step of a phase of a fit, which callbacks receive."""

    phase: str
    """Name of the phase, such as "initialisation", "selection" or "optimisation"."""
    step: int
    """Number of the step within its phase, from one."""
    steps: int
    """Largest number of steps that the phase can take."""
    objective: float
    """Objective in nats, larger is better; an estimate where subsets or layers are sampled."""
    inclusion: tuple[Tensor, ...] | None
    """Inclusion probabilities λ `[K]` of each candidate set, in phases that learn them."""
    candidates: tuple[Tensor, ...]
    """Current locations `[K D]` of each candidate set: one per layer of a deep GP, else one."""
    latents: Float[Tensor, "N Q"] | None = None
    """Current means of q(X), for GP-LVMs."""
    rows: int | None = None
    """Number of rows that the objective is summed over; None if all. Starting points are compared
    on some of the rows."""

    @classmethod
    def of(
        cls,
        model: AnyModel,
        phase: str,
        step: int,
        steps: int,
        objective: float,
        inclusion: tuple[Tensor, ...] | None = None,
        rows: int | None = None,
    ) -> "Progress":
        """Return the event of one step, with copies of the model's locations."""
        latents = model.latents.mean.detach().clone() if isinstance(model, LatentModel) else None
        candidates = candidate_sets(model)
        return cls(phase, step, steps, objective, inclusion, candidates, latents, rows)


def candidate_sets(model: AnyModel) -> tuple[Tensor, ...]:
    """Return copies of the candidates `[K D]` of each set; one per layer of a deep GP."""
    return tuple(candidates.detach().clone() for candidates in model.candidate_sets)


Callback: TypeAlias = Callable[[Progress], None]

"""A function that is called with every step of a fit.

It may raise `EndPhase` to end the phase early; any other exception ends the fit. A callback that
defines `state_dict` and `load_state_dict` is restored when a fit resumes from a checkpoint. One
that ends phases should define `decides`, which returns its settings as a string: a checkpoint
belongs to fits with the same settings.
"""


Callbacks: TypeAlias = Callback | Sequence[Callback] | None

"""The type of arguments named `callbacks`: None, one callback, or a sequence of callbacks."""


class EndPhase(Exception):
    """Raised by a callback to end the current phase; the fit continues with the next one.

    A phase of a single step has ended already, and ignores the exception.
    """


@runtime_checkable
class Stateful(Protocol):
    """An object whose state can be saved and restored, as PyTorch's modules and optimisers.

    A state holds numbers, strings, tensors, and lists, tuples and dictionaries of these.
    """

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state."""
        ...

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Restore a state that `state_dict` returned."""
        ...


@runtime_checkable
class _Deciding(Protocol):
    def decides(self) -> str: ...


def as_callbacks(callbacks: Callbacks) -> tuple[Callback, ...]:
    """Return the callbacks of an argument that may be None, one callable, or a sequence."""
    if callbacks is None:
        return ()
    given = (callbacks,) if callable(callbacks) else tuple(callbacks)
    for callback in given:
        if not callable(callback):
            raise InputError(
                "`callbacks` must be None, a callable, or a sequence of callables; "
                f"got {callback!r}."
            )
    return given


def notify(callbacks: Sequence[Callback], progress: Progress) -> None:
    """Call every callback in order, even if one of them ends the phase; then raise `EndPhase`."""
    end: EndPhase | None = None
    for callback in callbacks:
        try:
            callback(progress)
        except EndPhase as raised:
            end = raised
    if end is not None:
        raise end


def decision_settings(callbacks: Sequence[Callback]) -> str:
    """Return the settings of callbacks that end phases; an empty string if none does."""
    settings = [each.decides() for each in callbacks if isinstance(each, _Deciding)]
    return ", ".join(filter(None, settings))


@final
class CallbackStates:
    """The states of all callbacks that have one, as one stateful object.

    The callbacks of a resumed fit may differ from the original ones: a state is restored only to a
    callback of the same class at the same position.
    """

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self._callbacks = callbacks

    def state_dict(self) -> dict[str, Any]:
        """Return the class and state of each callback."""
        return {
            "callbacks": [
                (type(each).__qualname__, each.state_dict() if isinstance(each, Stateful) else None)
                for each in self._callbacks
            ]
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore each callback whose class matches."""
        for callback, (kind, saved) in zip(self._callbacks, state["callbacks"], strict=False):
            same = kind == type(callback).__qualname__ and saved is not None
            if same and isinstance(callback, Stateful):
                callback.load_state_dict(saved)


def step_metrics(progress: Progress) -> dict[str, float]:
    """Return the scalar metrics of a step: objective, number of points, expected number of points.

    Models with several layers have numbers of points per layer. Values that are not finite are
    left out.
    """
    metrics = {f"objective/{progress.phase}": progress.objective}
    for name, points in _named("points", progress.candidates).items():
        metrics[name] = float(len(points))
    for name, inclusion in inclusions(progress).items():
        metrics[name.replace("inclusion", "expected points")] = inclusion.sum().item()
    return {name: value for name, value in metrics.items() if isfinite(value)}


def inclusions(progress: Progress) -> dict[str, Tensor]:
    """Return λ of each candidate set by name; nothing in phases that do not learn it."""
    return {} if progress.inclusion is None else _named("inclusion", progress.inclusion)


def _named(name: str, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    if len(tensors) == 1:
        return {name: tensors[0]}
    return {f"{name}/layer {number}": each for number, each in enumerate(tensors, start=1)}


@final
class EarlyStopping:
    """End a phase, not the fit, once its objective has stopped rising.

    A phase ends when the mean objective of the last `patience` steps is less than `least_gain` nats
    above that of the `patience` steps before them. Means are compared because most objectives are
    noisy estimates, and the best estimate so far is biased upwards. The parameters that the phase
    reached are kept, and the next phase begins.

    >>> from winnowgp import SparseGPRegressor
    >>> model = SparseGPRegressor(
    ...     schedule="paper",
    ...     alpha=0.1,
    ...     epochs=(200, 5, 5),
    ...     callbacks=EarlyStopping(patience=5, least_gain=2.0),
    ... ).fit([[0.0], [1.0], [2.0], [3.0]], [0.0, 1.0, 4.0, 9.0])

    Args:
        patience: number of steps compared with as many before them.
        least_gain: gain in nats, summed over all observations.
        phases: names of the phases to end, such as {"pre-train", "post-train"}; all if None.
    """

    def __init__(
        self,
        patience: int = 50,
        least_gain: float = 0.1,
        *,
        phases: Collection[str] | None = None,
    ) -> None:
        if patience < 1 or not least_gain >= 0:
            raise InputError(
                "`patience` must be at least 1 step and `least_gain` zero or more nats; "
                f"got {patience} and {least_gain}."
            )
        self.patience, self.least_gain, self.phases = patience, least_gain, phases
        self._phase, self._objectives = "", list[float]()

    def __call__(self, progress: Progress) -> None:
        """Raise `EndPhase` if the objective has stopped rising."""
        if progress.phase != self._phase or progress.step == 1:
            self._phase, self._objectives = progress.phase, []
        if self.phases is not None and progress.phase not in self.phases:
            return
        self._objectives = [*self._objectives, progress.objective][-2 * self.patience :]
        if len(self._objectives) < 2 * self.patience:
            return
        before, now = sum(self._objectives[: self.patience]), sum(self._objectives[self.patience :])
        if now - before < self.patience * self.least_gain:
            raise EndPhase

    def decides(self) -> str:
        """Return patience, gain and phases as a string."""
        phases = None if self.phases is None else sorted(self.phases)
        return f"EarlyStopping({self.patience}, {self.least_gain}, phases={phases})"

    def state_dict(self) -> dict[str, Any]:
        """Return the current phase and the objectives that are still compared."""
        return {"phase": self._phase, "objectives": self._objectives}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` returned."""
        self._phase, self._objectives = state["phase"], list(state["objectives"])
