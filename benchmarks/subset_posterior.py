"""The posterior over subsets: what independent inclusion costs, and what correlated subsets gain.

    python benchmarks/subset_posterior.py                             # all parts and data sets
    python benchmarks/subset_posterior.py --only objective --data energy --seeds 0 --jobs 4
    python benchmarks/subset_posterior.py --report                    # print the results

Parts, on the problems of benchmarks/selection.py (K = 200 candidates, the paper's α):

- `objective`: E_q[L] − KL[q ‖ p] of the mean field and of determinantal processes, bounds on the
  evidence of the optimal q*, samples of q*, and the best subset of them against search;
- `density`: held-out log density of predictions averaged over samples of q*, against one searched
  subset of the same mean size and single samples, at three strengths of the prior, by split;
- `scale`: seconds per Gibbs sweep and memory with 1,000 candidates and all rows of protein.

Data are read from WINNOWGP_DATA. Each task runs on one thread; compare CPU seconds. Rows are
written as they come, to benchmarks/results/subset_posterior.
"""

import argparse
import resource
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context

import torch
from torch import Tensor

from measure import Row, mean, new_results, read_results, table, timed
from selection_problems import ALPHAS, K, fitted_model, permuted, problem, standardised
from winnowgp.data import Dataset
from winnowgp.errors import ConvergenceWarning
from winnowgp.gradients import ScoreFunction
from winnowgp.models import subset_mixture
from winnowgp.point_processes import (
    Bernoulli,
    CardinalityPrior,
    Determinantal,
    SquaredCardinality,
    kl_divergence,
    sampled_kl_divergence,
)
from winnowgp.selection import (
    SubsetStatistics,
    fit_determinantal,
    fit_inclusion,
    sample_subsets,
    search_frontier,
    subset_evidence,
)
from winnowgp.selection.frontier import multistart_search
from winnowgp.training.adam import Adam

PARTS = ("objective", "density", "scale")
DRAWS = 2000
"""Subsets for every value of an objective."""
RUNS = 16
"""Annealing runs in each direction."""
MEMBERS = 32
"""Subsets that predictions are averaged over."""
STRENGTHS = (0.1, 1.0, 10.0)
"""Factors of the paper's α in the part `density`."""


@dataclass(frozen=True, slots=True)
class Effort:
    """Gibbs sweeps of each of four chains, and temperatures of each annealing run."""

    sweeps: int
    steps: int


def seeded(seed: int) -> torch.Generator:
    """Return a generator of random numbers."""
    return torch.Generator().manual_seed(seed)


def objective_of(
    q: Bernoulli | Determinantal, statistics: SubsetStatistics, prior: CardinalityPrior
) -> Row:
    """Estimate the objective with a seed of its own."""
    masks = q.sample(DRAWS, generator=seeded(12345))
    values = statistics.value(masks)
    if isinstance(q, Bernoulli):
        nats = values - kl_divergence(q, prior)
    else:
        nats = values - sampled_kl_divergence(q, prior, masks)
    return {
        "objective": round(nats.mean().item(), 3),
        "objective_se": round((nats.std() / DRAWS**0.5).item(), 3),
        "bound_sd": round(values.std().item(), 3),
        "size": round(q.mean_count().item(), 2),
    }


def score_function_fit(
    statistics: SubsetStatistics,
    prior: CardinalityPrior,
    start: Determinantal,
    *,
    seed: int,
    steps: int = 600,
) -> Determinantal:
    """Fit logits and features by the paper's estimator, Adam with four samples per step."""
    logits, features = (
        A.detach().clone().requires_grad_(True) for A in (start.logits, start.features)
    )
    gradient, generator = ScoreFunction(samples=4), seeded(seed)
    states = [gradient.init()]

    def surrogate() -> Tensor:
        q = Determinantal(logits, features)

        def score(masks: Tensor) -> Tensor:
            with torch.no_grad():
                log_q = q.log_prob(masks)
                return statistics.value(masks) + prior.log_prob(masks, like=logits) - log_q

        estimate = gradient.step(q, score, state=states[-1], generator=generator)
        states[:] = [estimate.state]
        return estimate.surrogate

    Adam(steps).maximise(
        surrogate, [([logits, features], 0.02)], scale=1.0, on_step=lambda step, value: None
    )
    return Determinantal(logits.detach(), features.detach())


