"""Models with fixed or selected sizes, their comparison and plot, for figures 3 and 4."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import log, pi
from pathlib import Path
from statistics import fmean
from typing import Any, final

import numpy as np
import torch
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.stats import rankdata
from torch import Tensor

from winnowgp import training
from winnowgp.data import Dataset, Standardiser
from winnowgp.estimators.kernels import kernel_from
from winnowgp.experiments.base import (
    PROCEDURE_COLOURS,
    PROCEDURE_NAMES,
    RELEASED_NAMES,
    Row,
    claim,
    group_rows,
    process_options,
)
from winnowgp.models import SparseGP
from winnowgp.plots.style import COLOURS, save_figure, styled
from winnowgp.point_processes import Bernoulli, SquaredCardinality
from winnowgp.report.summary import counted
from winnowgp.training.adam import Adam
from winnowgp.training.initialization import kmeans

LEARNING_RATE = 0.01
"""Learning rate of Adam for everything but the inclusion probabilities."""

MARGIN = 0.01
"""Nats per observation within which two bounds count as equal: the default tolerance."""

FIXED_NAME = "fixed number, as many updates"
SELECTION_NAMES = {
    **PROCEDURE_NAMES,
    "auto": f"{PROCEDURE_NAMES['fast']} with automatic α",
    **RELEASED_NAMES,
}
_STYLES = {
    "paper": (PROCEDURE_COLOURS["paper"], "o"),
    "fast": (PROCEDURE_COLOURS["fast"], "D"),
    "auto": (COLOURS["second"], "s"),
    "released": (PROCEDURE_COLOURS["released"], "o"),
}


def standardised(data: Dataset, device: str) -> Dataset:
    """Return the data with columns of mean zero and unit variance, on a device."""
    X, Y = (Standardiser.of(A).forward(A).to(device) for A in (data.X, data.Y))
    return Dataset(X, Y)


@dataclass(frozen=True, slots=True)
class SelectedModels:
    """The outcome of a selection."""

    expected: float
    """E|Z|, the expected number of inducing points under the point process."""
    models: list[SparseGP]
    """Models of several draws from the point process, or of the one set that a search found."""


@final
@dataclass(frozen=True, slots=True)
class SizeStudy:
    """The paper's model of a data set (appendix C): RBF-ARD, all hyper-parameters start at 1.

    Inducing points and candidates start at random rows. The rows of a smaller number are the first
    rows of a larger one.

    Args:
        data: the data, usually standardised.
        seed: seed of the random rows and of the training.
        start: what starts otherwise: `lengthscale`, `noise`, or `locations` ("kmeans" for cluster
            centres).
    """

    data: Dataset
    seed: int
    start: Row = field(default_factory=dict)

    def run(self, settings: Row) -> tuple[list[SparseGP], Row]:
        """Return the models of one run, and the sizes that it selected.

        Args:
            settings: `kind`, and what that kind needs: `fixed` has `sizes`, `updates` and a
                `learning_rate`; `paper` and `released` have `candidates`, `alpha`, `steps`,
                `draws`, a `learning_rate` and what `process_options` reads; `fast` has
                `candidates` and `alpha`; `auto` has a `tolerance` and maybe `candidates`.
        """
        kind, K = settings["kind"], settings.get("candidates", 0)
        if kind == "fixed":
            steps, rate = settings["updates"], settings["learning_rate"]
            models = [self.fixed(M, steps=steps, learning_rate=rate) for M in settings["sizes"]]
            return models, {}
        if kind in ("paper", "released"):
            names = ("alpha", "steps", "draws", "learning_rate")
            options = process_options(settings)
            selected = self.by_paper(K, **{name: settings[name] for name in names}, **options)
        elif kind == "fast":
            selected = self.by_search(K, goal=training.FixedAlpha(settings["alpha"]))
        else:
            selected = self.by_search(K, goal=training.Tolerance(settings["tolerance"]))
        sizes = [model.K for model in selected.models]
        return selected.models, {"expected": round(selected.expected, 2), "kept": sizes}

    def fixed(self, M: int, *, steps: int, learning_rate: float = LEARNING_RATE) -> SparseGP:
        """Return a model with M inducing points that start at random rows, trained by Adam."""
        model = self._model(M)
        self.train(model, steps, learning_rate)
        return model

    def by_paper(
        self,
        K: int,
        *,
        alpha: float,
        steps: Row,
        draws: int,
        learning_rate: float = LEARNING_RATE,
        **process: Any,
    ) -> SelectedModels:
        """Run the paper's three phases, the last one for each of several draws from q(Z).

        Args:
            K: number of candidates.
            steps: numbers of updates: `pre`, `process` and `post`.
            draws: number of draws from q(Z).
            process: options of `PaperSchedule` for the point process.
        """
        generator, model = self._generator(), self._model(K)
        self.train(model, steps["pre"], learning_rate)
        schedule = training.PaperSchedule(
            SquaredCardinality(K, alpha),
            pre=0,
            joint=steps["process"],
            post=0,
            learning_rate=learning_rate,
            **process,
        )
        fitted = training.fit(model, self.data, schedule=schedule, generator=generator)
        q = Bernoulli.from_inclusion(fitted.selection.inclusion)
        models = [
            fitted.model.with_candidates(fitted.candidates[0][mask])
            for mask in q.sample(draws, generator=generator)
        ]
        for drawn_model in models:
            self.train(drawn_model, steps["post"], learning_rate)
        return SelectedModels(q.mean_count().item(), models)

    def by_search(self, K: int, *, goal: training.Goal) -> SelectedModels:
        """Run the fast schedule with K random rows as candidates, or with its own if K = 0."""
        schedule = training.FastSchedule(goal, n_candidates=K or None, reported=False)
        model, generator = self._model(K), self._generator()
        fitted = training.fit(model, self.data, schedule=schedule, generator=generator)
        return SelectedModels(fitted.selection.inclusion.sum().item(), [fitted.model])

    def _model(self, count: int) -> SparseGP:
        kernel = kernel_from("rbf", self.data.D)
        if "lengthscale" in self.start:
            kernel.initialize(**{"base_kernel.lengthscale": self.start["lengthscale"]})
        clustered = self.start.get("locations") == "kmeans" and count > 0
        points = kmeans(self.data.X, count, seed=self.seed) if clustered else self._rows(count)
        return SparseGP(kernel, points, noise=self.start.get("noise", 1.0))

    def _rows(self, count: int) -> Float[Tensor, "K D"]:
        # Drawn on the CPU, so that every device has the same rows.
        order = torch.randperm(self.data.N, generator=torch.Generator().manual_seed(self.seed))
        return self.data.X[order[:count].to(self.data.X.device)]

    def _generator(self) -> torch.Generator:
        return torch.Generator(device=self.data.X.device).manual_seed(self.seed)

    def train(self, model: SparseGP, steps: int, learning_rate: float) -> None:
        """Maximise the ELBO with Adam."""
        # Chunks are several times faster on a CPU; a GPU has the memory for whole matrices.
        on_gpu = self.data.X.device.type != "cpu"
        objective = model.chunked_bound(self.data)
        Adam(steps).maximise(
            (lambda: model.bound(self.data)) if on_gpu else objective,
            [(model.parameters(), learning_rate)],
            scale=self.data.N,
            on_step=lambda step, value: None,
        )


@dataclass(frozen=True, slots=True)
class Comparison:
    """The sets of one run against the curve of fixed sizes with the same seed."""

    gains: list[float]
    """For each set whose size is within the curve: its value minus the curve's, in nats."""
    outside: int
    """Number of sets whose size is outside the curve."""


