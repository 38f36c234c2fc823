"""Deep GP regression and classification."""

from abc import ABC
from collections.abc import Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self, final

import numpy as np
import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood
from numpy.typing import NDArray
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from winnowgp.data import Source, Standardiser
from winnowgp.errors import InputError
from winnowgp.estimators import validation
from winnowgp.estimators.base import (
    BaseGP,
    check_kernel_columns,
    cpu_frontier,
    documented,
    rows_at_once,
)
from winnowgp.estimators.classification import ClassTargets
from winnowgp.estimators.deep_shallow import (
    FEW_ROWS,
    has_shallow_alternative,
    is_identity,
    with_shallow_alternative,
)
from winnowgp.estimators.deep_training import DEPTHS, best_start, deep_schedule, selected_depth
from winnowgp.estimators.kernels import AUTO, AUTO_KERNELS, kernel_from
from winnowgp.estimators.numeric_targets import NumericTargets
from winnowgp.models import DeepGP, DeepPosterior
from winnowgp.models.deep_gp import Allocation, deep_predict_us, prediction_cost
from winnowgp.models.likelihoods import has_noise
from winnowgp.models.observations import Prediction
from winnowgp.training import (
    FitResult,
    Schedule,
)
from winnowgp.training.schedules import SizedDeepModel

_PHASES = {
    "fast": ("each layer alone", "all candidates", "selected points"),
    "paper": ("each layer alone", "all candidates", "learning inclusion", "selected points"),
}
_STEPS = {"fast": (100, 1000, 1000), "paper": (200, 1000, 500, 1500)}
# Those of the fast schedule on a GPU, whose steps take a tenth of the time.
_GPU_STEPS = (100, 3000, 3000)
# Number of times that the steps with all candidates are repeated, as long as that pays: on a GPU,
# and with many rows on a CPU, where kin8nm takes half a minute each.
_REPEATS = 2
# Rows of a minibatch by device.
_BATCHES = {"cpu": 1024, "cuda": 8192}
# Initial share of noise in the variance of the targets; with more, the first steps explain the
# function as noise.
_INITIAL_NOISE = 0.1
# Number of candidates of a layer, unless it grows.
_CANDIDATES = 100
_METHOD = validation.one_of("mixture", "matched")


def _alphas(name: str, value: Any) -> float | tuple[float, ...] | None:
    """Validate `alpha`: one strength, a tuple with one per layer, or None for "auto"."""
    if isinstance(value, tuple | list):
        return tuple(validation.positive_alpha(name, each) for each in value)
    return validation.alpha_or_auto(name, value)


def _layers(name: str, value: Any) -> int | None:
    """Validate `layers`: a number, or None for "auto"."""
    if not isinstance(value, str):
        return validation.integer(name, value)
    if value != "auto":
        raise InputError(f"`{name}` must be an integer of at least 1, or 'auto'; got {value!r}.")
    return None


def _optional_or_auto(name: str, value: Any) -> int | str | None:
    """Validate `batch_size` or `n_candidates`: a number, None or "auto"."""
    if value is None or value == "auto":
        return value
    if isinstance(value, str):
        raise InputError(f"`{name}` must be an integer, None or 'auto'; got {value!r}.")
    return validation.integer(name, value)


