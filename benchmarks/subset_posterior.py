"""The posterior over subsets: what independent inclusion costs, and what correlated subsets gain.

    python benchmarks/subset_posterior.py                             # all parts and data sets
    python benchmarks/subset_posterior.py --device cuda --jobs 4      # chains on a GPU
    python benchmarks/subset_posterior.py --only objective --data energy --seeds 1
    python benchmarks/subset_posterior.py --report                    # print the results

Parts, on the problems of benchmarks/selection.py (K = 200 candidates, the paper's α):

- `objective`: E_q[L] − KL[q ‖ p] of the mean field and of determinantal processes, samples of q*,
  and the best subset of them against search; on the CPU, one thread, by seed;
- `evidence`: tempered samples of q*, processes that are fitted from them, bounds on the evidence by
  annealing from a determinantal process and back from samples, and chains without tempering;
- `density`: held-out log density of predictions averaged over samples of q*, against one searched
  subset of the same mean size and single samples, at three strengths of the prior, by split;
- `scale`: seconds per Gibbs sweep, of a determinantal fit, and memory with 1,000 candidates and all
  rows of protein;
- `picture`: the three posteriors on the data of the paper's first figure.

Data are read from WINNOWGP_DATA. Each task runs on one thread; compare CPU seconds. Rows are
written as they come, to benchmarks/results/subset_posterior; subset_posterior_report.py prints and
draws them.
"""

import argparse
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import Any

import torch

from measure import Row, Seconds, mean, new_results, timed
from selection_problems import ALPHAS, K, fitted_model, permuted, problem, standardised
from subset_posterior_methods import (
    DRAWS,
    Effort,
    many_chains,
    objective_of,
    on_device,
    peak_mib,
    score_function_fit,
    searched,
    seeded,
    small_features,
    summarised,
)
from winnowgp.data import Dataset, hills
from winnowgp.errors import ConvergenceWarning
from winnowgp.estimators.kernels import kernel_from
from winnowgp.models import SparseGP, subset_mixture
from winnowgp.point_processes import Bernoulli, SquaredCardinality
from winnowgp.selection import (
    fit_determinantal,
    fit_inclusion,
    sample_subsets,
    search_frontier,
    subset_evidence,
)
from winnowgp.selection.subset_samples import SubsetSamples
from winnowgp.training.lbfgs import Stop, maximise_elbo

PARTS = ("objective", "evidence", "density", "scale", "picture")
MEMBERS = 32
"""Subsets that predictions are averaged over."""
STRENGTHS = (0.1, 1.0, 10.0)
"""Factors of the paper's α in the part `density`."""
SCALES = (1.0, 0.01)
"""Those in the part `scale`: few inducing points, and many."""
LADDER = 24
"""Inverse temperatures of tempered chains, down to 0.03."""
FIGURE_CANDIDATES, FIGURE_ALPHA = 50, 0.2
"""Those of the paper's first figure."""


