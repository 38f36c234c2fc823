"""The fast schedule of noise that depends on the inputs."""

import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel

from helpers.short_fits import shortest_fits
from winnowgp.data import Dataset
from winnowgp.errors import InputError
from winnowgp.models import HeteroscedasticGP, LogVarianceLikelihood, SparseGP, VariationalGP
from winnowgp.point_processes import SquaredCardinality
from winnowgp.training import (
    FastSchedule,
    FitResult,
    FixedAlpha,
    MaxPoints,
    PaperSchedule,
    Tolerance,
    fit,
)
from winnowgp.training.fast_heteroscedastic import noise_goal
from winnowgp.training.goals import AllCandidates

# Whole fits, whose functions other tests check.
pytestmark = pytest.mark.unchecked


def rows(*, varies: bool, N: int = 60) -> Dataset:
    g = torch.Generator().manual_seed(0)
    X = torch.rand(N, 1, generator=g, dtype=torch.float64).sort(0).values
    sd = 0.03 + 0.6 * X[:, 0].square() if varies else torch.full_like(X[:, 0], 0.2)
    return Dataset.of(X, torch.sin(7 * X[:, 0]) + sd * torch.randn(N, generator=g).double())


def fitted(data: Dataset, schedule: FastSchedule) -> FitResult[HeteroscedasticGP]:
    kernel = ScaleKernel(RBFKernel())
    model = HeteroscedasticGP(
        SparseGP(kernel, data.X[::7], noise=0.1),
        VariationalGP(kernel, data.X[::9], likelihood=LogVarianceLikelihood()),
    )
    with shortest_fits():
        return fit(model, data, schedule=schedule)


@pytest.fixture(scope="module")
def varying() -> tuple[FitResult[HeteroscedasticGP], Dataset]:
    data = rows(varies=True)
    return fitted(data, FastSchedule(rounds=1, inclusion_steps=3)), data


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
    kernel = ScaleKernel(RBFKernel())
    model = HeteroscedasticGP(
        SparseGP(kernel, data.X[::7], noise=0.1),
        VariationalGP(kernel, data.X[::9], likelihood=LogVarianceLikelihood()),
    )
    with pytest.raises(InputError, match="noise that depends on the inputs; use `FastSchedule`"):
        fit(model, data, schedule=PaperSchedule(SquaredCardinality(6, 0.1)))
