"""Deep GP regression and classification."""

from abc import ABC
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar, final

import numpy as np
import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood
from numpy.typing import NDArray
from torch import Tensor

from winnowgp.data import Source
from winnowgp.errors import InputError
from winnowgp.estimators import validation
from winnowgp.estimators.allocations import AllocatedEstimator, layer_locations
from winnowgp.estimators.base import (
    check_kernel_columns,
    cpu_frontier,
    documented,
    rows_at_once,
)
from winnowgp.estimators.classification import ClassTargets
from winnowgp.estimators.deep_initialization import DEPTHS, best_start, selected_depth
from winnowgp.estimators.deep_shallow import (
    has_shallow_alternative,
    is_identity,
    with_shallow_alternative,
)
from winnowgp.estimators.kernels import AUTO, AUTO_KERNELS, kernel_from
from winnowgp.estimators.numeric_targets import NumericTargets
from winnowgp.models import DeepGP
from winnowgp.models.deep_gp import deep_predict_us
from winnowgp.models.likelihoods import has_noise
from winnowgp.models.observations import Prediction
from winnowgp.training import (
    DeepTraining,
    FastSchedule,
    FitResult,
    FixedAlpha,
    MaxCost,
    MaxPredictTime,
    PaperSchedule,
    Schedule,
    Tolerance,
)
from winnowgp.training.checkpoint import CheckpointLog

_PHASES = {
    "fast": ("each layer alone", "all candidates", "selected points"),
    "paper": ("each layer alone", "all candidates", "learning inclusion", "selected points"),
}
_STEPS = {"fast": (100, 1000, 1000), "paper": (200, 1000, 500, 1500)}
# Those of the fast schedule on a GPU, whose steps take a tenth of the time.
_GPU_STEPS = (100, 3000, 3000)
# Number of times that its steps with all candidates are repeated there, as long as that pays.
_GPU_REPEATS = 2
# Rounds in which points are removed, and with a number for `alpha`: it can remove most points, and
# training does not regain what few large steps cost (`benchmarks/deep_jumps.py`).
_ROUNDS, _ALPHA_ROUNDS = 3, 10
# Rows of a minibatch by device.
_BATCHES = {"cpu": 1024, "cuda": 8192}
# Initial share of noise in the variance of the targets; with more, the first steps explain the
# function as noise.
_INITIAL_NOISE = 0.1
# Number of candidates of a layer, and largest number of those that grow.
_CANDIDATES, _MOST_CANDIDATES = 100, 1024
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
class DeepEstimator(AllocatedEstimator, ABC):
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
            3000), where a `tolerance` repeats the second phase up to twice as long as that gains
            more than it, and (200, 1000, 500, 1500) for the paper's schedule.
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
        params.repeats = _GPU_REPEATS if on_gpu and params.epochs is None else 0
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

    def _initial_model(
        self,
        data: Source,
        params: validation.Parameters,
        generator: torch.Generator,
        log: CheckpointLog,
    ) -> DeepGP:
        rows = data.require_dataset("a deep model")
        self._depths = ()
        if params.layers is None:
            params.layers, self._depths = selected_depth(rows, data, params, generator, log)
        start = best_start(rows, data, params, generator, log)
        # The fit trains the start itself.
        params.start = deepcopy(start)
        return start

    def _training_schedule(
        self, model: DeepGP, data: Source, params: validation.Parameters, log: CheckpointLog
    ) -> Schedule:
        del data
        settings: dict[str, Any] = {"samples": params.samples, "batch_size": params.batch_size}
        if params.schedule == "paper":
            layerwise, pre, joint, post = params.epochs
            return PaperSchedule(
                params.alpha, layerwise=layerwise, pre=pre, joint=joint, post=post, **settings
            )
        layerwise, pre, post = params.epochs
        if params.alpha is not None:
            goal = FixedAlpha(params.alpha)
        else:
            goal = limit = _limit(model, params, log)
            if params.tolerance is not None:
                goal = Tolerance(params.tolerance, limit=limit)
        assert goal is not None
        training = DeepTraining(
            layerwise=layerwise,
            pre=pre,
            post=post,
            most_repeats=params.repeats,
            predict_samples=params.predict_samples,
            max_candidates=_MOST_CANDIDATES if params.n_candidates is None else None,
            smaller_models=params.smaller_models,
            **settings,
        )
        rounds = _ROUNDS if params.alpha is None else _ALPHA_ROUNDS
        return FastSchedule(goal, rounds=rounds, deep=training)

    def _after_training(
        self,
        result: FitResult[Any],
        data: Source,
        params: validation.Parameters,
        generator: torch.Generator,
        log: CheckpointLog,
    ) -> FitResult[Any]:
        self._comparison = None
        if not has_shallow_alternative(params, data):
            return result
        result, self._comparison = with_shallow_alternative(result, data, params, generator, log)
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
        self.candidates_ = layer_locations(result.candidates, self._x_scaler)
        self.inclusion_ = tuple(selection.inclusion.cpu().numpy() for selection in selections)
        self.alpha_ = tuple(selection.alpha for selection in selections)
        self.frontiers_ = tuple(cpu_frontier(selection.frontier) for selection in selections)

    def _predict_by(self, method: str, X: Any, *, observed: bool) -> Prediction:
        """Return mean and variance of each row, for standardised inputs and targets."""
        _METHOD("method", method)
        inputs, posterior = self._inputs(X), self.posterior_
        predict = posterior.predict if method == "mixture" else posterior.predict_matched
        return self._predict_latent(inputs, predict, observed=observed)


def _limit(
    model: DeepGP, params: validation.Parameters, log: CheckpointLog
) -> MaxCost | MaxPredictTime | None:
    """Return the limit on the inducing points of all layers that the parameters specify."""
    if params.max_cost is not None:
        return MaxCost(params.max_cost)
    if params.max_predict_us is None:
        return None

    @cache
    def predict_us(sizes: tuple[int, ...]) -> float:
        # A resumed fit does not measure again.
        return log.once(lambda: deep_predict_us(model, sizes, samples=params.predict_samples))

    return MaxPredictTime(params.max_predict_us, predict_us)


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
