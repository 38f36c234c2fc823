"""q(u) of any of GPyTorch's variational distributions, read and written in one form."""

from dataclasses import dataclass
from typing import Any, final

import torch
from gpytorch.variational import (
    CholeskyVariationalDistribution,
    DeltaVariationalDistribution,
    MeanFieldVariationalDistribution,
    NaturalVariationalDistribution,
)
from jaxtyping import Float
from torch import Tensor, nn

from winnowgp.linalg import definite_cholesky, half_log_det, solve_lower


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
