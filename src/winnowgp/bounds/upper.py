"""An upper bound on the log evidence: how much there is still to gain."""

from math import log, pi

from jaxtyping import Float
from torch import Tensor

from winnowgp.bounds.projection import project
from winnowgp.typing import Noise


def upper_bound(
    Kuu: Float[Tensor, "*batch M M"],
    Kuf: Float[Tensor, "*batch M N"],
    *,
    kff: Float[Tensor, " N"],
    Y: Float[Tensor, "N P"],
    noise: Noise,
) -> Float[Tensor, "*batch"]:
    """U(Z) = −½ Σ_p [N log 2π + log |Q_ff + Σ| + y_pᵀ (Q_ff + Σ + t)⁻¹ y_p],  t = tr(K_ff − Q_ff).

    Titsias (2014): dropping K_ff − Q_ff ≥ 0 can only shrink the determinant, and t is at least its
    largest eigenvalue. Equal to the evidence when Z = X; loose where t exceeds the noise. O(N M²).

    Returns: nats, summed over rows and outputs, one number a batch element.
    """
    N, P = Y.shape
    variance = noise.expand(N)
    narrow = project(Kuu, Kuf, Y, variance)
    t = (kff - narrow.explained_variance()).clamp_min(0).sum(-1)
    widened = project(Kuu, Kuf, Y, variance + t[..., None])
    return -0.5 * (N * P * log(2 * pi) + P * narrow.log_det + widened.fit)
