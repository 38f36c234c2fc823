"""How shallow estimators and models of tables are packed."""

from typing import Any

import torch

from winnowgp.data import TableEncoder
from winnowgp.errors import ModelFileError
from winnowgp.estimators.inducing_estimator import InducingEstimator
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
from winnowgp.estimators.sparse_gp_classifier import SparseGPClassifier
from winnowgp.estimators.sparse_gp_regressor import SparseGPRegressor
from winnowgp.estimators.tabular_model import TASKS, TabularModel, prediction_names
from winnowgp.io import Packed, Packing
from winnowgp.io.models import packed_posterior, posterior_from
from winnowgp.io.save import packed, unpacked
from winnowgp.report import checked_findings

# Of a fit; may be infinite or absent.
_NUMBERS = ("elbo_", "given_up_", "alpha_")


def _packed_regressor(model: SparseGPRegressor) -> Packed:
    found = pack_numbers(model, _packed_inducing(model))
    found.about["evidence_gap_"] = packed_number(model.evidence_gap_)
    return found


def _regressor_from(found: Packed) -> SparseGPRegressor:
    model = take_numbers(_inducing_from(SparseGPRegressor, found), found)
    model.evidence_gap_ = float(found.about["evidence_gap_"])
    return model


def _packed_inducing(model: InducingEstimator) -> Packed:
    """What both shallow estimators have."""
    found = packed_estimator(model)
    found.about.update({name: packed_number(getattr(model, name)) for name in _NUMBERS})
    found.tensors["candidates_"] = torch.from_numpy(model.candidates_)
    found.tensors["inclusion_"] = torch.from_numpy(model.inclusion_)
    found.parts["x_units"] = packed_units(model._x_units)
    found.parts["posterior"] = packed_posterior(model.posterior_)
    if model.frontier_ is not None:
        found.parts["frontier"] = packed_frontier(model.frontier_)
    return found


def _inducing_from(made: Any, found: Packed) -> Any:
    model = estimator_from(made, found)
    D, posterior = model.n_features_in_, posterior_from(found.parts["posterior"])
    if posterior.Z.shape[1] != D:
        raise ModelFileError(f"has {D} inputs and points of {posterior.Z.shape[1]}")
    model._x_units = units_from(found.parts["x_units"], D)
    model.posterior_, model.kernel_ = posterior, posterior.kernel
    for name in _NUMBERS:
        setattr(model, name, number_from(found.about[name]))
    model.n_inducing_ = posterior.M
    model.inducing_points_ = model._x_units.inverse(posterior.Z).numpy()
    model.candidates_, model.inclusion_ = candidates_from(found, D)
    frontier = found.parts.get("frontier")
    model.frontier_ = None if frontier is None else frontier_from(frontier)
    return model


def _packed_tabular(model: TabularModel) -> Packed:
    about = {
        "encoder": model.encoder.about(),
        "id_column": model.id_column,
        "findings": dict(model.findings),
    }
    return Packed("TabularModel", about, parts={"estimator": packed(model.estimator)})


def _tabular_from(found: Packed) -> TabularModel:
    encoder = TableEncoder.from_about(found.about["encoder"])
    estimator = unpacked(found.parts["estimator"])
    findings = checked_findings(found.about["findings"])
    choice, name = findings["choice"], found.about["id_column"]
    consistent = (
        isinstance(estimator, SparseGPRegressor | SparseGPClassifier)
        and len(encoder.features) == estimator.n_features_in_
        and choice["points"] == estimator.n_inducing_
        and (choice["frontier"] is None or len(choice["frontier"]) > choice["points"])
        and len(findings["columns"]) > 0
        and findings["task"] in TASKS
        and (findings["task"] == "classification") == isinstance(estimator, SparseGPClassifier)
        and (name is None or isinstance(name, str))
        and name not in prediction_names(findings["task"], findings["classes"])
    )
    if not consistent:
        raise ModelFileError("its parts do not belong together")
    return TabularModel(encoder, estimator, name, findings)


PACKINGS = {
    "SparseGPRegressor": Packing(_packed_regressor, _regressor_from),
    "SparseGPClassifier": Packing(
        lambda model: pack_classes(model, _packed_inducing(model)),
        lambda found: take_classes(_inducing_from(SparseGPClassifier, found), found),
    ),
    "TabularModel": Packing(_packed_tabular, _tabular_from),
}
