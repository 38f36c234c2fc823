"""Sub-samples keep rare targets, with weights that restore their shares; centres of rows."""

import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import (
    BernoulliLikelihood,
    GaussianLikelihood,
    Likelihood,
    PoissonLikelihood,
    SoftmaxLikelihood,
    StudentTLikelihood,
)
from torch import Tensor

from winnowgp.data import Dataset
from winnowgp.models import VariationalGP
from winnowgp.training.initialization import random_start_centres, representative_rows

N, COUNT = 4000, 250


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def targets(*shares: float) -> Tensor:
    """Return 0, 1, 2, … in these shares, in random order."""
    values = [torch.full((round(share * N),), float(k)) for k, share in enumerate(shares)]
    joined = torch.cat(values).double()
    return joined[torch.randperm(len(joined), generator=seeded(1))]


def counts() -> Tensor:
    """Return counts with a rate of 0.05, and a few large ones."""
    values = torch.poisson(torch.full((N,), 0.05, dtype=torch.float64), generator=seeded(2))
    values[:12] = torch.arange(12).double()
    return values


def softmax() -> Likelihood:
    return SoftmaxLikelihood(num_classes=3, mixing_weights=False)


def chosen(likelihood: Likelihood, y: Tensor, count: int = COUNT, *, weights=None) -> Dataset:
    """Return the rows that represent the data; the first column of X is the row's number."""
    data = Dataset.of(torch.arange(len(y), dtype=torch.float64)[:, None], y)
    data = Dataset(data.X, data.Y, weights)
    model = VariationalGP(ScaleKernel(RBFKernel()), data.X[:0], likelihood=likelihood)
    order = torch.randperm(len(y), generator=seeded(3))
    return representative_rows(model, data, order, count)


def plain(y: Tensor, count: int = COUNT) -> list[int]:
    return torch.randperm(len(y), generator=seeded(3))[:count].tolist()


RARE = [
    pytest.param(BernoulliLikelihood, targets(0.99, 0.01), id="bernoulli"),
    pytest.param(BernoulliLikelihood, targets(0.02, 0.98), id="bernoulli, rare zeros"),
    pytest.param(softmax, targets(0.9, 0.08, 0.02), id="softmax"),
    pytest.param(PoissonLikelihood, targets(0.96, 0.03, 0.01), id="poisson, few counts"),
    pytest.param(PoissonLikelihood, counts(), id="poisson, many counts"),
]


def kinds_of(y: Tensor) -> Tensor:
    """Return classes and counts as they are; only zero or not if there are more than ten."""
    return y if len(y.unique()) <= 10 else (y > 0).double()


@pytest.mark.parametrize(("likelihood", "y"), RARE)
def test_representative_rows_weights_restore_shares(likelihood, y: Tensor) -> None:
    rows = chosen(likelihood(), y)
    kinds, all_kinds = kinds_of(y)[rows.X[:, 0].long()], kinds_of(y)
    assert rows.weights is not None
    assert 0 < rows.weights.min() <= rows.weights.max() == 1
    total = rows.weights.sum()
    for kind in all_kinds.unique():
        share = rows.weights[kinds == kind].sum() / total
        torch.testing.assert_close(share, (all_kinds == kind).double().mean())
        # Rows of one kind count equally.
        assert len(rows.weights[kinds == kind].unique()) == 1


@pytest.mark.parametrize(("likelihood", "y"), RARE)
def test_representative_rows_keep_rare_targets(likelihood, y: Tensor) -> None:
    rows = chosen(likelihood(), y)
    numbers = rows.X[:, 0].long()
    assert COUNT - 3 <= rows.N <= COUNT
    assert len(numbers.unique()) == rows.N
    assert torch.equal(rows.Y[:, 0], y[numbers])
    kinds = kinds_of(y)
    common = kinds.mode().values
    rare = [kind for kind in kinds.unique() if kind != common]
    for kind in rare:
        # All rows of a rare kind, or an equal part of half of the sample.
        wanted = min(int((kinds == kind).sum()), COUNT // (2 * len(rare)))
        assert int((kinds[numbers] == kind).sum()) == wanted
    assert int((kinds[numbers] == common).sum()) >= COUNT // 2


def test_representative_rows_multiply_own_weights() -> None:
    y, own = targets(0.99, 0.01), 0.5 + torch.rand(N, generator=seeded(4), dtype=torch.float64)
    without, rows = (chosen(BernoulliLikelihood(), y, weights=w) for w in (None, own))
    assert rows.weights is not None
    assert without.weights is not None
    expected = without.weights * own[rows.X[:, 0].long()]
    torch.testing.assert_close(rows.weights, expected)


@pytest.mark.parametrize(
    ("likelihood", "y", "count"),
    [
        (GaussianLikelihood, targets(0.99, 0.01), COUNT),
        (StudentTLikelihood, targets(0.99, 0.01), COUNT),
        (BernoulliLikelihood, targets(0.5, 0.5), COUNT),
        (BernoulliLikelihood, targets(0.99, 0.01), N),
        (softmax, targets(0.7, 0.2, 0.1), 1000),
        (PoissonLikelihood, targets(0.99, 0.01) + 0.5, COUNT),
    ],
    ids=["gaussian", "student-t", "balanced", "all rows", "enough of each", "no integers"],
)
def test_representative_rows_otherwise_are_a_plain_sample(likelihood, y: Tensor, count) -> None:
    rows = chosen(likelihood(), y, count)
    assert rows.weights is None
    assert rows.X[:, 0].tolist() == plain(y, count)


def test_random_start_centres_are_means_of_their_rows() -> None:
    g = torch.Generator().manual_seed(0)
    X = torch.randn(60, 2, generator=g, dtype=torch.float64)
    centres = random_start_centres(X, 5, generator=g, max_iter=100)
    nearest = torch.cdist(X, centres).argmin(1)
    assert len(nearest.unique()) == 5
    for k in range(5):
        torch.testing.assert_close(centres[k], X[nearest == k].mean(0))
