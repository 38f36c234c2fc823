"""Updates of a table model by the rows of another table, without the rows that it was fitted to.

The new rows are checked: columns and targets must have the categories and the units of the fit.
"""

import warnings
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from winnowgp.data import DataTable
from winnowgp.data.encoding import TableEncoder
from winnowgp.data.tables import TableLike
from winnowgp.errors import ExtrapolationWarning, FitWarning, InputError
from winnowgp.estimators.classification import ClassTargets
from winnowgp.estimators.deep import DeepEstimator
from winnowgp.models.likelihoods import has_noise
from winnowgp.report.summary import ColumnSummary, Summary
from winnowgp.tabular import table_summary
from winnowgp.tabular.evaluation import labelled_rows, observed_targets
from winnowgp.tabular.model import TabularModel
from winnowgp.tabular.quality import class_densities, held_out_quality
from winnowgp.tabular.splits import Split, held_out_split

# Ranges of a column by which its median may lie outside before it is taken for another unit; also
# the standard deviations, and the ratio of scales, of a target.
_OTHER_UNITS = 10.0
# Ranges by which the median may lie outside before that is worth a warning: heights in metres after
# those in centimetres are three ranges below, and months after years eight above. A column that
# counts time is half a range above after as many rows again.
_FAR = 2.0
# Correlation of a target with its predictions, from which its scale can be compared with theirs.
_FOLLOWS = 0.9
# Rows from which the spread of a target can be compared without that, and the standard deviations
# of its ratio to the predictions that are clear.
_ENOUGH_ROWS, _CLEAR = 10, 4.0
# New rows from which an equal target is worth a warning.
_SEVERAL = 10


@final
@dataclass(frozen=True, slots=True)
class TableUpdate:
    """A table model after more rows, and what they changed."""

    model: TabularModel
    rows: int
    """New rows that the model has learnt from."""
    held_out: int
    """Those of them that were held out first, to compare the model before and after."""
    points_before: int
    """Number of inducing points of the model before."""
    points: int
    """Number of inducing points of the updated model."""
    added: int
    """Number of inducing points added, summed over batches of at most 4,096 rows."""
    dropped: int
    """Number of inducing points dropped, summed over these batches."""
    moved: int
    """Largest number of inducing points that one of these batches moved."""
    density_before: float | None
    """Mean log density of the held-out rows under the model before; None without such rows."""
    density: float | None
    """The same under a model that was updated by the other new rows."""


def update_table(
    model: TabularModel,
    table: TableLike,
    *,
    test_size: float = 0.2,
    split_by: str | None = None,
    seed: int = 0,
    forgetting: float | None = None,
    window: int | None = None,
    move_points: bool | None = None,
    settings: Mapping[str, str] | None = None,
) -> TableUpdate:
    """Return a table model that has learnt from the rows of another table (`partial_fit`).

    Columns are encoded as in the fit, and known noise is that of its `noise_column`. Rows without a
    target are left out. Rows are held out for a comparison: the model is updated without them and
    predicts them, which takes one more update. The model that is returned has learnt all rows.

    Args:
        model: the model; it stays as it is.
        table: more rows, with the target.
        test_size: share of these rows held out to compare the model before and after; 0 for none.
        split_by: a column that decides which rows these are, as in `fit_table`; that of the fit by
            default.
        seed: seed of that split.
        forgetting: factor of the log-likelihood of all earlier rows; that of the model if None.
        window: number of the latest batches that are remembered, this one included; that of the
            model if None. The updated model has it too. More than 4,096 rows are several batches.
        move_points: whether inducing points are moved; as in the model if None.
        settings: settings to replace or add, such as the command that made it.

    Returns: a `TableUpdate` with the updated `model` and what changed.

    Raises:
        InputError: columns are missing or have unknown categories, inputs or the target have other
            units, or the model cannot be updated.
    """
    if isinstance(model.estimator, DeepEstimator):
        raise InputError(
            "`model` must not be a deep GP, which cannot be updated; fit all rows together, or a "
            "model of one layer."
        )
    rows = labelled_rows(model, table)
    model.encoder.require_columns(rows)
    check_categories(model.encoder, rows)
    X, y = model.encoder.encode(rows), observed_targets(model, rows)
    ranges = _ranges(model, X)
    _check_units(model, ranges)
    _check_target_units(model, X, y)
    if model.task != "classification":
        warn_of_constant(model.target, y)
    noise = _noise(model, rows)
    train, test = _split(model, rows, test_size, split_by=split_by, seed=seed)
    before = model.estimator
    given = {"forgetting": forgetting, "window": window, "move_points": move_points}
    given = {name: value for name, value in given.items() if value is not None}

    def updated(part: NDArray[np.intp]) -> Any:
        estimator = copy(before).set_params(**given)
        estimator.partial_fit(X[part], y[part], **_known_part(noise, part))
        return estimator.set_params(forgetting=before.forgetting, move_points=before.move_points)

    estimator = updated(np.arange(rows.N))
    batches = estimator.batches_[-(estimator.n_batches_ - before.n_batches_) :]
    changed = {
        **(settings or {}),
        "batches": str(estimator.n_batches_),
        "rows_seen": f"{estimator.n_rows_seen_:g}",
    }
    summary = _summary(model, estimator, ranges, y, settings=changed)
    density = density_before = None
    if len(test):
        compared, known = updated(train), _known_part(noise, test)
        density, density_before = (
            _density(each, X[test], y[test], known) for each in (compared, before)
        )
        summary["quality"] = held_out_quality(compared, X[test], y[test], y_train=y[train], **known)
    return TableUpdate(
        model=replace(model, estimator=estimator, summary=summary),
        rows=rows.N,
        held_out=len(test),
        points_before=before.n_inducing_,
        points=estimator.n_inducing_,
        added=sum(batch.added for batch in batches),
        dropped=sum(batch.dropped for batch in batches),
        moved=max(batch.moved for batch in batches),
        density_before=density_before,
        density=density,
    )


