from itertools import islice

import torch

from winnowgp.data import Dataset, minibatches


def data(N: int) -> Dataset:
    X = torch.arange(float(N))[:, None]
    return Dataset.of(X, 2 * X)


def test_batches_are_disjoint_until_too_few_rows_are_left(generator) -> None:
    batches = list(islice(minibatches(data(10), 3, generator=generator), 30))
    assert all(b.N == 3 for b in batches)
    for i in range(0, 30, 3):
        seen = torch.cat([b.X[:, 0] for b in batches[i : i + 3]])
        assert len(seen.unique()) == 9
    assert all(torch.equal(b.Y, 2 * b.X) for b in batches)


def test_every_row_comes_equally_often(generator) -> None:
    draws = 3000
    batches = islice(minibatches(data(10), 3, generator=generator), draws)
    counts = torch.cat([b.X[:, 0] for b in batches]).long().bincount(minlength=10)
    # Each count is binomial with p = 3/10 at the most; six standard deviations.
    expected, sd = draws * 0.3, (draws * 0.3 * 0.7) ** 0.5
    assert ((counts - expected).abs() < 6 * sd).all()


def test_all_rows_when_there_are_no_more(generator) -> None:
    rows = data(4)
    assert next(minibatches(rows, 9, generator=generator)) is rows
