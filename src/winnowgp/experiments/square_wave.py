"""Figure 5 of the paper: three layers fit a square wave, with fewer points in deeper layers.

The paper's procedure and the fast schedule select among 50 candidates per layer (α = 0.5).
Baselines have the sizes that the fast schedule selected, inducing points that start at random rows
or k-means centres, and as many updates.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import final

import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import GaussianLikelihood
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from winnowgp.data import Dataset
from winnowgp.estimators.kernels import kernel_from
from winnowgp.experiments.base import (
    PROCEDURE_COLOURS,
    PROCEDURE_NAMES,
    RELEASED_NAMES,
    Experiment,
    Row,
    Scope,
    claim,
    curve_from_row,
    curve_to_row,
    process_options,
    to_lists,
    to_tensor,
)
from winnowgp.experiments.deep import (
    STARTS,
    draw_layer_sizes,
    equal_size_claims,
    spread_rows,
    train_fixed_sizes,
)
from winnowgp.models import DeepGP, DeepLayer, DeepPosterior, deep_layers
from winnowgp.models.deep_gp import estimate_elbo
from winnowgp.plots import Curve
from winnowgp.plots.predictions import draw_curve
from winnowgp.plots.style import COLOURS, save_figure, styled
from winnowgp.report.summary import counted
from winnowgp.training import DeepTraining, FastSchedule, FixedAlpha, PaperSchedule, Schedule, fit
from winnowgp.training.layer_training import LayerTraining, random_rows

N, CANDIDATES, ALPHA, SAMPLES = 200, 50, 0.5, 4
# Samples per row of a prediction; SAMPLES are per row of a training step.
PREDICT_SAMPLES = 100
# Rounds in which the fast schedule removes points.
ROUNDS = 3
# Numbers of outputs of the layers, and standard deviation of the noise.
WIDTHS, SIGMA = (1, 1, 1), 0.05
STEPS = {"layerwise": 200, "pre": 1000, "process": 500, "post": 1000}
QUICK_STEPS = {"layerwise": 50, "pre": 150, "process": 100, "post": 150}
# The paper starts everything at 1.
PAPER_START = {"start_noise": 1.0, "learning_rate": 0.01}
FAST_START = {"start_noise": 0.1, "learning_rate": 0.01, "natural_rate": 0.05}
# The settings of the scripts that the authors released.
RELEASED: Row = {
    "N": 100,
    "steps": {"layerwise": 500, "pre": 500, "process": 1000, "post": 500},
    "start_noise": 1.0,
    "learning_rate": 0.02,
    "process_learning_rate": 0.3,
    "subsets": 16,
    "start_inclusion": 0.5,
}
NAMES = {**PROCEDURE_NAMES, **RELEASED_NAMES}
SEEDS = 5
# Seeds of the runs that take a tenth of the time of the paper's procedure.
CHEAP_SEEDS = 15
# The seed whose rows hold the curves of the figure.
DRAWN = 0


def square_wave(*, seed: int, count: int = N, sigma: float = SIGMA) -> Dataset:
    """Return three periods of a square wave with noise, at evenly spaced, standardised inputs."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.linspace(0, 3, count, dtype=torch.float64)[:, None]
    level = torch.where((x + 0.25) % 1 < 0.5, 1.0, -1.0).to(x)
    noise = sigma * torch.randn(x.shape, generator=generator, dtype=x.dtype)
    return Dataset.of((x - x.mean()) / x.std(), level + noise)


