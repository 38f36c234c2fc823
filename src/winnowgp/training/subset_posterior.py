"""The posterior over subsets of a fitted model, and predictions that average over it."""

import warnings
from dataclasses import replace
from typing import Any

import torch
from gpytorch.likelihoods import GaussianLikelihood

from winnowgp.data import Source
from winnowgp.errors import ConvergenceWarning
from winnowgp.models import MixturePosterior, SparseGP, subset_mixture
from winnowgp.models.likelihoods import is_plain
from winnowgp.point_processes import SquaredCardinality
from winnowgp.selection import (
    SubsetPosterior,
    SubsetSamples,
    SubsetStatistics,
    fit_determinantal,
    fit_inclusion,
    sample_subsets,
)
from winnowgp.training.schedules import FitResult

MEMBERS = 16
"""Subsets that predictions average over."""

MOST_CANDIDATES = 1_000
"""Candidates up to which a posterior other than the mean field is computed."""

_CHAINS = 4
# Sweeps of each chain. They are doubled while chains disagree; earlier ones are burn-in then.
_SWEEPS, _MOST_SWEEPS = 40, 640


def with_subset_posterior(
    result: FitResult[Any], data: Source, *, kind: str, generator: torch.Generator
) -> FitResult[Any]:
    """Return the result of a fit with another posterior over subsets of its last candidates.

    Hyper-parameters, locations and the strength of the prior are those of the fit. Samples of q*
    become a mixture of posteriors if noise is Gaussian; its mode is the selected model.

    Args:
        result: result with one set of candidates.
        data: the rows of the fit.
        kind: "determinantal" or "gibbs".
        generator: source of randomness.
    """
    selection, candidates = result.selections[0], result.candidates[0]
    if selection.K == 0 or selection.alpha is None:
        return result  # A constant: there is one subset only.
    if selection.K > MOST_CANDIDATES:
        warnings.warn(
            f"`posterior={kind!r}` is for at most {MOST_CANDIDATES:,} candidates; the fit ended "
            f"with {selection.K:,}, and its inclusion probabilities are those of 'mean-field'. "
            "Accept fewer inducing points with a larger `tolerance` or `max_points`.",
            ConvergenceWarning,
            stacklevel=2,
        )
        return result
    pool = result.model.with_candidates(candidates)
    statistics = pool.subset_statistics(data)
    prior = SquaredCardinality(selection.K, selection.alpha)
    q: Any
    if kind == "determinantal":
        q = fit_determinantal(
            statistics,
            prior=prior,
            start=fit_inclusion(
                statistics, prior=prior, generator=generator, start=selection.mask
            ).q,
            similarity=statistics.correlations(),
            generator=generator,
        ).q
        q = replace(q, logits=q.logits.detach().cpu(), features=q.features.detach().cpu())
    else:
        q = _mixed_samples(statistics, prior, generator)
    posterior = SubsetPosterior(q)
    result = replace(
        result,
        selections=(replace(selection, inclusion=posterior.inclusion), *result.selections[1:]),
        subset_posterior=posterior,
    )
    gaussian = isinstance(pool, SparseGP) and is_plain(pool.likelihood, GaussianLikelihood)
    if not isinstance(q, SubsetSamples) or not gaussian:
        return result
    masks = q.pooled[:: max(len(q.pooled) // MEMBERS, 1)][:MEMBERS].to(candidates.device)
    mixture = subset_mixture(pool, data, masks, mode=selection.mask)
    return replace(result, posterior=MixturePosterior(mixture.members, mode=result.posterior))


def _mixed_samples(
    statistics: SubsetStatistics, prior: SquaredCardinality, generator: torch.Generator
) -> SubsetSamples:
    """Return samples of chains that agree, or of as many sweeps as are affordable."""
    sweeps, start = _SWEEPS, None
    while True:
        last = 2 * sweeps > _MOST_SWEEPS
        with warnings.catch_warnings():
            if not last:
                warnings.simplefilter("ignore", ConvergenceWarning)
            samples = sample_subsets(
                statistics,
                prior=prior,
                generator=generator,
                chains=_CHAINS,
                sweeps=sweeps,
                burn_in=None if start is None else 0,
                start=start,
            )
        if samples.mixed or last:
            return samples
        sweeps, start = 2 * sweeps, samples.masks[:, -1]
