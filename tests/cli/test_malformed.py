"""Five hundred damaged files: one line that says what to do, exit code 2, no file written."""

import gzip
import io
import pickle
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import torch
from pyarrow import parquet
from safetensors.torch import save as save_tensors

from helpers.forgery import forged_outline, forged_tensor
from helpers.short_fits import short_fits
from winnowgp import load
from winnowgp.cli.app import run

Make = Callable[[random.Random, str], bytes]
"""Maps a random generator and a valid CSV to the bytes of a damaged file."""


def lines_of(good: str) -> list[list[str]]:
    return [line.split(",") for line in good.splitlines()]


def text_of(lines: list[list[str]]) -> bytes:
    return ("\n".join(",".join(line) for line in lines) + "\n").encode()


def wrong_type(rng: random.Random, good: str) -> bytes:
    lines = lines_of(good)
    place = rng.choice([lines[0].index("x"), lines[0].index("day")])
    lines[rng.randrange(1, len(lines))][place] = rng.choice(
        ["tall", "1.2.3", "0x1F", "1e", "1_000"]
    )
    return text_of(lines)


def not_finite(rng: random.Random, good: str) -> bytes:
    lines = lines_of(good)
    value = rng.choice(["inf", "-inf", "1e200", "Infinity", "-1e308", "1e999"])
    lines[rng.randrange(1, len(lines))][lines[0].index("x")] = value
    return text_of(lines)


def ragged(rng: random.Random, good: str) -> bytes:
    lines = lines_of(good)
    row = lines[rng.randrange(1, len(lines))]
    row.extend(["1"] * rng.randrange(1, 5)) if rng.random() < 0.5 else row.pop()
    return text_of(lines)


def lacks_a_column(rng: random.Random, good: str) -> bytes:
    lines = lines_of(good)
    place = lines[0].index(rng.choice(["x", "town", "day"]))
    return text_of([line[:place] + line[place + 1 :] for line in lines])


def duplicated_header(rng: random.Random, good: str) -> bytes:
    lines = lines_of(good)
    a, b = rng.sample(range(len(lines[0])), 2)
    lines[0][a] = lines[0][b]
    return text_of(lines)


def nameless_header(rng: random.Random, good: str) -> bytes:
    lines = lines_of(good)
    # The first column may be a row index, which has no name.
    lines[0][rng.randrange(1, len(lines[0]))] = rng.choice(["", " ", "\t"])
    return text_of(lines)


def bad_encoding(rng: random.Random, good: str) -> bytes:
    content = bytearray(good.encode())
    content[rng.randrange(len(content))] = rng.choice([0xFF, 0xFE, 0x80, 0xC0, 0xE9])
    return (
        bytes(content) if rng.random() < 0.7 else good.encode(rng.choice(["utf-16-le", "utf-32"]))
    )


def binary(rng: random.Random, good: str) -> bytes:
    return rng.randbytes(rng.randrange(1, 5000)).replace(b"\n", b"\0", 1) + b"\0"


def empty(rng: random.Random, good: str) -> bytes:
    header = good.splitlines()[0].encode()
    return rng.choice(
        [b"", b"\n", b"  \n\n", b"\r\n" * 9, header, header + b"\n\n\n", b"\xef\xbb\xbf"]
    )


def huge_field(rng: random.Random, good: str) -> bytes:
    lines = lines_of(good)
    lines[rng.randrange(len(lines))][0] = (
        '"' + rng.choice("ab,\n") * rng.randrange(140_000, 300_000) + '"'
    )
    return text_of(lines)


def open_quote(rng: random.Random, good: str) -> bytes:
    lines = lines_of(good)
    row = lines[rng.randrange(1, len(lines))]
    row[rng.randrange(len(row))] = rng.choice(['"', '"never closed', '"x"y'])
    return text_of(lines)


def cut_gzip(rng: random.Random, good: str) -> bytes:
    content = gzip.compress(good.encode(), mtime=0)
    return content[: rng.randrange(2, len(content) - 1)]


