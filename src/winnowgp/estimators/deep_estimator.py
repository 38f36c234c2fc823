"""What both deep estimators share: units, the choice of a start, the fit, and what it found."""

import os
from abc import ABC
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood
from numpy.typing import NDArray
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from winnowgp.data import Source, Standardiser
from winnowgp.errors import InputError
from winnowgp.estimators.layers_request import LayersRequest
from winnowgp.estimators.resumable import Folder, checkpoint_of, drawn_seed, journal_of
from winnowgp.estimators.source_rows import refuse_source
from winnowgp.estimators.tensors import tensor
from winnowgp.io import save
from winnowgp.models import HIDDEN_MEANS, DeepGP, Prediction, latent_functions
from winnowgp.training import Checkpoint, OnDeepProgress, deep_race, fit_deep

# Largest array while predicting: rows times samples times outputs times points of a layer.
NUMBERS = 2**24


class DeepEstimator(BaseEstimator, ABC):
    """An estimator of several layers, each of which keeps some of its candidates."""

    layers: int
    width: int | tuple[int, ...] | None
    kernel: str | Kernel | tuple[str | Kernel, ...]
    hidden_mean: str
    connected: bool
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
    on_progress: OnDeepProgress
    checkpoint: Folder | None

    def _fit(self, given: Source, likelihood: Likelihood) -> None:
        """Fit to inputs as users have them and targets that the likelihood understands.

        Args:
            given: rows in memory, merged, so that repeating rows and weighting them come to the
                same.
        """
        rows = given.in_memory("a deep model")
        request = LayersRequest.checked(
            layers=self.layers,
            width=self.width,
            kernel=self.kernel,
            connected=self.connected,
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
        journal = journal_of(
            self,
            checkpoint,
            ranks=given.ranks,
            X=rows.X,
            y=rows.Y,
            sample_weight=rows.weights,
        )
        seed = drawn_seed(self.random_state, journal)
        generator = torch.Generator().manual_seed(seed)
        units = Standardiser.of(rows.X, weights=rows.weights)
        data = replace(rows, X=units.forward(rows.X))
        outputs = latent_functions(likelihood, data.P)
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
        shared = given.alike(data)
        fitted = fit_deep(
            self._raced(starts, shared, request, generator, checkpoint),
            shared,
            schedule=request.plan(),
            generator=generator,
            on_progress=self.on_progress,
            checkpoint=checkpoint,
        )
        journal.finish()
        self._x_units = units
        self.posterior_ = fitted.model.posterior(samples=request.predict_samples)
        self.elbo_ = fitted.bound
        self.given_up_ = fitted.given_up / data.observations
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
        checkpoint: Checkpoint | None,
    ) -> DeepGP:
        if len(starts) == 1:
            return starts[0]
        layerwise, steps = request.steps[0], request.steps[1] // 5
        return deep_race(
            starts,
            data,
            layerwise=layerwise,
            steps=steps,
            samples=request.samples,
            batch_size=request.batch_size,
            generator=generator,
            on_progress=self.on_progress,
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
        return self._x_units.forward(tensor(X))

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