def _split(
    model: TabularModel, rows: DataTable, test_size: float, *, split_by: str | None, seed: int
) -> Split:
    """Return the rows to learn from and those to hold out for the comparison."""
    if test_size == 0:
        return np.arange(rows.N), np.arange(0)
    own = model.summary["settings"].get("split_by") if split_by is None else split_by
    try:
        return held_out_split(rows, test_size, split_by=own, seed=seed)
    except InputError as error:
        if own == split_by:
            raise
        raise InputError(
            f"{error} The model was fitted with split_by={own!r}. Pass another column "
            "(`--split-by`), or test_size=0 (`--test-size 0`) to compare no rows."
        ) from error


def _noise(model: TabularModel, rows: DataTable) -> NDArray[np.float64] | None:
    """Return the known noise of the rows, which a model that was fitted with some needs."""
    if model.noise_column is not None:
        rows.require_columns([model.noise_column], argument="the noise column of the fit")
    return model.noise_variance(rows)


def _known_part(noise: NDArray[np.float64] | None, rows: NDArray[np.intp]) -> dict[str, Any]:
    return {} if noise is None else {"noise_variance": noise[rows]}


def _ranges(model: TabularModel, X: NDArray[np.float64]) -> dict[str, NDArray[np.float64]]:
    """Return the entries of each column of numbers or dates."""
    pairs = zip(model.encoder.columns, model.encoder.feature_numbers.values(), strict=True)
    return {column.name: X[:, numbers[0]] for column, numbers in pairs if column.kind != "category"}


def _check_units(model: TabularModel, values: Mapping[str, NDArray[np.float64]]) -> None:
    """Raise an error if a column lies so far outside that it is in other units.

    Dates have no units, and later ones are what an update is for.
    """
    for column in model.summary["columns"]:
        name, spread = column["name"], column["spread"]
        if spread and name in values and name not in model.encoder.dates:
            check_column_units(name, values[name], low=spread[0], high=spread[-1])


def _check_target_units(model: TabularModel, X: NDArray[np.float64], y: NDArray[Any]) -> None:
    """Raise an error if the target is in other units; counts, proportions and classes have none."""
    estimator = model.estimator
    if isinstance(estimator, ClassTargets) or not has_noise(estimator.likelihood_):
        return
    scaler = estimator._y_scaler
    if scaler.log and (y <= 0).any():
        return  # `partial_fit` says that the logarithm needs positive targets.
    mean, sd = (np.asarray(each) for each in estimator.predict(X, return_std=True))
    check_target_units(
        model.target,
        y,
        mean=mean,
        sd=sd,
        noise_sd=float(scaler.noise(estimator.likelihood_)[0]) ** 0.5,
        first=(scaler.columns.shift.item(), scaler.columns.scale.item()),
        log=scaler.log,
    )


def _summary(
    model: TabularModel,
    estimator: Any,
    values: Mapping[str, NDArray[np.float64]],
    y: NDArray[Any],
    *,
    settings: Mapping[str, str],
) -> Summary:
    before, rows = model.summary, len(y)
    columns = [_widened(column, values.get(column["name"])) for column in before["columns"]]
    summary = table_summary.resized(
        {**before, "columns": columns}, estimator, model.encoder, settings
    )
    asked = before["choice"]["asked"]
    choice = table_summary.choice(
        estimator,
        before["choice"]["rows"] + rows,
        asked=asked,
        kernel=before["choice"]["kernel"],
    )
    return {
        **summary,
        "rows": before["rows"] + rows,
        "train_rows": before["train_rows"] + rows,
        "target_summary": _widened(before["target_summary"], y),
        "choice": choice,
    }


def _widened(column: ColumnSummary, values: NDArray[Any] | None) -> ColumnSummary:
    """Return the summary of a column with the ends of its range moved to the new rows."""
    spread = column["spread"]
    if not spread or values is None:
        return column
    ends = min(spread[0], float(values.min())), max(spread[-1], float(values.max()))
    return {**column, "spread": [ends[0], *spread[1:-1], ends[1]]}


