"""Several fidelities: linear and nonlinear relations, averaged over hyper-parameters."""

from copy import copy
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from gpytorch.kernels import RBFKernel
from numpy.typing import NDArray

from helpers.short_fits import short_fits
from winnowgp import MultiFidelityGPRegressor, SparseGP, load
from winnowgp.data import Dataset
from winnowgp.errors import InputError, ModelFileError
from winnowgp.estimators.validation import Parameters
from winnowgp.io.registry import deserialise, serialise
from winnowgp.models.fidelity_posterior import chain_inputs

# A cheap curve of the fidelity 0, and its double plus a trend at the fidelity 2.5.
LEVELS = np.repeat([0.0, 2.5], [30, 6])
INPUTS = np.concatenate([np.linspace(0, 1, 30), np.linspace(0.05, 0.95, 6)])
CURVE = np.where(LEVELS > 0, 2.0, 1.0) * np.sin(9 * INPUTS) + np.where(LEVELS > 0, INPUTS, 0.0)
FIDELITIES = pd.DataFrame({"level": LEVELS, "x": INPUTS})


@pytest.fixture(scope="module")
def point() -> MultiFidelityGPRegressor:
    model = MultiFidelityGPRegressor(
        fidelity="level", relation="linear", hyper="point", random_state=0
    )
    with short_fits():
        return model.fit(FIDELITIES, CURVE)


@pytest.fixture(scope="module")
def averaged() -> MultiFidelityGPRegressor:
    model = MultiFidelityGPRegressor(fidelity="level", relation="linear", random_state=0)
    return model.fit(FIDELITIES, CURVE)


@pytest.fixture(scope="module")
def squared() -> MultiFidelityGPRegressor:
    """A high fidelity that is the square of the low one (Perdikaris et al. 2017), 12 rows of it."""
    model = MultiFidelityGPRegressor(relation="nonlinear", random_state=0)
    with short_fits():
        return model.fit(*squared_rows())


def squared_rows() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    x = np.concatenate([np.linspace(0, 1, 40), np.linspace(0.02, 0.98, 12)])
    level = np.repeat([0.0, 1.0], [40, 12])
    low = np.sin(8 * np.pi * x)
    y = np.where(level == 1, 10 + 3 * (x - np.sqrt(2)) * low**2, low)
    return np.column_stack([x, level]), y


@pytest.mark.parametrize("name", ["point", "averaged"])
def test_fidelities_predict_each_level(name: str, request: pytest.FixtureRequest) -> None:
    model: MultiFidelityGPRegressor = request.getfixturevalue(name)
    x = np.linspace(0.05, 0.95, 40)
    for level, truth in ((0.0, np.sin(9 * x)), (2.5, 2 * np.sin(9 * x) + x)):
        rows = pd.DataFrame({"level": np.full(40, level), "x": x})
        lower, upper = model.predict_interval(rows, 0.99)
        assert np.sqrt(np.mean((model.predict(rows) - truth) ** 2)) < 0.1
        assert ((lower < truth) & (upper > truth)).mean() > 0.9
    np.testing.assert_array_equal(model.fidelities_, [0.0, 2.5])
    assert model.rho_[1, 0] == pytest.approx(2, abs=0.3)
    assert model.rho_[0, 1] == 0
    assert {points.shape[1] for points in model.inducing_points_} == {1}
    # In the units of the inputs; selected points were moved.
    assert all(-0.01 < points.min() < points.max() < 1.01 for points in model.candidates_)
    # No row observes the discrepancy at the lower fidelity.
    assert np.isin(model.candidates_[1][~model.inclusion_[1].astype(bool)], INPUTS).all()
    with pytest.raises(InputError, match=r"one of the fidelities \[0.0, 2.5\] in column 0; got 1"):
        model.predict(pd.DataFrame({"level": [1.0], "x": [0.5]}))


def test_condition_on_a_row_moves_predictions_of_its_fidelity(
    point: MultiFidelityGPRegressor,
) -> None:
    model = point
    rows = pd.DataFrame({"level": [0.0, 2.5], "x": [0.5, 0.5]})
    mean, sd = model.predict(rows, return_std=True, observed=False)
    updated = model.condition_on(rows[1:], mean[1:] + 1)
    after, less = updated.predict(rows, return_std=True, observed=False)
    assert mean[1] + 0.01 < after[1] < mean[1] + 1
    assert abs(after[0] - mean[0]) < abs(after[1] - mean[1])
    assert (less <= sd + 1e-9).all()
    assert model.predict(rows)[1] == mean[1]


