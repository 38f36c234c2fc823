"""Rows that estimators are given: validation of arrays, weights, known noise and sources; scaling.

Inputs may have dates. Numeric targets are standardised for training; predictions are in the units
of the targets.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from typing import Any, final

import numpy as np
import torch
from gpytorch.likelihoods import Likelihood
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from winnowgp.data import Dataset, Source, Standardiser
from winnowgp.data.tables import collected, days
from winnowgp.errors import InputError
from winnowgp.models.likelihoods import has_noise, observation_model
from winnowgp.models.target_likelihoods import TargetLikelihoods


def tensor(values: Any, *, name: str = "y", hint: str = "Use a classifier for labels.") -> Tensor:
    """Copy numbers to a float64 tensor, whatever the strides of the array.

    Args:
        name: the argument that the values were passed as, for the error message.
        hint: what to do if they are not numbers.
    """
    try:
        numbers = np.ascontiguousarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        wrong = next((v for v in np.ravel(np.asarray(values, object)) if _is_no_number(v)), values)
        raise InputError(f"`{name}` must be numbers; got {wrong!r}. {hint}") from error
    return torch.tensor(numbers)


def _is_no_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return True
    return False


def _is_missing(value: Any) -> bool:
    return _is_no_number(value) or float(value) != float(value)


@contextmanager
def explained_inputs(X: Any, y: Any = None) -> Iterator[None]:
    """Convert the error of a block about strings, NaN or infinity to one that names the cell.

    Args:
        X: inputs, with `dates_as_days`, that scikit-learn validates in the block.
        y: targets that it validates as well.
    """
    try:
        yield
    except ValueError as error:
        strings, missing = "could not convert string", "Input X contains NaN"
        _explain_numbers(X, y, error)
        if strings not in str(error) and missing not in str(error):
            raise
        cells = np.asarray(collected(X))
        if cells.ndim != 2:
            raise
        if cells.dtype.kind == "f":
            wrong = np.isnan(cells)
        else:
            cells = cells if cells.dtype == object else np.asarray(collected(X), dtype=object)
            holds = _is_missing if missing in str(error) else _is_no_number
            wrong = np.array([[holds(value) for value in row] for row in cells])
        if not wrong.any():
            raise InputError(
                "`y` must be numbers; it has strings. Use a classifier for labels."
            ) from error
        row, column = np.argwhere(wrong)[0]
        name = getattr(X, "columns", range(cells.shape[1]))[column]
        if missing in str(error):
            raise InputError(
                f"`X` contains NaN: column {name!r} has {wrong[:, column].sum()}, first in row "
                f"{np.argmax(wrong[:, column])} (counted from 0). Leave such rows out, impute them "
                "(`sklearn.impute.SimpleImputer`), or use "
                "`winnowgp.fit_table(..., missing='impute')`."
            ) from error
        raise InputError(
            f"`X` must be numbers; column {name!r} has {cells[row, column]!r} in row {row} "
            "(counted from 0). Encode categories (`sklearn.preprocessing.OneHotEncoder`), or use "
            "`winnowgp.fit_table`, which reads strings, dates and missing values."
        ) from error


def _explain_numbers(X: Any, y: Any, error: ValueError) -> None:
    """Raise an error that says where numbers are infinite, or where targets are NaN."""
    for name, values, kind, what in (
        ("X", X, "infinity", np.isinf),
        ("y", y, "infinity", np.isinf),
        ("y", y, "NaN", np.isnan),
    ):
        if values is None or f"Input {name} contains {kind}" not in str(error):
            continue
        try:
            wrong = what(np.asarray(collected(values), dtype=np.float64))
        except (TypeError, ValueError):
            return
        rows = np.flatnonzero(wrong.reshape(len(wrong), -1).any(1))
        if len(rows):
            raise InputError(
                f"`{name}` contains {kind} in {len(rows)} of {len(wrong)} rows, first in row "
                f"{rows[0]} (counted from 0). Correct such rows, or leave them out."
            ) from error


def check_magnitude(name: str, standardised: Tensor, *, farthest: float = 1e8) -> None:
    """Raise an error for numbers so large that sums of squares would lose all other rows."""
    distance = standardised.abs().nan_to_num(0.0, posinf=torch.inf)
    if bool((distance > farthest).any()):
        value, column = distance.amax(0).max(0)
        raise InputError(
            f"`{name}` must be within {farthest:.0e} standard deviations of the first batch; "
            f"column {int(column)} (counted from 0) has a value {value.item():.0e} of them away. "
            "Check the units, or fit all rows together."
        )


def dates_as_days(X: Any) -> Any:
    """Return inputs in which dates are days since 1970, as in tables; others are not copied.

    Args:
        X: an array, or a data frame of pandas or polars; columns of other types stay.
    """
    if type(X).__name__ == "Series":
        return X  # one column without its frame, which validation refuses
    package = type(X).__module__.partition(".")[0]
    if package == "pandas":
        return _pandas_days(X)
    if package == "polars":
        return _polars_days(X)
    if isinstance(X, np.ndarray) and X.dtype.kind == "M":
        return days(X)
    if isinstance(X, np.ndarray) and X.dtype == object and X.ndim == 2 and len(X):
        dated = [j for j in range(X.shape[1]) if any(isinstance(v, date) for v in X[:, j])]
        if dated:
            X = X.copy()
            for j in dated:
                X[:, j] = days(X[:, j])
    return X


def _pandas_days(X: Any) -> Any:
    types = [getattr(dtype, "kind", "") for dtype in getattr(X, "dtypes", [])]
    if "M" not in types:
        return X
    X = X.copy()
    for number, kind in enumerate(types):
        if kind == "M":
            column = X.iloc[:, number]
            zone = getattr(column.dtype, "tz", None)
            column = column if zone is None else column.dt.tz_convert("UTC").dt.tz_localize(None)
            X.isetitem(number, days(column.to_numpy()))
    return X


def _polars_days(X: Any) -> Any:
    polars: Any = sys.modules["polars"]
    dated = [s for s in collected(X).get_columns() if s.dtype in (polars.Date, polars.Datetime)]
    if not dated:
        return X
    # UTC by the epoch, whatever the zone of the column.
    new = [polars.Series(s.name, s.dt.epoch("us").to_numpy() / 86_400e6) for s in dated]
    return X.with_columns(new)


def set_source_columns(
    estimator: Any, source: Source, y: Any, sample_weight: Any, noise_variance: Any = None
) -> None:
    """Set the number and the names of an estimator's input columns from a source.

    Raises:
        InputError: targets, weights or noise were passed as well.
    """
    _refuse_targets_of_source(y, sample_weight, noise_variance)
    estimator.n_features_in_ = source.D
    if hasattr(estimator, "feature_names_in_"):
        del estimator.feature_names_in_
    if source.names is not None:
        estimator.feature_names_in_ = np.array(source.names, dtype=object)


@contextmanager
def columns_kept_after_errors(estimator: Any) -> Iterator[None]:
    """Undo what a block has set of an estimator's input columns if it raises an error."""
    names = ("n_features_in_", "feature_names_in_")
    before = {name: vars(estimator)[name] for name in names if name in vars(estimator)}
    try:
        yield
    except Exception:
        for name in names:
            vars(estimator).pop(name, None)
        vars(estimator).update(before)
        raise


