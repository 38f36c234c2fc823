"""The base of estimators with one set of inducing points."""

import os
from abc import ABC
from collections.abc import Callable
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import Any, TypeVar, final

import numpy as np
import torch
from gpytorch.kernels import Kernel
from jaxtyping import Float
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from winnowgp.data import Source, Standardiser
from winnowgp.data.scaling import StandardisedSource
from winnowgp.data.sources import sampled_rows
from winnowgp.errors import InputError
from winnowgp.estimators.kernels import kernel_from
from winnowgp.estimators.validation import (
    Folder,
    checkpoint_of,
    drawn_seed,
    open_checkpoint_log,
    positive,
    refuse_source,
    tensor,
    whole,
)
from winnowgp.io import save
from winnowgp.models import Prediction, greedy_variance
from winnowgp.models.base import InducingModel
from winnowgp.point_processes import SquaredCardinality
from winnowgp.selection import Frontier
from winnowgp.training import (
    Callbacks,
    FastSchedule,
    FitResult,
    FixedAlpha,
    Goal,
    MaxPoints,
    PaperSchedule,
    Schedule,
    Tolerance,
    fit,
)
from winnowgp.training.checkpoint import CheckpointLog
from winnowgp.training.fingerprint import row_identity
from winnowgp.training.goals import measured_predict_us, points_within

# What a user said about points, checked, and turned into locations and a plan.


SCHEDULES = ("fast", "paper")

CANDIDATES = ("auto", "greedy", "kmeans", "random")

PAPER_CANDIDATES = 100
# Rows that candidates are looked for in, where that takes more than drawing them.
MOST_ROWS = 4_000


@final
@dataclass(frozen=True, slots=True)
class PointsRequest:
    """The arguments of an estimator that concern inducing points."""

    alpha: float | None
    """None for "auto"."""
    tolerance: float
    max_points: int | None
    max_predict_us: float | None
    candidates: str | Tensor
    n_candidates: int
    schedule: str
    epochs: tuple[int, int, int]
    batch_size: int | None

    @classmethod
    def checked(
        cls,
        *,
        alpha: Any,
        tolerance: Any,
        max_points: Any,
        max_predict_us: Any,
        candidates: Any,
        n_candidates: Any,
        schedule: Any,
        epochs: Any,
        batch_size: Any,
        default_candidates: int,
    ) -> "PointsRequest":
        """The request, if it makes sense; an error that says what to do if not."""
        if not isinstance(schedule, str) or schedule not in SCHEDULES:
            raise InputError(f"`schedule` must be 'fast' or 'paper'; got {schedule!r}.")
        automatic = isinstance(alpha, str) and alpha == "auto"
        strength = None if automatic else positive("alpha", alpha, hint=_ALPHA_HINT)
        most = None if max_points is None else whole("max_points", max_points)
        slowest = None if max_predict_us is None else positive("max_predict_us", max_predict_us)
        if sum(said is not None for said in (strength, most, slowest)) > 1:
            raise InputError(
                "say how many points in one way only: a number for `alpha`, `max_points` or "
                "`max_predict_us`."
            )
        if schedule == "paper" and strength is None:
            raise InputError(
                "`schedule='paper'` needs a number for `alpha`, such as 0.05; the paper has no "
                "other way to say how many points."
            )
        if batch_size is not None and schedule != "paper":
            raise InputError(
                "`batch_size` is for `schedule='paper'`; the fast schedule looks at all rows, in "
                "chunks that fit into memory."
            )
        usual = PAPER_CANDIDATES if schedule == "paper" else default_candidates
        count = usual if n_candidates is None else n_candidates
        return cls(
            alpha=strength,
            tolerance=positive("tolerance", tolerance, hint="It is in nats per observation."),
            max_points=most,
            max_predict_us=slowest,
            candidates=_checked_candidates(candidates),
            n_candidates=whole("n_candidates", count),
            schedule=schedule,
            epochs=_checked_epochs(epochs),
            batch_size=None if batch_size is None else whole("batch_size", batch_size),
        )

    def locations(self, data: Source, units: Standardiser, *, kernel: Kernel, seed: int) -> Tensor:
        """Where points may be, in standard units; none if the schedule is to look for itself."""
        if isinstance(self.candidates, Tensor):
            if self.candidates.shape[1] != data.D:
                raise InputError(
                    f"`candidates` must be [K {data.D}], one column for each of `X`; "
                    f"got shape {list(self.candidates.shape)}."
                )
            return units.forward(self.candidates).to(data.dtype)
        if self.candidates in ("auto", "greedy") and self.schedule == "fast":
            return torch.zeros(0, data.D, dtype=data.dtype)
        generator = torch.Generator().manual_seed(seed)
        count = max(MOST_ROWS, self.n_candidates)
        rows = data.part(sampled_rows(data.N, count, generator)).X.cpu()
        part = rows[:MOST_ROWS]
        if self.candidates == "greedy":
            start = deepcopy(kernel).to(part)
            return part[greedy_variance(start, part, self.n_candidates, given=part[:0])]
        if self.candidates == "kmeans" and len(part.unique(dim=0)) > self.n_candidates:
            from sklearn.cluster import KMeans  # half a second that not all fits need

            clusters = KMeans(self.n_candidates, n_init="auto", max_iter=20, random_state=seed)
            return torch.from_numpy(clusters.fit(part.numpy()).cluster_centers_)
        return rows[: self.n_candidates]

    def plan(self, model: InducingModel, data: Source, checkpoint_log: CheckpointLog) -> Schedule:
        """The schedule that does what was asked for; what a clock decides is in the journal."""
        if self.schedule == "paper":
            assert self.alpha is not None
            pre, joint, post = self.epochs
            prior = SquaredCardinality(model.K, self.alpha)
            return PaperSchedule(prior, pre=pre, joint=joint, post=post, batch_size=self.batch_size)
        return FastSchedule(self._goal(model, data, checkpoint_log), n_candidates=self.n_candidates)

    def _goal(self, model: InducingModel, data: Source, checkpoint_log: CheckpointLog) -> Goal:
        if self.alpha is not None:
            return FixedAlpha(self.alpha)
        if self.max_points is not None:
            return MaxPoints(self.max_points)
        if self.max_predict_us is not None:
            # Read by all processes, and measured by one of them.
            some = data.part(torch.arange(min(data.N, max(1000, self.n_candidates))))
            measured = partial(
                points_within,
                self.max_predict_us,
                predict_us=partial(measured_predict_us, model, some),
                most=min(self.n_candidates, data.N),
            )
            return MaxPoints(checkpoint_log.once(measured))
        return Tolerance(self.tolerance)


