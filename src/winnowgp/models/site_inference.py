"""The optimal q(u) of any likelihood by natural-gradient steps on sites."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from winnowgp.bounds import Sites, SiteSums, WhitenedChunk, WhitenedChunks, site_sums
from winnowgp.errors import NotPositiveDefiniteError
from winnowgp.linalg import definite_cholesky, half_log_det

# Newton's step for the means of q(u) at a fixed covariance, in whitened coordinates.
#
# With m = V α the bound is Σ_i E_i(μ_i) − ½ ‖m‖², μ = Vᵀ m, up to a constant. Its Newton step
# solves
#
#     (I + V H Vᵀ) δ = V g − m,   g = ∂E/∂μ,   H = −∂²E/∂μ∂μᵀ.
#
# Where each latent function is seen alone, H is the diagonal of the sites' precisions and
# I + V H Vᵀ = B has been factorised. Where a likelihood sees several at once (softmax), conjugate
# gradients with B for a preconditioner need a few products. Without that coupling a step covers one
# part in fifty of the way in some directions.
#
# Every vector x that occurs is V a of some a, which is carried along with it: B⁻¹ V a = V (a − W Vᵀ
# B⁻¹ V a).


_PRODUCTS = 50
# Of the residual's norm.
_PRECISE = 0.1


@dataclass(frozen=True, slots=True)
class MeanStep:
    """A direction for the means of q."""

    pull: Float[Tensor, "N P"]
    """Of α."""
    q_mean: Float[Tensor, "M P"]
    """Of m = V α."""
    mean: Float[Tensor, "N P"]
    """Of μ = Vᵀ m."""

    def plus(self, length: Tensor, other: "MeanStep") -> "MeanStep":
        """This and a multiple of another."""
        return MeanStep(
            self.pull + length * other.pull,
            self.q_mean + length * other.q_mean,
            self.mean + length * other.mean,
        )


def mean_step(
    chunks: WhitenedChunks,
    *,
    roots: Float[Tensor, "P M M"],
    precision: Float[Tensor, "N P"],
    residual: Float[Tensor, "N P"],
    lifted: Float[Tensor, "M P"],
    coupling: Float[Tensor, "N P P"] | None,
) -> MeanStep:
    """The step at g − α = `residual` and V g − m = `lifted`; O(P N M) a product.

    Args:
        roots: factors of B_p = I + V W_p Vᵀ.
        precision: W.
        coupling: H; the diagonal `precision` if not given.
    """

    def through_B(a: Tensor, x: Tensor) -> MeanStep:
        """B⁻¹ x, x = V a."""
        found = solved(roots, x)
        across = torch.cat([part.V.mT @ found for part in chunks])
        return MeanStep(a - precision * across, found, across)

    z = through_B(residual, lifted)
    if coupling is None:
        return z
    direction, square = z, (lifted * z.q_mean).sum()
    enough = _PRECISE**2 * square
    zero = torch.zeros_like
    step = MeanStep(zero(residual), zero(lifted), zero(residual))
    for _ in range(_PRODUCTS):
        # (I + V H Vᵀ) x = V (a + H Vᵀ x)
        bent = (coupling @ direction.mean[..., None])[..., 0]
        product = direction.q_mean + _lifted(chunks, bent)
        length = square / (direction.q_mean * product).sum()
        step = step.plus(length, direction)
        residual, lifted = residual - length * (direction.pull + bent), lifted - length * product
        z = through_B(residual, lifted)
        before, square = square, (lifted * z.q_mean).sum()
        if not square > enough:
            break
        direction = z.plus(square / before, direction)
    return step


def solved(roots: Float[Tensor, "P M M"], D: Float[Tensor, "M P"]) -> Float[Tensor, "M P"]:
    """B_p⁻¹ D_p of each latent function."""
    return torch.cholesky_solve(D.mT[..., None], roots)[..., 0].mT


def _lifted(chunks: WhitenedChunks, a: Float[Tensor, "N P"]) -> Float[Tensor, "M P"]:
    """V a."""
    total = a.new_zeros(len(chunks.L), a.shape[1])
    for part in chunks:
        total.addmm_(part.V, a[part.rows])
    return total


# The best q(u) for any likelihood at fixed parameters: sites moved until the bound settles.
#
# In whitened coordinates sites (λ, w) give q(v_p) = N(V α_p, B_p⁻¹): α = λ − w μ is what each row
# pulls, and B_p = I + V W_p Vᵀ depends on the precisions alone. The best ones are α = ∂E/∂μ and
# w = −2 ∂E/∂σ² (Opper and Archambeau 2009). Means and precisions are moved in turn: the means at
# O(P N M) a step, with B kept, the precisions at O(P N M²). Moved at once, as a natural-gradient
# step
# does, the precisions answer means that have not settled yet, and full steps overshoot: three times
# as many factorisations on breast cancer's rows.


_SHORTEST = 1e-4
# Steps of the means at most before the precisions answer.
_MEAN_STEPS = 6

ExpectedLogProb: TypeAlias = Callable[[slice, Tensor, Tensor], Tensor]

"""From rows, means and variances `[B P]` of their centred latents to nats, differentiable."""

Coupling: TypeAlias = Callable[[Tensor, Tensor], Tensor | None]

"""From means and variances `[N P]` of all rows to −∂²E/∂μ∂μᵀ, `[N P P]`."""


@dataclass(frozen=True, slots=True)
class Inferred:
    """q(u) of some sites, and the sites that the likelihood asks for there."""

    sites: Sites
    sums: SiteSums
    q_mean: Float[Tensor, "M P"]
    """m = V α, in whitened coordinates."""
    mean: Float[Tensor, "N P"]
    """Of each row's centred latents under q."""
    variance: Float[Tensor, "N P"]
    better: Sites
    """The sites that the likelihood asks for at these marginals; the same at the optimum."""
    lift: Float[Tensor, "M P"]
    """V ∂E/∂μ; m at the optimum."""
    bound: float
    """In nats."""
    settled: bool = False
    """Whether the last change gained no more than was asked for; False where rounds ran out."""

    def constant(self) -> float:
        """Σ_i c_i: the bound less the evidence of the sites."""
        return self.bound - self.sums.evidence().item()

    def pull(self) -> Float[Tensor, "N P"]:
        """α = λ − w μ."""
        return self.sites.linear - self.sites.precision * self.mean

    def slope(self) -> Float[Tensor, "N P"]:
        """∂E/∂μ; α at the optimum."""
        return self.better.linear - self.better.precision * self.mean


