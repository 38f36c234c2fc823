"""Classes, counts and outliers: the default fit, all candidates, and GPyTorch's SVGP.

    python benchmarks/classification.py                       # all data sets but the large one
    python benchmarks/classification.py --data cancer --seeds 0 1 2
    python benchmarks/classification.py --data large          # 200,000 rows, winnowgp only
    python benchmarks/classification.py --report              # print the results

All methods have the same split (80 % of the rows), the same kernel (RBF with one lengthscale per
column) and one thread. SVGP is GPyTorch's, whitened, with as many inducing points as our default
selects, k-means start, minibatches of 1,024 rows and Adam at 0.01, which falls to 0.001 for the
last fifth of the steps; its test log density is recorded ten times. Compare CPU seconds. Results
are in benchmarks/results/classification.
"""

import argparse
import resource
from dataclasses import dataclass
from typing import Any

import gpytorch
import numpy as np
import torch
from gpytorch.likelihoods import (
    BernoulliLikelihood,
    Likelihood,
    PoissonLikelihood,
    SoftmaxLikelihood,
    StudentTLikelihood,
)
from sklearn.cluster import KMeans
from sklearn.datasets import load_breast_cancer, load_digits, load_wine
from sklearn.model_selection import train_test_split

from measure import Row, mean, new_results, read_results, table, timed
from winnowgp import SparseGPClassifier, SparseGPRegressor
from winnowgp.data import Standardiser
from winnowgp.models.likelihoods import observation_model

PEERS = ("winnowgp", "all", "svgp")
DATA = ("cancer", "wine", "digits", "counts", "outliers")
EMBEDDED = {"cancer": load_breast_cancer, "wine": load_wine, "digits": load_digits}
ALL = 200
STEPS = 2000
BATCH = 1024


@dataclass(frozen=True, slots=True)
class Split:
    """Training and test rows in their original units, and the likelihood."""

    X: np.ndarray
    y: np.ndarray
    X_test: np.ndarray
    y_test: np.ndarray
    likelihood: str


def split(name: str, *, seed: int) -> Split:
    """Return the split of a data set."""
    if name in EMBEDDED:
        X, y = EMBEDDED[name](return_X_y=True)
        likelihood = "classes"
    else:
        X, y, likelihood = synthetic(name, np.random.default_rng(seed))
    stratify = y if likelihood == "classes" else None
    parts = train_test_split(X, y, test_size=0.2, random_state=seed, stratify=stratify)
    X, X_test, y, y_test = (np.asarray(part) for part in parts)
    return Split(X, y, X_test, y_test, likelihood)


def synthetic(name: str, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, str]:
    """Draw counts, outliers, or many rows of two classes from smooth functions."""
    if name == "large":
        X = rng.uniform(-2, 2, (200_000, 4))
        f = 3 * np.sin(2 * X[:, 0]) * np.cos(X[:, 1]) + X[:, 2] * X[:, 3]
        return X, (rng.normal(size=len(X)) < f).astype(int), "classes"
    X = rng.uniform(-2, 2, (1000, 2))
    f = 2 * np.sin(2 * X[:, 0]) * np.cos(X[:, 1])
    if name == "counts":
        return X, rng.poisson(np.exp(1 + f)).astype(float), "poisson"
    return X, f + 0.1 * rng.standard_t(2.5, len(X)), "student-t"


def fitted(
    problem: Split, *, seed: int, everything: bool
) -> SparseGPClassifier | SparseGPRegressor:
    """Fit our default, or a model with all of 200 candidates."""
    options: dict[str, Any] = {"max_points": ALL, "n_candidates": ALL} if everything else {}
    if problem.likelihood == "classes":
        return SparseGPClassifier(random_state=seed, **options).fit(problem.X, problem.y)
    return SparseGPRegressor(likelihood=problem.likelihood, random_state=seed, **options).fit(
        problem.X, problem.y
    )


