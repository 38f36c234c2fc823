"""Models of tables with mixed columns: fit, evaluate, explain, update and export them."""

from winnowgp.tabular import serialization  # noqa: F401  it registers the models of tables
from winnowgp.tabular.diagnostics import diagnose
from winnowgp.tabular.effects import column_effect, permutation_importance
from winnowgp.tabular.evaluation import compare_models, cross_validate_table, evaluate_model
from winnowgp.tabular.export import export_numpy, export_onnx
from winnowgp.tabular.fitting import fit_table
from winnowgp.tabular.model import TabularModel
from winnowgp.tabular.outputs import cross_validate_outputs, fit_outputs_table, update_outputs_table
from winnowgp.tabular.updates import update_table

__all__ = [
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
    "permutation_importance",
    "update_outputs_table",
    "update_table",
]
