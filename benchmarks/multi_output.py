"""Several targets from processes of differing smoothness: points per process, test density.

    python benchmarks/multi_output.py --seeds 20 21 22 23 24 --jobs 2
    python benchmarks/multi_output.py --speed cpu              # P = 48, N = 10,000, Q = 6
    python benchmarks/multi_output.py --summary                # print the results as Markdown

- smoothness: eight targets of two inputs, mixed from four functions whose lengthscales are 0.4 to
  3.2 standard deviations; a fifth of the targets is missing; 800 rows and 1,000 test rows.
- curves: eight targets of one input, mixed from four functions whose lengthscales are 0.1 to 0.8
  standard deviations; a fifth of the targets is missing; 200 rows and 1,000 test rows.
- qpcr: 24 genes from the first three principal components of the other 24, 437 cells, a fifth of
  them held out. Which genes are which, and the cells, differ from seed to seed.

Each split is fitted by

- lmc: `MultiOutputGPRegressor()` with four processes, tolerance 0.01,
- limited: the same with `max_points`, half as many as `lmc` keeps,
- equal: as many points as `limited`, equally many for each process. It has the effort of `limited`:
  the best ELBO of four runs of up to 500 L-BFGS iterations on all parameters and locations, with
  points by greedy conditional variance: from the hyper-parameters of `lmc`, from those of
  `limited`, and from the results of both,
- independent: one process per target,
- shared: `SparseGPRegressor()`, one kernel and one set of points for all targets; its 0.01 nats are
  per row, not per target.

Log densities are of standardised targets, per observed test target. Settings were chosen on seeds
0 to 2.
"""

import warnings
from math import sqrt
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from measure import RESULTS, Row, Seconds, grouped, markdown, mean, parser_of, run_missing, timed
from winnowgp import MultiOutputGPRegressor, SparseGPRegressor
from winnowgp.data import Dataset
from winnowgp.data.catalogue import load_table
from winnowgp.experiments.runs import Runs
from winnowgp.models import greedy_variance
from winnowgp.models.priors import add_weak_priors
from winnowgp.training.lbfgs import Stop, maximise_elbo

Values = NDArray[np.float64]

FILE = RESULTS / "multi_output" / "fits.jsonl"
SPEED = RESULTS / "multi_output" / "speed.jsonl"
PROCESSES = 4
MADE: dict[str, tuple[int, int, list[float]]] = {
    "smoothness": (2, 800, [0.4, 0.8, 1.6, 3.2]),
    "curves": (1, 200, [0.1, 0.2, 0.4, 0.8]),
}
"""Inputs, rows and lengthscales of made problems."""
PARTS = ("allocation", "others")
METHODS = ("lmc", "limited", "equal", "independent", "shared")


def smooth_functions(X: Values, lengthscales: list[float], rng: np.random.Generator) -> Values:
    """Return draws of RBF processes, one for each lengthscale, by 1,000 random features each."""
    columns = []
    for lengthscale in lengthscales:
        frequencies = rng.normal(size=(X.shape[1], 1000)) / lengthscale
        phases, weights = rng.uniform(0, 2 * np.pi, 1000), rng.normal(size=1000)
        columns.append(np.cos(X @ frequencies + phases) @ weights * sqrt(2 / 1000))
    return np.column_stack(columns)


def problem(name: str, seed: int) -> tuple[Values, Values, Values, Values]:
    """Return training and test rows of a problem: X, Y, X_test, Y_test."""
    rng = np.random.default_rng(seed)
    if name in MADE:
        D, N, lengthscales = MADE[name]
        X = rng.normal(size=(N + 1000, D))
        f = smooth_functions(X, lengthscales, rng)
        noise = rng.uniform(0.1, 0.5, size=8) * rng.normal(size=(N + 1000, 8))
        Y = f @ rng.normal(size=(4, 8)) + noise
        Y[:N][rng.random((N, 8)) < 0.2] = np.nan
        train = np.arange(N + 1000) < N
    else:
        table = load_table("qpcr").values.numpy()
        genes = rng.permutation(table.shape[1])
        given = table[:, genes[:24]] - table[:, genes[:24]].mean(0)
        X = given @ np.linalg.svd(given, full_matrices=False)[2][:3].T
        Y = table[:, genes[24:]]
        train = rng.permutation(len(Y)) >= len(Y) // 5
    mean_, scale = np.nanmean(Y[train], 0), np.nanstd(Y[train], 0)
    Y = (Y - mean_) / scale
    return X[train], Y[train], X[~train], Y[~train]


