"""`fit_table`: from a table to a fitted model, its quality and its summary."""

import platform
import warnings
from functools import partial
from importlib.metadata import version
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from winnowgp import __version__
from winnowgp.data import Dataset, DataTable
from winnowgp.data.distributed import ProcessGroup
from winnowgp.data.sharding import ShardedSource
from winnowgp.data.tables import TableLike
from winnowgp.errors import FitWarning, InputError, WorseThanConstantWarning
from winnowgp.estimators.classification import SparseGPClassifier
from winnowgp.estimators.deep import DeepGPClassifier, DeepGPRegressor
from winnowgp.estimators.kernels import AUTO, parse_kernel
from winnowgp.estimators.regression import SparseGPRegressor
from winnowgp.estimators.rows import tensor
from winnowgp.estimators.validation import HETEROSCEDASTIC, TOLERANCE, CheckpointLike
from winnowgp.report.summary import Summary, counted
from winnowgp.tabular import table_summary
from winnowgp.tabular.diagnostics import diagnose, recorded_alarms, table_columns
from winnowgp.tabular.effects import importance, relevances
from winnowgp.tabular.model import TabularModel
from winnowgp.tabular.quality import held_out_quality
from winnowgp.tabular.reading import Reading, TableRows, read_rows
from winnowgp.tabular.splits import copied_rows_warning
from winnowgp.tabular.targets import likelihood_for
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
        settings: further settings to store with the model, such as the command that made it.
        process_group: processes that were given the same table and share its rows, if any; all
            return the same model. For classes and counts each process does all of the work, and the
            first one writes the checkpoint.

    The other arguments are those of `SparseGPRegressor` and `SparseGPClassifier`.
    """
    reading = Reading(
        test_size=test_size,
        split_by=split_by,
        id_column=id_column,
        drop=drop,
        categorical=categorical,
        decimal=decimal,
        dates=dates,
        missing=missing,
        max_categories=max_categories,
        seed=seed,
    )
    rows = read_rows(
        DataTable.of(table),
        target,
        reading,
        task=task,
        likelihood=likelihood,
        log_target=log_target,
        noise_column=noise_column,
        test_table=None if test_table is None else DataTable.of(test_table),
    )
    task, encoder, train, test = rows.task, rows.encoder, rows.train, rows.test
    likelihood = likelihood_for(task, likelihood)
    _check_noise_column(noise_column, task, likelihood, log_target=log_target)
    goal: dict[str, Any] = {
        "alpha": alpha,
        "tolerance": tolerance,
        "max_points": max_points,
        "max_predict_us": max_predict_us,
        "criterion": criterion,
    }
    options = {"log_target": log_target, "priors": priors, "hyper": hyper, "precision": precision}
    shallow = {"mean": mean, "posterior": posterior, "max_fit_seconds": max_fit_seconds, **goal}
    expression, columns = kernel, encoder.feature_numbers
    if layers == 1:
        if kernel != AUTO:
            expression = parse_kernel(kernel, len(encoder.features), columns=columns)
        made = partial(_estimator(task, likelihood=likelihood, **options), expression, **shallow)
    else:
        expression = "rbf" if kernel == AUTO else kernel
        others = {**shallow, **options, "noise_column": noise_column}
        made = _deep_estimator(task, layers, kernel, likelihood=likelihood, options=others)
    history = table_summary.TrainingHistory()
    estimator = made(
        random_state=seed,
        device=device,
        callbacks=(history, *as_callbacks(callbacks)),
        checkpoint=checkpoint,
    )
    X, start = encoder.encode(rows.inputs), perf_counter()
    with recorded_alarms() as alarms:
        if process_group is None:
            estimator.fit(X[train], rows.y[train], **rows.known_noise(train))
        elif task == "regression" and likelihood == "gaussian" and not log_target and layers == 1:
            estimator.fit(ShardedSource(_dataset(rows, X), process_group))
        else:
            estimator.checkpoint = checkpoint if process_group.is_first else None
            estimator.fit(X[train], rows.y[train])
    seconds = perf_counter() - start
    alarms = _alarms(rows, estimator, X, alarms)
    if process_group is None or process_group.is_first:
        for alarm in alarms:
            warnings.warn(alarm, stacklevel=2)
    # The estimator sees features, which have numbers and no names.
    estimator.kernel, estimator.callbacks, estimator.checkpoint = str(expression), None, None
    if not isinstance(expression, str):
        name = expression.text(columns)
    else:
        name = expression if layers != 1 else estimator.kernel_name_
    relevant = relevances(estimator, encoder)
    summaries = [
        table_summary.column_summary(rows.inputs, column, relevant, note=rows.notes[column.name])
        for column in encoder.columns
    ]
    held_out = (X[test], rows.y[test]) if len(test) else None
    lost = importance(estimator, encoder, *held_out) if held_out and len(test) > 1 else None
    quality = None
    if held_out is not None:
        known = rows.known_noise(test)
        quality = held_out_quality(estimator, *held_out, y_train=rows.y[train], **known)
    ranked = table_summary.ranked_columns(encoder, summaries, X, lost)
    curves, terms = table_summary.effects(estimator, encoder, ranked, name)
    summary: Summary = {
        "target": target,
        "task": task,
        "why_task": rows.why_task,
        "classes": [str(c) for c in getattr(estimator, "classes_", [])],
        "rows": rows.table.N,
        "train_rows": len(train),
        "columns": summaries,
        "target_summary": table_summary.target_summary(
            rows.table, target, task, note=rows.notes.get(target, "")
        ),
        "ignored": table_summary.ignored_columns(
            rows.everything, reading.drop, id_column, noise_column
        ),
        "kernel": kernel,
        "noise_sd": table_summary.noise_sd(estimator),
        "choice": table_summary.choice(
            estimator, len(train), asked=_described_goal(goal), kernel=name, held_out=held_out
        ),
        "alarms": [table_summary.alarm_summary(alarm) for alarm in alarms],
        "quality": quality,
        "importance": lost,
        "effects": curves,
        "terms": terms,
        "training": table_summary.training_summary(history, estimator, encoder, relevant),
        "timings": {"fit_s": seconds, "predict_us": table_summary.predict_us(estimator, X)},
        "settings": {
            "winnowgp": __version__,
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "gpytorch", "numpy", "scikit-learn")},
            "seed": str(seed),
            "device": device,
            "precision": precision,
            "test_size": f"{test_size:g}",
            **_target_settings(task, likelihood, log_target=log_target),
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


def _dataset(rows: TableRows, X: NDArray[np.float64]) -> Dataset:
    """Return the training rows for several processes, which share them."""
    noise = None if rows.noise is None else tensor(rows.noise[rows.train])
    return Dataset.of(tensor(X[rows.train]), tensor(rows.y[rows.train]), noise=noise).merged()


def _alarms(
    rows: TableRows, estimator: Any, X: NDArray[np.float64], alarms: list[FitWarning]
) -> list[FitWarning]:
    """Return the alarms about the rows, those that the fit has issued, and those of its result."""
    early = list(rows.alarms)
    if rows.task == "regression":
        copied = copied_rows_warning(X, rows.y, rows.train, rows.test)
        early += [] if copied is None else [copied]
    if rows.constant is not None:
        # The warning about the target names it.
        alarms = [alarm for alarm in alarms if not isinstance(alarm, type(rows.constant))]
    if not len(rows.test):
        return [*early, *alarms]
    seen = {type(alarm) for alarm in alarms}
    if rows.constant is not None:
        # No prediction of a constant is better than the constant.
        seen |= {type(rows.constant), WorseThanConstantWarning}
    found = diagnose(
        estimator,
        X,
        rows.y,
        held_out=rows.test,
        columns=table_columns(rows.encoder, rows.inputs),
        ordered=not rows.grouped,
        noise_variance=rows.noise,
    )
    return [*early, *alarms, *(alarm for alarm in found if type(alarm) not in seen)]


def _target_settings(task: str, likelihood: str, *, log_target: bool) -> dict[str, str]:
    if task == "classification":
        return {}
    return {"likelihood": likelihood} | ({"log_target": "True"} if log_target else {})


def _estimator(task: str, *, likelihood: str, precision: str, hyper: str, **options: Any) -> Any:
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


def _described_goal(goal: dict[str, Any]) -> str:
    if goal["alpha"] != "auto":
        return f"the paper's prior with α = {goal['alpha']:g}"
    limit = None
    if goal["max_points"] is not None:
        limit = f"at most {counted(goal['max_points'], 'point')}"
    elif goal["max_predict_us"] is not None:
        limit = f"at most {goal['max_predict_us']:g} µs per prediction"
    if limit is not None and goal["tolerance"] is None:
        return limit
    gap = "an ELBO gap" if goal["criterion"] == "elbo" else "a gap in held-out log density"
    nats = TOLERANCE if goal["tolerance"] is None else goal["tolerance"]
    tolerance = f"{gap} of at most {nats:g} nats per observation"
    return tolerance if limit is None else f"{tolerance}, {limit}"