def damaged_gzip(rng: random.Random, good: str) -> bytes:
    content = bytearray(gzip.compress(good.encode(), mtime=0))
    for _ in range(20):
        content[rng.randrange(12, len(content))] ^= rng.randrange(1, 256)
    return bytes(content)


def parquet_of(columns: dict[str, Any]) -> bytes:
    file = io.BytesIO()
    parquet.write_table(pyarrow.table(columns), file)
    return file.getvalue()


def good_parquet(good: str) -> bytes:
    header, *rows = lines_of(good)
    return parquet_of({name: [row[i] for row in rows] for i, name in enumerate(header)})


def cut_parquet(rng: random.Random, good: str) -> bytes:
    content = good_parquet(good)
    return content[: rng.randrange(4, len(content) - 1)]


def damaged_parquet(rng: random.Random, good: str) -> bytes:
    """The end of the footer says where everything is; any change to it is fatal."""
    content = bytearray(good_parquet(good))
    content[-rng.randrange(1, 8)] ^= rng.randrange(1, 256)
    return bytes(content)


def odd_parquet(rng: random.Random, good: str) -> bytes:
    n = rng.randrange(1, 9)
    return parquet_of(
        rng.choice(
            [
                {"x": [[1.0]] * n, "town": ["Oslo"] * n, "day": ["2024-01-01"] * n},
                {"x": [{"a": 1}] * n, "town": ["Oslo"] * n, "day": ["2024-01-01"] * n},
                {"x": [b"\xff"] * n, "town": ["Oslo"] * n, "day": ["2024-01-01"] * n},
                {"x": ["high"] * n, "town": ["Oslo"] * n, "day": ["2024-01-01"] * n},
                {"x": [float("inf")] * n, "town": ["Oslo"] * n, "day": ["2024-01-01"] * n},
                {"x": [1.0] * n, "town": ["Oslo"] * n, "day": [True] * n},
                {"x": [1.0] * n, "town": ["Oslo"] * n},
                {"x": [], "town": [], "day": []},
                {},
            ]
        )
    )


def garbage_parquet(rng: random.Random, good: str) -> bytes:
    return b"PAR1" + rng.randbytes(rng.randrange(0, 400)) + rng.choice([b"", b"PAR1"])


TABLES: dict[Make, int] = {
    wrong_type: 35,
    not_finite: 25,
    ragged: 25,
    lacks_a_column: 10,
    duplicated_header: 20,
    nameless_header: 15,
    bad_encoding: 30,
    binary: 25,
    empty: 15,
    huge_field: 15,
    open_quote: 20,
    cut_gzip: 20,
    damaged_gzip: 20,
    cut_parquet: 35,
    damaged_parquet: 15,
    odd_parquet: 25,
    garbage_parquet: 15,
}


def cut_model(rng: random.Random, good: bytes) -> bytes:
    return good[: rng.randrange(len(good))]


def damaged_model(rng: random.Random, good: bytes) -> bytes:
    content = bytearray(good)
    length = int.from_bytes(good[:8], "little")
    place = rng.choice([rng.randrange(8), rng.randrange(8 + length, len(good))])
    content[place] ^= rng.randrange(1, 256)
    return bytes(content)


def foreign_model(rng: random.Random, good: bytes) -> bytes:
    return rng.choice(
        [
            rng.randbytes(rng.randrange(3000)),
            pickle.dumps({"a": [1] * rng.randrange(100)}),
            save_tensors({"w": torch.zeros(rng.randrange(1, 9))}),
            b"[" * rng.randrange(100, 100_000),
            (10**6).to_bytes(8, "little") + b"{" * 10**6,
            b"a,b\n1,2\n" * rng.randrange(1, 50),
            len(b'{"__metadata__":3}').to_bytes(8, "little") + b'{"__metadata__":3}',
        ]
    )