@torch.no_grad()
def inferred(
    chunks: WhitenedChunks,
    expected: ExpectedLogProb,
    *,
    P: int,
    coupling: Coupling | None = None,
    start: Sites | None = None,
    gain: float,
    most: int = 100,
) -> Inferred:
    """Means and precisions in turn, until a change of the precisions gains less than `gain` nats.

    Either is moved the whole way where that raises the bound, and half as far until it does where
    it does not, or where q would have no covariance (sites of negative precision).

    Args:
        P: number of latent functions.
        coupling: of the likelihood, where it sees several latent functions at once.
        start: sites to begin with, such as those of nearby parameters.
    """
    current = _started(chunks, expected, P, start)
    rate, gained = 1.0, 0.0
    for _ in range(most):
        # What rounding of the bound lets one see.
        least = max(gain, 4 * torch.finfo(chunks.L.dtype).eps * abs(current.bound))
        enough, before = max(least, 0.1 * gained), current.bound
        current = _centred(chunks, expected, current, coupling, gain=least, settled=enough)
        tried, rate = _widened(chunks, expected, current, rate, gain=least)
        if tried is not None:
            gained, current = tried.bound - current.bound, tried
            if gained < least:
                return replace(current, settled=True)
        elif current.bound - before < least:
            return replace(current, settled=True)
        else:
            # The means have moved, and how short a step the precisions needed before says nothing.
            rate, gained = 1.0, 0.0
    return current


