"""Estimators fitted to sources, against the same estimator fitted to arrays."""

from copy import copy
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from numpy.typing import NDArray

from helpers.short_fits import short_fits, shortest_fits
from winnowgp import SparseGPRegressor
from winnowgp.data import ArraySource, BatchSource, Dataset, ParquetSource, Source, shard
from winnowgp.errors import InputError
from winnowgp.models import MixturePosterior


def table(N: int = 120, P: int = 1) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    rng = np.random.default_rng(0)
    X = rng.uniform(-3, 3, (N, 2)) * [1, 100] + [0, 1000]
    y = np.sin(X[:, :1]) + 0.004 * X[:, 1:] @ np.ones((1, P)) + 0.1 * rng.standard_normal((N, P))
    return X, 50 * y


def regressor(**more: Any) -> SparseGPRegressor:
    settings: dict[str, Any] = {"kernel": "rbf", "n_candidates": 20, "random_state": 0} | more
    return SparseGPRegressor(**settings)


def sources(tmp_path: Path) -> dict[str, Source]:
    import pyarrow
    import pyarrow.parquet

    X, y = table()
    columns = {"a": X[:, 0], "b": X[:, 1], "y": y[:, 0]}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "t.parquet", row_group_size=35)
    pieces = [(X[i : i + 50], y[i : i + 50]) for i in range(0, 120, 50)]
    held = Dataset.of(torch.from_numpy(X), torch.from_numpy(y))
    return {
        "dataset": held,
        "array": ArraySource(X, y[:, 0]),
        "parquet": ParquetSource(tmp_path / "t.parquet", targets=["y"]),
        "batches": BatchSource(lambda: iter(pieces)),
        "shared": shard(held),
        "shared parquet": shard(ParquetSource(tmp_path / "t.parquet", targets=["y"])),
    }


@pytest.fixture(scope="module")
def expected() -> SparseGPRegressor:
    X, y = table()
    with short_fits():
        return regressor().fit(X, y[:, 0])


@pytest.mark.parametrize(
    "kind", ["dataset", "array", "parquet", "batches", "shared", "shared parquet"]
)
@pytest.mark.usefixtures("quickly")
@pytest.mark.unchecked
def test_fit_of_a_source_equals_fit_of_its_rows(
    kind: str, expected: SparseGPRegressor, tmp_path: Path
) -> None:
    found = regressor().fit(sources(tmp_path)[kind])
    if kind.startswith("shared"):
        # Rows that processes share are not held out, and a constant has no weight then.
        expected, mixture = copy(expected), expected.posterior_
        assert isinstance(mixture, MixturePosterior)
        expected.posterior_ = MixturePosterior(mixture.members[:-1], mode=mixture.mode)
    assert found.n_inducing_ == expected.n_inducing_
    assert found.elbo_ == pytest.approx(expected.elbo_, abs=1e-3)
    X, y = table()
    named = pandas.DataFrame(X, columns=["a", "b"]) if "parquet" in kind else X
    for ours, theirs in zip(
        found.predict(named, return_std=True), expected.predict(X, return_std=True), strict=True
    ):
        assert ours.shape == (120,)
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=0.02)
    assert found.score(named, y[:, 0]) > 0.9


@pytest.mark.usefixtures("quickly")
@pytest.mark.unchecked
def test_several_targets_and_mixed_precision() -> None:
    X, y = table(30, P=2)
    double, mixed = (
        regressor(precision=p, n_candidates=30, hyper="point").fit(ArraySource(X, y))
        for p in ("double", "mixed")
    )
    assert double.predict(X).shape == (30, 2)
    # Both are within the tolerance of the same evidence, of 60 observations.
    assert mixed.elbo_ == pytest.approx(double.elbo_, abs=0.005 * 60)


def test_targets_beside_a_source_are_refused() -> None:
    X, y = table()
    with pytest.raises(InputError, match="leave out `y`"):
        regressor().fit(ArraySource(X, y), y)


def test_fit_that_needs_all_rows_refuses_a_source_on_disk() -> None:
    X, y = table()
    with pytest.raises(InputError, match=r"needs all 120 rows in memory at once"):
        regressor(likelihood="student-t").fit(ArraySource(X, y[:, 0]))


def test_invalid_precision_is_refused() -> None:
    X, y = table(20)
    with pytest.raises(InputError, match="`precision` must be"):
        regressor(precision="half").fit(X, y[:, 0])
    with pytest.raises(InputError, match="unless noise is Gaussian"):
        regressor(precision="mixed", likelihood="student-t").fit(X, y[:, 0])


@pytest.mark.parametrize("N", [120, 1000])
@pytest.mark.usefixtures("quickly")
@pytest.mark.unchecked
def test_constant_column_does_not_change_the_fit(N: int) -> None:
    X, y = table(N)
    X = np.column_stack([X, np.full(N, 273.15)])
    found = regressor(inducing_points=X[:3], n_candidates=None).fit(ArraySource(X, y[:, 0]))
    near = X.copy()
    near[:, 2] = np.float32(273.15)
    np.testing.assert_allclose(found.predict(near), found.predict(X), rtol=1e-3)


@pytest.mark.usefixtures("quickly")
@pytest.mark.unchecked
def test_fit_of_float32_rows_predicts() -> None:
    X, y = table()
    single = ArraySource(X.astype(np.float32), y[:, 0], dtype=torch.float32)
    found = regressor(max_points=4, candidates=X[:30]).fit(single)
    assert found.predict(X).dtype == np.float64
    assert found.score(X, y[:, 0]) > 0.8


@pytest.mark.unchecked
def test_feature_names_are_those_of_the_last_fit(tmp_path: Path) -> None:
    X, y = table(30)
    frame = pandas.DataFrame(X, columns=["u", "v"])
    model = regressor(max_points=1)
    with shortest_fits():
        model.fit(frame, y[:, 0])
        model.fit(ArraySource(X[:, :1], y[:, 0]))
        assert not hasattr(model, "feature_names_in_")
        model.fit(sources(tmp_path)["shared parquet"])
    assert list(model.feature_names_in_) == ["a", "b"]
