"""Layers whose minibatches several processes share."""

import sys

import numpy as np
import pytest

from helpers import shared_steps as work
from helpers.forks import Forks
from helpers.shared_work import together

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="processes are forked")


@pytest.mark.parametrize("name", ["paper", "fast", "classes", "all rows"])
def test_layers_of_two_processes_take_the_steps_of_one(forks: Forks, name: str) -> None:
    (alone,) = forks.call(together, work.deep_layers, 1)
    first, second = forks.call(together, work.deep_layers, 2)
    assert first[name] == second[name]
    assert first[name]["sizes"] == alone[name]["sizes"]
    assert len(alone[name]["values"]) > 8
    for finding in ("values", "bound", "state"):
        np.testing.assert_allclose(first[name][finding], alone[name][finding], rtol=1e-8, atol=1e-8)
