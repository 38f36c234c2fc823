"""How a map of the rows of a table is packed; the rows' places are part of it."""

import torch

from winnowgp.errors import ModelFileError
from winnowgp.estimators.gplvm import GPLVM
from winnowgp.estimators.latent_start import relevance
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
from winnowgp.estimators.packed_targets import check_likelihood
from winnowgp.io import Packed, Packing
from winnowgp.io.latent_models import latent_posterior_from, packed_latent_posterior

_NUMBERS = ("elbo_", "given_up_", "alpha_")
_ARRAYS = ("candidates_", "inclusion_", "embedding_", "embedding_std_")


def _packed_gplvm(model: GPLVM) -> Packed:
    found = packed_estimator(model)
    found.about.update({name: packed_number(getattr(model, name)) for name in _NUMBERS})
    found.about["n_iter_"] = int(model.n_iter_)
    found.tensors.update({name: torch.from_numpy(getattr(model, name)) for name in _ARRAYS})
    found.tensors["varies"] = model._varies
    found.tensors["anchor_mean"], found.tensors["anchor_variance"] = model._anchors
    found.parts["units"] = packed_units(model._units)
    found.parts["posterior"] = packed_latent_posterior(model.posterior_)
    if model.frontier_ is not None:
        found.parts["frontier"] = packed_frontier(model.frontier_)
    return found


def _gplvm_from(found: Packed) -> GPLVM:
    model = estimator_from(GPLVM, found)
    P = found.said("n_features_in_", int)
    posterior = latent_posterior_from(found.parts["posterior"])
    function, Q = posterior.function, posterior.Q
    varies = found.tensors["varies"]
    if function.P != P or varies.dtype != torch.bool or varies.shape != (P,):
        raise ModelFileError(f"has {P} columns and a map to {function.P}")
    check_likelihood(model.likelihood, function.likelihood)
    model._varies, model._units = varies, units_from(found.parts["units"], P)
    anchors = found.numbers("anchor_mean", None, Q)
    model._anchors = anchors, found.numbers("anchor_variance", *anchors.shape)
    if not bool((model._anchors[1] > 0).all()):
        raise ModelFileError("has places of rows whose variance is not positive")
    model.posterior_, model.kernel_ = posterior, function.kernel
    model.relevance_ = relevance(model.kernel_, Q)
    model.n_inducing_, model.inducing_points_ = function.M, function.Z.numpy()
    model.candidates_, model.inclusion_ = candidates_from(found, Q)
    model.embedding_ = found.numbers("embedding_", None, Q).numpy()
    model.embedding_std_ = found.numbers("embedding_std_", *model.embedding_.shape).numpy()
    model.elbo_, model.given_up_ = float(found.about["elbo_"]), float(found.about["given_up_"])
    model.alpha_ = number_from(found.about["alpha_"])
    model.n_iter_ = found.said("n_iter_", int)
    frontier = found.parts.get("frontier")
    model.frontier_ = None if frontier is None else frontier_from(frontier)
    model.noise_ = model._noise(P)
    return model


PACKINGS = {"GPLVM": Packing(_packed_gplvm, _gplvm_from)}
