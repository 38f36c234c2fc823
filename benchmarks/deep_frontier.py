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
from math import log, nan
from multiprocessing import get_context
from typing import Any, final

import torch

from deep_curves import DEFAULTS, initial_model, scores
from deep_frontier_tables import PAPER, TIMES, frontier_table, gain_table
from measure import (
    RESULTS,
    Row,
    Seconds,
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
            shallow_alternative=False,
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
