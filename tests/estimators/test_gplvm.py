import pickle

import numpy as np
import pytest
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood
from sklearn.decomposition import PCA
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import StandardScaler

from winnowgp import GPLVM
from winnowgp.errors import InputError


def curve(N: int = 50, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """A bent line in six columns of very different units."""
    rng = np.random.default_rng(seed)
    t = np.sort(rng.uniform(-2, 2, N))
    f = np.stack([np.sin(t), np.cos(t), t**2, np.tanh(2 * t), t, np.sin(2 * t)], axis=1)
    scale = np.array([1, 10, 100, 0.1, 5, 1e3])
    return t, scale * (f + 0.05 * rng.normal(size=f.shape)) + 7 * scale


def quick(**arguments) -> GPLVM:
    short = {} if arguments.get("schedule") == "paper" else {"max_iter": 60}
    return GPLVM(**{"n_components": 1, "random_state": 0, **short, **arguments})


@pytest.fixture(scope="module")
def fitted() -> GPLVM:
    return quick().fit(curve()[1])


def test_gplvm_recovers_the_order_along_a_curve(fitted: GPLVM) -> None:
    t, Y = curve()
    assert abs(np.corrcoef(np.argsort(np.argsort(fitted.embedding_[:, 0])), t)[0, 1]) > 0.98
    assert fitted.embedding_std_.shape == (50, 1)
    assert 0 < fitted.embedding_std_.min() < fitted.embedding_std_.max() < 0.5
    assert 3 <= fitted.n_inducing_ == len(fitted.inducing_points_) < 20
    assert len(fitted.inclusion_) == len(fitted.candidates_) >= fitted.n_inducing_
    # The noise was 0.05 in each column's own scale.
    np.testing.assert_allclose(np.sqrt(fitted.noise_) / np.std(Y, axis=0), 0.05, rtol=0.8)


def test_transform_of_training_rows_is_the_embedding(fitted: GPLVM) -> None:
    Y = curve()[1]
    np.testing.assert_allclose(fitted.transform(Y), fitted.embedding_, atol=1e-6)
    # A row alone lands where it does in company.
    np.testing.assert_allclose(fitted.transform(Y[7:8]), fitted.embedding_[7:8], atol=1e-6)


def test_inverse_transform_is_in_the_units_of_the_table(fitted: GPLVM) -> None:
    Y = curve()[1]
    back = fitted.inverse_transform(fitted.transform(Y))
    assert (np.sqrt(((back - Y) ** 2).mean(0)) < 0.25 * Y.std(0)).all()
    linear = PCA(1).fit(Y / Y.std(0))
    flat = linear.inverse_transform(linear.transform(Y / Y.std(0))) * Y.std(0)
    assert (((back - Y) / Y.std(0)) ** 2).sum() < 0.3 * (((flat - Y) / Y.std(0)) ** 2).sum()


def test_reconstruct_fills_missing_entries_with_calibrated_sd() -> None:
    Y = curve(40)[1]
    rng = np.random.default_rng(1)
    hidden = rng.uniform(size=Y.shape) < 0.15
    seen = np.where(hidden, np.nan, Y)
    model = quick().fit(seen)
    mean, sd = model.reconstruct(seen, return_std=True)
    error = (mean - Y)[hidden] / np.broadcast_to(Y.std(0), Y.shape)[hidden]
    assert np.sqrt((error**2).mean()) < 0.3
    z = ((mean - Y) / sd)[hidden]
    assert 0.6 < np.sqrt((z**2).mean()) < 1.7
    nats = model.log_density(np.where(hidden, Y, np.nan), given=seen)
    assert (np.isnan(nats) == ~hidden).all()
    blind = -0.5 * np.log(2 * np.pi * Y.var(0)) - 0.5 * ((Y - Y.mean(0)) / Y.std(0)) ** 2
    assert nats[hidden].mean() > blind[hidden].mean() + 0.5


def test_same_seed_gives_same_embedding_and_scores_have_units(
    fitted: GPLVM,
) -> None:
    """Eight times larger numbers, whose standardised digits are the same, are less dense."""
    Y = curve()[1]
    first, larger = (quick(max_iter=10, max_points=8).fit(each) for each in (Y, 8 * Y))
    np.testing.assert_array_equal(larger.embedding_, first.embedding_)
    np.testing.assert_array_equal(larger.inclusion_, first.inclusion_)
    np.testing.assert_allclose(
        larger.score_samples(8 * Y), first.score_samples(Y) - 6 * np.log(8), rtol=1e-6
    )
    some = Y.copy()
    some[:, 1:] = np.nan
    # About the density of one Gaussian column, whose standard deviation is near 0.75.
    assert -4 < fitted.score(some) < 0


def test_pickled_gplvm_has_the_same_embedding(fitted: GPLVM) -> None:
    Y = curve()[1][:3]
    restored = pickle.loads(pickle.dumps(fitted))
    np.testing.assert_allclose(restored.transform(Y), fitted.transform(Y), rtol=1e-10, atol=1e-12)


def test_rows_without_entries_stay_at_the_prior(fitted: GPLVM) -> None:
    nothing = np.full((1, 6), np.nan)
    np.testing.assert_allclose(fitted.transform(nothing), 0.0, atol=1e-4)
    np.testing.assert_allclose(fitted.score_samples(nothing), 0.0, atol=1e-6)
    assert np.isnan(fitted.log_density(nothing, given=nothing)).all()


@pytest.mark.parametrize("noise", ["shared", "column"])
def test_noise_is_shared_or_per_column(noise: str) -> None:
    rng = np.random.default_rng(3)
    Y = curve(40)[1]
    Y = (Y - Y.mean(0)) / Y.std(0)
    Y[:, 0] += rng.normal(size=40)
    model = quick(noise=noise, max_points=8).fit(Y)
    if noise == "shared":
        np.testing.assert_allclose(model.noise_ / Y.var(0), model.noise_[0] / Y[:, 0].var())
    else:
        assert model.noise_[0] > 5 * model.noise_[1:].max()


def test_superfluous_dimensions_are_irrelevant_and_plot_works(fitted: GPLVM) -> None:
    model = quick(n_components=3, max_points=8).fit(curve(30)[1])
    ax = model.plot(["a", "b"] * 15)
    assert len(ax.patches) == 30
    with pytest.raises(InputError, match="at least 2"):
        fitted.plot()
    relevance = np.sort(model.relevance_)
    assert relevance[-1] == 1
    assert relevance[0] < 0.2


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [
        quick(kernel="linear"),
        quick(kernel=ScaleKernel(RBFKernel())),
        quick(max_points=5),
        quick(alpha=0.5),
        quick(alpha=0.5, schedule="paper", epochs=15, n_candidates=12),
        quick(alpha=0.5, schedule="paper", epochs=3, n_candidates=12, batch_size=20),
        quick(alpha=0.5, schedule="paper", epochs=10, n_candidates=12, kernel="matern32"),
        quick(alpha=0.5, schedule="paper", epochs=10, n_candidates=12, likelihood="student-t"),
        quick(candidates=np.linspace(-2, 2, 9)[:, None], move_candidates=False),
        quick(start=curve()[0][:, None]),
        quick(standardise=False),
    ],
    ids=lambda m: repr(m)[6:60],
)
def test_every_combination_of_parameters_fits(model: GPLVM) -> None:
    Y = curve()[1]
    embedding = model.fit_transform(Y)
    assert embedding.shape == (50, 1)
    assert np.isfinite(embedding).all()
    assert np.isfinite(model.inverse_transform(embedding)).all()
    assert np.isfinite(model.score(Y))
    assert model.get_feature_names_out().tolist() == ["gplvm0"]
    if model.max_points is not None:
        assert model.n_inducing_ <= 5
    if not model.move_candidates:
        assert np.isin(model.inducing_points_, model.candidates_).all()
        grid = np.linspace(-2, 2, 9)
        assert np.isclose(model.inducing_points_, grid[None], atol=1e-12).any(1).all()