def objective(name: str, seed: int, effort: Effort) -> Iterator[Row]:
    """Measure all posteriors over subsets of one data set."""
    given = problem(name)
    statistics = given.model.subset_statistics(given.data)
    prior, generator = SquaredCardinality(K, ALPHAS[name]), seeded(seed)
    log_weights = prior.log_weights(statistics.empty)
    common = {"data": name, "N": given.data.N, "K": K, "alpha": ALPHAS[name], "seed": seed}

    def row(method: str, seconds: Row, **columns: object) -> Row:
        return {**common, "method": method, **seconds, **columns}

    fit, seconds = timed(lambda: fit_inclusion(statistics, prior=prior, generator=generator))
    field = fit.q
    yield row("mean field", seconds.row(), **objective_of(field, statistics, prior))
    samples, seconds = timed(
        lambda: sample_subsets(statistics, prior=prior, generator=generator, sweeps=effort.sweeps)
    )
    low, high = samples.credible_size(0.9)
    yield row(
        "gibbs",
        seconds.row(),
        sweeps=4 * (effort.sweeps + effort.sweeps // 4),
        r_hat=max(samples.r_hat.values()),
        effective_samples=min(samples.effective_samples.values()),
        size=samples.sizes.double().mean().item(),
        credible_size=[low, high],
        bound_sd=samples.bounds.std().item(),
        score=samples.best.score,
        best_size=int(samples.best.mask.sum()),
    )
    search, taken = timed(
        lambda: multistart_search(statistics, search_frontier(statistics), log_weights=log_weights)[
            0
        ]
    )
    yield row("search", taken.row(), score=search.score, best_size=int(search.mask.sum()))
    similarity = statistics.correlations()
    processes: dict[str, Bernoulli | Determinantal] = {"mean field": field}
    for method, inclusion in (
        ("determinantal", None),
        ("determinantal, from gibbs", samples.inclusion),
    ):
        fitted, taken = timed(
            lambda inclusion=inclusion: fit_determinantal(
                statistics,
                prior=prior,
                start=field,
                similarity=similarity,
                inclusion=inclusion,
                generator=generator,
            )
        )
        yield row(method, taken.row(), **objective_of(fitted.q, statistics, prior))
        processes[method] = fitted.q
    trained, taken = timed(
        lambda: score_function_fit(statistics, prior, _small_features(field, similarity), seed=seed)
    )
    yield row(
        "determinantal, score function", taken.row(), **objective_of(trained, statistics, prior)
    )
    back = samples.masks[:, :: effort.sweeps // (RUNS // 4)].flatten(0, 1)[:RUNS]
    for start, reference in processes.items():
        evidence, taken = timed(
            lambda reference=reference: subset_evidence(
                statistics,
                prior=prior,
                reference=reference,
                generator=generator,
                runs=RUNS,
                steps=effort.steps,
                samples=back,
            )
        )
        yield row(
            f"evidence, from {start}",
            taken.row(),
            lower=evidence.lower,
            lower_se=evidence.lower_error,
            estimate=evidence.estimate,
            upper=evidence.upper,
            upper_se=evidence.upper_error,
        )


def _small_features(q: Bernoulli, similarity: Tensor) -> Determinantal:
    """Return nearly independent inclusion, with features for a gradient to start from."""
    values, vectors = torch.linalg.eigh(similarity**16)
    features = vectors[:, -64:] * values[-64:].clamp_min(0).sqrt()
    return Determinantal(q.logits, 0.3 * features)


def density(name: str, seed: int, effort: Effort) -> Iterator[Row]:
    """Compare averaged predictions with those of one subset, on one split into 90 % and 10 %."""
    whole = standardised(name)
    order = permuted(whole.N, seed=1000 + seed)
    test, train = order[: whole.N // 10], order[whole.N // 10 :]
    data = Dataset(whole.X[train], whole.Y[train])
    held_out = Dataset(whole.X[test], whole.Y[test])
    model, _ = fitted_model(data)
    statistics, generator = model.subset_statistics(data), seeded(seed)
    frontier = search_frontier(statistics)
    for strength in STRENGTHS:
        alpha = round(strength * ALPHAS[name], 6)
        prior = SquaredCardinality(K, alpha)
        samples = sample_subsets(statistics, prior=prior, generator=generator, sweeps=effort.sweeps)
        thin = samples.pooled[:: len(samples.pooled) // MEMBERS][:MEMBERS]
        size = round(samples.sizes.double().mean().item())
        selected = frontier.at(size).mask
        mixture = subset_mixture(model, data, thin, mode=selected)
        members = [m.log_density(held_out.X, held_out.Y).mean().item() for m in mixture.members]
        one = mixture.mode.log_density(held_out.X, held_out.Y).mean().item()
        averaged = mixture.log_density(held_out.X, held_out.Y).mean().item()
        yield {
            "data": name,
            "N": data.N,
            "K": K,
            "alpha": alpha,
            "seed": seed,
            "size": size,
            "r_hat": max(samples.r_hat.values()),
            "selected": one,
            "averaged": averaged,
            "single_sample": mean(members),
        }


def scale(name: str, seed: int, effort: Effort) -> Iterator[Row]:
    """Time Gibbs sweeps with 1,000 candidates."""
    given = problem(name)
    order = permuted(given.data.N, seed=seed)
    model = given.model.with_candidates(given.data.X[order[:1000]])
    statistics, set_up = timed(lambda: model.subset_statistics(given.data))
    prior = SquaredCardinality(1000, ALPHAS[name])
    sweeps, burn_in = 4, 8
    samples, seconds = timed(
        lambda: sample_subsets(
            statistics,
            prior=prior,
            generator=seeded(seed),
            chains=1,
            sweeps=sweeps,
            burn_in=burn_in,
        )
    )
    yield {
        "data": name,
        "N": given.data.N,
        "K": 1000,
        "alpha": ALPHAS[name],
        "seed": seed,
        "sweeps": sweeps + burn_in,
        "size": samples.sizes.double().mean().item(),
        "memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        **set_up.row("set_up_"),
        **seconds.row(),
    }


MEASUREMENTS: dict[str, Callable[[str, int, Effort], Iterator[Row]]] = {
    "objective": objective,
    "density": density,
    "scale": scale,
}


def measured(part: str, name: str, seed: int, effort: Effort) -> None:
    """Write the rows of one task as they come, on one thread."""
    torch.set_num_threads(1)
    results = new_results(f"subset_posterior/{part}-{name}-{seed}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # R-hat is a column.
        for row in MEASUREMENTS[part](name, seed, effort):
            results.add(row)


def run(parts: list[str], names: list[str], seeds: list[int], *, jobs: int, effort: Effort) -> None:
    """Measure every part, data set and seed."""
    tasks = [
        (part, name, seed)
        for part in parts
        for name in (["protein"] if part == "scale" else names)
        for seed in (seeds[:1] if part == "scale" else seeds)
    ]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(measured, *task, effort): task for task in tasks}
        for future in as_completed(futures):
            future.result()
            print(*futures[future], flush=True)


def report() -> None:
    """Print the results."""
    rows = read_results("subset_posterior/objective-*")
    print("\nObjective in nats and CPU seconds. The evidence lies between lower and upper.\n")
    lines = []
    for row in sorted(rows, key=lambda row: (row["data"], row["seed"])):
        value = f"{row['objective']:.1f}±{row['objective_se']:.1f}" if "objective" in row else ""
        if "upper" in row:
            value = (
                f"{row['lower']:.1f}±{row['lower_se']:.1f} .. "
                f"{row['upper']:.1f}±{row['upper_se']:.1f}"
            )
        mixing = f"{row['r_hat']:.3f}, {row['effective_samples']:.0f}" if "r_hat" in row else ""
        score = f"{row['score']:.1f} ({row['best_size']})" if "score" in row else ""
        spread = f"{row['bound_sd']:.1f}" if "bound_sd" in row else ""
        size = f"{row['size']:.1f}" if "size" in row else ""
        seconds = f"{row['cpu_s']:.1f}"
        lines.append(
            [row["data"], row["seed"], row["method"], value, spread, size, mixing, score, seconds]
        )
    header = ["data", "seed", "method", "objective", "sd of L", "size", "R-hat, ESS", "best set"]
    print(table([*header, "s"], lines))
    print("\nHeld-out nats per observation: averaged minus selected, and minus single samples.\n")
    held_out = read_results("subset_posterior/density-*")
    lines = []
    for name, alpha in sorted({(row["data"], row["alpha"]) for row in held_out}):
        own = [row for row in held_out if (row["data"], row["alpha"]) == (name, alpha)]
        lines.append([name, alpha, f"{mean(row['size'] for row in own):.0f}", len(own)])
        for other in ("selected", "single_sample"):
            gains = torch.tensor([row["averaged"] - row[other] for row in own])
            error = gains.std() / len(gains) ** 0.5 if len(gains) > 1 else torch.tensor(torch.nan)
            lines[-1].append(f"{gains.mean():.4f}±{error:.4f}")
    print(table(["data", "alpha", "size", "splits", "over selected", "over samples"], lines))
    for row in read_results("subset_posterior/scale-*"):
        print(
            f"\nK = {row['K']}, N = {row['N']}: {row['cpu_s'] / row['sweeps']:.2f} CPU seconds per "
            f"sweep at {row['size']:.0f} points, set-up {row['set_up_cpu_s']:.1f} s, "
            f"{row['memory_mib']:.0f} MiB"
        )


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--data", nargs="+", choices=list(ALPHAS), default=list(ALPHAS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--jobs", type=int, default=1, help="tasks at the same time")
    parser.add_argument("--sweeps", type=int, default=250, help="Gibbs sweeps of each chain")
    parser.add_argument("--steps", type=int, default=400, help="temperatures of annealing")
    parser.add_argument("--report", action="store_true", help="print results without measuring")
    arguments = parser.parse_args()
    if not arguments.report:
        effort = Effort(arguments.sweeps, arguments.steps)
        run(arguments.only, arguments.data, arguments.seeds, jobs=arguments.jobs, effort=effort)
    report()


if __name__ == "__main__":
    main()
