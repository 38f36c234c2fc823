"""Psi statistics: kernel blocks averaged over uncertain inputs (Titsias & Lawrence 2010).

Under q(x_i) = N(μ_i, diag s_i), for M inducing points z and G sets of row weights w_g,

    ψ0_i = E[k(x_i, x_i)],   Ψ1_mi = E[k(z_m, x_i)],   Ψ2_g = Σ_i w_gi E[k(Z, x_i) k(x_i, Z)].

They replace k_ii, K_uf and K_uf W K_fu in every bound that is Gaussian given the inputs. Ψ2 is
symmetric: only the T = M(M + 1)/2 pairs m ≤ m' are computed.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

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
