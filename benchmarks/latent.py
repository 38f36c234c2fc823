"""GP-LVMs of qPCR (437 cells × 48 genes): embeddings, missing values, and GPyTorch.

    python benchmarks/latent.py                      # all parts; data from WINNOWGP_DATA
    python benchmarks/latent.py --part map missing --seeds 0 1 2
    python benchmarks/latent.py --report             # print the results

- `map`: nearest-neighbour accuracy of the cell stage in two-dimensional embeddings.
- `missing`: 5 % of the values are hidden, by one draw per seed; also Q = 11 and M = 40 as in
  Lalchand et al. (2022), with 20 % of the rows held out.
- `peer`: GPyTorch's BayesianGPLVM with the same start, kernel, noise and number of inducing points,
  Adam at 0.01 on all rows; every 25 steps its latent positions, kernel, noise and locations are
  scored by our bound with the optimal q(u), which favours it.

One thread, float64, CPU seconds. Results are in benchmarks/results/latent.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import gpytorch
import numpy as np
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.models.gplvm.bayesian_gplvm import BayesianGPLVM
from gpytorch.models.gplvm.latent_variable import VariationalLatentVariable
from gpytorch.variational import CholeskyVariationalDistribution, VariationalStrategy
from sklearn.cluster import KMeans

from measure import Runs, mean, new_results, read_results, table, timed
from winnowgp import GPLVM, LatentVariableGP, MaskedMatrix
from winnowgp.data import Standardiser
from winnowgp.data.catalogue import load_table
from winnowgp.experiments.gplvm import grid, neighbour_accuracy, paper_settings, run_gplvm
from winnowgp.models.gplvm import Latents
from winnowgp.training import FastSchedule, MaxPoints, Progress, fit, principal_latents
from winnowgp.training.adam import Adam

PARTS = ("map", "missing", "peer")
POINTS = 30
HIDDEN = 0.05
PEER_SECONDS = 120.0


def qpcr() -> tuple[torch.Tensor, tuple[str, ...]]:
    """Return the data in their original units, and the cell stages."""
    data = load_table("qpcr")
    return data.values, data.labels


def standardised_qpcr() -> MaskedMatrix:
    Y = qpcr()[0]
    return MaskedMatrix.of(Standardiser.of(Y).forward(Y))


def started(
    entries: MaskedMatrix, Q: int, candidates: torch.Tensor | None = None
) -> LatentVariableGP:
    """Return a model that starts at the principal components, as all methods do."""
    start = principal_latents(entries, Q, generator=torch.Generator().manual_seed(0))
    kernel = ScaleKernel(RBFKernel(ard_num_dims=Q)).double()
    kernel.initialize(**{"outputscale": 1.0, "base_kernel.lengthscale": 1.0})
    points = start[:0] if candidates is None else candidates
    return LatentVariableGP(kernel, start, candidates=points, noise=1.0)


def run_map(results: Runs, seeds: list[int]) -> None:
    """Compare PCA, the paper's schedule, all 225 candidates, and the default."""
    Y, stages = qpcr()
    entries = standardised_qpcr()
    start = principal_latents(entries, 2, generator=torch.Generator().manual_seed(0))
    results.add({"what": "PCA", "accuracy": neighbour_accuracy(start, stages)})
    for seed in seeds:
        training, seconds = timed(lambda seed=seed: run_gplvm(paper_settings(seed)))
        latents = training.fitted.model.latents.mean.detach()
        results.add(
            {
                "what": "paper's schedule",
                "seed": seed,
                "accuracy": neighbour_accuracy(latents, stages),
                "points": training.fitted.selection.M,
                "bound": training.fitted.elbo,
                **seconds.row(),
            }
        )
    full = started(entries, 2, grid())
    full.candidates.requires_grad_(False)
    learnt = [p for p in full.parameters() if p.requires_grad]

    def adam() -> None:
        Adam(300).maximise(
            lambda: full.bound(entries),
            [(learnt, 0.01)],
            scale=float(entries.count),
            on_step=lambda step, value: None,
        )

    _, seconds = timed(adam)
    results.add(
        {
            "what": "all 225 points, as long",
            "accuracy": neighbour_accuracy(full.latents.mean.detach(), stages),
            "points": 225,
            "bound": full.bound(entries).item(),
            **seconds.row(),
        }
    )
    for seed in seeds:
        model, seconds = timed(lambda seed=seed: GPLVM(random_state=seed).fit(Y.numpy()))
        results.add(
            {
                "what": "GPLVM()",
                "seed": seed,
                "accuracy": neighbour_accuracy(torch.from_numpy(model.embedding_), stages),
                "points": model.n_inducing_,
                "bound": model.elbo_,
                **seconds.row(),
            }
        )


