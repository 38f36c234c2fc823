"""Variational distributions of GPyTorch in whitened coordinates, pruned models, and what a
model remembers of earlier rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, final

import torch
from gpytorch.models import GP
from gpytorch.variational import (
    CholeskyVariationalDistribution,
    DeltaVariationalDistribution,
    MeanFieldVariationalDistribution,
    NaturalVariationalDistribution,
)
from jaxtyping import Bool, Float
from torch import Tensor, nn

from winnowgp.bounds.streaming import matches
from winnowgp.errors import InputError, NotPositiveDefiniteError
from winnowgp.integrations.gpytorch.strategies import (
    InducingStrategy,
    copy_module,
    inducing_strategies,
)
from winnowgp.linalg import definite_cholesky, half_log_det, solve_lower

Same = TypeVar("Same", bound=GP)

"""The class of model that a function takes and returns."""


@final
@dataclass(frozen=True, slots=True)
class GaussianQ:
    """q_f = N(m_f, F_f F_fᵀ) of F functions, in any coordinates.

    Factors need not be triangular; those of a point mass are zero.
    """

    mean: Float[Tensor, "F M"]
    factor: Float[Tensor, "F M J"]

    @classmethod
    def of(cls, distribution: Any) -> "GaussianQ":
        """Return the current values of a variational distribution, with its batch flattened."""
        q = distribution()
        mean = q.mean.detach().flatten(0, -2) if q.mean.dim() > 1 else q.mean.detach()[None]
        if isinstance(distribution, DeltaVariationalDistribution):
            return cls(mean, mean.new_zeros(*mean.shape, mean.shape[-1]))
        root = q.lazy_covariance_matrix.cholesky().to_dense().detach()
        return cls(mean, root.expand(*q.mean.shape, -1).reshape(*mean.shape, -1))

    def lower(self) -> Float[Tensor, "F M M"]:
        """Return the lower-triangular factor with a positive diagonal, by QR, without squaring."""
        R = torch.linalg.qr(self.factor.mT).R
        return (R * R.diagonal(dim1=-2, dim2=-1).sign()[..., None]).mT

    def precision(self) -> Float[Tensor, "F M M"]:
        """Return (F Fᵀ)⁻¹."""
        lower = self.lower()
        inverse = solve_lower(lower, torch.eye(lower.shape[-1]).to(lower))
        return inverse.mT @ inverse

    def divergence(self, *, point: bool) -> float:
        """Return Σ_f KL[q_f ‖ N(0, I)] in nats; ½‖m‖² of a point mass."""
        total = 0.5 * self.mean.square().sum()
        if not point:
            volume = 2 * half_log_det(self.lower()).sum()
            total = total + 0.5 * (self.factor.square().sum() - self.mean.numel() - volume)
        return total.item()

    def write_to(self, distribution: Any) -> None:
        """Write these values to a variational distribution, whose number of points may change.

        A mean-field distribution gets the deviations 1/√Λ_mm of the precision Λ: of all diagonal q
        it minimises KL[q ‖ this], and is optimal if this is the optimal full one.
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
        """Interpolate natural parameters between this q (rate 0) and another one (rate 1).

        Args:
            apart: whether to interpolate means separately, for point masses and for strategies
                whose means and covariances have points of their own.
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


@dataclass(frozen=True, slots=True)
class PriorBlocks:
    """The model's prior at the K inducing points and at B rows, for each role and function.

    The axis of functions has length one if all of them have the same prior and points.
    """

    centre: Float[Tensor, "R #F K"]
    Kuu: Float[Tensor, "R #F K K"]
    Kuf: Float[Tensor, "R #F K B"]
    mean: Float[Tensor, "R #F B"]
    kff: Float[Tensor, "R #F B"]


def prior_blocks(
    inducing: InducingStrategy, x: Float[Tensor, "*batch B D"], arguments: dict[str, Any]
) -> PriorBlocks:
    """Evaluate the model's `forward` at points and rows together, as GPyTorch does."""
    strategy, K = inducing.strategy, inducing.K
    rows, points = strategy._expand_inputs(x, strategy.inducing_points)
    prior = strategy.model.forward(torch.cat([points, rows], dim=-2), **arguments)
    covariance = prior.lazy_covariance_matrix
    kff = covariance[..., K:, K:].diagonal(dim1=-1, dim2=-2)
    # GPyTorch adds its jitter to the rows too if q(u) is whitened.
    kff = kff + inducing.jitter if inducing.whitened else kff
    return PriorBlocks(
        centre=_rows(inducing, prior.mean[..., :K], 1),
        Kuu=_rows(inducing, covariance[..., :K, :K].to_dense(), 2),
        Kuf=_rows(inducing, covariance[..., :K, K:].to_dense(), 2),
        mean=_rows(inducing, prior.mean[..., K:], 1),
        kff=_rows(inducing, kff, 1),
    )


