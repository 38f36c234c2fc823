"""Fitting whole tables."""

import os
import platform
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from itertools import repeat
from pathlib import Path
from time import perf_counter
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from winnowgp import __version__
from winnowgp.data import Dataset, DataTable, TableEncoder
from winnowgp.data.distributed import ProcessGroup
from winnowgp.data.encoding import check_finite, decimal_comma_advice, first_mismatch
from winnowgp.data.out_of_core import rechunk
from winnowgp.data.sharding import ShardedSource
from winnowgp.errors import InputError
from winnowgp.estimators.base import ROWS, predicting_on
from winnowgp.estimators.classification import SparseGPClassifier
from winnowgp.estimators.effects import relevances
from winnowgp.estimators.kernels import kernel_words, written
from winnowgp.estimators.quality import classification_quality, predictive, regression_quality
from winnowgp.estimators.regression import SparseGPRegressor
from winnowgp.estimators.table_summary import (
    Film,
    choice,
    column_summary,
    effects,
    noise_sd,
    predict_us,
    target_summary,
    training,
)
from winnowgp.estimators.validation import Folder, tensor
from winnowgp.io import save
from winnowgp.report.summary import Quality, Summary
from winnowgp.training import Callbacks
from winnowgp.training.callbacks import as_callbacks

# A model of a table: what `winnow fit` makes, and what a file of it holds.


TASKS = ("regression", "classification", "counts")


def prediction_names(task: str, classes: Iterable[Any]) -> set[str]:
    """Names of the columns that a model predicts; no column of names of rows may be called so."""
    if task == "classification":
        return {"class", *(f"p_{c}" for c in classes)}
    return {"mean", "sd", "lower", "upper"}