def objective(name: str, seed: int, effort: Effort) -> Iterator[Row]:
    """Measure all posteriors over subsets of one data set."""
    given = problem(name)
    statistics = given.model.subset_statistics(given.data)
    prior, generator = SquaredCardinality(K, ALPHAS[name]), seeded(seed)
    common = {"data": name, "N": given.data.N, "K": K, "alpha": ALPHAS[name], "seed": seed}

    def row(method: str, seconds: Seconds, columns: Row) -> Row:
        return {**common, "method": method, **seconds.row(), **columns}

    def gibbs(sweeps: int, **options: Any) -> tuple[SubsetSamples, Seconds]:
        return timed(
            lambda: sample_subsets(
                statistics, prior=prior, generator=generator, sweeps=sweeps, **options
            )
        )

    search, search_taken = timed(lambda: searched(statistics, prior))
    yield row("search", search_taken, {"score": search.score, "best_size": int(search.mask.sum())})
    for method, start in (("mean field", None), ("mean field, from search", search.mask)):
        fit, taken = timed(
            lambda start=start: fit_inclusion(
                statistics, prior=prior, generator=generator, start=start
            )
        )
        yield row(method, taken, objective_of(fit.q, statistics, prior))
    field, similarity = fit.q, statistics.correlations()
    samples, _ = gibbs(effort.sweeps, start=search.mask.expand(4, -1))
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
        yield row(method, taken, objective_of(fitted.q, statistics, prior))
    samples, taken = gibbs(effort.sweeps)
    yield row("gibbs", taken, summarised(samples))
    # Sweeps that take as long as the search, all of them samples.
    equal = max(4, round(search_taken.cpu / taken.cpu * (effort.sweeps + effort.sweeps // 4)))
    short, taken = gibbs(equal, burn_in=0)
    yield row("gibbs, time of search", taken, summarised(short))
    trained, taken = timed(
        lambda: score_function_fit(statistics, prior, small_features(field, similarity), seed=seed)
    )
    yield row("determinantal, score function", taken, objective_of(trained, statistics, prior))


def evidence(name: str, seed: int, effort: Effort) -> Iterator[Row]:
    """Bound the evidence of q*, which does not depend on the seed, and compare chains."""
    given = problem(name)
    statistics = given.model.subset_statistics(given.data)
    prior, generator = SquaredCardinality(K, ALPHAS[name]), seeded(seed)
    common = {"data": name, "N": given.data.N, "K": K, "alpha": ALPHAS[name], "seed": seed}
    search = searched(statistics, prior)
    moved = on_device(given.model, given.data, effort.device)

    def gibbs(method: str, **options: Any) -> tuple[SubsetSamples, Row]:
        samples, taken = timed(lambda: many_chains(moved, prior, generator, effort, **options))
        return samples, {**common, "method": method, **taken.row(), **summarised(samples)}

    # At low β every candidate is nearly as likely as in the searched subset.
    share = torch.full((K,), search.mask.double().mean().item(), dtype=torch.float64)
    samples, row = gibbs(
        "gibbs, tempered",
        reference=Bernoulli.from_inclusion(share),
        betas=[0.03 ** (step / (LADDER - 1)) for step in range(LADDER)],
        chains=max(effort.chains // 4, 2),
    )
    yield row
    best = max(search, samples.best, key=lambda result: result.score)
    field, taken = timed(
        lambda: fit_inclusion(statistics, prior=prior, generator=generator, start=best.mask).q
    )
    row = {**common, "method": "mean field, from best", **taken.row()}
    yield {**row, **objective_of(field, statistics, prior)}
    fitted, taken = timed(
        lambda: fit_determinantal(
            statistics,
            prior=prior,
            start=field,
            similarity=statistics.correlations(),
            inclusion=samples.inclusion,
            generator=generator,
        )
    )
    row = {**common, "method": "determinantal, from tempered", **taken.row()}
    yield {**row, **objective_of(fitted.q, statistics, prior)}
    every = max(samples.masks.shape[1] // 4, 1)
    bounds, taken = timed(
        lambda: subset_evidence(
            moved,
            prior=prior,
            reference=fitted.q,
            generator=generator,
            runs=effort.chains,
            steps=effort.steps,
            samples=samples.masks[:, every - 1 :: every].flatten(0, 1),
        )
    )
    yield {
        **common,
        "method": "evidence",
        **taken.row(),
        "runs": effort.chains,
        "steps": effort.steps,
        "lower": bounds.lower,
        "lower_se": bounds.lower_error,
        "estimate": bounds.estimate,
        "upper": bounds.upper,
        "upper_se": bounds.upper_error,
    }
    yield gibbs("gibbs, from best", start=best.mask.expand(effort.chains, -1))[1]
    yield gibbs("gibbs")[1]


def density(name: str, seed: int, effort: Effort) -> Iterator[Row]:
    """Compare averaged predictions with those of one subset, on one split into 90 % and 10 %."""
    whole = standardised(name)
    order = permuted(whole.N, seed=1000 + seed)
    test, train = order[: whole.N // 10], order[whole.N // 10 :]
    data = Dataset(whole.X[train], whole.Y[train])
    held_out = Dataset(whole.X[test], whole.Y[test])
    model, _ = fitted_model(data)
    frontier = search_frontier(model.subset_statistics(data))
    statistics, generator = on_device(model, data, effort.device), seeded(seed)
    for strength in STRENGTHS:
        alpha = round(strength * ALPHAS[name], 6)
        start = frontier.best_for_alpha(alpha).mask.expand(effort.chains, -1)
        samples, taken = timed(
            lambda alpha=alpha, start=start: many_chains(
                statistics, SquaredCardinality(K, alpha), generator, effort, start=start
            )
        )
        thin = samples.pooled[:: max(len(samples.pooled) // MEMBERS, 1)][:MEMBERS]
        size = round(samples.sizes.double().mean().item())
        model.cpu()
        mixture = subset_mixture(model, data, thin, mode=frontier.at(size).mask)
        members = [m.log_density(held_out.X, held_out.Y).mean().item() for m in mixture.members]
        yield {
            "data": name,
            "N": data.N,
            "K": K,
            "alpha": alpha,
            "seed": seed,
            **taken.row(),
            "size": size,
            "r_hat": samples.r_hat,
            "selected": mixture.mode.log_density(held_out.X, held_out.Y).mean().item(),
            "averaged": mixture.log_density(held_out.X, held_out.Y).mean().item(),
            "single_sample": mean(members),
        }


def scale(name: str, seed: int, effort: Effort) -> Iterator[Row]:
    """Time Gibbs sweeps of two chains and a determinantal fit with 1,000 candidates."""
    given, device = problem(name), effort.device
    order = permuted(given.data.N, seed=seed)
    model = given.model.with_candidates(given.data.X[order[:1000]])
    statistics, set_up = timed(lambda: on_device(model, given.data, device))
    generator = torch.Generator(device).manual_seed(seed)
    chains, sweeps, burn_in = 2, 4, 4
    common = {"data": name, "N": given.data.N, "K": 1000, "seed": seed, "device": device.type}
    fields: dict[float, Bernoulli] = {}
    for alpha in (strength * ALPHAS[name] for strength in SCALES):
        prior = SquaredCardinality(1000, alpha)
        field, field_taken = timed(
            lambda prior=prior: fit_inclusion(statistics, prior=prior, generator=generator).q
        )
        fields[alpha] = field
        samples, taken = timed(
            lambda prior=prior, field=field: sample_subsets(
                statistics,
                prior=prior,
                generator=generator,
                chains=chains,
                sweeps=sweeps,
                burn_in=burn_in,
                start=field.sample(chains, generator=generator),
            )
        )
        yield {
            **common,
            "alpha": alpha,
            "method": "gibbs",
            "chains": chains,
            "sweeps": sweeps + burn_in,
            "size": samples.sizes.double().mean().item(),
            "memory_mib": peak_mib(device),
            **set_up.row("set_up_"),
            **field_taken.row("mean_field_"),
            **taken.row(),
        }
    for alpha, field in fields.items():
        fitted, taken = timed(
            lambda alpha=alpha, field=field: fit_determinantal(
                statistics,
                prior=SquaredCardinality(1000, alpha),
                start=field,
                similarity=statistics.correlations(),
                generator=generator,
            )
        )
        yield {
            **common,
            "alpha": alpha,
            "method": "determinantal",
            "size": fitted.q.mean_count().item(),
            "objective": fitted.objective,
            "objective_se": fitted.error,
            "mean_field_objective": fitted.start,
            "memory_mib": peak_mib(device),
            **taken.row(),
        }


def picture(name: str, seed: int, effort: Effort) -> Iterator[Row]:
    """Fit the three posteriors on the data of the paper's first figure."""
    del effort
    data, generator = hills(), seeded(seed)
    rows = permuted(data.N, seed=seed)[:FIGURE_CANDIDATES]
    candidates = data.X[rows].sort(0).values
    model = SparseGP(kernel_from("rbf", 1), candidates)
    model.candidates.requires_grad_(False)
    stop = Stop(gain=1e-3, window=10, iterations=100)
    maximise_elbo(model, data.X, objective=model.chunked_bound(data), stop=stop)
    statistics = model.subset_statistics(data)
    prior = SquaredCardinality(FIGURE_CANDIDATES, FIGURE_ALPHA)
    start = searched(statistics, prior).mask
    field = fit_inclusion(statistics, prior=prior, generator=generator, start=start).q
    samples = sample_subsets(statistics, prior=prior, generator=generator, sweeps=500)
    repulsive = fit_determinantal(
        statistics,
        prior=prior,
        start=field,
        similarity=statistics.correlations(),
        inclusion=samples.inclusion,
        generator=generator,
    ).q
    posteriors = {
        "mean field": (field, field.sample(DRAWS, generator=generator)),
        "determinantal": (repulsive, repulsive.sample(DRAWS, generator=generator)),
        "q*": (samples, samples.pooled),
    }
    for method, (q, subsets) in posteriors.items():
        sizes = subsets.sum(1).double()
        yield {
            "data": name,
            "alpha": FIGURE_ALPHA,
            "seed": seed,
            "method": method,
            "candidates": [round(z, 4) for z in candidates[:, 0].tolist()],
            "inclusion": [round(p, 4) for p in q.inclusion.tolist()],
            "neighbours": [round(p, 5) for p in q.pairwise_inclusion().diagonal(1).tolist()],
            "subsets": [one.nonzero()[:, 0].tolist() for one in subsets[:: len(subsets) // 10]],
            "size": sizes.mean().item(),
            "size_sd": sizes.std().item(),
            "bound": statistics.value(subsets).mean().item(),
        }


MEASUREMENTS: dict[str, Callable[[str, int, Effort], Iterator[Row]]] = {
    "objective": objective,
    "evidence": evidence,
    "density": density,
    "scale": scale,
    "picture": picture,
}


def measured(part: str, name: str, seed: int, effort: Effort) -> None:
    """Write the rows of one task as they come, on one thread."""
    torch.set_num_threads(1)
    where = f"-{effort.device.type}" if part == "scale" else ""
    results = new_results(f"subset_posterior/{part}-{name}-{seed}{where}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # R-hat is a column.
        for row in MEASUREMENTS[part](name, seed, effort):
            results.add(row)


def run(parts: list[str], names: list[str], seeds: list[int], *, jobs: int, effort: Effort) -> None:
    """Measure every part, data set and seed."""
    once = {"scale": ["protein"], "picture": ["hills"]}
    tasks = [
        (part, name, seed)
        for part in parts
        for seed in (seeds if part in ("objective", "density") else seeds[:1])
        for name in once.get(part, names)
    ]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(measured, *task, effort): task for task in tasks}
        for future in as_completed(futures):
            error = future.exception()
            print(*futures[future], "" if error is None else repr(error), flush=True)


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--data", nargs="+", choices=list(ALPHAS), default=list(ALPHAS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5])
    parser.add_argument("--jobs", type=int, default=1, help="tasks at the same time")
    parser.add_argument("--sweeps", type=int, default=200, help="Gibbs sweeps of each of 4 chains")
    parser.add_argument("--chains", type=int, default=64, help="chains of evidence and density")
    parser.add_argument("--burn-in", type=int, default=60, help="sweeps before they are sampled")
    parser.add_argument("--steps", type=int, default=400, help="temperatures of annealing")
    parser.add_argument("--device", default="cpu", help="of evidence, density and scale")
    parser.add_argument("--report", action="store_true", help="print results without measuring")
    given = parser.parse_args()
    if not given.report:
        device = torch.device(given.device)
        effort = Effort(given.sweeps, given.chains, given.burn_in, given.steps, device)
        run(given.only, given.data, given.seeds, jobs=given.jobs, effort=effort)
    from subset_posterior_report import report

    report()


if __name__ == "__main__":
    main()
