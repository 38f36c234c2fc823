"""The fast schedule cut short, for tests that need some fitted model."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest

from winnowgp import training
from winnowgp.data import Dataset
from winnowgp.models.base import Model
from winnowgp.training import FastSchedule, fast_sparse
from winnowgp.training import hyperparameters as warm_up
from winnowgp.training.fast_steps import FastSteps


@contextmanager
def short_fits(*, starts: int = 1, rounds: int = 1) -> Iterator[None]:
    """In it estimators begin from the model as given and from so few starts, the first of those
    that the data suggest, and choose and move so few times."""
    every = warm_up.starting_points

    def few(model: Model, data: Dataset) -> list[Model]:
        return every(model, data)[: 1 + starts]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warm_up, "starting_points", few)
        patch.setattr(
            training, "FastSchedule", partial(FastSchedule, rounds=rounds, inclusion_steps=10)
        )
        yield


@contextmanager
def shortest_fits() -> Iterator[None]:
    """In it, in addition, estimators do not compare starts, and keep no smaller models."""
    with short_fits(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(FastSteps, "successive_halving", lambda _, starts, **_settings: starts[0])
        patch.setattr(fast_sparse, "_sized_models", lambda *_: ((), []))
        yield
