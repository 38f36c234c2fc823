"""The default schedule for deep models: train, eliminate layer by layer, train the rest."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from winnowgp.data import Dataset
from winnowgp.errors import InputError
from winnowgp.models import DeepGP, LayerSites, deep_sites
from winnowgp.point_processes import SquaredCardinality
from winnowgp.selection import Frontier, Selection, path_frontier, select_naturally
from winnowgp.training.course import Course
from winnowgp.training.deep_fit import (
    DeepFit,
    DeepProgress,
    DeepSchedule,
    drawn_seed,
    estimated_bound,
    seeded_bound,
)
from winnowgp.training.layer_goal import LayerGoal, SharedTolerance
from winnowgp.training.layer_training import LayerTraining
from winnowgp.training.layerwise import train_layerwise
from winnowgp.training.parts import Parts
from winnowgp.typing import Mask

# Rows times samples that sites are taken at when points are chosen, and most numbers in a pass.
_SITES, _NUMBERS = 65_536, 2**26
_MOST_SAMPLES = 16


@dataclass(frozen=True, slots=True)
class _Chosen:
    """A model after a choice, and what the choice was made from."""

    model: DeepGP
    selections: tuple[Selection, ...]
    candidates: tuple[Tensor, ...]
    lost: float
    """Nats that the choice cost, with the same samples before and after."""


@final
@dataclass(frozen=True, slots=True)
class DeepFast(DeepSchedule):
    """Choose the points of all layers from one pass of sites.

    1. All candidates: each layer alone, then all of them by Adam, with natural gradients for the
       last layer's q(u).
    2. Every layer as regression on its sites (`models.deep_sites`): backward elimination gives its
       frontier, the goal a strength α that all layers share, α the set of each layer.
    3. The sets that are left, trained on, the learning rate falling.
    """

    goal: LayerGoal = field(default_factory=SharedTolerance)
    layerwise: int = 100
    """Steps that each layer is trained alone first, as `train_layerwise` does."""
    pre: int = 1000
    post: int = 1000
    rounds: int = 3
    """In how many parts points are dropped, with a share of `pre` before each."""
    learning_rate: float = 0.03
    natural_rate: float = 0.3
    samples: int = 1
    batch_size: int | None = None
    """Rows a step looks at; all if None. Processes that share the data look at a part each."""
    inclusion_steps: int = 60
    """Subsets drawn at most to learn a layer's probabilities of inclusion."""

    def __post_init__(self) -> None:
        if min(self.layerwise, self.pre, self.post) < 0 or min(self.samples, self.rounds) < 1:
            raise InputError(
                "`layerwise`, `pre` and `post` must be zero or more steps, `samples` and `rounds` "
                f"at least one; got {self.layerwise}, {self.pre}, {self.post}, {self.samples} and "
                f"{self.rounds}."
            )
        if self.batch_size is not None and self.batch_size < 1:
            raise InputError(f"`batch_size` must be at least 1; got {self.batch_size}.")

    def run(self, model: DeepGP, data: Dataset, *, course: Course[DeepProgress]) -> DeepFit:
        generator = course.generator
        parts = Parts(data, self.batch_size, generator, ranks=course.ranks)
        before = LayerTraining(self.learning_rate, self.samples, self.natural_rate)
        train_layerwise(model, parts, training=before, steps=self.layerwise, course=course)
        chosen: list[_Chosen] = []
        for number in range(self.rounds):
            steps = self.pre // self.rounds + (number < self.pre % self.rounds)
            before.run(model, parts, "pre-train", steps=steps, course=course)
            chosen.append(self._chosen(model, data, (number + 1) / self.rounds, course))
            model = chosen[-1].model
        after = LayerTraining(self.learning_rate, self.samples, self.natural_rate, cooling=0.03)
        after.run(model, parts, "post-train", steps=self.post, course=course)
        bound = estimated_bound(model, data, generator=generator)
        return DeepFit(
            model=model,
            posterior=model.posterior(),
            selections=chosen[-1].selections,
            candidates=chosen[-1].candidates,
            bound=bound,
            given_up=sum(max(found.lost, 0.0) for found in chosen),
        )

    def _chosen(
        self, model: DeepGP, data: Dataset, share: float, course: Course[DeepProgress]
    ) -> _Chosen:
        """The model pruned, all the way to the goal's sets or a share of the way."""
        generator = course.generator
        seed = drawn_seed(generator)
        reference = seeded_bound(model, data, generator, seed=seed)
        sites = _sites(model, data, generator)
        selections = self._selections(model, sites, reference, data.observations, generator)
        candidates = tuple(layer.candidates.detach().clone() for layer in model.layers)
        masks = [_part_way(found, share) for found in selections]
        pruned = _pruned(model, data, sites, masks, generator)
        inclusion = tuple(found.inclusion for found in selections)
        course.tell_once(DeepProgress("choose", 1, 1, reference, pruned, inclusion))
        lost = reference - seeded_bound(pruned, data, generator, seed=seed)
        return _Chosen(pruned, selections, candidates, lost)

    def _selections(
        self,
        model: DeepGP,
        sites: Sequence[LayerSites],
        bound: float,
        N: int | float,
        generator: torch.Generator,
    ) -> tuple[Selection, ...]:
        """The set of each layer, and the probability of each of its candidates."""
        pairs = zip(model.layers, sites, strict=True)
        statistics = [found.statistics(layer, bound=bound, N=N) for layer, found in pairs]
        frontiers = [path_frontier(each) for each in statistics]
        alphas = self.goal.alphas(frontiers)
        here = torch.Generator().manual_seed(drawn_seed(generator))
        chosen = []
        for layer, frontier, alpha in zip(statistics, frontiers, alphas, strict=True):
            mask = _some(frontier, alpha)
            learnt = select_naturally(
                layer,
                prior=SquaredCardinality(layer.K, alpha),
                generator=here,
                start=mask,
                max_steps=self.inclusion_steps,
            )
            chosen.append(Selection(learnt.q.inclusion, mask, learnt.trace, alpha, frontier))
        return tuple(chosen)