def run_missing(results: Runs, seeds: list[int]) -> None:
    """Predict hidden values, then held-out rows, in units of the columns' deviations."""
    Y = qpcr()[0].numpy()
    for seed in seeds:
        rng = np.random.default_rng(seed)
        hidden = rng.uniform(size=Y.shape) < HIDDEN
        seen = np.where(hidden, np.nan, Y)
        centre, scale = np.nanmean(seen, 0), np.nanstd(seen, 0)
        truth = ((Y - centre) / scale)[hidden]
        blind = -0.5 * (np.log(2 * np.pi) + truth**2)
        results.add(
            {
                "what": "column means",
                "task": "5 % hidden",
                "seed": seed,
                "rmse": rms(truth),
                "nats": blind.mean(),
            }
        )
        for Q in (2, 11):
            fill, sd = principal_fill((seen - centre) / scale, Q)
            error = truth - fill[hidden]
            nats = -0.5 * (np.log(2 * np.pi * sd**2) + (error / sd) ** 2)
            results.add(
                {
                    "what": f"PCA, Q={Q}",
                    "task": "5 % hidden",
                    "seed": seed,
                    "rmse": rms(error),
                    "nats": nats.mean(),
                }
            )
        methods: dict[str, dict[str, Any]] = {
            "GPLVM, Q=2": {"n_components": 2},
            "GPLVM, Q=11, M=40": {"n_components": 11, "max_points": 40},
            "GPLVM, Q=11, M=40, noise a column": {
                "n_components": 11,
                "max_points": 40,
                "noise": "column",
            },
        }
        for name, arguments in methods.items():
            model, seconds = timed(partial(GPLVM(random_state=seed, **arguments).fit, seen))
            fill = (np.asarray(model.reconstruct(seen)) - centre) / scale
            nats = model.log_density(np.where(hidden, Y, np.nan), given=seen) + np.log(scale)
            results.add(
                {
                    "what": name,
                    "task": "5 % hidden",
                    "seed": seed,
                    "rmse": rms(truth - fill[hidden]),
                    "nats": nats[hidden].mean(),
                    "points": model.n_inducing_,
                    **seconds.row(),
                }
            )
        held_out(results, Y, seed)


def held_out(results: Runs, Y: np.ndarray, seed: int) -> None:
    """Train on 80 % of the rows, and reconstruct the others from inferred latent positions."""
    order = np.random.default_rng(seed).permutation(len(Y))
    train, test = Y[order[: int(0.8 * len(Y))]], Y[order[int(0.8 * len(Y)) :]]
    scale = train.std(0)
    for noise in ("shared", "column"):
        estimator = GPLVM(n_components=11, max_points=40, noise=noise, random_state=seed)
        model, seconds = timed(partial(estimator.fit, train))
        error = (np.asarray(model.reconstruct(test)) - test) / scale
        nats = model.log_density(test, given=test) + np.log(scale)
        results.add(
            {
                "what": f"GPLVM, Q=11, M=40, {noise} noise",
                "task": "20 % of rows held out",
                "seed": seed,
                "rmse": rms(error),
                "nats_a_row": nats.sum(1).mean(),
                "points": model.n_inducing_,
                **seconds.row(),
            }
        )


