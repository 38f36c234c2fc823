"""Schedules and results of fits."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Generic, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from winnowgp.data import Dataset, MaskedMatrix, Source
from winnowgp.errors import InputError
from winnowgp.models import DeepGP, DeepPosterior, LatentPosterior, Posterior
from winnowgp.models.base import Model
from winnowgp.models.gplvm import Latent
from winnowgp.selection import Selection
from winnowgp.training.callbacks import OnProgress, Progress, silent
from winnowgp.training.checkpoint import Checkpoint
from winnowgp.training.context import TrainingContext, training_context

# A schedule is a plan for a whole fit; a fit is what came of it.


@dataclass(frozen=True, slots=True)
class Fit(Generic[Model]):
    """A fitted model, its predictor, and how its points were chosen."""

    model: Model
    """Holds only the points that were kept, moved to where they serve best."""
    posterior: Posterior
    """Predicts without the training data."""
    selection: Selection
    """What was kept and how probable each candidate was."""
    candidates: Float[Tensor, "K D"]
    """Where the candidates stood when the choice was made."""
    bound: float
    """Lower bound on the log evidence of the final model, in nats."""
    upper_bound: float
    """Upper bound on the log evidence at the final parameters, in nats."""
    elbo_gap: float
    """Nats below the best bound seen with more points; zero if none was better."""


class Schedule(ABC):
    """A plan for a whole fit."""

    @abstractmethod
    def run(self, model: Model, data: Source, *, context: TrainingContext[Progress]) -> Fit[Model]:
        """Fit a model that the schedule may change as it likes; long loops are stages."""


# Fitting a deep model: the way in, the plan, what comes out, and what a watcher is told.


@dataclass(frozen=True, slots=True)
class DeepProgress:
    """One step of one phase."""

    phase: str
    step: int
    """Counted from one."""
    steps: int
    """How many the phase has."""
    objective: float
    """In nats, larger is better; an estimate."""
    model: DeepGP
    """As it stands; not to be changed."""
    inclusion: tuple[Tensor, ...] | None
    """λ of each layer, in phases that learn it."""


OnDeepProgress: TypeAlias = Callable[[DeepProgress], None]

"""A watcher. It may raise `EndPhase` to end the phase early, anything else to end the fit."""


def deep_silent(progress: DeepProgress) -> None:
    """The watcher that looks away."""


@dataclass(frozen=True, slots=True)
class DeepFit:
    """A fitted deep model, its predictor, and how the points of each layer were chosen."""

    model: DeepGP
    """Holds only the points that were kept, moved to where they serve best."""
    posterior: DeepPosterior
    """Predicts without the training data."""
    selections: tuple[Selection, ...]
    """What was kept in each layer and how probable each candidate was."""
    candidates: tuple[Tensor, ...]
    """Where each layer's candidates stood when the choice was made, `[K D]`."""
    bound: float
    """Lower bound on the log evidence of the final model, in nats; an average over samples."""
    elbo_gap: float
    """Nats that dropping points cost when it happened, before training went on, in all rounds
    together; zero if it cost nothing."""


class DeepSchedule(ABC):
    """A plan for a whole fit of a deep model."""

    @abstractmethod
    def run(
        self, model: DeepGP, data: Dataset, *, context: TrainingContext[DeepProgress]
    ) -> DeepFit:
        """Fit a model that the schedule may change as it likes; long loops are stages."""


