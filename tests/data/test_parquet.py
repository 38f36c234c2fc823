"""Parquet files and folders as sources: row groups, columns, memory and errors."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import torch
from pyarrow import parquet

from helpers.source_problems import CHOICE, N, Y, folder_of_files, row_groups, spoil
from winnowgp.data import Dataset, ParquetSource
from winnowgp.data.parquet import ParquetFile
from winnowgp.errors import InputError

WIDE, D = 50, 12
ROWS = Dataset.of(torch.randn(WIDE, D).double(), torch.randn(WIDE).double())


def test_parquet_source_names_row_group_of_a_bad_value(tmp_path: Path) -> None:
    for name, value, word in (("b", np.nan, "nan"), ("z", np.inf, "inf"), ("c", None, "no value")):
        values: list[float | None] = [0.5] * 200
        values[37 * 5 + 2] = value
        long = np.ones((200, 3))
        path = row_groups(tmp_path / "a.parquet", [5] * 40, long, long, **{name: values})
        source = ParquetSource(path, **CHOICE)
        row = r"row 188 \(row group 37, counted from 0"
        message = rf"a\.parquet: column '{name}' has {word} in {row}"
        for call in (
            lambda s=source: list(s.chunks(1000)),
            lambda s=source: list(s.shard(3, 4).chunks(7)),
            lambda s=source: s.part(torch.tensor([199, 187])),
        ):
            with pytest.raises(InputError, match=message):
                call()
        # Rows before it can be read.
        assert source.part(torch.tensor([184])).N == 1


def test_parquet_source_reads_only_the_row_groups_it_needs(tmp_path: Path) -> None:
    """Damage to other row groups goes unnoticed; damage to these is named."""
    rng = np.random.default_rng(0)
    path = row_groups(
        tmp_path / "a", [50] * 4, rng.normal(size=(200, 3)), rng.normal(size=(200, 3))
    )
    spoil(path, group=2, column=0)
    source = ParquetSource(path, **CHOICE)
    assert source.part(torch.tensor([99, 0])).N == 2
    assert sum(chunk.N for chunk in source.shard(3, 4).chunks(9)) == 50
    with pytest.raises(InputError, match=r"a: row group 2 \(counted from 0\) cannot be read"):
        list(source.chunks(9))


@pytest.mark.parametrize("kept", [-60, 30])
def test_parquet_source_names_the_truncated_file_of_a_folder(kept: int, tmp_path: Path) -> None:
    folder = folder_of_files(tmp_path)
    last = folder / "later" / "0.parquet"
    last.write_bytes(last.read_bytes()[:kept])
    with pytest.raises(InputError, match=r"later/0\.parquet cannot be read as Parquet.*cut off"):
        ParquetSource(folder, **CHOICE)


def test_parquet_source_that_changes_raises_input_error(tmp_path: Path) -> None:
    path = row_groups(tmp_path / "a", [50, 53])
    source = ParquetSource(path, **CHOICE)
    row_groups(path, [53, 50])
    with pytest.raises(InputError, match="a has changed since it was opened"):
        list(source.chunks(9))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"targets": ["y"]}, "column 'word' has type string; a source needs numeric columns"),
        ({"targets": ["y"], "inputs": ["a", "q"]}, "no column 'q'; its columns are 'a', 'y', 'b'"),
        ({"targets": ["y"], "inputs": ["a", "y"]}, "named once in .*'y' twice"),
        ({"targets": ["y"], "inputs": ["a"], "noise": "y"}, "named once in .*'y' twice"),
        ({"targets": ["y"], "inputs": ["a"], "noise": ["b", "z"]}, "one column for each of 1"),
        ({"targets": [], "inputs": ["a"]}, r"must each name a column; got \['a'\] and \[\]"),
    ],
)
def test_parquet_source_names_columns_it_cannot_use(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = row_groups(tmp_path / "a", [N])
    with pytest.raises(InputError, match=message):
        ParquetSource(path, **settings)


def test_parquet_source_names_the_row_of_a_negative_variance(tmp_path: Path) -> None:
    long = np.ones((200, 3))
    path = row_groups(tmp_path / "a", [50] * 4, long, long, b=[0.5] * 120 + [-1.0] + [0.5] * 79)
    source = ParquetSource(path, targets="y", inputs="a", noise="b")
    with pytest.raises(
        InputError, match=r"column 'b'.* at least 0; got -1 in row 121 \(row group 2"
    ):
        list(source.chunks(9))


def test_parquet_source_without_rows_raises_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nope cannot be read: there is no such"):
        ParquetSource(tmp_path / "nope", **CHOICE)
    with pytest.raises(InputError, match="is a folder without files"):
        ParquetSource(tmp_path, **CHOICE)
    path = row_groups(tmp_path / "a", [0])
    with pytest.raises(InputError, match="has no rows"):
        ParquetSource(path, **CHOICE)


def test_parquet_source_inputs_default_to_all_other_columns(tmp_path: Path) -> None:
    path = row_groups(tmp_path / "a", [N], word=np.arange(N))
    source = ParquetSource(path, targets=["z", "y"])
    assert source.inputs == ("a", "b", "word", "c")
    assert torch.equal(next(source.chunks(N)).Y, torch.tensor(Y[:, ::-1].copy()))


def test_parquet_source_memory_does_not_grow_with_row_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("winnowgp.data.parquet._BATCH", 1000)

    def peak(rows: int) -> int:
        values = np.random.default_rng(0).normal(size=rows)
        parquet.write_table(
            pyarrow.table({"a": values, "y": values}), tmp_path / "a", row_group_size=rows
        )
        source = ParquetSource(tmp_path / "a", targets=["y"])
        before, most, count = pyarrow.total_allocated_bytes(), 0, 0
        for chunk in source.chunks(2500):
            most = max(most, pyarrow.total_allocated_bytes() - before)
            count += chunk.N
        assert count == rows
        return most

    assert peak(1_200_000) < 1.2 * peak(400_000)


@pytest.fixture
def wide(tmp_path: Path) -> Path:
    columns = {f"x{i}": ROWS.X[:, i].numpy() for i in range(D)}
    table = pyarrow.table({**columns, "price": ROWS.Y[:, 0].numpy()})
    parquet.write_table(table, tmp_path / "wide.parquet")
    return tmp_path / "wide.parquet"


def test_parquet_source_decodes_fewer_rows_of_wide_tables(
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
    for numbers, most in ((26 * 3, 6), (5, 1), (2**23, WIDE)):
        sizes.clear()
        monkeypatch.setattr("winnowgp.data.parquet._NUMBERS", numbers)
        chunk = next(source.chunks(WIDE))
        assert torch.equal(chunk.X, ROWS.X)
        assert torch.equal(chunk.Y, ROWS.Y)
        assert max(sizes) == most


def test_parquet_source_accepts_one_name_without_a_list(wide: Path) -> None:
    source = ParquetSource(wide, inputs="x1", targets="price")
    assert (source.inputs, source.targets) == (("x1",), ("price",))
    assert torch.equal(next(source.chunks(WIDE)).X, ROWS.X[:, 1:2])
    rest = ParquetSource(wide, targets="x11")
    assert rest.inputs == (*(f"x{i}" for i in range(11)), "price")
    with pytest.raises(InputError, match=r"has no column 'cost'"):
        ParquetSource(wide, targets="cost")
    with pytest.raises(InputError, match="'x1' twice"):
        ParquetSource(wide, inputs=["x1", "x2"], targets="x1")
