"""At the same number of points: a set selected from a pool against sets chosen without looking.

First with locations left where they were chosen and hyper-parameters held, then after the same
number of L-BFGS steps on both.
"""

from collections.abc import Iterable

import torch
from sklearn.cluster import KMeans
from torch import Tensor

from problems import ALPHAS, Problem, moved, permuted, problem
from records import Records, Row, Seconds, mean, recorded, table, timed
from winnowgp.models import greedy_variance
from winnowgp.selection import elimination_frontier
from winnowgp.selection.search import forward_selection, oscillating_search, swap_search

SIZES = (16, 32, 64, 128, 256)
POOL = 512
SOURCE_ROWS = 4000
"""Rows that greedy variance chooses from."""
MOST_ROWS = {"protein": 10_000}
ITERATIONS = 50
REFITTED = {"concrete": 256, "energy": 256, "kin8nm": 64}
"""Largest size that is refitted."""
OTHERS = ("k-means", "random", "greedy variance")


def other_sets(given: Problem, M: int, *, seed: int) -> dict[str, Tensor]:
    """Locations by rules that do not look at the targets."""
    X = given.data.X[permuted(given.data.N, seed=seed)]
    clusters = KMeans(M, init="random", n_init="auto", random_state=seed).fit(X.numpy())
    few = X[:SOURCE_ROWS]
    greedy = few[greedy_variance(given.model.kernel, few, M, given=X[:0])]
    return {
        "k-means": torch.from_numpy(clusters.cluster_centers_).to(X),
        "random": X[:M],
        "greedy variance": greedy,
    }


def selected_sets(given: Problem, *, seed: int) -> dict[int, Tensor]:
    """Locations of the best subset found of each size.

    The pool is half rows of greatest variance, half random ones. A backward and a forward path lead
    to each size; the better end is improved by oscillations and swaps.
    """
    X = given.data.X[permuted(given.data.N, seed=seed)]
    few = X[:SOURCE_ROWS]
    greedy = greedy_variance(given.model.kernel, few, POOL // 2, given=X[:0])
    others = torch.ones(len(X), dtype=torch.bool)
    others[greedy] = False
    pool = torch.cat([few[greedy], X[others][: POOL - len(greedy)]])
    statistics = given.model.with_candidates(pool).subset_statistics(given.data)
    paths = elimination_frontier(statistics), forward_selection(statistics, max_size=max(SIZES))
    found = {}
    for M in SIZES:
        mask = max(paths, key=lambda path, M=M: path.bounds[M].item()).masks[M]
        mask, _ = oscillating_search(statistics, mask, depth=M // 3)
        mask, _ = swap_search(statistics, mask, sweeps=1)
        found[M] = pool[mask]
    return found


def run(names: Iterable[str], *, seeds: int) -> None:
    """Measure, and write a file of rows for each data set."""
    for name in names:
        given = problem(name, most=MOST_ROWS.get(name))
        records = Records(f"equal_size/{name}")
        for seed in range(seeds):
            selected, seconds = _searched(given, seed)
            for M in SIZES:
                sets = {"selected": selected[M], **other_sets(given, M, seed=seed)}
                for method, Z in sets.items():
                    taken = seconds if method == "selected" else Seconds(0.0, 0.0)
                    row = {"M": M, "seed": seed, "method": method, **taken.row("search_")}
                    _measure(records, given, Z, row)
        print(f"{name}: {len(records.rows)} rows", flush=True)


def _searched(given: Problem, seed: int) -> tuple[dict[int, Tensor], Seconds]:
    return timed(lambda: selected_sets(given, seed=seed))


def _measure(records: Records, given: Problem, Z: Tensor, row: Row) -> None:
    """The bound where the points are, and after the same refit where that is affordable."""
    model = given.model.with_candidates(Z)
    with torch.no_grad():
        held = model.chunked_bound(given.data)().item()
    columns = {"data": given.name, "N": given.data.N, "points": len(Z), "held": round(held, 3)}
    columns["note"] = _note(given.name, row["M"])
    if row["M"] <= REFITTED.get(given.name, 0):
        after, seconds = timed(lambda: moved(model, given.data, iterations=ITERATIONS))
        with torch.no_grad():
            columns["refitted"] = round(after.chunked_bound(given.data)().item(), 3)
        columns |= {"iterations": ITERATIONS, **seconds.row()}
    records.add(**columns, **row)


def _note(name: str, M: int) -> str:
    """What was left out."""
    rows = f"a random part of {MOST_ROWS[name]} rows" if name in MOST_ROWS else "all rows"
    return rows if REFITTED.get(name, 0) >= M else f"{rows}; not refitted"


def margins(rows: list[Row], *, column: str) -> dict[tuple[str, int, str], list[float]]:
    """Selected less each other, nats per observation, by data set, size and other; one a seed."""
    found: dict[tuple[str, int, str], list[float]] = {}
    at = {(r["data"], r["M"], r["seed"], r["method"]): r for r in rows if column in r}
    for (data, M, seed, method), row in at.items():
        selected = at.get((data, M, seed, "selected"))
        if method != "selected" and selected is not None:
            margin = (selected[column] - row[column]) / row["N"]
            found.setdefault((data, M, method), []).append(margin)
    return found


def report() -> None:
    """How often the selected set wins, and by how much."""
    rows = recorded("equal_size/*")
    for column in ("held", "refitted"):
        found = margins(rows, column=column)
        print(f"\nBound, {column}: selected less other, nats per observation; wins of seeds.\n")
        lines = []
        for data in ALPHAS:
            for M in SIZES:
                seen = [found.get((data, M, other), []) for other in OTHERS]
                if all(seen):
                    cells = [f"{mean(s):+.4f} {sum(m > 0 for m in s)}/{len(s)}" for s in seen]
                    lines.append([data, M, *cells])
        print(table(["data", "M", *OTHERS], lines))
        every = [m for seeds in found.values() for m in seeds]
        wins, near = sum(m > 0 for m in every), sum(m > -0.003 for m in every)
        print(
            f"\nwins {wins} of {len(every)}, above or within 0.003 {near}, mean {mean(every):+.4f}"
        )
