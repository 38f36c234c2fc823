"""Figure 1 of the paper on the package's own data."""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from winnowgp.data import Dataset, hills
from winnowgp.estimators import kernel_from
from winnowgp.models import Posterior, SparseGP
from winnowgp.plots.illustration import Illustration, Midway
from winnowgp.plots.posterior_1d import Curve
from winnowgp.point_processes import Bernoulli, SquaredCardinality
from winnowgp.training import Adam, Fit, OnProgress, Progress, ThreePhases, fit


@dataclass(frozen=True, slots=True)
class Illustrated:
    """The figure's numbers, and the fit behind them."""

    picture: Illustration
    fit: Fit
    full_bound: float
    """The bound with all candidates before any was dropped, in nats."""


@final
class _Watcher:
    """Passes progress on, and keeps the moment in the middle of learning inclusion."""

    def __init__(self, step: int, on_progress: OnProgress) -> None:
        self.step = step
        self.on_progress = on_progress
        self.kept: Progress | None = None

    def __call__(self, progress: Progress) -> None:
        if progress.phase == "inclusion" and progress.step == self.step:
            self.kept = progress
        self.on_progress(progress)


def illustrate(
    *,
    on_progress: OnProgress,
    n_candidates: int = 50,
    alpha: float = 0.2,
    pre: int = 400,
    process: int = 300,
    post: int = 200,
    learning_rate: float = 0.03,
    seed: int = 0,
) -> Illustrated:
    """Train with all candidates, learn which to keep, refit, and remember three moments."""
    data, generator = hills(), torch.Generator().manual_seed(seed)
    chosen = torch.randperm(data.N, generator=generator)[:n_candidates]
    model = SparseGP(kernel_from("rbf", data.D), data.X[chosen])

    def report(step: int, value: float) -> None:
        on_progress(Progress("pre-train", step, pre, value, None, model.candidates.detach()))

    Adam(pre).maximise(
        lambda: model.bound(data),
        [(model.parameters(), learning_rate)],
        scale=data.N,
        on_step=report,
    )
    before = model.posterior(data)
    full_bound = model.bound(data).item()
    watcher = _Watcher(max(process // 4, 1), on_progress)
    schedule = ThreePhases(
        SquaredCardinality(model.K, alpha),
        pre=0,
        process=process,
        post=post,
        learning_rate=learning_rate,
    )
    fitted = fit(model, data, schedule=schedule, generator=generator, on_progress=watcher)

    assert watcher.kept is not None
    picture = Illustration(
        x=data.X[:, 0],
        y=data.Y[:, 0],
        before=_curve(before, data),
        midway=_midway(watcher.kept, generator),
        after=_curve(fitted.posterior, data),
    )
    return Illustrated(picture, fitted, full_bound)


def _midway(progress: Progress, generator: torch.Generator) -> Midway:
    assert progress.inclusion is not None
    draws = Bernoulli.from_inclusion(progress.inclusion).sample(3, generator=generator)
    return Midway(progress.step, progress.candidates[:, 0], progress.inclusion, draws)


def _curve(posterior: Posterior, data: Dataset) -> Curve:
    x = data.X[:, 0]
    grid: Tensor = torch.linspace(float(x.min()), float(x.max()), 400, dtype=x.dtype)
    prediction = posterior.predict(grid[:, None], observed=True)
    return Curve(
        grid=grid,
        mean=prediction.mean[:, 0],
        sd=prediction.variance[:, 0].sqrt(),
        points=posterior.Z[:, 0],
        heights=posterior.predict_mean(posterior.Z)[:, 0],
    )
