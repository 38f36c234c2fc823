"""Deep fits of few rows that end below a shallow GP."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gpytorch.likelihoods import GaussianLikelihood
from scipy.stats import norm

from winnowgp import Checkpoint, DeepGPRegressor, SparseGPRegressor, load
from winnowgp.models import DeepPosterior
from winnowgp.models.kernels import covariance
from winnowgp.training import Progress


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
    return shortly().fit(*rows())


def test_shallow_alternative_has_the_collapsed_bound(fitted: DeepGPRegressor) -> None:
    X, y = rows()
    X, y = (X - X.mean(0)) / X.std(0), (y - y.mean()) / y.std()
    assert fitted.n_inducing_[0] == 1
    assert fitted.n_inducing_[1] > 1
    posterior = fitted.posterior_
    assert isinstance(posterior, DeepPosterior)
    last, likelihood = posterior.layers[-1], posterior.likelihood
    assert isinstance(likelihood, GaussianLikelihood)
    inputs, Z, noise = torch.tensor(X), last.candidates.detach(), likelihood.noise.item()
    with torch.no_grad():
        pairs = ((Z, Z), (Z, inputs), (inputs, inputs))
        Kuu, Kuf, Kff = (covariance(last.kernel, *pair).numpy() for pair in pairs)
    Q = Kuf.T @ np.linalg.solve(Kuu + 1e-10 * np.eye(len(Z)), Kuf)
    L = np.linalg.cholesky(Q + noise * np.eye(len(y)))
    bound = norm.logpdf(np.linalg.solve(L, y)).sum() - np.log(np.diag(L)).sum()
    bound -= 0.5 * np.trace(Kff - Q) / noise
    assert fitted.elbo_ == pytest.approx(bound, abs=0.1)


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
    assert loaded.posterior_.samples == fitted.posterior_.samples == 2


def test_shallow_alternative_is_compared_with_the_deep_models(fitted: DeepGPRegressor) -> None:
    deep = [each for each in fitted.allocations_ if each.sizes != fitted.n_inducing_]
    assert deep
    for each in deep:
        assert each.elbo < fitted.elbo_
        gap = (fitted.elbo_ - each.elbo) / 70
        assert each.elbo_gap - fitted.elbo_gap_ == pytest.approx(gap)
    # Its two samples are quicker than the 64 of the others.
    assert fitted.allocations_[0].sizes == fitted.n_inducing_
    assert fitted.available_sizes_ == (fitted.n_inducing_,)


def test_shallow_alternative_of_one_kernel_and_three_layers() -> None:
    model = shortly(3, kernel="matern32").fit(*rows(40))
    assert model.n_inducing_[:2] == (1, 1)
    assert "Matern" in str(model.posterior_.layers[-1].kernel)


@pytest.mark.parametrize(
    "options",
    [{"hidden_mean": "identity"}, {"width": 1}, {"skip_connections": True}, {"max_cost": 200.0}],
)
def test_specified_deep_models_are_not_replaced(options: dict[str, Any]) -> None:
    model = shortly(**options, n_candidates=6).fit(*rows(40))
    assert model.n_inducing_[0] > 1


def test_shallow_alternative_has_at_most_the_specified_candidates(fitted: DeepGPRegressor) -> None:
    model = shortly(n_candidates=6).fit(*rows())
    assert model.n_inducing_[0] == 1
    assert model.n_inducing_[1] <= 6 < fitted.n_inducing_[1]


def test_shallow_alternative_resumes_from_the_checkpoint(
    fitted: DeepGPRegressor, tmp_path: Path
) -> None:
    seen: list[str] = []

    def stop(progress: Progress) -> None:
        seen.append(progress.phase)
        if seen.count("optimisation") == 20:
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
    assert "pre-train" in seen
    assert "initialisation" in seen
    assert set(resumed) == {"optimisation", "selection"}
