"""Psi statistics and the bound of the Bayesian GP-LVM at the optimal q(u) (Titsias, Lawrence 2010).

Inputs have the prior N(0, I) and q(x_i) = N(μ_i, diag s_i). Psi statistics are the kernel blocks
averaged over them: for M inducing points z and G sets of row weights w_g,

    ψ0_i = E[k(x_i, x_i)],   Ψ1_mi = E[k(z_m, x_i)],   Ψ2_g = Σ_i w_gi E[k(Z, x_i) k(x_i, Z)].

They replace k_ii, K_uf and K_uf W K_fu in every bound that is Gaussian given the inputs. Ψ2 is
symmetric: only the T = M(M + 1)/2 pairs m ≤ m' are computed.

Given psi statistics the bound is that of regression: with K_uu = L Lᵀ, the matrices
C = L⁻¹ Ψ2 L⁻ᵀ/σ² and D = L⁻¹ Ψ1 Y/σ² and the scalar Σ_i ψ0_i/σ² are the moments of
`bounds.collapsed`. A missing entry is a row of weight zero in its column. Columns observed in the
same rows with the same noise share their moments; others have their own. The bound is exact for any
pattern of missing entries, and no q(u) has to be learnt.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import log, pi
from typing import Any, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from winnowgp.bounds.collapsed import Moments
from winnowgp.bounds.row_blocks import JITTER
from winnowgp.linalg import definite_cholesky, half_log_det, solve_lower

# Elements of one chunk of exp(A B), small enough for the CPU cache; and the largest number that is
# kept for the gradient (256 MiB in float64).
CHUNK, KEEP = 2**17, 2**25


@dataclass(frozen=True, slots=True)
class Psi:
    """The averaged kernel blocks ψ0, Ψ1 and Ψ2."""

    psi0: Float[Tensor, " N"]
    psi1: Float[Tensor, "M N"]
    psi2: Float[Tensor, "G M M"]


class ExpectedKernel(ABC):
    """A kernel at its current parameters that can be averaged over Gaussian inputs.

    All methods are differentiable in the parameters, the means and variances of the inputs, and Z.
    """

    @abstractmethod
    def uu(self, Z: Float[Tensor, "M Q"]) -> Float[Tensor, "M M"]:
        """Return K_uu."""

    @abstractmethod
    def psi0(self, mean: Float[Tensor, "N Q"], variance: Float[Tensor, "N Q"]) -> Tensor:
        """Return ψ0, `[N]`."""

    @abstractmethod
    def psi1(
        self, mean: Float[Tensor, "N Q"], variance: Float[Tensor, "N Q"], *, Z: Tensor
    ) -> Float[Tensor, "M N"]:
        """Return Ψ1."""

    @abstractmethod
    def psi2_rows(
        self, mean: Float[Tensor, "N Q"], variance: Float[Tensor, "N Q"], *, Z: Tensor
    ) -> Float[Tensor, "N T"]:
        """Return E[k(z_m, x_i) k(x_i, z_m')] of each row and pair m ≤ m' (`pairs`)."""

    @abstractmethod
    def psi2(
        self,
        mean: Float[Tensor, "N Q"],
        variance: Float[Tensor, "N Q"],
        *,
        Z: Float[Tensor, "M Q"],
        weights: Float[Tensor, "G N"],
    ) -> Float[Tensor, "G M M"]:
        """Return Ψ2 of each set of row weights; the weights are treated as constants."""

    def psi(
        self,
        mean: Float[Tensor, "N Q"],
        variance: Float[Tensor, "N Q"],
        *,
        Z: Float[Tensor, "M Q"],
        weights: Float[Tensor, "G N"],
    ) -> Psi:
        """Return ψ0, Ψ1 and Ψ2; O(N M² (Q + G))."""
        return Psi(
            self.psi0(mean, variance),
            self.psi1(mean, variance, Z=Z),
            self.psi2(mean, variance, Z=Z, weights=weights),
        )


def pairs(M: int, device: torch.device) -> Int[Tensor, "2 T"]:
    """Return the indices m ≤ m' of all pairs of M inducing points."""
    return torch.triu_indices(M, M, device=device)


def from_pairs(values: Float[Tensor, "G T"], M: int) -> Float[Tensor, "G M M"]:
    """Return symmetric matrices from the values of their pairs."""
    first, second = pairs(M, values.device)
    index = torch.empty(M, M, dtype=torch.long, device=values.device)
    index[first, second] = index[second, first] = torch.arange(len(first), device=values.device)
    return values[:, index]


def pair_weights(A: Float[Tensor, "G M M"]) -> Float[Tensor, "G T"]:
    """Return weights with ⟨A, B⟩ = Σ_t weight_t B_t over the pairs t, for symmetric A and B."""
    first, second = pairs(A.shape[-1], A.device)
    return A[:, first, second] * torch.where(first == second, 1.0, 2.0).to(A)


@final
@dataclass(frozen=True, slots=True)
class LinearPsi(ExpectedKernel):
    """Psi statistics of the linear kernel k(x, z) = Σ_q v_q x_q z_q.

    E[x xᵀ] = μ μᵀ + diag s, so Ψ2 = Z̃ (Σ_i w_i E[x_i x_iᵀ]) Z̃ᵀ with Z̃ = Z diag v. Prior and
    posterior have rank Q: more than Q inducing points do not improve the bound.
    """

    variances: Float[Tensor, " Q"]

    def uu(self, Z: Float[Tensor, "M Q"]) -> Float[Tensor, "M M"]:
        return (Z * self.variances) @ Z.mT

    def psi0(self, mean: Float[Tensor, "N Q"], variance: Float[Tensor, "N Q"]) -> Tensor:
        return (mean.square() + variance) @ self.variances

    def psi1(
        self, mean: Float[Tensor, "N Q"], variance: Float[Tensor, "N Q"], *, Z: Tensor
    ) -> Float[Tensor, "M N"]:
        return (Z * self.variances) @ mean.mT

    def psi2_rows(
        self, mean: Float[Tensor, "N Q"], variance: Float[Tensor, "N Q"], *, Z: Tensor
    ) -> Float[Tensor, "N T"]:
        scaled = Z * self.variances
        first, second = pairs(len(Z), Z.device)
        psi1 = mean @ scaled.mT
        return psi1[:, first] * psi1[:, second] + variance @ (scaled[first] * scaled[second]).mT

    def psi2(
        self,
        mean: Float[Tensor, "N Q"],
        variance: Float[Tensor, "N Q"],
        *,
        Z: Float[Tensor, "M Q"],
        weights: Float[Tensor, "G N"],
    ) -> Float[Tensor, "G M M"]:
        scaled = Z * self.variances
        weighted = weights[:, :, None] * mean
        moments = weighted.mT @ mean + torch.diag_embed(weights @ variance)
        return scaled @ moments @ scaled.mT


@final
@dataclass(frozen=True, slots=True)
class RBFPsi(ExpectedKernel):
    """Psi statistics of the scaled RBF kernel k(x, z) = v exp(−½ Σ_q (x_q − z_q)²/ℓ_q²).

        Ψ1_mi   = v Π_q (1 + s/ℓ²)^−½ exp(−½ (μ − z)²/(s + ℓ²))
        Ψ2_imm' = v² Π_q (1 + 2s/ℓ²)^−½ exp(−(z − z')²/4ℓ² − (μ − z̄)²/(2s + ℓ²)),   z̄ = (z + z')/2

    Both exponents are inner products of features of a row with features of an inducing point or of
    a pair. Ψ2 is therefore two thin products around one exponential of N · T numbers, and its
    gradient two more.
    """

    variance: Float[Tensor, ""]
    lengthscales: Float[Tensor, " Q"]

    def uu(self, Z: Float[Tensor, "M Q"]) -> Float[Tensor, "M M"]:
        scaled = Z / self.lengthscales
        square = scaled.square().sum(1)
        distance = square[:, None] + square - 2 * scaled @ scaled.mT
        return self.variance * torch.exp(-0.5 * distance.clamp_min(0))

    def psi0(self, mean: Float[Tensor, "N Q"], variance: Float[Tensor, "N Q"]) -> Tensor:
        return self.variance.expand(len(mean))

    def psi1(
        self, mean: Float[Tensor, "N Q"], variance: Float[Tensor, "N Q"], *, Z: Tensor
    ) -> Float[Tensor, "M N"]:
        square = self.lengthscales.square()
        b = 1 / (variance + square)
        volume = self.variance.log() - 0.5 * (variance / square).log1p().sum(1)
        constant = volume - 0.5 * (b * mean.square()).sum(1)
        rows = torch.cat([constant[:, None], b * mean, -0.5 * b], 1)
        points = torch.cat([torch.ones_like(Z[:, :1]), Z, Z.square()], 1)
        return torch.exp(points @ rows.mT)

    def psi2_rows(
        self, mean: Float[Tensor, "N Q"], variance: Float[Tensor, "N Q"], *, Z: Tensor
    ) -> Float[Tensor, "N T"]:
        return torch.exp(self._rows(mean, variance) @ self._pairs(Z))

    def psi2(
        self,
        mean: Float[Tensor, "N Q"],
        variance: Float[Tensor, "N Q"],
        *,
        Z: Float[Tensor, "M Q"],
        weights: Float[Tensor, "G N"],
    ) -> Float[Tensor, "G M M"]:
        summed = WeightedExponentials.apply(self._rows(mean, variance), self._pairs(Z), weights)
        return from_pairs(summed, len(Z))

    def _rows(self, mean: Tensor, variance: Tensor) -> Float[Tensor, "N F"]:
        square = self.lengthscales.square()
        b = 1 / (2 * variance + square)
        volume = 2 * self.variance.log() - 0.5 * (2 * variance / square).log1p().sum(1)
        constant = volume - (b * mean.square()).sum(1)
        one = torch.ones_like(constant)
        return torch.cat([constant[:, None], one[:, None], 2 * b * mean, -b], 1)

    def _pairs(self, Z: Tensor) -> Float[Tensor, "F T"]:
        first, second = pairs(len(Z), Z.device)
        middle = 0.5 * (Z[first] + Z[second])
        apart = ((Z[first] - Z[second]) / self.lengthscales).square().sum(1)
        one = torch.ones_like(apart)
        return torch.cat([one[:, None], -0.25 * apart[:, None], middle, middle.square()], 1).mT


@final
class WeightedExponentials(torch.autograd.Function):
    """W exp(A B) for thin A `[N F]` and B `[F T]`, computed in chunks of columns of B.

    With E = exp(A B) and cotangent G, the gradient is ((Wᵀ G) ∘ E) Bᵀ and Aᵀ ((Wᵀ G) ∘ E). W is
    treated as a constant. O(N T (F + G)); autograd alone would write and read N T numbers five
    times.
    """

    @staticmethod
    def forward(
        ctx: Any,
        A: Float[Tensor, "N F"],
        B: Float[Tensor, "F T"],
        W: Float[Tensor, "G N"],
    ) -> Float[Tensor, "G T"]:
        keep = A.shape[0] * B.shape[1] <= KEEP and any(ctx.needs_input_grad)
        exponentials, products = [], [W.new_zeros(len(W), 0)]
        for columns in B.split(max(1, CHUNK // max(len(A), 1)), dim=1):
            E = torch.mm(A, columns).exp_()
            products.append(W @ E)
            if keep:
                exponentials.append(E)
        ctx.save_for_backward(A, B, W)
        ctx.exponentials = exponentials
        return torch.cat(products, 1)

    @staticmethod
    def backward(ctx: Any, *output: Tensor) -> tuple[Tensor, Tensor, None]:
        A, B, W = ctx.saved_tensors
        size = max(1, CHUNK // max(len(A), 1))
        d_A, d_B = torch.zeros_like(A), [B.new_zeros(len(B), 0)]
        slices = zip(B.split(size, dim=1), output[0].split(size, dim=1), strict=True)
        for index, (columns, cotangent) in enumerate(slices):
            E = ctx.exponentials[index] if ctx.exponentials else torch.mm(A, columns).exp_()
            pulled_back = torch.mm(W.mT, cotangent).mul_(E)
            d_A.addmm_(pulled_back, columns.mT)
            d_B.append(A.mT @ pulled_back)
        return d_A, torch.cat(d_B, 1), None


@dataclass(frozen=True, slots=True)
class ObservedColumns:
    """The observed table of a GP-LVM, with the row weights of its psi statistics.

    Attributes:
        Y: the table, zero where an entry is missing.
        weights: row weights of each of G patterns: one where a row is observed, zero elsewhere.
        pattern: index of the pattern of each column.
        noise: noise variance of each column, or one for all columns.
    """

    Y: Float[Tensor, "N P"]
    weights: Float[Tensor, "G N"]
    pattern: Int[Tensor, " P"]
    noise: Float[Tensor, " P"] | Float[Tensor, " 1"]

    @property
    def shared(self) -> bool:
        """Whether all columns have the same moments."""
        return len(self.weights) == 1 and len(self.noise) == 1


def latent_kl(mean: Float[Tensor, "N Q"], variance: Float[Tensor, "N Q"]) -> Float[Tensor, " N"]:
    """Return KL[N(μ_i, diag s_i) ‖ N(0, I)] = ½ Σ_q (s + μ² − 1 − log s) of each row, in nats."""
    return 0.5 * (variance + mean.square() - 1 - variance.log()).sum(1)


def whitening_factor(Kuu: Float[Tensor, "*S M M"]) -> Float[Tensor, "*S M M"]:
    """Return the factor L of K_uu with a jitter of 1e-8 of its mean diagonal.

    Ψ2 is not available in factored form and is whitened from both sides, which multiplies its
    rounding error by the condition number of K_uu: the 1e-12 of `linalg.cholesky` is too small.
    """
    M = Kuu.shape[-1]
    mean = Kuu.diagonal(dim1=-2, dim2=-1).mean(-1) if M else Kuu.new_ones(Kuu.shape[:-2])
    eye = torch.eye(M, dtype=Kuu.dtype, device=Kuu.device)
    return definite_cholesky(Kuu + (JITTER * mean)[..., None, None] * eye)


def gplvm_bound(
    Kuu: Float[Tensor, "*S M M"],
    psi1: Float[Tensor, "*S M N"],
    psi2: Float[Tensor, "*S G M M"],
    *,
    psi0: Float[Tensor, " N"],
    columns: ObservedColumns,
) -> Float[Tensor, "*S"]:
    """Return the expected log-likelihood minus KL[q(u) ‖ p(u)] at the optimal q(u), in nats.

        −½ Σ_p [ n_p log 2πσ_p² + log|B_p| + (‖y_p‖² − D_pᵀB_p⁻¹D_p σ_p²)/σ_p²
                 + (Σ_i w_pi ψ0_i)/σ_p² − tr C_p ],    B_p = I + C_p

    The ELBO is this minus the sum of `latent_kl`. It equals `collapsed_bound` when q(x_i) has zero
    variance. O(M³) for each pattern and noise variance.
    """
    L = whitening_factor(Kuu)
    C, D = _whitened(L, psi1, psi2, columns)
    eye = torch.eye(C.shape[-1], dtype=C.dtype, device=C.device)
    LB = definite_cholesky(eye + C)
    # [*S 1 M P] for shared moments, or [*S P M 1] with one set of moments per column.
    targets = D.unsqueeze(-3) if columns.shared else D.mT.unsqueeze(-1)
    fit = solve_lower(LB, targets).square().sum((-3, -2, -1))
    volume = half_log_det(LB) - 0.5 * C.diagonal(dim1=-2, dim2=-1).sum(-1)
    repeats = columns.Y.shape[1] if columns.shared else 1
    return _empty_bound(psi0, columns).sum() + 0.5 * fit - repeats * volume.sum(-1)


def gplvm_moments(L: Float[Tensor, "M M"], psi: Psi, columns: ObservedColumns) -> list[Moments]:
    """Return the moments whitened with L, for `subset_statistics` and `moment_posterior`.

    There is one set of moments if all columns share rows and noise, else one per column. Where
    rounding has made some C indefinite (small noise, close inducing points), Ψ2 is first replaced
    by the nearest positive semi-definite matrix, so that I + C can be factorised. Not
    differentiable.
    """
    N, P = columns.Y.shape
    C, D = _whitened(L, psi.psi1, psi.psi2, columns)
    eye = torch.eye(len(L), dtype=L.dtype, device=L.device)
    if bool(torch.linalg.cholesky_ex(eye + C).info.any()):
        values, vectors = torch.linalg.eigh(psi.psi2)
        V = solve_lower(L, vectors * values.clamp_min(0).sqrt()[:, None, :])
        C = V @ V.mT if columns.shared else (V @ V.mT)[columns.pattern]
        C = C / columns.noise[:, None, None]
    counts = columns.weights.sum(1)[columns.pattern]
    square = columns.Y.square().sum(0) / columns.noise
    diagonal = (columns.weights @ psi.psi0)[columns.pattern] / columns.noise
    constant = -0.5 * counts * (2 * pi * columns.noise).log()
    if columns.shared:
        return [Moments(C[0], D, square.sum(), diagonal[0], constant[0], N)]
    return [
        Moments(C[p], D[:, p : p + 1], square[p], diagonal[p], constant[p], N) for p in range(P)
    ]


def _whitened(
    L: Tensor, psi1: Tensor, psi2: Tensor, columns: ObservedColumns
) -> tuple[Float[Tensor, "*S sets M M"], Float[Tensor, "*S M P"]]:
    """Return C of each set of moments, and D of each column."""
    half = solve_lower(L.unsqueeze(-3), psi2)
    C = solve_lower(L.unsqueeze(-3), half.mT)
    C = 0.5 * (C + C.mT)
    if not columns.shared:
        C = C[..., columns.pattern, :, :]
    D = solve_lower(L, psi1 @ columns.Y) / columns.noise
    return C / columns.noise[:, None, None], D


def _empty_bound(psi0: Float[Tensor, " N"], columns: ObservedColumns) -> Float[Tensor, " P"]:
    """Return the bound of each column without inducing points: log N(y | 0, σ²) − Σ ψ0/2σ²."""
    counts = columns.weights.sum(1)[columns.pattern]
    square = columns.Y.square().sum(0) + (columns.weights @ psi0)[columns.pattern]
    return -0.5 * (counts * (log(2 * pi) + columns.noise.log()) + square / columns.noise)
