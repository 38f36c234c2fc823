"""Layers whose minibatches several processes share."""

import sys
from typing import Any

import numpy as np
import pytest

from shared_steps import in_processes

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="processes are forked")


@pytest.fixture(scope="module")
def layers(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Any]]:
    return in_processes("deep_layers", tmp_path_factory.mktemp("layers"), 1, 2)["deep_layers"]


@pytest.mark.parametrize("name", ["paper", "fast", "classes", "all rows"])
def test_layers_of_two_processes_take_the_steps_of_one(
    layers: dict[int, list[Any]], name: str
) -> None:
    (alone,) = layers[1]
    first, second = layers[2]
    assert first[name] == second[name]
    assert first[name]["sizes"] == alone[name]["sizes"]
    assert len(alone[name]["values"]) > 8
    for finding in ("values", "bound", "state"):
        np.testing.assert_allclose(first[name][finding], alone[name][finding], rtol=1e-8, atol=1e-8)
