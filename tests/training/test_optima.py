"""Optima of the evidence: which of them are the same."""

from dataclasses import replace
from math import inf
from typing import Any, cast

import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import BernoulliLikelihood
from gpytorch.means import ConstantMean

from winnowgp.data import Dataset
from winnowgp.models import SparseGP, VariationalGP
from winnowgp.training.initialization import scaled
from winnowgp.training.lbfgs import Stop, maximise_elbo
from winnowgp.training.optima import (
    Optimum,
    approaches,
    best_objectives,
    best_optima,
    best_predicting,
    distinct_optima,
    divergence,
    has_lost,
    leave_one_out_gap,
    predicts_worse,
)


def oscillation(N: int) -> Dataset:
    """A fast oscillation with little noise."""
    g = torch.Generator().manual_seed(0)
    X = 2 * torch.rand(N, 1, generator=g, dtype=torch.float64) - 1
    y = torch.sin(9 * X[:, 0]) + 0.1 * torch.randn(N, generator=g, dtype=torch.float64)
    return Dataset.of(X, y)


def maximised(rows: Dataset, *, lengthscale: float, noise: float) -> SparseGP:
    """The maximum of the evidence next to some hyper-parameters."""
    kernel = ScaleKernel(RBFKernel()).initialize(**{"base_kernel.lengthscale": lengthscale})
    gp = SparseGP(kernel, rows.X[:0], noise=noise)
    maximise_elbo(gp, rows.X, objective=gp.dense_bound(rows), stop=Stop(1e-6, 10, 300))
    return gp


def test_divergence_equals_dense_kl_divergence() -> None:
    rows = oscillation(12)
    a = SparseGP(ScaleKernel(RBFKernel()), rows.X[:0], noise=0.2, mean=ConstantMean())
    a.mean.initialize(constant=0.3)
    b = scaled(a, variance=1.7, lengthscale=0.6, noise=3.0)
    b.mean.initialize(constant=-0.2)

    def distribution(gp: SparseGP) -> torch.distributions.MultivariateNormal:
        kernel, prior_mean = cast(Any, gp.kernel), cast(Any, gp.mean)
        variance, lengthscale = kernel.outputscale, kernel.base_kernel.lengthscale
        K = variance * torch.exp(-0.5 * (rows.X - rows.X.mT).square() / lengthscale**2)
        mean = prior_mean.constant.expand(rows.N)
        K = K + gp.noise * torch.eye(rows.N, dtype=K.dtype)
        return torch.distributions.MultivariateNormal(mean, K)

    with torch.no_grad():
        expected = torch.distributions.kl_divergence(distribution(a), distribution(b)).item()
    assert divergence(a, b, rows) == pytest.approx(expected, rel=1e-9)
    assert divergence(a, a, rows) == pytest.approx(0.0, abs=1e-9)


def test_approaches_same_mode_only() -> None:
    """Hyper-parameters next to an optimum approach it; those of another mode do not."""
    rows = oscillation(50)

    def optimum(gp: SparseGP) -> Optimum[SparseGP]:
        return Optimum(gp, gp.dense_bound(rows)().item(), rows.N, 0)

    best = optimum(maximised(rows, lengthscale=0.2, noise=0.01))
    noisy = maximised(rows, lengthscale=30.0, noise=1.0)
    near = optimum(scaled(best.model, variance=1.3, lengthscale=0.9, noise=1.2))
    assert approaches(near, best, rows)
    assert not approaches(best, near, rows)
    assert not approaches(optimum(noisy), best, rows)
    assert not approaches(Optimum(near.model, near.evidence, rows.N, 1), best, rows)


def test_optima_of_equal_evidence_are_one_unless_kernels_differ() -> None:
    gp = SparseGP(ScaleKernel(RBFKernel()), oscillation(5).X[:0])
    values = [(9.0, 1), (8.9, 1), (8.0, 0), (7.99, 1), (-inf, 2)]
    ranked = [Optimum(gp, nats, 100.0, kernel) for nats, kernel in values]
    assert distinct_optima(ranked) == [ranked[0], ranked[2], ranked[3]]
    assert best_optima(ranked) == [ranked[0], ranked[2], ranked[4]]
    assert best_objectives(ranked, 4) == (0.08, 0.09, -inf, -inf)


@pytest.mark.parametrize(
    ("missing", "recent", "lost"), [(1, 0, False), (3, 1, True), (3, 2, False)]
)
def test_optimum_far_below_the_best_has_lost_unless_it_rises(
    missing: float, recent: float, lost: bool
) -> None:
    rows = oscillation(100)
    gp = SparseGP(ScaleKernel(RBFKernel()), rows.X[:0], noise=0.1)
    # Two nats are 0.02 per observation.
    optimum = Optimum(gp, -missing, 100.0, 0, recent_gain=recent)
    assert has_lost(optimum, 0.0) is lost


def test_leave_one_out_gap_is_that_of_gaussian_noise_and_complete_targets() -> None:
    rows = oscillation(40)
    a = maximised(rows, lengthscale=0.3, noise=0.05)
    b = maximised(rows, lengthscale=30.0, noise=1.0)  # It explains the oscillation as noise.
    gap = leave_one_out_gap(a, b, rows)
    assert gap is not None
    assert gap.nats > 0.5
    reverse = leave_one_out_gap(b, a, rows)
    assert reverse is not None
    assert reverse.nats == pytest.approx(-gap.nats)
    assert predicts_worse(b, a, rows)
    assert not predicts_worse(a, b, rows)
    classes = VariationalGP(a.kernel, rows.X[:0], likelihood=BernoulliLikelihood())
    assert leave_one_out_gap(a, classes, rows) is None
    missing = Dataset(rows.X, torch.cat([rows.Y, rows.Y], 1))
    missing.Y[0, 1] = torch.nan
    assert leave_one_out_gap(a, b, missing) is None


@pytest.mark.parametrize(
    ("below", "changed", "expected"),
    [
        (0.004, {}, 1),
        (0.006, {}, 0),
        (0.004, {"converged": False}, 0),
        (0.004, {"observations": 20.0}, 0),
    ],
)
def test_best_predicting_of_nearly_equal_optima_is_the_better_predictor(
    below: float, changed: dict[str, Any], expected: int
) -> None:
    rows = oscillation(50)
    noisy = maximised(rows, lengthscale=30.0, noise=1.0)
    fine = maximised(rows, lengthscale=0.2, noise=0.01)
    first = Optimum(noisy, 10.0, rows.N, 0, converged=True)
    other = replace(first, model=fine, evidence=10.0 - below * rows.N, **changed)
    assert best_predicting((first, other), rows) == expected
    assert best_predicting((replace(first, model=fine), replace(other, model=noisy)), rows) == 0