def _centred(
    chunks: WhitenedChunks,
    expected: ExpectedLogProb,
    at: Inferred,
    coupling: Coupling | None,
    *,
    gain: float,
    settled: float,
) -> Inferred:
    """Newton's steps of the means at fixed precisions, the last one that gains `settled` nats."""
    for _ in range(_MEAN_STEPS):
        H = None if coupling is None else coupling(at.mean, at.variance)
        lifted = at.lift - at.q_mean
        step = mean_step(
            chunks,
            roots=at.sums.roots,
            precision=at.sites.precision,
            residual=at.slope() - at.pull(),
            lifted=lifted,
            coupling=H,
        )
        # A quadratic gains half of the slope along Newton's step.
        if 0.5 * (lifted * step.q_mean).sum().item() < 0.3 * gain:
            break
        tried = _uphill(chunks, expected, at, step)
        if tried is None:
            break
        gained, at = tried.bound - at.bound, tried
        if gained < settled:
            break
    return at


def _uphill(
    chunks: WhitenedChunks, expected: ExpectedLogProb, at: Inferred, step: MeanStep
) -> Inferred | None:
    """As much of a step as raises the bound: all of it, half, a quarter; None where none does."""
    share = 1.0
    while share >= _SHORTEST:
        try:
            tried = _recentred(chunks, expected, at, step, share)
        except NotPositiveDefiniteError:
            tried = None
        if tried is not None and tried.bound > at.bound:
            return tried
        share *= 0.5
    return None


def _widened(
    chunks: WhitenedChunks, expected: ExpectedLogProb, at: Inferred, rate: float, *, gain: float
) -> tuple[Inferred | None, float]:
    """The means held, precisions moved to those that the likelihood asks for; None at the end.

    Returns: what was found, and the share of the way that promises most next time.
    """
    wanted = at.better.precision - at.sites.precision
    while rate >= _SHORTEST:
        precision = at.sites.precision + rate * wanted
        try:
            tried = _evaluated(chunks, expected, Sites(at.pull() + precision * at.mean, precision))
        except NotPositiveDefiniteError:
            rate *= 0.5
            continue
        left = tried.better.precision - tried.sites.precision
        # Along the step what is wanted falls from 1 to `share`: it would be nothing at
        # rate / (1 − share) (Irons and Tuck 1969). A precision w changes log σ² by about σ² dw.
        weight = wanted * at.variance.square()
        share = ((weight * left).sum() / (weight * wanted).sum()).item()
        best = min(1.0, rate / min(1 - share, 10)) if share < 1 else 1.0
        # Near the optimum the bound is flat, and what is left to want says more.
        if tried.bound > at.bound or (tried.bound > at.bound - 0.1 * gain and abs(share) < 0.5):
            return tried, best
        if tried.bound > at.bound - 0.1 * gain:
            break
        rate = min(0.5 * rate, best)
    return None, rate


def _started(
    chunks: WhitenedChunks, expected: ExpectedLogProb, P: int, start: Sites | None
) -> Inferred:
    if start is not None:
        try:
            return _evaluated(chunks, expected, start)
        except NotPositiveDefiniteError:
            pass
    try:
        return _evaluated(chunks, expected, _swept(chunks, expected, P))
    except NotPositiveDefiniteError:
        flat = chunks.L.new_zeros(chunks.N, P)
        return _evaluated(chunks, expected, Sites(flat, flat))


def _swept(chunks: WhitenedChunks, expected: ExpectedLogProb, P: int) -> Sites:
    """Sites from one pass, each chunk seen by the q of those before it; O(P N M²).

    With many chunks this does the work of several steps that look at all rows. Precisions are held
    positive, so that every q on the way has a covariance.
    """
    M = len(chunks.L)
    B = torch.eye(M, dtype=chunks.L.dtype, device=chunks.L.device).repeat(P, 1, 1)
    D = chunks.L.new_zeros(M, P)
    sites = Sites(chunks.L.new_zeros(chunks.N, P), chunks.L.new_zeros(chunks.N, P))
    for part in chunks:
        rows = part.rows
        sums = SiteSums(definite_cholesky(B), D, D.new_zeros(P))
        variance = sums.variance(part, sums.inverse(rows.stop - rows.start))
        mean = part.V.mT @ solved(sums.roots, D)
        _, slope, curvature = _slopes(expected, rows, mean, variance)
        precision = (-2 * curvature).clamp_min(0)
        sites.precision[rows], sites.linear[rows] = precision, slope + precision * mean
        for p in range(P):
            B[p].addmm_(part.V * precision[:, p], part.V.mT)
        D.addmm_(part.V, sites.linear[rows])
    return sites


