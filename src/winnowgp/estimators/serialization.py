"""Serialisation of estimators: their parameters, what they have learnt, and the values they hold.

Importing this module registers the estimators with `winnowgp.io`. The state of an estimator is its
parameters and some of its fitted attributes, under their own names; the other attributes follow
from these and are restored by a function per family.
"""

from collections.abc import Callable
from dataclasses import replace
from math import isnan, nan
from typing import Any

import numpy as np
import torch
from gpytorch.likelihoods import BernoulliLikelihood, GaussianLikelihood
from jaxtyping import Bool, Float
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from winnowgp.bounds.evidence import Evidence
from winnowgp.bounds.streaming import Memory
from winnowgp.data import Dataset, Standardiser
from winnowgp.errors import ModelFileError
from winnowgp.estimators.classification import ClassLabels, SparseGPClassifier
from winnowgp.estimators.deep import DeepGPClassifier, DeepGPRegressor
from winnowgp.estimators.fidelity import MultiFidelityGPRegressor
from winnowgp.estimators.gplvm import GPLVM
from winnowgp.estimators.gplvm_initialization import relevance
from winnowgp.estimators.kernels import kernel_name
from winnowgp.estimators.multi_output import AdditiveGPRegressor, MultiOutputGPRegressor
from winnowgp.estimators.regression import SparseGPRegressor
from winnowgp.estimators.rows import TargetScaler
from winnowgp.estimators.stream_records import BatchRecord, FirstRows, StreamRecord
from winnowgp.estimators.validation import HETEROSCEDASTIC, LIKELIHOODS
from winnowgp.io.registry import register, register_class
from winnowgp.models import DeepPosterior, MixturePosterior, MultiOutputPosterior, Posterior
from winnowgp.models.deep_gp import Allocation
from winnowgp.models.fidelity_posterior import (
    FidelityModel,
    FidelityPosterior,
    NonlinearFidelityPosterior,
)
from winnowgp.models.gplvm_posterior import LatentPosterior
from winnowgp.models.heteroscedastic import HeteroscedasticPosterior
from winnowgp.models.likelihoods import HeteroscedasticLikelihood
from winnowgp.models.observations import target_noise
from winnowgp.models.target_likelihoods import TargetLikelihoods
from winnowgp.point_processes import Bernoulli, Determinantal
from winnowgp.selection import Frontier, SizeFrontier, SubsetPosterior
from winnowgp.selection.subset_samples import SubsetSamples
from winnowgp.training.schedules import SizedDeepModel, SizedModel

# Parameters that belong to the process that fits, not to the model.
_NOT_SAVED = ("callbacks", "checkpoint")
# Parameters that may be arrays in any form that NumPy reads.
_ARRAYS = ("candidates", "inducing_points", "start")

_Fields = dict[str, Any]

_ANY: _Fields = {
    "parameters": dict[str, Any],
    "n_features_in_": int,
    "feature_names_in_": list[str] | None,
    "elbo_": float,
    "elbo_gap_": float,
}
_SHALLOW: _Fields = _ANY | {
    "_x_scaler": Standardiser,
    "posterior_": Posterior | HeteroscedasticPosterior | MixturePosterior,
    "alpha_": float | None,
    "candidates_": Float[np.ndarray, "K D"],
    "inclusion_": Float[np.ndarray, " K"],
    "frontier_": SizeFrontier | None,
    "evidence_": Evidence | None,
    "kernel_evidence_": dict[str, float],
    "predictive_gap_": float,
    "predictive_gap_se_": float,
    "growth_limit_": str | None,
    "last_doubling_gain_": float,
    "_sized": tuple[SizedModel, ...],
    "_subset_posterior": SubsetPosterior | None,
    "_stream": StreamRecord | None,
}
_DEEP: _Fields = _ANY | {
    "_x_scaler": Standardiser,
    "posterior_": DeepPosterior,
    "alpha_": tuple[float | None, ...],
    "candidates_": tuple[Float[np.ndarray, "_ _"], ...],
    "inclusion_": tuple[Float[np.ndarray, " _"], ...],
    "frontiers_": tuple[Frontier | None, ...],
    "allocations_": tuple[Allocation, ...],
    "_sized": tuple[SizedDeepModel, ...],
}
_PROCESSES: _Fields = _ANY | {
    "_x_scaler": Standardiser,
    "posterior_": MultiOutputPosterior | FidelityPosterior | NonlinearFidelityPosterior,
    "alpha_": float | None | tuple[float | None, ...],
    "candidates_": tuple[Float[np.ndarray, "_ _"], ...],
    "inclusion_": tuple[Float[np.ndarray, " _"], ...],
    "frontier_": SizeFrontier | tuple[SizeFrontier, ...],
    "evidence_": Evidence | None,
}
_GPLVM: _Fields = _ANY | {
    "_x_scaler": Standardiser,
    "_varies": Bool[Tensor, " P"],
    "_anchors": tuple[Float[Tensor, "A Q"], Float[Tensor, "A Q"]],
    "posterior_": LatentPosterior,
    "alpha_": float | None,
    "candidates_": Float[np.ndarray, "K Q"],
    "inclusion_": Float[np.ndarray, " K"],
    "embedding_": Float[np.ndarray, "N Q"],
    "embedding_std_": Float[np.ndarray, "N Q"],
    "n_iter_": int,
    "frontier_": Frontier | None,
}
_REGRESSION: _Fields = {"_y_scaler": TargetScaler}
_CLASSIFICATION: _Fields = {"_labels": ClassLabels}


