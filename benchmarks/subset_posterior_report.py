"""Tables and the figure of benchmarks/subset_posterior.py, from its result files alone."""

from collections.abc import Iterable
from pathlib import Path

import matplotlib.pyplot as plt
import torch

from measure import Row, grouped, markdown, mean, read_results
from winnowgp.data import hills

FIGURE = Path(__file__).parents[1] / "docs" / "images" / "subset_posteriors.png"
MEAN_FIELD = "mean field, from search"
"""The independent process from which shares of the gap are measured."""
METHODS = (
    "mean field",
    MEAN_FIELD,
    "determinantal",
    "determinantal, from gibbs",
    "determinantal, score function",
    "mean field, from best",
    "determinantal, from tempered",
)


def mean_and_error(values: Iterable[float], digits: int) -> str:
    """Return the mean over seeds and its standard error."""
    numbers = torch.tensor(list(values), dtype=torch.float64)
    if len(numbers) < 2:
        return f"{numbers.mean():.{digits}f}"
    return f"{numbers.mean():.{digits}f} ± {numbers.std() / len(numbers) ** 0.5:.{digits}f}"


def objective_table(rows: list[Row], bounds: dict[str, Row]) -> str:
    """Return objectives, and the shares of the gap between mean field and evidence they close."""
    lines = []
    for (name,), own in grouped(rows, "data").items():
        by = grouped(own, "method")
        limit = bounds.get(name)
        for method in METHODS:
            fits = by.get((method,), [])
            share = ""
            if fits and limit is not None and method.startswith("determinantal"):
                field = "mean field, from best" if method.endswith("tempered") else MEAN_FIELD
                base = mean(r["objective"] for r in by[(field,)])
                gain = mean(r["objective"] for r in fits) - base
                ends = sorted(round(100 * gain / (limit[end] - base)) for end in ("upper", "lower"))
                share = " to ".join(f"{end}" for end in dict.fromkeys(ends)) + " %"
            if fits:
                value = mean_and_error((r["objective"] for r in fits), 1)
                numbers = (f"{mean(r[key] for r in fits):.1f}" for key in ("size", "bound_sd"))
                seconds = f"{mean(r['cpu_s'] for r in fits):.1f}"
                lines.append([name, method, len(fits), value, share, *numbers, seconds])
    header = ["data", "q(Z)", ">seeds", ">objective", ">share of the gap", ">E|Z|", ">sd of L"]
    return markdown([*header, ">CPU s"], lines)


def evidence_table(rows: list[Row]) -> str:
    """Return the bounds on the evidence by annealing."""
    lines = []
    for r in rows:
        ends = [f"{r[end]:.1f} ± {r[end + '_se']:.1f}" for end in ("lower", "upper")]
        lines.append([r["data"], *ends, r["runs"], r["steps"], f"{r['wall_s']:.0f}"])
    return markdown(["data", ">at least", ">at most", ">runs", ">steps", ">s"], lines)


def chains_table(rows: list[Row]) -> str:
    """Return what chains from different starts say, and whether they agree."""
    lines = []
    for r in rows:
        hats = (f"{r['r_hat'][key]:.2f}" for key in ("size", "bound", "distance"))
        low, high = r["credible_size"]
        numbers = (f"{r[key]:.1f}" for key in ("size", "bound_sd", "mean_score", "score"))
        size, spread, *scores = numbers
        lines.append([r["data"], r["method"], r["chains"], *hats, size, f"{low} to {high}", spread])
        lines[-1] += [*scores, f"{r['wall_s']:.0f}"]
    header = ["data", "chains", ">number", ">R-hat size", ">bound", ">subset", ">E|Z|", ">90 %"]
    return markdown([*header, ">sd of L", ">mean score", ">best score", ">s"], lines)


def best_subsets_table(rows: list[Row]) -> str:
    """Return by how much the best subset of search exceeds that of samples, by seed."""
    lines = []
    for (name,), own in grouped(rows, "data").items():
        by = grouped(own, "seed", "method")
        pairs = {
            method: [
                (by[(seed, "search")][0], by[(seed, method)][0])
                for (seed, other) in by
                if other == method
            ]
            for method in ("gibbs, time of search", "gibbs")
        }
        if not all(pairs.values()):
            continue
        searches = [a for a, _ in pairs["gibbs"]]
        lines.append([name, len(searches), mean_and_error((r["score"] for r in searches), 1)])
        for both in pairs.values():
            lines[-1].append(mean_and_error((a["score"] - b["score"] for a, b in both), 1))
        lines[-1] += [
            f"{mean(r['cpu_s'] for r in some):.1f}"
            for some in (searches, [b for _, b in pairs["gibbs"]])
        ]
    header = ["data", ">seeds", ">search", ">better than gibbs, equal time", ">than all samples"]
    return markdown([*header, ">CPU s of search", ">of gibbs"], lines)


