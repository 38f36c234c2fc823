"""Cholesky factorisation with explicit jitter, triangular algebra, subsets of rows, and threads.

Kernel matrices of close or duplicated points are singular to working precision. `cholesky`
therefore adds `jitter · mean(diag A)` to the diagonal, starting at the smallest value of a ladder
and increasing it only where the factorisation fails. The jitter is part of the result.

The smallest jitter is not zero: a factorisation that barely succeeds at a condition number of 1e16
has no correct digits, and a sparse GP whose inducing variables are observed with a little noise is
still a lower bound on the evidence. It is small, because the bound is sensitive to it: with smooth
kernels, close points carry information in differences as small as their conditional variance, and
a jitter of 1e-8 can cost a tenth of a nat where 1e-12 costs 1e-5.
"""

import ctypes
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from math import isfinite
from pathlib import Path
from typing import TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from winnowgp.errors import NotPositiveDefiniteError

_LADDERS = {
    torch.float64: (1e-12, 1e-11, 1e-10, 1e-9, 1e-8, 1e-7, 1e-6, 1e-5),
    torch.float32: (1e-6, 1e-5, 1e-4, 1e-3),
}


@dataclass(frozen=True, slots=True)
class Cholesky:
    """A lower factor with `L Lᵀ = A + jitter · mean(diag A) · I`, and the relative jitter."""

    L: Float[Tensor, "*batch M M"]
    jitter: Float[Tensor, "*batch"]


def jitter_ladder(dtype: torch.dtype) -> tuple[float, ...]:
    """Return the relative jitters that are tried for a dtype, smallest first.

    >>> jitter_ladder(torch.float64)[0]
    1e-12
    """
    return _LADDERS[dtype]


def cholesky(A: Float[Tensor, "*batch M M"]) -> Cholesky:
    """Return the lower Cholesky factor of a symmetric positive semi-definite matrix; O(M³).

    The jitter is increased only for batch elements whose factorisation fails. Differentiable in
    `A`; the jitter is treated as a constant.

    Raises:
        NotPositiveDefiniteError: the largest jitter failed, or `A` is not finite.
    """
    M = A.shape[-1]
    scale = A.detach().diagonal(dim1=-2, dim2=-1).mean(-1) if M else A.new_ones(A.shape[:-2])
    eye = torch.eye(M, dtype=A.dtype, device=A.device)
    ladder = jitter_ladder(A.dtype)
    jitter = torch.full_like(scale, ladder[0])
    if recording(A):
        return Cholesky(_nan_unless_definite(A + (jitter * scale)[..., None, None] * eye), jitter)
    if not torch.isfinite(scale).all():
        raise NotPositiveDefiniteError(
            "a covariance matrix must be finite; it has NaN or infinite entries. Check the "
            "inputs and the kernel's parameters."
        )
    for current in ladder:
        with threads_for(A.numel() * M / 3):
            L, info = torch.linalg.cholesky_ex(A + (jitter * scale)[..., None, None] * eye)
        failed = info != 0
        if not failed.any():
            return Cholesky(L, jitter)
        jitter = torch.where(failed, 10 * current, jitter)
    raise NotPositiveDefiniteError(
        f"a {M} by {M} covariance matrix could not be factorised with a jitter of {ladder[-1]:.0e} "
        "of its mean diagonal; check that kernel variance and lengthscales are finite and positive."
    )


def recording(A: Tensor) -> bool:
    """Return whether operations on a tensor are recorded in a CUDA graph.

    A graph cannot depend on numbers: factorisations that fail return NaN instead of an error.
    """
    return A.is_cuda and torch.cuda.is_current_stream_capturing()


def _nan_unless_definite(A: Float[Tensor, "*batch M M"]) -> Float[Tensor, "*batch M M"]:
    L, info = torch.linalg.cholesky_ex(A)
    return L.masked_fill((info != 0)[..., None, None], torch.nan)


