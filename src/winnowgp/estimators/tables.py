"""Models of whole tables: `fit_table` and `TabularModel`."""

import os
import platform
import warnings
from collections.abc import Iterable, Iterator, Sequence
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
from winnowgp.data.columns import ColumnKind, column_kinds, column_note, parse_numbers
from winnowgp.data.distributed import ProcessGroup
from winnowgp.data.out_of_core import rechunk
from winnowgp.data.sharding import ShardedSource
from winnowgp.data.tables import TableLike
from winnowgp.errors import FitWarning, InputError
from winnowgp.estimators import table_summary
from winnowgp.estimators.alarms import FarRows
from winnowgp.estimators.base import predicting_on, rows_at_once
from winnowgp.estimators.classification import SparseGPClassifier
from winnowgp.estimators.diagnostics import diagnose, recorded_alarms, table_columns
from winnowgp.estimators.effects import column_features, importance, relevances
from winnowgp.estimators.kernels import AUTO, parse_kernel
from winnowgp.estimators.quality import classification_quality, predictive, regression_quality
from winnowgp.estimators.regression import SparseGPRegressor
from winnowgp.estimators.splits import (
    copied_rows_warning,
    has_groups,
    held_out_split,
    random_split_warning,
    unseen_groups_warning,
)
from winnowgp.estimators.table_targets import (
    check_positive,
    implied_task,
    likelihood_for,
    likelihood_warning,
)
from winnowgp.estimators.validation import TOLERANCE, CheckpointLike, tensor
from winnowgp.io import save
from winnowgp.report.sentences import counted
from winnowgp.report.summary import Quality, Summary
from winnowgp.training import Callbacks
from winnowgp.training.callbacks import as_callbacks

TASKS = ("regression", "classification", "counts")

_MOST_CLASSES = 50


def prediction_names(task: str, classes: Iterable[Any]) -> set[str]:
    """Return the names of the columns that a model predicts; the id column needs another name."""
    if task == "classification":
        return {"class", *(f"p_{c}" for c in classes)}
    return {"mean", "sd", "lower", "upper"}


