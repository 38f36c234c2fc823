"""The fast schedule keeps its promises on draws from known Gaussian processes."""

from functools import cache

import pytest
import torch
from gpytorch.kernels import LinearKernel, MaternKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import BernoulliLikelihood, GaussianLikelihood
from gpytorch.means import ConstantMean
from sklearn.datasets import load_diabetes

from helpers import oracles
from helpers.short_fits import smaller_sizes
from winnowgp import fit
from winnowgp.data import Dataset
from winnowgp.models import Posterior, SparseGP, VariationalGP
from winnowgp.training import FastSchedule, FitResult, Tolerance

pytestmark = pytest.mark.unchecked

TOLERANCE = 0.01
# Rows, columns, lengthscale and noise variance.
DRAWS = [
    (60, 1, 0.3, 1e-3),
    (60, 2, 1.0, 1.0),
    (100, 1, 0.1, 0.01),
    (100, 3, 2.0, 1e-3),
    (150, 2, 0.7, 0.1),
    (200, 1, 0.5, 1.0),
]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@cache
def drawn(N: int, D: int, lengthscale: float, noise: float) -> Dataset:
    """Return a draw from a GP with an RBF kernel of unit variance on [-1, 1]^D."""
    g = seeded(N + D)
    X = 2 * torch.rand(N, D, generator=g, dtype=torch.float64) - 1
    K = torch.exp(-0.5 * ((X[:, None] - X) / lengthscale).square().sum(-1))
    eps = torch.randn(2, N, generator=g, dtype=torch.float64)
    L = torch.linalg.cholesky(K + 1e-8 * torch.eye(N))
    return Dataset.of(X, L @ eps[0] + noise**0.5 * eps[1])


@cache
def fitted(*draw, criterion: str = "elbo") -> FitResult[SparseGP]:
    rows = drawn(*draw)
    gp = SparseGP(ScaleKernel(RBFKernel(ard_num_dims=rows.D)), rows.X[:0], noise=0.1)
    schedule = FastSchedule(Tolerance(TOLERANCE), criterion=criterion, inclusion_steps=10)
    return fit(gp, rows, schedule=schedule, generator=seeded())


def test_fast_few_points_at_other_hyperparameters_are_preferred() -> None:
    """The evidence is highest for a term that varies rapidly and gains 0.002 nats in all."""
    values, target = map(torch.from_numpy, load_diabetes(return_X_y=True))
    X, y = values[::2, [2, 3, 8]], target[::2]
    rows = Dataset.of((X - X.mean(0)) / X.std(0), (y - y.mean()) / y.std())
    gp = SparseGP(LinearKernel() + ScaleKernel(RBFKernel()), rows.X[:0], noise=0.1)
    schedule = FastSchedule(Tolerance(TOLERANCE), inclusion_steps=5, rounds=1)
    with smaller_sizes(1):
        result = fit(gp, rows, schedule=schedule, generator=seeded())
    # A linear function of three columns.
    assert result.posterior.M == 3
    assert 0 <= result.elbo_gap < TOLERANCE * rows.N
    assert result.frontier is not None
    assert result.frontier.elbos[3] == pytest.approx(result.elbo)


def dense_evidence(gp: SparseGP, rows: Dataset) -> float:
    """log N(y | 0, K + σ² I) by dense matrices."""
    with torch.no_grad():
        K = gp.kernel(rows.X).to_dense()
        return oracles.log_normal(rows.Y, K + gp.noise * torch.eye(rows.N)).item()


def reference(result: FitResult[SparseGP]) -> float:
    """Return the exact evidence at its maximum, which every ELBO is compared with."""
    assert result.frontier is not None
    assert result.frontier.evidence is not None
    return result.frontier.evidence


@pytest.mark.parametrize("draw", DRAWS)
def test_fast_elbo_is_within_tolerance_of_evidence(draw) -> None:
    rows, result = drawn(*draw), fitted(*draw)
    assert result.growth is not None
    assert result.growth.limit is None
    assert result.growth.elbos[-1] > reference(result) - TOLERANCE * rows.N
    assert result.elbo == pytest.approx(result.model.fixed_bound(rows), abs=1e-6)
    assert result.elbo_gap == pytest.approx(max(reference(result) - result.elbo, 0), abs=1e-6)
    assert result.elbo_gap <= TOLERANCE * rows.N
    assert result.posterior.M < rows.N


