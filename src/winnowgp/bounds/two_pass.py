"""The gradient of the collapsed bound of rows that come in chunks.

The gradient (`two_pass_bound`) takes two passes. With K_uu = L Lᵀ, V = L⁻¹ K_uf, C = V Vᵀ,
d = V Y, B = I + C/σ², β = B⁻¹ d/σ² and t_i = k_ii − ‖v_i‖² the collapsed bound is

    F = −NP/2 log 2πσ² − P/2 log|B| − (‖Y‖² − ⟨d, β⟩)/(2σ²) − P/(2σ²) Σ_i t_i.

Pass one accumulates C, d, ‖Y‖² and Σ t_i. The remaining terms have the size of K_uu and are
differentiated in closed form; pass two propagates the gradient to each chunk of the kernel:

    ∂F/∂K_uf = L⁻ᵀ [(P(I − B⁻¹) − ββᵀ) V + β Yᵀ] / σ²
    ∂F/∂K_uu = −½ L⁻ᵀ [P(B + B⁻¹ − 2I) + ββᵀ] L⁻¹
    ∂F/∂k_ii = −P/(2σ²),   ∂F/∂Y = −(Y − Vᵀβ)/σ²

The Cholesky factor itself is not differentiated. Memory is O(chunk · M + M²) for any N. A row of
weight w counts as w equal rows: its terms of these sums and of the gradient are multiplied by w.

Targets with different noise, or missing in different rows, are groups whose bounds are added
(`data.noise`). A group with known noise s_i has Σ = diag(s_i + σ²) in place of σ²I: sums are
formed with w_i/(s_i + σ²), and those with w_i/(s_i + σ²)², their derivatives in σ², as well.

Most small tables have all rows in one block, no known noise, no missing targets, one noise variance
and rows of weight one. For few rows and inducing points the number of operations decides, not their
size: `OneBlockBound` takes fewer for the same bound and gradient.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import islice
from math import log, pi
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from winnowgp.bounds import panels, row_blocks
from winnowgp.data.noise import NoiseGroup, noise_groups
from winnowgp.linalg import definite_cholesky, half_log_det
from winnowgp.typing import TargetNoise


class ChunkedMean(ABC):
    """A prior mean at fixed parameters, with the pull-back of gradients onto these parameters."""

    @abstractmethod
    def fork(self) -> "ChunkedMean":
        """Return the same mean with sums of its own, which are zero."""

    @abstractmethod
    def centred(self, block: row_blocks.RowBlock) -> Float[Tensor, "B P"]:
        """Return the targets of a block minus their prior mean."""

    @abstractmethod
    def pull(self, block: row_blocks.RowBlock, cotangent: Float[Tensor, "B P"]) -> None:
        """Add the pull-back of ∂F/∂mean of a block to the gradient of the parameters."""

    @abstractmethod
    def pulled(self) -> row_blocks.Sums:
        """Return the gradient accumulated since the last call, one tensor per parameter."""


@dataclass(frozen=True, slots=True)
class BoundGradient:
    """A bound in nats and its gradient."""

    value: Float[Tensor, ""]
    noise: TargetNoise
    """Gradient with respect to the learnt noise variances."""
    mean: tuple[Tensor, ...]
    """Gradient with respect to the parameters of the prior mean."""
    kernel: tuple[Tensor, ...]
    """Gradient with respect to kernel parameters and inducing points, in the kernel's order."""
    information: Float[Tensor, "q q"] | None = None
    """Average information of the noise and the kernel parameters, if it was asked for."""


