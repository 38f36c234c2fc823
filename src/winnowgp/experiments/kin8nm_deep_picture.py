"""Figure 6 from its rows: accuracy against prediction time, points per layer, and what they say."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import final

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

from winnowgp.experiments.equal_sizes import equal_size_claims
from winnowgp.experiments.experiment import claim
from winnowgp.experiments.procedures import PROCEDURE_NAMES
from winnowgp.experiments.runs import Row
from winnowgp.plots import (
    COLOURS,
    PROCEDURES,
    Tradeoff,
    draw_layer_sizes,
    draw_tradeoff,
    saved,
    styled,
)

# The third weighs the prior of a layer by what its points cost a prediction.
NAMES = {**PROCEDURE_NAMES, "weighed": "the fast schedule, α by cost"}
HUES = {**PROCEDURES, "weighed": COLOURS["second"]}


@final
@dataclass(frozen=True, slots=True)
class Group:
    """Runs that differ in their fold alone."""

    kind: str
    label: str
    sizes: list[list[int]]
    cost: float
    """Mean µs of a prediction."""
    accuracy: float
    """Mean test log density in nats."""


def groups(rows: Sequence[Row]) -> list[Group]:
    """Runs by kind and α, or by kind and sizes, the quickest to predict first.

    Runs whose prediction has not been timed yet are left out.
    """
    timed = [row for row in rows if row["kind"] == "time"]
    us = {(tuple(row["sizes"]), row["connected"]): row["predict_us"] for row in timed}

    def cost(row: Row) -> float | None:
        return us.get((tuple(row["sizes"]), row["connected"]))

    together: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        if row["kind"] in NAMES and cost(row) is not None:
            together[row["kind"], f"α = {row['alpha']:g}"].append(row)
        elif row["kind"] == "grid" and cost(row) is not None:
            together["grid", f"{row['sizes']}"].append(row)
    found = [
        Group(
            kind,
            label,
            [row["sizes"] for row in members],
            fmean([cost(row) or 0.0 for row in members]),
            fmean([row["log_density"] for row in members]),
        )
        for (kind, label), members in together.items()
    ]
    return sorted(found, key=lambda group: group.cost)


def kin8nm_picture(rows: Sequence[Row], path: Path) -> Path:
    """Accuracy against prediction time on the left, points per layer of both on the right."""
    found = groups(rows)

    def tradeoff(kind: str, name: str) -> Tradeoff:
        of = [group for group in found if group.kind == kind]
        labels = [_sizes(group) for group in of] if kind in NAMES else []
        return Tradeoff(name, [g.cost for g in of], [g.accuracy for g in of], labels)

    named = {kind: name for kind, name in NAMES.items() if any(g.kind == kind for g in found)}
    with styled():
        figure = Figure(figsize=(7 + 3 * len(named), 4))
        left, *right = figure.subplots(1, 1 + len(named), width_ratios=[1.8] + [1] * len(named))
        ours = [tradeoff(kind, name) for kind, name in named.items()]
        colours = [HUES[kind] for kind in named]
        draw_tradeoff(tradeoff("grid", "sizes set by hand"), ours, ax=left, colours=colours)
        left.set(xlabel="µs to predict a row", ylabel="test log density (nats)", xscale="log")
        left.xaxis.set_major_locator(LogLocator(2))
        left.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        left.xaxis.set_minor_locator(NullLocator())
        for ax, (kind, name) in zip(right, named.items(), strict=True):
            of = sorted((g for g in found if g.kind == kind), key=lambda g: g.label)
            draw_layer_sizes({group.label: group.sizes for group in of}, ax=ax)
            runs = max(len(group.sizes) for group in of)
            ax.set_title(f"{name}, {runs} fold{'s' * (runs > 1)}")
    return saved(figure, path)


def kin8nm_claims(rows: Sequence[Row]) -> list[str]:
    """Of the frontier, and of the last layer; then what choosing is worth at equal sizes."""
    found = groups(rows)
    grid = [group for group in found if group.kind == "grid"]
    chosen = {kind: [group for group in found if group.kind == kind] for kind in NAMES}
    frontier = [_frontier_claim(kind, of, grid) for kind, of in chosen.items() if of]
    last = [_last_layer_claim(kind, of) for kind, of in chosen.items() if kind in PROCEDURE_NAMES]
    return [*frontier, *last, *_equal_sizes(rows)]


def _frontier_claim(kind: str, chosen: Sequence[Group], grid: Sequence[Group]) -> str:
    beaten = {group.label: [other for other in grid if _beats(other, group)] for group in chosen}
    return claim(
        "the sizes chosen lie on the frontier of accuracy and prediction time of "
        f"{len(grid)} sizes set by hand, {NAMES[kind]}",
        agrees=not any(beaten.values()),
        found="; ".join(
            f"{group.label}: {_sizes(group)} points, {group.accuracy:.3f} nats, "
            f"{group.cost:.0f} µs, "
            + (f"beaten by {_best(better)}" if (better := beaten[group.label]) else "not beaten")
            for group in chosen
        ),
    )


def _last_layer_claim(kind: str, chosen: Sequence[Group]) -> str:
    sizes = [each for group in chosen for each in group.sizes]
    more = sum(second > first for first, second in sizes)
    return claim(
        f"more points in the last layer, {NAMES[kind]}",
        agrees=2 * more > len(sizes),
        found=f"in {more} of {len(sizes)} runs",
    )


def _equal_sizes(rows: Sequence[Row]) -> list[str]:
    """`fast` at α = 1 against points that nobody chose."""
    chosen = [row for row in rows if row["kind"] == "fast" and row["alpha"] == 1.0]
    others: dict[str, dict[int, float]] = defaultdict(dict)
    for row in rows:
        if row["kind"] == "fixed":
            others[row["start"]][row["fold"]] = row["log_density"]
    return equal_size_claims({r["fold"]: r["log_density"] for r in chosen}, others, each="fold")


def _beats(other: Group, group: Group) -> bool:
    return other.cost <= group.cost and other.accuracy >= group.accuracy


def _best(beating: Sequence[Group]) -> str:
    best = max(beating, key=lambda group: group.accuracy)
    return f"{_sizes(best)} ({best.accuracy:.3f} nats, {best.cost:.0f} µs)"


def _sizes(group: Group) -> str:
    return ", ".join(f"{fmean(column):.0f}" for column in zip(*group.sizes, strict=True))
