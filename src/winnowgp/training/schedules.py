"""`fit`, its result, the interface of schedules, and the context that a schedule runs in."""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, final

import torch
from gpytorch.kernels import Kernel
from torch import Tensor

from winnowgp.bounds.evidence import Evidence
from winnowgp.data import MaskedMatrix, Source
from winnowgp.data.distributed import SINGLE_PROCESS, ProcessGroup
from winnowgp.data.scaling import StandardisedSource
from winnowgp.errors import InputError, NotShardedWarning
from winnowgp.linalg import reuse_freed_memory
from winnowgp.models import DeepGP, DeepPosterior, MixturePosterior, MultiOutputGP, Posterior
from winnowgp.models.base import InducingModel
from winnowgp.models.gplvm import LatentModel
from winnowgp.models.heteroscedastic import HeteroscedasticGP, HeteroscedasticPosterior
from winnowgp.selection import SizeFrontier, SubsetPosterior
from winnowgp.selection.frontier import Selection
from winnowgp.training.callbacks import (
    AnyModel,
    Callback,
    Callbacks,
    EndPhase,
    Progress,
    as_callbacks,
    notify,
)
from winnowgp.training.checkpoint import (
    NO_CHECKPOINT_LOG,
    Checkpoint,
    CheckpointLog,
    open_checkpoint,
)
from winnowgp.training.cross_validation import PredictiveGap
from winnowgp.training.fingerprint import row_identity
from winnowgp.training.goals import Goal


@final
@dataclass(frozen=True, slots=True)
class TrainingContext:
    """The generator, callbacks, checkpoint log and process group of a fit."""

    generator: torch.Generator
    callbacks: tuple[Callback, ...] = ()
    checkpoint_log: CheckpointLog = NO_CHECKPOINT_LOG
    process_group: ProcessGroup = SINGLE_PROCESS
    """The processes that share the fit."""

    def notify(self, progress: Progress) -> None:
        """Call the callbacks with a step.

        Where several processes share the fit, the callbacks of the first decide when a phase ends:
        a callback may depend on a clock, or exist in the first process only.

        Raises:
            EndPhase: a callback ends the phase.
        """
        if self.process_group.world_size == 1:
            notify(self.callbacks, progress)
            return
        end = torch.zeros(())
        try:
            notify(self.callbacks, progress)
        except EndPhase:
            end = torch.ones(())
        if bool(self.process_group.broadcast(end)[0]):
            raise EndPhase

    def notify_once(self, progress: Progress) -> None:
        """Call the callbacks with the only step of a phase, unless an earlier run has done so.

        The phase has ended already, so `EndPhase` has no effect.
        """
        if not self.checkpoint_log.passed:
            with suppress(EndPhase):
                self.notify(progress)


@contextmanager
def training_context(
    checkpoint: Checkpoint | CheckpointLog | None,
    *,
    generator: torch.Generator,
    callbacks: Callbacks = (),
    process_group: ProcessGroup = SINGLE_PROCESS,
    **identity: Any,
) -> Iterator[TrainingContext]:
    """Open the context of a fit; its checkpoint is complete once the block ends without an error.

    Args:
        checkpoint: where the fit is recorded, if anywhere; a log that is open already is continued,
            and remains open.
        process_group: the processes that share the fit.
        identity: values that determine the result, besides generator and callbacks; not used if a
            log is open.
    """
    callbacks = as_callbacks(callbacks)
    if isinstance(checkpoint, CheckpointLog):
        checkpoint.attach(generator, callbacks)
        yield TrainingContext(generator, callbacks, checkpoint, process_group)
        return
    log = open_checkpoint(
        checkpoint,
        generator=generator,
        callbacks=callbacks,
        process_group=process_group,
        **identity,
    )
    yield TrainingContext(generator, callbacks, log, process_group)
    log.finish()


def warn_not_sharded(process_group: ProcessGroup, reason: str) -> None:
    """Warn, in the first of several processes, that each of them repeats all work of a fit.

    Args:
        reason: a clause that gives the reason, and what to do.
    """
    if process_group.world_size > 1 and process_group.is_first:
        warnings.warn(
            f"each of {process_group.world_size} processes repeats the work of this fit: {reason}.",
            NotShardedWarning,
            stacklevel=3,
        )


Trained = TypeVar(
    "Trained", bound=InducingModel | DeepGP | LatentModel | HeteroscedasticGP | MultiOutputGP
)


@dataclass(frozen=True, slots=True)
class Growth:
    """The numbers of candidates of a pool that grew, and why it stopped growing."""

    sizes: tuple[int, ...]
    """Numbers of candidates, in the order of the fit."""
    elbos: tuple[float, ...]
    """ELBO with each of them, in nats."""
    limit: str | None
    """What ended growth: "work", "memory", "max_fit_seconds", "n_candidates", "max_points",
    "precision" if rounding errors exceed what more candidates add, "chance" or "held_out" if none
    are kept because they gain no more than by chance or predict held-out rows no better; None if
    they gain less than the tolerance."""
    last_gain: float
    """Nats per observation that the last doubling gained."""


