import warnings
from typing import Any

import numpy as np
import pytest
from gpytorch.kernels import LinearKernel, PeriodicKernel, RBFKernel, ScaleKernel
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import cross_val_score

from helpers.short_fits import smaller_sizes
from winnowgp import SparseGPRegressor
from winnowgp.errors import InputError, NoInducingPointsWarning
from winnowgp.experiments.synthetic import sampled

# Smaller sizes are tested in `test_sparse.py`.
pytestmark = pytest.mark.usefixtures("one_size")


def wave(N: int = 60, P: int = 1, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    X = np.sort(rng.uniform(100, 110, size=(N, 1)), axis=0)
    Y = 1e3 * np.sin(X + np.arange(P)) + 50 * rng.normal(size=(N, P)) + 7e3
    return X, (Y[:, 0] if P == 1 else Y)


def regressor(**arguments: Any) -> SparseGPRegressor:
    settings: dict[str, Any] = {"kernel": "rbf", "n_candidates": 30, "random_state": 0}
    settings |= {"hyper": "point"} | arguments
    return SparseGPRegressor(**settings)


def paper(**arguments: Any) -> SparseGPRegressor:
    settings: dict[str, Any] = {
        "schedule": "paper",
        "alpha": 0.05,
        "n_candidates": 15,
        "epochs": (30, 30, 30),
    }
    return regressor(**(settings | arguments))


@pytest.fixture(scope="module")
def fitted() -> SparseGPRegressor:
    """Fitted to the wave, for tests that only ask it."""
    with smaller_sizes(0):
        return regressor().fit(*wave())


@pytest.mark.parametrize("schedule", ["fast", "paper"])
def test_regressor_fits_in_the_units_of_the_data(schedule: str, fitted: SparseGPRegressor) -> None:
    X, y = wave()
    model = fitted if schedule == "fast" else paper(epochs=(300, 200, 200)).fit(X, y)
    mean, sd = model.predict(X, return_std=True)
    assert model.score(X, y) > 0.95
    assert 20 < np.median(sd) < 200
    assert 0 < model.n_inducing_ < 15
    assert model.inducing_points_.shape == (model.n_inducing_, 1)
    assert 98 < model.inducing_points_.min() <= model.inducing_points_.max() < 112
    assert model.inclusion_.shape == (len(model.candidates_),)
    assert ((model.inclusion_ >= 0) & (model.inclusion_ <= 1)).all()
    assert np.isfinite(model.elbo_)
    assert model.evidence_ is not None
    assert model.kl_bounds_[0] >= 0
    assert 30**2 < model.noise_[0] < 90**2
    inside = np.abs(y - mean) < 2 * sd
    assert 0.85 < inside.mean() <= 1.0


def test_default_elbo_gap_is_within_tolerance() -> None:
    X, y = wave(N=100)
    model = regressor(n_candidates=50).fit(X, y)
    assert model.elbo_gap_ <= 0.01
    assert model.alpha_ is not None
    assert model.alpha_ > 0
    assert model.frontier_ is not None
    # Elimination from a larger pool finds a set as good as the one that was kept, or nearly.
    assert model.frontier_.elbos[model.n_inducing_].item() > model.elbo_ - 0.01 * 100
    strict = regressor(n_candidates=50, tolerance=1e-4).fit(X, y)
    assert strict.n_inducing_ > model.n_inducing_


@pytest.mark.parametrize(
    "seed", [6, 8, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (7, 9))]
)
def test_elbo_gap_is_within_tolerance_without_noise(seed: int) -> None:
    rng = np.random.default_rng(seed)
    X = rng.uniform(-3, 3, size=(30, 2))
    model = SparseGPRegressor(random_state=seed, hyper="point").fit(X, np.sin(X[:, 0]))
    assert model.elbo_gap_ <= 0.01


