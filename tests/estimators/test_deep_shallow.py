"""Deep fits of few rows that end below a shallow GP."""

from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood
from scipy.stats import norm
from torch import Tensor

from helpers.short_fits import short_fits, short_shallow_starts
from winnowgp import Checkpoint, DeepGPRegressor, SparseGPRegressor, load
from winnowgp.data import Dataset
from winnowgp.errors import NoInducingPointsWarning
from winnowgp.estimators import deep_shallow, deep_training
from winnowgp.models import DeepGP, DeepLayer, DeepPosterior, SparseGP
from winnowgp.models.deep_gp import estimate_elbo
from winnowgp.models.deep_sites import deep_sites
from winnowgp.models.kernels import covariance
from winnowgp.models.priors import add_weak_priors
from winnowgp.training import Progress

pytestmark = pytest.mark.usefixtures("quickly")


def rows(N: int = 70) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    X = rng.uniform(-3, 3, size=(N, 2))
    return X, 5 + 3 * np.sin(2 * X[:, 0]) + X[:, 1] + 0.3 * rng.normal(size=N)


def shortly(layers: int = 2, **options: Any) -> DeepGPRegressor:
    """Return an estimator that is not trained enough."""
    given = {"epochs": (2, 3, 3), "smaller_models": 0, "random_state": 0}
    return DeepGPRegressor(layers, **{**given, **options})


@pytest.fixture(scope="module")
def fitted() -> DeepGPRegressor:
    with short_fits():
        return shortly().fit(*rows())


def collapsed_bound(last: DeepLayer, noise: float) -> float:
    """Return the collapsed bound of a shallow GP of the standardised rows, in nats."""
    X, y = rows()
    X, y = (X - X.mean(0)) / X.std(0), (y - y.mean()) / y.std()
    inputs, Z = torch.tensor(X), last.candidates.detach()
    with torch.no_grad():
        pairs = ((Z, Z), (Z, inputs), (inputs, inputs))
        Kuu, Kuf, Kff = (covariance(last.kernel, *pair).numpy() for pair in pairs)
    Q = Kuf.T @ np.linalg.solve(Kuu + 1e-10 * np.eye(len(Z)), Kuf)
    L = np.linalg.cholesky(Q + noise * np.eye(len(y)))
    bound = norm.logpdf(np.linalg.solve(L, y)).sum() - np.log(np.diag(L)).sum()
    return bound - 0.5 * np.trace(Kff - Q) / noise


def test_shallow_alternative_has_the_collapsed_bound(fitted: DeepGPRegressor) -> None:
    assert fitted.n_inducing_[0] == 1
    assert fitted.n_inducing_[1] > 1
    posterior = fitted.posterior_
    assert isinstance(posterior, DeepPosterior)
    likelihood = posterior.likelihood
    assert isinstance(likelihood, GaussianLikelihood)
    bound = collapsed_bound(posterior.layers[-1], likelihood.noise.item())
    assert fitted.elbo_ == pytest.approx(bound, abs=0.1)


