"""Priors on hyper-parameters: their log density, and fits that maximise it with the ELBO."""

from math import inf, log, pi, sqrt
from typing import Any

import numpy as np
import pytest
import torch
from gpytorch.kernels import AdditiveKernel, RBFKernel, ScaleKernel
from gpytorch.priors import GammaPrior, LogNormalPrior, NormalPrior, SmoothedBoxPrior, UniformPrior
from scipy import stats
from scipy.optimize import minimize
from torch import Tensor, nn

from helpers import oracles
from helpers.deep_problems import started, step_data
from winnowgp.data import Dataset, MaskedMatrix
from winnowgp.models import LatentVariableGP, SparseGP
from winnowgp.models.priors import add_weak_priors, log_prior
from winnowgp.training import DeepTraining, FastSchedule, FixedAlpha, PaperSchedule, Tolerance, fit

FIFTY = LogNormalPrior(log(50), 0.001)


def rows(N: int = 40, D: int = 1) -> Dataset:
    g = torch.Generator().manual_seed(0)
    X = torch.rand(N, D, generator=g, dtype=torch.float64)
    y = torch.sin(6 * X[:, 0]) + 0.3 * torch.randn(N, generator=g, dtype=torch.float64)
    return Dataset.of(X, y)


def model(data: Dataset, kernel: RBFKernel, points: int = 5) -> SparseGP:
    return SparseGP(ScaleKernel(kernel), data.X[:points], noise=0.1)


def base(model: Any) -> Any:
    """The kernel inside the `ScaleKernel` of a model or layer."""
    return model.kernel.base_kernel


def test_log_prior_is_the_sum_of_the_registered_densities() -> None:
    kernel = RBFKernel(ard_num_dims=2, lengthscale_prior=GammaPrior(3.0, 2.0))
    kernel.lengthscale = torch.tensor([0.5, 2.0])
    scaled = ScaleKernel(kernel, outputscale_prior=NormalPrior(1.0, 2.0))
    scaled.outputscale = 4.0
    expected = stats.gamma.logpdf([0.5, 2.0], 3, scale=0.5).sum() + stats.norm.logpdf(4, 1, 2)
    assert log_prior(scaled).item() == pytest.approx(expected, rel=1e-6)
    twice = AdditiveKernel(scaled, scaled)
    assert log_prior(twice).item() == pytest.approx(expected, rel=1e-6)


def test_log_prior_without_priors_is_zero() -> None:
    assert log_prior(nn.Sequential(ScaleKernel(RBFKernel()))).item() == 0


def test_log_prior_outside_the_support_is_minus_infinity() -> None:
    kernel = RBFKernel(lengthscale_prior=UniformPrior(1.0, 2.0))
    kernel.lengthscale = torch.tensor(3.0)
    assert log_prior(kernel).item() == -inf


def test_log_prior_of_a_prior_without_support() -> None:
    kernel = RBFKernel(lengthscale_prior=SmoothedBoxPrior(0.1, 2.0, sigma=0.1))
    assert log_prior(kernel).isfinite()


def test_fit_strong_prior_decides_the_lengthscale() -> None:
    data = rows()
    gp = model(data, RBFKernel(lengthscale_prior=FIFTY))
    result = fit(gp, data, schedule=FastSchedule(Tolerance(0.01)))
    assert base(result.model).lengthscale.item() == pytest.approx(50, rel=0.02)


def test_fit_paper_schedule_strong_prior_holds_the_lengthscale() -> None:
    data, lengthscales = rows(), []
    for kernel in (RBFKernel(), RBFKernel(lengthscale_prior=FIFTY)):
        kernel.initialize(lengthscale=50.0)
        schedule = PaperSchedule(0.1, pre=60, joint=10, post=10)
        result = fit(model(data, kernel), data, schedule=schedule)
        lengthscales.append(base(result.model).lengthscale.item())
    assert abs(lengthscales[0] - 50) > 0.3
    assert abs(lengthscales[1] - 50) < 0.1


def test_fit_prior_of_the_noise_enters() -> None:
    data = rows(20)
    gp = model(data, RBFKernel())
    noise: Any = gp.likelihood.noise_covar
    noise.register_prior("prior", LogNormalPrior(log(2.0), 0.001), "noise")
    result = fit(gp, data, schedule=FastSchedule(Tolerance(0.01)))
    assert result.model.noise.item() == pytest.approx(2.0, rel=0.02)


