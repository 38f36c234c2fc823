"""Integrals over Gaussian latents: nodes and expectations; and quantiles, which invert them.

Integrals that Gauss-Hermite quadrature of f gets wrong, because the likelihood is much narrower
than q(f) or has a kink, have a closed form, a smooth one-dimensional integral, or nodes that are
graded towards where the likelihood changes fast. `invert` finds the quantiles of any distribution
function, such as `ObservationModel.cdf`, the integral of P(Y ≤ y | f).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import inf, log, pi, sqrt
from typing import Any, TypeAlias

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, distributions
from torch.distributions import constraints

from winnowgp.errors import InputError
from winnowgp.linalg import cholesky, solve_lower

Cdf: TypeAlias = Callable[
    [Float[Tensor, "Q n P"], Int[Tensor, " n"]],
    Float[Tensor, "Q n P"],
]
"""F(y) of the rows of these numbers."""

# Standard deviations on either side beyond which a Gaussian is neglected: e⁻⁴⁰.
_REACH = 9.0
# Distance from the wanted probability, in standard deviations of a Gaussian.
_PRECISION = 1e-10
# Steps of false position. Every third one halves the bracket: of integers always, of real numbers
# if they have not converged by then.
_STEPS, _HALVE_AFTER = 300, 12


def hermite_nodes(count: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return Gauss-Hermite nodes `[T 1 …]` of N(0, 1), and their weights, which sum to one."""
    shape = [count] + [1] * like.dim()
    z, weights = (x.to(like).reshape(shape) for x in _hermite(count))
    return z, weights


@lru_cache
def _hermite(count: int) -> tuple[Float[Tensor, " T"], Float[Tensor, " T"]]:
    locations, weights = np.polynomial.hermite.hermgauss(count)
    return torch.from_numpy(sqrt(2) * locations), torch.from_numpy(weights / weights.sum())


def standard_deviation(variance: Tensor) -> Tensor:
    """Return √variance, bounded away from zero, where the square root has no derivative."""
    return variance.clamp_min(torch.finfo(variance.dtype).tiny).sqrt()


@lru_cache(maxsize=16)
def normal_nodes(count: int, dimension: int) -> Float[Tensor, "T D"]:
    """Return Sobol points mapped to N(0, I), each with its reflection, of covariance exactly I.

    Means over them are exact for polynomials of degree three.
    """
    # The cached nodes may be used in later calls with gradients.
    with torch.inference_mode(False):
        count = max(count, 2 * dimension)
        engine = torch.quasirandom.SobolEngine(dimension, scramble=True, seed=0)
        uniform = engine.draw(count, dtype=torch.float64)
        # Scrambled points may be 0 or 1, whose normal quantile is infinite.
        half = torch.special.ndtri(uniform.clamp(1e-6, 1 - 1e-6))
        root = cholesky(half.mT @ half / count).L
        half = solve_lower(root, half.mT).mT
        return torch.cat([half, -half])


@dataclass(frozen=True, slots=True)
class GradedNodes:
    """∫ N(f; μ, σ²) g(f) df ≈ Σ_t exp(log_weight_t) g(f_t), f_t = μ + σ z_t."""

    z: Float[Tensor, "T *shape"]
    log_weight: Float[Tensor, "T *shape"]


@torch.no_grad()
def graded_nodes(
    mean: Float[Tensor, "*shape"],
    deviation: Float[Tensor, "*shape"],
    *,
    centre: Float[Tensor, "*shape"],
    scale: Float[Tensor, "*shape"],
    count: int,
) -> GradedNodes:
    """Return trapezoidal nodes equally spaced in u, f = centre + w sinh u, w = min(scale, σ).

    Near the centre steps are a fraction of w, farther out the same fraction of the distance, up to
    nine σ beyond both mean and centre: two scales that differ by a factor of a million need three
    times the nodes of one. The trapezoidal rule converges exponentially for smooth functions.

    Args:
        centre: where the integrand changes fast; within a few σ of the mean, or at its peak.
        scale: length over which the integrand changes.
        count: number of nodes.
    """
    w = torch.minimum(scale, deviation)
    reach = _REACH * deviation
    low = ((torch.minimum(mean, centre) - reach - centre) / w).asinh()
    high = ((torch.maximum(mean, centre) + reach - centre) / w).asinh()
    share = torch.linspace(0, 1, count, dtype=mean.dtype, device=mean.device)
    u = low + (high - low) * share.reshape(-1, *([1] * mean.dim()))
    z = (centre - mean + w * u.sinh()) / deviation
    # df = w cosh u du, and N(f) df = φ(z) df / σ
    step = (w / deviation * u.cosh() * (high - low) / (count - 1)).log()
    return GradedNodes(z, step - 0.5 * z.square() - 0.5 * log(2 * pi))


