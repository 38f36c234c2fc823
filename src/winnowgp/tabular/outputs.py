"""Models of several columns of a table: `fit_outputs_table` and `MultiOutputTable`."""

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from winnowgp.data import DataTable
from winnowgp.data.columns import column_kinds, parse_numbers
from winnowgp.data.tables import TableLike
from winnowgp.errors import FitWarning, InputError, NoInducingPointsWarning
from winnowgp.estimators.multi_output import MultiOutputGPRegressor
from winnowgp.report.summary import Alarm
from winnowgp.tabular.diagnostics import recorded_alarms
from winnowgp.tabular.model import Columns, Extrapolation, TableModel
from winnowgp.tabular.reading import Reading
from winnowgp.tabular.splits import cross_validation_splits, held_out_split
from winnowgp.tabular.table_summary import alarm_summary
from winnowgp.tabular.targets import FEW_ROWS, constant_target_warning, few_rows_warning
from winnowgp.tabular.updates import (
    check_categories,
    check_column_units,
    check_target_units,
    warn_of_constant,
)

PARTS = ("mean", "sd", "lower", "upper")
"""Columns of a prediction, each after the name of its target."""


@final
@dataclass(frozen=True, slots=True)
class MultiOutputTable(TableModel):
    """A fitted model of several columns of a table.

    >>> x = np.linspace(0, 6, 40)
    >>> table = DataTable.of({"x": x, "a": np.sin(x), "b": 1 - np.sin(x)})
    >>> model = fit_outputs_table(table, ["a", "b"], n_latents=1, tolerance=0.1)
    >>> list(model.predict(table))[:4]
    ['a_mean', 'a_sd', 'a_lower', 'a_upper']
    """

    estimator: MultiOutputGPRegressor
    targets: list[str]
    quality: dict[str, dict[str, float]]
    """Of each target: root mean squared error, R² and log density of the held-out rows that have
    it, and their number; means over the folds of a cross-validation. Empty if none were held out,
    and without R² if the target does not vary among them."""
    settings: dict[str, str]
    alarms: list[Alarm]
    """Warnings of the fit, with their classes."""

    @property
    def noise_column(self) -> None:
        """A model of several targets has no column of known noise."""
        return

    def predict(self, table: TableLike, *, level: float = 0.95) -> Columns:
        """Return mean, standard deviation and a central interval of every target.

        An `ExtrapolationWarning` says that rows have categories that no training row has.

        Args:
            table: a `DataTable`, a data frame of pandas, polars or pyarrow, or a dictionary of
                columns.
            level: probability that an interval contains an observation.
        """
        return self._warned(DataTable.of(table), level, ())

    def extrapolation(self) -> Extrapolation:
        """Return a counter of unseen categories; the ranges of numbers are not known."""
        return Extrapolation(self.encoder, {})

    def _columns(
        self, table: DataTable, X: NDArray[np.float64], level: float, quantiles: Sequence[float]
    ) -> Columns:
        if quantiles:
            raise InputError("`quantiles` are for models of one target; leave them out.")
        columns: Columns = {}
        mean, sd = self.estimator.predict(X, return_std=True)
        lower, upper = self.estimator.predict_interval(X, level)
        parts = dict(zip(PARTS, (mean, sd, lower, upper), strict=True))
        for p, target in enumerate(self.targets):
            columns |= {f"{target}_{part}": values[:, p] for part, values in parts.items()}
        return columns

    def evaluate(self, table: TableLike, *, decimal: str = "auto") -> dict[str, dict[str, float]]:
        """Return the quality of each target on rows that have it, as `quality`.

        Targets with fewer than two values are left out.

        Args:
            decimal: what commas in the targets mean, as in `fit_table`; inputs are read as in the
                fit.
        """
        rows = DataTable.of(table)
        rows.require_columns(self.targets, argument="the targets of the model")
        rows, Y = _observed_targets(rows, self.targets, decimal=decimal)
        X, unseen = self.encoder.encode(rows), self.extrapolation()
        unseen.add(rows, X)
        for warning in unseen.warnings():
            warnings.warn(warning, stacklevel=2)
        return _quality(self.estimator, self.targets, X, Y)