def _rows(inducing: InducingStrategy, values: Tensor, events: int) -> Tensor:
    """Reshape the batch to [roles, functions], or [roles, 1] if functions share the values."""
    split = values[None] if inducing.roles == 1 else values.movedim(inducing.role_axis(events), 0)
    event = split.shape[split.dim() - events :]
    batch = split.shape[1 : split.dim() - events]
    if batch.numel() == 1:
        return split.reshape(len(split), 1, *event)
    lead = batch[: len(batch) - len(inducing.batch)]
    if lead.numel() != 1 or torch.broadcast_shapes(batch, inducing.batch).numel() != inducing.F:
        raise InputError(
            f"`{inducing.name}` must have a q(u) for each of its functions; the prior has a batch "
            f"of shape {list(batch)} and the variational distribution one of "
            f"{list(inducing.batch)}. Give the distribution "
            f"`batch_shape=torch.Size({list(batch)})`."
        )
    aligned = split.reshape(len(split), *batch[len(lead) :], *event)
    return aligned.expand(len(split), *inducing.batch, *event).reshape(
        len(split), inducing.F, *event
    )


@final
@dataclass(frozen=True, slots=True)
class Whitening:
    """Whitened coordinates u = μ_Z + L v, K_uu + jitter·I = L Lᵀ, of a strategy's functions."""

    inducing: InducingStrategy
    centre: Float[Tensor, "R #F K"]
    L: Float[Tensor, "R #F K K"]

    @classmethod
    def of(cls, inducing: InducingStrategy) -> "Whitening":
        """Return the coordinates at the strategy's current points."""
        Z = inducing.strategy.inducing_points
        prior = inducing.strategy.model.forward(Z)
        covariance = prior.lazy_covariance_matrix.to_dense().detach()
        centre = _rows(inducing, prior.mean.detach(), 1)
        return cls(inducing, centre, root(_rows(inducing, covariance, 2), inducing.jitter))

    def read(self) -> GaussianQ:
        """Return the strategy's q, of v."""
        q = GaussianQ.of(self.inducing.q)
        if self.inducing.whitened:
            return q
        mean = solve_lower(self.L[0], (q.mean - self.centre[0])[..., None])[..., 0]
        return GaussianQ(mean, solve_lower(self.L[0], q.factor))

    def write(self, q: GaussianQ) -> None:
        """Set the strategy's q to a q of v."""
        if not self.inducing.whitened:
            mean = self.centre[0] + (self.L[0] @ q.mean[..., None])[..., 0]
            q = GaussianQ(mean, self.L[0] @ q.factor)
        q.write_to(self.inducing.q)

    def marginal(self, q: GaussianQ, keep: Bool[Tensor, "G K"]) -> GaussianQ:
        """Return the marginal q of the selected points of each set, in their own coordinates.

        m_I = L_I⁻¹ (L m)_I,  F_I = L_I⁻¹ (L F)_I,  L_I L_Iᵀ = (L Lᵀ)_II. A sub-vector of v
        would be a different marginal.
        """
        means = self._marginal(0, q.mean[..., None], keep)[..., 0]
        return GaussianQ(means, self._marginal(self.inducing.roles - 1, q.factor, keep))

    def _marginal(
        self, role: int, values: Float[Tensor, "F K J"], keep: Bool[Tensor, "G K"]
    ) -> Float[Tensor, "F M J"]:
        masks = keep[self.inducing.set_of(role).to(keep.device)]
        L = self.L[role].expand(self.inducing.F, -1, -1)
        marginals = []
        for mask, factor, value in zip(masks, L, values, strict=True):
            rows = factor[mask]
            # The triangle of (rows I of L)ᵀ = Q R is that of K_II, without squaring.
            R = torch.linalg.qr(rows.mT).R
            lower = (R * R.diagonal().sign()[:, None]).mT
            marginals.append(solve_lower(lower, rows @ value))
        return torch.stack(marginals)


def root(Kuu: Float[Tensor, "*batch K K"], jitter: float) -> Float[Tensor, "*batch K K"]:
    """Return the Cholesky factor of K_uu + jitter·I, with GPyTorch's jitter."""
    shifted = Kuu + jitter * torch.eye(Kuu.shape[-1], dtype=Kuu.dtype, device=Kuu.device)
    L, info = torch.linalg.cholesky_ex(shifted)
    if bool((info != 0).any()):
        raise NotPositiveDefiniteError(
            "the covariance of the inducing points could not be factorised with the strategy's "
            f"jitter of {jitter:g}; give the strategy a larger `jitter_val`."
        )
    return L


def prune_model(model: Same, keep: Sequence[Bool[Tensor, "_ _"]]) -> Same:
    """Return a copy of a model with some of its inducing points and their marginal q(u).

    Args:
        keep: `[G K]` for each strategy of the model: which points of each of its sets to keep, the
            same number in each. If it is none, the functions of the strategy follow the prior.
    """
    smaller = copy_module(model)
    for inducing, mask in zip(inducing_strategies(smaller), keep, strict=True):
        if not bool(mask.any()):
            _reset_to_prior(inducing)
            continue
        whitening = Whitening.of(inducing)
        q = whitening.marginal(whitening.read(), mask)
        set_points(inducing, selected_points(inducing, mask))
        Whitening.of(inducing).write(q)
    return smaller


