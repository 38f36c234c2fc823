"""The rows behind the evidence: rare targets, and dense local blocks."""

from collections import Counter
from copy import deepcopy

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

from helpers import oracles
from winnowgp.data import Dataset
from winnowgp.models import SparseGP, VariationalGP
from winnowgp.training import hyperparameters
from winnowgp.training.budget import Budget
from winnowgp.training.hyperparameters import (
    Optimum,
    local_blocks,
    maximise_local_evidence,
    representative_rows,
)
from winnowgp.training.lbfgs import Stop, maximise_elbo

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


@pytest.mark.parametrize(("N", "D", "size"), [(200, 2, 30), (64, 1, 8), (100, 3, 100), (7, 1, 1)])
def test_local_blocks_partition_the_rows(N: int, D: int, size: int) -> None:
    X = torch.randn(N, D, generator=seeded(), dtype=torch.float64)
    blocks = local_blocks(X, size)
    assert Counter(torch.cat(blocks).tolist()) == Counter(range(N))
    assert all(1 <= len(block) <= size for block in blocks)
    # Halves, so that no block is far smaller than another.
    assert max(map(len, blocks)) <= min(map(len, blocks)) + 1


def test_local_blocks_are_neighbours_along_the_longer_column() -> None:
    X = torch.rand(400, 2, generator=seeded(), dtype=torch.float64)
    X[:, 0] *= 10
    blocks = local_blocks(X, 50)
    assert len(blocks) == 8
    spans = sorted((X[block, 0].min().item(), X[block, 0].max().item()) for block in blocks)
    # Intervals of the first column that do not overlap.
    assert all(a[1] < b[0] for a, b in zip(spans, spans[1:], strict=False))
    # Smaller blocks divide squares of side 1.25 along both columns.
    assert any(X[block, 1].max() - X[block, 1].min() < 0.7 for block in local_blocks(X, 20))


def test_local_blocks_ignore_outliers() -> None:
    X = torch.rand(400, 2, generator=seeded(), dtype=torch.float64)
    X[:, 0] *= 10
    X[0, 1] = 1e6
    spans = [(X[block, 0].max() - X[block, 0].min()).item() for block in local_blocks(X, 50)]
    assert max(spans) < 2


def test_local_blocks_of_equal_rows_end() -> None:
    blocks = local_blocks(torch.zeros(10, 2, dtype=torch.float64), 3)
    assert Counter(torch.cat(blocks).tolist()) == Counter(range(10))


def fine(rows: int, *, width: float, lengthscale: float) -> Dataset:
    """Return a draw from an RBF prior on a line, with a noise variance of 0.01."""
    g = seeded(5)
    X = (width * torch.rand(rows, 1, generator=g, dtype=torch.float64)).sort(0).values
    # Random Fourier features: the sum of many waves, whose covariance is nearly the RBF kernel.
    waves = torch.randn(300, generator=g, dtype=torch.float64) / lengthscale
    phases = 2 * torch.pi * torch.rand(300, generator=g, dtype=torch.float64)
    f = (2 / 300) ** 0.5 * (X * waves + phases).cos().sum(1)
    return Dataset.of(X, f + 0.1 * torch.randn(rows, generator=g, dtype=torch.float64))


def optimum_of(data: Dataset, *, lengthscale: float, noise: float) -> Optimum[SparseGP]:
    kernel = ScaleKernel(RBFKernel()).initialize(**{"base_kernel.lengthscale": lengthscale})
    return Optimum(SparseGP(kernel, data.X[:0], noise=noise), 0.0, data.N, 1)


def local(data: Dataset, optimum: Optimum[SparseGP]) -> Optimum[SparseGP] | None:
    budget = Budget(data.X.device)
    found = maximise_local_evidence(optimum, data, generator=seeded(), budget=budget)
    assert budget.spent > 0
    return found


def maximise(model: SparseGP, rows: Dataset) -> SparseGP:
    """Return a copy at a maximum of the exact evidence of these rows."""
    copy = deepcopy(model)
    maximise_elbo(copy, rows.X, objective=copy.dense_bound(rows), stop=Stop(1e-3, 10, 100))
    return copy


def dense_evidence(gp: SparseGP, rows: Dataset) -> float:
    with torch.no_grad():
        K = gp.kernel(rows.X).to_dense()
        return oracles.log_normal(rows.Y, K + gp.noise * torch.eye(rows.N)).item()


def lengthscale_of(gp: SparseGP) -> float:
    kernel = gp.kernel.get_submodule("base_kernel")
    assert isinstance(kernel, RBFKernel)
    return kernel.lengthscale.item()


def test_local_evidence_finds_a_lengthscale_that_a_sample_misses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = fine(6000, width=300, lengthscale=0.05)
    monkeypatch.setattr(hyperparameters, "_BLOCK", {"cpu": (60, 3)})
    # 180 random rows are thirty lengthscales apart: the function is noise to them.
    sample = data.part(torch.randperm(data.N, generator=seeded())[:180])
    alone = maximise(optimum_of(data, lengthscale=3.0, noise=0.3).model, sample)
    assert lengthscale_of(alone) > 1
    assert alone.noise > 0.5
    found = local(data, Optimum(alone, 0.0, 180, 1))
    assert found is not None
    assert lengthscale_of(found.model) == pytest.approx(0.05, rel=0.2)
    assert found.model.noise.item() == pytest.approx(0.01, rel=0.5)
    assert found.kernel == 1


def test_local_evidence_is_the_sum_over_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    data = fine(120, width=100, lengthscale=3.0)
    monkeypatch.setattr(hyperparameters, "_BLOCK", {"cpu": (40, 9)})
    found = local(data, optimum_of(data, lengthscale=30.0, noise=0.5))
    assert found is not None
    blocks = [data.part(rows) for rows in data.X[:, 0].argsort().split(30)]
    expected = sum(dense_evidence(found.model, block) for block in blocks)
    assert found.evidence == pytest.approx(expected, abs=1e-4)
    assert found.observations == 120
    # No hyper-parameters nearby are better.
    for factor in (0.8, 1.25):
        other = deepcopy(found.model)
        other.kernel.initialize(**{"base_kernel.lengthscale": factor * lengthscale_of(found.model)})
        assert sum(dense_evidence(other, block) for block in blocks) < expected
    # From there, nothing is left to gain.
    assert local(data, found) is None
