"""Regression for people who know scikit-learn."""

from typing import Any, final

import numpy as np
import torch
from gpytorch.kernels import Kernel
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, MultiOutputMixin, RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from winnowgp.data import Dataset, Standardiser
from winnowgp.errors import InputError
from winnowgp.estimators.kernels import kernel_from
from winnowgp.estimators.points_request import PointsRequest
from winnowgp.estimators.tensors import tensor
from winnowgp.models import SparseGP
from winnowgp.training import Fit, OnProgress, fit, silent

# Rows predicted at once: bounds memory at this many times the number of points.
_ROWS = 16_384


@final
class SparseGPRegressor(MultiOutputMixin, RegressorMixin, BaseEstimator):
    """Gaussian-process regression that decides how many inducing points it needs.

    Inputs and targets are standardised inside; everything you see is in your own units unless its
    description says otherwise. Several target columns share kernel and points.

    How many points to keep can be said in one of four ways: `tolerance` (the default),
    `max_points`, `max_predict_us`, or a number for `alpha`.

    Args:
        kernel: "rbf", "matern12", "matern32", "matern52" (one lengthscale a column), or a GPyTorch
            kernel for standardised inputs.
        alpha: "auto", or the strength of the paper's prior exp(−alpha · M²) on M points; larger
            values keep fewer.
        tolerance: nats per observation that may be given up relative to all candidates.
        max_points: most points; fewer only where the candidates hold no more information.
        max_predict_us: most microseconds for mean and variance of a row, measured on this machine
            in batches of 1,000 rows.
        candidates: "greedy" (rows of greatest conditional variance), "kmeans" (cluster centres),
            "random" (rows), or the locations themselves, `[K D]`. "auto" is greedy, or random with
            the paper's schedule.
        n_candidates: how many points to choose from; 512, or 100 with the paper's schedule.
        schedule: "fast", or "paper" for the three phases of the paper (needs a number for `alpha`).
        epochs: steps of the paper's three phases: all candidates, learning inclusion, kept points.
        random_state: a seed or RandomState; the same seed gives the same fit.
        on_progress: told of every step of the fit; see `winnowgp.training.Progress`.

    Attributes:
        n_inducing_: number of points kept.
        inducing_points_: where they are, `[M D]`.
        inclusion_: probability of each candidate of the last choice, `[K]`.
        candidates_: where those candidates are, `[K D]`; with the fast schedule the kept points
            come first, then fresh ones that were not needed.
        alpha_: strength of the prior that keeps this many points.
        elbo_: lower bound on the log evidence of the standardised targets, in nats.
        evidence_gap_: an upper bound on that evidence less `elbo_`, in nats.
        given_up_: nats per observation below the best bound seen with more points.
        frontier_: best bound for each number of points among the candidates; None with the paper's
            schedule.
        noise_: noise variance of each target, `[P]`.
        kernel_: the fitted kernel, for standardised inputs and targets.
        posterior_: the predictor, for standardised inputs and targets.

    >>> X = np.linspace(0, 6, 50)[:, None]
    >>> model = SparseGPRegressor(random_state=0).fit(X, np.sin(X[:, 0]))
    >>> model.n_inducing_ < 12
    True
    """

    def __init__(
        self,
        kernel: str | Kernel = "rbf",
        *,
        alpha: str | float = "auto",
        tolerance: float = 0.01,
        max_points: int | None = None,
        max_predict_us: float | None = None,
        candidates: str | ArrayLike = "auto",
        n_candidates: int | None = None,
        schedule: str = "fast",
        epochs: tuple[int, int, int] = (200, 600, 200),
        random_state: int | np.random.RandomState | None = None,
        on_progress: OnProgress = silent,
    ) -> None:
        self.kernel = kernel
        self.alpha = alpha
        self.tolerance = tolerance
        self.max_points = max_points
        self.max_predict_us = max_predict_us
        self.candidates = candidates
        self.n_candidates = n_candidates
        self.schedule = schedule
        self.epochs = epochs
        self.random_state = random_state
        self.on_progress = on_progress

    def fit(self, X: Any, y: Any) -> "SparseGPRegressor":
        """Learn kernel, noise, locations, and which candidates to keep.

        Args:
            X: inputs `[N D]`.
            y: targets `[N]` or `[N P]`.
        """
        X, y = validate_data(
            self, X, y, dtype=np.float64, multi_output=True, y_numeric=True, ensure_min_samples=1
        )
        request = PointsRequest.checked(
            alpha=self.alpha,
            tolerance=self.tolerance,
            max_points=self.max_points,
            max_predict_us=self.max_predict_us,
            candidates=self.candidates,
            n_candidates=self.n_candidates,
            schedule=self.schedule,
            epochs=self.epochs,
        )
        seed = int(check_random_state(self.random_state).randint(2**31))
        generator = torch.Generator().manual_seed(seed)
        self._single_target = np.ndim(y) == 1
        rows = Dataset.of(tensor(X), tensor(y))
        self._x_units, self._y_units = Standardiser.of(rows.X), Standardiser.of(rows.Y)
        data = Dataset(self._x_units.forward(rows.X), self._y_units.forward(rows.Y))

        kernel = kernel_from(self.kernel, data.D)
        points = request.locations(data, self._x_units, kernel=kernel, seed=seed)
        model = SparseGP(kernel, points)
        fitted = fit(
            model,
            data,
            schedule=request.plan(model, data),
            generator=generator,
            on_progress=self.on_progress,
        )
        self._keep(fitted, data)
        return self

    def _keep(self, fitted: Fit, data: Dataset) -> None:
        """What was learnt, in the user's units."""
        self.posterior_ = fitted.posterior
        self.kernel_ = fitted.posterior.kernel
        self.elbo_ = fitted.bound
        self.evidence_gap_ = fitted.upper_bound - fitted.bound
        self.given_up_ = fitted.given_up / data.N
        self.alpha_ = fitted.selection.alpha
        self.frontier_ = fitted.selection.frontier
        self.n_inducing_ = fitted.posterior.M
        self.inducing_points_ = self._x_units.inverse(fitted.posterior.Z).numpy()
        self.candidates_ = self._x_units.inverse(fitted.candidates).numpy()
        self.inclusion_ = fitted.selection.inclusion.numpy()
        assert isinstance(fitted.model, SparseGP)
        self.noise_ = (fitted.model.noise.detach() * self._y_units.scale.square()).numpy()

    def predict(
        self,
        X: Any,
        return_std: bool = False,
        return_cov: bool = False,
        *,
        observed: bool = True,
    ) -> Any:
        """Predictive mean, and on request the standard deviation or the covariance of the rows.

        Args:
            return_std: also return the standard deviation of each row.
            return_cov: also return the covariance between all rows, `[N N]` or `[N N P]`.
            observed: whether these are for a new observation (with its noise) or for the function.

        Returns: the mean `[N]` or `[N P]`; with a request, a pair.
        """
        if return_std and return_cov:
            raise InputError("ask for `return_std` or `return_cov`, not both.")
        inputs = self._inputs(X)
        if not return_std and not return_cov:
            parts = [self.posterior_.predict_mean(rows) for rows in inputs.split(_ROWS)]
            return self._targets(self._y_units.inverse(torch.cat(parts)))
        if return_cov:
            mean = self._y_units.inverse(self.posterior_.predict_mean(inputs))
            covariance = self.posterior_.covariance(inputs, observed=observed).permute(1, 2, 0)
            return self._targets(mean), self._targets(covariance * self._y_units.scale.square())
        mean, sd = self._predict(inputs, observed=observed)
        return self._targets(mean), self._targets(sd)

    def sample_y(
        self,
        X: Any,
        n_samples: int = 1,
        random_state: int | np.random.RandomState | None = 0,
    ) -> NDArray[np.float64]:
        """Functions drawn jointly at the rows, `[N n_samples]` or `[N P n_samples]`."""
        seed = int(check_random_state(random_state).randint(2**31))
        generator = torch.Generator().manual_seed(seed)
        draws = self.posterior_.sample(self._inputs(X), n_samples, generator=generator)
        draws = self._y_units.inverse(draws).permute(1, 2, 0)
        return (draws[:, 0] if self._single_target else draws).numpy()

    def log_density(self, X: Any, y: Any) -> NDArray[np.float64]:
        """Log predictive density of each observation, in nats and in the units of `y`."""
        inputs = self._inputs(X)
        targets = Dataset.of(inputs, tensor(y)).Y
        if targets.shape[1] != self.posterior_.P:
            raise InputError(
                f"`y` must have {self.posterior_.P} target columns as in `fit`; "
                f"got {targets.shape[1]}."
            )
        mean, sd = self._predict(inputs, observed=True)
        return self._targets(torch.distributions.Normal(mean, sd).log_prob(targets))

    def _inputs(self, X: Any) -> Tensor:
        """Checked inputs in standard units."""
        check_is_fitted(self)
        X = validate_data(self, X, dtype=np.float64, reset=False)
        return self._x_units.forward(tensor(X))

    @torch.no_grad()
    def _predict(self, inputs: Tensor, *, observed: bool) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation in the units of the targets."""
        parts = [self.posterior_.predict(rows, observed=observed) for rows in inputs.split(_ROWS)]
        mean = self._y_units.inverse(torch.cat([p.mean for p in parts]))
        return mean, torch.cat([p.variance for p in parts]).sqrt() * self._y_units.scale

    def _targets(self, values: Tensor) -> NDArray[np.float64]:
        """Drop the output axis, the last one, if `fit` was given a single target."""
        return (values[..., 0] if self._single_target else values).numpy()
