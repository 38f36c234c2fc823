"""GPyTorch's examples pruned by `winnow`: inducing points that remain, and test log density.

    python benchmarks/integrations.py [--report] [--seeds 3] [NAME ...]

The examples follow GPyTorch's documentation: SVGP regression (500 inducing points that start at the
first rows, minibatches of 1,024, Adam at 0.01), SVGP classification (Bernoulli, one input, an
inducing point at every row, 50 steps of Adam at 0.1), and the latter with two inputs. Each model is
trained as its example says and then pruned by `winnow`. Test log densities are in nats per
observation of standardised targets: before and after, with the marginal of q(u) instead of a new
q(u), and after a fifth of the epochs more ("on"). All in float32, GPyTorch's default; one thread.
Results are in benchmarks/results/integrations.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gpytorch
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import BernoulliLikelihood, GaussianLikelihood, Likelihood
from gpytorch.models import ApproximateGP
from gpytorch.variational import (
    CholeskyVariationalDistribution,
    UnwhitenedVariationalStrategy,
    VariationalStrategy,
)
from sklearn.datasets import make_moons
from torch import Tensor

from measure import Row, mean, new_results, read_results, table, timed
from winnowgp.data import Standardiser
from winnowgp.data.catalogue import load_table
from winnowgp.integrations.gpytorch import winnow
from winnowgp.integrations.gpytorch.distribution import prune_model
from winnowgp.integrations.gpytorch.strategies import copy_module

BATCH, POINTS, TEST = 1024, 500, 1000


class SVGP(ApproximateGP):
    """A constant mean and a scaled squared-exponential kernel."""

    mean_module: Any
    covar_module: Any

    def __init__(self, Z: Tensor, strategy: Callable = VariationalStrategy) -> None:
        q = CholeskyVariationalDistribution(len(Z))
        super().__init__(strategy(self, Z, q, learn_inducing_locations=True))
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

    def forward(self, x: Tensor) -> MultivariateNormal:
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


@dataclass(frozen=True, slots=True)
class Example:
    """A model, and its training and test data."""

    model: ApproximateGP
    likelihood: Likelihood
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    epochs: int
    batch: int
    rate: float

    def trained(self, model: ApproximateGP, likelihood: Likelihood, epochs: int) -> None:
        """Train a model as GPyTorch's documentation does."""
        x, y = self.train
        bound: Any = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=len(y))
        parameters = [*model.parameters(), *likelihood.parameters()]
        optimiser = torch.optim.Adam(parameters, lr=self.rate)
        model.train()
        likelihood.train()
        for _ in range(epochs):
            for rows in torch.randperm(len(y)).split(self.batch):
                optimiser.zero_grad()
                (-bound(model(x[rows]), y[rows])).backward()
                optimiser.step()

    def trained_on(self, model: ApproximateGP) -> float:
        """Return the log density of a copy after a fifth of the epochs more."""
        again, likelihood = copy_module(model), copy_module(self.likelihood)
        self.trained(again, likelihood, max(1, self.epochs // 5))
        return self.log_density(again, likelihood)

    @torch.no_grad()
    def log_density(self, model: ApproximateGP, likelihood: Likelihood | None = None) -> float:
        """Return the mean test log density in nats."""
        observed: Any = (self.likelihood if likelihood is None else likelihood).eval()
        model.eval()
        x, y = self.test
        batches = zip(x.split(BATCH), y.split(BATCH), strict=True)
        nats = [observed.log_marginal(b, model(a)).flatten() for a, b in batches]
        model.train()
        return torch.cat(nats).mean().item()


def regression(name: str, epochs: int) -> Callable[[int], Example]:
    """Return SVGP regression on 90 % of the rows of a data set."""

    def make(seed: int) -> Example:
        rows = load_table(name).dataset()
        order = torch.randperm(rows.N, generator=torch.Generator().manual_seed(seed))
        train, test = order[: int(0.9 * rows.N)], order[int(0.9 * rows.N) :]
        X, Y = Standardiser.of(rows.X[train]), Standardiser.of(rows.Y[train])
        x, y = X.forward(rows.X).float(), Y.forward(rows.Y).float()[:, 0]
        split = ((x[train], y[train]), (x[test], y[test]))
        model = SVGP(x[train][:POINTS])
        return Example(model, GaussianLikelihood(), *split, epochs, BATCH, 0.01)

    return make


def line(seed: int) -> Example:
    """Classify the sign of cos 4πx: ten rows, an inducing point at each."""
    torch.manual_seed(seed)
    x, test = torch.linspace(0, 1, 10), torch.linspace(0, 1, 101)
    y, labels = ((torch.cos(4 * torch.pi * v) > 0).float() for v in (x, test))
    model = SVGP(x[:, None], UnwhitenedVariationalStrategy)
    data = ((x[:, None], y), (test[:, None], labels))
    return Example(model, BernoulliLikelihood(), *data, 50, 10, 0.1)


def moons(seed: int) -> Example:
    """Classify two moons: 1,000 rows, inducing points at the first 100."""
    X, labels = make_moons(1000 + TEST, noise=0.25, random_state=seed)
    x, y = torch.tensor(X).float(), torch.tensor(labels).float()
    data = ((x[:1000], y[:1000]), (x[1000:], y[1000:]))
    return Example(SVGP(x[:100]), BernoulliLikelihood(), *data, 200, 1000, 0.05)


EXAMPLES: dict[str, Callable[[int], Example]] = {
    "line": line,
    "moons": moons,
    "kin8nm": regression("kin8nm", 4),
    "kin8nm, 100 epochs": regression("kin8nm", 100),
    "protein": regression("protein", 4),
}


def measured(name: str, seed: int) -> Row:
    """Train one example, and prune it by default and to half of its inducing points."""
    torch.manual_seed(seed)
    example = EXAMPLES[name](seed)
    _, training = timed(lambda: example.trained(example.model, example.likelihood, example.epochs))
    strategy: Any = example.model.variational_strategy
    K = len(strategy.inducing_points)
    row: Row = {"example": name, "seed": seed, "K": K, **training.row("train_")}
    row["before"] = example.log_density(example.model)
    row["before_on"] = example.trained_on(example.model)
    goals: dict[str, dict[str, Any]] = {"default": {}, "half": {"max_points": K // 2}}
    for goal, options in goals.items():
        result, seconds = timed(
            lambda o=options: winnow(example.model, example.likelihood, example.train, **o)
        )
        mask = result.sets[0].selection.mask
        row |= {
            f"{goal}_M": result.n_inducing,
            f"{goal}_after": example.log_density(result.model),
            f"{goal}_on": example.trained_on(result.model),
            f"{goal}_marginal": example.log_density(prune_model(example.model, [mask[None]])),
            f"{goal}_given_up": result.elbo_gap / len(example.train[1]),
            f"{goal}_gained": (result.reference - result.original) / len(example.train[1]),
            **seconds.row(f"{goal}_"),
        }
    return row


def report() -> None:
    """Print means over the seeds."""
    rows = read_results("integrations/*")
    columns = {
        "K": "K",
        "before": "before",
        "M": "default_M",
        "after": "default_after",
        "marginal": "default_marginal",
        "half": "half_M",
        "after ": "half_after",
        "before, on": "before_on",
        "half, on": "half_on",
        "train s": "train_cpu_s",
        "winnow s": "default_cpu_s",
    }
    lines = []
    for name in dict.fromkeys(row["example"] for row in rows):
        own = [row for row in rows if row["example"] == name]
        values = [mean(row[key] for row in own) for key in columns.values()]
        lines.append([name, *[f"{value:.3f}" for value in values]])
    print(table(["example", *columns], lines))


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*EXAMPLES, []], default=[])
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    if arguments.report:
        return report()
    torch.set_num_threads(1)
    for name in arguments.names or list(EXAMPLES):
        results = new_results(f"integrations/{name.replace(', ', '-').replace(' ', '-')}")
        for seed in range(arguments.seeds):
            row = results.add(measured(name, seed))
            print({k: v for k, v in row.items() if k != "versions"}, flush=True)
    return None


if __name__ == "__main__":
    main()
