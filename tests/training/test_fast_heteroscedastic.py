"""The fast schedule of noise that depends on the inputs."""

from collections.abc import Iterator
from dataclasses import replace
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel

from helpers.short_fits import short_fits, shortest_fits
from winnowgp.data import Dataset
from winnowgp.errors import InputError
from winnowgp.models import SparseGP, VariationalGP
from winnowgp.models.heteroscedastic import HeteroscedasticGP, LogVarianceLikelihood
from winnowgp.point_processes import SquaredCardinality
from winnowgp.training import (
    FastSchedule,
    FitResult,
    FixedAlpha,
    MaxPoints,
    PaperSchedule,
    Tolerance,
    budget,
    fit,
)
from winnowgp.training import fast_heteroscedastic as module
from winnowgp.training.confirmation import excess_kurtosis
from winnowgp.training.fast_heteroscedastic import noise_goal
from winnowgp.training.fast_sparse import SparseTraining, fit_sparse
from winnowgp.training.goals import AllCandidates
from winnowgp.training.schedules import TrainingContext

# Whole fits, whose functions other tests check.
pytestmark = pytest.mark.unchecked


TRAINING = SparseTraining(
    goal=Tolerance(),
    n_candidates=None,
    rounds=1,
    iterations=5,
    gain=1e-3,
    selection_rows=100,
    inclusion_steps=1,
)


def rows(*, varies: bool, N: int = 60) -> Dataset:
    g = torch.Generator().manual_seed(0)
    X = torch.rand(N, 1, generator=g, dtype=torch.float64).sort(0).values
    sd = 0.03 + 0.6 * X[:, 0].square() if varies else torch.full_like(X[:, 0], 0.2)
    return Dataset.of(X, torch.sin(7 * X[:, 0]) + sd * torch.randn(N, generator=g).double())


def untrained(data: Dataset) -> HeteroscedasticGP:
    kernel = ScaleKernel(RBFKernel())
    return HeteroscedasticGP(
        SparseGP(kernel, data.X[::7], noise=0.1),
        VariationalGP(kernel, data.X[::9], likelihood=LogVarianceLikelihood()),
    )


def fitted(data: Dataset, schedule: FastSchedule) -> FitResult[HeteroscedasticGP]:
    with shortest_fits():
        return fit(untrained(data), data, schedule=schedule)