@pytest.mark.usefixtures("quickly")
@pytest.mark.parametrize("relation", ["linear", "nonlinear"])
def test_one_fidelity_is_a_sparse_gp(relation: str) -> None:
    low = np.column_stack([INPUTS, np.ones_like(INPUTS)])[LEVELS == 0]
    model = MultiFidelityGPRegressor(relation=relation, hyper="point", random_state=0)
    model.fit(low, CURVE[LEVELS == 0])
    (posterior,) = model.posterior_.modes
    rows = model._inputs(low)[:, :1]
    y = model._y_scaler.columns.forward(torch.from_numpy(CURVE[LEVELS == 0])[:, None])
    one = SparseGP(
        posterior.kernels[0], posterior.Z, noise=posterior.likelihood.noise.item()
    ).posterior(Dataset.of(rows, y))
    expected = model._y_scaler.values(one.predict_mean(rows))
    np.testing.assert_allclose(model.predict(low), expected, atol=1e-6)


def test_damaged_posterior_is_refused(point: MultiFidelityGPRegressor) -> None:
    posterior: Any = point.posterior_
    archive = serialise("Model", posterior)
    archive.outline["state"]["levels"] = {"$tensor": "flipped"}
    archive.tensors["flipped"] = posterior.levels.flip(0)
    with pytest.raises(ModelFileError, match="ascending levels"):
        deserialise(archive)
    archive = serialise("Model", posterior.function)
    name = archive.outline["state"]["q_mean"]["$tensor"]
    archive.tensors[name] = archive.tensors[name][1:]
    with pytest.raises(ModelFileError):
        deserialise(archive)


def test_column_of_many_values_is_no_fidelity() -> None:
    model = MultiFidelityGPRegressor()
    with pytest.raises(InputError, match=r"column 1, which has 36 different values\. Name"):
        model.fit(np.column_stack([INPUTS, INPUTS]), CURVE)
    assert not hasattr(squared, "n_features_in_")


def test_mixing_reconstructs_predictions_of_the_lowest_fidelity(
    point: MultiFidelityGPRegressor,
) -> None:
    first = LEVELS == 0
    np.testing.assert_allclose(
        point.mixing_[0, 0] * point.predict_processes(FIDELITIES)[first, 0] + CURVE.mean(),
        point.predict(FIDELITIES)[first],
    )


def test_averages_over_hyperparameters_widen_intervals(
    point: MultiFidelityGPRegressor, averaged: MultiFidelityGPRegressor
) -> None:
    assert point.n_inducing_ == averaged.n_inducing_
    assert len(averaged.posterior_.component_weights) == 16
    # Six rows of the high fidelity leave the hyper-parameters of its discrepancy uncertain.
    rows = pd.DataFrame({"level": 2.5, "x": np.linspace(0, 1, 50)})
    narrow, wide = (model.predict(rows, return_std=True)[1].mean() for model in (point, averaged))
    assert wide > 1.1 * narrow
    lower, upper = averaged.predict_quantiles(rows, [0.1, 0.9])
    assert (lower < averaged.predict(rows)).all()
    assert (averaged.predict(rows) < upper).all()


def test_averaged_members_gain_weight_by_their_predictions(
    averaged: MultiFidelityGPRegressor,
) -> None:
    row = pd.DataFrame({"level": [2.5], "x": [0.33]})
    y = averaged.predict(row) + averaged.predict(row, return_std=True)[1]
    updated = averaged.condition_on(row, y)
    before, after = (each.posterior_.function for each in (averaged, updated))
    Y = torch.full((1, 2), torch.nan).double()
    Y[0, 1] = averaged._y_scaler.columns.forward(torch.from_numpy(y)[:, None]).item()
    rows = Dataset(averaged._process_inputs(row), Y)
    nats = torch.stack([member.log_predictive(rows) for member in before.members])
    torch.testing.assert_close(after.member_weights, nats.softmax(0))
    assert abs(updated.predict(row) - y) < abs(averaged.predict(row) - y)


def test_nonlinear_relation_learns_a_square(squared: Any) -> None:
    x = np.linspace(0.02, 0.98, 100)
    truth = 10 + 3 * (x - np.sqrt(2)) * np.sin(8 * np.pi * x) ** 2
    rows = np.column_stack([x, np.ones(100)])
    assert np.sqrt(np.mean((squared.predict(rows) - truth) ** 2)) < 0.3 * truth.std()
    lower, upper = squared.predict_interval(rows, 0.95)
    assert ((lower < truth) & (upper > truth)).mean() > 0.85
    assert len(squared.n_inducing_) == len(squared.alpha_) == len(squared.frontier_) == 2
    assert squared.n_inducing_[0] > squared.n_inducing_[1]
    assert {points.shape[1] for points in squared.inducing_points_} == {1}
    assert squared.noise_.shape == (2,)
    assert not hasattr(squared, "rho_")
    assert not hasattr(squared, "mixing_")
    with pytest.raises(InputError, match="need `relation='linear'`"):
        _ = squared.rho_


