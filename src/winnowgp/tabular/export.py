"""Export of fitted estimators to ONNX and to a Python file that needs only NumPy."""

import os
from pathlib import Path

import numpy as np

from winnowgp.errors import InputError, NotSaveableError
from winnowgp.estimators.classification import SparseGPClassifier
from winnowgp.estimators.deep import DeepEstimator
from winnowgp.estimators.fidelity import MultiFidelityGPRegressor
from winnowgp.estimators.processes import ProcessEstimator
from winnowgp.estimators.regression import SparseGPRegressor
from winnowgp.io.onnx_numpy import save_numpy, save_onnx
from winnowgp.io.posterior_program import (
    add_fidelities,
    add_latents,
    add_mixture,
    add_observation,
    add_processes,
    add_targets,
)
from winnowgp.io.program import Program
from winnowgp.models import BoxKernel, MixturePosterior, MultiOutputPosterior
from winnowgp.models.fidelity_posterior import NonlinearFidelityPosterior
from winnowgp.models.target_likelihoods import TargetLikelihoods
from winnowgp.tabular.model import TabularModel
from winnowgp.tabular.outputs import MultiOutputTable

Exportable = (
    TabularModel | MultiOutputTable | SparseGPRegressor | SparseGPClassifier | ProcessEstimator
)


def export_onnx(model: Exportable, path: str | os.PathLike[str]) -> Path:
    """Export the predictions of a model to ONNX, in float64.

    The exported model includes the preprocessing of its inputs and the scaling of its targets. An
    estimator has one input `X` `[N D]`. A `TabularModel` has one input per column: numbers and
    dates (in days since 1970) are doubles, NaN where missing; categories are strings without
    surrounding blanks, "" where missing. The outputs are `mean` and `variance` of a new
    observation, which has the learnt noise (add known noise of its own to the variance), or the
    `probabilities` of the classes that the metadata property `classes` lists. Those of several
    targets have a column for each, in the order of the metadata property `targets`.

    Args:
        model: a fitted estimator, `TabularModel` or `MultiOutputTable`.
        path: the file to write.

    Raises:
        NotSaveableError: the kernel, mean or likelihood cannot be exported.
        MissingExtraError: onnx is not installed.
    """
    return save_onnx(predictor_program(model), Path(path))


def export_numpy(model: Exportable, path: str | os.PathLike[str]) -> Path:
    """Export the predictions of a model to a Python file that needs only NumPy.

    The file has a function `predict` with the inputs and outputs of `export_onnx`. Categories may
    be of any type that a table may have; `predict` reads them as winnowgp does. Dates may also be
    strings such as 2024-03-01 or 2024-03-01T12:30, or `datetime64` of any unit, NaT where missing.

    Args:
        model: a fitted estimator, `TabularModel` or `MultiOutputTable`.
        path: the file to write.

    Raises:
        NotSaveableError: the kernel, mean or likelihood cannot be exported.
    """
    return save_numpy(predictor_program(model), Path(path))


def predictor_program(model: Exportable) -> Program:
    """Return the program that computes predictions from raw inputs."""
    program = Program(rows=_rows_at_once(model))
    if isinstance(model, TabularModel):
        X, estimator = _encoded(program, model), model.estimator
        program.metadata["target"] = model.target
    elif isinstance(model, MultiOutputTable):
        X, estimator = _encoded(program, model), model.estimator
        program.metadata["targets"] = list(model.targets)
    else:
        estimator = model
        X = program.add_input("X", width=estimator.n_features_in_)
    if isinstance(estimator, DeepEstimator):
        raise NotSaveableError(
            "a deep GP cannot be exported; save it with `save`, or export a model of one layer."
        )
    posterior = estimator.posterior_
    if isinstance(estimator, SparseGPRegressor):
        posterior = estimator._constant_noise_posterior("exported predictions")
    x_scaler = estimator._x_scaler
    shifted = program.apply("Sub", X, program.constant(x_scaler.shift.numpy()))
    inputs = program.scaled(shifted, 1 / x_scaler.scale.numpy())
    if isinstance(estimator, MultiFidelityGPRegressor):
        return _with_outputs(
            program, estimator, *add_fidelities(program, estimator.posterior_, inputs)
        )
    if isinstance(estimator, ProcessEstimator):
        return _with_outputs(program, estimator, *_mixtures(program, estimator.posterior_, inputs))
    if isinstance(posterior, MixturePosterior):
        members, weights = posterior.members, posterior.member_weights.tolist()
    else:
        members, weights = [posterior], [1.0]
    each = [
        add_observation(program, member.likelihood, *add_latents(program, member, inputs))
        for member in members
    ]
    mean, variance = each[0] if len(each) == 1 else add_mixture(program, each, weights)
    if isinstance(estimator, SparseGPClassifier):
        program.metadata["classes"] = estimator.classes_.tolist()
        program.add_output("probabilities", mean, width=len(estimator.classes_))
        return program
    assert variance is not None
    one_only = ("poisson", "negative-binomial", "beta")
    if estimator.likelihood in one_only and estimator.posterior_.P > 1:
        raise InputError(
            f"a {estimator.likelihood} likelihood is exported for one target only; got "
            f"{estimator.posterior_.P} targets. Use `MultiOutputGPRegressor`, or fit one model per "
            "target."
        )
    return _with_outputs(program, estimator, mean, variance)