@dataclass(kw_only=True, eq=False, repr=False)
class DeepEstimator(BaseGP, ABC):
    """The base class of deep estimators, which select inducing points in each layer.

    Args:
        layers: number of layers, the last one included; or "auto", which trains models of one, two
            and three layers shortly on nine tenths of the rows and adds a layer if it predicts the
            others better.
        width: number of outputs of each hidden layer, or a tuple with one number per hidden layer;
            by default the number of inputs.
        kernel: a string such as "rbf", "matern52" or "rbf + linear", with one lengthscale per
            column (see `winnowgp.estimators.kernels`), or a GPyTorch kernel that suits every layer;
            a tuple for one kernel per layer. "auto" is "rbf"; a shallow GP that is fitted as well
            then compares RBF and Matérn kernels.
        hidden_mean: initial mean of the hidden functions: "identity" (the inputs, zero-padded, or
            their principal components), "zero" (hidden layers are first trained on the targets), or
            "auto" for the better of the two after a short training. With Gaussian noise, the fast
            schedule also compares a start at the identity whose last layer has the
            hyper-parameters of a shallow GP.
        skip_connections: whether every layer after the first also receives the inputs.
        alpha: strength of the paper's prior exp(−alpha · M²) on the M inducing points of each
            layer, or a tuple with one strength per layer; larger values select fewer. "auto"
            derives it from `tolerance`.
        tolerance: largest ELBO gap of all layers together relative to all candidates, in nats per
            observation; 0.01 by default, unless another parameter sets the numbers of points.
        max_cost: largest Σ M² over the layers, allocated where it gains most; with a `tolerance`
            fewer points are selected if they are within it.
        max_predict_us: largest time for mean and variance of a row, in microseconds, measured on
            this machine's CPU with `predict_samples`; allocated and combined like `max_cost`.
        n_candidates: number of candidates of each layer; None starts with 64 and doubles them, up
            to 1,024, as long as that gains more than the `tolerance`. "auto" is 100; a shallow GP
            that is fitted as well then has as many as it needs.
        schedule: "fast", or "paper" for the phases of the paper (needs a number for `alpha`).
        epochs: numbers of steps of the phases: each layer alone, all candidates, (paper only:
            learning inclusion,) selected points. By default (100, 1000, 1000), on a GPU (100, 3000,
            3000), and (200, 1000, 500, 1500) for the paper's schedule. By default and with a
            `tolerance`, the second phase is repeated, twice at most, as long as that gains more
            than the tolerance: on a GPU, and on a CPU with more than 2,000 rows.
        batch_size: rows per step; all rows if None. "auto" is 1,024 on a CPU and 8,192 on a GPU,
            which takes about as long for them.
        samples: number of samples propagated per row in each step.
        predict_samples: number of samples propagated per row in predictions.
        smaller_models: with a `tolerance` and the fast schedule, number of smaller models that are
            trained after the selected one, each for the steps of the last phase and with four times
            the ELBO gap of the one before; `resized` returns them.

    Attributes:
        n_inducing_: number of inducing points of each layer.
        depths_: with `layers="auto"`, ELBO and held-out log density of each number of layers
            (`DepthScore`); empty otherwise, and in loaded estimators.
        inducing_points_: their locations, one array `[M D]` per layer: those of the first layer in
            the units of `X`, those of the others in the space of the layer's inputs.
        inclusion_: inclusion probability of each candidate in the last selection, one array `[K]`
            per layer; the fast schedule has pruned others in the rounds before.
        candidates_: locations of these candidates, one array `[K D]` per layer, in the same units.
        alpha_: strength of the prior in each layer.
        frontiers_: best ELBO for each number of inducing points in each layer, the other layers
            unchanged; None with the paper's schedule.
        allocations_: numbers of inducing points per layer, prediction time and ELBO of the trained
            models whose ELBO no quicker one reaches, quickest first
            (`winnowgp.models.deep_gp.Allocation`); of the model alone unless there is a
            `tolerance` and the fast schedule.
        comparison_: the deep model beside a shallow GP of the same rows, and which of them is the
            result (`winnowgp.estimators.deep_shallow.ShallowComparison`); None where there is no
            shallow alternative, and after loading.
        elbo_: lower bound on the log evidence, in nats; that of standardised targets in regression.
        elbo_gap_: nats per observation by which the ELBO is below that of the best model seen; with
            `alpha` or a limit alone, what pruning cost before training continued.
    """

    layers: int | str = field(default=2, kw_only=False)
    width: int | tuple[int, ...] | None = None
    kernel: str | Kernel | tuple[str | Kernel, ...] = AUTO
    hidden_mean: str = "auto"
    skip_connections: bool = False
    alpha: str | float | tuple[float, ...] = "auto"
    max_cost: float | None = None
    max_predict_us: float | None = None
    n_candidates: int | str | None = AUTO
    epochs: tuple[int, ...] | None = None
    batch_size: int | str | None = "auto"
    samples: int = 1
    predict_samples: int = 64
    smaller_models: int = 2

    _constraints: ClassVar[Mapping[str, validation.Constraint]] = {
        **validation.PARAMETERS,
        "alpha": _alphas,
        "batch_size": _optional_or_auto,
        "layers": _layers,
        "n_candidates": _optional_or_auto,
    }

    # Set by a fit; not arguments.
    posterior_: DeepPosterior = field(init=False)
    n_inducing_: tuple[int, ...] = field(init=False)
    allocations_: tuple[Allocation, ...] = field(init=False)
    _sized: tuple[SizedDeepModel, ...] = field(init=False)

    @property
    def available_sizes_(self) -> tuple[tuple[int, ...], ...]:
        """Numbers of inducing points per layer that `resized` accepts, quickest first."""
        return (*(sized.posterior.M for sized in self._sized), self.n_inducing_)

    def resized(self, points: int | tuple[int, ...]) -> Self:
        """Return a copy of the fitted estimator with fewer inducing points.

        The fit has trained this model already; no training data are needed. Inclusion probabilities
        were not computed: `candidates_` and `inclusion_` are empty, and `alpha_` and `frontiers_`
        have None for each layer.

        Args:
            points: numbers of inducing points per layer, one of `available_sizes_`, or their sum.
        """
        check_is_fitted(self)
        sizes = self.available_sizes_
        wanted = [each for each in sizes if points in (each, sum(each))]
        if not wanted:
            listed = ", ".join(f"{sum(each)} {each}" for each in sizes)
            raise InputError(
                f"`points` must be one of the sizes that the fit kept, {listed}; got {points!r}. "
                "For another size, fit again with a larger tolerance (`--tolerance`)."
            )
        number, resized = sizes.index(wanted[-1]), copy(self)
        if number < len(self._sized):
            resized._set_sized(number)
        return resized

    def scored_allocations(self, X: Any, y: Any) -> tuple[Allocation, ...]:
        """Return `allocations_` with the mean log density of new rows, of the available sizes.

        Args:
            X: inputs `[N D]`.
            y: targets or labels.
        """
        models: list[Any] = [self.resized(sizes) for sizes in self.available_sizes_]
        densities = {m.n_inducing_: float(np.mean(m.log_density(X, y))) for m in models}
        return tuple(
            replace(each, log_density=densities.get(each.sizes)) for each in self.allocations_
        )

    def _set_allocations(
        self, result: FitResult[Any], observations: float, *, samples: int
    ) -> None:
        """Set `allocations_`, and keep the models that are quicker than the selected one.

        Args:
            samples: number of samples of a prediction by the other models.
        """
        trained = [
            (each.posterior.with_samples(samples).cpu(), each.elbo) for each in result.allocations
        ]
        trained.append((self.posterior_, result.elbo))
        trained.sort(key=lambda pair: prediction_cost(pair[0].layers, samples=pair[0].samples))
        best = result.elbo + result.elbo_gap
        self.allocations_ = tuple(
            Allocation(
                posterior.M,
                deep_predict_us(result.model, posterior.M, samples=posterior.samples),
                elbo,
                (best - elbo) / observations,
            )
            for posterior, elbo in trained
        )
        own = [posterior is self.posterior_ for posterior, _ in trained].index(True)
        self._sized = tuple(SizedDeepModel(*pair) for pair in trained[:own])

    def _set_posterior(self, posterior: DeepPosterior) -> None:
        self.posterior_, self.n_inducing_ = posterior, posterior.M
        points = [layer.candidates.detach().clone() for layer in posterior.layers]
        self.inducing_points_ = _layer_locations(points, self._x_scaler)

    def _set_sized(self, number: int) -> None:
        """Set the attributes to those of a smaller model."""
        sized = self._sized[number]
        self.comparison_ = None
        self._set_posterior(sized.posterior)
        (gap,) = {each.elbo_gap for each in self.allocations_ if each.sizes == self.n_inducing_}
        self.elbo_, self.elbo_gap_ = sized.elbo, gap
        self._sized = self._sized[:number]
        self.candidates_ = tuple(points[:0] for points in self.inducing_points_)
        self.inclusion_ = tuple(np.zeros(0) for _ in self.n_inducing_)
        self.alpha_ = self.frontiers_ = (None,) * len(self.n_inducing_)

    def _check_combination(self, params: validation.Parameters) -> None:
        if params.layers is None:
            for name in ("width", "kernel", "alpha"):
                if isinstance(value := getattr(params, name), tuple | list):
                    raise InputError(
                        f"`{name}` must be one value for all layers with `layers='auto'`; "
                        f"got {value!r}."
                    )
            if params.schedule == "paper":
                raise InputError("`layers` must be a number with `schedule='paper'`; got 'auto'.")
        L = params.layers or max(DEPTHS)
        for name, default in (
            ("width", None),
            ("hidden_mean", "auto"),
            ("skip_connections", False),
        ):
            if L == 1 and (value := getattr(params, name)) != default:
                raise InputError(
                    f"`{name}` is for hidden layers, and `layers=1` has none; got {value!r}. Leave "
                    "it out."
                )
        if params.width is not None:
            widths = _one_for_each("width", params.width, L - 1, "hidden layers")
            params.width = tuple(validation.integer("width", width) for width in widths)
        params.shallow_kernels = AUTO_KERNELS if params.kernel == AUTO else ()
        kernel = "rbf" if params.shallow_kernels else params.kernel
        params.kernel = _one_for_each("kernel", kernel, L, "layers")
        if isinstance(params.alpha, tuple):
            _one_for_each("alpha", params.alpha, L, "layers")
        if params.max_cost is not None and params.max_cost < L:
            raise InputError(
                "`max_cost` is Σ M² over the layers and must allow one inducing point in each of "
                f"{L} layers; got {self.max_cost!r}."
            )
        params.shallow_candidates = None if params.n_candidates == AUTO else params.n_candidates
        if params.n_candidates == AUTO:
            params.n_candidates = _CANDIDATES
        if params.n_candidates is None and params.tolerance is None:
            raise InputError(
                "`n_candidates` may be None with a `tolerance`, which decides when more candidates "
                "gain too little; give a number of candidates, or a tolerance."
            )
        if params.batch_size == "auto":
            params.batch_size = _BATCHES[params.device.type]
        on_gpu = params.device.type == "cuda" and params.schedule == "fast"
        params.repeats = _REPEATS if params.schedule == "fast" and params.epochs is None else 0
        if params.epochs is None:
            params.epochs = _GPU_STEPS if on_gpu else _STEPS[params.schedule]
        params.epochs = validation.step_counts(
            "epochs", params.epochs, phases=_PHASES[params.schedule]
        )

    def _check_columns(self, params: validation.Parameters, D: int) -> None:
        if params.width is None:
            params.width = (D,) * (len(params.kernel) - 1)
        skipped = D if params.skip_connections else 0
        for kernel, inputs in zip(
            params.kernel, (D, *(width + skipped for width in params.width)), strict=True
        ):
            check_kernel_columns(kernel_from(kernel, inputs), inputs)

    def _initial_model(self, data: Source, params: validation.Parameters) -> DeepGP:
        rows = data.require_dataset("a deep model")
        self._depths = ()
        if params.layers is None:
            params.layers, self._depths = selected_depth(rows, data, params)
        start = best_start(rows, data, params)
        # The fit trains the start itself.
        params.start = deepcopy(start)
        return start

    def _training_schedule(
        self, model: DeepGP, data: Source, params: validation.Parameters
    ) -> Schedule:
        if params.device.type == "cpu" and data.N <= FEW_ROWS:
            params.repeats = 0
        return deep_schedule(model, params)

    def _after_training(
        self, result: FitResult[Any], data: Source, params: validation.Parameters
    ) -> FitResult[Any]:
        self._comparison = None
        if not has_shallow_alternative(params, data):
            return result
        result, self._comparison = with_shallow_alternative(result, data, params)
        return result

    def _set_fitted(self, result: FitResult[Any], observations: float) -> None:
        selections = result.selections
        shallow = len(result.model.layers) > 1 and is_identity(result.model)
        samples = 0 if shallow else int(self.predict_samples)
        self._set_posterior(result.model.posterior(samples=samples).cpu())
        self.elbo_ = result.elbo
        self.depths_, self.comparison_ = self._depths, self._comparison
        self.elbo_gap_ = result.elbo_gap / observations
        self._set_allocations(result, observations, samples=int(self.predict_samples))
        self.candidates_ = _layer_locations(result.candidates, self._x_scaler)
        self.inclusion_ = tuple(selection.inclusion.cpu().numpy() for selection in selections)
        self.alpha_ = tuple(selection.alpha for selection in selections)
        self.frontiers_ = tuple(cpu_frontier(selection.frontier) for selection in selections)

    def _predict_by(self, method: str, X: Any, *, observed: bool) -> Prediction:
        """Return mean and variance of each row, for standardised inputs and targets."""
        _METHOD("method", method)
        inputs, posterior = self._inputs(X), self.posterior_
        predict = posterior.predict if method == "mixture" else posterior.predict_matched
        return self._predict_latent(inputs, predict, observed=observed)


