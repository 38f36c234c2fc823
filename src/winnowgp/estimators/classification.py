"""Classification: class labels, and the sparse GP classifier."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, Self, final

import numpy as np
import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import BernoulliLikelihood, Likelihood, SoftmaxLikelihood
from numpy.typing import NDArray
from sklearn.base import ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import column_or_1d, validate_data
from torch import Tensor

from winnowgp.data import Dataset, Source
from winnowgp.errors import InputError
from winnowgp.estimators import validation
from winnowgp.estimators.base import BaseGP, documented
from winnowgp.estimators.rows import (
    check_source_columns,
    columns_kept_after_errors,
    dates_as_days,
    explained_inputs,
    rows_in_memory,
    set_source_columns,
    tensor,
    weighted_rows,
)
from winnowgp.estimators.selection import refuse_stream
from winnowgp.estimators.streaming import StreamingEstimator, batches_of
from winnowgp.models import VariationalGP


@final
@dataclass(frozen=True, slots=True)
class ClassLabels:
    """The classes of the training targets, in the order of their numbers 0 to C − 1."""

    classes: NDArray[Any]

    @classmethod
    def of(cls, y: NDArray[Any]) -> tuple["ClassLabels", NDArray[np.intp]]:
        """Return the classes of some labels, and the class number of each label."""
        _check_one_type(y)
        check_classification_targets(y)
        classes, numbers = np.unique(y, return_inverse=True)
        if len(classes) < 2:
            raise InputError(
                f"`y` must have at least two classes; got one class only, {classes.tolist()[0]!r}."
            )
        return cls(classes), numbers

    def likelihood(self) -> Likelihood:
        """Return a probit likelihood for two classes, a softmax likelihood for more."""
        C = len(self.classes)
        if C == 2:
            return BernoulliLikelihood()
        return SoftmaxLikelihood(num_classes=C, mixing_weights=False)

    def probabilities(self, mean: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the probability of each class, `[N C]`, from the likelihood's predictive mean."""
        if len(self.classes) == 2:
            return np.hstack([1 - mean, mean])
        return mean / mean.sum(1, keepdims=True)

    def known(self, y: NDArray[Any]) -> NDArray[np.intp]:
        """Return the class number of each label; raise an error if one is unknown."""
        _check_one_type(y)
        numbers, known = self.numbers(y, len(y))
        if not known.all():
            raise InputError(
                f"`y` must have labels of the first batch, {self.classes.tolist()[:10]}; got "
                f"{np.unique(y[~known]).tolist()[:10]}. Pass all labels as `classes` to the first "
                "call of `partial_fit`, or fit again."
            )
        return numbers

    def numbers(self, y: Any, N: int) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
        """Return the class number of each of N labels, 0 if unknown, and whether it is known."""
        labels = column_or_1d(y)
        if labels.shape != (N,):
            raise InputError(
                f"`y` must have one label per row, {N}; got shape {list(labels.shape)}."
            )
        known = np.isin(labels, self.classes)
        return np.searchsorted(self.classes, np.where(known, labels, self.classes[0])), known


