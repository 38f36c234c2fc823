"""Several targets from several processes, each with the inducing points that it needs.

    y_p = Σ_q W_pq f_q(x) + e_p,   f_q ~ GP(0, k_q),   e_p ~ N(0, σ_p²)

Every process has a kernel and candidates of its own, and one mixing matrix W connects processes and
targets. Its form names the model:

| mixing W | model |
|---|---|
| learnt | linear model of coregionalisation (Journel & Huijbregts 1978); ICM with one process |
| identity | independent targets |
| unit lower triangle | multi-fidelity, autoregressive (Kennedy & O'Hagan 2000) |
| a row of ones | one target, a sum of effects |

Targets may be missing, so that each may have inputs of its own. All processes and targets are
jointly Gaussian: the collapsed bound, the marginal gains of all candidates and the optimal q(u) are
exact (`bounds.mixing`). One search over the candidates of all processes allocates the inducing
points between them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from math import inf
from operator import add
from typing import final

import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood
from jaxtyping import Bool, Float
from torch import Tensor, nn

from winnowgp.bounds.collapsed import (
    Moments,
    exact_log_marginal,
    moment_bound,
    moment_posterior,
    moment_upper_bound,
    weight_correction,
)
from winnowgp.bounds.evidence import Evidence, exact_rows
from winnowgp.bounds.mixing import MixedChunks, MixedTargets, mixed_moments, mixed_two_pass
from winnowgp.bounds.row_blocks import ChunkedKernel, RowBlock, RowBlocks, block_size
from winnowgp.data import Dataset, Source
from winnowgp.errors import InputError
from winnowgp.linalg import cholesky
from winnowgp.models.base import SelectableModel, check_kernel
from winnowgp.models.chunked_kernels import chunked_kernel
from winnowgp.models.exact_gp import WithGradient
from winnowgp.models.kernels import (
    KernelBlocks,
    copy_module,
    covariance,
    kernel_blocks,
    prior_variance,
)
from winnowgp.models.likelihoods import copy_likelihood, observation_model
from winnowgp.models.mixed_sites import (
    MixedProfiledBound,
    expected_targets,
    infer_mixed_sites,
    initial_sites,
    site_targets,
)
from winnowgp.models.multi_output_posterior import MultiOutputPosterior
from winnowgp.models.observations import gaussian_noise, target_noise
from winnowgp.models.svgp import FINAL_GAIN, TRAINING_GAIN
from winnowgp.models.target_likelihoods import TargetLikelihoods
from winnowgp.selection import SubsetObjective, SubsetStatistics
from winnowgp.selection.objective import subset_statistics
from winnowgp.typing import Masks, Nats, Scalar


@final
@dataclass(frozen=True, slots=True)
class MultiOutputObjective(SubsetObjective):
    """The collapsed bound of any subset of all candidates, one process after another; O(N M²)."""

    blocks: tuple[KernelBlocks, ...]
    targets: MixedTargets

    @property
    def K(self) -> int:
        return sum(len(block.Kuu) for block in self.blocks)

    def value(self, mask: Masks) -> Nats:
        sizes = [len(block.Kuu) for block in self.blocks]
        values = [self._bound(each.split(sizes)) for each in mask]
        return torch.stack(values) if values else self.targets.square.new_zeros(0)

    def _bound(self, masks: Sequence[Bool[Tensor, " _"]]) -> Scalar:
        parts = list(zip(self.blocks, masks, strict=True))
        return moment_bound(
            mixed_moments(
                [cholesky(block.Kuu[keep][:, keep]).L for block, keep in parts],
                [block.Kuf[keep] for block, keep in parts],
                kff=torch.stack([block.kff for block in self.blocks]),
                targets=self.targets,
            )
        )


@final
@dataclass(frozen=True, slots=True)
class SiteObjective(SubsetObjective):
    """The bound of any subset of all candidates with the q(u) that is optimal for it."""

    model: "MultiOutputGP"
    data: Dataset

    @property
    def K(self) -> int:
        return self.model.K

    def value(self, mask: Masks) -> Nats:
        sizes = [len(Z) for Z in self.model.candidate_sets]
        bounds = [self.model.prune(each.split(sizes)).fixed_bound(self.data) for each in mask]
        return self.data.X.new_tensor(bounds)


@final
class MultiOutputGP(SelectableModel[Dataset]):
    """P targets that are linear combinations of Q Gaussian processes, with noise.

    q(u) is the optimal one of all processes jointly. Parameters are those of the kernels, the
    mixing matrix, the noise variances of the targets and the locations of the candidates. Without
    weights and missing targets, the number of targets hardly changes the cost.

    Args:
        kernels: a GPyTorch kernel for each process, without batch shape; copied.
        candidates: locations of the candidates of each process, `[K_q D]`; copied.
        mixing: initial mixing matrix W.
        learnt: which entries of W are learnt; all by default.
        noise: initial noise variance of each target, if all noise is Gaussian.
        likelihoods: otherwise a GPyTorch likelihood for each target; copied. Their latent functions
            have offsets that are learnt, and the optimal q(u) is found by Gaussian sites.

    >>> from gpytorch.kernels import RBFKernel
    >>> X = torch.linspace(0, 6, 40, dtype=torch.float64)[:, None]
    >>> Y = torch.cat([torch.sin(X), 2 * torch.sin(X), torch.sin(X) + X.cos()], 1)
    >>> mixing = torch.tensor([[1.0, 0.0], [2.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
    >>> model = MultiOutputGP(
    ...     [RBFKernel(), RBFKernel()], [X[::4], X[::8]], mixing=mixing, noise=mixing.new_ones(3)
    ... )
    >>> data = Dataset.of(X, Y)
    >>> model.subset_statistics(data).marginal_gains(torch.ones(15, dtype=torch.bool)).shape
    torch.Size([15])
    >>> model.posterior(data).predict(X).mean.shape
    torch.Size([40, 3])
    """

    mixing_learnt: Tensor
    initial_mixing: Tensor

    def __init__(
        self,
        kernels: Sequence[Kernel],
        candidates: Sequence[Float[Tensor, "_ D"]],
        *,
        mixing: Float[Tensor, "P Q"],
        learnt: Bool[Tensor, "_ _"] | None = None,
        noise: Float[Tensor, " P"] | None = None,
        likelihoods: Sequence[Likelihood] | None = None,
    ) -> None:
        super().__init__()
        P, Q = mixing.shape
        if (noise is None) == (likelihoods is None):
            raise InputError("pass `noise` for Gaussian noise, or `likelihoods`; not both.")
        targets = len(noise if noise is not None else likelihoods or ())
        if not len(kernels) == len(candidates) == Q or targets != P:
            raise InputError(
                "`mixing` must have a row for each target and a column for each kernel and set of "
                f"candidates; got {[P, Q]} for {targets} noise variances or likelihoods, "
                f"{len(kernels)} kernels and {len(candidates)} sets of candidates."
            )
        if learnt is not None and learnt.shape != mixing.shape:
            raise InputError(
                f"`learnt` must have the shape of `mixing`, {[P, Q]}; got {list(learnt.shape)}."
            )
        for kernel, points in zip(kernels, candidates, strict=True):
            check_kernel(kernel, points, name="kernels")
        self._kernels = nn.ModuleList(copy_module(kernel).to(mixing) for kernel in kernels)
        self.candidate_list = nn.ParameterList(
            nn.Parameter(points.detach().clone()) for points in candidates
        )
        if noise is not None:
            self.likelihood: Likelihood = gaussian_noise(noise.detach())
        else:
            parts = TargetLikelihoods(likelihoods or (), offset=mixing.new_zeros(P))
            self.likelihood = copy_likelihood(parts).to(mixing)
        entries = torch.ones_like(mixing, dtype=torch.bool) if learnt is None else learnt
        self.register_buffer("mixing_learnt", entries.clone())
        self.register_buffer("initial_mixing", mixing.detach().clone())
        self.raw_mixing = nn.Parameter(mixing.detach()[entries])

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """Kernel of each process."""
        return tuple(kernel for kernel in self._kernels if isinstance(kernel, Kernel))

    @property
    def P(self) -> int:
        """Number of targets."""
        return self.mixing_learnt.shape[0]

    @property
    def Q(self) -> int:
        """Number of processes."""
        return self.mixing_learnt.shape[1]

    @property
    def K(self) -> int:
        """Number of candidates of all processes together."""
        return sum(map(len, self.candidate_sets))

    @property
    def candidate_sets(self) -> tuple[nn.Parameter, ...]:
        """Locations of the candidates of each process."""
        return tuple(self.candidate_list)

    @property
    def candidates(self) -> nn.Parameter:
        """Locations of the candidates of the first process."""
        return self.candidate_sets[0]

    @property
    def mixing(self) -> Float[Tensor, "P Q"]:
        """The mixing matrix W; `raw_mixing` has the entries that are learnt."""
        return self.initial_mixing.masked_scatter(self.mixing_learnt, self.raw_mixing)

    @property
    def has_sites(self) -> bool:
        """Whether the optimal q(u) is found by sites, since some noise is not Gaussian."""
        return isinstance(self.likelihood, TargetLikelihoods)

    @property
    def noise(self) -> Float[Tensor, " P"]:
        """Noise variance of each target, if all noise is Gaussian."""
        return target_noise(self.likelihood)

    def check(self, data: Source) -> None:
        """Raise an `InputError` unless there are as many target columns, in memory."""
        if data.P != self.P:
            raise InputError(f"the model has {self.P} targets; the data have {data.P}.")
        rows = data.require_dataset("`MultiOutputGP`")
        if self.has_sites:
            if rows.noise is not None:
                raise InputError("known noise variances need Gaussian noise; leave them out.")
            observation_model(self.likelihood).check_targets(rows.Y)

    def bound(self, data: Dataset, *, generator: torch.Generator | None = None) -> Scalar:
        """Return the lower bound on log p(Y) with all candidates and the optimal q(u), in nats."""
        if self.has_sites:
            return self.chunked_bound(data)()
        self.check(data)
        return moment_bound(self._moments(data, [cholesky(K).L for K in self._prior()]))

    def subset_objective(
        self, data: Dataset, *, generator: torch.Generator | None = None
    ) -> SubsetObjective:
        """Return the bound in nats as a function of the subset of all candidates that is used."""
        self.check(data)
        if self.has_sites:
            return SiteObjective(self, data)
        pairs = zip(self.kernels, self.candidate_sets, strict=True)
        blocks = tuple(kernel_blocks(kernel, Z, data.X) for kernel, Z in pairs)
        return MultiOutputObjective(blocks, self._targets(data))

    @torch.no_grad()
    def subset_statistics(self, data: Dataset) -> SubsetStatistics:
        """Return statistics that score subsets of all candidates; O(N K²) once.

        They are exact for Gaussian noise, and for all candidates; otherwise to first order, at the
        sites of the optimal q(u) of all candidates.
        """
        L, moments = self.moments(data)
        return subset_statistics(torch.block_diag(*L), moments)

    @torch.no_grad()
    def moments(self, data: Dataset) -> tuple[list[Tensor], Moments]:
        """Return the Cholesky factor of each process, and the moments whitened with them.

        Other noise than Gaussian has the moments of its sites at the optimal q(u).
        """
        self.check(data)
        if self.has_sites:
            return self._site_moments(data)
        L = [cholesky(K).L for K in self._prior()]
        return L, self._moments(data, L)

    def fixed_bound(self, data: Dataset) -> float:
        """Return the collapsed bound as a number."""
        return moment_bound(self.moments(data)[1]).item()

    def chunked_bound(self, data: Dataset) -> Callable[[], Scalar]:
        """Return the collapsed bound as a function of the current parameters.

        The gradient is computed with the value, in two passes over blocks of rows
        (`bounds.mixing`). Memory does not grow with N K. The jitter is the 1e-8 of
        `bounds.row_blocks`, part of the objective.
        """
        self.check(data)
        blocks = RowBlocks.of(data, points=self.K)

        def chunks() -> tuple[MixedChunks, list[Tensor]]:
            kernels, inputs = self._chunked_kernels(blocks)
            return MixedChunks.for_gradients(kernels, blocks, combined=self._combined()), inputs

        if isinstance(self.likelihood, TargetLikelihoods):
            return MixedProfiledBound(
                data,
                likelihood=self.likelihood,
                chunks=chunks,
                mixing=lambda: self.mixing,
                gain=TRAINING_GAIN,
            )
        plain = data.complete and data.weights is None and data.noise is None

        def value() -> Scalar:
            rows, inputs = chunks()
            mixing, noise = self.mixing, self.noise
            leaves = [each.detach().clone().requires_grad_() for each in (mixing, noise)]

            def evaluate() -> tuple[Tensor, tuple[Tensor, ...]]:
                result = mixed_two_pass(
                    rows,
                    targets=lambda block: _mixed_targets(block, *leaves),
                    parameters=leaves,
                    shared=plain,
                )
                return result.value, (*result.targets, *(g for own in result.kernels for g in own))

            return WithGradient.apply(evaluate, mixing, noise, *inputs)

        return value

    def dense_bound(self, data: Dataset) -> Callable[[], Scalar]:
        """Return the exact log p(Y) as a function of the current parameters; O((N P)³).

        The covariance of two observed targets is Σ_q W_pq W_p'q k_q(x, x'). For Gaussian noise.
        """
        self.check(data)
        rows, columns = (~torch.isnan(data.Y)).nonzero().unbind(1)
        X, Y = data.X, data.Y[rows, columns][:, None]
        known = 0.0 if data.noise is None else data.noise[rows, columns]
        weights = None if data.weights is None else data.weights[rows]

        def value() -> Scalar:
            W = self.mixing[columns]
            terms = [
                covariance(kernel, X, X)[rows][:, rows] * (w[:, None] * w)
                for kernel, w in zip(self.kernels, W.mT, strict=True)
            ]
            noise = self.noise[columns] + known
            constant = 0.0
            if weights is not None:
                noise, constant = noise / weights, weight_correction(weights, noise)
            return exact_log_marginal(torch.stack(terms).sum(0), Y=Y, noise=noise) + constant

        return value

    def evidence(self, data: Dataset, *, max_rows: int | None = None) -> Evidence:
        """Return log p(Y) at the same parameters in nats: exact, or between two bounds.

        Args:
            data: the rows.
            max_rows: observed targets up to which it is exact; chosen for the device if None.
        """
        if self.has_sites:
            return Evidence(self.fixed_bound(data), inf, "none")
        limit = exact_rows(data.device) if max_rows is None else max_rows
        if int((~torch.isnan(data.Y)).sum()) <= limit:
            with torch.no_grad():
                exact = self.dense_bound(data)().item()
            return Evidence(exact, exact, "exact")
        moments = self.moments(data)[1]
        return Evidence(moment_bound(moments).item(), moment_upper_bound(moments).item(), "trace")

    def with_candidates(self, candidates: Sequence[Float[Tensor, "_ D"]]) -> "MultiOutputGP":
        """Return a new model with the same parameters and other candidates of each process."""
        copied = copy_module(self)
        for q, points in enumerate(candidates):
            learnt = self.candidate_list[q].requires_grad
            parameter = nn.Parameter(points.detach().clone(), requires_grad=learnt)
            copied.candidate_list[q] = parameter
        return copied

    def _pruned(self, *masks: Tensor) -> "MultiOutputGP":
        pairs = zip(self.candidate_sets, masks, strict=True)
        return self.with_candidates([points[mask] for points, mask in pairs])

    @torch.no_grad()
    def posterior(self, data: Dataset) -> MultiOutputPosterior:
        """Return q(f) of all processes jointly, which does not depend on the data afterwards."""
        L, moments = self.moments(data)
        q_mean, q_factor = moment_posterior(moments)
        return MultiOutputPosterior(
            self.kernels,
            self.candidate_sets,
            mixing=self.mixing,
            likelihood=self.likelihood,
            q_mean=q_mean[:, 0],
            q_factor=q_factor[0],
            L=L,
        )

    def _combined(self) -> Bool[Tensor, "Q Q"]:
        """Return which pairs of processes a target combines."""
        used = (self.mixing_learnt | (self.initial_mixing != 0)).double()
        return (used.mT @ used) > 0

    def _chunked_kernels(self, blocks: RowBlocks) -> tuple[list[ChunkedKernel], list[Tensor]]:
        """Return the kernel of each process in blocks of rows, and the inputs of all gradients."""
        pairs = zip(self.kernels, self.candidate_sets, strict=True)
        chunked = [chunked_kernel(*pair, blocks) for pair in pairs]
        return [kernel for kernel, _ in chunked], [each for _, own in chunked for each in own]

    def _site_moments(self, data: Dataset) -> tuple[list[Tensor], Moments]:
        assert isinstance(self.likelihood, TargetLikelihoods)
        blocks = RowBlocks.of(data, points=self.K)
        kernels, _ = self._chunked_kernels(blocks)
        chunks = MixedChunks.for_values(kernels, blocks, combined=self._combined())
        mixing = self.mixing.detach()
        inference = infer_mixed_sites(
            chunks,
            expected_targets(self.likelihood, data),
            mixing=mixing,
            start=initial_sites(self.likelihood, data),
            gain=FINAL_GAIN * data.N * data.P,
        )
        targets = site_targets(inference.sites, mixing)
        C, D, square, constant, diagonal, _ = chunks.moments(targets, shared=False)
        moments = Moments(C, D[:, None], square, diagonal, constant, blocks.observations)
        # The constant makes the bound of all candidates the true one.
        constant = constant + inference.bound - moment_bound(moments)
        return list(chunks.L), replace(moments, constant=constant)

    def _prior(self) -> list[Float[Tensor, "_ _"]]:
        """Return K_uu of each process."""
        pairs = zip(self.kernels, self.candidate_sets, strict=True)
        return [covariance(kernel, Z, Z) for kernel, Z in pairs]

    def _targets(self, rows: Dataset) -> MixedTargets:
        return _mixed_targets(rows, self.mixing, self.noise)

    def _moments(self, data: Dataset, L: list[Tensor]) -> Moments:
        """Return the moments of all rows, differentiable, in blocks of rows."""

        def moments_of(rows: Dataset) -> Moments:
            pairs = list(zip(self.kernels, self.candidate_sets, strict=True))
            kff = torch.stack([prior_variance(kernel, rows.X) for kernel, _ in pairs])
            Kuf = [covariance(kernel, Z, rows.X) for kernel, Z in pairs]
            return mixed_moments(L, Kuf, kff=kff, targets=self._targets(rows))

        blocks = data.chunks(block_size(data.device, self.K, data.D))
        return reduce(add, map(moments_of, blocks))


def _mixed_targets(
    rows: Dataset | RowBlock, mixing: Float[Tensor, "P Q"], noise: Float[Tensor, " P"]
) -> MixedTargets:
    variances = noise[None] if rows.noise is None else noise + rows.noise
    return MixedTargets.of(rows.Y, mixing=mixing, noise=variances, weights=rows.weights)