@final
@dataclass(frozen=True, slots=True)
class TabularModel:
    """A fitted model of a table: the encoder of its columns, the estimator, and a summary.

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
        """Name of the column that the model predicts."""
        return self.summary["target"]

    @property
    def task(self) -> str:
        """The task: "regression", "classification" or "counts"."""
        return self.summary["task"]

    def predict(
        self, table: TableLike, *, level: float = 0.95, quantiles: Sequence[float] = ()
    ) -> dict[str, np.ndarray[Any, Any]]:
        """Return columns of predictions, after the id column if there is one.

        They are mean, standard deviation and a central interval of a new observation; or the most
        probable class and the probability of each class. An `ExtrapolationWarning` says that rows
        lie far outside the training rows.

        Args:
            table: a `DataTable`, a data frame of pandas, polars or pyarrow, or a dictionary of
                columns.
            level: probability that the interval contains the observation.
            quantiles: probabilities of further columns: the 0.05-quantile is called `q0.05`.
        """
        far = self._far_rows()
        predictions = self._predicted(DataTable.of(table), level, quantiles, far)
        _warn(far.alarm())
        return predictions

    def _far_rows(self) -> FarRows:
        """Return a count of the rows to predict that lie far outside the training rows."""
        columns = [column for column in self.summary["columns"] if column["spread"]]
        ranges = {c["name"]: (c["spread"][0], c["spread"][-1]) for c in columns}
        return FarRows(ranges, {c["name"] for c in columns if c["kind"] == "date"})

    def _predicted(
        self, table: DataTable, level: float, quantiles: Sequence[float], far: FarRows
    ) -> dict[str, np.ndarray[Any, Any]]:
        X = self.encoder.encode(table)
        numbers = zip(self.encoder.columns, column_features(self.encoder), strict=True)
        far.add({c.name: X[:, f[0]] for c, f in numbers if c.kind != "words"}, table.N)
        columns: dict[str, np.ndarray[Any, Any]] = {}
        if self.id_column is not None and self.id_column in table.values:
            columns[self.id_column] = table.strings(self.id_column, literal=True)
        if isinstance(self.estimator, SparseGPClassifier):
            if quantiles:
                raise InputError("classes have no quantiles; leave `quantiles` out.")
            probability = self.estimator.predict_proba(X)
            classes = self.estimator.classes_
            columns["class"] = classes[probability.argmax(1)]
            return columns | {f"p_{c}": p for c, p in zip(classes, probability.T, strict=True)}
        observation = predictive(self.estimator, X)
        lower, upper = observation.interval(level)
        mean, sd = observation.mean, observation.sd
        columns |= {"mean": mean, "sd": sd, "lower": lower, "upper": upper}
        if not quantiles:
            return columns
        names = [f"q{p:g}" for p in quantiles]
        if len({*names, *columns}) < len(names) + len(columns):
            raise InputError(
                f"`quantiles` must differ from each other and from other columns; got {names}."
            )
        return columns | dict(zip(names, observation.quantiles(quantiles), strict=True))

    def predict_blocks(
        self,
        blocks: Iterable[DataTable],
        *,
        level: float = 0.95,
        quantiles: Sequence[float] = (),
        device: str = "cpu",
    ) -> Iterator[dict[str, np.ndarray[Any, Any]]]:
        """Return `predict` of a table that is read in blocks, such as those of a large file.

        The predictions do not depend on the blocks: rows are regrouped into chunks of the size that
        `predict` uses. Memory holds one chunk and one block.

        Args:
            level: probability that the interval contains the observation.
            quantiles: probabilities of further columns, as for `predict`.
            device: device of the predictions: "cpu", "cuda", or "auto" for a GPU if there is one.
        """
        moved = replace(self, estimator=predicting_on(device, self.estimator))
        far = self._far_rows()
        for rows in rechunk(blocks, repeat(rows_at_once(self.estimator.posterior_))):
            yield moved._predicted(rows, level, quantiles, far)
        _warn(far.alarm())

    def resized(self, points: int, *, settings: dict[str, str] | None = None) -> "TabularModel":
        """Return the model with fewer inducing points, from what the fit kept.

        No rows are needed. Effects and relevances are those of the smaller model. Its quality on
        held-out rows is not known, since the model does not keep them.

        Args:
            points: number of inducing points, one of `estimator.available_sizes_`.
            settings: settings to replace or add, such as the command that made it.
        """
        estimator = self.estimator.resized(points)
        if points == self.estimator.n_inducing_:
            return self
        summary = table_summary.resized(self.summary, estimator, self.encoder, settings or {})
        return replace(self, estimator=estimator, summary=summary)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the model to a file that `winnowgp.load` reads.

        The file grows with the number of inducing points, not with the number of rows.
        """
        return save(self, path)


