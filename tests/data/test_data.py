from pathlib import Path

import pytest
import torch

from winnowgp.data import Dataset, Standardiser, hills, load_table
from winnowgp.data.catalogue import ORIGINS
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


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (y[:2] + 1, r"one torch.float64 number per row, \[3\]"),
        (y.float() + 1, "got torch.float32"),
        (y, "must be positive and finite"),
        (y + float("inf"), "must be positive and finite"),
    ],
)
def test_unusable_weights_are_named(weights, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Dataset.of(X, y, weights=weights)


def test_equal_rows_are_merged_and_every_other_order_is_the_same() -> None:
    rows = torch.tensor([[2.0, 1.0, 5.0], [0.0, 0.0, 1.0], [2.0, 1.0, 6.0]]).double()
    times = torch.tensor([1, 3, 2])
    repeated = rows.repeat_interleave(times, 0)[[4, 0, 2, 5, 1, 3]]
    merged = Dataset.of(repeated[:, :2], repeated[:, 2:]).merged()
    weighted = Dataset.of(rows[:, :2], rows[:, 2:], weights=times.double()).merged()
    for found in (merged, weighted):
        assert found.weights is not None
        assert found.observations == 6
        assert found.X.tolist() == [[0, 0], [2, 1], [2, 1]]
        assert found.Y.tolist() == [[1], [5], [6]]
        assert found.weights.tolist() == [3, 1, 2]


def test_rows_that_count_once_stay_as_they_are() -> None:
    g = torch.Generator().manual_seed(0)
    X = torch.randint(0, 4, (30, 3), generator=g).double().unique(dim=0).flip(0)
    y = torch.zeros(len(X)).double()
    for weights in (None, torch.ones(len(X)).double()):
        found = Dataset.of(X, y, weights=weights).merged()
        assert found.weights is None
        assert torch.equal(found.X, X)
    halves = Dataset.of(X[[0, 0, 1]], y[:3], weights=torch.tensor([0.5, 0.5, 1.0]).double())
    assert halves.merged().weights is None
    assert halves.merged().N == 2


def test_weighted_units_are_those_of_repeated_rows() -> None:
    A = torch.randn(6, 2, generator=torch.Generator().manual_seed(0)).double() * 1e3 + 5
    times = torch.tensor([1, 3, 2, 5, 1, 1])
    found = Standardiser.of(A, weights=times.double())
    wanted = Standardiser.of(A.repeat_interleave(times, 0))
    torch.testing.assert_close(found.shift, wanted.shift)
    torch.testing.assert_close(found.scale, wanted.scale)


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
    assert name in ORIGINS


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
    with pytest.raises(InputError, match="is not the published data set"):
        load_table("energy")
