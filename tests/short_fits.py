"""The default schedule cut short, for tests of what is done with a model once there is one."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest

from winnowgp.estimators import points_request
from winnowgp.models import Model
from winnowgp.training import Fast, warm_up


@contextmanager
def short_fits() -> Iterator[None]:
    """In it estimators choose and move once, from the first of the starts that are not given."""
    every = warm_up.starting_points

    def second(model: Model, *words: object) -> list[Model]:
        return every(model, *words)[1:2]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warm_up, "starting_points", second)
        patch.setattr(points_request, "Fast", partial(Fast, rounds=1, inclusion_steps=10))
        yield