def principal_fill(seen: np.ndarray, Q: int) -> tuple[np.ndarray, float]:
    """Impute missing values by iterated PCA of rank Q; return them and the residual deviation.

    Plain iterations overfit; singular values are shrunk by the noise, as in probabilistic PCA.
    """
    missing = np.isnan(seen)
    filled = np.where(missing, 0.0, seen)
    low = np.zeros_like(filled)
    for _ in range(200):
        U, S, Vt = np.linalg.svd(filled, full_matrices=False)
        noise = (S[Q:] ** 2).sum() / (len(S) - Q)
        shrunk = (S[:Q] ** 2 - noise).clip(0) / S[:Q]
        low = (U[:, :Q] * shrunk) @ Vt[:Q]
        filled = np.where(missing, low, seen)
    return low, float((seen - low)[~missing].std())


def rms(error: np.ndarray) -> float:
    """Return the root mean square."""
    return float(np.sqrt((error**2).mean()))


class Peer(BayesianGPLVM):
    """The model of GPyTorch's tutorial with shared noise and a zero mean."""

    def __init__(self, N: int, P: int, start: torch.Tensor, points: torch.Tensor) -> None:
        batch = torch.Size([P])
        q_u = CholeskyVariationalDistribution(len(points), batch_shape=batch)
        strategy = VariationalStrategy(self, points.clone(), q_u, learn_inducing_locations=True)
        prior = gpytorch.priors.NormalPrior(torch.zeros_like(start), torch.ones_like(start))
        X = VariationalLatentVariable(N, P, start.shape[1], start.clone(), prior)
        super().__init__(X, strategy)
        self.mean_module = gpytorch.means.ZeroMean(batch_shape=batch)
        self.covar_module = ScaleKernel(RBFKernel(ard_num_dims=start.shape[1]))

    def forward(self, *inputs: Any, **arguments: Any) -> gpytorch.distributions.MultivariateNormal:
        (X,) = inputs
        zero: Any = self.mean_module(X)
        return gpytorch.distributions.MultivariateNormal(zero, self.covar_module(X))


