"""Studies of the number of points: runs, levels, claims."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import log, pi
from pathlib import Path
from statistics import fmean
from typing import Literal, final

import numpy as np
import torch
from jaxtyping import Float
from matplotlib.figure import Figure
from scipy.stats import rankdata
from torch import Tensor

from winnowgp.data import Dataset, Standardiser
from winnowgp.estimators import kernel_from
from winnowgp.experiments.base import PROCEDURE_NAMES, Row, alike, claim, counted
from winnowgp.models import SparseGP
from winnowgp.plots import (
    COLOURS,
    PROCEDURES,
    ChosenSizes,
    SizePanel,
    draw_size_panel,
    saved,
    styled,
)
from winnowgp.point_processes import Bernoulli, SquaredCardinality
from winnowgp.training import (
    FastSchedule,
    FitResult,
    FixedAlpha,
    Goal,
    PaperSchedule,
    Tolerance,
    fit,
)
from winnowgp.training.adam import Adam

# Models of one data set that differ in their points: so many set by hand, or chosen.


LEARNING_RATE = 0.01

"""Of Adam on everything but λ."""


def standardised(data: Dataset, device: str) -> Dataset:
    """Columns of mean zero and unit variance, on a device."""
    X, Y = (Standardiser.of(A).forward(A).to(device) for A in (data.X, data.Y))
    return Dataset(X, Y)


@dataclass(frozen=True, slots=True)
class Chosen:
    """What a procedure settled on."""

    expected: float
    """E|Z|, the expected number of points under its process."""
    models: list[SparseGP]
    """Of the sets that it keeps: draws from the process, or the one set that a search found."""


@final
@dataclass(frozen=True, slots=True)
class SizeStudy:
    """The paper's model of some rows (appendix C): RBF-ARD, every hyper-parameter starts at 1.

    Candidates are random rows, and a smaller number of points set by hand is the beginning of a
    larger one.

    Args:
        data: standardised.
        seed: of the rows that points start at, and of all that is drawn later.
    """

    data: Dataset
    seed: int

    def run(self, settings: Row) -> tuple[list[SparseGP], Row]:
        """Models of one run, and what there is to say of the choice behind them, if any.

        Args:
            settings: `kind`, and what that kind needs: `fixed` has `sizes`, `updates` and a
                `learning_rate`; `paper` that, `candidates`, `alpha`, `steps` and `draws`;
                `fast` `candidates` and `alpha`; `auto` a `tolerance` and, unless it picks its
                own, `candidates`.
        """
        if settings["kind"] == "fixed":
            how = {"steps": settings["updates"], "learning_rate": settings["learning_rate"]}
            return [self.by_hand(M, **how) for M in settings["sizes"]], {}
        chosen = self._chosen(settings)
        kept = [model.K for model in chosen.models]
        return chosen.models, {"expected": round(chosen.expected, 2), "kept": kept}

    def _chosen(self, settings: Row) -> Chosen:
        K = settings.get("candidates", 0)
        if settings["kind"] == "auto":
            return self.by_search(K, goal=Tolerance(settings["tolerance"]))
        alpha = settings["alpha"]
        if settings["kind"] == "fast":
            return self.by_search(K, goal=FixedAlpha(alpha))
        names = ("steps", "draws", "learning_rate")
        return self.by_paper(K, alpha=alpha, **{name: settings[name] for name in names})

    def by_hand(self, M: int, *, steps: int, learning_rate: float = LEARNING_RATE) -> SparseGP:
        """M points that nobody chose, trained by Adam."""
        model = self._model(M)
        self._train(model, steps, learning_rate)
        return model

    def by_paper(
        self,
        K: int,
        *,
        alpha: float,
        steps: Row,
        draws: int,
        learning_rate: float = LEARNING_RATE,
    ) -> Chosen:
        """The paper's three phases, the last of them for each of several draws from q(Z).

        Args:
            K: candidates.
            steps: numbers of updates, `pre`, `process` and `post`.
        """
        generator, model = self._generator(), self._model(K)
        self._train(model, steps["pre"], learning_rate)
        schedule = PaperSchedule(
            SquaredCardinality(K, alpha),
            pre=0,
            joint=steps["process"],
            post=0,
            learning_rate=learning_rate,
        )
        fitted = fit(model, self.data, schedule=schedule, generator=generator)
        q = Bernoulli.from_inclusion(fitted.selection.inclusion)
        kept = [
            fitted.model.with_candidates(fitted.candidates[0][mask])
            for mask in q.sample(draws, generator=generator)
        ]
        for one in kept:
            self._train(one, steps["post"], learning_rate)
        return Chosen(q.mean_count().item(), kept)

    def by_search(self, K: int, *, goal: Goal) -> Chosen:
        """The fast schedule among the same random rows, or among those it picks if K = 0."""
        schedule = FastSchedule(goal, n_candidates=K) if K else FastSchedule(goal)
        found: FitResult[SparseGP] = fit(
            self._model(K), self.data, schedule=schedule, generator=self._generator()
        )
        return Chosen(found.selection.inclusion.sum().item(), [found.model])

    def _model(self, count: int) -> SparseGP:
        return SparseGP(kernel_from("rbf", self.data.D), self._rows(count))

    def _rows(self, count: int) -> Float[Tensor, "K D"]:
        # Drawn where every device draws the same.
        order = torch.randperm(self.data.N, generator=torch.Generator().manual_seed(self.seed))
        return self.data.X[order[:count].to(self.data.X.device)]

    def _generator(self) -> torch.Generator:
        return torch.Generator(device=self.data.X.device).manual_seed(self.seed)

    def _train(self, model: SparseGP, steps: int, learning_rate: float) -> None:
        """Adam on the ordinary bound."""
        # Chunks are several times quicker on a CPU; a GPU waits for each, and has the memory.
        whole = self.data.X.device.type != "cpu"
        objective = model.chunked_bound(self.data)
        Adam(steps).maximise(
            (lambda: model.bound(self.data)) if whole else objective,
            [(model.parameters(), learning_rate)],
            scale=self.data.N,
            on_step=lambda step, value: None,
        )


# One level of what makes points less informative: the rows of all models there, compared.


NAMES = {
    "fixed": "fixed number, as many updates",
    **PROCEDURE_NAMES,
    "auto": f"{PROCEDURE_NAMES['fast']} with α left to it",
}

CHOOSING = ("paper", "fast", "auto")

MARGIN = 0.01

"""Nats a row within which two bounds count as level: what the default gives up on purpose."""


@dataclass(frozen=True, slots=True)
class Compared:
    """A run's sets against the curve of fixed numbers of its seed."""

    gains: list[float]
    """Of each set that lies within the curve: its value less the curve's there, in nats."""
    outside: int
    """Sets with fewer or more points than any on the curve, which are not judged."""


