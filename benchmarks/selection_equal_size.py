"""The bound at equal size: inducing points selected from a pool, k-means, random and greedy ones.

The bound is compared with fixed locations and hyper-parameters, and after the same number of L-BFGS
iterations on both. A part of benchmarks/selection.py; results are in benchmarks/results/equal_size.
"""

from collections.abc import Iterable

import torch
from sklearn.cluster import KMeans
from torch import Tensor

from measure import Row, Runs, Seconds, mean, new_results, read_results, table, timed
from selection_problems import ALPHAS, Problem, permuted, problem, refitted
from winnowgp.models import greedy_variance
from winnowgp.selection import elimination_frontier
from winnowgp.selection.search import forward_selection, oscillating_search, swap_search

SIZES = (16, 32, 64, 128, 256)
POOL = 512
SOURCE_ROWS = 4000
"""Number of rows that greedy variance selects from."""
MOST_ROWS = {"protein": 10_000}
ITERATIONS = 50
REFITTED = {"concrete": 256, "energy": 256, "kin8nm": 64}
"""Largest size that is refitted, by data set."""
NAMES = {"held": "fixed locations", "refitted": "refitted"}
OTHERS = ("k-means", "random", "greedy variance")


def other_sets(base: Problem, M: int, *, seed: int) -> dict[str, Tensor]:
    """Return locations by methods that do not use the targets."""
    X = base.data.X[permuted(base.data.N, seed=seed)]
    clusters = KMeans(M, init="random", n_init="auto", random_state=seed).fit(X.numpy())
    few = X[:SOURCE_ROWS]
    greedy = few[greedy_variance(base.model.kernel, few, M, given=X[:0])]
    return {
        "k-means": torch.from_numpy(clusters.cluster_centers_).to(X),
        "random": X[:M],
        "greedy variance": greedy,
    }


def selected_sets(base: Problem, *, seed: int) -> dict[int, Tensor]:
    """Return the locations of the best subset of each size.

    Half of the pool has the greatest conditional variance, half are random rows. The better of
    backward elimination and forward selection is improved by oscillations and swaps.
    """
    X = base.data.X[permuted(base.data.N, seed=seed)]
    few = X[:SOURCE_ROWS]
    greedy = greedy_variance(base.model.kernel, few, POOL // 2, given=X[:0])
    others = torch.ones(len(X), dtype=torch.bool)
    others[greedy] = False
    pool = torch.cat([few[greedy], X[others][: POOL - len(greedy)]])
    statistics = base.model.with_candidates(pool).subset_statistics(base.data)
    paths = elimination_frontier(statistics), forward_selection(statistics, max_size=max(SIZES))
    locations = {}
    for M in SIZES:
        mask = max(paths, key=lambda path, M=M: path.bounds[M].item()).masks[M]
        mask, _ = oscillating_search(statistics, mask, depth=M // 3)
        mask, _ = swap_search(statistics, mask, sweeps=1)
        locations[M] = pool[mask]
    return locations


def run(names: Iterable[str], *, seeds: int) -> None:
    """Measure every data set and write its results."""
    for name in names:
        base = problem(name, most=MOST_ROWS.get(name))
        results = new_results(f"equal_size/{name}")
        for seed in range(seeds):
            selected, seconds = _searched(base, seed)
            for M in SIZES:
                sets = {"selected": selected[M], **other_sets(base, M, seed=seed)}
                for method, Z in sets.items():
                    taken = seconds if method == "selected" else Seconds(0.0, 0.0)
                    row = {"M": M, "seed": seed, "method": method, **taken.row("search_")}
                    _measure(results, base, Z, row)
        print(f"{name}: {len(list(results))} rows", flush=True)


def _searched(base: Problem, seed: int) -> tuple[dict[int, Tensor], Seconds]:
    return timed(lambda: selected_sets(base, seed=seed))


def _measure(results: Runs, base: Problem, Z: Tensor, row: Row) -> None:
    """Measure the bound at base locations and, up to the size in REFITTED, after a refit."""
    model = base.model.with_candidates(Z)
    with torch.no_grad():
        fixed = model.chunked_bound(base.data)().item()
    columns = {"data": base.name, "N": base.data.N, "points": len(Z), "held": round(fixed, 3)}
    columns["note"] = _note(base.name, row["M"])
    if row["M"] <= REFITTED.get(base.name, 0):
        after, seconds = timed(lambda: refitted(model, base.data, iterations=ITERATIONS))
        with torch.no_grad():
            columns["refitted"] = round(after.chunked_bound(base.data)().item(), 3)
        columns |= {"iterations": ITERATIONS, **seconds.row()}
    results.add({**columns, **row})


def _note(name: str, M: int) -> str:
    """Return which rows were used, and whether the points were refitted."""
    rows = f"a random part of {MOST_ROWS[name]} rows" if name in MOST_ROWS else "all rows"
    return rows if REFITTED.get(name, 0) >= M else f"{rows}; not refitted"


def margins(rows: list[Row], *, column: str) -> dict[tuple[str, int, str], list[float]]:
    """Return selected minus other, in nats per observation, by data set, size and method."""
    differences: dict[tuple[str, int, str], list[float]] = {}
    at = {(r["data"], r["M"], r["seed"], r["method"]): r for r in rows if column in r}
    for (data, M, seed, method), row in at.items():
        selected = at.get((data, M, seed, "selected"))
        if method != "selected" and selected is not None:
            margin = (selected[column] - row[column]) / row["N"]
            differences.setdefault((data, M, method), []).append(margin)
    return differences


def report() -> None:
    """Print how often the selected set has the higher bound, and by how much."""
    rows = read_results("equal_size/*")
    for column in ("held", "refitted"):
        by_setting = margins(rows, column=column)
        print(
            f"\nBound, {NAMES[column]}: selected minus other, nats per observation; wins of "
            "seeds.\n"
        )
        lines = []
        for data in ALPHAS:
            for M in SIZES:
                seen = [by_setting.get((data, M, other), []) for other in OTHERS]
                if all(seen):
                    cells = [f"{mean(s):+.4f} {sum(m > 0 for m in s)}/{len(s)}" for s in seen]
                    lines.append([data, M, *cells])
        print(table(["data", "M", *OTHERS], lines))
        every = [m for seeds in by_setting.values() for m in seeds]
        wins, near = sum(m > 0 for m in every), sum(m > -0.003 for m in every)
        print(
            f"\nwins {wins} of {len(every)}, above or within 0.003 {near}, mean {mean(every):+.4f}"
        )
