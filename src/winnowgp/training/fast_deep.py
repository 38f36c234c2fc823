"""The fast schedule of deep GPs."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import final

import torch
from gpytorch.likelihoods import GaussianLikelihood, SoftmaxLikelihood
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import one_hot

from winnowgp.data import Dataset, Source
from winnowgp.errors import InputError, NotPositiveDefiniteError, TrainingError
from winnowgp.models import DeepGP, DeepLayer
from winnowgp.models.deep_gp import DeepEvaluation
from winnowgp.models.deep_layer import layer_inputs, linear_map
from winnowgp.models.deep_sites import LayerSites, deep_sites, layer_sites
from winnowgp.point_processes import SquaredCardinality
from winnowgp.selection import Frontier, Selection, path_frontier, select_naturally
from winnowgp.training.adam import Adam, Parts
from winnowgp.training.checkpoint import Checkpoint, described
from winnowgp.training.context import TrainingContext, training_context
from winnowgp.training.goals import LayerGoal, SharedTolerance
from winnowgp.training.schedules import (
    DeepFit,
    DeepProgress,
    DeepSchedule,
    OnDeepProgress,
    deep_silent,
    drawn_seed,
    estimated_bound,
    seeded_bound,
)
from winnowgp.typing import Mask, Scalar

# Training all layers of a deep model at once: Adam, and natural gradients in the last layer.


# Times that a natural step is shortened before it is not taken.
_SHORTENED = 5
# Nats a row below the running average.
_DEEPEST = 1.0


@final
@dataclass(frozen=True, slots=True)
class LayerTraining:
    """Steps on the ordinary bound with every point the model has.

    The last layer's q(u) can follow the natural gradient instead of Adam's, whole steps of which
    are exact for Gaussian noise given the layers below (Salimbeni et al. 2018). It reuses the
    gradients of the pass that the others need; the last layer's kernel is evaluated once more.
    """

    learning_rate: float
    samples: int = 1
    """Propagated for each row at each step."""
    natural_rate: float | None = None
    """Of the last layer's q(u); None leaves it to Adam."""
    cooling: float = 1.0
    """What share the learning rate falls to over the last third of the steps."""
    longest: float = 2.0
    """Times the running average of its length that a gradient may be; see `Adam`."""

    def run(
        self,
        model: DeepGP,
        parts: Parts,
        phase: str,
        *,
        steps: int,
        context: TrainingContext[DeepProgress],
    ) -> None:
        """Take `steps` steps."""
        last = model.layers[-1]
        chosen = [p for p in model.parameters() if p.requires_grad]
        others = [p for p in chosen if p is not last.q_mean and p is not last.q_factor]
        # Steps are Adam's: where it has nothing else to learn, q(u) is left to it.
        natural = self.natural_rate if 0 < len(others) == len(chosen) - 2 else None
        if natural is not None:
            chosen = others
        latest: list[tuple[Dataset, DeepEvaluation]] = []

        def objective() -> Scalar:
            rows = parts.next()
            noise = parts.own(model.noise(parts.rows, self.samples, context.generator))

            def bound() -> Scalar:
                found = model.evaluated(rows, total=parts.total, noise=noise)
                if natural is not None:
                    found.passed.last.mean.retain_grad()
                    found.passed.last.variance.retain_grad()
                    latest[:] = [(rows, found)]
                return found.bound

            return parts.together(bound)

        def on_step(step: int, value: float) -> None:
            if natural is not None:
                _improve(model, parts, *latest[0], rate=max(natural, 1 / step))
            context.on_progress(DeepProgress(phase, step, steps, value, model, None))

        Adam(steps, cooling=self.cooling, longest=self.longest, deepest=_DEEPEST).maximise(
            objective,
            [(chosen, self.learning_rate)],
            scale=parts.scale,
            on_step=on_step,
            checkpoint_log=context.checkpoint_log,
            memory={"parts": parts, "last layer": last},
            process_group=parts.process_group,
        )


