"""The fast schedule cut short, for tests that need some fitted model."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest

from winnowgp import training
from winnowgp.data import Dataset
from winnowgp.models.base import Model
from winnowgp.training import FastSchedule
from winnowgp.training import hyperparameters as warm_up


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
