"""Functions called in processes forked from one that has imported what they need.

Importing PyTorch and the library takes seconds, forking milliseconds. Run as a script, this module
is the server process: it reads one call per line and writes one result per line.
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
        self._server: subprocess.Popen[str] | None = None
        self._results: dict[str, str] = {}

    def call(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """Return the value of a function, which passes through JSON; calls are cached.

        The function runs in an empty folder. An exception fails the test, with its traceback.

        Args:
            work: a function of a module among the tests, not of a test.
            arguments: numbers, strings, and more such functions.
        """
        request = json.dumps([work, *arguments], default=_named)
        if request not in self._results:
            self._results[request] = self._result(request)
        return returned(self._results[request])

    def close(self) -> None:
        if self._server is not None:
            self._server.communicate()

    def _result(self, request: str) -> str:
        if self._server is None:
            self._server = _started()
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(f"{request}\n")
        self._server.stdin.flush()
        return self._server.stdout.readline() or _raised("the server process has ended")


@dataclass(frozen=True, slots=True)
class Fork:
    """A process that calls a function and writes its value or its exception to a file."""

    number: int
    path: Path

    @classmethod
    def of(cls, work: Callable[[], Any], path: Path) -> "Fork":
        """Start a process."""
        path.unlink(missing_ok=True)
        child = os.fork()
        if child:
            return cls(child, path)
        signal.alarm(LONGEST)
        try:
            try:
                result = json.dumps({"returned": work()})
            except BaseException:
                result = _raised(traceback.format_exc())
            path.write_text(result)
        finally:
            os._exit(0)

    def ended(self) -> str | None:
        """Wait for the process and return what it wrote; None if it was killed."""
        _, status = os.waitpid(self.number, 0)
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
            return None
        if self.path.exists():
            return self.path.read_text()
        return _raised(f"the process ended without a result: {status}")


def returned(line: str) -> Any:
    """Return the value of the function; an exception fails the test."""
    result = json.loads(line)
    assert "raised" not in result, result["raised"]
    return result["returned"]


def _raised(message: str) -> str:
    return json.dumps({"raised": message})


def _named(work: Callable[..., Any]) -> dict[str, str]:
    return {"module": work.__module__, "function": work.__name__}


def _function(names: dict[str, str]) -> Callable[..., Any]:
    return getattr(import_module(names["module"]), names["function"])


def _started() -> subprocess.Popen[str]:
    import winnowgp

    # The package under test; a process that has initialised CUDA cannot be forked.
    paths = [str(Path(winnowgp.__file__).parents[1]), str(Path(__file__).parents[1])]
    return subprocess.Popen(
        [sys.executable, __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(paths)},
    )


def _forked(request: str) -> str:
    # Imports happen here, not in every process.
    work, *arguments = json.loads(request, object_hook=_function)
    with TemporaryDirectory() as folder:
        work_folder = Path(folder) / "work"
        work_folder.mkdir()

        def called() -> Any:
            os.chdir(work_folder)
            return work(*arguments)

        return Fork.of(called, Path(folder) / "result").ended() or _raised("it was killed")


def _serve() -> None:
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    # Optimisers import half of PyTorch when they are first made.
    torch.optim.Adam([torch.zeros(1, requires_grad=True)]).step()
    # Printed output is not a result.
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for request in sys.stdin:
        try:
            result = _forked(request)
        except Exception:
            result = _raised(traceback.format_exc())
        results.write(f"{result}\n")
        results.flush()


if __name__ == "__main__":
    _serve()