def fit_outputs_table(
    table: TableLike,
    targets: Sequence[str],
    *,
    test_size: float = 0.2,
    split_by: str | None = None,
    id_column: str | None = None,
    drop: Sequence[str] = (),
    categorical: Sequence[str] = (),
    decimal: str = "auto",
    dates: str = "auto",
    missing: str = "error",
    max_categories: int = 30,
    likelihood: str | Mapping[str, str] = "gaussian",
    seed: int = 0,
    settings: dict[str, str] | None = None,
    **options: Any,
) -> MultiOutputTable:
    """Fit a model that predicts several columns of a table from the others.

    Targets may be missing in some rows; rows without any are left out.

    Args:
        targets: the columns to predict, which must be numbers.
        split_by: a column that decides which rows are held out, as in `fit_table`.
        likelihood: that of all targets, or of some of them by name; the others have Gaussian noise.
            `MultiOutputGPRegressor` names those there are; "bernoulli" is for classes 0 and 1.
        settings: settings to store with the model, such as the command that made it.
        options: further parameters of `MultiOutputGPRegressor`.

    The other arguments are those of `fit_table`.
    """
    table, names = DataTable.of(table), list(targets)
    clash = [f"{name}_{part}" for name in names for part in PARTS if f"{name}_{part}" == id_column]
    if clash:
        raise InputError(
            f"`id_column` must not have the name of a prediction; got {clash[0]!r}. Rename it."
        )
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
    reading.require_columns(table, names, argument="`targets`")
    apart = {*names, *reading.ignored}
    if (
        len(set(names)) < len(names)
        or set(names) & {*reading.ignored, *reading.categorical}
        or len(names) < 2
    ):
        raise InputError(
            "`targets` must be at least two different columns that are not in `drop` or "
            f"`categorical` nor the `id_column`; got {names}."
        )
    for name in names:
        if table.missing(name).all():
            raise InputError(
                f"the target {name!r} has no values; leave it out of `targets` (`--target`)."
            )
    kinds = reading.kinds(table, (*table.without(apart).names, *names))
    strings = [name for name in names if kinds[name].kind != "number"]
    if strings:
        raise InputError(
            f"`targets` must be numbers; {strings[0]!r} is not. Leave it out; two classes are 0 "
            "and 1, with the likelihood bernoulli."
        )
    table, Y = _observed_targets(parse_numbers(table, kinds), names)
    if not table.N:
        raise InputError("the table must have at least one row with a target; got none.")
    inputs = table.without(apart)
    train, test = reading.split(table)
    own = {name: kind for name, kind in kinds.items() if name not in names}
    encoder = reading.encoder(inputs, own, train)
    X = encoder.encode(inputs)
    estimator = MultiOutputGPRegressor(
        random_state=seed, likelihood=_by_target(likelihood, names), **options
    )
    with _named_targets(names), recorded_alarms() as issued:
        estimator.fit(X[train], Y[train])
    estimator.callbacks = estimator.checkpoint = None
    # Those of constant targets name them here.
    issued = [alarm for alarm in issued if not isinstance(alarm, NoInducingPointsWarning)]
    alarms = [*issued, *_alarms(estimator, names, Y[train])]
    for alarm in alarms:
        warnings.warn(alarm, stacklevel=2)
    quality = _quality(estimator, names, X[test], Y[test]) if len(test) else {}
    summaries = [alarm_summary(alarm) for alarm in alarms]
    return MultiOutputTable(
        encoder, estimator, id_column, names, quality, settings or {}, summaries
    )


@final
@dataclass(frozen=True, slots=True)
class OutputsUpdate:
    """A model of several targets after more rows, and what they changed."""

    model: MultiOutputTable
    rows: int
    """New rows that the model has learnt from."""
    held_out: int
    """Those of them that were held out first, to compare the model before and after."""
    points_before: tuple[int, ...]
    """Number of inducing points of each process before."""
    density_before: float | None
    """Mean log density of held-out targets under the model before; None without such rows."""
    density: float | None
    """The same under a model that was updated by the other new rows."""