@final
@dataclass(frozen=True, slots=True)
class Level:
    """Rows that differ in kind and seed alone.

    A row of the kind `fixed` has `sizes`, one or several numbers of points; any other has `kept`,
    the numbers of points in the sets it keeps, and `expected`, E|Z|. Each has an `elbo`, and maybe
    a divergence, for every size. Runs that took everything for noise are left out throughout.
    """

    group: str
    """What varies: a condition, or a data set to which noise is added."""
    value: float
    """How strongly."""
    N: int
    rows: tuple[Row, ...]

    def numbers(self, kind: str) -> dict[int, float]:
        """How many points a procedure chose, by seed: E|Z| under its process, or as many as it
        kept where a search ended with one set."""
        return {
            row["seed"]: row["expected"] if kind == "paper" else row["kept"][0]
            for row in self.of_kind(kind)
        }

    def took_all_for_noise(self, row: Row) -> bool:
        """Whether no bound of a run is a nat above that of independent noise on standardised
        targets, −N/2 (log 2π + 1): started at one scale for everything, it found no function."""
        return max(row["elbo"]) <= -0.5 * self.N * (log(2 * pi) + 1) + 1

    def of_kind(self, kind: str) -> list[Row]:
        """Rows of one kind, seeds in order."""
        found = [row for row in self.rows if row["kind"] == kind]
        kept = [row for row in found if not self.took_all_for_noise(row)]
        return sorted(kept, key=lambda row: row["seed"])

    def left_out(self, kind: str) -> int:
        """How many runs of a kind took everything for noise."""
        return sum(row["kind"] == kind and self.took_all_for_noise(row) for row in self.rows)

    def curve(self, column: str, *, seed: int) -> tuple[list[int], list[float]]:
        """A column against the fixed number of points."""
        rows = [row for row in self.of_kind("fixed") if row["seed"] == seed]
        pairs = sorted(p for row in rows for p in zip(row["sizes"], row[column], strict=True))
        return [size for size, _ in pairs], [value for _, value in pairs]

    def curves(self, column: str) -> tuple[list[int], list[list[float]]]:
        """The same for every seed whose curve is complete."""
        seeds = sorted({row["seed"] for row in self.of_kind("fixed")})
        found = [self.curve(column, seed=seed) for seed in seeds]
        widest = max((sizes for sizes, _ in found), key=len, default=[])
        return widest, [values for sizes, values in found if sizes == widest]

    def compared(self, kind: str, column: str) -> list[Compared]:
        """Every run of a procedure against the curve of its seed, linear in log M; those whose
        seed has no curve are not among them."""
        found = []
        for row in self.of_kind(kind):
            sizes, values = self.curve(column, seed=row["seed"])
            if not sizes:
                continue
            pairs = list(zip(row["kept"], row[column], strict=True))
            gains = [
                value - float(np.interp(log(size), np.log(sizes), values))
                for size, value in pairs
                if sizes[0] <= size <= sizes[-1]
            ]
            found.append(Compared(gains, len(pairs) - len(gains)))
        return found


