"""Fits killed with SIGKILL and resumed, each in its own process."""

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from helpers.forks import Fork, returned
from helpers.short_fits import shortest_fits
from winnowgp import GPLVM, Checkpoint, DeepGPRegressor, SparseGPClassifier, SparseGPRegressor, load
from winnowgp.cli.app import run
from winnowgp.selection import Frontier
from winnowgp.training import checkpoint as checkpoint_module
from winnowgp.training.fingerprint import described

# Commands import this lazily: import it before processes are forked.
with suppress(ModuleNotFoundError):
    import_module("pydantic")


SPARSE = 3
"""Number of events between two writes, where not every step is written."""


def curve(N: int = 40) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    X = np.sort(rng.uniform(0, 6, size=(N, 1)), axis=0)
    return X, np.sin(2 * X[:, 0]) + 0.1 * rng.normal(size=N)


def table(N: int = 24) -> np.ndarray:
    angle = np.linspace(0, 3, N)
    noise = 0.05 * np.random.default_rng(4).normal(size=(N, 3))
    values = np.stack([np.sin(angle), np.cos(angle), angle], axis=1) + noise
    values[5, 1] = np.nan
    return values


def description(value: Any) -> str:
    """Return a description of a value that is equal for equal bits only."""
    if isinstance(value, Frontier):
        return description((value.bounds, value.masks, value.N))
    if isinstance(value, tuple | list):
        return str([description(part) for part in value])
    if isinstance(value, dict):
        return str({key: description(part) for key, part in value.items()})
    return described(value)


def answer(model: Any) -> dict[str, str]:
    return {name: description(v) for name, v in vars(model).items() if name.endswith("_")}


def of_curve(model: Any, *, labels: bool = False) -> dict[str, str]:
    X, y = curve()
    return answer(model.fit(X, np.where(y > 0, "up", "low") if labels else y))


def fast(checkpoint: Any) -> dict[str, str]:
    return of_curve(SparseGPRegressor(tolerance=0.1, n_candidates=16, checkpoint=checkpoint))


def count_of_points(checkpoint: Any) -> dict[str, str]:
    return of_curve(SparseGPRegressor(max_points=4, n_candidates=16, checkpoint=checkpoint))


def classes(checkpoint: Any) -> dict[str, str]:
    model = SparseGPClassifier(tolerance=0.1, n_candidates=8, checkpoint=checkpoint)
    return of_curve(model, labels=True)


def paper(checkpoint: Any) -> dict[str, str]:
    settings = {"schedule": "paper", "alpha": 0.05, "epochs": (10, 16, 10), "n_candidates": 12}
    return of_curve(SparseGPRegressor(**settings, checkpoint=checkpoint))


def paper_classes(checkpoint: Any) -> dict[str, str]:
    settings = {"schedule": "paper", "alpha": 0.05, "epochs": (4, 8, 4), "n_candidates": 12}
    return of_curve(
        SparseGPClassifier(**settings, batch_size=12, checkpoint=checkpoint), labels=True
    )


def deep(checkpoint: Any) -> dict[str, str]:
    settings = {"epochs": (4, 12, 6), "n_candidates": 8, "batch_size": 12, "predict_samples": 2}
    return of_curve(DeepGPRegressor(layers=2, **settings, checkpoint=checkpoint))


def deep_paper(checkpoint: Any) -> dict[str, str]:
    settings = {"schedule": "paper", "alpha": 0.5, "epochs": (4, 6, 8, 6), "n_candidates": 8}
    model = DeepGPRegressor(layers=2, **settings, hidden_mean="zero", checkpoint=checkpoint)
    return of_curve(model)


def latent(checkpoint: Any) -> dict[str, str]:
    settings = {"max_iter": 24, "n_candidates": 8, "tolerance": 0.1}
    return answer(GPLVM(1, **settings, checkpoint=checkpoint).fit(table()))


def latent_paper(checkpoint: Any) -> dict[str, str]:
    settings = {
        "schedule": "paper",
        "alpha": 0.05,
        "epochs": 10,
        "n_candidates": 6,
        "batch_size": 10,
    }
    return answer(GPLVM(1, **settings, checkpoint=checkpoint).fit(table()))


