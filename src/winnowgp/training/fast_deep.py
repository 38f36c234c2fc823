"""The fast schedule of deep GPs: selection from sites between phases of training."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from winnowgp.data import Dataset
from winnowgp.errors import InputError
from winnowgp.models import DeepGP
from winnowgp.models.deep_gp import estimate_elbo, seeded_elbo
from winnowgp.models.deep_sites import LayerSites, deep_sites
from winnowgp.selection import Frontier, Selection, elimination_frontier
from winnowgp.training.adam import Minibatches
from winnowgp.training.callbacks import Progress, candidate_sets
from winnowgp.training.goals import Goal, natural_selection
from winnowgp.training.layer_training import LayerTraining, train_layerwise
from winnowgp.training.schedules import FitResult, TrainingContext, draw_seed
from winnowgp.typing import Mask

# Largest number of rows times samples that sites are computed at, and of numbers in one pass.
_SITES, _NUMBERS = 65_536, 2**26

_MOST_SAMPLES = 16


@final
@dataclass(frozen=True, slots=True)
class DeepTraining:
    """Settings by which the fast schedule trains a deep GP."""

    layerwise: int = 100
    """Number of steps that each layer is trained alone first, as in `train_layerwise`."""
    pre: int = 1000
    """Number of steps with all candidates, divided among the rounds of selection."""
    post: int = 1000
    """Number of steps after the last selection, with a decreasing learning rate."""
    learning_rate: float = 0.03
    natural_rate: float = 0.3
    """Rate of the natural-gradient steps on the last layer's q(u)."""
    samples: int = 1
    """Number of samples propagated for each row in each step."""
    batch_size: int | None = None
    """Number of rows in each step; all if None. Processes that share the data use a part each."""

    def __post_init__(self) -> None:
        if min(self.layerwise, self.pre, self.post) < 0 or self.samples < 1:
            raise InputError(
                "`layerwise`, `pre` and `post` must be zero or more steps and `samples` at least "
                f"one; got {self.layerwise}, {self.pre}, {self.post} and {self.samples}."
            )
        if self.batch_size is not None and self.batch_size < 1:
            raise InputError(f"`batch_size` must be at least 1; got {self.batch_size}.")


def fit_deep(
    model: DeepGP,
    data: Dataset,
    *,
    goal: Goal,
    rounds: int,
    training: DeepTraining,
    inclusion_steps: int,
    context: TrainingContext,
) -> FitResult[DeepGP]:
    """Select the inducing points of all layers from one pass of sites, in a few rounds.

    1. All candidates: each layer alone, then all of them by Adam, with natural gradients for the
       last layer's q(u).
    2. Every layer as regression on its sites (`models.deep_sites`): backward elimination gives its
       frontier, the goal a strength α for each layer, α the selected set of the layer.
    3. The selected points, trained further with a decreasing learning rate.

    Args:
        rounds: number of rounds in which points are removed, each after a share of `training.pre`.
        inclusion_steps: largest number of subsets drawn to learn inclusion probabilities.
    """
    generator = context.generator
    batches = Minibatches(data, training.batch_size, generator, process_group=context.process_group)
    before = LayerTraining(training.learning_rate, training.samples, training.natural_rate)
    train_layerwise(model, batches, training=before, steps=training.layerwise, context=context)
    selected: list[_Selected] = []
    for number in range(rounds):
        steps = training.pre // rounds + (number < training.pre % rounds)
        before.run(model, batches, "pre-train", steps=steps, context=context)
        share = (number + 1) / rounds
        selected.append(_select(model, data, goal, share, inclusion_steps, context))
        model = selected[-1].model
    after = LayerTraining(
        training.learning_rate, training.samples, training.natural_rate, cooling=0.03
    )
    after.run(model, batches, "post-train", steps=training.post, context=context)
    elbo = estimate_elbo(model, data, generator=generator)
    return FitResult(
        model=model,
        posterior=model.posterior(),
        selections=selected[-1].selections,
        candidates=selected[-1].candidates,
        elbo=elbo,
        elbo_gap=sum(max(each.gap, 0.0) for each in selected),
    )