@pytest.fixture(scope="module")
def small_model(shop: Path) -> Path:
    """Of x, town and day, where nothing may be missing."""
    lines = lines_of(shop.read_text(encoding="utf-8"))
    kept = [line[1:5] for line in lines if line[1]]
    clean = shop.parent / "clean.csv"
    clean.write_bytes(text_of(kept))
    model = shop.parent / "clean.winnow"
    words = ["--tolerance", "1", "--hyper", "point", "-q"]
    with short_fits():
        assert run(["fit", str(clean), "-t", "y", "-o", str(model), *words]) == 0
    return model


def refused(words: list[str], folder: Path, before: set[Path], capfd: Any) -> str:
    """Return the message of a refused command after checking its form."""
    code = run(words)
    output = capfd.readouterr()
    assert code == 2, (words, output)
    assert output.err.startswith("winnow: ")
    assert output.err.count("\n") == 1
    assert "Traceback" not in output.err
    assert len(output.err) < 700
    assert output.out == ""
    assert set(folder.iterdir()) == before
    return output.err


@pytest.mark.parametrize("make", TABLES, ids=lambda make: make.__name__)
def test_damaged_tables_are_refused(
    make: Make,
    small_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    # The model is intact and the same for all tables.
    monkeypatch.setattr("winnowgp.load", cache(load), raising=False)
    rng = random.Random(make.__name__)
    good = (small_model.parent / "clean.csv").read_text(encoding="utf-8")
    bad = tmp_path / "bad"
    for i in range(TABLES[make]):
        bad.write_bytes(make(rng, good))
        words = ["predict", str(small_model), str(bad), "-o", str(tmp_path / "out.csv"), "-q"]
        fits = make in (ragged, duplicated_header, nameless_header, binary, empty, huge_field)
        if fits and i % 2:
            words = ["fit", str(bad), "-t", "y", "-o", str(tmp_path / "out.winnow"), "-q"]
        output = refused(words, tmp_path, {bad}, capfd)
        assert "internal error" not in output


@pytest.mark.parametrize(("kind", "count"), [("cut", 40), ("damaged", 30), ("foreign", 25)])
def test_damaged_models_are_refused(
    kind: str, count: int, small_model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    make = {"cut": cut_model, "damaged": damaged_model, "foreign": foreign_model}[kind]
    rng, good, bad = random.Random(kind), small_model.read_bytes(), tmp_path / "bad"
    for i in range(count):
        bad.write_bytes(make(rng, good))
        table = str(small_model.parent / "clean.csv")
        words = [
            ["info", str(bad)],
            ["predict", str(bad), table, "-o", str(tmp_path / "out.csv")],
            ["frontier", str(bad), "-o", str(tmp_path / "out.png")],
            ["report", str(bad), "-o", str(tmp_path / "out.html")],
        ][i % 4]
        refused(words, tmp_path, {bad}, capfd)


def test_forged_models_are_refused(
    small_model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Some changes are harmless, such as another name of a phase; none may break a command.

    Commands that show the summary do not build the model, and do not notice changes in it.
    """
    rng, bad = random.Random(7), tmp_path / "bad"
    codes: dict[str, list[int]] = {}
    for i in range(60):
        forged = forged_outline(rng, small_model) if i % 3 else forged_tensor(rng, small_model)[1]
        bad.write_bytes(forged)
        for words in (
            ["info", str(bad)],
            ["predict", str(bad), str(small_model.parent / "clean.csv")],
            ["frontier", str(bad)],
            ["report", str(bad), "-o", str(tmp_path / "out.html")],
        ):
            code = run(words)
            codes.setdefault(words[0], []).append(code)
            output = capfd.readouterr().err
            assert code in (0, 2), output
            assert "Traceback" not in output
            (tmp_path / "out.html").unlink(missing_ok=True)
    assert codes["predict"].count(2) > 0.8 * len(codes["predict"])
    assert 0 < codes["info"].count(2) < len(codes["info"])
