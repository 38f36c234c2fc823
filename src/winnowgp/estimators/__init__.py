"""Estimators with scikit-learn's interface, and models of whole tables."""

from winnowgp.estimators import serialization  # noqa: F401  it registers the estimators
from winnowgp.estimators.classification import SparseGPClassifier
from winnowgp.estimators.deep import DeepGPClassifier, DeepGPRegressor
from winnowgp.estimators.diagnostics import diagnose
from winnowgp.estimators.effects import column_effect, permutation_importance
from winnowgp.estimators.evaluation import (
    CrossValidation,
    PairedDifference,
    compare_models,
    cross_validate_table,
    evaluate_model,
)
from winnowgp.estimators.export import export_numpy, export_onnx
from winnowgp.estimators.fidelity import MultiFidelityGPRegressor
from winnowgp.estimators.gplvm import GPLVM
from winnowgp.estimators.kernels import kernel_from
from winnowgp.estimators.multi_output import AdditiveGPRegressor, MultiOutputGPRegressor
from winnowgp.estimators.regression import SparseGPRegressor
from winnowgp.estimators.table_outputs import (
    MultiOutputTable,
    cross_validate_outputs,
    fit_outputs_table,
)
from winnowgp.estimators.table_updates import TableUpdate, update_table
from winnowgp.estimators.tables import fit_table
from winnowgp.estimators.tabular_model import TabularModel

__all__ = [
    "GPLVM",
    "AdditiveGPRegressor",
    "CrossValidation",
    "DeepGPClassifier",
    "DeepGPRegressor",
    "MultiFidelityGPRegressor",
    "MultiOutputGPRegressor",
    "MultiOutputTable",
    "PairedDifference",
    "SparseGPClassifier",
    "SparseGPRegressor",
    "TableUpdate",
    "TabularModel",
    "column_effect",
    "compare_models",
    "cross_validate_outputs",
    "cross_validate_table",
    "diagnose",
    "evaluate_model",
    "export_numpy",
    "export_onnx",
    "fit_outputs_table",
    "fit_table",
    "kernel_from",
    "permutation_importance",
    "update_table",
]
