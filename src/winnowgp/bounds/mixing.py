"""The collapsed bound of several processes that targets observe in linear combinations.

`mixed_moments` gives the moments of rows in memory. `mixed_two_pass` gives the bound and its
gradient in two passes over rows that come in chunks.

Q independent processes f_q have kernels and inducing values u_q of their own. Target p of row i is

    y_ip = Σ_q W_pq f_q(x_i) + e_ip,   e_ip ~ N(0, σ²_ip),

so that all inducing values and all targets are jointly Gaussian. With r_ip = 1/σ²_ip, zero where a
target is missing, the log-likelihood of a row is a quadratic form in its Q values f(x_i) alone:

    Σ_p log N(y_ip | W_p f, σ²_ip) = −½ fᵀ A_i f + b_iᵀ f + …,
    A_i = Wᵀ diag(r_i) W,   b_i = Wᵀ diag(r_i) y_i

Stack the whitened cross-covariances V_q = L_q⁻¹ K_qf of the processes. The moments of `Moments` are

    C_qs = V_q diag(A_·qs) V_sᵀ,   D_q = V_q b_·q,
    Σ w k = Σ_iq A_iqq k_q(x_i, x_i),   Σ w y² = Σ_ip r_ip y_ip²,

with the number of inducing points of all processes, and none of the N P targets, as their size. So
every collapsed bound, marginal gain and search of one process holds for several: a candidate of any
process competes with those of all others, in nats.

With B = I + C and β = B⁻¹ D, the bound is

    F = constant − ½ log|B| − ½ (Σ r y² − Dᵀβ) − ½ (Σ_iq A_iqq k_q(x_i, x_i) − tr C).

Pass one accumulates C and D. Everything else has the size of C and is differentiated in closed
form; pass two propagates the gradient to the blocks of each kernel. With H = I − B⁻¹ − ββᵀ, blocks
H_qs for the inducing points of processes q and s, and v_qi a column of V_q,

    ∂F/∂v_qi = Σ_s A_iqs H_qs v_si + β_q b_iq,   ∂F/∂K_qf = L_q⁻ᵀ ∂F/∂V_q
    ∂F/∂K_q = −½ L_q⁻ᵀ [C − I + B⁻¹ + ββᵀ]_qq L_q⁻¹,   ∂F/∂k_q(x_i, x_i) = −½ A_iqq
    ∂F/∂A_iqs = ½ v_qiᵀ H_qs v_si − ½ δ_qs k_q(x_i, x_i),   ∂F/∂b_iq = β_qᵀ v_qi.

Two processes that no target combines have A_qs = 0, and their blocks are left out. A pass costs
O(N M²) for the M inducing points of all processes that targets combine, and O(N Σ M_q²) for
independent targets; memory is O(chunk · M + M²) for any N.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import log, pi
from typing import TypeAlias, final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from winnowgp.bounds import panels, row_blocks
from winnowgp.bounds.collapsed import Moments
from winnowgp.bounds.row_blocks import ChunkedKernel, RowBlock, RowBlocks, Sums
from winnowgp.linalg import cholesky, definite_cholesky, half_log_det, solve_lower


@dataclass(frozen=True, slots=True)
class MixedTargets:
    """What the targets of some rows say about Q processes; A and b of the module's equations."""

    A: Float[Tensor, "#N Q Q"]
    """One matrix for all rows if they have equal noise, weights and observed targets."""
    b: Float[Tensor, "N Q"]
    square: Float[Tensor, ""]
    """Σ r y²."""
    constant: Float[Tensor, ""]
    """Σ ½ log(r/2π) over observed targets; a row of weight w counts as w rows."""
    count: float
    """Number of observed targets, each times the weight of its row."""

    @classmethod
    def of(
        cls,
        Y: Float[Tensor, "N P"],
        *,
        mixing: Float[Tensor, "P Q"],
        noise: Float[Tensor, "#N P"],
        weights: Float[Tensor, " N"] | None = None,
    ) -> "MixedTargets":
        """Return A and b of each row, differentiable in `mixing` and `noise`; O(N P Q²).

        Args:
            Y: targets; NaN where they are missing.
            noise: variances, one row for all or one each.
            weights: weights of the rows, if there are any.
        """
        missing = torch.isnan(Y)
        counts = (~missing).to(Y)
        if weights is not None:
            counts = weights[:, None] * counts
        r = counts / noise
        filled = torch.where(missing, 0.0, Y)
        equal = len(noise) == 1 and weights is None and not bool(missing.any())
        return cls(
            A=torch.einsum("np,pq,ps->nqs", r[:1] if equal else r, mixing, mixing),
            b=(r * filled) @ mixing,
            square=(r * filled.square()).sum(),
            constant=-0.5 * (counts * (log(2 * pi) + noise.log())).sum(),
            count=float(counts.sum()),
        )

    @classmethod
    def of_sites(
        cls,
        linear: Float[Tensor, "N P"],
        precision: Float[Tensor, "N P"],
        *,
        mixing: Float[Tensor, "P Q"],
    ) -> "MixedTargets":
        """Return A and b of Gaussian sites exp(λ g − ½ w g²) of the mixtures g = W f.

        Their sum has no constant. Sites of missing targets are zero.
        """
        zero = precision.new_zeros(())
        return cls(
            A=torch.einsum("np,pq,ps->nqs", precision, mixing, mixing),
            b=linear @ mixing,
            square=zero,
            constant=zero,
            count=float(len(linear)),
        )

    def detach(self) -> "MixedTargets":
        """Return the same numbers without their history."""
        return MixedTargets(
            A=self.A.detach(),
            b=self.b.detach(),
            square=self.square.detach(),
            constant=self.constant.detach(),
            count=self.count,
        )