def test_narrow_start_is_a_shallow_gp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hidden layers have their prior, and the last one the optimal q(u) of a shallow GP."""
    starts: list[DeepGP] = []

    def first(models: list[DeepGP], *_: Any, **__: Any) -> DeepGP:
        starts.extend(models)
        return models[0]

    monkeypatch.setattr(deep_training, "select_start", first)
    X, y = rows()
    shortly(n_candidates=12).fit(X, y)
    X, y = (X - X.mean(0)) / X.std(0), (y - y.mean()) / y.std()
    data = Dataset.of(torch.tensor(X), torch.tensor(y))
    narrow = starts[-1]
    hidden, last = narrow.layers
    assert (hidden.K, hidden.points().kl().item()) == (12, pytest.approx(0.0, abs=1e-9))
    assert last.K <= 12
    likelihood = narrow.likelihood
    assert isinstance(likelihood, GaussianLikelihood)
    generator = torch.Generator().manual_seed(0)
    elbo = estimate_elbo(narrow, data, generator=generator, samples=64)
    # Hidden functions differ from the identity by 0.003.
    assert elbo == pytest.approx(collapsed_bound(last, likelihood.noise.item()), abs=0.5)


@pytest.mark.parametrize(
    "options", [{"width": 1}, {"skip_connections": True}, {"max_cost": 200.0}, {"alpha": 1.0}]
)
def test_narrow_start_is_for_shallow_models_with_a_tolerance(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    def no_shallow_fit(*_: Any) -> DeepGP:
        raise AssertionError

    monkeypatch.setattr(deep_training, "with_shallow_top", no_shallow_fit)
    shortly(**options, n_candidates=6).fit(*rows(40))


def test_shallow_alternative_predicts_as_a_shallow_estimator(fitted, tmp_path) -> None:
    X, y = rows()
    X_new = np.random.default_rng(1).uniform(-3, 3, size=(40, 2))
    mean, sd = fitted.predict(X_new, return_std=True)
    other, other_sd = (
        SparseGPRegressor(random_state=0, hyper="point").fit(X, y).predict(X_new, return_std=True)
    )
    assert np.abs(mean - other).max() < 0.3
    assert np.abs(np.log(sd / other_sd)).max() < 0.2
    loaded = load(fitted.save(tmp_path / "model.winnow"))
    np.testing.assert_allclose(loaded.predict(X_new), mean, rtol=1e-10)
    assert loaded.posterior_.samples == fitted.posterior_.samples == 0


def test_shallow_alternative_is_compared_with_the_deep_models(fitted: DeepGPRegressor) -> None:
    deep = [each for each in fitted.allocations_ if each.sizes != fitted.n_inducing_]
    assert deep
    for each in deep:
        assert each.elbo < fitted.elbo_
        gap = (fitted.elbo_ - each.elbo) / 70
        assert each.elbo_gap - fitted.elbo_gap_ == pytest.approx(gap)
    # Without samples it is quicker than the 64 of the others.
    assert fitted.allocations_[0].sizes == fitted.n_inducing_
    assert fitted.available_sizes_ == (fitted.n_inducing_,)


def test_comparison_of_a_lower_elbo_holds_no_rows_out(fitted: DeepGPRegressor) -> None:
    compared = fitted.comparison_
    assert compared is not None
    assert compared.selected == "shallow"
    gains = [(each.elbo - fitted.elbo_) / 70 for each in fitted.allocations_]
    assert compared.elbo_gain < 0
    assert pytest.approx(compared.elbo_gain) in gains
    assert compared.density_gain is compared.density_gain_error is None


def test_shallow_alternative_has_the_posterior_of_the_shallow_gp() -> None:
    """Hidden functions differ from the identity by 1e-4, and none of its points is lost."""
    data = noisy(200)
    model = shallow_of(data)
    model.likelihood.noise = torch.tensor(1e-3)
    posterior = model.posterior(data)
    top = DeepLayer(model.kernel, data.X[:2], outputs=1)
    like = DeepGP([top], likelihood=GaussianLikelihood().double())
    shallow: Any = SimpleNamespace(model=model, posterior=posterior)
    found = deep_shallow._as_deep(shallow, data, like, 2, torch.Generator())
    assert [layer.K for layer in found.layers] == [1, 1, 40]
    new = noisy(30, seed=1).X
    exact, deep_one = posterior.predict(new), found.posterior(samples=0).predict(new)
    torch.testing.assert_close(deep_one.mean, exact.mean, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(deep_one.variance, exact.variance, rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(found.likelihood.noise, model.likelihood.noise)


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> None:
    """In it 70 rows are many, from which no deep GP starts as a shallow one."""

    def not_for_many(*_: Any) -> Any:
        raise AssertionError

    monkeypatch.setattr(deep_shallow, "FEW_ROWS", 60)
    monkeypatch.setattr(deep_training, "with_shallow_top", not_for_many)
    monkeypatch.setattr(deep_shallow, "_refitted", not_for_many)


@pytest.mark.usefixtures("many")
@pytest.mark.parametrize(("gain", "selected"), [(0.12, "deep"), (0.08, "shallow")])
def test_many_rows_are_compared_with_a_tenth_held_out(
    monkeypatch: pytest.MonkeyPatch, gain: float, selected: str
) -> None:
    model, (train, test) = compared(monkeypatch, gain)
    found = model.comparison_
    assert found is not None
    assert (train.N, test.N) == (63, 7)
    assert found.selected == selected
    assert found.density_gain == pytest.approx(gain)
    assert (model.n_inducing_[0] == 1) == (selected == "shallow")


@pytest.mark.usefixtures("many")
def test_shallow_gp_of_many_rows_has_not_seen_the_held_out_targets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its q(u) is that of the other rows, with the hyper-parameters and points of all rows."""
    monkeypatch.setattr(deep_shallow, "points_of_part", lambda train, test, points: points)
    compared_with: list[tuple[Any, Dataset]] = []

    def scores(_: DeepGP, train: Dataset, test: Dataset, **__: Any) -> tuple[float, Tensor]:
        compared_with.append((None, train))
        return 0.0, torch.zeros(test.N)

    def densities(posterior: Any, test: Dataset) -> Tensor:
        compared_with.append((posterior, test))
        return torch.ones(test.N)

    monkeypatch.setattr(deep_shallow, "seeded_elbo", lambda *_, **__: -1e4)
    monkeypatch.setattr(deep_shallow, "held_out_scores", scores)
    monkeypatch.setattr(deep_shallow, "log_densities", densities)
    with short_shallow_starts():
        model = shortly(n_candidates=8).fit(*rows())
    (_, train), (posterior, test) = compared_with
    assert (train.N, test.N) == (63, 7)
    last = model.posterior_.layers[-1]
    torch.testing.assert_close(posterior.Z, last.candidates)
    (whole,) = (posterior.condition_on(test),)
    torch.testing.assert_close(whole.q_mean, last.q_mean, rtol=1e-6, atol=1e-6)
    assert (posterior.q_mean - last.q_mean).abs().max() > 1e-3


