"""Hyper-parameters and kernel from the exact evidence: the best of many starts."""

from dataclasses import replace
from itertools import pairwise
from math import inf, isfinite
from typing import Any

import numpy as np
import pytest
import torch
from gpytorch.constraints import Interval
from gpytorch.kernels import Kernel, LinearKernel, MaternKernel, RBFKernel, ScaleKernel
from gpytorch.means import ConstantMean
from scipy.optimize import minimize
from torch import Tensor

from helpers import oracles
from winnowgp.data import Dataset, Standardiser
from winnowgp.data.catalogue import load_table
from winnowgp.models import SparseGP
from winnowgp.training import hyperparameters
from winnowgp.training.budget import Budget
from winnowgp.training.checkpoint import NO_CHECKPOINT_LOG as LOG
from winnowgp.training.hyperparameters import Initialization, maximise_evidence
from winnowgp.training.initialization import scaled, starting_points, trainable_lengthscales
from winnowgp.training.lbfgs import Maximum, Stop, maximise_elbo
from winnowgp.training.optima import Optimum


def data(N: int = 50, D: int = 1, seed: int = 0) -> Dataset:
    """A fast oscillation with little noise in the first column; the others are irrelevant."""
    g = torch.Generator().manual_seed(seed)
    X = 2 * torch.rand(N, D, generator=g, dtype=torch.float64) - 1
    y = torch.sin(9 * X[:, 0]) + 0.1 * torch.randn(N, generator=g, dtype=torch.float64)
    return Dataset.of(X, y)


def model(rows: Dataset, kernel: Kernel | None = None, noise: float = 1.0) -> SparseGP:
    return SparseGP(kernel or ScaleKernel(RBFKernel()), rows.X[:3], noise=noise)


def warm(gp: SparseGP, rows: Dataset, seed: int = 0, most: int = 1000) -> SparseGP:
    order = torch.randperm(rows.N, generator=torch.Generator().manual_seed(seed))
    budget = Budget(rows.X.device)
    return maximise_evidence([gp], rows, order=order, rows=most, budget=budget).best


def smooth_start(rows: Dataset) -> SparseGP:
    """A model near the mode that explains the oscillation as noise."""
    kernel = ScaleKernel(RBFKernel()).initialize(**{"base_kernel.lengthscale": 30.0})
    return model(rows, kernel, noise=1.0)


def test_initialise_finds_the_better_mode() -> None:
    rows = data()
    alone = smooth_start(rows).with_candidates(rows.X[:0])
    worse = maximise_elbo(
        alone, rows.X, objective=alone.dense_bound(rows), stop=Stop(1e-6, 10, 300)
    ).value
    found = warm(smooth_start(rows), rows)
    assert alone.noise > 0.3
    assert found.noise < 0.03
    evidence = found.dense_bound(rows)().item()
    assert evidence > worse + 20

    def dense(variance: float, lengthscale: float, noise: float) -> float:
        K = variance * torch.exp(-0.5 * (rows.X - rows.X.mT).square() / lengthscale**2)
        return oracles.log_normal(rows.Y, K + noise * torch.eye(rows.N)).item()

    grid = [
        dense(v, s, n)
        for v in (0.3, 0.5, 1.0, 2.0)
        for s in torch.logspace(-2, 1.5, 30).tolist()
        for n in (0.003, 0.01, 0.03, 0.3, 1.0)
    ]
    # The stopping rule leaves 1e-3 nats per row and ten iterations.
    assert evidence > max(grid) - 1e-3 * rows.N


