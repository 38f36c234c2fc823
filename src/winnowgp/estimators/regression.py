"""Regression: numeric targets and their scaler, and the sparse GP regressor."""

from copy import copy
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, ClassVar, Self, final

import numpy as np
import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import GaussianLikelihood, Likelihood
from jaxtyping import Float
from numpy.typing import ArrayLike, NDArray
from sklearn.base import MultiOutputMixin, RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from winnowgp.data import Dataset, Source, Standardiser, standardise
from winnowgp.data.frames import dates_as_days
from winnowgp.errors import InputError
from winnowgp.estimators import validation
from winnowgp.estimators.base import BaseGP, cpu_scaler, rows_at_once
from winnowgp.estimators.docstrings import documented
from winnowgp.estimators.streaming import BATCH_ROWS, StreamingEstimator, batches_of
from winnowgp.models import PosteriorPaths, SparseGP, VariationalGP
from winnowgp.models.base import InducingModel
from winnowgp.models.likelihoods import is_plain, observation_model
from winnowgp.models.priors import add_weak_priors
from winnowgp.training.initialization import best_level
from winnowgp.training.schedules import SizedModel


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
        Y = Dataset.of(inputs, validation.tensor(y)).Y
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
            GPyTorch likelihoods.

    Attributes:
        noise_: noise variance of each target (squared scale of Student's t and Laplace), `[P]`; NaN
            if the likelihood has none.
        likelihood_: the fitted likelihood, for standardised targets.
    """

    likelihood: str | Likelihood = "gaussian"

    # Whether sources may be larger than memory.
    _out_of_core: ClassVar[bool] = False

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> Self:
        """Learn the hyper-parameters and the likelihood, and select inducing points.

        Args:
            X: inputs `[N D]`; or inputs and targets together as a `winnowgp.data.Source`. For
                `SparseGPRegressor` with a Gaussian likelihood and the fast schedule it may be
                larger than memory (`ParquetSource`, `ArraySource`, `BatchSource`). Processes that
                `torchrun` started share the rows of `winnowgp.data.shard(source)`.
            y: targets `[N]` or `[N P]`; left out with a source.
            sample_weight: weights `[N]`, 1 for each row by default. The log-likelihood of a row is
                multiplied by its weight: a row of weight 2 counts as two rows, and a row of weight
                0 is left out.
        """
        params = self._validate()
        if isinstance(X, Source):
            self._refuse_logarithm_of_source()
            validation.set_source_columns(self, X, y, sample_weight)
            self._check_columns(params, X.D)
            rows, scaler = self._rows_of_source(X, params)
        else:
            data, single = self._rows_of_arrays(X, y, sample_weight)
            self._check_columns(params, data.D)
            rows, scaler = _scaled_targets(data, params.likelihood, single=single)
        self._fit(rows, params)
        self._y_scaler = replace(scaler, log=self._takes_logarithm())
        self.likelihood_ = self.posterior_.likelihood
        self.noise_ = scaler.noise(self.likelihood_)
        self._warn_of_limits()
        return self

    def log_density(self, X: Any, y: Any) -> NDArray[np.float64]:
        """Return the log predictive density of each observation, in nats.

        It is the density in the units of `y`.
        """
        inputs = self._inputs(X)
        targets = self._y_scaler.standardise(y, self.likelihood_, inputs=inputs)
        return self._y_scaler.log_densities(self._log_density(inputs, targets), targets)

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
        self, X: Any, probabilities: ArrayLike, *, observed: bool = True
    ) -> NDArray[np.float64]:
        """Return exact quantiles of the predictive distribution, `[Q N]` or `[Q N P]`.

        They invert its distribution function: a quantile of counts is the least count that is not
        exceeded with this probability. Those of a deep model are of the mixture of its samples.

        Args:
            X: inputs `[N D]`.
            probabilities: Q probabilities, strictly between 0 and 1.
            observed: whether to return quantiles of a new observation or of the latent function.
        """
        p = validation.tensor(probabilities, name="probabilities", hint="Pass one or several.")
        chunks = self._inputs(X).split(rows_at_once(self.posterior_))
        p = p.reshape(-1).to(chunks[0])
        quantiles = [self.posterior_.quantiles(rows, p, observed=observed) for rows in chunks]
        return self._y_scaler.values(torch.cat(quantiles, dim=1).cpu())

    def predict_interval(
        self, X: Any, level: float = 0.95, *, observed: bool = True
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return lower and upper ends of central intervals, `[N]` or `[N P]` each.

        A new observation is below the interval, and above it, with a probability of (1 − level)/2
        each; of counts with no more than that.

        Args:
            X: inputs `[N D]`.
            level: probability of the interval, strictly between 0 and 1.
            observed: whether the interval is that of a new observation or of the latent function.
        """
        if isinstance(level, bool) or not isinstance(level, Real) or not 0 < float(level) < 1:
            raise InputError(
                f"`level` must be a probability between 0 and 1, such as 0.95; got {level!r}."
            )
        tail = (1 - float(level)) / 2
        lower, upper = self.predict_quantiles(X, [tail, 1 - tail], observed=observed)
        return lower, upper

    def _rows_of_arrays(
        self, X: Any, y: Any, sample_weight: Any, *, reset: bool = True
    ) -> tuple[Dataset, bool]:
        """Return merged rows, and whether targets have shape `[N]` rather than `[N P]`.

        Args:
            reset: whether the rows set the columns of the estimator, or must have them.
        """
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
        X, y, weights = validation.weighted_rows(X, y, sample_weight)
        Y = validation.tensor(y)
        Y = logarithm(Y) if self._takes_logarithm() else Y
        return Dataset.of(validation.tensor(X), Y, weights=weights).merged(), np.ndim(y) == 1

    def _rows_of_source(
        self, source: Source, params: validation.Parameters
    ) -> tuple[Source, TargetScaler]:
        if not self._out_of_core:
            data = validation.rows_in_memory(source, "a deep model").merged()
            rows, scaler = _scaled_targets(data, params.likelihood, single=source.P == 1)
            return source.with_rows(rows), scaler
        if params.schedule == "paper" or self.likelihood != "gaussian":
            source.require_dataset("this fit")
        rows = standardise(source, targets=validation.has_noise(params.likelihood))
        if (dataset := rows.as_dataset()) is not None:
            observation_model(params.likelihood).check_targets(dataset.Y)
        return rows, TargetScaler(cpu_scaler(rows.y_scaler), single=rows.P == 1)


def logarithm(Y: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return log Y, or raise an error that names the first row that is not positive."""
    wrong = (~(Y > 0)).nonzero()
    if len(wrong):
        at = tuple(wrong[0].tolist())
        raise InputError(
            f"`log_target` needs positive targets; got {Y[at]:g} in row {at[0] + 1}. Leave such "
            "rows out, add a constant to the target, or fit without the logarithm."
        )
    return Y.log()


def _scaled_targets(
    data: Dataset, likelihood: Likelihood, *, single: bool
) -> tuple[Dataset, TargetScaler]:
    scaler = TargetScaler.of(data, likelihood, single=single)
    rows = replace(data, Y=scaler.columns.forward(data.Y))
    observation_model(likelihood).check_targets(rows.Y)
    return rows, scaler


@final
@documented
@dataclass(kw_only=True, eq=False, repr=False)
class SparseGPRegressor(StreamingEstimator, NumericTargets):
    """Sparse Gaussian process regression that selects the number of its inducing points.

    Inputs and targets are standardised internally; arguments and attributes are in your own units
    unless their description says otherwise. Several target columns share the kernel and the
    inducing points.

    The number of inducing points is set by `tolerance` (the default), by `max_points` or
    `max_predict_us`, by a tolerance and one of these limits together, or by a number for `alpha`.

    Args:
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

    precision: str = "double"
    priors: str | None = "weak"
    log_target: bool = False

    _out_of_core: ClassVar[bool] = True

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

    def _standardised(self, rows: Dataset) -> Dataset:
        """Return a batch in the units of the first one."""
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
    ) -> Any:
        """Return the predictive mean, and on request the standard deviation or the covariance.

        Args:
            X: inputs `[N D]`.
            return_std: whether to return the standard deviation of each row as well.
            return_cov: whether to return the covariance between all rows as well, `[N N]` or
                `[N N P]`. Unless the likelihood is Gaussian, only the covariance of the latent
                function is known: pass `observed=False`.
            observed: whether to predict a new observation, noise included, or the latent function.

        Returns: the mean `[N]` or `[N P]`; with `return_std` or `return_cov` a pair.
        """
        if return_std and return_cov:
            raise InputError("`return_std` and `return_cov` cannot both be True; choose one.")
        inputs = self._inputs(X)
        if return_cov:
            mean = self.posterior_.predict_mean(inputs).cpu()
            covariance = self.posterior_.covariance(inputs, observed=observed).permute(1, 2, 0)
            return self._y_scaler.joint_moments(mean, covariance.cpu())
        symmetric = validation.has_noise(self.likelihood_) and not self.log_target
        if not return_std and (symmetric or not (observed or self.log_target)):
            # The mean of the function is that of an observation, and costs O(M) per row.
            chunks = inputs.split(rows_at_once(self.posterior_))
            mean = torch.cat([self.posterior_.predict_mean(rows) for rows in chunks])
            return self._y_scaler.values(mean.cpu())
        prediction = self._predict_latent(inputs, self.posterior_.predict, observed=observed)
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
        return SampledFunctions(self, PosteriorPaths(self.posterior_, count, generator=generator))

    def _takes_logarithm(self) -> bool:
        return self.log_target

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

    def _collapsed(self, params: validation.Parameters) -> bool:
        return self.likelihood == "gaussian" and params.batch_size is None

    def _model(
        self, kernel: Kernel, candidates: Tensor, data: Source, params: validation.Parameters
    ) -> InducingModel:
        if self._collapsed(params):
            model = SparseGP(kernel, candidates, precision=params.precision).to(params.device)
            if params.weak_priors:
                add_weak_priors(model.likelihood)
            return model
        model = VariationalGP(kernel, candidates, likelihood=params.likelihood, targets=data.P)
        model = model.to(params.device)
        if not validation.has_noise(params.likelihood):
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
