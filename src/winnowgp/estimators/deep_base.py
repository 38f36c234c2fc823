"""The base of deep estimators."""

import os
from abc import ABC
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import sqrt
from numbers import Integral
from pathlib import Path
from typing import Any, TypeAlias, final

import numpy as np
import torch
from gpytorch.kernels import Kernel, ScaleKernel
from gpytorch.likelihoods import Likelihood, PoissonLikelihood, SoftmaxLikelihood
from numpy.typing import NDArray
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from winnowgp.data import Dataset, Source, Standardiser
from winnowgp.errors import InputError
from winnowgp.estimators.kernels import kernel_from
from winnowgp.estimators.validation import (
    Folder,
    checkpoint_of,
    drawn_seed,
    has_noise,
    open_checkpoint_log,
    positive,
    refuse_source,
    tensor,
    whole,
)
from winnowgp.io import save
from winnowgp.models import DeepGP, DeepLayer, Prediction, deep_layers
from winnowgp.models.deep_layer import HIDDEN_MEANS
from winnowgp.models.likelihoods import observation_model
from winnowgp.training import (
    Callbacks,
    DeepTraining,
    FastSchedule,
    FixedAlpha,
    Goal,
    MaxCost,
    PaperSchedule,
    Schedule,
    Tolerance,
    fit,
)
from winnowgp.training.checkpoint import CheckpointLog
from winnowgp.training.initialization import best_level
from winnowgp.training.layer_training import select_start

# What a user said about the layers of a deep model, checked, and turned into layers and a plan.


FAST_STEPS = (100, 1000, 1000)

PAPER_STEPS = (200, 1000, 500, 1500)
# Prior variance of what a hidden function adds to the identity, at the start.
_HIDDEN_VARIANCE = 0.1

LayerKernel: TypeAlias = str | Kernel | Sequence[str | Kernel]

"""By name or as an object, for all layers or for each."""


@final
@dataclass(frozen=True, slots=True)
class LayersRequest:
    """The arguments of a deep estimator that concern its layers and their points."""

    layers: int
    widths: tuple[int, ...] | None
    """Of the hidden layers; None for as many as there are inputs."""
    kernels: tuple[str | Kernel, ...]
    skip_connections: bool
    n_candidates: int
    goal: Goal
    schedule: str
    steps: tuple[int, ...]
    batch_size: int | None
    samples: int
    predict_samples: int

    @classmethod
    def checked(
        cls,
        *,
        layers: Any,
        width: Any,
        kernel: Any,
        skip_connections: Any,
        alpha: Any,
        tolerance: Any,
        max_cost: Any,
        n_candidates: Any,
        schedule: Any,
        epochs: Any,
        batch_size: Any,
        samples: Any,
        predict_samples: Any,
    ) -> "LayersRequest":
        """The request, if it makes sense; an error that says what to do if not."""
        L = whole("layers", layers)
        if not isinstance(schedule, str) or schedule not in ("fast", "paper"):
            raise InputError(f"`schedule` must be 'fast' or 'paper'; got {schedule!r}.")
        return cls(
            layers=L,
            widths=_widths(width, L),
            kernels=_kernels(kernel, L),
            skip_connections=bool(skip_connections),
            n_candidates=whole("n_candidates", n_candidates),
            goal=_goal(alpha, tolerance, max_cost, L, schedule),
            schedule=schedule,
            steps=_steps(epochs, schedule),
            batch_size=None if batch_size is None else whole("batch_size", batch_size),
            samples=whole("samples", samples),
            predict_samples=whole("predict_samples", predict_samples),
        )

    def model(
        self,
        data: Dataset,
        *,
        likelihood: Likelihood,
        outputs: int,
        hidden_mean: str,
        generator: torch.Generator,
    ) -> DeepGP:
        """A deep model at its start, candidates at random rows."""
        order = torch.randperm(data.N, generator=generator)
        points = data.X[order[: self.n_candidates]]
        widths = self.widths or (data.D,) * (self.layers - 1)

        def kernel(number: int, inputs: int) -> Kernel:
            hidden = number < self.layers - 1 and hidden_mean == "identity"
            return _started(self.kernels[number], inputs, hidden)

        layers = deep_layers(
            data.X,
            points,
            kernel=kernel,
            widths=(*widths, outputs),
            skip_connections=self.skip_connections,
            hidden_mean=hidden_mean,
        )
        model = DeepGP(
            layers, likelihood=likelihood, targets=data.P, skip_connections=self.skip_connections
        )
        if not has_noise(likelihood) and not isinstance(likelihood, SoftmaxLikelihood):
            _lift(model.layers[-1], best_level(likelihood, data), likelihood, data)
        return model

    def plan(self) -> Schedule:
        """The schedule that does what was asked for."""
        if self.schedule == "fast":
            layerwise, pre, post = self.steps
            return FastSchedule(
                self.goal,
                deep=DeepTraining(
                    layerwise=layerwise,
                    pre=pre,
                    post=post,
                    samples=self.samples,
                    batch_size=self.batch_size,
                ),
            )
        assert isinstance(self.goal, FixedAlpha)
        layerwise, pre, joint, post = self.steps
        return PaperSchedule(
            self.goal.alpha,
            layerwise=layerwise,
            pre=pre,
            joint=joint,
            post=post,
            samples=self.samples,
            batch_size=self.batch_size,
        )