# A large α leaves no points.
@pytest.mark.filterwarnings("ignore::winnowgp.errors.NoInducingPointsWarning")
@pytest.mark.usefixtures("quickly")
def test_goals_set_the_number_of_points() -> None:
    X, y = wave()
    assert regressor(max_points=4).fit(X, y).n_inducing_ == 4
    few, many = (regressor(alpha=a).fit(X, y) for a in (10.0, 0.01))
    assert few.n_inducing_ < many.n_inducing_
    assert (few.alpha_, many.alpha_) == (10.0, 0.01)
    assert 1 <= regressor(max_predict_us=1e6).fit(X, y).n_inducing_ <= 30
    with pytest.raises(InputError, match="`max_predict_us` must allow at least one inducing point"):
        regressor(max_predict_us=1e-9).fit(X, y)


@pytest.mark.usefixtures("quickly")
@pytest.mark.parametrize("candidates", ["greedy", "kmeans", "random"])
@pytest.mark.parametrize("build", [regressor, paper], ids=["fast", "paper"])
def test_every_candidate_option_fits(build, candidates: str) -> None:
    X, y = wave(30)
    assert np.isfinite(build(candidates=candidates, n_candidates=10).fit(X, y).elbo_)


def begun(candidates: str, seed: int = 0) -> np.ndarray:
    """Where six candidates are when the paper's schedule begins: of a fit without a step."""
    model = paper(candidates=candidates, n_candidates=6, epochs=(0, 0, 0), random_state=seed)
    return np.sort(model.fit(*wave()).candidates_[:, 0])


def test_candidates_are_found_as_specified() -> None:
    rows = wave()[0]
    greedy, kmeans, random = map(begun, ("greedy", "kmeans", "random"))
    for chosen in (greedy, random):
        assert np.isin(chosen, rows).all()
    # No two are near each other, and both ends are least known from the others.
    assert np.diff(greedy).min() > 1.2 > np.diff(random).min()
    assert {greedy[0], greedy[-1]} == {rows.min(), rows.max()}
    # Centres of clusters are nearer to the rows than any of them.
    near = [(np.abs(rows - points).min(1) ** 2).sum() for points in (kmeans, greedy, random)]
    assert near[0] < 0.75 * min(near[1:])


def test_other_seed_draws_other_candidates() -> None:
    np.testing.assert_array_equal(begun("random", 3), begun("random", 3))
    assert (begun("random", 3) != begun("random", 4)).any()


def test_elbo_gap_is_per_observation() -> None:
    """It is the distance to the bound of all candidates, whichever of them a seed draws."""
    X, y = wave()
    settings: dict[str, Any] = {"candidates": X[::6], "n_candidates": None, "epochs": (0, 0, 0)}
    fits = [paper(random_state=seed, **settings).fit(X, y) for seed in range(3)]
    assert np.ptp([model.elbo_ for model in fits]) > 1
    whole = [model.elbo_ + len(y) * model.elbo_gap_ for model in fits]
    np.testing.assert_allclose(whole, whole[0], rtol=1e-9)


def test_std_cov_and_samples_agree(fitted: SparseGPRegressor) -> None:
    rows, model = wave()[0][:4], fitted
    mean, sd = model.predict(rows, return_std=True)
    _, cov = model.predict(rows, return_cov=True)
    np.testing.assert_allclose(np.sqrt(np.diag(cov)), sd)
    _, latent = model.predict(rows, return_std=True, observed=False)
    np.testing.assert_allclose(sd**2 - latent**2, np.full(4, model.noise_[0]))
    np.testing.assert_allclose(model.predict(rows), mean)
    draws, again, others = (model.sample_y(rows, 4_000, random_state=seed) for seed in (1, 1, 2))
    assert draws.shape == (4, 4_000)
    np.testing.assert_array_equal(draws, again)
    assert (draws != others).all()
    assert (np.abs(draws.mean(1) - mean) < 4 * latent / np.sqrt(4_000)).all()
    with pytest.raises(InputError, match="cannot both be True"):
        model.predict(rows, return_std=True, return_cov=True)


