"""Regression: the sparse GP regressor, and functions drawn from its posterior."""

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, ClassVar, final

import numpy as np
import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import GaussianLikelihood, Likelihood
from gpytorch.means import ConstantMean, Mean
from numpy.typing import NDArray
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from winnowgp.data import Dataset, Source
from winnowgp.data.noise import pooled
from winnowgp.errors import InputError
from winnowgp.estimators import validation
from winnowgp.estimators.base import check_kernel_columns, documented, rows_at_once
from winnowgp.estimators.kernels import kernel_from, parse_kernel
from winnowgp.estimators.selection import (
    HYPER,
    OUTLIER_GAIN,
    check_hyper,
    gaussian_posterior,
    resolve_hyper_by_rows,
)
from winnowgp.estimators.streaming_regression import NEGLIGIBLE, StreamingRegressor
from winnowgp.models import MixturePosterior, Posterior, PosteriorPaths, SparseGP, VariationalGP
from winnowgp.models.base import InducingModel
from winnowgp.models.heteroscedastic import (
    HeteroscedasticGP,
    HeteroscedasticPosterior,
    LogVarianceLikelihood,
)
from winnowgp.models.likelihoods import HeteroscedasticLikelihood, has_noise, is_plain
from winnowgp.models.mixture import MixturePaths
from winnowgp.models.observations import Prediction
from winnowgp.models.priors import add_weak_priors
from winnowgp.training import FitResult
from winnowgp.training.confirmation import CONFIRMED_ROWS
from winnowgp.training.initialization import best_level
from winnowgp.training.laplace import (
    MOST_ROWS,
    with_constant,
    with_uncertain_hyperparameters,
)
from winnowgp.training.schedules import SizedModel


