"""The scikit-learn face: numpy arrays and data frames in and out; and whole tables."""

from winnowgp.estimators.deep_gp_classifier import DeepGPClassifier
from winnowgp.estimators.deep_gp_regressor import DeepGPRegressor
from winnowgp.estimators.export import export_numpy, export_onnx
from winnowgp.estimators.fit_table import fit_table
from winnowgp.estimators.gplvm import GPLVM
from winnowgp.estimators.kernels import KERNEL_NAMES, kernel_from
from winnowgp.estimators.predictive import Predictive, predictive
from winnowgp.estimators.sparse_gp_classifier import SparseGPClassifier
from winnowgp.estimators.sparse_gp_regressor import SparseGPRegressor
from winnowgp.estimators.tabular_model import TabularModel

__all__ = [
    "GPLVM",
    "KERNEL_NAMES",
    "DeepGPClassifier",
    "DeepGPRegressor",
    "Predictive",
    "SparseGPClassifier",
    "SparseGPRegressor",
    "TabularModel",
    "export_numpy",
    "export_onnx",
    "fit_table",
    "kernel_from",
    "predictive",
]