def test_inducing_points_at_held_out_rows_move_to_other_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(deep_shallow, "_DISTANCES", 100)
    data = noisy(60)
    test, train = data.part(torch.arange(15)), data.part(torch.arange(15, 60))
    own, near = train.X[:6], train.X[20:24] + 1e-6
    # One is at a held-out row whose closest other row is an inducing point as well.
    distance = (test.X[:, None] - train.X).norm(dim=2)
    taken = train.X[distance[3].argmin()][None]
    points = torch.cat([test.X[[3, 5, 8]], own, near, taken])
    found = deep_shallow.points_of_part(train, test, points)
    closest = [train.X[distance[number].argmin()] for number in (5, 8)]
    expected = torch.stack([*own, *near, *closest, taken[0]]).unique(dim=0)
    assert len(expected) == 13
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)
    assert deep_shallow.points_of_part(train, test, points[:0]).shape == (0, 2)


def test_comparison_is_with_inducing_points_that_are_not_held_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No inducing point of the shallow GP that is compared is closest to a held-out row."""
    parts: list[Dataset] = []
    seen: list[Any] = []

    def scores(_: DeepGP, train: Dataset, test: Dataset, **__: Any) -> tuple[float, Tensor]:
        parts.extend((train, test))
        return 0.0, torch.zeros(test.N)

    def densities(posterior: Any, test: Dataset) -> Tensor:
        seen.append(posterior)
        return torch.ones(test.N)

    monkeypatch.setattr(deep_shallow, "seeded_elbo", lambda *_, **__: -1e4)
    monkeypatch.setattr(deep_shallow, "held_out_scores", scores)
    monkeypatch.setattr(deep_shallow, "log_densities", densities)
    with short_shallow_starts():
        shortly(tolerance=1e-4).fit(*rows())
    (posterior,), (train, test) = seen, parts
    own, others = (torch.cdist(posterior.Z, part.X).min(1).values for part in (train, test))
    assert len(own) > 12
    assert bool((own <= others).all())


@pytest.mark.usefixtures("many")
def test_comparison_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_shallow_fit(*_: Any) -> Any:
        raise AssertionError

    monkeypatch.setattr(deep_shallow, "_fitted_shallow", no_shallow_fit)
    model = shortly(n_candidates=6, shallow_alternative=False).fit(*rows())
    assert model.comparison_ is None
    assert model.n_inducing_[0] > 1 or model.posterior_.samples == 64


def compared(
    monkeypatch: pytest.MonkeyPatch,
    gain: float,
    *,
    error: float = 0.1,
    sample_weight: np.ndarray | None = None,
) -> tuple[DeepGPRegressor, list[Dataset]]:
    """Return a fit whose ELBO is far above that of the shallow GP, and whose log density of
    held-out rows is higher by a mean gain with a standard error; and its parts of rows."""
    parts: list[Dataset] = []
    monkeypatch.setattr(deep_shallow, "seeded_elbo", lambda *_, **__: -1e4)

    def scores(start: DeepGP, train: Dataset, test: Dataset, **_: Any) -> tuple[float, Tensor]:
        parts.extend((train, test))
        return 0.0, torch.zeros(test.N)

    def densities(_: Any, test: Dataset) -> Tensor:
        spread = torch.linspace(-1, 1, test.N)
        return -gain + error * test.N**0.5 * spread / spread.std()

    monkeypatch.setattr(deep_shallow, "held_out_scores", scores)
    monkeypatch.setattr(deep_shallow, "log_densities", densities)
    with short_shallow_starts():
        return shortly(n_candidates=8).fit(*rows(), sample_weight=sample_weight), parts


def test_deep_gp_of_a_clearly_higher_held_out_density_is_selected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, (train, test) = compared(monkeypatch, 0.12)
    found = model.comparison_
    assert found is not None
    assert found.selected == "deep"
    assert (found.density_gain, found.density_gain_error) == pytest.approx((0.12, 0.1))
    assert found.elbo_gain == pytest.approx((model.elbo_ + 1e4) / 70)
    assert model.posterior_.samples == 64
    # Every row is in one of both parts.
    assert (train.N, test.N) == (56, 14)
    every = torch.cat([train.Y, test.Y])[:, 0].sort().values
    y = rows()[1]
    assert torch.allclose(every, torch.tensor((y - y.mean()) / y.std()).sort().values)


@pytest.mark.parametrize("gain", [0.08, -0.5])
def test_deep_gp_of_a_higher_elbo_alone_is_not_selected(
    monkeypatch: pytest.MonkeyPatch, gain: float
) -> None:
    model, _ = compared(monkeypatch, gain)
    found = model.comparison_
    assert found is not None
    assert found.selected == "shallow"
    assert found.density_gain == pytest.approx(gain)
    assert model.n_inducing_[0] == 1
    assert model.posterior_.samples == 0
    # The gap is that to a deep model, which is the best one by its ELBO.
    best = max(model.allocations_, key=lambda each: each.elbo)
    assert best.sizes != model.n_inducing_
    assert best.elbo_gap == pytest.approx(0.0, abs=1e-9)
    assert model.elbo_gap_ == pytest.approx((best.elbo - model.elbo_) / 70)


def test_gain_of_less_than_a_thousandth_is_not_enough_without_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All held-out rows of a constant target have the same gain."""
    for gain, selected in ((9e-4, "shallow"), (2e-3, "deep")):
        model, _ = compared(monkeypatch, gain, error=0.0)
        found = model.comparison_
        assert found is not None
        assert found.selected == selected
        assert found.density_gain == pytest.approx(gain, rel=1e-3)
        assert found.density_gain_error == pytest.approx(0.0, abs=1e-6)


