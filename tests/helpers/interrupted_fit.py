"""`winnow fit` interrupted by Ctrl-C in its own process."""

import json
import os
import signal
from pathlib import Path

import numpy as np

from helpers.forks import Fork, returned
from winnowgp.cli.app import run

ROWS, NAMES = 100, "a,b,c,d,e,f"


def interrupted_fit() -> tuple[int, str, dict[str, str | None]]:
    """Its exit code, what it said, and what is in its folder: the contents of the model's file
    and the name of any other.

    The signal is sent when the first progress is seen, long before the fit would end.
    """
    folder = Path("folder")
    folder.mkdir()
    os.chdir(folder)
    table = np.random.default_rng(0).normal(size=(ROWS, 6))
    table[:, 5] = np.sin(3 * table[:, 0]) + np.cos(2 * table[:, 1] * table[:, 2])
    np.savetxt("big.csv", table, delimiter=",", header=NAMES, comments="")
    Path("m.winnow").write_text("what was there")
    heard, speaks = os.pipe()

    def fit() -> int:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.update(COLUMNS="100", FORCE_COLOR="1")
        os.dup2(speaks, 2)
        return run(["fit", "big.csv", "-t", "f", "--kernel", "rbf", "-o", "m.winnow"])

    fork = Fork.of(fit, Path("../code"))
    os.close(speaks)
    with open(heard, "rb", buffering=0) as words:
        said = b""
        while b"initialisation" not in said and (piece := words.read(4096)):
            said += piece
        os.kill(fork.number, signal.SIGINT)
        said += words.read()
    code = returned(fork.ended() or json.dumps({"raised": "it was killed"}))
    left = {
        path.name: path.read_text() if path.name == "m.winnow" else None
        for path in Path().iterdir()
    }
    return code, said.decode(), left