def mixed_moments(
    L: Sequence[Float[Tensor, "_ _"]],
    Kuf: Sequence[Float[Tensor, "_ N"]],
    *,
    kff: Float[Tensor, "Q N"],
    targets: MixedTargets,
) -> Moments:
    """Return the moments of all inducing values, one process after another; O(N K²).

    Args:
        L: Cholesky factor of the prior covariance of each process' inducing values.
        Kuf: cross-covariances of each process.
        kff: prior variances of the rows in each process.
        targets: the targets of the rows.
    """
    V, A = [solve_lower(*pair) for pair in zip(L, Kuf, strict=True)], targets.A
    blocks: dict[tuple[int, int], Tensor] = {}
    for q in range(len(V)):
        for s in range(q + 1):
            if len(A) == 1:
                blocks[q, s] = A[0, q, s] * (V[q] @ V[s].mT)
            else:
                blocks[q, s] = (V[q] * A[:, q, s]) @ V[s].mT
            blocks[s, q] = blocks[q, s].mT
    C = torch.cat([torch.cat([blocks[q, s] for s in range(len(V))], 1) for q in range(len(V))])
    return Moments(
        C=C,
        D=torch.cat([v @ b for v, b in zip(V, targets.b.mT, strict=True)])[:, None],
        square=targets.square,
        diagonal=(A.diagonal(dim1=1, dim2=2).mT * kff).sum(),
        constant=targets.constant,
        N=targets.count,
    )


TargetFunction: TypeAlias = Callable[[RowBlock], MixedTargets]
"""What the targets of a block say about the processes, differentiable in some parameters."""


@dataclass(frozen=True, slots=True)
class MixedGradient:
    """A bound in nats and its gradient."""

    value: Float[Tensor, ""]
    targets: tuple[Tensor, ...]
    """Gradient with respect to the parameters of the targets."""
    kernels: tuple[tuple[Tensor, ...], ...]
    """Gradient with respect to kernel parameters and inducing points of each process."""