@final
@dataclass(frozen=True, slots=True)
class Level:
    """Rows of one condition and intensity, which differ only in kind and seed.

    A row of the kind `fixed` has `sizes`, one or several numbers of inducing points; any other row
    has `kept`, the sizes of its sets, and `expected`, E|Z|. Each row has one `elbo`, and maybe one
    KL divergence, per size. Runs that explain all data as noise are left out of all comparisons.
    """

    group: str
    """The condition that varies, or the data set to which noise is added."""
    value: float
    """Its intensity."""
    N: int
    rows: tuple[Row, ...]

    def sizes(self, kind: str) -> dict[int, float]:
        """Return the selected number of inducing points by seed.

        It is E|Z| for the paper's procedure, with printed or released settings, and the size of the
        set for a search.
        """
        return {
            row["seed"]: row["expected"] if kind in ("paper", "released") else row["kept"][0]
            for row in self.of_kind(kind)
        }

    def is_all_noise(self, row: Row) -> bool:
        """Return whether no bound of a run exceeds that of pure noise by more than a nat.

        Independent noise has the evidence −N/2 (log 2πv + 1), where v is the variance of the
        targets: 1 if they are standardised.
        """
        variance = row.get("target_variance", 1.0)
        return max(row["elbo"]) <= -0.5 * self.N * (log(2 * pi * variance) + 1) + 1

    def of_kind(self, kind: str) -> list[Row]:
        """Return the rows of one kind, sorted by seed, without runs that are all noise."""
        rows = [row for row in self.rows if row["kind"] == kind and not self.is_all_noise(row)]
        return sorted(rows, key=lambda row: row["seed"])

    def noise_count(self, kind: str) -> int:
        """Return the number of runs of a kind that explain all data as noise."""
        return sum(row["kind"] == kind and self.is_all_noise(row) for row in self.rows)

    def curve(self, column: str, *, seed: int) -> tuple[list[int], list[float]]:
        """Return the fixed sizes of one seed, and a column at these sizes."""
        rows = [row for row in self.of_kind("fixed") if row["seed"] == seed]
        pairs = sorted(p for row in rows for p in zip(row["sizes"], row[column], strict=True))
        return [size for size, _ in pairs], [value for _, value in pairs]

    def curves(self, column: str) -> tuple[list[int], list[list[float]]]:
        """Return the fixed sizes, and a column for every seed that has all of them."""
        seeds = sorted({row["seed"] for row in self.of_kind("fixed")})
        curves = [self.curve(column, seed=seed) for seed in seeds]
        all_sizes = max((sizes for sizes, _ in curves), key=len, default=[])
        return all_sizes, [values for sizes, values in curves if sizes == all_sizes]

    def offsets(self, column: str) -> dict[int, float]:
        """Return, by seed, a column at the largest fixed size minus its mean over seeds.

        Only seeds that have all fixed sizes count.
        """
        sizes, _ = self.curves(column)
        seeds = sorted({row["seed"] for row in self.of_kind("fixed")})
        curves = {seed: self.curve(column, seed=seed) for seed in seeds}
        ends = {seed: values[-1] for seed, (own, values) in curves.items() if own == sizes}
        return {seed: end - fmean(ends.values()) for seed, end in ends.items()}

    def comparisons(self, kind: str, column: str) -> list[Comparison]:
        """Compare every run of a kind with the curve of its seed, interpolated in log M.

        Runs whose seed has no curve are left out.
        """
        comparisons = []
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
            comparisons.append(Comparison(gains, len(pairs) - len(gains)))
        return comparisons


