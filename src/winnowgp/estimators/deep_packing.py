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
    number_from,
    packed_estimator,
    packed_frontier,
    packed_number,
    packed_units,
    units_from,
)
from winnowgp.estimators.packed_targets import (
    pack_classes,
    pack_numbers,
    take_classes,
    take_numbers,
)
from winnowgp.io import Packed, Packing
from winnowgp.io.deep_models import deep_posterior_from, packed_deep_posterior


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
    "DeepGPRegressor": Packing(
        lambda model: pack_numbers(model, _packed_deep(model)),
        lambda found: take_numbers(_deep_from(DeepGPRegressor, found), found),
    ),
    "DeepGPClassifier": Packing(
        lambda model: pack_classes(model, _packed_deep(model)),
        lambda found: take_classes(_deep_from(DeepGPClassifier, found), found),
    ),
}
