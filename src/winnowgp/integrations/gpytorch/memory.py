"""What a GPyTorch model remembers of earlier rows: a Gaussian function of its inducing values."""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from winnowgp.bounds.streaming import matches
from winnowgp.integrations.gpytorch.distribution import GaussianQ, Whitening


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