def levels_by_group(levels: Sequence[Level]) -> Iterator[tuple[str, list[Level]]]:
    """Yield each group with its levels, sorted by intensity."""
    for group in dict.fromkeys(level.group for level in levels):
        members = [level for level in levels if level.group == group]
        yield group, sorted(members, key=lambda level: level.value)


def levels_from_rows(rows: Sequence[Row], *, group: str, value: str) -> list[Level]:
    """Group rows by two of their columns: what varies, and its intensity."""
    return [
        Level(members[0][group], members[0][value], members[0]["N"], tuple(members))
        for members in group_rows(rows, group, value)
    ]


def size_claims(
    levels: Sequence[Level],
    *,
    fewer: Callable[[str], str],
    curves: Sequence[tuple[str, str, int]],
) -> list[str]:
    """Return for every procedure whether its sizes fall, and how its sets compare with the curve.

    Args:
        fewer: maps a group to the claim about its sizes.
        curves: a claim, the column that it is about, and the `sign` that `curve_claim` takes.
    """
    falling = [
        line
        for kind in SELECTION_NAMES
        for group, members in levels_by_group(levels)
        for line in falling_claim(fewer(group), members, kind)
    ]
    compared = [
        line
        for kind in SELECTION_NAMES
        for statement, column, sign in curves
        for line in curve_claim(statement, levels, kind, column, sign=sign)
    ]
    return [*falling, *compared]


def falling_claim(statement: str, levels: Sequence[Level], kind: str) -> list[str]:
    """Return whether the mean number of inducing points falls from each level to the next.

    Only seeds with a run at every level count; without any, there is no claim.
    """
    sizes = [level.sizes(kind) for level in levels]
    seeds = set.intersection(*(set(each) for each in sizes))
    paths = [[each[seed] for each in sizes] for seed in sorted(seeds)]
    if not paths:
        return []
    means = [fmean(each) for each in zip(*paths, strict=True)]
    correlations = [f"{_rank_correlation(range(len(path)), path):.2f}" for path in paths]
    evidence = (
        f"{', '.join(f'{mean:.1f}' for mean in means)} inducing points on average; rank "
        f"correlation by seed {', '.join(correlations)}; falling at every step in "
        f"{sum(_falls(path) for path in paths)} of {counted(len(paths), 'seed')}"
        + _noise_note(levels, kind)
    )
    text = f"{statement}, {SELECTION_NAMES[kind]}"
    return [claim(text, agrees=_falls(means), evidence=evidence)]


