"""Both schedules on models whose likelihood is not Gaussian."""

import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import (
    BernoulliLikelihood,
    GaussianLikelihood,
    PoissonLikelihood,
    SoftmaxLikelihood,
    StudentTLikelihood,
)

from helpers.short_fits import short_fits
from winnowgp import fit
from winnowgp.bounds.evidence import Evidence
from winnowgp.data import Dataset
from winnowgp.errors import InputError
from winnowgp.gradients import Relaxed
from winnowgp.models import Posterior, SparseGP, VariationalGP
from winnowgp.point_processes import SquaredCardinality
from winnowgp.training import FastSchedule, FixedAlpha, MaxPoints, PaperSchedule, Tolerance
from winnowgp.training import goals as predict_time
from winnowgp.training.fast_steps import FastSteps
from winnowgp.training.initialization import best_level, kernel_variances, noise_of

X = torch.linspace(-3, 3, 80, dtype=torch.float64)[:, None]
LABELS = (torch.sin(2 * X[:, 0]) > 0).double()


def model(K: int = 0, likelihood=None) -> VariationalGP:
    likelihood = BernoulliLikelihood() if likelihood is None else likelihood
    return VariationalGP(
        ScaleKernel(RBFKernel()), X[:: 80 // K][:K] if K else X[:0], likelihood=likelihood
    )


def data(y: torch.Tensor = LABELS) -> Dataset:
    return Dataset.of(X, y)


@pytest.mark.parametrize(
    "goal",
    [
        Tolerance(0.05),
        pytest.param(MaxPoints(6), marks=pytest.mark.unchecked),
        pytest.param(FixedAlpha(0.05), marks=[pytest.mark.unchecked, pytest.mark.slow]),
    ],
)
def test_fast_schedule_any_likelihood_meets_goal(goal, monkeypatch: pytest.MonkeyPatch) -> None:
    # The two most reliable of the eight starts.
    every = FastSteps.starts
    monkeypatch.setattr(FastSteps, "starts", lambda steps, M: every(steps, M)[:2])
    schedule = FastSchedule(goal, n_candidates=20, rounds=2, iterations=40, inclusion_steps=10)
    with short_fits():
        fitted = fit(model(), data(), schedule=schedule)
    M = fitted.posterior.M
    assert 2 < M < 20
    if isinstance(goal, MaxPoints):
        assert M == 6
    if isinstance(goal, Tolerance):
        assert fitted.elbo_gap <= 0.05 * 80 + 1e-6
    kept = fitted.model
    assert fitted.elbo == pytest.approx(kept.bound(data()).item(), abs=1e-5)
    assert fitted.elbo == pytest.approx(kept.fixed_bound(data()), abs=1e-5)
    assert fitted.selection.frontier is not None
    assert int(fitted.selection.mask.sum()) == M
    assert fitted.evidence is not None
    # No upper bound on the evidence is known for other likelihoods.
    assert fitted.evidence == Evidence(fitted.evidence.lower, float("inf"), "none")
    assert fitted.evidence.lower == pytest.approx(fitted.elbo)
    right = (fitted.posterior.predict(X, observed=True).mean[:, 0] > 0.5) == (LABELS > 0.5)
    assert right.double().mean() > 0.95


@pytest.mark.parametrize("batch_size", [None, 20])
@pytest.mark.parametrize("gradient", [None, Relaxed(samples=2)])
def test_paper_schedule_any_likelihood_returns_selection(batch_size, gradient) -> None:
    extra = {} if gradient is None else {"gradient": gradient}
    schedule = PaperSchedule(
        SquaredCardinality(12, 0.02),
        pre=30,
        joint=20,
        post=15,
        learning_rate=0.05,
        batch_size=batch_size,
        **extra,
    )
    start = model(12)
    fitted = fit(start, data(), schedule=schedule)
    assert fitted.elbo > start.bound(data())
    assert fitted.selection.inclusion.shape == (12,)
    assert fitted.selection.trace.shape == (20,)
    assert int(fitted.selection.mask.sum()) == fitted.posterior.M
    assert fitted.elbo == pytest.approx(fitted.model.bound(data()).item())


def test_minibatches_of_one_pass_average_to_elbo() -> None:
    gp, values = model(10).with_best_q(data()), []
    still = {"joint": 0, "post": 0, "learning_rate": 1e-14}
    schedule = PaperSchedule(SquaredCardinality(10, 0.1), pre=4, batch_size=20, **still)
    fit(gp, data(), schedule=schedule, callbacks=lambda step: values.append(step.objective))
    assert len(values) == 4
    assert max(values) - min(values) > 0.1
    assert sum(values) / 4 == pytest.approx(gp.bound(data()).item(), rel=1e-9)


def test_paper_schedule_sgpr_with_minibatches_raises() -> None:
    gp = SparseGP(ScaleKernel(RBFKernel()), X[::8])
    schedule = PaperSchedule(SquaredCardinality(10, 0.1), pre=1, batch_size=20)
    with pytest.raises(InputError, match="needs all rows at once"):
        fit(gp, data(), schedule=schedule)
    with pytest.raises(InputError, match="`batch_size` must be at least 1"):
        PaperSchedule(SquaredCardinality(10, 0.1), batch_size=0)


def test_fit_invalid_targets_raises() -> None:
    with pytest.raises(InputError, match=r"Bernoulli targets must be 0 or 1; got 0\.5"):
        fit(model(), data(torch.full((80,), 0.5, dtype=torch.float64)))


def test_initial_levels_and_variances_follow_targets() -> None:
    counts = data(torch.full((80,), 37.0, dtype=torch.float64))
    assert best_level(PoissonLikelihood(), counts).item() == pytest.approx(37, abs=0.5)
    rare = data((torch.arange(80) < 8).double())
    level = best_level(BernoulliLikelihood(), rare)
    assert torch.special.ndtr(level).item() == pytest.approx(0.1, abs=0.03)
    assert kernel_variances(BernoulliLikelihood(), rare) == (1.0, 10.0)
    spread = data(1000 * LABELS)
    assert kernel_variances(PoissonLikelihood(), spread)[1] == pytest.approx(1000**2 / 4, rel=0.1)
    assert noise_of(BernoulliLikelihood()) is None
    assert noise_of(SoftmaxLikelihood(num_classes=3, mixing_weights=False)) is None
    for likelihood in (GaussianLikelihood(), StudentTLikelihood()):
        assert noise_of(likelihood) is not None
        likelihood.raw_noise.requires_grad_(False)
        assert noise_of(likelihood) is None


def test_measured_predict_us_counts_latent_functions(monkeypatch) -> None:
    seen = []

    def watched(*arguments, **named) -> Posterior:
        seen.append(tuple(named["q_factor"].shape))
        return Posterior(*arguments, **named)

    monkeypatch.setattr(predict_time, "Posterior", watched)
    softmax = SoftmaxLikelihood(num_classes=3, mixing_weights=False)
    predict_time.measured_predict_us(model(likelihood=softmax), data(), 7)
    predict_time.measured_predict_us(SparseGP(ScaleKernel(RBFKernel()), X[:0]), data(), 7)
    assert seen == [(3, 7, 7), (1, 7, 7)]
