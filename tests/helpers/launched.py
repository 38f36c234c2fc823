"""torchrun for tests."""

import os
import subprocess
import sys
from pathlib import Path

import winnowgp

SHARED_WORK = str(Path(__file__).parent / "shared_work.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


def torchrun(
    *arguments: str,
    processes: int,
    restarts: int = 0,
    folder: Path,
) -> subprocess.CompletedProcess[str]:
    """Run torchrun; `arguments` are a script or a module with its arguments.

    Args:
        folder: where it is run.
    """
    # The package under test, whatever the working directory.
    package = str(Path(winnowgp.__file__).parents[1])
    tests = str(Path(__file__).parents[1])
    options = [f"--nproc-per-node={processes}", f"--max-restarts={restarts}"]
    return subprocess.run(
        [*TORCHRUN, *options, *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([package, tests])},
    )
