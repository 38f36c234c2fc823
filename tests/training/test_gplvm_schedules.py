import pytest
import torch
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel

from winnowgp.data import MaskedMatrix
from winnowgp.errors import InputError
from winnowgp.gradients import Relaxed
from winnowgp.models import LatentVariableGP, SampledLatentGP, VariationalGP
from winnowgp.models.observations import gaussian_noise
from winnowgp.point_processes import SquaredCardinality
from winnowgp.training import (
    FastSchedule,
    FixedAlpha,
    MaxPoints,
    PaperSchedule,
    Progress,
    fit,
    principal_latents,
)
from winnowgp.training.fast_gplvm import infer_latents


def arc(N: int = 24, *, missing: bool = False) -> MaskedMatrix:
    t = torch.linspace(-1.5, 1.5, N, dtype=torch.float64)
    Y = torch.stack([torch.sin(t), torch.cos(t), torch.tanh(2 * t), t], 1)
    Y = Y + 0.05 * torch.randn(N, 4, generator=torch.Generator().manual_seed(0), dtype=Y.dtype)
    Y = (Y - Y.mean(0)) / Y.std(0)
    if missing:
        Y[3, 0] = Y[9, 2] = float("nan")
    return MaskedMatrix.of(Y)


def model(table: MaskedMatrix, K: int = 0) -> LatentVariableGP:
    start = principal_latents(table, 1, generator=torch.Generator().manual_seed(0))
    kernel = ScaleKernel(RBFKernel(ard_num_dims=1))
    return LatentVariableGP(kernel, start, candidates=start[: K or 0], noise=0.1)


@pytest.mark.parametrize("missing", [False, True], ids=["complete", "missing"])
def test_fast_gplvm_selects_few_points_with_high_elbo(missing: bool) -> None:
    table = arc(missing=missing)
    seen: list[Progress] = []
    plan = FastSchedule(n_candidates=12, rounds=2, iterations=45)
    fitted = fit(model(table), table, schedule=plan, callbacks=seen.append)
    assert {p.phase for p in seen} == {"optimisation", "selection"}
    assert fitted.elbo > seen[0].objective + 20
    assert fitted.elbo == pytest.approx(fitted.model.bound(table).item())
    assert 3 <= fitted.model.K == fitted.selection.M < 24
    assert fitted.selection.frontier is not None
    # The frontier includes the latents' KL.
    assert fitted.selection.frontier.bounds[-1].item() >= fitted.elbo - 1e-3
    order = fitted.model.latents.mean[:, 0].argsort().argsort().double()
    line = torch.stack([order, torch.arange(24, dtype=torch.float64)])
    assert torch.corrcoef(line)[0, 1].abs() > 0.97


def test_fast_gplvm_goals_and_frozen_candidates() -> None:
    table = arc()
    grid = torch.linspace(-2, 2, 15, dtype=torch.float64)[:, None]
    frozen = model(table).with_candidates(grid)
    frozen.candidates.requires_grad_(False)
    plan = FastSchedule(FixedAlpha(1.0), n_candidates=15, rounds=1, iterations=15)
    fitted = fit(frozen, table, schedule=plan)
    assert (fitted.model.candidates[:, None] == grid).any(1).all()
    assert fitted.selection.alpha == 1.0
    capped = FastSchedule(MaxPoints(4), n_candidates=10, rounds=1, iterations=9)
    assert fit(model(table), table, schedule=capped).model.K <= 4


def test_paper_gplvm_trains_all_parameters_jointly() -> None:
    table = arc()
    seen: list[Progress] = []
    plan = PaperSchedule(SquaredCardinality(10, 20.0), joint=25)
    start = model(table, 10)
    fitted = fit(start, table, schedule=plan, callbacks=seen.append)
    assert len(seen) == len(fitted.selection.trace) == 25
    first, last = seen[0].inclusion, seen[-1].inclusion
    assert first is not None
    assert last is not None
    assert last[0].sum() < first[0].sum() - 1
    moved = seen[-1].latents
    assert moved is not None
    assert not torch.equal(moved, start.latents.mean)
    assert not torch.equal(fitted.candidates[0], start.candidates)
    assert fitted.model.K == fitted.selection.M
    again = fit(start, table, schedule=plan)
    assert torch.equal(again.selection.inclusion, fitted.selection.inclusion)


