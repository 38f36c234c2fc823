"""The fast schedule of deep GPs: selection from sites between phases of training."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from math import inf
from typing import final

import torch
from torch import Tensor

from winnowgp.data import Dataset
from winnowgp.errors import InputError
from winnowgp.models import DeepGP, greedy_variance
from winnowgp.models.deep_gp import estimate_elbo, prediction_cost, prediction_prices, seeded_elbo
from winnowgp.models.deep_sites import LayerSites, deep_sites
from winnowgp.selection import Frontier, SubsetStatistics, elimination_frontier
from winnowgp.selection.frontier import MIN_ALPHA, Selection
from winnowgp.training.adam import Minibatches
from winnowgp.training.callbacks import SMALLER_MODEL, Progress, candidate_sets
from winnowgp.training.goals import (
    FixedAlpha,
    Goal,
    MaxCost,
    MaxPredictTime,
    Tolerance,
    natural_selection,
)
from winnowgp.training.layer_training import LayerTraining, train_layerwise
from winnowgp.training.schedules import FitResult, SizedDeepModel, TrainingContext, draw_seed
from winnowgp.typing import Mask

# Largest number of rows times samples that sites are computed at, and of numbers in one pass.
_SITES, _NUMBERS = 65_536, 2**26

_MOST_SAMPLES = 16
# Factor that the learning rates decrease to at the end of a phase.
_COOLING = 0.03
# Rows among whose propagated values further candidates are selected.
_GROWTH_ROWS = 4096
# Predicted ELBO gap of the first round relative to the tolerance, and the factor by which it
# decreases after a round that missed the tolerance.
_EXCESS, _LESS = 2.0, 0.25
# Number of times that layers are priced at the sizes of the time before.
_PRICINGS = 3
# Factor of the ELBO gap from one of the smaller models to the next.
_SMALLER = 4.0


@final
@dataclass(frozen=True, slots=True)
class DeepTraining:
    """Settings by which the fast schedule trains a deep GP."""

    layerwise: int = 100
    """Number of steps that each layer is trained alone first, as in `train_layerwise`."""
    pre: int = 1000
    """Number of steps with all candidates: before selection with a `Tolerance`, otherwise divided
    among the rounds of selection."""
    post: int = 1000
    """Number of steps with the selected points, divided among the rounds with a `Tolerance`."""
    learning_rate: float = 0.03
    natural_rate: float = 0.3
    """Rate of the natural-gradient steps on the last layer's q(u)."""
    hidden_rate: float | None = None
    """Rate of natural-gradient steps on the covariances of hidden layers, such as 0.1; None leaves
    them to Adam. They raise the ELBO after as many steps, but not the density of new rows."""
    samples: int = 1
    """Number of samples propagated for each row in each step."""
    batch_size: int | None = None
    """Number of rows in each step; all if None. Processes that share the data use a part each."""
    most_repeats: int = 0
    """With a `Tolerance`, largest number of times that the `pre` steps are repeated, as long as
    that gains more than the tolerance."""
    predict_samples: int | None = None
    """Number of samples of a prediction. If given, a `Tolerance` and `MaxPredictTime` weight the
    points of each layer by the time that they add to a prediction (`prediction_prices`)."""
    max_candidates: int | None = None
    """With a `Tolerance`, layers get twice as many candidates, up to this number, as long as that
    gains more than the tolerance; None keeps the candidates of the model."""
    smaller_models: int = 0
    """With a `Tolerance`, number of smaller models that are trained after the selected one, each
    for `post` steps and with four times the gap of the one before; `FitResult.allocations` has
    them."""

    def __post_init__(self) -> None:
        counts = self.layerwise, self.pre, self.post, self.most_repeats, self.smaller_models
        if min(counts) < 0 or self.samples < 1:
            raise InputError(
                "`layerwise`, `pre`, `post`, `most_repeats` and `smaller_models` must be zero or "
                f"more, and `samples` at least one; got {counts} and {self.samples}."
            )
        if self.batch_size is not None and self.batch_size < 1:
            raise InputError(f"`batch_size` must be at least 1; got {self.batch_size}.")

    def layer_training(self, *, cooling: float = 1.0) -> LayerTraining:
        """Return how all layers are trained."""
        return LayerTraining(
            self.learning_rate, self.samples, self.natural_rate, self.hidden_rate, cooling=cooling
        )


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
    """Select the inducing points of all layers from sites, in a few rounds.

    1. All candidates: each layer alone, then all of them by Adam, with natural gradients for q(u).
    2. Every layer as regression on its sites (`models.deep_sites`): backward elimination gives its
       frontier, the goal a strength α for each layer, α the selected set of the layer.
    3. The selected points, trained further with a decreasing learning rate.

    With a `Tolerance`, steps 2 and 3 are repeated: a smaller model replaces the larger one only if
    its ELBO, after training, is within the tolerance of the best model seen. Otherwise its points
    come back, and fewer are removed in the next round.

    Args:
        rounds: number of rounds in which points are removed.
        inclusion_steps: largest number of subsets drawn to learn inclusion probabilities.
    """
    steps = _DeepSteps(data, training, rounds, inclusion_steps, context)
    train_layerwise(
        model,
        steps.batches,
        training=steps.constant,
        steps=training.layerwise,
        context=context,
    )
    limit = goal.limit if isinstance(goal, Tolerance) else goal
    if isinstance(goal, Tolerance) and training.max_candidates is None and _allows(limit, model):
        limit = None
    pruned = None if limit is None else steps.pruned_in_rounds(model, limit)
    if not isinstance(goal, Tolerance):
        assert pruned is not None
        steps.train(pruned.model, "post-train", training.post)
        elbo = estimate_elbo(pruned.model, data, generator=context.generator)
        return steps.result(pruned, elbo, pruned.gap)
    if pruned is None:
        steps.train(model, "pre-train", training.pre)
        fitted = steps.converged(steps.fitted(model, None), tolerance=goal.nats)
        fitted = steps.grown(fitted, tolerance=goal.nats)
    else:
        steps.train(pruned.model, "post-train", training.post)
        fitted = steps.fitted(pruned.model, pruned)
    return steps.within(replace(goal, limit=None), fitted)