def fit_table(
    table: TableLike,
    target: str,
    *,
    task: str = "auto",
    likelihood: str = "auto",
    log_target: bool = False,
    test_size: float = 0.2,
    split_by: str | None = None,
    test_table: DataTable | None = None,
    id_column: str | None = None,
    drop: tuple[str, ...] = (),
    categorical: tuple[str, ...] = (),
    decimal: str = "auto",
    dates: str = "auto",
    missing: str = "error",
    max_words: int = 30,
    kernel: str = AUTO,
    alpha: str | float = "auto",
    tolerance: float | None = None,
    max_points: int | None = None,
    max_predict_us: float | None = None,
    max_fit_seconds: float | None = None,
    criterion: str = "elbo",
    seed: int = 0,
    device: str = "cpu",
    precision: str = "double",
    settings: dict[str, str] | None = None,
    callbacks: Callbacks = None,
    checkpoint: CheckpointLike | None = None,
    process_group: ProcessGroup | None = None,
) -> TabularModel:
    """Fit a model that predicts one column of a table from the others, and measure its quality.

    Warnings, each a `winnowgp.errors.FitWarning`, say what the held-out rows and the selection show
    to be wrong, and what to try; `summary["alarms"]` has them too.

    Args:
        table: a `DataTable`, a data frame of pandas, polars or pyarrow, or a dictionary of columns.
        target: the column to predict. Rows without a target are left out if `missing` is "impute".
        task: "regression", "classification", "counts", or "auto": classification if the target is
            categorical or has two different values, regression otherwise.
        likelihood: "gaussian", "heteroscedastic", "student-t" or "laplace" for regression, "beta"
            for proportions, "poisson" or "negative-binomial" for counts, or "auto": Gaussian, or
            Poisson for counts. A `LikelihoodWarning` says that the target has counts or outliers.
        log_target: whether to fit the logarithm of a positive target; see `SparseGPRegressor`.
        test_size: share of the rows held out to measure quality, drawn with `seed`; 0 for none.
        split_by: a column that decides which rows are held out, rather than chance: those with the
            latest dates or largest numbers, or whole groups of equal strings. A
            `RandomSplitWarning` says that rows of a series were held out at random.
        test_table: rows to hold out; the model is fitted to all rows of `table`.
        id_column: a column that identifies rows; it is not an input, and is repeated beside
            predictions.
        drop: columns to leave out.
        categorical: columns of categories, whatever their strings look like; NA is a category in
            them, and only empty cells are missing.
        decimal: "." if commas separate thousands, "," for decimal commas, or "auto": a comma
            separates thousands where it cannot be a decimal comma, and is an error elsewhere.
        dates: "day-first" or "month-first" for dates such as 03/04/2024, or "auto": the only
            possible order, and an error where both are possible.
        missing: "error" or "impute"; see `TableEncoder`.
        max_words: largest number of categories of a column.
        kernel: "auto", or a kernel string, in which columns have names:
            "rbf[size] + linear[colour]".
        precision: "double", or "mixed" for regression.
        settings: further settings to keep with the model, such as the command that made it.
        process_group: processes that were given the same table and share its rows, if any; all
            return the same model. For classes and counts each process does all of the work, and the
            first one writes the checkpoint.

    The other arguments are those of `SparseGPRegressor` and `SparseGPClassifier`.
    """
    ignored = (*drop, *(() if id_column is None else (id_column,)))
    table = DataTable.of(table)
    table.require_columns([target], argument="`target`")
    table.require_columns(ignored, argument="`drop` and `id_column`")
    table.require_columns(categorical, argument="`categorical`")
    if target in ignored:
        raise InputError(
            f"`target` must not be in `drop` nor be the `id_column`; got {target!r} as both."
        )
    if task == "auto" and target in categorical:
        task = "classification"
    task = implied_task(task, likelihood, log_target=log_target)
    rows = table.N
    if test_table is not None:
        if split_by is not None:
            raise InputError("`split_by` must be left out if there is a `test_table`.")
        table = _with_test_rows(table, DataTable.of(test_table), optional=ignored)
    # Before any row is left out, so that an error gives the row number in the table.
    everything = table
    names = table.without([target, *ignored]).names
    # Labels of classes stay as they are written.
    read = names if task == "classification" else (*names, target)
    kinds = column_kinds(table, read, decimal=decimal, dates=dates, categorical=categorical)
    target_kind = _target_kind(kinds.pop(target, None), table, target)
    notes = {n: column_note(table, n, kind) for n, kind in {**kinds, **target_kind}.items()}
    table = parse_numbers(table, {**kinds, **target_kind})
    table, number = _with_target(table, target, missing=missing)
    task, why = _task(table, target, task)
    _check_id(id_column, table, target, task)
    inputs = table.without([target, *ignored])
    if test_table is not None:
        train, test = np.flatnonzero(number <= rows), np.flatnonzero(number > rows)
        _check_test_rows(train, test)
    else:
        train, test = held_out_split(table, test_size, split_by=split_by, seed=seed, dates=dates)
    encoder = TableEncoder.learn(
        inputs, kinds=kinds, rows=train, missing=missing, max_words=max_words
    )
    if target in target_kind:
        encoder = replace(encoder, target=target_kind[target].notation)
    y = _targets(table, target, task, train, number)
    if log_target:
        check_positive(y, target, number)
    # Said after the fit: an error about the input stands alone.
    early: list[FitWarning | None] = []
    if task == "regression" and likelihood == "auto" and not log_target:
        early.append(likelihood_warning(y[train], target))
    if split_by is None and test_table is None and len(test):
        early.append(random_split_warning(inputs, date_columns(encoder)))
    groups = split_by is not None and has_groups(table, split_by, dates=dates)
    if split_by is not None and groups and split_by in inputs.values and len(test):
        early.append(unseen_groups_warning(split_by))
    history = table_summary.TrainingHistory()
    points: dict[str, Any] = {
        "alpha": alpha,
        "tolerance": tolerance,
        "max_points": max_points,
        "max_predict_us": max_predict_us,
        "criterion": criterion,
    }
    expression = kernel
    if kernel != AUTO:
        expression = parse_kernel(kernel, len(encoder.features), columns=_feature_numbers(encoder))
    noise = likelihood_for(task, likelihood)
    estimator = _estimator(task, precision, likelihood=noise, log_target=log_target)(
        expression,
        random_state=seed,
        device=device,
        callbacks=(history, *as_callbacks(callbacks)),
        checkpoint=checkpoint,
        max_fit_seconds=max_fit_seconds,
        **points,
    )
    X = encoder.encode(inputs)
    if task == "regression":
        early.append(copied_rows_warning(X, y, train, test))
    start = perf_counter()
    with recorded_alarms() as found:
        if process_group is None:
            estimator.fit(X[train], y[train])
        elif task == "regression" and noise == "gaussian" and not log_target:
            data = Dataset.of(tensor(X[train]), tensor(y[train])).merged()
            estimator.fit(ShardedSource(data, process_group))
        else:
            estimator.checkpoint = checkpoint if process_group.is_first else None
            estimator.fit(X[train], y[train])
    fit_seconds = perf_counter() - start
    if len(test):
        seen = {type(alarm) for alarm in found}
        columns = table_columns(encoder, inputs)
        more = diagnose(estimator, X, y, held_out=test, columns=columns, ordered=not groups)
        found += [alarm for alarm in more if type(alarm) not in seen]
    found = [*(alarm for alarm in early if alarm is not None), *found]
    if process_group is None or process_group.is_first:
        for alarm in found:
            warnings.warn(alarm, stacklevel=2)
    # The estimator sees features, which have numbers and no names.
    estimator.kernel, estimator.callbacks, estimator.checkpoint = str(expression), None, None
    relevant = relevances(estimator.kernel_, encoder)
    summaries = [
        table_summary.column_summary(inputs, column, relevant, note=notes[column.name])
        for column in encoder.columns
    ]
    lost = importance(estimator, encoder, X[test], y[test]) if len(test) > 1 else None
    ranked = table_summary.ranked_columns(encoder, summaries, X, lost)
    expression = estimator.kernel_name_ if kernel == AUTO else kernel
    curves, terms = table_summary.effects(estimator, encoder, ranked, expression)
    summary: Summary = {
        "target": target,
        "task": task,
        "why_task": why,
        "classes": [str(c) for c in getattr(estimator, "classes_", [])],
        "rows": table.N,
        "train_rows": len(train),
        "columns": summaries,
        "target_summary": table_summary.target_summary(
            table, target, task, note=notes.get(target, "")
        ),
        "ignored": table_summary.ignored_columns(everything, drop, id_column),
        "kernel": kernel,
        "noise_sd": table_summary.noise_sd(estimator),
        "choice": table_summary.choice(estimator, len(train), asked=_described_goal(points)),
        "alarms": [table_summary.alarm_summary(alarm) for alarm in found],
        "quality": _quality(estimator, X, y, train, test),
        "importance": lost,
        "effects": curves,
        "terms": terms,
        "training": table_summary.training(history, estimator, encoder, relevant),
        "timings": {"fit_s": fit_seconds, "predict_us": table_summary.predict_us(estimator, X)},
        "settings": {
            "winnowgp": __version__,
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "gpytorch", "numpy", "scikit-learn")},
            "seed": str(seed),
            "device": device,
            "precision": precision,
            "test_size": f"{test_size:g}",
            **_target_settings(task, noise, log_target=log_target),
            **({} if split_by is None else {"split_by": split_by}),
            "missing": missing,
            **(settings or {}),
        },
    }
    return TabularModel(encoder, estimator, id_column, summary)


