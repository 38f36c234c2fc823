"""Regression: numeric targets and their scaler, and the sparse GP regressor."""

import warnings
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, replace
from math import nan
from numbers import Real
from typing import Any, ClassVar, Self, final

import numpy as np
import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import GaussianLikelihood, Likelihood
from gpytorch.means import ConstantMean, Mean
from jaxtyping import Float
from numpy.typing import ArrayLike, NDArray
from sklearn.base import MultiOutputMixin, RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from winnowgp.data import Dataset, Source, Standardiser, standardise
from winnowgp.data.frames import dates_as_days
from winnowgp.errors import InputError, MissingTargetsWarning
from winnowgp.estimators import validation
from winnowgp.estimators.base import (
    BaseGP,
    check_kernel_columns,
    chunks_with_noise,
    cpu_scaler,
    posterior_device,
    rows_at_once,
)
from winnowgp.estimators.docstrings import documented
from winnowgp.estimators.kernels import kernel_from, parse_kernel
from winnowgp.estimators.streaming import BATCH_ROWS, StreamingEstimator, batches_of
from winnowgp.models import (
    HeteroscedasticGP,
    HeteroscedasticPosterior,
    LogVarianceLikelihood,
    Posterior,
    PosteriorPaths,
    Prediction,
    SparseGP,
    VariationalGP,
)
from winnowgp.models.base import InducingModel
from winnowgp.models.likelihoods import HeteroscedasticLikelihood, is_plain, observation_model
from winnowgp.models.noise import LEAST_NOISE, gaussian_noise
from winnowgp.models.priors import add_weak_priors
from winnowgp.training.initialization import best_level
from winnowgp.training.schedules import SizedModel

# Noise variance of standardised targets that is added to noise which is known. It is not zero: the
# covariance of rows without any noise may be singular.
_NEGLIGIBLE = 2 * LEAST_NOISE


