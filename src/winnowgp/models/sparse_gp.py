"""Sparse Gaussian-process regression with candidates for its inducing points."""

from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from math import log, pi
from typing import final

import torch
from gpytorch.constraints import GreaterThan
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.means import Mean, ZeroMean
from jaxtyping import Float
from torch import Tensor, nn

from winnowgp.bounds import (
    Moments,
    Piece,
    RowBlock,
    RowBlocks,
    chunked_moments,
    collapsed_bound,
    moment_bound,
    moment_posterior,
    moment_upper_bound,
    repetition,
)
from winnowgp.data import Dataset, Source
from winnowgp.errors import InputError
from winnowgp.linalg import cholesky
from winnowgp.models.chunked_bound import ChunkedBound, chunked_kernel, evidence
from winnowgp.models.collapsed_objective import CollapsedObjective
from winnowgp.models.inducing_model import InducingModel, check_parts
from winnowgp.models.kernel_blocks import covariance, kernel_blocks, prior_mean
from winnowgp.models.posterior import Posterior
from winnowgp.selection import SubsetStatistics, subset_statistics
from winnowgp.typing import Mask, Noise, Scalar

LEAST_NOISE = 1e-6
PRECISIONS = ("double", "mixed")


@final
class SparseGP(InducingModel):
    """A Gaussian process with Gaussian noise, seen through K candidate inducing points.

    The posterior over inducing values is always the best one (the collapsed bound of Titsias 2009),
    so the parameters are the kernel's, the mean's, the noise and the candidates' locations.

    Args:
        kernel: any GPyTorch kernel without batch shape; copied.
        candidates: where inducing points may be, `[K D]`; copied, and learnt unless frozen.
        mean: prior mean, a GPyTorch mean; copied, zero by default.
        noise: starting value of the noise variance.
        precision: "double", or "mixed" for climbs in which blocks of rows are in float32 and sums
            over rows in float64. Selection, reported bounds and predictions are in double precision
            always.

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
        """Gaussian noise can explain anything."""

    def subset_objective(self, data: Dataset, *, total: int | None = None) -> CollapsedObjective:
        """What is the bound, in nats, if only this subset of the candidates is used?"""
        _refuse_part(total)
        blocks = kernel_blocks(self.kernel, self.candidates, data.X)
        noise, constant = self._row_noise(data)
        return CollapsedObjective(blocks, self._centred(data), noise, constant)

    def subset_statistics(self, data: Source) -> SubsetStatistics:
        """The same question at fixed parameters, answered without the data; O(N K²) once.

        Exact values of any subset, and the exact worth of every candidate, then cost nothing that
        grows with the rows.
        """
        return subset_statistics(*self.moments(data))

    @torch.no_grad()
    def moments(self, data: Source) -> tuple[Float[Tensor, "K K"], Moments]:
        """The factor of the candidates' covariance, and the data's moments whitened with it.

        Everything that predicts or scores at fixed parameters, in one pass over chunks of rows.
        """
        L = cholesky(covariance(self.kernel, self.candidates, self.candidates)).L
        blocks = self._blocks(data)
        kernel, _ = chunked_kernel(self.kernel, self.candidates, blocks)

        def pieces(rows: Iterable[RowBlock]) -> Iterator[Piece]:
            for block in rows:
                # A row of weight w is w rows, or one with a w-th of the noise.
                precision = (1 / self.noise).expand(len(block))
                if block.weights is not None:
                    precision = precision * block.weights
                Y = block.Y - prior_mean(self.mean, block.X)
                yield kernel.uf(block), kernel.ff(block), Y, precision

        C, D, square, diagonal = blocks.summed(
            chunked_moments(L, pieces(lane)).sums for lane in blocks.lanes()
        )
        N = blocks.observations
        constant = -0.5 * N * (log(2 * pi) + self.noise.log())
        return L, Moments(C, D, square, diagonal, constant, N)

    def bound(self, data: Dataset, *, total: int | None = None) -> Scalar:
        """Collapsed lower bound on log p(Y) with all candidates, in nats."""
        _refuse_part(total)
        blocks = kernel_blocks(self.kernel, self.candidates, data.X)
        noise, constant = self._row_noise(data)
        nats = collapsed_bound(
            blocks.Kuu, blocks.Kuf, kff=blocks.kff, Y=self._centred(data), noise=noise
        )
        return nats + constant

    def fixed_bound(self, data: Source) -> float:
        """The same bound as a number, in one pass over chunks of rows."""
        return moment_bound(self.moments(data)[1]).item()

    def chunked_bound(self, data: Source, *, tighter: bool = False) -> Callable[[], Scalar]:
        """The same bound, or the tighter one, as a function of the parameters when it is called.

        Made for optimisers: what depends on the rows alone is computed once, memory does not grow
        with N · K, and the jitter is the 1e-8 of `bounds.two_pass`, part of the objective.
        """
        dtype = torch.float32 if self.precision == "mixed" else None
        bound = ChunkedBound(self._blocks(data), tighter, dtype)

        def value() -> Scalar:
            return bound(self.kernel, Z=self.candidates, mean=self.mean, noise=self.noise)

        return value

    def chunked_cost(self, data: Source) -> float:
        return 4.5 * data.N * self.K**2

    def dense_bound(self, data: Dataset) -> Callable[[], Scalar]:
        """The exact log p(Y), which needs no inducing points; O(N³)."""

        def value() -> Scalar:
            return evidence(self.kernel, data=data, mean=self.mean, noise=self.noise)

        return value

    def upper_bound(self, data: Source) -> float:
        """Upper bound on log p(Y) at the same parameters, in nats."""
        return moment_upper_bound(self.moments(data)[1]).item()

    def with_candidates(self, candidates: Float[Tensor, "J D"]) -> "SparseGP":
        """A new model with the same parameters and other candidates."""
        copied = deepcopy(self)
        learnt = self.candidates.requires_grad
        copied.candidates = nn.Parameter(candidates.detach().clone(), requires_grad=learnt)
        return copied

    def prune(self, mask: Mask) -> "SparseGP":
        """A new model with the same parameters and only the candidates that `mask` keeps."""
        return self.with_candidates(self.candidates[mask])

    def with_best_q(self, data: Source) -> "SparseGP":
        """The model itself: its q(u) is the best one always."""
        return self

    @torch.no_grad()
    def posterior(self, data: Source) -> Posterior:
        """q(f) given the data, small and independent of them from then on; O(N K²) once."""
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

    def _row_noise(self, data: Dataset) -> tuple[Noise, Scalar | float]:
        """σ²/w_i of each row, and what the bound with that noise lacks, over all outputs."""
        if data.weights is None:
            return self.noise, 0.0
        return self.noise / data.weights, data.P * repetition(data.weights, self.noise)

    def _centred(self, data: Dataset) -> Float[Tensor, "N P"]:
        return data.Y - prior_mean(self.mean, data.X)


def _check(kernel: Kernel, candidates: Tensor, noise: float) -> None:
    check_parts(kernel, candidates)
    if not noise > LEAST_NOISE:
        raise InputError(f"`noise` is a variance and must exceed {LEAST_NOISE}; got {noise}.")


def _checked_precision(precision: str) -> str:
    if precision not in PRECISIONS:
        raise InputError(f'`precision` must be "double" or "mixed"; got {precision!r}.')
    return precision


def _refuse_part(total: int | None) -> None:
    if total is not None:
        raise InputError(
            "the collapsed bound needs all rows at once; leave `total` (or the batch size) out, or "
            "use `VariationalGP`."
        )
