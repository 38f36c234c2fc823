"""Estimators with scikit-learn's interface."""

from winnowgp.estimators import serialization  # noqa: F401  it registers the estimators
from winnowgp.estimators.classification import SparseGPClassifier
from winnowgp.estimators.deep import DeepGPClassifier, DeepGPRegressor
from winnowgp.estimators.fidelity import MultiFidelityGPRegressor
from winnowgp.estimators.gplvm import GPLVM
from winnowgp.estimators.multi_output import AdditiveGPRegressor, MultiOutputGPRegressor
from winnowgp.estimators.regression import SparseGPRegressor

__all__ = [
    "GPLVM",
    "AdditiveGPRegressor",
    "DeepGPClassifier",
    "DeepGPRegressor",
    "MultiFidelityGPRegressor",
    "MultiOutputGPRegressor",
    "SparseGPClassifier",
    "SparseGPRegressor",
]
