"""Figure 6 of the paper: a two-layer deep GP on kin8nm, with selected and with fixed sizes.

There are seven kinds of runs, each on five folds:

- `paper`: the paper's model (with input skip connections) and phases, 150
  candidates per layer, four strengths of the prior.
- `fast`: hidden functions around the identity, backward elimination by sites, as many updates.
- `weighed`: as `fast`, with a prior that weighs each layer by the cost of its predictions.
- `fixed`: the sizes that `fast` selected at α = 1, inducing points that start at random rows or
  k-means centres of each layer's inputs, as many updates.
- `grid`: the pairs of sizes in `GRID` (the paper has 10, 20, .., 100 in each layer).
- `released`: the paper's model with the settings of the scripts that the authors released.
- `time`: the cost of a prediction for the sizes of all other runs, on one CPU thread; measured
  after them, one at a time and without training.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from time import process_time
from typing import final

import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import GaussianLikelihood
from jaxtyping import Float
from matplotlib.figure import Figure
from sklearn.model_selection import KFold
from torch import Tensor

from winnowgp.data import Dataset, Standardiser
from winnowgp.data.catalogue import load_table
from winnowgp.estimators.kernels import kernel_from
from winnowgp.experiments.base import (
    PROCEDURE_NAMES,
    RELEASED_NAMES,
    Experiment,
    Row,
    Scope,
    process_options,
)
from winnowgp.experiments.deep import (
    STARTS,
    TRADEOFF_NAMES,
    draw_layer_sizes,
    draw_tradeoff,
    equal_size_claims,
    frontier_claim,
    last_layer_claim,
    spread_rows,
    tradeoff_groups,
    train_fixed_sizes,
)
from winnowgp.linalg import single_thread
from winnowgp.models import DeepGP, deep_layers
from winnowgp.models.deep_gp import estimate_elbo
from winnowgp.plots.style import save_figure, styled
from winnowgp.report.summary import counted
from winnowgp.training import DeepTraining, FastSchedule, FixedAlpha, PaperSchedule, Schedule, fit
from winnowgp.training.layer_training import LayerTraining, random_rows

N, FOLDS, CANDIDATES = 8192, 5, 150
# Samples per row of a prediction, and the number of timings; the shortest one is reported.
SAMPLES, BEST_OF, TIMED_ROWS = 100, 25, 500
ALPHAS = (0.5, 1.0, 2.0, 5.0)
# Fewer pairs than the paper's, but denser where predictions are cheap and good: a wide first layer
# and a narrow second one.
GRID = (
    *product((10, 40, 70, 100), (10, 40, 70, 100)),
    *product((70, 100), (20, 30)),
)
QUICK_GRID = tuple(product((5, 20), (5, 20)))
# A `share` of all updates precedes the fast schedule's elimination, which takes `rounds`.
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
# The settings of the scripts that the authors released. The strength of the prior that is given to
# them has no effect: α is 1 times the width of a layer. Two batches of 4,096 rows are an epoch: 300
# for each layer, 500 for both, ten steps of the point process, 500 for the selected points.
RELEASED: Row = {
    **PAPER,
    "alpha": 1.0,
    "weights": (8.0, 1.0),
    "steps": {"layerwise": 600, "pre": 1000, "process": 10, "post": 1000},
    "batch_size": 4096,
    "learning_rate": 0.02,
    "process_learning_rate": 0.3,
    "subsets": 32,
    "start_inclusion": 0.8,
}
# Rows that are predicted one by one in the released scripts.
RELEASED_CALLS = 1000
# For the fast schedule and the baselines; the lengthscale is √8 because there are eight inputs.
FAST = {
    "learning_rate": 0.03,
    "natural_rate": 0.3,
    "connected": False,
    "start_noise": 0.1,
    "start_variances": (0.1, 1.0),
    "start_lengthscale": 8**0.5,
}
# Weights of α in the two layers. A layer with P outputs costs (1 + P) M² per sample of its input:
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
    """Standardised training and test rows of one fold."""

    train: Dataset
    test: Dataset
    scale: float
    """Standard deviation of the target in its original unit."""

    @classmethod
    def of(cls, number: int, device: str, *, rows: int = N) -> "Fold":
        """Return one of five folds of the first rows of kin8nm."""
        table = load_table("kin8nm").dataset()
        data = Dataset(table.X[:rows], table.Y[:rows])
        splits = list(KFold(FOLDS, shuffle=True, random_state=0).split(data.X))
        train, test = (torch.from_numpy(indices) for indices in splits[number])
        x, y = Standardiser.of(data.X[train]), Standardiser.of(data.Y[train])

        def subset(rows: Tensor) -> Dataset:
            return Dataset(x.forward(data.X[rows]).to(device), y.forward(data.Y[rows]).to(device))

        return cls(subset(train), subset(test), y.scale.item())

    @torch.no_grad()
    def score(self, model: DeepGP, *, samples: int) -> Row:
        """Return test log density and RMSE in the target's original unit."""
        posterior = model.posterior(samples=samples)
        pairs = list(zip(self.test.X.split(512), self.test.Y.split(512), strict=True))
        nats = torch.cat([posterior.log_density(x, y) for x, y in pairs]).mean().item()
        mean = torch.cat([posterior.predict(x).mean for x, _ in pairs])
        error = (mean - self.test.Y).square().mean().sqrt().item()
        log_scale = torch.tensor(self.scale).log().item()
        return {"log_density": nats - log_scale, "rmse": error * self.scale}


