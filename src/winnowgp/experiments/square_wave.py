"""The paper's square wave."""

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
from winnowgp.estimators import kernel_from
from winnowgp.experiments.base import (
    PROCEDURE_NAMES,
    Experiment,
    Row,
    Scope,
    claim,
    curve_of,
    curve_row,
    numbers,
    rounded,
)
from winnowgp.experiments.fixed_points import STARTS, equal_size_claims, spread_rows, train_held
from winnowgp.models import DeepGP, DeepLayer, DeepPosterior, deep_layers
from winnowgp.plots import (
    PROCEDURES,
    Curve,
    DensityMap,
    draw_curve,
    draw_density,
    draw_layer_sizes,
    saved,
    styled,
)
from winnowgp.training import DeepTraining, FastSchedule, FixedAlpha, PaperSchedule, Schedule, fit
from winnowgp.training.layer_training import LayerTraining, random_rows
from winnowgp.training.schedules import estimate_elbo

# Figure 5 from its rows: layers, the density that comes out, and points per layer over seeds.


def square_wave_picture(rows: Sequence[Row], path: Path, *, drawn: int) -> Path:
    """A line of panels for each procedure, from the seed `drawn`; all seeds on the right."""
    chosen = [row for row in rows if row["kind"] in PROCEDURE_NAMES]
    shown = [row for row in chosen if row["seed"] == drawn]
    layers = len(shown[0]["layers"])
    with styled():
        figure = Figure(figsize=(14, 2.6 * len(shown)))
        grid = figure.add_gridspec(len(shown), layers + 2, width_ratios=[1] * layers + [1.5, 1])
        for line, row in enumerate(shown):
            axes = [figure.add_subplot(grid[line, column]) for column in range(layers + 1)]
            _draw_line(row, axes)
        right = figure.add_subplot(grid[:, -1])
        kinds = dict.fromkeys(row["kind"] for row in chosen)
        sizes = {k: [row["sizes"] for row in chosen if row["kind"] == k] for k in kinds}
        draw_layer_sizes(sizes, ax=right)
        right.set_title("points per layer, all seeds")
    return saved(figure, path)


def _draw_line(row: Row, axes: Sequence[Axes]) -> None:
    kind, density = row["kind"], row["density"]
    for number, (ax, curve) in enumerate(zip(axes, row["layers"], strict=False)):
        draw_curve(curve_of(curve), ax=ax, colour=PROCEDURES[kind])
        ax.set_title(f"layer {number + 1}: {len(curve['points'])} points")
        ax.set(xlabel="x" if number == 0 else f"output of layer {number}")
    axes[0].set_ylabel(PROCEDURE_NAMES[kind])
    found = DensityMap(
        numbers(density["x"]),
        numbers(density["y"]),
        numbers(density["shades"]),
        numbers(density["low"]),
        numbers(density["high"]),
    )
    draw_density(found, numbers(row["x"]), numbers(row["y"]), ax=axes[-1])
    axes[-1].set_ylim(density["y"][0], density["y"][-1])
    axes[-1].set_title(f"posterior density, test log density {row['log_density']:.2f}")


# Figure 5 of the paper: three layers make a square wave, with fewer points the deeper they lie.
#
# The paper's procedure and the fast one choose among 50 candidates a layer (α = 0.5); models of the
# sizes that the fast one kept, with points at random rows or k-means centres and as many updates,
# show what the choice is worth.


N, CANDIDATES, ALPHA, SAMPLES = 200, 50, 0.5, 4
# Propagated for each row of a prediction; SAMPLES are for each row of a training step.
PREDICT_SAMPLES = 100
# Of layers that have one output each, and of the noise that is added to the wave.
WIDTHS, SIGMA = (1, 1, 1), 0.05

STEPS = {"layerwise": 200, "pre": 1000, "process": 500, "post": 1000}

QUICK_STEPS = {"layerwise": 50, "pre": 150, "process": 100, "post": 150}
# The paper starts everything at 1.
PAPER_START = {"start_noise": 1.0, "learning_rate": 0.01}

FAST_START = {"start_noise": 0.1, "learning_rate": 0.01, "natural_rate": 0.05}

SEEDS = 5
# Of what takes a tenth of the time of the paper's procedure.
CHEAP_SEEDS = 15
# The seed whose rows hold the curves of the figure.
DRAWN = 0