def run_peer(results: Runs, seeds: list[int]) -> None:
    """Compare the CPU time of both from the same start to the same bound."""
    entries = standardised_qpcr()
    start = started(entries, 2)
    trace: list[tuple[float, float]] = []
    began = time.process_time()

    def record(progress: Progress) -> None:
        if progress.phase == "optimisation" and len(progress.candidates[0]) <= POINTS:
            trace.append((time.process_time() - began, progress.objective))

    schedule = FastSchedule(MaxPoints(POINTS))
    fitted = fit(start, entries, schedule=schedule, callbacks=record)
    ours = time.process_time() - began
    peers = peer_trace(entries, fitted.model.K)
    end = max(bound for _, bound in peers)
    theirs = first_at(peers, end)
    results.add(
        {
            "points": fitted.model.K,
            "our_bound": fitted.elbo,
            "our_cpu_s": ours,
            "peer_bound": end,
            "peer_cpu_s": theirs,
            "our_cpu_s_to_peer_bound": first_at(trace, end),
            "ratio": theirs / first_at(trace, end),
            "peer_reaches_ours": end >= fitted.elbo,
            "peer_trace": [
                [round(s, 2), round(b, 1)] for s, b in peers[:: max(1, len(peers) // 40)]
            ],
            "our_trace": [
                [round(s, 2), round(b, 1)] for s, b in trace[:: max(1, len(trace) // 40)]
            ],
        }
    )


def peer_trace(entries: MaskedMatrix, M: int) -> list[tuple[float, float]]:
    """Return CPU seconds and our bound at GPyTorch's parameters, every 25 steps."""
    Y = entries.Y
    N, P = Y.shape
    X = principal_latents(entries, 2, generator=torch.Generator().manual_seed(0))
    centres = KMeans(M, n_init="auto", random_state=0).fit(X.numpy()).cluster_centers_
    torch.set_default_dtype(torch.float64)
    model = Peer(N, P, X, torch.from_numpy(centres))
    with torch.no_grad():
        # softplus⁻¹ of √0.1: our initial variance is 0.1.
        model.X.q_log_sigma.fill_(float(np.log(np.expm1(np.sqrt(0.1)))))
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    likelihood.initialize(noise=1.0)
    elbo = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=N)
    optimiser = torch.optim.Adam([*model.parameters(), *likelihood.parameters()], lr=0.01)
    spent, trace = 0.0, [(0.0, peer_bound(model, likelihood, entries))]
    while spent < PEER_SECONDS:
        began = time.process_time()
        for _ in range(25):
            optimiser.zero_grad()
            nats: Any = elbo(model(model.sample_latent_variable()), Y.mT)
            (-nats.sum()).backward()
            optimiser.step()
        spent += time.process_time() - began
        trace.append((spent, peer_bound(model, likelihood, entries)))
    torch.set_default_dtype(torch.float32)
    return trace


def peer_bound(model: Peer, likelihood: Any, entries: MaskedMatrix) -> float:
    """Return our bound with the optimal q(u) at GPyTorch's parameters."""
    sd = torch.nn.functional.softplus(model.X.q_log_sigma.detach())
    model_copy = LatentVariableGP(
        model.covar_module,
        Latents(model.X.q_mu.detach(), variance=sd.square()),
        candidates=model.variational_strategy.inducing_points.detach(),
        noise=likelihood.noise.detach().reshape(-1),
    )
    with torch.no_grad():
        return model_copy.bound(entries).item()


def first_at(trace: list[tuple[float, float]], bound: float) -> float:
    """Return CPU seconds until a bound was reached; NaN if it never was."""
    return next((seconds for seconds, value in trace if value >= bound), float("nan"))


def report() -> None:
    """Print the results."""
    rows = read_results("latent/map")
    names = list(dict.fromkeys(row["what"] for row in rows))
    lines = []
    for name in names:
        group = [row for row in rows if row["what"] == name]
        points = mean(row.get("points", float("nan")) for row in group)
        accuracy = mean(row["accuracy"] for row in group)
        bound = mean(row.get("bound", float("nan")) for row in group)
        cpu = mean(row.get("cpu_s", float("nan")) for row in group)
        lines.append([name, f"{points:.1f}", f"{accuracy:.3f}", f"{bound:.0f}", f"{cpu:.1f}"])
    print(table(["embedding", "points", "1-NN accuracy", "bound", "CPU s"], lines), end="\n\n")
    rows, lines = read_results("latent/missing"), []
    for task, name in dict.fromkeys((row["task"], row["what"]) for row in rows):
        group = [row for row in rows if (row["task"], row["what"]) == (task, name)]
        nats = mean(row.get("nats", row.get("nats_a_row", float("nan"))) for row in group)
        cpu = mean(row.get("cpu_s", float("nan")) for row in group)
        rmse = mean(row["rmse"] for row in group)
        lines.append([task, name, f"{rmse:.3f}", f"{nats:.3f}", f"{cpu:.1f}"])
    print(table(["task", "method", "RMSE", "nats", "CPU s"], lines), end="\n\n")
    for row in read_results("latent/peer"):
        print({key: value for key, value in row.items() if not key.endswith(("trace", "versions"))})


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--report", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    runs: dict[str, Callable[[Runs, list[int]], None]] = {
        "map": run_map,
        "missing": run_missing,
        "peer": run_peer,
    }
    for part in () if arguments.report else arguments.part:
        runs[part](new_results(f"latent/{part}"), arguments.seeds)
    report()


if __name__ == "__main__":
    main()