def graded_mean(
    function: Callable[[Tensor], Tensor],
    mean: Float[Tensor, "*shape"],
    deviation: Float[Tensor, "*shape"],
    *,
    centre: Float[Tensor, "*shape"],
    scale: Float[Tensor, "*shape"],
    count: int,
) -> Float[Tensor, "*shape"]:
    """Return the expectation of a function of f over N(mean, deviation²) by `graded_nodes`."""
    nodes = graded_nodes(mean.detach(), deviation.detach(), centre=centre, scale=scale, count=count)
    return (nodes.log_weight.softmax(0) * function(mean + deviation * nodes.z)).sum(0)


def within_reach(point: Tensor, mean: Tensor, deviation: Tensor) -> Tensor:
    """Return a point, or the end of mean ± six deviations that is nearer to it."""
    return torch.minimum(torch.maximum(point, mean - 6 * deviation), mean + 6 * deviation)


@torch.no_grad()
def invert(
    cdf: Cdf,
    probabilities: Float[Tensor, " Q"],
    *,
    centre: Float[Tensor, "N P"],
    width: Float[Tensor, "N P"],
    support: tuple[float, float] = (-inf, inf),
    discrete: bool = False,
) -> Float[Tensor, "Q N P"]:
    """Return the least y with F(y) ≥ p, for each probability p.

    False position (the Illinois rule) on Φ⁻¹(F(y)) − Φ⁻¹(p), which is nearly linear if F is nearly
    Gaussian: about eight evaluations of F instead of the forty of bisection. Rows that have
    converged are not evaluated again.

    Args:
        cdf: F, non-decreasing in y.
        centre: where the search starts, such as the mean.
        width: a length of the order of the standard deviation.
        support: its ends; F is 0 below and 1 above.
        discrete: whether y is an integer.
    """
    height = _height(cdf, probabilities, centre, support)
    rows = torch.arange(len(centre), device=centre.device)
    low, high, at_low, at_high = _bracket(
        height, len(probabilities), centre, width, support=support, discrete=discrete
    )
    result, tiny = high.clone(), torch.finfo(high.dtype).tiny
    best, error = high, torch.full_like(high, inf)
    # How often an end has stayed where it is.
    stay_low, stay_high = torch.zeros_like(low), torch.zeros_like(low)
    for step in range(_STEPS):
        # The ends of the support may have any height.
        at_low, at_high = at_low.clamp_max(-tiny), at_high.clamp_min(tiny)
        halve = step % 3 == 2 and (discrete or step > _HALVE_AFTER)
        y = low + (0.5 if halve else at_low / (at_low - at_high)) * (high - low)
        if discrete:
            y = torch.maximum(torch.minimum(y.round(), high - 1), low + 1)
        at = height(y, rows)
        best, error = torch.where(at.abs() < error, y, best), torch.minimum(at.abs(), error)
        up = at < 0
        # An end that stays twice counts half, so that the next step crosses the root.
        stay_low, stay_high = torch.where(up, 0, stay_low + 1), torch.where(up, stay_high + 1, 0)
        at_low = torch.where(up, at, at_low * torch.where(stay_low > 1, 0.5, 1.0))
        at_high = torch.where(up, at_high * torch.where(stay_high > 1, 0.5, 1.0), at)
        low, high = torch.where(up, y, low), torch.where(up, high, y)
        if discrete:
            best, done = high, high - low <= 1
        else:
            rounding = 4 * torch.finfo(y.dtype).eps * torch.maximum(low.abs(), high.abs())
            done = (error < _PRECISION) | (high - low <= rounding)
        result[:, rows] = best
        open_ = ~done.all(0).all(-1)
        if not bool(open_.any()):
            break
        rows = rows[open_]
        state = low, high, at_low, at_high, best, error, stay_low, stay_high
        low, high, at_low, at_high, best, error, stay_low, stay_high = (t[:, open_] for t in state)
    return result


def _height(cdf: Cdf, probabilities: Tensor, like: Tensor, support: tuple[float, float]) -> Cdf:
    """Return y ↦ Φ⁻¹(F(y)) − Φ⁻¹(p), finite also where F rounds to 0 or 1."""
    wanted = torch.special.ndtri(probabilities.to(like))[:, None, None]
    info = torch.finfo(like.dtype)

    def height(y: Tensor, rows: Tensor) -> Tensor:
        F = torch.where(y < support[0], 0.0, cdf(y.clamp(*support), rows))
        return torch.special.ndtri(F.clamp(info.tiny, 1 - info.eps)) - wanted

    return height


