"""The base class of regressors: `fit`, densities, quantiles; `rows` has the scaler of targets."""

import warnings
from abc import abstractmethod
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, ClassVar, Self

import numpy as np
import torch
from gpytorch.likelihoods import GaussianLikelihood, Likelihood
from numpy.typing import ArrayLike, NDArray
from sklearn.base import MultiOutputMixin, RegressorMixin
from sklearn.utils.validation import validate_data
from torch import Tensor

from winnowgp.data import Dataset, Source, standardise
from winnowgp.errors import InputError, MissingTargetsWarning
from winnowgp.estimators import validation
from winnowgp.estimators.base import (
    BaseGP,
    chunks_with_noise,
    cpu_scaler,
    posterior_device,
)
from winnowgp.estimators.rows import (
    TargetScaler,
    columns_kept_after_errors,
    dates_as_days,
    explained_inputs,
    logarithm,
    missing_targets,
    noise_variances,
    rows_in_memory,
    set_source_columns,
    tensor,
    weighted_rows,
)
from winnowgp.models import MixturePosterior, MultiOutputPosterior, Posterior
from winnowgp.models.fidelity_posterior import FidelityModel
from winnowgp.models.likelihoods import has_noise, is_plain, observation_model
from winnowgp.models.observations import gaussian_noise


