"""Figure 4 of the paper: the less points tell, the fewer are kept; four tables with added noise.

All rows of a table, its targets corrupted by ŷ = y + ε · sd(y) · v with ε ~ N(0, 1), then
standardised. Four kinds of runs:

- `fixed`: points that nobody chose, 5000 updates each; 10, 20, .., 100 of them on concrete and
  energy, five of these numbers on kin8nm and protein.
- `paper`: the paper's three phases among 100 random rows, the last for several draws from q(Z), ten
  on concrete and energy and three on the others.
- `fast`: the fast schedule among the same rows under the same prior.
- `auto`: the fast schedule among the same rows with a tolerance in place of the prior: it keeps the
  fewest points that give up no more nats a row than that.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, final

import torch

from winnowgp.data import Dataset, load_table
from winnowgp.experiments.base import Experiment, Row, Scope
from winnowgp.experiments.sizes import (
    LEARNING_RATE,
    Level,
    SizeStudy,
    draw_levels,
    levels_of,
    size_claims,
    standardised,
)

CANDIDATES, TOLERANCE = 100, 0.01

ALL_SIZES, FEW_SIZES = tuple(range(10, 101, 10)), (10, 20, 40, 70, 100)


@dataclass(frozen=True, slots=True)
class Corruption:
    """How the paper treats one table, and how much of that one sitting can afford."""

    N: int
    """Rows, all of which are used."""
    alpha: float
    noises: tuple[float, ...]
    """v, from least to most."""
    seeds: int
    sizes: tuple[int, ...]
    """Fixed numbers of points."""
    draws: int
    """From q(Z), each trained further."""


TABLES = {
    "concrete": Corruption(1030, 0.01, (0.0, 0.2, 0.3, 0.4), 2, ALL_SIZES, 10),
    "energy": Corruption(768, 0.05, (0.0, 0.05, 0.1, 0.15), 2, ALL_SIZES, 10),
    # Five thousand updates of thousands of rows: fewer curves and draws than the paper's.
    "kin8nm": Corruption(8192, 0.1, (0.0, 0.2, 0.3, 0.4), 1, FEW_SIZES, 3),
    "protein": Corruption(45730, 0.2, (0.0, 0.3, 0.5, 0.7), 1, FEW_SIZES, 3),
}


def corrupted(name: str, noise: float, *, rows: int, seed: int) -> Dataset:
    """Random rows of a table (all of them as a rule), with noise added to the targets."""
    data = load_table(name).dataset()
    generator = torch.Generator().manual_seed(seed)
    epsilon = torch.randn(data.N, 1, generator=generator, dtype=torch.float64)
    Y = data.Y + noise * data.Y.std(0) * epsilon
    part = torch.randperm(data.N, generator=generator)[:rows]
    return Dataset(data.X[part], Y[part])


@final
@dataclass(frozen=True)
class Real(Experiment):
    """The bound against the number of points.

    >>> only = Real(names=("energy",))
    >>> len(only.settings(Scope(seeds=1), []))
    52
    """

    name: ClassVar[str] = "real"
    title: ClassVar[str] = "figure 4: fewer points as noise is added to four tables; the bound"
    tables: ClassVar[tuple[str, ...]] = tuple(TABLES)

    names: tuple[str, ...] = tuple(TABLES)
    """Tables that are looked at."""
    sizes: tuple[int, ...] | None = None
    """Fixed numbers of points; None for each table's own."""
    draws: int | None = None
    """From q(Z); None for each table's own."""

    def settings(self, scope: Scope, rows: Sequence[Row]) -> list[Row]:
        # Long runs first, so that several processes end together.
        return [
            {**kind, "data": name, "noise": noise, "seed": seed, "N": _rows(name, scope)}
            for name in sorted(self.names, key=list(TABLES).index, reverse=True)
            for kind in self._kinds(name, scope)
            for noise in (TABLES[name].noises[:: 3 if scope.quick else 1])
            for seed in range(scope.seeds or (1 if scope.quick else TABLES[name].seeds))
        ]

    def _kinds(self, name: str, scope: Scope) -> list[Row]:
        """What distinguishes the runs of one table, the longest first."""
        table = TABLES[name]
        steps = {"pre": 2500, "process": 1500, "post": 1000}
        sizes, draws = self.sizes or table.sizes, self.draws or table.draws
        if scope.quick:
            steps, sizes, draws = {"pre": 100, "process": 60, "post": 40}, (20, 60, 100), 2
        among, adam = {"candidates": CANDIDATES}, {"learning_rate": LEARNING_RATE}
        paper = {**among, "alpha": table.alpha, "steps": steps, "draws": draws, **adam}
        updates = sum(steps.values())
        return [
            {"kind": "paper", **paper},
            # One a row: five thousand updates are long enough to be lost.
            *({"kind": "fixed", "sizes": [M], "updates": updates, **adam} for M in sizes[::-1]),
            {"kind": "fast", **among, "alpha": table.alpha},
            {"kind": "auto", **among, "tolerance": TOLERANCE},
        ]

    def measured(self, settings: Row, scope: Scope) -> Row:
        found = corrupted(
            settings["data"], settings["noise"], rows=settings["N"], seed=settings["seed"]
        )
        data = standardised(found, scope.device)
        models, row = SizeStudy(data, settings["seed"]).run(settings)
        return {**row, "elbo": [round(model.fixed_bound(data), 2) for model in models]}

    def draw(self, rows: Sequence[Row], path: Path) -> Path:
        return draw_levels(
            _levels(rows),
            path,
            column="elbo",
            said="ELBO (nats)",
            titles=lambda level: f"{level.group}, v = {level.value:g}",
        )

    def claims(self, rows: Sequence[Row]) -> list[str]:
        return size_claims(
            _levels(rows),
            falling=lambda name: f"fewer points with more noise on {name}",
            curves=(("ELBO on or above that of as many fixed points", "elbo", 1),),
        )


def _rows(name: str, scope: Scope) -> int:
    return min(TABLES[name].N, 600) if scope.quick else TABLES[name].N


def _levels(rows: Sequence[Row]) -> list[Level]:
    found = levels_of(rows, group="data", value="noise")
    # The longest runs come first, the tables of the figure do not.
    return sorted(found, key=lambda level: (list(TABLES).index(level.group), level.value))
