"""The collapsed bound and its exact gradient in two passes over chunks of rows.

With K_uu = L Lᵀ, V = L⁻¹ K_uf, C = V Vᵀ, d = V Y, B = I + C/σ², β = B⁻¹ d/σ² and
t_i = k_ii − ‖v_i‖² the collapsed bound is

    F = −NP/2 log 2πσ² − P/2 log|B| − (‖Y‖² − ⟨d, β⟩)/(2σ²) − P/(2σ²) Σ_i t_i.

Pass one accumulates C, d, ‖Y‖² and Σ t_i. What is left has the size of K_uu and is differentiated
in closed form; pass two hands its share of the gradient to each chunk of the kernel:

    ∂F/∂K_uf = L⁻ᵀ [(P(I − B⁻¹) − ββᵀ) V + β Yᵀ] / σ²
    ∂F/∂K_uu = −½ L⁻ᵀ [P(B + B⁻¹ − 2I) + ββᵀ] L⁻¹
    ∂F/∂k_ii = −P/(2σ²),   ∂F/∂Y = −(Y − Vᵀβ)/σ²

The Cholesky factor itself is never differentiated. The tighter bound replaces t_i/σ² by
log(1 + t_i/σ²) and weights row i by 1/(σ² + t_i) instead of 1/σ²: pass one then also accumulates
V diag(1/(σ² + t)) Vᵀ. Memory is O(chunk · M + M²) at any N.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import log, pi
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from winnowgp.linalg import definite_cholesky, half_log_det, solve_lower

CHUNK = 2048
# Numbers that may be kept between the passes to save the second evaluation of the kernel: 512 MiB.
KEEP = 2**26
# Relative to the mean of diag K_uu. Part of the objective and of its gradient; at the 1e-12 of
# `linalg.cholesky` the gradient of close points is mostly rounding.
JITTER = 1e-8


class ChunkedKernel(ABC):
    """Blocks of a kernel at fixed parameters, and the pull-back of their gradients onto those.

    `pull_*` adds to what `gradient` returns; a cotangent passed to it may be overwritten.
    """

    @abstractmethod
    def uu(self) -> Float[Tensor, "M M"]:
        """K_uu without jitter."""

    @abstractmethod
    def uf(self, rows: slice) -> Float[Tensor, "M B"]:
        """K_uf of some rows."""

    @abstractmethod
    def ff(self, rows: slice) -> Float[Tensor, " B"]:
        """Prior variance of some rows."""

    @abstractmethod
    def pull_uu(self, cotangent: Float[Tensor, "M M"]) -> None:
        """Take ∂F/∂K_uu."""

    @abstractmethod
    def pull_uf(
        self, rows: slice, cotangent: Float[Tensor, "M B"], Kuf: Float[Tensor, "M B"]
    ) -> None:
        """Take ∂F/∂K_uf of some rows; `Kuf` is what `uf` returned for them."""

    @abstractmethod
    def pull_ff(self, rows: slice, cotangent: Float[Tensor, " B"]) -> None:
        """Take ∂F/∂k_ii of some rows."""

    @abstractmethod
    def gradient(self) -> tuple[Tensor, ...]:
        """What the pull-backs added up to, one tensor for each parameter."""


@dataclass(frozen=True, slots=True)
class TwoPass:
    """A bound in nats and its gradient."""

    value: Float[Tensor, ""]
    noise: Float[Tensor, ""]
    """With respect to the noise variance."""
    Y: Float[Tensor, "N P"]
    """With respect to the targets, for the parameters of a prior mean."""
    kernel: tuple[Tensor, ...]
    """With respect to the parameters of the kernel and the points, in the kernel's order."""


@dataclass(frozen=True, slots=True)
class _Chunk:
    rows: slice
    Kuf: Float[Tensor, "M B"]
    V: Float[Tensor, "M B"]
    t: Float[Tensor, " B"]


