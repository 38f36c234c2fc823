"""Figure 4 of the paper: with more noise fewer inducing points are selected, on four data sets.

The targets of a data set are corrupted by ŷ = y + ε · sd(y) · v with ε ~ N(0, 1), then
standardised; all rows are used. There are four kinds of runs:

- `fixed`: a fixed number of inducing points and 5000 updates; 10, 20, .., 100 inducing points on
  concrete and energy, five of these numbers on kin8nm and protein.
- `paper`: the paper's three phases with 100 random rows as candidates, the last phase for several
  draws from q(Z): ten on concrete and energy, three on the others.
- `fast`: the fast schedule with the same candidates and the same prior.
- `auto`: the fast schedule with the same candidates and a tolerance in place of the prior: it
  selects the fewest inducing points whose ELBO gap per observation is within the tolerance.

`RELEASED` has the settings of the scripts that the authors released, the same for every data set,
for runs of the kinds `released` and `fixed`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, final

import torch

from winnowgp.data import Dataset
from winnowgp.data.catalogue import load_table
from winnowgp.experiments.base import Experiment, Row, Scope
from winnowgp.experiments.sizes import (
    LEARNING_RATE,
    Level,
    SizeStudy,
    draw_levels,
    levels_from_rows,
    size_claims,
    standardised,
)

CANDIDATES, TOLERANCE = 100, 0.01

ALL_SIZES, FEW_SIZES = tuple(range(10, 101, 10)), (10, 20, 40, 70, 100)


@dataclass(frozen=True, slots=True)
class Corruption:
    """The settings of one data set: the paper's, with fewer sizes and draws on large ones."""

    N: int
    """Number of rows."""
    alpha: float
    noises: tuple[float, ...]
    """Values of v in ascending order."""
    seeds: int
    sizes: tuple[int, ...]
    """Fixed numbers of inducing points."""
    draws: int
    """Number of draws from q(Z)."""


TABLES = {
    "concrete": Corruption(1030, 0.01, (0.0, 0.2, 0.3, 0.4), 2, ALL_SIZES, 10),
    "energy": Corruption(768, 0.05, (0.0, 0.05, 0.1, 0.15), 2, ALL_SIZES, 10),
    # 5000 updates of thousands of rows are expensive: fewer sizes and draws than the paper.
    "kin8nm": Corruption(8192, 0.1, (0.0, 0.2, 0.3, 0.4), 1, FEW_SIZES, 3),
    "protein": Corruption(45730, 0.2, (0.0, 0.3, 0.5, 0.7), 1, FEW_SIZES, 3),
}


RELEASED: Row = {
    "alpha": 0.5,
    "steps": {"pre": 500, "process": 300, "post": 1000},
    "learning_rate": 0.02,
    "process_learning_rate": 0.3,
    "subsets": 64,
    "start_inclusion": 0.5,
}


def corrupted(name: str, noise: float, *, rows: int, seed: int) -> Dataset:
    """Return random rows of a data set with noise added to the targets."""
    data = load_table(name).dataset()
    generator = torch.Generator().manual_seed(seed)
    epsilon = torch.randn(data.N, 1, generator=generator, dtype=torch.float64)
    Y = data.Y + noise * data.Y.std(0) * epsilon
    part = torch.randperm(data.N, generator=generator)[:rows]
    return Dataset(data.X[part], Y[part])


@final
@dataclass(frozen=True)
class Real(Experiment):
    """The ELBO against the number of inducing points.

    >>> len(Real(names=("energy",)).settings(Scope(seeds=1), []))
    52
    """

    name: ClassVar[str] = "real"
    title: ClassVar[str] = (
        "figure 4: with more noise fewer inducing points, on four data sets; the ELBO"
    )
    tables: ClassVar[tuple[str, ...]] = tuple(TABLES)
    has_released: ClassVar[bool] = True

    names: tuple[str, ...] = tuple(TABLES)
    """Data sets that are used."""
    sizes: tuple[int, ...] | None = None
    """Fixed numbers of inducing points; None for those in `TABLES`."""
    draws: int | None = None
    """Number of draws from q(Z); None for that in `TABLES`."""

    def settings(self, scope: Scope, rows: Sequence[Row]) -> list[Row]:
        # The longest runs come first, so that several processes end at about the same time.
        return [
            {**kind, "data": name, "noise": noise, "seed": seed, "N": _rows(name, scope)}
            for name in sorted(self.names, key=list(TABLES).index, reverse=True)
            for kind in self._kinds(name, scope)
            for noise in (TABLES[name].noises[:: 3 if scope.quick else 1])
            for seed in range(scope.seeds or (1 if scope.quick else TABLES[name].seeds))
        ]

    def _kinds(self, name: str, scope: Scope) -> list[Row]:
        """Return the settings that distinguish the runs of one data set, the longest first."""
        table = TABLES[name]
        steps = {"pre": 2500, "process": 1500, "post": 1000}
        sizes, draws = self.sizes or table.sizes, self.draws or table.draws
        if scope.quick:
            steps, sizes, draws = {"pre": 100, "process": 60, "post": 40}, (20, 60, 100), 2
        among, adam = {"candidates": CANDIDATES}, {"learning_rate": LEARNING_RATE}
        if scope.released:
            chosen: Row = {**RELEASED, **among, "draws": draws}
            if scope.quick:
                chosen |= {"steps": steps, "subsets": 4}
            # Fixed sizes have as many updates as the last phase.
            fixed = {"updates": chosen["steps"]["post"], "learning_rate": chosen["learning_rate"]}
            return [
                {"kind": "released", **chosen},
                *({"kind": "fixed", "sizes": [M], **fixed} for M in sizes[::-1]),
            ]
        paper = {**among, "alpha": table.alpha, "steps": steps, "draws": draws, **adam}
        updates = sum(steps.values())
        return [
            {"kind": "paper", **paper},
            # One size per row, so that an interruption loses one training at most.
            *({"kind": "fixed", "sizes": [M], "updates": updates, **adam} for M in sizes[::-1]),
            {"kind": "fast", **among, "alpha": table.alpha},
            {"kind": "auto", **among, "tolerance": TOLERANCE},
        ]

    def run(self, settings: Row, scope: Scope) -> Row:
        noisy = corrupted(
            settings["data"], settings["noise"], rows=settings["N"], seed=settings["seed"]
        )
        data = standardised(noisy, scope.device)
        models, row = SizeStudy(data, settings["seed"]).run(settings)
        return {**row, "elbo": [round(model.fixed_bound(data), 2) for model in models]}

    def draw(self, rows: Sequence[Row], path: Path) -> Path:
        return draw_levels(
            _levels(rows),
            path,
            column="elbo",
            label="ELBO (nats)",
            title=lambda level: f"{level.group}, v = {level.value:g}",
            align=True,
        )

    def claims(self, rows: Sequence[Row]) -> list[str]:
        return size_claims(
            _levels(rows),
            fewer=lambda name: f"fewer inducing points with more noise on {name}",
            curves=(("ELBO at least that of the same fixed size", "elbo", 1),),
        )


def _rows(name: str, scope: Scope) -> int:
    return min(TABLES[name].N, 600) if scope.quick else TABLES[name].N


def _levels(rows: Sequence[Row]) -> list[Level]:
    levels = levels_from_rows(rows, group="data", value="noise")
    # The longest runs come first among the rows, the smallest data set in the figure.
    return sorted(levels, key=lambda level: (list(TABLES).index(level.group), level.value))
