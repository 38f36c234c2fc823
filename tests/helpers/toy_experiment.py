"""A small experiment for tests of the runner: three squares and their sum."""

import os
import time
from collections.abc import Sequence
from pathlib import Path

from winnowgp.experiments.base import Experiment, Row, Scope, claim


class Toy(Experiment):
    """Squares of seeds, then their sum; each run appends a line to a log, which tests count."""

    name = "toy"
    title = "squares, and their sum"

    def __init__(
        self,
        log: Path,
        *,
        steps: int = 7,
        hangs_at: int = -1,
        fails_at: int = -1,
        alone_at: int = -1,
    ):
        self.log, self.steps, self.hangs_at, self.fails_at = log, steps, hangs_at, fails_at
        self.alone_at = alone_at

    def runs_alone(self, settings: Row) -> bool:
        return settings.get("seed") == self.alone_at

    def settings(self, scope: Scope, rows: Sequence[Row]) -> list[Row]:
        seeds = scope.seeds or (1 if scope.quick else 3)
        squares: list[Row] = [
            {"kind": "square", "seed": seed, "sizes": (seed, 2), "steps": {"pre": self.steps}}
            for seed in range(seeds)
        ]
        results = [row["square"] for row in rows if row["kind"] == "square"]
        if len(results) < seeds:
            return squares
        return [*squares, {"kind": "sum", "of": results}]

    def run(self, settings: Row, scope: Scope) -> Row:
        with self.log.open("a", encoding="utf-8") as file:
            file.write(f"{settings['kind']} {os.getpid()}\n")
        if settings["kind"] == "sum":
            return {"sum": sum(settings["of"])}
        seed = settings["seed"]
        if seed == self.hangs_at:
            time.sleep(600)
        if seed == self.fails_at:
            raise ZeroDivisionError("a square that cannot be computed")
        return {"square": seed**2}

    def draw(self, rows: Sequence[Row], path: Path) -> Path:
        path.write_text("\n".join(str(row) for row in rows), encoding="utf-8")
        return path

    def claims(self, rows: Sequence[Row]) -> list[str]:
        sums = [row["sum"] for row in rows if row["kind"] == "sum"]
        return [claim("the sum is five", agrees=sums == [5], evidence=f"{sums}")]