def _warn(alarm: FitWarning | None) -> None:
    if alarm is not None:
        warnings.warn(alarm, stacklevel=3)


def _with_target(
    table: DataTable, target: str, *, missing: str
) -> tuple[DataTable, NDArray[np.intp]]:
    """Return the rows that have a target, and their row numbers in the table, from 1."""
    absent = table.missing(target)
    if absent.any() and missing == "error":
        raise InputError(
            f"the target {target!r} must not be missing; it is in {int(absent.sum())} rows, first "
            f"in row {int(absent.argmax()) + 1}. Fill it in, or leave such rows out with "
            "missing='impute' (`--missing impute`)."
        )
    rows = table.part(~absent)
    if rows.N < 2:
        raise InputError(f"the table must have at least 2 rows with a target; got {rows.N}.")
    return rows, np.flatnonzero(~absent) + 1


def _target_kind(kind: ColumnKind | None, table: DataTable, target: str) -> dict[str, ColumnKind]:
    """Return how a numeric target is read, by its name; empty for classes and plain numbers.

    A plain target may have two values, which are classes as they are written.
    """
    if kind is None or kind.kind != "number" or table.numbers(target) is not None:
        return {}
    return {target: kind}


def _feature_numbers(encoder: TableEncoder) -> dict[str, list[int]]:
    """Return the columns of the encoded matrix that belong to each column of the table."""
    owners = [column.name for column in encoder.columns for _ in column.features]
    return {
        column.name: [number for number, owner in enumerate(owners) if owner == column.name]
        for column in encoder.columns
    }


