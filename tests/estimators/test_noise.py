"""Noise of each target, missing targets and known noise of each row, in the estimators."""

from pathlib import Path
from runpy import run_path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import r2_score

import winnowgp
from helpers.short_fits import short_fits, shortest_fits
from winnowgp import (
    DeepGPClassifier,
    DeepGPRegressor,
    SparseGPClassifier,
    SparseGPRegressor,
)
from winnowgp.data import Dataset
from winnowgp.data.noise import pooled
from winnowgp.errors import InputError, MissingTargetsWarning
from winnowgp.integrations.botorch import SparseGPModel
from winnowgp.integrations.gpytorch import to_gpytorch
from winnowgp.tabular import export_numpy

RNG = np.random.default_rng(0)
N = 120
SD = np.array([0.5, 0.01])
X = RNG.uniform(-3, 3, (N, 1))


def functions(X: Any) -> Any:
    return np.column_stack([np.sin(2 * X[:, 0]), 5 + 3 * np.cos(X[:, 0])])


Y = functions(X) + SD * RNG.normal(size=(N, 2))
MISSING = Y.copy()
MISSING[RNG.random(Y.shape) < 0.2] = np.nan
MISSING[3] = [0.1, np.nan]
MISSING[5] = np.nan
SOME = ~np.isnan(MISSING).all(1)
NEW = RNG.uniform(-3, 3, (400, 1))
NEW_Y = functions(NEW) + SD * RNG.normal(size=(400, 2))
POINTS = np.linspace(-3, 3, 12)[:, None]
QUICK: dict[str, Any] = {
    "kernel": "rbf",
    "inducing_points": POINTS,
    "random_state": 0,
    "hyper": "point",
}


@pytest.fixture(scope="module")
def model() -> SparseGPRegressor:
    with shortest_fits():
        return SparseGPRegressor(**QUICK).fit(X, Y)


@pytest.fixture(scope="module")
def incomplete() -> SparseGPRegressor:
    with shortest_fits(), pytest.warns(MissingTargetsWarning, match="rows have no target"):
        return SparseGPRegressor(**QUICK).fit(X, MISSING)


def test_fit_several_targets_learns_the_noise_of_each(model: SparseGPRegressor) -> None:
    # One noise for both came out as 0.34 and 0.6, and intervals held 82 % and 100 %.
    assert np.sqrt(model.noise_) == pytest.approx(SD, rel=0.2)
    lower, upper = model.predict_interval(NEW)
    coverage = ((lower < NEW_Y) & (upper > NEW_Y)).mean(0)
    assert ((coverage > 0.88) & (coverage < 0.99)).all()


def test_fit_shared_noise_is_one_for_standardised_targets() -> None:
    with shortest_fits():
        shared = SparseGPRegressor(noise="shared", **QUICK).fit(X, Y)
    ratio = shared.noise_ / Y.var(0)
    assert ratio[0] == pytest.approx(ratio[1], rel=1e-9)


def test_fit_missing_targets_predicts_as_well(incomplete: SparseGPRegressor) -> None:
    assert np.sqrt(incomplete.noise_) == pytest.approx(SD, rel=0.25)
    density = incomplete.log_density(NEW, NEW_Y).mean(0)
    best = -np.log(SD * np.sqrt(2 * np.pi * np.e))
    assert (density > best - 0.15).all()


def test_fit_missing_targets_is_the_model_of_the_observed_ones(
    incomplete: SparseGPRegressor,
) -> None:
    """The posterior of a target is that of the rows which have it, at the same parameters."""
    q, p = incomplete.posterior_, 1
    rows = ~np.isnan(MISSING[:, p])
    x, scaler = incomplete._x_scaler, incomplete._y_scaler.columns
    data = Dataset.of(
        x.forward(torch.tensor(X[rows])),
        (torch.tensor(MISSING[rows, p]) - scaler.shift[p]) / scaler.scale[p],
    )
    alone = winnowgp.SparseGP(q.kernel, q.Z, noise=q.likelihood.noise[p].item()).posterior(data)
    new = x.forward(torch.tensor(NEW))
    both, one = q.predict(new, observed=True), alone.predict(new, observed=True)
    torch.testing.assert_close(both.mean[:, p], one.mean[:, 0])
    torch.testing.assert_close(both.variance[:, p], one.variance[:, 0])


def test_log_density_of_missing_targets_is_nan(model: SparseGPRegressor) -> None:
    y = NEW_Y[:3].copy()
    y[1, 0] = np.nan
    density, full = model.log_density(NEW[:3], y), model.log_density(NEW[:3], NEW_Y[:3])
    assert np.isnan(density[1, 0])
    np.testing.assert_array_equal(density[~np.isnan(y)], full[~np.isnan(y)])


