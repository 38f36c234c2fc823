"""The number of points in a random subset: the Poisson binomial distribution, exactly."""

import torch
from jaxtyping import Float
from torch import Tensor


def poisson_binomial(logits: Float[Tensor, " K"]) -> Float[Tensor, " K+1"]:
    """Distribution of `|Z| = Σ_k b_k` for independent `b_k ~ Bernoulli(λ_k)`, λ = sigmoid(logits).

    The generating function is `Π_k (1 − λ_k + λ_k t)`. Its coefficients are found by multiplying
    the factors in pairs, then the products in pairs, and so on: O(K²) operations in log₂ K
    vectorised steps, sums of positive terms throughout, so that small probabilities keep their
    relative accuracy (a Fourier transform would lose it). Differentiable in `logits`.

    >>> poisson_binomial(torch.zeros(2, dtype=torch.float64))
    tensor([0.2500, 0.5000, 0.2500], dtype=torch.float64)
    """
    return count_distribution(torch.sigmoid(-logits), torch.sigmoid(logits))


def count_distribution(off: Float[Tensor, " K"], on: Float[Tensor, " K"]) -> Float[Tensor, " K+1"]:
    """Coefficients of Π_k (off_k + on_k t); the two are probabilities that add to one."""
    K = on.shape[0]
    polynomials = torch.stack([off, on], dim=-1)
    # A factor of one (λ = 0) more on the right changes no count: pad to a power of two.
    missing = (1 << max(K - 1, 0).bit_length()) - K
    one = polynomials.new_tensor([[1.0, 0.0]]).expand(missing, 2)
    polynomials = torch.cat([polynomials, one])
    while polynomials.shape[0] > 1:
        polynomials = _products(polynomials[0::2], polynomials[1::2])
    return polynomials[0, : K + 1]


def _products(a: Float[Tensor, "n d"], b: Float[Tensor, "n d"]) -> Float[Tensor, "n e"]:
    """Row-wise polynomial products: `out_t = Σ_s a_s b_{t−s}`."""
    d = a.shape[1]
    windows = torch.nn.functional.pad(b, (d - 1, d - 1)).unfold(1, d, 1)
    return (windows @ a.flip(1)[:, :, None])[..., 0]
