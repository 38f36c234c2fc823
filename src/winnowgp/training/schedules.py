"""Results and schedules of fits, and the steps that several schedules share."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from winnowgp.data import Dataset, MaskedMatrix, Source
from winnowgp.models import DeepGP
from winnowgp.models.base import InducingModel
from winnowgp.models.gplvm import LatentModel
from winnowgp.point_processes import SquaredCardinality
from winnowgp.selection import Frontier, Selection, SubsetStatistics, alpha_at, fit_inclusion
from winnowgp.training.callbacks import AnyModel
from winnowgp.training.context import TrainingContext
from winnowgp.training.goals import FixedAlpha, Goal
from winnowgp.typing import Mask

Trained = TypeVar("Trained", bound=InducingModel | DeepGP | LatentModel)


@dataclass(frozen=True, slots=True)
class FitResult(Generic[Trained]):
    """A fitted model, its posterior, and how its inducing points were selected."""

    model: Trained
    """The model with the selected inducing points only, at their final locations."""
    posterior: Any
    """Predicts without the training data: a `Posterior`, `DeepPosterior` or `LatentPosterior`."""
    selections: tuple[Selection, ...]
    """The selection from each candidate set: one per layer of a deep GP, else one."""
    candidates: tuple[Tensor, ...]
    """Locations `[K D]` of each candidate set when the selection was made."""
    elbo: float
    """Lower bound on the log evidence of the final model, in nats; an average over samples for
    deep GPs and sampled GP-LVMs."""
    upper_bound: float | None
    """Upper bound on the log evidence at the final parameters, in nats; infinite where no finite
    one is known, None for deep GPs and GP-LVMs."""
    elbo_gap: float
    """Nats by which the ELBO is below the best one seen with more points; zero if none was better.

    For a deep GP, the nats that pruning cost, before training continued, summed over rounds.
    """

    @property
    def selection(self) -> Selection:
        """The selection of a model with one candidate set."""
        (selection,) = self.selections
        return selection


class Schedule(ABC):
    """Interface of schedules, which train a model and select its inducing points."""

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


@torch.no_grad()
def estimate_elbo(
    model: DeepGP,
    data: Dataset,
    *,
    generator: torch.Generator,
    samples: int = 4,
    rows: int = 4096,
) -> float:
    """Return the ELBO of a deep GP on all rows, in nats, averaged over samples.

    Args:
        rows: number of rows that are propagated at once.
    """
    expected = 0.0
    for start in range(0, data.N, rows):
        chunk = data.part(slice(start, start + rows))
        eps = model.base_samples(chunk.N, samples, generator)
        expected += model.evaluated(chunk, eps=eps).fit.item()
    return expected - sum(layer.points().kl().item() for layer in model.layers)


def seeded_elbo(model: DeepGP, data: Dataset, generator: torch.Generator, *, seed: int) -> float:
    """Return `estimate_elbo` with common random numbers: equal seeds draw equal samples."""
    seeded = torch.Generator(device=generator.device).manual_seed(seed)
    return estimate_elbo(model, data, generator=seeded)


def cluster_centres(
    X: Float[Tensor, "N D"],
    count: int,
    *,
    generator: torch.Generator,
    init: str = "k-means++",
    max_iter: int,
) -> Float[Tensor, "count D"]:
    """Return the centres of k-means clusters."""
    # Importing scikit-learn's clustering takes half a second, which not every fit needs.
    from sklearn.cluster import KMeans

    clusters = KMeans(
        count, init=init, n_init="auto", max_iter=max_iter, random_state=draw_seed(generator)
    ).fit(X.cpu().numpy())
    return torch.as_tensor(clusters.cluster_centers_).to(X)


def learn_inclusion(
    statistics: SubsetStatistics,
    frontier: Frontier,
    mask: Mask,
    *,
    goal: Goal,
    generator: torch.Generator,
    max_steps: int,
) -> Selection:
    """Return the selection of `mask`, with inclusion probabilities learnt by natural updates.

    The strength α of the prior is the goal's, or the one under which the frontier prefers as many
    points.

    Args:
        max_steps: largest number of subsets drawn.
    """
    fixed = isinstance(goal, FixedAlpha)
    alpha = goal.strength if fixed else alpha_at(frontier, int(mask.sum()))
    return natural_selection(
        statistics, frontier, mask, alpha=alpha, generator=generator, max_steps=max_steps
    )


def natural_selection(
    statistics: SubsetStatistics,
    frontier: Frontier,
    mask: Mask,
    *,
    alpha: float,
    generator: torch.Generator,
    max_steps: int,
) -> Selection:
    """Return the selection of `mask` under the prior exp(−α M²), with its inclusion probabilities.

    Args:
        max_steps: largest number of subsets drawn.
    """
    learnt = fit_inclusion(
        statistics,
        prior=SquaredCardinality(statistics.K, alpha),
        generator=generator,
        start=mask,
        max_steps=max_steps,
    )
    return Selection(learnt.q.inclusion, mask, learnt.trace, alpha, frontier)
