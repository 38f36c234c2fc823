"""Figure 5 of the paper: three layers make a square wave, with fewer points the deeper they lie.

    python -m winnowgp.experiments.square_wave RESULTS.jsonl PICTURE.png

The paper's procedure and the fast one choose among 50 candidates a layer (α = 0.5); models of the
sizes that the fast one kept, with points at random rows or k-means centres and as many updates,
show what the choice is worth.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import GaussianLikelihood
from jaxtyping import Float
from matplotlib.figure import Figure
from sklearn.cluster import KMeans
from torch import Tensor

from winnowgp.data import Dataset
from winnowgp.estimators import kernel_from
from winnowgp.experiments.runs import Row, Runs
from winnowgp.models import DeepGP, DeepPosterior, deep_layers
from winnowgp.plots import Curve, DensityMap, draw_curve, draw_density, saved, styled
from winnowgp.training import (
    DeepFast,
    DeepSchedule,
    DeepThreePhases,
    LayerAlphas,
    LayerTraining,
    Parts,
    deep_silent,
    estimated_bound,
    fit_deep,
    train_layerwise,
)

N, CANDIDATES, LAYERS, ALPHA, SAMPLES = 200, 50, 3, 0.5, 4
KINDS = ("paper", "fast", "random", "kmeans")


@final
@dataclass(frozen=True, slots=True)
class Steps:
    """Numbers of updates."""

    layerwise: int = 200
    pre: int = 1000
    process: int = 500
    post: int = 1000


def square_wave(*, seed: int, count: int = N) -> Dataset:
    """Three periods of a square wave with a little noise, rows evenly spread and standardised."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.linspace(0, 3, count, dtype=torch.float64)[:, None]
    level = torch.where((x + 0.25) % 1 < 0.5, 1.0, -1.0).to(x)
    noise = 0.05 * torch.randn(x.shape, generator=generator, dtype=x.dtype)
    return Dataset.of((x - x.mean()) / x.std(), level + noise)


def run_square_wave(runs: Runs, *, seed: int, steps: Steps) -> dict[str, DeepPosterior]:
    """Fit every kind, add a row each, and return the predictors."""
    data, test = square_wave(seed=seed), square_wave(seed=seed + 1000)
    found: dict[str, DeepPosterior] = {}
    sizes: tuple[int, ...] = ()
    for kind in KINDS:
        generator = torch.Generator().manual_seed(seed)
        if kind in ("paper", "fast"):
            model = _model(data, _points("random", data, CANDIDATES, generator))
            fitted = fit_deep(model, data, schedule=_schedule(kind, steps), generator=generator)
            model, bound = fitted.model, fitted.bound
            sizes = model.sizes
        else:
            model = _held(kind, data, sizes, steps, generator)
            bound = estimated_bound(model, data, generator=generator, samples=32)
        posterior = model.posterior(samples=100)
        with torch.no_grad():
            density = posterior.log_density(test.X, test.Y).mean().item()
        row: Row = {
            "kind": kind,
            "seed": seed,
            "sizes": list(model.sizes),
            "elbo": bound / data.N,
            "log_density": density,
        }
        runs.add(row)
        found[kind] = posterior
    return found


def _schedule(kind: str, steps: Steps) -> DeepSchedule:
    if kind == "paper":
        return DeepThreePhases(
            ALPHA,
            layerwise=steps.layerwise,
            pre=steps.pre,
            process=steps.process,
            post=steps.post,
            samples=SAMPLES,
        )
    half = (steps.pre + steps.process + steps.post) // 2
    return DeepFast(
        LayerAlphas(ALPHA),
        layerwise=steps.layerwise,
        pre=half,
        post=half,
        learning_rate=0.01,
        natural_rate=0.05,
        samples=SAMPLES,
    )


