"""JSON Lines files of runs, which experiments and benchmarks share.

This module does not import matplotlib: benchmarks measure the memory of processes that use it.
"""

import hashlib
import json
import os
import platform
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, final

import torch

import winnowgp

Row = dict[str, Any]


@final
class Runs:
    """A JSON Lines file with one row per run; iterating reads it.

    Each row is written and synchronised at once, so an interrupted process loses no finished run.

    Args:
        path: the file; it is created with the first row.
        replace: start the file anew with the first row that is added.
    """

    def __init__(self, path: Path, *, replace: bool = False) -> None:
        self.path = path
        self._replace = replace

    def __iter__(self) -> Iterator[Row]:
        if not self.path.exists():
            return
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                # The process was killed while it wrote this line.
                continue

    def add(self, row: Mapping[str, Any]) -> Row:
        """Append a row together with the versions of the software, and return it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        full = {**row, "versions": versions()}
        line = json.dumps(full, separators=(",", ":")) + "\n"
        mode, self._replace = "w" if self._replace else "a", False
        # A process that was killed while it wrote left a line without an end.
        torn = self.path.exists() and self.path.read_bytes()[-1:] not in (b"", b"\n")
        with self.path.open(mode, encoding="utf-8") as file:
            file.write("\n" * (torn and mode == "a") + line)
            file.flush()
            os.fsync(file.fileno())
        return full


def _source_digest(folder: Path) -> str:
    """Return twelve hexadecimal digits that identify the Python files below a folder."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        digest.update(f"{path.relative_to(folder).as_posix()} {content}\n".encode())
    return digest.hexdigest()[:12]


# Computed at import: files that are edited during a run are not the ones that run.
_SOURCE_DIGEST = _source_digest(Path(winnowgp.__file__).parent)


def versions() -> Row:
    """Return the versions of the software. They do not decide whether a row is reused."""
    packages = ("torch", "gpytorch", "numpy", "scikit-learn")
    return {
        "winnowgp": winnowgp.__version__,
        "source": _SOURCE_DIGEST,
        **{name: version(name) for name in packages},
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
    }