@final
class SquareWave(Experiment):
    """Two procedures that select, and two baselines of the sizes that the fast one selected."""

    name = "square-wave"
    title = "figure 5: a square wave by three layers, with fewer inducing points in deeper ones"
    has_released = True

    def settings(self, scope: Scope, rows: Sequence[Row]) -> list[Row]:
        few = scope.seeds or (1 if scope.quick else None)
        steps = QUICK_STEPS if scope.quick else STEPS
        problem = {"N": N, "sigma": SIGMA, "widths": WIDTHS, "predict_samples": PREDICT_SAMPLES}
        shared = {**problem, "samples": SAMPLES, "steps": steps}
        selected = {"candidates": CANDIDATES, "alpha": ALPHA, **shared}
        if scope.released:
            quick = {"steps": steps, "subsets": 4} if scope.quick else {}
            return [
                {"kind": "released", "seed": seed, **selected, **RELEASED, **quick}
                for seed in range(few or SEEDS)
            ]
        settings: list[Row] = []
        for seed in range(few or SEEDS):
            settings.append({"kind": "paper", "seed": seed, **selected, **PAPER_START})
        for seed in range(few or CHEAP_SEEDS):
            settings.append({"kind": "fast", "seed": seed, **selected, **FAST_START})
            settings += [
                {"kind": start, "seed": seed, "sizes": row["sizes"], **shared, **FAST_START}
                for row in rows
                if row["kind"] == "fast" and row["seed"] == seed
                for start in STARTS
            ]
        return settings

    def run(self, settings: Row, scope: Scope) -> Row:
        seed, device = settings["seed"], scope.device
        shape = {"count": settings["N"], "sigma": settings["sigma"]}
        data, test = (_moved(square_wave(seed=s, **shape), device) for s in (seed, seed + 1000))
        generator = torch.Generator(device=device).manual_seed(seed)
        model = train_square_wave(settings, data, generator)
        posterior = model.posterior(samples=settings["predict_samples"])
        with torch.no_grad():
            density = posterior.log_density(test.X, test.Y).mean().item()
        bound = estimate_elbo(model, data, generator=generator, samples=32)
        row: Row = {"elbo": round(bound / data.N, 4), "log_density": round(density, 4)}
        if settings["kind"] in STARTS:
            return row
        row["sizes"] = list(model.sizes)
        if seed != DRAWN:
            return row
        return {**row, **_figure_columns(posterior.cpu(), _moved(data, "cpu"))}

    def draw(self, rows: Sequence[Row], path: Path) -> Path:
        selected = [row for row in rows if row["kind"] in NAMES]
        shown = [row for row in selected if row["seed"] == DRAWN]
        layers = len(shown[0]["layers"])
        with styled():
            figure = Figure(figsize=(14, 2.6 * len(shown)))
            grid = figure.add_gridspec(len(shown), layers + 2, width_ratios=[1] * layers + [1.5, 1])
            for line, row in enumerate(shown):
                axes = [figure.add_subplot(grid[line, column]) for column in range(layers + 1)]
                _draw_layers(row, axes)
                draw_density(row, ax=axes[-1])
            right = figure.add_subplot(grid[:, -1])
            kinds = dict.fromkeys(row["kind"] for row in selected)
            sizes = {k: [row["sizes"] for row in selected if row["kind"] == k] for k in kinds}
            draw_layer_sizes(sizes, ax=right)
            right.set_title("all seeds")
        return save_figure(figure, path)

    def claims(self, rows: Sequence[Row]) -> list[str]:
        lines = []
        for kind, name in NAMES.items():
            sizes = [row["sizes"] for row in rows if row["kind"] == kind]
            if not sizes:
                continue
            means = [fmean(column) for column in zip(*sizes, strict=True)]
            ordered = sum(a > b > c for a, b, c in sizes)
            lines.append(
                claim(
                    f"fewer inducing points in deeper layers, {name}",
                    agrees=means[0] > means[1] > means[2],
                    evidence=", ".join(f"{mean:.1f}" for mean in means)
                    + f" on average, strictly fewer in {ordered} of {len(sizes)} seeds",
                )
            )
        return [*lines, *_equal_sizes(rows), _density_line(rows)]


def _equal_sizes(rows: Sequence[Row]) -> list[str]:
    densities: dict[str, dict[int, float]] = {start: {} for start in ("fast", *STARTS)}
    for row in rows:
        densities.get(row["kind"], {})[row["seed"]] = row["log_density"]
    return equal_size_claims(densities.pop("fast"), densities, unit="seed")


def _density_line(rows: Sequence[Row]) -> str:
    texts = []
    for kind in (*NAMES, *STARTS):
        nats = [row["log_density"] for row in rows if row["kind"] == kind]
        if nats:
            texts.append(f"{kind} {fmean(nats):.2f} ({min(nats):.2f} to {max(nats):.2f})")
    return "test log density in nats per observation, mean (range over seeds): " + ", ".join(texts)


def train_square_wave(settings: Row, data: Dataset, generator: torch.Generator) -> DeepGP:
    """Return the model of a run, trained as its settings specify."""
    kind, steps = settings["kind"], settings["steps"]
    if kind in STARTS:
        sizes, half = settings["sizes"], _half(steps)
        rates = settings["learning_rate"], settings["samples"], settings["natural_rate"]
        return train_fixed_sizes(
            _model(settings, data, spread_rows(data.X, max(sizes))),
            data,
            sizes=sizes,
            start=kind,
            training=LayerTraining(*rates),
            steps=(steps["layerwise"], half, half),
            generator=generator,
        )
    points = random_rows(data.X, settings["candidates"], generator)
    model = _model(settings, data, points)
    return fit(model, data, schedule=_schedule(settings), generator=generator).model


def _schedule(settings: Row) -> Schedule:
    steps, alpha, samples = settings["steps"], settings["alpha"], settings["samples"]
    if settings["kind"] in ("paper", "released"):
        phases = {"joint" if name == "process" else name: count for name, count in steps.items()}
        rate = settings["learning_rate"]
        options = {**phases, **process_options(settings)}
        return PaperSchedule(alpha, samples=samples, learning_rate=rate, **options)
    half = _half(steps)
    return FastSchedule(
        FixedAlpha(alpha),
        rounds=settings.get("rounds", ROUNDS),
        deep=DeepTraining(
            layerwise=steps["layerwise"],
            pre=half,
            post=half,
            samples=samples,
            learning_rate=settings["learning_rate"],
            natural_rate=settings["natural_rate"],
        ),
    )


