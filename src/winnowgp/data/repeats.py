"""Repeated measurements: many observations at the same inputs, pooled without loss."""

from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from winnowgp.data.dataset import Dataset

# Rows are pooled if that leaves at most this share of them.
_WORTH = 0.5
# Share of the rows that count as several observations whose inputs must have different ones.
_SEVERAL = 0.25


@torch.no_grad()
def pooled(data: Dataset, *, known: float | None = None) -> Dataset:
    """Return three or more observations at the same inputs as two, with the same likelihood.

    Of observations y_j with noise variances s_j and weights w_j, two observations ȳ ± δ of weight
    c/2 and noise variance s have the Gaussian log-likelihood, whatever the function is there:

        c = Σ w_j,   Λ = Σ w_j/s_j,   s = c/Λ,   ȳ = Σ (w_j/s_j) y_j / Λ,
        δ² = [Σ (w_j/s_j) (y_j − ȳ)² + Σ w_j log(s_j/s)] / Λ ≥ 0

    So does every bound, its gradient and every prediction, at a cost that depends on the number of
    different inputs. If noise is learnt, s_j has an unknown part, which may also depend on the
    inputs: then only rows with the same known noise are pooled, for which ȳ and δ² are the mean
    and the variance of y_j. The rows are returned as they are if fewer than half of them could be
    left out.

    >>> X = torch.zeros(4, 1)
    >>> pooled(Dataset.of(X, torch.tensor([1.0, 2.0, 3.0, 6.0]))).weights
    tensor([2., 2.])

    Args:
        data: rows; targets that are missing (NaN) are so in the whole of a group.
        known: variance of all noise that is not in `data.noise`; None if it is learnt.
    """
    groups, count = _groups(data, by_noise=known is None)
    large = count[groups] > 2
    if len(count[count > 2]) * 2 + int((~large).sum()) > _WORTH * data.N:
        return data
    rest, rows = data.part((~large).nonzero()[:, 0]), data.part(large.nonzero()[:, 0])
    _, index = torch.unique(groups[large], return_inverse=True)
    first = _first(index)
    w = rows.counts[:, None]
    s = torch.ones_like(rows.Y)
    if known is not None:
        s = known + (torch.zeros_like(s) if rows.noise is None else rows.noise)

    def total(terms: Float[Tensor, "N P"]) -> Float[Tensor, "G P"]:
        return terms.new_zeros(len(first), terms.shape[1]).index_add_(0, index, terms)

    c, precision = total(w), total(w / s)
    mean, level = total(w / s * rows.Y) / precision, c / precision
    square = total(w / s * (rows.Y - mean[index]).square() + w * (s / level[index]).log())
    offset = (square / precision).clamp_min(0).sqrt()
    noise = None if rows.noise is None else rows.noise[first]
    if known is not None and noise is not None:
        noise = (level - known).clamp_min(0)
    pair = Dataset(rows.X[first], mean + offset, 0.5 * c[:, 0], noise)
    parts = [pair, replace(pair, Y=mean - offset)]
    if rest.N:
        parts.append(replace(rest, weights=rest.counts))
    return Dataset.joined(parts)


def measured_repeatedly(data: Dataset) -> bool:
    """Return whether many rows that count as several observations have others at the same inputs.

    Their differences determine the noise; equal observations alone would imply that there is none.
    A quarter is enough: rounded targets of few different inputs often agree, and copies of rows by
    mistake have no other observations at their inputs.

    >>> X, y = torch.tensor([0.0, 0.0, 1.0])[:, None], torch.tensor([1.0, 2.0, 3.0])
    >>> measured_repeatedly(Dataset.of(X, y, weights=torch.tensor([2.0, 1.0, 2.0])))
    True
    >>> measured_repeatedly(Dataset.of(X, y, weights=torch.tensor([1.0, 1.0, 2.0])))
    False
    """
    if data.weights is None or not bool((data.weights > 1).any()):
        return False
    _, index, count = torch.unique(data.X, dim=0, return_inverse=True, return_counts=True)
    several = count[index][data.weights > 1] > 1
    return several.double().mean().item() >= _SEVERAL


def _groups(data: Dataset, *, by_noise: bool) -> tuple[Int[Tensor, " N"], Int[Tensor, " G"]]:
    """Return the group of each row, and the number of rows of each group."""
    columns = [data.X, torch.isnan(data.Y).to(data.X)]
    if by_noise and data.noise is not None:
        columns.append(data.noise)
    _, index, count = torch.unique(
        torch.cat(columns, 1), dim=0, return_inverse=True, return_counts=True
    )
    return index, count


def _first(index: Int[Tensor, " N"]) -> Int[Tensor, " G"]:
    """Return the first row of each group."""
    rows = torch.arange(len(index), device=index.device)
    first = torch.full((int(index.max()) + 1,), len(index), device=index.device)
    return first.scatter_reduce(0, index, rows, "amin")
