"""How deep estimators are packed."""

from typing import Any

import torch

from winnowgp.errors import ModelFileError
from winnowgp.estimators.deep_estimator import DeepEstimator, seen_outside
from winnowgp.estimators.deep_gp_classifier import DeepGPClassifier
from winnowgp.estimators.deep_gp_regressor import DeepGPRegressor
from winnowgp.estimators.packed_findings import (
    candidates_from,
    estimator_from,
    frontier_from,
    labels_from,
    number_from,
    packed_estimator,
    packed_frontier,
    packed_labels,
    packed_number,
    packed_target_units,
    packed_units,
    target_units_from,
    units_from,
)
from winnowgp.estimators.packing import check_likelihood
from winnowgp.io import Packed, Packing
from winnowgp.io.deep_models import deep_posterior_from, packed_deep_posterior


def _packed_regressor(model: DeepGPRegressor) -> Packed:
    found = _packed_deep(model)
    found.parts["y_units"] = packed_target_units(model._y_units)
    return found


def _regressor_from(found: Packed) -> DeepGPRegressor:
    model = _deep_from(DeepGPRegressor, found)
    check_likelihood(model.likelihood, model.posterior_.likelihood)
    model._y_units = target_units_from(found.parts["y_units"], model.posterior_.P)
    model.likelihood_ = model.posterior_.likelihood
    model.noise_ = model._y_units.noise(model.likelihood_)
    return model


def _packed_classifier(model: DeepGPClassifier) -> Packed:
    found = _packed_deep(model)
    found.about["classes_"] = packed_labels(model._labels)
    return found


def _classifier_from(found: Packed) -> DeepGPClassifier:
    model = _deep_from(DeepGPClassifier, found)
    model._labels = labels_from(
        found.about["classes_"],
        functions=model.posterior_.P,
        likelihood=model.posterior_.likelihood,
    )
    model.classes_ = model._labels.classes
    return model


def _packed_deep(model: DeepEstimator) -> Packed:
    """What both deep estimators have."""
    found = packed_estimator(model)
    found.about["elbo_"] = packed_number(model.elbo_)
    found.about["given_up_"] = packed_number(model.given_up_)
    found.about["alpha_"] = [packed_number(alpha) for alpha in model.alpha_]
    found.parts["x_units"] = packed_units(model._x_units)
    found.parts["posterior"] = packed_deep_posterior(model.posterior_)
    for number, points in enumerate(model.candidates_):
        found.tensors[f"candidates_{number}"] = torch.from_numpy(points)
        found.tensors[f"inclusion_{number}"] = torch.from_numpy(model.inclusion_[number])
    for number, frontier in enumerate(model.frontiers_):
        if frontier is not None:
            found.parts[f"frontier.{number}"] = packed_frontier(frontier)
    return found


def _deep_from(made: Any, found: Packed) -> Any:
    model = estimator_from(made, found)
    D, posterior = model.n_features_in_, deep_posterior_from(found.parts["posterior"])
    layers = posterior.layers
    if layers[0].D != D or model.layers != len(layers):
        raise ModelFileError("its layers are not those it says it was asked for")
    model._x_units = units_from(found.parts["x_units"], D)
    model.posterior_, model.n_inducing_ = posterior, posterior.M
    kept = [layer.candidates.detach().clone() for layer in layers]
    model.inducing_points_ = seen_outside(kept, model._x_units)
    model.elbo_ = number_from(found.about["elbo_"])
    model.given_up_ = number_from(found.about["given_up_"])
    model.alpha_ = tuple(number_from(text) for text in found.said("alpha_", list))
    pairs = [candidates_from(found, layer.D, str(n)) for n, layer in enumerate(layers)]
    model.candidates_, model.inclusion_ = zip(*pairs, strict=True)
    parts = [found.parts.get(f"frontier.{number}") for number in range(len(layers))]
    model.frontiers_ = tuple(None if part is None else frontier_from(part) for part in parts)
    if len(model.alpha_) != len(layers):
        raise ModelFileError("has other strengths of its prior than one a layer")
    return model


PACKINGS = {
    "DeepGPRegressor": Packing(_packed_regressor, _regressor_from),
    "DeepGPClassifier": Packing(_packed_classifier, _classifier_from),
}
