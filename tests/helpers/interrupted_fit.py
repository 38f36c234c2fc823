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
    """Return the exit code, the output, and the files of the folder, with the model file's content.

    The signal is sent at the first sign of progress, long before the fit would end.
    """
    folder = Path("folder")
    folder.mkdir()
    os.chdir(folder)
    table = np.random.default_rng(0).normal(size=(ROWS, 6))
    table[:, 5] = np.sin(3 * table[:, 0]) + np.cos(2 * table[:, 1] * table[:, 2])
    np.savetxt("big.csv", table, delimiter=",", header=NAMES, comments="")
    Path("m.winnow").write_text("what was there")
    read_end, write_end = os.pipe()

    def fit() -> int:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.update(COLUMNS="100", FORCE_COLOR="1")
        os.dup2(write_end, 2)
        return run(["fit", "big.csv", "-t", "f", "--kernel", "rbf", "-o", "m.winnow"])

    fork = Fork.of(fit, Path("../code"))
    os.close(write_end)
    with open(read_end, "rb", buffering=0) as stream:
        output = b""
        while b"initialisation" not in output and (piece := stream.read(4096)):
            output += piece
        os.kill(fork.number, signal.SIGINT)
        output += stream.read()
    code = returned(fork.ended() or json.dumps({"raised": "it was killed"}))
    left = {
        path.name: path.read_text() if path.name == "m.winnow" else None
        for path in Path().iterdir()
    }
    return code, output.decode(), left
