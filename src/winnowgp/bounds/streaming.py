"""The bound of a stream: rows that were seen once are remembered at the inducing points.

Rows that a model has seen enter the bound of later batches through a = f(Z_a), the function at its
inducing points (Bui, Nguyen and Turner 2017). Given a, their expected log-likelihood is a quadratic
function of a, which has the form of R ≤ M observations of combinations of a and a remainder:

    E[log p(y_old | f) | a] = −N P/2 log 2πσ² − (‖y − Aᵀa‖² + residual) / (2σ²)        (`Memory`)

With D_a⁻¹ = S_a⁻¹ − K'_aa⁻¹ for q(a) = N(m_a, S_a) under the old prior covariance K'_aa, this is
their equation: A Aᵀ = σ² D_a⁻¹ and A y = σ² S_a⁻¹ m_a. Nothing is subtracted here: in coordinates
whitened by K'_aa = L Lᵀ the moments C, D of all rows (`Moments`) have C = R Rᵀ, and

    A = σ L⁻ᵀ R,   y = σ R⁻¹ D,   residual = σ² (Σ w‖y‖² + P tr W(K − Q)) − ‖y‖²,

so that A Aᵀ is positive semi-definite and the residual non-negative. The noise variance is a factor
of its own: the rows are remembered for every σ², not only for that of their batch.

For candidates Z with V_a = L⁻¹ K_*a the memory is one more term of the moments,

    C += V_a A AᵀV_aᵀ/σ²,   D += V_a A y/σ²,   Σ w k_ii += tr Aᵀ K_aa A/σ²   (`memory_moments`),

and the bound of every subset, its marginal gains and elimination apply unchanged. A candidate that
is an old inducing point is the same variable, its jitter included: V_a has its row of L as column,
and batches that hold the points lose no information about them.

Targets with noise variances of their own, or with known noise, have one A and one residual each.
Gaussian sites are remembered alike, with σ² = 1, one A for each latent function, and a residual of
any sign that has the constants of their likelihood.

Rows of known noise variance s_i in addition to σ² have the precision 1/(s_i + σ²). They are
remembered in two parts, which agree with it to first order at the σ² of their time: with
ω = σ²/(s_i + σ²), a row of weight ω² and count ω for every σ², and one of the precision
ω(1 − ω)/σ², which is `Memory.fixed` from then on (`known_noise_parts`).

A memory is forgotten by its exponent or by a window. `Memory.forget` multiplies each log-likelihood
by a factor. For a window the batches have a memory each, all at the same inducing points, and the
rows of some of them together have the columns of all of their A (`joined`). A batch that leaves the
window takes its own columns along: the bound is that of the batches that are left, and no matrix is
downdated. When the inducing points change, each memory is projected on the new ones (`projected`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log, pi
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from winnowgp.bounds.collapsed import Moments
from winnowgp.bounds.panels import triangular_gram, triangular_product
from winnowgp.linalg import definite_cholesky, half_log_det, solve_lower, squared_norm
from winnowgp.typing import Scalar, TargetNoise

# Relative to the largest: eigenvalues of C that are rounding errors, smallest pivot of a regular C.
_ROUNDING, _DETERMINED = 1e-14, 1e-12
# Number of points from which products of triangular matrices are worth their own blocks.
_TRIANGULAR = 128


@dataclass(frozen=True, slots=True)
class Memory:
    """What a model remembers of the rows of earlier batches.

    Attributes:
        Z: inducing points at which the rows were seen.
        A: combinations of the function at Z that the rows observe; one set for all outputs, or one
            each.
        y: targets of these combinations, for a prior mean of zero.
        residual: what no function at Z explains: squared deviations, in units of the noise; of all
            outputs, or of each if they have noise variances of their own.
        N: number of observations; less than were seen if some are forgotten.
        fixed: what is remembered with precisions that do not depend on σ², at the same points.
        counts: number of observations of each output, if known noise makes them differ.
        lost: part of the residual that is known to be variance of the function; None if none is.
    """

    Z: Float[Tensor, "M D"]
    A: Float[Tensor, "#P M R"]
    y: Float[Tensor, "R P"]
    residual: Float[Tensor, "*outputs"]
    N: int | float
    fixed: "Memory | None" = None
    counts: Float[Tensor, " P"] | None = None
    lost: Float[Tensor, "*outputs"] | None = None

    @property
    def observations(self) -> int | float:
        """Number of observations, those of known noise included."""
        return self.N if self.fixed is None else self.N + self.fixed.N

    @property
    def M(self) -> int:
        """Number of inducing points."""
        return len(self.Z)

    @property
    def P(self) -> int:
        """Number of outputs."""
        return self.y.shape[1]

    @property
    def separate(self) -> bool:
        """Whether outputs are remembered one by one."""
        return len(self.A) > 1 or (self.fixed is not None and self.fixed.separate)

    def forget(self, factor: float) -> "Memory":
        """Return the memory of a power posterior: each log-likelihood is multiplied by `factor`.

        An observation that is remembered with factor w counts as w observations.
        """
        root = factor**0.5
        return replace(
            self,
            A=root * self.A,
            y=root * self.y,
            residual=factor * self.residual,
            N=factor * self.N,
            fixed=None if self.fixed is None else self.fixed.forget(factor),
            counts=None if self.counts is None else factor * self.counts,
            lost=None if self.lost is None else factor * self.lost,
        )

    def without(self, rows: "Memory") -> "Memory":
        """Return the memory without some of its rows, if it has no points."""
        fixed = self.fixed
        if fixed is not None and rows.fixed is not None:
            fixed = fixed.without(rows.fixed)
        N, counts = max(self.N - rows.N, 0.0), None
        if self.counts is not None or rows.counts is not None:
            counts = self.each_count() - rows.each_count()
        residual = self.residual - rows.residual
        return replace(self, residual=residual, N=N, fixed=fixed, counts=counts, lost=None)

    def each_count(self) -> Float[Tensor, " P"]:
        """Return the number of observations of each output."""
        return self.y.new_full((self.P,), self.N) if self.counts is None else self.counts

    def to(self, device: torch.device) -> "Memory":
        """Return the memory on another device."""
        Z, A, y, residual = (t.to(device) for t in (self.Z, self.A, self.y, self.residual))
        fixed = None if self.fixed is None else self.fixed.to(device)
        counts, lost = (None if t is None else t.to(device) for t in (self.counts, self.lost))
        return Memory(Z, A, y, residual, self.N, fixed, counts, lost)

    def noise_share(self) -> Float[Tensor, "*outputs"] | None:
        """Return the share of the noise variance σ² that the squares of targets show.

        The bound explains squares s = residual − lost and lost variance by noise, σ² = (s + lost)/n
        for n combinations. The targets, by which points are selected, have little of the function
        that is left out: s/n is a better estimate. At least one half; None if nothing is lost.
        """
        if self.lost is None:
            return None
        return (1 - self.lost / self.residual.clamp_min(1e-300)).clamp(0.5, 1)

    def centred(self, mean: Float[Tensor, "M 1"]) -> Float[Tensor, "R P"]:
        """Return the targets of the combinations of f − mean, given the prior mean at Z."""
        return self.y - (self.A.mT @ mean)[..., 0].mT


def matches(Z: Float[Tensor, "K D"], points: Float[Tensor, "M D"]) -> Int[Tensor, " M"]:
    """Return the candidate that each of some points is, −1 if none; the first of equal ones."""
    if not len(Z) or not len(points):
        return torch.full((len(points),), -1, dtype=torch.long, device=points.device)
    same = (points[:, None] == Z).all(2)
    return torch.where(same.any(1), same.int().argmax(1), -1)


def old_projection(
    L: Float[Tensor, "K K"],
    Kza: Float[Tensor, "K M"],
    Kaa: Float[Tensor, "M M"],
    *,
    match: Int[Tensor, " M"],
) -> tuple[Float[Tensor, "K M"], Float[Tensor, "M M"]]:
    """Return V_a = L⁻¹ K_*a, and the covariance K_aa − V_aᵀV_a of old points given the candidates.

    An old point that is a candidate has its row of L as column of V_a, and no covariance left.

    Args:
        L: factor of the candidates' covariance, jitter included.
        Kza: prior covariance of candidates and old points.
        Kaa: prior covariance of the old points.
        match: the candidate that each old point is, −1 if none (`matches`).
    """
    known = match >= 0
    V = torch.where(known, L[match.clamp_min(0)].mT, solve_lower(L, Kza)) if len(L) else Kza
    left = (Kaa - V.mT @ V) * (~known)[:, None] * ~known
    return V, left


def memory_moments(
    memory: Memory,
    V: Float[Tensor, "K M"],
    left: Float[Tensor, "M M"],
    *,
    mean: Float[Tensor, "M 1"],
    noise: TargetNoise | None,
    separate: bool = False,
) -> list[Moments]:
    """Return the moments of the remembered rows: one for all outputs, or one for each.

    Args:
        V: V_a of `old_projection`.
        left: covariance of the old points given the candidates.
        mean: prior mean at the old points.
        noise: σ², of all outputs or of each; None for Gaussian sites.
        separate: whether to return one for each output in any case.
    """
    groups = memory.P if separate else len(memory.A)
    variances = V.new_ones(groups) if noise is None else noise.expand(groups)
    counts = [memory.N] if memory.counts is None else memory.counts.tolist()
    counts = counts * (groups // len(counts))
    constants = -0.5 * V.new_tensor(counts) * (log(2 * pi) + variances.log())
    if noise is None:
        constants = torch.zeros_like(constants)
    residuals = (
        memory.residual if memory.residual.dim() else (memory.residual / groups).expand(groups)
    )
    y = memory.centred(mean)
    # Old points that are all candidates have no covariance left.
    known, moments = not bool(left.any()), []
    for g, A in enumerate(memory.A.expand(groups, -1, -1)):
        own, precision = y if groups == 1 else y[:, g : g + 1], 1 / variances[g]
        B, gram = observed_combinations(V, A)
        C = precision * gram
        unseen = C.new_zeros(()) if known else precision * (A * (left @ A)).sum()
        moments.append(
            Moments(
                C=C,
                D=precision * (B @ own),
                square=precision * (own.square().sum() + residuals[g]),
                diagonal=C.diagonal().sum() + unseen,
                constant=constants[g],
                N=counts[g],
            )
        )
    if memory.fixed is not None:
        fixed = memory_moments(memory.fixed, V, left, mean=mean, noise=None, separate=separate)
        moments = [a + b for a, b in zip(moments, fixed, strict=True)]
    return moments


def observed_combinations(
    V: Float[Tensor, "K M"], A: Float[Tensor, "M R"]
) -> tuple[Float[Tensor, "K R"], Float[Tensor, "K K"]]:
    """Return B = V A, the combinations that rows observe in whitened coordinates, and B Bᵀ.

    Both factors are upper triangular if the points of the memory are the first candidates.
    """
    K, M = V.shape
    plain = V.requires_grad or A.shape[1] != M or M > K or M < _TRIANGULAR
    if plain or bool(A.tril(-1).any()) or bool(V.tril(-1).any()):
        B = V @ A
        return B, B @ B.mT
    B, gram = V.new_zeros(K, M), V.new_zeros(K, K)
    B[:M] = triangular_product(V[:M], A)
    gram[:M, :M] = triangular_gram(B[:M])
    return B, gram


def remember(
    Z: Float[Tensor, "M D"],
    L: Float[Tensor, "M M"],
    moments: list[Moments],
    *,
    mean: Float[Tensor, "M 1"],
    noise: TargetNoise | None,
    earlier: Memory | None = None,
) -> Memory:
    """Return what inducing points remember of the rows of some moments; O(M³) each.

    Args:
        Z: inducing points.
        L: factor of their covariance that whitened the moments.
        moments: moments of all rows, those remembered before included.
        mean: prior mean at Z.
        noise: σ², of all outputs or of each; None for Gaussian sites, of which those that widen
            q(f) are forgotten.
        earlier: what was remembered before, which the moments contain.
    """
    scales = L.new_ones(len(moments)) if noise is None else noise.expand(len(moments))
    roots, targets, residuals, lost = [], [], [], []
    for m, scale in zip(moments, scales, strict=True):
        root, y = _square_root(scale * m.C, scale * m.D)
        A = torch.linalg.solve_triangular(L.mT, root, upper=True)
        P = m.D.shape[1]
        unexplained = m.diagonal - m.C.diagonal().sum()
        lost.append(scale * P * unexplained)
        residual = scale * m.square + lost[-1] - y.square().sum()
        residuals.append(residual - 2 * P * m.constant if noise is None else residual.clamp_min(0))
        roots.append(A)
        targets.append(y + A.mT @ mean)
    residual, newly = torch.stack(residuals), torch.stack(lost)
    if noise is None or not noise.dim():
        residual, newly = residual.sum(), newly.sum()
    newly = newly + (0 if earlier is None or earlier.lost is None else earlier.lost)
    A, y = torch.stack(roots), torch.cat(targets, 1)
    # Fewer rows than points observe fewer combinations.
    used = (A != 0).any(1).any(0)
    numbers = [m.N for m in moments]
    counts = None if min(numbers) == max(numbers) else A.new_tensor(numbers)
    N = sum(numbers) / len(numbers)
    # Without points, the function is a constant: its variance is not that of rows.
    newly = newly if noise is not None and len(Z) else None
    return Memory(Z, A[..., used], y[used], residual, N, counts=counts, lost=newly)


def _square_root(
    C: Float[Tensor, "M M"], D: Float[Tensor, "M P"]
) -> tuple[Float[Tensor, "M M"], Float[Tensor, "M P"]]:
    """Return a root R of C = R Rᵀ, and R⁻¹ D, or R⁺ D if C is singular.

    The root is upper triangular if the rows determine all inducing values: a Cholesky factor of C
    in reversed order takes a tenth of the time of the eigenvectors.
    """
    reverse, failed = torch.linalg.cholesky_ex(C.flip(0, 1))
    pivots = reverse.diagonal().square()
    if len(C) and not bool(failed) and bool(pivots.amin() > _DETERMINED * pivots.amax()):
        root = reverse.flip(0, 1).contiguous()
        return root, torch.linalg.solve_triangular(root, D, upper=True)
    # c is non-negative up to rounding, unless a likelihood is not log-concave.
    c, U = torch.linalg.eigh(C)
    c = torch.where(c > _ROUNDING * c.amax(), c, 0.0) if len(c) else c
    root = c.sqrt()
    return U * root, torch.where(root > 0, 1 / root, 0.0)[:, None] * (U.mT @ D)


def joined(memories: Sequence[Memory]) -> Memory:
    """Return the memory of the rows of several, which have the same inducing points."""
    fixed = [m.fixed for m in memories if m.fixed is not None]
    lost = [m.lost for m in memories if m.lost is not None]
    groups, counted = max(len(m.A) for m in memories), any(m.counts is not None for m in memories)
    return Memory(
        memories[0].Z,
        torch.cat([m.A.expand(groups, -1, -1) for m in memories], 2),
        torch.cat([m.y for m in memories]),
        torch.stack([m.residual for m in memories]).sum(0),
        sum(m.N for m in memories),
        joined(fixed) if fixed else None,
        torch.stack([m.each_count() for m in memories]).sum(0) if counted else None,
        torch.stack(lost).sum(0) if lost else None,
    )


def projected(
    memory: Memory,
    Z: Float[Tensor, "K D"],
    L: Float[Tensor, "K K"],
    V: Float[Tensor, "K M"],
    left: Float[Tensor, "M M"],
    *,
    mean: Float[Tensor, "M 1"],
    new_mean: Float[Tensor, "K 1"],
) -> Memory:
    """Return what other inducing points remember of the same rows; O(K M R).

    Given u = f(Z), the old values have the mean L⁻ᵀV and the covariance `left`:

        A' = L⁻ᵀ V A,   residual' = residual + P tr Aᵀ (K_aa − Q_aa) A.

    Nothing is subtracted, and an old point that is among the new ones stays the same variable. More
    than K combinations are reduced to K by a QR decomposition of A'ᵀ.

    Args:
        memory: memory at the old points.
        Z: new points.
        L: factor of their covariance.
        V: V_a of `old_projection`.
        left: covariance of the old points given the new ones.
        mean: prior mean at the old points.
        new_mean: prior mean at the new points.
    """
    match = matches(Z, memory.Z)
    unit = torch.eye(len(Z), dtype=L.dtype, device=L.device)
    T = torch.linalg.solve_triangular(L.mT, V, upper=True)
    if len(Z):
        T = torch.where(match >= 0, unit[:, match.clamp_min(0)], T)
    A, each = T @ memory.A, memory.residual.dim() > 0
    lost = (memory.A * (left @ memory.A)).sum((1, 2)).expand(memory.P)
    lost = lost if each else lost.sum()
    residual, lost = memory.residual + lost, lost + (0 if memory.lost is None else memory.lost)
    y = memory.centred(mean)
    if y.shape[0] > len(Z):
        Q, R = torch.linalg.qr(A.mT)
        columns = y[None] if len(A) == 1 else y.mT[..., None]
        reduced = Q.mT @ columns
        squares = (columns - Q @ reduced).square().sum(1).reshape(-1)
        residual = residual + (squares if each else squares.sum())
        A, y = R.mT, reduced[0] if len(A) == 1 else reduced[..., 0].mT
    fixed = None
    if memory.fixed is not None:
        fixed = projected(memory.fixed, Z, L, V, left, mean=mean, new_mean=new_mean)
    y = y + (A.mT @ new_mean)[..., 0].mT
    return Memory(Z, A, y, residual, memory.N, fixed, memory.counts, lost if len(Z) else None)


def known_noise_parts(
    V: Float[Tensor, "K N"],
    Y: Float[Tensor, "N P"],
    kff: Float[Tensor, " N"],
    *,
    counts: Float[Tensor, " N"],
    known: Float[Tensor, " N"],
    noise: Scalar,
) -> tuple[Moments, Moments]:
    """Return the moments of rows with known noise: the part for every σ², and the fixed one.

    Their sum is that of rows with precisions 1/(s_i + σ²), and so is its derivative in σ².

    Args:
        V: whitened covariances of candidates and rows.
        Y: targets minus the prior mean.
        kff: prior variances of the rows.
        counts: number of observations that each row counts as.
        known: known noise variances s_i.
        noise: σ².
    """
    share = noise / (known + noise)
    scaled = row_moments(V, Y, kff, counts * share.square() / noise, N=(counts * share).sum())
    fixed = row_moments(
        V, Y, kff, counts * share * (1 - share) / noise, N=(counts * (1 - share)).sum()
    )
    constant = -0.5 * scaled.N * (log(2 * pi) + noise.log())
    total = -0.5 * (counts * (log(2 * pi) + (known + noise).log())).sum()
    return replace(scaled, constant=constant), replace(fixed, constant=total - constant)


def row_moments(
    V: Float[Tensor, "K N"],
    Y: Float[Tensor, "N P"],
    kff: Float[Tensor, " N"],
    precision: Float[Tensor, " N"],
    *,
    N: Any,
) -> Moments:
    """Return the moments of rows of given precisions, without the constant of their density."""
    VW = V * precision
    square = (precision[:, None] * Y.square()).sum()
    N = N.item() if isinstance(N, Tensor) else N
    return Moments(VW @ V.mT, VW @ Y, square, precision @ kff, V.new_zeros(()), N)


def restrict_moments(
    L: Float[Tensor, "K K"], moments: Sequence[Moments], mask: Tensor
) -> tuple[Float[Tensor, "M M"], list[Moments]]:
    """Return the factor and the moments of a subset of the candidates, without the rows; O(K² M).

    With the QR decomposition (rows I of L)ᵀ = Q Tᵀ the moments of the subset are QᵀCQ and QᵀD.
    """
    Q, Tt = torch.linalg.qr(L[mask].mT)
    signs = torch.where(Tt.diagonal() < 0, -1.0, 1.0).to(L)
    Q, T = Q * signs, (signs[:, None] * Tt).mT
    return T, [replace(m, C=Q.mT @ m.C @ Q, D=Q.mT @ m.D) for m in moments]


def posterior_moments(
    q_mean: Float[Tensor, "M P"],
    q_factor: Float[Tensor, "#P M M"],
    *,
    elbo: float,
    noise: Scalar | None,
    N: int | float,
) -> list[Moments]:
    """Return moments whose optimal q(v) and bound are those of a fitted model; O(M³).

    The covariance F Fᵀ = (I + C)⁻¹ gives C from the singular values s of F: c = 1/s² − 1, zero
    where q is as wide as the prior.

    Args:
        q_mean: means of the whitened inducing values.
        q_factor: factors F of their covariance; one for all outputs, or one each.
        elbo: bound in nats.
        noise: σ²; None for Gaussian sites.
        N: number of observations.
    """
    groups = len(q_factor)
    constant = q_mean.new_zeros(())
    if noise is not None:
        constant = -0.5 * N * (log(2 * pi) + noise.log())
    moments, nats = [], q_mean.new_zeros(())
    for g, F in enumerate(q_factor):
        own = q_mean if groups == 1 else q_mean[:, g : g + 1]
        U, s, _ = torch.linalg.svd(F)
        c = (1 / s.square() - 1).clamp_min(0)
        C = (U * c) @ U.mT
        D = own + C @ own
        LB = definite_cholesky(C + torch.eye(len(C), dtype=C.dtype, device=C.device))
        nats = nats + own.shape[1] * (constant - half_log_det(LB))
        nats = nats + 0.5 * squared_norm(solve_lower(LB, D))
        zero = C.new_zeros(())
        moments.append(Moments(C, D, zero, C.diagonal().sum(), constant, N))
    square = 2 * (nats - elbo) / len(moments)
    return [replace(m, square=square) for m in moments]