_ALPHA_HINT = "Larger values keep fewer points; 'auto' derives it from `tolerance`."


def _checked_candidates(candidates: Any) -> str | Tensor:
    if isinstance(candidates, str):
        if candidates not in CANDIDATES:
            raise InputError(
                f"`candidates` must be one of {', '.join(CANDIDATES)} or locations [K D]; "
                f"got {candidates!r}."
            )
        return candidates
    try:
        points = tensor(candidates)
    except (TypeError, ValueError) as error:
        raise InputError(f"`candidates` must be numbers [K D]; {error}.") from error
    if points.dim() != 2 or points.shape[0] == 0:
        raise InputError(
            f"`candidates` must be [K D] with K of at least 1; got shape {list(points.shape)}."
        )
    if not torch.isfinite(points).all():
        raise InputError("`candidates` must be finite; drop those with NaN or infinity.")
    return points


def _checked_epochs(epochs: Any) -> tuple[int, int, int]:
    steps = tuple(epochs) if isinstance(epochs, tuple | list) else ()
    if len(steps) != 3 or not all(isinstance(n, Integral) and int(n) >= 0 for n in steps):
        raise InputError(f"`epochs` must be three whole numbers of steps; got {epochs!r}.")
    return (int(steps[0]), int(steps[1]), int(steps[2]))


# What every estimator with inducing points shares: units, the fit, and what it found.


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
    callbacks: Callbacks
    checkpoint: Folder | None
    n_features_in_: int
    feature_names_in_: Any

    def _fit(
        self,
        rows: Source,
        *,
        model: Callable[[Kernel, Tensor], InducingModel],
        n_candidates: int,
    ) -> FitResult[InducingModel]:
        """Fit a model to inputs as users have them and targets that it understands.

        Args:
            rows: in the user's units, in memory and merged, so that repeating rows and weighting
                them come to the same; or in standard units already.
            model: makes one of a kernel and candidates, both for standardised inputs.
            n_candidates: how many candidates the fast schedule has unless the user says.
        """
        request, device = self._request(n_candidates)
        checkpoint = checkpoint_of(self.checkpoint)
        about = row_identity(rows, saved=checkpoint is not None)
        said = {"inputs": "X", "targets": "y", "weights": "sample_weight"}
        told = {said.get(name, name): part for name, part in about.items()}
        checkpoint_log = open_checkpoint_log(
            self, checkpoint, process_group=rows.process_group, **told
        )
        seed = drawn_seed(self.random_state, checkpoint_log)
        generator = torch.Generator(device=device).manual_seed(seed)
        if isinstance(rows, StandardisedSource):
            # Kernels and candidates that users name are on the CPU until the model is made.
            units, data = rows.x_scaler.to(torch.device("cpu")), rows.materialised()
        else:
            held = rows.require_dataset("this fit")
            units = Standardiser.of(held.X, weights=held.weights)
            data = rows.with_rows(replace(held, X=units.forward(held.X)))
        kernel = self._kernel(units.scale)
        points = request.locations(data, units, kernel=kernel, seed=seed)
        made = model(kernel, points).to(device)
        data = data.to(device)
        fitted = fit(
            made,
            data,
            schedule=request.plan(made, data, checkpoint_log),
            generator=generator,
            callbacks=self.callbacks,
            checkpoint=checkpoint_log,
        )
        checkpoint_log.finish()
        self._x_scaler = plain_units(units)
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

    def _keep(self, fitted: FitResult[InducingModel], N: int | float) -> None:
        """What was learnt about points, in the user's units."""
        selection, candidates = fitted.selection, fitted.candidates[0].cpu().double()
        frontier = selection.frontier
        self.posterior_ = fitted.posterior.cpu().double()
        self.kernel_ = self.posterior_.kernel
        self.elbo_ = fitted.elbo
        self.elbo_gap_ = fitted.elbo_gap / N
        self.alpha_ = selection.alpha
        self.frontier_ = (
            None
            if frontier is None
            else Frontier(frontier.bounds.cpu(), frontier.masks.cpu(), frontier.N)
        )
        self.n_inducing_ = fitted.posterior.M
        self.inducing_points_ = self._x_scaler.inverse(self.posterior_.Z).numpy()
        self.candidates_ = self._x_scaler.inverse(candidates).numpy()
        self.inclusion_ = selection.inclusion.cpu().numpy()

    def _inputs(self, X: Any) -> Tensor:
        """Checked inputs in standard units, where the predictor is."""
        check_is_fitted(self)
        refuse_source(X)
        X = validate_data(self, X, dtype=np.float64, reset=False)
        return self._x_scaler.forward(tensor(X)).to(self.posterior_.Z.device)

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
