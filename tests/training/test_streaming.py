"""One batch of a stream: goals, prices of old points, and starts of the hyper-parameters."""

from typing import Any

import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel

from winnowgp.data import Dataset
from winnowgp.errors import NotPositiveDefiniteError
from winnowgp.models import SparseGP, closed_forms
from winnowgp.models.online import OnlineGP
from winnowgp.training import AllCandidates, FixedAlpha, Goal, MaxPoints, Tolerance, update


def batch(seed: int, low: float = 0.0, high: float = 6.0, N: int = 30) -> Dataset:
    generator = torch.Generator().manual_seed(seed)
    X = low + (high - low) * torch.rand(N, 2, generator=generator, dtype=torch.float64)
    noise = 0.1 * torch.randn(N, 1, generator=generator, dtype=torch.float64)
    return Dataset(X, torch.sin(X[:, :1]) + noise)


def noise_of(online: OnlineGP) -> float:
    assert isinstance(online.model, SparseGP)
    return online.model.noise.item()


@pytest.fixture(scope="module")
def online() -> OnlineGP:
    kernel = ScaleKernel(RBFKernel(ard_num_dims=2))
    model = SparseGP(kernel, torch.zeros(0, 2, dtype=torch.float64), noise=0.1)
    return update(OnlineGP.start(model), batch(0)).online


GOALS = {
    "tolerance": Tolerance(0.01),
    "alpha": FixedAlpha(0.1),
    "points": MaxPoints(4),
    "limit": Tolerance(0.01, limit=MaxPoints(5)),
    "all": AllCandidates(),
}


@pytest.mark.parametrize("name", GOALS)
def test_update_selects_by_each_goal(online: OnlineGP, name: str) -> None:
    goal: Goal = GOALS[name]
    before = online.model.candidates.detach().clone()
    result = update(online, batch(1), goal=goal, learn=False)
    M, memory = result.posterior.M, result.online.memory
    assert int(result.selected.sum()) == M
    assert result.online.model.K == memory.M == len(result.selected)
    assert M <= memory.M <= max(2 * M, 512)
    torch.testing.assert_close(memory.Z[result.selected], result.posterior.Z, rtol=0, atol=0)
    torch.testing.assert_close(memory.Z[: int(result.kept.sum())], before[result.kept])
    bounds = result.frontier.bounds
    assert result.elbo == pytest.approx(bounds[M].item(), abs=1e-6)
    assert result.gap == pytest.approx((bounds.max() - bounds[M]).item(), abs=1e-6)
    assert result.given_up == pytest.approx((bounds.max() - bounds[memory.M]).item(), abs=1e-6)
    torch.testing.assert_close(online.model.candidates.detach(), before, rtol=0, atol=0)
    if name == "all":
        torch.testing.assert_close(result.online.model.candidates.detach(), before)
    if name in ("points", "limit"):
        assert (4 if name == "points" else 5) >= M
    if name == "tolerance":
        assert result.gap <= 0.01 * 60
        # The memory has a fifth of it, and keeps more points.
        assert result.given_up <= 0.002 * 60
        assert memory.M > M


