"""Deep GPs: accuracy and cost of fits, and the cost of a step of the paper's point process.

    python benchmarks/deep.py fits                              # kin8nm, concrete, energy
    python benchmarks/deep.py fits --tables kin40k --fits two three --device cuda
    python benchmarks/deep.py fits --quick --rows 1000 --tables kin8nm   # a part of the rows
    python benchmarks/deep.py fits --summary
    python benchmarks/deep.py fits --summary --page             # and write the table of the page
    python benchmarks/deep.py step
    python benchmarks/deep.py predict                           # against GPyTorch's deep GP
    python benchmarks/deep.py points                            # inducing points at held-out rows

`fits` compares the estimators of `FITS` on splits of a table (90 % of the rows of a seeded
permutation). Settings were chosen on seeds 0 to 2; seeds from 3 on are
reported. Rows that exist already are not run again.

`step` compares a step of four subsets with four ordinary training steps: kin8nm, two layers of 150
candidates, minibatches of 4,096 of 7,000 rows, one thread. All subsets go through all layers in one
batched pass, padded to the largest subset. The ratio depends on how many candidates a draw
includes, so it is measured at three inclusion probabilities.

`predict` compares the CPU time of the prediction of 10,000 rows with 64 samples with that of
GPyTorch's deep GP of the same sizes (8 inputs, 8 hidden outputs), one thread, alternating.

`points` shows why a shallow GP that is compared on held-out rows has no inducing points at them.

Results are in benchmarks/results/deep.
"""

import argparse
from dataclasses import asdict
from functools import partial
from math import log
from pathlib import Path
from statistics import fmean, median, stdev
from time import perf_counter
from typing import Any

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import Kernel, MaternKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.means import ConstantMean
from gpytorch.models.deep_gps import DeepGP as PeerModel
from gpytorch.models.deep_gps import DeepGPLayer
from gpytorch.settings import num_likelihood_samples
from gpytorch.variational import CholeskyVariationalDistribution, VariationalStrategy

from measure import (
    RESULTS,
    Row,
    Seconds,
    grouped,
    markdown,
    new_results,
    parser_of,
    replace_sections,
    run_missing,
    table,
    timed,
)
from right_number_problems import Problem, split_table
from winnowgp import DeepGPRegressor, SparseGPRegressor
from winnowgp.data import Dataset, Standardiser
from winnowgp.data.catalogue import load_table
from winnowgp.estimators.base import rows_at_once
from winnowgp.estimators.deep import DeepEstimator
from winnowgp.estimators.deep_shallow import points_of_part
from winnowgp.estimators.kernels import kernel_from
from winnowgp.experiments.runs import Runs
from winnowgp.gradients import ScoreFunction
from winnowgp.linalg import single_thread
from winnowgp.models import DeepGP, DeepPosterior, SparseGP, deep_layers
from winnowgp.point_processes import Bernoulli
from winnowgp.training.depth import held_out, log_densities

TABLES = ("kin8nm", "concrete", "energy")
SEEDS = (3, 4, 5)
# With this strength only points without any effect are removed.
NOTHING = 1e-8
# Kin40k has fine structure, and needs more candidates than the default.
LARGE = {"n_candidates": 512, "epochs": (100, 4000, 1500), "batch_size": 4096}
FITS = {
    "shallow": lambda: SparseGPRegressor(),
    "one": lambda: DeepGPRegressor(1),
    "two": lambda: DeepGPRegressor(2),
    "three": lambda: DeepGPRegressor(3),
    "auto": lambda: DeepGPRegressor("auto"),
    "three_deep": lambda: DeepGPRegressor(3, shallow_alternative=False),
    "two_500": lambda: DeepGPRegressor(2, n_candidates=500, shallow_alternative=False),
    "two all": lambda: DeepGPRegressor(2, alpha=NOTHING),
    "two 50 us": lambda: DeepGPRegressor(2, max_predict_us=50.0),
    "two 200 us": lambda: DeepGPRegressor(2, max_predict_us=200.0),
}
"""Estimators by name: "two all" keeps all candidates of both layers; "three_deep" and "two_500" are
not compared with a shallow GP."""
# A fit of about half a minute on one thread, with 1,000 rows.
QUICK = {"n_candidates": 40, "epochs": (100, 400, 200)}
PUBLISHED = {
    "concrete": "−3.175 (10 other splits)",
    "energy": "−0.721 (10 other splits)",
    "protein": "−2.846 (10 other splits)",
    "kin8nm": "1.291 (one other split)",
    "kin40k": "",
}
"""Test log densities of two-layer deep GPs with 100 + 100 points: bayesian_benchmarks, and the
notebook of Doubly-Stochastic-DGP."""
KEYS = ("table", "rows", "quick", "fit", "seed")
TIMED_ROWS, TIMINGS = 500, 25
# Rows and timings of models that take more than 20 milliseconds per row.
SLOW_ROWS, SLOW_TIMINGS = 50, 5
# Rows of a prediction by GPyTorch.
PEER_ROWS = (50, 500)

