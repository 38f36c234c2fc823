"""Psi statistics: kernel blocks averaged over uncertain inputs (Titsias & Lawrence 2010).

Under q(x_i) = N(μ_i, diag s_i), for M points z and rows weighted in G ways,

    ψ0_i = E[k(x_i, x_i)],   Ψ1_mi = E[k(z_m, x_i)],   Ψ2_g = Σ_i w_gi E[k(Z, x_i) k(x_i, Z)].

They take the place of k_ii, K_uf and K_uf W K_fu in every bound that is Gaussian given the inputs.
Ψ2 is symmetric: only the T = M(M + 1)/2 pairs m ≤ m' are computed.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Psi:
    """The averaged blocks."""

    psi0: Float[Tensor, " N"]
    psi1: Float[Tensor, "M N"]
    psi2: Float[Tensor, "G M M"]


class ExpectedKernel(ABC):
    """A kernel at its present parameters that can be averaged over Gaussian inputs.

    Everything is differentiable in the parameters, the inputs' means and variances, and Z.
    """

    @abstractmethod
    def uu(self, Z: Float[Tensor, "M Q"]) -> Float[Tensor, "M M"]:
        """K_uu."""

    @abstractmethod
    def psi0(self, mean: Float[Tensor, "N Q"], variance: Float[Tensor, "N Q"]) -> Tensor:
        """ψ0, `[N]`."""

    @abstractmethod
    def psi1(
        self, mean: Float[Tensor, "N Q"], variance: Float[Tensor, "N Q"], *, Z: Tensor
    ) -> Float[Tensor, "M N"]:
        """Ψ1."""

    @abstractmethod
    def psi2_rows(
        self, mean: Float[Tensor, "N Q"], variance: Float[Tensor, "N Q"], *, Z: Tensor
    ) -> Float[Tensor, "N T"]:
        """E[k(z_m, x_i) k(x_i, z_m')] of each row and pair m ≤ m', in the order of `pairs`."""

    @abstractmethod
    def psi2(
        self,
        mean: Float[Tensor, "N Q"],
        variance: Float[Tensor, "N Q"],
        *,
        Z: Float[Tensor, "M Q"],
        weights: Float[Tensor, "G N"],
    ) -> Float[Tensor, "G M M"]:
        """Ψ2 of each way to weight the rows, which are taken as constants."""

    def psi(
        self,
        mean: Float[Tensor, "N Q"],
        variance: Float[Tensor, "N Q"],
        *,
        Z: Float[Tensor, "M Q"],
        weights: Float[Tensor, "G N"],
    ) -> Psi:
        """All three; O(N M² (Q + G))."""
        return Psi(
            self.psi0(mean, variance),
            self.psi1(mean, variance, Z=Z),
            self.psi2(mean, variance, Z=Z, weights=weights),
        )


def pairs(M: int, device: torch.device) -> Int[Tensor, "2 T"]:
    """Numbers m ≤ m' of all pairs."""
    return torch.triu_indices(M, M, device=device)


def from_pairs(values: Float[Tensor, "G T"], M: int) -> Float[Tensor, "G M M"]:
    """Symmetric matrices from their pairs."""
    first, second = pairs(M, values.device)
    place = torch.empty(M, M, dtype=torch.long, device=values.device)
    place[first, second] = place[second, first] = torch.arange(len(first), device=values.device)
    return values[:, place]


def pair_weights(A: Float[Tensor, "G M M"]) -> Float[Tensor, "G T"]:
    """Weights of the pairs so that ⟨A, B⟩ = Σ_t weight_t B_t, for symmetric A and B."""
    first, second = pairs(A.shape[-1], A.device)
    return A[:, first, second] * torch.where(first == second, 1.0, 2.0).to(A)