def curve_claim(
    statement: str, levels: Sequence[Level], kind: str, column: str, *, sign: int
) -> list[str]:
    """Return whether the sets of a procedure are at least as good as the curve of fixed sizes.

    A level is judged by the mean over its runs, a run by the mean over its sets within the curve.
    If no set can be compared, there is no claim.

    Args:
        sign: 1 if larger values are better, −1 if smaller ones are.
    """
    runs = [(i, run) for i, level in enumerate(levels) for run in level.comparisons(kind, column)]
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
    evidence = (
        f"better by more than {MARGIN} nats per observation at {better}, worse at {len(worse)} of "
        f"{counted(len(means), 'setting')}; mean difference {min(means.values()):+.3f} to "
        f"{max(means.values()):+.3f} nats per observation; {sum(gain < 0 for gain in judged)} of "
        f"{counted(len(judged), 'run')} on the wrong side of the curve by any amount"
    )
    if worse:
        settings = ", ".join(f"{level.group} {level.value:.3g}" for level in worse)
        evidence += f"; worse at {settings}"
    if outside := sum(run.outside for _, run in runs):
        total = outside + sum(len(run.gains) for _, run in runs)
        evidence += f"; {outside} of {counted(total, 'set')} outside the curve, not judged"
    evidence += _noise_note(levels, kind, "fixed")
    text = f"{statement}, {SELECTION_NAMES[kind]}"
    return [claim(text, agrees=not worse, evidence=evidence)]


def _noise_note(levels: Sequence[Level], *kinds: str) -> str:
    """Return how many runs of each kind are left out because they explain all data as noise."""
    counts = {kind: sum(level.noise_count(kind) for level in levels) for kind in kinds}
    texts = [counted(count, f"{kind} run") for kind, count in counts.items() if count]
    return f"; left out as all noise: {' and '.join(texts)}" if texts else ""


def _rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Return Spearman's rank correlation, and zero if one of the sequences is constant."""
    a, b = (rankdata(values) for values in (first, second))
    return 0.0 if min(np.ptp(a), np.ptp(b)) == 0 else float(np.corrcoef(a, b)[0, 1])


def _falls(values: Sequence[float]) -> bool:
    """Return whether values fall at every step, to the one decimal that is printed."""
    return all(round(b, 1) < round(a, 1) for a, b in pairwise(values))


def draw_levels(
    levels: Sequence[Level],
    path: Path,
    *,
    column: str,
    label: str,
    title: Callable[[Level], str],
    align: bool = False,
) -> Path:
    """Draw a column against the number of inducing points: one panel per level, one row per group.

    Args:
        align: shift the values of each seed so that all curves of fixed sizes end at their mean:
            other data have another ELBO, by more than procedures differ.
        label: label of the vertical axis.
        title: returns the title of a panel.
    """
    groups = [members for _, members in levels_by_group(levels)]
    wide = max(len(members) for members in groups)
    with styled():
        figure = Figure(figsize=(2.6 * wide, 2.3 * len(groups) + 0.4))
        axes = figure.subplots(len(groups), wide, squeeze=False, sharex="row")
        for row, members in zip(axes, groups, strict=True):
            for ax, level in zip(row, members, strict=False):
                draw_level(level, column, ax=ax, align=align)
                ax.set_title(title(level))
            for ax in row[len(members) :]:
                ax.set_axis_off()
            row[0].set_ylabel(label)
        for ax in axes[-1]:
            ax.set_xlabel("number of inducing points")
        handles, labels = axes[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=2)
    return save_figure(figure, path)


def draw_level(level: Level, column: str, *, ax: Axes, align: bool = False) -> None:
    """Draw fixed sizes as a grey curve with the range over seeds, and procedures in colour.

    The dashed line of a procedure is its mean size; each marker is one of its sets. If seeds are
    aligned, those without a curve are left out, unless no seed has one.
    """
    sizes, curves = level.curves(column)
    offsets = level.offsets(column) if align else {}
    if align:
        shifts = offsets.values()
        curves = [
            [value - shift for value in curve] for curve, shift in zip(curves, shifts, strict=True)
        ]
    by_size = list(zip(*curves, strict=True))
    low, high = [min(values) for values in by_size], [max(values) for values in by_size]
    grey = COLOURS["data"]
    ax.fill_between(sizes, low, high, color=grey, alpha=0.25, linewidth=0)
    means = [fmean(values) for values in by_size]
    ax.plot(sizes, means, color=grey, linewidth=1.4, label=FIXED_NAME)
    for kind, name in SELECTION_NAMES.items():
        rows, (colour, marker) = level.of_kind(kind), _STYLES[kind]
        if not rows:
            continue
        ax.axvline(fmean(level.sizes(kind).values()), color=colour, linestyle="--", linewidth=1)
        shown = [row for row in rows if not offsets or row["seed"] in offsets]
        ax.scatter(
            [size for row in shown for size in row["kept"]],
            [value - offsets.get(row["seed"], 0.0) for row in shown for value in row[column]],
            s=16,
            marker=marker,
            facecolors="none",
            edgecolors=colour,
            linewidths=0.9,
            zorder=3,
            label=name,
        )
