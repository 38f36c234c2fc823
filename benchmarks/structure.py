"""Measure the structure of the source tree: its size, and the files that four fits pass through.

    python benchmarks/structure.py                          # a table of this checkout
    python benchmarks/structure.py --source PATH --json     # another tree, as JSON
    python benchmarks/structure.py --compare benchmarks/results/structure/before.json

Files, lines and import statements are counted with `ast`. The files of a fit are those in which a
function is called while the fit runs; a file that is only imported is not counted.
"""

import argparse
import ast
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).resolve().parents[1] / "src" / "winnowgp"

ARRAYS = """
import numpy as np
rng = np.random.default_rng(0)
X = rng.uniform(-2.0, 2.0, (40, 2))
y = np.sin(2.0 * X[:, 0]) + X[:, 1] + 0.1 * rng.standard_normal(40)
"""

# Title, statements that prepare the fit, and the statement that is traced.
FITS = {
    "SparseGPRegressor().fit": (
        ARRAYS + "from winnowgp import SparseGPRegressor",
        "SparseGPRegressor(random_state=0).fit(X, y)",
    ),
    "winnow fit table.csv -t y": (
        ARRAYS + "import sys\n"
        "np.savetxt('table.csv', np.c_[X, y], delimiter=',', header='a,b,y', comments='')\n"
        "from winnowgp.cli import main\n"
        "sys.argv = ['winnow', 'fit', 'table.csv', '-t', 'y']",
        "main()",
    ),
    "DeepGPRegressor().fit": (
        ARRAYS + "from winnowgp import DeepGPRegressor",
        "DeepGPRegressor(random_state=0).fit(X, y)",
    ),
    "GPLVM().fit": (
        ARRAYS + "from winnowgp import GPLVM\nY = np.c_[X, y, X @ rng.standard_normal((2, 3))]",
        "GPLVM(random_state=0).fit(Y)",
    ),
}

# Runs in a process of its own. `sys.setprofile` reports every call of a Python function. Bodies of
# modules and classes are calls too, but have no fast locals (CO_OPTIMIZED is 1). A function that is
# called while a module is being imported (a decorator, say) does not belong to the fit.
TRACE = """
import json, os, sys, threading
source, result, prepare, fit = sys.argv[1:]
names = {}
exec(prepare, names)
prefix = source + os.sep
other, files = set(), {}

def importing(frame):
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_code.co_filename.startswith(prefix):
            return True
        frame = frame.f_back
    return False

def profile(frame, event, argument):
    code = frame.f_code
    path = code.co_filename
    if event != "call" or path in other or path in files or not code.co_flags & 1:
        return
    if not path.startswith(prefix):
        other.add(path)
    elif not importing(frame):
        files[path] = len(files)

threading.setprofile(profile)
sys.setprofile(profile)
try:
    exec(fit, names)
except SystemExit as end:
    if end.code:
        raise
finally:
    sys.setprofile(None)
    threading.setprofile(None)
with open(result, "w", encoding="utf-8") as file:
    json.dump([path[len(prefix):].replace(os.sep, "/") for path in files], file)
"""


