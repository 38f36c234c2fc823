"""Growth of the pool of candidates, and the limits that end it."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import BernoulliLikelihood

from helpers import oracles
from winnowgp.data import Dataset
from winnowgp.models import SparseGP, VariationalGP
from winnowgp.models.kernels import covariance
from winnowgp.training import growth
from winnowgp.training.budget import Budget, selection_work
from winnowgp.training.fast_steps import FastSteps
from winnowgp.training.growth import (
    grow,
    grow_refitted,
    grown_pool,
    measure_last_doubling,
    refit,
)
from winnowgp.training.hyperparameters import Initialization
from winnowgp.training.lbfgs import Stop
from winnowgp.training.optima import Optimum
from winnowgp.training.schedules import TrainingContext

N, NOISE, TOLERANCE = 120, 0.01, 0.01


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def kernel(lengthscale: float = 0.5, *, rough: bool = False) -> ScaleKernel:
    base = MaternKernel(nu=0.5) if rough else RBFKernel()
    return ScaleKernel(base).initialize(
        **{"outputscale": 1.0, "base_kernel.lengthscale": lengthscale}
    )


def drawn(prior: ScaleKernel, rows: int = N, noise: float = NOISE, seed: int = 0) -> Dataset:
    """Return a draw from the prior on a line."""
    g = seeded(seed)
    X = 10 * torch.rand(rows, 1, generator=g, dtype=torch.float64)
    with torch.no_grad():
        K = prior.double()(X).to_dense()
    eps = torch.randn(2, rows, generator=g, dtype=torch.float64)
    y = torch.linalg.cholesky(K + 1e-9 * torch.eye(rows)) @ eps[0] + noise**0.5 * eps[1]
    return Dataset.of(X, y)


def model(rows: Dataset, prior: ScaleKernel, noise: float = NOISE) -> SparseGP:
    return SparseGP(prior, rows.X[:0], noise=noise)


def steps_of(gp, rows: Dataset, *, work: float | None = None, seconds: float | None = None):
    budget = Budget(rows.X.device, work=work, seconds=seconds)
    return FastSteps(gp, rows, rows=4000, context=TrainingContext(seeded()), budget=budget)


def dense_evidence(gp: SparseGP, rows: Dataset) -> float:
    with torch.no_grad():
        K = gp.kernel(rows.X).to_dense()
        return oracles.log_normal(rows.Y, K + gp.noise * torch.eye(rows.N)).item()


def dense_elbo(gp: SparseGP, rows: Dataset) -> float:
    with torch.no_grad():
        Z = gp.candidates
        Kuu = gp.kernel(Z).to_dense() + 1e-10 * torch.eye(gp.K)
        blocks = Kuu, gp.kernel(Z, rows.X).to_dense(), gp.kernel(rows.X).to_dense()
        return oracles.collapsed(*blocks, rows.Y, gp.noise.reshape(())).item()


@pytest.mark.parametrize("lengthscale", [2.0, 0.5, 0.2])
def test_grow_ends_within_half_of_the_tolerance_of_the_evidence(lengthscale: float) -> None:
    rows = drawn(kernel(lengthscale))
    gp = model(rows, kernel(lengthscale))
    reference = dense_evidence(gp, rows)
    pool = grow(steps_of(gp, rows), gp, tolerance=TOLERANCE, most=N, reference=reference, first=4)
    sizes, elbos = pool.growth.sizes, pool.growth.elbos
    assert not pool.limited
    assert pool.growth.limit is None
    assert pool.model.K == sizes[-1] < N
    # The rows of a smooth function may end before the last doubling is complete.
    assert list(sizes[:-1]) == [4 * 2**i for i in range(len(sizes) - 1)]
    assert sizes[-2] < sizes[-1] <= 2 * sizes[-2]
    assert pool.elbo == elbos[-1] == pytest.approx(dense_elbo(pool.model, rows), abs=1e-3)
    gaps = [reference - elbo for elbo in elbos]
    assert gaps[-1] < 0.5 * TOLERANCE * N
    # The pool before was not large enough.
    assert gaps[-2] > 0.5 * TOLERANCE * N
    assert pool.growth.last_gain == pytest.approx((elbos[-1] - elbos[-2]) / N)


def test_grow_goes_on_after_a_small_gain_if_the_evidence_is_far() -> None:
    # A weak function with two hundred turns: sixteen points explain hardly more than eight.
    prior = kernel(0.02)
    prior.initialize(outputscale=0.12)
    rows = drawn(prior, 400, noise=1.0)
    gp = model(rows, prior, noise=1.0)
    reference = dense_evidence(gp, rows)
    pool = grow(steps_of(gp, rows), gp, tolerance=TOLERANCE, most=400, reference=reference, first=8)
    gains = [(b - a) / 400 for a, b in pairwise(pool.growth.elbos)]
    assert gains[0] < 0.5 * TOLERANCE
    assert pool.growth.limit is None
    assert reference - pool.elbo < 0.5 * TOLERANCE * 400


def test_grow_keeps_earlier_candidates_and_hyperparameters() -> None:
    rows, prior = drawn(kernel()), kernel()
    gp = model(rows, prior).with_candidates(rows.X[5:9])
    pool = grow(
        steps_of(model(rows, prior), rows), gp, tolerance=TOLERANCE, most=N, reference=None, first=4
    )
    assert pool.growth.sizes[0] == 4
    assert torch.equal(pool.model.candidates[:4], rows.X[5:9])
    assert len(pool.model.candidates.unique(dim=0)) == pool.model.K
    for (name, one), other in zip(
        gp.kernel.named_parameters(), pool.model.kernel.parameters(), strict=True
    ):
        assert torch.equal(one, other), name
    assert torch.equal(gp.noise, pool.model.noise)


def test_grow_without_reference_explains_the_variance() -> None:
    rows, prior = drawn(kernel()), kernel()
    gp = model(rows, prior)
    pool = grow(steps_of(gp, rows), gp, tolerance=TOLERANCE, most=N, reference=None, first=4)
    assert pool.growth.limit is None
    # The trace term is most of what the ELBO lacks.
    with torch.no_grad():
        Z, K = pool.model.candidates, gp.kernel(rows.X).to_dense()
        Q = oracles.explained(gp.kernel(Z).to_dense(), gp.kernel(Z, rows.X).to_dense())
    unexplained = ((K - Q).trace() / (2 * NOISE * N)).item()
    gain = pool.growth.last_gain
    assert unexplained < TOLERANCE or (gain < 0.5 * TOLERANCE and unexplained < 10 * TOLERANCE)
    assert dense_evidence(gp, rows) - pool.elbo < TOLERANCE * N


def test_grow_rough_function_uses_all_rows_without_a_limit() -> None:
    rows, prior = drawn(kernel(0.3, rough=True), 60, noise=1e-4), kernel(0.3, rough=True)
    gp = model(rows, prior, noise=1e-4)
    reference = dense_evidence(gp, rows)
    # A reference that no pool reaches.
    pool = grow(steps_of(gp, rows), gp, tolerance=1e-5, most=60, reference=reference + 1, first=16)
    assert pool.growth.sizes == (16, 32, 60)
    assert pool.growth.limit is None
    assert pool.elbo == pytest.approx(reference, abs=1e-2)


def test_grow_repeated_rows_are_exhausted() -> None:
    once, prior = drawn(kernel(0.2), 20), kernel(0.2)
    rows = Dataset(once.X.repeat(4, 1), once.Y.repeat(4, 1))
    gp = model(rows, prior)
    steps, evidence = steps_of(gp, rows), dense_evidence(gp, rows)
    pool = grow(steps, gp, tolerance=1e-5, most=80, reference=evidence, first=16)
    assert pool.growth.limit is None
    assert pool.growth.sizes == (16, 20)
    # A reference that no pool reaches, as with rounding errors.
    pool = grow(steps, gp, tolerance=1e-5, most=80, reference=evidence + 1, first=16)
    assert pool.growth.limit == "precision"
    assert pool.growth.sizes == (16, 20)


def test_grow_fewer_candidates_than_needed_are_a_limit() -> None:
    rows, prior = drawn(kernel(0.2)), kernel(0.2)
    gp = model(rows, prior)
    reference = dense_evidence(gp, rows)
    pool = grow(steps_of(gp, rows), gp, tolerance=TOLERANCE, most=20, reference=reference, first=8)
    assert pool.growth.sizes == (8, 16, 20)
    assert pool.growth.limit == "n_candidates"
    assert pool.limited


def test_grow_fewer_candidates_that_suffice_are_no_limit() -> None:
    rows, prior = drawn(kernel(4.0)), kernel(4.0)
    gp = model(rows, prior)
    reference = dense_evidence(gp, rows)
    pool = grow(steps_of(gp, rows), gp, tolerance=TOLERANCE, most=16, reference=reference, first=4)
    assert pool.growth.limit is None


def test_grow_budget_of_work_ends_growth() -> None:
    rows, prior = drawn(kernel(0.2)), kernel(0.2)
    gp = model(rows, prior)
    generous = steps_of(gp, rows)
    # Enough for sixteen candidates and a quarter of a selection for each pool before.
    spent = (selection_work(gp, rows, 8) + selection_work(gp, rows, 16)) / 4
    work = spent + generous.pool_work(32) - 1
    pool = grow(
        steps_of(gp, rows, work=work), gp, tolerance=TOLERANCE, most=N, reference=None, first=8
    )
    assert pool.growth.sizes == (8, 16)
    assert pool.growth.limit == "work"
    more = grow(
        steps_of(gp, rows, work=work + 2), gp, tolerance=TOLERANCE, most=N, reference=None, first=8
    )
    assert more.growth.sizes == (8, 16, 32)


def test_grow_clock_ends_growth() -> None:
    rows, prior = drawn(kernel(0.2)), kernel(0.2)
    gp = model(rows, prior)
    steps = steps_of(gp, rows, seconds=0.0)
    pool = grow(steps, gp, tolerance=TOLERANCE, most=N, reference=None, first=8)
    assert pool.growth.sizes == (8,)
    assert pool.growth.limit == "max_fit_seconds"


def test_limited_pool_of_one_size_has_the_gain_over_half_of_it() -> None:
    rows, prior = drawn(kernel(0.2)), kernel(0.2)
    gp = model(rows, prior)
    steps = steps_of(gp, rows)
    initial = Initialization((Optimum(gp, 0.0, rows.N, 0),), rows.N, True, (0.0,))
    pool, _ = grown_pool(steps, initial, tolerance=TOLERANCE, most=8, constant=-1e3)
    assert pool.growth.limit == "n_candidates"
    assert pool.growth.sizes[:2] == (4, 8)
    at_start = gp.with_candidates(steps.with_fresh(gp, 8).candidates)
    half = gp.with_candidates(at_start.candidates[:4])
    expected = [gp.fixed_bound(rows) for gp in (half, at_start)]
    assert pool.growth.elbos[:2] == pytest.approx(expected)


def test_grow_memory_ends_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    # Ten matrices of 20 by 20 doubles.
    monkeypatch.setattr("winnowgp.training.budget.memory", lambda device: 10 * 8 * 20**2)
    rows, prior = drawn(kernel(0.2)), kernel(0.2)
    gp = model(rows, prior)
    pool = grow(steps_of(gp, rows), gp, tolerance=TOLERANCE, most=N, reference=None, first=8)
    assert pool.growth.sizes == (8, 16)
    assert pool.growth.limit == "memory"


def wrong(rows: Dataset) -> SparseGP:
    """Return a model that is far too smooth and noisy, without candidates."""
    return model(rows, kernel(2.0), noise=0.5)


def test_refit_raises_the_elbo_and_holds_locations() -> None:
    rows = drawn(kernel())
    gp = wrong(rows)
    steps = steps_of(gp, rows)
    pool = grow(steps, gp, tolerance=TOLERANCE, most=N, reference=None, first=32)
    better = refit(steps, pool)
    assert better.elbo > pool.elbo + 20
    assert better.elbo == pytest.approx(dense_elbo(better.model, rows), abs=1e-3)
    assert torch.equal(better.model.candidates, pool.model.candidates)
    assert better.model.candidates.requires_grad
    assert better.growth.sizes == (*pool.growth.sizes, pool.model.K)
    assert better.growth.elbos == (*pool.growth.elbos, better.elbo)
    assert (better.growth.limit, better.growth.last_gain) == (None, pool.growth.last_gain)


def grown(rows: Dataset, *, most: int = N, work: float | None = None):
    gp = wrong(rows)
    steps = steps_of(gp, rows, work=work)
    pool = grow(steps, gp, tolerance=TOLERANCE, most=8, reference=None, first=8)
    pool = replace(pool, growth=replace(pool.growth, limit=None))
    return grow_refitted(steps, pool, tolerance=TOLERANCE, most=most, constant=-1.5 * rows.N)


def test_grow_refitted_reaches_the_evidence_at_other_hyperparameters() -> None:
    rows = drawn(kernel())
    pool = grown(rows)
    assert pool.growth.limit is None
    best = dense_evidence(model(rows, kernel()), rows)
    # The generating hyper-parameters are about as good as the best ones.
    assert pool.elbo > best - 2 * TOLERANCE * N
    assert pool.elbo == pytest.approx(dense_elbo(pool.model, rows), abs=1e-3)
    assert max(pool.growth.elbos) <= pool.elbo + 1e-3
    # The last doubling gained less than the tolerance.
    assert pool.growth.last_gain < TOLERANCE


def test_grow_refitted_doubles_until_a_limit() -> None:
    rows = drawn(kernel(0.2))
    pool = grown(rows, most=24)
    assert pool.growth.limit == "n_candidates"
    assert pool.model.K == 24


def test_grow_refitted_work_is_a_limit() -> None:
    rows = drawn(kernel(0.2))
    pool = grown(rows, work=steps_of(wrong(rows), rows).pool_work(8))
    assert pool.growth.limit == "work"


def test_measure_last_doubling_compares_with_half_the_candidates() -> None:
    rows, prior = drawn(kernel(0.2)), kernel(0.2)
    gp = model(rows, prior)
    steps = steps_of(gp, rows)
    pool = refit(steps, grow(steps, gp, tolerance=TOLERANCE, most=40, reference=None, first=40), 60)
    measured = measure_last_doubling(steps, pool)
    # Half of the candidates, with hyper-parameters of their own.
    half = steps.with_fresh(pool.model.with_candidates(rows.X[:0]), 20)
    half.candidates.requires_grad_(False)
    refitted, elbo = steps.optimise(half, stop=Stop(1e-3 * N, 10, 15))
    assert refitted.K == 20
    assert elbo > half.fixed_bound(rows)
    assert measured.growth.last_gain == pytest.approx((pool.elbo - elbo) / N, abs=1e-6)
    assert measured.growth.last_gain > TOLERANCE
    assert measured.elbo == pool.elbo
    assert measured.growth.limit == pool.growth.limit


def test_grow_refitted_other_likelihoods_refit_each_doubling(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = drawn(kernel(0.8), 30)
    labels = Dataset(rows.X, (rows.Y > 0).double())
    gp = VariationalGP(kernel(3.0), rows.X[:0], likelihood=BernoulliLikelihood())
    sizes: list[int] = []
    every = growth.refit

    def noted(steps, pool, *arguments):
        sizes.append(pool.model.K)
        return every(steps, pool, *arguments)

    monkeypatch.setattr(growth, "refit", noted)
    steps = steps_of(gp, labels)
    pool = grow(steps, gp, tolerance=TOLERANCE, most=4, reference=None, first=4)
    pool = replace(pool, growth=replace(pool.growth, limit=None))
    pool = grow_refitted(steps, pool, tolerance=TOLERANCE, most=30, constant=-0.7 * 30)
    assert sizes[0] == 4
    # Few rows have conditional variance given the others, so that the last pool is smaller.
    assert all(b == 2 * a for a, b in pairwise(sizes[:-1]))
    assert sizes[-2] < sizes[-1] <= 2 * sizes[-2]
    # The ELBO of each pool before and after its refit.
    assert pool.growth.sizes == tuple(size for size in sizes for _ in range(2))
    assert pool.growth.limit is None
    assert pool.growth.last_gain < TOLERANCE
    assert pool.elbo == pytest.approx(pool.model.fixed_bound(labels), abs=1e-6)


@pytest.mark.parametrize("most", [12, 150])
def test_limited_pool_has_hyperparameters_that_predict_best(most: int) -> None:
    """The ELBO of too few candidates prefers more noise; with many of them predictions do not."""
    g = seeded()
    X = 2 * torch.rand(200, 3, generator=g, dtype=torch.float64)
    prior = ScaleKernel(MaternKernel(1.5)).double()
    prior.base_kernel.lengthscale = torch.tensor(0.5)
    K = covariance(prior, X, X).detach() + 0.01 * torch.eye(200)
    normal = torch.randn(200, 1, generator=g, dtype=torch.float64)
    rows = Dataset(X, torch.linalg.cholesky(K) @ normal)
    gp = SparseGP(prior, X[:0], noise=0.003)
    steps = steps_of(gp, rows)
    initial = Initialization((Optimum(gp, 0.0, rows.N, 0),), rows.N, True, (0.0,))
    pool, highest = grown_pool(steps, initial, tolerance=TOLERANCE, most=most, constant=-1e3)
    held_out = steps.cross_validation(most, share=1.0)
    assert held_out is not None
    densities = []
    for factor in (1, 3, 10):
        candidates = steps.with_fresh(gp, most).candidates
        densities.append(held_out.densities(SparseGP(prior, candidates, noise=0.003 * factor)))
    unchanged = max(densities, key=held_out.mean)
    found = held_out.densities(pool.model)
    assert pool.predicts_best == (most == 150)
    assert highest >= pool.elbo
    if pool.predicts_best:
        torch.testing.assert_close(found, unchanged, rtol=1e-6, atol=1e-6)
        assert pool.model.noise <= 0.03
    else:
        gap = held_out.gap(unchanged, found)
        assert gap.nats < 2 * gap.standard_error