@dataclass(frozen=True, slots=True)
class _Selected:
    """A model after a selection, and what the selection was made from."""

    model: DeepGP
    selections: tuple[Selection, ...]
    candidates: tuple[Tensor, ...]
    gap: float
    """Nats that the selection cost, with the same samples before and after."""


def _select(
    model: DeepGP,
    data: Dataset,
    goal: Goal,
    share: float,
    inclusion_steps: int,
    context: TrainingContext,
) -> _Selected:
    """Prune the model to the goal's sets, or a share of the way towards them."""
    generator = context.generator
    seed = draw_seed(generator)
    reference = seeded_elbo(model, data, generator, seed=seed)
    sites = _sites(model, data, generator)
    pairs = zip(model.layers, sites, strict=True)
    statistics = [
        each.statistics(layer, bound=reference, N=data.observations) for layer, each in pairs
    ]
    frontiers = [elimination_frontier(each) for each in statistics]
    alphas = goal.alphas(frontiers)
    seeded = torch.Generator().manual_seed(draw_seed(generator))
    selections = tuple(
        natural_selection(
            each,
            frontier,
            _nonempty(frontier, alpha),
            alpha=alpha,
            generator=seeded,
            max_steps=inclusion_steps,
        )
        for each, frontier, alpha in zip(statistics, frontiers, alphas, strict=True)
    )
    candidates = candidate_sets(model)
    masks = [_part_way(selection, share) for selection in selections]
    pruned = _pruned(model, data, sites, masks, generator)
    inclusion = tuple(selection.inclusion for selection in selections)
    context.notify_once(Progress.of(pruned, "selection", 1, 1, reference, inclusion))
    gap = reference - seeded_elbo(pruned, data, generator, seed=seed)
    return _Selected(pruned, selections, candidates, gap)


def _sites(model: DeepGP, data: Dataset, generator: torch.Generator) -> list[LayerSites]:
    """Return the sites of all layers, on a random part of the rows where there are very many."""
    most = min(_SITES, _NUMBERS // max(layer.P * layer.K for layer in model.layers))
    rows, total = data, None
    if most < data.N:
        order = torch.randperm(data.N, generator=generator, device=data.X.device)
        rows, total = data.part(order[:most]), data.N
    samples = max(1, min(_MOST_SAMPLES, most // rows.N))
    return deep_sites(model, rows, total=total, eps=model.base_samples(rows.N, samples, generator))


def _nonempty(frontier: Frontier, alpha: float) -> Mask:
    """Return the frontier's best set for α with at least one point; no layer may be empty."""
    best = frontier.best_for_alpha(alpha).mask
    return best if bool(best.any()) else frontier.masks[min(1, len(frontier.masks) - 1)]


def _pruned(
    model: DeepGP,
    data: Dataset,
    sites: Sequence[LayerSites],
    masks: Sequence[Tensor],
    generator: torch.Generator,
) -> DeepGP:
    """Return the pruned model, with the q(u) of each layer that gives the higher ELBO.

    The last layer has the best q(u) of its own points. The others have either that, or the marginal
    of the q(u) of all points.
    """
    device = data.X.device
    marginal = model.prune([mask.to(device) for mask in masks])
    improved = [each.improved(layer) for layer, each in zip(marginal.layers, sites, strict=True)]
    choices = [
        marginal.with_layers([*marginal.layers[:-1], improved[-1]]),
        marginal.with_layers(improved),
    ]
    seed = draw_seed(generator)
    return max(choices, key=lambda choice: seeded_elbo(choice, data, generator, seed=seed))


def _part_way(selection: Selection, share: float) -> Mask:
    """Return a set between all candidates and the selected one, on the path between them."""
    if share == 1 or selection.frontier is None:
        return selection.mask
    return selection.frontier.masks[round(selection.K ** (1 - share) * selection.M**share)]