def _started(kernel: str | Kernel, inputs: int, hidden: bool) -> Kernel:
    """A kernel in words, each lengthscale √columns: two typical rows are √2 of that apart."""
    made = kernel_from(kernel, inputs)
    if not isinstance(kernel, str):
        return made
    for part in made.modules():
        if isinstance(part, ScaleKernel):
            part.outputscale = _HIDDEN_VARIANCE if hidden else 1.0
        elif isinstance(part, Kernel) and part.has_lengthscale:
            part.initialize(lengthscale=sqrt(part.lengthscale.shape[-1]))
    return made


@torch.no_grad()
def _lift(last: DeepLayer, level: Tensor, likelihood: Likelihood, data: Dataset) -> None:
    """Counts may be far from zero and wide, further than many small steps would get."""
    last.level.fill_(level)
    if isinstance(last.kernel, ScaleKernel) and isinstance(likelihood, PoissonLikelihood):
        # Beyond small counts the rate is the function itself.
        last.kernel.outputscale = data.Y.var(correction=0).clamp_min(1.0)


def _goal(alpha: Any, tolerance: Any, max_cost: Any, L: int, schedule: str) -> Goal:
    automatic = isinstance(alpha, str) and alpha == "auto"
    if not automatic and max_cost is not None:
        raise InputError(
            "say how many points in one way only: a number for `alpha`, or `max_cost`."
        )
    if schedule == "paper" and automatic:
        raise InputError(
            "`schedule='paper'` needs a number for `alpha`, such as 1.0, or one for each layer; "
            "the paper has no other way to say how many points."
        )
    if not automatic:
        many = isinstance(alpha, tuple | list)
        given = tuple(positive("alpha", a, hint=_ALPHA_HINT) for a in (alpha if many else [alpha]))
        if many and len(given) != L:
            raise InputError(
                f"`alpha` must be one number or one for each of {L} layers; got {len(given)}."
            )
        return FixedAlpha(given if many else given[0])
    if max_cost is not None:
        hint = f"It is Σ M² over the layers, of which there are {L}."
        cost = positive("max_cost", max_cost, hint=hint)
        if cost < L:
            raise InputError(
                f"`max_cost` must allow one point in each of {L} layers; got {max_cost!r}."
            )
        return MaxCost(cost)
    return Tolerance(positive("tolerance", tolerance, hint="It is in nats per observation."))


_ALPHA_HINT = "Larger values keep fewer points; 'auto' derives it from `tolerance`."


def _widths(width: Any, L: int) -> tuple[int, ...] | None:
    if width is None:
        return None
    given = tuple(width) if isinstance(width, tuple | list) else (width,) * (L - 1)
    if len(given) != L - 1:
        raise InputError(
            f"`width` must be one number or one for each of {L - 1} hidden layers; got {width!r}."
        )
    return tuple(whole("width", w) for w in given)


def _kernels(kernel: Any, L: int) -> tuple[str | Kernel, ...]:
    given = tuple(kernel) if isinstance(kernel, tuple | list) else (kernel,) * L
    if len(given) != L:
        raise InputError(f"`kernel` must be one or one for each of {L} layers; got {len(given)}.")
    return given


def _steps(epochs: Any, schedule: str) -> tuple[int, ...]:
    usual = FAST_STEPS if schedule == "fast" else PAPER_STEPS
    if epochs is None:
        return usual
    given = tuple(epochs) if isinstance(epochs, tuple | list) else ()
    if len(given) != len(usual) or not all(isinstance(n, Integral) and int(n) >= 0 for n in given):
        phases = "layer by layer, all points, kept points"
        if schedule == "paper":
            phases = "layer by layer, all points, learning inclusion, kept points"
        raise InputError(
            f"`epochs` must be {len(usual)} whole numbers of steps ({phases}); got {epochs!r}."
        )
    return tuple(int(n) for n in given)


# What both deep estimators share: units, the choice of a start, the fit, and what it found.


# Largest array while predicting: rows times samples times outputs times points of a layer.
NUMBERS = 2**24


