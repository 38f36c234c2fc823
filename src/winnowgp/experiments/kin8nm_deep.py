"""Figure 6 of the paper: a two-layer deep GP on kin8nm, its points chosen or set by hand.

Kinds of runs, on five folds:

- `paper`: the paper's model (the input added to the second layer) and phases, 150 candidates a
  layer, four strengths of the prior.
- `fast`: hidden functions around the identity, elimination by sites, as many updates.
- `fixed`: no choice; a model of the sizes that `fast` kept at α = 1, its points random rows or
  k-means centres, as many updates.
- `weighed`: as `fast`, with a prior that weighs a layer's points by what they cost a prediction.
- `grid`: no choice; 10, 40, 70 and 100 points in each layer (the paper: 10, 20, .., 100).
- `time`: what a prediction costs with the sizes of all the others, on one thread of this CPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import GaussianLikelihood
from jaxtyping import Float
from sklearn.model_selection import KFold
from torch import Tensor

from winnowgp.data import Dataset, Standardiser, load_table
from winnowgp.estimators import kernel_from
from winnowgp.experiments.experiment import Experiment, Scope
from winnowgp.experiments.held_points import STARTS, spread_rows, train_held
from winnowgp.experiments.kin8nm_deep_picture import kin8nm_claims, kin8nm_picture
from winnowgp.experiments.predict_cost import deep_predict_us
from winnowgp.experiments.runs import Row
from winnowgp.models import DeepGP, deep_layers
from winnowgp.training import (
    DeepFast,
    DeepSchedule,
    DeepThreePhases,
    LayerAlphas,
    LayerTraining,
    estimated_bound,
    fit_deep,
    random_rows,
)

N, FOLDS, CANDIDATES = 8192, 5, 150
# Propagated for each row of a prediction.
SAMPLES = 100
ALPHAS = (0.5, 1.0, 2.0, 5.0)
GRID = (10, 40, 70, 100)
# `share` of all updates come before the fast schedule's choice, which drops points in `rounds`.
STEPS = {"layerwise": 200, "pre": 1000, "process": 500, "post": 1500, "share": 0.5, "rounds": 3}
QUICK_STEPS = {"layerwise": 20, "pre": 40, "process": 30, "post": 40, "share": 0.5, "rounds": 2}
QUICK = (800, 40, QUICK_STEPS)
PAPER_RATES = {"learning_rate": 0.01}
# Of the fast schedule, and of whatever is to be compared with it.
FAST_RATES = {"learning_rate": 0.03, "natural_rate": 0.3}


KINDS = {"paper": PAPER_RATES, "fast": FAST_RATES, "weighed": FAST_RATES}
# Of α in the two layers. A layer with P outputs takes (1 + P) M² for each sample that it is given:
# the first has eight outputs and one sample, the row itself; the second one output and all samples.
WEIGHTS = tuple(2 * cost / (9 + 2 * SAMPLES) for cost in (9, 2 * SAMPLES))


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
    def score(self, model: DeepGP) -> Row:
        """Test log density and error in the target's own units, a mixture of 100 samples."""
        posterior = model.posterior(samples=SAMPLES)
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

    def settings(self, scope: Scope, rows: Sequence[Row]) -> list[Row]:
        folds = range(min(scope.seeds or (1 if scope.quick else FOLDS), FOLDS))
        used, candidates, steps = QUICK if scope.quick else (N, CANDIDATES, STEPS)
        alphas, sizes = ((1.0, 5.0), (5, 20)) if scope.quick else (ALPHAS, GRID)
        found: list[Row] = []
        for fold in folds:
            shared = {"fold": fold, "N": used, "steps": steps}
            held = {**shared, **FAST_RATES}
            found += [
                {"kind": kind, "alpha": alpha, "candidates": candidates, **shared, **rates}
                for kind, rates in KINDS.items()
                for alpha in alphas
            ]
            found += [
                {"kind": "grid", "sizes": [a, b], "start": "random", **held}
                for a in sizes
                for b in sizes
            ]
            found += [
                {"kind": "fixed", "sizes": row["sizes"], "start": start, **held}
                for row in rows
                if row["kind"] == "fast" and row["fold"] == fold and row["alpha"] == 1.0
                for start in STARTS
            ]
        return [*found, *_timings(rows)]

    def measured(self, settings: Row, scope: Scope) -> Row:
        if settings["kind"] == "time":
            sizes, samples = settings["sizes"], settings["samples"]
            us = deep_predict_us(sizes, connected=settings["connected"], samples=samples)
            return {"predict_us": us, "device": "cpu"}
        fold = Fold.of(settings["fold"], scope.device, rows=settings["N"])
        generator = torch.Generator(device=scope.device).manual_seed(settings["fold"])
        if settings["kind"] in ("grid", "fixed"):
            model, chosen = _held(settings, fold, generator), {}
            bound = estimated_bound(model, fold.train, generator=generator)
        else:
            model, bound, chosen = _chosen(settings, fold, generator)
        assert isinstance(model.likelihood, GaussianLikelihood)
        noise = model.likelihood.noise.item() * fold.scale**2
        scores = {**fold.score(model), "elbo": bound / fold.train.N, "noise": noise}
        return {**chosen, **{name: round(value, 6) for name, value in scores.items()}}

    def draw(self, rows: Sequence[Row], path: Path) -> Path:
        return kin8nm_picture(rows, path)

    def claims(self, rows: Sequence[Row]) -> list[str]:
        return kin8nm_claims(rows)


