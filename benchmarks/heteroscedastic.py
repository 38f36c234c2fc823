"""Noise that depends on the inputs: test density, coverage by region, points of both processes.

    python benchmarks/heteroscedastic.py --seeds 3 4 5 --jobs 2            # 2,000 rows at most
    python benchmarks/heteroscedastic.py --seeds 3 --rows 50000 --max-points 256 --device cuda
    python benchmarks/heteroscedastic.py --seeds 3 --rows 50000 --methods heteroscedastic constant
    python benchmarks/heteroscedastic.py --seeds 3 4 5 --rows 500 --methods ours gpboost catboost
    python benchmarks/heteroscedastic.py --summary            # print the results as Markdown

A made function of one input whose noise is large in the middle, as in the motorcycle data, and
parts of three tables. To protein and kin8nm, noise with the standard deviation of y is added where
the first column exceeds its median. Test rows are divided into a quiet and a noisy half: by the
true noise of made data, and by the first column of the tables. Each split is fitted by

- constant: a `SparseGP`, as `SparseGPRegressor()` fits it,
- heteroscedastic: a `HeteroscedasticGP`, as `SparseGPRegressor(likelihood="heteroscedastic")`,
- refitted: the same after the optimisation that all following models have, too,
- twice, half: the same with twice or half as many inducing points of the log noise. The others are
  rows of greatest conditional variance, or are removed by backward elimination,
- k-means, k-means twice: the same with as many, or twice as many, inducing points of the log noise
  that are not selected: cluster centres of the rows,
- GPBoost, CatBoost: see `peers/heteroscedastic.py`; `make noise-peers` installs them.

The log noise of all these is then optimised again: its kernel, its mean and the locations of its
inducing points, in turn with both posteriors; the function keeps its kernel and inducing points.
`--file` continues another result file, `--fewer` leaves the models out that vary the number, and
`--methods` fits a single model.
Settings were chosen on seeds 0 to 2.
"""

import subprocess
import sys
import warnings
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from gpytorch.kernels import Kernel
from numpy.typing import NDArray
from scipy.stats import norm

from measure import RESULTS, Row, grouped, markdown, mean, parser_of, run_missing, timed
from right_number_problems import Problem, split_table
from winnowgp import SparseGP
from winnowgp.data import Dataset
from winnowgp.estimators.kernels import AUTO_KERNELS, kernel_from
from winnowgp.experiments.runs import Runs
from winnowgp.models import VariationalGP, greedy_variance
from winnowgp.models.heteroscedastic import HeteroscedasticGP, LogVarianceLikelihood
from winnowgp.models.priors import add_weak_priors
from winnowgp.selection import elimination_frontier
from winnowgp.training import FastSchedule, MaxPoints, Tolerance, fit
from winnowgp.training.initialization import kmeans
from winnowgp.training.lbfgs import Stop, maximise_elbo

Values = NDArray[np.float64]

FILE = RESULTS / "heteroscedastic" / "fits.jsonl"
PEERS = Path(__file__).parent / "peers"
SIZES = {"motorcycle": 200, "concrete": 927, "protein": 41157, "kin8nm": 7372}
"""Training rows of each table at most: 90 % of the rows."""
SIZED = ("refitted", "twice", "half", "k-means", "k-means twice")
OURS = ("constant", "heteroscedastic", *SIZED)
PEER_NAMES = {"gpboost": "GPBoost", "catboost": "CatBoost"}
ROUNDS, ITERATIONS, GAIN = 5, 60, 1e-4
"""Rounds and L-BFGS iterations of the log noise, and nats per observation the last may gain."""
METHODS = ("ours", "constant", "heteroscedastic", "gpboost", "catboost")
"""All our models, one of them alone, and peers."""