def fit_deep(
    model: DeepGP,
    data: Source,
    *,
    schedule: DeepSchedule,
    generator: torch.Generator | None = None,
    on_progress: OnDeepProgress = deep_silent,
    checkpoint: Checkpoint | None = None,
) -> DeepFit:
    """Train a copy of a deep model, choose among each layer's candidates, return what is left.

    Args:
        data: rows in memory. Processes that share them look at a part of each minibatch; where the
            schedule has none, and where points are chosen, each does all of the work.
        schedule: `DeepFast()`, or the paper's `DeepThreePhases`.
        generator: where randomness comes from; the same seed gives the same fit.
        on_progress: told of every step.
        checkpoint: where to write down how far it has come, and go on from if it was stopped.
    """
    process_group, data = data.process_group, data.in_memory("a deep model")
    points = model.layers[0].candidates
    if points.dtype != data.X.dtype or points.device != data.X.device:
        raise InputError(
            f"the model is {points.dtype} on {points.device} and the data {data.X.dtype} on "
            f"{data.X.device}; make them alike."
        )
    model.check(data)
    if generator is None:
        generator = torch.Generator(device=points.device).manual_seed(0)
    with training_context(
        checkpoint,
        "fit",
        generator=generator,
        on_progress=on_progress,
        process_group=process_group,
        inputs=data.X,
        targets=data.Y,
        weights=data.weights,
        model=model,
        schedule=schedule,
    ) as context:
        return schedule.run(deepcopy(model), data, context=context)


def seeded_bound(model: DeepGP, data: Dataset, generator: torch.Generator, *, seed: int) -> float:
    """`estimated_bound` with samples that another model can be given too."""
    fresh = torch.Generator(device=generator.device).manual_seed(seed)
    return estimated_bound(model, data, generator=fresh)


def drawn_seed(generator: torch.Generator) -> int:
    """A seed for generators that are to draw the same."""
    return int(torch.randint(2**31, (1,), generator=generator, device=generator.device))


@torch.no_grad()
def estimated_bound(
    model: DeepGP, data: Dataset, *, generator: torch.Generator, samples: int = 4, rows: int = 4096
) -> float:
    """The bound of all rows, in nats, averaged over a few samples; rows in chunks."""
    fit = 0.0
    for start in range(0, data.N, rows):
        part = data.part(slice(start, start + rows))
        noise = model.noise(part.N, samples, generator)
        fit += model.evaluated(part, noise=noise).fit.item()
    return fit - sum(layer.points().kl().item() for layer in model.layers)


# Plans for fitting latent-variable models, the way in, and what comes of it.


@dataclass(frozen=True, slots=True)
class LatentFit(Generic[Latent]):
    """A fitted latent-variable model, its predictor, and how its points were chosen."""

    model: Latent
    """Holds q(X) of the training rows, and only the points that were kept."""
    posterior: LatentPosterior
    """Predicts, and places new rows, without the training table."""
    selection: Selection
    """What was kept and how probable each candidate was."""
    candidates: Float[Tensor, "K Q"]
    """Where the candidates stood when the choice was made."""
    bound: float
    """Lower bound on the log evidence of the final model, in nats; an estimate where sampled."""
    elbo_gap: float
    """Nats below the best bound seen with more points; zero if none was better."""


class LatentSchedule(ABC):
    """A plan for a whole fit."""

    @abstractmethod
    def run(
        self, model: Latent, table: MaskedMatrix, *, context: TrainingContext[Progress]
    ) -> LatentFit[Latent]:
        """Fit a model that the schedule may change as it likes; long loops are stages."""


def fit_latent(
    model: Latent,
    table: MaskedMatrix,
    *,
    schedule: LatentSchedule,
    generator: torch.Generator | None = None,
    on_progress: OnProgress = silent,
    checkpoint: Checkpoint | None = None,
) -> LatentFit[Latent]:
    """Train a copy of `model`, choose among its candidates, and return what is left.

    Args:
        schedule: `FastLatent()`, or the paper's `JointLatent`.
        generator: where randomness comes from; the same seed gives the same fit.
        on_progress: told of every step.
        checkpoint: where to write down how far it has come, and go on from if it was stopped.
    """
    model.check(table)
    if model.candidates.shape[1] != model.latents.Q:
        raise InputError(
            f"the candidates have {model.candidates.shape[1]} columns and the latents "
            f"{model.latents.Q} dimensions; make them alike."
        )
    if generator is None:
        generator = torch.Generator(device=model.candidates.device).manual_seed(0)
    with training_context(
        checkpoint,
        "fit",
        generator=generator,
        on_progress=on_progress,
        table=table.Y,
        observed=table.observed,
        model=model,
        schedule=schedule,
    ) as context:
        return schedule.run(deepcopy(model), table, context=context)
