"""Variational distributions in the whitened frame of their candidates."""

from dataclasses import dataclass
from typing import Any, final

import torch
from gpytorch.variational import (
    CholeskyVariationalDistribution,
    DeltaVariationalDistribution,
    MeanFieldVariationalDistribution,
    NaturalVariationalDistribution,
)
from jaxtyping import Bool, Float
from torch import Tensor, nn

from winnowgp.errors import InputError, NotPositiveDefiniteError
from winnowgp.integrations.gpytorch.strategies import InducingStrategy
from winnowgp.linalg import definite_cholesky, half_log_det, solve_lower

# q(u) of any of GPyTorch's variational distributions, read and written in one form.


@final
@dataclass(frozen=True, slots=True)
class GaussianQ:
    """q_f = N(m_f, F_f F_fᵀ) of F functions, in whatever coordinates its user says.

    Factors need not be triangular; those of a point mass are zero.
    """

    mean: Float[Tensor, "F M"]
    factor: Float[Tensor, "F M J"]

    @classmethod
    def of(cls, distribution: Any) -> "GaussianQ":
        """What a variational distribution holds now, its batch in one row."""
        q = distribution()
        mean = q.mean.detach().flatten(0, -2) if q.mean.dim() > 1 else q.mean.detach()[None]
        if isinstance(distribution, DeltaVariationalDistribution):
            return cls(mean, mean.new_zeros(*mean.shape, mean.shape[-1]))
        root = q.lazy_covariance_matrix.cholesky().to_dense().detach()
        return cls(mean, root.expand(*q.mean.shape, -1).reshape(*mean.shape, -1))

    def lower(self) -> Float[Tensor, "F M M"]:
        """The lower-triangular factor with a positive diagonal; by QR, which squares nothing."""
        R = torch.linalg.qr(self.factor.mT).R
        return (R * R.diagonal(dim1=-2, dim2=-1).sign()[..., None]).mT

    def precision(self) -> Float[Tensor, "F M M"]:
        """(F Fᵀ)⁻¹."""
        lower = self.lower()
        inverse = solve_lower(lower, torch.eye(lower.shape[-1]).to(lower))
        return inverse.mT @ inverse

    def divergence(self, *, point: bool) -> float:
        """Σ_f KL[q_f ‖ N(0, I)] in nats; ½‖m‖² of a point mass."""
        total = 0.5 * self.mean.square().sum()
        if not point:
            volume = 2 * half_log_det(self.lower()).sum()
            total = total + 0.5 * (self.factor.square().sum() - self.mean.numel() - volume)
        return total.item()

    def put_into(self, distribution: Any) -> None:
        """Give a variational distribution these values, for another number of points if need be.

        A mean-field one gets the deviations 1/√Λ_mm of the precision Λ: of all diagonal q the
        closest in KL[q ‖ this], and the best one where this is the best full one.
        """
        batch, M = distribution.batch_shape, self.mean.shape[-1]
        distribution.num_inducing_points = M
        mean = self.mean.reshape(*batch, M)
        if isinstance(distribution, DeltaVariationalDistribution):
            return _set(distribution, variational_mean=mean)
        if isinstance(distribution, CholeskyVariationalDistribution):
            root = self.lower().reshape(*batch, M, M)
            return _set(distribution, variational_mean=mean, chol_variational_covar=root)
        precision = self.precision()
        if isinstance(distribution, MeanFieldVariationalDistribution):
            deviation = precision.diagonal(dim1=-2, dim2=-1).rsqrt().reshape(*batch, M)
            return _set(distribution, variational_mean=mean, _variational_stddev=deviation)
        linear = (precision @ self.mean[..., None])[..., 0].reshape(*batch, M)
        if isinstance(distribution, NaturalVariationalDistribution):
            matrix = -0.5 * precision.reshape(*batch, M, M)
            return _set(distribution, natural_vec=linear, natural_mat=matrix)
        lower = self.lower()
        inverse = solve_lower(lower, torch.eye(M).to(lower)).reshape(*batch, M, M)
        return _set(distribution, natural_vec=linear, natural_tril_mat=inverse)

    def towards(self, other: "GaussianQ", rate: float, *, apart: bool) -> "GaussianQ":
        """A part of the way to another q along natural parameters; all of it at rate one.

        Args:
            apart: whether means go along their own line, as where q is a point mass, or where
                means and covariances have points of their own.
        """
        if rate == 1:
            return other
        point = not bool(self.factor.any())
        old, new = (None, None) if point else (self.precision(), other.precision())
        if old is None or new is None:
            return GaussianQ(torch.lerp(self.mean, other.mean, rate), self.factor)
        precision = torch.lerp(old, new, rate)
        root = definite_cholesky(precision)
        eye = torch.eye(root.shape[-1]).to(root)
        # Λ = root rootᵀ has the covariance root⁻ᵀ root⁻¹.
        factor = solve_lower(root, eye).mT
        if apart:
            return GaussianQ(torch.lerp(self.mean, other.mean, rate), factor)
        linear = torch.lerp(old @ self.mean[..., None], new @ other.mean[..., None], rate)
        return GaussianQ((factor @ (factor.mT @ linear))[..., 0], factor)


def _set(module: nn.Module, **values: Tensor) -> None:
    for name, value in values.items():
        old = getattr(module, name)
        fresh = value.detach().to(old).contiguous().clone()
        setattr(module, name, nn.Parameter(fresh, requires_grad=old.requires_grad))


# The coordinates that q(u) is read in: u = μ_Z + L v with K_uu + jitter·I = L Lᵀ.


