"""E log Φ(s f) for a Gaussian f and a sign s, with its derivatives by hand.

Over nodes ε_t of N(0, 1) with weights w_t, z_t = s (μ + σ ε_t) and h = φ/Φ,

    E = Σ_t w_t log Φ(z_t),   ∂E/∂μ = s Σ_t w_t h(z_t),   ∂E/∂σ² = s Σ_t w_t ε_t h(z_t) / (2σ).
"""

from math import log, pi, sqrt
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor


def probit_expectation(
    sign: Float[Tensor, " N"],
    mean: Float[Tensor, " N"],
    variance: Float[Tensor, " N"],
    *,
    nodes: Float[Tensor, " T"],
    weights: Float[Tensor, " T"],
) -> Float[Tensor, " N"]:
    """E log Φ(s f) of each row in nats, once differentiable in mean and variance."""
    nats: Any = _Expectation.apply(mean, variance, sign, nodes, weights)
    return nats


class _Expectation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, mean: Tensor, variance: Tensor, sign: Tensor, nodes: Tensor, weights: Tensor
    ) -> Tensor:
        deviation = variance.clamp_min(torch.finfo(variance.dtype).tiny).sqrt()
        z = torch.addcmul(sign * mean, nodes[:, None], sign * deviation)
        # erfcx(−z/√2) = 2 Φ(z) e^{z²/2}, which overflows where log Φ is nothing anyway.
        z.clamp_max_(sqrt(1.6 * log(torch.finfo(z.dtype).max)))
        scaled = torch.special.erfcx(z * -sqrt(0.5))
        nats = torch.addcmul(scaled.log().sub_(log(2)), z, z, value=-0.5)
        if any(ctx.needs_input_grad):
            # h = φ/Φ
            h = scaled.reciprocal_().mul_(sqrt(2 / pi))
            level, tilt = torch.stack([weights, weights * nodes]) @ h
            # A variance of zero has a square root without a derivative.
            curvature = torch.where(variance > 0, 0.5 * sign * tilt / deviation, 0.0)
            ctx.save_for_backward(sign * level, curvature)
        return weights @ nats

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *output: Tensor
    ) -> tuple[Tensor | None, ...]:
        slope, curvature = ctx.saved_tensors
        return output[0] * slope, output[0] * curvature, None, None, None
