"""GPyTorch's SGPR, fitted by Adam for each number of inducing points: one JSON row per fit.

`InducingPointKernel` around a scaled ARD squared-exponential kernel, a zero mean and Gaussian
noise, trained by the exact marginal log-likelihood with its trace penalty, which is the collapsed
bound. Hyper-parameters start at 1 and locations at cluster centres. Adam on all rows at rate 0.05,
falling to 0.005 for the last fifth of the steps (`torch.optim.LBFGS` stops after a few iterations
on this objective). Double precision.

    python gpytorch_sgpr.py --data-dir DIR --dataset concrete --points 64 --out results.jsonl
"""

from sweeps import STARTS, Problem, parser_of, sweep

# isort: split
# The number of threads is set.
import time

import gpytorch
import torch
from linear_operator.utils.errors import NanError, NotPSDError

RATE = 0.05


class SGPR(gpytorch.models.ExactGP):
    """The model of GPyTorch's SGPR example, with a zero mean and an ARD kernel."""

    def __init__(self, Z: torch.Tensor, X: torch.Tensor, y: torch.Tensor) -> None:
        likelihood = gpytorch.likelihoods.GaussianLikelihood(
            noise_constraint=gpytorch.constraints.GreaterThan(1e-6)
        )
        super().__init__(X, y, likelihood)
        self.mean_module = gpytorch.means.ZeroMean()
        scaled = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel(ard_num_dims=X.shape[1]))
        self.covar_module = gpytorch.kernels.InducingPointKernel(scaled, Z, likelihood)
        self.double()
        scaled.outputscale = 1.0
        scaled.base_kernel.lengthscale = 1.0
        likelihood.noise = 1.0

    def forward(self, X: torch.Tensor) -> gpytorch.distributions.MultivariateNormal:
        return gpytorch.distributions.MultivariateNormal(self.mean_module(X), self.covar_module(X))


def fit(problem: Problem, *, M: int, start: str, seed: int, steps: int) -> dict:
    """Fit one model and describe it; a failed factorisation gives a row with `error`.

    `curve` holds the CPU seconds and the bound at each step.
    """
    X, y = torch.from_numpy(problem.X), torch.from_numpy(problem.y)
    cpu, wall = time.process_time(), time.perf_counter()
    model = SGPR(torch.from_numpy(STARTS[start](problem.X, M, seed=seed)), X, y)
    model.train()
    bound = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    optimiser = torch.optim.Adam(model.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimiser, milestones=[int(0.8 * steps)])
    curve: list[tuple[float, float]] = []
    row: dict = {}
    try:
        for _ in range(steps):
            optimiser.zero_grad()
            loss = -bound(model(X), y)
            curve.append((time.process_time() - cpu, -len(y) * loss.item()))
            loss.backward()
            optimiser.step()
            schedule.step()
    except (NotPSDError, NanError, torch.linalg.LinAlgError) as failure:
        row["error"] = str(failure).splitlines()[0]
    return row | {
        "seconds": time.perf_counter() - wall,
        "cpu_seconds": time.process_time() - cpu,
        "elbo": max((elbo for _, elbo in curve), default=None),
        "curve": curve,
        "n_iterations": len(curve),
    }


def main() -> None:
    """Parse the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=1000, help="Adam steps")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    sweep(arguments, "gpytorch-sgpr", gpytorch.__version__, fit, steps=arguments.steps)


if __name__ == "__main__":
    main()
