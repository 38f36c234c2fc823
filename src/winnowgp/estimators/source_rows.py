"""Inputs and targets that come together, as a source."""

from typing import Any

import numpy as np
import torch

from winnowgp.data import Dataset, Source
from winnowgp.errors import InputError


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
    held = source.in_memory(user).to(torch.device("cpu"))
    weights = None if held.weights is None else held.weights.double()
    return Dataset(held.X.double(), held.Y.double(), weights)
