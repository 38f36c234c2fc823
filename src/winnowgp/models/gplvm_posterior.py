"""Posteriors of latent-variable models, and the ELBO of a row as a function of its q(x)."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from math import log
from typing import final

import torch
from gpytorch.likelihoods import GaussianLikelihood
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from winnowgp.bounds.gplvm import ExpectedKernel, latent_kl, pair_weights
from winnowgp.data import MaskedMatrix
from winnowgp.linalg import solve_lower
from winnowgp.models.kernels import expected_kernel
from winnowgp.models.likelihoods import observation_model
from winnowgp.models.observations import Prediction, fill_with_observed
from winnowgp.models.posterior import Posterior
from winnowgp.models.quadrature import normal_nodes

# Quasi-random nodes for integrals over q(x); each is used with its reflection. Fewer while the
# latent position of a row is inferred.
NODES, INFERENCE_NODES = 64, 8


class RowELBO(ABC):
    """Lower bounds on log p(y_i) of the observed entries of each row, as functions of q(x_i).

    Σ_p E log p(y_ip | f_p(x_i)) − KL[q(x_i) ‖ N(0, I)], in nats, at fixed functions.
    Maximising it infers the latent position of a row.
    """

    @property
    @abstractmethod
    def N(self) -> int:
        """Number of rows."""

    @abstractmethod
    def of(self, rows: Int[Tensor, " B"]) -> "RowELBO":
        """Return the bounds of some of the rows."""

    @abstractmethod
    def __call__(
        self, rows: Int[Tensor, " B"], mean: Float[Tensor, "B Q"], variance: Float[Tensor, "B Q"]
    ) -> Float[Tensor, " B"]:
        """Return the nats of some rows at these q(x), differentiable in them."""

    @abstractmethod
    def everywhere(
        self, mean: Float[Tensor, "J Q"], variance: Float[Tensor, "J Q"]
    ) -> Float[Tensor, "N J"]:
        """Return the nats of every row at each of J q(x)."""


@final
@dataclass(frozen=True, slots=True)
class ExpectedRowELBO(RowELBO):
    """Row ELBOs with Gaussian noise, by psi statistics.

        Σ_p E log N(y_ip | f_p(x_i), σ_p²) − KL[q(x_i) ‖ N(0, I)]
          = constant_i + ⟨first_i, ψ1_i⟩ − ½ (precision_i ψ0_i + ⟨second_i, Ψ2_i⟩) − KL_i

    At the q(x_i) of a training row the gradient is that of the model's bound, since q(u) is optimal
    there. Rows with the same observed entries share `second`.

    Attributes:
        constant: −½ Σ_p [log 2πσ_p² + y_ip²/σ_p²] over observed entries.
        first: Σ_p (y_ip/σ_p²) a_p.
        second: Σ_p A_p/σ_p² for each of H patterns of observed entries, by pairs of points.
        pattern: index of the pattern of each row.
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

    def of(self, rows: Int[Tensor, " B"]) -> "ExpectedRowELBO":
        """Return the bounds of some of the rows."""
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
        """Return the nats of some rows at these q(x), differentiable; O(M²) per row."""
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
        """Return the nats of every row at each of J q(x); O(N M J) if rows share patterns."""
        linear = self.first @ self.kernel.psi1(mean, variance, Z=self.Z)
        square = (self.second @ self.kernel.psi2_rows(mean, variance, Z=self.Z).mT)[self.pattern]
        square = square + self.precision[:, None] * self.kernel.psi0(mean, variance)
        return self.constant[:, None] + linear - 0.5 * square - latent_kl(mean, variance)


class LatentPosterior(nn.Module, ABC):
    """q(f) of a latent-variable model, integrated over q(x).

    Args:
        function: q(f) given the inputs.
    """

    def __init__(self, function: Posterior) -> None:
        super().__init__()
        self.function = function

    @property
    def Q(self) -> int:
        """Number of latent dimensions."""
        return self.function.Z.shape[1]

    @abstractmethod
    def predict(
        self,
        mean: Float[Tensor, "N Q"],
        variance: Float[Tensor, "N Q"],
        *,
        observed: bool = False,
    ) -> Prediction:
        """Return mean and variance of the functions at x ~ N(mean, diag variance).

        Args:
            observed: whether to predict an entry of the table, with noise.
        """

    @abstractmethod
    def row_elbo(self, table: MaskedMatrix) -> RowELBO:
        """Return the ELBO of each row of a table as a function of its q(x)."""

    @torch.no_grad()
    def log_density(
        self,
        Y: Float[Tensor, "N P"],
        mean: Float[Tensor, "N Q"],
        variance: Float[Tensor, "N Q"],
    ) -> Float[Tensor, "N P"]:
        """Return log ∫ p(y | x) q(x) dx of each entry in nats, by 128 quasi-random nodes."""
        observation_model(self.function.likelihood).check_targets(Y)
        nodes = nodes_at(mean, variance)
        nats = torch.stack([self.function.log_density(x, Y) for x in nodes])
        return nats.logsumexp(0) - log(len(nodes))


def nodes_at(
    mean: Float[Tensor, "N Q"], variance: Float[Tensor, "N Q"], count: int = NODES
) -> Float[Tensor, "T N Q"]:
    """Return nodes of equal weight under q(x) of each row, from the same standard nodes."""
    return mean + variance.sqrt() * normal_nodes(count, mean.shape[1]).to(mean)[:, None]


