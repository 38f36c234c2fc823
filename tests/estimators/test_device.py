"""Where a fit is computed."""

import numpy as np
import pytest
import torch

from winnowgp import SparseGPRegressor
from winnowgp.errors import InputError

X = np.linspace(0, 6, 30)[:, None]
y = np.sin(X[:, 0])


def test_auto_is_the_device_this_machine_has() -> None:
    best = "cuda" if torch.cuda.is_available() else "cpu"
    bounds = [
        SparseGPRegressor(device=device, random_state=0).fit(X, y).elbo_
        for device in ("auto", best)
    ]
    assert bounds[0] == pytest.approx(bounds[1], rel=1e-9)


@pytest.mark.parametrize("device", ["abacus", "cuda:97", ""])
def test_a_device_that_is_not_there_is_named(device: str) -> None:
    with pytest.raises(InputError, match=f"`device` must be one this machine has.*'{device}'"):
        SparseGPRegressor(device=device).fit(X, y)