def grouped(levels: Sequence[Level]) -> Iterator[tuple[str, list[Level]]]:
    """Levels of each group, from least to most."""
    for group in dict.fromkeys(level.group for level in levels):
        mine = [level for level in levels if level.group == group]
        yield group, sorted(mine, key=lambda level: level.value)


def levels_of(rows: Sequence[Row], *, group: str, value: str) -> list[Level]:
    """Rows by two of their columns, what varies and how strongly."""
    return [
        Level(mine[0][group], mine[0][value], mine[0]["N"], tuple(mine))
        for mine in alike(rows, group, value)
    ]


def size_claims(
    levels: Sequence[Level],
    *,
    falling: Callable[[str], str],
    curves: Sequence[tuple[str, str, int]],
) -> list[str]:
    """Of every procedure: whether its numbers of points fall, then how its sets compare.

    Args:
        falling: what is said of the numbers of a group.
        curves: what is said of a column, the column, and 1 or −1 as `curve_claim` takes it.
    """
    fewer = [
        line
        for kind in CHOOSING
        for group, mine in grouped(levels)
        for line in falling_claim(falling(group), mine, kind)
    ]
    compared = [
        line
        for kind in CHOOSING
        for said, column, sign in curves
        for line in curve_claim(said, levels, kind, column, sign=sign)
    ]
    return [*fewer, *compared]


def falling_claim(said: str, levels: Sequence[Level], kind: str) -> list[str]:
    """Whether the mean number of points falls at every step from level to level.

    Of the seeds that have a run at every level; no line while there is none.
    """
    numbers = [level.numbers(kind) for level in levels]
    seeds = set.intersection(*(set(each) for each in numbers))
    paths = [[each[seed] for each in numbers] for seed in sorted(seeds)]
    if not paths:
        return []
    means = [fmean(each) for each in zip(*paths, strict=True)]
    correlations = [f"{_rank_correlation(range(len(path)), path):.2f}" for path in paths]
    found = (
        f"{_listed(means)} points on average; rank correlation by seed {', '.join(correlations)}; "
        f"at every step in {sum(_falls(path) for path in paths)} of {counted(len(paths), 'seed')}"
        + _noise_said(levels, kind)
    )
    return [claim(f"{said}, {NAMES[kind]}", agrees=_falls(means), found=found)]


