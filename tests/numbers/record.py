"""Record the numbers of a fixed list of fits, and compare a later version with the record.

    python tests/numbers/record.py write before.json     # in a checkout of the commit before
    python tests/numbers/record.py compare before.json   # after a change of form only
    python tests/numbers/record.py compare before.json --only "GPLVM fast"
    python tests/numbers/record.py save tests/numbers/files

`compare` repeats every fit and loads every file of `files`; each number must agree to 1e-9,
relative, with the one that was recorded. Records are not part of the repository: numbers of fits
agree on one machine and one version of PyTorch, elsewhere the last bits of a sum differ, and a fit
of hundreds of steps enlarges them. `save` writes the files, whose predictions are part of it; a
version that only reads them must not run it.
"""

import argparse
import json
import sys
import warnings
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from file_models import MODELS
from measurements import compact, differences, predictions
from problems import PROBLEMS

import winnowgp

FILES = Path(__file__).with_name("files")
PREDICTIONS = "predictions.json"


def measured(names: list[str]) -> dict[str, Any]:
    """Numbers of the named problems, in the form in which they are written."""
    found = {}
    for name in names:
        start = perf_counter()
        try:
            found[name] = compact(PROBLEMS[name]())
        except Exception as error:
            # A difference like any other; the problems after this one are still measured.
            found[name] = {"raised": f"{type(error).__name__}: {error}"}
        sys.stdout.write(f"{perf_counter() - start:6.1f} s  {name}\n")
        sys.stdout.flush()
    return found


def file_predictions(folder: Path = FILES) -> dict[str, Any]:
    """Predictions of every saved file, in the form in which they are written."""
    return {
        path.stem: compact(predictions(winnowgp.load(path)))
        for path in sorted(folder.glob("*.winnow"))
    }


def save_files(folder: Path) -> None:
    """Save one model of each kind, and write down what its file predicts."""
    folder.mkdir(exist_ok=True)
    found = {}
    for name, make in MODELS.items():
        model = make()
        path = winnowgp.save(model, folder / f"{name}.winnow")
        # Of the loaded model: factors that it computes anew may differ in their last bit.
        found[name] = compact(predictions(winnowgp.load(path)))
        sys.stdout.write(f"{path.stat().st_size:7d} bytes  {name}\n")
    _write(folder / PREDICTIONS, found)


def _write(path: Path, found: dict[str, Any]) -> None:
    # One problem a line.
    lines = [f"{json.dumps(name)}: {json.dumps(numbers)}" for name, numbers in found.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("command", choices=["write", "compare", "save"])
    parser.add_argument("path", type=Path, help="the record, or the folder of files for `save`")
    parser.add_argument("--only", action="append", choices=[*PROBLEMS, "files"], metavar="NAME")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if options.command == "save":
        save_files(options.path)
        return 0
    only = options.only or [*PROBLEMS, "files"]
    problems = [name for name in only if name != "files"]
    if options.command == "write":
        before = (
            json.loads(options.path.read_text()) if options.only and options.path.exists() else {}
        )
        found = measured(problems)
        raised = [f"{name}: {found[name]['raised']}" for name in found if "raised" in found[name]]
        sys.stdout.write("".join(f"{line}\n" for line in raised))
        _write(options.path, before | found)
        return int(bool(raised))
    recorded = json.loads(options.path.read_text())
    wrong = list(differences({name: recorded[name] for name in problems}, measured(problems)))
    if "files" in only:
        wrong += differences(json.loads((FILES / PREDICTIONS).read_text()), file_predictions())
    sys.stdout.write("".join(f"{line}\n" for line in wrong))
    sys.stdout.write(f"{len(wrong)} differences in {len(only)} problems\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
