"""The log evidence of Gaussian regression: exact, with its gradient, or between two bounds.

With K̂ = K_ff + Σ, Σ = diag(σ²/w_i), the evidence of P outputs is

    log p(Y) = −½ Σ_p [N log 2π + log|K̂| + y_pᵀ K̂⁻¹ y_p].

`exact_evidence` factorises K̂ in place: O(N³) time and N² numbers. `evidence_gradient` returns the
gradient as well. `conjugate_gradient_evidence` never forms K̂ (Artemev, Burt and van der Wilk 2021).
It bounds both terms with Q̂ = Q_ff + Σ, where Q_ff ⪯ K_ff is the prior covariance that M inducing
points explain. For any v and r = y − K̂ v,

    yᵀ K̂⁻¹ y = 2 yᵀv − vᵀK̂v + rᵀK̂⁻¹r,   0 ≤ rᵀK̂⁻¹r ≤ rᵀQ̂⁻¹r,

and conjugate gradients make r small. The determinant is log|K̂| = log|Q̂| + log|I + A| with the
positive semi-definite A = Q̂^{-½} (K_ff − Q_ff) Q̂^{-½}, bounded from its trace t, its squared
Frobenius norm f and a bound β on its eigenvalues (`log_det_bounds`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from math import inf, log, log1p, pi, sqrt
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from winnowgp.bounds import panels
from winnowgp.bounds.collapsed import weight_correction
from winnowgp.bounds.row_blocks import ChunkedKernel, RowBlock, free_memory
from winnowgp.bounds.two_pass import BoundGradient, ChunkedMean, gathered_noise, joined_columns
from winnowgp.data.noise import TargetGroup, noise_groups
from winnowgp.errors import NotPositiveDefiniteError
from winnowgp.linalg import cholesky, definite_cholesky, half_log_det, solve_lower, squared_norm
from winnowgp.typing import Noise, TargetNoise

_Number = TypeVar("_Number", int, float)

# Rows up to which the evidence is computed exactly by default, if a GPU has the memory.
EXACT_ROWS = {"cpu": 10_000, "cuda": 60_000}
# Rows up to which conjugate gradients are tried.
MOST_ROWS = 200_000
# Floating-point operations of both bounds at most: about a minute on one core, or on an H200.
_WORK = {"cpu": 2e12, "cuda": 2e15}
# Operations that an entry of the kernel is counted as.
_ENTRY = 50
# Memory of K̂ and the workspace of its factorisation, in units of N² numbers.
_MATRICES = 1.2
# Elements of a block of rows of K_ff; kernels hold several arrays of this size.
_ELEMENTS = {"cpu": 2**22, "cuda": 2**26}
# Iterations at most, and the fewest for which conjugate gradients are tried.
_MOST_ITERATIONS, _FEWEST_ITERATIONS = 200, 10
# Nats per observation that the quadratic term may be uncertain by.
_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True)
class Evidence:
    """An interval that contains the log evidence log p(Y) at fixed hyper-parameters, in nats."""

    lower: float
    upper: float
    method: str
    """How it was computed: "exact", "conjugate-gradient", "trace" (the ELBO and the upper bound of
    Titsias 2014), or "none" (the ELBO, and no upper bound)."""

    @property
    def exact(self) -> bool:
        """Whether both ends are the log evidence itself, up to rounding."""
        return self.method == "exact"


@dataclass(frozen=True, slots=True)
class GaussianRows:
    """N rows with Gaussian noise, whose prior covariance is evaluated in blocks of rows.

    Attributes:
        X: inputs.
        Y: targets minus the prior mean.
        kff: prior variance of each row.
        noise: σ², one for all rows or one each.
        covariance: the prior covariance between two sets of inputs.
        weights: weights of the rows; a row of weight w counts as w equal rows.
    """

    X: Float[Tensor, "N D"]
    Y: Float[Tensor, "N P"]
    kff: Float[Tensor, " N"]
    noise: Noise
    covariance: Callable[[Tensor, Tensor], Tensor]
    weights: Float[Tensor, " N"] | None = None

    @property
    def N(self) -> int:
        """Number of rows."""
        return self.X.shape[0]

    @property
    def P(self) -> int:
        """Number of outputs."""
        return self.Y.shape[1]

    @property
    def observations(self) -> float:
        """Number of observations: N, or the sum of the weights."""
        return float(self.N) if self.weights is None else self.weights.sum().item()

    def variances(self) -> Float[Tensor, " N"]:
        """Return the noise variance σ²/w_i of each row."""
        return self.noise.expand(self.N) if self.weights is None else self.noise / self.weights

    def log_evidence(self, log_det: float, fit: float) -> float:
        """Return log p(Y) in nats from log|K̂| and Σ_p y_pᵀ K̂⁻¹ y_p."""
        nats = -0.5 * (self.P * (self.N * log(2 * pi) + log_det) + fit)
        if self.weights is not None:
            nats += self.P * weight_correction(self.weights, self.noise).item()
        return nats

    def factor(self) -> Float[Tensor, "N N"]:
        """Return the lower Cholesky factor of K̂, computed in place in N² numbers; O(N³).

        Raises:
            NotPositiveDefiniteError: K̂ is not finite, or singular to working precision.
        """
        upper = self.X.new_empty(self.N, self.N)
        for block in self.blocks():
            tail = slice(block.start, self.N)
            upper[block, tail] = self.covariance(self.X[block], self.X[tail])
        upper.diagonal().copy_(self.kff + self.variances())
        # The transpose is stored by columns, as LAPACK expects, so that the result can overwrite
        # it; the other triangle, which is not filled, is not read.
        A = upper.mT
        info = torch.empty((), dtype=torch.int32, device=A.device)
        torch.linalg.cholesky_ex(A, out=(A, info))
        # In exact arithmetic no pivot is below the noise; rounding has taken over where one is.
        sound = A.diagonal().square() >= 0.5 * self.variances()
        if info.item() != 0 or not bool(sound.all()):
            raise NotPositiveDefiniteError(
                f"the covariance of {self.N} observations could not be factorised; the noise is "
                "too small for the scale of the kernel, or a parameter is not finite. Standardise "
                "the data, or increase the noise."
            )
        return A

    def product(self, v: Float[Tensor, "N C"]) -> Float[Tensor, "N C"]:
        """Return K̂ v, with one block of rows of K_ff in memory at a time; O(N² (D + C)).

        Each entry k_ij, i < j, is evaluated once and used for both rows.
        """
        total = (self.kff + self.variances())[:, None] * v
        for block in self.blocks():
            K = self.covariance(self.X[block], self.X[block.start :])
            # kff replaces the diagonal of the block, which may be rounded.
            total[block] += K @ v[block.start :] - K.diagonal()[:, None] * v[block]
            size = block.stop - block.start
            total[block.stop :] += K[:, size:].mT @ v[block]
        return total

    def blocks(self) -> Iterator[slice]:
        """Yield slices of the rows whose covariance with all rows fits in memory."""
        size = max(1, _for_device(_ELEMENTS, self.X.device) // self.N)
        return (slice(s, min(s + size, self.N)) for s in range(0, self.N, size))


def exact_rows(device: torch.device) -> int:
    """Return the rows up to which the evidence is computed exactly by default on a device."""
    most = _for_device(EXACT_ROWS, device)
    if device.type != "cuda":
        return most
    return min(most, int(sqrt(free_memory(device) / (8 * _MATRICES))))


def affordable_iterations(rows: GaussianRows, M: int) -> int:
    """Return the iterations of conjugate gradients within the limits of time and memory.

    Args:
        rows: the rows.
        M: number of inducing points of the preconditioner.

    Returns:
        Zero if there are too many rows or inducing points for useful bounds.
    """
    N, device = rows.N, rows.X.device
    needed = 3 * 8 * N * M
    if N > MOST_ROWS or (device.type == "cuda" and free_memory(device) < needed):
        return 0
    count = int(0.5 * _for_device(_WORK, device) / (N**2 * (_ENTRY + 2 * rows.P)))
    return 0 if count < _FEWEST_ITERATIONS else min(count, _MOST_ITERATIONS)


@torch.no_grad()
def exact_evidence(rows: GaussianRows) -> Evidence:
    """Return the exact log evidence; O(N³) time, and the memory of one N by N matrix.

    Raises:
        NotPositiveDefiniteError: K̂ is not finite, or singular to working precision.
    """
    L = rows.factor()
    fit = squared_norm(solve_lower(L, rows.Y)).item()
    nats = rows.log_evidence(2 * half_log_det(L).item(), fit)
    return Evidence(nats, nats, "exact")


@torch.no_grad()
def conjugate_gradient_evidence(
    rows: GaussianRows,
    Z: Float[Tensor, "M D"],
    *,
    max_iterations: int = _MOST_ITERATIONS,
    tolerance: float = _TOLERANCE,
    moments: bool | None = None,
) -> Evidence:
    """Return lower and upper bounds on the log evidence; O(N²) per iteration, O(N M) memory.

    Args:
        rows: the rows.
        Z: inducing points of Q̂; those of the model, or more for tighter bounds.
        max_iterations: products with K̂ at most.
        tolerance: nats per observation that the quadratic term may be uncertain by.
        moments: whether to bound the determinant by the moments of A, in O(N² M) operations,
            rather than by the trace alone, in O(N M²); decided by the cost if None.

    Raises:
        NotPositiveDefiniteError: K_uu or B cannot be factorised.
    """
    explained = ExplainedCovariance.of(rows, Z)
    if moments is None:
        work = rows.N**2 * (_ENTRY + 4 * len(Z))
        moments = work <= 0.5 * _for_device(_WORK, rows.X.device)
    residual = residual_moments(rows, explained) if moments else residual_trace(rows, explained)
    least, most = log_det_bounds(rows.N, residual)
    log_det = explained.log_det()
    fit, slack = quadratic_bounds(
        rows, explained, max_iterations=max_iterations, tolerance=tolerance * rows.observations
    )
    return Evidence(
        lower=rows.log_evidence(log_det + most, fit + slack),
        upper=rows.log_evidence(log_det + least, fit),
        method="conjugate-gradient",
    )


@dataclass(frozen=True, slots=True)
class ExplainedCovariance:
    """Q̂ = Q_ff + Σ in a form that is cheap to invert."""

    V: Float[Tensor, "M N"]
    """L⁻¹ K_uf Σ^{-½}, with K_uu = L Lᵀ: Q̂ = Σ^½ (I + VᵀV) Σ^½."""
    LB: Float[Tensor, "M M"]
    """Cholesky factor of B = I + V Vᵀ."""
    scale: Float[Tensor, " N"]
    """Σ^{-½}."""

    @classmethod
    def of(cls, rows: GaussianRows, Z: Float[Tensor, "M D"]) -> "ExplainedCovariance":
        """Project the rows on inducing points; O(N M²)."""
        scale = rows.variances().rsqrt()
        L = cholesky(rows.covariance(Z, Z)).L
        V = solve_lower(L, rows.covariance(Z, rows.X)).mul_(scale)
        eye = torch.eye(len(Z), dtype=V.dtype, device=V.device)
        return cls(V, definite_cholesky(eye + V @ V.mT), scale)

    def solve(self, r: Float[Tensor, "N C"]) -> Float[Tensor, "N C"]:
        """Return Q̂⁻¹ r = Σ^{-½} (I − Vᵀ B⁻¹ V) Σ^{-½} r; O(N M)."""
        x = self.scale[:, None] * r
        x = x - self.V.mT @ torch.cholesky_solve(self.V @ x, self.LB)
        return self.scale[:, None] * x

    def log_det(self) -> float:
        """Return log|Q̂| = log|Σ| + log|B|."""
        return 2 * (half_log_det(self.LB) - self.scale.log().sum()).item()


def quadratic_bounds(
    rows: GaussianRows, explained: ExplainedCovariance, *, max_iterations: int, tolerance: float
) -> tuple[float, float]:
    """Return a lower bound on Σ_p y_pᵀ K̂⁻¹ y_p, and how far above it the value may be.

    Conjugate gradients for all outputs at once, preconditioned with Q̂ and stopped when ½ Σ_p
    r_pᵀ Q̂⁻¹ r_p is below `tolerance`, in nats. The residual is evaluated again at the end, so that
    the bounds hold for whatever v was found.
    """
    v, r = torch.zeros_like(rows.Y), rows.Y
    z = explained.solve(r)
    direction, slack = z, (r * z).sum(0).clamp_min(0)
    for _ in range(max_iterations):
        if 0.5 * slack.sum().item() <= tolerance:
            break
        product = rows.product(direction)
        # An output that has converged to working precision makes no further step.
        length = _quotient(slack, (direction * product).sum(0))
        v, r = v + length * direction, r - length * product
        z = explained.solve(r)
        before, slack = slack, (r * z).sum(0).clamp_min(0)
        direction = z + _quotient(slack, before) * direction
    r = rows.Y - rows.product(v)
    # 2 yᵀv − vᵀK̂v = vᵀ(y + r)
    fit = (v * (rows.Y + r)).sum().item()
    return fit, (r * explained.solve(r)).sum(0).clamp_min(0).sum().item()


@dataclass(frozen=True, slots=True)
class ResidualMoments:
    """What is known of the eigenvalues of A = Q̂^{-½} (K_ff − Q_ff) Q̂^{-½}."""

    trace: float
    """Sum of the eigenvalues, or an upper bound on it if the sum of squares is infinite."""
    square: float = inf
    """Sum of their squares."""
    largest: float = inf
    """An upper bound on the largest."""


def residual_trace(rows: GaussianRows, explained: ExplainedCovariance) -> ResidualMoments:
    """Return tr Σ⁻¹(K_ff − Q_ff), at least tr A since Q̂ ⪰ Σ; O(N M)."""
    # S_ii = (k_ii − q_ii) w_i/σ² is non-negative up to rounding.
    S = rows.kff * explained.scale.square() - explained.V.square().sum(0)
    return ResidualMoments(S.clamp_min(0).sum().item())


def residual_moments(rows: GaussianRows, explained: ExplainedCovariance) -> ResidualMoments:
    """Return tr A, tr A² and a bound on the largest eigenvalue of A; O(N² M), one pass over K_ff.

    With S = Σ^{-½} (K_ff − Q_ff) Σ^{-½} and G = LB⁻¹ V the matrix A is similar to (I − GᵀG) S, so

        tr A = tr S − tr G S Gᵀ,   tr A² = ‖S‖² − 2 ‖S Gᵀ‖² + ‖G S Gᵀ‖²,

    and A has no larger eigenvalue than S, whose eigenvalues are at most its largest sum of absolute
    values in a row.
    """
    V, LB, scale = explained.V, explained.LB, explained.scale
    inner = torch.zeros_like(LB)
    trace, square, projected, widest = (V.new_zeros(()) for _ in range(4))
    for block in rows.blocks():
        S = (rows.covariance(rows.X[block], rows.X) * scale[block, None]).mul_(scale)
        S.diagonal(block.start).copy_(rows.kff[block] * scale[block].square())
        S.addmm_(V[:, block].mT, V, alpha=-1)
        trace += S.diagonal(block.start).sum()
        square += S.square().sum()
        widest = torch.maximum(widest, S.abs().sum(1).max())
        SV = S @ V.mT
        projected += squared_norm(solve_lower(LB, SV.mT))
        inner.addmm_(V[:, block], SV)
    GSG = solve_lower(LB, solve_lower(LB, inner).mT)
    t = (trace - GSG.diagonal().sum()).item()
    f = (square - 2 * projected + squared_norm(GSG)).item()
    # Rounding must not break 0 ≤ t and t²/N ≤ f.
    t = max(t, 0.0)
    return ResidualMoments(t, max(f, t**2 / rows.N), widest.item())


def log_det_bounds(N: int, residual: ResidualMoments) -> tuple[float, float]:
    """Return lower and upper bounds on log|I + A| of an N by N positive semi-definite matrix A.

    With t = tr A, f = tr A² and all eigenvalues at most β,

        t²/f log(1 + f/t) ≤ log|I + A| ≤ min{N log(1 + t/N), a log(1 + τ) + b log(1 + β)},
        τ = (β t − f)/(β N − t),   b = (f − τ t)/(β (β − τ)),   a = N − b.

    These are Gauss-Radau rules with a node at 0 or at β, which match N, t and f (Bai and Golub
    1996): the third derivative of log(1 + x) is positive, so the rules err on opposite sides. The
    first of the upper bounds is Jensen's, and holds if t is only an upper bound on the trace.
    """
    t, f = residual.trace, residual.square
    if t == 0:
        return 0.0, 0.0
    upper = N * log1p(t / N)
    if f == inf:
        return 0.0, upper
    lower = t**2 / f * log1p(f / t)
    # f ≤ β t, up to rounding.
    beta = max(min(residual.largest, sqrt(f), t), f / t)
    if beta * N > t:
        tau = (beta * t - f) / (beta * N - t)
        if 0 <= tau < beta:
            b = (f - tau * t) / (beta * (beta - tau))
            upper = min(upper, (N - b) * log1p(tau) + b * log1p(beta))
    return lower, max(lower, upper)


def _quotient(a: Float[Tensor, " P"], b: Float[Tensor, " P"]) -> Float[Tensor, " P"]:
    """Return a/b, or zero where b is not positive."""
    return torch.where(b > 0, a / torch.where(b > 0, b, 1.0), 0.0)


def _for_device(values: dict[str, _Number], device: torch.device) -> _Number:
    return values.get(device.type, values["cpu"])


@torch.no_grad()
def evidence_gradient(
    kernel: ChunkedKernel,
    block: RowBlock,
    *,
    mean: ChunkedMean,
    noise: TargetNoise,
    groups: Sequence[TargetGroup] | None = None,
    products: Callable[[Tensor], Tensor] | None = None,
) -> BoundGradient:
    """Return the exact log evidence and its gradient; O(N³) for each group of targets.

        log p(Y) = −½ [NP log 2π + P log|A| + ⟨Y, α⟩],   A = K_ff + Σ,  α = A⁻¹ Y
        ∂/∂A = ½ (ααᵀ − P A⁻¹),   ∂/∂Y = −α

    This is several times faster than differentiating the Cholesky factor by autograd. Row i has the
    noise s_i + σ², with s known; with weights it is divided by w_i, and `weight_correction` is
    added. Targets with other noise, or missing in other rows, have an A of their own.

    The average information is the mean of the negative Hessian and its expectation, the Fisher
    information ½ tr A⁻¹A_i A⁻¹A_j, where A is linear in the parameters (Gilmour, Thompson and
    Cullis 1995). Its expectation is the Fisher information as well, and it costs O(N²) only:

        I_ij = ½ Σ_p (A_i α_p)ᵀ A⁻¹ (A_j α_p),   A_i = ∂A/∂θ_i.

    Args:
        kernel: a kernel whose inducing points are the rows of `block`.
        block: all rows.
        mean: prior mean.
        noise: σ², one for all targets or one each.
        groups: groups of targets, as `RowBlocks` has them; all in one by default.
        products: the products of ∂K_ff/∂θ_i with vectors, for all kernel parameters, if the average
            information is to be returned. It is where all targets have the same noise in all rows.

    Raises:
        NotPositiveDefiniteError: A cannot be factorised.
    """
    centred, K = mean.centred(block), kernel.uu()
    groups = groups or (TargetGroup(tuple(range(centred.shape[1]))),)
    parts = noise_groups(groups, noise, separate=True)
    only = len(parts) == 1 and groups[0].complete
    total, values, slopes, alphas = K if only else torch.zeros_like(K), [], [], []
    information = None
    for part in parts:
        rows = part.rows(block, centred)
        Y, weights, variance = rows.Y, block.weights, rows.variance
        variance = part.noise if variance is None else variance
        observed = part.group.observed(part.group.columns(centred))
        at = slice(None) if observed is None else observed.nonzero().flatten()
        if observed is not None:
            weights = None if weights is None else weights[at]
            Y, variance = Y[at], variance[at] if variance.dim() else variance
        N, P = Y.shape
        A = K if only else K[at][:, at].clone()
        A.diagonal().add_(variance if weights is None else variance / weights)
        # Factor, inverse and gradient take the place of A, as new memory costs as much as the
        # products; all are symmetric, so that rows and columns may be exchanged.
        L = definite_cholesky(A.mT, overwrite=True)
        log_det = 2 * half_log_det(L)
        A_inverse = panels.inverse_of_factor(L, overwrite=True)
        alpha = A_inverse @ Y
        value = -0.5 * (N * P * log(2 * pi) + P * log_det + (Y * alpha).sum())
        if products is not None and only and noise.dim() == 0:
            own = alpha if weights is None else alpha / weights[:, None]
            moved = torch.cat([own[None], products(alpha)]).mT.flatten(0, 1)
            weighed = (moved @ A_inverse).unflatten(0, (-1, P))
            information = 0.5 * torch.einsum("ipn,jpn->ij", weighed, moved.unflatten(0, (-1, P)))
        gradient = A_inverse.addmm_(alpha, alpha.mT, beta=-0.5 * P, alpha=0.5)
        slope = gradient.diagonal().sum()
        if weights is not None:
            value = value + P * weight_correction(weights, variance)
            correction = 0.5 * ((1 - weights) / variance).sum()
            slope = (gradient.diagonal() / weights).sum() + P * correction
        if only:
            total, mean_gradient = gradient, alpha
        else:
            mean_gradient = torch.zeros_like(rows.Y)
            mean_gradient[at] = alpha
            index = torch.arange(len(K), device=K.device)[at]
            total[index[:, None], index] += gradient
        values.append(value)
        slopes.append((part, slope))
        alphas.append(mean_gradient)
    mean.pull(block, joined_columns(parts, alphas, centred))
    return BoundGradient(
        reduce(torch.add, values),
        gathered_noise(noise, slopes),
        mean.pulled(),
        kernel.gradient(kernel.pulled(), total),
        information,
    )
