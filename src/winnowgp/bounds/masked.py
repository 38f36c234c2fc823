"""Appendix B.1 of the paper: a bound on all K candidates that weights can switch off smoothly."""

import torch
from jaxtyping import Float
from torch import Tensor

from winnowgp.bounds.collapsed import collapsed_bound
from winnowgp.typing import Nats, Noise, Weights


def masked_blocks(
    Kuu: Float[Tensor, "K K"], Kuf: Float[Tensor, "K N"], weights: Weights
) -> tuple[Float[Tensor, "S K K"], Float[Tensor, "S K N"]]:
    """Blocks of the prior in which candidate k is weighted by b_k ∈ [0, 1].

        κ̂(z_j, z_k) = b_j b_k κ(z_j, z_k) for j ≠ k,   κ̂(z_k, z_k) = b_k (κ(z_k, z_k) − s) + s,
        κ̂(z_k, x) = b_k κ(z_k, x)

    A switched-off candidate becomes an independent N(0, s). The paper has s = 1; the mean prior
    variance serves any kernel, and with weights of 0 and 1 every s gives the same bound. The result
    stays positive definite, since (1 − b)(b κ + s) ≥ 0 is added to the diagonal of b bᵀ ∘ K.
    """
    scaled = weights[:, :, None] * weights[:, None, :] * Kuu
    return scaled + added_variance(Kuu, weights), weights[:, :, None] * Kuf


def added_variance(Kuu: Float[Tensor, "K K"], weights: Weights) -> Float[Tensor, "S K K"]:
    """(1 − b)(b κ + s) on the diagonal: what weighting adds to b bᵀ ∘ K."""
    k = Kuu.diagonal()
    return torch.diag_embed((1 - weights) * (weights * k + k.mean()))


def masked_bound(
    Kuu: Float[Tensor, "K K"],
    Kuf: Float[Tensor, "K N"],
    *,
    weights: Weights,
    kff: Float[Tensor, " N"],
    Y: Float[Tensor, "N P"],
    noise: Noise,
) -> Nats:
    """L̂(Z*; b): the collapsed bound under the weighted prior.

    With b ∈ {0, 1}^K it is exactly L(Z); in between it is smooth, and the relaxed gradient
    differentiates it. Costs O(S N K²) whatever the weights.
    """
    return collapsed_bound(*masked_blocks(Kuu, Kuf, weights), kff=kff, Y=Y, noise=noise)