@dataclass(kw_only=True, eq=False, repr=False)
class NumericTargets(MultiOutputMixin, RegressorMixin, BaseGP):
    """The base class of regressors: `fit`, `log_density` and the attributes of the likelihood.

    Args:
        likelihood: "gaussian", "student-t" (robust to outliers), "laplace", "poisson" or
            "negative-binomial" (counts), "beta" (proportions), or a GPyTorch likelihood with one
            latent function per target. Targets are standardised for the first three, also as
            GPyTorch likelihoods. `SparseGPRegressor` also takes "heteroscedastic": Gaussian noise
            whose variance depends on the inputs, for one target.
        noise: "target" learns a noise variance for each of several targets, "shared" one for all of
            their standardised values. "known" learns none: the variances passed to `fit` are all
            the noise there is, and otherwise are added to the learnt one. It is for
            `likelihood="gaussian"`; others that have noise share it.

    Attributes:
        noise_: noise variance of each target (squared scale of Student's t and Laplace), `[P]`; NaN
            if the likelihood has none. Its harmonic mean over the rows if it depends on the inputs.
        likelihood_: the fitted likelihood, for standardised targets.
    """

    likelihood: str | Likelihood = "gaussian"
    noise: str = "target"

    # Whether sources may be larger than memory.
    _out_of_core: ClassVar[bool] = False

    def fit(
        self, X: Any, y: Any = None, sample_weight: Any = None, *, noise_variance: Any = None
    ) -> Self:
        """Learn the hyper-parameters and the likelihood, and select inducing points.

        Args:
            X: inputs `[N D]`; or inputs and targets together as a `winnowgp.data.Source`. For
                `SparseGPRegressor` with a Gaussian likelihood and the fast schedule it may be
                larger than memory (`ParquetSource`, `ArraySource`, `BatchSource`). Processes that
                `torchrun` started share the rows of `winnowgp.data.shard(source)`.
            y: targets `[N]` or `[N P]`; left out with a source. Several targets may be NaN where
                they are missing: with `SparseGPRegressor` and a Gaussian likelihood, or with
                `MultiOutputGPRegressor`.
            sample_weight: weights `[N]`, 1 for each row by default. The log-likelihood of a row is
                multiplied by its weight: a row of weight 2 counts as two rows, and a row of weight
                0 is left out.
            noise_variance: known variances of the noise of each row, in the squared units of `y`:
                one number, `[N]` or `[N P]`. The noise of a row has this variance plus the learnt
                one, unless `noise="known"`; it may be NaN where the target is missing. For
                estimators with one layer and a Gaussian likelihood; a source has its own
                (`Dataset.noise`).
        """
        self._fit_targets(self._validate(), X, y, sample_weight, noise_variance)
        self._warn_of_limits()
        return self

    def _fit_targets(
        self, params: validation.Parameters, X: Any, y: Any, sample_weight: Any, noise_variance: Any
    ) -> None:
        """Fit rows with validated parameters."""
        with columns_kept_after_errors(self):
            if isinstance(X, Source):
                self._refuse_logarithm_of_source()
                set_source_columns(self, X, y, sample_weight, noise_variance)
                self._check_columns(params, X.D)
                self._check_targets(params, X)
                rows, scaler = self._rows_of_source(X, params)
            else:
                data, single = self._rows_of_arrays(X, y, sample_weight, noise_variance)
                self._check_columns(params, data.D)
                self._check_targets(params, data)
                rows, scaler = _scaled_targets(data, params.likelihood, single=single)
                rows = self._pooled(rows, params)
            params.likelihood = self._likelihood_of(params, rows.P)
            self._fit(rows, params)
        self._constant_targets = constant_targets(rows) if isinstance(rows, Dataset) else ()
        self._y_scaler = replace(scaler, log=self._takes_logarithm())
        self.likelihood_ = self.posterior_.likelihood
        if rows.P > 1 or rows.has_noise:
            self._note_rows(rows)
        self.noise_ = scaler.noise(self.likelihood_)

    def log_density(self, X: Any, y: Any, *, noise_variance: Any = None) -> NDArray[np.float64]:
        """Return the log predictive density of each observation, in nats.

        It is the density in the units of `y`; NaN where one of several targets is missing.

        Args:
            X: inputs `[N D]`.
            y: targets `[N]` or `[N P]`.
            noise_variance: known noise variances of these observations, as in `fit`; they are added
                to the learnt one.
        """
        inputs = self._inputs(X)
        targets = self._y_scaler.standardise(y, self.likelihood_, inputs=inputs)
        known = self._known_noise(noise_variance, len(inputs), targets=targets)
        nats = self._log_density(inputs, targets, noise=known)
        return self._y_scaler.log_densities(nats, targets)

    @abstractmethod
    def predict(self, X: Any) -> Any:
        """Return the predictive mean, `[N]` or `[N P]`."""

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """Return R² of the predictive mean, averaged over targets.

        R² = 1 − Σ (y − ŷ)² / Σ (y − ȳ)²; 1 is best, and the mean ȳ of the rows scores 0. The sums
        leave out missing targets (NaN).

        Args:
            X: inputs `[N D]`.
            y: targets `[N]` or `[N P]`.
            sample_weight: weights `[N]` of the rows.
        """
        missing = torch.isnan(tensor(y)).numpy()
        if not missing.any():
            return float(super().score(X, y, sample_weight))
        predicted = self.predict(X)
        if missing.shape != predicted.shape or predicted.ndim == 1:
            raise InputError(
                "`y` must have a target in every row, or some of several targets as in `fit`; got "
                f"NaN in {int(missing.sum())} of {missing.size} places of shape "
                f"{list(missing.shape)}. Leave such rows out."
            )
        if (few := (~missing).sum(0) < 2).any():
            raise InputError(
                "`y` must have at least two values of every target to be scored; column "
                f"{int(few.argmax())} (counted from 0) has fewer. Score more rows."
            )
        # With the command `winnow` and in most programs it is not needed, and slow to import.
        from sklearn.metrics import r2_score

        observed = np.asarray(y, dtype=np.float64)
        weights = np.broadcast_to(1.0 if sample_weight is None else sample_weight, len(observed))
        return float(
            np.mean(
                [
                    r2_score(observed[rows, p], predicted[rows, p], sample_weight=weights[rows])
                    for p, rows in enumerate(~missing.T)
                ]
            )
        )

    def _check_targets(self, params: validation.Parameters, data: Source) -> None:
        super()._check_targets(params, data)
        rows = data.as_dataset()
        self._check_noise(params, data, missing=rows is not None and not rows.complete)

    def _check_noise(self, params: validation.Parameters, data: Source, *, missing: bool) -> None:
        """Raise an error if this model cannot have known noise, or missing targets."""
        if missing or data.has_noise:
            what = "missing targets need" if missing else "`noise_variance` needs"
            raise InputError(
                f"{what} a `SparseGPRegressor` or `MultiOutputGPRegressor` with Gaussian noise; "
                f"got a {type(self).__name__}. Leave incomplete rows and the noise out."
            )
        if params.noise == "known":
            raise InputError(
                "`noise='known'` needs a `SparseGPRegressor` with Gaussian noise; got a "
                f"{type(self).__name__}. Use 'target' or 'shared'."
            )

    def _likelihood_of(self, params: validation.Parameters, P: int) -> Likelihood:
        """Return the likelihood of P targets, with noise for each if that is specified."""
        likelihood = params.likelihood
        if self.likelihood != "gaussian" or params.noise != "target" or P == 1:
            return likelihood
        return gaussian_noise(likelihood.noise.detach().expand(P).double())

    def _known_noise(
        self, noise_variance: Any, N: int, *, observed: bool = True, targets: Tensor | None = None
    ) -> Tensor | None:
        """Validate known noise variances of new rows; return them for standardised targets.

        Args:
            targets: the observations, if they are known; NaN where they are missing.
        """
        missing = None if targets is None else torch.isnan(targets).cpu().numpy()
        variances = noise_variances(noise_variance, (N, self._y_scaler.P), missing)
        if variances is None:
            return None
        if not observed:
            raise InputError(
                "`noise_variance` is the noise of observations; got it with `observed=False`. "
                "Leave one of them out."
            )
        gaussian = is_plain(self.likelihood_, GaussianLikelihood)
        plain = gaussian and isinstance(
            self.posterior_, Posterior | MixturePosterior | MultiOutputPosterior | FidelityModel
        )
        if self._takes_logarithm() or not plain:
            raise InputError(
                "`noise_variance` needs Gaussian noise and one layer, and no `log_target`. Leave "
                "it out."
            )
        variances = variances / self._y_scaler.columns.scale.square()
        return variances.to(posterior_device(self.posterior_))

    def _pooled(self, rows: Dataset, params: validation.Parameters) -> Dataset:
        """Return fewer rows with the same likelihood, if there are many with equal inputs."""
        return rows

    def _note_rows(self, rows: Source) -> None:
        """Note what later batches need to know of rows with several targets or known noise."""

    def _takes_logarithm(self) -> bool:
        """Return whether the model is one of log y."""
        return False

    def _refuse_logarithm(self, what: str) -> None:
        """Raise an `InputError` if y is log-normal, which `what` cannot represent."""
        if self._takes_logarithm():
            raise InputError(
                f"`log_target` must be False for {what}; fit a model of log y, without "
                "`log_target`, and convert that one."
            )

    def _refuse_logarithm_of_source(self) -> None:
        if self._takes_logarithm():
            raise InputError(
                "`log_target` needs arrays; got a source. Pass `X` and `y`, or a source of log y "
                "to a model without `log_target`."
            )

    @torch.no_grad()
    def predict_quantiles(
        self,
        X: Any,
        probabilities: ArrayLike,
        *,
        observed: bool = True,
        noise_variance: Any = None,
    ) -> NDArray[np.float64]:
        """Return exact quantiles of the predictive distribution, `[Q N]` or `[Q N P]`.

        They invert its distribution function: a quantile of counts is the least count that is not
        exceeded with this probability. Those of a deep model are of the mixture of its samples.

        Args:
            X: inputs `[N D]`.
            probabilities: Q probabilities, strictly between 0 and 1.
            observed: whether to return quantiles of a new observation or of the latent function.
            noise_variance: known noise variances of these observations, as in `fit`; they are added
                to the learnt one.
        """
        p = tensor(probabilities, name="probabilities", hint="Pass one or several.")
        inputs = self._inputs(X)
        p = p.reshape(-1).to(inputs)
        known = self._known_noise(noise_variance, len(inputs), observed=observed)
        quantiles = [
            self.posterior_.quantiles(rows, p, observed=observed, **noise)
            for rows, noise in chunks_with_noise(self.posterior_, inputs, known)
        ]
        return self._y_scaler.values(torch.cat(quantiles, dim=1).cpu())

    def predict_interval(
        self, X: Any, level: float = 0.95, *, observed: bool = True, noise_variance: Any = None
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return lower and upper ends of central intervals, `[N]` or `[N P]` each.

        A new observation is below the interval, and above it, with a probability of (1 − level)/2
        each; for counts, with at most this probability.

        Args:
            X: inputs `[N D]`.
            level: probability of the interval, strictly between 0 and 1.
            observed: whether the interval is that of a new observation or of the latent function.
            noise_variance: known noise variances of these observations, as in `fit`; they are added
                to the learnt one.
        """
        if isinstance(level, bool) or not isinstance(level, Real) or not 0 < float(level) < 1:
            raise InputError(
                f"`level` must be a probability between 0 and 1, such as 0.95; got {level!r}."
            )
        tail = (1 - float(level)) / 2
        lower, upper = self.predict_quantiles(
            X, [tail, 1 - tail], observed=observed, noise_variance=noise_variance
        )
        return lower, upper

    def _rows_of_arrays(
        self, X: Any, y: Any, sample_weight: Any, noise_variance: Any = None, *, reset: bool = True
    ) -> tuple[Dataset, bool]:
        """Return merged rows, and whether targets have shape `[N]` rather than `[N P]`.

        Args:
            reset: whether the rows set the columns of the estimator, or must have them.
        """
        y, missing = missing_targets(y)
        X = dates_as_days(X)
        with explained_inputs(X, y):
            X, y = validate_data(
                self,
                X,
                y,
                dtype=np.float64,
                multi_output=True,
                y_numeric=True,
                ensure_min_samples=1,
                reset=reset,
            )
        Y, single = tensor(y), np.ndim(y) == 1
        Y = Y[:, None] if single else Y
        if missing is not None:
            Y[torch.from_numpy(missing)] = torch.nan
        noise = noise_variances(noise_variance, (len(Y), Y.shape[1]), missing)
        X, kept, weights = weighted_rows(X, np.arange(len(X)), sample_weight)
        Y = logarithm(Y[kept], kept) if self._takes_logarithm() else Y[kept]
        data = Dataset(tensor(X), Y, weights, None if noise is None else noise[kept])
        data = _with_targets(data, kept)
        return Dataset.of(
            data.X, data.Y, weights=data.weights, noise=data.noise, missing=missing is not None
        ).merged(), single

    def _rows_of_source(
        self, source: Source, params: validation.Parameters
    ) -> tuple[Source, TargetScaler]:
        if not self._out_of_core:
            data = rows_in_memory(source, f"`{type(self).__name__}`").merged()
            rows, scaler = _scaled_targets(data, params.likelihood, single=source.P == 1)
            return source.with_rows(rows), scaler
        if params.schedule == "paper" or self.likelihood != "gaussian":
            source.require_dataset("this fit")
        data = source.as_dataset()
        if data is not None and not data.complete:
            raise InputError("a source must have all targets; pass arrays if some are missing.")
        rows = standardise(source, targets=has_noise(params.likelihood))
        if (dataset := rows.as_dataset()) is not None:
            observation_model(params.likelihood).check_targets(dataset.Y)
        return rows, TargetScaler(cpu_scaler(rows.y_scaler), single=rows.P == 1)


def _with_targets(data: Dataset, rows: NDArray[np.intp]) -> Dataset:
    """Return the rows that have a target, with a warning if others are left out.

    Args:
        rows: index of each row among the user's rows.
    """
    empty = torch.isnan(data.Y).all(1)
    if not bool(empty.any()):
        return data
    warnings.warn(
        f"{int(empty.sum())} of {data.N} rows have no target and were left out of the fit; the "
        f"first is row {rows[empty.numpy()][0]} (counted from 0).",
        MissingTargetsWarning,
        stacklevel=4,
    )
    return data.part((~empty).nonzero().flatten())


def constant_targets(rows: Dataset) -> tuple[int, ...]:
    """Return the targets that several rows have, all with the same value."""
    observed = [y[~y.isnan()] for y in rows.Y.T]
    return tuple(p for p, y in enumerate(observed) if len(y) > 1 and bool((y == y[0]).all()))


def _scaled_targets(
    data: Dataset, likelihood: Likelihood, *, single: bool
) -> tuple[Dataset, TargetScaler]:
    scaler = TargetScaler.of(data, likelihood, single=single)
    noise = None if data.noise is None else data.noise / scaler.columns.scale.square()
    rows = replace(data, Y=scaler.columns.forward(data.Y), noise=noise)
    observation_model(likelihood).check_targets(rows.Y)
    return rows, scaler