@torch.no_grad()
def mixed_two_pass(
    chunks: "MixedChunks",
    *,
    targets: TargetFunction,
    parameters: Sequence[Tensor],
    shared: bool,
) -> MixedGradient:
    """Return the collapsed bound and its gradient.

    Args:
        chunks: the rows, `MixedChunks.for_gradients`.
        targets: what the targets of a block say.
        parameters: tensors that `targets` depends on, which require gradients.
        shared: whether all rows have the same A.

    Raises:
        NotPositiveDefiniteError: B cannot be factorised.
    """
    kernels, blocks = chunks.kernels, chunks.blocks
    products, D, square, constant, diagonal, kff = chunks.moments(targets, shared=shared)
    A = targets(next(iter(blocks))).A[0] if shared else None
    C = products if A is None else chunks.weighted(products, A)
    eye = torch.eye(len(C), dtype=C.dtype, device=C.device)
    LB = definite_cholesky(C + eye)
    B_inverse = torch.cholesky_inverse(LB)
    beta = B_inverse @ D
    fit = square - D @ beta
    value = constant - half_log_det(LB) - 0.5 * (fit + diagonal - C.diagonal().sum())
    H = (eye - B_inverse).addr_(beta, beta, alpha=-1)
    inner = (C - eye + B_inverse).addr_(beta, beta)
    back = _PullBack(chunks, H, beta, None if A is None else chunks.weighted(H, A))

    def pull_back(shard: Iterable[MixedChunk]) -> Sums:
        forks = [kernel.fork() for kernel in kernels]
        totals = [torch.zeros_like(parameter) for parameter in parameters]
        for chunk in shard:
            with torch.enable_grad():
                own = targets(chunk.block)
            cotangents = back(chunk, own.detach(), forks)
            with torch.enable_grad():
                _add_gradients(totals, own, cotangents, parameters)
        return (*(each for fork in forks for each in fork.pulled()), *totals)

    pulled = list(chunks.summed(pull_back))
    own = [pulled.pop() for _ in parameters][::-1]
    if shared:
        cotangent = chunks.shared_cotangent(H, products, kff)
        with torch.enable_grad():
            _accumulate(own, targets(next(iter(blocks))).A[0], cotangent, parameters)
    gradients, first = [], 0
    for kernel, inverse, part in zip(kernels, chunks.inverses, chunks.parts, strict=True):
        count = len(kernel.pulled())
        uu = -0.5 * (inverse.mT @ (inner[part, part] @ inverse))
        if M := len(uu):
            uu.diagonal().add_(uu.diagonal().sum() * (row_blocks.JITTER / M))
        gradients.append(kernel.gradient(tuple(pulled[first : first + count]), uu))
        first += count
    return MixedGradient(value, tuple(own), tuple(gradients))


@dataclass(frozen=True, slots=True)
class MixedChunk:
    """V_q = L_q⁻¹ K_qf of a block, one process after another, and prior variances of its rows."""

    block: RowBlock
    Kuf: list[Tensor]
    V: Float[Tensor, "M B"]
    kff: Float[Tensor, "Q B"]