def test_score_of_missing_targets_is_that_of_the_observed_ones(model: SparseGPRegressor) -> None:
    weights = np.linspace(1, 2, N)
    predicted = model.predict(X)
    parts = []
    for p, rows in enumerate(~np.isnan(MISSING.T)):
        y, w = MISSING[rows, p], weights[rows]
        error = (w * np.square(y - predicted[rows, p])).sum()
        parts.append(1 - error / (w * np.square(y - np.average(y, weights=w))).sum())
    assert model.score(X, MISSING, weights) == pytest.approx(np.mean(parts), rel=1e-12)
    assert model.score(X, Y) == pytest.approx(r2_score(Y, predicted), rel=1e-12)
    with pytest.raises(InputError, match=r"at least two values of every target.*column 1"):
        model.score(X, np.column_stack([Y[:, 0], np.full(N, np.nan)]))
    with pytest.raises(InputError, match=r"NaN in 1 of 120 places of shape \[120\]"):
        model.score(X, np.r_[np.nan, Y[1:, 0]])


def test_noise_of_missing_targets_may_be_missing() -> None:
    """It is not used: zero and NaN give the same model and the same densities."""
    rows = np.flatnonzero(SOME)[:40]
    known = np.where(np.isnan(MISSING), np.nan, 0.3)[rows]
    models = []
    with shortest_fits():
        for noise in (known, np.nan_to_num(known, nan=0.3)):
            quick = SparseGPRegressor("rbf", inducing_points=POINTS[::3], random_state=0)
            models.append(quick.fit(X[rows], MISSING[rows], noise_variance=noise))
    assert models[0].elbo_ == models[1].elbo_
    densities = [m.log_density(X[rows], MISSING[rows], noise_variance=known) for m in models]
    np.testing.assert_array_equal(*densities)
    assert np.array_equal(np.isnan(densities[0]), np.isnan(known))
    with pytest.raises(InputError, match="wherever there is a target"):
        models[0].predict(X[rows], noise_variance=known)
    with pytest.raises(InputError, match="wherever there is a target"):
        models[0].fit(X[rows], Y[rows], noise_variance=known)


@pytest.mark.parametrize("log_target", [False, True])
def test_rows_are_counted_with_those_of_weight_zero(log_target: bool) -> None:
    weights = np.r_[0.0, 0.0, np.ones(N - 2)]
    quick = SparseGPRegressor(**QUICK, log_target=log_target)
    if log_target:
        with pytest.raises(InputError, match="in row 4 "):
            quick.fit(X, np.where(np.arange(N) == 4, -1.0, 1.0), weights)
        return
    with shortest_fits(), pytest.warns(MissingTargetsWarning, match="the first is row 5 "):
        quick.fit(X, MISSING, weights)


def test_save_and_export_keep_the_noise_of_each_target(
    model: SparseGPRegressor, tmp_path: Path
) -> None:
    loaded = winnowgp.load(model.save(tmp_path / "model.winnow"))
    np.testing.assert_array_equal(loaded.noise_, model.noise_)
    mean, sd = model.predict(NEW, return_std=True)
    np.testing.assert_allclose(loaded.predict(NEW, return_std=True)[1], sd, rtol=1e-10, atol=1e-12)
    exported = run_path(str(export_numpy(model, tmp_path / "model.py")))["predict"](NEW)
    np.testing.assert_allclose(exported["mean"], mean, atol=1e-7)
    np.testing.assert_allclose(np.sqrt(exported["variance"]), sd, rtol=1e-6)
    covariance = model.predict(NEW[:5], return_cov=True)[1]
    np.testing.assert_allclose(np.einsum("iip->ip", covariance), sd[:5] ** 2, rtol=1e-6)


def test_conversions_keep_the_noise_of_each_target(model: SparseGPRegressor) -> None:
    rows = torch.tensor(NEW[:7])
    _, sd = model.predict(NEW[:7], return_std=True)
    gp, likelihood = to_gpytorch(model)
    with torch.no_grad():
        found = likelihood(gp(rows)).variance
    np.testing.assert_allclose(found.sqrt().numpy(), sd, rtol=1e-5)
    one = SparseGPModel.of(model).subset_output([1]).posterior(rows, observation_noise=True)
    np.testing.assert_allclose(one.variance[:, 0].detach().sqrt().numpy(), sd[:, 1], rtol=1e-5)


