"""The contract of every source, and random subsets of rows."""

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.source_problems import (
    CHOICE,
    WHOLE,
    D,
    N,
    P,
    X,
    Y,
    batches,
    folder_of_files,
    maps,
    row_groups,
)
from winnowgp.data import (
    ArraySource,
    BatchSource,
    Dataset,
    ParquetSource,
    Source,
    Standardiser,
    standardise,
)
from winnowgp.data.row_indices import RowBatches, sampled_rows
from winnowgp.errors import InputError


def unscaled(source: Source) -> Source:
    """Wrap a source in a standardiser that changes nothing."""
    scaled = standardise(source)
    none = Standardiser.none
    return type(scaled)(source, none(torch.zeros(1, D).double()), none(torch.zeros(1, P).double()))


SOURCES: dict[str, Callable[[Path], Source]] = {
    "tensors": lambda _: WHOLE,
    "arrays": lambda _: ArraySource(X, Y),
    "strides": lambda _: ArraySource(np.asfortranarray(X)[::-1][::-1], Y.astype(">f8")),
    "memory maps": lambda folder: ArraySource.open(*maps(folder)),
    "one row group": lambda f: ParquetSource(row_groups(f / "a", [N]), **CHOICE),
    "row groups": lambda f: ParquetSource(row_groups(f / "a", [40, 1, 0, 30, 32]), **CHOICE),
    "folder": lambda folder: ParquetSource(folder_of_files(folder), **CHOICE),
    "batches": lambda _: BatchSource(batches),
    "unscaled": lambda _: unscaled(ArraySource(X, Y)),
}


@pytest.fixture(params=SOURCES, ids=lambda name: name.replace(" ", "-"))
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Source:
    return SOURCES[request.param](tmp_path)


def same(data: Dataset, X: Any, Y: Any) -> None:
    assert data.X.dtype == data.Y.dtype == torch.float64
    assert torch.equal(data.X, torch.as_tensor(X).double())
    assert torch.equal(data.Y, torch.as_tensor(Y).double())


def joined(chunks: list[Dataset]) -> Dataset:
    return Dataset(torch.cat([c.X for c in chunks]), torch.cat([c.Y for c in chunks]))


def test_source_reports_its_dimensions(source: Source) -> None:
    assert isinstance(source, Source)
    assert (source.N, source.D, source.P) == (N, D, P)


@pytest.mark.parametrize("size", [1, 7, 50, N, 1000])
def test_source_chunks_of_any_size_are_all_rows(source: Source, size: int) -> None:
    for _ in range(2):  # a source can be read again
        chunks = list(source.chunks(size))
        full, left = divmod(N, size)
        assert [chunk.N for chunk in chunks] == [size] * full + [left] * (left > 0)
        same(joined(chunks), X, Y)


def test_source_concurrent_iterators_are_independent(source: Source) -> None:
    first = source.chunks(10)
    next(first)
    same(joined(list(source.chunks(9))), X, Y)
    same(next(first), X[10:20], Y[10:20])


@pytest.mark.parametrize("rows", [[5], [102, 0, 40, 41, 40], list(range(N))[::-1], [50, 51], []])
def test_source_part_equals_indexing(source: Source, rows: list[int]) -> None:
    same(source.part(torch.tensor(rows, dtype=torch.long)), X[rows], Y[rows])