def _register_estimator(cls: type, fields: _Fields, *restore: Callable[[Any], None]) -> None:
    """Register an estimator.

    Args:
        restore: functions that check the fitted attributes and set those that follow from them.
    """

    def state(model: Any) -> dict[str, Any]:
        check_is_fitted(model)
        parameters = model.get_params(deep=False)
        for name in _NOT_SAVED:
            parameters.pop(name, None)
        for name in _ARRAYS:
            if not isinstance(parameters.get(name), str | None):
                parameters[name] = np.array(parameters[name], dtype=np.float64)
        names = getattr(model, "feature_names_in_", None)
        special = {
            "parameters": parameters,
            "feature_names_in_": None if names is None else [str(name) for name in names],
        }
        return special | {name: getattr(model, name) for name in fields if name not in special}

    def build(
        parameters: dict[str, Any], feature_names_in_: list[str] | None, **attributes: Any
    ) -> Any:
        _require(parameters.keys().isdisjoint(_NOT_SAVED), "has parameters that are never saved")
        model = cls(**parameters)
        if feature_names_in_ is not None:
            named = len(feature_names_in_) == attributes["n_features_in_"]
            _require(named, "does not have one feature name per input")
            model.feature_names_in_ = np.array(feature_names_in_, dtype=object)
        for name, value in attributes.items():
            setattr(model, name, value)
        for function in restore:
            function(model)
        return model

    register(cls.__name__, cls, fields=fields, state=state)(build)


def _restore_shallow(model: Any) -> None:
    D, posterior = model.n_features_in_, model.posterior_
    widths = {posterior.Z.shape[1], model.candidates_.shape[1], len(model._x_scaler.shift)}
    _require(widths == {D}, f"has {D} inputs, but inducing points or a scaler of another width")
    sizes = [sized.posterior.M for sized in model._sized]
    _require(
        sizes == sorted(set(sizes)) and all(M < posterior.M for M in sizes),
        f"has models of {sizes} points that are not smaller than its own, in ascending order",
    )
    same = all(
        sized.posterior.Z.shape[1] == D
        and sized.posterior.P == posterior.P
        and type(sized.posterior.likelihood) is type(posterior.likelihood)
        for sized in model._sized
    )
    _require(same, "has smaller models with other inputs, outputs or likelihoods")
    frontier = model.frontier_
    _require(
        (frontier is not None and len(frontier.elbos) > posterior.M) or not model._sized,
        "has smaller models, but no frontier that reaches its own size",
    )
    subsets = model._subset_posterior
    _require(
        subsets is None or len(subsets.inclusion) == len(model.candidates_),
        "has a posterior over subsets of another number of candidates",
    )
    model.kernel_, model.n_inducing_ = posterior.kernel, posterior.M
    model.kernel_name_ = kernel_name(model.kernel, posterior.kernel)
    model.inducing_points_ = model._x_scaler.inverse(posterior.Z).numpy()