@pytest.mark.filterwarnings("ignore:all 4 candidates")
def test_minibatches_and_deep_models_have_noise_for_each_target() -> None:
    paper = SparseGPRegressor(
        "rbf", schedule="paper", alpha=0.01, epochs=(2, 1, 1), batch_size=40, n_candidates=4
    )
    assert paper.fit(X, Y).likelihood_.noise.shape == (2,)
    deep = DeepGPRegressor(
        schedule="paper", alpha=0.01, epochs=(1, 1, 1, 1), n_candidates=3, predict_samples=4
    )
    assert deep.fit(X[:30], Y[:30]).likelihood_.noise.shape == (2,)
    assert np.isfinite(paper.fit(X[SOME], MISSING[SOME]).noise_).all()
    with pytest.raises(InputError, match="got a DeepGPRegressor"):
        deep.fit(X[SOME], MISSING[SOME])


def test_paper_schedule_accepts_missing_targets() -> None:
    model = SparseGPRegressor("rbf", schedule="paper", alpha=0.01, epochs=(30, 1, 1))
    assert model.fit(X[SOME], MISSING[SOME]).noise_.shape == (2,)


def test_bad_missing_targets_raise() -> None:
    empty = np.column_stack([Y[:, 0], np.full(N, np.nan)])
    with pytest.raises(InputError, match="column 1"):
        SparseGPRegressor(**QUICK).fit(X, empty)
    with pytest.raises(ValueError, match="NaN"):
        SparseGPRegressor(**QUICK).fit(X, MISSING[:, 0])
    rows = Dataset.of(torch.tensor(X[SOME]), torch.tensor(MISSING[SOME]), missing=True)
    with pytest.raises(InputError, match="a source must have all targets"):
        SparseGPRegressor(**QUICK).fit(rows)


def test_unknown_noise_option_raises() -> None:
    with pytest.raises(InputError, match="'target', 'shared' or 'known'"):
        SparseGPRegressor(noise="column").fit(X, Y)


# Known noise.

KNOWN = np.where(RNG.random(N) < 0.5, 4.0, 0.0004)
y = functions(X)[:, 0] + np.sqrt(KNOWN + 0.0025) * RNG.normal(size=N)
NEW_KNOWN = np.where(RNG.random(400) < 0.5, 4.0, 0.0004)
NEW_y = functions(NEW)[:, 0] + np.sqrt(NEW_KNOWN + 0.0025) * RNG.normal(size=400)


@pytest.fixture(scope="module")
def informed() -> SparseGPRegressor:
    with shortest_fits():
        return SparseGPRegressor(**QUICK).fit(X, y, noise_variance=KNOWN)


def test_known_noise_beats_common_noise(informed: SparseGPRegressor) -> None:
    # Half of the rows have noise of a hundred times the standard deviation of the others.
    with shortest_fits():
        ignorant = SparseGPRegressor(**QUICK).fit(X, y)
    assert np.sqrt(informed.noise_[0]) == pytest.approx(0.05, abs=0.03)
    density = informed.log_density(NEW, NEW_y, noise_variance=NEW_KNOWN).mean()
    best = -0.5 * np.log(2 * np.pi * np.e * (NEW_KNOWN + 0.0025)).mean()
    assert density > best - 0.15
    assert density > ignorant.log_density(NEW, NEW_y).mean() + 0.5
    error = informed.predict(NEW) - functions(NEW)[:, 0]
    other = ignorant.predict(NEW) - functions(NEW)[:, 0]
    assert np.square(error).mean() < 0.1 * np.square(other).mean()


def test_known_noise_model_is_that_of_dense_matrices(informed: SparseGPRegressor) -> None:
    """All rows as inducing points: the exact GP with the variances s_i + σ² of the user."""
    scale, shift = y.std(), y.mean()
    q = informed.posterior_
    x = informed._x_scaler.forward(torch.tensor(X))
    new = informed._x_scaler.forward(torch.tensor(NEW[:9]))
    with torch.no_grad():
        K, k = q.kernel(x).to_dense(), q.kernel(x, new).to_dense()
        prior = q.kernel(new).to_dense().diagonal()
    A = scale**2 * K.numpy() + np.diag(KNOWN + informed.noise_)
    k = scale**2 * k.numpy()
    mean = shift + k.T @ np.linalg.solve(A, y - shift)
    variance = scale**2 * prior.numpy() - (k * np.linalg.solve(A, k)).sum(0)
    found, sd = informed.predict(NEW[:9], return_std=True, observed=False)
    # Twelve inducing points explain a smooth function of one input.
    np.testing.assert_allclose(found, mean, atol=2e-3)
    np.testing.assert_allclose(sd, np.sqrt(variance), rtol=0.05, atol=1e-3)


