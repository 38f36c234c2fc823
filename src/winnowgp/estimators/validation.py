"""Validation of what users pass to estimators."""

import os
from dataclasses import dataclass
from math import inf
from numbers import Integral, Real
from typing import Any, TypeAlias, TypeGuard, final

import numpy as np
import torch
from gpytorch.constraints import GreaterThan
from gpytorch.likelihoods import (
    BernoulliLikelihood,
    GaussianLikelihood,
    LaplaceLikelihood,
    Likelihood,
    PoissonLikelihood,
    SoftmaxLikelihood,
    StudentTLikelihood,
)
from jaxtyping import Bool, Float
from numpy.typing import NDArray
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import column_or_1d, validate_data
from torch import Tensor

from winnowgp.data import Dataset, MaskedMatrix, Source, Standardiser
from winnowgp.data.distributed import SINGLE_PROCESS, ProcessGroup
from winnowgp.errors import InputError
from winnowgp.models.likelihoods import is_plain, observation_model
from winnowgp.models.sgpr import LEAST_NOISE
from winnowgp.training import Checkpoint
from winnowgp.training.callbacks import as_callbacks
from winnowgp.training.checkpoint import CheckpointLog, open_checkpoint
from winnowgp.training.context import warn_not_sharded

# From what users bring to tensors.


def tensor(values: Any) -> Tensor:
    """A copy in float64, whatever the strides of the array were.

    Inputs have been made numbers before; what cannot be is among the targets.
    """
    try:
        numbers = np.ascontiguousarray(values, dtype=np.float64)
    except ValueError as error:
        word = next(str(v) for v in np.ravel(values) if not _is_number(v))
        raise InputError(
            f"`y` must be numbers; got {word!r}. Labels are for a classifier."
        ) from error
    return torch.tensor(numbers)


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except ValueError:
        return False
    return True


# Numbers that users give, checked.


def positive(name: str, value: Any, *, hint: str = "") -> float:
    """A positive, finite number."""
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 < float(value) < inf:
        raise InputError(f"`{name}` must be a positive number; got {value!r}. {hint}".strip())
    return float(value)


def whole(name: str, value: Any) -> int:
    """A whole number of at least one."""
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < 1:
        raise InputError(f"`{name}` must be a whole number of at least 1; got {value!r}.")
    return int(value)


# Likelihoods by name.


LIKELIHOODS = {
    "gaussian": GaussianLikelihood,
    "student-t": StudentTLikelihood,
    "laplace": LaplaceLikelihood,
    "poisson": PoissonLikelihood,
}


def likelihood_from(likelihood: str | Likelihood) -> Likelihood:
    """A likelihood by name, or the one given; whoever keeps it copies it.

    >>> likelihood_from("student-t").deg_free.item()
    7.0
    """
    if isinstance(likelihood, SoftmaxLikelihood):
        raise InputError("`likelihood` is softmax, which is for classes; use a classifier.")
    if isinstance(likelihood, Likelihood):
        return likelihood
    if not isinstance(likelihood, str) or likelihood not in LIKELIHOODS:
        raise InputError(
            f"`likelihood` must be one of {', '.join(LIKELIHOODS)} or a GPyTorch likelihood; "
            f"got {likelihood!r}."
        )
    kind = LIKELIHOODS[likelihood]
    if kind is PoissonLikelihood:
        return kind()
    return kind(noise_constraint=GreaterThan(LEAST_NOISE))


def has_noise(
    likelihood: Likelihood,
) -> TypeGuard[GaussianLikelihood | StudentTLikelihood | LaplaceLikelihood]:
    """Whether targets are the latent function plus noise; they can then be standardised."""
    return is_plain(likelihood, GaussianLikelihood, StudentTLikelihood, LaplaceLikelihood)


# Inputs and targets that come together, as a source.


def note_source(estimator: Any, source: Source, y: Any, sample_weight: Any) -> None:
    """Tell an estimator which columns there are.

    Raises:
        InputError: targets or weights were given a second time.
    """
    if y is not None or sample_weight is not None:
        raise InputError(
            "`X` is a source, which has targets and weights of its own; leave out `y` and "
            "`sample_weight`."
        )
    estimator.n_features_in_ = source.D
    if hasattr(estimator, "feature_names_in_"):
        del estimator.feature_names_in_
    if source.names is not None:
        estimator.feature_names_in_ = np.array(source.names, dtype=object)