@torch.no_grad()
def two_pass_bound(
    kernel: row_blocks.ChunkedKernel,
    blocks: row_blocks.RowBlocks,
    *,
    mean: ChunkedMean,
    noise: TargetNoise,
    keep: int | None = None,
    dtype: torch.dtype | None = None,
) -> BoundGradient:
    """Return the collapsed bound and its gradient; O(N M²) time, and O(M³) for each σ².

    Args:
        kernel: kernel at fixed parameters.
        blocks: the rows.
        mean: prior mean.
        noise: σ², one for all targets or one each.
        keep: largest number of elements to keep in memory between the passes; see `WhitenedChunks`.
        dtype: dtype of the matrices with one column per row; their sums have the dtype of `noise`.
            float32 matrices with float64 sums are faster, and accurate to seven digits per row.

    Raises:
        NotPositiveDefiniteError: K_uu or B cannot be factorised.
    """
    block = one_block(blocks, noise) if dtype is None else None
    if block is not None:
        bound = OneBlockBound.of(kernel, block, mean.centred(block), noise=noise.item())
        slope, mean_gradient, gradient = bound.gradient()
        mean.pull(block, mean_gradient)
        value, slope = noise.new_tensor([bound.value, slope])
        return BoundGradient(value, slope, mean.pulled(), gradient)
    chunks = row_blocks.WhitenedChunks.for_gradients(kernel, blocks, keep=keep, dtype=dtype)
    L_inverse, terms = chunks.L_inverse, _group_terms(chunks, mean, noise)
    groups = [term.group for term in terms]
    value = _total([term.value for term in terms])
    noise_gradient = gathered_noise(noise, [(t.group, t.noise_gradient) for t in terms])
    # ∂F/∂K_uu = −½ L⁻ᵀ [P(C/σ² − I + B⁻¹) + ββᵀ] L⁻¹
    inner = _total([term.inner for term in terms])
    Kuu_gradient = panels.congruence(L_inverse, inner).mul_(-0.5)
    if M := len(L_inverse):
        Kuu_gradient.diagonal().add_(Kuu_gradient.diagonal().sum() * (row_blocks.JITTER / M))
    factors = [term.to(chunks.dtype) for term in terms]

    def pull_back(shard: Iterable[row_blocks.WhitenedChunk]) -> row_blocks.Sums:
        own_kernel, own_mean = kernel.fork(), mean.fork()
        for chunk in shard:
            centred = mean.centred(chunk.block)
            pulled = [factor.pulled(chunk, centred) for factor in factors]
            own_mean.pull(chunk.block, joined_columns(groups, [Y for Y, _, _ in pulled], centred))
            own_kernel.pull_uf(chunk.block, _total([Kuf for _, Kuf, _ in pulled]), chunk.Kuf)
            own_kernel.pull_ff(chunk.block, -0.5 * _total([kff for _, _, kff in pulled]))
        return (*own_kernel.pulled(), *own_mean.pulled())

    pulled = chunks.summed(pull_back)
    split = len(pulled) - len(mean.pulled())
    gradient = kernel.gradient(pulled[:split], Kuu_gradient)
    return BoundGradient(value, noise_gradient, pulled[split:], gradient)


@torch.no_grad()
def one_pass_bound(
    kernel: row_blocks.ChunkedKernel,
    blocks: row_blocks.RowBlocks,
    *,
    mean: ChunkedMean,
    noise: TargetNoise,
    dtype: torch.dtype | None = None,
) -> Float[Tensor, ""]:
    """Return the value of `two_pass_bound` without its gradient, in less than half of the time."""
    block = one_block(blocks, noise) if dtype is None else None
    if block is not None:
        bound = OneBlockBound.of(kernel, block, mean.centred(block), noise=noise.item())
        return noise.new_tensor(bound.value)
    chunks = row_blocks.WhitenedChunks.for_gradients(kernel, blocks, keep=0, dtype=dtype)
    return _total([term.value for term in _group_terms(chunks, mean, noise)])


def _group_terms(
    chunks: row_blocks.WhitenedChunks, mean: ChunkedMean, noise: TargetNoise
) -> "list[_GroupTerm]":
    groups = noise_groups(chunks.blocks.groups, noise)
    sums = iter(_accumulate(chunks, mean, groups))
    N = chunks.blocks.observations
    return [_GroupTerm.of(group, sums, chunks.L_inverse, N) for group in groups]


def _accumulate(
    chunks: row_blocks.WhitenedChunks, mean: ChunkedMean, groups: Sequence[NoiseGroup]
) -> row_blocks.Sums:
    """Return the sums over all rows that `_GroupTerm` needs, group by group: pass one."""

    def sums(shard: Iterable[row_blocks.WhitenedChunk]) -> row_blocks.Sums:
        totals = [_GroupSums(group, chunks.L) for group in groups]
        for chunk in shard:
            Y = mean.centred(chunk.block)
            for total in totals:
                total.add(chunk, Y)
        return tuple(tensor for total in totals for tensor in total.taken())

    return chunks.summed(sums)