K, S, ROWS, BATCH, REPEATS = 150, 4, 7000, 4096, 8


def fit_row(name: str, rows: int | None, quick: bool, fit: str, seed: int, *, device: str) -> Row:
    """Fit an estimator to a split of a table, and score it on the test rows."""
    problem = split_table(name, seed=seed, train=rows)
    model = FITS[fit]()
    model.set_params(random_state=seed, device=device)
    deep = isinstance(model, DeepEstimator)
    if deep:
        # Smaller models are not compared here.
        model.set_params(smaller_models=0)
    if deep and (quick or name == "kin40k"):
        model.set_params(**(QUICK if quick else LARGE))
    _, seconds = timed(lambda: model.fit(problem.X, problem.y))
    return {
        **dict(zip(KEYS, (name, rows, quick, fit, seed), strict=True)),
        "n_train": problem.N,
        "device": device,
        "n_inducing": list(model.n_inducing_) if deep else [model.n_inducing_],
        "elbo": model.elbo_ / problem.N,
        "elbo_gap": model.elbo_gap_,
        **_scores(model.predicting_on(device), problem),
        **_predict_us(model, problem),
        **_comparison(model),
        **seconds.row(),
    }


def _comparison(model: DeepGPRegressor | SparseGPRegressor) -> Row:
    """Return how a deep fit was compared with a shallow one, if it was."""
    compared = model.comparison_ if isinstance(model, DeepGPRegressor) else None
    return {} if compared is None else {"comparison": asdict(compared)}


def _scores(model: DeepGPRegressor | SparseGPRegressor, problem: Problem) -> Row:
    nats = model.log_density(problem.X_test, problem.y_test).mean()
    error = ((model.predict(problem.X_test) - problem.y_test) ** 2).mean() ** 0.5
    return {
        "log_density": float(nats),
        "standardised_log_density": float(nats) + log(problem.scale),
        "standardised_rmse": float(error) / problem.scale,
    }


