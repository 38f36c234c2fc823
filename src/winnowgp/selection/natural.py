"""Natural all-flip selection: independent inclusions fitted by exact flips.

For q(Z) = Π Bernoulli(λ_k) the objective E_q[L] − KL[q ‖ p] is stationary where

    logit λ_k = E[L(Z ∪ k) − L(Z without k)] + E[w(|Z₋ₖ| + 1) − w(|Z₋ₖ|)],

and moving the logits a fraction ρ towards the right-hand side is a natural-gradient step. One
sampled subset gives an unbiased right-hand side for every k at once.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from winnowgp.errors import InputError
from winnowgp.point_processes import Bernoulli, CardinalityPrior, kl_divergence
from winnowgp.selection.objective import SearchObjective
from winnowgp.selection.search import forward_selection
from winnowgp.typing import Mask, Scalar

# Each finds four more bits of a size.
_CUTS = 8

_WINDOW = 20

_OFFSET, _POWER = 5.0, 0.75
# Of the expected size, that one subset may move it by; a point at least.
_FARTHEST = 0.02

_HALVINGS = 6


@dataclass(frozen=True, slots=True)
class InclusionState:
    """Where the iteration stands."""

    worth: Float[Tensor, " K"]
    """Running average of the flips, in nats."""
    q: Bernoulli
    step: int
    """Number of subsets seen."""


@dataclass(frozen=True, slots=True)
class InclusionFit:
    """Fitted inclusions."""

    q: Bernoulli
    trace: Float[Tensor, " T"]
    """One draw of L(Z) − KL[q ‖ p] a step, in nats: noisy, unbiased for the objective there."""
    settled: bool
    """Whether the stopping rule was met before the steps ran out."""


def inclusion_start(
    statistics: SearchObjective, mask: Mask, *, prior: CardinalityPrior
) -> InclusionState:
    """State at a given subset: its flips as the first average. O(K² M).

    Started from λ = ½ instead, a strong prior empties the set in one step and nothing brings it
    back, and a weak one fills it and takes tens of steps to forget the first, enormous flips.
    """
    worth = statistics.marginal_gains(mask)
    q = Bernoulli.from_inclusion(mask.to(worth))
    return InclusionState(worth, fixed_point(worth, prior, at=q), 0)


def inclusion_step(
    statistics: SearchObjective,
    state: InclusionState,
    *,
    prior: CardinalityPrior,
    generator: torch.Generator,
) -> tuple[InclusionState, Scalar]:
    """One subset drawn, its flips averaged in with ρ = (step + 5)^−¾, the logits fixed_point. O(K² M).

    The average of the flips is damped; the prior is not, for it is known exactly (`fixed_point`). The
    power lies between ½ and 1, so the steps add up to infinity and their squares do not.

    A step that would move the expected size by more than 2 % is halved until it does not: a subset
    that happens to lose a neighbourhood makes every point of it look worth hundreds of nats at
    once. On energy one such subset took E|Z| from 49 to 67 and the objective down by 90 nats.
    Steps that long die out as ρ falls.

    Returns: the next state, and the draw L(Z) − KL[q ‖ p] at the state that was passed in.
    """
    drawn = statistics.search_state(state.q.sample(1, generator=generator)[0])
    rate = (state.step + _OFFSET) ** -_POWER
    # No clipping: flips are heavy-tailed because losing a neighbourhood is; clipped ended lower.
    change = rate * (drawn.marginal_gains() - state.worth)
    draw = drawn.bound - kl_divergence(state.q, prior)
    return _moved(state, change, prior=prior), draw


def _moved(
    state: InclusionState, change: Float[Tensor, " K"], *, prior: CardinalityPrior
) -> InclusionState:
    """The next state, `change` halved until the expected size moves little."""
    size = state.q.mean_count().item()
    q = fixed_point(state.worth + change, prior, at=state.q)
    for _ in range(_HALVINGS):
        if abs(q.mean_count().item() - size) <= max(1.0, _FARTHEST * size):
            break
        change = 0.5 * change
        q = fixed_point(state.worth + change, prior, at=state.q)
    return InclusionState(state.worth + change, q, state.step + 1)


def fixed_point(worth: Float[Tensor, " K"], prior: CardinalityPrior, *, at: Bernoulli) -> Bernoulli:
    """Logits worth_k + slope_k, the prior's slope taken at the expected size they themselves imply.

    Solves m = Σ_k σ(worth_k + slope(m − λ_k) + c_k) for m by cutting intervals, O(K). slope
    interpolates the differences of the prior's log weights; c_k is how far that is from the exact
    expectation at the present λ, zero for the paper's prior. Taking the slope at the present λ
    instead overshoots: with α = 0.5 and a hundred points it is −100 nats a point, then nothing.
    """
    slopes = prior.log_weights(worth).diff()
    inclusion = at.inclusion
    offset = worth + prior.expected_slope(at) - _interpolated(slopes, inclusion.sum() - inclusion)
    # Sixteen parts at a time: small tensors cost the same whatever their number of rows.
    parts = torch.arange(1, 16, dtype=worth.dtype, device=worth.device)
    low, width = 0.0, float(at.K)
    for _ in range(_CUTS):
        width /= 16
        sizes = low + width * parts
        logits = offset + _interpolated(slopes, sizes[:, None] - inclusion)
        below = torch.sigmoid(logits).sum(1) > sizes
        low += width * int(below.cumprod(0).sum())
    return Bernoulli(offset + _interpolated(slopes, low + 0.5 * width - inclusion))


def _interpolated(
    slopes: Float[Tensor, " K"], sizes: Float[Tensor, "*S K"]
) -> Float[Tensor, "*S K"]:
    """Slopes at fractional sizes, linear between and beyond the ends."""
    if len(slopes) == 1:
        return slopes.expand_as(sizes)
    below = sizes.floor().clamp(0, len(slopes) - 2).long()
    return slopes[below] + (sizes - below) * (slopes[below + 1] - slopes[below])


def fit_inclusion(
    statistics: SearchObjective,
    *,
    prior: CardinalityPrior,
    generator: torch.Generator,
    start: Mask | None = None,
    max_steps: int = 100,
) -> InclusionFit:
    """Inclusions fitted until the objective stops rising.

    Stops when the mean of the last twenty draws of the objective is, within its standard error, no
    higher than that of the twenty before and no lower than that of the best twenty so far, and the
    expected size moved by less than one point between the two. The second condition keeps it from
    stopping where one unlucky subset has just inflated the flips.

    Args:
        start: subset to start at; the best one of a forward path if not given.
        max_steps: subsets drawn at most.
    """
    log_weights = prior.log_weights(statistics.empty)
    if not torch.isfinite(log_weights).all():
        raise InputError(
            "`prior` forbids some sizes, and q gives every subset some probability, so the KL "
            "would be infinite; give those sizes a large finite penalty instead."
        )
    if start is None:
        path = forward_selection(statistics, log_weights=log_weights)
        start = path.masks[int((path.bounds + log_weights[path.masks.sum(dim=1)]).argmax())]
    state = inclusion_start(statistics, start, prior=prior)
    draws: list[Scalar] = []
    sizes: list[float] = []
    settled = False
    while len(draws) < max_steps and not settled:
        state, draw = inclusion_step(statistics, state, prior=prior, generator=generator)
        draws.append(draw)
        sizes.append(state.q.mean_count().item())
        settled = len(draws) >= 2 * _WINDOW and _stalled(torch.stack(draws), sizes)
    trace = torch.stack(draws) if draws else state.worth[:0]
    return InclusionFit(state.q, trace, settled)


def _stalled(draws: Float[Tensor, " T"], sizes: list[float]) -> bool:
    """Whether the last window is level with the one before and with the best, within noise."""
    windows = draws.unfold(0, _WINDOW, 1)
    means = windows.mean(dim=1)
    now, before = windows[-1], windows[-1 - _WINDOW]
    error = ((now.var() + before.var()) / _WINDOW).sqrt()
    moved = abs(sum(sizes[-_WINDOW:]) - sum(sizes[-2 * _WINDOW : -_WINDOW])) / _WINDOW
    level = means[-1] - means[-1 - _WINDOW] <= error and means.max() - means[-1] <= error
    return bool(level) and moved < 1.0