@pytest.mark.parametrize("draw", DRAWS)
def test_fast_reference_is_at_least_the_generating_evidence(draw) -> None:
    rows, (*_, lengthscale, noise) = drawn(*draw), draw
    true = SparseGP(ScaleKernel(RBFKernel()), rows.X[:0], noise=noise)
    true.kernel.initialize(**{"outputscale": 1.0, "base_kernel.lengthscale": lengthscale})
    # L-BFGS leaves 3e-4 nats per row.
    assert reference(fitted(*draw)) > dense_evidence(true, rows) - 1e-3 * rows.N


@pytest.mark.parametrize("draw", DRAWS)
def test_fast_reported_evidence_is_exact(draw) -> None:
    rows, result = drawn(*draw), fitted(*draw)
    assert result.evidence is not None
    assert result.evidence.exact
    expected = dense_evidence(result.model, rows)
    assert result.evidence.lower == pytest.approx(expected, abs=1e-4)
    assert result.evidence.upper == pytest.approx(expected, abs=1e-4)
    assert result.elbo <= expected + 1e-6


@pytest.mark.parametrize("draw", [DRAWS[i] for i in (0, 4)])
def test_fast_predictive_gap_is_within_tolerance(draw) -> None:
    with smaller_sizes(0):
        result = fitted(*draw, criterion="predictive")
    assert result.growth is not None
    assert result.growth.limit is None
    assert result.predictive_gap is not None
    gap = result.predictive_gap
    assert gap.nats + gap.standard_error <= TOLERANCE + 1e-9
    assert result.elbo_gap == pytest.approx(max(reference(result) - result.elbo, 0), abs=1e-6)
    # Predictions lose less than the ELBO, so that fewer of the same candidates suffice.
    frontier = result.frontier
    assert frontier is not None
    enough = frontier.elbos >= reference(result) - TOLERANCE * frontier.N
    assert enough.nonzero()[0].item() + 1 >= result.posterior.M


def rebuilt(posterior: Posterior) -> SparseGP:
    assert isinstance(posterior.likelihood, GaussianLikelihood)
    noise = posterior.likelihood.noise.item()
    return SparseGP(posterior.kernel, posterior.Z, mean=posterior.mean, noise=noise)


@pytest.mark.parametrize("draw", [DRAWS[i] for i in (0, 2, 4)])
def test_fast_sized_models_have_their_elbo(draw) -> None:
    rows, result = drawn(*draw), fitted(*draw)
    assert result.sized
    sizes = [sized.posterior.M for sized in result.sized]
    assert sizes == sorted(set(sizes))
    assert sizes[-1] < result.posterior.M
    for sized in result.sized:
        assert isinstance(sized.posterior, Posterior)
        gp = rebuilt(sized.posterior)
        assert sized.elbo == pytest.approx(gp.fixed_bound(rows), abs=1e-4)
        predicted = gp.posterior(rows).predict(rows.X)
        torch.testing.assert_close(sized.posterior.predict_mean(rows.X), predicted.mean)
        # A little below the density of the rows that it was fitted to.
        density = gp.posterior(rows).log_density(rows.X, rows.Y).mean().item()
        assert density - 0.3 < sized.log_density < density + 0.1
    elbos = [sized.elbo for sized in result.sized]
    assert elbos == sorted(elbos)


@pytest.mark.parametrize("draw", DRAWS)
def test_fast_frontier_is_the_best_of_all_sizes(draw) -> None:
    rows, result = drawn(*draw), fitted(*draw)
    frontier = result.frontier
    assert frontier is not None
    assert frontier.N == rows.N
    # The constant model has independent targets of one variance.
    variance = rows.Y.square().mean()
    constant = oracles.log_normal(rows.Y, variance * torch.eye(rows.N)).item()
    assert frontier.elbos[0].item() == pytest.approx(constant, abs=1e-3 * rows.N)
    models = [(result.posterior.M, result.elbo)]
    models += [(sized.posterior.M, sized.elbo) for sized in result.sized]
    for M, elbo in models:
        assert frontier.elbos[M] >= elbo - 1e-6
    assert frontier.elbos.max() <= reference(result) + 1e-6 * rows.N + TOLERANCE * rows.N
    # At the last hyper-parameters, each subset of the selection is in the frontier too.
    assert result.selection.frontier is not None
    bounds = result.selection.frontier.bounds
    assert (frontier.elbos[: len(bounds)] >= bounds - 1e-6).all()


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.usefixtures("one_size")
def test_fast_pure_noise_needs_no_points(seed: int) -> None:
    g = seeded(seed)
    X, y = (torch.randn(60, columns, generator=g, dtype=torch.float64) for columns in (2, 1))
    gp = SparseGP(ScaleKernel(RBFKernel(ard_num_dims=2)), X[:0])
    schedule = FastSchedule(inclusion_steps=5)
    result = fit(gp, Dataset(X, y), schedule=schedule, generator=seeded())
    assert result.posterior.M == 0
    # The evidence of pure noise exceeds the constant model's, but not by three nats and a half per
    # parameter of the kernel.
    assert result.elbo_gap == pytest.approx(max(reference(result) - result.elbo, 0))
    assert result.elbo_gap < 3 + 0.5 * 3
    constant = oracles.log_normal(y, y.square().mean() * torch.eye(60)).item()
    assert result.elbo == pytest.approx(constant, abs=0.1)