@torch.no_grad()
def _improve(
    model: DeepGP, parts: Parts, rows: Dataset, found: DeepEvaluation, *, rate: float
) -> None:
    """A natural-gradient step on the last layer's q(u), from gradients of −bound / scale.

    Where noise is not Gaussian a whole step can lead far away: it is shortened until it gains.
    """
    last, top, process_group = model.layers[-1], found.passed.last, parts.process_group
    # Processes add up their sites, of which each has taken its rows for the whole minibatch.
    scale = parts.scale / process_group.world_size
    slope, curvature = top.mean.grad, top.variance.grad
    assert slope is not None
    assert curvature is not None
    precision = (2 * scale * curvature).clamp_min(0)
    inputs = found.passed.inputs[-1]
    sites = layer_sites(last, inputs, top.mean, -scale * slope, precision)
    old = last.q_mean.clone(), last.q_factor.clone()
    certain = isinstance(model.likelihood, GaussianLikelihood)
    before = 0.0 if certain else parts.together(lambda: found.fit - last.points().kl())

    def worth() -> Scalar:
        return parts.together(lambda: model.last_bound(rows, inputs, total=parts.total))

    for _ in range(_SHORTENED):
        try:
            _set(
                last,
                *process_group.broadcast(
                    *sites.natural_step(last, rate=rate, process_group=process_group)
                ),
            )
            if certain or worth() >= before:
                return
        except NotPositiveDefiniteError:
            # Like any step that cannot be computed: not taken.
            pass
        _set(last, *old)
        rate *= 0.25


def _set(layer: DeepLayer, q_mean: Tensor, q_factor: Tensor) -> None:
    layer.q_mean.copy_(q_mean)
    layer.q_factor.copy_(q_factor)


# Layers trained one after another, each as a shallow model, before all are trained together.


Place = Callable[[Float[Tensor, "N D"], int, torch.Generator], Float[Tensor, "J D"]]

"""Where so many points of a layer begin, given what the layer sees; J is that number or less."""


@torch.no_grad()
def random_rows(
    inputs: Float[Tensor, "N D"], count: int, generator: torch.Generator
) -> Float[Tensor, "J D"]:
    """Different rows, as far as there are so many."""
    order = torch.randperm(len(inputs), generator=generator, device=inputs.device)
    return inputs[order[:count]]


def train_layerwise(
    model: DeepGP,
    parts: Parts,
    *,
    training: LayerTraining,
    steps: int,
    context: TrainingContext[DeepProgress],
    place: Place = random_rows,
) -> None:
    """Train the layers in order, each for `steps` steps on the mean outputs of those before it.

    The last layer learns the targets. So does a hidden one without a linear map of its own, by
    regression (one column for each class), and with outputs to spare the principal components of
    its inputs: the next layer then begins with something that the targets depend on. A hidden layer
    around the identity begins with that already, and is left as it is. No steps change nothing.

    Args:
        parts: of the rows that all layers are to learn.
        place: where candidates of each layer after the first begin, unless frozen.
    """
    if steps == 0:
        return
    data, layers = parts.data, model.layers
    inputs = data.X
    for number, layer in enumerate(layers, start=1):
        last = number == len(layers)
        if last or not bool(layer.slope.any()):
            likelihood = model.likelihood if last else GaussianLikelihood()
            Y = data.Y if last else _hidden_targets(data, inputs, layer.P, model)
            alone = DeepGP([layer], likelihood=likelihood, targets=Y.shape[1])
            seen = parts.alike(Dataset(inputs, Y, data.weights))
            training.run(alone, seen, f"layer {number}", steps=steps, context=context)
            layer.load_state_dict(alone.layers[0].state_dict())
            if last:
                model.likelihood.load_state_dict(alone.likelihood.state_dict())
        if not last:
            inputs = layer_inputs(
                _mean(layer, inputs), data.X, skip_connections=model.skip_connections
            )
            if layers[number].candidates.requires_grad:
                _put(layers[number], place(inputs, layers[number].K, context.generator))


def _hidden_targets(
    data: Dataset, inputs: Float[Tensor, "N D"], width: int, model: DeepGP
) -> Float[Tensor, "N P"]:
    Y = data.Y
    if isinstance(model.likelihood, SoftmaxLikelihood):
        Y = one_hot(Y[:, 0].long(), model.likelihood.num_classes).to(Y)
    Y = (Y - Y.mean(0)) / Y.std(0, correction=0).clamp_min(1e-12)
    spare = max(width - Y.shape[1], 0)
    return torch.cat([Y[:, :width], inputs @ linear_map(inputs, spare)], dim=1)


