"""Recorded training steps of deep GPs, on a CPU: what is recorded, without the recording."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.deep_problems import started, step_data
from winnowgp import linalg
from winnowgp.data import Dataset
from winnowgp.models import DeepGP
from winnowgp.training import cuda_graphs, layer_training
from winnowgp.training.adam import Minibatches
from winnowgp.training.cuda_graphs import CapturedPass
from winnowgp.training.layer_training import LayerTraining
from winnowgp.training.schedules import training_context


def parameters(model: DeepGP) -> list[torch.Tensor]:
    last = model.layers[-1]
    natural = {id(last.q_mean), id(last.q_factor)}
    return [p for p in model.parameters() if p.requires_grad and id(p) not in natural]


def weighted(data: Dataset) -> Dataset:
    return Dataset(data.X, data.Y, torch.linspace(0.5, 2, data.N, dtype=torch.float64))


def trained(model: DeepGP, data: Dataset, *, steps: int) -> DeepGP:
    model, generator = deepcopy(model), torch.Generator(data.X.device).manual_seed(3)
    with training_context(None, generator=generator, callbacks=()) as context:
        batches = Minibatches(data, 16, generator)
        LayerTraining(0.03, 2, 0.3).run(model, batches, "all", steps=steps, context=context)
    return model


@pytest.fixture
def unrecorded(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """Functions that would be recorded; they are called instead of a replay."""
    functions: list[Callable[[], None]] = []

    def called(function: Callable[[], None]) -> Callable[[], None]:
        functions.append(function)
        function()
        return function

    monkeypatch.setattr(cuda_graphs, "_captured", called)
    return functions


@pytest.mark.parametrize("widths", [(1,), (2, 1)])
def test_recorded_training_equals_ordinary_training(
    unrecorded: list[Callable[[], None]],
    monkeypatch: pytest.MonkeyPatch,
    widths: tuple[int, ...],
) -> None:
    data = weighted(step_data())
    start = started(data=data, widths=widths)
    ordinary = trained(start, data, steps=30)
    assert not unrecorded

    def forced(model: DeepGP, batches: Minibatches, learnt: Any, *, samples: int) -> CapturedPass:
        before = deepcopy(model.layers[-1].state_dict())
        made = CapturedPass(model, batches, learnt, samples=samples)
        model.layers[-1].load_state_dict(before)
        return made

    monkeypatch.setattr(layer_training, "captured_pass", forced)
    recorded = trained(start, data, steps=30)
    assert len(unrecorded) == 2
    for own, other in zip(recorded.parameters(), ordinary.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-6, atol=1e-8)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("widths", [(1,), (2, 1)])
def test_replayed_training_equals_ordinary_training(
    monkeypatch: pytest.MonkeyPatch, widths: tuple[int, ...]
) -> None:
    data = weighted(step_data()).to(torch.device("cuda"))
    start = started(data=weighted(step_data()), widths=widths).to("cuda")
    made: list[CapturedPass | None] = []

    def captured(*arguments: Any, **options: Any) -> CapturedPass | None:
        made.append(cuda_graphs.captured_pass(*arguments, **options))
        return made[-1]

    monkeypatch.setattr(layer_training, "captured_pass", captured)
    replayed = trained(start, data, steps=30)
    assert [each is not None for each in made] == [True]
    monkeypatch.setattr(layer_training, "captured_pass", lambda *_, **__: None)
    ordinary = trained(start, data, steps=30)
    for own, other in zip(replayed.parameters(), ordinary.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-6, atol=1e-8)
    # The steps change q(u) of the last layer, and the natural-gradient steps do so alone.
    assert not torch.allclose(replayed.layers[-1].q_mean, start.layers[-1].q_mean)


class _Waits(TorchDispatchMode):
    """Collects operations whose result the CPU has to wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if any(word in name for word in ("_local_scalar_dense", "aten.equal", "aten.nonzero")):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


def test_recorded_operations_do_not_wait_for_a_gpu(
    unrecorded: list[Callable[[], None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = step_data()
    model = started(data=data)
    batches = Minibatches(data, 16, torch.Generator().manual_seed(0))
    CapturedPass(model, batches, parameters(model), samples=1)
    with _Waits() as waits:
        unrecorded[0]()
    assert waits.found  # a factorisation reads whether it has failed
    monkeypatch.setattr(linalg, "recording", lambda A: True)
    with _Waits() as waits:
        for function in unrecorded:
            function()
    assert not waits.found


def test_recorded_failure_is_reported_and_changes_nothing(
    unrecorded: list[Callable[[], None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = step_data()
    model = started(data=data)
    batches = Minibatches(data, 16, torch.Generator().manual_seed(0))
    recorded = CapturedPass(model, batches, parameters(model), samples=1)
    rows, eps = batches.next(), model.base_samples(16, 1, torch.Generator().manual_seed(0))
    assert recorded.gradient(rows, eps) is not None
    before = deepcopy(model.state_dict())
    monkeypatch.setattr(linalg, "recording", lambda A: True)
    definite = torch.linalg.cholesky_ex

    def failing(A: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        L, info = definite(A)
        return L, info + 1

    monkeypatch.setattr(torch.linalg, "cholesky_ex", failing)
    assert recorded.gradient(rows, eps) is None
    recorded.step(0.5)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