def _restore_deep(model: Any) -> None:
    D, layers = model.n_features_in_, model.posterior_.layers
    model.depths_, model.comparison_ = (), None
    _require(
        layers[0].D == D == len(model._x_scaler.shift) and model.layers in ("auto", len(layers)),
        "does not have the layers that its parameters specify",
    )
    per_layer = (model.alpha_, model.candidates_, model.inclusion_, model.frontiers_)
    _require(
        all(len(values) == len(layers) for values in per_layer)
        and all(
            points.shape == (len(inclusion), layer.D)
            for points, inclusion, layer in zip(
                model.candidates_, model.inclusion_, layers, strict=True
            )
        ),
        "does not have one set of candidates per layer",
    )
    _require(
        all(
            [(layer.D, layer.P) for layer in sized.posterior.layers]
            == [(layer.D, layer.P) for layer in layers]
            and type(sized.posterior.likelihood) is type(model.posterior_.likelihood)
            and sized.posterior.M in [each.sizes for each in model.allocations_]
            for sized in model._sized
        ),
        "has smaller models with other layers or likelihoods, or that no allocation describes",
    )
    model._set_posterior(model.posterior_)


def _restore_processes(model: Any) -> None:
    D, posterior = model.n_features_in_, model.posterior_
    several = isinstance(model, MultiFidelityGPRegressor)
    modes = posterior.modes if isinstance(posterior, FidelityModel) else [posterior]
    nonlinear = isinstance(posterior, NonlinearFidelityPosterior)
    _require(
        isinstance(posterior, FidelityModel) == several
        and (not several or 0 <= posterior.column < D)
        and (not several or model.relation in ("auto", model.relation_))
        and nonlinear == isinstance(model.frontier_, tuple) == isinstance(model.alpha_, tuple),
        "has a posterior of another kind",
    )
    # The column of fidelities is not an input of the processes.
    widths = {modes[0].Z.shape[1], len(model._x_scaler.shift) - several}
    widths |= {points.shape[1] for points in model.candidates_}
    _require(widths == {D - several}, f"has {D} inputs, but points or a scaler of another width")
    counts = [len(points) for points in model.candidates_]
    _require(
        [len(inclusion) for inclusion in model.inclusion_] == counts
        and len(counts) == sum(mode.Q for mode in modes),
        "does not have one set of candidates per process",
    )
    model._set_processes()


def _restore_targets(model: Any) -> None:
    likelihood = model.posterior_.likelihood
    _check_likelihood(model.likelihood, likelihood)
    _require(len(model._y_scaler.columns.shift) == model.posterior_.P, "has another target scaler")
    _require(isinstance(model._takes_logarithm(), bool), "has another `log_target`")
    model._y_scaler = replace(model._y_scaler, log=model._takes_logarithm())
    model.likelihood_, model.noise_ = likelihood, model._y_scaler.noise(likelihood)
    if model.noise == "target" and model.posterior_.P > 1 and _one_noise(likelihood):
        # Earlier versions learnt one noise for all targets.
        model.noise = "shared"


def _one_noise(likelihood: Any) -> bool:
    return isinstance(likelihood, GaussianLikelihood) and target_noise(likelihood).dim() == 0


def _restore_classes(model: Any) -> None:
    C, posterior = len(model._labels.classes), model.posterior_
    _require(
        (1 if C == 2 else C) == posterior.P
        and type(posterior.likelihood) is type(model._labels.likelihood()),
        f"has {C} classes, but a posterior of another number",
    )
    model.classes_ = model._labels.classes


def _restore_latent(model: Any) -> None:
    function, P, Q = model.posterior_.function, model.n_features_in_, model.posterior_.Q
    widths = {function.P, len(model._varies), len(model._x_scaler.shift)}
    _require(widths == {P}, f"has {P} columns, but a posterior or scaler of another width")
    _require(model.embedding_.shape[1] == Q, f"has latent positions of other than {Q} dimensions")
    _require(bool((model._anchors[1] > 0).all()), "has latent variances that are not positive")
    _check_likelihood(model.likelihood, function.likelihood)
    model.kernel_, model.relevance_ = function.kernel, relevance(function.kernel, Q)
    model.n_inducing_, model.inducing_points_ = function.M, function.Z.numpy()
    model.noise_ = model._noise(P)