def bernoulli(X: torch.Tensor, y: torch.Tensor) -> FitResult[VariationalGP]:
    gp = VariationalGP(
        ScaleKernel(RBFKernel(ard_num_dims=X.shape[1])),
        X[:0],
        likelihood=BernoulliLikelihood(),
        mean=ConstantMean(),
    )
    schedule = FastSchedule(inclusion_steps=5, rounds=1)
    return fit(gp, Dataset.of(X, y), schedule=schedule, generator=seeded())


@pytest.mark.usefixtures("one_size")
def test_fast_classes_without_effect_need_no_points() -> None:
    g = seeded(1)
    X = torch.randn(60, 2, generator=g, dtype=torch.float64)
    y = (torch.rand(60, generator=g, dtype=torch.float64) < 0.3).double()
    result = bernoulli(X, y)
    assert result.posterior.M == 0
    share = y.mean()
    constant = (y * share.log() + (1 - y) * (1 - share).log()).sum().item()
    assert result.elbo == pytest.approx(constant, abs=0.1)


@pytest.mark.usefixtures("one_size")
def test_fast_rare_class_keeps_points() -> None:
    # Eight of 100 rows, most of them in one corner.
    g = seeded(2)
    X = torch.rand(100, 2, generator=g, dtype=torch.float64)
    y = (X.sum(1) > X.sum(1).sort().values[-9]).double()
    assert y.sum() == 8
    result = bernoulli(X, y)
    assert result.posterior.M > 0
    share = y.mean()
    constant = (y * share.log() + (1 - y) * (1 - share).log()).sum().item()
    assert result.elbo > constant + 10
    # At most half a nat or a fiftieth of what there is to gain is given up.
    gain = result.elbo + result.elbo_gap - constant
    assert result.elbo_gap <= max(0.5, 0.02 * gain) + 0.01


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.usefixtures("one_size")
def test_fast_irrelevant_columns_keep_the_elbo(seed: int) -> None:
    g = seeded(seed)
    X = 2 * torch.rand(120, 4, generator=g, dtype=torch.float64) - 1
    y = torch.sin(9 * X[:, 0]) + 0.2 * torch.randn(120, generator=g, dtype=torch.float64)
    elbos = []
    for D in (1, 4):
        rows = Dataset.of(X[:, :D], y)
        gp = SparseGP(ScaleKernel(RBFKernel(ard_num_dims=D)), rows.X[:0])
        schedule = FastSchedule(Tolerance(TOLERANCE), inclusion_steps=5)
        elbos.append(fit(gp, rows, schedule=schedule, generator=seeded()).elbo)
    assert elbos[1] > elbos[0] - TOLERANCE * 120


@pytest.mark.usefixtures("one_size")
def test_fast_other_kernels_are_compared_and_the_best_is_kept() -> None:
    rows = drawn(*DRAWS[2])
    gp = SparseGP(ScaleKernel(MaternKernel(nu=1.5)), rows.X[:0], noise=0.1)
    schedule = FastSchedule(kernels=(ScaleKernel(RBFKernel()),), inclusion_steps=5)
    result = fit(gp, rows, schedule=schedule, generator=seeded())
    rough, smooth = result.kernel_evidence
    assert smooth > rough
    assert isinstance(result.model.kernel.get_submodule("base_kernel"), RBFKernel)
    # A smooth kernel needs fewer points.
    alone = fit(gp, rows, schedule=FastSchedule(inclusion_steps=5), generator=seeded())
    assert len(alone.kernel_evidence) == 1
    assert result.elbo > alone.elbo
    assert result.posterior.M < alone.posterior.M
