"""Work in several processes, as tests ask for it."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import winnowgp

SHARED_WORK = Path(__file__).parent / "shared_work.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


def forked(pieces: str, folder: Path, counts: tuple[int, ...]) -> dict[int, list[Any]]:
    """By the number of processes, what each answered, piece by piece; see `shared_work`."""
    words = [sys.executable, str(SHARED_WORK), pieces, str(folder), *map(str, counts)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    return {count: found[str(count)] for count in counts}


def torchrun(
    *words: str,
    processes: int,
    restarts: int = 0,
    folder: Path,
    more: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """What torchrun left behind; `words` name a script or a module with its arguments.

    Args:
        folder: where it is run.
        more: variables of the environment.
    """
    # The package under test, wherever the command is run.
    package = str(Path(winnowgp.__file__).parents[1])
    counted = [f"--nproc-per-node={processes}", f"--max-restarts={restarts}"]
    return subprocess.run(
        [*TORCHRUN, *counted, *words],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": package, **(more or {})},
    )
