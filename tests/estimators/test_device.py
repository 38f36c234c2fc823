"""The device of a fit."""

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.exceptions import NotFittedError

from helpers.short_fits import shortest_fits
from winnowgp import GPLVM, DeepGPClassifier, DeepGPRegressor, SparseGPClassifier, SparseGPRegressor
from winnowgp.data import Dataset
from winnowgp.errors import InputError

X = np.linspace(0, 6, 30)[:, None]
y = np.sin(X[:, 0])
TABLE = np.c_[np.sin(X), np.cos(X), X] + 0.05 * np.random.default_rng(0).normal(size=(30, 3))
DEEP: dict[str, Any] = {"n_candidates": 8, "predict_samples": 8}
FAST: dict[str, tuple[Any, tuple[np.ndarray, ...]]] = {
    "regressor": (SparseGPRegressor("rbf", n_candidates=15), (X, y)),
    "counts": (
        SparseGPRegressor("rbf", likelihood="poisson", max_points=4),
        (X, np.round(3 + 2 * y)),
    ),
    "classifier": (SparseGPClassifier("rbf", n_candidates=15), (X, y > 0)),
    "deep regressor": (DeepGPRegressor(**DEEP, epochs=(2, 5, 3)), (X, y)),
    "deep counts": (
        DeepGPRegressor(**DEEP, likelihood="poisson", epochs=(2, 5, 3)),
        (X, np.round(3 + 2 * y)),
    ),
    "deep classifier": (DeepGPClassifier(**DEEP, epochs=(2, 5, 3)), (X, y > 0)),
    "GPLVM": (GPLVM(1, max_points=5, max_iter=20), (TABLE,)),
}
PAPER: dict[str, Any] = {"schedule": "paper", "alpha": 0.1}
SLOW: dict[str, tuple[Any, tuple[np.ndarray, ...]]] = {
    "paper regressor": (SparseGPRegressor(**PAPER, n_candidates=8, epochs=(5, 5, 5)), (X, y)),
    "paper deep": (DeepGPRegressor(**PAPER, **DEEP, epochs=(3, 5, 5, 5)), (X, y)),
    "paper GPLVM": (GPLVM(1, **PAPER, n_candidates=5, epochs=5), (TABLE,)),
    "paper GPLVM of counts": (
        GPLVM(1, **PAPER, n_candidates=5, epochs=5, likelihood="poisson"),
        (np.round(10 + 5 * TABLE),),
    ),
    "minibatches of a GPLVM": (
        GPLVM(1, **PAPER, n_candidates=5, epochs=5, batch_size=10, noise="column"),
        (TABLE,),
    ),
}


def fitted(name: str, device: str) -> Any:
    estimator, data = {**FAST, **SLOW}[name]
    settings = estimator.get_params(deep=False) | {"device": device, "random_state": 0}
    return type(estimator)(**settings).fit(*data)


BEST = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("name", FAST)
def test_auto_device_is_the_one_of_this_machine(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    devices = []

    def train(self: Any, data: Any, params: Any, **_: Any) -> None:
        devices.append(torch.device(params.device))
        raise KeyboardInterrupt

    monkeypatch.setattr(type(FAST[name][0]), "_train", train)
    for device in ("auto", BEST):
        with pytest.raises(KeyboardInterrupt):
            fitted(name, device)
    assert devices == [torch.device(BEST)] * 2


def test_fit_on_the_automatic_device_equals_that_on_the_named_one() -> None:
    with shortest_fits():
        automatic, explicit = (fitted("regressor", device) for device in ("auto", BEST))
    assert automatic.elbo_ == pytest.approx(explicit.elbo_, rel=1e-9)


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("device", ["abacus", "cuda:97", ""])
def test_unavailable_device_is_refused(name: str, device: str) -> None:
    with pytest.raises(InputError, match=f"`device` must be a device of this machine.*'{device}'"):
        fitted(name, device)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:the latent positions")
@pytest.mark.parametrize("name", [*FAST, *SLOW])
def test_fit_on_a_gpu_predicts_on_the_cpu(name: str, tmp_path: Any) -> None:
    _, data = {**FAST, **SLOW}[name]
    model = fitted(name, "cuda")
    assert np.isfinite(model.elbo_)
    assert all(tensor.device.type == "cpu" for tensor in model.posterior_.state_dict().values())
    answer = model.transform(data[0]) if isinstance(model, GPLVM) else model.predict(data[0])
    assert len(answer) == len(data[0])
    assert model.save(tmp_path / "model.winnow").exists()
    if name in ("regressor", "classifier"):
        # The other fits depend on random numbers, which differ between devices.
        assert model.elbo_ == pytest.approx(fitted(name, "cpu").elbo_, rel=0.05, abs=1.0)


def test_copy_that_predicts_elsewhere_leaves_the_model_where_it_is() -> None:
    with shortest_fits():
        model = fitted("regressor", "cpu")
    before = model.predict(X)
    there = model.predicting_on("meta")
    assert there.posterior_.Z.device.type == "meta"
    assert model.posterior_.Z.device.type == "cpu"
    np.testing.assert_array_equal(model.predict(X), before)
    np.testing.assert_array_equal(model.predicting_on("cpu").predict(X), before)


def test_predicting_on_refuses_what_cannot_predict() -> None:
    with pytest.raises(NotFittedError):
        SparseGPRegressor().predicting_on("cpu")
    with shortest_fits():
        model = fitted("regressor", "cpu")
    with pytest.raises(InputError, match=r"`device` must be a device of this machine.*'abacus'"):
        model.predicting_on("abacus")
    with pytest.raises(InputError, match="a GPLVM infers positions and predicts on the CPU"):
        GPLVM(1).predicting_on("cpu")


def answers(model: Any, data: tuple[np.ndarray, ...]) -> dict[str, np.ndarray]:
    """Return the predictions of a fitted model that do not depend on random numbers."""
    if hasattr(model, "predict_proba"):
        return {"probability": model.predict_proba(X), "density": model.log_density(*data)}
    found = {
        "mean": model.predict(X),
        "sd": model.predict(X, return_std=True)[1],
        "density": model.log_density(*data),
        "quantiles": model.predict_quantiles(X, [0.1, 0.5]),
    }
    if isinstance(model, SparseGPRegressor):
        found["covariance"] = model.predict(X, return_cov=True, observed=False)[1]
    return found


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["regressor", "counts", "classifier"])
def test_predictions_on_a_gpu_equal_those_on_the_cpu(name: str) -> None:
    model, (_, data) = fitted(name, "cpu"), FAST[name]
    here, there = answers(model, data), answers(model.predicting_on("cuda"), data)
    for key, value in here.items():
        np.testing.assert_allclose(there[key], value, rtol=1e-7, atol=1e-9, err_msg=key)
    if name == "regressor":
        moved = model.predicting_on("cuda")
        assert np.isfinite(moved.sample_y(X, 3)).all()
        assert np.isfinite(moved.sample_functions(3)(X)).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("candidates", ["auto", "kmeans", "locations"])
def test_rows_on_a_gpu_give_the_fit_of_rows_on_the_cpu(device: str, candidates: str) -> None:
    rows = Dataset.of(torch.from_numpy(X), torch.from_numpy(y))
    given = X[::4] if candidates == "locations" else candidates
    on_cpu, on_gpu = (
        SparseGPRegressor(candidates=given, n_candidates=8, device=device, random_state=0).fit(
            rows.to(torch.device(where))
        )
        for where in ("cpu", "cuda")
    )
    assert on_gpu.elbo_ == pytest.approx(on_cpu.elbo_, rel=1e-3)
