"""Exact Gaussian process regression: the evidence and its gradient, and held-out densities."""

from collections.abc import Callable
from math import log, pi
from typing import Any

import torch
from gpytorch.kernels import Kernel
from gpytorch.means import Mean
from jaxtyping import Float
from torch import Tensor

from winnowgp.bounds.evidence import GaussianRows, evidence_gradient
from winnowgp.bounds.row_blocks import RowBlocks
from winnowgp.bounds.two_pass import BoundGradient
from winnowgp.data import Dataset
from winnowgp.data.noise import NoiseGroup, noise_groups, target_groups
from winnowgp.linalg import solve_lower
from winnowgp.models import kernels
from winnowgp.models.chunked_kernels import AutogradMean, chunked_kernel
from winnowgp.typing import Scalar, TargetNoise


def evidence(kernel: Kernel, *, blocks: RowBlocks, mean: Mean, noise: TargetNoise) -> Scalar:
    """Return the exact log evidence in nats, differentiable in kernel, mean and `noise`; O(N³).

    Args:
        blocks: all rows in one block.
    """
    (block,) = blocks
    chunked, inputs = chunked_kernel(kernel, block.X, blocks)
    row_mean, more = chunked_mean(mean)

    def evaluate() -> tuple[Tensor, tuple[Tensor, ...]]:
        result = evidence_gradient(
            chunked, block, mean=row_mean, noise=noise.detach(), groups=blocks.groups
        )
        return unpacked(result)

    return WithGradient.apply(evaluate, noise, *more, *inputs)


@torch.no_grad()
def gaussian_rows(
    kernel: Kernel, *, data: Dataset, mean: Mean, noise: TargetNoise
) -> tuple[GaussianRows, ...]:
    """Return the rows of an exact Gaussian process, for `exact_evidence` and its relatives.

    There is one element for each group of targets with noise of its own; a group that no row has is
    left out.
    """
    groups = noise_groups(target_groups(data), noise.detach(), separate=True)
    each = [_gaussian_rows(kernel, group.observed_rows(data), mean, group) for group in groups]
    return tuple(rows for rows in each if rows.N)


def _gaussian_rows(kernel: Kernel, data: Dataset, mean: Mean, group: NoiseGroup) -> GaussianRows:
    @torch.no_grad()
    def covariance(A: Tensor, B: Tensor) -> Tensor:
        return kernels.cross_covariance(kernel, B)(A)[0]

    return GaussianRows(
        X=data.X,
        Y=data.Y - kernels.prior_mean(mean, data.X),
        kff=kernels.prior_variance(kernel, data.X),
        noise=group.row_noise(data),
        covariance=covariance,
        weights=data.weights,
    )


@torch.no_grad()
def exact_log_density(
    kernel: Kernel, *, data: Dataset, mean: Mean, noise: TargetNoise, rows: Dataset
) -> Float[Tensor, " n"]:
    """Return the log density of other rows under the exact posterior of `data`; O(N³).

    Nats, summed over the outputs that were observed.

    Raises:
        NotPositiveDefiniteError: the covariance of the observations is singular to working
            precision.
    """
    total = torch.zeros_like(rows.Y[:, 0])
    prior = kernels.prior_variance(kernel, rows.X)[:, None]
    centre = kernels.prior_mean(mean, rows.X)
    for group in noise_groups(target_groups(data), noise, separate=True):
        targets = list(group.group.targets)
        given = _gaussian_rows(kernel, group.observed_rows(data), mean, group)
        variance, latent = prior, torch.zeros_like(rows.Y[:, targets])
        if given.N:
            L = given.factor()
            A = solve_lower(L, given.covariance(given.X, rows.X))
            latent = A.mT @ solve_lower(L, given.Y)
            # Non-negative up to rounding.
            variance = (prior - A.square().sum(0)[:, None]).clamp_min(0)
        variance = variance + group.noise
        if rows.noise is not None:
            variance = variance + rows.noise[:, targets]
        error = rows.Y[:, targets] - centre - latent
        nats = -0.5 * (error.square() / variance + variance.log() + log(2 * pi))
        total = total + nats.masked_fill(torch.isnan(rows.Y[:, targets]), 0.0).sum(1)
    return total


@torch.no_grad()
def leave_one_out_density(
    kernel: Kernel, *, data: Dataset, mean: Mean, noise: TargetNoise
) -> Float[Tensor, " N"]:
    """Return the log density of each row given all other rows, at fixed hyper-parameters; O(N³).

    Nats, summed over the outputs, which every row has. With A = (K + S)⁻¹ and the noise variances
    on the diagonal of S, an observation given all others has (Sundararajan and Keerthi 2001)

        mean y_i − [A y]_i / A_ii,   variance 1/A_ii.

    A row of weight w is left out with all of its observations, and predicted as one of them.

    Raises:
        NotPositiveDefiniteError: the covariance of the observations is singular to working
            precision.
    """
    total = torch.zeros_like(data.Y[:, 0])
    for rows in gaussian_rows(kernel, data=data, mean=mean, noise=noise):
        A = torch.cholesky_inverse(rows.factor())
        inverse = A.diagonal()[:, None]
        variance = 1 / inverse - rows.variances()[:, None] + rows.noise.expand(rows.N)[:, None]
        error = A @ rows.Y / inverse
        total -= 0.5 * (error.square() / variance + variance.log() + log(2 * pi)).sum(1)
    return total


def chunked_mean(mean: Mean) -> tuple[AutogradMean, list[Tensor]]:
    """Return a mean for passes over blocks of rows, and the parameters of its gradient."""
    inputs: list[Tensor] = [p for p in mean.parameters() if p.requires_grad]
    return AutogradMean(mean, parameters=inputs), inputs


def unpacked(result: BoundGradient) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return a value and its gradients, as `WithGradient` needs them."""
    return result.value, (result.noise, *result.mean, *result.kernel)


class WithGradient(torch.autograd.Function):
    """A value with a known gradient: `apply(evaluate, *inputs)`, where `evaluate` returns both."""

    @staticmethod
    def forward(
        ctx: Any, evaluate: Callable[[], tuple[Tensor, tuple[Tensor, ...]]], *inputs: Tensor
    ) -> Tensor:
        value, ctx.gradients = evaluate()
        return value

    @staticmethod
    def backward(ctx: Any, *output: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *(output[0] * gradient for gradient in ctx.gradients))
