"""Peak memory and time of `winnow predict` against the number of rows of the table.

    python benchmarks/predict_stream.py [--formats parquet csv csv.gz] [--rows 1 100000 2000000]
    python benchmarks/predict_stream.py --report

Nine numeric inputs, a model with 32 inducing points, input and output in the same format. Each run
has a process of its own, whose peak memory is read from the operating system. The table is written
in blocks. Results are in benchmarks/results/predict_stream.
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

from measure import Row, new_results, read_results, table
from winnowgp import DataTable, fit_table

INPUTS, POINTS = 9, 32
FORMATS = ("parquet", "csv", "csv.gz")
ROWS = (1, 100_000, 2_000_000)
BLOCK = 50_000
NAMES = [f"x{i}" for i in range(INPUTS)]


def blocks(rows: int) -> Iterator[NDArray[np.float64]]:
    """Yield the table in blocks of rows."""
    rng = np.random.default_rng(0)
    for start in range(0, rows, BLOCK):
        yield rng.normal(size=(min(BLOCK, rows - start), INPUTS))


def write(path: Path, rows: int) -> None:
    """Write the table in the format that the suffix of the file names."""
    if path.suffix == ".parquet":
        import pyarrow
        from pyarrow import parquet

        schema = pyarrow.schema([(name, pyarrow.float64()) for name in NAMES])
        with parquet.ParquetWriter(path, schema) as file:
            for block in blocks(rows):
                file.write_table(pyarrow.table(list(block.T), schema=schema))
        return
    with gzip.open(path, "wt", 1) if path.suffix == ".gz" else path.open("w") as file:
        writer = csv.writer(file)
        writer.writerow(NAMES)
        for block in blocks(rows):
            writer.writerows(block.round(6).tolist())


def fitted(path: Path) -> Path:
    """Fit a model and save it."""
    X = next(blocks(2000))
    columns = dict(zip(NAMES, X.T, strict=True)) | {"y": np.sin(X[:, 0]) + X[:, 1]}
    return fit_table(DataTable.of(columns), "y", max_points=POINTS).save(path)


def measured(arguments: list[str]) -> Row:
    """Return seconds and peak memory of a `winnow` command."""
    start = time.perf_counter()
    child = os.posix_spawn(
        sys.executable, [sys.executable, "-m", "winnowgp", *arguments], os.environ
    )
    _, status, used = os.wait4(child, 0)
    if status:
        raise SystemExit(f"winnow {' '.join(arguments)} failed")
    return {
        "wall_s": round(time.perf_counter() - start, 2),
        "cpu_s": round(used.ru_utime + used.ru_stime, 2),
        # Linux reports kibibytes.
        "peak_mib": round(used.ru_maxrss / 1024, 1),
    }


def run(formats: list[str], sizes: list[int]) -> None:
    """Measure every format at every size."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = fitted(folder / "model.winnow")
        for kind in formats:
            results = new_results(f"predict_stream/{kind}")
            for rows in sizes:
                new, out = folder / f"new.{kind}", folder / f"out.{kind}"
                write(new, rows)
                arguments = ["predict", str(model), str(new), "-o", str(out), "--quiet"]
                results.add({"format": kind, "rows": rows, **measured(arguments)})
                new.unlink()
                out.unlink()


def report() -> None:
    """Print peak memory and its ratio to that of the next smaller table."""
    lines = []
    for kind in FORMATS:
        rows = sorted(read_results(f"predict_stream/{kind}"), key=lambda row: row["rows"])
        for smaller, row in zip([None, *rows], rows, strict=False):
            ratio = "" if smaller is None else f"{row['peak_mib'] / smaller['peak_mib']:.2f}"
            lines.append(
                (kind, f"{row['rows']:,}", f"{row['peak_mib']:.0f} MiB", ratio, f"{row['cpu_s']} s")
            )
    print(table(("format", "rows", "peak memory", "ratio to row above", "CPU"), lines))


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    parser.add_argument("--report", action="store_true", help="print results without measuring")
    arguments = parser.parse_args()
    if not arguments.report:
        run(arguments.formats, arguments.rows)
    report()


if __name__ == "__main__":
    main()
