"""Dense reference implementations that the library is tested against."""

import math

import torch
from torch import Tensor
from torch.distributions import MultivariateNormal, kl_divergence


def log_normal(Y: Tensor, covariance: Tensor) -> Tensor:
    """Σ_p log N(y_p | 0, covariance)."""
    zero = torch.zeros(Y.shape[0], dtype=Y.dtype)
    return MultivariateNormal(zero, covariance).log_prob(Y.mT).sum()


def explained(Kuu: Tensor, Kuf: Tensor) -> Tensor:
    """Q_ff = K_fu K_uu⁻¹ K_uf."""
    if Kuu.shape[0] == 0:
        return torch.zeros(Kuf.shape[1], Kuf.shape[1], dtype=Kuf.dtype)
    return Kuf.mT @ torch.linalg.solve(Kuu, Kuf)


def collapsed(Kuu: Tensor, Kuf: Tensor, Kff: Tensor, Y: Tensor, noise: Tensor) -> Tensor:
    """The collapsed bound through N by N matrices."""
    Q, Sigma = explained(Kuu, Kuf), torch.diag(noise.expand(Y.shape[0]))
    return log_normal(Y, Q + Sigma) - Y.shape[1] / 2 * ((Kff - Q) @ Sigma.inverse()).trace()


def optimal_q(Kuu: Tensor, Kuf: Tensor, Y: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """The optimal q(u) of section 2.2 of the paper, whitened; outputs share one factor."""
    weighted = Kuf / noise.expand(Y.shape[0])
    A = torch.linalg.inv(Kuu + weighted @ Kuf.mT)
    return whiten(Kuu, Kuu @ A @ weighted @ Y, (Kuu @ A @ Kuu)[None])


def gaussian_expected_log_prob(Y: Tensor, mean: Tensor, variance: Tensor, noise: Tensor) -> Tensor:
    """E_q(f)[log N(y | f, σ²)] = log N(y | mean, σ²) − variance / (2 σ²)."""
    noise = noise.expand(Y.shape[0])[:, None]
    return -0.5 * (math.log(2 * math.pi) + noise.log() + ((Y - mean) ** 2 + variance) / noise)


def upper(Kuu: Tensor, Kuf: Tensor, Kff: Tensor, Y: Tensor, noise: Tensor) -> Tensor:
    """The upper bound of Titsias (2014) through N by N matrices."""
    N, P = Y.shape
    Q, Sigma = explained(Kuu, Kuf), torch.diag(noise.expand(N))
    widened = Q + Sigma + (Kff - Q).trace() * torch.eye(N, dtype=Y.dtype)
    quadratic = (Y * torch.linalg.solve(widened, Y)).sum()
    return -0.5 * (N * P * math.log(2 * math.pi) + P * torch.logdet(Q + Sigma) + quadratic)


def whiten(Kuu: Tensor, mean_u: Tensor, cov_u: Tensor) -> tuple[Tensor, Tensor]:
    """Whitened mean and a factor of the whitened covariance of q(u) = N(mean_u, cov_u[p])."""
    L = torch.linalg.cholesky(Kuu)
    inverse = L.inverse()
    return inverse @ mean_u, torch.linalg.cholesky(inverse @ cov_u @ inverse.mT)


def uncollapsed(
    Kuu: Tensor, Kuf: Tensor, Kff: Tensor, Y: Tensor, noise: Tensor, mean_u: Tensor, cov_u: Tensor
) -> Tensor:
    """The definition in u-space: N×N covariances and MultivariateNormal's own KL."""
    A = Kuf.mT @ Kuu.inverse()
    prior = MultivariateNormal(torch.zeros_like(mean_u[:, 0]), Kuu)
    total = torch.zeros((), dtype=Y.dtype)
    for p in range(Y.shape[1]):
        mean = A @ mean_u[:, p]
        variance = (Kff - A @ (Kuu - cov_u[p]) @ A.mT).diagonal()
        for i in range(Y.shape[0]):
            s2 = noise.expand(Y.shape[0])[i]
            error = (Y[i, p] - mean[i]) ** 2
            total = total - 0.5 * (torch.log(2 * math.pi * s2) + (error + variance[i]) / s2)
        total = total - kl_divergence(MultivariateNormal(mean_u[:, p], cov_u[p]), prior)
    return total