def test_update_with_known_curvature_computes_fewer_gradients(
    online: OnlineGP, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluations: list[int] = []
    original = closed_forms.streaming_gradient

    def counted(*args: Any, **settings: Any) -> Any:
        evaluations[-1] += 1
        return original(*args, **settings)

    monkeypatch.setattr(closed_forms, "streaming_gradient", counted)
    monkeypatch.setattr("winnowgp.training.streaming._shorten", lambda *_: False)
    steps = None
    for number in range(1, 7):
        evaluations.append(0)
        result = update(online, batch(number), steps=steps)
        evaluations.append(0)
        update(online, batch(number))
        online, steps = result.online, result.steps
    known, fresh = evaluations[::2], evaluations[1::2]
    assert known[0] == fresh[0] > 3
    assert sum(known[3:]) <= 0.5 * sum(fresh[3:])
    # Of two lengthscales, variance and noise.
    assert steps is not None
    assert 5 <= len(steps) <= 10
    assert steps.shape[1:] == (2, 4)
    # Gradient changes are per observation.
    curvature = (steps[:, 0] * steps[:, 1]).sum(1) / steps[:, 0].square().sum(1)
    assert curvature.max() < 10


def test_update_ignores_steps_of_other_hyperparameters(online: OnlineGP) -> None:
    other = torch.ones(6, 2, 9, dtype=torch.float64)
    plain, ignored = (update(online, batch(1), steps=steps) for steps in (None, other))
    assert ignored.elbo == plain.elbo
    assert ignored.steps is not None
    assert plain.steps is not None
    torch.testing.assert_close(ignored.steps, plain.steps)


def test_update_larger_tolerance_has_a_larger_share_of_a_small_gain() -> None:
    generator = torch.Generator().manual_seed(0)
    X = 6 * torch.rand(400, 1, generator=generator, dtype=torch.float64)
    Y = 0.5 * torch.sin(2 * X) + torch.randn(X.shape, generator=generator, dtype=torch.float64)
    online = OnlineGP.start(SparseGP(ScaleKernel(RBFKernel()), X[:0], noise=1.0))
    default, larger, held = (
        update(online, Dataset(X, Y), goal=goal, learn=False)
        for goal in (Tolerance(0.01), Tolerance(0.05), Tolerance(0.05, share=0.02 / 5))
    )
    # 2 % of the gain are less than 0.01 nats per observation.
    assert default.gap < 0.01 * 400 / 2
    assert min(held.posterior.M, default.posterior.M) > larger.posterior.M > 0
    assert default.gap < larger.gap < 0.05 * 400 / 2


def test_update_memory_of_a_large_tolerance_loses_as_little() -> None:
    kernel = ScaleKernel(RBFKernel(ard_num_dims=2))
    model = SparseGP(kernel, torch.zeros(0, 2, dtype=torch.float64), noise=0.1)
    coarse, fine = (
        update(OnlineGP.start(model), batch(0), goal=Tolerance(nats), learn=False)
        for nats in (0.5, 0.035)
    )
    assert coarse.posterior.M < fine.posterior.M
    assert coarse.given_up <= 0.007 * 30
    assert coarse.online.memory.M >= fine.online.memory.M


def test_update_without_tolerance_left_gives_nothing_up(online: OnlineGP) -> None:
    free = update(online, batch(1), learn=False)
    spent = update(online, batch(1), given_up=0.6, learn=False)
    assert spent.gap - 0.6 < 1e-6 < free.gap
    assert spent.posterior.M > free.posterior.M
    # The memory has the tolerance of the batch alone.
    assert spent.given_up - 0.6 <= 0.002 * 30
    assert spent.online.memory.M >= free.online.memory.M


def test_update_duplicates_of_old_points_are_the_same_points(online: OnlineGP) -> None:
    X = torch.cat([online.memory.Z, online.memory.Z, batch(1).X[:2]])
    result = update(online, Dataset(X, torch.sin(X[:, :1])), goal=MaxPoints(100), learn=False)
    Z = result.online.model.candidates.detach()
    assert len(Z.unique(dim=0)) == len(Z) <= online.model.K + 2
    assert torch.isfinite(result.online.memory.A).all()


def test_update_moves_points_only_where_that_pays(online: OnlineGP) -> None:
    held, moved = (update(online, batch(1), goal=MaxPoints(4), move=m) for m in (False, True))
    assert (held.moved, moved.moved) == (0, 4)
    assert moved.elbo > held.elbo


def test_update_moved_points_have_the_gap_of_their_elbo(online: OnlineGP) -> None:
    held, moved = (update(online, batch(1), goal=MaxPoints(4), move=m) for m in (False, True))
    assert held.gap - moved.gap == pytest.approx(moved.elbo - held.elbo)


def test_update_keeps_hyperparameters_with_which_no_factor_is_found(
    online: OnlineGP, monkeypatch: pytest.MonkeyPatch
) -> None:
    noise, moments = noise_of(online), OnlineGP.moments

    def failing(self: OnlineGP, data: Dataset) -> Any:
        if noise_of(self) != noise:
            raise NotPositiveDefiniteError("no factor")
        return moments(self, data)

    assert noise_of(update(online, batch(1)).online) != noise
    monkeypatch.setattr(OnlineGP, "moments", failing)
    assert noise_of(update(online, batch(1)).online) == noise


def test_update_keeps_points_where_moved_ones_have_no_factor(
    online: OnlineGP, monkeypatch: pytest.MonkeyPatch
) -> None:
    moments, rows = OnlineGP.moments, batch(1)
    known = torch.cat([online.model.candidates.detach(), rows.X])

    def failing(self: OnlineGP, data: Dataset) -> Any:
        if torch.cdist(self.model.candidates.detach(), known).min(1).values.max() > 1e-3:
            raise NotPositiveDefiniteError("no factor")
        return moments(self, data)

    assert update(online, rows, move=True, learn=False).moved > 0
    monkeypatch.setattr(OnlineGP, "moments", failing)
    assert update(online, rows, move=True, learn=False).moved == 0


def test_update_shortens_a_lengthscale_at_which_the_bound_is_flat(online: OnlineGP) -> None:
    stuck = online.with_candidates(online.model.candidates)
    stuck.model.kernel.initialize(**{"base_kernel.lengthscale": torch.tensor([[900.0, 900.0]])})
    # Thirty rows more are twice as many.
    learnt = update(stuck, batch(1)).online.model.kernel
    assert isinstance(learnt, ScaleKernel)
    assert learnt.base_kernel.lengthscale[0, 0].item() < 5
