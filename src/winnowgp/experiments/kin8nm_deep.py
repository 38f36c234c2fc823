"""Deep GPs on kin8nm."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean
from time import process_time
from typing import final

import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import GaussianLikelihood
from jaxtyping import Float
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter
from sklearn.model_selection import KFold
from torch import Tensor

from winnowgp.data import Dataset, Standardiser, load_table
from winnowgp.estimators import kernel_from
from winnowgp.experiments.base import PROCEDURE_NAMES, Experiment, Row, Scope, claim, one_thread
from winnowgp.experiments.fixed_points import STARTS, equal_size_claims, spread_rows, train_held
from winnowgp.models import DeepGP, deep_layers
from winnowgp.plots import (
    COLOURS,
    PROCEDURES,
    Tradeoff,
    draw_layer_sizes,
    draw_tradeoff,
    saved,
    styled,
)
from winnowgp.training import DeepTraining, FastSchedule, FixedAlpha, PaperSchedule, Schedule, fit
from winnowgp.training.layer_training import LayerTraining, random_rows
from winnowgp.training.schedules import estimate_elbo

# What a prediction of a two-layer model costs, by its sizes alone.


ROWS = 500


def deep_predict_us(sizes: Sequence[int], *, connected: bool, samples: int, best_of: int) -> float:
    """CPU microseconds for the mean and variance of one row, a mixture of `samples`.

    Eight inputs, eight hidden outputs, one thread; the least of `best_of` times, as whatever else
    a machine does makes them longer. No training comes before it: the time depends on sizes, not on
    where points lie.
    """
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(ROWS, 8, generator=generator, dtype=torch.float64)

    def kernel(number: int, inputs: int) -> Kernel:
        return kernel_from("rbf", inputs)

    layers = deep_layers(X, X[: max(sizes)], kernel=kernel, widths=(8, 1), connected=connected)
    model = DeepGP(layers, likelihood=GaussianLikelihood(), connected=connected)
    masks = [torch.arange(layer.K) < M for layer, M in zip(model.layers, sizes, strict=True)]
    posterior = model.prune(masks).posterior(samples=samples)
    seconds = []
    with one_thread(), torch.no_grad():
        posterior.predict(X)
        for _ in range(best_of):
            start = process_time()
            posterior.predict(X)
            seconds.append(process_time() - start)
    return round(1e6 * min(seconds) / ROWS, 2)


# Figure 6 from its rows: accuracy against prediction time, points per layer, and what they say.


# The third weighs the prior of a layer by what its points cost a prediction.
NAMES = {**PROCEDURE_NAMES, "weighed": "the fast schedule, α by cost"}

HUES = {**PROCEDURES, "weighed": COLOURS["second"]}


@final
@dataclass(frozen=True, slots=True)
class Group:
    """Runs that differ in their fold alone."""

    kind: str
    label: str
    sizes: list[list[int]]
    cost: float
    """Mean µs of a prediction."""
    accuracy: float
    """Mean test log density in nats."""


def groups(rows: Sequence[Row]) -> list[Group]:
    """Runs by kind and α, or by kind and sizes, the quickest to predict first.

    Runs whose prediction has not been timed yet are left out.
    """
    timed = [row for row in rows if row["kind"] == "time"]
    us = {(tuple(row["sizes"]), row["connected"]): row["predict_us"] for row in timed}

    def cost(row: Row) -> float | None:
        return us.get((tuple(row["sizes"]), row["connected"]))

    together: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        if row["kind"] in NAMES and cost(row) is not None:
            together[row["kind"], f"α = {row['alpha']:g}"].append(row)
        elif row["kind"] == "grid" and cost(row) is not None:
            together["grid", f"{row['sizes']}"].append(row)
    found = [
        Group(
            kind,
            label,
            [row["sizes"] for row in members],
            fmean([cost(row) or 0.0 for row in members]),
            fmean([row["log_density"] for row in members]),
        )
        for (kind, label), members in together.items()
    ]
    return sorted(found, key=lambda group: group.cost)


def kin8nm_picture(rows: Sequence[Row], path: Path) -> Path:
    """Accuracy against prediction time on the left, points per layer of both on the right."""
    found = groups(rows)

    def tradeoff(kind: str, name: str) -> Tradeoff:
        of = [group for group in found if group.kind == kind]
        labels = [_sizes(group) for group in of] if kind in NAMES else []
        return Tradeoff(name, [g.cost for g in of], [g.accuracy for g in of], labels)

    named = {kind: name for kind, name in NAMES.items() if any(g.kind == kind for g in found)}
    with styled():
        figure = Figure(figsize=(7 + 3 * len(named), 4))
        left, *right = figure.subplots(1, 1 + len(named), width_ratios=[1.8] + [1] * len(named))
        ours = [tradeoff(kind, name) for kind, name in named.items()]
        colours = [HUES[kind] for kind in named]
        draw_tradeoff(tradeoff("grid", "sizes set by hand"), ours, ax=left, colours=colours)
        left.set(xlabel="µs to predict a row", ylabel="test log density (nats)", xscale="log")
        left.xaxis.set_major_locator(LogLocator(2))
        left.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        left.xaxis.set_minor_locator(NullLocator())
        for ax, (kind, name) in zip(right, named.items(), strict=True):
            of = sorted((g for g in found if g.kind == kind), key=lambda g: g.label)
            draw_layer_sizes({group.label: group.sizes for group in of}, ax=ax)
            runs = max(len(group.sizes) for group in of)
            ax.set_title(f"{name}, {runs} fold{'s' * (runs > 1)}")
    return saved(figure, path)


def kin8nm_claims(rows: Sequence[Row]) -> list[str]:
    """Of the frontier, and of the last layer; then what choosing is worth at equal sizes."""
    found = groups(rows)
    grid = [group for group in found if group.kind == "grid"]
    chosen = {kind: [group for group in found if group.kind == kind] for kind in NAMES}
    frontier = [_frontier_claim(kind, of, grid) for kind, of in chosen.items() if of]
    last = [_last_layer_claim(kind, of) for kind, of in chosen.items() if kind in PROCEDURE_NAMES]
    return [*frontier, *last, *_equal_sizes(rows)]


def _frontier_claim(kind: str, chosen: Sequence[Group], grid: Sequence[Group]) -> str:
    beaten = {group.label: [other for other in grid if _beats(other, group)] for group in chosen}
    return claim(
        "the sizes chosen lie on the frontier of accuracy and prediction time of "
        f"{len(grid)} sizes set by hand, {NAMES[kind]}",
        agrees=not any(beaten.values()),
        found="; ".join(
            f"{group.label}: {_sizes(group)} points, {group.accuracy:.3f} nats, "
            f"{group.cost:.0f} µs, "
            + (f"beaten by {_best(better)}" if (better := beaten[group.label]) else "not beaten")
            for group in chosen
        ),
    )


def _last_layer_claim(kind: str, chosen: Sequence[Group]) -> str:
    sizes = [each for group in chosen for each in group.sizes]
    more = sum(second > first for first, second in sizes)
    return claim(
        f"more points in the last layer, {NAMES[kind]}",
        agrees=2 * more > len(sizes),
        found=f"in {more} of {len(sizes)} runs",
    )


def _equal_sizes(rows: Sequence[Row]) -> list[str]:
    """`fast` at α = 1 against points that nobody chose."""
    chosen = [row for row in rows if row["kind"] == "fast" and row["alpha"] == 1.0]
    others: dict[str, dict[int, float]] = defaultdict(dict)
    for row in rows:
        if row["kind"] == "fixed":
            others[row["start"]][row["fold"]] = row["log_density"]
    return equal_size_claims({r["fold"]: r["log_density"] for r in chosen}, others, each="fold")


def _beats(other: Group, group: Group) -> bool:
    return other.cost <= group.cost and other.accuracy >= group.accuracy


def _best(beating: Sequence[Group]) -> str:
    best = max(beating, key=lambda group: group.accuracy)
    return f"{_sizes(best)} ({best.accuracy:.3f} nats, {best.cost:.0f} µs)"


def _sizes(group: Group) -> str:
    return ", ".join(f"{fmean(column):.0f}" for column in zip(*group.sizes, strict=True))


# Figure 6 of the paper: a two-layer deep GP on kin8nm, its points chosen or set by hand.
#
# Kinds of runs, on five folds:
#
# - `paper`: the paper's model (the input added to the second layer) and phases, 150 candidates a
#   layer, four strengths of the prior.
# - `fast`: hidden functions around the identity, elimination by sites, as many updates.
# - `fixed`: no choice; a model of the sizes that `fast` kept at α = 1, its points random rows or
#   k-means centres of what each layer sees, as many updates.
# - `weighed`: as `fast`, with a prior that weighs a layer's points by what they cost a prediction.
# - `grid`: no choice; the pairs of sizes in `GRID` (the paper: 10, 20, .., 100 in each layer).
# - `time`: what a prediction costs with the sizes of all the others, on one thread of this CPU;
#   measured after them, one at a time, and without training.


N, FOLDS, CANDIDATES = 8192, 5, 150
# Propagated for each row of a prediction, and how often one is timed, for the least.
SAMPLES, BEST_OF = 100, 25

ALPHAS = (0.5, 1.0, 2.0, 5.0)
# Thinned, but for where predictions are cheap and good: a wide first layer, a narrow second one.
GRID = (
    *product((10, 40, 70, 100), (10, 40, 70, 100)),
    *product((70, 100), (20, 30)),
)

QUICK_GRID = tuple(product((5, 20), (5, 20)))
# `share` of all updates come before the fast schedule's choice, which drops points in `rounds`.
STEPS = {"layerwise": 200, "pre": 1000, "process": 500, "post": 1500, "share": 0.5, "rounds": 3}

QUICK_STEPS = {"layerwise": 20, "pre": 40, "process": 30, "post": 40, "share": 0.5, "rounds": 2}
# Every hyper-parameter starts at 1.
PAPER = {
    "learning_rate": 0.01,
    "connected": True,
    "start_noise": 1.0,
    "start_variances": (1.0, 1.0),
    "start_lengthscale": 1.0,
}
# Of the fast schedule, and of whatever is to be compared with it; √8 as there are eight inputs.
FAST = {
    "learning_rate": 0.03,
    "natural_rate": 0.3,
    "connected": False,
    "start_noise": 0.1,
    "start_variances": (0.1, 1.0),
    "start_lengthscale": 8**0.5,
}
# Of α in the two layers. A layer with P outputs takes (1 + P) M² for each sample that it is given:
# the first has eight outputs and one sample, the row itself; the second one output and all samples.
WEIGHTS = tuple(2 * cost / (9 + 2 * SAMPLES) for cost in (9, 2 * SAMPLES))

KINDS: dict[str, Row] = {
    "paper": {**PAPER, "weights": (1.0, 1.0)},
    "fast": {**FAST, "weights": (1.0, 1.0)},
    "weighed": {**FAST, "weights": WEIGHTS},
}


@final
@dataclass(frozen=True, slots=True)
class Fold:
    """A standardised training part and its test part."""

    train: Dataset
    test: Dataset
    scale: float
    """Of the target, for densities in its own units."""

    @classmethod
    def of(cls, number: int, device: str, *, rows: int = N) -> "Fold":
        """One of five parts of the first rows of kin8nm as test rows."""
        table = load_table("kin8nm").dataset()
        data = Dataset(table.X[:rows], table.Y[:rows])
        splits = list(KFold(FOLDS, shuffle=True, random_state=0).split(data.X))
        train, test = (torch.from_numpy(part) for part in splits[number])
        x, y = Standardiser.of(data.X[train]), Standardiser.of(data.Y[train])

        def part(rows: Tensor) -> Dataset:
            return Dataset(x.forward(data.X[rows]).to(device), y.forward(data.Y[rows]).to(device))

        return cls(part(train), part(test), y.scale.item())

    @torch.no_grad()
    def score(self, model: DeepGP, *, samples: int) -> Row:
        """Test log density and error in the target's own units, a mixture of `samples`."""
        posterior = model.posterior(samples=samples)
        pairs = list(zip(self.test.X.split(512), self.test.Y.split(512), strict=True))
        nats = torch.cat([posterior.log_density(x, y) for x, y in pairs]).mean().item()
        mean = torch.cat([posterior.predict(x).mean for x, _ in pairs])
        error = (mean - self.test.Y).square().mean().sqrt().item()
        log_scale = torch.tensor(self.scale).log().item()
        return {"log_density": nats - log_scale, "rmse": error * self.scale}


