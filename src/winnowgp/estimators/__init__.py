"""The scikit-learn face: numpy arrays and data frames in and out."""

from winnowgp.estimators.deep_gp_classifier import DeepGPClassifier
from winnowgp.estimators.deep_gp_regressor import DeepGPRegressor
from winnowgp.estimators.gplvm import GPLVM
from winnowgp.estimators.kernels import KERNEL_NAMES, kernel_from
from winnowgp.estimators.sparse_gp_classifier import SparseGPClassifier
from winnowgp.estimators.sparse_gp_regressor import SparseGPRegressor

__all__ = [
    "GPLVM",
    "KERNEL_NAMES",
    "DeepGPClassifier",
    "DeepGPRegressor",
    "SparseGPClassifier",
    "SparseGPRegressor",
    "kernel_from",
]