@dataclass(frozen=True, slots=True)
class SizedModel:
    """A model of another size, with hyper-parameters and locations of its own."""

    posterior: Posterior | HeteroscedasticPosterior | MixturePosterior
    elbo: float
    """ELBO in nats."""
    log_density: float
    """Held-out log density, in nats per observation; NaN if not computed."""


@dataclass(frozen=True, slots=True)
class SizedDeepModel:
    """A deep GP with another allocation of inducing points to its layers."""

    posterior: DeepPosterior
    elbo: float
    """ELBO in nats."""


@dataclass(frozen=True, slots=True)
class FitResult(Generic[Trained]):
    """A fitted model, its posterior, and how its inducing points were selected."""

    model: Trained
    """The model with the selected inducing points only, at their final locations."""
    posterior: Any
    """Predicts without the training data: a `Posterior`, `DeepPosterior` or `LatentPosterior`."""
    selections: tuple[Selection, ...]
    """The selection from each candidate set: one per layer of a deep GP and per process of a
    `MultiOutputGP`, those of the function and of its log noise for a `HeteroscedasticGP`, else
    one."""
    candidates: tuple[Tensor, ...]
    """Locations `[K D]` of each candidate set when the selection was made."""
    elbo: float
    """Lower bound on the log evidence of the final model, in nats; an average over samples for
    deep GPs and sampled GP-LVMs."""
    elbo_gap: float
    """Nats by which the ELBO is below the best one seen with more points; zero if none was better.

    For a deep GP, the nats that pruning cost, before training continued, summed over rounds.
    """

    evidence: Evidence | None = None
    """The log evidence at the final hyper-parameters, exact or bounded on both sides; None for deep
    GPs and GP-LVMs."""
    growth: Growth | None = None
    """How the pool of candidates grew, and which limit ended growth; None with other schedules."""
    kernel_evidence: tuple[float, ...] = ()
    """Exact evidence of each kernel that was compared, in nats per observation of some rows: the
    model's own, then those of the schedule."""
    linear_gain: float | None = None
    """Nats per observation that a linear term added to the best of these, if there is one."""
    linear_kernel: int = 0
    """Position of the kernel that the linear term was added to."""
    frontier: SizeFrontier | None = None
    """The best model known for each number of inducing points."""
    sized: tuple[SizedModel, ...] = ()
    """Models with fewer inducing points, refitted at their size, smallest first."""
    allocations: tuple[SizedDeepModel, ...] = ()
    """Other trained deep GPs whose ELBO no quicker one reaches, quickest first."""
    predictive_gap: PredictiveGap | None = None
    """Gap of the held-out log density to that of the largest model."""
    subset_posterior: SubsetPosterior | None = None
    """The posterior over subsets, if it is not that of independent inclusion."""
    noise_gain: float | None = None
    """Nats by which noise that depends on the inputs raised the ELBO; None for other models."""
    constant_weight: float = 0.0
    """Expected share of observations that a constant describes and not the model, by the held-out
    rows of a fit to few rows; zero if none were held out."""
    constant_gain: float = 0.0
    """Nats per held-out row that the average with a constant of this weight gains over the model;
    positive if outliers cost more than the constant does elsewhere."""

    @property
    def selection(self) -> Selection:
        """The selection of a model with one candidate set."""
        (selection,) = self.selections
        return selection


@dataclass(frozen=True, slots=True)
class SparseTraining:
    """Settings of the fast schedule for models with one candidate set; see `FastSchedule`."""

    goal: Goal
    n_candidates: int | None
    rounds: int
    iterations: int
    gain: float
    selection_rows: int
    inclusion_steps: int
    kernels: tuple[Kernel, ...] = ()
    linear_term: bool = False
    max_seconds: float | None = None
    kept_sizes: int = 3
    criterion: str = "elbo"
    warm_start: bool = False
    reported: bool = True
    """Whether held-out densities are computed for the report."""
    averaged: bool = False
    """Whether predictions will be averaged with a constant."""
    evidence_rows: int | None = None
    """Rows of the exact evidence at most; as many as are affordable by default."""
    max_starts: int | None = None
    """Largest number of starts for the hyper-parameters of few rows."""


class Schedule(ABC):
    """Interface of schedules, which train a model and select its inducing points."""

    # Not abstract: a schedule that fits every model has nothing to check.
    def check(self, model: AnyModel, data: Source | MaskedMatrix) -> None:  # noqa: B027
        """Raise an error if the schedule cannot fit the model; called before anything else."""

    @abstractmethod
    def run(
        self, model: Trained, data: Source | MaskedMatrix, *, context: TrainingContext
    ) -> FitResult[Trained]:
        """Fit a model.

        Args:
            model: a copy, which the schedule may change.
            context: generator, callbacks, checkpoint log and process group of the fit.
        """


