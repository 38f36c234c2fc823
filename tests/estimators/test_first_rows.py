"""The first rows of a stream, which `partial_fit` keeps."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from numpy.typing import NDArray

from helpers.short_fits import shortest_fits
from winnowgp import SparseGPClassifier, SparseGPRegressor, load
from winnowgp.data import Dataset
from winnowgp.estimators import stream_records
from winnowgp.estimators.stream_records import FirstRows
from winnowgp.models import SparseGP, VariationalGP
from winnowgp.training import hyperparameters

# Shapes are checked by the tests of `models.online` and of fits.
pytestmark = pytest.mark.unchecked

Batch = tuple[NDArray[Any], NDArray[Any]]


def batch(seed: int, N: int = 15) -> Batch:
    rng = np.random.default_rng(seed)
    X = rng.uniform(0, 6, (N, 1))
    return X, 4 + 3 * np.sin(X[:, 0]) + 0.3 * rng.standard_normal(N)


@pytest.fixture(scope="module")
def regressor() -> SparseGPRegressor:
    with shortest_fits():
        model = SparseGPRegressor("rbf", random_state=0).partial_fit(*batch(0))
    assert model.n_inducing_
    return model


def kept(model: SparseGPRegressor | SparseGPClassifier) -> FirstRows | None:
    return model._record().first


def rows(model: SparseGPRegressor, *batches: Batch) -> Dataset:
    X, y = np.vstack([X for X, _ in batches]), np.concatenate([y for _, y in batches])
    scaled = model._y_scaler.columns.forward(torch.tensor(y)[:, None])
    return Dataset(model._x_scaler.forward(torch.tensor(X)), scaled)


def test_partial_fit_few_rows_has_the_bound_of_all_of_them(regressor: SparseGPRegressor) -> None:
    model = deepcopy(regressor).partial_fit(*batch(1)).partial_fit(*batch(2))
    posterior, data = model.posterior_, rows(model, *map(batch, range(3)))
    noise = posterior.likelihood.noise.item()
    exact = SparseGP(posterior.kernel, posterior.Z, mean=posterior.mean, noise=noise)
    assert model.elbo_ == pytest.approx(exact.fixed_bound(data), abs=1e-6)
    mean = exact.posterior(data).predict_mean(data.X)
    torch.testing.assert_close(posterior.predict_mean(data.X), mean, rtol=1e-6, atol=1e-6)
    first = kept(model)
    assert first is not None
    torch.testing.assert_close(first.rows.X, data.X)


@pytest.mark.parametrize("given", [False, True])
def test_partial_fit_first_call_starts_from_a_given_kernel(
    given: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = ScaleKernel(RBFKernel()).initialize(**{"base_kernel.lengthscale": 0.123})
    starts, maximise = [], hyperparameters.optimise_evidence

    def recorded(model: Any, *arguments: Any) -> Any:
        starts.append(model.kernel.base_kernel.lengthscale.item())
        return maximise(model, *arguments)

    monkeypatch.setattr(hyperparameters, "optimise_evidence", recorded)
    SparseGPRegressor(kernel if given else "rbf", random_state=0).partial_fit(*batch(0))
    # Further runs continue from an optimum.
    own = [0.123] if given else []
    assert starts[: 2 + given] == pytest.approx([1.0, 0.1, *own])
    assert (pytest.approx(0.123) in starts) == given


def test_partial_fit_many_rows_keeps_none_of_them(
    regressor: SparseGPRegressor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_records, "FIRST_ROWS", 40)
    model = deepcopy(regressor).partial_fit(*batch(1))
    assert kept(model) is not None
    assert kept(model.partial_fit(*batch(2))) is None
    assert kept(model.partial_fit(*batch(3))) is None
    assert model.n_rows_seen_ == 60


def test_fit_and_windows_keep_no_rows(regressor: SparseGPRegressor) -> None:
    with shortest_fits():
        assert kept(SparseGPRegressor("rbf", random_state=0).fit(*batch(0))) is None
    assert kept(deepcopy(regressor).set_params(window=3).partial_fit(*batch(1))) is None


def test_partial_fit_of_loaded_model_has_the_kept_rows(
    regressor: SparseGPRegressor, tmp_path: Path
) -> None:
    model = deepcopy(regressor).set_params(forgetting=0.8).partial_fit(*batch(1))
    loaded, X = load(model.save(tmp_path / "model.winnow")), batch(9)[0]
    first = kept(loaded)
    assert first is not None
    assert first.rows.weights is not None
    np.testing.assert_allclose(first.rows.weights, np.repeat([0.8, 1.0], 15))
    after = model.partial_fit(*batch(2)).predict(X)
    np.testing.assert_allclose(loaded.partial_fit(*batch(2)).predict(X), after, rtol=1e-10)


@pytest.mark.filterwarnings("ignore::winnowgp.errors.NoInducingPointsWarning")
def test_classifier_sorted_stream_finds_the_function_of_all_rows() -> None:
    rng = np.random.default_rng(0)
    X = np.sort(rng.uniform(0, 6, 90))[:, None]
    y = (np.sin(1.5 * X[:, 0]) + 0.2 * rng.standard_normal(90) < 0).astype(int)
    y[0] = 1
    model = SparseGPClassifier("rbf", random_state=0)
    with shortest_fits():
        model.partial_fit(X[:20], y[:20])
        assert model.n_inducing_ == 0
        # Less than an eighth of the rows are new.
        model.partial_fit(X[20:22], y[20:22])
        first = kept(model)
        assert first is not None
        assert (first.rows.N, first.waiting) == (22, 2)
        model.partial_fit(X[22:], y[22:])
    assert model.n_inducing_
    assert model.score(X[1:], y[1:]) > 0.9
    posterior = model.posterior_
    data = Dataset(model._x_scaler.forward(torch.tensor(X)), torch.tensor(y[:, None]).double())
    exact = VariationalGP(
        posterior.kernel, posterior.Z, mean=posterior.mean, likelihood=posterior.likelihood
    )
    assert model.elbo_ == pytest.approx(exact.with_best_q(data).fixed_bound(data), abs=1e-2)


def test_first_rows_of_a_constant_are_the_latest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_records, "CONSTANT_ROWS", 5)
    X = torch.arange(8.0, dtype=torch.float64)[:, None]
    first = FirstRows(Dataset(X[:4], X[:4]), 0.0).forget(0.5).plus(Dataset(X[4:], X[4:]))
    assert first.waiting == 4
    assert first.is_search_due(32.0)
    assert not first.is_search_due(32.1)
    with monkeypatch.context() as few:
        few.setattr(stream_records, "FIRST_ROWS", 5)
        assert first.is_search_due(12.0)
        assert not first.is_search_due(12.1)
    latest = first.kept(6.0, constant=True)
    assert latest is not None
    assert latest.rows.X.flatten().tolist() == [3, 4, 5, 6, 7]
    assert latest.rows.weights is not None
    assert latest.rows.weights.tolist() == [0.5, 1, 1, 1, 1]
    assert first.kept(6.0, constant=False) is first
    assert first.kept(6.1, constant=False) is None
