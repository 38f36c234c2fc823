"""What a fit reports: kernel, evidence, growth, and models of other sizes."""

from typing import Any

import numpy as np
import pytest
import torch
from gpytorch.kernels import LinearKernel, RBFKernel, ScaleKernel

from helpers.short_fits import short_fits
from winnowgp import SparseGPClassifier, SparseGPRegressor, training
from winnowgp.errors import GrowthLimitWarning, InputError
from winnowgp.estimators import selection
from winnowgp.selection import SizeFrontier

N = 80
rng = np.random.default_rng(0)
X = np.sort(rng.uniform(0, 6, (N, 1)), axis=0)
y = np.sin(4 * X[:, 0]) + 0.1 * rng.normal(size=N)


@pytest.fixture(scope="module")
def fitted() -> SparseGPRegressor:
    return SparseGPRegressor(random_state=0).fit(X, y)


@pytest.fixture(scope="module")
def classifier() -> SparseGPClassifier:
    with short_fits(sizes=1):
        return SparseGPClassifier(random_state=0).fit(X, y > 0)


def standardised(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    targets = torch.from_numpy(y)[:, None]
    return model._x_scaler.forward(torch.from_numpy(X)), model._y_scaler.columns.forward(targets)


def blocks(model: Any) -> tuple[Any, ...]:
    """Kuu, Kuf, kff, Y and noise of the model, on all rows."""
    inputs, Y = standardised(model)
    posterior = model.posterior_
    with torch.no_grad():
        Kuu, Kuf = posterior.kernel(posterior.Z), posterior.kernel(posterior.Z, inputs)
        kff = posterior.kernel(inputs).to_dense()
        return Kuu.to_dense(), Kuf.to_dense(), kff, Y, posterior.likelihood.noise.squeeze()


def log_evidence(covariance: torch.Tensor, Y: torch.Tensor) -> float:
    zeros = torch.zeros(len(Y), dtype=Y.dtype)
    return torch.distributions.MultivariateNormal(zeros, covariance).log_prob(Y[:, 0]).item()


def collapsed(model: Any) -> float:
    """The collapsed bound log N(y | 0, Q + σ² I) − tr(K − Q)/2σ², dense."""
    Kuu, Kuf, kff, Y, noise = blocks(model)
    Q = Kuf.mT @ torch.linalg.solve(Kuu, Kuf)
    evidence = log_evidence(Q + noise * torch.eye(N).double(), Y)
    return evidence - 0.5 * ((kff - Q).trace() / noise).item()


def test_auto_kernel_is_the_best_by_evidence(fitted: SparseGPRegressor) -> None:
    assert set(fitted.kernel_evidence_) == {"matern52", "rbf", "matern32"}
    # The function is smooth.
    assert fitted.kernel_name_ == "rbf"
    assert fitted.kernel_evidence_["rbf"] == 0
    assert fitted.kernel_evidence_["matern32"] < fitted.kernel_evidence_["matern52"] < 0
    assert isinstance(fitted.kernel_.base_kernel, RBFKernel)


@pytest.mark.usefixtures("one_size")
def test_auto_kernel_of_a_rough_function_is_matern() -> None:
    walk = np.cumsum(np.random.default_rng(2).normal(size=N))
    model = SparseGPRegressor(random_state=0, tolerance=0.1, hyper="point").fit(
        np.arange(N)[:, None], walk
    )
    assert model.kernel_name_ == "matern32"
    assert model.kernel_evidence_["rbf"] < -0.01


@pytest.mark.usefixtures("one_size")
def test_auto_kernel_adds_a_linear_term_where_it_pays() -> None:
    trend = y + 10 * X[:, 0]
    model = SparseGPRegressor(random_state=0, hyper="point").fit(X, trend)
    assert model.kernel_name_.endswith(" + linear")
    assert any(isinstance(part, LinearKernel) for part in model.kernel_.kernels)
    # It is one of the kernels that were compared, and the best of them.
    assert model.kernel_evidence_.pop(model.kernel_name_) == 0
    assert set(model.kernel_evidence_) == {"matern52", "rbf", "matern32"}
    assert max(model.kernel_evidence_.values()) < -0.01


@pytest.mark.usefixtures("one_size")
def test_kernel_evidence_of_few_points_with_another_kernel_has_the_best_one() -> None:
    rng = np.random.default_rng(7)
    inputs = rng.standard_normal((120, 4))
    targets = inputs @ rng.standard_normal(4) * 2 + np.sin(4 * inputs[:, 0]) * 0.7
    targets += np.sin(3 * inputs[:, 1] * inputs[:, 2]) * 0.5 + 0.02 * rng.standard_normal(120)
    model = SparseGPRegressor(max_points=6, random_state=0).fit(inputs, targets)
    assert model.kernel_name_ == "matern52"
    assert model.kernel_evidence_["rbf + linear"] == 0
    assert max(model.kernel_evidence_[name] for name in ("matern52", "rbf", "matern32")) < -0.01


def test_auto_kernel_of_the_paper_schedule_is_rbf() -> None:
    model = SparseGPRegressor(
        schedule="paper", alpha=0.1, epochs=(2, 2, 2), n_candidates=6, random_state=0
    )
    model.fit(X, y)
    assert (model.kernel_name_, model.kernel_evidence_) == ("rbf", {})
    assert isinstance(model.kernel_.base_kernel, RBFKernel)
    assert (model.frontier_, model.available_sizes_) == (None, (model.n_inducing_,))
    assert model.growth_limit_ is None
    assert np.isnan([model.last_doubling_gain_, model.predictive_gap_]).all()


@pytest.mark.parametrize(
    ("kernel", "name"),
    [("matern12[0]", "matern12[0]"), (ScaleKernel(RBFKernel()), "ScaleKernel")],
)
# A short fit of twenty rows selects none.
@pytest.mark.filterwarnings("ignore::winnowgp.errors.NoInducingPointsWarning")
def test_kernel_name_of_a_given_kernel(kernel: Any, name: str) -> None:
    with short_fits():
        model = SparseGPRegressor(kernel, random_state=0, tolerance=0.3).fit(X[::4], y[::4])
    assert (model.kernel_name_, model.kernel_evidence_) == (name, {})


def test_evidence_and_kl_equal_dense_oracle(fitted: SparseGPRegressor) -> None:
    _, _, kff, Y, noise = blocks(fitted)
    exact = log_evidence(kff + noise * torch.eye(N).double(), Y)
    assert fitted.evidence_ is not None
    assert fitted.evidence_.exact
    assert (fitted.evidence_.lower, fitted.evidence_.upper) == pytest.approx((exact, exact))
    assert fitted.kl_bounds_ == pytest.approx([exact - fitted.elbo_] * 2, abs=1e-6)
    assert fitted.elbo_ == pytest.approx(collapsed(fitted), abs=1e-6)


def test_classifier_has_no_evidence(classifier: SparseGPClassifier) -> None:
    assert classifier.evidence_ is None
    assert classifier.kl_bounds_ == (0.0, np.inf)
    assert isinstance(classifier.frontier_, SizeFrontier)
    assert np.isfinite([classifier.predictive_gap_, classifier.predictive_gap_se_]).all()
    assert 0 in classifier.kernel_evidence_.values()


def test_resized_model_has_the_exact_bound_of_its_size(fitted: SparseGPRegressor) -> None:
    assert len(fitted.available_sizes_) >= 3
    assert fitted.available_sizes_[-1] == fitted.n_inducing_
    assert fitted.frontier_ is not None
    best = fitted.elbo_ + N * fitted.elbo_gap_
    for points in fitted.available_sizes_[:-1]:
        small = fitted.resized(points=points)
        assert small.n_inducing_ == len(small.inducing_points_) == small.posterior_.M == points
        assert small.elbo_ == pytest.approx(collapsed(small), abs=1e-6)
        assert small.elbo_ < fitted.elbo_
        # The reference is the same.
        assert small.elbo_ + N * small.elbo_gap_ == pytest.approx(best)
        assert fitted.frontier_.elbos[points] >= small.elbo_
        scale = small._y_scaler.columns.scale.item()
        noise = small.posterior_.likelihood.noise.item()
        assert small.noise_[0] == pytest.approx(noise * scale**2)
        assert small.kernel_ is small.posterior_.kernel
        assert (small.evidence_, small.alpha_, small.kl_bounds_) == (None, None, (0.0, np.inf))
        assert small.available_sizes_ == tuple(M for M in fitted.available_sizes_ if points >= M)
        mean, sd = small.predict(X, return_std=True)
        prediction = small.posterior_.predict(standardised(small)[0], observed=True)
        np.testing.assert_allclose(sd, prediction.variance.sqrt()[:, 0] * scale)
        assert np.corrcoef(mean, y)[0, 1] > 0
    # The fitted estimator itself is unchanged.
    assert fitted.n_inducing_ == fitted.available_sizes_[-1] == fitted.posterior_.M
    assert fitted.elbo_ == pytest.approx(collapsed(fitted), abs=1e-6)


def test_resized_predictive_gap_has_the_same_reference(fitted: SparseGPRegressor) -> None:
    assert fitted.frontier_ is not None
    densities = fitted.frontier_.log_densities
    small = fitted.resized(fitted.available_sizes_[0])
    reference = densities[fitted.n_inducing_].item() + fitted.predictive_gap_
    held_out = densities[small.n_inducing_].item()
    assert small.predictive_gap_ == pytest.approx(reference - held_out)
    # Tenths of the rows are left out at once, single rows by the oracle.
    assert held_out == pytest.approx(small_density(small), abs=0.02)
    assert np.isnan(small.predictive_gap_se_)
    assert fitted.predictive_gap_se_ > 0


def small_density(model: Any) -> float:
    """The mean held-out log density, each row left out of the dense posterior.

    An inducing point at the row is left out, too.
    """
    Kuu, Kuf, kff, Y, noise = blocks(model)
    inputs, Z = standardised(model)[0], model.posterior_.Z
    nats = []
    for i in range(N):
        other = (inputs[i] != Z).any(1)
        Q = Kuf[other].mT @ torch.linalg.solve(Kuu[other][:, other], Kuf[other])
        rest = [j for j in range(N) if j != i]
        K = Q[rest][:, rest] + noise * torch.eye(N - 1).double()
        weights = torch.linalg.solve(K, Q[rest, i])
        variance = kff[i, i] - Q[i, rest] @ weights + noise
        normal = torch.distributions.Normal(weights @ Y[rest, 0], variance.sqrt())
        nats.append(normal.log_prob(Y[i, 0]).item())
    return float(np.mean(nats))


def test_resized_classifier_predicts(classifier: SparseGPClassifier) -> None:
    small = classifier.resized(classifier.available_sizes_[0])
    assert small.predict_proba(X).shape == (N, 2)
    assert small.elbo_ < classifier.elbo_


def test_resized_to_its_own_size_is_the_same_model(fitted: SparseGPRegressor) -> None:
    same = fitted.resized(fitted.n_inducing_)
    assert same is not fitted
    assert same.elbo_ == fitted.elbo_
    assert same.available_sizes_ == fitted.available_sizes_


@pytest.mark.parametrize("points", [0, 3, 1000, "8", 8.5])
def test_resized_to_another_size_names_the_sizes(fitted: SparseGPRegressor, points: Any) -> None:
    sizes = ", ".join(map(str, fitted.available_sizes_))
    with pytest.raises(InputError, match=f"`points` must be one of .* kept, {sizes}; got"):
        fitted.resized(points)


def test_fit_that_a_limit_ended_warns_what_to_do() -> None:
    with short_fits(), pytest.warns(GrowthLimitWarning) as warned:
        model = SparseGPRegressor(n_candidates=10, random_state=0).fit(X, y)
    assert model.growth_limit_ == "n_candidates"
    (warning,) = (each for each in warned if each.category is GrowthLimitWarning)
    message = str(warning.message)
    assert "(limit: n_candidates)" in message
    assert "raise `n_candidates`" in message
    assert "larger `tolerance`" in message
    assert warning.filename == __file__
    # The estimator is complete.
    assert model.noise_.shape == (1,)


def test_fit_within_tolerance_of_the_full_gp_does_not_warn() -> None:
    """The limit is reported, but more points would gain nothing."""
    with short_fits():
        model = SparseGPRegressor(n_candidates=30, tolerance=0.3, random_state=0).fit(X, y)
    model.growth_limit_ = "n_candidates"
    assert model.elbo_gap_ <= 0.3
    model._warn_of_limits()


# Four candidates may be too few to explain anything.
@pytest.mark.filterwarnings("ignore::winnowgp.errors.NoInducingPointsWarning")
@pytest.mark.parametrize("goal", [{"max_points": 3}, {"alpha": 0.5}])
@pytest.mark.usefixtures("quickly")
def test_fit_with_another_goal_does_not_warn(goal: dict[str, Any]) -> None:
    model = SparseGPRegressor(n_candidates=4, random_state=0, **goal).fit(X, y)
    assert model.growth_limit_ in ("max_points", "n_candidates")


def test_fit_without_limit_reports_none(fitted: SparseGPRegressor) -> None:
    assert fitted.growth_limit_ is None
    assert np.isfinite(fitted.last_doubling_gain_)


def test_fit_passes_limits_and_criterion_to_the_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    schedules = []

    class Recorded(Exception):
        pass

    def record(goal: Any, **settings: Any) -> None:
        schedules.append((goal, settings))
        raise Recorded

    monkeypatch.setattr(training, "FastSchedule", record)
    for model in (
        SparseGPRegressor(max_fit_seconds=5, criterion="predictive"),
        SparseGPClassifier("rbf", n_candidates=7),
    ):
        with pytest.raises(Recorded):
            model.fit(X, y > 0)
    first, second = (settings for _, settings in schedules)
    assert (first["max_seconds"], first["criterion"], first["n_candidates"]) == (
        5.0,
        "predictive",
        None,
    )
    assert [kernel.base_kernel.__class__.__name__ for kernel in first["kernels"]] == [
        "RBFKernel",
        "MaternKernel",
    ]
    assert first["kernels"][1].base_kernel.nu == 1.5
    assert first["linear_term"]
    assert (second["kernels"], second["linear_term"], second["n_candidates"]) == ((), False, 7)
    assert (second["max_seconds"], second["criterion"]) == (None, "elbo")


def test_max_predict_us_searches_up_to_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = []

    def points_within(max_us: float, *, predict_us: Any, most: int) -> int:
        limits.append(most)
        return 2

    monkeypatch.setattr(selection, "points_within", points_within)
    with short_fits():
        SparseGPRegressor("rbf", max_predict_us=50, random_state=0).fit(X[::4], y[::4])
        SparseGPRegressor("rbf", max_predict_us=50, n_candidates=9, random_state=0).fit(
            X[::4], y[::4]
        )
    assert limits == [20, 9]


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("criterion", "aic", "`criterion` must be 'elbo' or 'predictive'; got 'aic'"),
        ("max_fit_seconds", 0, "`max_fit_seconds` must be a positive number; got 0"),
    ],
)
def test_invalid_criterion_and_seconds_are_refused(name: str, value: Any, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        SparseGPRegressor(**{name: value}).fit(X, y)


@pytest.mark.parametrize("extra", [{"max_fit_seconds": 3.0}, {"criterion": "predictive"}])
def test_settings_of_the_fast_schedule_are_refused_by_the_paper(extra: dict[str, Any]) -> None:
    (name,) = extra
    with pytest.raises(InputError, match=f"`{name}` is for `schedule='fast'`"):
        SparseGPRegressor(schedule="paper", alpha=0.1, **extra).fit(X, y)