def definite_cholesky(
    A: Float[Tensor, "*batch M M"], *, overwrite: bool = False
) -> Float[Tensor, "*batch M M"]:
    """Return the lower factor of a matrix of the form I + V Vᵀ, which needs no jitter.

    Args:
        overwrite: whether the factor replaces A, which saves memory if A is stored by columns.

    Raises:
        NotPositiveDefiniteError: `A` is not finite or not positive definite.
    """
    if recording(A):
        return _nan_unless_definite(A)
    with threads_for(A.numel() * A.shape[-1] / 3):
        if overwrite:
            info = torch.empty(A.shape[:-2], dtype=torch.int32, device=A.device)
            L, info = torch.linalg.cholesky_ex(A, out=(A, info))
        else:
            L, info = torch.linalg.cholesky_ex(A)
    # One read, since each one synchronises with a GPU.
    pivots = L.diagonal(dim1=-2, dim2=-1).sum(-1).masked_fill(info != 0, torch.nan)
    if not isfinite(pivots.sum().item()):
        raise NotPositiveDefiniteError(
            "a matrix of the form I + V Vᵀ must be finite and positive definite; it is not. "
            "Standardise the data, or check the scale of the kernel and of the noise."
        )
    return L


def solve_lower(L: Float[Tensor, "*#batch M M"], A: Float[Tensor, "*#batch M C"]) -> Tensor:
    """Return `L⁻¹ A` for a lower-triangular `L`.

    Computed as `(Aᵀ L⁻ᵀ)ᵀ`: LAPACK expects columns while `A` is usually stored in rows, so that a
    solve from the left copies it first, a fifth of the time for 200 by 2048.
    """
    return torch.linalg.solve_triangular(L.mT, A.mT, upper=True, left=False).mT


def half_log_det(L: Float[Tensor, "*batch M M"]) -> Float[Tensor, "*batch"]:
    """Return `½ log |L Lᵀ| = Σ log L_ii`."""
    return L.diagonal(dim1=-2, dim2=-1).log().sum(-1)


def squared_norm(A: Float[Tensor, "*batch M C"]) -> Float[Tensor, "*batch"]:
    """Return the squared Frobenius norm `Σ_ij A_ij²`."""
    return A.square().sum((-2, -1))


# Subsets of the rows of a lower-triangular L.
#
# With A = L Lᵀ, the rows l_k of L are vectors whose inner products are the entries of A. A subset I
# has an orthonormal basis Q of span{l_i}; each k outside I has the residual of l_k orthogonal to
# that span; each k inside I has the dual vector d_k of the span with d_kᵀ l_j = δ_kj. Adding or
# removing one k changes every residual and dual by a multiple of one unit vector.


def subset_factors(
    L: Float[Tensor, "K K"],
    indices: Int[Tensor, "S M"],
    *,
    real: Bool[Tensor, "S M"],
    targets: Float[Tensor, "K P"] | None = None,
) -> tuple[Float[Tensor, "S M M"], Float[Tensor, "S M P"]]:
    """Return T with T Tᵀ = (L Lᵀ)_II for S subsets at once, and Qᵀ targets; O(S K M²).

    T comes from a QR of the rows, (rows I of L)ᵀ = Q Tᵀ, and has pivots accurate to eps/pivot. A
    Cholesky factor of (L Lᵀ)_II has them to eps/pivot², an error of 2e-6 in the bound for two close
    candidates. The targets are appended as columns, so that Q is never formed.

    Args:
        L: all rows.
        indices: rows of each subset, padded.
        real: False where an index is padding.
        targets: columns to project on the subset, or None.

    Returns:
        Lower-triangular factors with an identity block as padding and arbitrary signs on the
        diagonal; and Qᵀ targets, zero in the padding (no columns without targets).
    """
    rows = L[indices] * real[:, :, None]
    targets = L[:, :0] if targets is None else targets
    columns = torch.cat([rows.mT, targets.expand(len(indices), -1, -1)], dim=2)
    triangle = torch.linalg.qr(columns, mode="r").R
    M = indices.shape[1]
    factor = triangle[:, :M, :M].mT + torch.diag_embed((~real).to(L.dtype))
    return factor, triangle[:, :M, M:] * real[:, :, None]