def curve_claim(
    said: str, levels: Sequence[Level], kind: str, column: str, *, sign: int
) -> list[str]:
    """Whether a procedure's sets are level with the curve of fixed numbers, or better.

    A level is judged by the mean over its runs, a run by the mean over its sets within the curve.
    No line where none of its sets can be compared.

    Args:
        sign: 1 if more is better, −1 if less is.
    """
    runs = [(i, run) for i, level in enumerate(levels) for run in level.compared(kind, column)]
    gains: dict[int, list[float]] = {}
    for i, run in runs:
        if run.gains:
            gains.setdefault(i, []).append(sign * fmean(run.gains) / levels[i].N)
    if not gains:
        return []
    means = {number: fmean(each) for number, each in gains.items()}
    worse = [levels[number] for number, gain in means.items() if gain < -MARGIN]
    better = sum(gain > MARGIN for gain in means.values())
    judged = [gain for each in gains.values() for gain in each]
    found = (
        f"better by more than {MARGIN} nats a row at {better}, worse at {len(worse)} of "
        f"{counted(len(means), 'setting')}; better by {min(means.values()):+.3f} to "
        f"{max(means.values()):+.3f} nats a row; {sum(gain < 0 for gain in judged)} of "
        f"{counted(len(judged), 'run')} on the wrong side of the curve by any amount"
    )
    if worse:
        where = ", ".join(f"{level.group} {level.value:.3g}" for level in worse)
        found += f"; worse at {where}"
    if outside := sum(run.outside for _, run in runs):
        total = outside + sum(len(run.gains) for _, run in runs)
        found += f"; {outside} of {counted(total, 'set')} outside the curve, not judged"
    found += _noise_said(levels, kind, "fixed")
    return [claim(f"{said}, {NAMES[kind]}", agrees=not worse, found=found)]


def _noise_said(levels: Sequence[Level], *kinds: str) -> str:
    """How many runs are left out, for each kind that has such."""
    numbers = {kind: sum(level.left_out(kind) for level in levels) for kind in kinds}
    words = [counted(number, f"{kind} run") for kind, number in numbers.items() if number]
    return f"; left out as all noise: {' and '.join(words)}" if words else ""


def _rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's, and nought where one of them never changes."""
    a, b = (rankdata(values) for values in (first, second))
    return 0.0 if min(np.ptp(a), np.ptp(b)) == 0 else float(np.corrcoef(a, b)[0, 1])


def _falls(values: Sequence[float]) -> bool:
    """As far as can be seen in what is printed."""
    return all(round(b, 1) < round(a, 1) for a, b in pairwise(values))


def _listed(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.1f}" for value in values)


# Figures 3 and 4: a panel a level, a row of panels a group.


_COLOURS = {**PROCEDURES, "auto": COLOURS["second"]}

_MARKERS = {"paper": "o", "fast": "D", "auto": "s"}


def draw_levels(
    levels: Sequence[Level],
    path: Path,
    *,
    column: str,
    said: str,
    titles: Callable[[Level], str],
    scale: Literal["linear", "symlog"] = "linear",
) -> Path:
    """A column against the number of points: fixed numbers in grey, procedures in colour.

    Args:
        column: the quantity of the rows that is drawn.
        said: its name for the axis.
        titles: of each panel.
        scale: of the axis.
    """
    groups = [mine for _, mine in grouped(levels)]
    wide = max(len(mine) for mine in groups)
    with styled():
        figure = Figure(figsize=(2.6 * wide, 2.3 * len(groups) + 0.4))
        axes = figure.subplots(len(groups), wide, squeeze=False, sharex="row")
        for row, mine in zip(axes, groups, strict=True):
            for ax, level in zip(row, mine, strict=False):
                draw_size_panel(_panel(level, column, titles(level)), ax=ax)
                ax.set_yscale(scale)
            for ax in row[len(mine) :]:
                ax.set_axis_off()
            row[0].set_ylabel(said)
        for ax in axes[-1]:
            ax.set_xlabel("number of points")
        handles, labels = axes[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=2)
    return saved(figure, path)


def _panel(level: Level, column: str, title: str) -> SizePanel:
    sizes, curves = level.curves(column)
    by_size = list(zip(*curves, strict=True))
    return SizePanel(
        title=title,
        sizes=sizes,
        middle=[fmean(values) for values in by_size],
        low=[min(values) for values in by_size],
        high=[max(values) for values in by_size],
        name=NAMES["fixed"],
        chosen=[_chosen(level, kind, column) for kind in CHOOSING if level.of_kind(kind)],
    )


def _chosen(level: Level, kind: str, column: str) -> ChosenSizes:
    rows, numbers = level.of_kind(kind), level.numbers(kind).values()
    return ChosenSizes(
        name=NAMES[kind],
        colour=_COLOURS[kind],
        expected=fmean(numbers),
        sizes=[size for row in rows for size in row["kept"]],
        values=[value for row in rows for value in row[column]],
        marker=_MARKERS[kind],
    )
