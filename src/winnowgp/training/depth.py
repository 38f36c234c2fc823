"""Deep GPs compared by held-out log density after a short training: the number of layers."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from math import inf, isfinite
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from winnowgp.data import Dataset, Source
from winnowgp.errors import NotPositiveDefiniteError, TrainingError
from winnowgp.models import DeepGP, DeepPosterior, Posterior
from winnowgp.models.deep_gp import estimate_elbo
from winnowgp.training.adam import Minibatches
from winnowgp.training.callbacks import Callbacks
from winnowgp.training.checkpoint import CheckpointLog
from winnowgp.training.cross_validation import PredictiveGap
from winnowgp.training.layer_training import LayerTraining, train_layerwise
from winnowgp.training.schedules import TrainingContext, training_context

FEWEST_ROWS = 20
"""Fewest rows of which some are held out; the simplest model is preferred where there are fewer."""
# Share of the rows that are held out, their largest number, and the number predicted at once.
_SHARE, _MOST, _CHUNK = 0.1, 4096, 128


@final
@dataclass(frozen=True, slots=True)
class DepthScore:
    """A deep GP of some number of layers after a short training on a part of the rows."""

    layers: int
    elbo: float
    """ELBO in nats per observation of the rows that it was trained on; −∞ if training failed."""
    log_density: float
    """Mean log density of held-out rows, in nats per observation; −∞ if training failed."""
    gain: float = 0.0
    """Nats per observation by which `log_density` exceeds that of the model preferred before."""
    gain_error: float = 0.0
    """Standard error of the gain over held-out rows."""


def select_depth(
    starts: Sequence[DeepGP],
    data: Source,
    *,
    training: LayerTraining,
    layerwise: int,
    steps: int,
    batch_size: int | None,
    generator: torch.Generator,
    callbacks: Callbacks = (),
    checkpoint: CheckpointLog | None = None,
) -> tuple[int, tuple[DepthScore, ...]]:
    """Return the position of the best start, and the scores of all of them.

    Copies of the starts are trained on nine tenths of the rows. A later start is preferred to an
    earlier one if its log density of the others is higher by more than the standard error of the
    difference, so that layers which do not pay are not added. ELBOs are reported, and decide
    nothing: models of different depth differ in how tight they are.

    Args:
        starts: models in order of their number of layers.
        training: how they are trained.
        layerwise: number of steps that each layer is trained alone.
        steps: number of steps that all layers are then trained together.
        checkpoint: open log of the fit that this is a part of.
    """
    process_group, rows = data.process_group, data.require_dataset("a deep model")
    if rows.N < FEWEST_ROWS:
        return 0, ()
    test, train = held_out(rows, share=_SHARE, generator=generator)
    best, best_nats, scores = 0, None, []
    with training_context(
        checkpoint, generator=generator, callbacks=callbacks, process_group=process_group
    ) as context:
        for number, start in enumerate(starts):
            elbo, nats = held_out_scores(
                start,
                train,
                test,
                training=training,
                layerwise=layerwise,
                steps=steps,
                batch_size=batch_size,
                phase="depth",
                context=context,
            )
            gain, error = 0.0, 0.0
            if best_nats is not None:
                gain, error = density_gain(nats, best_nats, weights=test.weights)
            density = (test.counts @ nats / test.counts.sum()).item()
            scores.append(DepthScore(len(start.layers), elbo, density, gain, error))
            if best_nats is None or gain > error:
                best, best_nats = number, nats
    return best, tuple(scores)


def held_out(rows: Dataset, *, share: float, generator: torch.Generator) -> tuple[Dataset, Dataset]:
    """Return a random share of the rows, 4,096 at most, and the others."""
    order = torch.randperm(rows.N, generator=generator, device=rows.device)
    held = min(round(share * rows.N), _MOST)
    return rows.part(order[:held]), rows.part(order[held:])


def held_out_scores(
    start: DeepGP,
    train: Dataset,
    test: Dataset,
    *,
    training: LayerTraining,
    layerwise: int,
    steps: int,
    batch_size: int | None,
    phase: str,
    context: TrainingContext,
) -> tuple[float, Float[Tensor, " N"]]:
    """Return ELBO per observation and log density of each test row of a copy that is trained.

    Both are −∞ if training fails.

    Args:
        start: an initial model, which stays as it is.
        training: how it is trained.
        layerwise: number of steps that each layer is trained alone.
        steps: number of steps that all layers are then trained together.
    """
    model, group, generator = deepcopy(start), context.process_group, context.generator
    batches = Minibatches(train, batch_size, generator, process_group=group)
    try:
        train_layerwise(model, batches, training=training, steps=layerwise, context=context)
        training.run(model, batches, phase, steps=steps, context=context)
        elbo = estimate_elbo(model, train, generator=generator) / train.observations
        nats = log_densities(model.posterior(), test)
    except (TrainingError, NotPositiveDefiniteError):
        elbo, nats = -inf, test.Y.new_full((test.N,), -inf)
    elbo = group.broadcast_object(elbo)
    return elbo if isfinite(elbo) else -inf, group.broadcast(nats)[0]


def density_gain(
    nats: Float[Tensor, " N"],
    other: Float[Tensor, " N"],
    *,
    weights: Float[Tensor, " N"] | None = None,
) -> tuple[float, float]:
    """Return the mean difference and its standard error; a model that failed loses to any other.

    Args:
        nats: log density of each held-out row.
        other: that of another model.
        weights: weights of the rows, one by default; see `PredictiveGap`.
    """
    if not bool(torch.isfinite(nats).all() & torch.isfinite(other).all()):
        return (inf if bool(torch.isfinite(nats).all()) else -inf), 0.0
    gap = PredictiveGap.of(nats, other, weights=weights)
    return gap.nats, gap.standard_error


@torch.no_grad()
def log_densities(posterior: DeepPosterior | Posterior, rows: Dataset) -> Float[Tensor, " N"]:
    """Return the log density of each row, summed over targets."""
    pairs = zip(rows.X.split(_CHUNK), rows.Y.split(_CHUNK), strict=True)
    return torch.cat([posterior.log_density(x, y) for x, y in pairs]).sum(1)
