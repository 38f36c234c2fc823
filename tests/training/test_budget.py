"""The budget of a fit, on a clock and a memory that the tests set."""

from math import inf

import pytest
import torch

from winnowgp.training import budget as module
from winnowgp.training.budget import DENSE, WORK, Budget, memory

CPU = torch.device("cpu")


class Clock:
    """A clock that a test advances."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "perf_counter", clock)
    return clock


@pytest.fixture
def plenty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "memory", lambda device: 1e15)


def test_budget_default_is_the_work_of_the_device() -> None:
    for device in (CPU, torch.device("cuda", 0)):
        budget = Budget(device)
        assert budget.work == budget.work_limit == budget.remaining == WORK[device.type]
        assert budget.spent == 0
        assert not budget.expired()


def test_budget_spent_work_is_not_remaining(plenty: None) -> None:
    budget = Budget(CPU, work=100.0)
    assert budget.limit_of(100.0) is None
    assert budget.limit_of(100.1) == "work"
    budget.spend(30.0)
    budget.spend(30.0)
    assert budget.spent == 60
    assert budget.remaining == 40
    assert budget.limit_of(40.0) is None
    assert budget.limit_of(40.1) == "work"
    budget.spend(50.0)
    assert budget.remaining == 0


def test_budget_of_work_ignores_the_clock(clock: Clock) -> None:
    budget = Budget(CPU, work=100.0)
    budget.spend(10.0)
    clock.now += 1e9
    assert budget.remaining == 90
    assert not budget.expired()


def test_budget_of_seconds_estimates_work_from_speed(clock: Clock, plenty: None) -> None:
    budget = Budget(CPU, seconds=10.0)
    assert budget.work == inf
    assert budget.work_limit == WORK["cpu"]
    budget.spend(1e10)
    clock.now += 2.0
    # 1e10 operations in 2 seconds, 8 seconds are left.
    assert budget.remaining == pytest.approx(4e10)
    assert budget.limit_of(3.9e10) is None
    assert budget.limit_of(4.1e10) == "max_fit_seconds"
    clock.now += 1.9
    assert not budget.search_expired
    clock.now += 0.2
    assert budget.search_expired
    assert budget.expired(0.4)
    assert not budget.expired(0.5)
    clock.now += 5.8
    assert not budget.expired()
    clock.now += 0.2
    assert budget.expired()
    assert budget.remaining == 0


def test_budget_with_seconds_and_work_obeys_both(clock: Clock) -> None:
    budget = Budget(CPU, work=5e10, seconds=10.0)
    budget.spend(4e10)
    clock.now += 1.0
    assert budget.remaining == pytest.approx(1e10)


def test_budget_of_few_seconds_affords_few_rows(clock: Clock, plenty: None) -> None:
    whole = Budget(CPU).dense_rows()
    assert Budget(CPU, seconds=120.0).dense_rows() == whole
    assert Budget(CPU, seconds=15.0).dense_rows() == pytest.approx(whole / 2, abs=1)


def test_budget_memory_limits_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    # Ten matrices of 100 by 100 doubles.
    monkeypatch.setattr(module, "memory", lambda device: 10 * 8 * 100**2)
    budget = Budget(CPU, work=1.0)
    assert budget.limit_of(1.0, candidates=100) is None
    assert budget.limit_of(1.0, candidates=101) == "memory"
    # The memory is named first: more time would not help.
    assert budget.limit_of(2.0, candidates=101) == "memory"


def test_budget_dense_rows_take_two_fifths_in_fifty_evaluations(plenty: None) -> None:
    budget = Budget(CPU, work=50 * DENSE * 100.5**3 / 0.4)
    assert budget.dense_rows() == 100
    assert budget.dense_rows(cost=8.0) == 50
    # A share of the whole fit, whatever was spent before.
    budget.spend(0.5 * budget.work_limit)
    assert budget.dense_rows() == 100


def test_budget_dense_rows_fit_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    # Five matrices of 70 by 70 doubles.
    monkeypatch.setattr(module, "memory", lambda device: 5 * 8 * 70.5**2)
    assert Budget(CPU).dense_rows() == 70


def test_budget_dense_rows_shrink_with_the_clock(clock: Clock, plenty: None) -> None:
    budget = Budget(CPU, seconds=10.0)
    clock.now += 5.0
    budget.spend(1e11)
    # 1e11 operations are left at the speed so far.
    assert budget.dense_rows() == Budget(CPU, work=1e11).dense_rows()
    # A long clock does not make the exact evidence take hours.
    assert Budget(CPU, seconds=1e6).dense_rows() == Budget(CPU).dense_rows()


def test_memory_is_half_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = {"SC_PHYS_PAGES": 1000, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(module.os, "sysconf", pages.__getitem__)
    assert memory(CPU) == 0.5 * 4096 * 1000

    def unknown(name: str) -> int:
        raise ValueError(name)

    monkeypatch.setattr(module.os, "sysconf", unknown)
    assert memory(CPU) == 4e9