def check_source_columns(estimator: Any, source: Source, *given: Any) -> None:
    """Raise an `InputError` if a source lacks the input columns of a fitted estimator.

    Args:
        given: targets, weights and noise, which a source has itself.
    """
    _refuse_targets_of_source(*given)
    names = getattr(estimator, "feature_names_in_", None)
    if estimator.n_features_in_ != source.D:
        raise InputError(
            f"`X` must have {estimator.n_features_in_} input columns as before; got {source.D}."
        )
    if names is not None and source.names is not None and list(source.names) != list(names):
        raise InputError(
            f"`X` must have the input columns {list(names)[:12]} as before, in this order; got "
            f"{list(source.names)[:12]}."
        )


def _refuse_targets_of_source(*given: Any) -> None:
    if any(values is not None for values in given):
        raise InputError(
            "`X` is a source, which has targets, weights and noise of its own; leave out `y`, "
            "`sample_weight` and `noise_variance`."
        )


def refuse_source(X: Any) -> None:
    """Raise an error if predictions for all rows of a source are requested at once."""
    if isinstance(X, Source):
        raise InputError(
            f"`X` must be inputs [N D]; got a {type(X).__name__}. Predict its rows in chunks: "
            "`for rows in source.chunks(10_000): model.predict(rows.X.numpy())`."
        )


def rows_in_memory(source: Source, user: str) -> Dataset:
    """Return all rows of a source on the CPU in double precision.

    Args:
        user: name of the algorithm that needs them, for the error message.
    """
    return source.require_dataset(user).to(torch.device("cpu")).double()


def missing_targets(y: Any) -> tuple[Any, NDArray[np.bool_] | None]:
    """Return targets with missing ones replaced by zero, and where they are missing, `[N P]`.

    Several targets may be missing in different rows. Other targets are returned as they are, for
    scikit-learn to check.

    >>> missing_targets([[1.0, np.nan], [2.0, 3.0]])[0].tolist()
    [[1.0, 0.0], [2.0, 3.0]]
    """
    try:
        values = np.asarray(y)
        # Objects may be numbers; other kinds, such as integers, are never NaN.
        numbers = values.astype(np.float64) if values.dtype.kind in "fO" else None
    except (TypeError, ValueError):
        return y, None
    if numbers is None:
        return y, None
    missing = np.isnan(numbers)
    if numbers.ndim != 2 or numbers.shape[1] < 2 or not missing.any():
        return y, None
    empty = missing.all(0)
    if empty.any():
        raise InputError(
            "`y` must have a value of every target in at least one row; column "
            f"{int(empty.argmax())} (counted from 0) has none. Leave that column out."
        )
    return np.where(missing, 0.0, numbers), missing


