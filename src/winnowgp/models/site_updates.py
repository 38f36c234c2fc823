"""Alternating updates of Gaussian sites: Newton steps of the means, then the precisions.

`alternate` needs few evaluations of a `SiteProblem`; `site_inference` has latent functions with
separate posteriors, and `mixed_sites` mixtures of processes with a joint one.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeAlias, TypeVar, final

import torch
from jaxtyping import Float
from torch import Tensor

from winnowgp.bounds.sites import Sites
from winnowgp.data import Dataset
from winnowgp.errors import NotPositiveDefiniteError

ExpectedLogProb: TypeAlias = Callable[[slice, Tensor, Tensor], Tensor]

"""A function from rows, means and variances `[B P]` of their centred latents to nats."""

_Result = TypeVar("_Result")

# Shortest step that backtracking tries.
_SHORTEST = 1e-4
# Updates of the precisions at most.
_ROUNDS = 100
# Newton steps of the means at most between two updates of the precisions.
_MEAN_STEPS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteState:
    """q(u) of given sites, and the sites that the likelihood implies at its marginals.

    q(u) is in whitened coordinates V, with one mean for each latent function or a joint one.
    """

    sites: Sites
    q_mean: Float[Tensor, "M *P"]
    """m = V α."""
    mean: Float[Tensor, "N P"]
    """Mean under q of each row's latents, without their prior mean."""
    variance: Float[Tensor, "N P"]
    implied: Sites
    """Sites from the gradient of the likelihood at these marginals; equal at the optimum."""
    lift: Float[Tensor, "M *P"]
    """V ∂E/∂μ; equal to m at the optimum."""
    bound: float
    """ELBO, in nats."""
    converged: bool = False
    """Whether the last update gained less than the tolerance; False if rounds ran out."""

    def alpha(self) -> Float[Tensor, "N P"]:
        """Return α = λ − w μ."""
        return self.sites.linear - self.sites.precision * self.mean

    def slope(self) -> Float[Tensor, "N P"]:
        """Return ∂E/∂μ; equal to α at the optimum."""
        return self.implied.linear - self.implied.precision * self.mean


_State = TypeVar("_State", bound=SiteState)


@final
@dataclass(frozen=True, slots=True)
class MeanStep:
    """A direction for the means of q: of each latent function, or of all jointly."""

    alpha: Float[Tensor, "N P"]
    """Change of α."""
    q_mean: Float[Tensor, "M *P"]
    """Change of m = V α."""
    mean: Float[Tensor, "N P"]
    """Change of μ = Vᵀ m."""

    def plus(self, length: Tensor, other: "MeanStep") -> "MeanStep":
        """Return the sum of this direction and a multiple of another."""
        return MeanStep(
            self.alpha + length * other.alpha,
            self.q_mean + length * other.q_mean,
            self.mean + length * other.mean,
        )


class SiteProblem(ABC, Generic[_State]):
    """Rows and a likelihood whose sites are inferred: what a step needs to evaluate."""

    @abstractmethod
    def evaluate(self, sites: Sites) -> _State:
        """Return q(u) of given sites; may raise `NotPositiveDefiniteError`."""

    @abstractmethod
    def mean_step(self, at: _State) -> tuple[MeanStep, float]:
        """Return Newton's step of the means, and its slope: twice the gain that it predicts."""

    @abstractmethod
    def moved(self, at: _State, sites: Sites, q_mean: Tensor, mean: Tensor) -> _State:
        """Return the state with these means, and sites of the same precisions."""

    def move_means(self, at: _State, step: MeanStep, rate: float) -> _State:
        """Return the state after a multiple of a step of the means, at the same precisions."""
        q_mean, mean = at.q_mean + rate * step.q_mean, at.mean + rate * step.mean
        alpha, precision = at.alpha() + rate * step.alpha, at.sites.precision
        return self.moved(at, Sites(alpha + precision * mean, precision), q_mean, mean)


def alternate(problem: SiteProblem[_State], current: _State, *, gain: float) -> _State:
    """Update means and precisions in turn from a state; see `infer_sites`."""
    rate, gained = 1.0, 0.0
    for _ in range(_ROUNDS):
        # Rounding of the bound hides smaller gains.
        least = max(gain, 4 * torch.finfo(current.mean.dtype).eps * abs(current.bound))
        enough, before = max(least, 0.1 * gained), current.bound
        current = _update_means(problem, current, gain=least, enough=enough)
        updated, rate = _update_precisions(problem, current, rate, gain=least)
        if updated is not None:
            gained, current = updated.bound - current.bound, updated
            if gained < least:
                return replace(current, converged=True)
        elif current.bound - before < least:
            return replace(current, converged=True)
        else:
            # The means have moved: the step length that the precisions needed no longer applies.
            rate, gained = 1.0, 0.0
    return current