def residual(rows: Float[Tensor, "J K"], Q: Float[Tensor, "M K"]) -> Float[Tensor, "J K"]:
    """Return rows minus their projection on the orthonormal rows of Q, subtracted twice; O(J K M).

    One subtraction leaves a component eps·‖row‖ inside the span, which dominates when the row
    nearly lies in it; the second leaves eps·‖residual‖.
    """
    once = rows - (rows @ Q.mT) @ Q
    return once - (once @ Q.mT) @ Q


def residuals_and_duals(
    L: Float[Tensor, "K K"], mask: Bool[Tensor, " K"]
) -> tuple[Float[Tensor, "K K"], Float[Tensor, "M K"]]:
    """Return the residual of each row outside a subset and the dual of each row inside; O(K² M).

    With the Householder QR (rows I)ᵀ = Qᵀ Tᵀ, the duals are the rows of T⁻ᵀ Q. The first rows of a
    triangle are one themselves, with Q = [I 0].

    Args:
        L: lower-triangular.
        mask: the subset.

    Returns:
        The residuals and duals, and the orthonormal rows Q that span the subset.
    """
    M, E = int(mask.sum()), torch.empty_like(L)
    if bool(mask[:M].all()):
        Tt, Q = L[:M, :M].mT, torch.eye(M, len(L), dtype=L.dtype, device=L.device)
    else:
        Qt, Tt = torch.linalg.qr(L[mask].mT)
        Q = Qt.mT
    E[mask] = torch.linalg.solve_triangular(Tt, Q, upper=True)
    E[~mask] = residual(L[~mask], Q)
    return E, Q


def rank_one_update(
    L: Float[Tensor, "K K"],
    E: Float[Tensor, "J K"],
    *,
    rows: Int[Tensor, " J"],
    same: Bool[Tensor, " J"] | None,
    leaves: bool,
    at: int,
) -> tuple[Float[Tensor, " J"], Float[Tensor, " K"]]:
    """Return a and q of the update E + a qᵀ when one row is added or removed; O(J K).

    q = e/‖e‖ for the row e that is added or removed. Rows on the same side (inside or outside the
    subset) lose their component along q; the row itself changes from e to e/‖e‖² (residual to dual,
    or back). On the other side a dual d_j loses (d_jᵀ l_k)/‖e‖ when k is added, and a residual
    gains l_jᵀ q when k is removed.

    Args:
        L: all rows.
        E: residuals and duals of all K rows, or of some.
        rows: row of L that each row of E belongs to.
        same: which rows of E are on the same side as the changed one; None if all are.
        leaves: whether the row is removed from the subset.
        at: position in E of the row that is added or removed.
    """
    norm = torch.linalg.vector_norm(E[at])
    q = E[at] / norm
    a = -(E @ q)
    if same is not None:
        across = L[rows] @ q if leaves else -(E @ L[rows[at]]) / norm
        a = torch.where(same, a, across)
    a[at] = 1 / norm - norm
    return a, q


# Threads. A parallel region of OpenMP waits for the slowest of its threads, and libgomp's threads
# spin while they wait: with a busy neighbour on each of two cores, a Cholesky factor of 400 rows
# takes 48 ms on two threads and 1.3 ms on one. Small matrices therefore use one thread, and passes
# over rows use threads that work on rows of their own and wait without spinning.

# Operations up to which one thread is used: tens of milliseconds.
_SMALL = 2e9

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


@contextmanager
def single_thread() -> Iterator[None]:
    """Run each operation of PyTorch on one CPU thread within this block, in this thread alone.

    `parallel_map` still uses the threads that were given. `torch.set_num_threads` would also change
    threads that first use PyTorch during the block, for the rest of their lives; the functions of
    OpenMP and MKL do not.
    """
    given = torch.get_num_threads()
    if given == 1:
        yield
        return
    setters = _thread_setters()
    before = [setter(1) for setter in setters]
    _outside.threads = given
    try:
        yield
    finally:
        _outside.threads = None
        for setter, threads in zip(setters, before, strict=True):
            setter(threads)


