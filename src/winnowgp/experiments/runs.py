"""Results of experiments as tidy JSON lines, one row a run, that a later start goes on with."""

import hashlib
import json
import os
import platform
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, final

import winnowgp

Row = dict[str, Any]


def source_digest(root: Path) -> str:
    """Twelve hexadecimal digits that change with any Python file below a folder, or its place."""
    found = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        body = hashlib.sha256(path.read_bytes()).hexdigest()
        found.update(f"{path.relative_to(root).as_posix()} {body}\n".encode())
    return found.hexdigest()[:12]


# Taken when the code is: files that are edited while runs are made do not make them.
SOURCE = source_digest(Path(winnowgp.__file__).parent)


@final
class Runs:
    """A file of rows. Each is written at once, whole, so that whatever ends a run loses none.

    Args:
        path: the file; made when the first row is added.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def __iter__(self) -> Iterator[Row]:
        if not self.path.exists():
            return
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                # The last line of a run that was ended while it wrote.
                continue

    def add(self, row: Mapping[str, Any]) -> None:
        """Append a row, with the versions behind it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        full = {**row, "versions": versions()}
        line = json.dumps(full, separators=(",", ":")) + "\n"
        # A run that was ended while it wrote left its last line open.
        torn = self.path.exists() and self.path.read_bytes()[-1:] not in (b"", b"\n")
        with self.path.open("a", encoding="utf-8") as file:
            file.write("\n" * torn + line)
            file.flush()
            os.fsync(file.fileno())


def versions() -> Row:
    """What the numbers depend on besides their settings; never what makes two runs the same."""
    names = ("torch", "gpytorch")
    return {
        "winnowgp": winnowgp.__version__,
        "source": SOURCE,
        **{name: version(name) for name in names},
        "python": platform.python_version(),
    }