def _check_likelihood(parameter: Any, likelihood: Any) -> None:
    """Check that the name and the fitted likelihood agree; predictions depend on both."""
    if isinstance(likelihood, TargetLikelihoods):
        parts = likelihood.parts
        names = parameter if isinstance(parameter, list | tuple) else [parameter] * len(parts)
        _require(len(names) == len(parts), "has likelihoods of another number of targets")
        for name, part in zip(names, parts, strict=True):
            _check_likelihood(name, part)
        return
    if isinstance(parameter, list | tuple):
        # Gaussian noise of all targets has one likelihood.
        for name in parameter:
            _check_likelihood(name, likelihood)
    elif parameter == "bernoulli":
        same = isinstance(likelihood, BernoulliLikelihood)
        _require(same, "has a likelihood other than its parameter `likelihood`")
    elif isinstance(parameter, str):
        names = LIKELIHOODS | {HETEROSCEDASTIC: HeteroscedasticLikelihood}
        same = names.get(parameter) is type(likelihood)
        _require(same, "has a likelihood other than its parameter `likelihood`")


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise ModelFileError(f"the estimator {problem}")


_register_estimator(
    SparseGPRegressor,
    _SHALLOW | _REGRESSION,
    _restore_shallow,
    _restore_targets,
)
_register_estimator(
    SparseGPClassifier, _SHALLOW | _CLASSIFICATION, _restore_shallow, _restore_classes
)
_register_estimator(DeepGPRegressor, _DEEP | _REGRESSION, _restore_deep, _restore_targets)
_register_estimator(DeepGPClassifier, _DEEP | _CLASSIFICATION, _restore_deep, _restore_classes)
for _cls in (MultiOutputGPRegressor, MultiFidelityGPRegressor, AdditiveGPRegressor):
    _register_estimator(_cls, _PROCESSES | _REGRESSION, _restore_processes, _restore_targets)
_register_estimator(GPLVM, _GPLVM, _restore_latent)


# Values that fitted estimators hold.

register_class(Standardiser, {"positive scales": lambda own: (own.scale > 0).all()})
register_class(
    TargetScaler,
    {"one column for one target": lambda own: not own.single or len(own.columns.shift) == 1},
    # Whether the targets are logarithms is a parameter of the estimator.
    fields={"columns": Standardiser, "single": bool},
)
register_class(
    Frontier,
    {
        "bounds that are numbers": lambda own: _are_numbers(own.bounds),
        "subsets of 0, 1, 2, … points": lambda own: torch.equal(
            own.masks.sum(1), torch.arange(len(own.bounds))
        ),
    },
    # The bound of a subset may be −∞, which a `Float` of a file may not.
    fields={"bounds": Tensor, "masks": Bool[Tensor, "J K"], "N": int | float},
)
register_class(Evidence, {"a lower bound below the upper one": lambda own: own.lower <= own.upper})
for _cls in (SizedModel, SizedDeepModel, Allocation, SubsetPosterior, Determinantal, BatchRecord):
    register_class(_cls)
register_class(Bernoulli, fields={"logits": Float[Tensor, " K"]})
register_class(
    SubsetSamples,
    {
        "subsets": lambda own: own.masks.numel() > 0,
        "a weight for each size": lambda own: len(own.log_weights) == own.masks.shape[2] + 1,
    },
)
register_class(
    StreamRecord,
    {
        "batches with rows": lambda own: (
            own.seen > 0 and own.count >= 1 and own.given_up >= 0 and own.waiting >= 0
        ),
        "no more rows in memory than were seen": lambda own: (
            isnan(own.remembered) or 0 < own.remembered <= own.seen * (1 + 1e-9)
        ),
        "different numbers of its points": lambda own: all(
            len(set(numbers)) == len(numbers) and all(0 <= n < own.arrived for n in numbers)
            for numbers in (own.points, own.memory_points)
        ),
        "all inducing points in memory": lambda own: {*own.points} <= {*own.memory_points},
        "a number for each point of its memory": lambda own: all(
            len(own.memory_points) == memory.M for memory in own.memories
        ),
        "a share of the noise between 0 and 1": lambda own: (
            own.noise_share is None or ((own.noise_share > 0) & (own.noise_share <= 1)).all()
        ),
    },
)
register_class(
    Memory,
    {
        "the same points and outputs in both parts": lambda own: (
            own.fixed is None
            or (own.fixed.Z.shape == own.Z.shape and own.fixed.y.shape[1] == own.y.shape[1])
        ),
        "rows": lambda own: own.N > 0,
        "one residual, or one of each output": lambda own: (
            own.residual.shape in ((), (own.y.shape[1],))
        ),
    },
)