def _allows(limit: Goal | None, model: DeepGP) -> bool:
    """Return whether a limit allows all candidates, so that it changes nothing."""
    if isinstance(limit, MaxCost):
        return sum(M**2 for M in model.sizes) <= limit.cost
    if isinstance(limit, MaxPredictTime):
        return limit.predict_us(tuple(model.sizes)) <= limit.microseconds
    return False


@dataclass(frozen=True, slots=True)
class _Fitted:
    """A trained model, its ELBO, and the selection that it is the result of, if there was one."""

    model: DeepGP
    elbo: float
    selected: "_Selected | None"


@final
class _DeepSteps:
    """The steps of `fit_deep`."""

    def __init__(
        self,
        data: Dataset,
        training: DeepTraining,
        rounds: int,
        inclusion_steps: int,
        context: TrainingContext,
    ) -> None:
        self.data, self.training, self.rounds = data, training, rounds
        self.inclusion_steps, self.context = inclusion_steps, context
        self.batches = Minibatches(
            data, training.batch_size, context.generator, process_group=context.process_group
        )
        self.constant = training.layer_training()
        # All models are compared on the same samples.
        self.seed = draw_seed(context.generator)
        self.trained: list[_Fitted] = []

    def train(self, model: DeepGP, phase: str, steps: int) -> None:
        """Train with a learning rate that decreases over the last third of the steps."""
        cooled = self.training.layer_training(cooling=_COOLING)
        cooled.run(model, self.batches, phase, steps=steps, context=self.context)

    def fitted(self, model: DeepGP, selected: "_Selected | None") -> _Fitted:
        """Return a trained model with its ELBO of all rows, of the same samples for every model."""
        elbo = seeded_elbo(model, self.data, self.context.generator, seed=self.seed)
        self.trained.append(_Fitted(model, elbo, selected))
        return self.trained[-1]

    def pruned_in_rounds(self, model: DeepGP, goal: Goal) -> "_Selected":
        """Train the candidates and remove a share of them, in every round."""
        training, gap, selected = self.training, 0.0, None
        for number in range(self.rounds):
            steps = training.pre // self.rounds + (number < training.pre % self.rounds)
            self.constant.run(model, self.batches, "pre-train", steps=steps, context=self.context)
            selected = self.select(model, goal, share=(number + 1) / self.rounds)
            model, gap = selected.model, gap + max(selected.gap, 0.0)
        assert selected is not None
        return replace(selected, gap=gap)

    def converged(self, fitted: _Fitted, *, tolerance: float) -> _Fitted:
        """Repeat the training of all candidates as long as that gains more than a tolerance."""
        for _ in range(self.training.most_repeats):
            before, longer = fitted, deepcopy(fitted.model)
            self.train(longer, "pre-train", self.training.pre)
            fitted = max(before, self.fitted(longer, None), key=lambda each: each.elbo)
            if fitted.elbo - before.elbo <= tolerance * self.data.observations:
                break
        return fitted

    def grown(self, fitted: _Fitted, *, tolerance: float) -> _Fitted:
        """Double the candidates of every layer for as long as that gains more than a tolerance."""
        most = min(self.training.max_candidates or 0, self.data.N)
        while max(fitted.model.sizes) < most:
            larger = grow_candidates(fitted.model, self.data, most, self.context.generator)
            if larger.sizes == fitted.model.sizes:
                # All inputs are represented already.
                break
            self.train(larger, "more candidates", self.training.pre)
            before = fitted
            fitted = max(fitted, self.fitted(larger, None), key=lambda each: each.elbo)
            if fitted.elbo - before.elbo <= tolerance * self.data.observations:
                break
        return fitted

    def within(self, goal: Tolerance, fitted: _Fitted) -> FitResult[DeepGP]:
        """Remove points as long as the ELBO after training is within the tolerance of the best."""
        N, best, excess = self.data.observations, fitted.elbo, _EXCESS
        nothing = FixedAlpha(MIN_ALPHA)
        for number in range(self.rounds):
            slack = fitted.elbo - best + goal.nats * N
            if slack <= 0:
                break
            # Training regains a part of what pruning costs.
            selected = self.select(fitted.model, replace(goal, nats=excess * slack / N))
            if selected.model.sizes == fitted.model.sizes:
                break
            steps = self.training.post // self.rounds + (number < self.training.post % self.rounds)
            self.train(selected.model, "post-train", steps)
            smaller = self.fitted(selected.model, selected)
            best = max(best, smaller.elbo)
            if smaller.elbo >= best - goal.nats * N:
                fitted = smaller
            else:
                excess *= _LESS
        if fitted.selected is None:
            # Points without any effect are all that may be removed without further training.
            selected = self.select(fitted.model, nothing)
            fitted = self.fitted(selected.model, selected)
        self.train_smaller(fitted, goal, best)
        best = max(each.elbo for each in self.trained)
        within = [
            each
            for each in self.trained
            if each.selected is not None and each.elbo >= best - goal.nats * N
        ]
        fitted = min(within, key=self.cost, default=fitted)
        assert fitted.selected is not None
        result = self.result(fitted.selected, fitted.elbo, best - fitted.elbo)
        return replace(result, allocations=self.allocations(fitted))

    def train_smaller(self, fitted: _Fitted, goal: Tolerance, best: float) -> None:
        """Train smaller models, each with a larger gap."""
        N, gap = self.data.observations, goal.nats
        for _ in range(self.training.smaller_models):
            gap *= _SMALLER
            slack = max(fitted.elbo - best + gap * N, goal.nats * N)
            selected = self.select(fitted.model, replace(goal, nats=_EXCESS * slack / N))
            if selected.model.sizes == fitted.model.sizes:
                return
            # With a third of the steps small models ended below as many random rows after as many
            # updates in all.
            self.train(selected.model, SMALLER_MODEL, self.training.post)
            fitted = self.fitted(selected.model, selected)

    def result(self, selected: "_Selected", elbo: float, gap: float) -> FitResult[DeepGP]:
        """Return the result of the fit, with inclusion probabilities of its last selection."""
        generator = torch.Generator().manual_seed(draw_seed(self.context.generator))
        selections = [
            layer.learnt(generator, max_steps=self.inclusion_steps) for layer in selected.layers
        ]
        return FitResult(
            model=selected.model,
            posterior=selected.model.posterior(),
            selections=tuple(selections),
            candidates=selected.candidates,
            elbo=elbo,
            elbo_gap=gap,
        )

    def alphas(self, model: DeepGP, goal: Goal, frontiers: Sequence[Frontier]) -> tuple[float, ...]:
        """Return the α of every layer that the goal gives, with prices at the selected sizes."""
        samples = self.training.predict_samples
        if samples is None:
            return goal.alphas(frontiers)
        alphas, sizes = (), list(model.sizes)
        for _ in range(_PRICINGS):
            prices = prediction_prices(model.layers, sizes, samples=samples)
            alphas = goal.alphas(frontiers, prices)
            pairs = zip(frontiers, alphas, strict=True)
            sizes = [int(_nonempty(frontier, alpha).sum()) for frontier, alpha in pairs]
        return alphas

    def cost(self, fitted: _Fitted) -> tuple[float, float]:
        """Return the cost of a prediction; of equal costs, the higher ELBO is less."""
        samples = self.training.predict_samples or 1
        return prediction_cost(fitted.model.layers, samples=samples), -fitted.elbo

    def allocations(self, chosen: _Fitted) -> tuple[SizedDeepModel, ...]:
        """Return the other trained models that no quicker one has the ELBO of, quickest first."""
        frontier, highest = list[_Fitted](), -inf
        for each in sorted(self.trained, key=self.cost):
            if each.elbo > highest or each is chosen:
                frontier.append(each)
            highest = max(highest, each.elbo)
        others = [each for each in frontier if each.model.sizes != chosen.model.sizes]
        return tuple(SizedDeepModel(each.model.posterior(), each.elbo) for each in others)

    def select(self, model: DeepGP, goal: Goal, *, share: float = 1.0) -> "_Selected":
        """Prune the model to the goal's sets, or a share of the way towards them."""
        data, generator = self.data, self.context.generator
        seed = draw_seed(generator)
        reference = seeded_elbo(model, data, generator, seed=seed)
        sites = _sites(model, data, generator)
        statistics = [
            each.statistics(layer, bound=reference, N=data.observations)
            for layer, each in zip(model.layers, sites, strict=True)
        ]
        frontiers = [elimination_frontier(each) for each in statistics]
        layers = [
            _LayerSelection(each, frontier, _nonempty(frontier, alpha), alpha)
            for each, frontier, alpha in zip(
                statistics, frontiers, self.alphas(model, goal, frontiers), strict=True
            )
        ]
        masks = [layer.part_way(share) for layer in layers]
        pruned = pruned_model(model, data, sites, masks, generator)
        selected = tuple(mask.double() for mask in masks)
        self.context.notify_once(Progress.of(pruned, "selection", 1, 1, reference, selected))
        gap = reference - seeded_elbo(pruned, data, generator, seed=seed)
        return _Selected(pruned, layers, candidate_sets(model), gap)


