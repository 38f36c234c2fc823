"""Optimal q(u) of any likelihood by alternating updates of Gaussian sites.

In whitened coordinates sites (λ, w) give q(v_p) = N(V α_p, B_p⁻¹), where α = λ − w μ is the
gradient of each row's log site at its mean, and B_p = I + V W_p Vᵀ depends on the precisions alone.
The optimum has α = ∂E/∂μ and w = −2 ∂E/∂σ² (Opper and Archambeau 2009). Means and precisions are
updated in turn: the means at O(P N M) per step at fixed B, the precisions at O(P N M²). A joint
natural-gradient step updates the precisions at means that have not converged yet, and full steps
overshoot: it took three times as many factorisations on the breast-cancer data.

The mean update is Newton's. With m = V α the bound is Σ_i E_i(μ_i) − ½ ‖m‖², μ = Vᵀ m, up to a
constant, and the step solves

    (I + V H Vᵀ) δ = V g − m,   g = ∂E/∂μ,   H = −∂²E/∂μ∂μᵀ.

If each latent function is observed alone, H is the diagonal of the sites' precisions and
I + V H Vᵀ = B has been factorised. If a likelihood couples several (softmax), conjugate gradients
preconditioned with B need a few products; without the coupling a step covers a fiftieth of the way
in some directions. Every vector x that occurs is V a of some a, which is stored along with it:
B⁻¹ V a = V (a − W Vᵀ B⁻¹ V a).

`gauss_newton_precisions` serves deep models and the GPyTorch integration as well.

A stream has sites of each batch, given what it remembers of earlier rows (`infer_batch_sites`): the
optimal q(u) of a batch and a memory is that of the batch's rows, which have sites to be inferred,
and of the R remembered combinations of each latent function, which are observed with Gaussian noise
of variance one (`bounds.streaming`).
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import isfinite
from typing import TypeAlias, final

import torch
from jaxtyping import Float
from torch import Tensor

from winnowgp.bounds.collapsed import Moments
from winnowgp.bounds.row_blocks import RowBlocks, WhitenedChunk, WhitenedChunks
from winnowgp.bounds.sites import Sites, SiteSums, site_moments, site_sums
from winnowgp.bounds.streaming import Memory
from winnowgp.data import Dataset
from winnowgp.errors import NotPositiveDefiniteError
from winnowgp.linalg import definite_cholesky, half_log_det
from winnowgp.models.base import InducingModel
from winnowgp.models.chunked_kernels import chunked_kernel
from winnowgp.models.kernels import prior_mean
from winnowgp.models.likelihoods import observation_model
from winnowgp.models.site_updates import (
    ExpectedLogProb,
    MeanStep,
    SiteProblem,
    SiteState,
    alternate,
    site_derivatives,
)

Coupling: TypeAlias = Callable[[Tensor, Tensor], Tensor | None]

"""A function from means and variances `[N P]` to −∂²E/∂μ∂μᵀ, `[N P P]`; None if diagonal."""

# Conjugate-gradient products at most, and the relative norm of the residual at which they end.
_PRODUCTS, _PRECISE = 50, 0.1
# Nats per row by which the bound of given sites may be below zero.
_FAR = 100.0


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SiteInference(SiteState):
    """q(u) of latent functions with a B_p each."""

    sums: SiteSums

    def constant(self) -> float:
        """Return Σ_i c_i, the bound less the evidence of the sites."""
        return self.bound - self.sums.evidence().item()


@torch.no_grad()
def infer_sites(
    chunks: WhitenedChunks,
    expected: ExpectedLogProb,
    *,
    P: int,
    coupling: Coupling | None = None,
    start: Sites | None = None,
    gain: float,
) -> SiteInference:
    """Update means and precisions in turn until a change of the precisions gains too little.

    Each update is a full step if that raises the bound, and is halved until it does otherwise, or
    if q would have no covariance (sites of negative precision).

    Args:
        P: number of latent functions.
        coupling: curvature of a likelihood that depends on several latent functions at once.
        start: sites to start from, such as those of nearby parameters.
        gain: nats that the last change of the precisions may gain.
    """
    problem = _SeparateFunctions(chunks, expected, coupling)
    return alternate(problem, _initialise(problem, P, start), gain=gain)


@torch.enable_grad()
def gauss_newton_precisions(
    outputs: Sequence[Tensor], precisions: Sequence[Tensor], hidden: Sequence[Tensor]
) -> list[Tensor]:
    """Return the Gauss-Newton precisions w_h = Σ_o (∂f_o/∂h)² w_o of hidden functions.

    They are never negative, whereas the exact curvature of samples is noisy and has either sign.
    The cost is one backward pass per output.

    Args:
        outputs: means of the functions that the likelihood acts on; each row depends on the same
            row of the hidden functions alone.
        precisions: w_o of each output, to be broadcast against the gradients.
        hidden: means of the hidden functions, or samples of them.
    """
    totals = [torch.zeros_like(h) for h in hidden]
    for output, precision in zip(outputs, precisions, strict=True):
        slopes = torch.autograd.grad(
            output.sum(), hidden, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        for number, slope in enumerate(slopes):
            totals[number] = totals[number] + slope.square() * precision
    return totals


def mean_step(
    chunks: WhitenedChunks,
    *,
    roots: Float[Tensor, "P M M"],
    precision: Float[Tensor, "N P"],
    residual: Float[Tensor, "N P"],
    lifted: Float[Tensor, "M P"],
    coupling: Float[Tensor, "N P P"] | None,
) -> MeanStep:
    """Return Newton's step at g − α = `residual` and V g − m = `lifted`; O(P N M) per product.

    Args:
        roots: factors of B_p = I + V W_p Vᵀ.
        precision: W.
        coupling: H; the diagonal `precision` if None.
    """

    def solve(a: Tensor, x: Tensor) -> MeanStep:
        """Return B⁻¹ x for x = V a."""
        solution = _solve_each(roots, x)
        mean = torch.cat([chunk.V.mT @ solution for chunk in chunks])
        return MeanStep(a - precision * mean, solution, mean)

    z = solve(residual, lifted)
    if coupling is None:
        return z
    direction, square = z, (lifted * z.q_mean).sum()
    enough = _PRECISE**2 * square
    zero = torch.zeros_like
    step = MeanStep(zero(residual), zero(lifted), zero(residual))
    for _ in range(_PRODUCTS):
        # (I + V H Vᵀ) x = V (a + H Vᵀ x)
        bent = (coupling @ direction.mean[..., None])[..., 0]
        product = direction.q_mean + _lift(chunks, bent)
        length = square / (direction.q_mean * product).sum()
        step = step.plus(length, direction)
        residual, lifted = residual - length * (direction.alpha + bent), lifted - length * product
        z = solve(residual, lifted)
        before, square = square, (lifted * z.q_mean).sum()
        if not square > enough:
            break
        direction = z.plus(square / before, direction)
    return step


@final
@dataclass(frozen=True, slots=True)
class _SeparateFunctions(SiteProblem[SiteInference]):
    """Latent functions with a B_p each, which a likelihood may couple."""

    chunks: WhitenedChunks
    expected: ExpectedLogProb
    coupling: Coupling | None

    def evaluate(self, sites: Sites) -> SiteInference:
        """Evaluate sites in two passes over the rows, O(P N M²) each."""
        sums = site_sums(self.chunks, sites)
        q_mean, inverse = _solve_each(sums.roots, sums.D), sums.inverse(self.chunks.N)

        def marginal(chunk: WhitenedChunk) -> tuple[Tensor, Tensor]:
            return chunk.V.mT @ q_mean, sums.variance(chunk, inverse)

        return self._with_likelihood(sites, sums, q_mean, marginal)

    def mean_step(self, at: SiteInference) -> tuple[MeanStep, float]:
        lifted = at.lift - at.q_mean
        step = mean_step(
            self.chunks,
            roots=at.sums.roots,
            precision=at.sites.precision,
            residual=at.slope() - at.alpha(),
            lifted=lifted,
            coupling=None if self.coupling is None else self.coupling(at.mean, at.variance),
        )
        return step, (lifted * step.q_mean).sum().item()

    def moved(self, at: SiteInference, sites: Sites, q_mean: Tensor, mean: Tensor) -> SiteInference:
        """Move only the means: one pass over the rows, O(P N M)."""
        roots = at.sums.roots
        # D = B m
        D = (roots @ (roots.mT @ q_mean.mT[..., None]))[..., 0].mT
        return self._with_likelihood(
            sites,
            replace(at.sums, D=D),
            q_mean,
            lambda chunk: (mean[chunk.rows], at.variance[chunk.rows]),
        )

    def _with_likelihood(
        self,
        sites: Sites,
        sums: SiteSums,
        q_mean: Tensor,
        marginal: Callable[[WhitenedChunk], tuple[Tensor, Tensor]],
    ) -> SiteInference:
        """Evaluate the likelihood and its derivatives at the marginals, in one pass."""
        mean, variance = torch.empty_like(sites.linear), torch.empty_like(sites.linear)
        linear, precision = torch.empty_like(mean), torch.empty_like(mean)
        nats, lift = mean.new_zeros(()), torch.zeros_like(q_mean)
        for chunk in self.chunks:
            rows = chunk.rows
            m, v = marginal(chunk)
            total, slope, curvature = site_derivatives(self.expected, rows, m, v)
            nats += total
            mean[rows], variance[rows], precision[rows] = m, v, -2 * curvature
            linear[rows] = slope + precision[rows] * m
            lift.addmm_(chunk.V, slope)
        if not torch.isfinite(nats + linear.sum() + precision.sum()):
            raise NotPositiveDefiniteError(
                "the gradient of the likelihood is not finite at some rows"
            )
        # KL = ½ ‖m‖² + ½ log|B| − ½ tr(V W Vᵀ B⁻¹), and V_iᵀ B⁻¹ V_i = σ_i² − t_i.
        inside = (sites.precision * variance).sum() - sums.open.sum()
        kl = half_log_det(sums.roots).sum() + 0.5 * (q_mean.square().sum() - inside)
        bound = (nats - kl).item()
        if not isfinite(bound):
            # ‖m‖² overflows before the gradients do.
            raise NotPositiveDefiniteError("the bound is not finite")
        return SiteInference(
            sites=sites,
            sums=sums,
            q_mean=q_mean,
            mean=mean,
            variance=variance,
            implied=Sites(linear, precision),
            lift=lift,
            bound=bound,
        )


def _initialise(problem: _SeparateFunctions, P: int, start: Sites | None) -> SiteInference:
    """Evaluate the given sites, those of one sweep, or flat ones: the first that have a q(u).

    Given sites that are far off, such as those of other parameters, are compared with a sweep: from
    −10¹⁷⁸ nats or infinity, which occurred, updates may not return within a thousand evaluations.
    """
    given = None
    if start is not None:
        with suppress(NotPositiveDefiniteError):
            given = problem.evaluate(start)
        if given is not None and given.bound > -_FAR * problem.chunks.N:
            return given
    try:
        swept = problem.evaluate(_sweep(problem.chunks, problem.expected, P))
    except NotPositiveDefiniteError:
        if given is not None:
            return given
        flat = problem.chunks.L.new_zeros(problem.chunks.N, P)
        return problem.evaluate(Sites(flat, flat))
    return swept if given is None or swept.bound > given.bound else given


def _sweep(chunks: WhitenedChunks, expected: ExpectedLogProb, P: int) -> Sites:
    """Return sites from one pass, each chunk at the q of the previous ones; O(P N M²).

    With many chunks this replaces several full updates. Precisions are clipped at zero, so that
    every q on the way has a covariance.
    """
    M = len(chunks.L)
    B = torch.eye(M, dtype=chunks.L.dtype, device=chunks.L.device).repeat(P, 1, 1)
    D = chunks.L.new_zeros(M, P)
    sites = Sites(chunks.L.new_zeros(chunks.N, P), chunks.L.new_zeros(chunks.N, P))
    for chunk in chunks:
        rows = chunk.rows
        sums = SiteSums(definite_cholesky(B), D, D.new_zeros(P))
        variance = sums.variance(chunk, sums.inverse(rows.stop - rows.start))
        mean = chunk.V.mT @ _solve_each(sums.roots, D)
        _, slope, curvature = site_derivatives(expected, rows, mean, variance)
        precision = (-2 * curvature).clamp_min(0)
        sites.precision[rows], sites.linear[rows] = precision, slope + precision * mean
        for p in range(P):
            B[p].addmm_(chunk.V * precision[:, p], chunk.V.mT)
        D.addmm_(chunk.V, sites.linear[rows])
    return sites


def _solve_each(roots: Float[Tensor, "P M M"], D: Float[Tensor, "M P"]) -> Float[Tensor, "M P"]:
    """Return B_p⁻¹ D_p of each latent function."""
    return torch.cholesky_solve(D.mT[..., None], roots)[..., 0].mT


def _lift(chunks: WhitenedChunks, a: Float[Tensor, "N P"]) -> Float[Tensor, "M P"]:
    """Return V a."""
    total = a.new_zeros(len(chunks.L), a.shape[1])
    for chunk in chunks:
        total.addmm_(chunk.V, a[chunk.rows])
    return total


def infer_batch_sites(
    model: InducingModel,
    memory: Memory,
    data: Dataset,
    *,
    L: Float[Tensor, "K K"],
    V: Float[Tensor, "K M"],
    gain: float,
    start: Sites | None = None,
) -> SiteInference:
    """Return the optimal q(u) given a batch and a memory; its sites are those of the batch first.

    Args:
        model: the model, with K candidates.
        memory: what is remembered of earlier rows.
        data: the batch.
        L: factor of K_uu.
        V: L⁻¹ K_ua of the points of the memory (`old_projection`).
        gain: nats per observation that the last update of the sites may gain.
        start: sites to start from.
    """
    blocks = RowBlocks.of(data, points=model.K)
    kernel, _ = chunked_kernel(model.kernel, model.candidates, blocks)
    R, P = memory.y.shape
    chunks = WhitenedChunks(kernel, blocks, L=L).followed_by(
        torch.cat([V @ A for A in memory.A], 1)
    )
    observations = observation_model(model.likelihood)
    centre = prior_mean(model.mean, data.X).detach()
    old = memory.centred(prior_mean(model.mean, memory.Z)).detach().mT.reshape(-1)
    output = torch.eye(P, dtype=V.dtype, device=V.device).repeat_interleave(R, 0)

    def expected(rows: slice, m: Tensor, v: Tensor) -> Tensor:
        if rows.start >= data.N:
            m, v = (m * output).sum(1), (v * output).sum(1)
            return -0.5 * ((m - old).square() + v)
        block = data.part(rows)
        return block.weighted(observations.expected_log_prob(block.Y, centre[rows] + m, v))

    def coupling(m: Tensor, v: Tensor) -> Tensor | None:
        H = observations.coupling(centre + m[: data.N], v[: data.N])
        if H is None:
            return None
        H = H if data.weights is None else data.weights[:, None, None] * H
        return torch.cat([H, torch.diag_embed(output)])

    precision = observations.initial_precision()
    if start is None and precision is not None:
        # As in `svgp`: under a wide q(f), far targets have hardly any gradient.
        precision = data.weighted(precision.expand(data.Y.shape).clone())
        start = Sites(
            torch.cat([precision * (data.Y - centre), output * old[:, None]]),
            torch.cat([precision, output]),
        )
    return infer_sites(
        chunks,
        expected,
        P=P,
        coupling=coupling,
        start=start,
        gain=gain * data.observations,
    )


def batch_site_moments(
    inference: SiteInference, memory: Memory, remembered: list[Moments], *, N: int | float
) -> list[Moments]:
    """Return the moments of inferred sites, which include the remembered rows.

    Args:
        inference: sites of a batch and a memory.
        memory: the memory.
        remembered: its moments, of which the sites do not have the residual and the trace.
        N: number of observations of the batch.
    """
    own = site_moments(inference.sums, constant=inference.constant(), N=N + memory.N)
    return [
        replace(
            m,
            square=m.square + memory.residual / memory.P,
            diagonal=m.diagonal + (r.diagonal - r.C.diagonal().sum()),
        )
        for m, r in zip(own, remembered, strict=True)
    ]