@final
class _Passes:
    """The chunks of one evaluation, kept between the passes if they are small enough together."""

    def __init__(
        self, kernel: ChunkedKernel, Y: Float[Tensor, "N P"], *, chunk: int, keep: int
    ) -> None:
        self.kernel, self.Y, self.chunk = kernel, Y, chunk
        Kuu = kernel.uu()
        M = Kuu.shape[0]
        self.eye = torch.eye(M, dtype=Y.dtype, device=Y.device)
        shift = JITTER * Kuu.diagonal().mean() if M else 0.0
        # One inverse and products in panels are two to three times quicker than solves a chunk.
        self.L_inverse = solve_lower(definite_cholesky(Kuu + shift * self.eye), self.eye)
        self.kept: list[_Chunk] | None = [] if 2 * Y.shape[0] * M <= keep else None

    def first(self) -> Iterator[_Chunk]:
        for start in range(0, self.Y.shape[0], self.chunk):
            part = self._evaluate(slice(start, min(start + self.chunk, self.Y.shape[0])))
            if self.kept is not None:
                self.kept.append(part)
            yield part

    def second(self) -> Iterator[_Chunk]:
        if self.kept is not None:
            yield from self.kept
            return
        for start in range(0, self.Y.shape[0], self.chunk):
            yield self._evaluate(slice(start, min(start + self.chunk, self.Y.shape[0])))

    def _evaluate(self, rows: slice) -> _Chunk:
        Kuf = self.kernel.uf(rows)
        V = torch.empty_like(Kuf)
        for panel in _panels(V.shape[0]):
            torch.mm(self.L_inverse[panel, : panel.stop], Kuf[: panel.stop], out=V[panel])
        # t_i cannot be negative but for rounding.
        t = (self.kernel.ff(rows) - V.square().sum(0)).clamp_min(0)
        return _Chunk(rows, Kuf, V, t)


@dataclass(slots=True)
class _Sums:
    """What pass one accumulates."""

    C: Float[Tensor, "M M"]
    d: Float[Tensor, "M P"]
    trace: Float[Tensor, ""]
    """Σ t_i/σ², or Σ log(1 + t_i/σ²)."""
    trace_noise: Float[Tensor, ""]
    """Derivative of `trace` with respect to σ²."""
    weighted: Float[Tensor, "M M"]
    """V diag(1/σ²) Vᵀ, or V diag(1/(σ² + t)) Vᵀ."""


@dataclass(frozen=True, slots=True)
class _Back:
    """What pass two multiplies a chunk with."""

    L_inverse: Float[Tensor, "M M"]
    middle: Float[Tensor, "M M"]
    beta: Float[Tensor, "M P"]
    weighted: bool


@torch.no_grad()
def two_pass_bound(
    kernel: ChunkedKernel,
    *,
    Y: Float[Tensor, "N P"],
    noise: Float[Tensor, ""],
    tighter: bool = False,
    chunk: int = CHUNK,
    keep: int = KEEP,
) -> TwoPass:
    """The collapsed (or the tighter collapsed) bound and its gradient; O(N M²) time.

    Args:
        kernel: fresh, with a zero gradient.
        Y: targets less the prior mean.
        noise: σ².
        tighter: the tighter collapsed bound.
        chunk: rows a pass holds at once.
        keep: numbers that may be kept between the passes.

    Raises:
        NotPositiveDefiniteError: K_uu or B cannot be factorised.
    """
    passes = _Passes(kernel, Y, chunk=chunk, keep=keep)
    sums = _accumulate(passes, noise, tighter)
    (N, P), M, eye, L_inverse = Y.shape, sums.C.shape[0], passes.eye, passes.L_inverse
    LB = definite_cholesky(eye + sums.C / noise)
    B_inverse = torch.cholesky_inverse(LB)
    beta = torch.cholesky_solve(sums.d, LB) / noise
    square = Y.square().sum()
    fit = (sums.d * beta).sum()
    value = -0.5 * (
        N * P * (log(2 * pi) + noise.log())
        + 2 * P * half_log_det(LB)
        + (square - fit) / noise
        + P * sums.trace
    )
    noise_gradient = 0.5 * (
        P * (M - B_inverse.diagonal().sum() - N) / noise
        + (square - fit) / noise**2
        - beta.square().sum() / noise
        - P * sums.trace_noise
    )
    # ∂F/∂K_uu = −½ L⁻ᵀ [P(C_w − I + B⁻¹) + ββᵀ] L⁻¹ with C_w the weighted Gram matrix
    inner = torch.addmm(P * (sums.weighted - eye + B_inverse), beta, beta.mT)
    Kuu_gradient = -0.5 * (L_inverse.mT @ (inner @ L_inverse))
    if M:
        Kuu_gradient.diagonal().add_(Kuu_gradient.diagonal().sum() * (JITTER / M))
    kernel.pull_uu(Kuu_gradient)
    # ∂F/∂K_uf = L⁻ᵀ [(P I − P B⁻¹ − ββᵀ) V + β Yᵀ] / σ²; the tighter bound weights P I row by row.
    middle = torch.addmm((0 if tighter else P) * eye - P * B_inverse, beta, beta.mT, alpha=-1)
    back = _Back(L_inverse, L_inverse.mT @ middle / noise, L_inverse.mT @ beta / noise, tighter)
    Y_gradient = torch.empty_like(Y)
    for part in passes.second():
        y = Y[part.rows]
        Y_gradient[part.rows] = (part.V.mT @ beta - y) / noise
        _push_back(kernel, part, y, back=back, weight=P / (noise + part.t * tighter))
    return TwoPass(value, noise_gradient, Y_gradient, kernel.gradient())


