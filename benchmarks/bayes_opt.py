"""Bayesian optimisation of the six-dimensional Hartmann function with sparse GPs.

    python benchmarks/bayes_opt.py                        # every method, twenty seeds
    python benchmarks/bayes_opt.py --methods greedy winnowing --seeds 0 1 --jobs 2
    python benchmarks/bayes_opt.py --methods greedy winnowing --most 64
    python benchmarks/bayes_opt.py --report               # a table of what the files hold

The regret after twenty Sobol points and batches of four by qLogEI up to a hundred evaluations,
without noise. Each step fits BoTorch's SingleTaskVariationalGP by L-BFGS on its ELBO, starting from
the kernel of the step before, with at most a quarter of the rows as inducing points (BoTorch's
default) or at most `--most` of them, at fixed locations. Methods differ in the allocator:

- `greedy`: BoTorch's GreedyVarianceReduction;
- `prior`: WinnowingAllocator without targets;
- `winnowing`: WinnowingAllocator with the targets, and the noise of the step before;
- `regressor`: SparseGPRegressor with its defaults in place of the model;
- `capped`: SparseGPRegressor with at most a quarter of the rows;
- `updated`: SparseGPRegressor with BoTorch's kernel and at most as many points, which learns the
  new rows of each step with `partial_fit`.

All methods have the same start and draws for the same seed. Each run has a file in benchmarks/
results/bayes_opt and is skipped if the file exists. One thread per run; times are CPU seconds.
"""

import argparse
import multiprocessing
import time
import warnings
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import product
from statistics import median
from typing import Any

import torch
from botorch.acquisition.logei import qLogExpectedImprovement
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskVariationalGP
from botorch.models.model import Model
from botorch.models.utils.gpytorch_modules import get_covar_module_with_dim_scaled_prior
from botorch.models.utils.inducing_point_allocators import (
    GreedyVarianceReduction,
    InducingPointAllocator,
)
from botorch.optim import optimize_acqf
from botorch.sampling import SobolQMCNormalSampler
from botorch.test_functions import Hartmann
from gpytorch.kernels import Kernel
from gpytorch.mlls import VariationalELBO
from torch import Tensor

from measure import RESULTS, mean, new_results, read_results, table
from winnowgp import SparseGPRegressor
from winnowgp.integrations.botorch import SparseGPModel, WinnowingAllocator

METHODS = ("greedy", "prior", "winnowing", "capped", "regressor", "updated")
D, START, BATCH, TOTAL = 6, 20, 4, 100
SHARE = 4


@dataclass
class Surrogate:
    """A model of each step, with the state that the next step starts from."""

    method: str
    seed: int
    most: int | None = None
    """Largest number of inducing points; None for a quarter of the rows."""
    kernel: Kernel | None = None
    noise: float | None = None
    points: list[int] = field(default_factory=list)
    stream: SparseGPRegressor | None = None
    """The regressor that is updated."""

    def updated(self, X: Tensor, Y: Tensor) -> Model:
        """Return a model that has learnt the latest outcomes, in their own units, as well."""
        new = slice(-BATCH, None)
        if self.stream is None:
            # BoTorch's kernel, with its prior: without it, few outcomes look like noise.
            kernel = get_covar_module_with_dim_scaled_prior(ard_num_dims=D, use_rbf_kernel=True)
            self.stream = SparseGPRegressor(kernel.double(), random_state=self.seed)
            new = slice(None)
        # A tolerance may select a constant, with which no input is better than another.
        self.stream.set_params(max_points=self._most(X))
        self.stream.partial_fit(X[new].numpy(), Y[new].numpy())
        self.points.append(self.stream.n_inducing_)
        return SparseGPModel.of(self.stream)

    def fitted(self, X: Tensor, y: Tensor) -> Model:
        """Return a model of standardised outcomes."""
        if self.method in ("regressor", "capped"):
            most = self._most(X) if self.method == "capped" else None
            regressor = SparseGPRegressor(max_points=most, random_state=self.seed).fit(
                X.numpy(), y.numpy()
            )
            self.points.append(regressor.n_inducing_)
            return SparseGPModel.of(regressor)
        model: Any = SingleTaskVariationalGP(
            X,
            y[:, None],
            covar_module=deepcopy(self.kernel),
            learn_inducing_points=False,
            inducing_points=self._most(X),
            inducing_point_allocator=self._allocator(y),
        )
        fit_gpytorch_mll(VariationalELBO(model.likelihood, model.model, num_data=len(X)))
        self.kernel, self.noise = model.model.covar_module, model.likelihood.noise.item()
        self.points.append(model.model.variational_strategy.inducing_points.shape[-2])
        return model

    def _most(self, X: Tensor) -> int:
        return len(X) // SHARE if self.most is None else min(self.most, len(X))

    def _allocator(self, y: Tensor) -> InducingPointAllocator:
        makers: dict[str, Callable[[], InducingPointAllocator]] = {
            "greedy": GreedyVarianceReduction,
            "prior": lambda: WinnowingAllocator(noise=self.noise),
            "winnowing": lambda: WinnowingAllocator(targets=y, noise=self.noise),
        }
        return makers[self.method]()


