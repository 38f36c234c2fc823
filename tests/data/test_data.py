from pathlib import Path

import pytest
import torch

from winnowgp.data import Dataset, Standardiser, hills, load_table, table_names
from winnowgp.errors import DataNotFoundError, InputError

X = torch.zeros(3, 2, dtype=torch.float64)
y = torch.zeros(3, dtype=torch.float64)


def test_one_target_becomes_a_column() -> None:
    data = Dataset.of(X, y)
    assert (data.N, data.D, data.P) == (3, 2, 1)


@pytest.mark.parametrize(
    ("inputs", "targets", "message"),
    [
        (X[0], y, r"\[N D\]"),
        (X, y[:2], "3 rows and `y` has 2"),
        (X[:0], y[:0], "no rows"),
        (X, y.float(), "share a float dtype"),
        (X / 0, y, "`X` has 6 entries"),
        (X, y + float("inf"), "`y` has 3 entries"),
    ],
)
def test_unusable_data_are_named(inputs, targets, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Dataset.of(inputs, targets)


def test_standardising_and_back() -> None:
    A = torch.randn(50, 3, dtype=torch.float64) * torch.tensor([1.0, 1e6, 1e-6]) + 5
    units = Standardiser.of(A)
    Z = units.forward(A)
    torch.testing.assert_close(Z.mean(0), torch.zeros(3, dtype=A.dtype), atol=1e-8, rtol=0)
    torch.testing.assert_close(Z.std(0, correction=0), torch.ones(3, dtype=A.dtype))
    torch.testing.assert_close(units.inverse(Z), A)


@pytest.mark.parametrize("level", [0.0, 0.1, 1e9])
def test_a_constant_column_is_shifted_and_not_blown_up(level: float) -> None:
    A = torch.full((7, 1), level, dtype=torch.float64)
    units = Standardiser.of(A)
    assert units.scale.item() == 1.0
    assert units.forward(A).abs().max() < 1e-6


def test_the_embedded_data_are_there() -> None:
    data = hills()
    assert (data.N, data.D, data.P) == (180, 1, 1)


@pytest.mark.usefixtures("paper_data")
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("concrete", (1030, 9)),
        ("energy", (768, 9)),
        ("kin8nm", (8192, 9)),
        ("protein", (45730, 10)),
        ("qpcr", (437, 48)),
    ],
)
def test_the_papers_data_have_their_published_shapes(name: str, shape: tuple[int, int]) -> None:
    table = load_table(name)
    assert tuple(table.values.shape) == shape
    assert len(table.columns) == shape[1]
    assert len(table.labels) == (437 if name == "qpcr" else 0)
    assert name in table_names()


def test_unknown_missing_and_damaged_files_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WINNOWGP_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(InputError, match="must be one of concrete"):
        load_table("boston")
    with pytest.raises(DataNotFoundError, match="WINNOWGP_DATA"):
        load_table("energy")
    (tmp_path / "energy.csv.gz").write_bytes(b"not it")
    with pytest.raises(InputError, match="not the file it should be"):
        load_table("energy")
