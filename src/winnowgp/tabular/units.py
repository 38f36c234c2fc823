"""Checks of the rows of an update: are columns and targets in the units of the fit?"""

import warnings

import numpy as np
from numpy.typing import NDArray

from winnowgp.errors import ExtrapolationWarning, FitWarning, InputError

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
