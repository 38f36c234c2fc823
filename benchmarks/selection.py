"""Selection of inducing points: methods, number of points at a tolerance, quality at equal size.

    python benchmarks/selection.py                      # all parts
    python benchmarks/selection.py estimators --data concrete energy
    python benchmarks/selection.py --report             # print the results

- estimators: four methods at fixed hyper-parameters; see selection_methods.py.
- synthetic: the number of inducing points that a tolerance selects in the paper's settings: N = 500
  values of a GP with an RBF kernel on [0, 100]; candidates are 80 random rows, or the schedule's
  own. The noise, the lengthscale or the clustering of the inputs increases.
- equal-size: the bound of inducing points selected from a pool, and of k-means, random and greedy
  ones: with fixed locations and hyper-parameters, and after as many L-BFGS iterations on both.

Data are read from WINNOWGP_DATA. One thread; compare CPU seconds: wall-clock time depends on the
load of the machine. Results are in benchmarks/results/selection, synthetic and equal_size.
"""

import argparse
from collections.abc import Iterable
from itertools import pairwise

import torch
from sklearn.cluster import KMeans
from torch import Tensor

import selection_methods
from measure import Row, Runs, Seconds, mean, new_results, read_results, table, timed
from selection_problems import ALPHAS, Problem, permuted, problem, refitted
from winnowgp.data import Dataset
from winnowgp.estimators.kernels import kernel_from
from winnowgp.experiments import synthetic
from winnowgp.models import SparseGP, greedy_variance
from winnowgp.selection import elimination_frontier
from winnowgp.selection.search import forward_selection, oscillating_search, swap_search
from winnowgp.training import FastSchedule, Tolerance, fit
from winnowgp.training.initialization import trainable_lengthscales

DRAWN, GIVEN, TOLERANCE = 500, 80, 0.01
"""Rows, random candidates and the tolerance in the synthetic settings."""
RANGES = {"noise": (0.3, 1.0), "lengthscale": (0.8, 2.5), "clustering": (0.03, 0.5)}
"""Smallest and largest σ, γ and √β."""
CANDIDATES = ("random", "default")
"""`GIVEN` random rows, as in the paper, or the schedule's own candidates."""
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


def intensities(condition: str) -> list[float]:
    """Return five log-spaced values."""
    low, high = RANGES[condition]
    return [low * (high / low) ** (i / 4) for i in range(5)]


def sampled(condition: str, intensity: float, *, seed: int) -> Dataset:
    """Return the data of figure 3, which calls a longer lengthscale smoothness."""
    name = {"lengthscale": "smoothness"}.get(condition, condition)
    return synthetic.sampled(name, intensity, rows=DRAWN, seed=seed)


def lengthscale(model: SparseGP) -> float:
    """Return the lengthscale of the kernel."""
    (kernel,) = trainable_lengthscales(model.kernel)
    return kernel.lengthscale.item()


def run_synthetic(*, seeds: int) -> None:
    """Fit each setting with each seed; all hyper-parameters start at 1."""
    for condition in RANGES:
        for candidates in CANDIDATES:
            results = new_results(f"synthetic/{condition}-{candidates}")
            for index, intensity in enumerate(intensities(condition)):
                for seed in range(seeds):
                    data = sampled(condition, intensity, seed=seed)
                    row = {"condition": condition, "index": index, "intensity": intensity}
                    _fit_synthetic(results, data, {**row, "candidates": candidates, "seed": seed})
            print(f"{results.path.stem}: {len(list(results))} rows", flush=True)


def _fit_synthetic(results: Runs, data: Dataset, row: Row) -> None:
    """Fit one data set; its rows are independent draws, so the first K are random rows."""
    initial = data.X[:GIVEN] if row["candidates"] == "random" else data.X[:0]
    model = SparseGP(kernel_from("rbf", 1), initial)
    schedule = FastSchedule(Tolerance(TOLERANCE), n_candidates=512)
    generator = torch.Generator().manual_seed(row["seed"])
    fitted, seconds = timed(lambda: fit(model, data, schedule=schedule, generator=generator))
    assert fitted.evidence is not None
    results.add(
        {
            **row,
            "N": data.N,
            "K": GIVEN if len(initial) else schedule.n_candidates,
            "tolerance": TOLERANCE,
            "points": fitted.model.K,
            "bound": round(fitted.elbo, 3),
            "evidence": round(fitted.evidence.upper, 3),
            "noise": fitted.model.noise.item(),
            "lengthscale": lengthscale(fitted.model),
            **seconds.row(),
        }
    )


def report_synthetic() -> None:
    """Print the mean number of inducing points by intensity, and whether it falls throughout."""
    rows = read_results("synthetic/*")
    print(f"\nMean number of inducing points at a tolerance of {TOLERANCE} nats per observation.\n")
    lines = []
    for candidates in CANDIDATES:
        for condition in RANGES:
            runs = [r for r in rows if (r["condition"], r["candidates"]) == (condition, candidates)]
            means = [mean(r["points"] for r in runs if r["index"] == index) for index in range(5)]
            falls = all(b < a for a, b in pairwise(means))
            values = ", ".join(f"{value:.2f}" for value in intensities(condition))
            cells = [f"{m:.1f}" for m in means]
            lines.append([candidates, f"{condition} ({values})", *cells, falls])
    print(table(["candidates", "condition", "1", "2", "3", "4", "5", "falls"], lines))


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


def run_equal_size(names: Iterable[str], *, seeds: int) -> None:
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


def report_equal_size() -> None:
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


# Number of seeds, functions that measure and that print, by part.
PARTS = {
    "estimators": (3, selection_methods.run, selection_methods.report),
    "synthetic": (5, lambda _, *, seeds: run_synthetic(seeds=seeds), report_synthetic),
    "equal-size": (5, run_equal_size, report_equal_size),
}


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("parts", nargs="*", metavar="part", help=f"one of {', '.join(PARTS)}")
    parser.add_argument("--data", nargs="+", choices=list(ALPHAS), default=list(ALPHAS))
    parser.add_argument("--report", action="store_true", help="print results without measuring")
    arguments = parser.parse_args()
    parts = arguments.parts or PARTS
    if unknown := set(parts) - set(PARTS):
        parser.error(f"unknown part: {', '.join(sorted(unknown))}")
    torch.set_num_threads(1)
    for part in PARTS:
        if part in parts:
            seeds, run, report = PARTS[part]
            if not arguments.report:
                run(arguments.data, seeds=seeds)
            report()


if __name__ == "__main__":
    main()