def update_outputs_table(
    model: MultiOutputTable,
    table: TableLike,
    *,
    test_size: float = 0.2,
    split_by: str | None = None,
    decimal: str = "auto",
    seed: int = 0,
    settings: dict[str, str] | None = None,
) -> OutputsUpdate:
    """Return a model of several targets that has learnt from more rows (`partial_fit`).

    Columns are encoded as in the fit; rows without any target are left out. Rows are held out for a
    comparison: the model is updated without them and predicts them. The model that is returned has
    learnt all rows, and its `quality` is that of the comparison.

    Args:
        model: the model; it stays as it is.
        table: more rows, with the targets.
        settings: settings to replace or add.

    The other arguments are those of `fit_outputs_table`.

    Returns: an `OutputsUpdate` with the updated `model` and what changed.

    Raises:
        InputError: columns are missing or have unknown categories, or are in other units.
    """
    rows = DataTable.of(table)
    rows.require_columns(model.targets, argument="the targets of the model")
    model.encoder.require_columns(rows)
    check_categories(model.encoder, rows)
    rows, Y = _observed_targets(rows, model.targets, decimal=decimal)
    if not rows.N:
        raise InputError("the table must have at least one row with a target; got none.")
    X = model.encoder.encode(rows)
    with _named_targets(model.targets):
        _check_units(model, X, Y)
    kinds: Any = model.estimator.likelihood
    for p, name in enumerate(model.targets):
        if (kinds if isinstance(kinds, str) else kinds[p]) != "bernoulli":
            warn_of_constant(name, Y[~np.isnan(Y[:, p]), p])
    train, test = np.arange(rows.N), np.arange(0)
    if test_size:
        train, test = held_out_split(rows, test_size, split_by=split_by, seed=seed)

    def updated(part: np.ndarray[Any, Any]) -> MultiOutputGPRegressor:
        return copy(model.estimator).partial_fit(X[part], Y[part])

    density = density_before = None
    quality = model.quality
    if len(test):
        compared = updated(train)
        quality = _quality(compared, model.targets, X[test], Y[test])
        density_before, density = (
            float(np.nanmean(each.log_density(X[test], Y[test])))
            for each in (model.estimator, compared)
        )
    estimator = updated(np.arange(rows.N))
    updates = {"updates": str(1 + int(model.settings.get("updates", "0")))}
    changed = replace(
        model,
        estimator=estimator,
        quality=quality,
        settings={**model.settings, **(settings or {}), **updates},
    )
    before = model.estimator.n_inducing_
    return OutputsUpdate(changed, rows.N, len(test), before, density_before, density)


def cross_validate_outputs(
    table: TableLike,
    targets: Sequence[str],
    *,
    folds: int = 5,
    split_by: str | None = None,
    seed: int = 0,
    **options: Any,
) -> tuple[MultiOutputTable, list[dict[str, dict[str, float]]]]:
    """Fit a model to all rows; return it, and the quality of each fold of a cross-validation.

    The quality of the model is the mean over the folds.

    Args:
        table: rows with targets; those without any are left out of the folds.
        targets: the columns to predict.
        folds: number of folds. Each one takes a fit to the other rows.
        split_by: as in `cross_validate_table`.
        seed: seed of the folds and of every fit.
        options: further arguments of `fit_outputs_table`.
    """
    if options.get("checkpoint") is not None:
        raise InputError(
            "`checkpoint` is for one fit, and a cross-validation has several; leave it out, or fit "
            "with `fit_outputs_table`."
        )
    table, names = DataTable.of(table), list(targets)
    table.require_columns(names, argument="`targets`")
    # First, so that an error about a cell gives its row in the whole table.
    model = fit_outputs_table(table, names, test_size=0, seed=seed, **options)
    empty = np.column_stack([table.missing(name) for name in names]).all(axis=1)
    labelled = table.part(np.flatnonzero(~empty))
    dates = options.get("dates", "auto")
    splits = cross_validation_splits(labelled, folds, split_by=split_by, seed=seed, dates=dates)
    qualities = []
    for train, test in splits:
        fold = fit_outputs_table(labelled.part(train), names, test_size=0, seed=seed, **options)
        decimal = options.get("decimal", "auto")
        qualities.append(fold.evaluate(labelled.part(test), decimal=decimal))
    return replace(model, quality=_mean_quality(names, qualities)), qualities


def _by_target(likelihood: str | Mapping[str, str], targets: list[str]) -> str | list[str]:
    """Return the likelihood of all targets, or that of each."""
    if isinstance(likelihood, str):
        return likelihood
    unknown = set(likelihood) - set(targets)
    if unknown:
        raise InputError(
            f"`likelihood` must name targets, {', '.join(targets)}; got {min(unknown)!r}."
        )
    return [likelihood.get(name, "gaussian") for name in targets]


@contextmanager
def _named_targets(names: list[str]) -> Iterator[None]:
    """Name columns in errors of the estimator, which counts them."""
    try:
        yield
    except InputError as error:
        text = re.sub(
            r"target (\d+) \(counted from 0\)",
            lambda match: f"target {names[int(match[1])]!r}",
            str(error),
        )
        raise InputError(text) from error


