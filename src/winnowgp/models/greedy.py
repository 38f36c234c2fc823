"""Locations of inducing points: rows by greedy conditional variance, and the bound at given ones.

The row of largest conditional variance t_i = k_ii − q_ii, relative to its prior variance k_ii, is
selected next (Burt et al. 2020). With the rows F of the factor so far, q_ii = Σ_j F_ji².

Rows are selected in blocks. The c rows of largest t_i/k_ii are contenders, and the covariance of
the contenders given what is selected, K_cc − F_cᵀ F_c, is factorised with pivoting. Conditional
variances only fall, so that the next row is a contender until the largest t_i/k_ii of the
contenders is below the largest of the other rows at the start of the block. With T the triangle of
the pivots p, the factor of all N rows then grows by T⁻¹ (K_p* − F_pᵀ F): one matrix product instead
of one pass over the factor per row. The selection is the same, up to ties. Few rows are all
contenders, so that one block is enough, and its T contains the factor.
"""

from dataclasses import dataclass
from math import inf
from typing import final

import numpy as np
import torch
from gpytorch.kernels import AdditiveKernel, Kernel
from jaxtyping import Float, Int
from torch import Tensor

from winnowgp.data import Dataset
from winnowgp.linalg import cholesky, solve_lower
from winnowgp.models.kernels import covariance, prior_variance
from winnowgp.models.sgpr import SparseGP
from winnowgp.models.stationary import stationary_form
from winnowgp.selection import SubsetStatistics
from winnowgp.typing import Scalar

# Selection ends when the conditional variances are below this share of the prior variances, or
# below this many times the eps of the data type, which is more in float32.
LEAST, _ROUNDING = 1e-8, 100

BLOCK_ROWS = 4096

# Elements of the largest temporary of a kernel evaluation: what fits into a cache, or few launches.
_CPU_ELEMENTS, _GPU_ELEMENTS = 2**18, 2**24

# Contenders are this many times the rows selected in the previous block, within these limits: where
# the rows of largest variance are close to each other, few of them are selected at a time.
_FEWEST, _GROWTH, _MOST = 32, 4, 512
# Number of rows that are all contenders.
_FEW_ROWS = 256


@dataclass(frozen=True, slots=True)
class PivotedCholesky:
    """Rows selected by conditional variance, and the variance that they leave.

    Attributes:
        indices: selected rows, in order of selection.
        traces: Σ_i (k_ii − q_ii) over all N rows after each selected row.
        prior: Σ_i k_ii.
    """

    indices: Int[Tensor, " k"]
    traces: Float[Tensor, " k"]
    prior: Float[Tensor, ""]


@torch.no_grad()
def pivoted_cholesky(
    kernel: Kernel,
    X: Float[Tensor, "N D"],
    K: int,
    *,
    given: Float[Tensor, "M D"],
    stop: float | None = None,
) -> PivotedCholesky:
    """Select up to K rows by the largest conditional variance given `given` and previous rows.

    O(N K (K + M)) time and O(N (K + M)) memory; pass a sample of the rows if N is large. Selection
    ends early when all conditional variances are below 1e-8 of the prior variance (1e-5 in
    float32), so that duplicates are never selected twice.

    Args:
        kernel: a GPyTorch kernel without batch shape.
        X: rows to select among.
        K: number of rows to select at most.
        given: inducing points that are there already.
        stop: trace Σ_i (k_ii − q_ii) at which selection ends; the row that reaches it is selected.
    """
    prior = prior_variance(kernel, X)
    M, N = len(given), len(X)
    L = cholesky(covariance(kernel, given, given)).L
    known = solve_lower(L, covariance(kernel, given, X))
    residual = prior - known.square().sum(0)
    # A row without prior variance is never selected.
    whole = torch.where(prior > 0, prior, torch.inf)
    least = max(LEAST, _ROUNDING * torch.finfo(X.dtype).eps)
    if N <= _FEW_ROWS:
        C = _covariance(kernel, X, X) - known.mT @ known
        _, order, trace = _pivots(
            C, residual, whole, count=min(K, N), least=least, stop=-inf if stop is None else stop
        )
        return PivotedCholesky(order.to(X.device), trace.to(X), prior=prior.sum())
    factor = X.new_empty(M + min(K, N), N)
    factor[:M] = known
    indices = [torch.empty(0, dtype=torch.long, device=X.device)]
    traces = [residual.new_empty(0)]
    k, c, trace = M, _FEWEST, residual.clamp_min(0).sum()
    while k < len(factor) and not (stop is not None and trace.item() <= stop):
        # The covariances of the block are written where its rows of the factor will be.
        pivots, T = _block(kernel, X, factor, residual, whole=whole, k=k, c=c, least=least)
        B = len(pivots)
        if B == 0:
            break
        new = factor[k : k + B]
        new.addmm_(factor[:k, pivots].mT, factor[:k], alpha=-1)
        new.copy_(solve_lower(T, new))
        squares = new.square()
        residual = (residual - squares.sum(0)).index_fill_(0, pivots, 0)
        indices.append(pivots)
        traces.append(trace - squares.sum(1).cumsum(0))
        trace = traces[-1][-1] = residual.clamp_min(0).sum()
        k, c = k + B, min(max(_GROWTH * B, _FEWEST), _MOST)
    selected, left = torch.cat(indices), torch.cat(traces)
    if stop is not None:
        # The last block may contain rows beyond the one that reaches `stop`.
        count = int((left > stop).long().cumprod(0).sum()) + 1
        selected, left = selected[:count], left[:count]
    return PivotedCholesky(indices=selected, traces=left, prior=prior.sum())