class _Outside(threading.local):
    """The number of threads outside of `single_thread`, in each thread."""

    threads: int | None = None


_outside = _Outside()


def threads_for(operations: float) -> AbstractContextManager[None]:
    """Return a context that uses one thread if the work within is small.

    The size alone decides, so that a fit has the same digits on a busy machine.
    """
    return single_thread() if operations <= _SMALL else nullcontext()


def parallel_map(
    function: Callable[[_Item], _Result], items: Iterable[_Item], *, parallel: bool = True
) -> list[_Result]:
    """Apply a function to each item, on as many threads as PyTorch was given in this thread.

    Each call runs on one thread, so that results do not depend on the number of threads. A single
    item has all threads, unless `single_thread` applies.

    Args:
        function: must not change what other calls use.
        items: inputs of the calls.
        parallel: whether calls may run at the same time; otherwise one follows another.
    """
    inputs = list(items)
    if len(inputs) < 2:
        return [function(item) for item in inputs]
    given = _outside.threads or torch.get_num_threads()
    threads = min(given, len(inputs)) if parallel else 1
    if threads == 1:
        with single_thread():
            return [function(item) for item in inputs]
    grad_enabled = torch.is_grad_enabled()

    def call(item: _Item) -> _Result:
        # Both settings belong to a thread.
        with torch.set_grad_enabled(grad_enabled), single_thread():
            _outside.threads = 1  # no pool within the pool
            return function(item)

    return list(_pool(threads).map(call, inputs))


# Blocks up to this size may come from the heap of glibc instead of the kernel.
_HEAP_BLOCK = 2**25 - 2**14


def reuse_freed_memory() -> None:
    """Let the C library keep freed matrices of up to 32 MiB for the next ones of their size.

    Otherwise glibc returns them to the kernel, which clears each page when it is written again: a
    third of the time of evaluations with a few hundred to two thousand rows. Its limit grows with
    the largest block that was freed, so freeing one, which is never written, is enough. Other C
    libraries are not affected.
    """
    torch.empty(_HEAP_BLOCK, dtype=torch.uint8)


# Elements of a tensor from which clearing its memory by all threads saves time.
_LONG_COPY = 2**24

_Module = TypeVar("_Module", bound=torch.nn.Module)


def on_cpu(module: _Module) -> _Module:
    """Move a module to the CPU, as `module.cpu()` does, and return it.

    Matrices of gigabytes take most of their time where a single thread waits for the kernel to
    provide their pages. Here all threads write to new memory first.
    """
    return module._apply(_copied_to_cpu)


def _copied_to_cpu(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda or tensor.numel() < _LONG_COPY:
        return tensor.cpu()
    return torch.empty_like(tensor, device="cpu").zero_().copy_(tensor)


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="winnowgp")


if hasattr(os, "register_at_fork"):
    # The threads of a pool do not exist in a forked process.
    os.register_at_fork(after_in_child=_pool.cache_clear)


@cache
def _thread_setters() -> tuple[Callable[[int], int], ...]:
    """Return functions that set the calling thread's number of threads and return that before."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        openmp, current = library.omp_set_num_threads, library.omp_get_max_threads
    except (OSError, AttributeError):
        # Another platform, or PyTorch without OpenMP.
        return (lambda threads: _replaced(torch.get_num_threads, torch.set_num_threads, threads),)
    mkl = getattr(library, "MKL_Set_Num_Threads_Local", None)
    setters = [lambda threads: _replaced(current, openmp, threads)]
    return tuple(setters if mkl is None else [*setters, mkl])


def _replaced(read: Callable[[], int], write: Callable[[int], object], value: int) -> int:
    before = read()
    write(value)
    return before
