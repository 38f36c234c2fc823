"""SparseGPRegressor with likelihoods other than the Gaussian."""

from typing import Any

import numpy as np
import pytest
import torch
from gpytorch.likelihoods import (
    BetaLikelihood,
    GaussianLikelihood,
    MultitaskGaussianLikelihood,
    NegativeBinomialLikelihood,
    SoftmaxLikelihood,
    StudentTLikelihood,
)
from sklearn.exceptions import NotFittedError

from helpers.short_fits import shortest_fits
from winnowgp import SparseGPRegressor
from winnowgp.errors import InputError

X = np.sort(np.random.default_rng(0).uniform(0, 6, size=(150, 1)), axis=0)
WAVE = np.sin(2 * X[:, 0])


def regressor(likelihood, **arguments) -> SparseGPRegressor:
    return SparseGPRegressor(
        "rbf", likelihood=likelihood, n_candidates=30, random_state=0, **arguments
    )


def brief(likelihood) -> SparseGPRegressor:
    """For what holds however well it is fitted."""
    return SparseGPRegressor(
        likelihood=likelihood,
        schedule="paper",
        alpha=0.01,
        n_candidates=8,
        epochs=(20, 5, 20),
        random_state=0,
    )


@pytest.mark.filterwarnings("ignore::winnowgp.errors.NoInducingPointsWarning")  # of the plain one
@pytest.mark.parametrize(
    "likelihood", ["student-t", pytest.param(StudentTLikelihood(), marks=pytest.mark.slow)]
)
def test_student_t_is_robust_to_outliers_in_any_units(likelihood) -> None:
    y = WAVE + 0.1 * np.random.default_rng(4).normal(size=150)
    y[::10] += 8
    y = 1e3 * y - 500
    with shortest_fits():
        robust, plain = (regressor(each).fit(X, y) for each in (likelihood, "gaussian"))
    truth = 1e3 * WAVE - 500
    error, plain_error = (np.abs(m.predict(X) - truth).mean() for m in (robust, plain))
    assert error < 60 < 200 < plain_error
    assert robust.log_density(X, y).mean() > plain.log_density(X, y).mean() + 0.5
    assert 30**2 < robust.noise_[0] < 200**2
    assert robust.evidence_ is None
    assert robust.kl_bounds_ == (0.0, np.inf)
    assert robust.n_inducing_ < 25


@pytest.mark.parametrize(
    ("likelihood", "level"),
    [
        pytest.param("poisson", 200.0, marks=pytest.mark.slow),
        (NegativeBinomialLikelihood(), 1.0),
        pytest.param("poisson", 1.0, marks=pytest.mark.slow),
        pytest.param(NegativeBinomialLikelihood(), 200.0, marks=pytest.mark.slow),
    ],
)
@pytest.mark.usefixtures("quickly")
def test_counts_small_and_large(likelihood, level: float) -> None:
    few, rate = X[::3], level * np.exp(1.2 * WAVE[::3])
    y = np.random.default_rng(1).poisson(rate)
    model = regressor(likelihood).fit(few, y)
    mean, sd = model.predict(few, return_std=True)
    np.testing.assert_allclose(model.predict(few), mean)
    assert np.abs(mean - rate).mean() < 0.35 * rate.mean() ** 0.5 + 0.05 * rate.mean()
    assert 0.85 < (np.abs(y - mean) <= 2 * sd).mean() <= 1
    assert np.isnan(model.noise_).all()
    assert model.log_density(few, y).mean() > -0.5 * np.log(2 * np.pi * np.e * rate).mean() - 0.3


@pytest.fixture(scope="module")
def counted() -> SparseGPRegressor:
    """Fitted to counts, for tests that only ask it."""
    return brief("poisson").fit(X, np.random.default_rng(2).poisson(2 + WAVE))


def test_density_of_counts_sums_to_one(counted: SparseGPRegressor) -> None:
    model = counted
    counts = np.arange(40)
    density = np.exp([model.log_density(X[:3], np.full(3, c)) for c in counts])
    np.testing.assert_allclose(density.sum(0), 1, atol=1e-6)
    mean = (counts[:, None] * density).sum(0)
    np.testing.assert_allclose(model.predict(X[:3]), mean, atol=1e-5)


def test_proportions() -> None:
    few = X[::3]
    y = 1 / (1 + np.exp(-WAVE[::3] - 0.1 * np.random.default_rng(5).normal(size=50)))
    with shortest_fits():
        model = regressor(BetaLikelihood()).fit(few, y)
    mean, sd = model.predict(few, return_std=True)
    assert np.abs(mean - y).mean() < 0.05
    assert ((mean > 0) & (mean < 1)).all()
    assert (sd < 0.2).all()