def test_predictions_add_known_noise_to_learnt_noise(informed: SparseGPRegressor) -> None:
    rows, extra = NEW[:5], np.array([0.0, 1.0, 2.0, 0.5, 0.1])
    _, latent = informed.predict(rows, return_std=True, observed=False)
    _, learnt = informed.predict(rows, return_std=True)
    _, sd = informed.predict(rows, return_std=True, noise_variance=extra)
    np.testing.assert_allclose(learnt**2, latent**2 + informed.noise_, rtol=1e-9)
    np.testing.assert_allclose(sd**2, learnt**2 + extra, rtol=1e-9)
    _, covariance = informed.predict(rows, return_cov=True, noise_variance=extra)
    np.testing.assert_allclose(np.diag(covariance), sd**2, rtol=1e-6)
    lower, upper = informed.predict_interval(rows, 0.6826894921, noise_variance=extra)
    np.testing.assert_allclose((upper - lower) / 2, sd, rtol=1e-6)
    density = informed.log_density(rows, NEW_y[:5], noise_variance=extra)
    z = (NEW_y[:5] - informed.predict(rows)) / sd
    np.testing.assert_allclose(density, -0.5 * z**2 - np.log(sd * np.sqrt(2 * np.pi)), rtol=1e-6)
    _, one = informed.predict(rows, return_std=True, noise_variance=2.0)
    np.testing.assert_allclose(one**2, learnt**2 + 2, rtol=1e-9)


def test_known_noise_alone_learns_none(tmp_path: Path) -> None:
    total = KNOWN + 0.0025
    with shortest_fits():
        model = SparseGPRegressor(noise="known", **QUICK).fit(X, y, noise_variance=total)
    assert model.noise_[0] == pytest.approx(2e-6 * y.var())
    best = -0.5 * np.log(2 * np.pi * np.e * (NEW_KNOWN + 0.0025)).mean()
    known = NEW_KNOWN + 0.0025
    assert model.log_density(NEW, NEW_y, noise_variance=known).mean() > best - 0.15
    loaded = winnowgp.load(model.save(tmp_path / "known.winnow"))
    assert loaded.noise == "known"
    np.testing.assert_allclose(loaded.predict(NEW), model.predict(NEW), rtol=1e-9)