def backtrack(
    attempt: Callable[[float], _Result],
    *,
    accept: Callable[[_Result], bool],
    rate: float = 1.0,
    shortest: float = _SHORTEST,
) -> tuple[_Result | None, float]:
    """Halve a step until its result is accepted.

    Args:
        attempt: from a step length to a result; may raise `NotPositiveDefiniteError`, which rejects
            the step.
        accept: whether to stop at a result.
        rate: first step length.
        shortest: last step length, at least.

    Returns: the accepted result, or None, and the last step length.
    """
    while rate >= shortest:
        try:
            result = attempt(rate)
        except NotPositiveDefiniteError:
            pass
        else:
            if accept(result):
                return result, rate
        rate *= 0.5
    return None, rate


def _update_means(
    problem: SiteProblem[_State], at: _State, *, gain: float, enough: float
) -> _State:
    """Take Newton steps of the means at fixed precisions, until one gains less than `enough`."""
    for _ in range(_MEAN_STEPS):
        step, slope = problem.mean_step(at)
        # A quadratic gains half of the slope along Newton's step.
        if 0.5 * slope < 0.3 * gain:
            break
        before = at.bound
        moved, _ = backtrack(
            lambda rate, at=at, step=step: problem.move_means(at, step, rate),
            accept=lambda result, before=before: result.bound > before,
        )
        if moved is None:
            break
        gained, at = moved.bound - before, moved
        if gained < enough:
            break
    return at


def _update_precisions(
    problem: SiteProblem[_State], at: _State, rate: float, *, gain: float
) -> tuple[_State | None, float]:
    """Move the precisions towards the implied ones at fixed means; None if nothing is gained.

    Unlike `backtrack` this extrapolates the next step length from the change that remains.

    Returns: the result, and the step length to try next time.
    """
    change = at.implied.precision - at.sites.precision
    while rate >= _SHORTEST:
        precision = at.sites.precision + rate * change
        try:
            moved = problem.evaluate(Sites(at.alpha() + precision * at.mean, precision))
        except NotPositiveDefiniteError:
            rate *= 0.5
            continue
        remaining = moved.implied.precision - moved.sites.precision
        # Along the step the change that remains falls from 1 to `share`: it would vanish at
        # rate / (1 − share) (Irons and Tuck 1969). A precision w changes log σ² by about σ² dw.
        weight = change * at.variance.square()
        share = ((weight * remaining).sum() / (weight * change).sum()).item()
        best = min(1.0, rate / min(1 - share, 10)) if share < 1 else 1.0
        # Near the optimum the bound is flat, and the change that remains is more informative.
        if moved.bound > at.bound or (moved.bound > at.bound - 0.1 * gain and abs(share) < 0.5):
            return moved, best
        if moved.bound > at.bound - 0.1 * gain:
            break
        rate = min(0.5 * rate, best)
    return None, rate


def site_derivatives(
    expected: ExpectedLogProb, rows: slice, mean: Tensor, variance: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return Σ_i E_i with ∂E_i/∂μ_i and ∂E_i/∂σ_i²."""
    if not torch.isfinite(mean.sum() + variance.sum()):
        # Likelihoods would raise errors of their own, which backtracking does not catch.
        raise NotPositiveDefiniteError("q(f) is not finite at some rows")
    with torch.enable_grad():
        at = mean.detach().requires_grad_(), variance.detach().requires_grad_()
        nats = expected(rows, *at).sum()
        slope, curvature = torch.autograd.grad(nats, at)
    return nats.detach(), slope, curvature


class SiteBound:
    """The base class of bounds whose calls start from the sites of the call before.

    Args:
        data: rows, which are fixed.
    """

    def __init__(self, data: Dataset) -> None:
        self._data = data
        self._sites: Sites | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the sites that the next call starts from."""
        sites = self._sites
        return {} if sites is None else {"linear": sites.linear, "precision": sites.precision}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Start the next call from saved sites."""
        like = self._data.X
        self._sites = (
            Sites(state["linear"].to(like), state["precision"].to(like)) if state else None
        )