def noise_variances(
    noise_variance: Any, shape: tuple[int, int], missing: NDArray[np.bool_] | None = None
) -> Tensor | None:
    """Return known noise variances of all targets, `[N P]`; None if there are none.

    Args:
        noise_variance: one number, one per row `[N]`, or one per row and target `[N P]`.
        shape: N and P.
        missing: where targets are missing; their noise is not used, may be anything, and becomes
            zero.

    >>> noise_variances([0.1, 0.2], (2, 1)).tolist()
    [[0.1], [0.2]]
    """
    if noise_variance is None:
        return None
    N, P = shape
    hint = "Pass variances in the squared units of `y`."
    values = tensor(noise_variance, name="noise_variance", hint=hint)
    # `tensor` makes one number an array of length one.
    if np.ndim(noise_variance) == 0:
        values = values.reshape(1, 1)
    elif values.shape == (N,):
        values = values[:, None]
    elif values.shape != (N, P):
        raise InputError(
            f"`noise_variance` must be one number, one per row [{N}] or one per row and target "
            f"[{N} {P}]; got shape {list(values.shape)}."
        )
    values = values.expand(N, P).clone()
    if missing is not None:
        values[torch.from_numpy(missing)] = 0.0
    if not bool((torch.isfinite(values) & (values >= 0)).all()):
        raise InputError(
            "`noise_variance` must be finite and at least 0 wherever there is a target; some "
            "values are not. It is a variance, the square of a standard deviation."
        )
    return values


def weighted_rows(
    X: NDArray[np.float64], y: NDArray[Any], sample_weight: Any
) -> tuple[NDArray[np.float64], NDArray[Any], Tensor | None]:
    """Return the rows of positive weight and their weights `[N]`; None if all weights are one.

    A row of weight w counts as w rows.

    >>> X, y, weights = weighted_rows(np.eye(3), np.arange(3), [2, 0, 1])
    >>> y.tolist(), weights.tolist()
    ([0, 2], [2.0, 1.0])
    """
    if sample_weight is None:
        return X, y, None
    weights = _sample_weights(sample_weight, len(X))
    positive = weights > 0
    if not positive.any():
        raise InputError(
            "`sample_weight` must be positive for at least one row; all weights are zero."
        )
    return X[positive], y[positive], torch.tensor(weights[positive])


