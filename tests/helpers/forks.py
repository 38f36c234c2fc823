"""Functions called in processes forked from one that has imported what they need.

To import PyTorch and the library takes seconds, to fork next to nothing. As a script it is the
process that forks: it reads what to call line by line, and answers each line with another.
"""

import json
import os
import signal
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

LONGEST = 600
"""Seconds after which a process is killed."""


class Forks:
    """One server process for a session of tests, started at the first call."""

    def __init__(self) -> None:
        self._forking: subprocess.Popen[str] | None = None
        self._answers: dict[str, str] = {}

    def call(self, work: Callable[..., Any], *words: Any) -> Any:
        """Return what the function returns, as JSON; called once for the same arguments.

        It is called in an empty folder, and what it raises fails whoever asked, traceback and all.

        Args:
            work: a function of a module among the tests, not of a test.
            words: numbers, strings, and more such functions.
        """
        asked = json.dumps([work, *words], default=_named)
        if asked not in self._answers:
            self._answers[asked] = self._answered(asked)
        return returned(self._answers[asked])

    def close(self) -> None:
        if self._forking is not None:
            self._forking.communicate()

    def _answered(self, asked: str) -> str:
        if self._forking is None:
            self._forking = _started()
        assert self._forking.stdin is not None
        assert self._forking.stdout is not None
        self._forking.stdin.write(f"{asked}\n")
        self._forking.stdin.flush()
        return self._forking.stdout.readline() or _raised("the process that forks has ended")


@dataclass(frozen=True, slots=True)
class Fork:
    """A process that calls a function and writes what it returns, or raises, to a file."""

    number: int
    answer: Path

    @classmethod
    def of(cls, work: Callable[[], Any], answer: Path) -> "Fork":
        """Start a process."""
        answer.unlink(missing_ok=True)
        child = os.fork()
        if child:
            return cls(child, answer)
        signal.alarm(LONGEST)
        try:
            try:
                said = json.dumps({"returned": work()})
            except BaseException:
                said = _raised(traceback.format_exc())
            answer.write_text(said)
        finally:
            os._exit(0)

    def ended(self) -> str | None:
        """Return the process's answer; None if it was killed."""
        _, status = os.waitpid(self.number, 0)
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
            return None
        if self.answer.exists():
            return self.answer.read_text()
        return _raised(f"the process ended before it answered: {status}")


def returned(answer: str) -> Any:
    """Return what a function returned; an exception fails the test."""
    said = json.loads(answer)
    assert "raised" not in said, said["raised"]
    return said["returned"]


def _raised(words: str) -> str:
    return json.dumps({"raised": words})


def _named(work: Callable[..., Any]) -> dict[str, str]:
    return {"module": work.__module__, "function": work.__name__}


def _function(names: dict[str, str]) -> Callable[..., Any]:
    return getattr(import_module(names["module"]), names["function"])


def _started() -> subprocess.Popen[str]:
    import winnowgp

    # The package under test; and what has once asked for a GPU cannot be forked.
    paths = [str(Path(winnowgp.__file__).parents[1]), str(Path(__file__).parents[1])]
    return subprocess.Popen(
        [sys.executable, __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(paths)},
    )


def _forked(asked: str) -> str:
    # Imports happen here, not in every process.
    work, *words = json.loads(asked, object_hook=_function)
    with TemporaryDirectory() as folder:
        place = Path(folder) / "work"
        place.mkdir()

        def called() -> Any:
            os.chdir(place)
            return work(*words)

        return Fork.of(called, Path(folder) / "answer").ended() or _raised("it was killed")


def _serve() -> None:
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    # Optimisers import half of PyTorch when they are first made.
    torch.optim.Adam([torch.zeros(1, requires_grad=True)]).step()
    # Printed output is not an answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for asked in sys.stdin:
        try:
            answer = _forked(asked)
        except Exception:
            answer = _raised(traceback.format_exc())
        answers.write(f"{answer}\n")
        answers.flush()


if __name__ == "__main__":
    _serve()