def greedy_variance(
    kernel: Kernel, X: Float[Tensor, "N D"], K: int, *, given: Float[Tensor, "M D"]
) -> Int[Tensor, " k"]:
    """Return up to K rows of largest conditional variance given `given` and previous rows.

    These are the indices of `pivoted_cholesky`, which also returns the variance that is left.
    O(N K (K + M)) time and O(N (K + M)) memory; pass a sample of the rows if N is large. Duplicates
    are never selected twice: selection ends when all conditional variances are below 1e-8 of the
    prior variance (1e-5 in float32).

    Args:
        kernel: a GPyTorch kernel without batch shape.
        X: rows to select among.
        K: number of rows to select at most.
        given: inducing points that are there already.

    Returns: indices of the selected rows, in order of selection.
    """
    return pivoted_cholesky(kernel, X, K, given=given).indices


@torch.no_grad()
def chunked_greedy_variance(
    kernel: Kernel, X: Float[Tensor, "N D"], K: int, *, rows: int = BLOCK_ROWS
) -> Int[Tensor, " k"]:
    """Select up to K rows by greedy conditional variance, in blocks of `rows` rows.

    Each block competes with the rows selected so far. With N ≤ `rows` this is `greedy_variance`;
    beyond, it is a greedy selection among greedy selections (GreeDi; Mirzasoleiman et al. 2013).
    O(N K²) time for K ≤ `rows`, and O(K (K + rows)) memory for any N.
    """
    selected = torch.empty(0, dtype=torch.long, device=X.device)
    for block in torch.arange(len(X), device=X.device).split(rows):
        pool = torch.cat([selected, block])
        selected = pool[greedy_variance(kernel, X[pool], K, given=X[:0])]
    return selected


def _block(
    kernel: Kernel,
    X: Float[Tensor, "N D"],
    factor: Float[Tensor, "F N"],
    residual: Float[Tensor, " N"],
    *,
    whole: Float[Tensor, " N"],
    k: int,
    c: int,
    least: float,
) -> tuple[Int[Tensor, " B"], Float[Tensor, "B B"]]:
    """Return the next rows to select and the triangle T of their conditional covariance.

    Args:
        factor: its first k rows are known; the next B are set to the prior covariances K_p*.
        residual: conditional variance of each row.
        whole: prior variance of each row.
        k: number of known rows of the factor.
        c: number of contenders.
        least: t_i/k_ii at which selection ends.
    """
    rows, threshold = _largest(residual / whole, c)
    known = factor[:k, rows]
    C = _covariance(kernel, X[rows], X[rows]).to(factor) - known.mT @ known
    count = min(len(factor) - k, len(rows))
    T, chosen, _ = _pivots(
        C, residual[rows], whole[rows], count=count, least=least, threshold=threshold
    )
    triangle = T[:, chosen].mT.tril().to(factor)
    pivots = rows[chosen.to(rows.device)]
    factor[k : k + len(pivots)] = _covariance(kernel, X[pivots], X)
    return pivots, triangle


