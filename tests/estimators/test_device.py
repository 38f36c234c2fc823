"""Where a fit is computed."""

import numpy as np
import pytest
import torch

from winnowgp import SparseGPRegressor
from winnowgp.data import Dataset
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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("candidates", ["auto", "kmeans", "locations"])
def test_rows_on_a_gpu_are_a_source_too(device: str, candidates: str) -> None:
    rows = Dataset.of(torch.from_numpy(X), torch.from_numpy(y))
    said = X[::4] if candidates == "locations" else candidates
    here, there = (
        SparseGPRegressor(candidates=said, n_candidates=8, device=device, random_state=0).fit(
            rows.to(torch.device(place))
        )
        for place in ("cpu", "cuda")
    )
    assert there.elbo_ == pytest.approx(here.elbo_, rel=1e-3)
