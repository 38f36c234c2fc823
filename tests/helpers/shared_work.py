"""Work that several processes share.

    torchrun --nproc-per-node COUNT shared_work.py MODULE:FUNCTION ... [-- ARGUMENTS]

runs `python -m winnowgp ARGUMENTS`, its fit cut short, in each of the processes that torchrun
started, then calls the functions, and writes the value of each to a file in the folder.
"""

import json
import os
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from runpy import run_module
from typing import Any

import torch
import torch.distributed as dist

import winnowgp
from helpers.forks import Fork, returned
from helpers.short_fits import short_fits
from winnowgp.data.distributed import ProcessGroup

SHARED_WORK = __file__
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


def together(work: Callable[[ProcessGroup], Any], of: int) -> list[Any]:
    """Return the values of a function called in each of several processes that form a group."""
    rendezvous = Path("rendezvous").absolute()

    def start(rank: int) -> Any:
        dist.init_process_group(
            "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=of
        )
        process_group = ProcessGroup.initialise()
        assert process_group == ProcessGroup(rank, of)
        return work(process_group)

    forks = [Fork.of(lambda rank=rank: start(rank), Path(f"{rank}.answer")) for rank in range(of)]
    answers = [fork.ended() or json.dumps({"raised": "it was killed"}) for fork in forks]
    # Wait for all: processes that lost another one raise as well.
    raised = [output["raised"] for answer in answers if "raised" in (output := json.loads(answer))]
    assert not raised, "\n".join(raised)
    return [returned(answer) for answer in answers]


def launched(folder: str, *tasks: str) -> dict[str, Any]:
    """Run this script's tasks in two processes with the environment variables of torchrun.

    Forking them saves the seconds that torchrun takes to start them.
    """
    os.chdir(folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    streams = {1: Path("stdout"), 2: Path("stderr")}

    def start(rank: int) -> None:
        environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_PORT": port}
        os.environ.update({name: str(number) for name, number in environment.items()})
        os.environ.update(MASTER_ADDR="127.0.0.1", TORCHELASTIC_RUN_ID="none")
        for stream, path in streams.items():
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
        _work(list(tasks))
        sys.stdout.flush()

    forks = [Fork.of(lambda rank=rank: start(rank), Path(f"{rank}.answer")) for rank in range(2)]
    ended = [fork.ended() for fork in forks]
    failed = [output for output in ended if output is None or "raised" in json.loads(output)]
    output = {path.name: path.read_text() for path in streams.values()}
    return {"returncode": int(bool(failed)), "failed": failed, **output}


def _command(arguments: list[str]) -> int:
    sys.argv = ["winnow", *arguments]
    try:
        with short_fits(rounds=2):
            run_module("winnowgp", run_name="__main__")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    return -1


def _write(name: str, answer: Any) -> None:
    Path(f"{name}-{os.environ['RANK']}.json").write_text(json.dumps(answer))


def _work(tasks: list[str]) -> None:
    if "--" in tasks:
        cut = tasks.index("--")
        tasks, arguments = tasks[:cut], tasks[cut + 1 :]
        _write("command", _command(arguments))
    for each in tasks:
        module, name = each.split(":")
        _write(name, getattr(import_module(module), name)(ProcessGroup.initialise()))


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    _work(sys.argv[1:])
