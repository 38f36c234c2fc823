import math
from itertools import pairwise
from typing import Any

import pytest
import torch

from winnowgp.errors import NotPositiveDefiniteError, TrainingError
from winnowgp.training.adam import Adam


def test_adam_quadratic_reaches_maximum_and_reports_steps() -> None:
    x = torch.zeros(2, requires_grad=True)
    values: list[tuple[int, float]] = []
    Adam(300).maximise(
        lambda: -((x - 1) ** 2).sum(),
        [([x], 0.05)],
        scale=1.0,
        on_step=lambda step, value: values.append((step, value)),
    )
    torch.testing.assert_close(x.detach(), torch.ones(2), atol=1e-2, rtol=0)
    assert [step for step, _ in values] == list(range(1, 301))
    assert values[0][1] == pytest.approx(-2.0)


@pytest.mark.parametrize("failure", ["raise", "nan"])
def test_adam_failed_step_is_reverted(failure: str) -> None:
    """The objective cannot be computed beyond x = 0.5; the optimisation stops before it."""
    x = torch.zeros((), requires_grad=True)

    def objective() -> torch.Tensor:
        if x > 0.5:
            if failure == "raise":
                raise NotPositiveDefiniteError("beyond")
            return x * float("nan")
        return x * 1.0

    Adam(60).maximise(objective, [([x], 0.2)], scale=1.0, on_step=lambda *_: None)
    assert 0.3 < x.item() < 0.6
    assert torch.isfinite(x)


def test_adam_objective_that_always_fails_raises() -> None:
    x = torch.zeros((), requires_grad=True)
    with pytest.raises(TrainingError, match="standardise"):
        Adam(5).maximise(lambda: x * float("nan"), [([x], 0.1)], scale=1.0, on_step=lambda *_: None)


def strides(steps: int, **options: Any) -> list[float]:
    """Return the length of each step on a slope of one, which is the learning rate."""
    x = torch.zeros((), dtype=torch.float64, requires_grad=True)
    places: list[float] = []
    Adam(steps, **options).maximise(
        lambda: 1.0 * x, [([x], 0.1)], scale=1.0, on_step=lambda *_: places.append(x.item())
    )
    places.append(x.item())
    return [after - before for before, after in pairwise(places)]


def test_adam_cooling_decreases_rate_over_last_third() -> None:
    found = strides(300, cooling=0.01)
    # Steps are counted from zero: 0.1 · 0.01^max(0, 3 step / 300 − 2).
    expected = [0.1 * 0.01 ** max(0.0, (step - 200) / 100) for step in range(300)]
    assert found == pytest.approx(expected, rel=1e-5)
    assert found[-1] == pytest.approx(0.001, rel=0.05)


def test_adam_without_cooling_keeps_rate() -> None:
    assert strides(30) == pytest.approx([0.1] * 30, rel=1e-5)
    assert strides(30, cooling=1.0) == strides(30)
    assert strides(1, cooling=0.01) == pytest.approx([0.1], rel=1e-5)


def test_adam_halved_rate_recovers_after_good_steps() -> None:
    """One step fails; the rates are half of the schedule's, and the schedule's 25 steps later."""
    x = torch.zeros((), dtype=torch.float64, requires_grad=True)
    places: list[float] = []
    calls = iter(range(1000))

    def objective() -> torch.Tensor:
        return x * float("nan") if next(calls) == 150 else 1.0 * x

    Adam(300, cooling=0.01).maximise(
        objective, [([x], 0.1)], scale=1.0, on_step=lambda *_: places.append(x.item())
    )
    lengths = [after - before for before, after in pairwise(places)]
    # The step before the failure is undone; the rate falls over the last hundred steps.
    assert lengths[148] == pytest.approx(0.1, rel=1e-3)
    assert lengths[150:174] == pytest.approx([0.5 * 0.1] * 24, rel=1e-3)
    assert lengths[175:199] == pytest.approx([0.1] * 24, rel=1e-3)
    assert lengths[-1] == pytest.approx(0.1 * 0.01 ** (98 / 100), rel=1e-3)


