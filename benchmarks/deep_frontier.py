"""Two-layer deep GPs: selected allocations against sizes, and inducing points, set by hand.

    python benchmarks/deep_frontier.py train --device cuda --seeds 3 4 5 6 7 --jobs 12
    python benchmarks/deep_frontier.py limits --device cuda --tables kin8nm kin40k --jobs 3
    python benchmarks/deep_frontier.py time          # alone, on one CPU thread
    python benchmarks/deep_frontier.py summary
    python benchmarks/deep_frontier.py page          # write the tables into the page

`train` fits one `DeepGPRegressor`, whose smaller models are the other allocations. Three of them
are compared with as many points in every layer that start at random rows or k-means centres.
Kin8nm also has the pairs of sizes of `winnow reproduce kin8nm-deep`, from random rows. All models
get as many updates: 3,000, and those of the smaller models before a smaller one. `limits` fits two
layers within a limit of the cost, with the same start and as many updates as the models of as many
random rows and k-means centres that it is compared with. `time` measures
the CPU time of the prediction of a row for all sizes: median and quartiles of 25 calls. Settings
were chosen on split seeds 0 and 1. Rows that exist already are not run again. Results are in
benchmarks/results/deep. A step of one model leaves a GPU idle most of the time: several processes
(`--jobs`) share it.
"""

from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, as_completed, wait
from functools import cache, partial
from math import isnan, log, nan
from multiprocessing import get_context
from statistics import fmean, stdev
from typing import Any, final

import torch

from deep_curves import DEFAULTS, initial_model, scores
from measure import (
    RESULTS,
    Row,
    Seconds,
    grouped,
    markdown,
    parser_of,
    replace_sections,
    table,
    timed,
)
from right_number_problems import split_table
from winnowgp import DeepGPRegressor
from winnowgp.data import Dataset
from winnowgp.experiments.deep import STARTS
from winnowgp.experiments.kin8nm_deep import GRID, deep_predict_us
from winnowgp.experiments.runs import Runs
from winnowgp.models import DeepGP
from winnowgp.models.deep_gp import estimate_elbo
from winnowgp.training import DeepTraining, FastSchedule, MaxCost, fit
from winnowgp.training.adam import Minibatches
from winnowgp.training.callbacks import SMALLER_MODEL, Progress
from winnowgp.training.layer_training import LayerTraining
from winnowgp.training.schedules import training_context

UPDATES, SAMPLES, CALLS = 3000, 64, 25
# Updates of a smaller model, and how many of the allocations are compared at equal sizes.
SMALLER, COMPARED = UPDATES // 2, 3
# Limits of Σ M², and updates of all models that are compared within them.
LIMITS, LIMITED = {"kin8nm": (15_000, 5_000), "kin40k": (28_000,)}, 4500
CANDIDATES = 150
# Largest number of rows of an update.
ROWS = 8192
MODELS = Runs(RESULTS / "deep" / "frontier.jsonl")
TIMES = Runs(RESULTS / "deep" / "frontier_times.jsonl")
# Nats per observation by which a pair must be better to count.
MARGIN = 0.003
PAPER = {(53, 92): 1.297, (37, 80): 1.272, (24, 71): 1.256, (11, 58): 1.185}
"""Sizes and densities that the paper's figure shows."""


def by_hand(
    sizes: tuple[int, ...], start: str, train: Dataset, seed: int, *, updates: int
) -> tuple[DeepGP, float]:
    """Return a model with these sizes after so many updates, and its ELBO per observation."""
    model, generator = _initial(sizes, train, seed)
    with torch.no_grad():
        for layer in model.layers:
            # Hidden layers start at the identity: their outputs are the inputs.
            layer.candidates.copy_(STARTS[start](train.X, layer.K, generator))
    with training_context(None, generator=generator, callbacks=()) as context:
        training = LayerTraining(0.03, 1, 0.3, cooling=0.03)
        training.run(
            model, Minibatches(train, ROWS, generator), "all", steps=updates, context=context
        )
    return model, estimate_elbo(model, train, generator=generator) / train.N