@final
class MixedChunks(row_blocks.KeptChunks[MixedChunk]):
    """The whitened chunks of all rows, kept in memory after the first pass if they fit.

    Args:
        kernels: kernel of each process at fixed parameters.
        blocks: the rows.
        L: factor of the prior covariance of each process' inducing values.
        combined: which pairs of processes a target combines.
        inverses: inverses of L, for whitening by products instead of solves, as in
            `row_blocks.WhitenedChunks`.
    """

    def __init__(
        self,
        kernels: Sequence[ChunkedKernel],
        blocks: RowBlocks,
        *,
        L: Sequence[Float[Tensor, "_ _"]],
        combined: Bool[Tensor, "Q Q"],
        inverses: Sequence[Float[Tensor, "_ _"]] = (),
    ) -> None:
        self.kernels, self.L, self.inverses = kernels, L, inverses
        self.combined = combined.tolist()
        ends = list(accumulate(map(len, L), initial=0))
        self.parts, self.M = [slice(*pair) for pair in pairwise(ends)], ends[-1]
        keep = row_blocks.keep_bytes(blocks) >= 16 * blocks.N * self.M
        parallel = all(kernel.parallel for kernel in kernels)
        super().__init__(blocks, keep=keep, parallel=parallel)

    @classmethod
    @torch.no_grad()
    def for_gradients(
        cls, kernels: Sequence[ChunkedKernel], blocks: RowBlocks, *, combined: Bool[Tensor, "Q Q"]
    ) -> "MixedChunks":
        """Return chunks for a bound and its gradient: jitter 1e-8, whitened by inverses."""
        L, inverses = [], []
        for kernel in kernels:
            Kuu = kernel.uu()
            eye = torch.eye(len(Kuu), dtype=Kuu.dtype, device=Kuu.device)
            shift = row_blocks.JITTER * Kuu.diagonal().mean() if len(Kuu) else 0.0
            L.append(definite_cholesky(Kuu + shift * eye))
            inverses.append(solve_lower(L[-1], eye))
        return cls(kernels, blocks, L=L, combined=combined, inverses=inverses)

    @classmethod
    @torch.no_grad()
    def for_values(
        cls, kernels: Sequence[ChunkedKernel], blocks: RowBlocks, *, combined: Bool[Tensor, "Q Q"]
    ) -> "MixedChunks":
        """Return chunks for values only: the smallest jitter that works, whitened by solves."""
        L = [cholesky(kernel.uu()).L for kernel in kernels]
        return cls(kernels, blocks, L=L, combined=combined)

    def pairs(self, lower: bool = False) -> list[tuple[int, int]]:
        """Return the pairs of processes that a target combines.

        Args:
            lower: leave out pairs of a process and a later one.
        """
        Q = len(self.parts)
        every = [(q, s) for q in range(Q) for s in range(q + 1 if lower else Q)]
        return [(q, s) for q, s in every if self.combined[q][s]]

    def moments(self, targets: TargetFunction, *, shared: bool) -> Sums:
        """Return sums over all rows: C, D, Σ r y², the constant, Σ A_qq k_q and Σ k_q.

        Args:
            targets: what the targets of a block say.
            shared: whether all rows have the same A; the first sum is V Vᵀ instead of C then.
        """
        like = self.L[0]

        def sums(shard: Iterable[MixedChunk]) -> Sums:
            C, D = like.new_zeros(self.M, self.M), like.new_zeros(self.M)
            square = constant = diagonal = like.new_zeros(())
            kff = like.new_zeros(len(self.parts))
            for chunk in shard:
                own, V = targets(chunk.block).detach(), chunk.V
                for q, s in self.pairs(lower=True):
                    left, right = V[self.parts[q]], V[self.parts[s]]
                    block = C[self.parts[q], self.parts[s]]
                    weighted = left if shared else left * own.A[:, q, s]
                    if q == s:
                        panels.add_gram(block, weighted, right)
                    else:
                        block.addmm_(weighted, right.mT)
                for part, b in zip(self.parts, own.b.mT, strict=True):
                    D[part] += V[part] @ b
                square, constant = square + own.square, constant + own.constant
                A = own.A.diagonal(dim1=1, dim2=2).mT
                diagonal, kff = diagonal + (A * chunk.kff).sum(), kff + chunk.kff.sum(1)
            return panels.from_panels(C), D, square, constant, diagonal, kff

        return self.summed(sums)

    def weighted(self, matrix: Float[Tensor, "M M"], A: Float[Tensor, "Q Q"]) -> Tensor:
        """Return A_qs times each block of a matrix."""
        sizes = torch.tensor([p.stop - p.start for p in self.parts], device=A.device)
        process = torch.repeat_interleave(torch.arange(len(sizes), device=A.device), sizes)
        return A[process][:, process] * matrix

    def shared_cotangent(
        self, H: Float[Tensor, "M M"], products: Float[Tensor, "M M"], kff: Float[Tensor, " Q"]
    ) -> Float[Tensor, "Q Q"]:
        """Return ∂F/∂A where all rows have the same A."""
        cotangent = torch.diag(-0.5 * kff)
        for q, s in self.pairs():
            at = self.parts[q], self.parts[s]
            cotangent[q, s] += 0.5 * (H[at] * products[at]).sum()
        return cotangent

    @torch.no_grad()
    def _evaluate(self, block: RowBlock) -> MixedChunk:
        Kuf = [kernel.uf(block) for kernel in self.kernels]
        V = Kuf[0].new_empty(self.M, len(block))
        for q, (part, K) in enumerate(zip(self.parts, Kuf, strict=True)):
            if self.inverses:
                V[part] = panels.lower_product(self.inverses[q], K)
            else:
                V[part] = solve_lower(self.L[q], K)
        kff = torch.stack([kernel.ff(block) for kernel in self.kernels])
        return MixedChunk(block, Kuf, V, kff)


