"""The collapsed bound of several processes that targets observe in linear combinations.

Q independent processes f_q have kernels and inducing values u_q of their own. Target p of row i is

    y_ip = Σ_q W_pq f_q(x_i) + e_ip,   e_ip ~ N(0, σ²_ip),

so that all inducing values and all targets are jointly Gaussian. With r_ip = 1/σ²_ip, zero where a
target is missing, the log-likelihood of a row is a quadratic form in its Q values f(x_i) alone:

    Σ_p log N(y_ip | W_p f, σ²_ip) = −½ fᵀ A_i f + b_iᵀ f + …,
    A_i = Wᵀ diag(r_i) W,   b_i = Wᵀ diag(r_i) y_i

Stack the whitened cross-covariances V_q = L_q⁻¹ K_qf of the processes. The moments of `Moments` are

    C_qs = V_q diag(A_·qs) V_sᵀ,   D_q = V_q b_·q,
    Σ w k = Σ_iq A_iqq k_q(x_i, x_i),   Σ w y² = Σ_ip r_ip y_ip²,

with the number of inducing points of all processes, and none of the N P targets, as their size. So
every collapsed bound, marginal gain and search of one process holds for several: a candidate of any
process competes with those of all others, in nats.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log, pi

import torch
from jaxtyping import Float
from torch import Tensor

from winnowgp.bounds.collapsed import Moments
from winnowgp.linalg import solve_lower


@dataclass(frozen=True, slots=True)
class MixedTargets:
    """What the targets of some rows say about Q processes; A and b of the module's equations."""

    A: Float[Tensor, "#N Q Q"]
    """One matrix for all rows if they have equal noise, weights and observed targets."""
    b: Float[Tensor, "N Q"]
    square: Float[Tensor, ""]
    """Σ r y²."""
    constant: Float[Tensor, ""]
    """Σ ½ log(r/2π) over observed targets; a row of weight w counts as w rows."""
    count: float
    """Number of observed targets, each times the weight of its row."""

    @classmethod
    def of(
        cls,
        Y: Float[Tensor, "N P"],
        *,
        mixing: Float[Tensor, "P Q"],
        noise: Float[Tensor, "#N P"],
        weights: Float[Tensor, " N"] | None = None,
    ) -> "MixedTargets":
        """Return A and b of each row, differentiable in `mixing` and `noise`; O(N P Q²).

        Args:
            Y: targets; NaN where they are missing.
            noise: variances, one row for all or one each.
            weights: weights of the rows, if there are any.
        """
        missing = torch.isnan(Y)
        counts = (~missing).to(Y)
        if weights is not None:
            counts = weights[:, None] * counts
        r = counts / noise
        filled = torch.where(missing, 0.0, Y)
        equal = len(noise) == 1 and weights is None and not bool(missing.any())
        return cls(
            A=torch.einsum("np,pq,ps->nqs", r[:1] if equal else r, mixing, mixing),
            b=(r * filled) @ mixing,
            square=(r * filled.square()).sum(),
            constant=-0.5 * (counts * (log(2 * pi) + noise.log())).sum(),
            count=float(counts.sum()),
        )

    @classmethod
    def of_sites(
        cls,
        linear: Float[Tensor, "N P"],
        precision: Float[Tensor, "N P"],
        *,
        mixing: Float[Tensor, "P Q"],
    ) -> "MixedTargets":
        """Return A and b of Gaussian sites exp(λ g − ½ w g²) of the mixtures g = W f.

        Their sum has no constant. Sites of missing targets are zero.
        """
        zero = precision.new_zeros(())
        return cls(
            A=torch.einsum("np,pq,ps->nqs", precision, mixing, mixing),
            b=linear @ mixing,
            square=zero,
            constant=zero,
            count=float(len(linear)),
        )

    def detach(self) -> "MixedTargets":
        """Return the same numbers without their history."""
        return MixedTargets(
            A=self.A.detach(),
            b=self.b.detach(),
            square=self.square.detach(),
            constant=self.constant.detach(),
            count=self.count,
        )


def mixed_moments(
    L: Sequence[Float[Tensor, "_ _"]],
    Kuf: Sequence[Float[Tensor, "_ N"]],
    *,
    kff: Float[Tensor, "Q N"],
    targets: MixedTargets,
) -> Moments:
    """Return the moments of all inducing values, one process after another; O(N K²).

    Args:
        L: Cholesky factor of the prior covariance of each process' inducing values.
        Kuf: cross-covariances of each process.
        kff: prior variances of the rows in each process.
        targets: the targets of the rows.
    """
    V, A = [solve_lower(*pair) for pair in zip(L, Kuf, strict=True)], targets.A
    blocks: dict[tuple[int, int], Tensor] = {}
    for q in range(len(V)):
        for s in range(q + 1):
            if len(A) == 1:
                blocks[q, s] = A[0, q, s] * (V[q] @ V[s].mT)
            else:
                blocks[q, s] = (V[q] * A[:, q, s]) @ V[s].mT
            blocks[s, q] = blocks[q, s].mT
    C = torch.cat([torch.cat([blocks[q, s] for s in range(len(V))], 1) for q in range(len(V))])
    return Moments(
        C=C,
        D=torch.cat([v @ b for v, b in zip(V, targets.b.mT, strict=True)])[:, None],
        square=targets.square,
        diagonal=(A.diagonal(dim1=1, dim2=2).mT * kff).sum(),
        constant=targets.constant,
        N=targets.count,
    )