@final
class Kin8nmDeep(Experiment):
    """Accuracy against prediction time, and the number of inducing points per layer."""

    name = "kin8nm-deep"
    title = "figure 6: two layers on kin8nm; accuracy, prediction time, inducing points per layer"
    tables = ("kin8nm",)
    folds = FOLDS
    has_released = True

    def settings(self, scope: Scope, rows: Sequence[Row]) -> list[Row]:
        folds = range(min(scope.seeds or (1 if scope.quick else FOLDS), FOLDS))
        runs = _released_runs if scope.released else _runs
        return [*(run for fold in folds for run in runs(fold, scope, rows)), *_timings(rows, scope)]

    def run(self, settings: Row, scope: Scope) -> Row:
        if settings["kind"] == "time":
            us = deep_predict_us(
                settings["sizes"],
                skip_connections=settings["connected"],
                samples=settings["samples"],
                best_of=settings["best_of"],
                calls=settings.get("calls"),
            )
            return {"predict_us": us, "device": "cpu"}
        fold = Fold.of(settings["fold"], scope.device, rows=settings["N"])
        generator = torch.Generator(device=scope.device).manual_seed(settings["fold"])
        if settings["kind"] in ("grid", "fixed"):
            model, sizes = _fixed_model(settings, fold, generator), {}
            bound = estimate_elbo(model, fold.train, generator=generator)
        else:
            model, bound, sizes = _selected_model(settings, fold, generator)
        assert isinstance(model.likelihood, GaussianLikelihood)
        noise = model.likelihood.noise.item() * fold.scale**2
        scores = fold.score(model, samples=settings["samples"])
        scores = {**scores, "elbo": bound / fold.train.N, "noise": noise}
        return {**sizes, **{name: round(value, 6) for name, value in scores.items()}}

    def runs_alone(self, settings: Row) -> bool:
        return settings["kind"] == "time"

    def draw(self, rows: Sequence[Row], path: Path) -> Path:
        grouped = tradeoff_groups(rows)
        kinds = [kind for kind in TRADEOFF_NAMES if any(group.kind == kind for group in grouped)]
        with styled():
            figure = Figure(figsize=(7 + 3 * len(kinds), 4))
            left, *right = figure.subplots(1, 1 + len(kinds), width_ratios=[1.8] + [1] * len(kinds))
            draw_tradeoff(grouped, ax=left)
            for ax, kind in zip(right, kinds, strict=True):
                members = sorted((g for g in grouped if g.kind == kind), key=lambda g: g.label)
                draw_layer_sizes({group.label: group.sizes for group in members}, ax=ax)
                runs = max(len(group.sizes) for group in members)
                ax.set_title(f"{TRADEOFF_NAMES[kind]}, {counted(runs, 'fold')}")
        return save_figure(figure, path)

    def claims(self, rows: Sequence[Row]) -> list[str]:
        grouped = tradeoff_groups(rows)
        grid = [group for group in grouped if group.kind == "grid"]
        selected = {
            kind: [group for group in grouped if group.kind == kind] for kind in TRADEOFF_NAMES
        }
        return [
            *(frontier_claim(kind, each, grid) for kind, each in selected.items() if each and grid),
            *(
                last_layer_claim(kind, sizes)
                for kind in (*PROCEDURE_NAMES, *RELEASED_NAMES)
                if (sizes := [row["sizes"] for row in rows if row["kind"] == kind])
            ),
            *_equal_sizes(rows),
        ]


