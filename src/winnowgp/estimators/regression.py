"""Regression for people who know scikit-learn."""

from dataclasses import replace
from typing import Any, final

import numpy as np
import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood
from numpy.typing import ArrayLike, NDArray
from sklearn.base import MultiOutputMixin, RegressorMixin
from sklearn.utils import check_random_state
from torch import Tensor

from winnowgp.data import Source, standardise
from winnowgp.errors import InputError
from winnowgp.estimators.base import ROWS, InducingEstimator, plain_units
from winnowgp.estimators.validation import (
    Folder,
    TargetScaler,
    has_noise,
    likelihood_from,
    note_source,
    numeric_rows,
)
from winnowgp.models import SparseGP, VariationalGP
from winnowgp.models.base import InducingModel
from winnowgp.training import Callbacks
from winnowgp.training.initialization import best_level

N_CANDIDATES = 512


@final
class SparseGPRegressor(MultiOutputMixin, RegressorMixin, InducingEstimator):
    """Gaussian-process regression that decides how many inducing points it needs.

    Inputs and targets are standardised inside; everything you see is in your own units unless its
    description says otherwise. Several target columns share kernel and points.

    How many points to keep can be said in one of four ways: `tolerance` (the default),
    `max_points`, `max_predict_us`, or a number for `alpha`.

    Args:
        kernel: in words, such as "rbf", "matern52", "rbf + periodic" or "rbf[0, 1] * linear" (one
            lengthscale a column; see `winnowgp.estimators.kernel_words`), or a GPyTorch kernel for
            standardised inputs.
        likelihood: "gaussian", "student-t" (outliers), "laplace", "poisson" (counts), or a GPyTorch
            likelihood of one latent function a target (Beta, negative binomial, your own). Targets
            are standardised for the first three and for these as GPyTorch objects.
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
        batch_size: rows a step of the paper's schedule looks at; all of them if not given.
        random_state: a seed or RandomState; the same seed gives the same fit.
        device: where the fit is computed, "cpu" or "cuda", or "auto" for a GPU if there is one;
            predictions are always on the CPU.
        precision: "double", or, with Gaussian noise, "mixed": blocks of rows are in float32 and
            sums over rows in float64. Half the memory on a GPU, and quicker where float32 is.
        callbacks: None, a function called with the `winnowgp.training.Progress` of every step, or a
            sequence of such functions.
        checkpoint: a folder, or a `Checkpoint`, in which the fit writes down how far it has come.
            Run again with the same one after it was killed, it goes on to the same answer.

    Attributes:
        n_inducing_: number of points kept.
        inducing_points_: where they are, `[M D]`.
        inclusion_: probability of each candidate of the last choice, `[K]`.
        candidates_: where those candidates are, `[K D]`; with the fast schedule the kept points
            come first, then fresh ones that were not needed.
        alpha_: strength of the prior that keeps this many points.
        elbo_: lower bound on the log evidence of the (standardised) targets, in nats.
        evidence_gap_: an upper bound on that evidence less `elbo_`, in nats; infinite where no
            upper bound is known, which is for every likelihood but the Gaussian.
        elbo_gap_: nats per observation below the best bound seen with more points.
        frontier_: best bound for each number of points among the candidates; None with the paper's
            schedule.
        noise_: noise variance (scale² of Student's t and Laplace) of each target, `[P]`; NaN where
            the likelihood has none.
        likelihood_: the fitted likelihood, for standardised targets.
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
        likelihood: str | Likelihood = "gaussian",
        alpha: str | float = "auto",
        tolerance: float = 0.01,
        max_points: int | None = None,
        max_predict_us: float | None = None,
        candidates: str | ArrayLike = "auto",
        n_candidates: int | None = None,
        schedule: str = "fast",
        epochs: tuple[int, int, int] = (200, 600, 200),
        batch_size: int | None = None,
        random_state: int | np.random.RandomState | None = None,
        device: str = "cpu",
        precision: str = "double",
        callbacks: Callbacks = None,
        checkpoint: Folder | None = None,
    ) -> None:
        self.kernel = kernel
        self.likelihood = likelihood
        self.alpha = alpha
        self.tolerance = tolerance
        self.max_points = max_points
        self.max_predict_us = max_predict_us
        self.candidates = candidates
        self.n_candidates = n_candidates
        self.schedule = schedule
        self.epochs = epochs
        self.batch_size = batch_size
        self.random_state = random_state
        self.device = device
        self.precision = precision
        self.callbacks = callbacks
        self.checkpoint = checkpoint

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> "SparseGPRegressor":
        """Learn kernel, noise, locations, and which candidates to keep.

        Args:
            X: inputs `[N D]`; or inputs and targets together as a `winnowgp.data.Source`, which may
                be larger than memory (`ParquetSource`, `ArraySource`, `BatchSource`) or shared
                among processes (`shared`).
            y: targets `[N]` or `[N P]`; left out with a source.
            sample_weight: how often each row counts, `[N]`: the log-likelihood of a row of weight w
                is multiplied by w, so that 2 is the row twice and 0 leaves it out. Once if not
                given.
        """
        likelihood = likelihood_from(self.likelihood)
        if isinstance(X, Source):
            note_source(self, X, y, sample_weight)
            self._check_before_reading(X)
            data = standardise(X, targets=has_noise(likelihood))
            units = TargetScaler(plain_units(data.y_scaler), single=data.P == 1)
        else:
            rows, single = numeric_rows(self, X, y, sample_weight)
            units = TargetScaler.of(rows, likelihood, single=single)
            data = replace(rows, Y=units.columns.forward(rows.Y))

        def model(kernel: Kernel, points: Tensor) -> InducingModel:
            if self.likelihood == "gaussian" and self.batch_size is None:
                return SparseGP(kernel, points, precision=self.precision)
            if self.precision != "double":
                raise InputError(
                    "`precision` must be 'double' unless noise is Gaussian and there is no "
                    f"`batch_size`; got {self.precision!r}."
                )
            made = VariationalGP(kernel, points, likelihood=likelihood, targets=data.P)
            made.check(data)
            if not has_noise(likelihood):
                # Counts may be far from zero, further than the paper's small steps would get.
                held = data.require_dataset("a likelihood without noise")
                made.mean.initialize(constant=best_level(made.likelihood, held))
            return made

        fitted = self._fit(data, model=model, n_candidates=N_CANDIDATES)
        self._y_scaler = units
        assert fitted.upper_bound is not None
        self.evidence_gap_ = fitted.upper_bound - fitted.elbo
        self.likelihood_ = fitted.posterior.likelihood
        self.noise_ = self._y_scaler.noise(self.likelihood_)
        return self

    def _check_before_reading(self, rows: Source) -> None:
        """What is wrong with a request is said before a pass over all rows."""
        self._request(N_CANDIDATES)
        kernel = self._kernel(torch.ones(rows.D))
        if self.schedule == "paper" or self.likelihood != "gaussian":
            rows.require_dataset("this fit")
        else:
            SparseGP(kernel, torch.zeros(0, rows.D), precision=self.precision)

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
            return_cov: also return the covariance between all rows, `[N N]` or `[N N P]`. Unless
                the likelihood is Gaussian, ask for that of the function, with `observed=False`.
            observed: whether these are for a new observation (with its noise) or for the latent
                function.

        Returns: the mean `[N]` or `[N P]`; with a request, a pair.
        """
        if return_std and return_cov:
            raise InputError("ask for `return_std` or `return_cov`, not both.")
        inputs = self._inputs(X)
        if return_cov:
            mean = self.posterior_.predict_mean(inputs).cpu()
            covariance = self.posterior_.covariance(inputs, observed=observed).permute(1, 2, 0)
            return self._y_scaler.values(mean), self._y_scaler.variances(covariance.cpu())
        if not return_std and (has_noise(self.likelihood_) or not observed):
            # The mean of the function is that of an observation, and O(M) a row.
            mean = torch.cat([self.posterior_.predict_mean(rows) for rows in inputs.split(ROWS)])
            return self._y_scaler.values(mean.cpu())
        found = self._predicted(inputs, observed=observed)
        mean = self._y_scaler.values(found.mean)
        return (mean, self._y_scaler.deviations(found.variance.sqrt())) if return_std else mean

    def sample_y(
        self,
        X: Any,
        n_samples: int = 1,
        random_state: int | np.random.RandomState | None = 0,
    ) -> NDArray[np.float64]:
        """Latent functions drawn jointly at the rows, `[N n_samples]` or `[N P n_samples]`."""
        seed = int(check_random_state(random_state).randint(2**31))
        inputs = self._inputs(X)
        generator = torch.Generator(inputs.device).manual_seed(seed)
        draws = self.posterior_.sample(inputs, n_samples, generator=generator).cpu()
        return np.moveaxis(self._y_scaler.values(draws), 0, -1)

    def log_density(self, X: Any, y: Any) -> NDArray[np.float64]:
        """Log predictive density of each observation, in nats and in the units of `y`."""
        inputs = self._inputs(X)
        targets = self._y_scaler.seen(y, self.likelihood_, inputs=inputs)
        return self._y_scaler.log_densities(self._log_density(inputs, targets))
