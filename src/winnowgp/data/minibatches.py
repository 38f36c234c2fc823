"""Random parts of the rows, one after another without end."""

from collections.abc import Iterator

import torch

from winnowgp.data.dataset import Dataset


def minibatches(data: Dataset, size: int, *, generator: torch.Generator) -> Iterator[Dataset]:
    """Batches of `size` rows in a random order, drawn anew whenever fewer than `size` are left.

    Every batch is a uniformly random part of the rows. All rows at once if there are no more.

    >>> X = torch.arange(5.0)[:, None]
    >>> batches = minibatches(Dataset.of(X, X), 2, generator=torch.Generator().manual_seed(0))
    >>> [next(batches).N for _ in range(4)]
    [2, 2, 2, 2]
    """
    if size >= data.N:
        while True:
            yield data
    while True:
        order = torch.randperm(data.N, generator=generator, device=generator.device)
        for start in range(0, data.N - size + 1, size):
            rows = order[start : start + size].to(data.X.device)
            yield Dataset(data.X[rows], data.Y[rows])
