"""A schedule is a plan for a whole fit; a fit is what came of it."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic

from jaxtyping import Float
from torch import Tensor

from winnowgp.data import Source
from winnowgp.models import Model, Posterior
from winnowgp.selection import Selection
from winnowgp.training.course import Course
from winnowgp.training.progress import Progress


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
    given_up: float
    """Nats below the best bound seen with more points; zero if none was better."""


class Schedule(ABC):
    """A plan for a whole fit."""

    @abstractmethod
    def run(self, model: Model, data: Source, *, course: Course[Progress]) -> Fit[Model]:
        """Fit a model that the schedule may change as it likes; long loops are stages."""
