"""Tables of many columns: fewer rows of them at a time, and names looked up once."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.tracked_source import Tracked
from winnowgp.bounds.row_blocks import CHUNK, gpu_size
from winnowgp.data import ArraySource, Dataset, ParquetSource, standardise
from winnowgp.data.parquet import ParquetFile
from winnowgp.errors import InputError

N, D = 50, 12
ROWS = Dataset.of(torch.randn(N, D).double(), torch.randn(N).double())


@pytest.fixture
def wide(tmp_path: Path) -> Path:
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    from pyarrow import parquet

    columns = {f"x{i}": ROWS.X[:, i].numpy() for i in range(D)}
    table = pyarrow.table({**columns, "price": ROWS.Y[:, 0].numpy()})
    parquet.write_table(table, tmp_path / "wide.parquet")
    return tmp_path / "wide.parquet"


def test_parquet_is_decoded_fewer_rows_at_a_time(
    wide: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []
    read = ParquetFile.batches

    def batches(self: ParquetFile, size: int, **options: Any) -> Iterator[Any]:
        for batch, origin in read(self, size, **options):
            sizes.append(batch.num_rows)
            yield batch, origin

    monkeypatch.setattr(ParquetFile, "batches", batches)
    source = ParquetSource(wide, targets="price")
    for numbers, most in ((26 * 3, 6), (5, 1), (2**23, N)):
        sizes.clear()
        monkeypatch.setattr("winnowgp.data.parquet._NUMBERS", numbers)
        found = next(source.chunks(N))
        assert torch.equal(found.X, ROWS.X)
        assert torch.equal(found.Y, ROWS.Y)
        assert max(sizes) == most


def test_a_column_may_be_named_without_a_list(wide: Path) -> None:
    """Letters of a word are not names, nor are its parts."""
    source = ParquetSource(wide, inputs="x1", targets="price")
    assert (source.inputs, source.targets) == (("x1",), ("price",))
    assert torch.equal(next(source.chunks(N)).X, ROWS.X[:, 1:2])
    rest = ParquetSource(wide, targets="x11")
    assert rest.inputs == (*(f"x{i}" for i in range(11)), "price")
    with pytest.raises(InputError, match=r"has no column 'cost'"):
        ParquetSource(wide, targets="cost")
    with pytest.raises(InputError, match="'x1' twice"):
        ParquetSource(wide, inputs=["x1", "x2"], targets="x1")


def test_units_are_found_from_fewer_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("winnowgp.data.scaling._NUMBERS", 5 * (D + 1))
    source = Tracked(ROWS)
    found = standardise(source)
    assert source.most <= 2 * 5
    torch.testing.assert_close(found.x_scaler.scale, ROWS.X.std(0, correction=0))


def test_blocks_for_a_gpu_leave_half_of_it_free() -> None:
    # 128 GiB are more than enough for few columns; a matrix of a block has 2^26 numbers at most.
    assert gpu_size(2**37, 1024, 9) == 65_536
    assert gpu_size(2**37, 128, 9) == gpu_size(2**37, 0, 9) == 262_144
    assert gpu_size(2**37, 1024, 10_000) == 2**26 // 10_000
    # What is held of a row: six numbers for each point and each input, of eight bytes.
    for points, inputs in ((1000, 24), (24, 1000), (512, 512)):
        assert gpu_size(2**30, points, inputs) == 2**29 // (8 * 6 * 1024)
    assert gpu_size(0, 1024, 9) == CHUNK


def test_standard_units_move_with_rows_in_memory() -> None:
    meta = torch.device("meta")
    moved = standardise(ROWS).to(meta)
    found = moved.part(torch.arange(3))
    assert {moved.device, found.X.device, found.Y.device, moved.x_scaler.shift.device} == {meta}
    # Others are moved as they are read.
    stays = standardise(ArraySource(ROWS.X.numpy(), ROWS.Y.numpy())).to(meta)
    assert next(stays.chunks(3)).X.device.type == stays.device.type == "cpu"


@pytest.mark.parametrize(
    ("X", "message"),
    [
        (ROWS.X, "`X` must be a numpy array; got a Tensor. Use `Dataset.of` for tensors"),
        (ROWS.X.tolist(), "`X` must be a numpy array; got a list"),
    ],
    ids=["tensor", "list"],
)
@pytest.mark.unchecked
def test_what_is_no_array_is_said(X: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        ArraySource(X, np.zeros(N))
