"""Work that several processes share.

    torchrun --nproc-per-node COUNT shared_work.py MODULE:FUNCTION ... [-- WORDS]

runs `python -m winnowgp WORDS`, its fit cut short, in each of the processes that torchrun started,
then calls the functions, and leaves what each returned in the folder.
"""

import json
import os
import socket
import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from runpy import run_module
from typing import Any

import torch
import torch.distributed as dist

from helpers.forks import Fork, returned
from helpers.short_fits import short_fits
from winnowgp.data import ProcessGroup


def together(work: Callable[[ProcessGroup], Any], of: int) -> list[Any]:
    """Return what the work returned in each of several processes that form a group."""
    met = Path("met").absolute()

    def begun(rank: int) -> Any:
        dist.init_process_group("gloo", init_method=f"file://{met}", rank=rank, world_size=of)
        process_group = ProcessGroup.started()
        assert process_group == ProcessGroup(rank, of)
        return work(process_group)

    forks = [Fork.of(lambda rank=rank: begun(rank), Path(f"{rank}.answer")) for rank in range(of)]
    answers = [fork.ended() or json.dumps({"raised": "it was killed"}) for fork in forks]
    # Wait for all: processes that lost another one raise as well.
    raised = [said["raised"] for answer in answers if "raised" in (said := json.loads(answer))]
    assert not raised, "\n".join(raised)
    return [returned(answer) for answer in answers]


def launched(folder: str, *asked: str) -> dict[str, Any]:
    """What two processes left that were told who they are as torchrun tells them, and that did in
    the folder what this script does; without the seconds that torchrun takes to start them."""
    os.chdir(folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    streams = {1: Path("stdout"), 2: Path("stderr")}

    def begun(rank: int) -> None:
        told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_PORT": port}
        os.environ.update({name: str(number) for name, number in told.items()})
        os.environ.update(MASTER_ADDR="127.0.0.1", TORCHELASTIC_RUN_ID="none")
        for stream, path in streams.items():
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
        _work(list(asked))
        sys.stdout.flush()

    forks = [Fork.of(lambda rank=rank: begun(rank), Path(f"{rank}.answer")) for rank in range(2)]
    ended = [fork.ended() for fork in forks]
    failed = [said for said in ended if said is None or "raised" in json.loads(said)]
    said = {path.name: path.read_text() for path in streams.values()}
    return {"returncode": int(bool(failed)), "failed": failed, **said}


def _command(words: list[str]) -> int:
    sys.argv = ["winnow", *words]
    try:
        with short_fits(rounds=2):
            run_module("winnowgp", run_name="__main__")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    return -1


def _leave(name: str, answer: Any) -> None:
    Path(f"{name}-{os.environ['RANK']}.json").write_text(json.dumps(answer))


def _work(asked: list[str]) -> None:
    if "--" in asked:
        cut = asked.index("--")
        asked, words = asked[:cut], asked[cut + 1 :]
        _leave("command", _command(words))
    for each in asked:
        module, name = each.split(":")
        _leave(name, getattr(import_module(module), name)(ProcessGroup.started()))


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    _work(sys.argv[1:])
