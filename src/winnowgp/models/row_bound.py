"""Rows of a table, each as a function of its own place in latent space."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from winnowgp.bounds import ExpectedKernel, latent_kl


class RowBound(ABC):
    """A lower bound on log p(y_i) of each row's observed entries, given the functions.

    Σ_p E log p(y_ip | f_p(x_i)) − KL[q(x_i) ‖ N(0, I)], in nats, as a function of q(x_i).
    """

    @property
    @abstractmethod
    def N(self) -> int:
        """Number of rows."""

    @abstractmethod
    def of(self, rows: Int[Tensor, " B"]) -> "RowBound":
        """Some of the rows."""

    @abstractmethod
    def __call__(
        self, rows: Int[Tensor, " B"], mean: Float[Tensor, "B Q"], variance: Float[Tensor, "B Q"]
    ) -> Float[Tensor, " B"]:
        """Nats of some rows at these places, differentiable in them."""

    @abstractmethod
    def everywhere(
        self, mean: Float[Tensor, "J Q"], variance: Float[Tensor, "J Q"]
    ) -> Float[Tensor, "N J"]:
        """Nats of every row at each of J places."""


@final
@dataclass(frozen=True, slots=True)
class ExpectedRowBound(RowBound):
    """Rows with Gaussian noise, by psi statistics.

        Σ_p E log N(y_ip | f_p(x_i), σ_p²) − KL[q(x_i) ‖ N(0, I)]
          = constant_i + ⟨first_i, ψ1_i⟩ − ½ (precision_i ψ0_i + ⟨second_i, Ψ2_i⟩) − KL_i

    At a training row's own q(x_i) its gradient is that of the model's bound, since q(u) is the best
    one there. Rows with the same entries observed share `second`.

    Attributes:
        constant: −½ Σ_p [log 2πσ_p² + y_ip²/σ_p²] over what is observed.
        first: Σ_p (y_ip/σ_p²) a_p.
        second: Σ_p A_p/σ_p² for each of H patterns, by pairs of points.
        pattern: which of them each row has.
        precision: Σ_p 1/σ_p².
    """

    kernel: ExpectedKernel
    Z: Float[Tensor, "M Q"]
    constant: Float[Tensor, " N"]
    first: Float[Tensor, "N M"]
    second: Float[Tensor, "H T"]
    pattern: Int[Tensor, " N"]
    precision: Float[Tensor, " N"]

    @property
    def N(self) -> int:
        """Number of rows."""
        return len(self.constant)

    def of(self, rows: Int[Tensor, " B"]) -> "ExpectedRowBound":
        """Some of the rows."""
        return replace(
            self,
            constant=self.constant[rows],
            first=self.first[rows],
            pattern=self.pattern[rows],
            precision=self.precision[rows],
        )

    def __call__(
        self, rows: Int[Tensor, " B"], mean: Float[Tensor, "B Q"], variance: Float[Tensor, "B Q"]
    ) -> Float[Tensor, " B"]:
        """Nats of some rows at these places, differentiable in them; O(M²) a row."""
        psi1 = self.kernel.psi1(mean, variance, Z=self.Z)
        psi2 = self.kernel.psi2_rows(mean, variance, Z=self.Z)
        linear = (self.first[rows] * psi1.mT).sum(1)
        square = (self.second[self.pattern[rows]] * psi2).sum(1)
        square = square + self.precision[rows] * self.kernel.psi0(mean, variance)
        return self.constant[rows] + linear - 0.5 * square - latent_kl(mean, variance)

    @torch.no_grad()
    def everywhere(
        self, mean: Float[Tensor, "J Q"], variance: Float[Tensor, "J Q"]
    ) -> Float[Tensor, "N J"]:
        """Nats of every row at each of J places; O(N M J) where rows share their patterns."""
        linear = self.first @ self.kernel.psi1(mean, variance, Z=self.Z)
        square = (self.second @ self.kernel.psi2_rows(mean, variance, Z=self.Z).mT)[self.pattern]
        square = square + self.precision[:, None] * self.kernel.psi0(mean, variance)
        return self.constant[:, None] + linear - 0.5 * square - latent_kl(mean, variance)
