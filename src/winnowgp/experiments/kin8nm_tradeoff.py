"""Accuracy against prediction time of deep GPs on kin8nm: groups of runs, their plot and claims."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, final

from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

from winnowgp.experiments.base import (
    PROCEDURE_COLOURS,
    PROCEDURE_NAMES,
    RELEASED_NAMES,
    Row,
    claim,
)
from winnowgp.plots.style import COLOURS

NAMES = {**PROCEDURE_NAMES, "weighed": "the fast schedule, α by cost", **RELEASED_NAMES}
COLOURS_BY_KIND = {**PROCEDURE_COLOURS, "weighed": COLOURS["second"]}


@final
@dataclass(frozen=True, slots=True)
class Group:
    """Runs that differ only in their fold."""

    kind: str
    label: str
    sizes: list[list[int]]
    cost: float
    """Mean prediction time in microseconds."""
    accuracy: float
    """Mean test log density in nats."""


def groups(rows: Sequence[Row]) -> list[Group]:
    """Group runs by kind and α, or by kind and sizes, sorted by prediction time.

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
        if time is None or row["kind"] not in (*NAMES, "grid"):
            continue
        label = f"{row['sizes']}" if row["kind"] == "grid" else f"α = {row['alpha']:g}"
        members[row["kind"], label].append((row, time))
    grouped = [
        Group(
            kind,
            label,
            [row["sizes"] for row, _ in pairs],
            fmean([time for _, time in pairs]),
            fmean([row["log_density"] for row, _ in pairs]),
        )
        for (kind, label), pairs in members.items()
    ]
    return sorted(grouped, key=lambda group: group.cost)


def draw_tradeoff(grouped: Sequence[Group], *, ax: Axes) -> None:
    """Draw accuracy against prediction time: fixed sizes as grey dots, procedures as lines."""
    by_kind = {kind: [g for g in grouped if g.kind == kind] for kind in ("grid", *NAMES)}
    grid = by_kind.pop("grid")
    costs, accuracies = [g.cost for g in grid], [g.accuracy for g in grid]
    ax.scatter(costs, accuracies, s=16, color=COLOURS["data"], alpha=0.7, label="fixed sizes")
    shown = {kind: members for kind, members in by_kind.items() if members}
    best = max(shown, key=lambda kind: max(g.accuracy for g in shown[kind]), default=None)
    for kind, members in shown.items():
        colour = COLOURS_BY_KIND[kind]
        points = [(group.cost, group.accuracy) for group in members]
        ax.plot(*zip(*points, strict=True), color=colour, marker="o", ms=5, label=NAMES[kind])
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


def frontier_claim(kind: str, selected: Sequence[Group], grid: Sequence[Group]) -> str:
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
        f"{len(grid)} fixed sizes, {NAMES[kind]}",
        agrees=not any(better.values()),
        evidence="; ".join(texts),
    )


def last_layer_claim(kind: str, sizes: Sequence[Sequence[int]]) -> str:
    """Return whether most runs have more inducing points in the last layer."""
    more = sum(second > first for first, second in sizes)
    means = ", ".join(f"{fmean(column):.1f}" for column in zip(*sizes, strict=True))
    return claim(
        f"more inducing points in the last layer, {NAMES[kind]}",
        agrees=2 * more > len(sizes),
        evidence=f"in {more} of {len(sizes)} runs; {means} on average",
    )


def _beats(other: Group, group: Group) -> bool:
    return other.cost <= group.cost and other.accuracy >= group.accuracy


def _scores(group: Group) -> str:
    return f"{group.accuracy:.3f} nats, {group.cost:.0f} µs"


def _sizes(group: Group) -> str:
    return ", ".join(f"{fmean(column):.0f}" for column in zip(*group.sizes, strict=True))
