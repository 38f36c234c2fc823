"""Methods and quantities that benchmarks/subset_posterior.py compares."""

import resource
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from measure import Row
from winnowgp.data import Dataset
from winnowgp.gradients import ScoreFunction
from winnowgp.models import SparseGP
from winnowgp.point_processes import (
    Bernoulli,
    CardinalityPrior,
    Determinantal,
    kl_divergence,
    sampled_kl_divergence,
)
from winnowgp.selection import SubsetStatistics, sample_subsets, search_frontier
from winnowgp.selection.frontier import multistart_search
from winnowgp.selection.search import SearchResult
from winnowgp.selection.subset_samples import SubsetSamples
from winnowgp.training.adam import Adam

DRAWS = 2000
"""Subsets for every value of an objective."""


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


def on_device(model: SparseGP, data: Dataset, device: torch.device) -> SubsetStatistics:
    """Return the statistics of a model on a device."""
    return model.to(device).subset_statistics(data.to(device))


def peak_mib(device: torch.device) -> float:
    """Return the peak memory of the GPU, or of this process, in MiB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


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


def searched(statistics: SubsetStatistics, prior: CardinalityPrior) -> SearchResult:
    """Return the best subset that search finds."""
    frontier = search_frontier(statistics)
    return multistart_search(statistics, frontier, log_weights=prior.log_weights(statistics.empty))[
        0
    ]


def summarised(samples: SubsetSamples) -> Row:
    """Return what samples say about q*, and whether their chains agree."""
    scores = samples.bounds + samples.log_weights[samples.sizes]
    return {
        "chains": len(samples.bounds),
        "samples": samples.bounds.shape[1],
        "r_hat": samples.r_hat,
        "effective_samples": min(samples.effective_samples.values()),
        "size": samples.sizes.double().mean().item(),
        "credible_size": list(samples.credible_size(0.9)),
        "bound_sd": samples.bounds.std().item(),
        "mean_score": scores.mean().item(),
        "score": samples.best.score,
        "best_size": int(samples.best.mask.sum()),
    }


def many_chains(
    statistics: SubsetStatistics,
    prior: CardinalityPrior,
    generator: torch.Generator,
    effort: Effort,
    **options: Any,
) -> SubsetSamples:
    """Return samples of many chains, by default from random subsets of different sizes."""
    return sample_subsets(
        statistics,
        prior=prior,
        generator=generator,
        **{
            "chains": effort.chains,
            "sweeps": max(effort.burn_in // 2, 4),
            "burn_in": effort.burn_in,
            **options,
        },
    )


def small_features(q: Bernoulli, similarity: Tensor) -> Determinantal:
    """Return nearly independent inclusion, with features for a gradient to start from."""
    values, vectors = torch.linalg.eigh(similarity**16)
    features = vectors[:, -64:] * values[-64:].clamp_min(0).sqrt()
    return Determinantal(q.logits, 0.3 * features)


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
