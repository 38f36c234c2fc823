"""`fit_table`: from a table to a fitted model, its quality and its summary."""

import platform
import warnings
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from winnowgp import __version__
from winnowgp.data import Dataset, DataTable
from winnowgp.data.columns import column_kinds, column_note, parse_numbers
from winnowgp.data.distributed import ProcessGroup
from winnowgp.data.encoding import TableEncoder
from winnowgp.data.sharding import ShardedSource
from winnowgp.data.tables import TableLike
from winnowgp.errors import FitWarning, InputError, WorseThanConstantWarning
from winnowgp.estimators.classification import ClassTargets, SparseGPClassifier
from winnowgp.estimators.deep import DeepGPClassifier, DeepGPRegressor
from winnowgp.estimators.kernels import AUTO, parse_kernel
from winnowgp.estimators.regression import SparseGPRegressor
from winnowgp.estimators.rows import tensor
from winnowgp.estimators.validation import HETEROSCEDASTIC, TOLERANCE, CheckpointLike
from winnowgp.report.summary import Quality, Summary, counted
from winnowgp.tabular import table_summary
from winnowgp.tabular.diagnostics import diagnose, recorded_alarms, table_columns
from winnowgp.tabular.effects import importance, relevances
from winnowgp.tabular.model import TabularModel, prediction_names
from winnowgp.tabular.quality import classification_quality, regression_quality
from winnowgp.tabular.splits import (
    copied_rows_warning,
    has_groups,
    held_out_split,
    random_split_warning,
    unseen_groups_warning,
)
from winnowgp.tabular.targets import (
    check_positive,
    check_proportions,
    constant_target_warning,
    few_rows_warning,
    implied_task,
    known_noise,
    likelihood_for,
    likelihood_warning,
    numeric_target_kind,
    rows_with_target,
    task_of,
    training_targets,
)
from winnowgp.tabular.training_history import TrainingHistory, training_summary
from winnowgp.training.callbacks import Callbacks, as_callbacks

# The values of options that deep models accept; other options are not restricted.
_DEEP_OPTIONS: dict[str, tuple[Any, ...]] = {
    "mean": ("auto",),
    "posterior": ("mean-field",),
    "max_fit_seconds": (None,),
    "max_points": (None,),
    "criterion": ("elbo",),
    "log_target": (False,),
    "hyper": ("auto", "point"),
    "precision": ("double",),
    "noise_column": (None,),
}