def _runs(fold: int, scope: Scope, rows: Sequence[Row]) -> list[Row]:
    """Return the settings of one fold; those of the baselines once their sizes are known."""
    used, candidates, steps = (800, 40, QUICK_STEPS) if scope.quick else (N, CANDIDATES, STEPS)
    alphas = (1.0, 5.0) if scope.quick else ALPHAS
    shared = {"fold": fold, "N": used, "steps": steps, "samples": SAMPLES}
    selected = [
        {"kind": kind, "alpha": alpha, "candidates": candidates, **shared, **own}
        for kind, own in KINDS.items()
        for alpha in alphas
    ]
    grid = _grid(shared, scope)
    fixed = [
        {"kind": "fixed", "sizes": row["sizes"], "start": start, **shared, **FAST}
        for row in rows
        if row["kind"] == "fast" and row["fold"] == fold and row["alpha"] == 1.0
        for start in STARTS
    ]
    return [*selected, *grid, *fixed]


def _grid(shared: Row, scope: Scope) -> list[Row]:
    """Return the settings of the fixed sizes of one fold."""
    pairs = QUICK_GRID if scope.quick else GRID
    return [
        {"kind": "grid", "sizes": sizes, "start": "random", **shared, **FAST} for sizes in pairs
    ]


def _released_runs(fold: int, scope: Scope, rows: Sequence[Row]) -> list[Row]:
    """Return the settings of the released run of a fold, and of the same grid as otherwise."""
    settings = {"kind": "released", "fold": fold, "N": N, "candidates": CANDIDATES, **RELEASED}
    shared = {"fold": fold, "N": N, "steps": STEPS, "samples": SAMPLES}
    if scope.quick:
        steps = {name: QUICK_STEPS[name] for name in ("layerwise", "pre", "post")}
        settings |= {"N": 800, "candidates": 40, "batch_size": 400, "subsets": 4}
        settings |= {"steps": {**RELEASED["steps"], **steps}}
        shared |= {"N": 800, "steps": QUICK_STEPS}
    return [{**settings, "samples": SAMPLES}, *_grid(shared, scope)]


def _timings(rows: Sequence[Row], scope: Scope) -> list[Row]:
    """Return the settings of one timing for every pair of sizes of the other runs."""
    models = {(tuple(r["sizes"]), r["connected"]): None for r in rows if r["kind"] != "time"}
    repeats = {"samples": SAMPLES, "best_of": BEST_OF}
    if scope.released:
        repeats |= {"best_of": 1, "calls": RELEASED_CALLS}
    return [
        {"kind": "time", "sizes": sizes, "connected": skip_connections, **repeats}
        for sizes, skip_connections in models
    ]


def _selected_model(
    settings: Row, fold: Fold, generator: torch.Generator
) -> tuple[DeepGP, float, Row]:
    """Return the model that a procedure ends with, its ELBO, and its sizes."""
    points = random_rows(fold.train.X, settings["candidates"], generator)
    model = _model(settings, fold, points)
    fitted = fit(model, fold.train, schedule=_schedule(settings), generator=generator)
    expected = [round(each.inclusion.sum().item(), 3) for each in fitted.selections]
    row: Row = {"sizes": list(fitted.model.sizes), "expected_sizes": expected}
    return fitted.model, fitted.elbo, row


