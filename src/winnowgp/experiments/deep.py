"""What experiments with deep GPs share: baselines of fixed size, plots and claims.

The second part compares accuracy with prediction time: groups of runs, their plot and claims.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from statistics import fmean, stdev
from typing import Any, final

import torch
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter
from torch import Tensor

from winnowgp.data import Dataset
from winnowgp.errors import InputError
from winnowgp.experiments.base import (
    PROCEDURE_COLOURS,
    PROCEDURE_NAMES,
    RELEASED_NAMES,
    Row,
    claim,
)
from winnowgp.models import DeepGP
from winnowgp.plots.style import COLOURS
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

TRADEOFF_NAMES = {**PROCEDURE_NAMES, "weighed": "the fast schedule, α by cost", **RELEASED_NAMES}
_TRADEOFF_COLOURS = {**PROCEDURE_COLOURS, "weighed": COLOURS["second"]}

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


@final
@dataclass(frozen=True, slots=True)
class TradeoffGroup:
    """Runs that differ only in their fold."""

    kind: str
    label: str
    sizes: list[list[int]]
    cost: float
    """Mean prediction time in microseconds."""
    accuracy: float
    """Mean test log density in nats."""


def tradeoff_groups(rows: Sequence[Row]) -> list[TradeoffGroup]:
    """Return the runs grouped by kind and α, or by kind and sizes, sorted by prediction time.

    Runs whose prediction time has not been measured are left out.
    """
    times = {
        (tuple(row["sizes"]), row["connected"]): row["predict_us"]
        for row in rows
        if row["kind"] == "time"
    }
    members: dict[tuple[str, str], list[tuple[Row, float]]] = defaultdict(list)
    for row in rows:
        time = times.get((tuple(row["sizes"]), row["connected"]))
        if time is None or row["kind"] not in (*TRADEOFF_NAMES, "grid"):
            continue
        label = f"{row['sizes']}" if row["kind"] == "grid" else f"α = {row['alpha']:g}"
        members[row["kind"], label].append((row, time))
    grouped = [
        TradeoffGroup(
            kind,
            label,
            [row["sizes"] for row, _ in pairs],
            fmean([time for _, time in pairs]),
            fmean([row["log_density"] for row, _ in pairs]),
        )
        for (kind, label), pairs in members.items()
    ]
    return sorted(grouped, key=lambda group: group.cost)


def draw_tradeoff(grouped: Sequence[TradeoffGroup], *, ax: Axes) -> None:
    """Draw accuracy against prediction time: fixed sizes as grey dots, procedures as lines."""
    by_kind = {kind: [g for g in grouped if g.kind == kind] for kind in ("grid", *TRADEOFF_NAMES)}
    grid = by_kind.pop("grid")
    costs, accuracies = [g.cost for g in grid], [g.accuracy for g in grid]
    ax.scatter(costs, accuracies, s=16, color=COLOURS["data"], alpha=0.7, label="fixed sizes")
    shown = {kind: members for kind, members in by_kind.items() if members}
    best = max(shown, key=lambda kind: max(g.accuracy for g in shown[kind]), default=None)
    for kind, members in shown.items():
        colour = _TRADEOFF_COLOURS[kind]
        points = [(group.cost, group.accuracy) for group in members]
        ax.plot(
            *zip(*points, strict=True), color=colour, marker="o", ms=5, label=TRADEOFF_NAMES[kind]
        )
        # Labels stand above the uppermost line and below the others, so that they do not overlap.
        offset: dict[str, Any] = {"xytext": (-5, 4), "ha": "right"}
        if len(shown) == 1 or kind != best:
            offset = {"xytext": (5, -9), "ha": "left"}
        style = {"textcoords": "offset points", "fontsize": 7, "color": colour, **offset}
        for group, point in zip(members, points, strict=True):
            ax.annotate(_sizes(group), point, **style)
    ax.set(
        xlabel="prediction time (µs per row)",
        ylabel="test log density (nats per observation)",
        xscale="log",
    )
    low, high = ax.get_xlim()
    # Two octaves have a tick or two at powers of two, too few to read times.
    ax.xaxis.set_major_locator(LogLocator(2, subs=(1.0, 1.25, 1.5) if high < 4 * low else (1.0,)))
    ax.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.legend(loc="lower right")


def frontier_claim(
    kind: str, selected: Sequence[TradeoffGroup], grid: Sequence[TradeoffGroup]
) -> str:
    """Return whether no pair of fixed sizes is as quick as selected ones and as accurate."""
    better = {group.label: [other for other in grid if _beats(other, group)] for group in selected}
    texts = []
    for group in selected:
        text = f"{group.label}: {_sizes(group)} inducing points, {_scores(group)}, "
        if not better[group.label]:
            texts.append(text + "not beaten")
            continue
        best = max(better[group.label], key=lambda group: group.accuracy)
        texts.append(text + f"beaten by {_sizes(best)} ({_scores(best)})")
    return claim(
        "the selected sizes lie on the frontier of accuracy and prediction time of "
        f"{len(grid)} fixed sizes, {TRADEOFF_NAMES[kind]}",
        agrees=not any(better.values()),
        evidence="; ".join(texts),
    )


def last_layer_claim(kind: str, sizes: Sequence[Sequence[int]]) -> str:
    """Return whether most runs have more inducing points in the last layer."""
    more = sum(second > first for first, second in sizes)
    means = ", ".join(f"{fmean(column):.1f}" for column in zip(*sizes, strict=True))
    return claim(
        f"more inducing points in the last layer, {TRADEOFF_NAMES[kind]}",
        agrees=2 * more > len(sizes),
        evidence=f"in {more} of {len(sizes)} runs; {means} on average",
    )


def _beats(other: TradeoffGroup, group: TradeoffGroup) -> bool:
    return other.cost <= group.cost and other.accuracy >= group.accuracy


def _scores(group: TradeoffGroup) -> str:
    return f"{group.accuracy:.3f} nats, {group.cost:.0f} µs"


def _sizes(group: TradeoffGroup) -> str:
    return ", ".join(f"{fmean(column):.0f}" for column in zip(*group.sizes, strict=True))