def _density(
    estimator: Any, X: NDArray[np.float64], y: NDArray[Any], known: dict[str, Any]
) -> float:
    if isinstance(estimator, ClassTargets):
        return float(class_densities(estimator, X, y).mean())
    return float(np.mean(estimator.log_density(X, y, **known)))


def check_categories(encoder: TableEncoder, rows: DataTable) -> None:
    """Raise an error if rows have categories that were not in the training table."""
    for name, unseen in encoder.unseen(rows).items():
        examples = ", ".join(repr(value[:30]) for value in sorted(unseen)[:5])
        raise InputError(
            f"column {name!r} has categories that the model does not know: {examples}. Correct "
            "them, leave such rows out, or fit a new model to all rows."
        )


def check_column_units(name: str, values: NDArray[np.float64], *, low: float, high: float) -> None:
    """Raise an error if a column lies so far outside of its range that it is in other units.

    Where it may be, an `ExtrapolationWarning` says so; also if it had one value in training and has
    another one.

    Args:
        low: lowest value in training.
        high: highest value in training.
    """
    middle = float(np.median(values))
    beyond, width = max(low - middle, middle - high), high - low
    earlier = f"{low:.6g} to {high:.6g} in training" if width else f"{low:.6g} in all training rows"
    seen = f"column {name!r} has a median of {middle:.6g}, and was {earlier}"
    if width > 0 and beyond > _OTHER_UNITS * width:
        raise InputError(
            f"{seen}: it seems to be in other units. Convert it; if the units are right, fit a new "
            "model to all rows."
        )
    if beyond > _FAR * width:
        warnings.warn(
            f"{seen}. If it is in other units, convert it and update the earlier file; otherwise "
            "fit a new model to all rows, since what is known of this column comes from its "
            "earlier range.",
            ExtrapolationWarning,
            stacklevel=4,
        )


def check_target_units(
    name: str,
    y: NDArray[np.float64],
    *,
    mean: NDArray[np.float64],
    sd: NDArray[np.float64],
    noise_sd: float,
    first: tuple[float, float],
    log: bool = False,
) -> None:
    """Raise an error if a target is in other units than in training.

    That is so if half of its values are more than ten standard deviations from the mean of the
    first rows, or if they follow the predictions (correlation above 0.9) at another scale: a tenth
    or ten times of it, or that ratio to the predictions if the model is one of log y. Ten rows that
    do not follow the predictions are in other units if they are spread ten times as much as
    predicted, or a tenth of the noise; for log y, if the ratio to the predictions is far from one,
    compared with its own spread. Values whose quartiles are equal have no spread to compare.

    Args:
        mean: predictive means of the rows.
        sd: predictive standard deviations, noise included.
        noise_sd: standard deviation of the noise.
        first: mean and standard deviation of the first rows, of log y if `log`.
        log: whether the model is one of log y.
    """
    values, predicted = (np.log(y), np.log(mean)) if log else (y, mean)
    shift, scale = first
    far = bool(np.median(np.abs(values - shift)) > _OTHER_UNITS * scale)
    varies, ratio = len(y) > 2 and np.ptp(values) > 0, 1.0
    if varies and np.ptp(predicted) > 0 and np.corrcoef(values, predicted)[0, 1] > _FOLLOWS:
        slope = float(np.polyfit(predicted, values, 1)[0])
        ratio = float(np.exp(np.median(values - predicted))) if log else slope
    elif varies and len(y) >= _ENOUGH_ROWS and log:
        offset, spread = float(np.median(values - predicted)), _spread(values - predicted)
        ratio = float(np.exp(offset)) if abs(offset) > _CLEAR * spread else 1.0
    elif len(y) >= _ENOUGH_ROWS and (spread := _spread(values)) > 0:
        # Var y = Var E[y | x] + E Var[y | x], of which neighbouring rows have the noise only.
        most = float(np.hypot(_spread(predicted), np.median(sd)))
        ratio = spread / most if spread > most else min(spread / max(noise_sd, 1e-300), 1.0)
    if far or not 1 / _OTHER_UNITS < ratio < _OTHER_UNITS:
        raise InputError(
            f"the target {name!r} has a median of {np.median(y):.6g} and a spread of "
            f"{_spread(y):.3g}, where the model predicts {np.median(mean):.6g} and "
            f"{np.hypot(_spread(mean), np.median(sd)):.3g}: it seems to be in other units. "
            "Convert it; if the units are right, fit a new model to all rows."
        )


def _spread(values: NDArray[np.float64]) -> float:
    """Return the standard deviation of a Gaussian with the quartiles of some values."""
    low, high = np.quantile(values, [0.25, 0.75])
    return float(high - low) / 1.349


def warn_of_constant(target: str, y: NDArray[np.float64]) -> None:
    """Warn if a target has one value in all of several new rows."""
    if len(y) < _SEVERAL or np.ptp(y) > 0:
        return
    # The rows may be right, for instance of a sensor at its limit; the model learns them.
    warnings.warn(
        f"the target {target!r} is {y[0]:g} in all {len(y)} new rows: the model learns it as an "
        "observation of each. Check the column; if it is wrong, go on with the earlier file.",
        FitWarning,
        stacklevel=3,
    )
