"""Two-layer deep GPs: selected allocations against sizes, and inducing points, set by hand.

    python benchmarks/deep_frontier.py train --device cuda --seeds 3 4 5 6 7 --jobs 12
    python benchmarks/deep_frontier.py train --device cuda --tables kin40k --no-pairs
    python benchmarks/deep_frontier.py time          # alone, on one CPU thread
    python benchmarks/deep_frontier.py summary

`train` fits one `DeepGPRegressor`, whose smaller models are the other allocations. Two of them are
compared with as many inducing points in every layer that start at random rows or k-means centres.
Kin8nm also has the pairs of sizes of `winnow reproduce kin8nm-deep`, from random rows. All models
get as many updates: 3,000, and those of the smaller models before a smaller one. `time` measures
the CPU time of the prediction of a row for all sizes: median and quartiles of 25 calls. Settings
were chosen on split seed 0. Rows that exist already are not run again. Results are in
benchmarks/results/deep. A step of one model leaves a GPU idle most of the time: several processes
(`--jobs`) share it.
"""

from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from functools import cache, partial
from math import log, nan
from multiprocessing import get_context
from statistics import fmean, stdev
from typing import Any, final

import torch

from deep_curves import DEFAULTS, initial_model, scores
from measure import RESULTS, Row, grouped, parser_of, table, timed
from right_number_problems import split_table
from winnowgp import DeepGPRegressor
from winnowgp.data import Dataset
from winnowgp.experiments.deep import STARTS
from winnowgp.experiments.kin8nm_deep import GRID, deep_predict_us
from winnowgp.experiments.runs import Runs
from winnowgp.models import DeepGP
from winnowgp.models.deep_gp import estimate_elbo
from winnowgp.training.adam import Minibatches
from winnowgp.training.layer_training import LayerTraining
from winnowgp.training.schedules import training_context

UPDATES, SAMPLES, CALLS = 3000, 64, 25
# Updates of a smaller model, and which of the allocations are compared at equal sizes.
SMALLER, COMPARED = UPDATES // 6, (0, 2)
# Largest number of rows of an update.
ROWS = 8192
MODELS = Runs(RESULTS / "deep" / "frontier.jsonl")
TIMES = Runs(RESULTS / "deep" / "frontier_times.jsonl")
# Nats per observation by which a pair must be better to count.
MARGIN = 0.003
# Number of settings: the chosen allocation and three smaller ones.
SETTINGS = 4
PAPER = {(53, 92): 1.297, (37, 80): 1.272, (24, 71): 1.256, (11, 58): 1.185}
"""Sizes and densities that the paper's figure shows."""