@final
class Kin8nmDeep(Experiment):
    """Accuracy against the time of a prediction, and where the points go."""

    name = "kin8nm-deep"
    title = "figure 6: two layers on kin8nm, accuracy against prediction time, points per layer"
    tables = ("kin8nm",)
    folds = FOLDS

    def settings(self, scope: Scope, rows: Sequence[Row]) -> list[Row]:
        folds = range(min(scope.seeds or (1 if scope.quick else FOLDS), FOLDS))
        return [*(run for fold in folds for run in _runs(fold, scope, rows)), *_timings(rows)]

    def measured(self, settings: Row, scope: Scope) -> Row:
        if settings["kind"] == "time":
            kinds = ("sizes", "connected", "samples", "best_of")
            us = deep_predict_us(**{name: settings[name] for name in kinds})
            return {"predict_us": us, "device": "cpu"}
        fold = Fold.of(settings["fold"], scope.device, rows=settings["N"])
        generator = torch.Generator(device=scope.device).manual_seed(settings["fold"])
        if settings["kind"] in ("grid", "fixed"):
            model, chosen = _held(settings, fold, generator), {}
            bound = estimate_elbo(model, fold.train, generator=generator)
        else:
            model, bound, chosen = _chosen(settings, fold, generator)
        assert isinstance(model.likelihood, GaussianLikelihood)
        noise = model.likelihood.noise.item() * fold.scale**2
        scores = fold.score(model, samples=settings["samples"])
        scores = {**scores, "elbo": bound / fold.train.N, "noise": noise}
        return {**chosen, **{name: round(value, 6) for name, value in scores.items()}}

    def alone(self, settings: Row) -> bool:
        return settings["kind"] == "time"

    def draw(self, rows: Sequence[Row], path: Path) -> Path:
        return kin8nm_picture(rows, path)

    def claims(self, rows: Sequence[Row]) -> list[str]:
        return kin8nm_claims(rows)