def draw_seed(generator: torch.Generator) -> int:
    """Return a random seed for another generator."""
    return int(torch.randint(2**31, (1,), generator=generator, device=generator.device))


def fit(
    model: Trained,
    data: Source | MaskedMatrix,
    *,
    schedule: Schedule | None = None,
    callbacks: Callbacks = (),
    checkpoint: Checkpoint | CheckpointLog | None = None,
    generator: torch.Generator | None = None,
) -> FitResult[Trained]:
    """Train a copy of a model and select inducing points among its candidates.

    Args:
        model: a `SparseGP`, `VariationalGP`, `HeteroscedasticGP`, `MultiOutputGP`, `DeepGP`,
            `LatentVariableGP` or `SampledLatentGP`.
        data: a `Dataset`, or any other source for a `SparseGP` with `FastSchedule`; a
            `MaskedMatrix` for GP-LVMs. Processes that share a source all return the same result.
        schedule: the schedule of the fit; `FastSchedule()` if None, which selects the fewest
            inducing points within 0.01 nats per observation of the best ELBO.
        callbacks: functions called with the `Progress` of every step.
        checkpoint: folder in which the fit is recorded, and from which it resumes if interrupted;
            or the open log of a larger fit that this one is a part of.
        generator: source of randomness, seeded with 0 if None.

    >>> from gpytorch.kernels import RBFKernel, ScaleKernel
    >>> from winnowgp.data import hills
    >>> from winnowgp.models import SparseGP
    >>> data = hills()
    >>> model = SparseGP(ScaleKernel(RBFKernel()), data.X[::2])
    >>> result = fit(model, data)
    >>> result.posterior.M < 20 < model.K
    True
    """
    if schedule is None:
        # `fast` imports this module.
        from winnowgp.training.fast import FastSchedule

        schedule = FastSchedule()
    process_group = SINGLE_PROCESS
    if not isinstance(data, Source | MaskedMatrix):
        raise InputError(
            "`data` must be a Dataset, another source, or a MaskedMatrix for a GP-LVM; got "
            f"{type(data).__name__}. Make a Dataset of tensors with `Dataset.of(X, y)`."
        )
    if isinstance(data, MaskedMatrix) != isinstance(model, LatentModel):
        raise InputError(
            "`data` must be a MaskedMatrix for a GP-LVM, and a Dataset or another source for other "
            f"models; got {type(data).__name__} for {type(model).__name__}."
        )
    if not isinstance(data, MaskedMatrix):
        process_group = data.process_group
        if isinstance(data, StandardisedSource):
            data = data.materialised()
        if isinstance(model, DeepGP):
            data = data.require_dataset("a deep model")
    _check(model, data)
    schedule.check(model, data)
    if generator is None:
        generator = torch.Generator(device=_device(model)).manual_seed(0)
    reuse_freed_memory()
    identity: dict[str, Any] = {}
    if not isinstance(checkpoint, CheckpointLog):
        identity = {**_row_identity(data, saved=checkpoint is not None), "model": model}
        identity["schedule"] = schedule
    with training_context(
        checkpoint,
        generator=generator,
        callbacks=callbacks,
        process_group=process_group,
        **identity,
    ) as context:
        return schedule.run(deepcopy(model), data, context=context)


def _check(model: Any, data: Any) -> None:
    """Raise an error if the model cannot be fitted to the data."""
    if isinstance(model, LatentModel):
        model.check(data)
        if model.candidates.shape[1] != model.latents.Q:
            raise InputError(
                "the candidates must have as many columns as the latents have dimensions, "
                f"{model.latents.Q}; got {model.candidates.shape[1]}."
            )
        return
    points = model.layers[0].candidates if isinstance(model, DeepGP) else model.candidates
    dataset = data.as_dataset()
    # Rows that are read during the fit are moved to the model's device then.
    device = points.device if dataset is None else dataset.device
    if points.shape[1] != data.D or points.dtype != data.dtype or points.device != device:
        raise InputError(
            "model and data must have the same number of columns, dtype and device; the model's "
            f"candidates are {points.dtype} with {points.shape[1]} columns on {points.device} and "
            f"the data {data.dtype} with {data.D} on {device}. Convert one of them."
        )
    model.check(data)


def _device(model: Any) -> torch.device:
    return next(model.parameters()).device


def _row_identity(data: Source | MaskedMatrix, *, saved: bool) -> dict[str, Any]:
    """Return what identifies the rows of a fit."""
    if isinstance(data, MaskedMatrix):
        return {"table": data.Y, "observed": data.observed}
    return row_identity(data, saved=saved)
