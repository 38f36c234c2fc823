"""Models with fewer inducing points than the selected one, which a fit keeps beside it."""

from dataclasses import dataclass
from math import nan
from typing import Generic

from winnowgp.data import Source
from winnowgp.errors import TrainingError
from winnowgp.linalg import threads_for
from winnowgp.models.base import Model
from winnowgp.selection import Frontier
from winnowgp.training.cross_validation import CrossValidation
from winnowgp.training.fast_steps import FastSteps
from winnowgp.training.schedules import SizedModel

# Numbers of inducing points that a fit may keep models of, besides its own.
_SIZES = (2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True, slots=True)
class SmallerModel(Generic[Model]):
    """A model with fewer inducing points, refitted at its size."""

    model: Model
    elbo: float
    frontier: Frontier
    """The frontier of its points at its hyper-parameters."""

    def sized(self, data: Source, held_out: CrossValidation | None) -> SizedModel:
        """Return its posterior, ELBO and held-out log density."""
        model = self.model.with_best_q(data)
        density = nan if held_out is None else held_out.mean(held_out.densities(model))
        return SizedModel(model.posterior(data), self.elbo, density)


def smaller_models(
    steps: FastSteps[Model], fitted: Model, count: int
) -> tuple[SmallerModel[Model], ...]:
    """Return models with fewer inducing points than a fitted one, up to `count` of them."""
    smaller: list[SmallerModel[Model]] = []
    sizes = [size for size in _SIZES if size < fitted.K]
    for M in sizes[max(len(sizes) - count, 0) :]:
        with threads_for(10.0 * M**3):
            try:
                model, elbo = steps.shrunk(fitted, M)
            except TrainingError:
                continue
            if model.K not in [other.model.K for other in smaller] and model.K < fitted.K:
                frontier = steps.frontier(model.subset_statistics(steps.data))
                smaller.append(SmallerModel(model, elbo, frontier))
    return tuple(smaller)