def _predict_us(model: DeepGPRegressor | SparseGPRegressor, problem: Problem) -> Row:
    """Return the median and the quartiles of the time of a row, on one CPU thread."""
    X, seconds = problem.X_test[:SLOW_ROWS], []
    with single_thread():
        _, first = timed(lambda: model.predict(X, return_std=True))
        slow = first.wall > 2e-2 * len(X)
        if not slow:
            X = problem.X_test[:TIMED_ROWS]
            model.predict(X, return_std=True)
        for _ in range(SLOW_TIMINGS if slow else TIMINGS):
            start = perf_counter()
            model.predict(X, return_std=True)
            seconds.append(perf_counter() - start)
    us = sorted(1e6 * each / len(X) for each in seconds)
    return {
        "predict_us": median(us),
        "predict_us_quartiles": [us[len(us) // 4], us[-1 - len(us) // 4]],
    }


def summary(rows: list[Row]) -> str:
    """Return a table of the means over seeds, and the paired gain over the shallow fit."""
    shallow = {(r["table"], r["rows"], r["seed"]): r for r in rows if r["fit"] == "shallow"}
    lines = []
    for (name, count, quick, fit), group in grouped(rows, *KEYS[:-1]).items():
        pairs = [(r, shallow.get((name, count, r["seed"]))) for r in group]
        gains = [r["log_density"] - s["log_density"] for r, s in pairs if s is not None]
        error = stdev(gains) / len(gains) ** 0.5 if len(gains) > 1 else float("nan")
        sizes = zip(*(r["n_inducing"] for r in group), strict=False)
        lines.append(
            (
                name,
                count or "all",
                f"{fit}{', quick' * quick}",
                len(group),
                ", ".join(f"{fmean(each):.0f}" for each in sizes),
                *(
                    f"{fmean(r[column] for r in group):.{digits}f}"
                    for column, digits in (
                        ("elbo", 3),
                        ("log_density", 3),
                        ("standardised_log_density", 3),
                        ("predict_us", 0),
                        ("cpu_s", 0),
                        ("wall_s", 0),
                    )
                ),
                f"{fmean(gains):+.3f} ± {error:.3f}" if gains else "",
            )
        )
    header = ("table", "rows", "fit", "seeds", "points", "ELBO", "log density", "standardised")
    return table((*header, "µs", "CPU s", "wall s", "over shallow"), lines)


def page_table(rows: list[Row]) -> str:
    """Return two layers against the shallow default on the same splits, and published figures.

    Only fits of all training rows with default settings count. The difference is the mean over the
    splits that both have, with its standard error.
    """
    rows = [row for row in rows if row["rows"] is None and not row["quick"]]
    shallow = {(row["table"], row["seed"]): row for row in rows if row["fit"] == "shallow"}
    lines = []
    two = grouped([row for row in rows if row["fit"] == "two"], "table", "device")
    for name, device in sorted(two, key=lambda key: list(PUBLISHED).index(key[0])):
        deep = two[name, device]
        pairs = [
            (row, shallow[name, row["seed"]]) for row in deep if (name, row["seed"]) in shallow
        ]
        gains = [two["log_density"] - one["log_density"] for two, one in pairs]
        density = [row["log_density"] for row in deep]
        points = zip(*(row["n_inducing"] for row in deep), strict=True)
        identity = sum(row["n_inducing"][0] == 1 for row in deep)
        lines.append(
            (
                name,
                {"cpu": "CPU", "cuda": "GPU"}[device],
                ", ".join(str(row["seed"]) for row in sorted(deep, key=lambda r: r["seed"])),
                ", ".join(f"{fmean(each):.0f}" for each in points),
                f"{identity} of {len(deep)}",
                f"{fmean(density):.3f} ({min(density):.3f} to {max(density):.3f})",
                f"{fmean(one['log_density'] for _, one in pairs):.3f}" if pairs else "",
                _mean_and_error(gains) if gains else "",
                PUBLISHED[name] or "",
            )
        )
    header = [
        "table",
        "device",
        "seeds of the splits",
        "inducing points, mean",
        "shallow GP selected",
    ]
    header += [">two layers: test log density", ">shallow default, same splits", ">difference"]
    return markdown([*header, "published two layers, 100 + 100"], lines)


def _mean_and_error(gains: list[float]) -> str:
    if len(gains) == 1:
        return f"{gains[0]:+.3f} (one split)"
    return f"{fmean(gains):+.3f} ± {stdev(gains) / len(gains) ** 0.5:.3f} ({len(gains)} splits)"


def fits(arguments: argparse.Namespace) -> None:
    """Run the fits that have no row yet, and print all."""
    runs = Runs(arguments.results)
    if not arguments.summary:
        cases = [
            (name, arguments.rows, arguments.quick, fit, seed)
            for seed in arguments.seeds
            for name in arguments.tables
            for fit in arguments.fits
        ]
        work = partial(fit_row, device=arguments.device)
        for row in run_missing(runs, work, cases, keys=KEYS, jobs=arguments.jobs):
            print({name: value for name, value in row.items() if name != "versions"}, flush=True)
    print(summary(list(runs)))
    if arguments.page:
        pages = RESULTS.parents[1] / "docs" / "benchmarks"
        replace_sections(pages / "deep.md", **{"deep-fits": page_table(list(runs))})


def problem() -> tuple[DeepGP, Dataset]:
    """Return the model before training, and one minibatch."""
    rows = load_table("kin8nm").dataset()
    X = Standardiser.of(rows.X).forward(rows.X)[:ROWS]
    Y = Standardiser.of(rows.Y).forward(rows.Y)[:ROWS]

    def kernel(number: int, inputs: int) -> Kernel:
        return kernel_from("rbf", inputs)

    layers = deep_layers(X, X[:K], kernel=kernel, widths=(8, 1), q_scale=0.1)
    model = DeepGP(layers, likelihood=GaussianLikelihood())
    return model, Dataset(X[:BATCH], Y[:BATCH])


def step() -> None:
    """Alternate ordinary steps and steps of the point process, and compare their CPU times."""
    torch.set_num_threads(1)
    model, batch = problem()
    generator = torch.Generator().manual_seed(0)
    ordinary_optimiser = torch.optim.Adam(model.parameters(), lr=1e-4)

    def ordinary() -> None:
        ordinary_optimiser.zero_grad()
        (-model.bound(batch, total=ROWS, generator=generator)).backward()
        ordinary_optimiser.step()

    def process(logits: torch.Tensor, optimiser: torch.optim.Adam) -> None:
        optimiser.zero_grad()
        objective = model.subset_objective(batch, total=ROWS, generator=generator)
        gradient = ScoreFunction(S)
        step = gradient.step(
            Bernoulli(logits), objective.value, state=gradient.init(), generator=generator
        )
        (-step.surrogate).backward()
        optimiser.step()

    results = new_results("deep/process_step")
    ordinary()
    for inclusion in (0.3, 0.5, 0.95):
        start = torch.full((sum(model.sizes),), inclusion, dtype=torch.float64)
        logits = torch.nn.Parameter(torch.logit(start))
        optimiser = torch.optim.Adam([*model.parameters(), logits], lr=1e-4)
        process(logits, optimiser)
        process_time, ordinary_time = Seconds(0, 0), Seconds(0, 0)
        for _ in range(REPEATS):
            ordinary_time += timed(ordinary)[1]
            process_time += timed(partial(process, logits, optimiser))[1]
        ratio = process_time.cpu / (S * ordinary_time.cpu)
        results.add(
            {
                "inclusion": inclusion,
                "ordinary_cpu_s": ordinary_time.cpu / REPEATS,
                "process_cpu_s": process_time.cpu / REPEATS,
                "ratio": ratio,
            }
        )
        print(
            f"inclusion {inclusion}: a step of {S} subsets takes {process_time.cpu / REPEATS:.2f} "
            f"s, {ratio:.2f} times {S} ordinary steps of {ordinary_time.cpu / REPEATS:.2f} s"
        )


class PeerLayer(DeepGPLayer):
    """A layer of GPyTorch's deep GP, as in its documentation."""

    def __init__(self, inputs: int, outputs: int | None, points: int) -> None:
        batch = torch.Size([]) if outputs is None else torch.Size([outputs])
        q = CholeskyVariationalDistribution(points, batch_shape=batch)
        strategy = VariationalStrategy(self, torch.randn(*batch, points, inputs), q)
        super().__init__(strategy, inputs, outputs)
        self.mean_module = ConstantMean(batch_shape=batch)
        base = RBFKernel(batch_shape=batch, ard_num_dims=inputs)
        self.covar_module = ScaleKernel(base, batch_shape=batch)

    def forward(self, x: torch.Tensor) -> MultivariateNormal:
        mean: Any = self.mean_module(x)
        return MultivariateNormal(mean, self.covar_module(x))


class PeerDeepGP(PeerModel):
    """GPyTorch's deep GP of two layers."""

    def __init__(self, sizes: tuple[int, int]) -> None:
        super().__init__()
        self.hidden, self.last = PeerLayer(8, 8, sizes[0]), PeerLayer(8, None, sizes[1])

    def forward(self, x: torch.Tensor) -> MultivariateNormal:
        return self.last(self.hidden(x))


@torch.no_grad()
def predict() -> None:
    """Predict 10,000 rows with 64 samples, and compare with GPyTorch."""
    torch.set_num_threads(1)
    X = torch.randn(10_000, 8, dtype=torch.float64)
    results, generator = new_results("deep/predict"), torch.Generator().manual_seed(0)
    for sizes in ((50, 50), (100, 100), (100, 30)):
        largest = torch.randn(max(sizes), 8, generator=generator, dtype=torch.float64)

        def kernel(number: int, inputs: int) -> Kernel:
            return kernel_from("rbf", inputs)

        layers = deep_layers(X, largest, kernel=kernel, widths=(8, 1), q_scale=0.1)
        model = DeepGP(layers, likelihood=GaussianLikelihood())
        masks = [torch.arange(len(largest)) < size for size in sizes]
        posterior = model.prune(masks).posterior(samples=64)
        size = rows_at_once(posterior)
        peer = PeerDeepGP(sizes).double().eval()

        def own(posterior: DeepPosterior = posterior, size: int = size) -> None:
            for rows in X.split(size):
                posterior.predict(rows)

        def other(chunk: int, peer: PeerDeepGP = peer) -> torch.Tensor:
            with num_likelihood_samples(64):
                predicted: list[Any] = [peer(rows) for rows in X.split(chunk)]
                return torch.cat([each.variance for each in predicted], -1)

        # GPyTorch computes covariances among the rows of a call: two numbers of rows are tried.
        calls = {"ours": own, **{f"GPyTorch, {n}": partial(other, n) for n in PEER_ROWS}}
        times = [{name: timed(call)[1].cpu for name, call in calls.items()} for _ in range(3)]
        # The first predictions allocate memory.
        middle = {name: median(each[name] for each in times[1:]) for name in calls}
        results.add({"sizes": sizes, "cpu_s": middle, "runs": times})
        print(sizes, {name: round(seconds, 2) for name, seconds in middle.items()}, flush=True)


@torch.no_grad()
def held_out_points() -> None:
    """Predict rows that are held out, and new ones, with inducing points at any row or at others.

    4,000 rows of protein, a Matérn 1/2 kernel with lengthscales of 0.5, noise of 0.02, and 1,600
    random rows as inducing points; a tenth is held out.
    """
    results = new_results("deep/held_out_points")
    for seed in (3, 4, 5):
        split = split_table("protein", seed=seed, train=4000)
        X, y = (torch.tensor(each) for each in (split.X, split.y[:, None]))
        x_scaler, y_scaler = Standardiser.of(X), Standardiser.of(y)
        data = Dataset.of(x_scaler.forward(X), y_scaler.forward(y))
        X, y = (torch.tensor(each) for each in (split.X_test[:2000], split.y_test[:2000, None]))
        new = Dataset.of(x_scaler.forward(X), y_scaler.forward(y))
        generator = torch.Generator().manual_seed(seed)
        kernel = kernel_from("matern12", data.D)
        for module in kernel.modules():
            if isinstance(module, MaternKernel):
                module.initialize(lengthscale=0.5)
        points = data.X[torch.randperm(data.N, generator=generator)[:1600]]
        test, train = held_out(data, share=0.1, generator=generator)

        def density(
            points: torch.Tensor, part: Dataset, test: Dataset, kernel: Kernel = kernel
        ) -> float:
            model = SparseGP(kernel, points, noise=0.02)
            return float(log_densities(model.posterior(part), test).mean())

        row = {
            "seed": seed,
            "new": density(points, data, new),
            "at_held_out_rows": density(points, train, test),
            "moved": density(points_of_part(train, test, points), train, test),
        }
        print(results.add(row))


def main() -> None:
    parser = parser_of(__doc__, seeds=SEEDS)
    parser.add_argument("what", choices=("fits", "step", "predict", "points"))
    parser.add_argument("--tables", nargs="+", default=list(TABLES))
    parser.add_argument("--fits", nargs="+", default=list(FITS), choices=list(FITS))
    parser.add_argument("--rows", type=int, help="number of training rows; 90 %% if not given")
    parser.add_argument("--quick", action="store_true", help="fewer candidates and steps")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--results", type=Path, default=RESULTS / "deep" / "fits.jsonl")
    parser.add_argument("--page", action="store_true", help="write the table of the page")
    arguments = parser.parse_args()
    if arguments.what == "step":
        step()
    elif arguments.what == "predict":
        predict()
    elif arguments.what == "points":
        held_out_points()
    else:
        fits(arguments)


if __name__ == "__main__":
    main()
