"""Deep GPs with hand-set sizes: test log density against seconds of training.

    python benchmarks/deep_curves.py --device cuda --cases two three --seconds 120
    python benchmarks/deep_curves.py --summary

Every case trains all layers together, from hidden layers at the identity, for about so many
seconds: the first steps are timed, and the learning rate decreases over the last third. A row of
benchmarks/results/deep/curves.jsonl is written every few seconds, and one at the end. Settings are
compared on split seed 0.
"""

from time import perf_counter
from typing import Any

import torch
from gpytorch.likelihoods import GaussianLikelihood

from measure import RESULTS, Row, grouped, parser_of, table
from right_number_problems import split_table
from winnowgp.data import Dataset
from winnowgp.estimators.deep_training import initial_kernel
from winnowgp.experiments.runs import Runs
from winnowgp.models import DeepGP, deep_layers
from winnowgp.models.deep_gp import estimate_elbo
from winnowgp.training.adam import Minibatches
from winnowgp.training.callbacks import Progress
from winnowgp.training.layer_training import LayerTraining
from winnowgp.training.schedules import training_context

Settings = dict[str, Any]

DEFAULTS: Settings = {
    "table": "kin40k",
    "sizes": (512, 1024),
    "width": 8,
    "skip": False,
    "batch": 4096,
    "rate": 0.01,
    "natural": 0.1,
    "hidden": None,
    "samples": 1,
}
CASES: dict[str, Settings] = {
    "two": {},
    "three": {"sizes": (512, 512, 1024)},
    "two quick": {"rate": 0.03, "natural": 0.3},
    "two natural": {"hidden": 0.1},
    "two wide": {"width": 16},
    "two large": {"sizes": (1024, 2048)},
    "three natural": {"sizes": (512, 512, 1024), "hidden": 0.1},
    "three small": {"sizes": (256, 256, 512), "rate": 0.02},
    "kin8nm": {"table": "kin8nm", "sizes": (100, 100), "batch": 1024, "rate": 0.03, "natural": 0.3},
    "kin8nm slow": {"table": "kin8nm", "sizes": (100, 100), "batch": 1024},
    "kin8nm all rows": {
        "table": "kin8nm",
        "sizes": (100, 100),
        "batch": None,
        "rate": 0.03,
        "natural": 0.3,
    },
    "kin8nm natural": {
        "table": "kin8nm",
        "sizes": (100, 100),
        "batch": 1024,
        "rate": 0.03,
        "natural": 0.3,
        "hidden": 0.1,
    },
}
TIMED, TEST_SAMPLES, CHUNK = 60, 32, 1000


def initial_model(X: torch.Tensor, settings: Settings, generator: torch.Generator) -> DeepGP:
    """Return an untrained model with inducing points at random rows."""
    sizes, D = settings["sizes"], X.shape[1]
    rows = X[torch.randperm(len(X), generator=generator)[: max(sizes)]]
    hidden = len(sizes) - 1
    layers = deep_layers(
        X,
        rows,
        kernel=lambda number, inputs: initial_kernel("rbf", inputs, number < hidden),
        widths=(*(settings["width"] or D,) * hidden, 1),
        skip_connections=settings["skip"],
    )
    likelihood = GaussianLikelihood()
    likelihood.noise = torch.tensor(0.1)
    model = DeepGP(layers, likelihood=likelihood, skip_connections=settings["skip"])
    return model.prune([torch.arange(max(sizes)) < size for size in sizes])


@torch.no_grad()
def scores(model: DeepGP, test: Dataset) -> Row:
    """Return test log density and RMSE of standardised targets."""
    posterior, nats, errors = model.posterior(samples=TEST_SAMPLES), [], []
    for x, y in zip(test.X.split(CHUNK), test.Y.split(CHUNK), strict=True):
        nats.append(posterior.log_density(x, y))
        errors.append((posterior.predict(x).mean - y).square())
    return {
        "standardised_log_density": torch.cat(nats).mean().item(),
        "standardised_rmse": torch.cat(errors).mean().sqrt().item(),
    }