@pytest.mark.slow
def test_laplace_and_several_targets() -> None:
    Y = np.c_[WAVE, -10 * WAVE] + 0.1 * np.random.default_rng(6).laplace(size=(150, 2))
    model = regressor("laplace", max_points=10).fit(X, Y)
    assert model.predict(X).shape == (150, 2)
    assert model.log_density(X, Y).shape == (150, 2)
    assert model.noise_.shape == (2,)
    assert model.score(X, Y) > 0.9


@pytest.mark.usefixtures("quickly")
def test_gaussian_likelihood_object_agrees_with_the_collapsed_model() -> None:
    few = X[::3]
    y = WAVE[::3] + 0.1 * np.random.default_rng(7).normal(size=50)
    # An object has no weak priors.
    settings: dict[str, Any] = {"inducing_points": few[::2], "priors": None, "hyper": "point"}
    collapsed, explicit = (
        SparseGPRegressor("rbf", likelihood=likelihood, **settings).fit(few, y)
        for likelihood in ("gaussian", GaussianLikelihood())
    )
    assert abs(collapsed.elbo_ - explicit.elbo_) < 1e-3 * 50
    np.testing.assert_allclose(collapsed.predict(few), explicit.predict(few), atol=0.005)


def test_paper_schedule_uses_minibatches() -> None:
    y = np.random.default_rng(1).poisson(np.exp(1.2 * WAVE))
    settings = {"schedule": "paper", "alpha": 0.02, "batch_size": 50, "n_candidates": 15}
    model = SparseGPRegressor(
        likelihood="poisson", epochs=(30, 20, 30), random_state=0, **settings
    ).fit(X, y)
    assert 0 < model.n_inducing_ < 15
    assert model.log_density(X, y).mean() > -1.6
    gaussian = SparseGPRegressor(epochs=(150, 20, 50), random_state=0, **settings).fit(X, WAVE)
    assert gaussian.score(X, WAVE) > 0.8


class TestBadTargets:
    @pytest.mark.parametrize("bad", [-1.0, 0.5])
    def test_counts(self, bad: float) -> None:
        y = np.ones(150)
        y[3] = bad
        with pytest.raises(InputError, match=rf"counts must be whole numbers.*got {bad:g}"):
            regressor("poisson").fit(X, y)

    @pytest.mark.parametrize("likelihood", ["normal", 3, None])
    def test_unknown_likelihood_is_refused(self, likelihood) -> None:
        with pytest.raises(
            InputError, match="`likelihood` must be one of gaussian, heteroscedastic, student"
        ):
            regressor(likelihood).fit(X, WAVE)

    def test_a_likelihood_that_cannot_be_supported(self) -> None:
        with pytest.raises(InputError, match="got MultitaskGaussianLikelihood"):
            regressor(MultitaskGaussianLikelihood(num_tasks=2)).fit(X, WAVE)

    def test_observed_covariance_without_gaussian_noise_is_refused(
        self, counted: SparseGPRegressor
    ) -> None:
        model = counted
        with pytest.raises(InputError, match="PoissonLikelihood has no Gaussian noise"):
            model.predict(X[:3], return_cov=True)
        _, covariance = model.predict(X[:3], return_cov=True, observed=False)
        assert covariance.shape == (3, 3)


def test_likelihood_object_is_not_modified() -> None:
    mine = StudentTLikelihood()
    before = {name: p.clone() for name, p in mine.named_parameters()}
    SparseGPRegressor(
        likelihood=mine, schedule="paper", alpha=0.1, n_candidates=5, epochs=(5, 5, 5)
    ).fit(X, WAVE)
    for name, p in mine.named_parameters():
        assert torch.equal(p, before[name])


@pytest.mark.slow
def test_student_t_without_outliers_is_as_good_as_gaussian() -> None:
    few = X[::4]
    plain, robust = (
        regressor(name).fit(few, np.sin(few[:, 0])) for name in ("gaussian", "student-t")
    )
    assert robust.elbo_ > plain.elbo_ - 1
    assert np.abs(robust.predict(few) - np.sin(few[:, 0])).max() < 1e-2


def test_paper_schedule_starts_at_the_level_of_large_counts() -> None:
    y = np.random.default_rng(3).poisson(200 * (2 + WAVE))
    model = brief("poisson").set_params(epochs=(5, 5, 5)).fit(X, y)
    assert 250 < model.predict(X).mean() < 550


def test_softmax_likelihood_is_refused() -> None:
    softmax = SoftmaxLikelihood(num_classes=3, mixing_weights=False)
    with pytest.raises(InputError, match="use a classifier"):
        regressor(softmax).fit(X, np.arange(150) % 3)


def test_density_of_invalid_counts_is_refused(counted: SparseGPRegressor) -> None:
    with pytest.raises(InputError, match="counts must be whole numbers"):
        counted.log_density(X[:2], [1, -1])


def test_sampling_before_fitting() -> None:
    with pytest.raises(NotFittedError):
        regressor("poisson").sample_y([[1.0]])