def _layer_locations(
    layers: Sequence[Tensor], x_scaler: Standardiser
) -> tuple[NDArray[np.float64], ...]:
    """Return the locations of each layer's points; only those of the first layer have units."""
    first, *others = (points.cpu() for points in layers)
    return (x_scaler.inverse(first).numpy(), *(points.numpy() for points in others))


def _one_for_each(name: str, value: Any, count: int, what: str) -> tuple[Any, ...]:
    """Return a tuple of `count` values, of one value for all or a sequence of as many."""
    values = tuple(value) if isinstance(value, tuple | list) else (value,) * count
    if len(values) != count:
        raise InputError(
            f"`{name}` must be one value, or one for each of {count} {what}; got {len(values)}."
        )
    return values


@final
@documented
@dataclass(kw_only=True, eq=False, repr=False)
class DeepGPRegressor(DeepEstimator, NumericTargets):
    """Deep Gaussian process regression that selects the inducing points of each layer.

    A deep GP suits functions that jump or whose smoothness varies, for which one kernel is a
    compromise. Inputs and targets are standardised internally.

    The number of inducing points is set by `tolerance` (the default), by `max_cost` or
    `max_predict_us`, by a tolerance and one of these limits together, or by a number for `alpha`.

    Args:
        shallow_alternative: whether the result is a shallow GP where it is better. With Gaussian
            noise, one target, a `tolerance` and the default of `hidden_mean`, a shallow GP is then
            fitted as well, and the deep GP trained once more on a part of the rows, to compare
            predictions of the others. False saves this time.
    """

    shallow_alternative: bool = True

    def predict(
        self, X: Any, return_std: bool = False, *, observed: bool = True, method: str = "mixture"
    ) -> Any:
        """Return the predictive mean, and on request the standard deviation, of each row.

        Args:
            X: inputs `[N D]`.
            return_std: whether to return the standard deviation as well.
            observed: whether to predict a new observation, noise included, or the latent function.
            method: "mixture" of propagated samples, or "matched": propagate one Gaussian with the
                same moments from layer to layer, which is faster and nearly as accurate if the
                variance of hidden layers is small.

        Returns: the mean `[N]` or `[N P]`; with `return_std` a pair.
        """
        prediction = self._predict_by(method, X, observed=observed)
        mean = self._y_scaler.values(prediction.mean)
        if not return_std:
            return mean
        return mean, self._y_scaler.deviations(prediction.variance.sqrt())

    def _set_sized(self, number: int) -> None:
        super()._set_sized(number)
        self.likelihood_ = self.posterior_.likelihood
        self.noise_ = self._y_scaler.noise(self.likelihood_)

    @torch.no_grad()
    def _latents(self, inputs: Tensor) -> list[tuple[Prediction, Likelihood, float]]:
        """Return mean and variance of latent functions, likelihood and weight of each sample."""
        chunks = inputs.split(rows_at_once(self.posterior_))
        each = [self.posterior_.components(chunk) for chunk in chunks]
        mean = torch.cat([components.mean for components in each], 1).cpu()
        variance = torch.cat([components.variance for components in each], 1).cpu()
        samples = list(zip(mean, variance, strict=True))
        return [(Prediction(*pair), self.likelihood_, 1.0 / len(samples)) for pair in samples]

    def _check_combination(self, params: validation.Parameters) -> None:
        super()._check_combination(params)
        if isinstance(self.likelihood, str) and has_noise(params.likelihood):
            params.likelihood.noise = torch.tensor(_INITIAL_NOISE)


@final
@documented
@dataclass(kw_only=True, eq=False, repr=False)
class DeepGPClassifier(DeepEstimator, ClassTargets):
    """Deep Gaussian process classification that selects the inducing points of each layer.

    Two classes have one latent function and a probit likelihood; more classes have one latent
    function each and a softmax likelihood. Inputs are standardised internally.

    The number of inducing points is set by `tolerance` (the default), by `max_cost` or
    `max_predict_us`, by a tolerance and one of these limits together, or by a number for `alpha`.
    """

    def predict_proba(self, X: Any, *, method: str = "mixture") -> NDArray[np.float64]:
        """Return the probability of each class, `[N C]`, averaged over the latent functions.

        Args:
            X: inputs `[N D]`.
            method: "mixture" of propagated samples, or the faster "matched".
        """
        mean = self._predict_by(method, X, observed=True).mean
        return self._labels.probabilities(mean.numpy())
