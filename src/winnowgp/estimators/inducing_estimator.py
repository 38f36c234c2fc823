"""What every estimator with inducing points shares: units, the fit, and what it found."""

import os
from abc import ABC
from collections.abc import Callable
from copy import copy, deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from gpytorch.kernels import Kernel
from jaxtyping import Float
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from winnowgp.data import Source, StandardisedSource, Standardiser
from winnowgp.errors import InputError
from winnowgp.estimators.kernels import kernel_from
from winnowgp.estimators.points_request import PointsRequest
from winnowgp.estimators.resumable import Folder, checkpoint_of, drawn_seed, journal_of
from winnowgp.estimators.source_rows import refuse_source
from winnowgp.estimators.tensors import tensor
from winnowgp.io import save
from winnowgp.models import InducingModel, Prediction
from winnowgp.selection import Frontier
from winnowgp.training import Fit, OnProgress, fit, row_identity

# Rows predicted at once: bounds memory at this many times the number of points.
ROWS = 16_384


class InducingEstimator(BaseEstimator, ABC):
    """An estimator that keeps some of its candidates for inducing points.

    Its children say what their targets are and which model they want; everything that concerns the
    points is here. Their arguments are listed in each child, as scikit-learn asks.
    """

    kernel: str | Kernel
    alpha: str | float
    tolerance: float
    max_points: int | None
    max_predict_us: float | None
    candidates: str | ArrayLike
    n_candidates: int | None
    schedule: str
    epochs: tuple[int, int, int]
    batch_size: int | None
    random_state: int | np.random.RandomState | None
    device: str
    on_progress: OnProgress
    checkpoint: Folder | None
    n_features_in_: int
    feature_names_in_: Any

    def _fit(
        self,
        rows: Source,
        *,
        model: Callable[[Kernel, Tensor], InducingModel],
        n_candidates: int,
    ) -> Fit[InducingModel]:
        """Fit a model to inputs as users have them and targets that it understands.

        Args:
            rows: in the user's units, in memory and merged, so that repeating rows and weighting
                them come to the same; or in standard units already.
            model: makes one of a kernel and candidates, both for standardised inputs.
            n_candidates: how many candidates the fast schedule has unless the user says.
        """
        request, device = self._request(n_candidates)
        checkpoint = checkpoint_of(self.checkpoint)
        about = row_identity(rows, kept=checkpoint is not None)
        said = {"inputs": "X", "targets": "y", "weights": "sample_weight"}
        told = {said.get(name, name): part for name, part in about.items()}
        journal = journal_of(self, checkpoint, ranks=rows.ranks, **told)
        seed = drawn_seed(self.random_state, journal)
        generator = torch.Generator(device=device).manual_seed(seed)
        if isinstance(rows, StandardisedSource):
            # Kernels and candidates that users name are on the CPU until the model is made.
            units, data = rows.x_units.to(torch.device("cpu")), rows.converted()
        else:
            held = rows.in_memory("this fit")
            units = Standardiser.of(held.X, weights=held.weights)
            data = rows.alike(replace(held, X=units.forward(held.X)))
        kernel = self._kernel(units.scale)
        points = request.locations(data, units, kernel=kernel, seed=seed)
        made = model(kernel, points).to(device)
        data = data.to(device)
        fitted = fit(
            made,
            data,
            schedule=request.plan(made, data, journal),
            generator=generator,
            on_progress=self.on_progress,
            checkpoint=checkpoint,
        )
        journal.finish()
        self._x_units = plain_units(units)
        self._keep(fitted, data.observations)
        return fitted

    def _request(self, n_candidates: int) -> tuple[PointsRequest, torch.device]:
        """How many points, and where the fit is to be; an error that says what to do if not."""
        request = PointsRequest.checked(
            alpha=self.alpha,
            tolerance=self.tolerance,
            max_points=self.max_points,
            max_predict_us=self.max_predict_us,
            candidates=self.candidates,
            n_candidates=self.n_candidates,
            schedule=self.schedule,
            epochs=self.epochs,
            batch_size=self.batch_size,
            default_candidates=n_candidates,
        )
        return request, _checked_device(self.device)

    def _kernel(self, scale: Float[Tensor, " D"]) -> Kernel:
        """For standardised inputs, of which these are the units."""
        names = getattr(self, "feature_names_in_", ())
        columns = {str(name): [place] for place, name in enumerate(names)}
        return kernel_from(self.kernel, len(scale), columns=columns, scale=scale)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write to a file that `winnowgp.load` reads; its size grows with M, not with N."""
        return save(self, path)

    def _keep(self, fitted: Fit[InducingModel], N: int | float) -> None:
        """What was learnt about points, in the user's units."""
        selection, candidates = fitted.selection, fitted.candidates.cpu().double()
        frontier = selection.frontier
        self.posterior_ = fitted.posterior.cpu().double()
        self.kernel_ = self.posterior_.kernel
        self.elbo_ = fitted.bound
        self.given_up_ = fitted.given_up / N
        self.alpha_ = selection.alpha
        self.frontier_ = (
            None
            if frontier is None
            else Frontier(frontier.bounds.cpu(), frontier.masks.cpu(), frontier.N)
        )
        self.n_inducing_ = fitted.posterior.M
        self.inducing_points_ = self._x_units.inverse(self.posterior_.Z).numpy()
        self.candidates_ = self._x_units.inverse(candidates).numpy()
        self.inclusion_ = selection.inclusion.cpu().numpy()

    def _inputs(self, X: Any) -> Tensor:
        """Checked inputs in standard units, where the predictor is."""
        check_is_fitted(self)
        refuse_source(X)
        X = validate_data(self, X, dtype=np.float64, reset=False)
        return self._x_units.forward(tensor(X)).to(self.posterior_.Z.device)

    @torch.no_grad()
    def _predicted(self, inputs: Tensor, *, observed: bool) -> Prediction:
        """Mean and variance of each row, in standard units."""
        parts = [self.posterior_.predict(rows, observed=observed) for rows in inputs.split(ROWS)]
        mean, variance = ([part.mean for part in parts], [part.variance for part in parts])
        return Prediction(torch.cat(mean).cpu(), torch.cat(variance).cpu())

    @torch.no_grad()
    def _log_density(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Of each row and target, in standard units."""
        pairs = zip(inputs.split(ROWS), targets.to(inputs.device).split(ROWS), strict=True)
        return torch.cat([self.posterior_.log_density(x, y) for x, y in pairs]).cpu()


Estimator = TypeVar("Estimator", bound=InducingEstimator)


def predicting_on(device: str, estimator: Estimator) -> Estimator:
    """A copy of a fitted estimator that computes predictions on another device.

    Args:
        device: "cpu" or "cuda", or "auto" for a GPU if there is one.
    """
    moved = copy(estimator)
    moved.posterior_ = deepcopy(estimator.posterior_).to(_checked_device(device))
    return moved


def plain_units(units: Standardiser) -> Standardiser:
    """As predictions need them, whatever a source's rows were."""
    return Standardiser(units.shift.cpu().double(), units.scale.cpu().double())


def _checked_device(name: str) -> torch.device:
    """A device that this machine has; "auto" is a GPU if it has one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, TypeError, NotImplementedError) as error:
        raise InputError(
            "`device` must be one this machine has, such as 'cpu' or 'cuda', or 'auto'; got "
            f"{name!r}: {str(error).splitlines()[0]}"
        ) from error
    return device
