"""Small tables with uncertain inputs, and their dense oracles."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from gpytorch.kernels import Kernel, LinearKernel, RBFKernel, ScaleKernel
from torch import Tensor

from winnowgp.data import MaskedMatrix
from winnowgp.models import LatentVariableGP
from winnowgp.models.gplvm import Latents


@dataclass(frozen=True)
class Latent:
    mean: Tensor
    variance: Tensor
    Z: Tensor
    Y: Tensor
    kernel: Kernel

    def k(self, A: Tensor, B: Tensor) -> Tensor:
        return self.kernel(A, B).to_dense().detach()

    def model(self, *, noise: float | Tensor = 0.3) -> LatentVariableGP:
        latents = Latents(self.mean, variance=self.variance)
        return LatentVariableGP(self.kernel, latents, candidates=self.Z, noise=noise)

    @property
    def table(self) -> MaskedMatrix:
        return MaskedMatrix.of(self.Y)


def rbf() -> Kernel:
    kernel = ScaleKernel(RBFKernel(ard_num_dims=2)).double()
    kernel.outputscale = 1.7
    kernel.base_kernel.lengthscale = torch.tensor([0.8, 1.4])
    return kernel


def linear() -> Kernel:
    kernel = ScaleKernel(LinearKernel(ard_num_dims=2)).double()
    kernel.outputscale = 0.6
    kernel.base_kernel.variance = torch.tensor([[0.7, 2.0]])
    return kernel


def latent(
    kernel: Kernel | None = None, *, N: int = 7, M: int = 5, P: int = 3, missing: bool = False
) -> Latent:
    """Q = 2; M = 2 points at most for the linear kernel, whose prior has rank 2."""
    g = torch.Generator().manual_seed(3)
    mean = torch.randn(N, 2, generator=g, dtype=torch.float64)
    variance = 0.05 + torch.rand(N, 2, generator=g, dtype=torch.float64)
    Z = 1.5 * torch.randn(M, 2, generator=g, dtype=torch.float64)
    Y = torch.sin(mean @ torch.randn(2, P, generator=g, dtype=torch.float64))
    if missing:
        Y[0, 0] = Y[2, 1] = Y[3, 1] = float("nan")
    return Latent(mean, variance, Z, Y, rbf() if kernel is None else kernel)


def quadrature(mean: Tensor, variance: Tensor, nodes: int = 40) -> tuple[Tensor, Tensor]:
    """Nodes `[T² 2]` and weights of a row's q(x) in two dimensions."""
    x, w = np.polynomial.hermite_e.hermegauss(nodes)
    grid = torch.cartesian_prod(torch.from_numpy(x), torch.from_numpy(x))
    weights = torch.cartesian_prod(torch.from_numpy(w), torch.from_numpy(w)).prod(1)
    return mean + variance.sqrt() * grid, weights / weights.sum()


def dense_bound(
    problem: Latent, *, y: Tensor, rows: Tensor, noise: float, jitter: float = 0.0
) -> Tensor:
    """One column's part by the definition: log ∫ N(u | 0, K) exp E_q(x)p(f|u)[log p(y | f)] du.

    The exponent is quadratic in u; its coefficients are sums over quadrature nodes of each row.
    """
    M = len(problem.Z)
    K = problem.k(problem.Z, problem.Z) + jitter * torch.eye(M, dtype=torch.float64)
    inverse = K.inverse()
    A, b = inverse.clone(), torch.zeros(M, dtype=torch.float64)
    constant = torch.zeros((), dtype=torch.float64)
    for i in torch.nonzero(rows)[:, 0]:
        X, w = quadrature(problem.mean[i], problem.variance[i])
        Kuf = problem.k(problem.Z, X)
        psi2 = (Kuf * w) @ Kuf.mT
        A += inverse @ psi2 @ inverse / noise
        b += inverse @ (Kuf @ w) * y[i] / noise
        prior = problem.kernel(X, diag=True).detach() @ w
        open_variance = prior - (inverse @ psi2).trace()
        constant -= 0.5 * (math.log(2 * math.pi * noise) + (y[i] ** 2 + open_variance) / noise)
    volume = torch.logdet(K) + torch.logdet(A)
    return constant - 0.5 * volume + 0.5 * b @ torch.linalg.solve(A, b)
