"""Deep models whose points nobody chose, trained as long as those whose points were."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from sklearn.cluster import KMeans
from torch import Tensor

from winnowgp.data import Dataset
from winnowgp.errors import InputError
from winnowgp.models import DeepGP
from winnowgp.training import Course, LayerTraining, Parts, deep_silent, train_layerwise

STARTS = ("random", "kmeans")


def start_points(
    start: str, data: Dataset, count: int, *, seed: int, generator: torch.Generator
) -> Float[Tensor, "K D"]:
    """Random rows, or centres of clusters."""
    if start not in STARTS:
        raise InputError(f"`start` must be one of {', '.join(STARTS)}; got {start!r}.")
    if start == "random":
        order = torch.randperm(data.N, generator=generator, device=data.X.device)
        return data.X[order[:count]]
    rows = data.X.cpu().numpy()
    found = KMeans(count, n_init="auto", max_iter=50, random_state=seed).fit(rows)
    return torch.from_numpy(found.cluster_centers_).to(data.X)


def train_held(
    model: DeepGP,
    data: Dataset,
    *,
    sizes: Sequence[int],
    training: LayerTraining,
    steps: tuple[int, int, int],
    generator: torch.Generator,
) -> DeepGP:
    """The first few candidates of each layer, trained as the fast schedule trains.

    Args:
        sizes: how many points each layer has.
        steps: of each layer alone, then of all, then of all with the learning rate falling.
    """
    device = data.X.device
    held = model.prune(
        [
            torch.arange(layer.K, device=device) < size
            for layer, size in zip(model.layers, sizes, strict=True)
        ]
    )
    alone, first, last = steps
    course = Course(generator, deep_silent)
    train_layerwise(held, data, training=training, steps=alone, batch_size=None, course=course)
    parts = Parts(data, None, generator)
    training.run(held, parts, "train", steps=first, course=course)
    cooled = LayerTraining(
        training.learning_rate, training.samples, training.natural_rate, cooling=0.03
    )
    cooled.run(held, parts, "cool", steps=last, course=course)
    return held