@final
class _GroupSums:
    """C = V W Vᵀ, d = V W Y, Σ w y² and Σ w t_i of the targets of a group, divided by no σ².

    Where σ² is the same for all rows and targets, the last sum is divided by it. If targets are
    missing, the number of observations follows; if noise is known, so do the sum of log (s_i + σ²)
    over observations and the derivatives of all sums in σ².
    """

    def __init__(self, group: NoiseGroup, L: Float[Tensor, "M M"]) -> None:
        self.group, noise = group, group.noise
        M, P = len(L), group.group.P
        zero = noise.new_zeros(())
        square = noise.new_zeros(P) if group.separate else zero
        self.sums = [noise.new_zeros(M, M), noise.new_zeros(M, P), square, zero]
        self.slopes = [noise.new_zeros(M, M), noise.new_zeros(M, P), zero, zero]
        self.count = self.log = self.log_slope = zero

    def add(self, chunk: row_blocks.WhitenedChunk, Y: Float[Tensor, "B P"]) -> None:
        rows, t = self.group.rows(chunk.block, Y), chunk.t.to(self.group.noise.dtype)
        self._add(self.sums, chunk.V, rows.Y, t, rows.weights)
        if self.group.group.plain:
            return
        counts = torch.ones_like(t) if rows.counts is None else rows.counts
        self.count = self.count + counts.sum()
        if rows.variance is not None:
            self.log = self.log + (counts * rows.variance.log()).sum()
            self.log_slope = self.log_slope + (counts / rows.variance).sum()
            self._add(self.slopes, chunk.V, rows.Y, t, counts / rows.variance.square())

    def _add(
        self, sums: list[Tensor], chunk: Tensor, Y: Tensor, t: Tensor, w: Tensor | None
    ) -> None:
        V = chunk if w is None else chunk * w.to(chunk.dtype)
        panels.add_gram(sums[0], V, chunk)
        panels.add_product(sums[1], V, Y.to(V.dtype))
        square = Y.square() if w is None else w[:, None] * Y.square()
        sums[2] = sums[2] + (square.sum(0) if self.group.separate else square.sum())
        unit = 1.0 if self.group.separate else self.group.unit
        sums[3] = sums[3] + (t if w is None else w * t).sum() / unit

    def taken(self) -> row_blocks.Sums:
        C, *others = self.sums
        taken = (panels.from_panels(C), *others)
        if self.group.group.plain:
            return taken
        if not self.group.group.known:
            return (*taken, self.count)
        C, *others = self.slopes
        slopes = (panels.from_panels(C), *others)
        return (*taken, self.count, self.log, self.log_slope, *slopes)