def selected_points(
    inducing: InducingStrategy, keep: Bool[Tensor, "G K"]
) -> Float[Tensor, "G M D"]:
    """Return the locations of the selected points of each set."""
    return torch.stack([Z[mask] for Z, mask in zip(inducing.locations, keep, strict=True)])


def set_points(inducing: InducingStrategy, sets: Float[Tensor, "G M D"]) -> None:
    """Set the locations of a strategy; its q(u) must be set afterwards."""
    strategy = inducing.strategy
    old = strategy.inducing_points
    fresh = inducing.stacked(sets).to(old).contiguous().clone()
    learnt = isinstance(old, nn.Parameter)
    # Locations that are not learnt are a buffer.
    strategy.inducing_points = (
        nn.Parameter(fresh, requires_grad=old.requires_grad) if learnt else fresh
    )
    strategy._clear_cache()


def _reset_to_prior(inducing: InducingStrategy) -> None:
    """Keep one point whose q(u) is the prior, so that q(f) is the prior everywhere."""
    set_points(inducing, inducing.locations[:, :1])
    q = CholeskyVariationalDistribution(1, batch_shape=inducing.batch)
    inducing.strategy._variational_distribution = q.to(inducing.strategy.inducing_points)
    ones = inducing.strategy.inducing_points.new_ones(inducing.F, 1, 1)
    whitening = Whitening.of(inducing)
    whitening.write(GaussianQ(torch.zeros_like(ones[..., 0]), ones))


@final
@dataclass(frozen=True, slots=True)
class EarlierRows:
    """The expected log-likelihood of earlier rows, given the values at the candidates.

        Σ_f D_fᵀ v_f − ½ v_fᵀ C_f v_f + constant,   u_f = mean + L_f v_f

    The optimal q(v) of these rows alone is N(m, S) with C = S⁻¹ − I and D = S⁻¹ m, so that q says
    all that is remembered (`bounds.streaming`). Kernel and mean must not change.
    """

    Z: Float[Tensor, "K D"]
    L: Float[Tensor, "F K K"]
    C: Float[Tensor, "F K K"]
    D: Float[Tensor, "F K"]
    constant: float
    N: int | float
    """Number of these rows."""

    @classmethod
    def of(cls, q: GaussianQ, wider: Whitening, *, bound: float, N: int | float) -> "EarlierRows":
        """Return the rows of an optimal q(v) of some points, which are the first candidates.

        The factor of the covariance of the first points is the first block of that of all, so that
        C and D have zeros for the others.

        Args:
            q: q(v) of the first M candidates, in their own whitened coordinates.
            wider: coordinates of all candidates.
            bound: ELBO of q, in nats.
            N: number of rows.
        """
        M, K = q.mean.shape[1], wider.inducing.K
        U, s, _ = torch.linalg.svd(q.factor)
        # Zero where q is as wide as the prior.
        C = (U * (1 / s.square() - 1).clamp_min(0)[:, None, :]) @ U.mT
        D = q.mean + (C @ q.mean[..., None])[..., 0]
        padded = C.new_zeros(len(C), K, K), D.new_zeros(len(D), K)
        padded[0][:, :M, :M], padded[1][:, :M] = C, D
        L = wider.L[0].expand(len(C), -1, -1)
        rows = cls(wider.inducing.locations[0], L, *padded, 0.0, N)
        own = bound + q.divergence(point=False) - _expected(C, D, q)
        return cls(rows.Z, rows.L, rows.C, rows.D, own, N)

    def at(
        self, points: Float[Tensor, "M D"]
    ) -> tuple[Float[Tensor, "F M M"], Float[Tensor, "F M"], Float[Tensor, " F"]]:
        """Return C and D for some of the candidates, and tr C of what these leave open; O(K² M).

        With (rows I of L)ᵀ = Q R, v given v_I has the mean Q v_I and the covariance I − Q Qᵀ.
        """
        Q, R = torch.linalg.qr(self.L[:, matches(self.Z, points)].mT)
        Q = Q * R.diagonal(dim1=-2, dim2=-1).sign()[:, None, :]
        C = Q.mT @ self.C @ Q
        trace = self.C.diagonal(dim1=-2, dim2=-1).sum(-1) - C.diagonal(dim1=-2, dim2=-1).sum(-1)
        return C, (Q.mT @ self.D[..., None])[..., 0], trace.clamp_min(0)

    def expected(self, whitening: Whitening) -> float:
        """Return the expected log-likelihood under the q of a strategy, in nats."""
        C, D, trace = self.at(whitening.inducing.locations[0])
        return self.constant + _expected(C, D, whitening.read()) - 0.5 * trace.sum().item()


def _expected(C: Float[Tensor, "F M M"], D: Float[Tensor, "F M"], q: GaussianQ) -> float:
    """Return Σ_f E_q[D_fᵀv − ½ vᵀC_f v]."""
    m = q.mean[..., None]
    square = (m * (C @ m)).sum() + (q.factor * (C @ q.factor)).sum()
    return ((D * q.mean).sum() - 0.5 * square).item()
