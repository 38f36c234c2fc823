"""The data sets that are loaded by name."""

from pathlib import Path

import pytest

from winnowgp.data import hills
from winnowgp.data.catalogue import ORIGINS, load_table
from winnowgp.errors import DataNotFoundError, InputError


def test_hills_has_180_rows() -> None:
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
def test_load_table_returns_the_published_shapes(name: str, shape: tuple[int, int]) -> None:
    table = load_table(name)
    assert tuple(table.values.shape) == shape
    assert len(table.columns) == shape[1]
    assert len(table.labels) == (437 if name == "qpcr" else 0)
    assert name in ORIGINS


def test_load_table_unknown_missing_or_damaged_raises(
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
