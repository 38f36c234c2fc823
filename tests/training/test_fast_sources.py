"""Sources that are no larger than the sample are read a few times, not in every pass."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel

from helpers.tracked_source import Tracked
from winnowgp.data import BatchSource, Dataset, Source, shard, standardise
from winnowgp.models import SparseGP
from winnowgp.training import FastSchedule, FitResult, fit

N = 40
RNG = np.random.default_rng(0)
X = RNG.uniform(-2, 2, size=(N, 1))
Y = np.sin(2 * X[:, 0]) + 0.3 * RNG.normal(size=N)
WHOLE = Dataset.of(torch.tensor(X), torch.tensor(Y))
PLAN = FastSchedule(n_candidates=6, rounds=1, selection_rows=20, gain=1e-3, inclusion_steps=5)


def fitted(source: Source) -> FitResult[SparseGP]:
    model = SparseGP(ScaleKernel(RBFKernel()), WHOLE.X[:0], noise=0.1)
    return fit(model, source, schedule=PLAN)


def test_fast_small_source_is_read_once() -> None:
    passes = 0

    def batches() -> Iterator[tuple[Any, Any]]:
        nonlocal passes
        passes += 1
        yield from ((X[i : i + 7], Y[i : i + 7]) for i in range(0, N, 7))

    found = fitted(standardise(BatchSource(batches)))
    # One pass each for the count, the scalers and the rows.
    assert passes == 3
    expected = fitted(standardise(WHOLE))
    assert found.elbo == pytest.approx(expected.elbo, rel=1e-10)
    torch.testing.assert_close(found.posterior.Z, expected.posterior.Z)


def test_fast_larger_source_is_read_in_every_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("winnowgp.training.initialization.HELD", N - 1)
    source = Tracked(WHOLE)
    fitted(source)
    assert source.read > 20 * N


def test_fast_small_shared_source_keeps_shards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One process sums in as many shards as several do, for identical digits."""
    bounds = []
    for most in (0, N):
        monkeypatch.setattr("winnowgp.training.initialization.HELD", most)
        source = BatchSource(lambda: iter([(X, Y)]))
        bounds.append(fitted(shard(source)).elbo)
    assert bounds[0] == bounds[1]


def test_fast_sample_of_wide_table_has_fewer_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Dataset.of(torch.randn(N, 9).double(), torch.randn(N).double())
    monkeypatch.setattr("winnowgp.training.initialization.NUMBERS", 120)
    monkeypatch.setattr("winnowgp.training.initialization._FEWEST_ROWS", 2)
    from winnowgp.training.initialization import rows_in_memory

    sample, order = rows_in_memory(Tracked(rows), torch.Generator().manual_seed(0))
    assert sample.N == len(order) == 12


def test_fast_sample_has_a_minimum_of_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = Dataset.of(torch.randn(5000, 1).double(), torch.randn(5000).double())
    monkeypatch.setattr("winnowgp.training.initialization.NUMBERS", 120)
    from winnowgp.training.initialization import rows_in_memory

    sample, _ = rows_in_memory(Tracked(rows), torch.Generator().manual_seed(0))
    assert FastSchedule().selection_rows <= sample.N == 4096