@pytest.mark.parametrize("noise", ["target", "known"])
def test_fit_of_repeated_measurements_is_that_of_all_rows(
    noise: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    settings = rng.uniform(0, 6, (12, 1))[rng.integers(0, 12, 150)]
    known = rng.uniform(0.05, 0.3, 150) if noise == "known" else None
    deviation = 0.3 if known is None else np.sqrt(known)
    targets = np.sin(settings[:, 0]) + deviation * rng.standard_normal(150)
    model = SparseGPRegressor("rbf", max_points=4, noise=noise, random_state=0)
    seen: list[int] = []

    def counted(rows: Dataset, *, known: float | None) -> Dataset:
        fewer = pooled(rows, known=known)
        seen.append(fewer.N)
        return fewer if len(seen) == 1 else rows

    monkeypatch.setattr("winnowgp.estimators.regression.CONFIRMED_ROWS", 100)
    monkeypatch.setattr("winnowgp.estimators.regression.pooled", counted)
    grid = np.linspace(0, 6, 20)[:, None]
    elbos, predictions = [], []
    with shortest_fits():
        for _ in range(2):
            model.fit(settings, targets, noise_variance=known)
            elbos.append(model.elbo_)
            predictions.append(model.predict(grid))
    assert seen[0] <= 24
    assert elbos[0] == pytest.approx(elbos[1], abs=0.2)
    np.testing.assert_allclose(*predictions, atol=0.02)


@pytest.mark.parametrize("rows", [60, 2100], ids=["all rows", "pooled"])
def test_fit_of_groups_finds_their_effects(rows: int) -> None:
    """A group that is held out as a whole could not be predicted from the others."""
    rng = np.random.default_rng(0)
    group = np.arange(rows) % 6
    targets = rng.normal(size=6)[group] + 0.5 * rng.standard_normal(rows)
    with short_fits():
        model = SparseGPRegressor("rbf", hyper="point", random_state=0)
        model.fit(np.eye(6)[group], targets)
    assert 1 <= model.n_inducing_ <= 6
    means = np.array([targets[group == number].mean() for number in range(6)])
    best = 1 - (targets - means[group]).var() / targets.var()
    assert model.score(np.eye(6)[group], targets) > 0.9 * best > 0.2


def test_minibatches_weight_rows_by_their_known_noise() -> None:
    minibatches = SparseGPRegressor(
        "rbf",
        schedule="paper",
        alpha=0.01,
        epochs=(60, 1, 20),
        batch_size=50,
        n_candidates=12,
        noise="known",
        random_state=0,
    )
    total = KNOWN + 0.05**2
    model = minibatches.fit(X, y, noise_variance=total)
    assert model.noise_[0] == pytest.approx(2e-6 * y.var(), rel=1e-3)
    truth = functions(NEW)[:, 0]
    error = np.abs(model.predict(NEW) - truth).mean()
    without = minibatches.set_params(noise="target").fit(X, y)
    assert error < 0.85 * np.abs(without.predict(NEW) - truth).mean()


@pytest.mark.filterwarnings("ignore:all 12 candidates")
def test_known_noise_of_a_source_and_of_repeated_rows_is_the_same_model() -> None:
    quick = SparseGPRegressor(
        "rbf", schedule="paper", alpha=0.01, epochs=(4, 1, 1), candidates=POINTS, random_state=0
    )
    rows = Dataset.of(torch.tensor(X), torch.tensor(y), noise=torch.tensor(KNOWN))
    plain = quick.fit(X, y, noise_variance=KNOWN).elbo_
    assert quick.fit(rows).elbo_ == pytest.approx(plain, rel=1e-9)
    twice, two = np.tile(X, (2, 1)), np.tile(y, 2)
    repeated = quick.fit(twice, two, noise_variance=np.tile(KNOWN, 2)).elbo_
    weighted = quick.fit(X, y, np.full(N, 2.0), noise_variance=KNOWN).elbo_
    assert repeated == pytest.approx(weighted, rel=1e-9)
    zero = np.r_[np.zeros(N), np.ones(N)]
    noise = np.r_[KNOWN + 1, KNOWN]
    assert quick.fit(twice, two, zero, noise_variance=noise).elbo_ == pytest.approx(plain, rel=1e-9)


@pytest.mark.parametrize(
    ("parameters", "noise", "message"),
    [
        ({}, -KNOWN, "at least 0"),
        ({}, KNOWN[:5], "one per row"),
        ({}, "much", "must be numbers"),
        ({"likelihood": "student-t"}, KNOWN, "likelihood='student-t'"),
        ({"noise": "known"}, None, "needs `noise_variance`"),
        ({"noise": "known", "likelihood": "laplace"}, None, "likelihood='laplace'"),
        ({"log_target": True}, KNOWN, "the model is one of log y"),
    ],
)
def test_bad_known_noise_raises(parameters: dict[str, Any], noise: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        SparseGPRegressor(**parameters).fit(X, np.exp(y / 9), noise_variance=noise)


def test_known_noise_of_other_models_raises(informed: SparseGPRegressor) -> None:
    with pytest.raises(InputError, match="got a DeepGPRegressor"):
        DeepGPRegressor().fit(X, y, noise_variance=KNOWN)
    classes = Dataset.of(torch.tensor(X), torch.tensor(y > 0).double(), noise=torch.tensor(KNOWN))
    for classifier in (SparseGPClassifier(), DeepGPClassifier()):
        with pytest.raises(InputError, match="noise variances, which classes do not have"):
            classifier.fit(classes)
    with pytest.raises(InputError, match="`observed=False`"):
        informed.predict(NEW, observed=False, noise_variance=1.0)


def test_wrong_noise_leaves_a_fitted_model_as_it_was() -> None:
    rng = np.random.default_rng(0)
    X = rng.uniform(0, 6, (20, 2))
    with shortest_fits():
        model = SparseGPRegressor("rbf", max_points=3, random_state=0).fit(X[:, :1], X[:, 0])
    with pytest.raises(InputError, match="noise_variance"):
        model.fit(X, X[:, 0], noise_variance=-1.0)
    assert model.predict(X[:, :1]).shape == (20,)


def test_warm_start_does_not_add_learnt_noise_to_known() -> None:
    rng = np.random.default_rng(0)
    X = rng.uniform(0, 6, (30, 1))
    y = np.sin(X[:, 0]) + 0.3 * rng.standard_normal(30)
    with shortest_fits():
        model = SparseGPRegressor("rbf", max_points=5, priors=None, random_state=0).fit(X, y)
        model.set_params(noise="known", warm_start=True).fit(X, y, noise_variance=0.09)
    assert model.noise_[0] < 1e-5