def _half(steps: dict[str, int]) -> int:
    """Return half of the number of updates of all layers that the paper's procedure takes."""
    return (steps["pre"] + steps["process"] + steps["post"]) // 2


def _model(settings: Row, data: Dataset, points: Float[Tensor, "K 1"]) -> DeepGP:
    """Return a deep GP with zero-mean layers and kernel hyper-parameters of 1."""

    def kernel(number: int, inputs: int) -> Kernel:
        return kernel_from("rbf", inputs)

    widths = settings["widths"]
    layers = deep_layers(data.X, points, kernel=kernel, widths=widths, hidden_mean="zero")
    likelihood = GaussianLikelihood()
    likelihood.noise = torch.tensor(settings["start_noise"])
    return DeepGP(layers, likelihood=likelihood).to(data.X.device)


def _moved(data: Dataset, device: str) -> Dataset:
    return Dataset(data.X.to(device), data.Y.to(device))


@torch.no_grad()
def _figure_columns(posterior: DeepPosterior, data: Dataset) -> Row:
    """Return the function of each layer with its inducing points, and the predictive density."""
    grid, layers = _widened_grid(data.X[:, 0]), []
    for layer in posterior.layers:
        layers.append(curve_to_row(_curve(layer, grid)))
        image = layer.marginals(grid[:, None], layer.points())
        grid = _widened_grid(image.mean[:, 0])
    return {
        "x": to_lists(data.X[:, 0]),
        "y": to_lists(data.Y[:, 0]),
        "layers": layers,
        "density": _density(posterior, data),
    }


def _curve(layer: DeepLayer, grid: Float[Tensor, " G"]) -> Curve:
    points = layer.points()
    along, at = layer.marginals(grid[:, None], points), layer.marginals(layer.candidates, points)
    return Curve(
        grid, along.mean[:, 0], along.variance[:, 0].sqrt(), layer.candidates[:, 0], at.mean[:, 0]
    )


def _density(posterior: DeepPosterior, data: Dataset) -> Row:
    """Return the density on a grid as integers from 0 to 99, and the 5 % and 95 % quantiles."""
    x = torch.linspace(data.X.min().item(), data.X.max().item(), 100, dtype=torch.float64)
    y = torch.linspace(-1.6, 1.6, 49, dtype=torch.float64)
    nats = torch.stack(
        [posterior.log_density(x[:, None], level.expand(len(x), 1))[:, 0] for level in y]
    )
    # The square root of the density: sharp plateaus would leave the jumps white.
    shades = (nats - nats.max()).mul(0.5).exp()
    low, high = posterior.quantiles(x[:, None], x.new_tensor([0.05, 0.95]))[:, :, 0]
    row = {name: to_lists(a) for name, a in {"x": x, "y": y, "low": low, "high": high}.items()}
    return {**row, "shades": (99 * shades).round().int().tolist()}


def _widened_grid(values: Float[Tensor, " N"]) -> Float[Tensor, " G"]:
    low, high = values.min().item(), values.max().item()
    margin = 0.1 * (high - low)
    return torch.linspace(low - margin, high + margin, 120, dtype=values.dtype)


def _draw_layers(row: Row, axes: Sequence[Axes]) -> None:
    for number, (ax, curve) in enumerate(zip(axes, row["layers"], strict=False)):
        draw_curve(curve_from_row(curve), ax=ax, colour=PROCEDURE_COLOURS[row["kind"]])
        ax.set_title(f"layer {number + 1}: {counted(len(curve['points']))}")
        ax.set(xlabel="x" if number == 0 else f"output of layer {number}")
    axes[0].set_ylabel(NAMES[row["kind"]])


def draw_density(row: Row, *, ax: Axes) -> None:
    """Draw the predictive density as shades, its 5 % and 95 % quantiles, and the data of a row."""
    density = row["density"]
    x, y, shades = (to_tensor(density[name]).numpy() for name in ("x", "y", "shades"))
    ax.pcolormesh(x, y, shades, cmap="Blues", shading="auto", rasterized=True)
    for name, label in (("low", "5 % and 95 %"), ("high", None)):
        ax.plot(x, density[name], color=COLOURS["posterior"], linewidth=0.8, label=label)
    ax.scatter(row["x"], row["y"], s=7, marker="x", linewidths=0.6, color=COLOURS["inclusion"])
    ax.set(xlabel="x", ylabel="y", ylim=(density["y"][0], density["y"][-1]))
    ax.set_title(f"predictive density, test log density {row['log_density']:.2f}")