@final
@dataclass(frozen=True, slots=True)
class _GroupTerm:
    """The bound of the targets of a group, and the part of its gradient that has the size of K_uu.

    Every σ² of the group has its own B and β; the sums of their gradients are stored.
    """

    group: NoiseGroup
    value: Float[Tensor, ""]
    noise_gradient: TargetNoise
    inner: Float[Tensor, "M M"]
    middle: Float[Tensor, "M M"]
    left: Float[Tensor, "M p"]
    beta: Float[Tensor, "M p"]
    precision: Float[Tensor, ""]
    """Σ_p 1/σ_p²."""

    @classmethod
    def of(
        cls,
        group: NoiseGroup,
        sums: Iterator[Tensor],
        L_inverse: Float[Tensor, "M M"],
        N: int | float,
    ) -> "_GroupTerm":
        """Return the terms of a group from its part of all sums.

        Args:
            N: number of observations, if no target is missing.
        """
        C, d, square, trace = islice(sums, 4)
        count = N if group.group.plain else next(sums)
        M, eye = len(C), torch.eye(len(C), dtype=C.dtype, device=C.device)
        known = group.group.known
        log_sum, log_slope, *slopes = islice(sums, 6) if known else (torch.zeros_like(trace),) * 2
        parts: list[tuple[Tensor, ...]] = []
        for columns, noise in group.variances():
            own_d, own_square = d[:, columns], square[columns] if group.separate else square
            own_square = own_square.sum() if group.separate else own_square
            own_trace = trace / noise if group.separate else trace
            P = own_d.shape[1]
            LB = definite_cholesky(eye + C / noise)
            B_inverse = panels.inverse_of_factor(LB)
            beta = torch.cholesky_solve(own_d, LB) / noise
            residual = own_square - (own_d * beta).sum()
            log_det = count * (log(2 * pi) + noise.log())
            value = -0.5 * (
                P * (log_det + log_sum)
                + 2 * P * half_log_det(LB)
                + residual / noise
                + P * own_trace
            )
            if known:
                # ∂F/∂σ² = −½ [P (Σ w + tr B⁻¹C' + Σ t') + Σ y²' − 2⟨d', β⟩ + βᵀC'β], where the
                # slopes are −C', −d', −Σ y²' and −Σ t'.
                C_slope, d_slope, square_slope, trace_slope = slopes
                slope = -0.5 * (
                    P * (log_slope - (B_inverse * C_slope).sum() - trace_slope)
                    - square_slope
                    + 2 * (d_slope * beta).sum()
                    - (beta * (C_slope @ beta)).sum()
                )
            else:
                slope = 0.5 * (
                    P * (M - B_inverse.diagonal().sum() - count) / noise
                    + residual / noise**2
                    - beta.square().sum() / noise
                    + P * (own_trace / noise)
                )
            inner = torch.addmm(P * (C / noise - eye + B_inverse), beta, beta.mT)
            # ∂F/∂K_uf = L⁻ᵀ [(P I − P B⁻¹ − ββᵀ) V + β Yᵀ] / σ²
            middle = torch.addmm(P * eye - P * B_inverse, beta, beta.mT, alpha=-1)
            middle = panels.upper_product(L_inverse, middle).div_(noise)
            left = L_inverse.mT @ beta / noise
            parts.append((value, slope, inner, middle, left, beta, P / noise))
        value, slope, inner, middle, left, beta, precision = zip(*parts, strict=True)
        return cls(
            group=group,
            value=_total(value),
            noise_gradient=torch.stack(slope) if group.separate else slope[0],
            inner=_total(inner),
            middle=_total(middle),
            left=torch.cat(left, 1),
            beta=torch.cat(beta, 1),
            precision=_total(precision),
        )

    def to(self, dtype: torch.dtype) -> "_GroupTerm":
        """Return the terms with factors of matrices that have one column per row in their dtype."""
        middle, left, beta = (x.to(dtype) for x in (self.middle, self.left, self.beta))
        return replace(self, middle=middle, left=left, beta=beta)

    def pulled(
        self, chunk: row_blocks.WhitenedChunk, Y: Float[Tensor, "B P"]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return ∂F/∂mean, ∂F/∂K_uf and −2 ∂F/∂k_ii of a chunk: pass two."""
        V, rows = chunk.V, self.group.rows(chunk.block, Y)
        noise, weights = self.group.noise if self.group.separate else self.group.unit, rows.weights
        Y_gradient = (rows.Y - V.mT @ self.beta) / noise
        kff_gradient = self.precision.expand(len(Y))
        Kuf_gradient = (self.left @ rows.Y.mT.to(V.dtype)).addmm_(self.middle, V)
        if weights is not None:
            Kuf_gradient.mul_(weights.to(V.dtype))
            Y_gradient = weights[:, None] * Y_gradient
            kff_gradient = weights * kff_gradient
        return Y_gradient, Kuf_gradient, kff_gradient


def _total(terms: Sequence[Tensor]) -> Tensor:
    return reduce(torch.add, terms)


def joined_columns(
    groups: Sequence[NoiseGroup], columns: Sequence[Tensor], like: Float[Tensor, "B P"]
) -> Float[Tensor, "B P"]:
    """Return columns of all targets from those of each group of targets."""
    if len(groups) == 1:
        return columns[0]
    joined = torch.empty_like(like)
    for group, own in zip(groups, columns, strict=True):
        joined[:, list(group.group.targets)] = own.to(joined.dtype)
    return joined


def gathered_noise(noise: TargetNoise, parts: Sequence[tuple[NoiseGroup, Tensor]]) -> TargetNoise:
    """Return the gradient of all variances from those of groups; summed if they share one."""
    if noise.dim() == 0:
        return _total([gradient for _, gradient in parts])
    total = torch.zeros_like(noise)
    for group, gradient in parts:
        total[list(group.group.targets)] += gradient
    return total


# Elements of K_uf up to which a product of all rows is quicker than one in panels.
_SMALL = 40_000


def one_block(blocks: row_blocks.RowBlocks, noise: TargetNoise) -> row_blocks.RowBlock | None:
    """Return the block of all rows if `OneBlockBound` has their bound, else None."""
    block, (group, *others) = blocks.only, blocks.groups
    if block is None or block.weights is not None or noise.dim() or noise.is_cuda:
        return None
    return block if group.plain and not others else None


@final
@dataclass(frozen=True, slots=True)
class OneBlockBound:
    """The collapsed bound of the rows of a block, and what its gradient needs."""

    kernel: row_blocks.ChunkedKernel
    block: row_blocks.RowBlock
    Y: Float[Tensor, "N P"]
    """Targets minus the prior mean."""
    noise: float
    value: float
    """The bound in nats."""
    misfit: float
    """‖Y‖² − ⟨d, β⟩ + P Σ t_i."""
    L_inverse: Float[Tensor, "M M"]
    Kuf: Float[Tensor, "M N"]
    V: Float[Tensor, "M N"]
    C: Float[Tensor, "M M"]
    """V Vᵀ/σ²."""
    LB: Float[Tensor, "M M"]
    beta: Float[Tensor, "M P"]

    @classmethod
    def of(
        cls,
        kernel: row_blocks.ChunkedKernel,
        block: row_blocks.RowBlock,
        Y: Float[Tensor, "N P"],
        *,
        noise: float,
    ) -> "OneBlockBound":
        """Return the bound at fixed parameters; O(N M² + M³).

        Args:
            kernel: kernel at fixed parameters, whose sums are zero.
            block: all rows.
            Y: targets minus the prior mean.
            noise: σ².

        Raises:
            NotPositiveDefiniteError: K_uu or B cannot be factorised.
        """
        (N, P), Kuu = Y.shape, kernel.uu()
        if len(Kuu):
            Kuu.diagonal().add_(row_blocks.JITTER * Kuu.diagonal().mean())
        L_inverse, Kuf = panels.inverted(definite_cholesky(Kuu)), kernel.uf(block)
        is_small = Kuf.numel() <= _SMALL
        V = L_inverse @ Kuf if is_small else panels.lower_product(L_inverse, Kuf)
        C = V @ V.mT if is_small else _gram(V)
        d = V @ Y
        # Non-negative up to rounding.
        trace = max((kernel.ff(block).sum() - C.diagonal().sum()).item(), 0.0)
        C.div_(noise)
        B = C.clone()
        B.diagonal().add_(1.0)
        LB = definite_cholesky(B)
        beta = torch.cholesky_solve(d, LB).div_(noise)
        misfit = (Y.square().sum() - (d * beta).sum()).item() + P * trace
        log_det = N * log(2 * pi * noise) + 2 * half_log_det(LB).item()
        value = -0.5 * (P * log_det + misfit / noise)
        return cls(kernel, block, Y, noise, value, misfit, L_inverse, Kuf, V, C, LB, beta)

    def gradient(self) -> tuple[float, Float[Tensor, "N P"], tuple[Tensor, ...]]:
        """Return ∂F/∂σ², ∂F/∂mean, and the gradient in the kernel; once, as it overwrites."""
        (N, P), M, noise, beta = self.Y.shape, len(self.C), self.noise, self.beta
        B_inverse = panels.inverse_of_factor(self.LB)
        shrunk = M - B_inverse.diagonal().sum().item() - N
        slope = 0.5 * (P * shrunk + self.misfit / noise - beta.square().sum().item()) / noise
        # ∂F/∂K_uf = L⁻ᵀ [(P I − P B⁻¹ − ββᵀ) V + β Yᵀ] / σ²
        outer = beta @ beta.mT
        middle = torch.add(outer, B_inverse, alpha=P).neg_()
        middle.diagonal().add_(P)
        middle = panels.upper_product(self.L_inverse, middle).div_(noise)
        left = (self.L_inverse.mT @ beta).div_(noise)
        # ∂F/∂K_uu = −½ L⁻ᵀ [P(C/σ² − I + B⁻¹) + ββᵀ] L⁻¹
        inner = outer.add_(self.C.add_(B_inverse), alpha=P)
        inner.diagonal().sub_(P)
        half = panels.upper_product(self.L_inverse, inner)
        Kuu_gradient = panels.upper_product(self.L_inverse, half.mT).mul_(-0.5)
        if M:
            Kuu_gradient.diagonal().add_(Kuu_gradient.diagonal().sum() * (row_blocks.JITTER / M))
        Kuf_gradient = (left @ self.Y.mT).addmm_(middle, self.V)
        kernel, block = self.kernel, self.block
        kernel.pull_uf(block, Kuf_gradient, self.Kuf)
        kernel.pull_ff(block, self.Y.new_full((1,), -0.5 * P / noise))
        mean_gradient = torch.addmm(self.Y, self.V.mT, beta, alpha=-1).div_(noise)
        return slope, mean_gradient, kernel.gradient(kernel.pulled(), Kuu_gradient)


def _gram(V: Float[Tensor, "M N"]) -> Float[Tensor, "M M"]:
    total = V.new_zeros(len(V), len(V))
    panels.add_gram(total, V, V)
    return panels.from_panels(total)