@pytest.mark.usefixtures("quickly")
def test_several_targets_share_points() -> None:
    X, Y = wave(P=3)
    model = regressor().fit(X, Y)
    mean, sd = model.predict(X, return_std=True)
    assert mean.shape == sd.shape == (60, 3)
    assert model.predict(X[:4], return_cov=True)[1].shape == (4, 4, 3)
    assert model.sample_y(X[:4], 2).shape == (4, 3, 2)
    assert model.noise_.shape == (3,)
    assert model.log_density(X, Y).shape == (60, 3)


def test_log_density_is_in_the_units_of_the_targets(fitted: SparseGPRegressor) -> None:
    (X, y), model = wave(), fitted
    mean, sd = model.predict(X, return_std=True)
    expected = -0.5 * np.log(2 * np.pi) - np.log(sd) - 0.5 * ((y - mean) / sd) ** 2
    np.testing.assert_allclose(model.log_density(X, y), expected)


def test_fit_is_invariant_to_units(fitted: SparseGPRegressor) -> None:
    (X, y), first = wave(), fitted
    second = regressor().fit(1e3 * X - 5, 1e-3 * y + 2)
    assert first.n_inducing_ == second.n_inducing_
    np.testing.assert_allclose(first.predict(X), (second.predict(1e3 * X - 5) - 2) * 1e3, rtol=1e-3)


def test_same_seed_gives_the_same_fit(fitted: SparseGPRegressor) -> None:
    first, second = fitted, regressor().fit(*wave())
    assert first.elbo_ == second.elbo_
    np.testing.assert_array_equal(first.inducing_points_, second.inducing_points_)


# A short fit of few rows may select none.
@pytest.mark.filterwarnings("ignore::winnowgp.errors.NoInducingPointsWarning")
@pytest.mark.usefixtures("quickly")
def test_kernels_by_name_and_as_objects() -> None:
    X, y = wave(30)
    for kernel in ("matern12", ScaleKernel(PeriodicKernel())):
        assert np.isfinite(regressor(kernel=kernel).fit(X, y).elbo_)
    with pytest.raises(InputError, match="the kernels are rbf"):
        regressor(kernel="brownian").fit(X, y)


@pytest.mark.usefixtures("quickly")
def test_it_clones_and_cross_validates() -> None:
    X, y = wave(30)
    assert repr(clone(regressor(alpha=0.3))) == repr(regressor(alpha=0.3))
    assert cross_val_score(regressor(), X, y, cv=2).shape == (2,)


@pytest.mark.usefixtures("quickly")
def test_given_candidates_are_in_the_units_of_the_inputs() -> None:
    X, y = wave()
    grid = np.linspace(100, 110, 8)[:, None]
    model = paper(candidates=grid, n_candidates=None, epochs=(0, 1, 0)).fit(X, y)
    np.testing.assert_allclose(model.candidates_, grid, atol=0.2)
    assert regressor(candidates=grid).fit(X, y).n_inducing_ <= 8