def _task(table: DataTable, target: str, task: str) -> tuple[str, str]:
    """Return the task, and the reason for it."""
    if task == "auto":
        if table.numbers(target) is None:
            return _checked_task("classification", table, target), "the target is categorical"
        if table.n_unique(target) == 2:
            return "classification", "the target has two different values"
        return "regression", "the target is numeric"
    if task not in TASKS:
        raise InputError(f"`task` must be one of auto, {', '.join(TASKS)}; got {task!r}.")
    return _checked_task(task, table, target), "as specified"


def _checked_task(task: str, table: DataTable, target: str) -> str:
    values = table.numbers(target)
    if task == "classification":
        different = table.n_unique(target)
        if not 2 <= different <= _MOST_CLASSES:
            raise InputError(
                f"the target must have 2 to {_MOST_CLASSES} different values for classification; "
                f"{target!r} has {different}. Choose another target or task."
            )
    elif values is None:
        raise InputError(
            f"the target {target!r} must be numeric for {task}; it has strings. Use "
            "task='classification' (`--task classification`), or choose another target."
        )
    elif task == "counts" and not ((values >= 0) & (values == np.round(values))).all():
        raise InputError(
            f"the target {target!r} must have integers of at least 0 for counts; it has other "
            "numbers. Use task='regression' (`--task regression`)."
        )
    return task