def _rows_at_once(model: Exportable) -> int:
    """Return the rows that a NumPy file predicts at once: fewer if every row is many."""
    estimator = model.estimator if isinstance(model, TabularModel | MultiOutputTable) else model
    repeats = 1
    if isinstance(estimator.posterior_, NonlinearFidelityPosterior):
        repeats = len(estimator.posterior_.component_weights)
    elif isinstance(estimator, ProcessEstimator):
        boxes = [k for k in estimator.kernels_ if isinstance(k, BoxKernel)]
        repeats = max([1, *(k.nodes ** (2 * len(k.widths)) for k in boxes)])
    return max(1, Program().rows // repeats)


def _mixtures(program: Program, posterior: MultiOutputPosterior, inputs: str) -> tuple[str, str]:
    """Add mean and variance of observations of several targets, standardised."""
    latents, likelihood = add_processes(program, posterior, inputs), posterior.likelihood
    if isinstance(likelihood, TargetLikelihoods):
        return add_targets(program, likelihood, *latents)
    mean, variance = add_observation(program, likelihood, *latents)
    assert variance is not None
    return mean, variance


def _with_outputs(
    program: Program, estimator: SparseGPRegressor | ProcessEstimator, mean: str, variance: str
) -> Program:
    """Return the program with mean and variance in the units of the targets as outputs."""
    targets = estimator._y_scaler.columns
    scale, shift = targets.scale.numpy(), targets.shift.numpy()
    mean = program.apply("Add", program.scaled(mean, scale), program.constant(shift))
    variance = program.apply("Mul", variance, program.constant(np.square(scale)))
    if estimator._takes_logarithm():
        mean, variance = _log_normal(program, mean, variance)
    width = None if estimator._y_scaler.single else estimator.posterior_.P
    if width is None:
        mean, variance = program.apply("Squeeze1", mean), program.apply("Squeeze1", variance)
    program.add_output("mean", mean, width=width)
    program.add_output("variance", variance, width=width)
    return program


def _log_normal(program: Program, mean: str, variance: str) -> tuple[str, str]:
    """Add E y = exp(m + v/2) and Var y = (E y)² (eᵛ − 1) for log y of mean m and variance v."""
    half = program.apply("Mul", variance, program.constant(0.5))
    level = program.apply("Exp", program.apply("Add", mean, half))
    spread = program.apply("Sub", program.apply("Exp", variance), program.constant(1.0))
    return level, program.apply("Mul", program.apply("Mul", level, level), spread)


def _encoded(program: Program, model: TabularModel | MultiOutputTable) -> str:
    """Add the features `[N D]` of a table's columns, with missing values imputed."""
    features = []
    for column in model.encoder.columns:
        if column.kind == "category":
            strings = program.add_input(column.name, kind="category")
            categories = np.array(column.categories, dtype=object)
            features.append(program.apply("OneHot", strings, program.constant(categories)))
            continue
        numbers = program.apply("Unsqueeze1", program.add_input(column.name, kind=column.kind))
        features.append(program.apply("Filled", numbers, program.constant(float(column.typical))))
        if column.flagged:
            features.append(program.apply("Missing", numbers))
    program.metadata["dates"] = model.encoder.dates
    return program.apply("Concat", *features) if len(features) > 1 else features[0]
