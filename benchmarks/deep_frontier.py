"""Two-layer deep GPs on kin8nm: selected allocations against pairs of sizes set by hand.

    python benchmarks/deep_frontier.py train --device cuda --seeds 3 4
    python benchmarks/deep_frontier.py time          # alone, on one CPU thread
    python benchmarks/deep_frontier.py summary

`train` trains the pairs of `winnow reproduce kin8nm-deep` from random rows for `UPDATES` updates of
all rows, and fits one `DeepGPRegressor`, whose smaller models are the other allocations. `time`
measures the prediction of a row for all sizes: median and quartiles of 25 calls. Settings were
chosen on split seed 0. Results are in benchmarks/results/deep.
"""

import torch

from deep_curves import DEFAULTS, initial_model, scores
from measure import RESULTS, Row, grouped, mean, parser_of, table, timed
from right_number_problems import split_table
from winnowgp import DeepGPRegressor
from winnowgp.data import Dataset
from winnowgp.experiments.kin8nm_deep import GRID
from winnowgp.experiments.runs import Runs
from winnowgp.linalg import single_thread
from winnowgp.models import DeepGP
from winnowgp.models.deep_costs import deep_predict_us
from winnowgp.models.deep_gp import estimate_elbo
from winnowgp.training.adam import Minibatches
from winnowgp.training.layer_training import LayerTraining
from winnowgp.training.schedules import training_context

UPDATES, SAMPLES, CALLS = 3000, 64, 25
MODELS = Runs(RESULTS / "deep" / "frontier.jsonl")
TIMES = Runs(RESULTS / "deep" / "frontier_times.jsonl")
# Nats per observation by which a pair must be better to count.
MARGIN = 0.003


def by_hand(sizes: tuple[int, int], train: Dataset, seed: int) -> tuple[DeepGP, float]:
    """Return a model with these sizes after `UPDATES` updates of all rows, and its ELBO."""
    device = train.X.device
    start = initial_model(
        train.X.cpu(), {**DEFAULTS, "sizes": sizes}, torch.Generator().manual_seed(seed)
    )
    model, generator = start.to(device), torch.Generator(device).manual_seed(seed)
    with training_context(None, generator=generator, callbacks=()) as context:
        training = LayerTraining(0.03, 1, 0.3, cooling=0.03)
        batches = Minibatches(train, None, generator)
        training.run(model, batches, "all", steps=UPDATES, context=context)
    return model, estimate_elbo(model, train, generator=generator) / train.N


def train_all(seed: int, device: str, *, pairs: bool) -> None:
    """Add the rows of one split."""
    problem = split_table("kin8nm", seed=seed, train=None)
    rows = problem.standardised()
    train = Dataset(torch.tensor(rows.X), torch.tensor(rows.y)[:, None]).to(torch.device(device))
    test = Dataset(torch.tensor(rows.X_test), torch.tensor(rows.y_test)[:, None]).to(train.X.device)
    offset = torch.tensor(problem.scale).log().item()

    def add(kind: str, model: DeepGP, sizes: tuple[int, ...], elbo: float, **more: object) -> None:
        nats = scores(model, test)["standardised_log_density"] - offset
        row = {"kind": kind, "seed": seed, "sizes": list(sizes), "elbo": elbo, "log_density": nats}
        print(MODELS.add({**row, **more})["kind"], sizes, f"{nats:.4f}", flush=True)

    model = DeepGPRegressor(
        2,
        n_candidates=150,
        tolerance=0.005,
        batch_size=None,
        epochs=(100, UPDATES, UPDATES),
        smaller_models=5,
        random_state=seed,
        device=device,
    )
    _, seconds = timed(lambda: model.fit(problem.X, problem.y))
    for each in model.scored_allocations(problem.X_test, problem.y_test):
        if each.log_density is not None:
            row = {"kind": "selected", "seed": seed, "sizes": list(each.sizes)}
            chosen = each.sizes == model.n_inducing_
            row |= {"elbo": each.elbo / problem.N, "log_density": each.log_density}
            print(MODELS.add({**row, "chosen": chosen, **seconds.row()})["sizes"], flush=True)
    if pairs:
        # Wide first layers first: they are quick and good.
        for sizes in sorted(GRID, key=lambda pair: (-pair[0] - 2 * (pair == (100, 100)), pair[1])):
            (found, elbo), seconds = timed(lambda sizes=sizes: by_hand(sizes, train, seed))
            add("by hand", found, sizes, elbo, **seconds.row())


def time_all() -> None:
    """Measure the prediction time of all sizes that have none."""
    done = {tuple(row["sizes"]) for row in TIMES}
    X = torch.randn(200, 8, dtype=torch.float64)
    sizes = sorted({tuple(row["sizes"]) for row in MODELS} - done)
    model = initial_model(X, {**DEFAULTS, "sizes": (10, 10)}, torch.Generator().manual_seed(0))
    with single_thread():
        # Sizes take turns, so that a busy moment does not fall on one of them.
        us = {each: list[float]() for each in sizes}
        for _ in range(CALLS):
            for each in sizes:
                us[each].append(deep_predict_us(model, each, samples=SAMPLES))
    for each, numbers in us.items():
        ordered = sorted(numbers)
        quartiles = [ordered[CALLS // 4], ordered[CALLS // 2], ordered[-1 - CALLS // 4]]
        TIMES.add({"sizes": list(each), "predict_us": quartiles[1], "quartiles": quartiles})


def summary() -> str:
    """Return a table of all sizes, and how many pairs are as quick and better."""
    times = {tuple(row["sizes"]): row["predict_us"] for row in TIMES}
    rows: list[Row] = [
        {**row, "us": times.get(tuple(row["sizes"]), float("nan"))} for row in MODELS
    ]
    lines = []
    for (kind, sizes), group in grouped(
        [{**row, "sizes": tuple(row["sizes"])} for row in rows], "kind", "sizes"
    ).items():
        better = 0
        for row in group if kind == "selected" else []:
            pairs = [r for r in rows if r["kind"] == "by hand" and r["seed"] == row["seed"]]
            better += sum(
                r["us"] <= row["us"] and r["log_density"] > row["log_density"] + MARGIN
                for r in pairs
            )
        nats = mean(row["log_density"] for row in group)
        elbo = mean(row["elbo"] for row in group)
        chosen = sum(row.get("chosen", False) for row in group)
        us = group[0]["us"]
        lines.append((us, (kind, sizes, len(group), chosen, f"{us:.0f}", elbo, nats, better)))
    ordered = [
        (*cells[:5], f"{cells[5]:.4f}", f"{cells[6]:.4f}", cells[7])
        for _, cells in sorted(lines, key=lambda line: line[0])
    ]
    header = ("", "sizes", "seeds", "chosen", "µs", "ELBO", "log density", "better pairs")
    return table(header, ordered)


def main() -> None:
    parser = parser_of(__doc__, seeds=(3,))
    parser.add_argument("what", choices=("train", "time", "summary"))
    parser.add_argument("--no-pairs", action="store_true", help="train no pairs set by hand")
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    if given.what == "train":
        for seed in given.seeds:
            train_all(seed, given.device, pairs=not given.no_pairs)
    elif given.what == "time":
        time_all()
    print(summary())


if __name__ == "__main__":
    main()
