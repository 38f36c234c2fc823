"""The posterior over subsets: what independent inclusion costs, and what correlated subsets gain.

    python benchmarks/subset_posterior.py                             # all parts and data sets
    python benchmarks/subset_posterior.py --device cuda --jobs 4      # chains on a GPU
    python benchmarks/subset_posterior.py --only objective --data energy --seeds 0
    python benchmarks/subset_posterior.py --report                    # print the results

Parts, on the problems of benchmarks/selection.py (K = 200 candidates, the paper's α):

- `objective`: E_q[L] − KL[q ‖ p] of the mean field and of determinantal processes, samples of q*,
  and the best subset of them against search; on the CPU, one thread, by seed;
- `evidence`: bounds on the evidence of q*, by annealing from a determinantal process, and
  back from one sample of each of many chains;
- `density`: held-out log density of predictions averaged over samples of q*, against one searched
  subset of the same mean size and single samples, at three strengths of the prior, by split;
- `scale`: seconds per Gibbs sweep and memory with 1,000 candidates and all rows of protein;
- `picture`: the three posteriors on the data of the paper's first figure.

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
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import Tensor

from measure import Row, grouped, markdown, mean, new_results, read_results, timed
from selection_problems import ALPHAS, K, fitted_model, permuted, problem, standardised
from winnowgp.data import Dataset, hills
from winnowgp.errors import ConvergenceWarning
from winnowgp.estimators import kernel_from
from winnowgp.gradients import ScoreFunction
from winnowgp.models import SparseGP, subset_mixture
from winnowgp.point_processes import (
    Bernoulli,
    CardinalityPrior,
    Determinantal,
    SquaredCardinality,
    kl_divergence,
    sampled_kl_divergence,
)
from winnowgp.selection import (
    SubsetSamples,
    SubsetStatistics,
    fit_determinantal,
    fit_inclusion,
    sample_subsets,
    search_frontier,
    subset_evidence,
)
from winnowgp.selection.frontier import multistart_search
from winnowgp.training.adam import Adam
from winnowgp.training.lbfgs import Stop, maximise_elbo

FIGURE = Path(__file__).parents[1] / "docs" / "images" / "subset_posteriors.png"
PARTS = ("objective", "evidence", "density", "scale", "picture")
DRAWS = 2000
"""Subsets for every value of an objective."""
MEMBERS = 32
"""Subsets that predictions are averaged over."""
STRENGTHS = (0.1, 1.0, 10.0)
"""Factors of the paper's α in the part `density`."""
FIGURE_CANDIDATES, FIGURE_ALPHA = 50, 0.2
"""Those of the paper's first figure."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to sample, and on which device."""

    sweeps: int
    """Gibbs sweeps of each of four chains in the part `objective`."""
    chains: int
    """Chains of the parts `evidence` and `density`, and annealing runs in each direction."""
    burn_in: int
    """Their sweeps before the first sample."""
    steps: int
    """Temperatures of each annealing run."""
    device: torch.device


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


def on_device(model: SparseGP, data: Dataset, device: torch.device) -> SubsetStatistics:
    """Return the statistics of a model on a device."""
    return model.to(device).subset_statistics(data.to(device))