def scores(model: Any, X: Values, Y: Values) -> Row:
    """Return the mean test log density, RMSE and coverage of 90 % intervals."""
    lower, upper = model.predict_interval(X, 0.9)
    return {
        "log_density": float(model.log_density(X, Y).mean()),
        "rmse": float(np.sqrt(np.mean((model.predict(X) - Y) ** 2))),
        "coverage_90": float(np.mean((lower <= Y) & (upper >= Y))),
    }


def equal_numbers(
    models: list[MultiOutputGPRegressor], X: Values, Y: Values, M: int
) -> tuple[Any, float]:
    """Return the best posterior with M/Q points of each process, and its ELBO.

    Args:
        models: fitted models, whose hyper-parameters are starts.
    """
    scaler = models[0]
    x, y = scaler._x_scaler.forward(torch.from_numpy(X)), torch.from_numpy(Y)
    data = Dataset.of(x, scaler._y_scaler.columns.forward(y), missing=True)
    fits = []
    for model in models:
        posterior = model.posterior_
        for _ in range(2):
            Q = posterior.Q
            counts = [M // Q + (q < M % Q) for q in range(Q)]
            points = [
                x[greedy_variance(kernel, x, count, given=x[:0])]
                for kernel, count in zip(posterior.kernels, counts, strict=True)
            ]
            gp = multi_output_gp(posterior, points)
            count = int((~torch.isnan(data.Y)).sum())
            stop = Stop(5e-6 * count, 20, 500)
            maximise_elbo(gp, x, objective=gp.chunked_bound(data), stop=stop)
            posterior = gp.posterior(data)
            fits.append((gp.fixed_bound(data), posterior))
    elbo, best = max(fits, key=lambda fit: fit[0])
    return best, elbo


def multi_output_gp(posterior: Any, points: list[torch.Tensor]) -> Any:
    """Return a model with the hyper-parameters of a posterior and other points."""
    from winnowgp import MultiOutputGP

    noise = posterior.likelihood.noise
    gp = MultiOutputGP(posterior.kernels, points, mixing=posterior.mixing, noise=noise)
    add_weak_priors(gp.likelihood)
    for kernel in gp.kernels:
        kernel.requires_grad_(True)
        if hasattr(kernel, "raw_outputscale"):
            kernel.raw_outputscale.requires_grad_(False)
    return gp


def run(name: str, seed: int, part: str) -> Row:
    """Fit one split by the methods of one part."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    X, Y, X_test, Y_test = problem(name, seed)
    count = int(np.isfinite(Y).sum())
    models: dict[str, Row] = {}

    def note(method: str, model: Any, seconds: Seconds | None) -> None:
        models[method] = {"points": model.n_inducing_, "elbo": model.elbo_ / count}
        models[method] |= scores(model, X_test, Y_test) | ({} if seconds is None else seconds.row())

    settings: dict[str, Any] = {"kernel": "rbf", "random_state": seed}
    if part == "allocation":
        lmc = MultiOutputGPRegressor(n_latents=PROCESSES, **settings)
        _, seconds = timed(lambda: lmc.fit(X, Y))
        note("lmc", lmc, seconds)
        M = max(sum(lmc.n_inducing_) // 2, PROCESSES)
        limited = MultiOutputGPRegressor(n_latents=PROCESSES, max_points=M, **settings)
        _, seconds = timed(lambda: limited.fit(X, Y))
        note("limited", limited, seconds)
        M = sum(limited.n_inducing_)
        (best, elbo), seconds = timed(lambda: equal_numbers([lmc, limited], X, Y, M))
        lmc.posterior_, lmc.elbo_, lmc.n_inducing_ = best, elbo, best.sizes
        note("equal", lmc, seconds)
    else:
        others = {
            "independent": MultiOutputGPRegressor(mixing="independent", **settings),
            "shared": SparseGPRegressor(hyper="point", **settings),
        }
        for method, model in others.items():
            _, seconds = timed(lambda model=model: model.fit(X, Y))
            note(method, model, seconds)
    return {
        "name": name,
        "seed": seed,
        "part": part,
        "rows": len(X),
        "targets": Y.shape[1],
        "models": models,
    }


def speed(device: str) -> Row:
    """Return seconds and memory of a fit of 48 targets and 10,000 rows by six processes."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(10_000, 3))
    f = smooth_functions(X, [0.7, 1.0, 1.5, 2.0, 3.0, 4.0], rng)
    Y = f @ rng.normal(size=(6, 48)) + 0.3 * rng.normal(size=(10_000, 48))
    model = MultiOutputGPRegressor(kernel="rbf", n_latents=6, random_state=0, device=device)
    _, seconds = timed(lambda: model.fit(X[:9000], Y[:9000]))
    _, prediction = timed(lambda: model.predict(X[9000:], return_std=True))
    row = {"device": device, "points": model.n_inducing_, **seconds.row()}
    if device == "cuda":
        row["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    else:
        import resource

        row["threads"] = torch.get_num_threads()
        row["peak_gib"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2)
    row["predict_us_per_row"] = round(1e6 * prediction.wall / 1000, 1)
    return row | {"r2": model.score(X[9000:], Y[9000:])}


def summary(rows: list[Row]) -> str:
    """Return means over seeds, and paired differences from equal numbers, as a Markdown table."""
    lines = []
    for (name,), own in grouped(rows, "name").items():
        for method in METHODS:
            fits = [row["models"][method] for row in own if method in row["models"]]
            if not fits:
                continue
            points = [np.sort(np.atleast_1d(fit["points"])) for fit in fits]
            shown = " + ".join(f"{count:.0f}" for count in np.mean(points, 0))
            difference = ""
            if method == "limited":
                others = [row["models"]["equal"] for row in own if "equal" in row["models"]]
                pairs = zip(fits, others, strict=True)
                gaps = [fit["log_density"] - other["log_density"] for fit, other in pairs]
                error = np.std(gaps, ddof=1) / sqrt(len(gaps)) if len(gaps) > 1 else np.nan
                difference = f"{mean(gaps):+.3f} ± {error:.3f}"
            lines.append(
                [
                    name,
                    method,
                    len(fits),
                    shown,
                    f"{mean(f['elbo'] for f in fits):.3f}",
                    f"{mean(f['log_density'] for f in fits):.3f}",
                    difference,
                    f"{mean(f['rmse'] for f in fits):.3f}",
                    f"{mean(f['coverage_90'] for f in fits):.3f}",
                    f"{mean(f['cpu_s'] for f in fits):.0f}" if "cpu_s" in fits[0] else "",
                ]
            )
    header = ["problem", "model", ">seeds", "points per process", ">ELBO", ">test log density"]
    return markdown([*header, ">against equal", ">RMSE", ">90 % intervals hold", ">CPU s"], lines)


def main() -> None:
    """Parse the command line; fit splits that have no rows yet, or print the summary."""
    parser = parser_of(__doc__, seeds=[20, 21, 22, 23, 24])
    parser.add_argument("--only", nargs="+", default=[*MADE, "qpcr"])
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--speed", choices=["cpu", "cuda"], help="measure the speed on a device")
    arguments = parser.parse_args()
    if arguments.speed:
        print(Runs(SPEED).add(speed(arguments.speed)))
        return
    runs = Runs(FILE)
    if arguments.summary:
        print(summary(list(runs)))
        return
    cases = [
        (name, seed, part)
        for part in arguments.parts
        for name in arguments.only
        for seed in arguments.seeds
    ]
    for row in run_missing(runs, run, cases, keys=("name", "seed", "part"), jobs=arguments.jobs):
        for method, model in row["models"].items():
            print(row["name"], row["seed"], method, model["points"], f"{model['log_density']:.3f}")


if __name__ == "__main__":
    main()