@final
@dataclass(frozen=True, slots=True)
class TargetScaler:
    """Standardises numeric targets: z = (y − shift) / scale, column by column.

    Targets are scaled only if they are the latent function plus noise; counts and proportions stay
    as they are.

    >>> from gpytorch.likelihoods import GaussianLikelihood
    >>> data = Dataset.of(torch.zeros(2, 1).double(), torch.tensor([1.0, 3.0]).double())
    >>> scaler = TargetScaler.of(data, GaussianLikelihood(), single=True)
    >>> Z = scaler.columns.forward(data.Y)
    >>> Z.tolist(), scaler.values(Z).tolist(), scaler.deviations(Z).tolist()
    ([[-1.0], [1.0]], [1.0, 3.0], [-1.0, 1.0])
    """

    columns: Standardiser
    single: bool
    """Whether targets were passed to `fit` as `[N]` rather than `[N P]`."""
    log: bool = False
    """Whether the logarithm of the targets is standardised, rather than the targets."""

    @classmethod
    def of(cls, data: Dataset, likelihood: Likelihood, *, single: bool) -> "TargetScaler":
        """Return the scaler of the targets of some rows."""
        if not validation.has_noise(likelihood):
            return cls(Standardiser.none(data.Y), single)
        return cls(Standardiser.of(data.Y, weights=data.weights), single)

    @property
    def P(self) -> int:
        """Number of target columns."""
        return len(self.columns.shift)

    def standardise(
        self, y: Any, likelihood: Likelihood, *, inputs: Float[Tensor, "N D"]
    ) -> Float[Tensor, "N P"]:
        """Validate targets that are to be scored, and standardise them."""
        Y = Dataset.of(inputs, validation.tensor(y), missing=self.P > 1).Y
        if Y.shape[1] != self.P:
            raise InputError(
                f"`y` must have {self.P} target columns as in `fit`; got {Y.shape[1]}."
            )
        Y = self.columns.forward(logarithm(Y) if self.log else Y)
        observation_model(likelihood).check_targets(Y)
        return Y

    def values(self, Y: Float[Tensor, "*S P"]) -> NDArray[np.float64]:
        """Return quantiles or samples, or without a logarithm means, in the targets' units."""
        values = self.columns.inverse(Y)
        return self._array(values.exp() if self.log else values)

    def moments(
        self, mean: Float[Tensor, "N P"], variance: Float[Tensor, "N P"]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return mean and standard deviation of y; log-normal if log y is Gaussian.

        E y = exp(m + v/2),   Var y = (E y)² (eᵛ − 1)
        """
        if not self.log:
            return self.values(mean), self.deviations(variance.sqrt())
        v = variance * self.columns.scale.square()
        level = (self.columns.inverse(mean) + 0.5 * v).exp()
        return self._array(level), self._array(level * v.expm1().sqrt())

    def joint_moments(
        self, mean: Float[Tensor, "N P"], covariance: Float[Tensor, "N N P"]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return mean and covariance of y; if log y is Gaussian, E yᵢ E yⱼ (exp Cᵢⱼ − 1)."""
        if not self.log:
            return self.values(mean), self.variances(covariance)
        C = covariance * self.columns.scale.square()
        level = (self.columns.inverse(mean) + 0.5 * C.diagonal().mT).exp()
        return self._array(level), self._array(level[:, None] * level * C.expm1())

    def deviations(self, sd: Float[Tensor, "*S P"]) -> NDArray[np.float64]:
        """Return standard deviations in the units of the targets."""
        return self._array(sd * self.columns.scale)

    def variances(self, variance: Float[Tensor, "*S P"]) -> NDArray[np.float64]:
        """Return variances or covariances in the squared units of the targets."""
        return self._array(variance * self.columns.scale.square())

    def log_densities(
        self, nats: Float[Tensor, "N P"], Y: Float[Tensor, "N P"]
    ) -> NDArray[np.float64]:
        """Return log densities of the targets: log p(y) = log p(z) − log scale, and − log y if
        z is their standardised logarithm.

        Args:
            nats: log densities of the standardised targets.
            Y: standardised targets.
        """
        nats = nats - self.columns.scale.log()
        return self._array(nats - self.columns.inverse(Y) if self.log else nats)

    def noise(self, likelihood: Likelihood) -> NDArray[np.float64]:
        """Return the noise variance of each target or its logarithm, `[P]`; NaN without noise."""
        if not validation.has_noise(likelihood):
            return np.full(self.P, np.nan)
        return (likelihood.noise * self.columns.scale.square()).detach().numpy()

    def _array(self, values: Tensor) -> NDArray[np.float64]:
        """Drop the last axis, that of the targets, if `fit` received targets `[N]`."""
        return (values[..., 0] if self.single else values).numpy()


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
            y: targets `[N]` or `[N P]`; left out with a source. Of several targets, those that are
                NaN are missing (`SparseGPRegressor` with a Gaussian likelihood).
            sample_weight: weights `[N]`, 1 for each row by default. The log-likelihood of a row is
                multiplied by its weight: a row of weight 2 counts as two rows, and a row of weight
                0 is left out.
            noise_variance: known variances of the noise of each row, in the squared units of `y`:
                one number, `[N]` or `[N P]`. The noise of a row has this variance plus the learnt
                one, unless `noise="known"`. For `SparseGPRegressor` with a Gaussian likelihood; a
                source has its own (`Dataset.noise`).
        """
        params = self._validate()
        if isinstance(X, Source):
            self._refuse_logarithm_of_source()
            validation.set_source_columns(self, X, y, sample_weight, noise_variance)
            self._check_columns(params, X.D)
            self._check_targets(params, X)
            rows, scaler = self._rows_of_source(X, params)
        else:
            data, single = self._rows_of_arrays(X, y, sample_weight, noise_variance)
            self._check_columns(params, data.D)
            self._check_targets(params, data)
            rows, scaler = _scaled_targets(data, params.likelihood, single=single)
        params.likelihood = self._likelihood_of(params, rows.P)
        self._fit(rows, params)
        self._y_scaler = replace(scaler, log=self._takes_logarithm())
        self.likelihood_ = self.posterior_.likelihood
        self._note_rows(rows)
        self.noise_ = scaler.noise(self.likelihood_)
        self._warn_of_limits()
        return self

    def log_density(self, X: Any, y: Any, *, noise_variance: Any = None) -> NDArray[np.float64]:
        """Return the log predictive density of each observation, in nats.

        It is the density in the units of `y`; NaN for a missing target of several.

        Args:
            X: inputs `[N D]`.
            y: targets `[N]` or `[N P]`.
            noise_variance: known noise variances of these observations, as in `fit`; they are added
                to the learnt one.
        """
        inputs = self._inputs(X)
        known = self._known_noise(noise_variance, len(inputs))
        targets = self._y_scaler.standardise(y, self.likelihood_, inputs=inputs)
        nats = self._log_density(inputs, targets, noise=known)
        return self._y_scaler.log_densities(nats, targets)

    def _check_targets(self, params: validation.Parameters, data: Source) -> None:
        super()._check_targets(params, data)
        rows = data.as_dataset()
        self._check_noise(params, data, missing=rows is not None and not rows.complete)

    def _check_noise(self, params: validation.Parameters, data: Source, *, missing: bool) -> None:
        """Raise an error if this model cannot have known noise, or missing targets."""
        if missing or data.has_noise:
            what = "missing targets" if missing else "`noise_variance`"
            raise InputError(
                f"{what} need a `SparseGPRegressor` with Gaussian noise; got a "
                f"{type(self).__name__}. Leave incomplete rows and the noise out."
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

    def _known_noise(self, noise_variance: Any, N: int, *, observed: bool = True) -> Tensor | None:
        """Validate known noise variances of new rows; return them for standardised targets."""
        variances = validation.noise_variances(noise_variance, (N, self._y_scaler.P))
        if variances is None:
            return None
        if not observed:
            raise InputError(
                "`noise_variance` is the noise of observations; got it with `observed=False`. "
                "Leave one of them out."
            )
        gaussian = is_plain(self.likelihood_, GaussianLikelihood)
        if self._takes_logarithm() or not (gaussian and isinstance(self.posterior_, Posterior)):
            raise InputError(
                "`noise_variance` needs a `SparseGPRegressor` with Gaussian noise, and without "
                "`log_target`. Leave it out."
            )
        variances = variances / self._y_scaler.columns.scale.square()
        return variances.to(posterior_device(self.posterior_))

    def _note_rows(self, rows: Source) -> None:
        """Note what later batches need to know of the rows of a fit."""

    def _takes_logarithm(self) -> bool:
        """Return whether the model is one of log y."""
        return False

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
        p = validation.tensor(probabilities, name="probabilities", hint="Pass one or several.")
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
        each; of counts with no more than that.

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
        y, missing = validation.missing_targets(y)
        X, y = validate_data(
            self,
            dates_as_days(X),
            y,
            dtype=np.float64,
            multi_output=True,
            y_numeric=True,
            ensure_min_samples=1,
            reset=reset,
        )
        Y, single = validation.tensor(y), np.ndim(y) == 1
        Y = Y[:, None] if single else Y
        if missing is not None:
            Y[torch.from_numpy(missing)] = torch.nan
        noise = validation.noise_variances(noise_variance, (len(Y), Y.shape[1]))
        X, kept, weights = validation.weighted_rows(X, np.arange(len(X)), sample_weight)
        Y = logarithm(Y[kept]) if self._takes_logarithm() else Y[kept]
        data = Dataset(validation.tensor(X), Y, weights, None if noise is None else noise[kept])
        data = _with_targets(data)
        return Dataset.of(
            data.X, data.Y, weights=data.weights, noise=data.noise, missing=missing is not None
        ).merged(), single

    def _rows_of_source(
        self, source: Source, params: validation.Parameters
    ) -> tuple[Source, TargetScaler]:
        if not self._out_of_core:
            data = validation.rows_in_memory(source, "a deep model").merged()
            rows, scaler = _scaled_targets(data, params.likelihood, single=source.P == 1)
            return source.with_rows(rows), scaler
        if params.schedule == "paper" or self.likelihood != "gaussian":
            source.require_dataset("this fit")
        data = source.as_dataset()
        if data is not None and not data.complete:
            raise InputError("a source must have all targets; pass arrays if some are missing.")
        rows = standardise(source, targets=validation.has_noise(params.likelihood))
        if (dataset := rows.as_dataset()) is not None:
            observation_model(params.likelihood).check_targets(dataset.Y)
        return rows, TargetScaler(cpu_scaler(rows.y_scaler), single=rows.P == 1)


def logarithm(Y: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return log Y, or raise an error that names the first row that is not positive."""
    wrong = (Y <= 0).nonzero()
    if len(wrong):
        at = tuple(wrong[0].tolist())
        raise InputError(
            f"`log_target` needs positive targets; got {Y[at]:g} in row {at[0] + 1}. Leave such "
            "rows out, add a constant to the target, or fit without the logarithm."
        )
    return Y.log()


def _with_targets(data: Dataset) -> Dataset:
    """Return the rows that have a target, with a warning if others are left out."""
    empty = torch.isnan(data.Y).all(1)
    if not bool(empty.any()):
        return data
    warnings.warn(
        f"{int(empty.sum())} of {data.N} rows have no target and were left out of the fit; the "
        f"first is row {int(empty.nonzero()[0])} (counted from 0).",
        MissingTargetsWarning,
        stacklevel=4,
    )
    return data.part((~empty).nonzero().flatten())


def _scaled_targets(
    data: Dataset, likelihood: Likelihood, *, single: bool
) -> tuple[Dataset, TargetScaler]:
    scaler = TargetScaler.of(data, likelihood, single=single)
    noise = None if data.noise is None else data.noise / scaler.columns.scale.square()
    rows = replace(data, Y=scaler.columns.forward(data.Y), noise=noise)
    observation_model(likelihood).check_targets(rows.Y)
    return rows, scaler


@final
@documented
@dataclass(kw_only=True, eq=False, repr=False)
class SparseGPRegressor(StreamingEstimator, NumericTargets):
    """Sparse Gaussian process regression that selects the number of its inducing points.

    Inputs and targets are standardised internally; arguments and attributes are in your own units
    unless their description says otherwise. Several target columns share the kernel and the
    inducing points; each has its own noise (see `noise`), and some of them may be missing (NaN) in
    some rows.

    The number of inducing points is set by `tolerance` (the default), by `max_points` or
    `max_predict_us`, by a tolerance and one of these limits together, or by a number for `alpha`.

    Args:
        noise_kernel: kernel of the log noise variance for `likelihood="heteroscedastic"`: a string
            or a GPyTorch kernel for standardised inputs, as for `kernel`. The log noise has
            inducing points of its own, as few as `tolerance` allows; none if noise does not vary.
        precision: "double"; or "mixed" for the collapsed bound (`likelihood="gaussian"` and the
            fast schedule): blocks of rows in float32, sums over rows in float64. It halves the
            memory on a GPU, and is faster where float32 is.
        priors: "weak" adds priors of short lengthscales, kernel variances and noise to the
            objective of the fast schedule, if noise is Gaussian and the kernel is a string. They
            prevent overfitting of few rows, and have hardly any effect with a thousand. None adds
            none. Priors that are registered on a GPyTorch kernel are always used.
        log_target: whether the model is a Gaussian process of log y, for positive targets whose
            spread grows with their level. Predictions are exact log-normal distributions of y:
            means, deviations, quantiles, samples and densities are in the units of y, so that they
            compare with those of other models. `noise_` and the latent function are those of log y.

    >>> X = np.linspace(0, 6, 50)[:, None]
    >>> model = SparseGPRegressor(random_state=0).fit(X, np.sin(X[:, 0]))
    >>> model.n_inducing_ < 12
    True
    """

    noise_kernel: Any = "rbf"
    precision: str = "double"
    priors: str | None = "weak"
    log_target: bool = False

    _out_of_core: ClassVar[bool] = True
    _constraints: ClassVar[Mapping[str, validation.Constraint]] = {
        **StreamingEstimator._constraints,
        "likelihood": validation.regression_likelihood,
    }

    @property
    def n_noise_inducing_(self) -> int:
        """Number of inducing points of the log noise; zero if noise does not vary."""
        return self._log_noise("n_noise_inducing_").M

    @property
    def noise_inducing_points_(self) -> NDArray[np.float64]:
        """Locations of the inducing points of the log noise, `[M D]`."""
        return self._x_scaler.inverse(self._log_noise("noise_inducing_points_").Z).numpy()

    @torch.no_grad()
    def predict_noise(self, X: Any) -> NDArray[np.float64]:
        """Return the standard deviation of the noise of each row, `[N]` or `[N P]`.

        With `likelihood="heteroscedastic"` it is the root of the expected noise variance, so that
        the variance of an observation is the sum of its square and that of the function.

        Args:
            X: inputs `[N D]`.
        """
        inputs = self._inputs(X)
        self._refuse_logarithm("noise in the units of the targets")
        if not isinstance(self.likelihood_, GaussianLikelihood | HeteroscedasticLikelihood):
            raise InputError(
                "`predict_noise` needs Gaussian noise, 'gaussian' or 'heteroscedastic'; got "
                f"`likelihood={self.likelihood!r}`."
            )
        if not isinstance(self.posterior_, HeteroscedasticPosterior):
            variance = self.likelihood_.noise.expand(len(inputs), self.posterior_.P)
        else:
            chunks = inputs.split(rows_at_once(self.posterior_))
            variance = torch.cat([self.posterior_.predict_noise(rows).mean for rows in chunks])
        return self._y_scaler.deviations(variance.sqrt().cpu())

    def partial_fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> Self:
        """Learn from one more batch of rows, without the rows of earlier batches.

        The first call is `fit`, which fixes the kernel and the scaling of inputs and targets; the
        estimator may also have been fitted or loaded. Later calls update the hyper-parameters, add
        rows of the batch to the inducing points, and drop those that are no longer needed, so that
        all selections together give up at most `tolerance` nats per observation. After an error
        the estimator is as it was.

        Args:
            X: inputs `[N D]`; or inputs and targets together as a `winnowgp.data.Source`, which is
                read in batches of 4,096 rows.
            y: targets `[N]` or `[N P]`; left out with a source.
            sample_weight: weights `[N]`, as in `fit`.
        """
        self._check_stream(X, y)
        if not hasattr(self, "posterior_"):
            return self.fit(X, y, sample_weight)
        params = self._validate_stream()
        self._check_columns(params, self.n_features_in_)
        if isinstance(X, Source):
            self._refuse_logarithm_of_source()
            validation.check_source_columns(self, X, y, sample_weight)
            rows = batches_of(X)
        else:
            rows = self._rows_of_arrays(X, y, sample_weight, reset=False)[0].chunks(BATCH_ROWS)
        return self._update(map(self._standardised, rows), params)

    def _note_rows(self, rows: Source) -> None:
        plain = not rows.has_noise and (not isinstance(rows, Dataset) or rows.complete)
        if not plain and self._stream is not None:
            # Later batches would mistake them for rows with the learnt noise.
            self._stream = replace(self._stream, remembered=nan)

    def _check_stream(self, X: Any, y: Any) -> None:
        """Raise an error if the noise is of a kind that a stream does not remember."""
        targets = X.P if isinstance(X, Source) else (*np.shape(y), 1, 1)[1]
        own = self.likelihood == "gaussian" and self.noise == "target" and targets > 1
        if own or self.noise == "known" or self.likelihood == validation.HETEROSCEDASTIC:
            raise InputError(
                "`partial_fit` needs one learnt noise variance for all rows and targets; got "
                f"likelihood={self.likelihood!r} and noise={self.noise!r} for {targets} targets. "
                "Pass noise='shared', or fit one model per target."
            )

    def _standardised(self, rows: Dataset) -> Dataset:
        """Return a batch in the units of the first one."""
        if rows.has_noise or not rows.complete:
            raise InputError(
                "`partial_fit` needs rows without missing targets and without known noise; leave "
                "such rows out, or fit all rows together."
            )
        scaler = self._y_scaler
        if rows.P != scaler.P:
            raise InputError(f"`y` must have {scaler.P} target columns as before; got {rows.P}.")
        data = Dataset(self._x_scaler.forward(rows.X), scaler.columns.forward(rows.Y), rows.weights)
        observation_model(self.likelihood_).check_targets(data.Y)
        return data

    def _mean_log_density(self, data: Dataset) -> float:
        nats = self._log_density(data.X, data.Y)
        return float(np.mean(self._y_scaler.log_densities(nats, data.Y)))

    def predict(
        self,
        X: Any,
        return_std: bool = False,
        return_cov: bool = False,
        *,
        observed: bool = True,
        noise_variance: Any = None,
    ) -> Any:
        """Return the predictive mean, and on request the standard deviation or the covariance.

        Args:
            X: inputs `[N D]`.
            return_std: whether to return the standard deviation of each row as well.
            return_cov: whether to return the covariance between all rows as well, `[N N]` or
                `[N N P]`. Unless the likelihood is Gaussian, only the covariance of the latent
                function is known: pass `observed=False`.
            observed: whether to predict a new observation, noise included, or the latent function.
            noise_variance: known noise variances of these observations, as in `fit`. They are added
                to the learnt one, which is all the noise of an observation otherwise.

        Returns: the mean `[N]` or `[N P]`; with `return_std` or `return_cov` a pair.
        """
        if return_std and return_cov:
            raise InputError("`return_std` and `return_cov` cannot both be True; choose one.")
        inputs = self._inputs(X)
        known = self._known_noise(noise_variance, len(inputs), observed=observed)
        if return_cov:
            mean = self.posterior_.predict_mean(inputs).cpu()
            extra = {} if known is None else {"noise": known}
            covariance = self.posterior_.covariance(inputs, observed=observed, **extra)
            return self._y_scaler.joint_moments(mean, covariance.permute(1, 2, 0).cpu())
        symmetric = validation.has_noise(self.likelihood_) and not self.log_target
        if not return_std and (symmetric or not (observed or self.log_target)):
            # The mean of the function is that of an observation, and costs O(M) per row.
            chunks = inputs.split(rows_at_once(self.posterior_))
            mean = torch.cat([self.posterior_.predict_mean(rows) for rows in chunks])
            return self._y_scaler.values(mean.cpu())
        prediction = self._predict_latent(
            inputs, self.posterior_.predict, observed=observed, noise=known
        )
        mean, sd = self._y_scaler.moments(prediction.mean, prediction.variance)
        return (mean, sd) if return_std else mean

    def sample_y(
        self,
        X: Any,
        n_samples: int = 1,
        random_state: int | np.random.RandomState | None = 0,
    ) -> NDArray[np.float64]:
        """Return joint samples of the latent function, `[N n_samples]` or `[N P n_samples]`."""
        seed = int(check_random_state(random_state).randint(2**31))
        inputs = self._inputs(X)
        generator = torch.Generator(inputs.device).manual_seed(seed)
        samples = self.posterior_.sample(inputs, n_samples, generator=generator).cpu()
        return np.moveaxis(self._y_scaler.values(samples), 0, -1)

    def sample_functions(
        self, n_samples: int = 1, random_state: int | np.random.RandomState | None = 0
    ) -> "SampledFunctions":
        """Return functions drawn from the posterior of the latent function.

        They can be evaluated at any rows, one call after another, at O(M) per row: an array of rows
        gives an array, and a tensor gives a tensor that is differentiable in the rows. See
        `winnowgp.models.PosteriorPaths` for the kernels that this is possible for; `sample_y` draws
        at given rows with any kernel, O(N³).

        Args:
            n_samples: number of functions.
            random_state: seed or RandomState.
        """
        check_is_fitted(self)
        self._refuse_logarithm("functions that are differentiable in tensors")
        count = validation.integer("n_samples", n_samples)
        seed = int(check_random_state(random_state).randint(2**31))
        generator = torch.Generator(self.posterior_.Z.device).manual_seed(seed)
        function = self.posterior_
        if isinstance(function, HeteroscedasticPosterior):
            function = function.function
        return SampledFunctions(self, PosteriorPaths(function, count, generator=generator))

    def _takes_logarithm(self) -> bool:
        return self.log_target

    def _latents(self, inputs: Tensor) -> Prediction:
        """Return mean and variance of the latent functions that the likelihood acts on."""
        posterior = self.posterior_
        if not isinstance(posterior, HeteroscedasticPosterior):
            return self._predict_latent(inputs, posterior.predict, observed=False)
        return self._predict_latent(
            inputs, lambda rows, observed: posterior.latents(rows), observed=False
        )

    def _log_noise(self, attribute: str) -> Posterior:
        """Return q(g), or raise an error if the model has none."""
        if not isinstance(getattr(self, "posterior_", None), HeteroscedasticPosterior):
            raise AttributeError(
                f"`{attribute}` exists after a fit with `likelihood='heteroscedastic'` only."
            )
        return self.posterior_.log_noise

    def _refuse_varying_noise(self, what: str) -> None:
        """Raise an `InputError` if noise depends on the inputs, which `what` cannot represent."""
        if isinstance(self.posterior_, HeteroscedasticPosterior):
            raise InputError(
                f"{what} cannot represent noise that depends on the inputs; fit with "
                "`likelihood='gaussian'`, or save the model with `save`."
            )

    def _refuse_logarithm(self, what: str) -> None:
        """Raise an `InputError` if y is log-normal, which `what` cannot represent."""
        if self.log_target:
            raise InputError(
                f"`log_target` must be False for {what}; fit a model of log y, without "
                "`log_target`, and convert that one."
            )

    def _check_combination(self, params: validation.Parameters) -> None:
        super()._check_combination(params)
        if params.log_target and not is_plain(params.likelihood, GaussianLikelihood):
            raise InputError(
                "`log_target` needs Gaussian noise: with heavier tails the mean of y is infinite, "
                "and counts and proportions have their own likelihoods; "
                f"got `likelihood={self.likelihood!r}`."
            )
        validation.refuse_other_schedule(params, fast={"precision": "double"}, paper={})
        if self.likelihood == validation.HETEROSCEDASTIC:
            _check_varying_noise(params)
        params.weak_priors = (
            params.priors == "weak"
            and params.schedule == "fast"
            and self._collapsed(params)
            and not isinstance(self.kernel, Kernel)
        )
        if params.precision != "double" and not self._collapsed(params):
            raise InputError(
                f"`precision` must be 'double' unless noise is Gaussian; got {params.precision!r}."
            )

    def _check_columns(self, params: validation.Parameters, D: int) -> None:
        super()._check_columns(params, D)
        if self.likelihood == validation.HETEROSCEDASTIC:
            # The string may name columns.
            if isinstance(params.noise_kernel, str):
                names = getattr(self, "feature_names_in_", ())
                columns = {str(name): [number] for number, name in enumerate(names)}
                params.noise_kernel = parse_kernel(params.noise_kernel, D, columns=columns)
            check_kernel_columns(kernel_from(params.noise_kernel, D), D)

    def _collapsed(self, params: validation.Parameters) -> bool:
        gaussian = self.likelihood in ("gaussian", validation.HETEROSCEDASTIC)
        return gaussian and params.batch_size is None

    def _check_noise(self, params: validation.Parameters, data: Source, *, missing: bool) -> None:
        plain = self.likelihood == "gaussian" and params.batch_size is None
        if not plain and (missing or data.has_noise or params.noise == "known"):
            what = "missing targets" if missing else "known noise"
            raise InputError(
                f"{what} can be used with `likelihood='gaussian'` and without `batch_size`; got "
                f"likelihood={self.likelihood!r} and batch_size={params.batch_size!r}. Other "
                "likelihoods define the noise themselves."
            )
        if data.has_noise and params.log_target:
            raise InputError(
                "`noise_variance` is that of y, and the model is one of log y; pass log y and the "
                "variances of its noise to a model without `log_target`."
            )
        if params.noise == "known" and not data.has_noise:
            raise InputError(
                "`noise='known'` needs `noise_variance`, the variances of the noise; got none. "
                "Pass them to `fit`, or leave `noise` out to learn the noise."
            )

    def _model(
        self, kernel: Kernel, candidates: Tensor, data: Source, params: validation.Parameters
    ) -> InducingModel | HeteroscedasticGP:
        if self._collapsed(params):
            noise = 1.0
            if params.noise == "target" and data.P > 1:
                noise = candidates.new_ones(data.P)
            elif params.noise == "known":
                noise = _NEGLIGIBLE
            model = SparseGP(
                kernel,
                candidates,
                mean=params.prior_mean,
                noise=noise,
                precision=params.precision,
            )
            if params.noise == "known":
                model.likelihood.requires_grad_(False)
            elif params.weak_priors:
                add_weak_priors(model.likelihood)
            model = model.to(params.device)
            if self.likelihood == validation.HETEROSCEDASTIC:
                return _with_log_noise(model, params)
            return model
        model = VariationalGP(
            kernel,
            candidates,
            mean=params.prior_mean,
            likelihood=params.likelihood,
            targets=data.P,
        ).to(params.device)
        constant = isinstance(model.mean, ConstantMean) and not isinstance(self.mean, Mean)
        if constant and not validation.has_noise(params.likelihood):
            # Counts may be further from zero than the small steps of the paper's schedule reach.
            rows = data.require_dataset("a likelihood without noise")
            model.mean.initialize(constant=best_level(model.likelihood, rows))
        return model

    def _update_once(self, data: Dataset, params: validation.Parameters) -> None:
        super()._update_once(data, params)
        self.likelihood_ = self.posterior_.likelihood
        self.noise_ = self._y_scaler.noise(self.likelihood_)

    def _set_sized(self, sized: SizedModel) -> None:
        super()._set_sized(sized)
        self.likelihood_ = self.posterior_.likelihood
        self.noise_ = self._y_scaler.noise(self.likelihood_)


def _check_varying_noise(params: validation.Parameters) -> None:
    """Raise an `InputError` if other parameters cannot be used with noise that varies."""
    others = {
        "schedule": ("fast", "the paper's schedule has constant noise"),
        "warm_start": (False, "a fit begins with constant noise"),
        "max_predict_us": (None, "set `max_points` instead"),
    }
    for name, (allowed, why) in others.items():
        if getattr(params, name) != allowed:
            raise InputError(
                f"`{name}` must be {allowed!r} for `likelihood='heteroscedastic'`: {why}; got "
                f"{getattr(params, name)!r}."
            )


def _with_log_noise(function: SparseGP, params: validation.Parameters) -> HeteroscedasticGP:
    """Return the model with a process for the log noise, whose candidates the schedule selects."""
    D = function.candidates.shape[1]
    kernel = kernel_from(params.noise_kernel, D, scale=params.x_scaler.scale)
    if params.priors == "weak" and not isinstance(params.noise_kernel, Kernel):
        add_weak_priors(kernel)
    none = function.candidates.detach()[:0]
    log_noise = VariationalGP(kernel, none, likelihood=LogVarianceLikelihood())
    return HeteroscedasticGP(function, log_noise.to(params.device))


@final
class SampledFunctions:
    """Functions drawn by `SparseGPRegressor.sample_functions`, in the units of the data."""

    def __init__(self, regressor: SparseGPRegressor, paths: PosteriorPaths) -> None:
        # Scalers and the columns of `X` are those of this fit, also after another one.
        self._regressor, self._paths = copy(regressor), paths

    def __call__(self, X: Any) -> Any:
        """Return the values of the functions at rows `[N D]`, `[N n_samples]` or `[N P n_samples]`.

        The result is a tensor, differentiable in the rows, if `X` is one.
        """
        fitted = self._regressor
        if not isinstance(X, Tensor):
            with torch.no_grad():
                values = self._paths(fitted._inputs(X)).cpu()
            return np.moveaxis(fitted._y_scaler.values(values), 0, -1)
        values = self._paths(fitted._x_scaler.forward(X))
        values = fitted._y_scaler.columns.inverse(values).movedim(0, -1)
        return values[:, 0] if fitted._y_scaler.single else values