def _runs(fold: int, scope: Scope, rows: Sequence[Row]) -> list[Row]:
    """Settings of one fold; those of the controls as soon as their sizes are known."""
    used, candidates, steps = (800, 40, QUICK_STEPS) if scope.quick else (N, CANDIDATES, STEPS)
    alphas, pairs = ((1.0, 5.0), QUICK_GRID) if scope.quick else (ALPHAS, GRID)
    shared = {"fold": fold, "N": used, "steps": steps, "samples": SAMPLES}
    chosen = [
        {"kind": kind, "alpha": alpha, "candidates": candidates, **shared, **own}
        for kind, own in KINDS.items()
        for alpha in alphas
    ]
    grid = [
        {"kind": "grid", "sizes": sizes, "start": "random", **shared, **FAST} for sizes in pairs
    ]
    fixed = [
        {"kind": "fixed", "sizes": row["sizes"], "start": start, **shared, **FAST}
        for row in rows
        if row["kind"] == "fast" and row["fold"] == fold and row["alpha"] == 1.0
        for start in STARTS
    ]
    return [*chosen, *grid, *fixed]


def _timings(rows: Sequence[Row]) -> list[Row]:
    """One for every pair of sizes that the other runs ended with."""
    models = {(tuple(r["sizes"]), r["connected"]): None for r in rows if r["kind"] != "time"}
    how = {"samples": SAMPLES, "best_of": BEST_OF}
    return [
        {"kind": "time", "sizes": sizes, "connected": connected, **how}
        for sizes, connected in models
    ]


