"""Streams that forget: by a factor, and by a window of batches."""

from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.stream_batches import batch, first_classifier, first_regressor, labelled
from winnowgp import SparseGPRegressor, load
from winnowgp.data import Dataset
from winnowgp.models import SparseGP
from winnowgp.models.online import OnlineGP

# Shapes are checked by the tests of `models.online` and of fits.
pytestmark = pytest.mark.unchecked


@pytest.fixture(scope="module")
def first() -> SparseGPRegressor:
    return first_regressor()


@pytest.fixture
def model(first: SparseGPRegressor) -> SparseGPRegressor:
    return deepcopy(first).partial_fit(*batch(1))


@pytest.fixture(scope="module")
def windowed(first: SparseGPRegressor) -> list[SparseGPRegressor]:
    """A model after each of three batches with a window of two."""
    models = [deepcopy(first).set_params(window=2)]
    for seed in (1, 2):
        models.append(deepcopy(models[-1]).partial_fit(*batch(seed)))
    return models


def test_window_forgets_the_rows_of_older_batches(windowed: list[SparseGPRegressor]) -> None:
    model, (X, y) = windowed[-1], batch(50, 100)
    assert model.n_rows_seen_ == 60
    assert [memory.N for memory in model._record().memories] == [20, 20]
    # The same model without the first batch: the latest rows alone, at its hyper-parameters.
    posterior, rows = model.posterior_, [batch(seed) for seed in (1, 2)]
    recent = model._standardised(
        Dataset.of(*(torch.tensor(np.concatenate(part)) for part in zip(*rows, strict=True)))
    )
    noise = model.likelihood_.noise.item()
    alone = SparseGP(posterior.kernel, posterior.Z, mean=posterior.mean, noise=noise)
    online = OnlineGP.start(alone).after(recent)
    expected = online.posterior(*online.remembered_moments()).predict_mean(model._inputs(X))[:, 0]
    found = posterior.predict_mean(model._inputs(X))[:, 0]
    # Batches were seen at the points and hyper-parameters of their time.
    assert (found - expected).abs().max() < 0.05
    assert model.log_density(X, y).mean() > -0.5


def test_window_is_saved_and_goes_on(windowed: list[SparseGPRegressor], tmp_path: Path) -> None:
    model = deepcopy(windowed[-1])
    loaded = load(model.save(tmp_path / "model.winnow"))
    assert loaded.window == 2
    X, _ = batch(50)
    after = loaded.partial_fit(*batch(3)).predict(X)
    np.testing.assert_allclose(after, model.partial_fit(*batch(3)).predict(X), rtol=1e-9)
    assert len(loaded._record().memories) == 2


def test_window_longer_than_the_stream_forgets_nothing(
    first: SparseGPRegressor, model: SparseGPRegressor
) -> None:
    other = deepcopy(first).set_params(window=5).partial_fit(*batch(1))
    X, _ = batch(50)
    np.testing.assert_allclose(other.predict(X), model.predict(X), atol=1e-6)
    other.partial_fit(*batch(2))
    np.testing.assert_allclose(other.predict(X), model.partial_fit(*batch(2)).predict(X), atol=1e-4)
    assert other.elbo_ == pytest.approx(model.elbo_, abs=1e-3)
    # Without the window the model goes on with all that it remembers.
    assert len(other.set_params(window=None).partial_fit(*batch(3))._record().memories) == 1


def test_window_of_classes_follows_labels_that_change() -> None:
    model = first_classifier().set_params(window=2)
    for seed in (1, 2):
        X, y = labelled(seed)
        model.partial_fit(X, np.where(y == "low", "high", "low"))
    X, y = labelled(9, 100)
    assert model.score(X, np.where(y == "low", "high", "low")) > 0.75
    assert model._record().remembered == 50


def test_forgetting_follows_a_function_that_changes(model: SparseGPRegressor) -> None:
    forgetful = deepcopy(model).set_params(forgetting=0.5)
    for seed in range(2, 5):
        X, y = batch(seed)
        for each in (model, forgetful):
            each.partial_fit(X, y + 3)
    X, y = batch(9)
    error = [np.abs(each.predict(X) - y - 3).mean() for each in (model, forgetful)]
    assert error[1] < 0.7 * error[0]
    assert forgetful._record().remembered == pytest.approx(40 / 8 + 20 * (1 / 4 + 1 / 2 + 1))
