"""Optima of the evidence of few rows: which of them generalise."""

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from scipy import stats
from scipy.integrate import quad
from scipy.special import beta
from torch.distributions import Normal

from winnowgp.data import Dataset
from winnowgp.models import Posterior, SparseGP
from winnowgp.models.mixture import mixture_moments
from winnowgp.training import FastSchedule, FitResult, MaxPoints, Tolerance, confirmation, fit
from winnowgp.training.confirmation import (
    averaged_gain,
    confirms,
    constant_log_density,
    constant_weight,
    excess_kurtosis,
    held_out_gain,
    normal_scores,
)

pytestmark = pytest.mark.usefixtures("one_size")


def rows(n: int, columns: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(seed)
    X, noise = rng.normal(size=(n, columns)), rng.normal(size=(n, 1))
    return torch.from_numpy(X), torch.from_numpy(noise)


def standardised(Y: torch.Tensor) -> torch.Tensor:
    return (Y - Y.mean(0)) / Y.std(0, correction=0)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def gp(X: torch.Tensor, noise: float = 1.0) -> SparseGP:
    kernel = ScaleKernel(RBFKernel(ard_num_dims=X.shape[1]))
    return SparseGP(kernel, X[:0], noise=noise)


def fitted(X: torch.Tensor, Y: torch.Tensor) -> FitResult[SparseGP]:
    schedule = FastSchedule(inclusion_steps=5, rounds=1)
    return fit(gp(X), Dataset(X, standardised(Y)), schedule=schedule, generator=generator())


def test_constant_weight_is_the_mean_over_which_rows_the_constant_describes() -> None:
    # No gain in the median: nothing is subtracted.
    gain = torch.tensor([0.4, -1.5, 0.9, -0.2, -0.3]).double()
    total = mean = 0.0
    for constant in product([True, False], repeat=len(gain)):
        count = sum(constant)
        others = sum(g.item() for g, c in zip(gain, constant, strict=True) if not c)
        # ∫ w^a (1 − w)^b dw = B(a + 1, b + 1), with w^(_PRIOR − 1) more of the prior.
        a, b = count + confirmation._PRIOR, len(gain) - count + 1
        total += beta(a, b) * np.exp(others)
        mean += beta(a + 1, b) * np.exp(others)
    assert constant_weight(gain, len(gain)) == pytest.approx(mean / total, rel=1e-6)


def test_average_gains_where_a_row_is_predicted_badly() -> None:
    gain = torch.tensor([1.0, 2.0, -30.0]).double()
    expected = (0.9 * gain.exp() + 0.1).log()
    torch.testing.assert_close(averaged_gain(gain, 0.1), expected)
    assert (averaged_gain(gain, 0.1) - gain).mean() > 9
    assert (averaged_gain(gain[:2], 0.1) - gain[:2]).mean() < 0


def test_constant_weight_rows_held_out_stand_for_all() -> None:
    gain = torch.full((3,), 0.1).double()
    expected = constant_weight(gain.repeat(4), 12)
    assert constant_weight(gain, 12) == pytest.approx(expected, rel=1e-12)
    assert expected < constant_weight(gain, 3)


@pytest.mark.parametrize(("spread", "subtracted"), [(0.01, 0.01 / np.sqrt(3)), (0.5, 0.1 / 3)])
def test_constant_weight_gains_are_lower_by_their_error(spread: float, subtracted: float) -> None:
    gain = torch.tensor([0.1 - spread, 0.1, 0.1 + spread]).double()
    # One standard error, at most a third of the median.
    shifted = gain - subtracted
    nodes = (torch.arange(4096).double() + 0.5) / 4096
    rows = ((1 - nodes)[:, None] * shifted.exp() + nodes[:, None]).log().sum(1)
    density = (rows + nodes.log()).softmax(0)
    assert constant_weight(gain, 3) == pytest.approx((density @ nodes).item(), rel=1e-9)


@pytest.mark.parametrize(("N", "prior", "subtracted"), [(200, 2, 0.05), (201, 1, 0.0)])
def test_constant_weight_of_more_rows_has_a_uniform_prior(
    N: int, prior: int, subtracted: float
) -> None:
    gains = np.array([-0.4, 0.15, 0.15, 0.9])
    shifted = gains - subtracted  # A third of the median, less than the standard error.

    def moment(power: int) -> float:
        def integrand(w: float) -> float:
            nats = (N / 4) * np.log((1 - w) * np.exp(shifted) + w).sum()
            return w ** (power + prior - 1) * np.exp(nats - N / 5)

        return quad(integrand, 0, 1, epsabs=0, epsrel=1e-10)[0]

    expected = moment(1) / moment(0)
    assert constant_weight(torch.from_numpy(gains), N) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("gain", [0.3, 1.0, 3.0])
def test_constant_weight_adds_at_most_half_to_the_mean_variance(gain: float) -> None:
    # Targets of unit variance, of which the model explains 1 − v: its means are ±√(1 − v).
    v, w = np.exp(-2 * gain), constant_weight(torch.full((10,), gain).double(), 10)
    means = torch.tensor([[-1.0, 1.0], [0.0, 0.0]]).double() * np.sqrt(1 - v)
    variances = torch.tensor([[v, v], [1.0, 1.0]]).double()
    mixed = mixture_moments(
        means[..., None], variances[..., None], torch.tensor([1 - w, w]).double()
    ).variance.mean()
    assert mixed.item() / v == pytest.approx(1 + w * (2 - w) * (1 / v - 1))
    assert mixed.item() / v < 1.5
    assert gain < 1 or mixed.item() / v > 1.45  # The limit decides.


def test_constant_weight_limit_is_that_of_the_mean_or_median_gain_per_target() -> None:
    limit = 0.25 / (np.exp(8.0) - 1)
    assert constant_weight(torch.full((40,), 4.0), 40) == pytest.approx(limit)
    assert constant_weight(torch.full((40,), 8.0), 40, 2) == pytest.approx(limit)
    # One row that gains much more than the others does not lower the weight.
    gain = torch.full((40,), 4.0).double()
    gain[0] = 400.0
    shifted = gain.median().item() - min((gain.std() / 40**0.5).item(), 4 / 3)
    assert constant_weight(gain, 40) == pytest.approx(0.25 / (np.exp(2 * shifted) - 1))
    # Gains may be so large that the exponential overflows.
    assert 0 <= constant_weight(torch.tensor([8e4, 8e4, 1.0]).double(), 3) < 1e-9


@pytest.mark.parametrize("weights", [None, torch.tensor([1.0, 2, 0.5, 1, 1, 3]).double()])
def test_constant_log_density_is_that_of_weighted_moments(weights: torch.Tensor | None) -> None:
    X, Y = rows(6, 2, seed=1)
    Y = torch.cat([Y, Y.square()], 1)
    w = None if weights is None else weights.numpy()
    mean = np.average(Y, axis=0, weights=w)
    sd = np.sqrt(np.average((Y.numpy() - mean) ** 2, axis=0, weights=w))
    expected = stats.norm.logpdf(Y, mean, sd).sum(1)
    data = Dataset(X, Y, weights)
    np.testing.assert_allclose(constant_log_density(data, data), expected, rtol=1e-10)


def test_normal_scores_are_quantiles_of_ranks() -> None:
    y = torch.tensor([3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0]).double()
    expected = stats.norm.ppf((stats.rankdata(y) - 0.5) / 7)
    expected = (expected - expected.mean()) / expected.std()
    np.testing.assert_allclose(normal_scores(y[:, None])[:, 0], expected, rtol=1e-10)


def test_excess_kurtosis_is_that_of_the_worst_column() -> None:
    _, Y = rows(50, 1, seed=2)
    Y = torch.cat([Y, Y.exp()], 1)
    assert excess_kurtosis(Y) == pytest.approx(stats.kurtosis(Y[:, 1]))


@pytest.mark.parametrize(("N", "held_out"), [(12, 10), (40, 10), (8, 8)])
def test_held_out_gain_late_has_enough_rows_to_decide(N: int, held_out: int) -> None:
    X, Y = rows(N, 1, seed=3)
    gain = held_out_gain(Dataset(X, Y), lambda _: gp(X, noise=0.5), is_late=lambda: True)
    assert held_out <= len(gain) <= held_out + 3


@pytest.mark.parametrize(("enough", "held_out"), [(10, 10), (25, 26), (60, 40)])
def test_held_out_gain_clear_ends_after_enough_rows(enough: int, held_out: int) -> None:
    X = torch.linspace(-3, 3, 40, dtype=torch.double)[:, None]
    data = Dataset(X, X.sin())
    gain = held_out_gain(data, lambda _: gp(X, noise=0.01), enough=enough)
    assert len(gain) == held_out


def test_held_out_gain_uses_each_row_once_and_only_others() -> None:
    X, Y = rows(23, 1, seed=3)
    data, seen = Dataset(X, Y), []

    def refit(rest: Dataset) -> SparseGP:
        seen.append(rest)
        return gp(X, noise=0.5)

    gain = held_out_gain(data, refit, early_stopping=False)
    assert len(gain) == 23
    left_out = [set(Y.flatten().tolist()) - set(rest.Y.flatten().tolist()) for rest in seen]
    assert sorted(y for fold in left_out for y in fold) == sorted(Y.flatten().tolist())
    # The dense predictive density of the first fold, relative to the constant.
    rest = seen[0]
    held = torch.tensor([y not in set(rest.Y.flatten().tolist()) for y in Y.flatten().tolist()])
    model = gp(X, noise=0.5)
    with torch.no_grad():
        K = model.kernel(X).to_dense() + 0.5 * torch.eye(23)
    A = K[held][:, ~held] @ K[~held][:, ~held].inverse()
    mean, C = A @ Y[~held], K[held][:, held] - A @ K[~held][:, held]
    density = stats.norm.logpdf(Y[held][:, 0], mean[:, 0], C.diagonal().sqrt())
    constant = stats.norm.logpdf(Y[held][:, 0], 0, rest.Y.square().mean().sqrt())
    expected = density - constant
    np.testing.assert_allclose(gain[: len(expected)], expected, rtol=1e-6)


def log_normal_noise(X: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    return (1.5 * noise).exp()


def skewed_effect(X: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    return (2 * torch.sin(1.5 * X[:, :1]) + 0.3 * noise).exp()


@pytest.mark.parametrize(("target", "points"), [(log_normal_noise, False), (skewed_effect, True)])
def test_fast_skewed_targets_need_an_effect_in_their_ranks(
    target: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], points: bool
) -> None:
    # The evidence of this noise has an optimum 7 nats above the constant model's.
    X, noise = rows(50, 6, seed=3)
    result = fitted(X, target(X, noise))
    assert (result.posterior.M > 0) == points
    assert result.growth is not None
    assert result.growth.limit == (None if points else "held_out")


@pytest.mark.parametrize(
    ("loss", "doubtful", "certain"), [(-0.5, True, True), (0.5, False, True), (1.5, False, False)]
)
def test_confirms_allows_a_loss_within_its_error_where_the_evidence_is_certain(
    loss: float, doubtful: bool, certain: bool
) -> None:
    gain = torch.linspace(-1, 1, 400, dtype=torch.float64)
    gain = gain - loss * gain.std() / 20  # The standard error of 400 rows is a twentieth.
    assert confirms(gain, 400) == doubtful
    assert confirms(gain, 400, certain=True) == certain


def test_fast_insignificant_gain_is_named_as_limit() -> None:
    X, noise = rows(40, 3, seed=7)
    result = fitted(X, 0.4 * X[:, :1] + noise)
    assert result.posterior.M == 0
    assert result.elbo_gap > 0.01 * 40
    assert result.growth is not None
    assert result.growth.limit == "chance"


def test_fast_limited_points_start_from_the_confirmed_optimum() -> None:
    rng = np.random.default_rng(1)
    X = torch.from_numpy(rng.normal(size=(100, 3)))
    noise = torch.from_numpy(rng.normal(size=100))
    Y = (1.2 * torch.sin(2 * X[:, 0]) + 0.5 * X[:, 1] + 0.6 * noise).exp()[:, None]
    goal = Tolerance(0.01, limit=MaxPoints(6))
    schedule = FastSchedule(goal, inclusion_steps=5, rounds=1)
    result = fit(gp(X), Dataset(X, standardised(Y)), schedule=schedule, generator=generator())
    assert isinstance(result.posterior, Posterior)
    kernel: Any = result.posterior.kernel
    lengthscale = kernel.base_kernel.lengthscale.flatten()
    # The first column drives the target; with the optimum of the targets alone it looked flat.
    assert lengthscale[0] < 3


def test_lengthscales_of_ranks_are_learnt_without_held_out_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lengthscales: list[torch.Tensor] = []

    def held_out(data: Dataset, refit: Callable[[Dataset], Any], **_: Any) -> torch.Tensor:
        for rest in (slice(0, 50), slice(30, 80)):
            lengthscales.append(refit(data.part(rest)).kernel.base_kernel.lengthscale)
        return torch.ones(data.N, dtype=torch.double)

    monkeypatch.setattr("winnowgp.training.confirmation.held_out_gain", held_out)
    X, noise = rows(80, 2, seed=3)
    fitted(X, (2 * X[:, :1].sin() + 0.4 * noise).exp())
    ranks, targets = lengthscales[:2], lengthscales[2:]
    assert len(targets) == 2
    assert not torch.allclose(*ranks, rtol=1e-3)


@pytest.mark.parametrize(("N", "gain", "ranks"), [(200, 4, True), (201, 2, True), (201, 4, False)])
def test_confirmed_optima_lengthscales_of_ranks_are_for_few_rows_or_a_doubtful_gain(
    N: int, gain: float, ranks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[tuple[str, ...]] = []

    def recorded(steps: Any, initial: Any, **parameters: bool) -> None:
        confirmed = confirmation.confirmed_optima(steps, initial, **parameters)
        assert confirmed is not None
        found.append(confirmed.held)
        raise KeyboardInterrupt

    gains = torch.linspace(-1, 1, N, dtype=torch.double)
    gains = gains + gain * gains.std() / N**0.5  # So many standard errors.
    monkeypatch.setattr(confirmation, "held_out_gain", lambda *_, **__: gains)
    monkeypatch.setattr("winnowgp.training.fast_sparse.confirmed_optima", recorded)
    X, noise = rows(N, 2, seed=3)
    with pytest.raises(KeyboardInterrupt):
        fitted(X, (2 * X[:, :1].sin() + 0.4 * noise).exp())
    assert bool(found[0]) == ranks


@pytest.mark.parametrize(
    ("N", "averaged", "early"),
    [(200, True, True), (201, True, False), (201, False, True), (501, True, True)],
)
def test_confirmed_optima_all_rows_weigh_an_average_of_201_to_500_rows(
    N: int, averaged: bool, early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped: list[bool] = []

    def held_out(*_: Any, early_stopping: bool, **__: Any) -> torch.Tensor:
        stopped.append(early_stopping)
        raise KeyboardInterrupt

    monkeypatch.setattr(confirmation, "held_out_gain", held_out)
    X, noise = rows(N, 1, seed=3)
    schedule = FastSchedule(averaged=averaged)
    with pytest.raises(KeyboardInterrupt):
        fit(gp(X), Dataset(X, standardised(X.sin() + 0.3 * noise)), schedule=schedule)
    assert stopped == [early]


@pytest.mark.parametrize(("bad", "confirmed"), [(1, True), (8, False)])
def test_confirms_leaves_out_one_bad_row_and_not_several(bad: int, confirmed: bool) -> None:
    gain = torch.linspace(0.5, 1.0, 30, dtype=torch.float64)
    # As much is lost in all as is gained, almost.
    gain[:bad] = -0.99 * gain[bad:].sum() / bad
    assert gain.mean() > 0
    assert gain.median() > 0.5
    assert confirms(gain, 30) == confirmed


def test_confirms_averaged_if_the_average_with_a_constant_is_clearly_better() -> None:
    gain = torch.linspace(0.3, 1.3, 28, dtype=torch.float64)
    gain[:2] = torch.tensor([-17.0, -9.0])  # Without them, the mean is 0.8.
    assert not confirms(gain, 28)
    assert confirms(gain, 28, averaged=True)
    # With eight such rows of 28 no weight is clearly better than the constant alone.
    gain[:8] = -17.0
    assert not confirms(gain, 28, averaged=True)


@pytest.mark.parametrize("seed", range(5))
def test_confirms_averaged_noise_does_not(seed: int) -> None:
    draws = np.random.default_rng(seed).normal(-0.1, 0.5, size=40)
    assert not confirms(torch.from_numpy(draws), 40, averaged=True)


def test_fast_averaged_models_of_few_rows_that_one_row_speaks_against(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def held_out(data: Dataset, *_: Any, **__: Any) -> torch.Tensor:
        gain = torch.ones(data.N, dtype=torch.double)
        gain[:2] = -20.0
        return gain

    monkeypatch.setattr("winnowgp.training.confirmation.held_out_gain", held_out)
    X, noise = rows(30, 1, seed=3)
    data = Dataset(X, standardised(X.sin() + 0.3 * noise))
    for averaged in (False, True):
        schedule = FastSchedule(inclusion_steps=5, rounds=1, averaged=averaged)
        result = fit(gp(X), data, schedule=schedule, generator=generator())
        assert (result.posterior.M > 0) == averaged
        assert (result.constant_weight > 0.05) == averaged


def test_fast_many_columns_share_a_lengthscale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("winnowgp.training.confirmation._SMALL_FOLDS", 3)
    monkeypatch.setattr("winnowgp.training.confirmation._TRIED", 1)
    # Each of 14 columns is a noisy copy of the only one that matters.
    rng = np.random.default_rng(0)
    Z, noise = rng.normal(size=518), rng.normal(size=518)
    X = torch.from_numpy(rng.normal(size=(518, 14)) + Z[:, None])
    Y = torch.from_numpy(Z + 0.3 * noise)[:, None]
    result = fitted(X[:18], standardised(Y)[:18])
    kernel: Any = result.posterior.kernel
    lengthscale = kernel.base_kernel.lengthscale
    assert result.posterior.M > 0
    torch.testing.assert_close(
        lengthscale, lengthscale.mean().expand_as(lengthscale), rtol=0.6, atol=0
    )
    density = result.posterior.log_density(X[18:], standardised(Y)[18:]).mean()
    assert density > Normal(0.0, 1.0).log_prob(standardised(Y)[18:]).mean() + 0.2
