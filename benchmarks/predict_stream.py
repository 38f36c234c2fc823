"""Peak memory and time of `winnow predict` against the number of rows of the table.

    python benchmarks/predict_stream.py [--formats parquet csv csv.gz] [--rows 1 100000 2000000]
    python benchmarks/predict_stream.py --report

Nine numeric inputs, a model of 32 points, from and to a file of one format; each run in a process
of its own, of which the kernel says how much memory it had at most. The table is made a part at a
time. Rows go to benchmarks/results/predict_stream.
"""

import argparse
import csv
import gzip
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from records import Records, Row, recorded, table
from winnowgp import DataTable, fit_table

INPUTS, POINTS = 9, 32
FORMATS = ("parquet", "csv", "csv.gz")
ROWS = (1, 100_000, 2_000_000)
PART = 50_000
NAMES = [f"x{i}" for i in range(INPUTS)]


def parts(rows: int) -> Iterator[NDArray[np.float64]]:
    """The table, some rows at a time."""
    rng = np.random.default_rng(0)
    for start in range(0, rows, PART):
        yield rng.normal(size=(min(PART, rows - start), INPUTS))


def write(path: Path, rows: int) -> None:
    """The table in the format that the name of the file says."""
    if path.suffix == ".parquet":
        import pyarrow
        from pyarrow import parquet

        schema = pyarrow.schema([(name, pyarrow.float64()) for name in NAMES])
        with parquet.ParquetWriter(path, schema) as file:
            for part in parts(rows):
                file.write_table(pyarrow.table(list(part.T), schema=schema))
        return
    with gzip.open(path, "wt", 1) if path.suffix == ".gz" else path.open("w") as file:
        writer = csv.writer(file)
        writer.writerow(NAMES)
        for part in parts(rows):
            writer.writerows(part.round(6).tolist())


def fitted(path: Path) -> Path:
    """A model file."""
    X = next(parts(2000))
    columns = dict(zip(NAMES, X.T, strict=True)) | {"y": np.sin(X[:, 0]) + X[:, 1]}
    return fit_table(DataTable.of(columns), "y", max_points=POINTS).save(path)


def measured(words: list[str]) -> Row:
    """Seconds and peak memory of a command that must succeed."""
    start = time.perf_counter()
    child = os.posix_spawn(sys.executable, [sys.executable, "-m", "winnowgp", *words], os.environ)
    _, status, used = os.wait4(child, 0)
    if status:
        raise SystemExit(f"winnow {' '.join(words)} failed")
    return {
        "wall_s": round(time.perf_counter() - start, 2),
        "cpu_s": round(used.ru_utime + used.ru_stime, 2),
        # Linux counts kibibytes.
        "peak_mib": round(used.ru_maxrss / 1024, 1),
    }


def run(formats: list[str], sizes: list[int]) -> None:
    """Every format at every size, smallest first."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = fitted(folder / "model.winnow")
        for kind in formats:
            records = Records(f"predict_stream/{kind}")
            for rows in sizes:
                given, out = folder / f"new.{kind}", folder / f"out.{kind}"
                write(given, rows)
                words = ["predict", str(model), str(given), "-o", str(out), "--quiet"]
                records.add(format=kind, rows=rows, **measured(words))
                given.unlink()
                out.unlink()


def report() -> None:
    """Peak memory and its ratio to that of the smaller tables."""
    lines = []
    for kind in FORMATS:
        rows = sorted(recorded(f"predict_stream/{kind}"), key=lambda row: row["rows"])
        for smaller, row in zip([None, *rows], rows, strict=False):
            ratio = "" if smaller is None else f"{row['peak_mib'] / smaller['peak_mib']:.2f}"
            lines.append(
                (kind, f"{row['rows']:,}", f"{row['peak_mib']:.0f} MiB", ratio, f"{row['cpu_s']} s")
            )
    print(table(("format", "rows", "peak memory", "of the row above", "CPU"), lines))


def main() -> None:
    """Words typed by a person to calls of the parts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    parser.add_argument("--report", action="store_true", help="measure nothing")
    words = parser.parse_args()
    if not words.report:
        run(words.formats, words.rows)
    report()


if __name__ == "__main__":
    main()