@final
@dataclass(frozen=True, slots=True)
class TabularModel:
    """An encoder, an estimator, and everything worth knowing about the fit.

    >>> from winnowgp.estimators import fit_table
    >>> x = np.linspace(0, 6, 60)
    >>> table = DataTable.of({"x": x, "side": ["left", "right"] * 30, "y": np.sin(x)})
    >>> model = fit_table(table, "y", test_size=0.2)
    >>> sorted(model.predict(table))
    ['lower', 'mean', 'sd', 'upper']
    """

    encoder: TableEncoder
    estimator: SparseGPRegressor | SparseGPClassifier
    id_column: str | None
    summary: Summary

    @property
    def target(self) -> str:
        """Name of the column that is predicted."""
        return self.summary["target"]

    @property
    def task(self) -> str:
        """ "regression", "classification" or "counts"."""
        return self.summary["task"]

    def predict(self, table: DataTable, *, level: float = 0.95) -> dict[str, np.ndarray[Any, Any]]:
        """Columns of predictions, the column of names of rows first where there is one.

        Mean, standard deviation and a central interval of a new observation; or the most probable
        class and the probability of each.

        Args:
            level: probability that the interval holds.
        """
        X = self.encoder.encode(table)
        found: dict[str, np.ndarray[Any, Any]] = {}
        if self.id_column is not None and self.id_column in table.values:
            found[self.id_column] = table.strings(self.id_column)
        if isinstance(self.estimator, SparseGPClassifier):
            probability = self.estimator.predict_proba(X)
            classes = self.estimator.classes_
            found["class"] = classes[probability.argmax(1)]
            return found | {f"p_{c}": p for c, p in zip(classes, probability.T, strict=True)}
        ahead = predictive(self.estimator, X)
        lower, upper = ahead.interval(level)
        return found | {"mean": ahead.mean, "sd": ahead.sd, "lower": lower, "upper": upper}

    def predict_blocks(
        self, blocks: Iterable[DataTable], *, level: float = 0.95, device: str = "cpu"
    ) -> Iterator[dict[str, np.ndarray[Any, Any]]]:
        """`predict` for a table that comes in parts, such as `read_blocks` of a large file.

        The answers are those for the whole table, to the last bit, however it was cut: rows are
        gathered to be predicted as many at a time as `predict` itself takes. Memory is that of
        these rows and one block.

        Args:
            level: probability that the interval holds.
            device: where to compute: "cpu" or "cuda", or "auto" for a GPU if there is one.
        """
        there = replace(self, estimator=predicting_on(device, self.estimator))
        for rows in rechunk(blocks, repeat(ROWS)):
            yield there.predict(rows, level=level)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write to a file that `winnowgp.load` reads; its size grows with M, not with N."""
        return save(self, path)


# From a table to a model of it, measured on rows held out.


_MOST_CLASSES = 50


def fit_table(
    table: DataTable,
    target: str,
    *,
    task: str = "auto",
    test_size: float = 0.2,
    id_column: str | None = None,
    drop: tuple[str, ...] = (),
    missing: str = "error",
    max_words: int = 30,
    kernel: str = "rbf",
    alpha: str | float = "auto",
    tolerance: float = 0.01,
    max_points: int | None = None,
    max_predict_us: float | None = None,
    seed: int = 0,
    device: str = "cpu",
    precision: str = "double",
    settings: dict[str, str] | None = None,
    callbacks: Callbacks = None,
    checkpoint: Folder | None = None,
    process_group: ProcessGroup | None = None,
) -> TabularModel:
    """Learn to predict one column of a table from the others.

    Args:
        target: the column to predict. Rows without it are left out if `missing` is "impute".
        task: "regression", "classification", "counts", or "auto": classification if the target
            holds words or two different values, regression otherwise.
        test_size: share of the rows held out to measure quality, drawn with `seed`; 0 for none.
        id_column: names rows; not an input, and repeated beside predictions.
        drop: columns to leave out.
        missing: "error" or "impute"; see `TableEncoder`.
        max_words: most categories of a column of words.
        precision: "double", or, for regression, "mixed".
        settings: further words to keep with the model, such as the command that made it.
        ranks: processes that were given the same table and share its rows, if any; all return the
            same model. For classes and counts each does all of the work, and the first one writes
            the checkpoint.

    The other arguments are those of the estimators.
    """
    ignored = (*drop, *(() if id_column is None else (id_column,)))
    table.require_columns([target], argument="`target`")
    table.require_columns(ignored, argument="`drop` and `id_column`")
    if target in ignored:
        raise InputError(f"{target!r} cannot be the target and be left out; choose one.")
    if not 0 <= test_size < 1:
        raise InputError(f"`test_size` must be a share from 0 to below 1; got {test_size}.")
    names = table.without([target, *ignored]).names
    table = table.parse_numbers(names)
    for name in names:
        # Before any row is left out, so that the error names a row of the table.
        if (values := table.values[name]).dtype != object:
            check_finite(table, name, values)
    table, number = _with_target(table, target, missing=missing)
    task, why = _task(table, target, task)
    _check_id(id_column, table, target, task)
    inputs = table.without([target, *ignored])
    train, test = _split(table.N, test_size, seed=seed)
    encoder = TableEncoder.learn(inputs.part(train), missing=missing, max_words=max_words)
    _check_held_out(encoder, inputs, number)
    y = _targets(table, target, task, train, number)
    film = Film()
    points: dict[str, Any] = {
        "alpha": alpha,
        "tolerance": tolerance,
        "max_points": max_points,
        "max_predict_us": max_predict_us,
    }
    D, places = len(encoder.features), _feature_numbers(encoder)
    estimator = _estimator(task, precision)(
        written(kernel_words(kernel, D, columns=places)),
        random_state=seed,
        device=device,
        callbacks=(film, *as_callbacks(callbacks)),
        checkpoint=checkpoint,
        **points,
    )
    X = encoder.encode(inputs)
    start = perf_counter()
    if process_group is None:
        estimator.fit(X[train], y[train])
    elif task == "regression":
        rows = Dataset.of(tensor(X[train]), tensor(y[train])).merged()
        estimator.fit(ShardedSource(rows, process_group))
    else:
        estimator.checkpoint = checkpoint if process_group.is_first else None
        estimator.fit(X[train], y[train])
    fit_seconds = perf_counter() - start
    estimator.callbacks = estimator.checkpoint = None
    relevant = relevances(estimator.kernel_, encoder)
    summaries = [column_summary(inputs, column, relevant) for column in encoder.columns]
    summary: Summary = {
        "target": target,
        "task": task,
        "why_task": why,
        "classes": [str(c) for c in getattr(estimator, "classes_", [])],
        "rows": table.N,
        "train_rows": len(train),
        "columns": summaries,
        "target_summary": target_summary(table, target, task),
        "kernel": kernel,
        "noise_sd": noise_sd(estimator),
        "choice": choice(estimator, len(train), asked=_asked(points)),
        "quality": _quality(estimator, X, y, train, test),
        "effects": effects(estimator, encoder, summaries, X),
        "training": training(film, estimator, encoder, relevant),
        "timings": {"fit_s": fit_seconds, "predict_us": predict_us(estimator, X)},
        "settings": {
            "winnowgp": __version__,
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "gpytorch", "numpy", "scikit-learn")},
            "seed": str(seed),
            "device": device,
            "precision": precision,
            "test_size": f"{test_size:g}",
            "missing": missing,
            **(settings or {}),
        },
    }
    return TabularModel(encoder, estimator, id_column, summary)


def _with_target(
    table: DataTable, target: str, *, missing: str
) -> tuple[DataTable, NDArray[np.intp]]:
    """The rows that have a target, and their numbers in the table, from 1."""
    absent = table.missing(target)
    if absent.any() and missing == "error":
        raise InputError(
            f"the target {target!r} is missing in {int(absent.sum())} rows, first in row "
            f"{int(absent.argmax()) + 1}; fill it in, or leave such rows out (`--missing impute`)."
        )
    kept = table.part(~absent)
    if kept.N < 2:
        raise InputError(f"the table has {kept.N} rows with a target; a fit needs at least 2.")
    return kept, np.flatnonzero(~absent) + 1


def _feature_numbers(encoder: TableEncoder) -> dict[str, list[int]]:
    """Which columns of the matrix a column of the table became."""
    owners = [column.name for column in encoder.columns for _ in column.features]
    return {
        column.name: [place for place, owner in enumerate(owners) if owner == column.name]
        for column in encoder.columns
    }


def _task(table: DataTable, target: str, task: str) -> tuple[str, str]:
    """What to do, and why in words."""
    if task == "auto":
        if table.numbers(target) is None:
            if advice := decimal_comma_advice(table.strings(target)):
                example = table.strings(target)[0]
                raise InputError(f"the target {target!r} holds words, such as {example!r}.{advice}")
            return _checked_task("classification", table, target), "the target holds words"
        if table.n_unique(target) == 2:
            return "classification", "the target has two different values"
        return "regression", "the target holds numbers"
    if task not in TASKS:
        raise InputError(f"`task` must be auto, {', '.join(TASKS)}; got {task!r}.")
    return _checked_task(task, table, target), "as asked"


def _checked_task(task: str, table: DataTable, target: str) -> str:
    values = table.numbers(target)
    if task == "classification":
        different = table.n_unique(target)
        if not 2 <= different <= _MOST_CLASSES:
            raise InputError(
                f"the target {target!r} has {different} different values; classification takes 2 "
                f"to {_MOST_CLASSES}. Is it the right column?"
            )
    elif values is None:
        raise InputError(
            f"the target {target!r} holds words; `--task {task}` needs numbers. "
            "Say `--task classification`, or choose another target."
        )
    elif task == "counts" and not ((values >= 0) & (values == np.round(values))).all():
        raise InputError(
            f"the target {target!r} must hold whole numbers of at least 0 for `--task counts`."
        )
    return task


def _check_id(id_column: str | None, table: DataTable, target: str, task: str) -> None:
    """A column of predictions would take its place."""
    classes = table.strings(target) if task == "classification" else ()
    if id_column in prediction_names(task, classes):
        raise InputError(
            f"`id_column` is {id_column!r}, and so is a column of predictions; rename it."
        )


def _check_held_out(encoder: TableEncoder, inputs: DataTable, number: NDArray[np.intp]) -> None:
    """A word in a column whose rows to learn from are all numbers, or all dates."""
    for column in encoder.columns:
        if column.accepts(inputs):
            continue
        row, word = first_mismatch(inputs, column.name, column.kind)
        raise InputError(
            f"column {column.name!r} holds {column.kind}s, and {word!r} in row {number[row]}; "
            f"mend that row, or leave the column out (`--drop`).{decimal_comma_advice([word])}"
        )


def _targets(
    table: DataTable, target: str, task: str, train: NDArray[Any], number: NDArray[np.intp]
) -> NDArray[Any]:
    if task == "classification":
        words = table.strings(target).astype(str)
        if len(set(words[train])) < 2:
            raise InputError(
                f"only one class of {target!r} is among the {len(train)} training rows; "
                "give more rows, or another `--seed`."
            )
        return words
    values = table.numbers(target)
    assert values is not None
    bad = ~(np.abs(values) < 1e150)
    if bad.any():
        raise InputError(
            f"the target {target!r} has {values[bad][0]:g} in row {number[bad.argmax()]}; it must "
            "be finite and below 1e150."
        )
    return values


def _split(N: int, test_size: float, *, seed: int) -> tuple[NDArray[Any], NDArray[Any]]:
    order = np.random.default_rng(seed).permutation(N)
    held_out = round(N * test_size)
    if N - held_out < 1:
        raise InputError(f"`test_size` {test_size:g} leaves none of {N} rows to learn from.")
    return np.sort(order[held_out:]), np.sort(order[:held_out])


def _estimator(task: str, precision: str) -> Any:
    if task == "regression":
        return partial(SparseGPRegressor, precision=precision)
    if precision != "double":
        raise InputError(
            f"`precision` must be 'double' for {task}; got {precision!r}. Only regression has more."
        )
    if task == "classification":
        return SparseGPClassifier
    return partial(SparseGPRegressor, likelihood="poisson")


def _quality(
    estimator: Any,
    X: NDArray[np.float64],
    y: NDArray[Any],
    train: NDArray[Any],
    test: NDArray[Any],
) -> Quality | None:
    if not len(test):
        return None
    if isinstance(estimator, SparseGPClassifier):
        return classification_quality(estimator, X[test], y[test], train_labels=y[train])
    return regression_quality(estimator, X[test], y[test], y_train=y[train])


def _asked(points: dict[str, Any]) -> str:
    if points["max_points"] is not None:
        return f"at most {points['max_points']} points"
    if points["max_predict_us"] is not None:
        return f"at most {points['max_predict_us']:g} µs a prediction"
    if points["alpha"] != "auto":
        return f"the paper's prior with α = {points['alpha']:g}"
    return f"at most {points['tolerance']:g} nats per row given up"
