"""Regression for people who know scikit-learn."""

from numbers import Integral, Real
from typing import Any, Self, final

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
from winnowgp.models import Prediction, SparseGP
from winnowgp.point_processes import SquaredCardinality
from winnowgp.training import OnProgress, ThreePhases, fit, silent

# Rows predicted at once: bounds memory at this many times the number of points.
_ROWS = 16_384


@final
class SparseGPRegressor(MultiOutputMixin, RegressorMixin, BaseEstimator):
    """Gaussian-process regression that decides how many inducing points it needs.

    Inputs and targets are standardised inside; everything you see is in your own units unless its
    description says otherwise. Several target columns share kernel and points.

    Args:
        kernel: "rbf", "matern12", "matern32", "matern52" (one lengthscale a column), or a GPyTorch
            kernel for standardised inputs.
        alpha: strength of the prior exp(−alpha · M²) on M points; larger values keep fewer.
        n_candidates: how many points to choose from, a random subset of the rows; all rows if there
            are fewer.
        candidates: where points may be instead, `[K D]`.
        epochs: steps of the three phases: all candidates, learning inclusion, the kept points.
        random_state: a seed or RandomState; the same seed gives the same fit.
        on_progress: told of every step of the fit; see `winnowgp.training.Progress`.

    Attributes:
        n_inducing_: number of points kept.
        inducing_points_: where they are, `[M D]`.
        inclusion_: probability of each candidate, `[K]`.
        candidates_: where the candidates stood when they were chosen from, `[K D]`.
        elbo_: lower bound on the log evidence of the standardised targets, in nats.
        noise_: noise variance of each target, `[P]`.
        kernel_: the fitted kernel, for standardised inputs and targets.
        posterior_: the predictor, for standardised inputs and targets.

    >>> X = np.linspace(0, 6, 50)[:, None]
    >>> model = SparseGPRegressor(n_candidates=20, epochs=(50, 50, 50), random_state=0)
    >>> model.fit(X, np.sin(X[:, 0])).n_inducing_ < 20
    True
    """

    def __init__(
        self,
        kernel: str | Kernel = "rbf",
        *,
        alpha: float = 0.05,
        n_candidates: int = 100,
        candidates: ArrayLike | None = None,
        epochs: tuple[int, int, int] = (200, 600, 200),
        random_state: int | np.random.RandomState | None = None,
        on_progress: OnProgress = silent,
    ) -> None:
        self.kernel = kernel
        self.alpha = alpha
        self.n_candidates = n_candidates
        self.candidates = candidates
        self.epochs = epochs
        self.random_state = random_state
        self.on_progress = on_progress

    def fit(self, X: Any, y: Any) -> Self:
        """Learn kernel, noise, locations, and which candidates to keep.

        Args:
            X: inputs `[N D]`.
            y: targets `[N]` or `[N P]`.
        """
        X, y = validate_data(
            self, X, y, dtype=np.float64, multi_output=True, y_numeric=True, ensure_min_samples=1
        )
        self._check_parameters()
        seed = int(check_random_state(self.random_state).randint(2**31))
        generator = torch.Generator().manual_seed(seed)
        self._single_target = np.ndim(y) == 1
        rows = Dataset.of(torch.tensor(X), torch.tensor(np.asarray(y, dtype=np.float64)))
        self._x_units, self._y_units = Standardiser.of(rows.X), Standardiser.of(rows.Y)
        data = Dataset(self._x_units.forward(rows.X), self._y_units.forward(rows.Y))

        model = SparseGP(kernel_from(self.kernel, data.D), self._candidates(data, generator))
        pre, process, post = self.epochs
        prior = SquaredCardinality(model.K, self.alpha)
        fitted = fit(
            model,
            data,
            schedule=ThreePhases(prior, pre=pre, process=process, post=post),
            generator=generator,
            on_progress=self.on_progress,
        )
        self.posterior_ = fitted.posterior
        self.kernel_ = fitted.posterior.kernel
        self.elbo_ = fitted.bound
        self.n_inducing_ = fitted.posterior.M
        self.inducing_points_ = self._x_units.inverse(fitted.posterior.Z).numpy()
        self.candidates_ = self._x_units.inverse(fitted.candidates).numpy()
        self.inclusion_ = fitted.selection.inclusion.numpy()
        self.noise_ = (fitted.posterior.noise * self._y_units.scale.square()).numpy()
        return self

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
        prediction = self._predict(inputs, observed=observed)
        return self._targets(prediction.mean), self._targets(prediction.variance.sqrt())

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
        targets = torch.tensor(np.asarray(y, dtype=np.float64))
        targets = Dataset.of(inputs, targets).Y
        p = self._predict(inputs, observed=True)
        return self._targets(
            torch.distributions.Normal(p.mean, p.variance.sqrt()).log_prob(targets)
        )

    def _check_parameters(self) -> None:
        if isinstance(self.alpha, bool) or not isinstance(self.alpha, Real):
            raise InputError(f"`alpha` must be a positive number; got {self.alpha!r}.")
        if self.candidates is None and not (
            isinstance(self.n_candidates, Integral) and self.n_candidates >= 1
        ):
            raise InputError(
                f"`n_candidates` must be a whole number of at least 1; got {self.n_candidates!r}."
            )

    def _candidates(self, data: Dataset, generator: torch.Generator) -> Tensor:
        """Where points may be, in standard units."""
        if self.candidates is None:
            order = torch.randperm(data.N, generator=generator)
            return data.X[order[: int(self.n_candidates)]]
        points = torch.tensor(np.asarray(self.candidates, dtype=np.float64))
        if points.dim() != 2 or points.shape[0] == 0 or points.shape[1] != data.D:
            raise InputError(
                f"`candidates` must be [K {data.D}] with K of at least 1; "
                f"got shape {list(points.shape)}."
            )
        if not torch.isfinite(points).all():
            raise InputError("`candidates` must be finite; drop those with NaN or infinity.")
        return self._x_units.forward(points)

    def _inputs(self, X: Any) -> Tensor:
        """Checked inputs in standard units."""
        check_is_fitted(self)
        X = validate_data(self, X, dtype=np.float64, reset=False)
        return self._x_units.forward(torch.tensor(X))

    @torch.no_grad()
    def _predict(self, inputs: Tensor, *, observed: bool) -> Prediction:
        """Mean and variance in the units of the targets."""
        parts = [self.posterior_.predict(rows, observed=observed) for rows in inputs.split(_ROWS)]
        mean = torch.cat([p.mean for p in parts])
        variance = torch.cat([p.variance for p in parts])
        return Prediction(self._y_units.inverse(mean), variance * self._y_units.scale.square())

    def _targets(self, values: Tensor) -> NDArray[np.float64]:
        """Drop the output axis, the last one, if `fit` was given a single target."""
        return (values[..., 0] if self._single_target else values).numpy()
