"""Plans for fitting latent-variable models, the way in, and what comes of it."""

from abc import ABC, abstractmethod
from copy import deepcopy
from dataclasses import dataclass
from typing import Generic

import torch
from jaxtyping import Float
from torch import Tensor

from winnowgp.data import Entries
from winnowgp.errors import InputError
from winnowgp.models import Latent, LatentPosterior
from winnowgp.selection import Selection
from winnowgp.training.checkpoint import Checkpoint
from winnowgp.training.course import Course, kept_course
from winnowgp.training.progress import OnProgress, Progress, silent


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
    given_up: float
    """Nats below the best bound seen with more points; zero if none was better."""


class LatentSchedule(ABC):
    """A plan for a whole fit."""

    @abstractmethod
    def run(self, model: Latent, table: Entries, *, course: Course[Progress]) -> LatentFit[Latent]:
        """Fit a model that the schedule may change as it likes; long loops are stages."""


def fit_latent(
    model: Latent,
    table: Entries,
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
    with kept_course(
        checkpoint,
        "fit",
        generator=generator,
        on_progress=on_progress,
        table=table.Y,
        observed=table.observed,
        model=model,
        schedule=schedule,
    ) as course:
        return schedule.run(deepcopy(model), table, course=course)