@dataclass(kw_only=True, eq=False, repr=False)
class ClassTargets(ClassifierMixin, BaseGP):
    """The base class of classifiers: `fit`, `predict` and `log_density`.

    Args:
        class_weight: weights of the classes: a dictionary from labels to positive numbers, 1 for
            labels that it does not have; "balanced" for weights that give all classes the same sum;
            or None. The log-likelihood of a row is multiplied by the weight of its class, and by
            its `sample_weight`. Probabilities are then those of a population with such shares.

    Attributes:
        classes_: the labels, in the order of the columns of `predict_proba`.
    """

    class_weight: Mapping[Any, float] | str | None = None

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> Self:
        """Learn the hyper-parameters, and select inducing points.

        Args:
            X: inputs `[N D]`; or inputs and class numbers together as a `winnowgp.data.Source` in
                memory. Processes that `torchrun` started share the minibatches of
                `winnowgp.data.shard(Dataset.of(X, y))`.
            y: labels `[N]`: strings, integers or Booleans; left out with a source.
            sample_weight: weights `[N]`, 1 for each row by default. The log-likelihood of a row is
                multiplied by its weight: a row of weight 2 counts as two rows, and a row of weight
                0 is left out.
        """
        return self._fit_labels(self._validate(), None, X, y, sample_weight)

    def _fit_labels(
        self,
        params: validation.Parameters,
        labels: ClassLabels | None,
        X: Any,
        y: Any,
        sample_weight: Any,
    ) -> Self:
        """Fit rows whose labels are given, or those that occur, with validated parameters."""
        with columns_kept_after_errors(self):
            if isinstance(X, Source):
                set_source_columns(self, X, y, sample_weight)
                self._check_columns(params, X.D)
                labels, data = _rows_of_source(X, labels)
            else:
                labels, data = self._rows_of_arrays(X, y, sample_weight, labels=labels, reset=True)
                self._check_columns(params, data.D)
            if len(data.Y.unique()) < 2:
                raise InputError(
                    "the first batch must have at least two classes: one class alone is explained "
                    "by a constant, which does not remember where its rows were. Join it with the "
                    "next one."
                )
            weighted = _class_weighted(data, labels, params.class_weight)
            rows = X.with_rows(weighted) if isinstance(X, Source) else weighted
            params.likelihood = labels.likelihood()
            self._check_targets(params, rows)
        self._fit(rows, params)
        self._labels, self.classes_ = labels, labels.classes
        self._warn_of_limits()
        return self

    @abstractmethod
    def predict_proba(self, X: Any) -> NDArray[np.float64]:
        """Return the probability of each class, `[N C]`, averaged over the latent functions."""

    def predict_log_proba(self, X: Any) -> NDArray[np.float64]:
        """Return the log probability of each class, `[N C]`, in nats.

        For two classes it is accurate where `predict_proba` rounds to 0 or 1.
        """
        inputs = self._inputs(X)
        if len(self.classes_) > 2:
            with np.errstate(divide="ignore"):
                return np.log(self.predict_proba(X))
        targets = torch.zeros(len(inputs), 1, dtype=torch.float64)
        nats = [self._log_density(inputs, targets + number) for number in range(2)]
        return torch.cat(nats, 1).numpy()

    def predict(self, X: Any) -> NDArray[Any]:
        """Return the most probable class of each row."""
        probability = self.predict_proba(X)
        return self.classes_[probability.argmax(1)]

    def log_density(self, X: Any, y: Any) -> NDArray[np.float64]:
        """Return the log probability of each label, in nats; −∞ for an unknown label."""
        inputs = self._inputs(X)
        numbers, known = self._labels.numbers(y, len(inputs))
        nats = self._log_density(inputs, tensor(numbers)[:, None])[:, 0]
        return torch.where(torch.from_numpy(known), nats, -torch.inf).numpy()

    def _rows_of_arrays(
        self,
        X: Any,
        y: Any,
        sample_weight: Any,
        *,
        labels: ClassLabels | None,
        reset: bool = False,
    ) -> tuple[ClassLabels, Dataset]:
        """Return the classes, and merged rows whose targets are class numbers.

        Args:
            labels: the classes, if they are known.
            reset: whether the rows set the columns of the estimator, or must have them.
        """
        _check_missing(y)
        X = dates_as_days(X)
        with explained_inputs(X):
            X, y = validate_data(self, X, y, dtype=np.float64, ensure_min_samples=1, reset=reset)
        X, y, weights = weighted_rows(X, y, sample_weight)
        labels, numbers = ClassLabels.of(y) if labels is None else (labels, labels.known(y))
        return labels, Dataset.of(tensor(X), tensor(numbers), weights=weights).merged()


def _numbered(labels: ClassLabels, rows: Dataset) -> Dataset:
    """Return rows of a source whose targets are class numbers."""
    numbers = tensor(labels.known(_integer_labels(rows)))
    return Dataset.of(rows.X, numbers, weights=rows.weights)


def _rows_of_source(source: Source, labels: ClassLabels | None) -> tuple[ClassLabels, Dataset]:
    data = rows_in_memory(source, "classification")
    if labels is not None:
        return labels, _numbered(labels, data).merged()
    labels, numbers = ClassLabels.of(_integer_labels(data))
    return labels, Dataset.of(data.X, tensor(numbers), weights=data.weights).merged()


def _class_weighted(
    data: Dataset, labels: ClassLabels, class_weight: Mapping[Any, float] | str | None
) -> Dataset:
    """Return merged rows whose weights are multiplied by those of their classes."""
    if class_weight is None:
        return data
    numbers = data.Y[:, 0].long()
    own = data.counts
    if isinstance(class_weight, str):
        totals = torch.bincount(numbers, own, minlength=len(labels.classes))
        weights = own.sum() / (len(labels.classes) * totals)
    else:
        classes = labels.classes.tolist()
        unknown = [label for label in class_weight if label not in classes]
        if unknown:
            raise InputError(
                f"`class_weight` must have labels of `y`, {classes[:10]}; got {unknown[:10]}."
            )
        weights = data.X.new_tensor([class_weight.get(label, 1.0) for label in classes])
    return replace(data, weights=own * weights[numbers])


def _integer_labels(rows: Dataset) -> NDArray[np.int64]:
    labels = rows.Y.numpy()
    if rows.P != 1:
        raise InputError(f"`X` must have one target column of classes; got {rows.P}.")
    if rows.has_noise:
        raise InputError(
            "`X`, a source, has noise variances, which classes do not have; leave its noise out."
        )
    # Above 2**53 two integers can be the same float64.
    wrong = labels[(labels != labels.round()) | (np.abs(labels) >= 2**53)]
    if len(wrong):
        raise InputError(
            "`X`, a source, must have integers below 2**53 as classes; got "
            f"{wrong[0]:g}. Number the classes with `np.unique(y, return_inverse=True)`."
        )
    return labels[:, 0].astype(np.int64)


def _check_missing(y: Any) -> None:
    """Reject missing labels: None and NA have no order, and sorting would raise a TypeError."""
    labels = np.asarray(y)
    if y is not None and labels.dtype == object:
        missing = sum(v is None or type(v).__name__ in ("NAType", "NaTType") for v in labels.flat)
        if missing:
            raise InputError(f"`y` must not have missing labels; got {missing}. Drop those rows.")


