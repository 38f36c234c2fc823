"""Importance by permutation, grids of effect curves, and terms of a sum kernel."""

from typing import Any

import numpy as np
import pytest
import torch

from helpers.short_fits import shortest_fits
from winnowgp import DataTable, TabularModel, fit_table
from winnowgp.errors import InputError
from winnowgp.estimators.kernels import kernel_from
from winnowgp.models.kernels import covariance
from winnowgp.tabular import column_effect, permutation_importance
from winnowgp.tabular.effects import relevances, resolution

pytestmark = pytest.mark.filterwarnings("ignore::winnowgp.errors.RandomSplitWarning")

DAYS = 40


def series() -> DataTable:
    """An hourly series of 40 days with a trend and a daily cycle."""
    rng = np.random.default_rng(0)
    hours = np.sort(rng.choice(24 * DAYS, 150, replace=False))
    start = np.datetime64("2024-03-01T00")
    t, u = hours / 24, rng.normal(size=len(hours))
    y = 0.05 * t + np.sin(2 * np.pi * t) + 0.1 * rng.normal(size=len(t))
    when = [str(start + np.timedelta64(int(h), "h")) for h in hours]
    return DataTable.of({"when": when, "u": u, "y": y})


@pytest.fixture(scope="module")
def model() -> TabularModel:
    kernel = "rbf['when'] + periodic['when'](period=1) + linear['u']"
    with shortest_fits():
        return fit_table(series(), "y", kernel=kernel, max_points=10)


@pytest.fixture(scope="module")
def classes() -> tuple[TabularModel, DataTable]:
    rng = np.random.default_rng(1)
    x, town = rng.uniform(-1, 1, 70), rng.choice(["a", "b", "c"], 70)
    label = np.where(x + 0.2 * rng.normal(size=70) > 0, "yes", "no")
    table = DataTable.of({"x": x, "town": town, "label": label})
    with shortest_fits():
        return fit_table(table, "label", kernel="rbf", max_points=4), table


def test_importance_is_the_loss_of_a_permuted_column(model: TabularModel) -> None:
    """Against a loop over permutations of the column."""
    table = series().part(np.arange(60))
    found = permutation_importance(model, table, repeats=3, seed=4)
    assert found["measure"] == "R²"
    assert [c["column"] for c in found["columns"]] == ["when", "u"]
    X, y = model.encoder.encode(table), table.numbers("y")
    assert y is not None
    rng = np.random.default_rng(4)
    rows = rng.permutation(60)
    X, y = X[rows], y[rows]
    losses = {}
    for number, name in enumerate(("when", "u")):
        total = np.zeros(60)
        for _ in range(3):
            other = X.copy()
            other[:, number] = X[rng.permutation(60), number]
            total += (model.estimator.predict(other) - y) ** 2
        loss = (total / 3 - (model.estimator.predict(X) - y) ** 2) / y.var()
        losses[name] = loss.mean(), loss.std(ddof=1) / np.sqrt(60)
    for column in found["columns"]:
        expected = losses[column["column"]]
        assert (column["loss"], column["standard_error"]) == pytest.approx(expected)


def test_importance_of_an_irrelevant_column_is_within_its_error(
    model: TabularModel, classes: tuple[TabularModel, DataTable]
) -> None:
    held_out = model.summary["importance"]
    assert held_out is not None
    when, u = held_out["columns"]
    assert when["loss"] > 5 * when["standard_error"]
    assert abs(u["loss"]) < 3 * u["standard_error"] + 1e-3
    fitted, table = classes
    found = permutation_importance(fitted, table)
    assert found["measure"].startswith("log probability")
    assert found["columns"][0]["column"] == "x"
    assert found["columns"][0]["loss"] > 0.3


def test_importance_needs_the_target(model: TabularModel) -> None:
    with pytest.raises(InputError, match="'y'"):
        permutation_importance(model, series().without(["y"]))


def test_effect_grid_resolves_the_shortest_period(model: TabularModel) -> None:
    effect = model.summary["effects"][0]
    at, mean = np.array(effect["at"], dtype=float), np.array(effect["curves"][0]["mean"])
    assert effect["column"] == "when"
    assert np.diff(at).max() < 1 / 12
    # Every day has a cycle of about ± 1, instead of a beat.
    for day in range(int(at[0]) + 1, int(at[-1]) - 1):
        assert np.ptp(mean[(at >= day) & (at < day + 1)]) > 1.2