def test_adam_warm_up_increases_the_rate_linearly() -> None:
    x = torch.zeros((), dtype=torch.float64, requires_grad=True)
    places: list[float] = []
    Adam(8, warm_up=4).maximise(
        lambda: 1.0 * x, [([x], 0.1)], scale=1.0, on_step=lambda *_: places.append(x.item())
    )
    lengths = [after - before for before, after in pairwise(places)]
    expected = [0.02, 0.04, 0.06, 0.08, 0.1, 0.1, 0.1]
    assert lengths == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(("longest", "least", "most"), [(2.0, 0.05, 0.2), (math.inf, 0.0, 0.01)])
def test_adam_outlying_gradient_is_clipped(longest: float, least: float, most: float) -> None:
    """Without clipping, one spike dominates Adam's moments, and later steps vanish."""
    x = torch.zeros((), dtype=torch.float64, requires_grad=True)
    places: list[float] = []
    calls = iter(range(1000))

    def objective() -> torch.Tensor:
        return (1e6 if next(calls) == 50 else 1.0) * x

    Adam(100, max_norm_ratio=longest).maximise(
        objective, [([x], 0.1)], scale=1.0, on_step=lambda *_: places.append(x.item())
    )
    assert least < places[-1] - places[-2] < most


@pytest.mark.parametrize(("deepest", "least", "most"), [(1.0, 0.3, 0.6), (math.inf, 5.0, 20.0)])
def test_adam_divergence_rolls_back_with_smaller_steps(
    deepest: float, least: float, most: float
) -> None:
    """The gradient always points right, also beyond 0.5, where the objective is far lower."""
    x = torch.zeros((), requires_grad=True)
    other = torch.nn.Parameter(torch.zeros(()))
    values: list[float] = []

    def on_step(step: int, value: float) -> None:
        values.append(x.item())
        with torch.no_grad():
            other.copy_(x)

    Adam(200, rollback_threshold=deepest).maximise(
        lambda: 3 * (x - 100 * (x > 0.5)),
        [([x], 0.05)],
        scale=3.0,
        on_step=on_step,
        memory={"other": torch.nn.ParameterList([other])},
    )
    assert least < x.item() < most
    # Other state is rolled back as well, and never far from the parameter.
    assert abs(other.item() - x.item()) < 0.11
    # A few steps were spent on divergence.
    assert (len(values) < 200) == (deepest < math.inf)


@pytest.mark.parametrize("steps", [12, 13, 14])
def test_adam_divergence_at_the_end_rolls_back(steps: int) -> None:
    """The eleventh step passes the edge; one, two or three evaluations follow."""
    x = torch.zeros((), dtype=torch.float64, requires_grad=True)
    Adam(steps, rollback_threshold=1.0).maximise(
        lambda: x - 100 * (x > 0.52), [([x], 0.05)], scale=1.0, on_step=lambda *_: None
    )
    assert x.item() == pytest.approx(0.5)


def test_adam_low_last_value_by_chance_keeps_parameters() -> None:
    x = torch.zeros((), dtype=torch.float64, requires_grad=True)
    calls = iter(range(1, 1000))
    Adam(12, rollback_threshold=1.0).maximise(
        lambda: x - 100 * (next(calls) == 12), [([x], 0.05)], scale=1.0, on_step=lambda *_: None
    )
    assert x.item() == pytest.approx(0.6)
    # The objective was evaluated once more.
    assert next(calls) == 14


@pytest.mark.parametrize(("edge", "least", "most"), [(math.inf, 7.0, 10.0), (4.0, 3.9, 4.01)])
def test_adam_rollback_distinguishes_noise_from_divergence(
    edge: float, least: float, most: float
) -> None:
    """The noise is as large as the threshold; beyond the edge the objective is far lower."""
    values: list[float] = []
    x = torch.zeros((), dtype=torch.float64, requires_grad=True)
    noise = torch.Generator().manual_seed(1)

    def objective() -> torch.Tensor:
        chance = torch.randn((), generator=noise)
        return -((x - 10) ** 2) / 20 - 100 * (x > edge) + chance

    Adam(2000, rollback_threshold=1.0).maximise(
        objective, [([x], 0.01)], scale=1.0, on_step=lambda _, value: values.append(value)
    )
    assert least < x.item() < most
    # Repeated divergence does not raise the estimate of the noise.
    assert sum(value < -50 for value in values[-100:]) < 50