def _timings(rows: Sequence[Row]) -> list[Row]:
    """One for every pair of sizes that the other runs ended with."""
    pairs = {(tuple(r["sizes"]), r["kind"] == "paper"): None for r in rows if r["kind"] != "time"}
    return [
        {"kind": "time", "sizes": list(sizes), "connected": connected, "samples": SAMPLES}
        for sizes, connected in pairs
    ]


def _chosen(settings: Row, fold: Fold, generator: torch.Generator) -> tuple[DeepGP, float, Row]:
    """The model that a procedure ends with, its bound, and what it kept and expected to keep."""
    points = random_rows(fold.train.X, settings["candidates"], generator)
    model = _model(fold, points, connected=settings["kind"] == "paper")
    fitted = fit_deep(model, fold.train, schedule=_schedule(settings), generator=generator)
    expected = [round(found.inclusion.sum().item(), 3) for found in fitted.selections]
    row: Row = {"sizes": list(fitted.model.sizes), "expected_sizes": expected}
    return fitted.model, fitted.bound, row


def _schedule(settings: Row) -> DeepSchedule:
    steps, alpha = settings["steps"], settings["alpha"]
    if settings["kind"] == "paper":
        phases = {name: steps[name] for name in ("layerwise", "pre", "process", "post")}
        return DeepThreePhases(alpha, learning_rate=settings["learning_rate"], **phases)
    before, after = _halves(steps)
    alphas = tuple(alpha * w for w in WEIGHTS) if settings["kind"] == "weighed" else alpha
    return DeepFast(
        LayerAlphas(alphas),
        layerwise=steps["layerwise"],
        pre=before,
        post=after,
        rounds=steps["rounds"],
        learning_rate=settings["learning_rate"],
        natural_rate=settings["natural_rate"],
    )


def _held(settings: Row, fold: Fold, generator: torch.Generator) -> DeepGP:
    sizes, steps = settings["sizes"], settings["steps"]
    return train_held(
        _model(fold, spread_rows(fold.train.X, max(sizes)), connected=False),
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


def _model(fold: Fold, points: Float[Tensor, "K 8"], *, connected: bool) -> DeepGP:
    def kernel(number: int, inputs: int) -> Kernel:
        made = kernel_from("rbf", inputs)
        if not connected:
            made.initialize(outputscale=0.1 if number == 0 else 1.0)
            made.initialize(**{"base_kernel.lengthscale": inputs**0.5})
        return made

    likelihood = GaussianLikelihood()
    likelihood.noise = torch.tensor(1.0 if connected else 0.1)
    layers = deep_layers(
        fold.train.X,
        points,
        kernel=kernel,
        widths=(8, 1),
        connected=connected,
        hidden_mean="zero" if connected else "identity",
    )
    return DeepGP(layers, likelihood=likelihood, connected=connected).to(points.device)