def test_fit_gplvm_prior_enters() -> None:
    g = torch.Generator().manual_seed(1)
    table = torch.randn(20, 3, generator=g, dtype=torch.float64)
    kernel = ScaleKernel(RBFKernel(ard_num_dims=1, lengthscale_prior=FIFTY)).double()
    gp = LatentVariableGP(kernel, table[:, :1], candidates=table[:4, :1], noise=0.5)
    result = fit(gp, MaskedMatrix.of(table), schedule=FastSchedule(Tolerance(0.05)), generator=g)
    assert base(result.model).lengthscale.item() == pytest.approx(50, rel=0.05)


def test_fit_maximises_evidence_and_prior_together() -> None:
    """All rows are inducing points at the optimum, found by another optimiser."""
    data = rows(25)
    prior = LogNormalPrior(log(0.05), 0.3)
    result = fit(
        model(data, RBFKernel(lengthscale_prior=prior), points=0),
        data,
        schedule=FastSchedule(Tolerance(1e-4)),
        generator=torch.Generator().manual_seed(0),
    )

    def negative(raw: np.ndarray) -> float:
        variance, lengthscale, noise = np.exp(raw)
        K = variance * torch.exp(-0.5 * ((data.X - data.X.mT) / lengthscale).square())
        evidence = oracles.log_normal(data.Y, K + noise * torch.eye(25)).item()
        z = (log(lengthscale) - log(0.05)) / 0.3
        return -(evidence - 0.5 * z**2 - log(lengthscale * 0.3 * sqrt(2 * pi)))

    best = min(
        (minimize(negative, [0.0, a, b], method="Nelder-Mead") for a in (-3, -1) for b in (-3, -1)),
        key=lambda found: found.fun,
    )
    fitted = result.model
    lengthscale = base(fitted).lengthscale.item()
    assert lengthscale == pytest.approx(np.exp(best.x[1]), rel=0.1)
    reached = log_prior(fitted).item() + fitted.evidence(data).lower
    assert reached == pytest.approx(-best.fun, abs=0.2)


def test_fit_elbo_does_not_include_the_prior() -> None:
    data = rows()
    kernel = RBFKernel(lengthscale_prior=LogNormalPrior(log(0.3), 0.5))
    result = fit(model(data, kernel), data, schedule=FastSchedule(Tolerance(0.01)))
    assert abs(log_prior(result.model).item()) > 0.1

    def covariance(A: Tensor, B: Tensor) -> Tensor:
        return result.model.kernel(A, B).to_dense().detach()

    Z = result.model.candidates.detach()
    Kuu = covariance(Z, Z) + 1e-10 * torch.eye(len(Z))
    Kuf = covariance(Z, data.X)
    Q = Kuf.mT @ torch.linalg.solve(Kuu, Kuf)
    noise = result.model.noise.detach()
    dense = oracles.log_normal(data.Y, Q + noise * torch.eye(data.N)) - 0.5 / noise * (
        covariance(data.X, data.X).diagonal().sum() - Q.diagonal().sum()
    )
    assert result.elbo == pytest.approx(dense.item(), abs=1e-4)


@pytest.mark.parametrize(
    "schedule",
    [
        FastSchedule(
            FixedAlpha(0.5), inclusion_steps=3, deep=DeepTraining(layerwise=2, pre=30, post=10)
        ),
        PaperSchedule(0.1, pre=10, joint=10, post=10),
    ],
    ids=["fast", "paper"],
)
def test_fit_deep_prior_enters(schedule) -> None:
    lengthscales = []
    for scale in (10.0, 0.01):
        deep = started()
        for layer in deep.layers:
            kernel = base(layer)
            prior = NormalPrior(kernel.lengthscale.detach().clone(), scale)
            kernel.register_prior("prior", prior, "lengthscale")
        before = base(deep.layers[0]).lengthscale.detach()
        result = fit(
            deep, step_data(), schedule=schedule, generator=torch.Generator().manual_seed(0)
        )
        after = base(result.model.layers[0]).lengthscale.detach()
        lengthscales.append((after / before - 1).abs().max().item())
    assert lengthscales[0] > 0.03
    assert lengthscales[1] < 0.02


def test_lengthscale_prior_without_irrelevant_columns_has_a_mode() -> None:
    free, held = (ScaleKernel(RBFKernel(ard_num_dims=4)).double() for _ in range(2))
    add_weak_priors(free)
    add_weak_priors(held, irrelevant=False)
    for factor in (0.2, 1.0, 5.0):
        for kernel in (free, held):
            kernel.base_kernel.initialize(lengthscale=factor * 6.0)
        gap = log_prior(free) - log_prior(held)
        # Equal up to the mode of 3 √D; above it the density falls by log²/2 per column.
        expected = 4 * 0.5 * max(log(factor), 0.0) ** 2
        assert gap.item() == pytest.approx(expected, abs=1e-6)