def _alarms(
    estimator: MultiOutputGPRegressor, targets: list[str], Y: np.ndarray[Any, Any]
) -> list[FitWarning]:
    """Return warnings about few rows, constant targets, and a model without inducing points."""
    constant = [constant_target_warning(y, name) for y, name in zip(Y.T, targets, strict=True)]
    found = [few_rows_warning(len(Y)), *constant]
    if not sum(estimator.n_inducing_) and not all(constant) and len(Y) >= FEW_ROWS:
        found.append(
            NoInducingPointsWarning(
                "no process has inducing points: the model predicts the same for every row, "
                "because inducing points gain no more than they would by chance. Check that the "
                "inputs vary and have to do with the targets, or add columns or rows."
            )
        )
    return [alarm for alarm in found if alarm is not None]


def _mean_quality(
    targets: list[str], folds: list[dict[str, dict[str, float]]]
) -> dict[str, dict[str, float]]:
    """Return means over the folds that have a measure, and the number of all rows."""
    mean: dict[str, dict[str, float]] = {}
    for target in targets:
        own = [fold[target] for fold in folds if target in fold]
        for name in own[0] if own else ():
            values = [scores[name] for scores in own if name in scores]
            total = float(np.sum(values) if name == "rows" else np.mean(values))
            mean.setdefault(target, {})[name] = total
    return mean


def _observed_targets(
    table: DataTable, targets: list[str], *, decimal: str = "auto"
) -> tuple[DataTable, np.ndarray[Any, Any]]:
    """Return the rows that have a target, and their targets."""
    # A column without any value has no numbers to read.
    empty = {name: np.full(table.N, np.nan) for name in targets if table.missing(name).all()}
    table = DataTable({**table.values, **empty})
    columns = [table.values[name] for name in targets]
    if any(not np.issubdtype(column.dtype, np.number) for column in columns):
        table = parse_numbers(table, column_kinds(table, tuple(targets), decimal=decimal))
        columns = [table.values[name] for name in targets]
    Y = np.column_stack(columns).astype(np.float64)
    seen = np.flatnonzero(np.isfinite(Y).any(axis=1))
    return table.part(seen), Y[seen]


def _quality(
    estimator: MultiOutputGPRegressor,
    targets: list[str],
    X: np.ndarray[Any, Any],
    Y: np.ndarray[Any, Any],
) -> dict[str, dict[str, float]]:
    errors, nats = (estimator.predict(X) - Y) ** 2, estimator.log_density(X, Y)
    quality = {}
    for p, target in enumerate(targets):
        known = np.isfinite(Y[:, p])
        if known.sum() > 1:
            error = float(errors[known, p].mean())
            variance = float(Y[known, p].var())
            quality[target] = {
                "rmse": error**0.5,
                "log_density": float(nats[known, p].mean()),
                "rows": float(known.sum()),
            }
            if variance > 0:
                quality[target]["r2"] = 1 - error / variance
    return quality


def _check_units(model: MultiOutputTable, X: NDArray[np.float64], Y: NDArray[np.float64]) -> None:
    """Raise an error if a column of numbers or a target is in other units than in the fit."""
    estimator = model.estimator
    x_scaler, y_scaler = estimator._x_scaler, estimator._y_scaler.columns
    pairs = zip(model.encoder.columns, model.encoder.feature_numbers.values(), strict=True)
    for column, (number, *_) in pairs:
        if column.kind == "number":
            # A range of four standard deviations, as far as the fit remembers it.
            middle, width = x_scaler.shift[number].item(), 2 * x_scaler.scale[number].item()
            check_column_units(column.name, X[:, number], low=middle - width, high=middle + width)
    mean, sd = estimator.predict(X, return_std=True)
    noise_sd = np.sqrt(estimator._y_scaler.noise(estimator.likelihood_))
    # Classes, counts and proportions have no units; the likelihood checks them.
    estimator._y_scaler.standardise(Y, estimator.likelihood_, inputs=estimator._inputs(X))
    for index, name in enumerate(model.targets):
        observed = ~np.isnan(Y[:, index])
        if observed.any() and not np.isnan(noise_sd[index]):
            check_target_units(
                name,
                Y[observed, index],
                mean=mean[observed, index],
                sd=sd[observed, index],
                noise_sd=float(noise_sd[index]),
                first=(y_scaler.shift[index].item(), y_scaler.scale[index].item()),
            )