def _sample_weights(sample_weight: Any, N: int) -> NDArray[np.float64]:
    try:
        weights = np.asarray(sample_weight, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise InputError(f"`sample_weight` must be numbers; {error}.") from error
    if weights.ndim == 0:
        weights = np.full(N, float(weights))
    if weights.shape != (N,):
        raise InputError(
            f"`sample_weight` must be one number per row, [{N}]; got shape {list(weights.shape)}."
        )
    bad = int((~np.isfinite(weights) | (weights < 0)).sum())
    if bad:
        raise InputError(
            f"`sample_weight` must be finite and not negative; {bad} of {N} are not. A row of "
            "weight 2 counts as two rows, and a row of weight 0 is left out."
        )
    return weights


@final
@dataclass(frozen=True, slots=True)
class TargetScaler:
    """Standardises numeric targets: z = (y − shift) / scale, column by column.

    Targets are scaled only if they are the latent function plus noise; counts and proportions stay
    as they are.

    >>> import torch
    >>> from gpytorch.likelihoods import GaussianLikelihood
    >>> data = Dataset.of(torch.zeros(2, 1).double(), torch.tensor([1.0, 3.0]).double())
    >>> scaler = TargetScaler.of(data, GaussianLikelihood(), single=True)
    >>> Z = scaler.columns.forward(data.Y)
    >>> Z.tolist(), scaler.values(Z).tolist(), scaler.deviations(Z).tolist()
    ([[-1.0], [1.0]], [1.0, 3.0], [-1.0, 1.0])
    """

    columns: Standardiser
    single: bool
    """Whether targets were passed to `fit` as `[N]` rather than `[N P]`."""
    log: bool = False
    """Whether the logarithm of the targets is standardised, rather than the targets."""

    @classmethod
    def of(cls, data: Dataset, likelihood: Likelihood, *, single: bool) -> "TargetScaler":
        """Return the scaler of the targets of some rows."""
        none = Standardiser.none(data.Y)
        if isinstance(likelihood, TargetLikelihoods):
            scaler = Standardiser.of(data.Y, weights=data.weights)
            noisy = torch.tensor([has_noise(part) for part in likelihood.parts])
            shift = torch.where(noisy, scaler.shift, none.shift)
            return cls(Standardiser(shift, torch.where(noisy, scaler.scale, none.scale)), single)
        if not has_noise(likelihood):
            return cls(none, single)
        return cls(Standardiser.of(data.Y, weights=data.weights), single)

    @property
    def P(self) -> int:
        """Number of target columns."""
        return len(self.columns.shift)

    def standardise(
        self, y: Any, likelihood: Likelihood, *, inputs: Float[Tensor, "N D"]
    ) -> Float[Tensor, "N P"]:
        """Validate targets that are to be scored, and standardise them."""
        Y = Dataset.of(inputs, tensor(y), missing=self.P > 1).Y
        if Y.shape[1] != self.P:
            raise InputError(
                f"`y` must have {self.P} target columns as in `fit`; got {Y.shape[1]}."
            )
        Y = self.columns.forward(logarithm(Y) if self.log else Y)
        observation_model(likelihood).check_targets(Y)
        return Y

    def values(self, Y: Float[Tensor, "*S P"]) -> NDArray[np.float64]:
        """Return quantiles or samples, or without a logarithm means, in the targets' units."""
        values = self.columns.inverse(Y)
        return self._array(values.exp() if self.log else values)

    def moments(
        self, mean: Float[Tensor, "N P"], variance: Float[Tensor, "N P"]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return mean and standard deviation of y; log-normal if log y is Gaussian.

        E y = exp(m + v/2),   Var y = (E y)² (eᵛ − 1)
        """
        if not self.log:
            return self.values(mean), self.deviations(variance.sqrt())
        v = variance * self.columns.scale.square()
        level = (self.columns.inverse(mean) + 0.5 * v).exp()
        return self._array(level), self._array(level * v.expm1().sqrt())

    def joint_moments(
        self, mean: Float[Tensor, "N P"], covariance: Float[Tensor, "N N P"]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return mean and covariance of y; if log y is Gaussian, E yᵢ E yⱼ (exp Cᵢⱼ − 1)."""
        if not self.log:
            return self.values(mean), self.variances(covariance)
        C = covariance * self.columns.scale.square()
        level = (self.columns.inverse(mean) + 0.5 * C.diagonal().mT).exp()
        return self._array(level), self._array(level[:, None] * level * C.expm1())

    def deviations(self, sd: Float[Tensor, "*S P"]) -> NDArray[np.float64]:
        """Return standard deviations in the units of the targets."""
        return self._array(sd * self.columns.scale)

    def variances(self, variance: Float[Tensor, "*S P"]) -> NDArray[np.float64]:
        """Return variances or covariances in the squared units of the targets."""
        return self._array(variance * self.columns.scale.square())

    def log_densities(
        self, nats: Float[Tensor, "N P"], Y: Float[Tensor, "N P"]
    ) -> NDArray[np.float64]:
        """Return log densities of the targets: log p(y) = log p(z) − log scale, and − log y if
        z is their standardised logarithm.

        Args:
            nats: log densities of the standardised targets.
            Y: standardised targets.
        """
        nats = nats - self.columns.scale.log()
        return self._array(nats - self.columns.inverse(Y) if self.log else nats)

    def noise(self, likelihood: Likelihood) -> NDArray[np.float64]:
        """Return the noise variance of each target or its logarithm, `[P]`; NaN without noise."""
        if isinstance(likelihood, TargetLikelihoods):
            nan = likelihood.offset.new_full((1,), torch.nan)
            noise = [p.noise.flatten() if has_noise(p) else nan for p in likelihood.parts]
            return (torch.cat(noise) * self.columns.scale.square()).detach().numpy()
        if not has_noise(likelihood):
            return np.full(self.P, np.nan)
        return (likelihood.noise * self.columns.scale.square()).detach().numpy()

    def _array(self, values: Tensor) -> NDArray[np.float64]:
        """Drop the last axis, that of the targets, if `fit` received targets `[N]`."""
        return (values[..., 0] if self.single else values).numpy()


def logarithm(
    Y: Float[Tensor, "*shape"], rows: NDArray[np.intp] | None = None
) -> Float[Tensor, "*shape"]:
    """Return log Y, or raise an error that names the first row that is not positive.

    Args:
        rows: index of each target among the user's rows; they are all of them by default.
    """
    wrong = (Y <= 0).nonzero()
    if len(wrong):
        at = tuple(wrong[0].tolist())
        row = at[0] if rows is None else int(rows[at[0]])
        raise InputError(
            f"`log_target` needs positive targets; got {Y[at]:g} in row {row} (counted from 0). "
            "Leave such rows out, add a constant to the target, or fit without the logarithm."
        )
    return Y.log()
