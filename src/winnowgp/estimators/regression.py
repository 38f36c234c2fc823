"""Regression: the sparse GP regressor."""

from collections.abc import Iterator, Mapping
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from math import nan
from typing import Any, ClassVar, Self, final

import numpy as np
import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import GaussianLikelihood, Likelihood
from gpytorch.means import ConstantMean, Mean
from numpy.typing import NDArray
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from winnowgp.bounds.streaming import Memory
from winnowgp.data import Dataset, Source
from winnowgp.data.repeats import pooled
from winnowgp.errors import InputError
from winnowgp.estimators import validation
from winnowgp.estimators.base import rows_at_once
from winnowgp.estimators.docstrings import documented
from winnowgp.estimators.heteroscedastic import (
    VaryingNoise,
    check_noise_kernel,
    check_varying_noise,
    with_log_noise,
)
from winnowgp.estimators.hyperparameter_uncertainty import (
    HYPER,
    check_hyper,
    check_hyper_rows,
    gaussian_posterior,
)
from winnowgp.estimators.rows import check_source_columns
from winnowgp.estimators.sampled_functions import SampledFunctions
from winnowgp.estimators.streaming import StreamingEstimator, batches_of, fitted_attributes
from winnowgp.estimators.subset_posterior import refuse_stream
from winnowgp.models import (
    HeteroscedasticGP,
    HeteroscedasticPosterior,
    MixturePosterior,
    Posterior,
    PosteriorPaths,
    Prediction,
    SparseGP,
    VariationalGP,
)
from winnowgp.models.base import InducingModel
from winnowgp.models.likelihoods import is_plain, observation_model
from winnowgp.models.observations import LEAST_NOISE
from winnowgp.models.online import OnlineGP
from winnowgp.models.priors import add_weak_priors
from winnowgp.training import FitResult
from winnowgp.training.initialization import best_level
from winnowgp.training.laplace import MOST_ROWS, with_uncertain_hyperparameters
from winnowgp.training.schedules import SizedModel

# Noise variance of standardised targets that is added to noise which is known. It is not zero: the
# covariance of rows without any noise may be singular.
_NEGLIGIBLE = 2 * LEAST_NOISE


