"""Sites of GPyTorch models and refits of q(u) against dense references."""

from copy import deepcopy
from math import log, pi
from typing import Any

import pytest
import torch
from gpytorch.likelihoods import (
    BernoulliLikelihood,
    Likelihood,
)
from gpytorch.variational import (
    BatchDecoupledVariationalStrategy,
    MeanFieldVariationalDistribution,
    UnwhitenedVariationalStrategy,
    VariationalStrategy,
)
from torch import Tensor

from helpers.gpytorch_models import (
    Deep,
    Model,
    curve,
    gaussian,
    points,
    with_random_q,
)
from winnowgp.data import Dataset
from winnowgp.gradients import all_masks
from winnowgp.integrations.gpytorch.distribution import prune_model
from winnowgp.integrations.gpytorch.selection import RefittedModel, refit_q
from winnowgp.integrations.gpytorch.sites import ModelELBO, _hidden, _sites
from winnowgp.models import VariationalGP


def refitted(
    model: Any, likelihood: Likelihood, x: Any, y: Any, *, steps: int = 50
) -> RefittedModel:
    elbo = ModelELBO.of(model, likelihood, x, y, seed=0)
    return refit_q(elbo, elbo.bound(), steps=steps)


def dense_bound(model: Model, x: Tensor, y: Tensor, noise: float, mask: Tensor) -> Tensor:
    """log N(y | μ, Q + σ²) − tr(K − Q)/2σ² of one subset, through N by N matrices."""
    Z = model.variational_strategy.inducing_points.detach()[mask]
    with torch.no_grad():
        Kff, Kuf = model.covar_module(x).to_dense(), model.covar_module(Z, x).to_dense()
        Kuu = model.covar_module(Z).to_dense() + 1e-6 * torch.eye(len(Z)).double()
        off = y - model.mean_module(x)
    Q = Kuf.mT @ torch.linalg.solve(Kuu, Kuf)
    S = Q + noise * torch.eye(len(x)).double()
    fit = off @ torch.linalg.solve(S, off) + torch.linalg.slogdet(S).logabsdet
    return -0.5 * (fit + len(x) * log(2 * pi) + (Kff - Q).trace() / noise)


@pytest.mark.parametrize("strategy", [VariationalStrategy, UnwhitenedVariationalStrategy])
def test_sites_gaussian_subsets_equal_collapsed_bound(strategy: Any) -> None:
    x, y = curve(40)
    model = with_random_q(Model(points(5), strategy=strategy))
    fitted = refitted(model, gaussian(), x, y, steps=1)
    (statistics,) = fitted.sites[0].statistics(fitted.bound)
    masks = all_masks(5)[1:]
    dense = torch.stack([dense_bound(model, x, y, 0.02, mask) for mask in masks])
    # The statistics include GPyTorch's jitter on the rows, 1e-6/2σ² per row.
    torch.testing.assert_close(statistics.value(masks), dense, rtol=1e-5, atol=2e-3)
    assert fitted.bound == pytest.approx(dense[-1].item(), abs=2e-3)


def test_refit_q_one_step_reaches_optimum_of_regression() -> None:
    x, y = curve(40)
    model = with_random_q(Model(points(5)))
    first = refitted(model, gaussian(), x, y, steps=1)
    best = first.sites[0].best_q()
    now = first.sites[0].whitening.read()
    torch.testing.assert_close(now.mean, best.mean, rtol=0, atol=1e-6)
    torch.testing.assert_close(now.lower(), best.lower(), rtol=0, atol=1e-6)
    assert first.sites[0].excess(now, best.mean, point=False) == pytest.approx(0, abs=1e-6)


def test_refit_q_promised_gain_equals_actual_gain() -> None:
    """With Gaussian noise the sites do not change."""
    x, y = curve(40)
    model = with_random_q(Model(points(5)))
    before = refitted(model, gaussian(), x, y, steps=0)
    after = refitted(model, gaussian(), x, y, steps=1)
    (totals,) = before.sites
    promised = totals.excess(totals.whitening.read(), totals.best_q().mean, point=False)
    assert promised == pytest.approx(after.bound - before.bound, rel=1e-6)


def test_refit_q_other_likelihoods_reach_optimum() -> None:
    x, y = curve(50)
    y = (y > 0).double()
    model = with_random_q(Model(points(12)))
    bound = refitted(model, BernoulliLikelihood(), x, y).bound
    ours = VariationalGP(
        model.covar_module, points(12), likelihood=BernoulliLikelihood(), mean=model.mean_module
    )
    # GPyTorch's log Φ is off by up to 2e-3 nats per row near z = −1.
    assert bound == pytest.approx(ours.fixed_bound(Dataset.of(x, y)), abs=0.1)


def test_refit_q_mean_field_reaches_best_diagonal() -> None:
    """S_kk = 1/(I + C)_kk maximises log|S| − tr(S (I + C)) among diagonal S."""
    x, y = curve(40)
    model = with_random_q(Model(points(5), distribution=MeanFieldVariationalDistribution))
    fitted = refitted(model, gaussian(), x, y)
    for change in (0.99, 1.01):
        moved = deepcopy(fitted.elbo.model)
        deviation = moved.get_submodule(fitted.elbo.strategies[0].name).get_parameter(
            "_variational_distribution._variational_stddev"
        )
        deviation.data[2] *= change
        assert fitted.elbo.with_model(moved).bound() < fitted.bound


def test_sites_decoupled_roles_are_scored_separately() -> None:
    """The bound of any pair of subsets is what refitting the pruned model reaches."""
    x, y = curve(40)
    model = with_random_q(Model(points(5), strategy=BatchDecoupledVariationalStrategy, prior=(1,)))
    fitted = refitted(model, gaussian(), x, y)
    means, covariances = fitted.sites[0].statistics(fitted.bound)
    masks = all_masks(5)
    # Subsets of as many points: {0, 1, 2} and {2, 3, 4}, and so on.
    for one, other in ((7, 28), (13, 19), (3, 24)):
        keep = torch.stack([masks[one], masks[other]])
        smaller = fitted.elbo.with_model(prune_model(fitted.elbo.model, [keep]))
        reached = refit_q(smaller, smaller.bound()).bound
        promised = means.value(keep[:1]).item() + covariances.value(keep[1:]).item()
        assert promised == pytest.approx(reached, abs=1e-4)


def test_sites_hidden_precisions_are_gauss_newton() -> None:
    """Against a constant added to one hidden function: the change of the top mean of each row."""
    x, y = curve(20)
    model = with_random_q(Deep(6, linear=False))
    seen = ModelELBO.of(model, gaussian(), x, y, seed=0)

    def evaluated(shift: float, function: int) -> Any:
        constant = seen.model.hidden.mean_module.constant
        constant.data[function] += shift
        with seen._same_draws():
            output, target = next(seen._evaluated(differentiable=True))
            calls = [
                seen.model.hidden.variational_strategy.calls[0],
                seen.model.last.variational_strategy.calls[0],
            ]
            nats = seen._expected(output, target)
        constant.data[function] -= shift
        return nats, calls

    nats, calls = evaluated(0.0, 0)
    assert _hidden(calls) == [0]
    (_, below), (_, above) = _sites(nats, calls)
    for function in (0, 1):
        up, down = (evaluated(s, function)[1][1].mean for s in (1e-5, -1e-5))
        slope = (up - down) / 2e-5
        torch.testing.assert_close(
            below[function], (slope.square() * above)[0].detach(), rtol=1e-4, atol=1e-6
        )
    torch.testing.assert_close(above, torch.full_like(above, 50.0))
