"""GPyTorch's SVGP, fitted by Adam for each number of inducing points: one JSON row per fit.

A zero-mean GP with a scaled ARD squared-exponential kernel and Gaussian noise; whitened
variational distribution with a full Cholesky factor; inducing locations are learned. Inputs and
target are standardised on the training rows; kernel variance, lengthscales and noise start at 1.
Adam at rate 0.01 over minibatches of 1,024 rows (all rows, where there are fewer), falling to
0.001 for the last fifth of the steps. Double precision, as the factorisations need it.

    python gpytorch_svgp.py --data-dir DIR --dataset concrete --start kmeans --out results.jsonl
"""

from sweeps import STARTS, Problem, parser_of, sweep

# isort: split
# The number of threads is set.
import time

import gpytorch
import numpy as np
import torch
from linear_operator.utils.errors import NanError, NotPSDError

BATCH = 1024
RATE = 0.01


class SVGP(gpytorch.models.ApproximateGP):
    """Whitened SVGP with learned inducing locations."""

    def __init__(self, Z: torch.Tensor) -> None:
        super().__init__(
            gpytorch.variational.VariationalStrategy(
                self,
                Z,
                gpytorch.variational.CholeskyVariationalDistribution(len(Z)),
                learn_inducing_locations=True,
            )
        )
        self.mean_module = gpytorch.means.ZeroMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(
            gpytorch.kernels.RBFKernel(ard_num_dims=Z.shape[1])
        )

    def forward(self, X: torch.Tensor) -> gpytorch.distributions.MultivariateNormal:
        return gpytorch.distributions.MultivariateNormal(self.mean_module(X), self.covar_module(X))


def build(Z: torch.Tensor) -> tuple[SVGP, gpytorch.likelihoods.GaussianLikelihood]:
    """Model and likelihood in double precision, every hyper-parameter at 1."""
    model = SVGP(Z).double()
    model.covar_module.outputscale = 1.0
    model.covar_module.base_kernel.lengthscale = 1.0
    likelihood = gpytorch.likelihoods.GaussianLikelihood(
        noise_constraint=gpytorch.constraints.GreaterThan(1e-6)
    ).double()
    likelihood.noise = 1.0
    return model, likelihood


def training_elbo(bound: gpytorch.mlls.VariationalELBO, X: torch.Tensor, y: torch.Tensor) -> float:
    """The bound over all training rows, summed, in nats.

    GPyTorch reports L_batch / B - KL / N; with the whole data as the batch that is L / N.
    """
    with torch.no_grad():
        return float(bound(bound.model(X), y)) * len(y)


def optimise(
    model: SVGP,
    likelihood: gpytorch.likelihoods.GaussianLikelihood,
    *,
    X: torch.Tensor,
    y: torch.Tensor,
    steps: int,
    generator: torch.Generator,
) -> tuple[list[tuple[float, float]], float]:
    """Run Adam for `steps` minibatches.

    Returns:
        CPU seconds since the call and training ELBO after 1, 2, 4, ... and all steps, without the
        time of these evaluations; and the mean loss per row over the first half of the slow phase
        less that over the second half (nats per row; near zero when the fit has settled).
    """
    bound = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=len(y))
    parameters = [*model.parameters(), *likelihood.parameters()]
    optimiser = torch.optim.Adam(parameters, lr=RATE)
    slow_from = int(0.8 * steps)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimiser, milestones=[slow_from])
    losses, curve = [], []
    rows = torch.arange(len(y))
    start = time.process_time()
    while len(losses) < steps:
        order = rows if len(y) <= BATCH else torch.randperm(len(y), generator=generator)
        for batch in order.split(BATCH)[: steps - len(losses)]:
            optimiser.zero_grad()
            loss = -bound(model(X[batch]), y[batch])
            loss.backward()
            optimiser.step()
            schedule.step()
            losses.append(loss.item())
            if len(losses).bit_count() == 1 or len(losses) == steps:
                now = time.process_time()
                curve.append((now - start, training_elbo(bound, X, y)))
                start += time.process_time() - now
    first, second = np.array_split(losses[slow_from:], 2)
    return curve, float(np.mean(first) - np.mean(second))


def test_scores(
    model: SVGP, likelihood: gpytorch.likelihoods.GaussianLikelihood, problem: Problem
) -> dict[str, float]:
    """RMSE and mean log density of the test rows, in the target's own units."""
    model.eval()
    likelihood.eval()
    with torch.no_grad():
        prediction = likelihood(model(torch.from_numpy(problem.X_test)))
    return problem.scores(prediction.mean.numpy(), prediction.variance.numpy())


def fit(problem: Problem, *, M: int, start: str, seed: int, steps: int) -> dict:
    """Fit one model and describe it; a failed factorisation gives a row with `error`.

    `seconds` covers the choice of the start and optimisation, `start_seconds` is its first part.
    `cpu_seconds` is the process's own time over the same span, which other load on the machine
    hardly changes, less that of evaluating `curve`. `converged` says that the slow phase gained
    less than 0.001 nats per row between its halves.
    """
    row: dict = {}
    X, y = torch.from_numpy(problem.X), torch.from_numpy(problem.y)
    wall, cpu = time.perf_counter(), time.process_time()
    Z = torch.from_numpy(STARTS[start](problem.X, M, seed=seed))
    row["start_seconds"] = time.perf_counter() - wall
    model, likelihood = build(Z)
    # The first call in training mode perturbs the variational mean from torch's global generator.
    torch.manual_seed(seed)
    try:
        started = time.process_time() - cpu
        curve, drift = optimise(
            model,
            likelihood,
            X=X,
            y=y,
            steps=steps,
            generator=torch.Generator().manual_seed(seed),
        )
        row |= {"seconds": time.perf_counter() - wall, "cpu_seconds": started + curve[-1][0]}
        row |= {"curve": [(started + seconds, elbo) for seconds, elbo in curve]}
        row |= {"elbo": curve[-1][1], **test_scores(model, likelihood, problem)}
    except (NotPSDError, NanError, torch.linalg.LinAlgError) as failure:
        row |= {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}
        return row | {"error": str(failure).splitlines()[0]}
    return row | {
        "n_iterations": steps,
        "converged": abs(drift) < 1e-3,
        "drift": drift,
        "noise": likelihood.noise.item(),
        "kernel_variance": model.covar_module.outputscale.item(),
        "lengthscales": model.covar_module.base_kernel.lengthscale[0].tolist(),
    }


def main() -> None:
    """Parse the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=4000, help="Adam steps")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    sweep(arguments, "gpytorch-svgp", gpytorch.__version__, fit, steps=arguments.steps)


if __name__ == "__main__":
    main()