def _check_one_type(y: NDArray[Any]) -> None:
    """Reject strings together with numbers: they have no order, and classes are sorted."""
    if y.dtype != object:
        return
    strings = [isinstance(v, str) for v in y.flat]
    if any(strings) and not all(strings):
        string, other = y.flat[strings.index(True)], y.flat[strings.index(False)]
        raise InputError(
            f"`y` must have labels of one type; got {type(string).__name__} and "
            f"{type(other).__name__}, such as {string!r} and {other!r}. Convert all to strings."
        )


@final
@documented
@dataclass(kw_only=True, eq=False, repr=False)
class SparseGPClassifier(StreamingEstimator, ClassTargets):
    """Sparse Gaussian process classification that selects the number of its inducing points.

    Two classes have one latent function and a probit likelihood; more classes have one latent
    function each and a softmax likelihood. All share the kernel and the inducing points. Inputs are
    standardised internally.

    The number of inducing points is set by `tolerance` (the default), by `max_points` or
    `max_predict_us`, by a tolerance and one of these limits together, or by a number for `alpha`.

    >>> X = np.linspace(0, 6, 30)[:, None]
    >>> y = np.where(np.sin(X[:, 0]) > 0, "up", "low")
    >>> model = SparseGPClassifier("rbf", random_state=0).fit(X, y)
    >>> model.predict([[1.5], [4.5]])
    array(['up', 'low'], dtype='<U3')
    """

    def partial_fit(
        self, X: Any, y: Any = None, classes: Any = None, sample_weight: Any = None
    ) -> Self:
        """Learn from one more batch of rows; those of earlier batches need not be passed again.

        The first call is `fit`, which fixes the kernel, the classes and the scaling of inputs; the
        estimator may also have been fitted or loaded. Later calls update the hyper-parameters, add
        rows of the batch to the inducing points, and drop those that are no longer needed, so that
        the ELBO gap of all selections together is at most `tolerance` nats per observation. The
        likelihood of earlier rows is remembered as a Gaussian function of the latent functions.
        After an error the estimator is as it was.

        Args:
            X: inputs `[N D]`; or inputs and class numbers together as a `winnowgp.data.Source`,
                which is read in batches of 4,096 rows.
            y: labels `[N]`; left out with a source.
            classes: all labels that may occur, for the first call; by default those of its `y`.
            sample_weight: weights `[N]`, as in `fit`.
        """
        refuse_stream(self.posterior)
        if isinstance(self.class_weight, str):
            raise InputError(
                "`class_weight='balanced'` needs all rows at once; pass `partial_fit` a dictionary "
                "from labels to weights, or weights of rows."
            )
        params = self._validate_stream()
        if not hasattr(self, "posterior_"):
            labels = None if classes is None else ClassLabels.of(np.asarray(classes))[0]
            first = copy(self)._fit_labels(params, labels, X, y, sample_weight)
            first._keep_first(first._stream_rows(X, y, sample_weight)[0])
            vars(self).update(vars(first))
            return self
        if classes is not None and not np.array_equal(np.unique(classes), self.classes_):
            raise InputError(
                f"`classes` must be those of the first batch, {self.classes_.tolist()[:10]}; got "
                f"{np.asarray(classes).tolist()[:10]}. Leave it out."
            )
        self._check_columns(params, self.n_features_in_)
        params.likelihood = self._labels.likelihood()
        rows, source = self._stream_rows(X, y, sample_weight)
        return self._update(rows, params, source=source)

    def _stream_rows(self, X: Any, y: Any, sample_weight: Any) -> tuple[Iterator[Dataset], Source]:
        """Return standardised batches of weighted rows, and the rows in the user's units."""
        if isinstance(X, Source):
            check_source_columns(self, X, y, sample_weight)
            source: Source = X
            rows = (_numbered(self._labels, part) for part in batches_of(X))
        else:
            source = self._rows_of_arrays(X, y, sample_weight, labels=self._labels)[1]
            rows = batches_of(source)
        weighted = (_class_weighted(part, self._labels, self.class_weight) for part in rows)
        return (replace(part, X=self._x_scaler.forward(part.X)) for part in weighted), source

    def _mean_log_density(self, data: Dataset) -> float:
        nats = data.weighted(self._log_density(data.X, data.Y))
        return nats.sum().item() / data.observations

    def predict_proba(self, X: Any) -> NDArray[np.float64]:
        """Return the probability of each class, `[N C]`, averaged over the latent functions."""
        inputs = self._inputs(X)
        mean = self._predict_latent(inputs, self.posterior_.predict, observed=True).mean
        return self._labels.probabilities(mean.numpy())

    def _model(
        self, kernel: Kernel, candidates: Tensor, data: Source, params: validation.Parameters
    ) -> VariationalGP:
        del data
        likelihood, mean = params.likelihood, params.prior_mean
        model = VariationalGP(kernel, candidates, mean=mean, likelihood=likelihood)
        return model.to(params.device)
