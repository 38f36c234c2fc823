"""What a bare `pip install winnowgp` must be able to do; run by `make dist` and by a test.

    python minimal_install.py [--clean]

With `--clean` the environment must hold none of the optional packages; without it they are hidden.
"""

import csv
import math
import sys
from importlib import resources
from importlib.abc import MetaPathFinder
from importlib.metadata import metadata, version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

OPTIONAL = (
    "beartype",
    "botorch",
    "hypothesis",
    "mlflow",
    "onnx",
    "onnxruntime",
    "openpyxl",
    "pandas",
    "polars",
    "pyarrow",
    "pytest",
    "tensorboard",
)


class Hidden(MetaPathFinder):
    """Finds that the optional packages are not there."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        if fullname.partition(".")[0] in OPTIONAL:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)


def check(holds: bool, what: str) -> None:
    """Also where assertions are switched off."""
    if not holds:
        raise SystemExit(f"minimal install: {what}")


def table(path: Path) -> Path:
    """A curve, a category, and a target."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["x", "kind", "y"])
        for i in range(40):
            writer.writerow([i / 8, "ab"[i % 2], math.sin(i / 8) + (i % 2)])
    return path


def commands(folder: Path) -> None:
    """The command line, from a table to an exported predictor."""
    from winnowgp.cli.app import run

    rows, model = str(table(folder / "rows.csv")), str(folder / "rows.winnow")
    kernel = "rbf[x] + linear[kind]"
    fit = ["fit", rows, "-t", "y", "-o", model, "--kernel", kernel, "--quiet"]
    check(run(["--version"]) == 0, "`winnow --version` failed")
    check(run(fit) == 0, "`winnow fit` failed")
    check(run(["predict", model, rows, "-o", str(folder / "p.csv")]) == 0, "`winnow predict`")
    check(run(["report", model, "-o", str(folder / "r.html")]) == 0, "`winnow report` failed")
    check(run(["export", model, "-o", str(folder / "p.py")]) == 0, "`winnow export` failed")
    # What needs an optional package says so, as a mistake of the caller's.
    check(run(["export", model, "-o", str(folder / "p.onnx")]) == 2, "ONNX was not refused")
    check(run(["predict", model, rows, "-o", str(folder / "p.parquet")]) == 2, "Parquet")
    errors = [abs(float(row["y"]) - float(row["mean"])) for row in answers(folder, rows)]
    check(max(errors) < 0.2, f"predictions are off by {max(errors)}")


def answers(folder: Path, rows: str) -> list[dict[str, str]]:
    """Return the rows of a table together with the predictions in the folder."""
    with open(rows, encoding="utf-8") as asked, (folder / "p.csv").open(encoding="utf-8") as given:
        pairs = zip(csv.DictReader(asked), csv.DictReader(given), strict=True)
        return [row | {"mean": next(v for k, v in p.items() if "mean" in k)} for row, p in pairs]


def library(folder: Path) -> None:
    """Fit, save, load, predict."""
    import numpy as np

    import winnowgp
    from winnowgp.errors import MissingExtraError

    X = np.linspace(0, 6, 60)[:, None]
    try:
        import winnowgp.integrations.botorch
    except MissingExtraError as error:
        check("winnowgp[botorch]" in str(error), "BoTorch is not named")
    else:
        check(False, "BoTorch was found")
    model = winnowgp.SparseGPRegressor(random_state=0).fit(X, np.sin(X[:, 0]))
    back = winnowgp.load(model.save(folder / "model.winnow"))
    check(bool(np.allclose(back.predict(X), model.predict(X))), "a loaded model differs")
    check(model.n_inducing_ < 15 and model.score(X, np.sin(X[:, 0])) > 0.99, "a poor fit")


def main(arguments: list[str]) -> None:
    """Everything; exits with a message where something is amiss."""
    if "--clean" in arguments:
        found = [name for name in OPTIONAL if find_spec(name) is not None]
        check(not found, f"not a minimal environment: {', '.join(found)}")
    else:
        sys.meta_path.insert(0, Hidden())
    import winnowgp

    check(winnowgp.__version__ == version("winnowgp"), "two versions")
    check(resources.files("winnowgp").joinpath("py.typed").is_file(), "py.typed is missing")
    fields = metadata("winnowgp")
    for field in ("Summary", "License-Expression", "Requires-Python", "Keywords", "Author"):
        check(field in fields, f"the metadata lack {field}")
    with TemporaryDirectory() as folder:
        commands(Path(folder))
        library(Path(folder))


if __name__ == "__main__":
    main(sys.argv[1:])