def _sites(model: DeepGP, data: Dataset, generator: torch.Generator) -> list[LayerSites]:
    """Sites of all layers, on a part of the rows where there are very many."""
    most = min(_SITES, _NUMBERS // max(layer.P * layer.K for layer in model.layers))
    rows, total = data, None
    if most < data.N:
        rows, total = _part(data, most, generator), data.N
    samples = max(1, min(_MOST_SAMPLES, most // rows.N))
    return deep_sites(model, rows, total=total, noise=model.noise(rows.N, samples, generator))


def _some(frontier: Frontier, alpha: float) -> Tensor:
    """The frontier's best set for α, of one point at least: a layer of none learns nothing."""
    best = frontier.best_for_alpha(alpha).mask
    return best if bool(best.any()) else frontier.masks[min(1, len(frontier.masks) - 1)]


def _pruned(
    model: DeepGP,
    data: Dataset,
    sites: Sequence[LayerSites],
    masks: Sequence[Tensor],
    generator: torch.Generator,
) -> DeepGP:
    """The chosen points, with the best q(u) of their own in the last layer, and in the others
    either theirs or the marginal of all points', whichever is worth more."""
    device = data.X.device
    marginal = model.prune([mask.to(device) for mask in masks])
    improved = [s.improved(layer) for layer, s in zip(marginal.layers, sites, strict=True)]
    choices = [
        marginal.with_layers([*marginal.layers[:-1], improved[-1]]),
        marginal.with_layers(improved),
    ]
    seed = drawn_seed(generator)
    return max(choices, key=lambda choice: seeded_bound(choice, data, generator, seed=seed))


def _part(data: Dataset, count: int, generator: torch.Generator) -> Dataset:
    order = torch.randperm(data.N, generator=generator, device=data.X.device)[:count]
    return data.part(order)


def _part_way(found: Selection, share: float) -> Mask:
    """A set between all candidates and the chosen one, on the path that leads to it."""
    if share == 1 or found.frontier is None:
        return found.mask
    return found.frontier.masks[round(found.K ** (1 - share) * found.M**share)]