def _held(
    kind: str, data: Dataset, sizes: tuple[int, ...], steps: Steps, generator: torch.Generator
) -> DeepGP:
    """A model whose points nobody chose, trained as the fast schedule trains."""
    model = _model(data, _points(kind, data, max(sizes), generator))
    model = model.prune(
        [torch.arange(layer.K) < M for layer, M in zip(model.layers, sizes, strict=True)]
    )
    training = LayerTraining(0.01, SAMPLES, 0.05)
    told: dict[str, Any] = {"generator": generator, "on_progress": deep_silent}
    train_layerwise(model, data, training=training, steps=steps.layerwise, batch_size=None, **told)
    half = (steps.pre + steps.process + steps.post) // 2
    parts = Parts(data, None, generator)
    training.run(model, parts, "train", steps=half, **told)
    LayerTraining(0.01, SAMPLES, 0.05, cooling=0.03).run(model, parts, "cool", steps=half, **told)
    return model


def _points(
    kind: str, data: Dataset, count: int, generator: torch.Generator
) -> Float[Tensor, "K 1"]:
    if kind == "kmeans":
        centres = KMeans(count, n_init="auto", random_state=0).fit(data.X.numpy()).cluster_centers_
        return torch.from_numpy(centres)
    return data.X[torch.randperm(data.N, generator=generator)[:count]]


def _model(data: Dataset, points: Float[Tensor, "K 1"]) -> DeepGP:
    """Zero-mean layers of width one, hyper-parameters at 1, each layer first fitted alone."""

    def kernel(number: int, inputs: int) -> Kernel:
        return kernel_from("rbf", inputs)

    layers = deep_layers(data.X, points, kernel=kernel, widths=(1,) * LAYERS, hidden_mean="zero")
    likelihood = GaussianLikelihood()
    likelihood.noise = torch.tensor(0.1)
    return DeepGP(layers, likelihood=likelihood)


def square_wave_picture(posterior: DeepPosterior, data: Dataset, path: Path) -> Path:
    """Each layer's function with its points, then the composed density over the data."""
    with styled(), torch.no_grad():
        figure = Figure(figsize=(11, 2.7))
        panels = figure.subplots(1, LAYERS + 1, width_ratios=[1] * LAYERS + [1.6])
        grid = _widened(data.X[:, 0])
        for number, layer in enumerate(posterior.layers):
            ax = panels[number]
            draw_curve(_curve(layer, grid), ax=ax)
            ax.set_title(f"layer {number + 1}: {layer.K} points")
            ax.set(xlabel="x" if number == 0 else f"output of layer {number}")
            points = layer.points()
            image = layer.marginals(grid[:, None], points)
            grid = _widened(image.mean[:, 0])
        draw_density(_density(posterior, data), data.X[:, 0], data.Y[:, 0], ax=panels[-1])
        panels[-1].set_title("posterior density")
        panels[-1].legend(loc="upper center", ncols=2)
    return saved(figure, path)


def _curve(layer: Any, grid: Float[Tensor, " G"]) -> Curve:
    points = layer.points()
    along, at = layer.marginals(grid[:, None], points), layer.marginals(layer.candidates, points)
    return Curve(
        grid, along.mean[:, 0], along.variance[:, 0].sqrt(), layer.candidates[:, 0], at.mean[:, 0]
    )


def _density(posterior: DeepPosterior, data: Dataset) -> DensityMap:
    x = torch.linspace(data.X.min().item(), data.X.max().item(), 300, dtype=torch.float64)
    y = torch.linspace(-1.6, 2.1, 186, dtype=torch.float64)
    nats = torch.stack(
        [posterior.log_density(x[:, None], level.expand(len(x), 1))[:, 0] for level in y]
    )
    edges = posterior.quantiles(x[:, None], torch.tensor([0.05, 0.95], dtype=torch.float64))
    # Shades on a scale of their own: a sharp plateau would leave the jumps white.
    return DensityMap(x, y, nats.exp().sqrt(), edges[0, :, 0], edges[1, :, 0])


def _widened(values: Float[Tensor, " N"]) -> Float[Tensor, " G"]:
    low, high = values.min().item(), values.max().item()
    margin = 0.1 * (high - low)
    return torch.linspace(low - margin, high + margin, 200, dtype=values.dtype)


if __name__ == "__main__":
    predictors = run_square_wave(Runs(Path(sys.argv[1])), seed=0, steps=Steps())
    square_wave_picture(predictors["fast"], square_wave(seed=0), Path(sys.argv[2]))