def motorcycle(seed: int, train: int) -> tuple[Problem, NDArray[np.bool_]]:
    """Return a function of one input whose noise is large in the middle, as in the crash data."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(0, 1, train + 1000)
    sd = 0.03 + 0.5 * np.exp(-0.5 * ((x - 0.6) / 0.15) ** 2)
    y = np.sin(8 * x) * np.exp(-(((x - 0.5) / 0.3) ** 2)) + sd * rng.normal(size=len(x))
    problem = Problem(x[:train, None], y[:train], x[train:, None], y[train:])
    return problem, sd[train:] > np.median(sd[train:])


def problem_of(name: str, seed: int, train: int) -> tuple[Problem, NDArray[np.bool_]]:
    """Return a split in standardised units, and which of its test rows are in the noisy half."""
    if name == "motorcycle":
        problem, noisy = motorcycle(seed, train)
        return problem.standardised(), noisy
    problem = split_table(name, seed=seed, train=train)
    halves = [X[:, 0] > np.median(problem.X[:, 0]) for X in (problem.X, problem.X_test)]
    if name != "concrete":
        rng = np.random.default_rng(seed)
        y, y_test = (
            y + problem.scale * half * rng.normal(size=len(y))
            for y, half in zip((problem.y, problem.y_test), halves, strict=True)
        )
        problem = replace(problem, y=y, y_test=y_test)
    return problem.standardised(), halves[1]


def run(
    name: str,
    seed: int,
    rows: int,
    method: str,
    device: str,
    max_points: int | None,
    *,
    fewer: bool = False,
) -> Row | None:
    """Return the scores of one split; those of all our models for our own method.

    Args:
        fewer: whether to leave out the models that vary the number of points of the log noise.
    """
    torch.set_num_threads(1)
    problem, noisy = problem_of(name, seed, rows)
    case = {"name": name, "seed": seed, "rows": problem.N, "method": method, "device": device}
    case["max_points"] = max_points
    if method in PEER_NAMES:
        scores = peer_scores(method, problem, noisy, seed)
        return None if scores is None else case | scores
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fits = OURS[:2] if method == "ours" else (method,)
        models = our_scores(problem, noisy, seed, device, max_points, fits=fits, fewer=fewer)
        return case | {"models": models}


def kernel(name: str, D: int) -> Kernel:
    """Return a kernel with weak priors."""
    result = kernel_from(name, D)
    add_weak_priors(result)
    return result


def our_scores(
    problem: Problem,
    noisy: NDArray[np.bool_],
    seed: int,
    device: str,
    max_points: int | None,
    *,
    fits: Sequence[str],
    fewer: bool,
) -> dict[str, Row]:
    """Return scores, points and times of our models; with at most so many points, if limited.

    Args:
        fits: the models that are fitted: "constant", "heteroscedastic" or both.
    """
    data = Dataset.of(torch.from_numpy(problem.X), torch.from_numpy(problem.y)).merged()
    data = data.to(torch.device(device))
    first, *others = AUTO_KERNELS
    plain = SparseGP(kernel(first, data.D), data.X[:0], noise=1.0)
    add_weak_priors(plain.likelihood)
    log_noise = VariationalGP(kernel("rbf", data.D), data.X[:0], likelihood=LogVarianceLikelihood())
    schedule = FastSchedule(
        goal=Tolerance() if max_points is None else MaxPoints(max_points),
        kernels=tuple(kernel(other, data.D).to(data.X) for other in others),
        linear_term=True,
    )
    X = torch.from_numpy(problem.X_test).to(data.X)
    Y = torch.from_numpy(problem.y_test)[:, None].to(data.X)

    def fitted(model: Any) -> tuple[Any, Row]:
        generator = torch.Generator(device).manual_seed(seed)
        found, seconds = timed(lambda: fit(model, data, schedule=schedule, generator=generator))
        sizes = [len(Z) for Z in found.model.candidate_sets]
        print(f"{type(model).__name__}: {sizes} points, {seconds.wall:.0f} s", flush=True)
        return found, seconds.row()

    def scores(posterior: Any) -> Row:
        ends = posterior.quantiles(X, X.new_tensor([0.05, 0.95]))
        inside = ((ends[0] <= Y) & (ends[1] >= Y))[:, 0].cpu().numpy()
        return quality(posterior.log_density(X, Y)[:, 0].cpu().numpy(), inside, noisy)

    result: dict[str, Row] = {}
    if "constant" in fits:
        constant, seconds = fitted(plain)
        result["constant"] = {"points": constant.model.K, "elbo": constant.elbo / problem.N}
        result["constant"] |= scores(constant.posterior) | seconds
    if "heteroscedastic" not in fits:
        return result
    varying, longer = fitted(HeteroscedasticGP(plain, log_noise))
    models = {"heteroscedastic": varying.model}
    if (M := len(varying.model.log_noise.candidates)) and not fewer:
        models |= {
            "refitted": refitted(varying.model, data),
            "twice": doubled(varying.model, data),
            "half": halved(varying.model, data),
            "k-means": clustered(varying.model, data, M, seed),
            "k-means twice": clustered(varying.model, data, 2 * M, seed),
        }
    for method, model in models.items():
        points, noise_points = map(len, model.candidate_sets)
        result[method] = {
            "points": points,
            "noise_points": noise_points,
            "elbo": model.fixed_bound(data) / problem.N,
            **scores(model.posterior(data)),
        }
    result["heteroscedastic"] |= longer
    return result


def doubled(model: HeteroscedasticGP, data: Dataset) -> HeteroscedasticGP:
    """Return the model with twice the inducing points of its log noise."""
    g = model.log_noise
    Z = g.candidates.detach()
    fresh = data.X[greedy_variance(g.kernel, data.X, len(Z), given=Z)]
    return refitted(model.with_parts(log_noise=g.with_candidates(torch.cat([Z, fresh]))), data)


def halved(model: HeteroscedasticGP, data: Dataset) -> HeteroscedasticGP:
    """Return the model with half of the inducing points of its log noise."""
    function, log_noise = model.candidate_sets
    frontier = elimination_frontier(model.subset_statistics(data)[1])
    whole = torch.ones(len(function), dtype=torch.bool, device=data.device)
    return refitted(model.prune((whole, frontier.masks[(len(log_noise) + 1) // 2])), data)


def clustered(model: HeteroscedasticGP, data: Dataset, M: int, seed: int) -> HeteroscedasticGP:
    """Return the model with cluster centres as the inducing points of its log noise."""
    centres = kmeans(data.X.cpu(), min(M, data.N), seed=seed).to(data.X)
    return refitted(model.with_parts(log_noise=model.log_noise.with_candidates(centres)), data)


def refitted(model: HeteroscedasticGP, data: Dataset) -> HeteroscedasticGP:
    """Return the model with its log noise and both posteriors optimised in turn."""
    stop = Stop(GAIN * data.N, 10, ITERATIONS)
    model = model.with_best_q(data, gain=1e-6)
    bound = model.fixed_bound(data)
    for _ in range(ROUNDS):
        g, targets = deepcopy(model.log_noise), model.residuals(data)
        maximise_elbo(g, data.X, objective=g.chunked_bound(targets), stop=stop)
        better = model.with_parts(log_noise=g.with_best_q(targets)).with_best_q(data, gain=1e-6)
        gained = better.fixed_bound(data) - bound
        if gained > 0:
            model, bound = better, bound + gained
        if gained < GAIN * data.N:
            break
    return model


def peer_scores(peer: str, problem: Problem, noisy: NDArray[np.bool_], seed: int) -> Row | None:
    """Return scores and times of a peer; None if it is not installed."""
    python = PEERS / f".venv-{peer}" / "bin" / "python"
    if not python.exists():
        print(f"{peer} is not installed; `make noise-peers` installs it.", file=sys.stderr)
        return None
    with TemporaryDirectory() as folder:
        given, predicted = Path(folder) / "problem.npz", Path(folder) / "predictions.npz"
        np.savez(given, X=problem.X, y=problem.y, X_test=problem.X_test)
        script = PEERS / "heteroscedastic.py"
        subprocess.run(
            [python, script, peer, given, predicted, "--seed", str(seed)],
            check=True,
            env={"PATH": ""},
        )
        found = dict(np.load(predicted))
    sd = np.sqrt(found["variance"])
    error = problem.y_test - found["mean"]
    scores = quality(norm.logpdf(error, scale=sd), np.abs(error) < norm.ppf(0.95) * sd, noisy)
    return scores | {key: round(float(found[key]), 4) for key in ("wall_s", "cpu_s")}


def quality(nats: Values, inside: NDArray[np.bool_], noisy: NDArray[np.bool_]) -> Row:
    """Return the log density and the coverage of 90 % intervals, of all rows and by region."""
    regions = {"": np.ones_like(noisy), "_quiet": ~noisy, "_noisy": noisy}
    return {
        f"{measure}{region}": float(values[rows].mean())
        for region, rows in regions.items()
        for measure, values in (("log_density", nats), ("coverage_90", inside))
    }


def flat(rows: list[Row]) -> list[Row]:
    """Return one row per model."""
    return [
        row | {"method": method} | scores
        for row in rows
        for method, scores in row.get("models", {row["method"]: {}}).items()
    ]


def summary(rows: list[Row]) -> str:
    """Return the means over seeds as a Markdown table."""
    order = [*OURS, *PEER_NAMES]
    rows = sorted(
        flat(rows),
        key=lambda r: (
            r["name"],
            r["rows"],
            r["device"],
            r["max_points"] or 0,
            order.index(r["method"]),
        ),
    )
    lines, shown_last = [], None
    keys = ("name", "rows", "device", "max_points", "method")
    for (name, count, device, most, method), own in grouped(rows, *keys).items():
        case, title = (name, count, device, most), f"{name} ({count})"
        if most is not None:
            title += f", at most {most} points"
        if device != "cpu":
            title += f", {device}"

        def shown(key: str, digits: int, own: list[Row] = own) -> str:
            return f"{mean(r[key] for r in own):.{digits}f}" if key in own[0] else ""

        lines.append(
            [
                "" if case == shown_last else title,
                PEER_NAMES.get(method, method),
                len(own),
                shown("points", 0),
                shown("noise_points", 0),
                shown("elbo", 3),
                shown("log_density", 3),
                *(shown(f"log_density{region}", 3) for region in ("_quiet", "_noisy")),
                *(shown(f"coverage_90{region}", 3) for region in ("", "_quiet", "_noisy")),
                shown("cpu_s" if device == "cpu" else "wall_s", 0),
            ]
        )
        shown_last = case
    header = ["table (rows)", "model", ">seeds", ">points", ">of the noise", ">ELBO"]
    halves = [">quiet half", ">noisy half"]
    return markdown(
        [
            *header,
            ">test log density",
            *halves,
            ">90 % intervals hold",
            *halves,
            ">CPU s (GPU: wall s)",
        ],
        lines,
    )


def main() -> None:
    """Parse the command line; fit splits that have no rows yet, or print the summary."""
    parser = parser_of(__doc__, seeds=[3, 4, 5])
    parser.add_argument("--only", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--rows", type=int, default=2000, help="training rows at most")
    parser.add_argument("--methods", nargs="+", default=["ours"], choices=METHODS)
    parser.add_argument("--device", default="cpu", help="device of our own models")
    parser.add_argument("--max-points", type=int, help="inducing points of each process at most")
    parser.add_argument("--fewer", action="store_true", help="the two fits alone")
    parser.add_argument("--file", type=Path, default=FILE, help="the results, one row per split")
    arguments = parser.parse_args()
    runs = Runs(arguments.file)
    if arguments.summary:
        print(summary(list(runs)))
        return
    cases = [
        (
            name,
            seed,
            min(SIZES[name], arguments.rows),
            method,
            arguments.device,
            arguments.max_points,
        )
        for method in arguments.methods
        for seed in arguments.seeds
        for name in arguments.only
    ]
    keys = ("name", "seed", "rows", "method", "device", "max_points")
    work = partial(run, fewer=arguments.fewer)
    for row in run_missing(runs, work, cases, keys=keys, jobs=arguments.jobs):
        for model in flat([row]):
            name, seed, method = (model[key] for key in ("name", "seed", "method"))
            print(name, seed, method, f"{model['log_density']:.3f}", flush=True)


if __name__ == "__main__":
    main()