def within_cost(cost: float, train: Dataset, seed: int, *, updates: int) -> tuple[DeepGP, float]:
    """Return the model selected within a limit of Σ M², and its ELBO per observation.

    It starts like the others, with candidates at random rows, and has as many updates in all.
    """
    model, generator = _initial((CANDIDATES,) * 2, train, seed)
    deep = DeepTraining(layerwise=0, pre=updates // 2, post=updates - updates // 2, batch_size=ROWS)
    schedule = FastSchedule(MaxCost(cost), inclusion_steps=1, deep=deep)
    model = fit(model, train, schedule=schedule, generator=generator).model
    return model, estimate_elbo(model, train, generator=generator) / train.N


def _initial(sizes: tuple[int, ...], train: Dataset, seed: int) -> tuple[DeepGP, torch.Generator]:
    device = train.X.device
    model = initial_model(
        train.X.cpu(), {**DEFAULTS, "sizes": sizes}, torch.Generator().manual_seed(seed)
    )
    return model.to(device), torch.Generator(device).manual_seed(seed)


# Kind, sizes, start and number of updates of a model that is not selected.
Case = tuple[str, tuple[int, ...], str, int]


@final
class Split:
    """The fits of one split of a table."""

    def __init__(self, table: str, seed: int, device: str) -> None:
        self.table, self.seed, self.device = table, seed, device
        self.problem = split_table(table, seed=seed, train=None)
        rows, where = self.problem.standardised(), torch.device(device)
        self.train = Dataset(torch.tensor(rows.X), torch.tensor(rows.y)[:, None]).to(where)
        self.test = Dataset(torch.tensor(rows.X_test), torch.tensor(rows.y_test)[:, None]).to(where)

    def add(self, kind: str, sizes: Sequence[int], **more: object) -> None:
        """Write a row."""
        row = {"table": self.table, "kind": kind, "seed": self.seed, "sizes": list(sizes), **more}
        print(MODELS.add(row)["kind"], self.table, self.seed, sizes, more, flush=True)

    def select(self) -> None:
        """Fit the estimator, and write a row for each of its allocations."""
        problem, smaller = self.problem, list[tuple[int, ...]]()

        def record(progress: Progress) -> None:
            if progress.phase == SMALLER_MODEL and progress.step == progress.steps:
                smaller.append(tuple(len(points) for points in progress.candidates))

        model = DeepGPRegressor(
            2,
            n_candidates=CANDIDATES,
            tolerance=0.005,
            batch_size=ROWS,
            epochs=(100, UPDATES // 2, UPDATES // 2),
            smaller_models=4,
            random_state=self.seed,
            device=self.device,
            callbacks=record,
        )
        _, seconds = timed(lambda: model.fit(problem.X, problem.y))
        for each in model.scored_allocations(problem.X_test, problem.y_test):
            if each.log_density is not None:
                self.add(
                    "selected",
                    each.sizes,
                    elbo=each.elbo / problem.N,
                    log_density=each.log_density,
                    chosen=each.sizes == model.n_inducing_,
                    # A smaller model continues from the one before it.
                    updates=UPDATES + SMALLER * (1 + smaller.index(each.sizes))
                    if each.sizes in smaller
                    else UPDATES,
                    **seconds.row(),
                )

    def limited(self, kind: str, cost: int, updates: int) -> tuple[int, ...]:
        """Train a model within a limit, write its row unless there is one, and return its sizes."""
        for row in MODELS:
            if (row["table"], row["kind"], row["seed"]) == (self.table, kind, self.seed):
                return tuple(row["sizes"])
        found = partial(within_cost, cost, self.train, self.seed, updates=updates)
        (model, elbo), seconds = timed(found)
        self._write(kind, model, elbo, updates, seconds)
        return tuple(model.sizes)

    def _write(self, kind: str, model: DeepGP, elbo: float, updates: int, seconds: Seconds) -> None:
        nats = scores(model, self.test)["standardised_log_density"] - log(self.problem.scale)
        more = {"elbo": elbo, "log_density": nats, "updates": updates}
        self.add(kind, model.sizes, **more, **seconds.row())

    def set_by_hand(self, kind: str, sizes: tuple[int, ...], start: str, updates: int) -> None:
        """Train a model with these sizes, and write its row unless there is one."""
        if (self.table, kind, self.seed, sizes) in _rows():
            return
        found = partial(by_hand, sizes, start, self.train, self.seed, updates=updates)
        (model, elbo), seconds = timed(found)
        self._write(kind, model, elbo, updates, seconds)

    def comparisons(self) -> list[Case]:
        """Return as many points as selected ones, from other starts, with as many updates."""
        return [
            (f"as many, {start}", tuple(row["sizes"]), start, row["updates"])
            for row in self.allocations()[:COMPARED]
            for start in STARTS
        ]

    def allocations(self) -> list[Row]:
        """Return the selected models that are no larger than the chosen one, largest first."""
        rows = [
            row for key, row in _rows().items() if key[:3] == (self.table, "selected", self.seed)
        ]
        chosen = max((row["sizes"] for row in rows if row["chosen"]), default=[])
        smaller = [row for row in rows if row["sizes"] <= chosen]
        return sorted(smaller, key=lambda row: row["sizes"], reverse=True)


@cache
def _split(table: str, seed: int, device: str) -> Split:
    torch.set_num_threads(1)
    return Split(table, seed, device)


def _select(table: str, seed: int, device: str) -> list[Case]:
    """Fit the estimator unless it has rows, and return what is compared with it."""
    split = _split(table, seed, device)
    if not split.allocations():
        split.select()
    return split.comparisons()


def _train(table: str, seed: int, device: str, case: Case) -> None:
    _split(table, seed, device).set_by_hand(*case)


def train_all(
    tables: Sequence[str], seeds: Sequence[int], device: str, *, pairs: bool, jobs: int
) -> None:
    """Add the rows that are missing, by so many processes."""
    # Wide first layers first: they are quick and good.
    order = sorted(GRID, key=lambda p: (-p[0] - 2 * (p == (100, 100)), p[1]))
    splits = [(table, seed, device) for seed in seeds for table in tables]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        selections = {pool.submit(_select, *split): split for split in splits}
        left: set[Future[Any]] = {*selections}
        for split in splits:
            for sizes in order if pairs and split[0] == "kin8nm" else ():
                case = ("by hand", sizes, "random", UPDATES)
                if (split[0], case[0], split[1], sizes) not in _rows():
                    left.add(pool.submit(_train, *split, case))
        while left:
            done, left = wait(left, return_when=FIRST_COMPLETED)
            for future in done:
                if error := future.exception():
                    # The other models are trained all the same.
                    print(f"failed: {error!r}", flush=True)
                elif future in selections:
                    split = selections[future]
                    left |= {pool.submit(_train, *split, case) for case in future.result()}


def _limited(table: str, seed: int, device: str, cost: int, updates: int) -> None:
    """Train the model within a limit, and those of as many other points."""
    split = _split(table, seed, device)
    kind = f"within {cost}" if updates == LIMITED else f"within {cost} in {updates}"
    sizes = split.limited(kind, cost, updates)
    for start in STARTS:
        split.set_by_hand(f"as many {kind}, {start}", sizes, start, updates)


def limit_all(
    tables: Sequence[str], seeds: Sequence[int], device: str, *, updates: int, jobs: int
) -> None:
    """Add the rows that are missing; those of the first limit alone with other updates."""
    cases = [
        (name, seed, device, cost, updates)
        for name in tables
        for cost in (LIMITS[name] if updates == LIMITED else LIMITS[name][:1])
        for seed in seeds
    ]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        for future in as_completed([pool.submit(_limited, *case) for case in cases]):
            if error := future.exception():
                print(f"failed: {error!r}", flush=True)


def _rows() -> dict[tuple[Any, ...], Row]:
    """Return the rows of all models by their keys."""
    return {(row["table"], row["kind"], row["seed"], tuple(row["sizes"])): row for row in MODELS}


def time_all() -> None:
    """Measure the prediction time of all sizes that have none, in turns."""
    selected = [r for r in MODELS if (r["table"], r["kind"]) == ("kin8nm", "selected")]
    done = {tuple(row["sizes"]) for row in TIMES}
    sizes = sorted({*GRID, *PAPER, *(tuple(row["sizes"]) for row in selected)} - done)
    us = {each: list[float]() for each in sizes}
    # Sizes take turns, so that a busy moment does not fall on one of them.
    for _ in range(CALLS):
        for each in sizes:
            options = {"skip_connections": False, "samples": SAMPLES, "best_of": 1}
            us[each].append(deep_predict_us(each, **options))
    for each, numbers in us.items():
        ordered = sorted(numbers)
        quartiles = [ordered[CALLS // 4], ordered[CALLS // 2], ordered[-1 - CALLS // 4]]
        TIMES.add({"sizes": list(each), "predict_us": quartiles[1], "quartiles": quartiles})


def summary() -> str:
    """Return a table of all models, and the tables of the page."""
    rows = models()
    lines = [
        (
            row["table"],
            row["seed"],
            row["kind"] + ", chosen" * row.get("chosen", False),
            row["sizes"],
            *(f"{row['us']:.0f}", f"{row['elbo']:.4f}", f"{row['log_density']:.4f}"),
        )
        for row in sorted(rows, key=lambda r: (r["table"], r["seed"], r["us"]))
    ]
    header = ("table", "seed", "", "sizes", "µs", "ELBO", "log density")
    return "\n\n".join((table(header, lines), frontier_table(rows), gain_table(rows)))


def models() -> list[Row]:
    """Return the rows of all models, with the microseconds of a prediction."""
    times = {tuple(row["sizes"]): row for row in TIMES}
    return [
        {**row, "sizes": sizes, "us": time["predict_us"], "quartiles": time["quartiles"]}
        for row in MODELS
        for sizes in [tuple(row["sizes"])]
        for time in [times.get(sizes, {"predict_us": nan, "quartiles": [nan] * 3})]
    ]


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


GAINS = ("gain", "elbo gain")
SELECTED = (
    "selected, smallest",
    *(f"selected, {place} smallest" for place in ("second", "third", "fourth", "fifth")),
)


def _mean_and_error(values: list[float]) -> str:
    if len(values) == 1:
        return f"{values[0]:+.4f} (one split)"
    return f"{fmean(values):+.4f} ± {stdev(values) / len(values) ** 0.5:.4f}"


def write_page() -> None:
    """Write the tables into the page of benchmarks."""
    rows = models()
    replace_sections(
        RESULTS.parents[1] / "docs" / "benchmarks" / "deep.md",
        **{"frontier": frontier_table(rows), "equal-sizes": gain_table(rows)},
    )


def main() -> None:
    parser = parser_of(__doc__, seeds=(3,))
    parser.add_argument("what", choices=("train", "limits", "time", "summary", "page"))
    parser.add_argument("--tables", nargs="+", default=["kin8nm"])
    parser.add_argument("--no-pairs", action="store_true", help="no pairs of the grid")
    parser.add_argument("--updates", type=int, default=LIMITED, help="of models within limits")
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    if given.what == "train":
        pairs = not given.no_pairs
        train_all(given.tables, given.seeds, given.device, pairs=pairs, jobs=given.jobs)
    elif given.what == "limits":
        shared = given.tables, given.seeds, given.device
        limit_all(*shared, updates=given.updates, jobs=given.jobs)
    elif given.what == "time":
        time_all()
    if given.what == "page":
        write_page()
    else:
        print(summary())


if __name__ == "__main__":
    main()