@pytest.mark.slow
def test_gplvm_of_counts_fits() -> None:
    t, _ = curve(40)
    rng = np.random.default_rng(0)
    counts = rng.poisson(np.stack([np.exp(1 + t), np.exp(1 - t), np.exp(2 - t**2)], axis=1))
    Y = counts.astype(float)
    Y[0, 0] = np.nan
    model = quick(
        likelihood="poisson", schedule="paper", alpha=0.2, epochs=60, n_candidates=10
    ).fit(Y)
    assert abs(np.corrcoef(model.embedding_[:, 0], t)[0, 1]) > 0.7
    assert np.isnan(model.noise_).all()
    assert (model.inverse_transform(model.embedding_) > 0).all()


@pytest.mark.parametrize("size", [100, pytest.param(3000, marks=pytest.mark.slow)])
def test_counts_may_be_large(size: int) -> None:
    t = np.linspace(-2, 2, 30)
    shapes = np.stack([np.exp(t / 2), np.exp(-t / 2), 2 + np.sin(2 * t)], axis=1)
    Y = np.random.default_rng(0).poisson(size * shapes).astype(float)
    Y[3, 0] = np.nan
    settings = {"likelihood": "poisson", "schedule": "paper", "alpha": 0.2, "n_candidates": 12}
    model = quick(**settings, epochs=30).fit(Y)
    error = model.inverse_transform(model.embedding_) - size * shapes
    # Column means alone have an error of 1.
    assert (np.sqrt((error**2).mean(0)) / (size * shapes).std(0) < 0.6).all()


