"""Moments for targets that nobody has seen yet."""

from dataclasses import replace

import torch

from winnowgp.bounds.moments import Moments


def prior_moments(moments: Moments) -> Moments:
    """Moments whose bounds are K times those expected of targets drawn from the prior.

    A bound depends on targets through D Dᵀ and Σ w y² alone. For y ~ N(0, Q_** + W⁻¹), the prior
    seen through all K candidates, with C = V W Vᵀ = U diag(s) Uᵀ,

        E[D Dᵀ] = V W (VᵀV + W⁻¹) W Vᵀ = C² + C,   E[Σ w y²] = tr C + N.

    The K columns of √K U diag(s (s + 1))^½ are such a D for K outputs at once, so that every
    collapsed bound of every subset, divided by K, is exactly its expectation; O(K³).

    Args:
        moments: of the rows, whatever their targets were.
    """
    K = len(moments.C)
    s, U = torch.linalg.eigh(moments.C)
    s = s.clamp_min(0)  # but for rounding they are not negative
    return replace(
        moments,
        D=U * (K * s * (s + 1)).sqrt(),
        square=K * (moments.C.diagonal().sum() + moments.N),
    )
