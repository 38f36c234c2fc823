"""Optima of the evidence of some rows, and whether two of them are the same.

A search from several starts ends in the same optimum more than once. Those that approach a known
optimum are not optimised further, and of those with equal evidence one is enough.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Generic

import torch

from winnowgp.data import Dataset
from winnowgp.errors import NotPositiveDefiniteError
from winnowgp.linalg import definite_cholesky, half_log_det, solve_lower, squared_norm
from winnowgp.models import SparseGP
from winnowgp.models.base import InducingModel, Model
from winnowgp.models.exact_gp import leave_one_out_density
from winnowgp.models.kernels import covariance, prior_mean
from winnowgp.models.priors import log_prior
from winnowgp.training.cross_validation import PredictiveGap
from winnowgp.training.lbfgs import Curvature, Maximum

# Hyper-parameters approach an optimum if their divergence from it is at most so many times what
# they lack, plus so many nats per observation, and at most so many; rows by which it is computed.
_QUADRATIC, _EQUAL, _NEAR, _COMPARED = 4.0, 2e-3, 0.1, 300
# Optima differ if their evidences differ by so many nats per observation.
_DISTINCT = 2e-3
# Hyper-parameters that are so many nats per observation below the best have lost, unless they lack
# at most so many times what their last iterations gained.
_LOST, _RISING = 0.02, 2.0
# Standard errors by which the log density of rows that are left out is clearly lower, and nats per
# observation by which optima are nearly equal.
_CLEAR, _TIED = 2.0, 0.005


@dataclass(frozen=True, slots=True, eq=False)
class Optimum(Generic[Model]):
    """Hyper-parameters that maximise the exact evidence of some rows."""

    model: Model
    """The model without candidates."""
    evidence: float
    """Evidence in nats, without priors."""
    observations: float
    """Number of observations behind the evidence; with weights, their sum."""
    kernel: int
    """Position of its kernel among those that were compared."""
    log_prior: float = 0.0
    """Log density of the hyper-parameters under their priors, in nats."""
    converged: bool = False
    """Whether the optimisation ended before its largest number of iterations."""
    recent_gain: float = 0.0
    """Nats that the last few iterations gained."""
    curvature: Curvature = field(default_factory=Curvature)
    """Curvature of the evidence there, with which an optimisation of the same rows continues."""

    @property
    def objective(self) -> float:
        """The evidence and the priors of hyper-parameters, by which optima are compared."""
        return self.evidence + self.log_prior


@dataclass(frozen=True, slots=True)
class Start(Generic[Model]):
    """Hyper-parameters to start from."""

    model: Model
    kernel: int
    curvature: Curvature = field(default_factory=Curvature)
    """That of an optimisation which ended here."""

    def optimum(self, maximum: Maximum, rows: Dataset) -> Optimum[Model]:
        """Return the optimum at which an optimisation of the model has ended."""
        with torch.no_grad():
            prior = log_prior(self.model).item()
        return Optimum(
            self.model,
            maximum.value,
            rows.observations,
            self.kernel,
            prior,
            maximum.converged,
            maximum.recent_gain,
            self.curvature,
        )


def approaches(optimum: Optimum[Model], other: Optimum[Model], rows: Dataset) -> bool:
    """Return whether hyper-parameters of lower evidence are near the optimum `other`.

    Near a maximum of the evidence the nats that are missing are about half the squared distance in
    the metric of the information matrix, and so is the KL divergence between the distributions of
    the targets. Where that is much larger, the hyper-parameters belong to another mode.
    """
    if optimum.kernel != other.kernel or optimum.objective > other.objective:
        return False
    missing = (other.objective - optimum.objective) / rows.observations
    part = rows.part(slice(_COMPARED))
    most = min(_QUADRATIC * missing + _EQUAL, _NEAR)
    return divergence(other.model, optimum.model, part) <= most * part.N


@torch.no_grad()
def divergence(a: InducingModel, b: InducingModel, rows: Dataset) -> float:
    """Return the KL divergence of the prior distributions of one target in some rows, in nats.

    Infinite for other likelihoods than Gaussian noise that is the same for all rows and targets,
    and where a covariance cannot be factorised.

        KL = ½ [tr(B⁻¹A) − N + log|B| − log|A| + Δᵀ B⁻¹ Δ],   Δ = difference of the means
    """
    if not (isinstance(a, SparseGP) and isinstance(b, SparseGP)):
        return inf
    if a.noise.numel() > 1 or rows.noise is not None:
        return inf
    try:
        L_a, L_b = (
            definite_cholesky(
                covariance(model.kernel, rows.X, rows.X)
                + model.noise * torch.eye(rows.N).to(rows.X)
            )
            for model in (a, b)
        )
    except NotPositiveDefiniteError:
        return inf
    means = prior_mean(a.mean, rows.X) - prior_mean(b.mean, rows.X)
    trace = squared_norm(solve_lower(L_b, L_a)) + squared_norm(solve_lower(L_b, means))
    return (0.5 * (trace - rows.N) + half_log_det(L_b) - half_log_det(L_a)).item()


def leave_one_out_gap(
    reference: InducingModel, other: InducingModel, rows: Dataset
) -> PredictiveGap | None:
    """Return how much better `reference` predicts each row from the others; O(N³).

    Both have seen all rows, which favours the model of more parameters. None for other likelihoods
    than Gaussian noise, where targets are missing, and where a covariance cannot be factorised.
    """
    if not (isinstance(reference, SparseGP) and isinstance(other, SparseGP) and rows.complete):
        return None
    try:
        densities = [
            leave_one_out_density(m.kernel, data=rows, mean=m.mean, noise=m.noise)
            for m in (reference, other)
        ]
    except NotPositiveDefiniteError:
        return None
    return PredictiveGap.of(*densities, weights=rows.weights)


def predicts_worse(model: InducingModel, other: InducingModel, rows: Dataset) -> bool:
    """Return whether a model predicts each row from the others clearly worse than another one."""
    gap = leave_one_out_gap(other, model, rows)
    return gap is not None and gap.nats > _CLEAR * gap.standard_error


def best_predicting(optima: Sequence[Optimum[Model]], rows: Dataset) -> int:
    """Return which optimum to use: the first, or a nearly equal one that predicts better.

    Hyper-parameters of nearly equal evidence may predict very differently: on two of twelve splits
    of energy a smooth function exceeded a rough one by 0.0003 and 0.002 nats per observation, and
    predicted 0.5 worse. The position is that of an optimum on the same rows, at most 0.005 nats per
    observation below the first, which predicts each row from the others clearly better.

    Args:
        optima: the best first.
        rows: those of their evidence.
    """
    best, least = 0, optima[0].objective - _TIED * optima[0].observations
    for index, optimum in enumerate(optima):
        tied = optimum.converged and optimum.observations == optima[0].observations
        if not index or not tied or optimum.objective < least:
            continue
        if predicts_worse(optima[best].model, optimum.model, rows):
            best = index
    return best


def has_lost(optimum: Optimum[Model], highest: float) -> bool:
    """Return whether hyper-parameters are too far below the highest objective to be continued.

    Those that still rise are continued: a few iterations may gain as much again.
    """
    least = max(_LOST * optimum.observations, _RISING * optimum.recent_gain)
    return optimum.objective < highest - least


def descending(optimum: Optimum[Model]) -> float:
    """Return a key that sorts optima, the best first."""
    return -optimum.objective


def distinct_optima(ranked: Sequence[Optimum[Model]]) -> list[Optimum[Model]]:
    """Return the optima whose evidence differs from that of those before them."""
    distinct: list[Optimum[Model]] = []
    for optimum in ranked:
        if optimum.objective == -inf and distinct:
            continue
        margin = _DISTINCT * optimum.observations
        if all(
            other.kernel != optimum.kernel or other.objective > optimum.objective + margin
            for other in distinct
        ):
            distinct.append(optimum)
    return distinct


def best_optima(ranked: Sequence[Optimum[Model]]) -> list[Optimum[Model]]:
    """Return the best optimum of each kernel, the best first."""
    best: dict[int, Optimum[Model]] = {}
    for optimum in ranked:
        best.setdefault(optimum.kernel, optimum)
    return list(best.values())


def best_objectives(ranked: Sequence[Optimum[Model]], count: int) -> tuple[float, ...]:
    """Return the best objective of each of `count` kernels per observation, −∞ if it has none."""
    best = [-inf] * count
    for optimum in reversed(ranked):
        best[optimum.kernel] = optimum.objective / optimum.observations
    return tuple(best)