@pytest.mark.parametrize("of", [1, 2, 4, 7, N])
def test_source_shards_together_are_all_rows(source: Source, of: int) -> None:
    shares = [source.shard(rank, of) for rank in range(of)]
    sizes = [share.N for share in shares]
    assert sum(sizes) == N
    assert max(sizes) - min(sizes) <= 1
    assert {(share.D, share.P) for share in shares} == {(D, P)}
    same(joined([chunk for share in shares for chunk in share.chunks(6)]), X, Y)
    start = sum(sizes[: of // 2])
    rows = torch.tensor([sizes[of // 2] - 1, 0])
    same(shares[of // 2].part(rows), X[rows + start], Y[rows + start])


def test_source_shard_of_a_shard_is_a_range_of_rows(source: Source) -> None:
    same(joined(list(source.shard(1, 2).shard(1, 3).chunks(5))), X[68:85], Y[68:85])


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda s: list(s.chunks(0)), "`size` must be at least 1 row; got 0"),
        (lambda s: s.shard(2, 2), "`index` must be from 0 to below `count`; got 2 of 2"),
        (lambda s: s.shard(0, N + 1), f"{N} rows cannot be divided into {N + 1} shards"),
    ],
)
def test_source_invalid_size_or_shard_raises_input_error(
    source: Source, ask: Callable[[Source], object], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        ask(source)


# A Dataset indexes as tensors do.
@pytest.mark.parametrize("source", [name for name in SOURCES if name != "tensors"], indirect=True)
@pytest.mark.parametrize("rows", [[-1], [3, N]])
def test_source_part_outside_the_rows_raises_input_error(source: Source, rows: list[int]) -> None:
    with pytest.raises(InputError, match=f"indices from 0 to {N - 1}; got {rows[0]} to {rows[-1]}"):
        source.part(torch.tensor(rows))


def test_source_standardised_has_the_moments_of_all_rows(source: Source) -> None:
    scaled = standardise(source)
    for units, A in ((scaled.x_scaler, X), (scaled.y_scaler, Y)):
        np.testing.assert_allclose(units.shift, A.mean(0), rtol=0, atol=1e-15)
        np.testing.assert_allclose(units.scale, A.std(0), rtol=1e-14)
    expected = (X - X.mean(0)) / X.std(0)
    for chunks in (scaled.chunks(8), (c for r in range(3) for c in scaled.shard(r, 3).chunks(8))):
        whole = joined(list(chunks))
        np.testing.assert_allclose(whole.X, expected, atol=1e-13)
        np.testing.assert_allclose(whole.Y, (Y - Y.mean(0)) / Y.std(0), atol=1e-13)
    np.testing.assert_allclose(scaled.part(torch.tensor([9, 2])).X, expected[[9, 2]], atol=1e-13)
    as_they_are = standardise(source, targets=False)
    assert torch.equal(next(as_they_are.chunks(N)).Y, torch.tensor(Y))


def test_source_other_dtypes_are_converted_when_read(tmp_path: Path) -> None:
    whole = np.arange(12, dtype=np.int16).reshape(6, 2)
    for made in (
        ArraySource(whole, whole[:, 0] > 4, dtype=torch.float32),
        BatchSource(lambda: iter([(whole, whole[:, 0] > 4)]), dtype=torch.float32),
        ParquetSource(
            row_groups(tmp_path / "a", [6], np.hstack([whole, whole]), whole, t=whole[:, 0] > 4),
            inputs=["a", "b"],
            targets=["t"],
            dtype=torch.float32,
        ),
    ):
        chunk = next(made.chunks(9))
        assert chunk.X.dtype == chunk.Y.dtype == torch.float32
        assert chunk.X.tolist() == whole.tolist()
        assert chunk.Y.tolist() == [[0.0]] * 3 + [[1.0]] * 3


@pytest.mark.parametrize("N", [10, 30, 1000])
def test_sampled_rows_are_distinct_and_shuffled(N: int) -> None:
    rows = sampled_rows(N, 20, torch.Generator().manual_seed(0))
    assert len(rows.unique()) == len(rows) == min(N, 20)
    assert not torch.equal(rows, rows.sort().values)
    assert int(rows.max()) < N


def test_row_batches_of_one_epoch_are_disjoint(generator) -> None:
    batches = list(islice(RowBatches(10, 3, generator=generator), 30))
    assert all(len(rows) == 3 for rows in batches)
    for i in range(0, 30, 3):
        assert len(torch.cat(batches[i : i + 3]).unique()) == 9


def test_row_batches_visit_rows_equally_often(generator) -> None:
    draws = 3000
    batches = islice(RowBatches(10, 3, generator=generator), draws)
    counts = torch.cat(list(batches)).bincount(minlength=10)
    # Each count is binomial with p = 3/10 at the most; six standard deviations.
    expected, sd = draws * 0.3, (draws * 0.3 * 0.7) ** 0.5
    assert ((counts - expected).abs() < 6 * sd).all()


def test_row_batches_of_all_rows_are_in_order_and_draw_nothing(generator) -> None:
    before = generator.get_state()
    assert next(RowBatches(4, 9, generator=generator)).tolist() == [0, 1, 2, 3]
    assert torch.equal(generator.get_state(), before)


@pytest.mark.parametrize("seen", range(5))
def test_row_batches_continue_from_a_saved_state(generator, seen: int) -> None:
    first = RowBatches(10, 3, generator=generator)
    for _ in range(seen):
        next(first)
    state = {
        k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in first.state_dict().items()
    }
    randomness = generator.get_state()
    expected = torch.stack(list(islice(first, 7)))
    other = torch.Generator()
    other.set_state(randomness)
    second = RowBatches(10, 3, generator=other)
    second.load_state_dict(state)
    assert torch.equal(torch.stack(list(islice(second, 7))), expected)