class SVGP(gpytorch.models.ApproximateGP):
    """One latent function, or one per class with shared kernel and inducing points."""

    def __init__(self, Z: torch.Tensor, latents: int) -> None:
        batch = torch.Size([latents]) if latents > 1 else torch.Size()
        strategy = gpytorch.variational.VariationalStrategy(
            self,
            Z,
            gpytorch.variational.CholeskyVariationalDistribution(len(Z), batch_shape=batch),
            learn_inducing_locations=True,
        )
        if latents > 1:
            strategy = gpytorch.variational.IndependentMultitaskVariationalStrategy(
                strategy, num_tasks=latents
            )
        super().__init__(strategy)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(
            gpytorch.kernels.RBFKernel(ard_num_dims=Z.shape[1])
        )

    def forward(self, x: torch.Tensor) -> gpytorch.distributions.MultivariateNormal:
        mean: Any = self.mean_module(x)
        return gpytorch.distributions.MultivariateNormal(mean, self.covar_module(x))


class SVGPTraining:
    """Training of GPyTorch's SVGP on one problem."""

    def __init__(self, problem: Split, *, M: int, seed: int) -> None:
        X = torch.tensor(problem.X, dtype=torch.float64)
        x_scaler = Standardiser.of(X)
        self.X = x_scaler.forward(X)
        self.X_test = x_scaler.forward(torch.tensor(problem.X_test, dtype=torch.float64))
        y, y_test = (torch.tensor(v, dtype=torch.float64)[:, None] for v in _pair(problem))
        self.scale = 1.0
        if problem.likelihood == "student-t":
            y_scaler = Standardiser.of(y)
            y, y_test = y_scaler.forward(y), y_scaler.forward(y_test)
            self.scale = y_scaler.scale.item()
        self.y, self.y_test = y[:, 0], y_test
        self.likelihood = _likelihood(problem).double()
        self.latents = getattr(self.likelihood, "num_classes", 1)
        centres = KMeans(M, n_init="auto", random_state=seed).fit(self.X.numpy()).cluster_centers_
        torch.manual_seed(seed)
        self.model = SVGP(torch.from_numpy(centres), self.latents).double()

    def train(self, steps: int) -> None:
        """Train with Adam; the rate falls to a tenth for the last fifth of all steps."""
        if not hasattr(self, "optimiser"):
            parameters = [*self.model.parameters(), *self.likelihood.parameters()]
            self.optimiser = torch.optim.Adam(parameters, lr=0.01)
            self.schedule = torch.optim.lr_scheduler.MultiStepLR(
                self.optimiser, milestones=[int(0.8 * STEPS)]
            )
            self.bound = gpytorch.mlls.VariationalELBO(
                self.likelihood, self.model, num_data=len(self.y)
            )
        self.model.train()
        targets = self.y.long() if self.latents > 1 else self.y
        for _ in range(steps):
            rows = torch.randperm(len(self.y))[:BATCH]
            self.optimiser.zero_grad()
            bound: Any = self.bound(self.model(self.X[rows]), targets[rows])
            loss = -bound
            loss.backward()
            self.optimiser.step()
            self.schedule.step()

    @torch.no_grad()
    def log_density(self) -> float:
        """Return the mean test log density in the original unit of the targets."""
        self.model.eval()
        q = self.model(self.X_test)
        shape = (len(self.X_test), self.latents)
        nats = observation_model(self.likelihood).log_density(
            self.y_test, q.mean.reshape(shape), q.variance.reshape(shape)
        )
        return nats.mean().item() - float(np.log(self.scale))


def _pair(problem: Split) -> tuple[np.ndarray, np.ndarray]:
    """Return training and test targets as numbers."""
    if problem.likelihood != "classes":
        return problem.y, problem.y_test
    classes = np.unique(problem.y)
    return np.searchsorted(classes, problem.y), np.searchsorted(classes, problem.y_test)