def test_conditioned_chain_learns_from_any_fidelity(squared: MultiFidelityGPRegressor) -> None:
    rows = np.array([[0.11, 0.0], [0.11, 1.0]])
    mean, sd = squared.predict(rows, return_std=True)
    low = squared.condition_on(rows[:1], mean[:1] + 0.5).predict(rows)
    assert low[0] > mean[0] + 1e-3
    assert abs(low[1] - mean[1]) > 1e-4  # through the relation
    high = squared.condition_on(rows[1:], mean[1:] + sd[1:]).predict(rows)
    assert high[0] == mean[0]
    assert mean[1] < high[1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"relation": "square"}, "`relation` must be 'auto', 'linear' or 'nonlinear'"),
        ({"hyper": "none"}, "`hyper` must be"),
        ({"kernel": RBFKernel()}, "must be a string such as 'rbf' for `relation='nonlinear'`"),
        ({"widths": [1]}, "`widths` are for `relation='linear'`"),
    ],
)
def test_wrong_parameters_are_refused(settings: dict[str, Any], message: str) -> None:
    X = np.column_stack([INPUTS, INPUTS, LEVELS])
    model = MultiFidelityGPRegressor(relation="nonlinear").set_params(**settings)
    with pytest.raises(InputError, match=message):
        model.fit(X, CURVE)


