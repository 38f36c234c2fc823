"""Predictors for machines without winnowgp: preprocessing, points, likelihood, units."""

import json
import os
from pathlib import Path

import numpy as np

from winnowgp.errors import InputError
from winnowgp.estimators.classification import SparseGPClassifier
from winnowgp.estimators.regression import SparseGPRegressor
from winnowgp.estimators.tables import TabularModel
from winnowgp.io.export import save_numpy, save_onnx
from winnowgp.io.program import Program, add_latents, add_observation

Exportable = TabularModel | SparseGPRegressor | SparseGPClassifier


def export_onnx(model: Exportable, path: str | os.PathLike[str]) -> Path:
    """Write the predictor as ONNX in float64.

    An estimator has one input `X` `[N D]`. A model of a table has one input a column: numbers and
    dates (in days since 1970) as doubles with NaN where missing, words as strings without blanks
    around them, "" where missing. Outputs: `mean` and `variance` of an observation, or
    `probabilities` of the classes that the property `classes` names.
    """
    return save_onnx(predictor_program(model), Path(path))


def export_numpy(model: Exportable, path: str | os.PathLike[str]) -> Path:
    """Write the same predictor as a Python file with a function `predict`; it needs only numpy.

    Words may be anything that a table may hold: it reads them as winnowgp does.
    """
    return save_numpy(predictor_program(model), Path(path))


def predictor_program(model: Exportable) -> Program:
    """Everything between what a caller gives and what they get."""
    program = Program()
    if isinstance(model, TabularModel):
        X, estimator = _encoded(program, model), model.estimator
        program.about["target"] = model.target
    else:
        estimator = model
        X = program.give("X", width=estimator.n_features_in_)
    units = estimator._x_scaler
    shifted = program.do("Sub", X, program.constant(units.shift.numpy()))
    inputs = program.do("Div", shifted, program.constant(units.scale.numpy()))
    latent_mean, latent_variance = add_latents(program, estimator.posterior_, inputs)
    likelihood = estimator.posterior_.likelihood
    mean, variance = add_observation(program, likelihood, latent_mean, latent_variance)
    if isinstance(estimator, SparseGPClassifier):
        program.about["classes"] = json.dumps(estimator.classes_.tolist())
        program.answer("probabilities", mean, width=len(estimator.classes_))
        return program
    assert variance is not None
    if estimator.likelihood == "poisson" and estimator.posterior_.P > 1:
        raise InputError("counts are exported for one target only; fit one model a target.")
    targets = estimator._y_scaler.columns
    scale, shift = targets.scale.numpy(), targets.shift.numpy()
    # As a matrix: see `winnowgp.io.predictor_program`.
    scaled = program.do("MatMul", mean, program.constant(np.diag(scale)))
    mean = program.do("Add", scaled, program.constant(shift))
    variance = program.do("Mul", variance, program.constant(np.square(scale)))
    width = None if estimator._y_scaler.single else estimator.posterior_.P
    if width is None:
        mean, variance = program.do("Squeeze1", mean), program.do("Squeeze1", variance)
    program.answer("mean", mean, width=width)
    program.answer("variance", variance, width=width)
    return program


def _encoded(program: Program, model: TabularModel) -> str:
    """The encoder's matrix, as it would encode a table; what is missing is imputed."""
    parts = []
    for column in model.encoder.columns:
        if column.kind == "words":
            given = program.give(column.name, words=True)
            parts.append(program.do("OneHot", given, _words(program, column.categories)))
            continue
        given = program.do("Unsqueeze1", program.give(column.name))
        parts.append(program.do("Filled", given, program.constant(float(column.typical))))
        if column.flagged:
            parts.append(program.do("Missing", given))
    program.about["dates"] = json.dumps(
        [column.name for column in model.encoder.columns if column.kind == "date"]
    )
    return program.do("Concat", *parts) if len(parts) > 1 else parts[0]


def _words(program: Program, words: tuple[str, ...]) -> str:
    known = np.empty(len(words), dtype=object)
    known[:] = words
    return program.constant(known)
