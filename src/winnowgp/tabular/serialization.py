"""Serialisation of models of tables, and `load`.

Importing this module registers every class that a model file may hold with `winnowgp.io`;
`winnowgp.load` is taken from here, so that they are known before a file is read.
"""

from typing import Any

import numpy as np

from winnowgp.data.encoding import TableEncoder
from winnowgp.errors import ModelFileError
from winnowgp.estimators import MultiOutputGPRegressor
from winnowgp.estimators.base import total_points
from winnowgp.estimators.classification import ClassTargets
from winnowgp.io.registry import load, register
from winnowgp.report.summary import Alarm, Summary, is_consistent
from winnowgp.tabular.model import TabularModel, prediction_names
from winnowgp.tabular.outputs import MultiOutputTable
from winnowgp.tabular.quality import TableEstimator
from winnowgp.tabular.targets import TASKS

__all__ = ["load"]


@register("TableEncoder", TableEncoder, state=lambda encoder: {"config": encoder.to_dict()})
def _table_encoder(config: dict[str, Any]) -> TableEncoder:
    return TableEncoder.from_dict(config)


@register("TabularModel", TabularModel)
def _tabular_model(
    encoder: TableEncoder,
    estimator: TableEstimator,
    id_column: str | None,
    summary: Summary,
) -> TabularModel:
    choice, task = summary["choice"], summary["task"]
    consistent = (
        len(encoder.features) == estimator.n_features_in_
        and choice["points"] == total_points(estimator)
        and choice["sizes"] == [np.sum(sizes) for sizes in estimator.available_sizes_]
        and choice.get("layers", [choice["points"]]) == list(np.atleast_1d(estimator.n_inducing_))
        and is_consistent(summary)
        and task in TASKS
        and (task == "classification") == isinstance(estimator, ClassTargets)
        and id_column not in prediction_names(task, summary["classes"])
    )
    if not consistent:
        raise ModelFileError("the encoder, estimator and summary of a TabularModel do not agree")
    return TabularModel(encoder, estimator, id_column, summary)


@register("MultiOutputTable", MultiOutputTable)
def _multi_output_table(
    encoder: TableEncoder,
    estimator: MultiOutputGPRegressor,
    targets: list[str],
    id_column: str | None,
    quality: dict[str, dict[str, float]],
    settings: dict[str, str],
    alarms: list[Alarm],
) -> MultiOutputTable:
    same = len(encoder.features) == estimator.n_features_in_
    if not same or len(targets) != estimator.posterior_.P:
        raise ModelFileError("the encoder, estimator and targets of a table do not agree")
    return MultiOutputTable(encoder, estimator, id_column, targets, quality, settings, alarms)