@pytest.mark.usefixtures("quickly")
@pytest.mark.parametrize("name", ["averaged", "squared"])
def test_batches_of_any_fidelity_are_learnt(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    model = copy(request.getfixturevalue(name))
    level, x = np.tile(model.fidelities_, 12), np.linspace(1.0, 1.2, 24)
    low, x_high = np.sin(8 * np.pi * x), x - np.sqrt(2)
    rows, y = np.column_stack([x, level]), np.where(level > 0, 10 + 3 * x_high * low**2, low)
    if name == "averaged":
        rows = pd.DataFrame({"level": level, "x": x})
        y = np.where(level > 0, 2.0, 1.0) * np.sin(9 * x) + np.where(level > 0, x, 0.0)
    before, sizes = model.log_density(rows, y), model.n_inducing_
    model.partial_fit(rows, y)
    assert sum(model.n_inducing_) > sum(sizes)
    assert np.mean(model.log_density(rows, y)) > np.mean(before) + 1
    high = level > 0
    assert np.sqrt(np.mean((model.predict(rows) - y)[high] ** 2)) < 0.3 * y[high].std()
    again = load(model.save(tmp_path / "model.winnow"))
    np.testing.assert_allclose(again.predict(rows), model.predict(rows), rtol=1e-10, atol=1e-12)


def test_batches_of_both_fidelities_give_the_dense_posterior(
    point: MultiFidelityGPRegressor,
) -> None:
    """The exact GP of all rows at the hyper-parameters of the first fit."""
    model = copy(point).set_params(tolerance=1e-5)
    x = np.linspace(1.0, 1.3, 8)
    rows = pd.DataFrame({"level": np.tile([0.0, 2.5], 4), "x": x})
    model.partial_fit(rows, np.sin(9 * x))
    everything = pd.concat([FIDELITIES, rows])
    y = np.concatenate([CURVE, np.sin(9 * x)])
    mode: Any = point._processes
    inputs, level = model._process_inputs(everything), (everything["level"] > 0).to_numpy()
    W = mode.mixing[level.astype(int)]
    K = sum(
        torch.outer(W[:, q], W[:, q]) * kernel(inputs).to_dense()
        for q, kernel in enumerate(mode.kernels)
    )
    z = model._y_scaler.columns.forward(torch.from_numpy(y)[:, None])
    noise = mode.likelihood.noise[level.astype(int)]
    mean = (K @ torch.linalg.solve(K + torch.diag(noise), z)).detach()
    exact = model._y_scaler.values(mean)
    np.testing.assert_allclose(model.predict(everything), exact, atol=0.02)
    # The first fit knows nothing of the second batch.
    assert np.abs(point.predict(everything) - exact).max() > 0.2


def test_member_weights_after_a_batch_are_those_of_its_density(
    averaged: MultiFidelityGPRegressor,
) -> None:
    """Rows at inducing points of all members need no more points, and weigh as in conditioning."""
    Z = averaged.inducing_points_[1][:2, 0]
    rows = pd.DataFrame({"level": 2.5, "x": Z})
    y = averaged.predict(rows) + 0.05
    updated = copy(averaged).partial_fit(rows, y)
    conditioned = averaged.condition_on(rows, y)
    np.testing.assert_allclose(
        updated.posterior_.component_weights, conditioned.posterior_.component_weights, atol=0.05
    )


@pytest.mark.usefixtures("quickly")
def test_auto_keeps_the_relation_with_the_higher_elbo(
    point: MultiFidelityGPRegressor, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"fidelity": "level", "hyper": "point", "random_state": 0}
    auto = MultiFidelityGPRegressor(checkpoint=tmp_path / "fit", **settings).fit(FIDELITIES, CURVE)
    assert auto.relation_ == "linear"
    assert auto.elbo_ == point.elbo_
    np.testing.assert_allclose(
        auto.predict(FIDELITIES), point.predict(FIDELITIES), rtol=1e-10, atol=1e-12
    )
    assert {path.name for path in (tmp_path / "fit").iterdir()} == {"linear", "nonlinear"}
    assert load(auto.save(tmp_path / "model.winnow")).relation_ == "linear"
    rows, y = squared_rows()
    other = MultiFidelityGPRegressor(hyper="point", tolerance=0.1, random_state=0).fit(rows, y)
    assert other.relation_ == "nonlinear"
    boxes = MultiFidelityGPRegressor(widths=[1], hyper="point", tolerance=0.5, n_candidates=6)
    rows = np.column_stack([INPUTS, 0.1 * np.ones(36), LEVELS])[::3]
    assert boxes.fit(rows, CURVE[::3]).relation_ == "linear"


@pytest.mark.usefixtures("quickly")
def test_elbo_of_a_chain_is_in_the_units_of_all_targets() -> None:
    """The dense evidence of all fidelities, of targets that were standardised together."""
    rows = np.column_stack([INPUTS, LEVELS])
    model = MultiFidelityGPRegressor(relation="nonlinear", hyper="point", random_state=0)
    model.fit(rows, CURVE)
    scaler = model._y_scaler.columns
    z = scaler.forward(torch.from_numpy(CURVE)[:, None])
    inputs = model._process_inputs(rows)
    total = 0.0
    for t, (mode, level) in enumerate(zip(model.posterior_.modes, (0.0, 2.5), strict=True)):
        own = torch.from_numpy(level == LEVELS)
        X = chain_inputs(model.posterior_.functions[:t], inputs[own])
        y = ((z[own] - model.posterior_.shift[t]) / model.posterior_.scale[t])[:, 0]
        cov = mode.kernels[0](X).to_dense() + mode.likelihood.noise * torch.eye(len(X))
        dense = torch.distributions.MultivariateNormal(torch.zeros(len(X)).double(), cov)
        # The density of z rather than of the targets that were standardised once more.
        total += dense.log_prob(y).item() - len(y) * model.posterior_.scale[t].log().item()
    assert model.evidence_.lower == pytest.approx(total, abs=1e-3)
    assert total - model.elbo_ == pytest.approx(0.0, abs=0.05 * len(z))
    assert model.elbo_ <= total + 1e-6


@pytest.mark.parametrize(("gain", "kept"), [(5.0, "linear"), (6.0, "nonlinear")])
def test_auto_charges_half_a_log_of_the_rows_per_hyperparameter(
    gain: float, kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three more hyper-parameters and 36 rows: 5.4 nats."""
    model: Any = MultiFidelityGPRegressor()

    def fit(relation: str, count: int, elbo: float) -> Any:
        def fake(data: Any, params: Any, *_levels: Any) -> None:
            assert params.relation == relation
            params.hyperparameters += count
            model.elbo_, model.kept = elbo, relation

        return fake

    monkeypatch.setattr(model, "_fit_joint", fit("linear", 7, 1.0), raising=False)
    monkeypatch.setattr(model, "_fit_chain", fit("nonlinear", 10, 1.0 + gain), raising=False)
    rows = Dataset.of(torch.from_numpy(INPUTS)[:, None], torch.from_numpy(CURVE))
    params = Parameters(relation="auto", checkpoint=None, hyperparameters=0)
    model._fit_better(rows, params, torch.tensor([0.0, 2.5]), torch.zeros(36))
    assert model.kept == kept
