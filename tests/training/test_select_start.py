"""Selection among several starts of a deep GP."""

import math
from importlib import import_module

import pytest
import torch

from helpers.deep_problems import started, step_data
from winnowgp.errors import NotPositiveDefiniteError
from winnowgp.models import DeepGP
from winnowgp.training import Progress
from winnowgp.training.layer_training import select_start


def raced(starts: list[DeepGP], callback=()) -> DeepGP:
    return select_start(
        starts,
        step_data(),
        layerwise=2,
        steps=5,
        batch_size=None,
        generator=torch.Generator().manual_seed(0),
        callbacks=callback,
    )


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_select_start_returns_better_start_unchanged(order: tuple[int, int]) -> None:
    good, poor = started(K=8), started(K=1)
    before = {name: p.clone() for name, p in good.named_parameters()}
    callback: list[Progress] = []
    assert raced([(good, poor)[number] for number in order], callback.append) is good
    assert all(torch.equal(p, before[name]) for name, p in good.named_parameters())
    # Both were trained: the last layer alone, then all, and as long again.
    assert [p.phase for p in callback] == [
        *(2 * (2 * ["layer 2"] + 5 * ["start"])),
        *(2 * 5 * ["start"]),
    ]


def test_select_start_that_leads_at_first_only_is_not_selected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = import_module("winnowgp.training.layer_training")
    # After the first steps of three starts, and after the further steps of the two best.
    elbos = iter([-3.0, -1.0, -2.0, -0.9, -0.5])
    monkeypatch.setattr(module, "estimate_elbo", lambda *_, **__: next(elbos))
    starts = [started(K=2) for _ in range(3)]
    assert raced(starts) is starts[2]
    assert next(elbos, None) is None


@pytest.mark.parametrize("failure", ["raise", "nan"])
def test_select_start_failed_elbo_is_not_selected(
    failure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = import_module("winnowgp.training.layer_training")
    real, calls = module.estimate_elbo, iter(range(9))

    def bound(*given, **kwargs) -> float:
        if next(calls) > 0:
            return real(*given, **kwargs)
        if failure == "raise":
            raise NotPositiveDefiniteError("too close")
        return math.nan

    monkeypatch.setattr(module, "estimate_elbo", bound)
    broken, other = started(K=8), started(K=1)
    assert raced([broken, other]) is other