@pytest.fixture(scope="module")
def clock() -> Iterator[list[float]]:
    """A clock of the budgets, which the tests advance."""
    now = [0.0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(budget, "perf_counter", lambda: now[0])
        yield now


@pytest.fixture(scope="module")
def limits() -> list[float | None]:
    """Seconds that each fit of one process is given, in the fit `varying`."""
    return []


@pytest.fixture(scope="module")
def varying(
    clock: list[float], limits: list[float | None]
) -> tuple[FitResult[HeteroscedasticGP], Dataset]:
    def minutes(*given: Any, training: SparseTraining, **settings: Any) -> FitResult[Any]:
        limits.append(training.max_seconds)
        result = fit_sparse(*given, training=replace(training, max_seconds=None), **settings)
        clock[0] += 100.0
        return result

    data = rows(varies=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "fit_sparse", minutes)
        schedule = FastSchedule(rounds=1, inclusion_steps=3, max_seconds=1000.0)
        return fitted(data, schedule), data


def test_fit_varying_noise_selects_points_of_both(varying) -> None:
    result, data = varying
    function, noise = result.model.candidate_sets
    assert 4 <= len(function) <= 12
    assert 1 <= len(noise) <= 6
    assert result.noise_gain > 10
    assert result.elbo == pytest.approx(result.model.fixed_bound(data))
    sd = result.posterior.predict_noise(data.X).mean.sqrt()[:, 0]
    assert sd[-1] > 4 * sd[0]
    assert [s.M for s in result.selections] == [len(function), len(noise)]
    assert [len(c) for c in result.candidates] == [s.K for s in result.selections]
    assert result.evidence is None
    assert result.frontier.elbos[len(function)].item() == pytest.approx(result.elbo, abs=0.5)


def test_fit_varying_noise_is_optimal_in_q(varying) -> None:
    result, data = varying
    better = result.model.with_best_q(data).fixed_bound(data)
    assert better == pytest.approx(result.elbo, abs=1e-3)
    assert result.model.weighted(data).weights.mean().item() == pytest.approx(1)


def test_fit_of_many_rows_begins_with_the_noise_of_a_part_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes, fit_noise = [], module._fit_noise

    def noted(log_noise: VariationalGP, data: Dataset, **settings: Any) -> FitResult[VariationalGP]:
        sizes.append((data.N, data.X[:, 0].unique().numel()))
        return fit_noise(log_noise, data, **settings)

    monkeypatch.setattr(module, "_fit_noise", noted)
    monkeypatch.setattr(module, "_FIRST_ROWS", 50)
    data = rows(varies=True)
    result = fitted(data, FastSchedule(rounds=1, inclusion_steps=3))
    assert data.N > 50
    assert sizes == [(50, 50)]
    # The last steps have all rows.
    assert len(result.model.candidate_sets[1]) >= 1
    assert result.elbo == pytest.approx(result.model.fixed_bound(data))
    sd = result.posterior.predict_noise(data.X).mean.sqrt()[:, 0]
    assert sd[-1] > 4 * sd[0]


def test_fit_constant_noise_keeps_no_noise_points() -> None:
    data = rows(varies=False, N=40)
    result = fitted(data, FastSchedule(rounds=1, inclusion_steps=3))
    function, log_noise = result.model.candidate_sets
    assert len(function) > 2
    assert len(log_noise) == 0
    assert result.noise_gain == 0
    assert [s.M for s in result.selections] == [len(function), 0]
    noise = result.posterior.predict_noise(data.X)
    torch.testing.assert_close(noise.mean, result.model.function.noise.expand_as(noise.mean))
    plain = result.model.function.posterior(data)
    torch.testing.assert_close(
        result.posterior.log_density(data.X, data.Y),
        plain.log_density(data.X, data.Y),
        rtol=1e-4,
        atol=1e-4,
    )


def test_noise_goal_treats_numbers_of_points_as_limits() -> None:
    assert noise_goal(MaxPoints(7)) == Tolerance(limit=MaxPoints(7))
    assert noise_goal(AllCandidates()) == Tolerance()
    assert noise_goal(FixedAlpha(0.1)) == FixedAlpha(0.1)


def test_paper_schedule_varying_noise_is_refused() -> None:
    data = rows(varies=True, N=20)
    model = untrained(data)
    with pytest.raises(InputError, match="noise that depends on the inputs; use `FastSchedule`"):
        fit(model, data, schedule=PaperSchedule(SquaredCardinality(6, 0.1)))


@pytest.mark.usefixtures("varying")
def test_wall_clock_limit_is_divided_among_the_steps(limits: list[float | None]) -> None:
    # A hundred of the seconds that are left have passed after each fit.
    assert limits == [0.4 * 1000, 0.3 * 900, 800]


@pytest.mark.parametrize(("seconds", "rounds"), [(None, 6), (1000.0, 6), (100.0, 2)])
def test_clock_ends_the_alternation(
    seconds: float | None, rounds: int, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An optimisation of g takes a minute here, and every round gains enough."""
    counted, optimise_noise = [], module._Steps.optimise_noise

    def slow(self: module._Steps, model: HeteroscedasticGP) -> HeteroscedasticGP:
        clock[0] += 60.0
        counted.append(1)
        return optimise_noise(self, model)

    monkeypatch.setattr(module, "_GAIN", -inf)
    monkeypatch.setattr(module, "_ITERATIONS", 1)
    monkeypatch.setattr(module._Steps, "optimise_noise", slow)
    data = rows(varies=True, N=20)
    limit = budget.Budget(data.device, seconds=seconds)
    context = TrainingContext(torch.Generator())
    module._Steps(data, TRAINING, context, limit).alternate(untrained(data))
    assert len(counted) == rounds


def test_lengthscales_of_the_ranks_are_free_once_noise_varies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Noise explains the outliers, on account of which the first fit holds the lengthscales."""
    g = torch.Generator().manual_seed(3)
    X = torch.rand(60, 1, generator=g, dtype=torch.float64)
    noise = torch.where(X[:, 0] > 0.8, 3.0, 0.1) * torch.randn(60, generator=g).double()
    data = Dataset.of(X, torch.sin(7 * X[:, 0]) + noise)
    assert excess_kurtosis(data.Y) > 1.5
    fits = []

    def recorded(*given: Any, **settings: Any) -> FitResult[Any]:
        fits.append(fit_sparse(*given, **settings))
        return fits[-1]

    monkeypatch.setattr(module, "fit_sparse", recorded)
    with short_fits():
        schedule = FastSchedule(rounds=1, inclusion_steps=3)
        result = fit(
            untrained(data).prune((torch.zeros(9) > 0, torch.zeros(7) > 0)), data, schedule=schedule
        )
    assert len(result.model.log_noise.candidates) > 0
    kernels: list[Any] = [fits[0].model.kernel, result.model.function.kernel]
    held, free = (kernel.base_kernel for kernel in kernels)
    assert held.raw_lengthscale.requires_grad
    # Lengthscales that stay as they are would be equal.
    assert abs(held.lengthscale.log() - free.lengthscale.log()).item() > 0.001


@pytest.mark.parametrize(("most", "complete"), [(None, True), (40, False)])
def test_fit_sparse_evidence_rows_limit_the_exact_evidence(
    most: int | None, complete: bool
) -> None:
    data = rows(varies=False)
    model = SparseGP(ScaleKernel(RBFKernel()), data.X[:0], noise=0.1)
    training = replace(TRAINING, evidence_rows=most, kept_sizes=0, reported=False)
    context = TrainingContext(generator=torch.Generator().manual_seed(0))
    with shortest_fits():
        frontier = fit_sparse(model, data, training=training, context=context).frontier
    assert frontier is not None
    assert (frontier.evidence is not None) is complete


@pytest.mark.parametrize(
    ("device", "N", "moves"), [("cuda", 10_000, True), ("cuda", 10_001, False), ("cpu", 5, False)]
)
def test_noise_context_few_rows_of_a_gpu_are_fitted_on_the_cpu(
    device: str, N: int, moves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "draw_seed", lambda generator: 3)
    generator: Any = SimpleNamespace(device=torch.device(device))
    context = TrainingContext(generator)
    own = module.noise_context(context, N)
    assert (own is not context) is moves
    if moves:
        assert own.generator.device.type == "cpu"
        assert own.generator.initial_seed() == 3


def test_noise_context_on_the_cpu_continues_from_the_generator_of_the_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A resumed fit restores that generator alone: its state must determine all later draws."""
    monkeypatch.setattr(module, "_noise_device", lambda context, N: torch.device("cpu", 0))
    context = TrainingContext(torch.Generator().manual_seed(5))
    state = context.generator.get_state()
    before = [torch.rand(1, generator=module.noise_context(context, 9).generator) for _ in "ab"]
    context.generator.set_state(state)
    after = [torch.rand(1, generator=module.noise_context(context, 9).generator) for _ in "ab"]
    assert before == after
    assert before[0] != before[1]