def _pivots(
    C: Float[Tensor, "c c"],
    residual: Float[Tensor, " c"],
    whole: Float[Tensor, " c"],
    *,
    count: int,
    least: float,
    threshold: float = 0.0,
    stop: float = -inf,
) -> tuple[Float[Tensor, "B c"], Int[Tensor, " B"], Float[Tensor, " B"]]:
    """Return the factor T of a covariance with pivoting, the pivots, and the traces after them.

    A step has five operations on short vectors, which take NumPy a fraction of PyTorch's time.

    Args:
        C: covariance of the contenders.
        residual: its diagonal.
        whole: prior variances.
        count: largest number of pivots.
        least: t_i/k_ii at which selection ends.
        threshold: t_i/k_ii below which no further row is selected than the first.
        stop: trace at which selection ends; the row that reaches it is selected.
    """
    C_, left, scale = C.cpu().numpy(), residual.cpu().numpy().copy(), whole.cpu().numpy()
    T, order, traces = np.empty((count, len(left)), dtype=C_.dtype), [], []
    trace = float(left.clip(0).sum())
    while len(order) < count and trace > stop:
        b, shares = len(order), left / scale
        p = int(shares.argmax())
        # The first row is the largest of all; a tie with `threshold` is as good as another row.
        if not shares[p] > least or (order and shares[p] < threshold):
            break
        row = T[b] = (C_[p] - T[:b, p] @ T[:b]) / np.sqrt(left[p])
        left -= row**2
        left[p] = 0
        order.append(p)
        trace = float(left.clip(0).sum())
        traces.append(trace)
    return (
        torch.from_numpy(T[: len(order)]),
        torch.tensor(order, dtype=torch.long),
        torch.tensor(traces, dtype=C.dtype),
    )


def _covariance(
    kernel: Kernel, A: Float[Tensor, "B D"], X: Float[Tensor, "N D"]
) -> Float[Tensor, "B N"]:
    """Return the prior covariances of each row of A with all rows of X.

    The distance of two equal rows is exactly zero. For RBF and Matérn kernels it is computed from
    differences. For other kernels each row is a batch of its own, as GPyTorch centres the inputs of
    a batch at its first argument; in one batch of all rows the distance would not be zero.
    """
    form = stationary_form(kernel, X.shape[1])
    if form is not None:
        profile, log_s = form.profile, form.variance.log().item()
        a, x = A / form.lengthscales, X / form.lengthscales
        r = torch.cdist(a, x, compute_mode="donot_use_mm_for_euclid_dist")
        u = r.square_().mul_(profile.rate)
        return profile.covariances_(u.add_(log_s) if profile.is_log else u, log_s)
    if type(kernel) is AdditiveKernel and kernel.active_dims is None:
        parts = [_covariance(k, A, X) for k in kernel.kernels if isinstance(k, Kernel)]
        return torch.stack(parts).sum(0)
    elements = _CPU_ELEMENTS if X.device.type == "cpu" else _GPU_ELEMENTS
    parts = A[:, None].split(max(elements // max(X.numel(), 1), 1))
    return torch.cat([covariance(kernel, a, X.expand(len(a), *X.shape))[:, 0] for a in parts])


def _largest(shares: Float[Tensor, " N"], c: int) -> tuple[Int[Tensor, " c"], float]:
    """Return positions of the c largest entries, and the largest of the other entries.

    Of equal entries the first are taken, so that the selection does not depend on c.
    """
    if c >= len(shares):
        return torch.arange(len(shares), device=shares.device), 0.0
    values = shares.topk(c + 1).values
    lowest = values[c - 1]
    above, equal = (shares > lowest).nonzero()[:, 0], (shares == lowest).nonzero()[:, 0]
    return torch.cat([above, equal[: c - len(above)]]), values[c].item()


@final
@dataclass(frozen=True, slots=True, eq=False)
class ModelLocations:
    """L(Z) of a `SparseGP` at fixed hyper-parameters, for `winnowgp.selection.sample_locations`.

    Attributes:
        model: the model; its candidates are not used.
        data: the rows.
    """

    model: SparseGP
    data: Dataset

    @torch.no_grad()
    def statistics(self, Z: Float[Tensor, "K D"]) -> SubsetStatistics:
        """Return the bounds of all subsets of some locations; O(N K²)."""
        return self.model.with_candidates(Z).subset_statistics(self.data)

    def bound_and_gradient(self, Z: Float[Tensor, "M D"]) -> tuple[Scalar, Float[Tensor, "M D"]]:
        """Return L(Z) in nats, and its gradient in the locations; O(N M²)."""
        model = self.model.with_candidates(Z).requires_grad_(False)
        model.candidates.requires_grad_(True)
        with torch.enable_grad():
            bound = model.chunked_bound(self.data)()
            if not len(Z):
                return bound.detach(), torch.zeros_like(Z)
            (gradient,) = torch.autograd.grad(bound, model.candidates)
        return bound.detach(), gradient
