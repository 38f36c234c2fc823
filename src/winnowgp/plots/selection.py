"""Figures of a selection: the frontier, inclusion probabilities, and the training history."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from winnowgp.plots.style import COLOURS
from winnowgp.report.summary import AllocationSummary, counted, listed

# Nats per observation below which two bounds count as equal: a logarithmic axis has no zero.
_SMALLEST_GAP = 1e-5
# Marker and label of the phases of `Fast` that are marked.
_PHASES = {"initialisation": ("s", "initialisation"), "selection": ("o", "selection")}


def draw_frontier(
    elbos: Sequence[float | None],
    chosen: int,
    *,
    rows: int,
    ax: Axes,
    evidence: float | None = None,
    sizes: Sequence[int] = (),
) -> Axes:
    """Draw the ELBO gap to the best model against the number of inducing points.

    The best model is the full GP where its evidence is known. It has no gap, and is a dashed line
    below all others, since a logarithmic axis has no zero.

    Args:
        elbos: the best ELBO for 0, 1, 2, ... inducing points, in nats; None where none is known.
        chosen: the number of inducing points that was selected.
        rows: N, the number of observations; the gap is shown in nats per observation.
        evidence: log evidence of the full GP in nats, if it is known.
        sizes: numbers of inducing points that are available as models.
    """
    known = {M: elbo for M, elbo in enumerate(elbos) if elbo is not None}
    best = max(elbo for elbo in (*known.values(), evidence) if elbo is not None)
    gaps = {M: max((best - elbo) / rows, _SMALLEST_GAP) for M, elbo in known.items()}
    ax.plot(list(gaps), list(gaps.values()), color=COLOURS["posterior"], linewidth=1.4)
    others = [M for M in sizes if M in gaps and chosen != M]
    if others:
        ax.scatter(
            others,
            [gaps[M] for M in others],
            s=22,
            color=COLOURS["posterior"],
            zorder=3,
            label="available as a model",
        )
    ax.scatter(
        [chosen],
        [gaps[chosen]],
        s=46,
        facecolors="white",
        edgecolors=COLOURS["points"],
        linewidths=1.4,
        zorder=3,
        label=f"{counted(chosen)} selected",
    )
    if evidence is not None:
        ax.axhline(
            max(min(gaps.values()) / 3, _SMALLEST_GAP),
            color=COLOURS["inclusion"],
            linestyle="--",
            linewidth=1.2,
            label=f"full GP, all {rows} rows",
        )
    ax.set_yscale("log")
    ax.set(xlabel="number of inducing points", ylabel="ELBO gap (nats per observation)")
    ax.set_title("ELBO gap by number of inducing points")
    ax.legend(loc="upper right")
    return ax


def draw_allocations(
    allocations: Sequence[AllocationSummary], chosen: Sequence[int], *, ax: Axes
) -> Axes:
    """Draw the ELBO gap of allocations of inducing points to layers against the prediction time.

    Args:
        allocations: models that were trained.
        chosen: numbers of inducing points per layer that were selected.
    """
    us = [each["predict_us"] for each in allocations]
    gaps = [max(each["elbo_gap"], _SMALLEST_GAP) for each in allocations]
    ax.plot(us, gaps, color=COLOURS["posterior"], linewidth=1.0, marker="o", markersize=4)
    for x, gap, each in zip(us, gaps, allocations, strict=True):
        ax.annotate(listed(each["points"]), (x, gap), xytext=(5, 4), textcoords="offset points")
        if list(each["points"]) == list(chosen):
            ax.scatter(
                [x],
                [gap],
                s=46,
                facecolors="white",
                edgecolors=COLOURS["points"],
                linewidths=1.4,
                zorder=3,
                label=f"{listed(chosen)} selected",
            )
    ax.set_yscale("log")
    ax.set(xlabel="prediction time (µs per row)", ylabel="ELBO gap (nats per observation)")
    ax.set_title("ELBO gap by prediction time")
    ax.margins(x=0.15)
    if ax.get_legend_handles_labels()[0]:
        ax.legend(loc="upper right")
    return ax


def draw_inclusion(inclusion: Sequence[float], kept: int, *, ax: Axes) -> Axes:
    """Draw inclusion probabilities: selected candidates, then the others, each in falling order.

    Args:
        inclusion: the inclusion probability of each candidate, the selected ones first.
        kept: the number of selected candidates.
    """
    groups = (
        (inclusion[:kept], COLOURS["posterior"], f"{kept} candidates selected"),
        (inclusion[kept:], COLOURS["inclusion"], f"{len(inclusion) - kept} not selected"),
    )
    start = 0
    for values, colour, label in groups:
        positions = range(start, start + len(values))
        heights = sorted(values, reverse=True)
        ax.vlines(positions, 0, heights, color=colour, linewidth=1)
        ax.scatter(positions, heights, s=12, color=colour, label=label)
        start += len(values)
    ax.set(ylim=(0, 1.15), xlabel="candidate", ylabel="inclusion probability")
    ax.set_title("Inclusion probabilities of the candidates")
    ax.legend(loc="upper right", ncols=2)
    return ax


def draw_trace(moments: Sequence[Any], *, ax: Axes) -> Axes:
    """Draw the objective against the step and, on a second axis, the number of inducing points.

    Args:
        moments: `Summary["training"]["moments"]`.
    """
    moments = [moment for moment in moments if moment["objective"] is not None]
    steps = [moment["step"] for moment in moments]
    ax.plot(steps, [m["objective"] for m in moments], color=COLOURS["posterior"], linewidth=1.4)
    for phase, (marker, label) in _PHASES.items():
        marked = [moment for moment in moments if moment["phase"] == phase]
        if marked:
            ax.scatter(
                [m["step"] for m in marked],
                [m["objective"] for m in marked],
                marker=marker,
                s=26,
                facecolors="white",
                edgecolors=COLOURS["posterior"],
                zorder=3,
                label=label,
            )
    ax.set(xlabel="step", ylabel="objective (nats)")
    ax.yaxis.label.set_color(COLOURS["posterior"])
    counts = ax.twinx()
    sizes = [len(m["x"]) for m in moments]
    counts.step(steps, sizes, where="post", color=COLOURS["inclusion"], linewidth=1)
    counts.set_ylabel("inducing points", color=COLOURS["inclusion"])
    counts.set_ylim(bottom=0)
    counts.yaxis.set_major_locator(MaxNLocator(integer=True))
    counts.spines["right"].set_visible(True)
    ax.set_title("Training history")
    if ax.get_legend_handles_labels()[1]:
        ax.legend(loc="lower right")
    return ax


def draw_mixing(
    mixing: Sequence[Sequence[float]],
    counts: Sequence[int],
    *,
    ax: Axes,
    targets: Sequence[str] = (),
) -> Axes:
    """Draw what each process adds to each target, and the inducing points of each process.

    A row of colours is a target, relative to its largest entry.

    Args:
        mixing: the mixing matrix `[P Q]`.
        counts: number of inducing points of each process.
        targets: names of the targets; numbers by default.
    """
    largest = [max(max(map(abs, row)), 1e-300) for row in mixing]
    shares = [[entry / most for entry in row] for row, most in zip(mixing, largest, strict=True)]
    ax.imshow(shares, cmap="RdBu", vmin=-1, vmax=1, aspect="auto")
    names = [f"process {q + 1}\n{counted(count)}" for q, count in enumerate(counts)]
    ax.set_xticks(range(len(counts)), names)
    ax.set_yticks(range(len(largest)), targets or [f"target {p + 1}" for p in range(len(largest))])
    for p, row in enumerate(mixing):
        for q, entry in enumerate(row):
            dark = abs(shares[p][q]) > 0.6
            ax.text(q, p, f"{entry:.2g}", ha="center", va="center", color="w" if dark else "k")
    ax.set_title("mixing matrix")
    return ax