def fit_table(
    table: TableLike,
    target: str,
    *,
    task: str = "auto",
    likelihood: str = "auto",
    log_target: bool = False,
    noise_column: str | None = None,
    test_size: float = 0.2,
    split_by: str | None = None,
    test_table: DataTable | None = None,
    id_column: str | None = None,
    drop: tuple[str, ...] = (),
    categorical: tuple[str, ...] = (),
    decimal: str = "auto",
    dates: str = "auto",
    missing: str = "error",
    max_categories: int = 30,
    kernel: str = AUTO,
    layers: int | str = 1,
    priors: str | None = "weak",
    hyper: str = "auto",
    posterior: str = "mean-field",
    mean: str = "auto",
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
            One row is enough to fit a constant; fewer than ten are fitted with a `FewRowsWarning`.
        target: the column to predict. Rows without a target are left out if `missing` is "impute".
        task: "regression", "classification", "counts", or "auto": classification if the target is
            categorical or has two different values, regression otherwise.
        likelihood: "gaussian", "heteroscedastic", "student-t" or "laplace" for regression, "beta"
            for proportions, "poisson" or "negative-binomial" for counts, or "auto": Gaussian, or
            Poisson for counts. A `LikelihoodWarning` says that the target has counts or outliers.
        log_target: whether to fit the logarithm of a positive target; see `SparseGPRegressor`.
        noise_column: a column of known noise variances of the target, in its squared units, for
            regression with Gaussian noise. It is not an input; the learnt noise is added to it.
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
        max_categories: largest number of categories of a column.
        kernel: "auto", or a kernel string, in which columns have names:
            "rbf[size] + linear[colour]".
        layers: 1, or the number of layers of a deep GP (`DeepGPRegressor`, `DeepGPClassifier`); or
            "auto", which compares one, two and three. A deep GP has no options but `alpha`,
            `tolerance`, `max_predict_us`, `likelihood`, and a kernel without names of columns.
        priors: "weak", or None to fit Gaussian noise without priors of hyper-parameters; see
            `SparseGPRegressor`. Classes and other likelihoods have none.
        hyper: "auto", "point", or "laplace" to average predictions over the hyper-parameters of
            regression with Gaussian noise and at most 2,000 rows; see `SparseGPRegressor`.
        posterior: "mean-field", "determinantal" or "gibbs", the posterior over subsets of the
            candidates; see `SparseGPRegressor`.
        mean: prior mean of the function: "auto", "zero", "constant" or "linear"; see
            `SparseGPRegressor`.
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
    apart = (target, *ignored, *(() if noise_column is None else (noise_column,)))
    if noise_column is not None and noise_column in (target, *ignored, *categorical):
        raise InputError(
            "`noise_column` must not be the target, the `id_column`, in `drop` or in "
            f"`categorical`; got {noise_column!r} as both."
        )
    if noise_column is not None:
        table.require_columns([noise_column], argument="`noise_column`")
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
    names = table.without(apart).names
    # Labels of classes stay as they are written.
    read = names if task == "classification" else (*names, target)
    kinds = column_kinds(table, read, decimal=decimal, dates=dates, categorical=categorical)
    target_kind = numeric_target_kind(kinds.pop(target, None), table, target)
    notes = {n: column_note(table, n, kind) for n, kind in {**kinds, **target_kind}.items()}
    table = parse_numbers(table, {**kinds, **target_kind})
    table, number = rows_with_target(table, target, missing=missing)
    task, why = task_of(table, target, task)
    _check_id(id_column, table, target, task)
    inputs = table.without(apart)
    known = None if noise_column is None else known_noise(table, noise_column, number)
    if test_table is not None:
        train, test = np.flatnonzero(number <= rows), np.flatnonzero(number > rows)
        _check_test_rows(train, test)
    else:
        train, test = held_out_split(table, test_size, split_by=split_by, seed=seed, dates=dates)
    encoder = TableEncoder.learn(
        inputs, kinds=kinds, rows=train, missing=missing, max_categories=max_categories
    )
    if target in target_kind:
        encoder = replace(encoder, target=target_kind[target].notation)
    y = training_targets(table, target, task, train, number)
    if log_target:
        check_positive(y, target, number)
    if likelihood == "beta":
        check_proportions(y, target, number, percent=encoder.target.sign == "%")
    # Issued after the fit, so that an error about the input is the only message.
    early: list[FitWarning | None] = [few_rows_warning(len(train))]
    constant = None if task == "classification" else constant_target_warning(y[train], target)
    early.append(constant)
    if task == "regression" and likelihood == "auto" and not log_target:
        early.append(likelihood_warning(y[train], target))
    if split_by is None and test_table is None and len(test):
        early.append(random_split_warning(inputs, date_columns(encoder)))
    groups = split_by is not None and has_groups(table, split_by, dates=dates)
    if split_by is not None and groups and split_by in inputs.values and len(test):
        early.append(unseen_groups_warning(split_by))
    history = TrainingHistory()
    points: dict[str, Any] = {
        "alpha": alpha,
        "tolerance": tolerance,
        "max_points": max_points,
        "max_predict_us": max_predict_us,
        "criterion": criterion,
    }
    expression, numbers = kernel, _feature_numbers(encoder)
    noise = likelihood_for(task, likelihood)
    _check_noise_column(noise_column, task, noise, log_target=log_target)
    options = {"log_target": log_target, "priors": priors, "hyper": hyper}
    shallow = {"mean": mean, "posterior": posterior, "max_fit_seconds": max_fit_seconds}
    if layers == 1:
        if kernel != AUTO:
            expression = parse_kernel(kernel, len(encoder.features), columns=numbers)
        made = _estimator(task, precision, likelihood=noise, **options)
        made = partial(made, expression, **shallow, **points)
    else:
        expression = "rbf" if kernel == AUTO else kernel
        refused = {**shallow, **points, **options, "precision": precision}
        refused |= {"noise_column": noise_column}
        made = _deep_estimator(task, layers, kernel, likelihood=noise, options=refused)
    estimator = made(
        random_state=seed,
        device=device,
        callbacks=(history, *as_callbacks(callbacks)),
        checkpoint=checkpoint,
    )
    X = encoder.encode(inputs)
    if task == "regression":
        early.append(copied_rows_warning(X, y, train, test))
    start = perf_counter()
    with recorded_alarms() as alarms:
        if process_group is None:
            estimator.fit(X[train], y[train], **_known_part(known, train))
        elif task == "regression" and noise == "gaussian" and not log_target and layers == 1:
            part = None if known is None else tensor(known[train])
            data = Dataset.of(tensor(X[train]), tensor(y[train]), noise=part).merged()
            estimator.fit(ShardedSource(data, process_group))
        else:
            estimator.checkpoint = checkpoint if process_group.is_first else None
            estimator.fit(X[train], y[train])
    fit_seconds = perf_counter() - start
    if constant is not None:
        # The warning about the target names it.
        alarms = [alarm for alarm in alarms if not isinstance(alarm, type(constant))]
    if len(test):
        seen = {type(alarm) for alarm in alarms}
        if constant is not None:
            # No prediction of a constant is better than the constant.
            seen |= {type(constant), WorseThanConstantWarning}
        columns = table_columns(encoder, inputs)
        more = diagnose(
            estimator,
            X,
            y,
            held_out=test,
            columns=columns,
            ordered=not groups,
            noise_variance=known,
        )
        alarms += [alarm for alarm in more if type(alarm) not in seen]
    alarms = [*(alarm for alarm in early if alarm is not None), *alarms]
    if process_group is None or process_group.is_first:
        for alarm in alarms:
            warnings.warn(alarm, stacklevel=2)
    # The estimator sees features, which have numbers and no names.
    estimator.kernel, estimator.callbacks, estimator.checkpoint = str(expression), None, None
    relevant = relevances(estimator, encoder)
    summaries = [
        table_summary.column_summary(inputs, column, relevant, note=notes[column.name])
        for column in encoder.columns
    ]
    lost = importance(estimator, encoder, X[test], y[test]) if len(test) > 1 else None
    ranked = table_summary.ranked_columns(encoder, summaries, X, lost)
    if isinstance(expression, str):
        name = expression if layers != 1 else estimator.kernel_name_
    else:
        name = expression.text(numbers)
    held_out = (X[test], y[test]) if len(test) else None
    curves, terms = table_summary.effects(estimator, encoder, ranked, name)
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
        "ignored": table_summary.ignored_columns(everything, drop, id_column, noise_column),
        "kernel": kernel,
        "noise_sd": table_summary.noise_sd(estimator),
        "choice": table_summary.choice(
            estimator, len(train), asked=_described_goal(points), kernel=name, held_out=held_out
        ),
        "alarms": [table_summary.alarm_summary(alarm) for alarm in alarms],
        "quality": _quality(estimator, X, y, train, test, known),
        "importance": lost,
        "effects": curves,
        "terms": terms,
        "training": training_summary(history, estimator, encoder, relevant),
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
            **({} if noise_column is None else {"noise_column": noise_column}),
            **({} if mean == "auto" else {"mean": mean}),
            **({} if layers == 1 else {"layers": str(layers)}),
            "missing": missing,
            **({} if priors is not None else {"priors": "none"}),
            **(settings or {}),
        },
    }
    return TabularModel(encoder, estimator, id_column, summary)


