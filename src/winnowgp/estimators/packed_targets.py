"""What regressors and classifiers learn of their targets, shallow or deep, as a file keeps it."""

from typing import Any

from winnowgp.errors import ModelFileError
from winnowgp.estimators.likelihoods import LIKELIHOODS
from winnowgp.estimators.packed_findings import (
    labels_from,
    packed_labels,
    packed_target_units,
    target_units_from,
)
from winnowgp.io import Packed


def pack_numbers(model: Any, found: Packed) -> Packed:
    """Add what a regressor knows of numbers: their units."""
    found.parts["y_units"] = packed_target_units(model._y_units)
    return found


def take_numbers(model: Any, found: Packed) -> Any:
    """The way back, for a regressor that has its posterior."""
    learnt = model.posterior_.likelihood
    check_likelihood(model.likelihood, learnt)
    model._y_units = target_units_from(found.parts["y_units"], model.posterior_.P)
    model.likelihood_, model.noise_ = learnt, model._y_units.noise(learnt)
    return model


def pack_classes(model: Any, found: Packed) -> Packed:
    """Add what a classifier knows of classes: their labels."""
    found.about["classes_"] = packed_labels(model._labels)
    return found


def take_classes(model: Any, found: Packed) -> Any:
    """The way back, for a classifier that has its posterior."""
    posterior = model.posterior_
    about, likelihood = found.about["classes_"], posterior.likelihood
    model._labels = labels_from(about, functions=posterior.P, likelihood=likelihood)
    model.classes_ = model._labels.classes
    return model


def check_likelihood(asked: Any, learnt: Any) -> None:
    """Whether a likelihood asked for by name is the one that was learnt."""
    if isinstance(asked, str) and LIKELIHOODS.get(asked) is not type(learnt):
        raise ModelFileError("its likelihood is not the one it says it was asked for")
