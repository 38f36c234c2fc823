"""Tables of deep models that `deep_frontier.py` has trained and timed."""

from math import isnan, nan
from statistics import fmean, stdev

from measure import RESULTS, Row, grouped, markdown
from winnowgp.experiments.runs import Runs

TIMES = Runs(RESULTS / "deep" / "frontier_times.jsonl")
# Nats per observation by which a pair must be better to count.
MARGIN = 0.003
PAPER = {(53, 92): 1.297, (37, 80): 1.272, (24, 71): 1.256, (11, 58): 1.185}
"""Sizes and densities that the paper's figure shows."""
GAINS = ("gain", "elbo gain")
SELECTED = (
    "selected, smallest",
    *(f"selected, {place} smallest" for place in ("second", "third", "fourth", "fifth")),
)


def settings(rows: list[Row]) -> dict[str, list[Row]]:
    """Return the models of kin8nm by setting: pairs set by hand, and selected allocations.

    Selected are the models of each fit that are no larger than its result, counted from the
    smallest. Each has half as many inducing points as the next one, or a little more, so that those
    with the same number are of like sizes; the result itself is the last or the one before it.
    """
    rows = [row for row in rows if row["table"] == "kin8nm"]
    groups = {
        f"{sizes[0]}, {sizes[1]}": group
        for (kind, sizes), group in grouped(rows, "kind", "sizes").items()
        if kind == "by hand"
    }
    for (seed,) in grouped(rows, "seed"):
        own = [row for row in rows if row["kind"] == "selected" and row["seed"] == seed]
        # All that are trained longer than the chosen one are smaller.
        largest = max((row["sizes"] for row in own if row["chosen"]), default=())
        ordered = sorted((r for r in own if r["sizes"] <= largest), key=lambda r: r["sizes"])
        for name, row in zip(SELECTED, ordered, strict=False):
            groups.setdefault(name, []).append(row)
    return {name: sorted(group, key=lambda r: r["seed"]) for name, group in groups.items()}


def better_pairs(mean: dict[str, float], pairs: dict[str, dict[str, float]]) -> list[str]:
    """Return the names of the pairs that are as quick, and better by more than the margin.

    >>> pairs = {"a": {"us": 9.0, "log_density": 1.1}, "b": {"us": 11.0, "log_density": 1.2}}
    >>> better_pairs({"us": 10.0, "log_density": 1.0}, pairs)
    ['a']
    >>> better_pairs({"us": 10.0, "log_density": 1.098}, pairs)
    []
    """
    return [
        name
        for name, pair in pairs.items()
        if pair["us"] <= mean["us"] and pair["log_density"] > mean["log_density"] + MARGIN
    ]


def frontier_table(rows: list[Row]) -> str:
    """Return means over the splits of kin8nm: pairs set by hand, selected allocations, the paper.

    A setting is beaten by pairs that are as quick and better: in the means over the splits that
    both have, or on a split.
    """
    groups = settings(rows)
    seeds = sorted({row["seed"] for group in groups.values() for row in group})
    means = {name: _means(group) for name, group in groups.items()}
    by_hand = [name for name in groups if name not in SELECTED]
    lines = []
    for name, mean in sorted(means.items(), key=lambda item: item[1]["us"]):
        group, selected = groups[name], name in SELECTED
        points = "; ".join(f"{r['sizes'][0]}, {r['sizes'][1]}" for r in group)
        low, high = (fmean(r["quartiles"][i] for r in group) for i in (0, 2))
        cells = {r["seed"]: f"{r['log_density']:.3f}" for r in group}
        beaten = ""
        if selected:
            better = [each for each in by_hand if _is_better(groups[each], group)]
            single = 0
            for row in group:
                own = {
                    each: r for each in by_hand for r in groups[each] if r["seed"] == row["seed"]
                }
                single += bool(better_pairs(row, own))
            beaten = f"{' · '.join(better) or 'none'}; on {single} of {len(group)} splits"
            if isnan(mean["us"]):
                beaten = "not judged: some sizes have no time"
        lines.append(
            (
                f"**{points}**" if selected else points.split(";")[0],
                name if selected else "by hand",
                _time(low, mean["us"], high),
                f"{mean['log_density']:.3f}",
                *(cells.get(seed, "") for seed in seeds),
                beaten,
            )
        )
    times = {tuple(row["sizes"]): row for row in TIMES}
    for sizes, nats in PAPER.items():
        low, us, high = times[sizes]["quartiles"] if sizes in times else [nan] * 3
        us = _time(low, us, high)
        points = f"{sizes[0]}, {sizes[1]}"
        lines.append((points, "the paper", us, f"{nats:.3f}", *[""] * len(seeds), ""))
    header = ["inducing points in layers 1, 2", "", "CPU µs per row (quartiles)"]
    header += ["mean test log density", *(f"seed {seed}" for seed in seeds)]
    return markdown([*header, "pairs as quick and better"], lines)


def _time(low: float, us: float, high: float) -> str:
    return "" if isnan(us) else f"{us:.0f} ({low:.0f} to {high:.0f})"


def _means(rows: list[Row]) -> dict[str, float]:
    return {column: fmean(row[column] for row in rows) for column in ("us", "log_density")}


def _is_better(pair: list[Row], selected: list[Row]) -> bool:
    """Return whether a pair is as quick and better in the means over common splits."""
    seeds = {row["seed"] for row in pair} & {row["seed"] for row in selected}
    ours, theirs = ([r for r in rows if r["seed"] in seeds] for rows in (selected, pair))
    return bool(seeds) and bool(better_pairs(_means(ours), {"pair": _means(theirs)}))


def gain_table(rows: list[Row]) -> str:
    """Return the gain of selected inducing points over as many others, and its standard error."""
    models = {(r["table"], r["kind"], r["seed"], r["sizes"]): r for r in rows}
    compared = []
    for r in rows:
        # "as many, random" is compared with "selected", "as many within 9, random" with "within 9".
        kind = r["kind"].partition(", ")[0].removeprefix("as many").strip() or "selected"
        own = models.get((r["table"], kind, r["seed"], r["sizes"]))
        if r["kind"].startswith("as many") and own is not None:
            gains = (own[name] - r[name] for name in ("log_density", "elbo"))
            compared.append({**r, **dict(zip(GAINS, gains, strict=True))})
    lines = [
        (
            *key,
            len(group),
            " + ".join(
                f"{fmean(each):.0f}" for each in zip(*(r["sizes"] for r in group), strict=True)
            ),
            *(_mean_and_error([r[name] for r in group]) for name in GAINS),
            f"{sum(r['gain'] > 0 for r in group)} of {len(group)}",
        )
        for key, group in sorted(grouped(compared, "table", "updates", "kind").items())
    ]
    header = ["table", "updates", "against", "splits", "inducing points, mean"]
    header += ["gain of test log density", "gain of the ELBO per observation", "splits with a gain"]
    return markdown(header, lines)


def _mean_and_error(values: list[float]) -> str:
    if len(values) == 1:
        return f"{values[0]:+.4f} (one split)"
    return f"{fmean(values):+.4f} ± {stdev(values) / len(values) ** 0.5:.4f}"