def by_hand(
    sizes: tuple[int, ...], start: str, train: Dataset, seed: int, *, updates: int
) -> tuple[DeepGP, float]:
    """Return a model with these sizes after so many updates, and its ELBO per observation."""
    device = train.X.device
    model = initial_model(
        train.X.cpu(), {**DEFAULTS, "sizes": sizes}, torch.Generator().manual_seed(seed)
    ).to(device)
    generator = torch.Generator(device).manual_seed(seed)
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
        problem = self.problem
        model = DeepGPRegressor(
            2,
            n_candidates=150,
            tolerance=0.005,
            batch_size=ROWS,
            epochs=(100, UPDATES // 2, UPDATES // 2),
            smaller_models=5,
            random_state=self.seed,
            device=self.device,
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
                    **seconds.row(),
                )

    def set_by_hand(self, kind: str, sizes: tuple[int, ...], start: str, updates: int) -> None:
        """Train a model with these sizes, and write its row unless there is one."""
        if (self.table, kind, self.seed, sizes) in _rows():
            return
        found = partial(by_hand, sizes, start, self.train, self.seed, updates=updates)
        (model, elbo), seconds = timed(found)
        nats = scores(model, self.test)["standardised_log_density"] - log(self.problem.scale)
        self.add(kind, sizes, elbo=elbo, log_density=nats, updates=updates, **seconds.row())

    def comparisons(self) -> list[Case]:
        """Return as many points as selected ones, from other starts."""
        return [
            (f"as many, {start}", sizes, start, UPDATES + number * SMALLER)
            for number in COMPARED
            for sizes in self.allocations()[number : number + 1]
            for start in STARTS
        ]

    def allocations(self) -> list[tuple[int, ...]]:
        """Return the selected sizes that are no larger than the chosen ones, largest first."""
        rows = [
            row for key, row in _rows().items() if key[:3] == (self.table, "selected", self.seed)
        ]
        chosen = [tuple(row["sizes"]) for row in rows if row["chosen"]]
        sizes = {tuple(row["sizes"]) for row in rows}
        return sorted((each for each in sizes if each <= max(chosen)), reverse=True)


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


def _rows() -> dict[tuple[Any, ...], Row]:
    """Return the rows of all models by their keys."""
    return {(row["table"], row["kind"], row["seed"], tuple(row["sizes"])): row for row in MODELS}


def time_all() -> None:
    """Measure the prediction time of all sizes, one after the other and in turns."""
    selected = [r for r in MODELS if (r["table"], r["kind"]) == ("kin8nm", "selected")]
    sizes = sorted({*GRID, *PAPER, *(tuple(row["sizes"]) for row in selected)})
    us = {each: list[float]() for each in sizes}
    # Sizes take turns, so that a busy moment does not fall on one of them.
    for _ in range(CALLS):
        for each in sizes:
            options = {"skip_connections": False, "samples": SAMPLES, "best_of": 1}
            us[each].append(deep_predict_us(each, **options))
    times = Runs(TIMES.path, replace=True)
    for each, numbers in us.items():
        ordered = sorted(numbers)
        quartiles = [ordered[CALLS // 4], ordered[CALLS // 2], ordered[-1 - CALLS // 4]]
        times.add({"sizes": list(each), "predict_us": quartiles[1], "quartiles": quartiles})


def summary() -> str:
    """Return a table of all sizes with how many pairs are as quick and better, and the gains."""
    times = {tuple(row["sizes"]): row["predict_us"] for row in TIMES}
    rows: list[Row] = [
        {**row, "sizes": tuple(row["sizes"]), "us": times.get(tuple(row["sizes"]), nan)}
        for row in MODELS
    ]
    lines = []
    for row in sorted(rows, key=lambda r: (r["table"], r["seed"], r["us"])):
        pairs = [r for r in rows if r["kind"] == "by hand" and r["seed"] == row["seed"]]
        better = [
            r["sizes"]
            for r in pairs
            if r["us"] <= row["us"] and r["log_density"] > row["log_density"] + MARGIN
        ]
        numbers = (f"{row['us']:.0f}", f"{row['elbo']:.4f}", f"{row['log_density']:.4f}")
        kind = row["kind"] + ", chosen" * row.get("chosen", False)
        beaten = len(better) if row["kind"] == "selected" and row["table"] == "kin8nm" else ""
        lines.append((row["table"], row["seed"], kind, row["sizes"], *numbers, beaten))
    header = ("table", "seed", "", "sizes", "µs", "ELBO", "log density", "better pairs")
    return f"{table(header, lines)}\n\n{settings(rows, times)}\n\n{gains(rows)}"


def settings(rows: list[Row], times: dict[tuple[int, ...], float]) -> str:
    """Return means over the splits of kin8nm, of pairs set by hand and of every selected setting.

    A setting is the chosen allocation of a split, or the first, second or third smaller one.
    """
    rows = [row for row in rows if row["table"] == "kin8nm"]
    groups = {
        f"by hand {sizes}": group
        for (kind, sizes), group in grouped(rows, "kind", "sizes").items()
        if kind == "by hand"
    }
    for (seed,) in grouped(rows, "seed"):
        own = [row for row in rows if row["kind"] == "selected" and row["seed"] == seed]
        # All that are trained longer than the chosen one are smaller.
        largest = max((row["us"] for row in own if row["chosen"]), default=nan)
        ordered = sorted((r for r in own if r["us"] <= largest), key=lambda r: -r["us"])
        for number, row in enumerate(ordered[:SETTINGS]):
            groups.setdefault(f"selected {number}", []).append(row)
    means = {
        name: {column: fmean(row[column] for row in group) for column in ("us", "log_density")}
        for name, group in groups.items()
    }
    splits = max(map(len, groups.values()), default=0)
    lines = []
    for name, mean in sorted(means.items(), key=lambda item: item[1]["us"]):
        sizes = [
            f"{fmean(each):.0f}" for each in zip(*(r["sizes"] for r in groups[name]), strict=True)
        ]
        better = [
            other.removeprefix("by hand ")
            for other, pair in means.items()
            if other.startswith("by hand") and len(groups[other]) == splits
            if pair["us"] <= mean["us"] and pair["log_density"] > mean["log_density"] + MARGIN
        ]
        numbers = (f"{mean['us']:.1f}", f"{mean['log_density']:.4f}")
        beaten = " ".join(better) if name.startswith("selected") else ""
        lines.append((name, len(groups[name]), " + ".join(sizes), *numbers, beaten))
    for sizes, nats in PAPER.items():
        us = times.get(sizes, nan)
        lines.append(("the paper", "", " + ".join(map(str, sizes)), f"{us:.1f}", f"{nats:.4f}", ""))
    return table(("", "splits", "points", "µs", "log density", "as quick and better"), lines)


def gains(rows: list[Row]) -> str:
    """Return the gain of selected inducing points over as many others, and its standard error."""
    selected = {(r["table"], r["seed"], r["sizes"]): r for r in rows if r["kind"] == "selected"}
    compared = [
        {**r, "gain": own["log_density"] - r["log_density"], "elbo gain": own["elbo"] - r["elbo"]}
        for r in rows
        if r["kind"].startswith("as many")
        and (own := selected.get((r["table"], r["seed"], r["sizes"])))
    ]
    lines = [
        (*key, len(group), *(_mean_and_error([r[name] for r in group]) for name in GAINS))
        for key, group in grouped(compared, "table", "kind", "updates").items()
    ]
    return table(("table", "against", "updates", "splits", *GAINS), lines)


GAINS = ("gain", "elbo gain")


def _mean_and_error(values: list[float]) -> str:
    error = stdev(values) / len(values) ** 0.5 if len(values) > 1 else nan
    return f"{fmean(values):+.4f} ± {error:.4f}"


def main() -> None:
    parser = parser_of(__doc__, seeds=(3,))
    parser.add_argument("what", choices=("train", "time", "summary"))
    parser.add_argument("--tables", nargs="+", default=["kin8nm"])
    parser.add_argument("--no-pairs", action="store_true", help="no pairs of the grid")
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    if given.what == "train":
        pairs = not given.no_pairs
        train_all(given.tables, given.seeds, given.device, pairs=pairs, jobs=given.jobs)
    elif given.what == "time":
        time_all()
    print(summary())


if __name__ == "__main__":
    main()