def test_comparison_counts_held_out_rows_by_their_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = np.random.default_rng(0).uniform(0.5, 4.0, size=70)
    model, (_, test) = compared(monkeypatch, 0.3, sample_weight=weights)
    found = model.comparison_
    assert found is not None
    spread = torch.linspace(-1, 1, 14)
    gains, w = (0.3 - 0.1 * 14**0.5 * spread / spread.std()).numpy(), test.counts.numpy()
    mean = np.average(gains, weights=w)
    error = (14 / 13 * (w**2 * (gains - mean) ** 2).sum()) ** 0.5 / w.sum()
    assert (found.density_gain, found.density_gain_error) == pytest.approx((mean, error), rel=1e-4)
    assert abs(mean - gains.mean()) > 0.01


def shallow_of(data: Dataset) -> SparseGP:
    """Return a shallow GP with weak priors, of a fifth of the rows as inducing points."""
    kernel = ScaleKernel(RBFKernel(ard_num_dims=2))
    model = SparseGP(kernel, data.X[::5], noise=0.1)
    add_weak_priors(model)
    return model


def noisy(N: int, weight: float | None = None, seed: int = 0) -> Dataset:
    g = torch.Generator().manual_seed(seed)
    X = 4 * torch.rand(N, 2, dtype=torch.float64, generator=g) - 2
    y = torch.sin(2 * X[:, :1]) + 0.3 * torch.randn(N, 1, dtype=torch.float64, generator=g)
    weights = None if weight is None else torch.full((N,), weight, dtype=torch.float64)
    return Dataset.of(X, y, weights=weights)


