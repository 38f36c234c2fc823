"""Labels as users write them, and as likelihoods count them."""

from dataclasses import dataclass
from typing import Any, final

import numpy as np
from gpytorch.likelihoods import BernoulliLikelihood, Likelihood, SoftmaxLikelihood
from numpy.typing import NDArray
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import column_or_1d

from winnowgp.errors import InputError


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
