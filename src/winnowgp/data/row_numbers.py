"""Checks of numbers of rows, said once for every source."""

import torch
from jaxtyping import Int
from torch import Tensor

from winnowgp.errors import InputError


def checked_size(size: int) -> int:
    """Rows of a chunk."""
    if size < 1:
        raise InputError(f"`size` must be at least 1 row; got {size}.")
    return size


def checked_rows(rows: Int[Tensor, " B"], N: int) -> Int[Tensor, " B"]:
    """Numbers of rows, each of which exists."""
    if len(rows) and not bool(((rows >= 0) & (rows < N)).all()):
        raise InputError(
            f"`rows` must be numbers from 0 to {N - 1}; got {int(rows.min())} to {int(rows.max())}."
        )
    return rows


def share_range(N: int, rank: int, of: int) -> range:
    """The rows of one of `of` processes; lengths differ by at most one.

    >>> [share_range(5, rank, 2) for rank in range(2)]
    [range(0, 2), range(2, 5)]
    """
    if not 0 <= rank < of:
        raise InputError(f"`rank` must be from 0 to below `of`; got {rank} of {of}.")
    if of > N:
        raise InputError(f"{of} processes cannot share {N} rows; start at most {N}.")
    return range(rank * N // of, (rank + 1) * N // of)


def sampled_rows(N: int, count: int, generator: torch.Generator) -> Int[Tensor, " B"]:
    """Up to `count` different rows of N in random order, on the generator's device.

    Memory is that of `count` rows: an order of all would take some for each row.
    """
    device = generator.device
    if 4 * count >= N:
        return torch.randperm(N, generator=generator, device=device)[:count]
    # Few of them are drawn twice.
    rows = torch.randint(N, (2 * count,), generator=generator, device=device).unique()
    return rows[torch.randperm(len(rows), generator=generator, device=device)[:count]]