@torch.no_grad()
def _mean(layer: DeepLayer, inputs: Float[Tensor, "N D"]) -> Float[Tensor, "N P"]:
    points = layer.points()
    return torch.cat([layer.marginals(rows, points).mean for rows in inputs.split(4096)])


@torch.no_grad()
def _put(layer: DeepLayer, places: Float[Tensor, "J D"]) -> None:
    layer.candidates[: len(places)].copy_(places)


# Several starts of a deep model, and the one that leads after a short run.


def deep_race(
    starts: Sequence[DeepGP],
    data: Source,
    *,
    layerwise: int,
    steps: int,
    samples: int = 1,
    batch_size: int | None,
    generator: torch.Generator,
    on_progress: OnDeepProgress = deep_silent,
    checkpoint: Checkpoint | None = None,
) -> DeepGP:
    """The start, as it was given, whose copy has the highest bound after a short training.

    Deep bounds have many optima, and where hidden functions begin decides which is reached: around
    the identity on tables of many columns, from layers trained on the targets where a function of
    few inputs jumps (a square wave: by 150 nats).

    Args:
        data: rows in memory; processes that share them look at a part of each minibatch.
    """
    process_group, rows = data.process_group, data.in_memory("a deep model")
    training = LayerTraining(0.03, samples, natural_rate=0.3)

    def raced(start: DeepGP, context: TrainingContext[DeepProgress]) -> float:
        model, parts = (
            deepcopy(start),
            Parts(rows, batch_size, generator, process_group=process_group),
        )
        try:
            train_layerwise(model, parts, training=training, steps=layerwise, context=context)
            training.run(model, parts, "race", steps=steps, context=context)
            bound = estimated_bound(model, rows, generator=generator)
        except (TrainingError, NotPositiveDefiniteError):
            # What the last step of a phase leads to has not been looked at before.
            bound = -inf
        bound = process_group.broadcast_object(bound)
        return bound if isfinite(bound) else -inf

    with training_context(
        checkpoint,
        "race",
        generator=generator,
        on_progress=on_progress,
        process_group=process_group,
        inputs=rows.X,
        targets=rows.Y,
        weights=rows.weights,
        starts=[described(start) for start in starts],
        steps=(layerwise, steps, samples, batch_size),
    ) as context:
        return max(starts, key=lambda start: raced(start, context))


# The default schedule for deep models: train, eliminate layer by layer, train the rest.


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

    def run(
        self, model: DeepGP, data: Dataset, *, context: TrainingContext[DeepProgress]
    ) -> DeepFit:
        generator = context.generator
        parts = Parts(data, self.batch_size, generator, process_group=context.process_group)
        before = LayerTraining(self.learning_rate, self.samples, self.natural_rate)
        train_layerwise(model, parts, training=before, steps=self.layerwise, context=context)
        chosen: list[_Chosen] = []
        for number in range(self.rounds):
            steps = self.pre // self.rounds + (number < self.pre % self.rounds)
            before.run(model, parts, "pre-train", steps=steps, context=context)
            chosen.append(self._chosen(model, data, (number + 1) / self.rounds, context))
            model = chosen[-1].model
        after = LayerTraining(self.learning_rate, self.samples, self.natural_rate, cooling=0.03)
        after.run(model, parts, "post-train", steps=self.post, context=context)
        bound = estimated_bound(model, data, generator=generator)
        return DeepFit(
            model=model,
            posterior=model.posterior(),
            selections=chosen[-1].selections,
            candidates=chosen[-1].candidates,
            bound=bound,
            elbo_gap=sum(max(found.lost, 0.0) for found in chosen),
        )

    def _chosen(
        self, model: DeepGP, data: Dataset, share: float, context: TrainingContext[DeepProgress]
    ) -> _Chosen:
        """The model pruned, all the way to the goal's sets or a share of the way."""
        generator = context.generator
        seed = drawn_seed(generator)
        reference = seeded_bound(model, data, generator, seed=seed)
        sites = _sites(model, data, generator)
        selections = self._selections(model, sites, reference, data.observations, generator)
        candidates = tuple(layer.candidates.detach().clone() for layer in model.layers)
        masks = [_part_way(found, share) for found in selections]
        pruned = _pruned(model, data, sites, masks, generator)
        inclusion = tuple(found.inclusion for found in selections)
        context.notify_once(DeepProgress("choose", 1, 1, reference, pruned, inclusion))
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