def _feature_numbers(encoder: TableEncoder) -> dict[str, list[int]]:
    """Return the columns of the encoded matrix that belong to each column of the table."""
    owners = [column.name for column in encoder.columns for _ in column.features]
    return {
        column.name: [number for number, owner in enumerate(owners) if owner == column.name]
        for column in encoder.columns
    }


def _check_id(id_column: str | None, table: DataTable, target: str, task: str) -> None:
    """Check that no column of predictions has the name of the id column."""
    classes = table.strings(target) if task == "classification" else ()
    if id_column in prediction_names(task, classes):
        raise InputError(
            f"`id_column` must not be the name of a column of predictions; got {id_column!r}. "
            "Rename it."
        )


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


def _estimator(task: str, precision: str, *, likelihood: str, hyper: str, **options: Any) -> Any:
    if task == "regression":
        return partial(
            SparseGPRegressor, likelihood=likelihood, precision=precision, hyper=hyper, **options
        )
    if hyper not in ("auto", "point"):
        raise InputError(
            f"`hyper` (`--hyper`) must be 'auto' or 'point' for {task}; got {hyper!r}. Only "
            "regression with Gaussian noise averages over hyper-parameters."
        )
    if precision != "double":
        raise InputError(
            f"`precision` must be 'double' for {task}; got {precision!r}. Only regression supports "
            "'mixed'."
        )
    if task == "classification":
        return SparseGPClassifier
    return partial(SparseGPRegressor, likelihood=likelihood)