def _check_id(id_column: str | None, table: DataTable, target: str, task: str) -> None:
    """Check that no column of predictions has the name of the id column."""
    classes = table.strings(target) if task == "classification" else ()
    if id_column in prediction_names(task, classes):
        raise InputError(
            f"`id_column` must not be the name of a column of predictions; got {id_column!r}. "
            "Rename it."
        )


def _targets(
    table: DataTable, target: str, task: str, train: NDArray[Any], number: NDArray[np.intp]
) -> NDArray[Any]:
    if task == "classification":
        labels = table.strings(target).astype(str)
        if len(set(labels[train])) < 2:
            raise InputError(
                f"the {len(train)} training rows must have at least two classes of {target!r}; got "
                "one. Use more rows, or another `seed` (`--seed`)."
            )
        return labels
    values = table.numbers(target)
    assert values is not None
    bad = ~(np.abs(values) < 1e150)
    if bad.any():
        raise InputError(
            f"the target {target!r} must be finite and below 1e150; got {values[bad][0]:g} in row "
            f"{number[bad.argmax()]}. Correct that row, or rescale the target."
        )
    return values


def _with_test_rows(table: DataTable, test: DataTable, *, optional: tuple[str, ...]) -> DataTable:
    """Return the rows of both tables; the second one may lack columns that are not used."""
    lacking = [n for n in table.names if n not in optional and n not in test.values]
    if lacking:
        raise InputError(
            "`test_table` (`--test-file`) must have the target and all inputs; it lacks "
            f"{', '.join(map(repr, lacking[:12]))}."
        )
    absent = {name: np.full(test.N, None, dtype=object) for name in optional}
    values = {name: test.values.get(name, absent.get(name)) for name in table.names}
    return DataTable.joined([table, DataTable({n: v for n, v in values.items() if v is not None})])


def _check_test_rows(train: NDArray[Any], test: NDArray[Any]) -> None:
    if not len(train) or not len(test):
        raise InputError(
            "the table and the `test_table` must each have rows with a target; got "
            f"{len(train)} and {len(test)}."
        )


def date_columns(encoder: TableEncoder) -> list[str]:
    """Return the names of the columns that hold dates."""
    return [column.name for column in encoder.columns if column.kind == "date"]


def _target_settings(task: str, likelihood: str, *, log_target: bool) -> dict[str, str]:
    if task == "classification":
        return {}
    return {"likelihood": likelihood} | ({"log_target": "True"} if log_target else {})


def _estimator(task: str, precision: str, *, likelihood: str, log_target: bool) -> Any:
    if task == "regression":
        return partial(
            SparseGPRegressor, likelihood=likelihood, log_target=log_target, precision=precision
        )
    if precision != "double":
        raise InputError(
            f"`precision` must be 'double' for {task}; got {precision!r}. Only regression supports "
            "'mixed'."
        )
    if task == "classification":
        return SparseGPClassifier
    return partial(SparseGPRegressor, likelihood=likelihood)


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


def _described_goal(points: dict[str, Any]) -> str:
    if points["alpha"] != "auto":
        return f"the paper's prior with α = {points['alpha']:g}"
    limit = None
    if points["max_points"] is not None:
        limit = f"at most {counted(points['max_points'], 'point')}"
    elif points["max_predict_us"] is not None:
        limit = f"at most {points['max_predict_us']:g} µs per prediction"
    if limit is not None and points["tolerance"] is None:
        return limit
    gap = "an ELBO gap" if points["criterion"] == "elbo" else "a gap in held-out log density"
    nats = TOLERANCE if points["tolerance"] is None else points["tolerance"]
    tolerance = f"{gap} of at most {nats:g} nats per observation"
    return tolerance if limit is None else f"{tolerance}, {limit}"
