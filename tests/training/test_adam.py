import math
from itertools import pairwise

import pytest
import torch

from winnowgp.errors import NotPositiveDefiniteError, TrainingError
from winnowgp.training.adam import Adam


def test_it_climbs_and_reports_each_step() -> None:
    x = torch.zeros(2, requires_grad=True)
    told: list[tuple[int, float]] = []
    Adam(300).maximise(
        lambda: -((x - 1) ** 2).sum(),
        [([x], 0.05)],
        scale=1.0,
        on_step=lambda step, value: told.append((step, value)),
    )
    torch.testing.assert_close(x.detach(), torch.ones(2), atol=1e-2, rtol=0)
    assert [step for step, _ in told] == list(range(1, 301))
    assert told[0][1] == pytest.approx(-2.0)


@pytest.mark.parametrize("failure", ["raise", "nan"])
def test_a_step_that_fails_is_taken_back(failure: str) -> None:
    """Beyond x = 0.5 the objective cannot be computed; the climb stops short of it, unharmed."""
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


def test_an_objective_that_never_works_is_an_error_and_not_a_loop() -> None:
    x = torch.zeros((), requires_grad=True)
    with pytest.raises(TrainingError, match="standardise"):
        Adam(5).maximise(lambda: x * float("nan"), [([x], 0.1)], scale=1.0, on_step=lambda *_: None)


def strides(steps: int, **options: float) -> list[float]:
    """How far each step goes up a slope of one: as far as the learning rate says."""
    x = torch.zeros((), dtype=torch.float64, requires_grad=True)
    places: list[float] = []
    Adam(steps, **options).maximise(
        lambda: 1.0 * x, [([x], 0.1)], scale=1.0, on_step=lambda *_: places.append(x.item())
    )
    places.append(x.item())
    return [after - before for before, after in pairwise(places)]


def test_cooling_lets_the_learning_rate_fall_over_the_last_third() -> None:
    found = strides(300, cooling=0.01)
    # Steps are counted from zero: 0.1 · 0.01^max(0, 3 step / 300 − 2).
    expected = [0.1 * 0.01 ** max(0.0, (step - 200) / 100) for step in range(300)]
    assert found == pytest.approx(expected, rel=1e-5)
    assert found[-1] == pytest.approx(0.001, rel=0.05)


def test_without_cooling_the_learning_rate_stays() -> None:
    assert strides(30) == pytest.approx([0.1] * 30, rel=1e-5)
    assert strides(30, cooling=1.0) == strides(30)
    assert strides(1, cooling=0.01) == pytest.approx([0.1], rel=1e-5)


def test_cooling_goes_on_from_a_rate_that_was_halved() -> None:
    """One step fails; afterwards the rates are half of what the schedule says."""
    x = torch.zeros((), dtype=torch.float64, requires_grad=True)
    places: list[float] = []
    calls = iter(range(1000))

    def objective() -> torch.Tensor:
        return x * float("nan") if next(calls) == 150 else 1.0 * x

    Adam(300, cooling=0.01).maximise(
        objective, [([x], 0.1)], scale=1.0, on_step=lambda *_: places.append(x.item())
    )
    assert places[-1] - places[-2] == pytest.approx(0.5 * 0.1 * 0.01 ** (98 / 100), rel=1e-3)


@pytest.mark.parametrize(("longest", "least", "most"), [(2.0, 0.05, 0.2), (math.inf, 0.0, 0.01)])
def test_a_gradient_out_of_all_proportion_is_shortened(
    longest: float, least: float, most: float
) -> None:
    """Unshortened, one spike fills Adam's memory, and the steps after it go nowhere."""
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
def test_a_fall_is_undone_with_shorter_steps(deepest: float, least: float, most: float) -> None:
    """Uphill is always to the right, also beyond the edge at 0.5, where everything is far lower."""
    x = torch.zeros((), requires_grad=True)
    other = torch.nn.Parameter(torch.zeros(()))
    told: list[float] = []

    def on_step(step: int, value: float) -> None:
        told.append(x.item())
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
    # What is kept besides goes back too: never far from the parameter.
    assert abs(other.item() - x.item()) < 0.11
    # A few steps were spent on falls.
    assert (len(told) < 200) == (deepest < math.inf)


@pytest.mark.parametrize("steps", [12, 13, 14])
def test_a_phase_that_ends_in_a_fall_ends_where_it_was_before(steps: int) -> None:
    """The edge is passed by the eleventh step, and seen by one, two or three."""
    x = torch.zeros((), dtype=torch.float64, requires_grad=True)
    Adam(steps, rollback_threshold=1.0).maximise(
        lambda: x - 100 * (x > 0.52), [([x], 0.05)], scale=1.0, on_step=lambda *_: None
    )
    assert x.item() == pytest.approx(0.5)


def test_a_phase_whose_last_step_looked_low_by_chance_keeps_what_it_reached() -> None:
    x = torch.zeros((), dtype=torch.float64, requires_grad=True)
    calls = iter(range(1, 1000))
    Adam(12, rollback_threshold=1.0).maximise(
        lambda: x - 100 * (next(calls) == 12), [([x], 0.05)], scale=1.0, on_step=lambda *_: None
    )
    assert x.item() == pytest.approx(0.6)
    # It was looked at once more.
    assert next(calls) == 14


@pytest.mark.parametrize(("edge", "least", "most"), [(math.inf, 7.0, 10.0), (4.0, 3.9, 4.01)])
def test_noise_is_not_taken_for_a_fall_nor_hides_one(
    edge: float, least: float, most: float
) -> None:
    """Noise as large as the limit; beyond the edge everything is far lower."""
    told: list[float] = []
    x = torch.zeros((), dtype=torch.float64, requires_grad=True)
    noise = torch.Generator().manual_seed(1)

    def objective() -> torch.Tensor:
        chance = torch.randn((), generator=noise)
        return -((x - 10) ** 2) / 20 - 100 * (x > edge) + chance

    Adam(2000, rollback_threshold=1.0).maximise(
        objective, [([x], 0.01)], scale=1.0, on_step=lambda _, value: told.append(value)
    )
    assert least < x.item() < most
    # However often it falls again, a fall is not what it gets used to.
    assert sum(value < -50 for value in told[-100:]) < 50