def _accumulate(passes: _Passes, noise: Float[Tensor, ""], tighter: bool) -> _Sums:
    """Pass one."""
    Y, eye = passes.Y, passes.eye
    zero = Y.new_zeros(())
    sums = _Sums(torch.zeros_like(eye), Y.new_zeros(len(eye), Y.shape[1]), zero, zero, eye * 0)
    for part in passes.first():
        for panel in _panels(len(eye)):
            sums.C[panel, : panel.stop].addmm_(part.V[panel], part.V[: panel.stop].mT)
        sums.d.addmm_(part.V, Y[part.rows])
        ratio = part.t / noise
        sums.trace = sums.trace + (ratio.log1p() if tighter else ratio).sum()
        if tighter:
            scale = (noise + part.t).reciprocal()
            sums.weighted.addmm_(part.V * scale, part.V.mT)
            sums.trace_noise = sums.trace_noise + (scale - 1 / noise).sum()
        else:
            sums.trace_noise = sums.trace_noise - ratio.sum() / noise
    # Only the lower panels were summed.
    sums.C = sums.C.tril() + sums.C.tril(-1).mT
    if not tighter:
        sums.weighted = sums.C / noise
    return sums


def _push_back(
    kernel: ChunkedKernel,
    part: _Chunk,
    y: Float[Tensor, "B P"],
    *,
    back: _Back,
    weight: Float[Tensor, " B"],
) -> None:
    """Pass two for one chunk; `weight` is P/σ², or P/(σ² + t_i)."""
    gradient = torch.addmm(back.beta @ y.mT, back.middle, part.V)
    if back.weighted:
        gradient.addmm_(back.L_inverse.mT, part.V * weight)
    kernel.pull_uf(part.rows, gradient, part.Kuf)
    kernel.pull_ff(part.rows, -0.5 * weight)


def _panels(M: int) -> list[slice]:
    """Row panels that let a general product skip most of what a triangle does not need."""
    count = 1 if M < 96 else 2 if M < 192 else 4
    edges = [M * i // count for i in range(count + 1)]
    return [slice(a, b) for a, b in pairwise(edges)]


@torch.no_grad()
def evidence_gradient(
    kernel: ChunkedKernel, *, Y: Float[Tensor, "N P"], noise: Float[Tensor, ""]
) -> TwoPass:
    """The exact log evidence and its gradient, for a kernel whose points are the rows; O(N³).

        log p(Y) = −½ [NP log 2π + P log|A| + ⟨Y, α⟩],   A = K_ff + σ²I,  α = A⁻¹ Y
        ∂/∂A = ½ (ααᵀ − P A⁻¹),   ∂/∂Y = −α

    Several times quicker than differentiating a Cholesky factor by autograd.

    Raises:
        NotPositiveDefiniteError: A cannot be factorised.
    """
    N, P = Y.shape
    A = kernel.uu()
    A.diagonal().add_(noise)
    L = definite_cholesky(A)
    A_inverse = torch.cholesky_inverse(L)
    alpha = A_inverse @ Y
    value = -0.5 * (N * P * log(2 * pi) + 2 * P * half_log_det(L) + (Y * alpha).sum())
    gradient = A_inverse.mul_(-0.5 * P).addmm_(alpha, alpha.mT, alpha=0.5)
    noise_gradient = gradient.diagonal().sum()
    kernel.pull_uu(gradient)
    return TwoPass(value, noise_gradient, -alpha, kernel.gradient())