def _likelihood(problem: Split) -> Likelihood:
    if problem.likelihood == "poisson":
        return PoissonLikelihood()
    if problem.likelihood == "student-t":
        return StudentTLikelihood()
    C = len(np.unique(problem.y))
    return (
        BernoulliLikelihood() if C == 2 else SoftmaxLikelihood(num_classes=C, mixing_weights=False)
    )


def run(name: str, peers: list[str], *, seed: int) -> None:
    """Fit some methods to one split; SVGP has as many inducing points as ours."""
    problem = split(name, seed=seed)
    for peer in peers:
        results = new_results(f"classification/{name}-{seed}-{peer}")
        measure = svgp if peer == "svgp" else ours
        row = results.add(
            {
                "dataset": name,
                "seed": seed,
                "n_train": len(problem.y),
                "peer": peer,
                **measure(problem, name=name, seed=seed, everything=peer == "all"),
            }
        )
        print(name, seed, peer, row["M"], round(row["log_density"], 4), row["cpu_s"], flush=True)


def ours(problem: Split, *, name: str, seed: int, everything: bool) -> Row:
    """Measure our default, or a model with all of 200 candidates."""
    model, seconds = timed(lambda: fitted(problem, seed=seed, everything=everything))
    return {
        "M": model.n_inducing_,
        "elbo": model.elbo_,
        "log_density": float(model.log_density(problem.X_test, problem.y_test).mean()),
        "score": float(model.score(problem.X_test, problem.y_test)),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        **seconds.row(),
    }


def svgp(problem: Split, *, name: str, seed: int, everything: bool) -> Row:
    """Measure GPyTorch's SVGP; its log density is recorded ten times."""
    M = read_results(f"classification/{name}-{seed}-winnowgp")[0]["M"]
    training, seconds = timed(lambda: SVGPTraining(problem, M=M, seed=seed))
    trace = []
    for _ in range(10):
        _, more = timed(lambda: training.train(STEPS // 10))
        seconds = seconds + more
        trace.append((round(seconds.cpu, 3), training.log_density()))
    return {"M": M, "log_density": trace[-1][1], "trace": trace, **seconds.row()}


def report() -> None:
    """Print means over seeds, one line per data set."""
    rows = read_results("classification/*")
    header = (
        "data",
        "seeds",
        "our M",
        "all M",
        "log density",
        "minus all's",
        "minus SVGP's",
        "minus SVGP's best",
        "cpu s",
        "all cpu s",
        "SVGP cpu s",
    )
    lines = []
    for name in [*DATA, "large"]:
        ours, everything, svgp = (
            {r["seed"]: r for r in rows if (r["dataset"], r["peer"]) == (name, peer)}
            for peer in PEERS
        )
        seeds = sorted(ours)

        def gap(others: dict[int, Row], ours: dict[int, Row] = ours) -> str:
            both = ours.keys() & others.keys()
            difference = mean(ours[s]["log_density"] - others[s]["log_density"] for s in both)
            return f"{difference:+.4f}"

        best = {s: {"log_density": max(v for _, v in r["trace"])} for s, r in svgp.items()}
        lines.append(
            (
                name,
                len(seeds),
                f"{mean(ours[s]['M'] for s in seeds):.1f}",
                f"{mean(r['M'] for r in everything.values()):.1f}",
                f"{mean(ours[s]['log_density'] for s in seeds):.4f}",
                gap(everything),
                gap(svgp),
                gap(best),
                f"{mean(ours[s]['cpu_s'] for s in seeds):.1f}",
                f"{mean(r['cpu_s'] for r in everything.values()):.1f}",
                f"{mean(r['cpu_s'] for r in svgp.values()):.1f}",
            )
        )
    print(table(header, lines))


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", nargs="+", choices=[*DATA, "large"], default=list(DATA))
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--report", action="store_true", help="print results without measuring")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if not arguments.report:
        for name in arguments.data:
            for seed in arguments.seeds:
                run(name, arguments.peers if name != "large" else ["winnowgp"], seed=seed)
    report()


if __name__ == "__main__":
    main()