def refuse_source(X: Any) -> None:
    """An error for whoever asks for predictions of all rows of a source at once."""
    if isinstance(X, Source):
        raise InputError(
            f"`X` must be inputs [N D]; got a {type(X).__name__}. Predict its rows some at a "
            "time: `for rows in source.chunks(10_000): model.predict(rows.X.numpy())`."
        )


def held_rows(source: Source, user: str) -> Dataset:
    """All rows on the CPU in double precision, for one who needs them at once.

    Args:
        user: who that is, for the error that says so.
    """
    held = source.require_dataset(user).to(torch.device("cpu"))
    weights = None if held.weights is None else held.weights.double()
    return Dataset(held.X.double(), held.Y.double(), weights)


# Sample weights as scikit-learn's users give them: how often each row counts.


def counted_rows(
    X: NDArray[np.float64], y: NDArray[Any], sample_weight: Any
) -> tuple[NDArray[np.float64], NDArray[Any], Tensor | None]:
    """The rows that count at all, and their weights `[N]`; None if all count once.

    A row of weight w counts as w rows, and one of weight zero is left out.

    >>> X, y, weights = counted_rows(np.eye(3), np.arange(3), [2, 0, 1])
    >>> y.tolist(), weights.tolist()
    ([0, 2], [2.0, 1.0])
    """
    if sample_weight is None:
        return X, y, None
    weights = _numbers(sample_weight, len(X))
    counts = weights > 0
    if not counts.any():
        raise InputError(
            "`sample_weight` must be positive for at least one row; all of them are zero."
        )
    return X[counts], y[counts], torch.tensor(weights[counts])