def objective(name: str, seed: int, effort: Effort) -> Iterator[Row]:
    """Measure all posteriors over subsets of one data set."""
    given = problem(name)
    statistics = given.model.subset_statistics(given.data)
    prior, generator = SquaredCardinality(K, ALPHAS[name]), seeded(seed)
    log_weights = prior.log_weights(statistics.empty)
    common = {"data": name, "N": given.data.N, "K": K, "alpha": ALPHAS[name], "seed": seed}

    def row(method: str, seconds: Row, **columns: object) -> Row:
        return {**common, "method": method, **seconds, **columns}

    fit, taken = timed(lambda: fit_inclusion(statistics, prior=prior, generator=generator))
    field = fit.q
    yield row("mean field", taken.row(), **objective_of(field, statistics, prior))
    search, search_taken = timed(
        lambda: multistart_search(statistics, search_frontier(statistics), log_weights=log_weights)[
            0
        ]
    )
    yield row("search", search_taken.row(), score=search.score, best_size=int(search.mask.sum()))
    samples, taken = timed(
        lambda: sample_subsets(statistics, prior=prior, generator=generator, sweeps=effort.sweeps)
    )
    low, high = samples.credible_size(0.9)
    yield row(
        "gibbs",
        taken.row(),
        sweeps=effort.sweeps + effort.sweeps // 4,
        r_hat=max(samples.r_hat.values()),
        effective_samples=min(samples.effective_samples.values()),
        size=samples.sizes.double().mean().item(),
        credible_size=[low, high],
        bound_sd=samples.bounds.std().item(),
        score=samples.best.score,
        best_size=int(samples.best.mask.sum()),
    )
    # Sweeps that take as long as the search, all of them samples.
    equal = max(4, round(search_taken.cpu / taken.cpu * (effort.sweeps + effort.sweeps // 4)))
    short, taken = timed(
        lambda: sample_subsets(
            statistics, prior=prior, generator=generator, sweeps=equal, burn_in=0
        )
    )
    yield row(
        "gibbs, time of search",
        taken.row(),
        sweeps=equal,
        score=short.best.score,
        best_size=int(short.best.mask.sum()),
    )
    similarity = statistics.correlations()
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
    trained, taken = timed(
        lambda: score_function_fit(statistics, prior, _small_features(field, similarity), seed=seed)
    )
    yield row(
        "determinantal, score function", taken.row(), **objective_of(trained, statistics, prior)
    )


def evidence(name: str, seed: int, effort: Effort) -> Iterator[Row]:
    """Bound the evidence of q*, which does not depend on the seed."""
    given = problem(name)
    statistics = given.model.subset_statistics(given.data)
    prior, generator = SquaredCardinality(K, ALPHAS[name]), seeded(seed)
    common = {"data": name, "N": given.data.N, "K": K, "alpha": ALPHAS[name], "seed": seed}
    field = fit_inclusion(statistics, prior=prior, generator=generator).q
    moved = on_device(given.model, given.data, effort.device)
    samples, taken = timed(lambda: _many_chains(moved, prior, generator, effort))
    yield {
        **common,
        "method": "gibbs",
        **taken.row(),
        "chains": effort.chains,
        "sweeps": samples.masks.shape[1] + effort.burn_in,
        "r_hat": max(samples.r_hat.values()),
        "size": samples.sizes.double().mean().item(),
        "credible_size": list(samples.credible_size(0.9)),
        "bound_sd": samples.bounds.std().item(),
    }
    fitted = fit_determinantal(
        statistics,
        prior=prior,
        start=field,
        similarity=statistics.correlations(),
        inclusion=samples.inclusion,
        generator=generator,
    )
    bounds, taken = timed(
        lambda: subset_evidence(
            moved,
            prior=prior,
            reference=fitted.q,
            generator=generator,
            runs=effort.chains,
            steps=effort.steps,
            samples=samples.masks[:, -1],
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


def _many_chains(
    statistics: SubsetStatistics,
    prior: CardinalityPrior,
    generator: torch.Generator,
    effort: Effort,
) -> SubsetSamples:
    """Return samples of many chains that start from subsets of different sizes."""
    return sample_subsets(
        statistics,
        prior=prior,
        generator=generator,
        chains=effort.chains,
        sweeps=max(effort.burn_in // 2, 4),
        burn_in=effort.burn_in,
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
    frontier = search_frontier(model.subset_statistics(data))
    statistics, generator = on_device(model, data, effort.device), seeded(seed)
    for strength in STRENGTHS:
        alpha = round(strength * ALPHAS[name], 6)
        samples, taken = timed(
            lambda alpha=alpha: _many_chains(
                statistics, SquaredCardinality(K, alpha), generator, effort
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
            "r_hat": max(samples.r_hat.values()),
            "selected": mixture.mode.log_density(held_out.X, held_out.Y).mean().item(),
            "averaged": mixture.log_density(held_out.X, held_out.Y).mean().item(),
            "single_sample": mean(members),
        }


def scale(name: str, seed: int, effort: Effort) -> Iterator[Row]:
    """Time Gibbs sweeps of two chains with 1,000 candidates, on the device and on the CPU."""
    given = problem(name)
    order = permuted(given.data.N, seed=seed)
    model = given.model.with_candidates(given.data.X[order[:1000]])
    prior = SquaredCardinality(1000, ALPHAS[name])
    chains, sweeps, burn_in = 2, 4, 2
    for device in dict.fromkeys((effort.device, torch.device("cpu"))):
        statistics, set_up = timed(lambda device=device: on_device(model, given.data, device))
        samples, taken = timed(
            lambda statistics=statistics: sample_subsets(
                statistics,
                prior=prior,
                generator=seeded(seed),
                chains=chains,
                sweeps=sweeps,
                burn_in=burn_in,
                start=torch.zeros(chains, 1000, dtype=torch.bool),
            )
        )
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        if device.type == "cuda":
            memory = torch.cuda.max_memory_allocated(device) / 2**20
        yield {
            "data": name,
            "N": given.data.N,
            "K": 1000,
            "alpha": ALPHAS[name],
            "seed": seed,
            "device": device.type,
            "chains": chains,
            "sweeps": sweeps + burn_in,
            "size": samples.sizes.double().mean().item(),
            "memory_mib": memory,
            **set_up.row("set_up_"),
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
    field = fit_inclusion(statistics, prior=prior, generator=generator).q
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
        "mean field": (
            field.inclusion,
            field.inclusion[:, None] * field.inclusion,
            field.sample(DRAWS, generator=generator),
        ),
        "determinantal": (
            repulsive.inclusion,
            repulsive.pairwise_inclusion(),
            repulsive.sample(DRAWS, generator=generator),
        ),
        "q*": (samples.inclusion, samples.pairwise_inclusion(), samples.pooled),
    }
    for method, (inclusion, pairs, subsets) in posteriors.items():
        sizes = subsets.sum(1).double()
        yield {
            "data": name,
            "alpha": FIGURE_ALPHA,
            "seed": seed,
            "method": method,
            "candidates": [round(z, 4) for z in candidates[:, 0].tolist()],
            "inclusion": [round(p, 4) for p in inclusion.tolist()],
            "neighbours": [round(p, 5) for p in pairs.diagonal(1).tolist()],
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
    results = new_results(f"subset_posterior/{part}-{name}-{seed}")
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
            future.result()
            print(*futures[future], flush=True)


METHODS = (
    "mean field",
    "determinantal",
    "determinantal, from gibbs",
    "determinantal, score function",
    "gibbs",
)


def mean_and_error(values: list[float], digits: int) -> str:
    """Return the mean over seeds and its standard error."""
    numbers = torch.tensor(values, dtype=torch.float64)
    if len(numbers) < 2:
        return f"{mean(values):.{digits}f}"
    return f"{numbers.mean():.{digits}f} ± {numbers.std() / len(numbers) ** 0.5:.{digits}f}"


def report() -> None:
    """Print the results as Markdown tables, and draw the picture."""
    rows = read_results("subset_posterior/objective-*")
    bounds = [r for r in read_results("subset_posterior/evidence-*") if "lower" in r]
    best = {
        (r["data"], r["alpha"]): r
        for r in sorted(bounds, key=lambda r: r["lower"] - r["upper"])
        if "lower" in r
    }
    print("\nObjective in nats: mean over seeds and its standard error.\n")
    lines = []
    for (name, alpha), own in grouped(rows, "data", "alpha").items():
        by = grouped(own, "method")
        limit = best.get((name, alpha))
        start = mean(r["objective"] for r in by[("mean field",)])
        for method in METHODS:
            if not (found := by.get((method,))):
                continue
            value = share = ""
            if "objective" in found[0]:
                value = mean_and_error([r["objective"] for r in found], 1)
                if limit is not None and method != "mean field":
                    gain = mean(r["objective"] for r in found) - start
                    shares = [100 * gain / (limit[end] - start) for end in ("upper", "lower")]
                    share = f"{min(shares):.0f} to {max(shares):.0f} %"
            elif limit is not None:
                value = (
                    f"{limit['lower']:.1f} ± {limit['lower_se']:.1f} to "
                    f"{limit['upper']:.1f} ± {limit['upper_se']:.1f}"
                )
            size = f"{mean(r['size'] for r in found):.1f}"
            spread = f"{mean(r['bound_sd'] for r in found):.1f}"
            seconds = f"{mean(r['cpu_s'] for r in found):.1f}"
            lines.append([name, method, len(found), value, share, size, spread, seconds])
    header = ["data", "q(Z)", ">seeds", ">objective", ">share of the gap", ">E|Z|", ">sd of L"]
    print(markdown([*header, ">CPU s"], lines))
    print("\nEvidence by annealing, and mixing of the chains.\n")
    lines = []
    for r in read_results("subset_posterior/evidence-*"):
        ends = [f"{r[e]:.1f} ± {r[e + '_se']:.1f}" if e in r else "" for e in ("lower", "upper")]
        hat = f"{r['r_hat']:.3f}" if "r_hat" in r else ""
        lines.append([r["data"], r["method"], *ends, hat, f"{r['cpu_s']:.0f}"])
    print(markdown(["data", "method", ">at least", ">at most", ">R-hat", ">CPU s"], lines))
    print("\nBest score L(Z) + w(|Z|) in nats: search minus samples of q*, by seed.\n")
    lines = []
    for (name,), own in grouped(rows, "data").items():
        by = grouped(own, "method")
        if ("gibbs, time of search",) not in by:
            continue
        lines.append([name, mean_and_error([r["score"] for r in by[("search",)]], 1)])
        for method in ("gibbs, time of search", "gibbs"):
            pairs = zip(by[("search",)], by[(method,)], strict=False)
            lines[-1].append(mean_and_error([a["score"] - b["score"] for a, b in pairs], 1))
        lines[-1] += [f"{mean(r['cpu_s'] for r in by[(m,)]):.1f}" for m in ("search", "gibbs")]
    header = ["data", ">search", ">better than gibbs, equal time", ">than all samples"]
    print(markdown([*header, ">s of search", ">s of gibbs"], lines))
    print("\nHeld-out nats per observation: averaged minus selected, and minus single samples.\n")
    lines = []
    for (name, alpha), own in grouped(
        sorted(read_results("subset_posterior/density-*"), key=lambda r: (r["data"], r["alpha"])),
        "data",
        "alpha",
    ).items():
        size, hat = mean(r["size"] for r in own), max(r["r_hat"] for r in own)
        lines.append([name, alpha, f"{size:.0f}", len(own), f"{hat:.2f}"])
        for other in ("selected", "single_sample"):
            lines[-1].append(mean_and_error([r["averaged"] - r[other] for r in own], 4))
    header = ["data", ">α", ">E|Z|", ">splits", ">worst R-hat", ">over selected", ">over samples"]
    print(markdown(header, lines))
    for r in read_results("subset_posterior/scale-*"):
        print(
            f"\nK = {r['K']}, N = {r['N']}, {r['device']}, {r['chains']} chains: "
            f"{r['wall_s'] / r['sweeps']:.2f} seconds per sweep of all chains at {r['size']:.0f} "
            f"points, set-up {r['set_up_wall_s']:.1f} s, {r['memory_mib']:.0f} MiB"
        )
    draw(read_results("subset_posterior/picture-*"))


def draw(rows: list[Row]) -> None:
    """Draw inclusion, subsets and neighbours of the three posteriors of the picture."""
    if not rows:
        return
    data = hills()
    figure, axes = plt.subplots(
        5, 1, sharex=True, figsize=(7.5, 9), height_ratios=[1.6, 1, 1, 1, 1.3], layout="constrained"
    )
    axes[0].plot(data.X[:, 0], data.Y[:, 0], "k.", markersize=2)
    axes[0].set(ylabel="y", title="Which of 50 candidates are inducing points?")
    for number, (axis, row) in enumerate(zip(axes[1:4], rows, strict=True)):
        colour = f"C{number}"
        z = torch.tensor(row["candidates"])
        axis.vlines(z, 0, row["inclusion"], color=colour)
        axis.plot(z, row["inclusion"], "o", color=colour, markersize=4)
        for height, subset in enumerate(row["subsets"]):
            level = torch.full((len(subset),), 1.08 + 0.07 * height)
            axis.plot(z[subset], level, "|", color="0.35", markersize=4)
        label = f"{row['method']}: {row['size']:.1f} ± {row['size_sd']:.1f} points"
        axis.set(ylim=(0, 1.85), yticks=[0, 0.5, 1], ylabel="P(k ∈ Z)")
        axis.set_title(label, loc="left", fontsize="medium", color=colour)
        p = torch.tensor(row["inclusion"])
        ratio = torch.tensor(row["neighbours"]) / (p[1:] * p[:-1]).clamp_min(1e-6)
        likely = (p[1:] * p[:-1]) > 0.01
        between = (z[1:] + z[:-1]) / 2
        axes[4].plot(between[likely], ratio[likely], "o-", color=colour, markersize=3)
    axes[4].set(xlabel="x", ylabel="P(both) / P P\nof neighbours", ylim=(0, None))
    figure.savefig(FIGURE, dpi=120)
    plt.close(figure)


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--data", nargs="+", choices=list(ALPHAS), default=list(ALPHAS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
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
    report()


if __name__ == "__main__":
    main()
