"""Baselines of fixed size, their claims, and a plot, for both experiments with deep GPs."""

from collections.abc import Mapping, Sequence
from math import inf
from statistics import fmean, stdev

import torch
from jaxtyping import Float
from matplotlib.axes import Axes
from torch import Tensor

from winnowgp.data import Dataset
from winnowgp.errors import InputError
from winnowgp.experiments.base import claim
from winnowgp.models import DeepGP
from winnowgp.report.summary import counted
from winnowgp.training.adam import Minibatches
from winnowgp.training.initialization import kmeans
from winnowgp.training.layer_training import (
    Initializer,
    LayerTraining,
    random_rows,
    train_layerwise,
)
from winnowgp.training.schedules import TrainingContext

STANDARD_ERRORS = 2.0
"""A mean gain counts if it exceeds this number of standard errors over folds or seeds."""

# Number of restarts of k-means; the best one is used.
_RESTARTS = 10
# Colours of Okabe and Ito that the two procedures do not use.
_LAYER_COLOURS = ("#009E73", "#CC79A7", "#E69F00", "#7f7f7f")


@torch.no_grad()
def kmeans_centres(
    inputs: Float[Tensor, "N D"], count: int, generator: torch.Generator
) -> Float[Tensor, "J D"]:
    """Return k-means centres; if there are fewer rows than centres, one centre per row."""
    seed = int(torch.randint(2**31, (), generator=generator, device=inputs.device))
    return kmeans(inputs, min(count, len(inputs)), seed=seed, restarts=_RESTARTS)


STARTS: dict[str, Initializer] = {"random": random_rows, "kmeans": kmeans_centres}
"""Initial locations of inducing points of fixed number."""
START_NAMES = {"random": "random rows", "kmeans": "k-means centres"}


def spread_rows(inputs: Float[Tensor, "N D"], count: int) -> Float[Tensor, "K D"]:
    """Return evenly spaced rows, as initial inducing points whose locations are set later.

    >>> spread_rows(torch.arange(9.0)[:, None], 3)[:, 0].tolist()
    [0.0, 4.0, 8.0]
    """
    steps = torch.linspace(0, len(inputs) - 1, count, dtype=torch.float64)
    return inputs[steps.round().long().to(inputs.device)]


def train_fixed_sizes(
    model: DeepGP,
    data: Dataset,
    *,
    sizes: Sequence[int],
    start: str,
    training: LayerTraining,
    steps: tuple[int, int, int],
    generator: torch.Generator,
) -> DeepGP:
    """Train a deep GP with given numbers of inducing points as the fast schedule trains.

    The inducing points of each layer start at random rows or k-means centres of the layer's
    inputs, when its own training begins.

    Args:
        model: has at least as many candidates in every layer; their locations do not matter.
        data: training data.
        sizes: number of inducing points of each layer.
        start: a key of `STARTS`.
        training: how all layers are trained.
        steps: steps of each layer alone, of all layers, and of all layers with a falling
            learning rate.
        generator: source of randomness.
    """
    if start not in STARTS:
        raise InputError(f"`start` must be one of {', '.join(STARTS)}; got {start!r}.")
    initializer, device = STARTS[start], data.X.device
    fixed = model.prune(
        [
            torch.arange(layer.K, device=device) < size
            for layer, size in zip(model.layers, sizes, strict=True)
        ]
    )
    with torch.no_grad():
        locations = initializer(data.X, sizes[0], generator)
        fixed.layers[0].candidates[: len(locations)].copy_(locations)
    alone, first, last = steps
    context = TrainingContext(generator)
    batches = Minibatches(data, None, generator)
    train_layerwise(
        fixed, batches, training=training, steps=alone, context=context, initializer=initializer
    )
    training.run(fixed, batches, "train", steps=first, context=context)
    cooled = LayerTraining(
        training.learning_rate, training.samples, training.natural_rate, cooling=0.03
    )
    cooled.run(fixed, batches, "cool", steps=last, context=context)
    return fixed


def equal_size_claims(
    selected: Mapping[int, float], baselines: Mapping[str, Mapping[int, float]], *, unit: str
) -> list[str]:
    """Compare selected inducing points with baselines of the same sizes and number of updates.

    The claim agrees if the mean gain over folds or seeds exceeds `STANDARD_ERRORS`; a single fold
    cannot show that. A baseline without a common fold or seed has no claim.

    Args:
        selected: test log density in nats per observation, by fold or seed.
        baselines: the same for each start of a fixed number of inducing points.
        unit: "fold" or "seed".
    """
    lines = []
    for start, densities in baselines.items():
        common = sorted(selected.keys() & densities.keys())
        if not common:
            continue
        ours, theirs = (fmean([side[key] for key in common]) for side in (selected, densities))
        gains = [selected[key] - densities[key] for key in common]
        error = stdev(gains) / len(gains) ** 0.5 if len(gains) > 1 else inf
        lines.append(
            claim(
                "beyond the paper: selected inducing points beat as many "
                f"{START_NAMES[start]} in every layer",
                agrees=fmean(gains) > STANDARD_ERRORS * error,
                evidence=f"test log density {ours:.3f} against {theirs:.3f} nats per observation "
                f"after as many updates, higher on {sum(gain > 0 for gain in gains)} of "
                f"{counted(len(common), unit)}; gain {fmean(gains):+.4f} with a standard error of "
                f"{error:.4f}; a gain above {STANDARD_ERRORS:g} standard errors counts",
            )
        )
    return lines


def draw_layer_sizes(sizes: Mapping[str, Sequence[Sequence[int]]], *, ax: Axes) -> Axes:
    """Draw the number of inducing points by layer: a group per label, a dot per run, the means.

    Args:
        sizes: for each label the sizes of every run, one number per layer.
        ax: the axes.
    """
    layers = max(len(run) for runs in sizes.values() for run in runs)
    for layer in range(layers):
        offset = (layer - (layers - 1) / 2) * 0.22
        colour = _LAYER_COLOURS[layer % len(_LAYER_COLOURS)]
        for group, runs in enumerate(sizes.values()):
            values, x = [run[layer] for run in runs], group + offset
            name = f"layer {layer + 1}" if group == 0 else None
            dots = [x] * len(values)
            ax.scatter(dots, values, s=14, color=colour, alpha=0.6, linewidths=0, label=name)
            ax.hlines(fmean(values), x - 0.08, x + 0.08, color=colour)
    ax.set_xticks(range(len(sizes)), list(sizes))
    ax.set(ylabel="inducing points", ylim=(0, None))
    ax.legend()
    return ax
