"""Several starts of a deep model, and the one that leads after a short run."""

from collections.abc import Sequence
from copy import deepcopy
from math import inf, isfinite

import torch

from winnowgp.data import Source
from winnowgp.errors import NotPositiveDefiniteError, TrainingError
from winnowgp.models import DeepGP
from winnowgp.training.checkpoint import Checkpoint
from winnowgp.training.course import Course, kept_course
from winnowgp.training.deep_fit import DeepProgress, OnDeepProgress, deep_silent, estimated_bound
from winnowgp.training.fingerprint import described
from winnowgp.training.layer_training import LayerTraining
from winnowgp.training.layerwise import train_layerwise
from winnowgp.training.parts import Parts


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
    ranks, rows = data.ranks, data.in_memory("a deep model")
    training = LayerTraining(0.03, samples, natural_rate=0.3)

    def raced(start: DeepGP, course: Course[DeepProgress]) -> float:
        model, parts = deepcopy(start), Parts(rows, batch_size, generator, ranks=ranks)
        try:
            train_layerwise(model, parts, training=training, steps=layerwise, course=course)
            training.run(model, parts, "race", steps=steps, course=course)
            bound = estimated_bound(model, rows, generator=generator)
        except (TrainingError, NotPositiveDefiniteError):
            # What the last step of a phase leads to has not been looked at before.
            bound = -inf
        bound = ranks.agreed(bound)
        return bound if isfinite(bound) else -inf

    with kept_course(
        checkpoint,
        "race",
        generator=generator,
        on_progress=on_progress,
        ranks=ranks,
        inputs=rows.X,
        targets=rows.Y,
        weights=rows.weights,
        starts=[described(start) for start in starts],
        steps=(layerwise, steps, samples, batch_size),
    ) as course:
        return max(starts, key=lambda start: raced(start, course))