class DeepEstimator(BaseEstimator, ABC):
    """An estimator of several layers, each of which keeps some of its candidates."""

    layers: int
    width: int | tuple[int, ...] | None
    kernel: str | Kernel | tuple[str | Kernel, ...]
    hidden_mean: str
    skip_connections: bool
    alpha: str | float | tuple[float, ...]
    tolerance: float
    max_cost: float | None
    n_candidates: int
    schedule: str
    epochs: tuple[int, ...] | None
    batch_size: int | None
    samples: int
    predict_samples: int
    random_state: int | np.random.RandomState | None
    callbacks: Callbacks
    checkpoint: Folder | None

    def _fit(self, given: Source, likelihood: Likelihood) -> None:
        """Fit to inputs as users have them and targets that the likelihood understands.

        Args:
            given: rows in memory, merged, so that repeating rows and weighting them come to the
                same.
        """
        rows = given.require_dataset("a deep model")
        request = LayersRequest.checked(
            layers=self.layers,
            width=self.width,
            kernel=self.kernel,
            skip_connections=self.skip_connections,
            alpha=self.alpha,
            tolerance=self.tolerance,
            max_cost=self.max_cost,
            n_candidates=self.n_candidates,
            schedule=self.schedule,
            epochs=self.epochs,
            batch_size=self.batch_size,
            samples=self.samples,
            predict_samples=self.predict_samples,
        )
        if not isinstance(self.hidden_mean, str) or self.hidden_mean not in ("auto", *HIDDEN_MEANS):
            raise InputError(
                f"`hidden_mean` must be one of auto, {', '.join(HIDDEN_MEANS)}; "
                f"got {self.hidden_mean!r}."
            )
        checkpoint = checkpoint_of(self.checkpoint)
        checkpoint_log = open_checkpoint_log(
            self,
            checkpoint,
            process_group=given.process_group,
            X=rows.X,
            y=rows.Y,
            sample_weight=rows.weights,
        )
        seed = drawn_seed(self.random_state, checkpoint_log)
        generator = torch.Generator().manual_seed(seed)
        units = Standardiser.of(rows.X, weights=rows.weights)
        data = replace(rows, X=units.forward(rows.X))
        outputs = observation_model(likelihood).num_latents(data.P)
        names = HIDDEN_MEANS if self.hidden_mean == "auto" else (self.hidden_mean,)
        starts = [
            request.model(
                data,
                likelihood=likelihood,
                outputs=outputs,
                hidden_mean=name,
                generator=torch.Generator().manual_seed(seed),
            )
            for name in (names if request.layers > 1 else names[:1])
        ]
        shared = given.with_rows(data)
        fitted = fit(
            self._raced(starts, shared, request, generator, checkpoint_log),
            shared,
            schedule=request.plan(),
            generator=generator,
            callbacks=self.callbacks,
            checkpoint=checkpoint_log,
        )
        checkpoint_log.finish()
        self._x_scaler = units
        self.posterior_ = fitted.model.posterior(samples=request.predict_samples)
        self.elbo_ = fitted.elbo
        self.elbo_gap_ = fitted.elbo_gap / data.observations
        self.n_inducing_ = self.posterior_.M
        kept = [layer.candidates.detach().clone() for layer in self.posterior_.layers]
        self.inducing_points_ = seen_outside(kept, units)
        self.candidates_ = seen_outside(fitted.candidates, units)
        self.inclusion_ = tuple(found.inclusion.numpy() for found in fitted.selections)
        self.alpha_ = tuple(found.alpha for found in fitted.selections)
        self.frontiers_ = tuple(found.frontier for found in fitted.selections)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write to a file that `winnowgp.load` reads; its size grows with M, not with N."""
        return save(self, path)

    def _raced(
        self,
        starts: list[DeepGP],
        data: Source,
        request: LayersRequest,
        generator: torch.Generator,
        checkpoint: CheckpointLog,
    ) -> DeepGP:
        if len(starts) == 1:
            return starts[0]
        layerwise, steps = request.steps[0], request.steps[1] // 5
        return select_start(
            starts,
            data,
            layerwise=layerwise,
            steps=steps,
            samples=request.samples,
            batch_size=request.batch_size,
            generator=generator,
            callbacks=self.callbacks,
            checkpoint=checkpoint,
        )

    @property
    def _rows(self) -> int:
        """Rows predicted at once, as memory allows."""
        posterior = self.posterior_
        hidden = sum(layer.P for layer in posterior.layers[:-1])
        samples = max(posterior.samples, 4 * hidden)
        return max(1, NUMBERS // (samples * max(layer.P * layer.K for layer in posterior.layers)))

    def _inputs(self, X: Any) -> Tensor:
        """Checked inputs in standard units."""
        check_is_fitted(self)
        refuse_source(X)
        X = validate_data(self, X, dtype=np.float64, reset=False)
        return self._x_scaler.forward(tensor(X))

    @torch.no_grad()
    def _predicted(self, inputs: Tensor, *, observed: bool, method: str) -> Prediction:
        """Mean and variance of each row, in standard units."""
        if method not in ("mixture", "matched"):
            raise InputError(f"`method` must be 'mixture' or 'matched'; got {method!r}.")
        posterior = self.posterior_
        predict = posterior.predict if method == "mixture" else posterior.predict_matched
        parts = [predict(rows, observed=observed) for rows in inputs.split(self._rows)]
        return Prediction(
            torch.cat([part.mean for part in parts]), torch.cat([part.variance for part in parts])
        )

    @torch.no_grad()
    def _log_density(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Of each row and target, in standard units."""
        pairs = zip(inputs.split(self._rows), targets.split(self._rows), strict=True)
        return torch.cat([self.posterior_.log_density(x, y) for x, y in pairs])


def seen_outside(layers: Sequence[Tensor], units: Standardiser) -> tuple[NDArray[np.float64], ...]:
    """Points of each layer; those of the first in the user's units, the others have none."""
    first, *others = layers
    return (units.inverse(first).numpy(), *(points.numpy() for points in others))
