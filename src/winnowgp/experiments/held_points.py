"""Deep models whose points nobody chose, trained as long as those whose points were."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from sklearn.cluster import KMeans
from torch import Tensor

from winnowgp.data import Dataset
from winnowgp.errors import InputError
from winnowgp.models import DeepGP
from winnowgp.training import (
    Course,
    LayerTraining,
    Parts,
    Place,
    deep_silent,
    random_rows,
    train_layerwise,
)

# Of k-means, from different starts; the best is kept.
TRIES = 10


@torch.no_grad()
def kmeans_centres(
    inputs: Float[Tensor, "N D"], count: int, generator: torch.Generator
) -> Float[Tensor, "J D"]:
    """Centres of as many clusters, or of as many as there are rows."""
    seed = int(torch.randint(2**31, (), generator=generator, device=inputs.device))
    clusters = min(count, len(inputs))
    search = KMeans(clusters, random_state=seed).set_params(n_init=TRIES)
    found = search.fit(inputs.cpu().numpy())
    return torch.from_numpy(found.cluster_centers_).to(inputs)


def spread_rows(inputs: Float[Tensor, "N D"], count: int) -> Float[Tensor, "K D"]:
    """Places for points that will be put elsewhere: rows far apart in their order, never random.

    >>> spread_rows(torch.arange(9.0)[:, None], 3)[:, 0].tolist()
    [0.0, 4.0, 8.0]
    """
    steps = torch.linspace(0, len(inputs) - 1, count, dtype=torch.float64)
    return inputs[steps.round().long().to(inputs.device)]


STARTS: dict[str, Place] = {"random": random_rows, "kmeans": kmeans_centres}


def train_held(
    model: DeepGP,
    data: Dataset,
    *,
    sizes: Sequence[int],
    start: str,
    training: LayerTraining,
    steps: tuple[int, int, int],
    generator: torch.Generator,
) -> DeepGP:
    """So many points in each layer, trained as the fast schedule trains.

    The points of every layer begin at random rows of what it sees, or at as many centres of
    k-means, when its own training begins.

    Args:
        model: with at least as many candidates in every layer; where they lie does not matter.
        sizes: how many points each layer has.
        start: a key of `STARTS`.
        steps: of each layer alone, then of all, then of all with the learning rate falling.
    """
    if start not in STARTS:
        raise InputError(f"`start` must be one of {', '.join(STARTS)}; got {start!r}.")
    place, device = STARTS[start], data.X.device
    held = model.prune(
        [
            torch.arange(layer.K, device=device) < size
            for layer, size in zip(model.layers, sizes, strict=True)
        ]
    )
    with torch.no_grad():
        places = place(data.X, sizes[0], generator)
        held.layers[0].candidates[: len(places)].copy_(places)
    alone, first, last = steps
    course = Course(generator, deep_silent)
    parts = Parts(data, None, generator)
    train_layerwise(held, parts, training=training, steps=alone, course=course, place=place)
    training.run(held, parts, "train", steps=first, course=course)
    cooled = LayerTraining(
        training.learning_rate, training.samples, training.natural_rate, cooling=0.03
    )
    cooled.run(held, parts, "cool", steps=last, course=course)
    return held
