"""The noise of a stream: known for each row, learnt, and what is refused."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from helpers.short_fits import short_fits, shortest_fits
from helpers.stream_batches import batch, first_regressor
from winnowgp import SparseGPRegressor, load
from winnowgp.data import Dataset
from winnowgp.errors import InputError
from winnowgp.models import SparseGP
from winnowgp.models.observations import target_noise
from winnowgp.models.priors import log_prior

# Shapes are checked by the tests of `models.online` and of fits.
pytestmark = pytest.mark.unchecked


def noisy(seed: int, N: int = 20) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Return rows, half of which have a known noise of standard deviation 3."""
    rng, (X, y) = np.random.default_rng(100 + seed), batch(seed, N)
    variance = np.where(np.arange(N) % 2 == 0, 9.0, 0.0)
    return X, y + np.sqrt(variance) * rng.standard_normal(N), variance


def all_rows(model: SparseGPRegressor, seeds: range) -> Dataset:
    X, y, variance = (np.concatenate(part) for part in zip(*map(noisy, seeds), strict=True))
    rows = Dataset.of(torch.tensor(X), torch.tensor(y), noise=torch.tensor(variance))
    return model._standardised(rows)


def exact_bound(model: SparseGPRegressor, data: Dataset) -> float:
    q = model.posterior_
    noise = target_noise(q.likelihood).detach()
    return SparseGP(q.kernel, q.Z, mean=q.mean, noise=noise).fixed_bound(data)


@pytest.fixture(scope="module")
def first() -> SparseGPRegressor:
    X, y, variance = noisy(0)
    with shortest_fits():
        model = SparseGPRegressor("rbf", random_state=0)
        return model.fit(X, y, noise_variance=variance)


def test_partial_fit_known_noise_remembers_it(first: SparseGPRegressor, tmp_path: Path) -> None:
    model = deepcopy(first)
    for seed in range(1, 5):
        X, y, variance = noisy(seed)
        model.partial_fit(X, y, noise_variance=variance)
    # The memory of five batches, against all rows at once. It is of first order in σ², which
    # approaches its optimum over several batches.
    assert model.elbo_ == pytest.approx(exact_bound(model, all_rows(model, range(5))), abs=1.5)
    assert model.n_rows_seen_ == 100
    assert model._record().memories[0].observations == pytest.approx(100)
    X, y = batch(99, 200)
    # The true function and noise have −0.21.
    assert model.log_density(X, y).mean() > -0.35
    assert 0.2 < np.sqrt(model.noise_[0]) < 0.45
    loaded = load(model.save(tmp_path / "model.winnow"))
    X, y, variance = noisy(6)
    after = loaded.partial_fit(X, y, noise_variance=variance).predict(X)
    model.partial_fit(X, y, noise_variance=variance)
    np.testing.assert_allclose(after, model.predict(X), rtol=1e-9)


def test_fit_of_a_source_with_known_noise_remembers_it(first: SparseGPRegressor) -> None:
    X, y, variance = (torch.tensor(part) for part in noisy(0))
    with shortest_fits():
        model = SparseGPRegressor("rbf", random_state=0).fit(Dataset.of(X, y, noise=variance))
    (memory,), (expected,) = model._record().memories, first._record().memories
    assert memory.fixed is not None
    assert expected.fixed is not None
    for a, b in ((memory, expected), (memory.fixed, expected.fixed)):
        assert pytest.approx(b.N, rel=1e-3) == a.N
        assert a.residual.item() == pytest.approx(b.residual.item(), rel=1e-3, abs=1e-3)


def test_partial_fit_resized_model_with_known_noise_is_refused() -> None:
    X, y, variance = noisy(0)
    with short_fits(sizes=1):
        model = SparseGPRegressor("rbf", random_state=0).fit(X, y, noise_variance=variance)
    small = model.resized(model.available_sizes_[0])
    assert small.n_inducing_ < model.n_inducing_
    with pytest.raises(InputError, match="resized after a fit with known noise"):
        small.partial_fit(X, y, noise_variance=variance)


def test_partial_fit_first_rows_with_known_noise_are_exact() -> None:
    model = SparseGPRegressor("rbf", random_state=0)
    for seed in range(2):
        X, y, variance = noisy(seed)
        with shortest_fits():
            model.partial_fit(X, y, noise_variance=variance)
    assert model.elbo_ == pytest.approx(exact_bound(model, all_rows(model, range(2))), abs=1e-6)