def run(method: str, seed: int, most: int | None) -> None:
    """Make one run and write its row."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    torch.manual_seed(seed)
    function = Hartmann(D, negate=True).to(dtype=torch.float64)
    X = torch.quasirandom.SobolEngine(D, scramble=True, seed=seed).draw(START, dtype=torch.float64)
    Y, surrogate = function(X), Surrogate(method, seed, most)
    best, seconds = [Y.max().item()], {"fit": 0.0, "acquisition": 0.0}
    while len(X) < TOTAL:
        started = time.process_time()
        if method == "updated":
            model = surrogate.updated(X, Y)
        else:
            model = surrogate.fitted(X, (Y - Y.mean()) / Y.std())
        fitted = time.process_time()
        new = proposed(model, X, seed=seed)
        seconds["fit"] += fitted - started
        seconds["acquisition"] += time.process_time() - fitted
        X, Y = torch.cat([X, new]), torch.cat([Y, function(new)])
        best.append(Y.max().item())
    new_results(file_of(method, seed, most)).add(
        {
            "method": method,
            "seed": seed,
            "most": most,
            "regret": function.optimal_value - best[-1],
            "regrets": [function.optimal_value - value for value in best],
            "points": surrogate.points,
            "noise": surrogate.noise,
            "fit_cpu_s": round(seconds["fit"], 2),
            "acquisition_cpu_s": round(seconds["acquisition"], 2),
        }
    )


def file_of(method: str, seed: int, most: int | None) -> str:
    """Return the name of the result file of a run."""
    return f"bayes_opt/{method}-{most or 'quarter'}-{seed}"


def proposed(model: Model, X: Tensor, *, seed: int) -> Tensor:
    """Return the next batch of inputs."""
    with torch.no_grad():
        posterior: Any = model.posterior(X)
    incumbent = posterior.mean.max()
    sampler = SobolQMCNormalSampler(torch.Size([64]), seed=seed)
    cube = torch.stack([X.new_zeros(D), X.new_ones(D)])
    return optimize_acqf(
        qLogExpectedImprovement(model, incumbent, sampler=sampler),
        cube,
        q=BATCH,
        num_restarts=4,
        raw_samples=128,
    )[0]


def report() -> None:
    """Print means and medians over the seeds."""
    rows = read_results("bayes_opt/*")
    lines = []
    for most, method in product((None, *sorted({row["most"] for row in rows} - {None})), METHODS):
        runs = [row for row in rows if row["method"] == method and row["most"] == most]
        if not runs:
            continue
        regrets = [row["regret"] for row in runs]
        lines.append(
            [
                method,
                "a quarter" if most is None else most,
                len(runs),
                f"{mean(regrets):.3f}",
                f"{median(regrets):.3f}",
                f"{mean(row['regrets'][10] for row in runs):.3f}",
                f"{mean(mean(row['points']) for row in runs):.1f}",
                f"{mean(row['points'][-1] for row in runs):.1f}",
                f"{mean(row['fit_cpu_s'] for row in runs):.0f}",
                f"{mean(row['acquisition_cpu_s'] for row in runs):.0f}",
            ]
        )
    header = ["method", "at most", "seeds", "mean regret", "median", "mean at 60"]
    header += ["points, mean", "at the end", "fit CPU s", "acquisition CPU s"]
    print(table(header, lines))


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--seeds", nargs="+", type=int, default=range(20))
    parser.add_argument("--jobs", type=int, default=1, help="processes, of one thread each")
    parser.add_argument(
        "--most", type=int, help="largest number of inducing points; default: a quarter of the rows"
    )
    parser.add_argument("--report", action="store_true", help="print results without measuring")
    arguments = parser.parse_args()
    if not arguments.report:
        wanted = [
            (method, seed, arguments.most)
            for seed, method in product(arguments.seeds, arguments.methods)
            if not (RESULTS / f"{file_of(method, seed, arguments.most)}.jsonl").exists()
        ]
        with multiprocessing.get_context("spawn").Pool(arguments.jobs) as pool:
            pool.starmap(run, wanted, chunksize=1)
    report()


if __name__ == "__main__":
    main()