def _chosen(settings: Row, fold: Fold, generator: torch.Generator) -> tuple[DeepGP, float, Row]:
    """The model that a procedure ends with, its bound, and what it kept and expected to keep."""
    points = random_rows(fold.train.X, settings["candidates"], generator)
    model = _model(settings, fold, points)
    fitted = fit(model, fold.train, schedule=_schedule(settings), generator=generator)
    expected = [round(found.inclusion.sum().item(), 3) for found in fitted.selections]
    row: Row = {"sizes": list(fitted.model.sizes), "expected_sizes": expected}
    return fitted.model, fitted.elbo, row


def _schedule(settings: Row) -> Schedule:
    steps = settings["steps"]
    alphas = tuple(settings["alpha"] * weight for weight in settings["weights"])
    if settings["kind"] == "paper":
        phases = {name: steps[name] for name in ("layerwise", "pre", "post")}
        rate = settings["learning_rate"]
        return PaperSchedule(alphas, joint=steps["process"], learning_rate=rate, **phases)
    before, after = _halves(steps)
    return FastSchedule(
        FixedAlpha(alphas),
        rounds=steps["rounds"],
        deep=DeepTraining(
            layerwise=steps["layerwise"],
            pre=before,
            post=after,
            learning_rate=settings["learning_rate"],
            natural_rate=settings["natural_rate"],
        ),
    )


def _held(settings: Row, fold: Fold, generator: torch.Generator) -> DeepGP:
    sizes, steps = settings["sizes"], settings["steps"]
    return train_held(
        _model(settings, fold, spread_rows(fold.train.X, max(sizes))),
        fold.train,
        sizes=sizes,
        start=settings["start"],
        training=LayerTraining(settings["learning_rate"], natural_rate=settings["natural_rate"]),
        steps=(steps["layerwise"], *_halves(steps)),
        generator=generator,
    )


def _halves(steps: Row) -> tuple[int, int]:
    """As many updates of all layers as the paper's procedure takes: before and after a choice."""
    total = steps["pre"] + steps["process"] + steps["post"]
    before = round(steps["share"] * total)
    return before, total - before


def _model(settings: Row, fold: Fold, points: Float[Tensor, "K 8"]) -> DeepGP:
    connected = settings["connected"]

    def kernel(number: int, inputs: int) -> Kernel:
        made = kernel_from("rbf", inputs)
        made.initialize(outputscale=settings["start_variances"][number])
        made.initialize(**{"base_kernel.lengthscale": settings["start_lengthscale"]})
        return made

    likelihood = GaussianLikelihood()
    likelihood.noise = torch.tensor(settings["start_noise"])
    layers = deep_layers(
        fold.train.X,
        points,
        kernel=kernel,
        widths=(8, 1),
        connected=connected,
        hidden_mean="zero" if connected else "identity",
    )
    return DeepGP(layers, likelihood=likelihood, connected=connected).to(points.device)