def test_gplvm_works_in_a_pipeline() -> None:
    Y = curve()[1]
    pipeline: Pipeline = make_pipeline(StandardScaler(), quick(max_points=3, max_iter=3))
    assert np.shape(pipeline.fit_transform(Y)) == (50, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_components": 0}, "`n_components` must be an integer"),
        ({"schedule": "slow"}, "'fast' or 'paper'; got 'slow'"),
        ({"schedule": "paper"}, "needs a number for `alpha`"),
        ({"noise": "loud"}, "'shared' or 'column'"),
        ({"kernel": "cubic"}, "`kernel` must be one of"),
        ({"kernel": "matern32"}, "schedule='paper'"),
        ({"likelihood": "poisson"}, "schedule='paper'"),
        ({"alpha": -1.0}, "`alpha` must be a positive number"),
        ({"alpha": 1.0, "max_points": 3}, "in one way only"),
        ({"tolerance": 0}, "nats per observed entry"),
        ({"start": "random"}, "`start` must be one of pca or locations"),
        ({"start": np.zeros((3, 1))}, r"shape \[50 1\]; got shape \[3, 1\]"),
        ({"candidates": np.zeros((3, 2))}, r"shape \[K 1\]"),
        ({"candidates": "grid"}, "`candidates` must be one of auto or locations"),
        ({"candidates": np.zeros((0, 1))}, r"got shape \[0, 1\]"),
        ({"start": [["a"]] * 50}, "`start` must be numbers"),
        ({"kernel": None}, "or a GPyTorch kernel; got None"),
        ({"kernel": RBFKernel(ard_num_dims=3)}, "`ard_num_dims=1`"),
        ({"batch_size": 10}, "`batch_size` is for"),
    ],
)
def test_invalid_parameter_is_refused(arguments, message: str) -> None:
    with pytest.raises(InputError, match=message):
        quick(**arguments).fit(curve()[1])


def test_positions_of_another_shape_are_refused(fitted: GPLVM) -> None:
    with pytest.raises(InputError, match="must have 1 columns"):
        fitted.inverse_transform(np.zeros((2, 3)))
    with pytest.raises(InputError, match="`X` has 2 rows and `given` 3"):
        fitted.log_density(curve()[1][:2], given=curve()[1][:3])


def bend(seed: int = 0) -> np.ndarray:
    """Two columns fold where two others rise: a first climb takes all of it for noise."""
    a = np.linspace(-2, 2, 30)
    Y = np.stack([np.sin(a), np.cos(a), np.tanh(2 * a), a**2], axis=1)
    return Y + 0.05 * np.random.default_rng(seed).normal(size=Y.shape)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_fit_that_collapses_to_noise_is_restarted(seed: int) -> None:
    Y = bend(seed)
    model = quick(max_iter=150).fit(Y)
    standard = (Y - Y.mean(0)) / Y.std(0)
    noise_alone = -0.5 * standard.size * np.log(2 * np.pi) - 0.5 * (standard**2).sum()
    assert model.elbo_ > noise_alone + 50
    assert model.embedding_.std() > 0.5


def test_table_of_noise_warns() -> None:
    with pytest.warns(UserWarning, match="the latent positions of all rows are 0"):
        quick(max_points=5).fit(np.random.default_rng(0).normal(size=(40, 5)))


@pytest.mark.parametrize("noise", ["shared", "column"])
def test_constant_columns_are_ignored_and_reconstructed(noise: str) -> None:
    Y = curve(30)[1]
    Y[2, 3] = np.nan
    wider = np.insert(Y, 1, 7.0, axis=1)
    settings = {"noise": noise, "max_points": 5, "max_iter": 12}
    with_it, without = (quick(**settings).fit(A) for A in (wider, Y))
    np.testing.assert_allclose(np.delete(with_it.noise_, 1), without.noise_, rtol=0.02)
    mean, sd = with_it.reconstruct(wider, return_std=True)
    assert (mean[:, 1] == 7).all()
    assert (sd[:, 1] == 0).all()
    assert with_it.noise_[1] == 0


def test_columns_without_observed_entries_are_refused() -> None:
    Y = curve()[1]
    Y[:, 2] = np.nan
    with pytest.raises(InputError, match=r"columns \[2\] have none"):
        quick().fit(Y)
    with pytest.raises(InputError, match="all of them are constant"):
        quick().fit(np.ones((9, 3)))


def test_gaussian_likelihood_object_sets_the_noise() -> None:
    likelihood = GaussianLikelihood()
    likelihood.initialize(noise=0.5)
    likelihood.noise_covar.requires_grad_(False)
    Y = curve()[1]
    model = quick(likelihood=likelihood, max_points=3, max_iter=6).fit(Y)
    np.testing.assert_allclose(model.noise_ / Y.var(0), 0.5, rtol=1e-5)


def test_minibatches_learn_noise_per_column() -> None:
    paper = {"schedule": "paper", "alpha": 1.0, "epochs": 2, "n_candidates": 5}
    Y = curve()[1]
    noise = quick(noise="column", batch_size=20, **paper).fit(Y).noise_ / Y.var(0)
    assert len(np.unique(noise.round(12))) == 6
    with pytest.raises(InputError, match="unless the likelihood is Gaussian"):
        quick(noise="column", likelihood="student-t", **paper).fit(Y)


def test_plot_has_a_legend_and_axis_names() -> None:
    model = quick(n_components=2, max_points=3, max_iter=3).fit(curve(30)[1])
    ax = model.plot([0, 1] * 15)
    legend = ax.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["0", "1"]
    assert {ax.get_xlabel(), ax.get_ylabel()} == {"gplvm0", "gplvm1"}
    with pytest.raises(InputError, match="each of 30 rows; got 2"):
        model.plot(["a", "b"])
