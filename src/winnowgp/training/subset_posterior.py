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
    SubsetStatistics,
    fit_determinantal,
    fit_inclusion,
    sample_subsets,
)
from winnowgp.selection.subset_samples import SubsetSamples
from winnowgp.training.schedules import FitResult
from winnowgp.typing import Mask, Masks

MEMBERS = 16
"""Subsets that predictions average over."""

MOST_CANDIDATES = 1_000
"""Candidates up to which a posterior other than the mean field is computed."""

_CHAINS = 4
# Sweeps of each chain. They are doubled while chains disagree; earlier ones are burn-in then.
_SWEEPS, _MOST_SWEEPS = 40, 320


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
        q = _mixed_samples(statistics, prior, generator, selected=selection.mask)
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
    statistics: SubsetStatistics,
    prior: SquaredCardinality,
    generator: torch.Generator,
    *,
    selected: Mask,
) -> SubsetSamples:
    """Return samples of chains that agree; if they do not, samples around the best subset.

    Chains from random subsets may end in separate maxima, tens of nats below the selected subset.
    Averages over them would describe none of them.
    """

    def sample(sweeps: int, start: Masks | None) -> SubsetSamples:
        return sample_subsets(
            statistics,
            prior=prior,
            generator=generator,
            chains=_CHAINS,
            sweeps=sweeps,
            burn_in=None if start is None else 0,
            start=start,
        )

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        samples = sample(_SWEEPS, None)
        while not samples.mixed and 2 * samples.bounds.shape[1] <= _MOST_SWEEPS:
            samples = sample(2 * samples.bounds.shape[1], samples.masks[:, -1])
        if samples.mixed:
            return samples
        own = statistics.value(selected[None])[0].cpu() + samples.log_weights[int(selected.sum())]
        best = selected if own > samples.best.score else samples.best.mask
        around = sample(samples.bounds.shape[1], best.cpu().expand(_CHAINS, -1))
    warnings.warn(
        f"chains from random subsets have not mixed: R-hat is {max(samples.r_hat.values()):.2f}. "
        "`subset_posterior_` has samples around the best subset "
        f"(R-hat {max(around.r_hat.values()):.2f}); others may be as probable.",
        ConvergenceWarning,
        stacklevel=3,
    )
    return around