def test_effect_grid_follows_lengthscales_and_periods() -> None:
    kernel = kernel_from("rbf[0] + periodic[1] + linear", 2)
    for component in kernel.modules():
        if hasattr(component, "period_length"):
            component.period_length = torch.tensor([0.1])
            component.lengthscale = torch.tensor(100.0)
    assert resolution(kernel, 0, 2, 3.0) == pytest.approx((3 / 6, None))
    assert resolution(kernel, 1, 2, 3.0) == pytest.approx((0.3 / 16, 0.3))
    assert resolution(kernel_from("linear", 2), 0, 2, 1.0) == (np.inf, None)


def test_effect_of_many_periods_shows_the_last_ones(model: TabularModel) -> None:
    low = model.summary["columns"][0]["spread"][0]
    effect = column_effect(model, "when", between=(low, low + 4000))
    at = np.array(effect["at"], dtype=float)
    assert len(at) <= 1001
    assert np.diff(at).max() < 1 / 12
    assert at[-1] == pytest.approx(low + 4000)
    assert "of 4000 days are shown" in effect["note"]


def test_effects_have_the_density_of_the_table(model: TabularModel) -> None:
    for effect in model.summary["effects"]:
        # Curves end at the 1st and the 99th percentile.
        assert 0.97 * series().N <= sum(effect["counts"]) <= series().N


def test_categories_have_their_numbers_of_rows(
    classes: tuple[TabularModel, DataTable],
) -> None:
    fitted, table = classes
    (effect,) = [e for e in fitted.summary["effects"] if e["column"] == "town"]
    towns = table.strings("town").tolist()
    assert effect["counts"] == [towns.count(town) for town in effect["at"]]


def test_terms_add_up_to_the_latent_function_and_equal_dense_algebra(model: TabularModel) -> None:
    """With dense matrices, E f_j = k_j K⁻¹ m and cov f_j = k_j(x, x') − k_j K⁻¹ (K − S) K⁻¹ k_j',
    both after the projection H = I − 11ᵀ/n off the average."""
    terms = {(e["term"], e["column"]): e for e in model.summary["terms"]}
    names = ["rbf[when]", "periodic[when](period=1)", "linear[u]"]
    assert list(terms) == [(names[0], "when"), (names[1], "when"), (names[2], "u")]
    estimator: Any = model.estimator
    q, scale = estimator.posterior_, estimator._y_scaler.columns.scale.item()
    K = covariance(q.kernel, q.Z, q.Z)
    m, S = q.L @ q.q_mean[:, 0], q.L @ q.q_factor[0] @ q.q_factor[0].mT @ q.L.mT
    u = float(model.encoder.columns[1].typical)
    for name, kernel in zip(names[:2], q.kernel.kernels, strict=False):
        effect = terms[name, "when"]
        at = np.array(effect["at"], dtype=float)
        X = estimator._inputs(np.stack([at, np.full_like(at, u)], 1))
        k = covariance(kernel, q.Z, X)
        solved = torch.linalg.solve(K, k)
        H = torch.eye(len(at)).double() - 1 / len(at)
        mean = scale * (H @ solved.mT @ m)
        C = covariance(kernel, X, X) - solved.mT @ (K - S) @ solved
        variance = (H @ C @ H).diagonal()
        curve = effect["curves"][0]
        np.testing.assert_allclose(curve["mean"], mean, atol=1e-3)
        width = 4 * scale * variance.clamp_min(0).sqrt()
        np.testing.assert_allclose(
            np.subtract(curve["upper"], curve["lower"]), width, rtol=1e-2, atol=5e-3
        )
    X = estimator._inputs(np.array([[19800.3, 0.4]]))
    parts = torch.stack([covariance(kernel, X, q.Z) @ q.weights for kernel in q.kernel.kernels])
    whole = q.predict_mean(X) - q.mean(X)[:, None]
    assert parts.sum().item() == pytest.approx(whole.item())


def test_kernel_of_one_term_has_no_terms(classes: tuple[TabularModel, DataTable]) -> None:
    assert classes[0].summary["terms"] == []


def test_effect_of_an_unknown_column_is_refused(model: TabularModel) -> None:
    with pytest.raises(InputError, match="They are 'when', 'u'"):
        column_effect(model, "where")


def test_relevance_leaves_out_terms_of_negligible_variance(
    classes: tuple[TabularModel, DataTable], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = classes
    kernel: Any = kernel_from("rbf + matern52", len(model.encoder.features))
    smooth, rough = kernel.kernels
    smooth.base_kernel.lengthscale, rough.base_kernel.lengthscale = 2.0, 0.1
    smooth.outputscale, rough.outputscale = 1.0, 1e-6
    monkeypatch.setattr(model.estimator, "kernel_", kernel)
    assert relevances(model.estimator, model.encoder) == pytest.approx({"x": 0.5, "town": 0.5})
    rough.outputscale = 0.01
    assert relevances(model.estimator, model.encoder) == pytest.approx({"x": 10.0, "town": 10.0})