def _schedule(settings: Row) -> Schedule:
    steps = settings["steps"]
    alphas = tuple(settings["alpha"] * weight for weight in settings["weights"])
    if settings["kind"] in ("paper", "released"):
        phases = {name: steps[name] for name in ("layerwise", "pre", "post")}
        options = {"batch_size": settings.get("batch_size"), **process_options(settings)}
        rate = settings["learning_rate"]
        return PaperSchedule(
            alphas, joint=steps["process"], learning_rate=rate, **phases, **options
        )
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


def _fixed_model(settings: Row, fold: Fold, generator: torch.Generator) -> DeepGP:
    sizes, steps = settings["sizes"], settings["steps"]
    return train_fixed_sizes(
        _model(settings, fold, spread_rows(fold.train.X, max(sizes))),
        fold.train,
        sizes=sizes,
        start=settings["start"],
        training=LayerTraining(settings["learning_rate"], natural_rate=settings["natural_rate"]),
        steps=(steps["layerwise"], *_halves(steps)),
        generator=generator,
    )


def _halves(steps: Row) -> tuple[int, int]:
    """Split the paper's number of updates of all layers into those before and after elimination."""
    total = steps["pre"] + steps["process"] + steps["post"]
    before = round(steps["share"] * total)
    return before, total - before


def _model(settings: Row, fold: Fold, points: Float[Tensor, "K 8"]) -> DeepGP:
    skip_connections = settings["connected"]

    def kernel(number: int, inputs: int) -> Kernel:
        rbf = kernel_from("rbf", inputs)
        rbf.initialize(outputscale=settings["start_variances"][number])
        rbf.initialize(**{"base_kernel.lengthscale": settings["start_lengthscale"]})
        return rbf

    likelihood = GaussianLikelihood()
    likelihood.noise = torch.tensor(settings["start_noise"])
    layers = deep_layers(
        fold.train.X,
        points,
        kernel=kernel,
        widths=(8, 1),
        skip_connections=skip_connections,
        hidden_mean="zero" if skip_connections else "identity",
    )
    model = DeepGP(layers, likelihood=likelihood, skip_connections=skip_connections)
    return model.to(points.device)


def deep_predict_us(
    sizes: Sequence[int],
    *,
    skip_connections: bool,
    samples: int,
    best_of: int,
    calls: int | None = None,
) -> float:
    """Return CPU microseconds per row for the mean and variance of a two-layer model.

    The model has eight inputs, eight hidden outputs and no training: the time depends on the sizes,
    not on the parameters. It is the shortest of `best_of` timings on one thread, because other
    processes can only make a timing longer.

    Args:
        calls: number of rows that are predicted one by one, in one call each, as the released
            scripts do; all rows in one call if None.
    """
    generator = torch.Generator().manual_seed(0)
    rows = calls or TIMED_ROWS
    X = torch.randn(rows, 8, generator=generator, dtype=torch.float64)

    def kernel(number: int, inputs: int) -> Kernel:
        return kernel_from("rbf", inputs)

    layers = deep_layers(
        X, X[: max(sizes)], kernel=kernel, widths=(8, 1), skip_connections=skip_connections
    )
    model = DeepGP(layers, likelihood=GaussianLikelihood(), skip_connections=skip_connections)
    masks = [torch.arange(layer.K) < M for layer, M in zip(model.layers, sizes, strict=True)]
    posterior = model.prune(masks).posterior(samples=samples)
    seconds = []
    with single_thread(), torch.no_grad():
        posterior.predict(X)
        for _ in range(best_of):
            start = process_time()
            for part in X.split(1 if calls else rows):
                posterior.predict(part)
            seconds.append(process_time() - start)
    return round(1e6 * min(seconds) / rows, 2)


def _equal_sizes(rows: Sequence[Row]) -> list[str]:
    """Compare `fast` at α = 1 with the baselines of the same sizes."""
    selected = [row for row in rows if row["kind"] == "fast" and row["alpha"] == 1.0]
    baselines: dict[str, dict[int, float]] = defaultdict(dict)
    for row in rows:
        if row["kind"] == "fixed":
            baselines[row["start"]][row["fold"]] = row["log_density"]
    densities = {row["fold"]: row["log_density"] for row in selected}
    return equal_size_claims(densities, baselines, unit="fold")