def _evaluated(chunks: WhitenedChunks, expected: ExpectedLogProb, sites: Sites) -> Inferred:
    """Two passes over the rows, O(P N M²) each."""
    sums = site_sums(chunks, sites)
    q_mean, inverse = solved(sums.roots, sums.D), sums.inverse(chunks.N)

    def marginal(part: WhitenedChunk) -> tuple[Tensor, Tensor]:
        return part.V.mT @ q_mean, sums.variance(part, inverse)

    return _observed(chunks, expected, sites, sums, q_mean, marginal)


def _recentred(
    chunks: WhitenedChunks, expected: ExpectedLogProb, at: Inferred, step: MeanStep, share: float
) -> Inferred:
    """Only the means moved: one pass over the rows, O(P N M)."""
    q_mean, mean = at.q_mean + share * step.q_mean, at.mean + share * step.mean
    pull = at.pull() + share * step.pull
    sites = Sites(pull + at.sites.precision * mean, at.sites.precision)
    roots = at.sums.roots
    # D = B m
    D = (roots @ (roots.mT @ q_mean.mT[..., None]))[..., 0].mT
    sums = replace(at.sums, D=D)
    return _observed(
        chunks,
        expected,
        sites,
        sums,
        q_mean,
        lambda part: (mean[part.rows], at.variance[part.rows]),
    )


def _observed(
    chunks: WhitenedChunks,
    expected: ExpectedLogProb,
    sites: Sites,
    sums: SiteSums,
    q_mean: Tensor,
    marginal: Callable[[WhitenedChunk], tuple[Tensor, Tensor]],
) -> Inferred:
    """What the likelihood says of these marginals, in one pass."""
    mean, variance = torch.empty_like(sites.linear), torch.empty_like(sites.linear)
    linear, precision = torch.empty_like(mean), torch.empty_like(mean)
    nats, lift = mean.new_zeros(()), torch.zeros_like(q_mean)
    for part in chunks:
        rows = part.rows
        m, v = marginal(part)
        total, slope, curvature = _slopes(expected, rows, m, v)
        nats += total
        mean[rows], variance[rows], precision[rows] = m, v, -2 * curvature
        linear[rows] = slope + precision[rows] * m
        lift.addmm_(part.V, slope)
    if not torch.isfinite(nats + linear.sum() + precision.sum()):
        raise NotPositiveDefiniteError("the likelihood has no finite slope at some rows")
    # KL = ½ ‖m‖² + ½ log|B| − ½ tr(V W Vᵀ B⁻¹), and V_iᵀ B⁻¹ V_i = σ_i² − t_i.
    inside = (sites.precision * variance).sum() - sums.open.sum()
    kl = half_log_det(sums.roots).sum() + 0.5 * (q_mean.square().sum() - inside)
    return Inferred(
        sites, sums, q_mean, mean, variance, Sites(linear, precision), lift, (nats - kl).item()
    )


def _slopes(
    expected: ExpectedLogProb, rows: slice, mean: Tensor, variance: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Σ_i E_i with ∂E_i/∂μ_i and ∂E_i/∂σ_i²."""
    if not torch.isfinite(mean.sum() + variance.sum()):
        # Likelihoods answer with an error of their own, which no optimiser takes for a long step.
        raise NotPositiveDefiniteError("q(f) is not finite at some rows")
    with torch.enable_grad():
        at = mean.detach().requires_grad_(), variance.detach().requires_grad_()
        nats = expected(rows, *at).sum()
        slope, curvature = torch.autograd.grad(nats, at)
    return nats.detach(), slope, curvature