@pytest.mark.usefixtures("quickly")
class TestOddButLegalInput:
    def test_more_candidates_than_rows(self) -> None:
        X, y = wave(N=6)
        assert paper(n_candidates=500).fit(X, y).inclusion_.shape == (6,)
        assert regressor(n_candidates=500).fit(X, y).n_inducing_ <= 6

    def test_one_row(self) -> None:
        model = regressor().fit([[2.0]], [5.0])
        np.testing.assert_allclose(model.predict([[2.0]]), [5.0])

    def test_a_constant_column(self) -> None:
        X, y = wave()
        model = regressor().fit(np.hstack([X, np.full_like(X, 3.0)]), y)
        assert np.isfinite(model.predict(np.hstack([X, np.full_like(X, 3.0)]))).all()

    def test_a_constant_target(self) -> None:
        X, _ = wave()
        with pytest.warns(NoInducingPointsWarning):
            model = regressor().fit(X, np.full(60, 4.2))
        np.testing.assert_allclose(model.predict(X), 4.2)

    def test_duplicated_rows(self) -> None:
        X, y = wave()
        assert np.isfinite(regressor().fit(np.repeat(X[::3], 3, 0), np.repeat(y[::3], 3)).elbo_)

    def test_integers_and_lists(self) -> None:
        assert np.isfinite(regressor().fit([[0], [1], [2], [3]], [0, 1, 4, 9]).elbo_)

    def test_huge_and_tiny_numbers(self) -> None:
        X, y = wave()
        model = regressor().fit(X * 1e200, y * 1e-200)
        assert np.corrcoef(model.predict(X * 1e200) * 1e200, y)[0, 1] > 0.97

    def test_reversed_and_strided_arrays(self) -> None:
        X, y = wave()
        assert regressor().fit(X[::-1], y[::-1]).score(X[::-1], y[::-1]) > 0.9

    def test_a_kernel_without_variance_at_some_row(self) -> None:
        X = np.array([[-2.0], [-1.0], [0.0], [1.0], [2.0]])
        model = regressor(kernel=LinearKernel()).fit(X, 3 * X[:, 0])
        np.testing.assert_allclose(model.predict(X), 3 * X[:, 0], atol=0.2)

    def test_a_kernel_on_some_columns(self) -> None:
        X, y = wave()
        kernel = ScaleKernel(RBFKernel(ard_num_dims=1), active_dims=(0,))
        assert regressor(kernel=kernel).fit(np.hstack([X, X]), y).score(np.hstack([X, X]), y) > 0.9


class TestBadInput:
    X, y = wave()

    @pytest.mark.parametrize("value", [np.nan, np.inf])
    def test_not_finite(self, value: float) -> None:
        X = self.X.copy()
        X[3] = value
        with pytest.raises(ValueError, match=r"X`? contains"):
            regressor().fit(X, self.y)
        y = self.y.copy()
        y[3] = value
        with pytest.raises(ValueError, match=r"`y` contains \w+ in 1 of 60 rows, first in row 3 "):
            regressor().fit(self.X, y)

    def test_mismatched_rows(self) -> None:
        with pytest.raises(ValueError, match=r"inconsistent numbers of samples: \[60, 59\]"):
            regressor().fit(self.X, self.y[:-1])

    def test_no_rows(self) -> None:
        with pytest.raises(ValueError, match="minimum of 1 is required"):
            regressor().fit(np.zeros((0, 1)), np.zeros(0))

    @pytest.mark.parametrize("value", [-0.1, 0, np.nan, np.inf, "strong", True, [1]])
    @pytest.mark.parametrize("name", ["alpha", "tolerance", "max_predict_us"])
    def test_positive_numbers(self, name: str, value) -> None:
        with pytest.raises(InputError, match=f"`{name}` must be a positive number"):
            regressor(**{name: value}).fit(self.X, self.y)

    @pytest.mark.parametrize("value", [0, -3, 2.5, "many", True])
    @pytest.mark.parametrize("name", ["n_candidates", "max_points"])
    def test_integers(self, name: str, value) -> None:
        with pytest.raises(InputError, match=f"`{name}` must be an integer"):
            regressor(**{name: value}).fit(self.X, self.y)

    @pytest.mark.parametrize("shape", [(0, 1), (4, 2), (4,)])
    def test_candidates_of_the_wrong_shape(self, shape: tuple[int, ...]) -> None:
        with pytest.raises(InputError, match=r"`candidates` must have shape \[K"):
            regressor(candidates=np.zeros(shape)).fit(self.X, self.y)

    def test_unknown_options(self) -> None:
        with pytest.raises(InputError, match="`candidates` must be one of auto"):
            regressor(candidates="clever").fit(self.X, self.y)
        with pytest.raises(InputError, match="`schedule` must be 'fast' or 'paper'"):
            regressor(schedule="slow").fit(self.X, self.y)

    def test_contradicting_parameters(self) -> None:
        with pytest.raises(InputError, match="in one way only"):
            regressor(alpha=0.1, max_points=3).fit(self.X, self.y)
        with pytest.raises(InputError, match="needs a number for `alpha`"):
            regressor(schedule="paper").fit(self.X, self.y)
        with pytest.raises(InputError, match="`epochs` must be 3 integers"):
            paper(epochs=(1, 2)).fit(self.X, self.y)

    def test_candidates_that_are_not_finite(self) -> None:
        with pytest.raises(InputError, match="`candidates` must be finite"):
            regressor(candidates=[[np.nan]]).fit(self.X, self.y)

    def test_targets_of_another_width(self) -> None:
        X, Y = wave(N=20, P=2)
        with pytest.raises(InputError, match="2 target columns"):
            paper(epochs=(1, 1, 1)).fit(X, Y).log_density(X, Y[:, 0])

    def test_candidates_and_kernels_of_another_type(self) -> None:
        with pytest.raises(InputError, match="`candidates` must be numbers"):
            regressor(candidates=[["a"]]).fit(self.X, self.y)
        with pytest.raises(InputError, match="`kernel` must be one of"):
            regressor(kernel=np.ones(2)).fit(self.X, self.y)

    def test_predicting_before_fitting(self) -> None:
        with pytest.raises(NotFittedError):
            regressor().predict(self.X)

    def test_another_number_of_columns(self, fitted: SparseGPRegressor) -> None:
        with pytest.raises(ValueError, match="expecting 1 features"):
            fitted.predict(np.zeros((2, 3)))


