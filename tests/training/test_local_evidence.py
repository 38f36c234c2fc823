"""Hyper-parameters from dense local blocks of rows."""

from collections import Counter
from copy import deepcopy
from itertools import pairwise

import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel

from helpers import oracles
from winnowgp.data import Dataset
from winnowgp.models import SparseGP
from winnowgp.training import local_evidence
from winnowgp.training.budget import Budget
from winnowgp.training.lbfgs import Stop, maximise_elbo
from winnowgp.training.local_evidence import local_blocks, maximise_local_evidence
from winnowgp.training.optima import Optimum


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


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
    assert all(a[1] < b[0] for a, b in pairwise(spans))
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
    monkeypatch.setattr(local_evidence, "_BLOCK", {"cpu": (60, 3)})
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
    monkeypatch.setattr(local_evidence, "_BLOCK", {"cpu": (40, 9)})
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