@final
@documented
@dataclass(kw_only=True, eq=False, repr=False)
class SparseGPRegressor(StreamingEstimator, VaryingNoise):
    """Sparse Gaussian process regression that selects the number of its inducing points.

    Inputs and targets are standardised internally; arguments and attributes are in your own units
    unless their description says otherwise. Several target columns share the kernel and the
    inducing points; each has its own noise (see `noise`), and some of them may be missing (NaN) in
    some rows.

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
        hyper: "point" predicts with the most probable hyper-parameters. "laplace" averages over
            their uncertainty, for at most 2,000 rows and Gaussian noise: predictions, intervals and
            densities are those of a mixture of 16 posteriors (`winnowgp.models.MixturePosterior`)
            at draws from a weighted Laplace approximation, with the same inducing points. Intervals
            of few rows are then wider and cover better. The fit takes little longer; predictions
            take 16 times as long, and files are as much larger. Attributes such as `kernel_`,
            `noise_` and `elbo_` are those of the most probable hyper-parameters. "auto" averages
            over them with up to 500 rows, where it is possible and `max_points` does not ask for
            cheap predictions; what needs a Gaussian posterior (`partial_fit`, BoTorch, GPyTorch)
            then goes on with that of the most probable hyper-parameters.
        log_target: whether the model is a Gaussian process of log y, for positive targets whose
            spread grows with their level. Predictions are exact log-normal distributions of y:
            means, deviations, quantiles, samples and densities are in the units of y, so that they
            compare with those of other models. `noise_` and the latent function are those of log y.

    >>> X = np.linspace(0, 6, 50)[:, None]
    >>> model = SparseGPRegressor("rbf", random_state=0).fit(X, np.sin(X[:, 0]))
    >>> model.n_inducing_ < 12
    True
    """

    precision: str = "double"
    priors: str | None = "weak"
    hyper: str = "auto"
    log_target: bool = False

    _out_of_core: ClassVar[bool] = True
    _constraints: ClassVar[Mapping[str, validation.Constraint]] = {
        **StreamingEstimator._constraints,
        "hyper": validation.one_of(*HYPER),
        "likelihood": validation.regression_likelihood,
    }

    def partial_fit(
        self, X: Any, y: Any = None, sample_weight: Any = None, *, noise_variance: Any = None
    ) -> Self:
        """Learn from one more batch of rows; those of earlier batches need not be passed again.

        The first call is `fit` at the most probable hyper-parameters, which fixes the kernel and
        the scaling of inputs and targets; the estimator may also have been fitted or loaded. Later
        calls update the hyper-parameters, add rows of the batch to the inducing points, and drop
        those that are no longer needed, so that all selections together give up at most `tolerance`
        nats per observation. After an error the estimator is as it was.

        Args:
            X: inputs `[N D]`; or inputs and targets together as a `winnowgp.data.Source`, which is
                read in batches of 4,096 rows. With a `checkpoint` an update that was interrupted
                goes on after its last batch.
            y: targets `[N]` or `[N P]`; left out with a source.
            sample_weight: weights `[N]`, as in `fit`.
            noise_variance: known variances of the noise, as in `fit`, the same for all targets of a
                row. If the learnt noise changes later, rows that were seen have the precision that
                is right to first order in this change.
        """
        self._check_stream(X, y)
        params = self._validate_stream()
        if not hasattr(self, "posterior_"):
            # A stream goes on with one posterior: an average over hyper-parameters is not used.
            first = copy(self).set_params(hyper="point")
            first.fit(X, y, sample_weight, noise_variance=noise_variance)
            first._keep_first(first._stream_rows(X, y, sample_weight, noise_variance)[0])
            vars(self).update(fitted_attributes(first))
            return self
        self._check_columns(params, self.n_features_in_)
        self._check_same_noise()
        rows, source = self._stream_rows(X, y, sample_weight, noise_variance)
        self._check_noise(params, source, missing=False)
        return self._update(rows, params, source=source)

    def _stream_rows(
        self, X: Any, y: Any, sample_weight: Any, noise_variance: Any
    ) -> tuple[Iterator[Dataset], Source]:
        """Return standardised batches of the rows, and the rows in the user's units."""
        if isinstance(X, Source):
            self._refuse_logarithm_of_source()
            check_source_columns(self, X, y, sample_weight, noise_variance)
            source: Source = X
        else:
            source = self._rows_of_arrays(X, y, sample_weight, noise_variance, reset=False)[0]
        return map(self._standardised, batches_of(source)), source

    def _note_rows(self, rows: Source) -> None:
        """Note what later batches need to know of the rows of a fit, whose targets are scaled."""
        if self._stream is None:
            return
        if isinstance(rows, Dataset) and not rows.complete:
            # Later batches would mistake them for others.
            self._stream = replace(self._stream, remembered=nan)
        elif rows.has_noise and isinstance(self.posterior_, Posterior | MixturePosterior):
            # The posterior does not say which part of its precision depends on the learnt noise.
            self._stream = replace(self._stream, memories=(self._memory_of(rows),))

    def _memory_of(self, rows: Source) -> Memory:
        """Return what the inducing points remember of rows, at the fitted hyper-parameters."""
        posterior = self.posterior_
        if isinstance(posterior, MixturePosterior):
            posterior = posterior.mode
        model = SparseGP(
            deepcopy(posterior.kernel),
            posterior.Z,
            mean=posterior.mean,
            noise=posterior.likelihood.noise.item(),
        )
        online = OnlineGP.start(model, outputs=rows.P)
        for part in batches_of(rows):
            online = online.after(replace(part, X=self._x_scaler.forward(part.X)))
        return online.memory

    def _check_stream(self, X: Any, y: Any) -> None:
        """Raise an error if the noise is of a kind that a stream does not remember."""
        refuse_stream(self.posterior)
        if self.hyper == "laplace":
            raise InputError(
                f"`partial_fit` needs hyper='point' or 'auto'; got {self.hyper!r}: a stream "
                "remembers one posterior. Fit all rows together, or pass 'point'."
            )
        targets = X.P if isinstance(X, Source) else (*np.shape(y), 1, 1)[1]
        if self.likelihood == validation.HETEROSCEDASTIC:
            raise InputError(
                "`partial_fit` needs noise that does not depend on the inputs; got "
                f"likelihood={self.likelihood!r}. Fit all rows together, or pass 'gaussian'."
            )
        if self.likelihood == "gaussian" and self.noise == "target" and targets > 1:
            raise InputError(
                "`partial_fit` needs one learnt noise variance for all targets; got "
                f"likelihood={self.likelihood!r} and noise={self.noise!r} for {targets} targets. "
                "Pass noise='shared', or fit one model per target."
            )

    def _check_same_noise(self) -> None:
        """Raise an error if noise was learnt from earlier rows and is known now, or vice versa."""
        if not is_plain(self.likelihood_, GaussianLikelihood):
            return
        known = abs(self.likelihood_.noise.max().item() / _NEGLIGIBLE - 1) < 1e-3
        if known != (self.noise == "known"):
            raise InputError(
                "`partial_fit` needs the `noise` of the earlier batches, "
                f"{'known' if known else 'learnt'}; got noise={self.noise!r}. Set it back, or fit "
                "all rows together."
            )

    def _standardised(self, rows: Dataset) -> Dataset:
        """Return a batch in the units of the first one."""
        if not rows.complete:
            raise InputError(
                "`partial_fit` needs rows without missing targets; leave such rows out, or fit all "
                "rows together."
            )
        scaler, noise = self._y_scaler, rows.noise
        if rows.P != scaler.P:
            raise InputError(f"`y` must have {scaler.P} target columns as before; got {rows.P}.")
        if noise is not None:
            noise = noise / scaler.columns.scale.square()
        data = Dataset(
            self._x_scaler.forward(rows.X), scaler.columns.forward(rows.Y), rows.weights, noise
        )
        observation_model(self.likelihood_).check_targets(data.Y)
        return data

    def _mean_log_density(self, data: Dataset) -> float:
        nats = self._log_density(data.X, data.Y, noise=data.noise)
        each = torch.from_numpy(self._y_scaler.log_densities(nats, data.Y)).reshape(data.N, -1)
        return float(data.weighted(each.mean(1)[:, None]).sum() / data.observations)

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
    ) -> SampledFunctions:
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

    def _takes_logarithm(self) -> bool:
        return self.log_target

    def _latents(self, inputs: Tensor) -> list[tuple[Prediction, Likelihood]]:
        """Return mean and variance of the latent functions, and the likelihood that acts on them.

        There is one pair for each member of a mixture.
        """
        posterior = self.posterior_
        if isinstance(posterior, HeteroscedasticPosterior):
            latent = self._predict_latent(
                inputs, lambda rows, observed: posterior.latents(rows), observed=False
            )
            return [(latent, self.likelihood_)]
        if not isinstance(posterior, MixturePosterior):
            latent = self._predict_latent(inputs, posterior.predict, observed=False)
            return [(latent, self.likelihood_)]
        return [
            (self._predict_latent(inputs, member.predict, observed=False), member.likelihood)
            for member in posterior.members
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
            check_varying_noise(params)
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
            check_noise_kernel(params, D, names=getattr(self, "feature_names_in_", ()))

    def _check_targets(self, params: validation.Parameters, data: Source) -> None:
        super()._check_targets(params, data)
        check_hyper_rows(params, data)

    def _pooled(self, rows: Dataset, params: validation.Parameters) -> Dataset:
        if not self._collapsed(params):
            return rows
        return pooled(rows, known=_NEGLIGIBLE if params.noise == "known" else None)

    def _after_training(
        self,
        result: FitResult[Any],
        data: Source,
        params: validation.Parameters,
        generator: torch.Generator,
    ) -> FitResult[Any]:
        if params.hyper != "laplace":
            return result
        # Few rows: all processes have all of them.
        own = [rows.to(torch.device("cpu")) for rows in data.chunks(MOST_ROWS)]
        parts = data.process_group.all_gather(own)
        rows = Dataset.joined([rows for part in parts for rows in part]).to(params.device)
        return with_uncertain_hyperparameters(result, rows, generator=generator)

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
                return with_log_noise(model, params)
            return model
        model = VariationalGP(
            kernel,
            candidates,
            mean=params.prior_mean,
            likelihood=params.likelihood,
            targets=data.P,
        ).to(params.device)
        if params.noise == "known":
            model.likelihood.initialize(noise=_NEGLIGIBLE)
            model.likelihood.requires_grad_(False)
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