@pytest.mark.parametrize("sigma", [0.3, 1.0])
def test_rapidly_varying_function_is_not_taken_for_noise(sigma: float) -> None:
    """The sample spans a hundred lengthscales, which starts of one lengthscale all miss."""
    data = sampled("noise", sigma, rows=500, seed=1)
    model = SparseGPRegressor("rbf", random_state=0, hyper="point")
    model.fit(data.X.numpy(), data.Y[:, 0].numpy())
    assert model.n_inducing_ > 40
    # Noise alone has −709 nats.
    assert model.elbo_ > -600


@pytest.mark.usefixtures("quickly")
def test_fit_constant_target_with_given_number_of_points_warns() -> None:
    X = np.random.default_rng(0).uniform(size=(40, 2))
    with pytest.warns(NoInducingPointsWarning, match="same value in all training rows"):
        SparseGPRegressor(random_state=0, max_points=2).fit(X, np.full(40, 3.0))


@pytest.mark.usefixtures("quickly")
def test_fit_outliers_alone_are_no_constant_target() -> None:
    rng = np.random.default_rng(0)
    y = np.zeros(30) + 1e-6 * rng.normal(size=30)
    y[[3, 11]] = 50, -80
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = SparseGPRegressor("rbf", likelihood="student-t", random_state=0)
        model.fit(rng.uniform(size=(30, 1)), y)
    assert not [each for each in caught if "same value" in str(each.message)]


@pytest.mark.usefixtures("quickly")
@pytest.mark.parametrize("level", [0.0, 7.0])
def test_fit_constant_target_predicts_it(level: float) -> None:
    X = np.random.default_rng(0).uniform(size=(40, 2))
    with pytest.warns(NoInducingPointsWarning, match="same value in all training rows"):
        model = SparseGPRegressor(random_state=0).fit(X, np.full(40, level))
    assert model.n_inducing_ == 0
    mean, sd = model.predict(X[:3], return_std=True)
    np.testing.assert_allclose(mean, level, atol=1e-6)
    assert sd.max() < 0.01
