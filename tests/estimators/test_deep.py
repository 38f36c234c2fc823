from typing import Any

import joblib
import numpy as np
import pytest
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import LaplaceLikelihood
from sklearn.datasets import make_moons
from sklearn.exceptions import NotFittedError

from helpers.short_fits import short_shallow_starts
from winnowgp import DeepGPClassifier, DeepGPRegressor
from winnowgp.errors import InputError
from winnowgp.estimators import deep, deep_training
from winnowgp.models.deep_gp import prediction_prices

pytestmark = pytest.mark.usefixtures("short_shallow")

QUICK: dict[str, Any] = {
    "n_candidates": 12,
    "random_state": 0,
    "hidden_mean": "identity",
    "smaller_models": 0,
}


def regressor(**arguments: Any) -> DeepGPRegressor:
    settings: dict[str, Any] = QUICK | {"epochs": (20, 60, 60)} | arguments
    return DeepGPRegressor(**settings)


def classifier(**arguments: Any) -> DeepGPClassifier:
    settings: dict[str, Any] = QUICK | {"epochs": (20, 60, 60)} | arguments
    return DeepGPClassifier(**settings)


def steps(N: int = 120, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """A function that jumps, in units of its own."""
    rng = np.random.default_rng(seed)
    X = rng.uniform(100, 110, size=(N, 1))
    y = 50 + 20 * np.sign(np.sin(X[:, 0])) + rng.normal(size=N)
    return X, y


@pytest.fixture(scope="module")
def learnt() -> DeepGPRegressor:
    """Fitted to the steps from a shallow GP that is fitted to the end."""
    # Fixtures of a module are set up before `short_shallow`.
    return regressor(n_candidates=20, epochs=(30, 300, 220), hidden_mean="auto").fit(*steps())


def test_deep_regressor_learns_a_step_function_in_its_units(learnt: DeepGPRegressor) -> None:
    (X, y), model = steps(), learnt
    mean, sd = model.predict(X, return_std=True)
    # Also of rows that it has not seen: most of the rest is where the function jumps.
    assert model.score(*steps(seed=50)) > 0.94
    assert 0.5 < np.sqrt(model.noise_[0]) < 6
    assert (sd > 0).all()
    inside = np.abs(y - mean) < 2 * sd
    assert inside.mean() > 0.85
    assert len(model.n_inducing_) == 2
    assert all(0 < M <= 20 for M in model.n_inducing_)
    assert [len(p) for p in model.inducing_points_] == list(model.n_inducing_)
    # The candidates of the selection are what the rounds before it, if any, left of twenty.
    pairs = list(zip(model.inclusion_, model.candidates_, model.n_inducing_, strict=True))
    assert all(len(p) == len(z) and M <= len(p) <= 20 for p, z, M in pairs)
    assert sum(model.n_inducing_) < 40
    assert all(((p >= 0) & (p <= 1)).all() for p in model.inclusion_)
    # Both layers have one output; the second is evaluated for each of 64 samples. Prices depend
    # on the selected sizes, up to a few points between the last two times that they are computed.
    first, second = model.alpha_
    assert first is not None
    prices = prediction_prices(model.posterior_.layers, model.n_inducing_, samples=64)
    assert second == pytest.approx(first * prices[1] / prices[0], rel=0.05)


@pytest.fixture(scope="module")
def fitted() -> DeepGPRegressor:
    """Fitted to the steps, for tests that only ask it."""
    with short_shallow_starts():
        return regressor(epochs=(20, 80, 40), smaller_models=2).fit(*steps())


def test_resized_is_the_model_of_an_allocation(fitted: DeepGPRegressor) -> None:
    X, y = steps()
    scored = {each.sizes: each for each in fitted.scored_allocations(X, y)}
    sizes = fitted.available_sizes_
    assert len(sizes) > 1
    assert sizes[-1] == fitted.n_inducing_
    for points in (sizes[0], sum(sizes[0])):
        small = fitted.resized(points)
        assert small.n_inducing_ == sizes[0]
        assert [len(each) for each in small.inducing_points_] == list(sizes[0])
        assert (small.elbo_, small.elbo_gap_) == (scored[sizes[0]].elbo, scored[sizes[0]].elbo_gap)
        assert small.log_density(X, y).mean() == pytest.approx(scored[sizes[0]].log_density)
        assert small.available_sizes_ == sizes[:1]
    assert fitted.n_inducing_ == sizes[-1]
    with pytest.raises(InputError, match="one of the sizes that the fit kept"):
        fitted.resized(10_000)


def test_quantiles_agree_with_log_density(fitted: DeepGPRegressor) -> None:
    X, model = steps()[0], fitted
    low, middle, high = model.predict_quantiles(X, [0.05, 0.5, 0.95])
    assert ((low < middle) & (middle < high)).all()
    # The density integrates to the probability between two quantiles.
    grid = np.linspace(low[0], high[0], 2001)
    density = np.exp(model.log_density(np.repeat(X[:1], len(grid), 0), grid))
    assert np.trapezoid(density, grid) == pytest.approx(0.9, abs=1e-3)


def test_prediction_is_independent_of_other_rows_and_repeatable() -> None:
    X, y = steps(40)
    short = regressor(epochs=(2, 6, 3))
    together = short.fit(X, y).predict(X)
    np.testing.assert_allclose(together[:3], short.predict(X[:3]), rtol=1e-10)
    np.testing.assert_array_equal(together, short.predict(X))
    np.testing.assert_array_equal(short.fit(X, y).predict(X), together)


def test_matched_prediction_is_close_to_the_mixture(fitted: DeepGPRegressor) -> None:
    X, y = steps()
    mixture, matched = fitted.predict(X), fitted.predict(X, method="matched")
    assert np.abs(mixture - matched).max() < 0.3 * y.std()


def test_large_alpha_or_small_max_cost_keep_few_points() -> None:
    X, y = steps(30)
    short = {"epochs": (5, 15, 5), "n_candidates": 8}
    weak = regressor(alpha=1e-3, **short).fit(X, y).n_inducing_
    strong = regressor(alpha=2.0, **short).fit(X, y).n_inducing_
    assert sum(strong) < sum(weak)
    cheap = regressor(max_cost=20, **short).fit(X, y)
    assert sum(M**2 for M in cheap.n_inducing_) <= 20
    assert regressor(max_cost=4, epochs=(2, 5, 5)).fit(X, y).n_inducing_ in [(1, 1)]


@pytest.mark.parametrize(("given", "rounds"), [({"alpha": 2.0}, 10), ({"max_cost": 20}, 3)])
def test_alpha_removes_points_in_more_rounds(given: dict[str, float], rounds: int) -> None:
    X, y = steps(30)
    phases = []
    options = {"epochs": (2, 10, 2), "n_candidates": 8, **given}
    regressor(callbacks=lambda progress: phases.append(progress.phase), **options).fit(X, y)
    assert phases.count("selection") == rounds


@pytest.mark.parametrize(("few", "repeats"), [(30, 0), (29, 2)])
def test_all_candidates_of_many_rows_are_trained_as_long_as_that_pays(
    few: int, repeats: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deep, "FEW_ROWS", few)
    monkeypatch.setitem(deep._STEPS, "fast", (2, 8, 2))
    (X, y), phases = steps(30), []
    options = {"epochs": None, "n_candidates": 8, "tolerance": 1e-6, "shallow_alternative": False}
    regressor(callbacks=lambda progress: phases.append(progress.phase), **options).fit(X, y)
    assert phases.count("pre-train") == (1 + repeats) * 8


def test_max_predict_us_limits_the_points_of_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that costs one microsecond per point in the first layer and ten in the second."""

    def clock(model: Any, sizes: tuple[int, ...], *, samples: int) -> float:
        assert samples == 64
        return sizes[0] + 10.0 * sizes[1]

    monkeypatch.setattr(deep_training, "deep_predict_us", clock)
    X, y = steps(30)
    short = {"epochs": (5, 15, 5), "n_candidates": 8}
    first, second = regressor(max_predict_us=36.0, **short).fit(X, y).n_inducing_
    assert first + 10 * second <= 36
    # One more point in either layer would be a point of the full model, or too slow.
    assert first == 8 or second >= 2
    with pytest.raises(InputError, match=r"`max_predict_us` must allow .* takes 11 here"):
        regressor(max_predict_us=10.0, **short).fit(X, y)


def test_candidates_grow_while_they_gain_more_than_the_tolerance() -> None:
    _, y = steps(100)
    X = np.random.default_rng(1).normal(size=(100, 4))
    seen = []
    model = regressor(
        n_candidates=None,
        epochs=(5, 20, 6),
        tolerance=1e-6,
        callbacks=lambda p: seen.append((p.phase, tuple(len(z) for z in p.candidates))),
    ).fit(X, y)
    assert {sizes for phase, sizes in seen if phase == "pre-train"} == {(64, 64)}
    grown = list(dict.fromkeys(sizes for phase, sizes in seen if phase == "more candidates"))
    assert grown
    assert [max(sizes) for sizes in grown] == sorted({max(sizes) for sizes in grown} - {64})
    # No layer has more candidates than rows.
    assert all(64 <= K <= 100 for sizes in grown for K in sizes)
    assert all(M <= 100 for M in model.n_inducing_)


@pytest.mark.slow
def test_layers_auto_fits_the_preferred_number_of_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    X, y = steps(30)
    short = regressor(layers="auto", epochs=(2, 6, 3), n_candidates=5).fit(X, y)
    assert [score.layers for score in short.depths_] == [1, 2, 3]
    seen = []

    def third(starts: list[Any], data: Any, **settings: Any) -> tuple[int, tuple[()]]:
        seen.extend(len(start.layers) for start in starts)
        assert (settings["layerwise"], settings["steps"]) == (2, 3)
        return 2, ()

    monkeypatch.setattr(deep_training, "select_depth", third)
    assert len(short.fit(X, y).n_inducing_) == 3
    assert seen == [1, 2, 3]


def test_several_targets_layers_widths_and_kernels() -> None:
    X, y = steps(40)
    two = np.column_stack([y, -3 * y])
    kernels = ("matern52", ScaleKernel(MaternKernel(nu=1.5)), "rbf")
    model = regressor(layers=3, width=(3, 2), kernel=kernels, epochs=(2, 6, 3)).fit(
        np.hstack([X, X**2]), two
    )
    assert model.predict(np.hstack([X, X**2])).shape == two.shape
    assert model.log_density(np.hstack([X, X**2]), two).shape == two.shape
    assert [p.shape[1] for p in model.inducing_points_] == [2, 3, 2]


def test_skip_connections_pass_the_inputs_to_every_layer() -> None:
    X, y = steps(40)
    model = regressor(skip_connections=True, hidden_mean="zero", epochs=(2, 6, 3)).fit(X, y)
    # Points of the first layer are in the units of X.
    assert 90 < model.inducing_points_[0].mean() < 120
    assert [p.shape[1] for p in model.inducing_points_] == [1, 2]
    assert np.isfinite(model.predict(X)).all()


@pytest.mark.parametrize("likelihood", ["student-t", LaplaceLikelihood(), "poisson"])
def test_other_likelihoods(likelihood: Any) -> None:
    X, y = steps(40)
    model = regressor(likelihood=likelihood, epochs=(2, 6, 3)).fit(X, np.round(np.abs(y)))
    assert np.isfinite(model.log_density(X, np.round(np.abs(y)))).all()
    assert model.predict_quantiles(X, 0.5).shape == (1, len(X))
    assert model.predict_quantiles(X, 0.5, observed=False).shape == (1, len(X))


def test_paper_schedule_learns_inclusion_in_all_layers() -> None:
    X, y = steps(40)
    seen = []
    model = regressor(
        schedule="paper",
        alpha=(0.1, 0.2),
        epochs=(2, 6, 8, 6),
        callbacks=lambda p: seen.append(p.phase),
    ).fit(X, y)
    assert list(dict.fromkeys(seen)) == ["layer 2", "pre-train", "inclusion", "post-train"]
    assert model.alpha_ == (0.1, 0.2)
    assert model.frontiers_ == (None, None)


@pytest.mark.parametrize("C", [2, 3])
def test_deep_classifier_learns_classes(C: int) -> None:
    X, label = map(np.asarray, make_moons(100, noise=0.15, random_state=0))
    label = label if C == 2 else np.where(X[:, 0] > 1.2, 2, label)
    y = np.array(["a", "b", "c"])[label]
    model = classifier(epochs=(10, 40, 20)).fit(X, y)
    assert model.score(X, y) > 0.9
    probability = model.predict_proba(X)
    np.testing.assert_allclose(probability.sum(1), 1, rtol=1e-12)
    chosen = probability[np.arange(len(y)), np.searchsorted(model.classes_, y)]
    np.testing.assert_allclose(model.log_density(X, y), np.log(chosen), atol=1e-9)
    assert model.log_density(X[:1], ["never seen"]) == -np.inf
    assert model.predict_proba(X, method="matched").shape == (100, C)


def test_counts_may_be_large() -> None:
    X, _ = steps(60)
    y = np.random.default_rng(1).poisson(1000 * (1.5 + np.sin(X[:, 0]))).astype(float)
    assert regressor(likelihood="poisson", epochs=(10, 40, 30)).fit(X, y).score(X, y) > 0.95


@pytest.mark.parametrize(("N", "D", "width"), [(2, 5, 3), (1, 3, 2)])
def test_fewer_rows_than_outputs(N: int, D: int, width: int) -> None:
    X = np.random.default_rng(0).normal(size=(N, D))
    model = regressor(width=width, epochs=(2, 3, 3), hidden_mean="auto").fit(X, X[:, 0])
    assert np.isfinite(model.predict(X)).all()


def test_interrupted_fit_leaves_the_fitted_estimator_unchanged() -> None:
    X, y = steps(30)
    for model, labels in ((regressor(epochs=(2, 5, 5)), y), (classifier(epochs=(2, 5, 5)), y > 50)):
        model.fit(X, labels)
        before, seen = model.predict(X), []

        def ended(progress: Any, seen: list[Any] = seen) -> None:
            seen.append(progress)
            raise KeyboardInterrupt

        model.set_params(callbacks=ended, hidden_mean="auto")
        with pytest.raises(KeyboardInterrupt):
            model.fit(1e3 * X, 7 * y if labels is y else y > 40)
        np.testing.assert_array_equal(model.predict(X), before)
        # The short run that compares starts is told of too.
        assert seen


def test_deep_regressor_survives_joblib(fitted: DeepGPRegressor, tmp_path) -> None:
    X, _ = steps()
    joblib.dump(fitted, tmp_path / "model")
    np.testing.assert_allclose(
        joblib.load(tmp_path / "model").predict(X), fitted.predict(X), rtol=1e-10, atol=1e-12
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"layers": 0}, "`layers` must be an integer"),
        ({"layers": "auto", "width": (1, 2)}, "`width` must be one value for all layers"),
        ({"layers": "auto", "schedule": "paper", "alpha": 1.0}, "`layers` must be a number"),
        ({"layers": "deep"}, "`layers` must be an integer of at least 1, or 'auto'"),
        ({"width": (1, 2)}, "`width` must be one value, or one for each of 1 hidden layers"),
        ({"kernel": ("rbf",)}, "`kernel` must be one value, or one for each of 2 layers"),
        ({"kernel": "rbff"}, "the kernels are rbf"),
        ({"hidden_mean": "none"}, "`hidden_mean` must be 'auto', 'identity' or 'zero'"),
        ({"alpha": -1.0}, "`alpha` must be a positive number"),
        ({"alpha": (1.0, 1.0, 1.0)}, "one for each of 2 layers"),
        ({"alpha": 1.0, "max_cost": 10}, "in one way only"),
        ({"max_cost": 0}, "`max_cost` must be a positive number"),
        ({"tolerance": 0}, "`tolerance` must be a positive number"),
        ({"schedule": "slow"}, "`schedule` must be 'fast' or 'paper'"),
        ({"schedule": "paper"}, "needs a number for `alpha`"),
        ({"epochs": (1, 2)}, "`epochs` must be 3 integers"),
        ({"batch_size": 0}, "`batch_size` must be an integer"),
        ({"samples": 0}, "`samples` must be an integer"),
        ({"predict_samples": 0}, "`predict_samples` must be an integer"),
        ({"predict_samples": "64"}, "`predict_samples` must be an integer"),
        ({"n_candidates": None, "max_cost": 9}, "`n_candidates` may be None with a `tolerance`"),
        ({"max_cost": 9, "max_predict_us": 9}, "in one way only"),
        ({"max_cost": 1}, "`max_cost` .* must allow one inducing point in each of 2 layers"),
        ({"kernel": RBFKernel(ard_num_dims=3)}, "`kernel` cannot be evaluated on 1 columns"),
        ({"likelihood": "poisson"}, "counts must be whole numbers"),
    ],
)
def test_invalid_parameter_is_refused(arguments: dict[str, Any], words: str) -> None:
    X, y = steps(20)
    with pytest.raises(InputError, match=words):
        regressor(**arguments).fit(X, y)


def test_invalid_prediction_argument_is_refused(fitted: DeepGPRegressor) -> None:
    X, y = steps(30)
    with pytest.raises(NotFittedError):
        regressor().predict(X)
    model = fitted
    with pytest.raises(InputError, match="`method` must be"):
        model.predict(X, method="quick")
    with pytest.raises(InputError, match="strictly between 0 and 1"):
        model.predict_quantiles(X, [0.0])
    with pytest.raises(InputError, match="1 target columns"):
        model.log_density(X, np.column_stack([y, y]))