def _bracket(
    height: Cdf,
    Q: int,
    centre: Float[Tensor, "N P"],
    width: Float[Tensor, "N P"],
    *,
    support: tuple[float, float],
    discrete: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return ends with F(low) < p ≤ F(high), or those of the support, and their heights."""
    # One below the support, so that F(low) < p also for its least integer.
    least, most = support[0] - 1 if discrete else support[0], support[1]
    low, high = (
        (centre + side * width).expand(Q, *centre.shape).clamp(least, most) for side in (-4, 4)
    )
    if discrete:
        low, high = low.floor(), high.ceil()
    rows = torch.arange(len(centre), device=centre.device)
    at_low, at_high = height(low, rows), height(high, rows)
    while bool((short := (at_low >= 0) & (low > least)).any()):
        further = (2 * low - high).clamp_min(least)
        low, high = torch.where(short, further, low), torch.where(short, low, high)
        at_low, at_high = height(low, rows), torch.where(short, at_low, at_high)
    while bool((short := (at_high < 0) & (high < most)).any()):
        further = (2 * high - low).clamp_max(most)
        low, high = torch.where(short, high, low), torch.where(short, further, high)
        at_low, at_high = torch.where(short, at_high, at_low), height(high, rows)
    return low, high, at_low, at_high


def check_probabilities(probabilities: Float[Tensor, " Q"]) -> None:
    """Raise an `InputError` unless there are probabilities, all strictly between 0 and 1."""
    if not len(probabilities) or not bool(((probabilities > 0) & (probabilities < 1)).all()):
        raise InputError(
            "`probabilities` must lie strictly between 0 and 1, such as 0.05; "
            f"got {probabilities.tolist()}."
        )


def gaussian_quantiles(
    mean: Float[Tensor, "*S N P"],
    variance: Float[Tensor, "*S N P"],
    probabilities: Float[Tensor, " Q"],
    *,
    weights: Float[Tensor, " S"] | None = None,
) -> Float[Tensor, "Q N P"]:
    """Return quantiles of Gaussians or, with a leading axis, of their mixture.

    Args:
        weights: weights of the mixture, which sum to one; equal by default.
    """
    check_probabilities(probabilities)
    mean, variance = mean[None].flatten(0, -3), variance[None].flatten(0, -3)
    sd = standard_deviation(variance)
    if len(mean) == 1:
        return mean + torch.special.ndtri(probabilities.to(mean))[:, None, None] * sd
    share = mean.new_full((len(mean),), 1 / len(mean)) if weights is None else weights.to(mean)

    def mixture_cdf(Y: Tensor, rows: Tensor) -> Tensor:
        parts = zip(share, mean[:, rows], sd[:, rows], strict=True)
        return sum((w * torch.special.ndtr((Y - m) / s) for w, m, s in parts), Y.new_zeros(()))

    centre = torch.tensordot(share, mean, 1)
    spread = torch.tensordot(share, variance + (mean - centre).square(), 1)
    width = standard_deviation(spread)
    return invert(mixture_cdf, probabilities, centre=centre, width=width)


def distribution_cdf(distribution: distributions.Distribution, y: Tensor) -> Tensor:
    """Return P(Y ≤ y) of a PyTorch distribution, also of those whose `cdf` PyTorch lacks."""
    match distribution:
        case distributions.Poisson():
            return torch.special.gammaincc(y + 1, distribution.rate)
        case distributions.NegativeBinomial():
            failures, probability = distribution.total_count, distribution.probs
            return _scipy("betainc", failures, y + 1, 1 - probability)
        case distributions.Beta():
            return _scipy("betainc", distribution.concentration1, distribution.concentration0, y)
        case distributions.StudentT():
            z = (y - distribution.loc) / distribution.scale
            return _scipy("stdtr", distribution.df, z)
    try:
        return distribution.cdf(y)
    except NotImplementedError as error:
        raise InputError(
            f"quantiles need p(y | f) with a `cdf`; {type(distribution).__name__} has none."
        ) from error


def support(distribution: distributions.Distribution) -> tuple[tuple[float, float], bool]:
    """Return the ends of the support of a PyTorch distribution, and whether it is discrete."""
    try:
        region: Any = distribution.support
    except NotImplementedError:
        region = constraints.real
    ends = (getattr(region, "lower_bound", -inf), getattr(region, "upper_bound", inf))
    return (float(ends[0]), float(ends[1])), bool(region.is_discrete)


def _scipy(name: str, *arguments: Tensor) -> Tensor:
    """Return a special function of SciPy, which computes on the CPU."""
    # Imported here, because `winnow info` needs models and no quantiles.
    from scipy import special

    like = torch.broadcast_tensors(*arguments)[0]
    value = getattr(special, name)(*(argument.detach().cpu().numpy() for argument in arguments))
    return torch.as_tensor(value, dtype=like.dtype, device=like.device)
