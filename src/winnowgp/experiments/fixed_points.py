"""Deep models with inducing points held at given locations."""

from collections.abc import Mapping, Sequence
from math import inf
from statistics import fmean, stdev

import torch
from jaxtyping import Float
from sklearn.cluster import KMeans
from torch import Tensor

from winnowgp.data import Dataset
from winnowgp.errors import InputError
from winnowgp.experiments.base import claim, counted
from winnowgp.models import DeepGP
from winnowgp.training.adam import Minibatches
from winnowgp.training.context import TrainingContext
from winnowgp.training.layer_training import (
    Initializer,
    LayerTraining,
    random_rows,
    train_layerwise,
)

# Chosen points against as many that nobody chose, after as many updates.


STARTS_SAID = {"random": "random rows", "kmeans": "k-means centres"}

CLEAR = 2.0

"""Standard errors that a mean gain must exceed; less can be the luck of folds or seeds."""


def equal_size_claims(
    chosen: Mapping[int, float], others: Mapping[str, Mapping[int, float]], *, each: str
) -> list[str]:
    """A line for every way to place points that has a run where the choice has one.

    The choice beats them if its gain, fold by fold or seed by seed, is clear of chance; one fold
    alone cannot show that.

    Args:
        chosen: test log density in nats a row, by fold or seed.
        others: the same for each way to place points without a choice.
        each: what the numbers are of, a fold or a seed.
    """
    lines = []
    for start, found in others.items():
        both = sorted(chosen.keys() & found.keys())
        if not both:
            continue
        mine, theirs = (fmean([side[key] for key in both]) for side in (chosen, found))
        gains = [chosen[key] - found[key] for key in both]
        error = stdev(gains) / len(gains) ** 0.5 if len(gains) > 1 else inf
        lines.append(
            claim(
                f"beyond the paper: chosen points beat as many {STARTS_SAID[start]} in every layer",
                agrees=fmean(gains) > CLEAR * error,
                found=f"test log density {mine:.3f} against {theirs:.3f} nats a row after as many "
                f"updates, higher on {sum(gain > 0 for gain in gains)} of "
                f"{counted(len(both), each)}; gain {fmean(gains):+.4f} with a standard error of "
                f"{error:.4f}, {CLEAR:g} of which would be clear of chance",
            )
        )
    return lines


# Deep models whose points nobody chose, trained as long as those whose points were.


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


STARTS: dict[str, Initializer] = {"random": random_rows, "kmeans": kmeans_centres}


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
    context = TrainingContext(generator)
    batches = Minibatches(data, None, generator)
    train_layerwise(
        held, batches, training=training, steps=alone, context=context, initializer=place
    )
    training.run(held, batches, "train", steps=first, context=context)
    cooled = LayerTraining(
        training.learning_rate, training.samples, training.natural_rate, cooling=0.03
    )
    cooled.run(held, batches, "cool", steps=last, context=context)
    return held
