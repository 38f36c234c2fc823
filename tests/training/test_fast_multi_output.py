"""The fast schedule of several processes: what it selects and for which process."""

from dataclasses import replace

import pytest
import torch
from gpytorch.kernels import RBFKernel

from winnowgp.data import Dataset
from winnowgp.models import BoxKernel, MultiOutputGP
from winnowgp.training import FastSchedule, FitResult, MaxPoints, Progress, fit
from winnowgp.training.fast_multi_output import _Steps, principal_mixing, starting_points
from winnowgp.training.schedules import TrainingContext

SHORT = FastSchedule(rounds=2, iterations=60, inclusion_steps=10)


def rows(N: int = 120) -> Dataset:
    """Return three targets that mix a slow and a rapid wave; a tenth of them is missing."""
    g = torch.Generator().manual_seed(0)
    X = 3 * torch.rand(N, 1, generator=g, dtype=torch.float64) - 1.5
    waves = torch.cat([torch.sin(1.5 * X), torch.sin(9 * X)], 1)
    W = torch.tensor([[1.0, 0.2], [0.3, -1.0], [0.8, 0.8]], dtype=torch.float64)
    Y = waves @ W.mT + 0.1 * torch.randn(N, 3, generator=g, dtype=torch.float64)
    Y[torch.rand(N, 3, generator=g) < 0.1] = torch.nan
    keep = ~torch.isnan(Y).all(1)
    return Dataset.of(X[keep], Y[keep], missing=True)


def model(data: Dataset) -> MultiOutputGP:
    return MultiOutputGP(
        [RBFKernel(), RBFKernel()],
        [data.X[:0]] * 2,
        mixing=torch.eye(3, 2, dtype=torch.float64),
        noise=torch.full((3,), 0.1, dtype=torch.float64),
    )


@pytest.fixture(scope="module")
def fitted() -> tuple[FitResult[MultiOutputGP], list[Progress]]:
    steps: list[Progress] = []
    return fit(model(rows()), rows(), schedule=SHORT, callbacks=steps.append), steps


def test_fit_gives_the_rapid_process_more_points(fitted) -> None:
    result, steps = fitted
    few, many = sorted(result.posterior.sizes)
    assert 3 <= few <= 7 < 10 <= many <= 25
    lengthscales = [kernel.lengthscale.item() for kernel in result.model.kernels]
    assert lengthscales.index(max(lengthscales)) == result.posterior.sizes.index(few)
    assert {step.phase for step in steps} >= {"initialisation", "selection", "optimisation"}
    assert all(len(step.candidates) == 2 for step in steps)


def test_fit_result_is_consistent(fitted) -> None:
    result, _ = fitted
    data = rows()
    count = int((~torch.isnan(data.Y)).sum())
    assert result.elbo == pytest.approx(result.model.fixed_bound(data))
    assert result.elbo_gap < 0.02 * count
    assert result.evidence is not None
    assert result.evidence.exact
    assert result.elbo < result.evidence.lower < result.elbo + 0.03 * count
    assert result.frontier is not None
    assert count == result.frontier.N
    for selection, points, chosen in zip(
        result.selections, result.candidates, result.model.candidate_sets, strict=True
    ):
        assert len(points) == selection.K
        torch.testing.assert_close(points[selection.mask], chosen.detach())


def test_max_points_limits_all_processes_together_and_keeps_both() -> None:
    data = rows(80)
    result = fit(model(data), data, schedule=replace(SHORT, goal=MaxPoints(12)))
    assert sum(result.posterior.sizes) == 12
    assert min(result.posterior.sizes) >= 2


def test_number_of_candidates_is_a_strict_limit() -> None:
    data = rows(60)
    context = TrainingContext(torch.Generator().manual_seed(0))
    steps = _Steps.of(model(data), data, context, most=21)
    pool = steps.pool(model(data), 21)
    assert pool.K == 20
    assert steps.with_fresh(pool, 64).K == 20
    half = pool.with_candidates([Z[:3] for Z in pool.candidate_sets])
    assert steps.with_fresh(half, 64).K == 20


def test_candidates_of_a_process_are_rows_that_observe_it() -> None:
    data = rows(60)
    Y = data.Y.clone()
    Y[:30, 0], Y[30:, 1:] = torch.nan, torch.nan
    keep = ~torch.isnan(Y).all(1)
    seen = Dataset.of(data.X[keep], Y[keep], missing=True)
    mixing = torch.tensor([[1.0, 0.0], [1.0, 1.0], [1.0, 1.0]], dtype=torch.float64)
    start = MultiOutputGP(
        [RBFKernel(), RBFKernel()],
        [data.X[:0]] * 2,
        mixing=mixing,
        learnt=torch.zeros(3, 2, dtype=torch.bool),
        noise=torch.full((3,), 0.1, dtype=torch.float64),
    )
    steps: list[Progress] = []
    fit(start, seen, schedule=replace(SHORT, rounds=1, iterations=1), callbacks=steps.append)
    first = next(step for step in steps if step.phase == "selection")
    assert torch.isin(first.candidates[1], seen.X[~torch.isnan(seen.Y[:, 1])]).all()


def test_principal_mixing_spans_the_targets() -> None:
    Y = torch.tensor([[1.0, 2.0], [-1.0, -2.0], [2.0, 4.0], [-2.0, -4.0]], dtype=torch.float64)
    W = principal_mixing(Dataset.of(Y[:, :1], Y), 1)
    torch.testing.assert_close(W @ W.mT, Y.mT @ Y / 4)
    # The bound has no gradient in a column of zeros.
    assert (principal_mixing(Dataset.of(Y[:, :1], Y), 3).norm(dim=0) > 0).all()


def test_samples_of_rows_have_targets_that_few_rows_have() -> None:
    X = torch.arange(1000.0, dtype=torch.float64)[:, None]
    Y = torch.stack([X[:, 0], torch.full((1000,), torch.nan, dtype=torch.float64)], 1)
    Y[::200, 1] = 1.0
    model = MultiOutputGP(
        [RBFKernel(), RBFKernel()],
        [X[:0], X[:0]],
        mixing=torch.eye(2, dtype=torch.float64),
        noise=torch.ones(2, dtype=torch.float64),
    )
    context = TrainingContext(torch.Generator().manual_seed(0))
    part = _Steps.of(model, Dataset.of(X, Y, missing=True), context, most=10).part(50)
    assert (~torch.isnan(part.Y[:, 1])).sum() == 5
    assert (~torch.isnan(part.Y[:, 0])).all()


def test_starting_lengthscales_are_those_of_the_centres_of_boxes() -> None:
    centres = torch.linspace(-2, 2, 20, dtype=torch.float64)[:, None]
    data = Dataset.of(torch.cat([centres, 1e-3 * centres.abs()], 1), centres.sin())
    one = torch.ones(1, dtype=torch.float64)
    kernel = BoxKernel(RBFKernel(), widths=[1])
    model = MultiOutputGP([kernel], [data.X[:0]], mixing=one[:, None], noise=one)
    largest = max(
        kernel.base_kernel.lengthscale.item()
        for start in starting_points(model, data)
        for kernel in start.kernels
        if isinstance(kernel, BoxKernel)
    )
    assert largest == pytest.approx(centres.std(correction=0).item())
