"""Functions drawn from a fitted regressor."""

import numpy as np
import pytest
import torch

from helpers.short_fits import shortest_fits
from winnowgp import SparseGPRegressor
from winnowgp.errors import InputError


def test_sample_functions_have_the_moments_of_predictions() -> None:
    rng = np.random.default_rng(0)
    X = rng.uniform(50, 60, (20, 1))
    y = 1e3 * np.sin(X[:, 0]) + 50 * rng.normal(size=20)
    with shortest_fits():
        model = SparseGPRegressor("rbf", inducing_points=[[51.0], [55.0]]).fit(X, y)
    rows = np.array([[50.5], [53.0], [70.0]])
    functions = model.sample_functions(2000, random_state=0)
    values = functions(rows)
    mean, cov = model.predict(rows, return_cov=True, observed=False)
    errors = values.T - mean
    second = errors[:, :, None] * errors[:, None, :]
    assert np.abs(errors.mean(0) / errors.std(0)).max() < 4.5 / 2000**0.5
    assert np.abs((second.mean(0) - cov) / second.std(0)).max() < 4.5 / 2000**0.5
    tensor = torch.tensor(rows, requires_grad=True)
    np.testing.assert_allclose(functions(tensor).detach().numpy(), values, rtol=1e-9)
    (gradient,) = torch.autograd.grad(functions(tensor)[0, 0], tensor)
    step = (functions(rows + 1e-5) - functions(rows - 1e-5))[0, 0] / 2e-5
    assert gradient[0].item() == pytest.approx(step, rel=1e-4)
    # Another fit leaves the functions as they are.
    with shortest_fits():
        model.set_params(inducing_points=[[1.0]]).fit(X - 50, y / 1e3)
    np.testing.assert_array_equal(functions(rows), values)


def test_sample_functions_of_several_targets_have_an_axis_for_them() -> None:
    X = np.linspace(0, 6, 20)[:, None]
    with shortest_fits():
        model = SparseGPRegressor("rbf", inducing_points=X[::5])
        model.fit(X, np.c_[np.sin(X), np.cos(X)])
    assert model.sample_functions(5)(X[:3]).shape == model.sample_y(X[:3], 5).shape == (3, 2, 5)
    assert model.sample_functions(5)(torch.tensor(X[:3])).shape == (3, 2, 5)
    np.testing.assert_array_equal(model.sample_functions()(X), model.sample_functions()(X))
    with pytest.raises(InputError, match="`n_samples` must be an integer of at least 1"):
        model.sample_functions(0)