@final
@documented
@dataclass(kw_only=True, eq=False, repr=False)
class SparseGPRegressor(StreamingRegressor):
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
        hyper: "point" predicts with the most probable hyper-parameters. "laplace" averages over
            their uncertainty, for at most 2,000 rows and Gaussian noise: predictions, intervals and
            densities are those of a mixture of 16 posteriors (`winnowgp.models.MixturePosterior`)
            at draws from a weighted Laplace approximation, with the same inducing points. A
            constant is a further member if rows could be held out: its weight is the share of
            observations that it describes and the model does not, about 2/N if there are none
            among these rows. Intervals of few rows are then wider and cover better, and outliers
            cost less. The fit takes little longer; predictions take 16 times as long, and files
            are as much larger. Attributes such as `kernel_`, `noise_` and `elbo_` are those of the
            most probable hyper-parameters. "auto" averages over them with up to 500 rows, where it
            is possible and `max_points` does not ask for cheap predictions. With 501 to 2,000 rows
            it averages the most probable ones with a constant if held-out rows gain more than 0.01
            nats by it, which is so where there are outliers. Methods that need a Gaussian posterior
            (`partial_fit`, BoTorch, GPyTorch) use that of the most probable hyper-parameters.
        log_target: whether the model is a Gaussian process of log y, for positive targets whose
            spread grows with their level. Predictions are exact log-normal distributions of y:
            means, deviations, quantiles, samples and densities are in the units of y, so that they
            compare with those of other models. `noise_` and the latent function are those of log y.

    >>> X = np.linspace(0, 6, 50)[:, None]
    >>> model = SparseGPRegressor("rbf", random_state=0).fit(X, np.sin(X[:, 0]))
    >>> model.n_inducing_ < 12
    True
    """

    noise_kernel: Any = "rbf"
    precision: str = "double"
    priors: str | None = "weak"
    hyper: str = "auto"
    log_target: bool = False

    _out_of_core: ClassVar[bool] = True
    _constraints: ClassVar[Mapping[str, validation.Constraint]] = {
        **StreamingRegressor._constraints,
        "hyper": validation.one_of(*HYPER),
        "likelihood": validation.regression_likelihood,
    }

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
        symmetric = has_noise(self.likelihood_) and not self.log_target
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
        """Return joint samples of the latent function, `[N n_samples]` or `[N P n_samples]`; O(N³).

        Args:
            X: inputs `[N D]`.
            n_samples: number of samples.
            random_state: seed or RandomState.
        """
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
        if isinstance(function, MixturePosterior):
            return SampledFunctions(self, function.paths(count, generator=generator))
        if isinstance(function, HeteroscedasticPosterior):
            function = function.function
        return SampledFunctions(self, PosteriorPaths(function, count, generator=generator))

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
        if isinstance(self.posterior_, MixturePosterior):
            variance = self.posterior_.noise.expand(len(inputs), self.posterior_.P)
        elif not isinstance(self.posterior_, HeteroscedasticPosterior):
            variance = self.likelihood_.noise.expand(len(inputs), self.posterior_.P)
        else:
            chunks = inputs.split(rows_at_once(self.posterior_))
            variance = torch.cat([self.posterior_.predict_noise(rows).mean for rows in chunks])
        return self._y_scaler.deviations(variance.sqrt().cpu())

    def _log_noise(self, attribute: str) -> Posterior:
        """Return q(g), or raise an error if the model has none."""
        if not isinstance(getattr(self, "posterior_", None), HeteroscedasticPosterior):
            raise AttributeError(
                f"`{attribute}` exists after a fit with `likelihood='heteroscedastic'` only."
            )
        return self.posterior_.log_noise

    def _constant_noise_posterior(self, what: str) -> Posterior | MixturePosterior:
        """Return q(f) with one noise variance for all rows, which is all that `what` represents."""
        posterior = self.posterior_
        if not isinstance(posterior, HeteroscedasticPosterior):
            return posterior
        if posterior.log_noise.M:
            raise InputError(
                f"{what} cannot represent noise that depends on the inputs; fit with "
                "`likelihood='gaussian'`, or save the model with `save`."
            )
        return posterior.with_constant_noise()

    def _takes_logarithm(self) -> bool:
        return self.log_target

    def _latents(self, inputs: Tensor) -> list[tuple[Prediction, Likelihood, float]]:
        """Return mean and variance of the latent functions, their likelihood, and their weight.

        There is one such part for each member of a mixture.
        """
        posterior = self.posterior_
        if isinstance(posterior, HeteroscedasticPosterior):
            latent = self._predict_latent(
                inputs, lambda rows, observed: posterior.latents(rows), observed=False
            )
            return [(latent, self.likelihood_, 1.0)]
        if not isinstance(posterior, MixturePosterior):
            latent = self._predict_latent(inputs, posterior.predict, observed=False)
            return [(latent, self.likelihood_, 1.0)]
        return [
            (self._predict_latent(inputs, member.predict, observed=False), member.likelihood, w)
            for member, w in zip(posterior.members, posterior.member_weights.tolist(), strict=True)
        ]

    def _gaussian_posterior(self, what: str) -> Posterior:
        """Return the posterior at the most probable hyper-parameters.

        Raises:
            InputError: an average over them was asked for, or noise depends on the inputs, which
                `what` cannot represent.
        """
        posterior = self._constant_noise_posterior(what)
        return gaussian_posterior(posterior, hyper=self.hyper, subsets=self.posterior, what=what)

    def _check_combination(self, params: validation.Parameters) -> None:
        super()._check_combination(params)
        if params.log_target and not is_plain(params.likelihood, GaussianLikelihood):
            raise InputError(
                "`log_target` needs Gaussian noise: with heavier tails the mean of y is infinite, "
                "and counts and proportions have their own likelihoods; "
                f"got `likelihood={self.likelihood!r}`."
            )
        validation.refuse_other_schedule(params, fast={"precision": "double"}, paper={})
        check_hyper(params, self.likelihood)
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
            _check_noise_kernel(params, D, names=getattr(self, "feature_names_in_", ()))

    def _check_targets(self, params: validation.Parameters, data: Source) -> None:
        super()._check_targets(params, data)
        resolve_hyper_by_rows(params, data)
        params.averaged = params.hyper == "laplace"

    def _pooled(self, rows: Dataset, params: validation.Parameters) -> Dataset:
        # Few rows are held out one by one, to confirm that they show an effect.
        if not self._collapsed(params) or rows.N <= CONFIRMED_ROWS:
            return rows
        return pooled(rows, known=NEGLIGIBLE if params.noise == "known" else None)

    def _after_training(
        self, result: FitResult[Any], data: Source, params: validation.Parameters
    ) -> FitResult[Any]:
        outliers = params.robust and result.constant_gain > OUTLIER_GAIN
        if outliers or params.hyper == "laplace":
            # Few rows: all processes have all of them.
            own = [rows.to(torch.device("cpu")) for rows in data.chunks(MOST_ROWS)]
            parts = data.process_group.all_gather(own)
            rows = Dataset.joined([rows for part in parts for rows in part]).to(params.device)
            if outliers:
                result = with_constant(result, rows)
            else:
                generator = params.generator
                result = with_uncertain_hyperparameters(result, rows, generator=generator)
        return super()._after_training(result, data, params)

    def _collapsed(self, params: validation.Parameters) -> bool:
        gaussian = self.likelihood in ("gaussian", validation.HETEROSCEDASTIC)
        return gaussian and params.batch_size is None

    def _check_noise(self, params: validation.Parameters, data: Source, *, missing: bool) -> None:
        if self.likelihood != "gaussian" and (missing or data.has_noise or params.noise == "known"):
            what = "missing targets" if missing else "known noise"
            raise InputError(
                f"{what} can be used with `likelihood='gaussian'`; got "
                f"likelihood={self.likelihood!r}. Other likelihoods define the noise themselves."
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
                noise = NEGLIGIBLE
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
        if params.noise == "known":
            model.likelihood.initialize(noise=NEGLIGIBLE)
            model.likelihood.requires_grad_(False)
        constant = isinstance(model.mean, ConstantMean) and not isinstance(self.mean, Mean)
        if constant and not has_noise(params.likelihood):
            # Counts may be further from zero than the small steps of the paper's schedule reach.
            rows = data.require_dataset("a likelihood without noise")
            model.mean.initialize(constant=best_level(model.likelihood, rows))
        return model

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


def _check_noise_kernel(params: validation.Parameters, D: int, *, names: Sequence[str]) -> None:
    """Parse the kernel of the log noise, and check that it can be evaluated on D columns."""
    if isinstance(params.noise_kernel, str):
        # The string may name columns.
        columns = {str(name): [number] for number, name in enumerate(names)}
        params.noise_kernel = parse_kernel(
            params.noise_kernel, D, columns=columns, name="noise_kernel"
        )
    kernel = kernel_from(params.noise_kernel, D, scale=torch.ones(D), name="noise_kernel")
    check_kernel_columns(kernel, D, name="noise_kernel")


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

    def __init__(self, regressor: Any, paths: PosteriorPaths | MixturePaths) -> None:
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