def main() -> None:
    """Parse the command line, measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--source", type=Path, default=SOURCE, help="the package's folder")
    parser.add_argument(
        "--json", action="store_true", help="print JSON, with the files of each fit"
    )
    parser.add_argument("--compare", type=Path, help="JSON of an earlier run, as a first column")
    arguments = parser.parse_args()
    if not (arguments.source / "__init__.py").is_file():
        parser.error(f"--source must be the folder of a package; got {arguments.source}")
    measures = structure(arguments.source.resolve())
    if arguments.json:
        print(json.dumps(measures, indent=2))
        return
    columns = {arguments.source.name: measures}
    if arguments.compare is not None:
        earlier = json.loads(arguments.compare.read_text(encoding="utf-8"))
        columns = {"before": earlier, "after": measures}
    print(markdown(columns))


def structure(source: Path) -> dict[str, Any]:
    """Return all measures of the package in `source`."""
    sources = {path: path.read_text(encoding="utf-8") for path in sorted(source.rglob("*.py"))}
    lines = [text.count("\n") for text in sources.values()]
    imports = sum(import_lines(ast.parse(text)) for text in sources.values())
    names = set(public_names(source))
    fits = {title: files_of_fit(source, *statements) for title, statements in FITS.items()}
    return {
        "files": len(lines),
        "lines": sum(lines),
        "median_lines_per_file": statistics.median(lines),
        "import_lines": imports,
        "import_share": round(imports / sum(lines), 4),
        "public_names": len(names),
        "public_names_without_reexports": len({name for _, name in names}),
        "files_per_fit": {title: len(files) for title, files in fits.items()},
        "fits": fits,
    }


def import_lines(module: ast.Module) -> int:
    """Return the number of lines that import statements occupy, wherever they stand."""
    occupied: set[int] = set()
    for node in ast.walk(module):
        if isinstance(node, ast.Import | ast.ImportFrom):
            occupied.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(occupied)


def public_names(source: Path) -> Iterator[tuple[str, str]]:
    """Yield (package, name) for every name in the `__all__` of a public package or top module."""
    for path in sorted({*source.rglob("__init__.py"), *source.glob("*.py")}):
        place = path.parent if path.name == "__init__.py" else path.with_suffix("")
        package = (source.name, *place.relative_to(source).parts)
        if any(part.startswith("_") for part in package):
            continue
        for name in all_names(path, ".".join(package), source):
            yield ".".join(package), name


def all_names(path: Path, package: str, source: Path) -> list[str]:
    """Return `__all__` of a package; one that is computed is read by importing the package."""
    values = [
        node.value
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name) and target.id == "__all__"
    ]
    if not values:
        return []
    if len(values) == 1 and isinstance(values[0], ast.List | ast.Tuple):
        elements = values[0].elts
        if all(isinstance(element, ast.Constant) for element in elements):
            return [ast.literal_eval(element) for element in elements]
    code = f"import json, {package}; print(json.dumps(list({package}.__all__)))"
    return json.loads(python(source, "-c", code).stdout)


def files_of_fit(source: Path, prepare: str, fit: str) -> list[str]:
    """Return the files in which the statement `fit` calls functions, in order of first call."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "files.json"
        python(source, "-c", TRACE, str(source), str(result), prepare, fit, folder=folder)
        return json.loads(result.read_text(encoding="utf-8"))


def python(
    source: Path, *words: str, folder: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Run Python in a process that imports the package from `source`; exit if it fails."""
    environment = os.environ | {
        "PYTHONPATH": str(source.parent),
        "OMP_NUM_THREADS": "1",
        "MPLBACKEND": "agg",
    }
    process = subprocess.run(
        [sys.executable, "-W", "ignore", *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if process.returncode != 0:
        sys.exit(f"Running {source} failed:\n{process.stderr or process.stdout}")
    return process


def markdown(columns: dict[str, dict[str, Any]]) -> str:
    """Return a table with one column per source tree."""
    rows = {
        "files": [f"{m['files']:,}" for m in columns.values()],
        "lines": [f"{m['lines']:,}" for m in columns.values()],
        "median lines per file": [f"{m['median_lines_per_file']:g}" for m in columns.values()],
        "import lines": [f"{m['import_share']:.1%}" for m in columns.values()],
        "public names": [f"{m['public_names']}" for m in columns.values()],
        "public names, re-exports counted once": [
            f"{m['public_names_without_reexports']}" for m in columns.values()
        ],
    }
    for title in FITS:
        rows[f"files called by `{title}`"] = [
            f"{m['files_per_fit'][title]}" for m in columns.values()
        ]
    lines = ["| | " + " | ".join(columns) + " |", "|---" + "|---:" * len(columns) + "|"]
    lines += [f"| {name} | " + " | ".join(cells) + " |" for name, cells in rows.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