def test_refitted_shallow_gp_of_large_weights_has_the_noise_of_unit_weights() -> None:
    """The exact evidence of rows that count ten times each has no maximum in the noise."""
    plain, heavy = noisy(60), noisy(60, 10.0)
    noise = deep_shallow._refitted(shallow_of(plain), plain).noise.item()
    assert 0.03 < noise < 0.3
    refitted = deep_shallow._refitted(shallow_of(heavy), heavy)
    assert refitted.noise.item() == pytest.approx(noise, rel=1e-6)


def test_refitted_shallow_gp_keeps_priors_and_inducing_points() -> None:
    data = noisy(30)
    model = shallow_of(data)
    refitted = deep_shallow._refitted(model, data)
    assert torch.equal(refitted.candidates, model.candidates)
    names = {
        name for part in (refitted.kernel, refitted.likelihood) for name, *_ in part.named_priors()
    }
    assert {each.rpartition(".")[2] for each in names} == {
        "lengthscale_prior",
        "outputscale_prior",
        "noise_prior",
    }


def test_comparison_trains_a_deep_gp_that_has_not_seen_the_held_out_targets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The start from a shallow GP has a q(u) of all rows, which is computed anew. Hidden functions
    are their means here: samples of q(u) would differ."""

    def means(model: DeepGP, N: int, samples: int, _: torch.Generator | None) -> list[Tensor]:
        like = model.layers[0].candidates.detach()
        return [like.new_zeros(samples, N, layer.P) for layer in model.layers[:-1]]

    monkeypatch.setattr(DeepGP, "base_samples", means)
    given: list[DeepGP] = []
    seen: list[tuple[DeepGP, Dataset]] = []

    def last(models: list[DeepGP], *_: Any, **__: Any) -> DeepGP:
        given.append(deepcopy(models[-1]))
        return models[-1]

    def scores(start: DeepGP, train: Dataset, test: Dataset, **_: Any) -> tuple[float, Tensor]:
        seen.append((start, train))
        return 0.0, torch.zeros(test.N)

    monkeypatch.setattr(deep_training, "select_start", last)
    monkeypatch.setattr(deep_shallow, "seeded_elbo", lambda *_, **__: -1e4)
    monkeypatch.setattr(deep_shallow, "held_out_scores", scores)
    with short_shallow_starts():
        shortly(n_candidates=8).fit(*rows())
    (whole,), ((start, train),) = given, seen
    sites = deep_sites(start, train, eps=start.base_samples(train.N, 2, None))
    best = sites[-1].improved(start.layers[-1]).q_mean
    distance, of_all = (
        (model.layers[-1].q_mean - best).abs().max().item() for model in (start, whole)
    )
    assert distance < 0.01 * of_all


def test_fit_of_too_few_rows_to_hold_some_out_is_shallow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deep_shallow, "seeded_elbo", lambda *_, **__: -1e4)
    X, y = rows()
    model = shortly(n_candidates=4).fit(X[:19], y[:19])
    found = model.comparison_
    assert found is not None
    assert (found.selected, found.density_gain) == ("shallow", None)
    assert model.n_inducing_[0] == 1


@pytest.mark.slow
def test_shallow_alternative_of_one_kernel_and_three_layers() -> None:
    model = shortly(3, kernel="matern32").fit(*rows(40))
    assert model.n_inducing_[:2] == (1, 1)
    assert "Matern" in str(model.posterior_.layers[-1].kernel)


@pytest.mark.parametrize(
    "options",
    [{"hidden_mean": "identity"}, {"width": 1}, {"skip_connections": True}, {"max_cost": 200.0}],
)
def test_specified_deep_models_are_not_replaced(options: dict[str, Any]) -> None:
    hidden = shortly(**options, n_candidates=6).fit(*rows(40)).posterior_.layers[0]
    assert isinstance(hidden.kernel, ScaleKernel)
    # That of the alternative is 1e-8.
    assert hidden.kernel.outputscale.item() > 1e-7


def test_fit_where_the_shallow_gp_is_a_constant() -> None:
    X, _ = rows(30)
    y = np.random.default_rng(2).normal(size=30)
    with pytest.warns(NoInducingPointsWarning):
        SparseGPRegressor(random_state=0).fit(X, y)
    model = shortly().fit(X, y)
    assert model.n_inducing_ == (1, 1)
    assert model.elbo_ == pytest.approx(norm.logpdf((y - y.mean()) / y.std()).sum(), rel=0.02)
    mean, sd = model.predict(X, return_std=True)
    np.testing.assert_allclose(mean, y.mean(), atol=0.01)
    np.testing.assert_allclose(sd, y.std(), rtol=0.1)


def test_shallow_gp_has_the_priors_of_a_shallow_estimator_while_it_is_fitted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without them, the shallow GP of seven rows of noise interpolates them."""
    names: list[list[set[str]]] = []
    fit = deep_shallow.fit

    def spied(model: Any, data: Any, *, schedule: Any, **options: Any) -> Any:
        modules = (model.kernel, model.likelihood, *schedule.kernels)
        names.append([{name.rpartition(".")[2] for name, *_ in m.named_priors()} for m in modules])
        return fit(model, data, schedule=schedule, **options)

    monkeypatch.setattr(deep_shallow, "fit", spied)
    with short_shallow_starts():
        model = shortly(n_candidates=4).fit(*rows(30))
    kernel, noise = {"lengthscale_prior", "outputscale_prior"}, {"noise_prior"}
    # The start has an RBF kernel; the alternative compares others with it.
    assert names[0] == [kernel, noise]
    assert names[1][:2] == [kernel, noise]
    assert all(each == kernel for each in names[1][2:])
    assert len(names[1]) > 2
    assert not [*model.posterior_.layers[-1].kernel.named_priors()]


def test_shallow_alternative_has_at_most_the_specified_candidates(fitted: DeepGPRegressor) -> None:
    model = shortly(n_candidates=6).fit(*rows())
    assert model.n_inducing_[0] == 1
    assert model.n_inducing_[1] <= 6 < fitted.n_inducing_[1]


@pytest.mark.slow
def test_shallow_alternative_resumes_from_the_checkpoint(
    fitted: DeepGPRegressor, tmp_path: Path
) -> None:
    seen: list[str] = []

    def stop(progress: Progress) -> None:
        seen.append(progress.phase)
        # The start has a shallow fit of its own, before the deep models are trained.
        if "pre-train" in seen and seen[seen.index("pre-train") :].count("optimisation") == 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        shortly(checkpoint=Checkpoint(tmp_path, every=0.0), callbacks=stop).fit(*rows())
    resumed: list[str] = []
    model = shortly(
        checkpoint=Checkpoint(tmp_path, every=0.0), callbacks=lambda p: resumed.append(p.phase)
    )
    model.fit(*rows())
    assert model.elbo_ == fitted.elbo_
    # Neither the deep models nor the first steps of the shallow one are trained again.
    assert set(resumed) == {"optimisation", "selection", "smaller model"}