def square_wave(*, seed: int, count: int = N, sigma: float = SIGMA) -> Dataset:
    """Three periods of a square wave with a little noise, rows evenly spread and standardised."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.linspace(0, 3, count, dtype=torch.float64)[:, None]
    level = torch.where((x + 0.25) % 1 < 0.5, 1.0, -1.0).to(x)
    noise = sigma * torch.randn(x.shape, generator=generator, dtype=x.dtype)
    return Dataset.of((x - x.mean()) / x.std(), level + noise)


@final
class SquareWave(Experiment):
    """Two procedures that choose, and two controls of the sizes that the fast one kept."""

    name = "square-wave"
    title = "figure 5: three layers make a square wave, with fewer points in deeper ones"

    def settings(self, scope: Scope, rows: Sequence[Row]) -> list[Row]:
        few = scope.seeds or (1 if scope.quick else None)
        steps = QUICK_STEPS if scope.quick else STEPS
        problem = {"N": N, "sigma": SIGMA, "widths": WIDTHS, "predict_samples": PREDICT_SAMPLES}
        shared = {**problem, "samples": SAMPLES, "steps": steps}
        chosen = {"candidates": CANDIDATES, "alpha": ALPHA, **shared}
        found: list[Row] = []
        for seed in range(few or SEEDS):
            found.append({"kind": "paper", "seed": seed, **chosen, **PAPER_START})
        for seed in range(few or CHEAP_SEEDS):
            found.append({"kind": "fast", "seed": seed, **chosen, **FAST_START})
            found += [
                {"kind": start, "seed": seed, "sizes": row["sizes"], **shared, **FAST_START}
                for row in rows
                if row["kind"] == "fast" and row["seed"] == seed
                for start in STARTS
            ]
        return found

    def measured(self, settings: Row, scope: Scope) -> Row:
        seed, device = settings["seed"], scope.device
        shape = {"count": settings["N"], "sigma": settings["sigma"]}
        data, test = (_moved(square_wave(seed=s, **shape), device) for s in (seed, seed + 1000))
        generator = torch.Generator(device=device).manual_seed(seed)
        model = _trained(settings, data, generator)
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
        return {**row, **_seen(posterior.cpu(), _moved(data, "cpu"))}

    def draw(self, rows: Sequence[Row], path: Path) -> Path:
        return square_wave_picture(rows, path, drawn=DRAWN)

    def claims(self, rows: Sequence[Row]) -> list[str]:
        lines = []
        for kind, name in PROCEDURE_NAMES.items():
            sizes = [row["sizes"] for row in rows if row["kind"] == kind]
            means = [fmean(column) for column in zip(*sizes, strict=True)]
            ordered = sum(a > b > c for a, b, c in sizes)
            lines.append(
                claim(
                    f"the deeper the layer the fewer points, {name}",
                    agrees=means[0] > means[1] > means[2],
                    found=", ".join(f"{mean:.1f}" for mean in means)
                    + f" points on average, strictly fewer in {ordered} of {len(sizes)} seeds",
                )
            )
        return [*lines, *_equal_sizes(rows), _density_line(rows)]


def _equal_sizes(rows: Sequence[Row]) -> list[str]:
    found: dict[str, dict[int, float]] = {start: {} for start in ("fast", *STARTS)}
    for row in rows:
        found.get(row["kind"], {})[row["seed"]] = row["log_density"]
    return equal_size_claims(found.pop("fast"), found, each="seed")


def _density_line(rows: Sequence[Row]) -> str:
    words = []
    for kind in (*PROCEDURE_NAMES, *STARTS):
        nats = [row["log_density"] for row in rows if row["kind"] == kind]
        if nats:
            spread = f"{min(nats):.2f} to {max(nats):.2f}"
            words.append(f"{kind} {fmean(nats):.2f} ({spread})")
    return "test log density in nats a row, mean (range over seeds): " + ", ".join(words)


def _trained(settings: Row, data: Dataset, generator: torch.Generator) -> DeepGP:
    kind, steps = settings["kind"], settings["steps"]
    if kind in STARTS:
        sizes, half = settings["sizes"], _half(steps)
        rates = settings["learning_rate"], settings["samples"], settings["natural_rate"]
        return train_held(
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
    if settings["kind"] == "paper":
        phases = {"joint" if name == "process" else name: count for name, count in steps.items()}
        rate = settings["learning_rate"]
        return PaperSchedule(alpha, samples=samples, learning_rate=rate, **phases)
    half = _half(steps)
    return FastSchedule(
        FixedAlpha(alpha),
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
    """Of as many updates of all layers as the paper's procedure takes."""
    return (steps["pre"] + steps["process"] + steps["post"]) // 2


def _model(settings: Row, data: Dataset, points: Float[Tensor, "K 1"]) -> DeepGP:
    """Zero-mean layers, kernels' hyper-parameters at 1."""

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
def _seen(posterior: DeepPosterior, data: Dataset) -> Row:
    """Each layer's function with its points, and the composed density, coarsely."""
    grid, layers = _widened(data.X[:, 0]), []
    for layer in posterior.layers:
        layers.append(curve_row(_curve(layer, grid)))
        image = layer.marginals(grid[:, None], layer.points())
        grid = _widened(image.mean[:, 0])
    return {
        "x": rounded(data.X[:, 0]),
        "y": rounded(data.Y[:, 0]),
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
    """Shades from 0 to 99, and the lines of 5 and 95 %."""
    x = torch.linspace(data.X.min().item(), data.X.max().item(), 100, dtype=torch.float64)
    y = torch.linspace(-1.6, 1.6, 49, dtype=torch.float64)
    nats = torch.stack(
        [posterior.log_density(x[:, None], level.expand(len(x), 1))[:, 0] for level in y]
    )
    # Square roots: a sharp plateau would leave the jumps white.
    shades = (nats - nats.max()).mul(0.5).exp()
    low, high = posterior.quantiles(x[:, None], x.new_tensor([0.05, 0.95]))[:, :, 0]
    return {
        "x": rounded(x),
        "y": rounded(y),
        "shades": (99 * shades).round().int().tolist(),
        "low": rounded(low),
        "high": rounded(high),
    }


def _widened(values: Float[Tensor, " N"]) -> Float[Tensor, " G"]:
    low, high = values.min().item(), values.max().item()
    margin = 0.1 * (high - low)
    return torch.linspace(low - margin, high + margin, 120, dtype=values.dtype)