@dataclass(frozen=True, slots=True)
class PriorBlocks:
    """The user's own prior at the K points and at B rows; a role and a function each.

    The axis of functions has length one where all of them have the same prior and points.
    """

    centre: Float[Tensor, "R #F K"]
    Kuu: Float[Tensor, "R #F K K"]
    Kuf: Float[Tensor, "R #F K B"]
    mean: Float[Tensor, "R #F B"]
    kff: Float[Tensor, "R #F B"]


def prior_blocks(
    found: InducingStrategy, x: Float[Tensor, "*batch B D"], arguments: dict[str, Any]
) -> PriorBlocks:
    """What the user's `forward` says of points and rows together, as GPyTorch asks it."""
    strategy, K = found.strategy, found.K
    rows, points = strategy._expand_inputs(x, strategy.inducing_points)
    prior = strategy.model.forward(torch.cat([points, rows], dim=-2), **arguments)
    covariance = prior.lazy_covariance_matrix
    kff = covariance[..., K:, K:].diagonal(dim1=-1, dim2=-2)
    # GPyTorch adds its jitter to the rows too where q(u) is whitened.
    kff = kff + found.jitter if found.whitened else kff
    return PriorBlocks(
        centre=_rows(found, prior.mean[..., :K], 1),
        Kuu=_rows(found, covariance[..., :K, :K].to_dense(), 2),
        Kuf=_rows(found, covariance[..., :K, K:].to_dense(), 2),
        mean=_rows(found, prior.mean[..., K:], 1),
        kff=_rows(found, kff, 1),
    )


def _rows(found: InducingStrategy, values: Tensor, events: int) -> Tensor:
    """The batch as [roles, functions], or [roles, 1] where it has no functions of its own."""
    split = values[None] if found.roles == 1 else values.movedim(found.role_axis(events), 0)
    event = split.shape[split.dim() - events :]
    batch = split.shape[1 : split.dim() - events]
    if batch.numel() == 1:
        return split.reshape(len(split), 1, *event)
    lead = batch[: len(batch) - len(found.batch)]
    if lead.numel() != 1 or torch.broadcast_shapes(batch, found.batch).numel() != found.F:
        raise InputError(
            f"`{found.name}` must have a q(u) for each of its functions; the prior has a batch of "
            f"shape {list(batch)} and the variational distribution one of {list(found.batch)}. "
            f"Give the distribution `batch_shape=torch.Size({list(batch)})`."
        )
    aligned = split.reshape(len(split), *batch[len(lead) :], *event)
    return aligned.expand(len(split), *found.batch, *event).reshape(len(split), found.F, *event)


@final
@dataclass(frozen=True, slots=True)
class Frame:
    """Coordinates v of all functions of a strategy, in each of its roles."""

    found: InducingStrategy
    centre: Float[Tensor, "R #F K"]
    L: Float[Tensor, "R #F K K"]

    @classmethod
    def of(cls, found: InducingStrategy) -> "Frame":
        """At the strategy's present points."""
        Z = found.strategy.inducing_points
        prior = found.strategy.model.forward(Z)
        covariance = prior.lazy_covariance_matrix.to_dense().detach()
        centre = _rows(found, prior.mean.detach(), 1)
        return cls(found, centre, root(_rows(found, covariance, 2), found.jitter))

    def read(self) -> GaussianQ:
        """The strategy's q, of v."""
        q = GaussianQ.of(self.found.q)
        if self.found.whitened:
            return q
        mean = solve_lower(self.L[0], (q.mean - self.centre[0])[..., None])[..., 0]
        return GaussianQ(mean, solve_lower(self.L[0], q.factor))

    def write(self, q: GaussianQ) -> None:
        """Give the strategy a q of v."""
        if not self.found.whitened:
            mean = self.centre[0] + (self.L[0] @ q.mean[..., None])[..., 0]
            q = GaussianQ(mean, self.L[0] @ q.factor)
        q.put_into(self.found.q)

    def marginal(self, q: GaussianQ, keep: Bool[Tensor, "G K"]) -> GaussianQ:
        """q of the points that are kept in each set, in the coordinates that they have alone.

        m_I = L_I⁻¹ (L m)_I,  F_I = L_I⁻¹ (L F)_I,  L_I L_Iᵀ = (L Lᵀ)_II. Sub-vectors of v itself
        would be another model.
        """
        means = self._kept(0, q.mean[..., None], keep)[..., 0]
        return GaussianQ(means, self._kept(self.found.roles - 1, q.factor, keep))

    def _kept(
        self, role: int, values: Float[Tensor, "F K J"], keep: Bool[Tensor, "G K"]
    ) -> Float[Tensor, "F M J"]:
        chosen = keep[self.found.set_of(role).to(keep.device)]
        L = self.L[role].expand(self.found.F, -1, -1)
        parts = []
        for own, factor, value in zip(chosen, L, values, strict=True):
            rows = factor[own]
            # The triangle of (rows I of L)ᵀ = Q R is that of K_II, without squaring.
            R = torch.linalg.qr(rows.mT).R
            lower = (R * R.diagonal().sign()[:, None]).mT
            parts.append(solve_lower(lower, rows @ value))
        return torch.stack(parts)


def root(Kuu: Float[Tensor, "*batch K K"], jitter: float) -> Float[Tensor, "*batch K K"]:
    """The factor of K_uu + jitter·I, with GPyTorch's jitter."""
    shifted = Kuu + jitter * torch.eye(Kuu.shape[-1], dtype=Kuu.dtype, device=Kuu.device)
    L, info = torch.linalg.cholesky_ex(shifted)
    if bool((info != 0).any()):
        raise NotPositiveDefiniteError(
            f"the covariance of the inducing points could not be factorised with the strategy's "
            f"jitter of {jitter:g}; give the strategy a larger `jitter_val`."
        )
    return L