@final
class _PullBack:
    """Pass two: the cotangents of a chunk, of which the kernels take theirs."""

    def __init__(
        self,
        chunks: MixedChunks,
        H: Float[Tensor, "M M"],
        beta: Float[Tensor, " M"],
        shared: Float[Tensor, "M M"] | None,
    ) -> None:
        self._chunks, self._H, self._beta = chunks, H, beta
        pairs = zip(chunks.inverses, chunks.parts, strict=True)
        # L_q⁻ᵀ times the rows of A ∘ H, and of β.
        self._left, self._middle = [], []
        for q, (inverse, part) in enumerate(pairs):
            self._left.append(inverse.mT @ beta[part])
            if shared is not None:
                used = [p for s, p in enumerate(chunks.parts) if chunks.combined[q][s]]
                self._middle.append([(p, inverse.mT @ shared[part, p]) for p in _joined(used)])

    def __call__(
        self, chunk: MixedChunk, targets: MixedTargets, kernels: Sequence[ChunkedKernel]
    ) -> tuple[Tensor | None, Tensor]:
        """Let kernels take their cotangents; return those of A, unless it is shared, and of b."""
        chunks, V = self._chunks, chunk.V
        A_cotangent = None if self._middle else torch.diag_embed(-0.5 * chunk.kff.mT)
        for q, (kernel, part) in enumerate(zip(kernels, chunks.parts, strict=True)):
            K = torch.outer(self._left[q], targets.b[:, q])
            if A_cotangent is None:
                for used, middle in self._middle[q]:
                    K.addmm_(middle, V[used])
            else:
                total = torch.zeros_like(K)
                for s, other in enumerate(chunks.parts):
                    if chunks.combined[q][s]:
                        product = self._H[part, other] @ V[other]
                        A_cotangent[:, q, s] += 0.5 * (V[part] * product).sum(0)
                        total.addcmul_(product, targets.A[:, q, s])
                K.addmm_(chunks.inverses[q].mT, total)
            kernel.pull_uf(chunk.block, K, chunk.Kuf[q])
            weights = targets.A[:, q, q].expand(len(chunk.block))
            kernel.pull_ff(chunk.block, -0.5 * weights)
        means = [self._beta[part] @ V[part] for part in chunks.parts]
        return A_cotangent, torch.stack(means, 1)


def _joined(parts: Sequence[slice]) -> list[slice]:
    """Return slices with neighbours joined: one product instead of several."""
    joined: list[slice] = []
    for part in parts:
        if joined and joined[-1].stop == part.start:
            joined[-1] = slice(joined[-1].start, part.stop)
        else:
            joined.append(part)
    return joined


def _add_gradients(
    totals: list[Tensor],
    targets: MixedTargets,
    cotangents: tuple[Tensor | None, Tensor],
    parameters: Sequence[Tensor],
) -> None:
    """Add the pull-back of a chunk's targets: F has −½ Σ r y² and the constant as terms."""
    A, b = cotangents
    value = (targets.b * b).sum() - 0.5 * targets.square + targets.constant
    if A is not None:
        value = value + (targets.A * A).sum()
    _accumulate(totals, value, torch.ones_like(value), parameters)


def _accumulate(
    totals: list[Tensor], value: Tensor, cotangent: Tensor, parameters: Sequence[Tensor]
) -> None:
    if not value.requires_grad:
        return
    gradients = torch.autograd.grad(value, list(parameters), cotangent, allow_unused=True)
    for total, gradient in zip(totals, gradients, strict=True):
        if gradient is not None:
            total += gradient