def command(checkpoint: Any) -> dict[str, str]:
    """Run `winnow fit`, and return the contents of its file."""
    X, y = curve(20)
    here = Path("command")
    here.mkdir(exist_ok=True)
    rows = [f"{x},{value}" for x, value in zip(X[:, 0], y, strict=True)]
    (here / "curve.csv").write_text("\n".join(["x,y", *rows]))
    settings = [
        "fit",
        str(here / "curve.csv"),
        "-t",
        "y",
        "--tolerance",
        "1",
        "--kernel",
        "rbf",
        "-q",
    ]
    where = here / f"{os.getpid()}.winnow"
    if checkpoint is not None:
        settings += ["--checkpoint", str(checkpoint.folder)]
        settings += ["--checkpoint-every", str(checkpoint.every)]
    with shortest_fits():
        assert run([*settings, "-o", str(where)]) == 0
    model = load(where)
    summary = {k: v for k, v in model.summary.items() if k not in ("timings", "settings")}
    summary["choice"] = {k: v for k, v in summary["choice"].items() if not k.endswith("_us")}
    return {**answer(model.estimator), "findings": repr(summary)}


PROBLEMS: dict[str, Callable[[Any], dict[str, str]]] = {
    "fast": fast,
    "count of points": count_of_points,
    "classes": classes,
    "paper": paper,
    "paper, classes": paper_classes,
    "deep": deep,
    "deep, paper": deep_paper,
    "latent": latent,
    "latent, paper": latent_paper,
    "command": command,
}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_at_writing(number: int, *, midway: bool) -> list[int]:
    """Kill this process during the n-th write, or right after it."""
    real, seen = checkpoint_module.write_archive, [0]

    def write(archive: Any, path: Path) -> Path:
        seen[0] += 1
        if midway and seen[0] == number:
            mock.patch.object(Path, "write_bytes", half).start()
        done = real(archive, path)
        if seen[0] == number:
            die()
        return done

    def half(path: Path, content: bytes) -> int:
        with path.open("wb") as file:
            file.write(content[: len(content) // 2])
        die()
        return 0

    checkpoint_module.write_archive = write
    return seen


def die_at_tick(number: int) -> list[int]:
    """Install a clock that advances with every call, and kills this process at the n-th."""
    ticks, seen = count(), [0]

    def tick() -> float:
        seen[0] += 1
        if seen[0] == number:
            die()
        return float(next(ticks))

    checkpoint_module.monotonic = tick
    return seen


def in_a_process(work: Callable[[], Any], seed: int) -> Any:
    """Return the value of a function called in a process; None if the process was killed."""

    def seeded() -> Any:
        # The seed of a fit without `random_state`.
        np.random.seed(seed)  # noqa: NPY002
        return work()

    answer = Fork.of(seeded, Path("answer")).ended()
    return None if answer is None else returned(answer)


def events(problem: Callable[[Any], dict[str, str]], *, sparse: bool) -> int:
    """Return the number of moments at which a process can be killed."""

    def work() -> int:
        seen = die_at_tick(0) if sparse else die_at_writing(0, midway=False)
        problem(Checkpoint(f"counted-{sparse}", SPARSE if sparse else 0))
        return seen[0]

    return in_a_process(work, 7)


def killed(name: str, points: int) -> dict[str, Any]:
    """Return the result of an uninterrupted fit, and those of fits that were killed and resumed.

    Args:
        name: a problem.
        points: number of fits; each is killed at another moment, and every fourth twice.
    """
    problem = PROBLEMS[name]
    expected = in_a_process(lambda: problem(None), 7)
    most = {sparse: events(problem, sparse=sparse) for sparse in (False, True)}
    found, kills, left = [], 0, []
    for point in range(points):
        share = (point + 0.5) / points
        kind = ("after", "midway", "between", "twice")[point % 4]
        sparse = kind == "between"
        # Not before the seed is on disk: until then there is nothing to resume from.
        moment = 3 + int(share * (most[sparse] - 3))
        where = Checkpoint(f"killed-{point}", SPARSE if sparse else 0)

        def dies(moment: int = moment, kind: str = kind, where: Checkpoint = where) -> Any:
            if kind == "between":
                die_at_tick(moment)
            else:
                die_at_writing(moment, midway=kind == "midway")
            return problem(where)

        def dies_again(where: Checkpoint = where) -> Any:
            die_at_writing(2, midway=True)
            return problem(where)

        deaths = [dies, dies_again] if kind == "twice" else [dies]
        # Another seed afterwards: the checkpoint has the one that was drawn.
        for seed, death in enumerate(deaths, start=7):
            kills += in_a_process(death, seed) is None
        found.append(in_a_process(lambda where=where: problem(where), 11))
        left += [path.name for path in Path(where.folder).iterdir() if path.name.startswith(".")]
    counts = {"kills": kills, "events": most[False]}
    return {"expected": expected, "found": found, "left": left, **counts}