def curve(
    runs: Runs, case: str, *, seed: int, rows: int | None, seconds: float, every: float, device: str
) -> None:
    """Train one case, and write rows as it is trained."""
    settings = {**DEFAULTS, **CASES[case]}
    problem = split_table(settings["table"], seed=seed, train=rows).standardised()
    X, X_test = torch.tensor(problem.X), torch.tensor(problem.X_test)
    y, y_test = torch.tensor(problem.y)[:, None], torch.tensor(problem.y_test)[:, None]
    model = initial_model(X, settings, torch.Generator().manual_seed(seed)).to(device)
    where = torch.device(device)
    train, test = Dataset(X, y).to(where), Dataset(X_test, y_test).to(where)
    generator = torch.Generator(device=device).manual_seed(seed)
    identity = {"case": case, "seed": seed, "n_train": train.N, "device": device, **settings}
    clock = {"start": perf_counter(), "last": perf_counter(), "out": 0.0}

    def record(progress: Progress) -> None:
        now = perf_counter()
        if now - clock["last"] < every:
            return
        row = {"step": progress.step, "steps": progress.steps, "elbo": progress.objective / train.N}
        row["seconds"] = now - clock["start"] - clock["out"]
        runs.add({**identity, **row, **scores(model, test)})
        clock["last"] = perf_counter()
        clock["out"] += clock["last"] - now

    def training(cooling: float) -> LayerTraining:
        return LayerTraining(
            settings["rate"],
            settings["samples"],
            settings["natural"],
            settings["hidden"],
            cooling=cooling,
        )

    with training_context(None, generator=generator, callbacks=record) as context:
        batches = Minibatches(train, settings["batch"], generator)
        training(1.0).run(model, batches, "first", steps=TIMED, context=context)
        timed = perf_counter()
        training(1.0).run(model, batches, "timed", steps=TIMED, context=context)
        step = (perf_counter() - timed) / TIMED
        steps = max(1, int(seconds / step))
        runs.add({**identity, "step": 2 * TIMED, "step_ms": 1e3 * step, "steps": steps})
        training(0.03).run(model, batches, "all", steps=steps, context=context)
        elbo = estimate_elbo(model, train, generator=generator) / train.N
    row = {"step": steps, "steps": steps, "elbo": elbo, "final": True}
    row["seconds"] = perf_counter() - clock["start"] - clock["out"]
    runs.add({**identity, **row, **scores(model, test)})


def summary(rows: list[Row]) -> str:
    """Return a table of the last row of every case."""
    lines = []
    for (case, seed), group in grouped(rows, "case", "seed").items():
        last = group[-1]
        ms = [row["step_ms"] for row in group if "step_ms" in row]
        numbers = [last.get(name, float("nan")) for name in ("elbo", *SCORES)]
        lines.append(
            (
                case,
                seed,
                last["sizes"],
                f"{ms[-1]:.1f}" if ms else "",
                f"{last['step']}/{last['steps']}",
                f"{last.get('seconds', 0):.0f}",
                *(f"{number:.3f}" for number in numbers),
            )
        )
    return table(("case", "seed", "sizes", "ms", "steps", "s", "ELBO", "test", "RMSE"), lines)


SCORES = ("standardised_log_density", "standardised_rmse")


def main() -> None:
    parser = parser_of(__doc__, seeds=(0,))
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--rows", type=int, help="number of training rows; 90 %% if not given")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--every", type=float, default=15.0, help="seconds between two rows")
    parser.add_argument("--name", default="curves", help="name of the result file")
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    runs = Runs(RESULTS / "deep" / f"{given.name}.jsonl")
    if not given.summary:
        for seed in given.seeds:
            for case in given.cases:
                curve(
                    runs,
                    case,
                    seed=seed,
                    rows=given.rows,
                    seconds=given.seconds,
                    every=given.every,
                    device=given.device,
                )
                print(summary(list(runs)), flush=True)
    print(summary(list(runs)))


if __name__ == "__main__":
    main()
