"""Sparse Gaussian-process regression with Gaussian noise: the collapsed bound of Titsias (2009)."""

from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from math import log, pi
from typing import Any, final

import torch
from gpytorch.constraints import GreaterThan
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.means import Mean, ZeroMean
from jaxtyping import Float
from torch import Tensor, nn

from winnowgp.bounds import collapsed_bound, masked_bound, subset_blocks
from winnowgp.bounds.chunked import (
    BoundGradient,
    KernelChunk,
    Moments,
    chunked_moments,
    evidence_gradient,
    moment_bound,
    moment_posterior,
    moment_upper_bound,
    two_pass_bound,
)
from winnowgp.bounds.collapsed import weight_correction
from winnowgp.bounds.evidence import (
    Evidence,
    GaussianRows,
    affordable_iterations,
    conjugate_gradient_evidence,
    exact_evidence,
    exact_rows,
)
from winnowgp.bounds.row_blocks import ChunkedKernel, RowBlock, RowBlocks
from winnowgp.data import Dataset, Source
from winnowgp.errors import InputError, NotPositiveDefiniteError
from winnowgp.linalg import cholesky, solve_lower
from winnowgp.models import kernels
from winnowgp.models.base import InducingModel, check_kernel, copy_with
from winnowgp.models.chunked_kernels import AutogradMean, chunked_kernel
from winnowgp.models.posterior import Posterior
from winnowgp.selection import RelaxedObjective, SubsetStatistics
from winnowgp.selection.statistics import subset_statistics
from winnowgp.typing import Masks, Nats, Noise, Scalar, Weights

LEAST_NOISE = 1e-6

PRECISIONS = ("double", "mixed")


@final
@dataclass(frozen=True, slots=True)
class CollapsedObjective(RelaxedObjective):
    """The collapsed bound of any subset, differentiable in kernel, noise and locations.

    The kernel is evaluated once for all candidates. A batch of S subsets costs O(S N M²) with M the
    size of the largest.
    """

    blocks: kernels.KernelBlocks
    Y: Float[Tensor, "N P"]
    noise: Noise
    constant: Scalar | float = 0.0
    """A constant added to every value: `bounds.weight_correction` if rows have weights."""

    @property
    def K(self) -> int:
        return self.blocks.Kuu.shape[0]

    def value(self, mask: Masks) -> Nats:
        Kuu, Kuf = subset_blocks(self.blocks.Kuu, self.blocks.Kuf, mask)
        nats = collapsed_bound(Kuu, Kuf, kff=self.blocks.kff, Y=self.Y, noise=self.noise)
        return nats + self.constant

    def relaxed_value(self, weights: Weights) -> Nats:
        nats = masked_bound(
            self.blocks.Kuu,
            self.blocks.Kuf,
            weights=weights,
            kff=self.blocks.kff,
            Y=self.Y,
            noise=self.noise,
        )
        return nats + self.constant