def test_partial_fit_noise_that_is_all_known_is_not_learnt() -> None:
    rng, model = np.random.default_rng(0), SparseGPRegressor("rbf", noise="known", random_state=0)
    for seed in range(3):
        X, _ = batch(seed)
        y, variance = 4 + 3 * np.sin(X[:, 0]) + 0.3 * rng.standard_normal(20), np.full(20, 0.09)
        with shortest_fits():
            model.partial_fit(X, y, noise_variance=variance)
    assert model.noise_[0] < 1e-4
    X, y = batch(99, 200)
    assert model.log_density(X, y, noise_variance=0.09).mean() > -0.5
    with pytest.raises(InputError, match="needs `noise_variance`"):
        model.partial_fit(*batch(4))
    with pytest.raises(InputError, match="`noise` must be that of the earlier batches, known"):
        model.set_params(noise="target").partial_fit(*batch(4))


def test_partial_fit_batch_record_has_the_density_under_known_noise(
    first: SparseGPRegressor,
) -> None:
    X, y, variance = noisy(1)
    expected = first.log_density(X, y, noise_variance=variance).mean()
    after = deepcopy(first).partial_fit(X, y, noise_variance=variance)
    assert after.batches_[-1].log_density == pytest.approx(expected)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"noise": "known"}, "needs `noise_variance`"),
        ({"likelihood": "heteroscedastic"}, "noise does not depend on the inputs"),
    ],
)
def test_partial_fit_noise_that_a_stream_cannot_have_is_refused(
    settings: dict[str, Any], message: str
) -> None:
    X, y = batch(0)
    model = SparseGPRegressor("rbf", **settings)
    with pytest.raises(InputError, match=message):
        model.partial_fit(X, y)
    assert not hasattr(model, "posterior_")


@pytest.mark.parametrize(("noise", "known"), [("target", False), ("shared", True)])
def test_partial_fit_several_targets_learn_the_noise_of_all_rows(noise: str, known: bool) -> None:
    X, y, variance = (np.concatenate(part) for part in zip(*map(noisy, range(5)), strict=True))
    # The second target is noisier by itself, and does not say by how much.
    Y = np.stack([y, np.random.default_rng(0).standard_normal(len(y)) - y], 1)
    given = np.stack([variance, 0 * variance], 1) if known else None
    stream, whole = (SparseGPRegressor("rbf", noise=noise, random_state=0) for _ in range(2))
    with shortest_fits():
        whole.fit(X, Y, noise_variance=given)
        # `fit` keeps no rows.
        for rows, learn in zip(
            np.split(np.arange(100), [40, 60, 80]),
            (stream.fit, *[stream.partial_fit] * 3),
            strict=True,
        ):
            learn(X[rows], Y[rows], noise_variance=None if given is None else given[rows])
    assert stream.n_rows_seen_ == 100
    np.testing.assert_allclose(stream.noise_, whole.noise_, rtol=0.3)
    if noise == "target":
        assert stream.noise_[1] > 1.1 * stream.noise_[0]


def test_partial_fit_after_missing_targets_is_refused() -> None:
    X, y = batch(0)
    Y = np.stack([y, -y], 1)
    Y[0, 0] = np.nan
    with shortest_fits():
        model = SparseGPRegressor("rbf", noise="shared", random_state=0, max_points=4).fit(X, Y)
    with pytest.raises(InputError, match="missing targets"):
        model.partial_fit(X, np.stack([y, -y], 1))


def test_partial_fit_other_noise_than_before_is_an_error() -> None:
    model, (X, y) = first_regressor(), batch(1)
    before = dict(vars(model))
    with pytest.raises(InputError, match="`noise` must be that of the earlier batches, learnt"):
        model.set_params(noise="known").partial_fit(X, y, noise_variance=0.1)
    assert vars(model) == {**before, "noise": "known"}
    with shortest_fits():
        two = SparseGPRegressor("rbf", random_state=0, max_points=4).fit(X, np.stack([y, -y], 1))
    with pytest.raises(InputError, match="needs the likelihood of the earlier fit"):
        two.set_params(noise="shared").partial_fit(X, np.stack([y, -y], 1))


def test_partial_fit_other_priors_are_used() -> None:
    model = first_regressor()
    assert log_prior(model._online_model(all_rows(model, range(1)), model._validate())) != 0
    model.set_params(priors=None).partial_fit(*batch(1))
    assert log_prior(model.posterior_.kernel) == 0
    model.set_params(priors="weak").partial_fit(*batch(2))
    assert model.n_batches_ == 3
