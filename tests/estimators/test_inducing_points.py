"""Inducing points that the user fixes are used as given."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gpytorch.kernels import RBFKernel

import winnowgp
from helpers.short_fits import smaller_sizes
from winnowgp import SparseGP, SparseGPClassifier, SparseGPRegressor, fit
from winnowgp.data import Dataset
from winnowgp.errors import InputError
from winnowgp.models import LatentVariableGP
from winnowgp.models.gplvm import Latents
from winnowgp.models.priors import add_weak_priors, log_prior
from winnowgp.training import AllCandidates, FastSchedule

rng = np.random.default_rng(0)
X = np.sort(rng.uniform(0, 6, (80, 1)), axis=0)
y = np.sin(3 * X[:, 0]) + 0.1 * rng.normal(size=80)
# Two equal points, and one far from all rows.
Z = np.array([[0.5], [0.5], [2.0], [3.0], [3.5], [30.0]])


@pytest.fixture(scope="module")
def fitted() -> SparseGPRegressor:
    with smaller_sizes(0):
        return SparseGPRegressor("rbf", inducing_points=Z, random_state=0).fit(X, y)


def test_regressor_neither_moves_nor_prunes_given_inducing_points(
    fitted: SparseGPRegressor, tmp_path: Path
) -> None:
    np.testing.assert_allclose(fitted.inducing_points_, Z, rtol=1e-12)
    assert fitted.growth_limit_ is None
    loaded: Any = winnowgp.load(fitted.save(tmp_path / "model.winnow"))
    np.testing.assert_array_equal(loaded.inducing_points, Z)
    # The last digit may depend on where an array lies in memory.
    np.testing.assert_allclose(loaded.predict(X), fitted.predict(X), rtol=1e-13)


def test_regressor_learns_the_other_parameters(fitted: SparseGPRegressor) -> None:
    """The gradient of the collapsed bound and the priors, computed directly, is small."""
    data = Dataset.of(
        fitted._x_scaler.forward(torch.tensor(X)),
        fitted._y_scaler.columns.forward(torch.tensor(y)[:, None]),
    )
    model = SparseGP(fitted.kernel_, fitted.posterior_.Z, noise=fitted.likelihood_.noise.item())
    for parameter in (*model.kernel.parameters(), *model.likelihood.parameters()):
        parameter.requires_grad_(True)
    add_weak_priors(model)
    bound = model.bound(data)
    parameters = [*model.kernel.parameters(), *model.likelihood.parameters()]
    gradients = torch.autograd.grad(bound + log_prior(model), parameters)
    assert bound.item() == pytest.approx(fitted.elbo_, abs=1e-3)
    assert max(gradient.abs().max().item() for gradient in gradients) < 0.1


def test_classifier_neither_moves_nor_prunes_given_inducing_points(quickly: None) -> None:
    model = SparseGPClassifier("rbf", inducing_points=Z, random_state=0).fit(X[::2], y[::2] > 0)
    np.testing.assert_allclose(model.inducing_points_, Z, rtol=1e-12)


@pytest.mark.parametrize(
    "other",
    [
        {"tolerance": 0.01},
        {"alpha": 0.1},
        {"max_points": 3},
        {"max_predict_us": 3.0},
        {"n_candidates": 3},
        {"candidates": "kmeans"},
        {"candidates": Z},
        {"criterion": "predictive"},
        {"schedule": "paper", "alpha": 0.1},
    ],
    ids=str,
)
def test_parameters_of_the_selection_are_refused(other: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="nothing is selected; got"):
        SparseGPRegressor(inducing_points=Z, **other).fit(X, y)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("kmeans", r"must be numbers; got 'kmeans'. Pass locations \[M D\]"),
        (np.zeros((3, 2)), r"must have shape \[M 1\]; got shape \[3, 2\]"),
        (np.zeros((0, 1)), r"must have shape \[M D\]"),
        (np.full((3, 1), np.nan), "must be finite"),
    ],
)
def test_wrong_inducing_points_are_refused(wrong: Any, message: str) -> None:
    with pytest.raises(InputError, match=f"`inducing_points` {message}"):
        SparseGPRegressor(inducing_points=wrong).fit(X, y)


def test_all_candidates_is_refused_for_models_without_any() -> None:
    data = Dataset.of(torch.tensor(X), torch.tensor(y))
    with pytest.raises(InputError, match="the model has none"):
        fit(SparseGP(RBFKernel(), data.X[:0]), data, schedule=FastSchedule(AllCandidates()))
    latent = LatentVariableGP(RBFKernel(), Latents(data.X), candidates=data.X[:3], noise=data.X[0])
    with pytest.raises(InputError, match="GP-LVM"):
        FastSchedule(AllCandidates()).check(latent, data)