class Stopped(Exception):
    """An exception that the library does not raise."""


def stop_with_number_of_steps(progress: Progress) -> None:
    raise Stopped(progress.steps)


@pytest.mark.unchecked
def test_paper_gplvm_other_gradients_and_minibatches() -> None:
    table = arc(missing=True)
    relaxed = PaperSchedule(SquaredCardinality(8, 0.5), joint=3, gradient=Relaxed())
    assert torch.isfinite(fit(model(table, 8), table, schedule=relaxed).selection.trace).all()
    start = model(table, 8)
    noise = gaussian_noise(torch.full((1,), 0.1, dtype=torch.float64))
    function = VariationalGP(
        ScaleKernel(MaternKernel()), start.candidates, likelihood=noise, targets=4
    )
    sampled = SampledLatentGP(function, start.latents)
    parts = PaperSchedule(SquaredCardinality(8, 0.5), joint=5, batch_size=7)
    assert len(fit(sampled, table, schedule=parts).selection.trace) == 5
    passes = PaperSchedule(SquaredCardinality(8, 0.5), batch_size=12)
    with pytest.raises(Stopped, match=f"^{300 * 2}$"):
        fit(sampled, table, schedule=passes, callbacks=stop_with_number_of_steps)
    with pytest.raises(InputError, match="requires a LatentVariableGP"):
        fit(sampled, table, schedule=FastSchedule())


def test_infer_latents_matches_grid_search() -> None:
    """Against a fine search over means and variances of one dimension."""
    table = arc(missing=True)
    fitted = fit(
        model(table), table, schedule=FastSchedule(n_candidates=10, rounds=1, iterations=30)
    )
    bound = fitted.posterior.row_elbo(table)
    latents = fitted.model.latents
    anchors = latents.mean.detach(), latents.variance.detach()
    found = infer_latents(bound, anchors=anchors)
    mean = torch.linspace(-3.5, 3.5, 351, dtype=torch.float64)
    sd = torch.logspace(-2, 0, 41, dtype=torch.float64)
    grid = torch.cartesian_prod(mean, sd)
    nats = bound.everywhere(grid[:, :1], grid[:, 1:].square())
    assert (found.nats > nats.amax(1) - 1e-6).all()
    assert (found.nats < nats.amax(1) + 0.1).all()


def test_principal_latents_fill_in_missing_entries(generator) -> None:
    line = torch.linspace(-1, 1, 30, dtype=torch.float64)[:, None]
    Y = line * torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    Y[4, 1] = float("nan")
    X = principal_latents(MaskedMatrix.of(Y), 1, generator=generator)
    assert torch.corrcoef(torch.cat([X, line], 1).mT)[0, 1].abs() > 0.9999
    torch.testing.assert_close(X[:, 0].square().mean(), torch.ones((), dtype=torch.float64))
    # A rank-one table has no second direction.
    assert principal_latents(MaskedMatrix.of(Y[5:]), 2, generator=generator)[:, 1].std() < 0.2


def test_gplvm_schedules_invalid_settings_raise() -> None:
    table = arc()
    plan = PaperSchedule(SquaredCardinality(4, 1.0))
    with pytest.raises(
        InputError, match=r"as many candidates as the model has, \[5\]; it is over 4"
    ):
        fit(model(table, 5), table, schedule=plan)
    with pytest.raises(InputError, match="at least 1"):
        FastSchedule(rounds=0)
    with pytest.raises(InputError, match="`joint`"):
        PaperSchedule(SquaredCardinality(4, 1.0), joint=-1)
    wrong = model(table).with_candidates(torch.zeros(3, 2, dtype=torch.float64))
    with pytest.raises(InputError, match="latents have dimensions, 1; got 2"):
        fit(wrong, table, schedule=FastSchedule())
