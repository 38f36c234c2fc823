"""Sparse Gaussian-process regression with Gaussian noise: the collapsed bound of Titsias (2009)."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from math import log, pi
from typing import final

import torch
from gpytorch.kernels import Kernel
from gpytorch.means import Mean, ZeroMean
from jaxtyping import Float, Int
from torch import Tensor, nn

from winnowgp.bounds import collapsed_bound, subset_blocks
from winnowgp.bounds.collapsed import (
    GroupedChunk,
    Moments,
    grouped_sums,
    masked_blocks,
    moment_bound,
    moment_posterior,
    moment_upper_bound,
    weight_correction,
)
from winnowgp.bounds.evidence import (
    Evidence,
    affordable_iterations,
    conjugate_gradient_evidence,
    exact_evidence,
    exact_rows,
)
from winnowgp.bounds.row_blocks import ChunkedKernel, RowBlock, RowBlocks, Sums
from winnowgp.data import Dataset, Source
from winnowgp.data.noise import NoiseGroup, noise_groups, target_groups
from winnowgp.errors import InputError, NotPositiveDefiniteError
from winnowgp.linalg import cholesky
from winnowgp.models import kernels
from winnowgp.models.base import InducingModel, check_kernel, copy_with
from winnowgp.models.chunked_kernels import chunked_kernel
from winnowgp.models.closed_forms import ParametricBound
from winnowgp.models.exact_gp import gaussian_rows
from winnowgp.models.observations import gaussian_noise, target_noise
from winnowgp.models.posterior import Posterior
from winnowgp.selection import SubsetStatistics
from winnowgp.selection.objective import RelaxedObjective, subset_statistics
from winnowgp.typing import Masks, Nats, Noise, Scalar, TargetNoise, Weights

PRECISIONS = ("double", "mixed")


@final
@dataclass(frozen=True, slots=True)
class CollapsedObjective(RelaxedObjective):
    """The collapsed bound of any subset, differentiable in kernel, noise and locations.

    The kernel is evaluated once for all candidates. A batch of S subsets costs O(S N M²) with M the
    size of the largest, for each group of targets that share their noise.
    """

    blocks: kernels.KernelBlocks
    targets: "tuple[GroupTargets, ...]"

    @property
    def K(self) -> int:
        return self.blocks.Kuu.shape[0]

    def value(self, mask: Masks) -> Nats:
        return self._summed(*subset_blocks(self.blocks.Kuu, self.blocks.Kuf, mask))

    def relaxed_value(self, weights: Weights) -> Nats:
        return self._summed(*masked_blocks(self.blocks.Kuu, self.blocks.Kuf, weights))

    def all_candidates(self) -> Scalar:
        """Return the bound of all candidates in nats."""
        return self._summed(self.blocks.Kuu, self.blocks.Kuf)

    def _summed(self, Kuu: Tensor, Kuf: Tensor) -> Tensor:
        return torch.stack([t.bound(Kuu, Kuf, self.blocks.kff) for t in self.targets]).sum(0)


@final
@dataclass(frozen=True, slots=True)
class GroupTargets:
    """Targets with the same noise in every row, and the rows that have them."""

    Y: Float[Tensor, "n p"]
    """Targets minus the prior mean."""
    noise: Noise
    """Noise variance, that of each row divided by its weight."""
    constant: Scalar | float
    """A constant added to the bound: `bounds.weight_correction` if rows have weights."""
    rows: Int[Tensor, " n"] | None
    """The rows; None for all."""

    def bound(
        self,
        Kuu: Float[Tensor, "*batch M M"],
        Kuf: Float[Tensor, "*batch M N"],
        kff: Float[Tensor, " N"],
    ) -> Float[Tensor, "*batch"]:
        """Return the collapsed bound of these targets in nats."""
        if self.rows is not None:
            Kuf, kff = Kuf[..., self.rows], kff[self.rows]
        return collapsed_bound(Kuu, Kuf, kff=kff, Y=self.Y, noise=self.noise) + self.constant


@final
class SparseGP(InducingModel):
    """A Gaussian process with Gaussian noise and K candidate inducing points.

    q(u) is always the optimal one (the collapsed bound of Titsias 2009), so that the parameters
    are those of kernel and mean, the noise variance and the locations of the candidates.

    Args:
        kernel: a GPyTorch kernel without batch shape; copied.
        candidates: locations of the candidates, `[K D]`; copied, and learnt unless frozen.
        mean: prior mean, a GPyTorch mean; copied; zero by default.
        noise: initial noise variance of all targets; or one each, `[P]`, which are then learnt for
            each target. Rows with known noise variances (`Dataset.noise`) have both.
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
        noise: float | Float[Tensor, " P"] = 1.0,
        precision: str = "double",
    ) -> None:
        super().__init__()
        check_kernel(kernel, candidates)
        self.precision = _checked_precision(precision)
        self.kernel = kernels.copy_module(kernel).to(candidates)
        self.mean = kernels.copy_module(ZeroMean() if mean is None else mean).to(candidates)
        start = torch.as_tensor(noise, dtype=candidates.dtype, device=candidates.device)
        self.likelihood = gaussian_noise(start)
        self.candidates = nn.Parameter(candidates.detach().clone())

    @property
    def noise(self) -> TargetNoise:
        """Noise variance σ² that is learnt: one for all targets, or one each."""
        return target_noise(self.likelihood)

    def check(self, data: Source) -> None:
        """Raise an error if there is a noise variance for each target, but not as many targets."""
        if self.noise.dim() and len(self.noise) != data.P:
            raise InputError(
                f"the model has noise variances for {len(self.noise)} targets; the data have "
                f"{data.P}. Pass `noise` as one number, or one for each target."
            )

    def subset_objective(
        self,
        data: Dataset,
        *,
        total: int | None = None,
        generator: torch.Generator | None = None,
    ) -> CollapsedObjective:
        """Return the bound in nats as a function of the subset of candidates that is used."""
        _refuse_minibatch(total)
        self.check(data)
        blocks = kernels.kernel_blocks(self.kernel, self.candidates, data.X)
        centred = replace(data, Y=data.Y - kernels.prior_mean(self.mean, data.X))
        groups = self._groups(data)
        return CollapsedObjective(blocks, tuple(_group_targets(g, centred) for g in groups))

    def subset_statistics(self, data: Source) -> SubsetStatistics:
        """Return statistics that score subsets exactly at fixed parameters; O(N K²) once.

        Values of subsets, and the marginal gains of all candidates, then have a cost that does not
        depend on the number of rows.
        """
        L, moments = self.moments(data)
        return subset_statistics(L, *moments)

    @torch.no_grad()
    def moments(self, data: Source) -> tuple[Float[Tensor, "K K"], tuple[Moments, ...]]:
        """Return the Cholesky factor of K_uu, and the moments of the data whitened with it.

        They suffice for predictions and scores at fixed parameters, and take one pass over the
        rows. There is one for each group of targets that share their noise in every row.
        """
        self.check(data)
        blocks = self._blocks(data)
        kernel, _ = chunked_kernel(self.kernel, self.candidates, blocks)
        # More accurate for points that nearly coincide than `kernel.uu`.
        L = cholesky(kernels.covariance(self.kernel, self.candidates, self.candidates)).L
        groups = noise_groups(blocks.groups, self.noise)
        sums = blocks.mapped(
            lambda shard: self._sums(L, kernel, shard, groups),
            parallel=kernel.parallel and blocks.worth_sharing(self.K),
        )
        moments: list[Moments] = []
        # Four sums of each group, then two numbers of each.
        numbers = sums[4 * len(groups) :]
        for i, group in enumerate(groups):
            own = (*sums[4 * i : 4 * i + 4], *numbers[2 * i : 2 * i + 2])
            moments += _moments_of(group, own, blocks.observations)
        return L, tuple(moments)

    def bound(
        self,
        data: Dataset,
        *,
        total: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Scalar:
        """Return the collapsed lower bound on log p(Y) with all candidates, in nats."""
        return self.subset_objective(data, total=total, generator=generator).all_candidates()

    def fixed_bound(self, data: Source) -> float:
        """Return the collapsed bound as a number, in one pass over blocks of rows."""
        return _total(moment_bound, self.moments(data)[1])

    def chunked_bound(self, data: Source) -> Callable[[], Scalar]:
        """Return the collapsed bound as a function of the current parameters.

        Quantities that depend on the rows alone are computed once, memory does not grow with N · K,
        and the jitter is the 1e-8 of `bounds.row_blocks`, part of the objective.
        """
        self.check(data)
        dtype = torch.float32 if self.precision == "mixed" else None
        return ParametricBound(self, self._blocks(data), dtype=dtype)

    def bound_and_trace(self, data: Source) -> tuple[float, float]:
        """Return the collapsed bound, and the nats ½ Σ_i w_i (k_ii − q_ii) of its trace term."""
        moments = self.moments(data)[1]
        return _total(moment_bound, moments), _total(_trace_term, moments)

    def chunked_cost_of(self, data: Source, K: int) -> float:
        groups = self._groups(data)
        sums = len(noise_groups(target_groups(data), self.noise))
        return sums * 9.0 * data.N * K**2 + len(groups) * 4.0 * K**3

    def noise_terms(self, data: Source) -> int:
        return len(self._groups(data))

    def dense_bound(self, data: Dataset) -> Callable[[], Scalar]:
        """Return the exact log p(Y), which needs no inducing points, as a function; O(N³).

        Each group of targets with noise of its own takes as long.
        """
        self.check(data)
        return ParametricBound(self, RowBlocks.of(data, size=data.N), exact=True)

    def upper_bound(self, data: Source) -> float:
        """Return an upper bound on log p(Y) at the same parameters, in nats."""
        return _total(moment_upper_bound, self.moments(data)[1])

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
        lower, upper = _total(moment_bound, moments), _total(moment_upper_bound, moments)
        return Evidence(lower, upper, "trace")

    def with_candidates(
        self, candidates: Float[Tensor, "J D"], *, shared: bool = False
    ) -> "SparseGP":
        """Return a new model with the same parameters and other candidates.

        Args:
            shared: whether it has the kernel, mean and likelihood of this model, not copies.
        """
        return copy_with(self, candidates, shared=shared)

    def _pruned(self, *masks: Tensor) -> "SparseGP":
        return self.with_candidates(self.candidates[masks[0]])

    def with_best_q(self, data: Source) -> "SparseGP":
        """Return the model itself, whose q(u) is always the optimal one."""
        return self

    @torch.no_grad()
    def posterior(self, data: Source) -> Posterior:
        """Return q(f) given the data, on which it does not depend afterwards; O(N K²) once."""
        q_mean, q_factor = self.optimal_q(data, self.moments(data)[1])
        return Posterior(
            self.kernel,
            self.candidates.detach(),
            mean=self.mean,
            likelihood=self.likelihood,
            q_mean=q_mean,
            q_factor=q_factor,
        )

    def optimal_q(
        self, data: Source, moments: tuple[Moments, ...]
    ) -> tuple[Float[Tensor, "M P"], Float[Tensor, "#P M M"]]:
        """Return means and factors of the optimal q(v) from moments of the data; O(M³)."""
        q_mean, q_factor = moment_posterior(*moments)
        groups = self._groups(data)
        if len(groups) > 1:
            # From the order of the groups to that of the targets.
            targets = torch.tensor([p for group in groups for p in group.group.targets])
            order = targets.argsort().to(q_mean.device)
            q_mean, q_factor = q_mean[:, order], q_factor[order]
        return q_mean, q_factor

    def _blocks(self, data: Source) -> RowBlocks:
        return RowBlocks.of(data, points=self.K, device=self.candidates.device)

    def _groups(self, data: Source) -> list[NoiseGroup]:
        """Return the groups of targets that share their noise in every row."""
        return noise_groups(target_groups(data), self.noise, separate=True)

    def _sums(
        self,
        L: Float[Tensor, "K K"],
        kernel: ChunkedKernel,
        rows: Iterable[RowBlock],
        groups: list[NoiseGroup],
    ) -> Sums:
        """Return `grouped_sums` of some rows, and Σ w and Σ w log (s + σ²) of each group."""
        totals = [[L.new_zeros(()), L.new_zeros(())] for _ in groups]

        def chunks() -> Iterator[GroupedChunk]:
            for block in rows:
                Y = block.Y - kernels.prior_mean(self.mean, block.X)
                targets = []
                for group, total in zip(groups, totals, strict=True):
                    own = group.rows(block, Y)
                    # A row of weight w counts as w rows, or as one row with noise σ²/w.
                    unit = 1 / (L.new_ones(()) if group.separate else group.unit)
                    precision = unit.expand(len(block))
                    precision = precision if own.weights is None else precision * own.weights
                    targets.append((own.Y, precision))
                    if not group.group.plain:
                        counts = torch.ones_like(Y[:, 0]) if own.counts is None else own.counts
                        total[0] = total[0] + counts.sum()
                        if own.variance is not None:
                            total[1] = total[1] + (counts * own.variance.log()).sum()
                yield kernel.uf(block), kernel.ff(block), targets

        sums = grouped_sums(L, chunks())
        return (*sums, *(number for total in totals for number in total))

    def _dense_evidence(self, data: Dataset, max_rows: int | None) -> Evidence | None:
        """Return the evidence from K_ff, or None if that is not affordable or K̂ is singular."""
        # A copy takes longer than the evidence of few rows.
        exact = self.candidates.dtype == torch.float64
        model = self if exact else kernels.copy_module(self).double()
        device = model.candidates.device
        limit = exact_rows(device) if max_rows is None else max_rows
        groups = gaussian_rows(
            model.kernel, data=data.to(device).double(), mean=model.mean, noise=model.noise
        )
        terms = []
        try:
            for rows in groups:
                if limit >= rows.N:
                    terms.append(exact_evidence(rows))
                    continue
                iterations = affordable_iterations(rows, self.K) // len(groups)
                if not iterations:
                    return None
                Z = model.candidates.detach()
                terms.append(conjugate_gradient_evidence(rows, Z, max_iterations=iterations))
        except NotPositiveDefiniteError:
            # The noise is too small for the scale of the kernel; moments need K_uu only.
            return None
        methods = [term.method for term in terms if not term.exact]
        lower, upper = sum(term.lower for term in terms), sum(term.upper for term in terms)
        return Evidence(lower, upper, methods[0] if methods else "exact")


def _group_targets(group: NoiseGroup, data: Dataset) -> GroupTargets:
    observed = group.group.observed(group.group.columns(data.Y))
    own = group.observed_rows(data)
    rows = None if observed is None else observed.nonzero().flatten()
    noise, constant = group.row_noise(own), 0.0
    if own.weights is not None:
        constant = own.P * weight_correction(own.weights, noise)
        noise = noise / own.weights
    return GroupTargets(own.Y, noise, constant, rows)


def _moments_of(
    group: NoiseGroup, sums: tuple[Tensor, ...], observations: int | float
) -> list[Moments]:
    """Return the moments of a group; of each of its targets, if they have noise of their own."""
    C, D, square, diagonal, counted, log_variance = sums
    count = observations if group.group.plain else counted
    if not group.separate:
        constant = -0.5 * (count * (log(2 * pi) + group.unit.log()) + log_variance)
        return [Moments(C, D, square.sum(), diagonal, constant, observations)]
    return [
        Moments(
            C / noise,
            D[:, columns] / noise,
            square[columns].sum() / noise,
            diagonal / noise,
            -0.5 * count * (log(2 * pi) + noise.log()),
            observations,
        )
        for columns, noise in group.variances()
    ]


def _trace_term(moments: Moments) -> Scalar:
    unexplained = moments.diagonal - moments.C.diagonal().sum()
    return 0.5 * moments.D.shape[1] * unexplained


def _total(nats: Callable[[Moments], Scalar], moments: tuple[Moments, ...]) -> float:
    return torch.stack([nats(each) for each in moments]).sum().item()


def _checked_precision(precision: str) -> str:
    if precision not in PRECISIONS:
        raise InputError(f"`precision` must be 'double' or 'mixed'; got {precision!r}.")
    return precision


def _refuse_minibatch(total: int | None) -> None:
    if total is not None:
        raise InputError(
            "the collapsed bound needs all rows at once; leave `total` (or the batch size) out, or "
            "use `VariationalGP`."
        )
