"""The number of layers of a deep GP, by held-out log density after a short training."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from math import inf, isfinite, sqrt
from typing import final

import torch
from torch import Tensor

from winnowgp.data import Dataset, Source
from winnowgp.errors import NotPositiveDefiniteError, TrainingError
from winnowgp.models import DeepGP
from winnowgp.models.deep_gp import estimate_elbo
from winnowgp.training.adam import Minibatches
from winnowgp.training.callbacks import Callbacks
from winnowgp.training.checkpoint import CheckpointLog
from winnowgp.training.layer_training import LayerTraining, train_layerwise
from winnowgp.training.schedules import TrainingContext, training_context

# Fewest rows of which some are held out; the first start is preferred where there are fewer.
_FEWEST = 20
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
    """Nats per observation by which this exceeds the one that was preferred before it."""
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
    if rows.N < _FEWEST:
        return 0, ()
    order = torch.randperm(rows.N, generator=generator, device=rows.device)
    held = min(round(_SHARE * rows.N), _MOST)
    test, train = rows.part(order[:held]), rows.part(order[held:])

    def trained(start: DeepGP, context: TrainingContext) -> tuple[float, Tensor]:
        model = deepcopy(start)
        batches = Minibatches(train, batch_size, generator, process_group=process_group)
        try:
            train_layerwise(model, batches, training=training, steps=layerwise, context=context)
            training.run(model, batches, "depth", steps=steps, context=context)
            elbo = estimate_elbo(model, train, generator=generator) / train.observations
            nats = _log_density(model, test)
        except (TrainingError, NotPositiveDefiniteError):
            elbo, nats = -inf, test.Y.new_full((test.N,), -inf)
        elbo = process_group.broadcast_object(elbo)
        return elbo if isfinite(elbo) else -inf, process_group.broadcast(nats)[0]

    best, best_nats, scores = 0, None, []
    with training_context(
        checkpoint, generator=generator, callbacks=callbacks, process_group=process_group
    ) as context:
        for number, start in enumerate(starts):
            elbo, nats = trained(start, context)
            gain, error = (0.0, 0.0) if best_nats is None else _gain(nats, best_nats)
            scores.append(DepthScore(len(start.layers), elbo, nats.mean().item(), gain, error))
            if best_nats is None or gain > error:
                best, best_nats = number, nats
    return best, tuple(scores)


def _gain(nats: Tensor, other: Tensor) -> tuple[float, float]:
    """Return the mean difference and its standard error; a model that failed loses to any other."""
    if not bool(torch.isfinite(nats).all() & torch.isfinite(other).all()):
        return (inf if bool(torch.isfinite(nats).all()) else -inf), 0.0
    difference = nats - other
    return difference.mean().item(), difference.std().item() / sqrt(len(nats))


@torch.no_grad()
def _log_density(model: DeepGP, rows: Dataset) -> Tensor:
    """Return the log density of each row, summed over targets."""
    posterior = model.posterior()
    pairs = zip(rows.X.split(_CHUNK), rows.Y.split(_CHUNK), strict=True)
    return torch.cat([posterior.log_density(x, y) for x, y in pairs]).sum(1)