@final
class ExpectedPosterior(LatentPosterior):
    """q(f) of a GP-LVM with Gaussian noise, integrated over q(x) by psi statistics.

    With a_p = L⁻ᵀ m_p and A_p = a_p a_pᵀ + L⁻ᵀ (F_p F_pᵀ − I) L⁻¹, an input x ~ N(μ, diag s) has

        E f_p = ψ1ᵀ a_p,   E f_p² = ψ0 + ⟨Ψ2, A_p⟩.
    """

    second: Tensor

    def __init__(self, function: Posterior) -> None:
        super().__init__(function)
        F, L = function.q_factor, function.L
        eye = torch.eye(function.M, dtype=L.dtype, device=L.device)
        L_inverse = solve_lower(L, eye)
        a = function.weights.mT
        spread = L_inverse.mT @ (F @ F.mT - eye) @ L_inverse
        self.register_buffer("second", pair_weights(a[:, :, None] * a[:, None, :] + spread))

    @property
    def noise(self) -> Float[Tensor, " columns"]:
        """Noise variance of each column, or one for all."""
        assert isinstance(self.function.likelihood, GaussianLikelihood)
        return self.function.likelihood.noise

    def predict(
        self,
        mean: Float[Tensor, "N Q"],
        variance: Float[Tensor, "N Q"],
        *,
        observed: bool = False,
    ) -> Prediction:
        """Return mean and variance at x ~ N(mean, diag variance); O(P M²) per row."""
        kernel, Z = expected_kernel(self.function.kernel, self.Q), self.function.Z
        first = kernel.psi1(mean, variance, Z=Z).mT @ self.function.weights
        pairs = kernel.psi2_rows(mean, variance, Z=Z) @ self.second.mT
        second = kernel.psi0(mean, variance)[:, None] + pairs
        spread = (second - first.square()).clamp_min(0)
        return Prediction(first, spread + self.noise if observed else spread)

    @torch.no_grad()
    def row_elbo(self, table: MaskedMatrix) -> ExpectedRowELBO:
        """Return the ELBO of each row of a table as a function of its q(x)."""
        noise = self.noise.expand(table.P)
        precision = table.observed / noise
        pattern, which = torch.unique(table.observed, dim=0, return_inverse=True)
        Y = table.filled()
        density = (2 * torch.pi * noise).log() * table.observed + Y.square() * precision
        return ExpectedRowELBO(
            kernel=expected_kernel(self.function.kernel, self.Q),
            Z=self.function.Z,
            constant=-0.5 * density.sum(1),
            first=(Y * precision) @ self.function.weights.mT,
            second=(pattern / noise) @ self.second,
            pattern=which,
            precision=precision.sum(1),
        )


@final
class SampledPosterior(LatentPosterior):
    """q(f) for any kernel and likelihood, integrated over q(x) by fixed quasi-random nodes."""

    def predict(
        self,
        mean: Float[Tensor, "N Q"],
        variance: Float[Tensor, "N Q"],
        *,
        observed: bool = False,
    ) -> Prediction:
        """Return mean and variance, with Var y = E Var[y | x] + Var E[y | x]."""
        at_nodes = [self.function.predict(x, observed=observed) for x in nodes_at(mean, variance)]
        means = torch.stack([prediction.mean for prediction in at_nodes])
        inner = torch.stack([prediction.variance for prediction in at_nodes]).mean(0)
        return Prediction(means.mean(0), inner + means.var(0, correction=0))

    def row_elbo(self, table: MaskedMatrix) -> "SampledRowELBO":
        """Return the ELBO of each row of a table as a function of its q(x)."""
        observation_model(self.function.likelihood).check_targets(fill_with_observed(table))
        return SampledRowELBO(self.function, fill_with_observed(table), table.observed)


@final
@dataclass(frozen=True, slots=True)
class SampledRowELBO(RowELBO):
    """Row ELBOs under any likelihood, by a mean over nodes of q(x).

    Attributes:
        Y: the table, with missing entries replaced by an observed value.
        observed: which entries are observed.
    """

    function: Posterior
    Y: Float[Tensor, "N P"]
    observed: Bool[Tensor, "N P"]

    @property
    def N(self) -> int:
        return len(self.Y)

    def of(self, rows: Int[Tensor, " B"]) -> "SampledRowELBO":
        return SampledRowELBO(self.function, self.Y[rows], self.observed[rows])

    def __call__(
        self, rows: Int[Tensor, " B"], mean: Float[Tensor, "B Q"], variance: Float[Tensor, "B Q"]
    ) -> Float[Tensor, " B"]:
        Y, observed = self.Y[rows], self.observed[rows]
        nodes = nodes_at(mean, variance, INFERENCE_NODES)
        nats = torch.stack([self._nats(Y, x) * observed for x in nodes])
        return nats.mean(0).sum(1) - latent_kl(mean, variance)

    @torch.no_grad()
    def everywhere(
        self, mean: Float[Tensor, "J Q"], variance: Float[Tensor, "J Q"]
    ) -> Float[Tensor, "N J"]:
        """Return the nats at the means of the q(x) only, which suffices to compare them."""
        latent, likelihood = self.function.predict(mean), self.function.likelihood
        columns = []
        for f, v in zip(latent.mean, latent.variance, strict=True):
            size = (self.N, len(f))
            nats = observation_model(likelihood).expected_log_prob(
                self.Y, f.expand(size), v.expand(size)
            )
            columns.append((nats * self.observed).sum(1))
        return torch.stack(columns, 1) - latent_kl(mean, variance)

    def _nats(self, Y: Tensor, X: Tensor) -> Tensor:
        latent = self.function.predict(X)
        return observation_model(self.function.likelihood).expected_log_prob(
            Y, latent.mean, latent.variance
        )