def _deep_estimator(
    task: str, layers: int | str, kernel: str, *, likelihood: str, options: dict[str, Any]
) -> Any:
    """Return a constructor of a deep estimator; `options` are those of sparse ones as well."""
    for name, value in options.items():
        if value not in _DEEP_OPTIONS.get(name, (value,)):
            raise InputError(
                f"`{name}` (`--{name.replace('_', '-')}`) is not for deep models; got {value!r} "
                f"with `layers` {layers!r}. Leave one of them out. `tolerance`, `max_predict_us` "
                "or `alpha` set the numbers of inducing points of a deep model."
            )
    goal = {name: options[name] for name in ("alpha", "tolerance", "max_predict_us")}
    if task == "classification":
        return partial(DeepGPClassifier, layers, kernel=kernel, **goal)
    if likelihood == HETEROSCEDASTIC:
        raise InputError(
            "`likelihood` (`--likelihood`) 'heteroscedastic' is not for deep models; leave it or "
            "`layers` out."
        )
    return partial(DeepGPRegressor, layers, kernel=kernel, likelihood=likelihood, **goal)


def _quality(
    estimator: Any,
    X: NDArray[np.float64],
    y: NDArray[Any],
    train: NDArray[Any],
    test: NDArray[Any],
    known: NDArray[np.float64] | None,
) -> Quality | None:
    if not len(test):
        return None
    if isinstance(estimator, ClassTargets):
        return classification_quality(estimator, X[test], y[test], train_labels=y[train])
    noise = _known_part(known, test)
    return regression_quality(estimator, X[test], y[test], y_train=y[train], **noise)


def _check_noise_column(
    noise_column: str | None, task: str, likelihood: str, *, log_target: bool
) -> None:
    plain = task == "regression" and likelihood == "gaussian" and not log_target
    if noise_column is None or plain:
        return
    what = "`log_target`" if log_target else f"{task} with {likelihood!r}"
    raise InputError(
        "`noise_column` (`--noise-column`) needs regression with Gaussian noise of the target "
        f"itself; got {what}. Leave one of them out."
    )


def _known_part(known: NDArray[np.float64] | None, rows: NDArray[Any]) -> dict[str, Any]:
    """Return the known noise of some rows as an argument, if there is any."""
    return {} if known is None else {"noise_variance": known[rows]}


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