def _are_numbers(values: Tensor) -> bool:
    return values.is_floating_point() and values.dim() == 1 and not bool(values.isnan().any())


def _size_frontier_state(frontier: SizeFrontier) -> dict[str, Any]:
    densities = enumerate(frontier.log_densities.tolist())
    return {
        "elbos": frontier.elbos,
        "length": len(frontier.elbos),
        # Few are known.
        "log_densities": [(M, nats) for M, nats in densities if not isnan(nats)],
        "N": frontier.N,
        "evidence": frontier.evidence,
        "exact_log_density": frontier.exact_log_density,
        "earlier_gap": frontier.earlier_gap,
    }


@register("SizeFrontier", SizeFrontier, state=_size_frontier_state)
def _size_frontier(
    elbos: Tensor,
    length: int | None,
    log_densities: list[tuple[int, float]],
    N: int | float,
    evidence: float | None,
    exact_log_density: float | None,
    earlier_gap: float,
) -> SizeFrontier:
    # An ELBO may be −∞, so `elbos` is not declared as an array of finite numbers.
    if not _are_numbers(elbos):
        raise ModelFileError("the ELBOs of a SizeFrontier must be numbers, one per size")
    # Files of earlier versions do not have the length.
    if length is not None and len(elbos) != length:
        raise ModelFileError(f"a SizeFrontier must have {length} ELBOs; it has {len(elbos)}")
    if not len(elbos) or not N > 0:
        raise ModelFileError("a SizeFrontier must have at least one size and one observation")
    densities = torch.full_like(elbos, nan, dtype=torch.float64)
    for M, nats in log_densities:
        if not 0 <= M < len(elbos):
            raise ModelFileError("a SizeFrontier must have log densities of its own sizes only")
        densities[M] = nats
    return SizeFrontier(elbos.double(), densities, N, evidence, exact_log_density, earlier_gap)


def _first_rows_state(first: FirstRows) -> dict[str, Any]:
    rows = first.rows
    return {
        "X": rows.X,
        "Y": rows.Y,
        "weights": rows.weights,
        "noise": rows.noise,
        "waiting": float(first.waiting),
    }


@register("FirstRows", FirstRows, state=_first_rows_state)
def _first_rows(
    X: Float[Tensor, "N D"],
    Y: Float[Tensor, "N P"],
    weights: Float[Tensor, " N"] | None,
    noise: Float[Tensor, "N P"] | None,
    waiting: float,
) -> FirstRows:
    if not waiting >= 0:
        raise ModelFileError("FirstRows cannot wait for a negative number of rows")
    return FirstRows(Dataset.of(X, Y, weights=weights, noise=noise), waiting)


def _class_labels_state(labels: ClassLabels) -> dict[str, Any]:
    return {"dtype": labels.classes.dtype.str, "values": labels.classes.tolist()}


@register("ClassLabels", ClassLabels, state=_class_labels_state)
def _class_labels(dtype: str, values: list[Any]) -> ClassLabels:
    numpy_dtype = np.dtype(dtype)
    longest = max((len(value) for value in values if isinstance(value, str)), default=1)
    # Wider strings than any label would only fill memory.
    too_wide = numpy_dtype.kind == "U" and numpy_dtype.itemsize > 4 * max(longest, 1)
    if numpy_dtype.kind not in "biufUO" or too_wide:
        raise ModelFileError(f"class labels cannot have the type {numpy_dtype}")
    classes = np.empty(len(values), dtype=numpy_dtype)
    classes[:] = values
    # Probabilities are looked up in the order of the classes.
    if len(classes) < 2 or not np.array_equal(np.unique(classes), classes):
        raise ModelFileError("class labels must be two or more, sorted and distinct")
    return ClassLabels(classes)


def _random_state_state(random_state: np.random.RandomState) -> dict[str, Any]:
    _, key, position, has_gauss, gauss = random_state.get_state(legacy=True)
    key = np.asarray(key).astype(np.int64)
    return {"key": key, "position": position, "has_gauss": has_gauss, "gauss": gauss}


@register("RandomState", np.random.RandomState, state=_random_state_state)
def _random_state(
    key: np.ndarray, position: int, has_gauss: int, gauss: float
) -> np.random.RandomState:
    random_state = np.random.RandomState()
    random_state.set_state(("MT19937", key.astype(np.uint32), position, has_gauss, gauss))
    return random_state