def _numbers(sample_weight: Any, N: int) -> NDArray[np.float64]:
    try:
        weights = np.asarray(sample_weight, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise InputError(f"`sample_weight` must be numbers; {error}.") from error
    if weights.ndim == 0:
        weights = np.full(N, float(weights))
    if weights.shape != (N,):
        raise InputError(
            f"`sample_weight` must be one number a row, [{N}]; got shape {list(weights.shape)}."
        )
    bad = int((~np.isfinite(weights) | (weights < 0)).sum())
    if bad:
        raise InputError(
            f"`sample_weight` must be finite and not negative; {bad} of {N} are not. A row of "
            "weight 2 counts as two rows, one of weight 0 is left out."
        )
    return weights


# Rows with numbers for targets, from arrays.


def numeric_rows(estimator: Any, X: Any, y: Any, sample_weight: Any) -> tuple[Dataset, bool]:
    """Checked rows, merged, and whether targets came as `[N]` rather than `[N P]`."""
    X, y = validate_data(
        estimator, X, y, dtype=np.float64, multi_output=True, y_numeric=True, ensure_min_samples=1
    )
    X, y, weights = counted_rows(X, y, sample_weight)
    return Dataset.of(tensor(X), tensor(y), weights=weights).merged(), np.ndim(y) == 1


# Labels as users write them, and as likelihoods count them.


@final
@dataclass(frozen=True, slots=True)
class ClassLabels:
    """The classes of a training set, in the order of their numbers 0 to C − 1."""

    classes: NDArray[Any]

    @classmethod
    def of(cls, y: NDArray[Any]) -> tuple["ClassLabels", NDArray[np.intp]]:
        """The classes of checked labels, and the number of each row's."""
        _check_comparable(y)
        check_classification_targets(y)
        classes, index = np.unique(y, return_inverse=True)
        if len(classes) < 2:
            raise InputError(
                f"`y` must have at least two classes; got one class only, {classes.tolist()[0]!r}."
            )
        return cls(classes), index

    def likelihood(self) -> Likelihood:
        """One latent function behind a probit for two classes, one each behind a softmax."""
        C = len(self.classes)
        if C == 2:
            return BernoulliLikelihood()
        return SoftmaxLikelihood(num_classes=C, mixing_weights=False)

    def probabilities(self, mean: NDArray[np.float64]) -> NDArray[np.float64]:
        """Of each class, `[N C]`, from the mean observation of the likelihood."""
        if len(self.classes) == 2:
            return np.hstack([1 - mean, mean])
        return mean / mean.sum(1, keepdims=True)

    def numbers(self, y: Any, N: int) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
        """The number of each of N labels, 0 where it was never seen, and whether it was."""
        labels = column_or_1d(y)
        if labels.shape != (N,):
            raise InputError(f"`y` must have one label a row, {N}; got shape {list(labels.shape)}.")
        known = np.isin(labels, self.classes)
        return np.searchsorted(self.classes, np.where(known, labels, self.classes[0])), known


def check_missing(y: Any) -> None:
    """None and pandas' NA cannot be compared, so they would fail where nobody understands why."""
    labels = np.asarray(y)
    if y is not None and labels.dtype == object:
        missing = sum(v is None or type(v).__name__ in ("NAType", "NaTType") for v in labels.flat)
        if missing:
            raise InputError(f"`y` has {missing} missing labels; drop those rows.")


def _check_comparable(y: NDArray[Any]) -> None:
    """Words and numbers have no order, and classes are numbered in theirs."""
    if y.dtype != object:
        return
    words = [isinstance(v, str) for v in y.flat]
    if any(words) and not all(words):
        word, other = y.flat[words.index(True)], y.flat[words.index(False)]
        raise InputError(
            f"`y` must have labels of one type; got {type(word).__name__} and "
            f"{type(other).__name__}, such as {word!r} and {other!r}. Write all of them as text."
        )


# Rows with classes for targets, from arrays or from a source.


def labelled_rows(estimator: Any, X: Any, y: Any, sample_weight: Any) -> tuple[ClassLabels, Source]:
    """The classes, and merged rows whose targets are their numbers; shared as a source was."""
    if isinstance(X, Source):
        note_source(estimator, X, y, sample_weight)
        given = held_rows(X, "classification")
        labels, index = ClassLabels.of(_whole(given))
        return labels, X.with_rows(
            Dataset.of(given.X, tensor(index), weights=given.weights).merged()
        )
    check_missing(y)
    X, y = validate_data(estimator, X, y, dtype=np.float64, ensure_min_samples=1)
    X, y, weights = counted_rows(X, y, sample_weight)
    labels, index = ClassLabels.of(y)
    return labels, Dataset.of(tensor(X), tensor(index), weights=weights).merged()


def _whole(rows: Dataset) -> NDArray[np.int64]:
    """The one target of each row, `[N]`."""
    labels = rows.Y.numpy()
    if rows.P != 1:
        raise InputError(f"a source of classes must have one target; got {rows.P}.")
    # Beyond that two whole numbers can be one float64.
    odd = labels[(labels != labels.round()) | (np.abs(labels) >= 2**53)]
    if len(odd):
        raise InputError(
            f"classes in a source must be whole numbers below 2**53; got {odd[0]:g}. Number them: "
            "`np.unique(y, return_inverse=True)`."
        )
    return labels[:, 0].astype(np.int64)


# Tables of which a map is made, checked.


def checked_table(estimator: Any, X: Any, *, reset: bool) -> Float[Tensor, "N P"]:
    """A table in which entries may be missing.

    Args:
        reset: whether its columns are to be remembered, and there must be two rows; else they must
            be those of before.
    """
    if isinstance(X, Source):
        raise InputError(
            f"`X` must be a table [N P]; got a {type(X).__name__}. A map takes rows that are in "
            "memory, and they are not shared."
        )
    return tensor(
        validate_data(
            estimator,
            X,
            dtype=np.float64,
            ensure_all_finite="allow-nan",
            ensure_min_samples=2 if reset else 1,
            reset=reset,
        )
    )


def varying_columns(raw: MaskedMatrix) -> Bool[Tensor, " P"]:
    """Which columns of a table take more than one value.

    Raises:
        InputError: some column has no entry at all, or none varies.
    """
    never = torch.nonzero(~raw.observed.any(0))[:, 0].tolist()
    if never:
        raise InputError(
            f"every column of `X` must have an entry that is observed; columns {never[:10]} have "
            "none. Leave them out."
        )
    low = torch.where(raw.observed, raw.Y, torch.inf).amin(0)
    high = torch.where(raw.observed, raw.Y, -torch.inf).amax(0)
    if not bool((low < high).any()):
        raise InputError("some column of `X` must vary; all of them are constant.")
    return low < high


# Targets as users have them, and as models see them.


@final
@dataclass(frozen=True, slots=True)
class TargetScaler:
    """z = (y − shift) / scale, column by column; a single target has no axis of outputs outside.

    Only where targets are the function plus noise: counts and shares stay what they are.

    >>> import torch
    >>> from gpytorch.likelihoods import GaussianLikelihood
    >>> data = Dataset.of(torch.zeros(2, 1).double(), torch.tensor([1.0, 3.0]).double())
    >>> units = TargetScaler.of(data, GaussianLikelihood(), single=True)
    >>> Y = units.columns.forward(data.Y)
    >>> Y.tolist(), units.values(Y).tolist(), units.deviations(Y).tolist()
    ([[-1.0], [1.0]], [1.0, 3.0], [-1.0, 1.0])
    """

    columns: Standardiser
    single: bool
    """Whether `fit` was given `[N]` rather than `[N P]`."""

    @classmethod
    def of(cls, data: Dataset, likelihood: Likelihood, *, single: bool) -> "TargetScaler":
        """The units of checked targets."""
        if not has_noise(likelihood):
            return cls(Standardiser.none(data.Y), single)
        return cls(Standardiser.of(data.Y, weights=data.weights), single)

    @property
    def P(self) -> int:
        """Number of target columns."""
        return len(self.columns.shift)

    def seen(
        self, y: Any, likelihood: Likelihood, *, inputs: Float[Tensor, "N D"]
    ) -> Float[Tensor, "N P"]:
        """Targets to be scored, as the model sees them; an error if they do not fit."""
        Y = Dataset.of(inputs, tensor(y)).Y
        if Y.shape[1] != self.P:
            raise InputError(
                f"`y` must have {self.P} target columns as in `fit`; got {Y.shape[1]}."
            )
        Y = self.columns.forward(Y)
        observation_model(likelihood).check_targets(Y)
        return Y

    def values(self, Y: Float[Tensor, "*S P"]) -> NDArray[np.float64]:
        """Means, quantiles and draws."""
        return self._outside(self.columns.inverse(Y))

    def deviations(self, sd: Float[Tensor, "*S P"]) -> NDArray[np.float64]:
        """Standard deviations."""
        return self._outside(sd * self.columns.scale)

    def variances(self, variance: Float[Tensor, "*S P"]) -> NDArray[np.float64]:
        """Variances and covariances."""
        return self._outside(variance * self.columns.scale.square())

    def log_densities(self, nats: Float[Tensor, "*S P"]) -> NDArray[np.float64]:
        """log p(y) = log p(z) − log scale."""
        return self._outside(nats - self.columns.scale.log())

    def noise(self, likelihood: Likelihood) -> NDArray[np.float64]:
        """Noise variance of each target, `[P]`; NaN where the likelihood has none."""
        if not has_noise(likelihood):
            return np.full(self.P, np.nan)
        return (likelihood.noise * self.columns.scale.square()).detach().numpy()

    def _outside(self, values: Tensor) -> NDArray[np.float64]:
        """Without the output axis, the last one, if there was none in `fit`."""
        return (values[..., 0] if self.single else values).numpy()


# What an estimator needs to be stopped and go on: a folder, and what chance decided.


Folder: TypeAlias = str | os.PathLike[str] | Checkpoint

"""What users may say for a checkpoint."""


def checkpoint_of(folder: Folder | None) -> Checkpoint | None:
    """The checkpoint that a user asked for, if any."""
    if folder is None or isinstance(folder, Checkpoint):
        return folder
    if not isinstance(folder, str | os.PathLike):
        raise InputError(f"`checkpoint` must be a folder or a `Checkpoint`; got {folder!r}.")
    return Checkpoint(folder)


def open_checkpoint_log(
    estimator: BaseEstimator,
    checkpoint: Checkpoint | None,
    *,
    process_group: ProcessGroup = SINGLE_PROCESS,
    **rows: Any,
) -> CheckpointLog:
    """What is drawn or measured once for a fit to these rows, of an estimator with this request.

    Warns where `torchrun` has started several processes, and the rows are not shared among them.

    Raises:
        CheckpointError: the folder belongs to a fit of other rows or another request.
    """
    if process_group.world_size == 1:
        warn_not_sharded(
            ProcessGroup.from_environment(),
            "rows are shared as a source, `fit(shared(source))`, for regression with Gaussian "
            "noise and for minibatches of classes and of layers",
        )
    watching = ("callbacks", "checkpoint")
    asked = {k: v for k, v in estimator.get_params(deep=False).items() if k not in watching}
    kind = type(estimator).__name__
    return open_checkpoint(
        checkpoint,
        callbacks=as_callbacks(estimator.get_params(deep=False)["callbacks"]),
        process_group=process_group,
        **rows,
        estimator=kind,
        **asked,
    )


def drawn_seed(random_state: Any, checkpoint_log: CheckpointLog) -> int:
    """A seed; without a `random_state` the one that the fit began with."""
    seed = int(check_random_state(random_state).randint(2**31))
    return checkpoint_log.once(lambda: seed)