def test_start_with_hardly_any_noise_finds_rough_function(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = data(300)
    Y = torch.sin(60 * rows.X) + rows.X
    rows = replace(rows, Y=Y / Y.std())
    smooth = model(rows, ScaleKernel(MaternKernel(nu=1.5))).with_candidates(rows.X[:0])
    # All other starts explain the oscillation as noise.
    monkeypatch.setattr(hyperparameters, "starting_points", lambda *_: [smooth] * 2)
    found = warm(smooth, rows)
    assert found.noise < 0.01
    monkeypatch.setattr(hyperparameters._Search, "little_noise", lambda *_: [])
    worse = warm(smooth, rows)
    assert worse.noise > 0.3
    assert found.dense_bound(rows)() > worse.dense_bound(rows)() + 100


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))]
)
def test_initialise_energy_finds_low_noise_mode(paper_data: None, seed: int) -> None:
    raw = load_table("energy").dataset()
    rows = Dataset(Standardiser.of(raw.X).forward(raw.X), Standardiser.of(raw.Y).forward(raw.Y))
    gp = SparseGP(ScaleKernel(RBFKernel(ard_num_dims=rows.D)), rows.X[:0])
    assert warm(gp, rows, seed, most=240).noise < 0.01


def test_initialise_returns_no_candidates_and_keeps_input() -> None:
    rows = data()
    gp = model(rows)
    before = {name: p.detach().clone() for name, p in gp.named_parameters()}
    found = warm(gp, rows)
    assert found.K == 0
    assert gp.K == 3
    for name, parameter in gp.named_parameters():
        assert torch.equal(parameter, before[name]), name


KERNELS = {
    "rbf": lambda: ScaleKernel(RBFKernel()),
    "ard": lambda: ScaleKernel(RBFKernel(ard_num_dims=2)),
    "matern": lambda: ScaleKernel(MaternKernel(nu=1.5)),
    "sum": lambda: ScaleKernel(RBFKernel(active_dims=(0,))) + LinearKernel(),
    "linear": lambda: LinearKernel(),
}


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS.keys())
def test_initialise_any_kernel_does_not_lower_evidence(kernel) -> None:
    rows = data(N=30, D=2)
    gp = model(rows, kernel())
    assert warm(gp, rows).dense_bound(rows)() >= gp.dense_bound(rows)()


def constant(N: int) -> Dataset:
    rows = data(N=N)
    return Dataset(rows.X, torch.zeros_like(rows.Y))


@pytest.mark.parametrize(
    "rows",
    [
        data(N=1),
        data(N=2),
        constant(1),
        constant(20),
        Dataset(torch.ones_like(data().X), data().Y),
        Dataset(data().X.repeat(2, 1), data().Y.repeat(2, 1)),
    ],
    ids=["N=1", "N=2", "N=1, zero", "zeros", "one place", "rows twice"],
)
def test_initialise_degenerate_data_is_finite(rows: Dataset) -> None:
    gp = model(rows)
    found = warm(gp, rows)
    assert all(p.isfinite().all() for p in found.parameters())
    assert found.dense_bound(rows)().isfinite()
    assert found.dense_bound(rows)() >= gp.dense_bound(rows)()


def test_initialise_frozen_parameters_stay() -> None:
    rows = data()
    gp = model(rows)
    frozen = gp.kernel.get_parameter("base_kernel.raw_lengthscale").requires_grad_(False)
    gp.likelihood.raw_noise.requires_grad_(False)
    for found in (warm(gp, rows), *starting_points(gp, rows)):
        assert torch.equal(found.kernel.get_parameter("base_kernel.raw_lengthscale"), frozen)
        assert torch.equal(found.noise, gp.noise)


def lengthscale(gp: SparseGP) -> Tensor:
    base = gp.kernel.get_submodule("base_kernel")
    assert isinstance(base, Kernel)
    return base.lengthscale.detach().flatten()


def test_initialise_learns_mean() -> None:
    rows = data()
    rows = Dataset(rows.X, rows.Y + 5)
    gp = SparseGP(ScaleKernel(RBFKernel()), rows.X[:0], mean=ConstantMean())
    gp.kernel.get_parameter("raw_outputscale").requires_grad_(False)
    mean = warm(gp, rows).mean.get_parameter("raw_constant")
    assert abs(mean.item() - 5) < 0.7