@dataclass(frozen=True, slots=True)
class _LayerSelection:
    """The set that one layer keeps, and what it was selected from."""

    statistics: SubsetStatistics
    frontier: Frontier
    mask: Mask
    alpha: float

    def part_way(self, share: float) -> Mask:
        """Return a set between all candidates and the selected one, on the path between them."""
        if share == 1:
            return self.mask
        size = self.statistics.K ** (1 - share) * int(self.mask.sum()) ** share
        return self.frontier.masks[round(size)]

    def learnt(self, generator: torch.Generator, *, max_steps: int) -> Selection:
        """Return the selection with its inclusion probabilities, which take longer than it."""
        return natural_selection(
            self.statistics,
            self.frontier,
            self.mask,
            alpha=self.alpha,
            generator=generator,
            max_steps=max_steps,
        )


@dataclass(frozen=True, slots=True)
class _Selected:
    """A model after a selection, and what the selection was made from."""

    model: DeepGP
    layers: Sequence[_LayerSelection]
    candidates: tuple[Tensor, ...]
    gap: float
    """Nats that the selection cost, with the same samples before and after."""


@torch.no_grad()
def grow_candidates(model: DeepGP, data: Dataset, most: int, generator: torch.Generator) -> DeepGP:
    """Return the model with up to twice as many candidates in each layer, and the same q(f).

    The new ones are inputs of the layer whose variance given the others is largest.

    Args:
        most: largest number of candidates of a layer.
    """
    order = torch.randperm(data.N, generator=generator, device=data.X.device)[:_GROWTH_ROWS]
    rows = data.part(order)
    eps = model.base_samples(rows.N, 1, generator)
    inputs = model.evaluated(rows, eps=eps).passed.inputs
    layers = []
    for layer, each in zip(model.layers, inputs, strict=True):
        count = max(min(layer.K, most - layer.K), 0)
        new = greedy_variance(layer.kernel, each[0], count, given=layer.candidates.detach())
        layers.append(layer.grown(each[0][new]))
    return model.with_layers(layers)


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


def pruned_model(
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