def density_table(rows: list[Row]) -> str:
    """Return by how much averages over subsets exceed one subset, held out, over splits."""
    ordered = sorted(rows, key=lambda r: (r["data"], r["alpha"]))
    lines = []
    for (name, alpha), own in grouped(ordered, "data", "alpha").items():
        size, hat = mean(r["size"] for r in own), max(r["r_hat"]["distance"] for r in own)
        lines.append([name, alpha, f"{size:.0f}", len(own), f"{hat:.2f}"])
        for other in ("selected", "single_sample"):
            lines[-1].append(mean_and_error((r["averaged"] - r[other] for r in own), 4))
    header = ["data", ">α", ">E|Z|", ">splits", ">worst R-hat", ">over selected", ">over samples"]
    return markdown(header, lines)


def scale_table(rows: list[Row]) -> str:
    """Return seconds and memory with 1,000 candidates."""
    lines = []
    for r in rows:
        sweeps = r["method"] == "gibbs"
        seconds = r["wall_s"] / r["sweeps"] if sweeps else r["wall_s"]
        what = f"Gibbs sweep of {r['chains']} chains" if sweeps else "determinantal fit"
        values = [f"{r[key]:.0f}" for key in ("size", "memory_mib")]
        lines.append([what, r["device"], f"{r['alpha']:g}", values[0], f"{seconds:.2f}", values[1]])
    return markdown(["", "device", ">α", ">E|Z|", ">s", ">MiB"], lines)


def report() -> None:
    """Print the results as Markdown tables, and draw the picture."""
    rows = read_results("subset_posterior/objective-*")
    evidence = read_results("subset_posterior/evidence-*")
    annealed = [r for r in evidence if "lower" in r]
    sampled = [r for r in evidence if "r_hat" in r]
    rows += [r for r in evidence if "objective" in r]
    tables = {
        "Objective in nats: mean over seeds and its standard error": objective_table(
            rows, {r["data"]: r for r in annealed}
        ),
        "Evidence by annealing, in nats": evidence_table(annealed),
        "Mixing of chains": chains_table(sampled),
        "Best score L(Z) + w(|Z|) in nats: search minus samples of q*": best_subsets_table(rows),
        "Held-out nats per observation: averaged minus others": density_table(
            read_results("subset_posterior/density-*")
        ),
        "K = 1,000, N = 45,730": scale_table(read_results("subset_posterior/scale-*")),
    }
    for title, table in tables.items():
        print(f"\n{title}.\n\n{table}")
    draw(read_results("subset_posterior/picture-*"))


def draw(rows: list[Row]) -> None:
    """Draw inclusion, subsets and neighbours of the three posteriors of the picture."""
    if not rows:
        return
    data = hills()
    figure, axes = plt.subplots(
        5, 1, sharex=True, figsize=(7.5, 9), height_ratios=[1.6, 1, 1, 1, 1.3], layout="constrained"
    )
    axes[0].plot(data.X[:, 0], data.Y[:, 0], "k.", markersize=2)
    axes[0].set(ylabel="y", title="Which of 50 candidates are inducing points?")
    for number, (axis, row) in enumerate(zip(axes[1:4], rows, strict=True)):
        colour = f"C{number}"
        z = torch.tensor(row["candidates"])
        axis.vlines(z, 0, row["inclusion"], color=colour)
        axis.plot(z, row["inclusion"], "o", color=colour, markersize=4)
        for height, subset in enumerate(row["subsets"]):
            level = torch.full((len(subset),), 1.08 + 0.07 * height)
            axis.plot(z[subset], level, "|", color="0.35", markersize=4)
        label = f"{row['method']}: {row['size']:.1f} ± {row['size_sd']:.1f} points"
        axis.set(ylim=(0, 1.85), yticks=[0, 0.5, 1], ylabel="P(k ∈ Z)")
        axis.set_title(label, loc="left", fontsize="medium", color=colour)
        p = torch.tensor(row["inclusion"])
        ratio = torch.tensor(row["neighbours"]) / (p[1:] * p[:-1]).clamp_min(1e-6)
        likely = (p[1:] * p[:-1]) > 0.01
        between = (z[1:] + z[:-1]) / 2
        axes[4].plot(between[likely], ratio[likely], "o-", color=colour, markersize=3)
    axes[4].set(xlabel="x", ylabel="P(both) / P P\nof neighbours", ylim=(0, None))
    figure.savefig(FIGURE, dpi=120)
    plt.close(figure)