def test_starting_points_respect_lengthscale_constraint() -> None:
    rows = data()
    base = RBFKernel(lengthscale_constraint=Interval(0.01, 0.3))
    found = warm(model(rows, ScaleKernel(base)), rows)
    assert 0.01 < lengthscale(found).item() < 0.3


def test_starting_points_nested_active_dims() -> None:
    rows = data(N=20, D=3)
    gp = model(rows, ScaleKernel(RBFKernel(ard_num_dims=2), active_dims=(0, 1)))
    assert warm(gp, rows).dense_bound(rows)() > gp.dense_bound(rows)()


def kernel_matrix(X: Tensor, lengthscale: float, *, rough: bool = False) -> Tensor:
    r = torch.cdist(X / lengthscale, X / lengthscale)
    if rough:
        return (1 + 3**0.5 * r) * torch.exp(-(3**0.5) * r)
    return torch.exp(-0.5 * r.square())


@pytest.mark.parametrize("late_after", [0, 3])
def test_evidence_search_ends_with_its_share_of_the_clock(
    late_after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that is past its share after some starts: no more starts, and the rows of these."""
    rows = drawn(300, 1.0, 0.1)
    count, optimise = [0], hyperparameters.optimise_evidence

    def counted(*given: Any) -> Maximum:
        count[0] += 1
        return optimise(*given)

    monkeypatch.setattr(hyperparameters, "optimise_evidence", counted)
    monkeypatch.setattr(Budget, "search_expired", property(lambda _: count[0] > late_after))
    kernels = ScaleKernel(RBFKernel()), ScaleKernel(MaternKernel(1.5))
    found = compared(rows, *kernels, budget=Budget(rows.X.device, seconds=100.0), linear_term=True)
    # One start at least; the last that began before the time was over ends.
    assert count[0] == late_after + 1
    # The first stage has 250 rows.
    assert (found.rows, found.complete) == (250, False)
    assert isfinite(found.optima[0].evidence)
    assert found.kernels[1] == -inf


def drawn(N: int, lengthscale: float, noise: float, *, rough: bool = False, seed: int = 0):
    """Return a draw from a GP on [0, 10] with a Matérn-3/2 kernel, or an RBF kernel."""
    g = torch.Generator().manual_seed(seed)
    X = 10 * torch.rand(N, 1, generator=g, dtype=torch.float64)
    eps = torch.randn(2, N, generator=g, dtype=torch.float64)
    K = kernel_matrix(X, lengthscale, rough=rough)
    f = torch.linalg.cholesky(K + 1e-9 * torch.eye(N)) @ eps[0]
    return Dataset.of(X, f + noise**0.5 * eps[1])


def compared(table: Dataset, *kernels: Kernel, **settings: Any) -> Initialization[SparseGP]:
    order = torch.randperm(table.N, generator=torch.Generator().manual_seed(0))
    models = [SparseGP(kernel, table.X[:0], noise=0.1) for kernel in kernels]
    settings = {"rows": table.N, "budget": Budget(table.X.device), **settings}
    return maximise_evidence(models, table, order=order, **settings)


@pytest.mark.parametrize(("lengthscale", "noise"), [(0.5, 1e-3), (2.0, 0.1), (1.0, 1.0)])
def test_evidence_of_all_rows_reaches_its_maximum(lengthscale: float, noise: float) -> None:
    rows = drawn(60, lengthscale, noise)
    found = compared(rows, ScaleKernel(RBFKernel()))
    assert found.complete
    assert found.rows == 60

    def dense(raw: np.ndarray) -> tuple[float, np.ndarray]:
        """−log N(y | 0, v K + σ² I) and its gradient in log v, log lengthscale and log σ²."""
        t = torch.tensor(raw, requires_grad=True)
        K = t[0].exp() * torch.exp(-0.5 * ((rows.X - rows.X.mT) / t[1].exp()).square())
        value = -oracles.log_normal(rows.Y, K + (t[2].exp() + 1e-10) * torch.eye(60))
        value.backward()
        assert t.grad is not None
        return value.item(), t.grad.numpy()

    bounds = [(-6, 6), (-4, 4), (-9, 3)]
    starts = [(0.0, a, b) for a in (-2.0, 0.0, 2.0) for b in (-5.0, -1.0)]
    best = -min(
        minimize(dense, np.array(s), jac=True, bounds=bounds, method="L-BFGS-B").fun for s in starts
    )
    optimum = found.optima[0]
    # The stopping rule leaves 3e-4 nats per row and ten iterations.
    assert best - 3e-3 * rows.N < optimum.evidence < best + 1e-4
    with torch.no_grad():
        K = found.best.kernel(rows.X).to_dense() + found.best.noise * torch.eye(60)
    assert optimum.evidence == pytest.approx(oracles.log_normal(rows.Y, K).item(), abs=1e-5)
    assert optimum.observations == 60
    assert found.kernels == (pytest.approx(optimum.evidence / 60, abs=1e-3),)


@pytest.mark.parametrize("N", [50, 300])
def test_evidence_two_starts_of_few_rows_find_the_better_mode(
    N: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, runs, maximise = data(N), [], hyperparameters.optimise_evidence

    def counted(*arguments: Any) -> Maximum:
        runs.append(arguments)
        return maximise(*arguments)

    monkeypatch.setattr(hyperparameters, "optimise_evidence", counted)
    noises, counts = [], []
    for most in (2, None):
        runs.clear()
        found = maximise_evidence(
            [smooth_start(rows)],
            rows,
            order=torch.arange(N),
            rows=N,
            max_starts=most,
            budget=Budget(rows.X.device),
        )
        noises.append(found.best.noise.item())
        counts.append(len(runs))
    assert max(noises) < 0.03
    # The search of more than 250 rows is complete.
    assert counts[0] == 2 < counts[1] if N == 50 else counts[0] == counts[1]
    assert (noises[0] == noises[1]) == (N == 300)


def test_evidence_third_start_is_the_model_as_given() -> None:
    # The shortest lengthscale of the other starts is one standard deviation, with five columns.
    rows = data(120, D=5)
    rows = replace(rows, Y=torch.sin(30 * rows.X[:, :1]))
    given = ScaleKernel(RBFKernel(ard_num_dims=5))
    given.initialize(**{"base_kernel.lengthscale": torch.tensor([0.05, 3.0, 3.0, 3.0, 3.0])})
    two, three = (
        maximise_evidence(
            [model(rows, given, noise=0.01)],
            rows,
            order=torch.arange(rows.N),
            rows=rows.N,
            max_starts=most,
            budget=Budget(rows.X.device),
        )
        for most in (2, 3)
    )
    assert two.best.noise.item() > 1e-3
    assert three.best.noise.item() < 1e-4


def test_evidence_distinct_optima_are_kept_best_first() -> None:
    found = compared(data(), ScaleKernel(RBFKernel()))
    evidences = [optimum.evidence for optimum in found.optima]
    assert evidences == sorted(evidences, reverse=True)
    assert all(a > b + 2e-3 * 50 for a, b in pairwise(evidences))
    assert found.best is found.optima[0].model


KINDS = {"rbf": lambda: ScaleKernel(RBFKernel()), "matern": KERNELS["matern"]}


@pytest.mark.parametrize("first", KINDS)
@pytest.mark.parametrize("truth", KINDS)
def test_evidence_generating_kernel_wins(truth: str, first: str) -> None:
    rows = drawn(200, 1.0, 0.01, rough=truth == "matern")
    names = [first, *(name for name in KINDS if name != first)]
    found = compared(rows, *(KINDS[name]() for name in names))
    winner = names.index(truth)
    assert found.optima[0].kernel == winner
    base = found.best.kernel.get_submodule("base_kernel")
    assert isinstance(base, MaternKernel if truth == "matern" else RBFKernel)
    assert found.kernels[winner] > found.kernels[1 - winner] + 0.01


def test_evidence_of_each_kernel_is_that_of_the_kernel_alone() -> None:
    rows = drawn(80, 1.0, 0.01, rough=True)
    found = compared(rows, *(kernel() for kernel in KINDS.values()))
    for kernel, evidence in zip(KINDS.values(), found.kernels, strict=True):
        assert evidence == pytest.approx(compared(rows, kernel()).kernels[0], abs=5e-3)


@pytest.mark.parametrize("column", [0, 4])
def test_evidence_finds_a_fast_cycle_in_one_of_six_columns(column: int) -> None:
    g = torch.Generator().manual_seed(1)
    X = torch.rand(200, 6, generator=g, dtype=torch.float64)
    y = torch.sin(40 * X[:, column]) + 0.2 * torch.randn(200, generator=g, dtype=torch.float64)
    found = compared(Dataset.of(X, y), ScaleKernel(RBFKernel(ard_num_dims=6)))
    lengthscales = lengthscale(found.best)
    assert int(lengthscales.argmin()) == column
    assert lengthscales[column] < 0.1
    assert lengthscales.sort().values[1] > 1
    assert found.best.noise.item() == pytest.approx(0.04, rel=0.4)


def test_optimise_starts_that_approach_a_known_optimum_are_left_out() -> None:
    rows = drawn(60, 1.0, 0.1)
    gp = SparseGP(ScaleKernel(RBFKernel()), rows.X[:0], noise=0.1)
    search = hyperparameters._Search([gp], rows, torch.arange(60), Budget(rows.X.device), LOG)
    starts = [scaled(gp, lengthscale=factor) for factor in (0.9, 1.0, 1.1, 1.2)]
    optima = search.optimise([hyperparameters.Start(each, 0) for each in starts], 60)
    assert len(optima) == 1
    assert optima[0].converged


def test_evidence_fewer_rows_than_there_are_is_not_complete() -> None:
    found = compared(drawn(60, 1.0, 0.1), ScaleKernel(RBFKernel()), rows=40)
    assert not found.complete
    assert found.rows == 40
    assert found.optima[0].observations == 40


def test_evidence_few_points_reach_the_optimum_of_the_evidence(monkeypatch) -> None:
    rows = drawn(200, 2.0, 0.3)
    dense = compared(rows, ScaleKernel(RBFKernel()))
    monkeypatch.setattr(hyperparameters, "STAGES", (30, 60, 100))
    before, points = hyperparameters._Search._optimise_sparse, []

    def optimise_sparse(search, start, data, stop, **options):
        optimum = before(search, start, data, stop, **options)
        points.append((data.N, optimum is not None))
        return optimum

    monkeypatch.setattr(hyperparameters._Search, "_optimise_sparse", optimise_sparse)
    found = compared(rows, ScaleKernel(RBFKernel()))
    assert (200, True) in points
    assert found.optima[0].evidence == pytest.approx(dense.optima[0].evidence, abs=1e-3 * 200)
    exact = found.best.dense_bound(rows)().item()
    assert found.optima[0].evidence == pytest.approx(exact, abs=1e-6)


def test_evidence_that_few_points_do_not_reach_is_maximised_itself(monkeypatch) -> None:
    monkeypatch.setattr(hyperparameters, "STAGES", (30, 60, 100))
    rows = drawn(200, 0.1, 1e-3)
    gp = SparseGP(ScaleKernel(RBFKernel()), rows.X[:0], noise=1e-3)
    trainable_lengthscales(gp.kernel)[0].initialize(lengthscale=0.1)
    search = hyperparameters._Search([gp], rows, torch.arange(200), Budget(rows.X.device), LOG)
    before = {name: value.clone() for name, value in gp.state_dict().items()}
    start = hyperparameters.Start(gp, 0)
    assert search._optimise_sparse(start, rows, Stop(1.0, 5, 20)) is None
    assert all(torch.equal(gp.state_dict()[name], value) for name, value in before.items())


def test_evidence_far_start_is_optimised_with_few_points_on_request(monkeypatch) -> None:
    monkeypatch.setattr(hyperparameters, "STAGES", (30, 60, 100))
    rows = drawn(200, 2.0, 0.3)
    gp = SparseGP(ScaleKernel(RBFKernel()), rows.X[:0], noise=0.01)
    trainable_lengthscales(gp.kernel)[0].initialize(lengthscale=0.05)
    search = hyperparameters._Search([gp], rows, torch.arange(200), Budget(rows.X.device), LOG)
    stop, before = Stop(0.02, 10, 60), gp.dense_bound(rows)().item()
    start = hyperparameters.Start(gp, 0)
    assert search._optimise_sparse(start, rows, stop) is None
    found = search._optimise_sparse(start, rows, stop, close=inf)
    assert found is not None
    optimum, _ = found
    exact = optimum.model.dense_bound(rows)().item()
    assert optimum.evidence == pytest.approx(exact, abs=1e-6)
    assert optimum.evidence > before + 50


def test_evidence_fresh_start_finds_the_optimum_that_fewer_rows_miss(monkeypatch) -> None:
    monkeypatch.setattr(hyperparameters, "STAGES", (30, 60, 200))
    rows = drawn(150, 0.5, 0.1)
    best = compared(rows, ScaleKernel(RBFKernel())).optima[0].evidence
    flat = SparseGP(ScaleKernel(RBFKernel()), rows.X[:0], noise=1.0)
    flat.kernel.initialize(outputscale=1e-6)
    trainable_lengthscales(flat.kernel)[0].initialize(lengthscale=1e3)
    start = hyperparameters.Start(flat, 0)
    monkeypatch.setattr(hyperparameters._Search, "continued", lambda search, ranked, **_: [start])
    found = compared(rows, ScaleKernel(RBFKernel())).optima[0].evidence
    assert found == pytest.approx(best, abs=0.1)


def test_evidence_two_optima_of_each_kernel_are_continued() -> None:
    rows = data(20)
    models = [model(rows, kernel) for kernel in (ScaleKernel(RBFKernel()), MaternKernel(nu=2.5))]
    # Kernels and evidences, the best first; the second and the fifth equal those before them.
    found = [(0, 100.0), (0, 99.99), (0, 90.0), (1, 85.0), (1, 84.99), (0, 80.0), (1, 70.0)]
    ranked = [
        Optimum(model(rows, models[k].kernel, noise=1 / nats), nats, rows.observations, k)
        for k, nats in found
    ]
    search = hyperparameters._Search(models, rows, torch.arange(20), Budget(rows.X.device), LOG)

    def continued(*, of_each_kernel: bool) -> list[tuple[int, int]]:
        starts = search.continued(ranked, of_each_kernel=of_each_kernel)
        return [(start.kernel, round(1 / start.model.noise.item())) for start in starts]

    assert continued(of_each_kernel=False) == [(0, 100), (0, 90)]
    assert continued(of_each_kernel=True) == [(0, 100), (0, 90), (1, 85), (1, 70)]


def test_evidence_of_each_kernel_is_that_of_all_rows(monkeypatch) -> None:
    rows = drawn(150, 0.5, 0.1)
    monkeypatch.setattr(hyperparameters, "STAGES", (30, 60, 200))
    kernels = [ScaleKernel(RBFKernel()), ScaleKernel(MaternKernel(nu=2.5))]
    found = compared(rows, *kernels)
    for index, kernel in enumerate(kernels):
        best = compared(rows, kernel).optima[0].evidence / rows.observations
        assert found.kernels[index] == pytest.approx(best, abs=2e-3)