@final
class SparseGP(InducingModel):
    """A Gaussian process with Gaussian noise and K candidate inducing points.

    q(u) is always the optimal one (the collapsed bound of Titsias 2009), so that the parameters
    are those of kernel and mean, the noise variance and the locations of the candidates.

    Args:
        kernel: a GPyTorch kernel without batch shape; copied.
        candidates: locations of the candidates, `[K D]`; copied, and learnt unless frozen.
        mean: prior mean, a GPyTorch mean; copied; zero by default.
        noise: initial noise variance.
        precision: "double", or "mixed" to optimise with blocks of rows in float32 and sums over
            rows in float64. Selection, reported bounds and predictions always use double precision.

    >>> from gpytorch.kernels import RBFKernel, ScaleKernel
    >>> X = torch.linspace(0, 6, 30, dtype=torch.float64)[:, None]
    >>> model = SparseGP(ScaleKernel(RBFKernel()), X[::3], noise=0.1)
    >>> data = Dataset.of(X, torch.sin(X[:, 0]))
    >>> bool(model.bound(data) < model.upper_bound(data))
    True
    """

    def __init__(
        self,
        kernel: Kernel,
        candidates: Float[Tensor, "K D"],
        *,
        mean: Mean | None = None,
        noise: float = 1.0,
        precision: str = "double",
    ) -> None:
        super().__init__()
        _check(kernel, candidates, noise)
        self.precision = _checked_precision(precision)
        self.kernel = deepcopy(kernel).to(candidates)
        self.mean = deepcopy(ZeroMean() if mean is None else mean).to(candidates)
        likelihood = GaussianLikelihood(noise_constraint=GreaterThan(LEAST_NOISE)).to(candidates)
        likelihood.noise = candidates.new_tensor(noise)
        self.likelihood = likelihood
        self.candidates = nn.Parameter(candidates.detach().clone())

    @property
    def noise(self) -> Scalar:
        """Noise variance σ²."""
        assert isinstance(self.likelihood, GaussianLikelihood)
        return self.likelihood.noise.reshape(())

    def check(self, data: Source) -> None:
        """Accept all data: Gaussian noise gives every target a positive density."""

    def subset_objective(
        self,
        data: Dataset,
        *,
        total: int | None = None,
        generator: torch.Generator | None = None,
    ) -> CollapsedObjective:
        """Return the bound in nats as a function of the subset of candidates that is used."""
        _refuse_minibatch(total)
        blocks = kernels.kernel_blocks(self.kernel, self.candidates, data.X)
        noise, constant = self._row_noise(data)
        return CollapsedObjective(blocks, self._centred(data), noise, constant)

    def subset_statistics(self, data: Source) -> SubsetStatistics:
        """Return statistics that score subsets exactly at fixed parameters; O(N K²) once.

        Values of subsets, and the marginal gains of all candidates, then have a cost that does not
        depend on the number of rows.
        """
        return subset_statistics(*self.moments(data))

    @torch.no_grad()
    def moments(self, data: Source) -> tuple[Float[Tensor, "K K"], Moments]:
        """Return the Cholesky factor of K_uu, and the moments of the data whitened with it.

        They suffice for predictions and scores at fixed parameters, and take one pass over the
        rows.
        """
        L = cholesky(kernels.covariance(self.kernel, self.candidates, self.candidates)).L
        blocks = self._blocks(data)
        kernel, _ = chunked_kernel(self.kernel, self.candidates, blocks)
        C, D, square, diagonal = blocks.mapped(
            lambda shard: chunked_moments(L, self._chunks(kernel, shard)).sums,
            parallel=kernel.parallel,
        )
        N = blocks.observations
        constant = -0.5 * N * (log(2 * pi) + self.noise.log())
        return L, Moments(C, D, square, diagonal, constant, N)

    def bound(
        self,
        data: Dataset,
        *,
        total: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Scalar:
        """Return the collapsed lower bound on log p(Y) with all candidates, in nats."""
        _refuse_minibatch(total)
        blocks = kernels.kernel_blocks(self.kernel, self.candidates, data.X)
        noise, constant = self._row_noise(data)
        nats = collapsed_bound(
            blocks.Kuu, blocks.Kuf, kff=blocks.kff, Y=self._centred(data), noise=noise
        )
        return nats + constant

    def fixed_bound(self, data: Source) -> float:
        """Return the collapsed bound as a number, in one pass over blocks of rows."""
        return moment_bound(self.moments(data)[1]).item()

    def chunked_bound(self, data: Source) -> Callable[[], Scalar]:
        """Return the collapsed bound as a function of the current parameters.

        Quantities that depend on the rows alone are computed once, memory does not grow with N · K,
        and the jitter is the 1e-8 of `bounds.chunked`, part of the objective.
        """
        dtype = torch.float32 if self.precision == "mixed" else None
        bound = ChunkedBound(self._blocks(data), dtype)

        def value() -> Scalar:
            return bound(self.kernel, Z=self.candidates, mean=self.mean, noise=self.noise)

        return value

    def bound_and_trace(self, data: Source) -> tuple[float, float]:
        """Return the collapsed bound, and the nats ½ Σ_i w_i (k_ii − q_ii) of its trace term."""
        moments = self.moments(data)[1]
        trace = 0.5 * moments.D.shape[1] * (moments.diagonal - moments.C.diagonal().sum())
        return moment_bound(moments).item(), trace.item()

    def chunked_cost_of(self, data: Source, K: int) -> float:
        return 9.0 * data.N * K**2 + 4.0 * K**3

    def dense_bound(self, data: Dataset) -> Callable[[], Scalar]:
        """Return the exact log p(Y), which needs no inducing points, as a function; O(N³)."""

        def value() -> Scalar:
            return evidence(self.kernel, data=data, mean=self.mean, noise=self.noise)

        return value

    def upper_bound(self, data: Source) -> float:
        """Return an upper bound on log p(Y) at the same parameters, in nats."""
        return moment_upper_bound(self.moments(data)[1]).item()

    def evidence(self, data: Source, *, max_rows: int | None = None) -> Evidence:
        """Return log p(Y) at the same parameters in nats, exact or between two bounds.

        Exact by one Cholesky factorisation for up to `max_rows` rows in memory; beyond, bounds by
        conjugate gradients with the candidates as preconditioner, as long as they are affordable;
        otherwise the ELBO and the upper bound of `upper_bound`. Computed in double precision on the
        device of the model.

        Args:
            data: the rows; several processes that share them compute the result once.
            max_rows: rows up to which the evidence is exact; chosen for the device and its free
                memory if None.
        """
        dataset = data.as_dataset()
        if dataset is not None:
            result = data.process_group.broadcast_result(
                lambda: self._dense_evidence(dataset, max_rows)
            )
            if result is not None:
                return result
        moments = self.moments(data)[1]
        lower, upper = moment_bound(moments).item(), moment_upper_bound(moments).item()
        return Evidence(lower, upper, "trace")

    def with_candidates(self, candidates: Float[Tensor, "J D"]) -> "SparseGP":
        """Return a new model with the same parameters and other candidates."""
        return copy_with(self, candidates)

    def _pruned(self, *masks: Tensor) -> "SparseGP":
        return self.with_candidates(self.candidates[masks[0]])

    def with_best_q(self, data: Source) -> "SparseGP":
        """Return the model itself, whose q(u) is always the optimal one."""
        return self

    @torch.no_grad()
    def posterior(self, data: Source) -> Posterior:
        """Return q(f) given the data, on which it does not depend afterwards; O(N K²) once."""
        q_mean, q_factor = moment_posterior(self.moments(data)[1])
        return Posterior(
            self.kernel,
            self.candidates.detach(),
            mean=self.mean,
            likelihood=self.likelihood,
            q_mean=q_mean,
            q_factor=q_factor,
        )

    def _blocks(self, data: Source) -> RowBlocks:
        return RowBlocks.of(data, points=self.K, device=self.candidates.device)

    def _chunks(self, kernel: ChunkedKernel, rows: Iterable[RowBlock]) -> Iterator[KernelChunk]:
        for block in rows:
            # A row of weight w counts as w rows, or as one row with noise σ²/w.
            precision = (1 / self.noise).expand(len(block))
            if block.weights is not None:
                precision = precision * block.weights
            Y = block.Y - kernels.prior_mean(self.mean, block.X)
            yield kernel.uf(block), kernel.ff(block), Y, precision

    def _dense_evidence(self, data: Dataset, max_rows: int | None) -> Evidence | None:
        """Return the evidence from K_ff, or None if that is not affordable or K̂ is singular."""
        model = deepcopy(self).double()
        device = model.candidates.device
        limit = exact_rows(device) if max_rows is None else max_rows
        rows = gaussian_rows(
            model.kernel, data=_double(data.to(device)), mean=model.mean, noise=model.noise
        )
        try:
            if limit >= rows.N:
                return exact_evidence(rows)
            iterations = affordable_iterations(rows, self.K)
            if iterations:
                Z = model.candidates.detach()
                return conjugate_gradient_evidence(rows, Z, max_iterations=iterations)
        except NotPositiveDefiniteError:
            # The noise is too small for the scale of the kernel; moments need K_uu only.
            return None
        return None

    def _row_noise(self, data: Dataset) -> tuple[Noise, Scalar | float]:
        """Return σ²/w_i of each row, and the constant that corrects the bound for all outputs."""
        if data.weights is None:
            return self.noise, 0.0
        return self.noise / data.weights, data.P * weight_correction(data.weights, self.noise)

    def _centred(self, data: Dataset) -> Float[Tensor, "N P"]:
        return data.Y - kernels.prior_mean(self.mean, data.X)


@dataclass(frozen=True, slots=True)
class ChunkedBound:
    """The collapsed bound of fixed rows as a function of kernel, inducing points, mean and noise.

    The gradient is computed with the value, in two passes over blocks of rows (`bounds.chunked`).
    Memory does not grow with N · M, nor with N if the rows are not in memory.
    """

    blocks: RowBlocks
    dtype: torch.dtype | None = None
    """Data type of blocks of rows, if less precise than that of the sums."""

    def __call__(
        self, kernel: Kernel, *, Z: Float[Tensor, "M D"], mean: Mean, noise: Scalar
    ) -> Scalar:
        """Return the bound in nats, differentiable in all parameters."""
        chunked, inputs = chunked_kernel(kernel, Z, self.blocks, self.dtype)
        chunked_mean, more = _chunked_mean(mean)

        def evaluate() -> tuple[Tensor, tuple[Tensor, ...]]:
            result = two_pass_bound(
                chunked,
                self.blocks,
                mean=chunked_mean,
                noise=noise.detach(),
                dtype=self.dtype,
            )
            return _unpacked(result)

        return WithGradient.apply(evaluate, noise, *more, *inputs)


def evidence(kernel: Kernel, *, data: Dataset, mean: Mean, noise: Scalar) -> Scalar:
    """Return the exact log evidence in nats, differentiable in kernel, mean and `noise`; O(N³)."""
    blocks = RowBlocks.of(data, size=data.N)
    chunked, inputs = chunked_kernel(kernel, data.X, blocks)
    chunked_mean, more = _chunked_mean(mean)

    def evaluate() -> tuple[Tensor, tuple[Tensor, ...]]:
        block = next(iter(blocks))
        return _unpacked(evidence_gradient(chunked, block, mean=chunked_mean, noise=noise.detach()))

    return WithGradient.apply(evaluate, noise, *more, *inputs)


@torch.no_grad()
def gaussian_rows(kernel: Kernel, *, data: Dataset, mean: Mean, noise: Scalar) -> GaussianRows:
    """Return the rows of an exact Gaussian process, for `exact_evidence` and its relatives."""

    @torch.no_grad()
    def covariance(A: Tensor, B: Tensor) -> Tensor:
        return kernels.cross_covariance(kernel, B)(A)[0]

    return GaussianRows(
        X=data.X,
        Y=data.Y - kernels.prior_mean(mean, data.X),
        kff=kernels.prior_variance(kernel, data.X),
        noise=noise.detach(),
        covariance=covariance,
        weights=data.weights,
    )


@torch.no_grad()
def exact_log_density(
    kernel: Kernel, *, data: Dataset, mean: Mean, noise: Scalar, rows: Dataset
) -> Float[Tensor, " n"]:
    """Return the log density of other rows under the exact posterior of `data`; O(N³).

    Nats, summed over outputs.

    Raises:
        NotPositiveDefiniteError: the covariance of the observations is singular to working
            precision.
    """
    given = gaussian_rows(kernel, data=data, mean=mean, noise=noise)
    L = given.factor()
    A = solve_lower(L, given.covariance(given.X, rows.X))
    latent = A.mT @ solve_lower(L, given.Y)
    # Non-negative up to rounding.
    explained = kernels.prior_variance(kernel, rows.X) - A.square().sum(0)
    variance = explained.clamp_min(0)[:, None] + noise
    error = rows.Y - kernels.prior_mean(mean, rows.X) - latent
    return -0.5 * (error.square() / variance + variance.log() + log(2 * pi)).sum(1)


def _double(data: Dataset) -> Dataset:
    weights = None if data.weights is None else data.weights.double()
    return Dataset(data.X.double(), data.Y.double(), weights)


def _chunked_mean(mean: Mean) -> tuple[AutogradMean, list[Tensor]]:
    inputs: list[Tensor] = [p for p in mean.parameters() if p.requires_grad]
    return AutogradMean(mean, parameters=inputs), inputs


def _unpacked(result: BoundGradient) -> tuple[Tensor, tuple[Tensor, ...]]:
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


def _check(kernel: Kernel, candidates: Tensor, noise: float) -> None:
    check_kernel(kernel, candidates)
    if not noise > LEAST_NOISE:
        raise InputError(f"`noise` is a variance and must exceed {LEAST_NOISE}; got {noise}.")


def _checked_precision(precision: str) -> str:
    if precision not in PRECISIONS:
        raise InputError(f'`precision` must be "double" or "mixed"; got {precision!r}.')
    return precision


def _refuse_minibatch(total: int | None) -> None:
    if total is not None:
        raise InputError(
            "the collapsed bound needs all rows at once; leave `total` (or the batch size) out, or "
            "use `VariationalGP`."
        )
