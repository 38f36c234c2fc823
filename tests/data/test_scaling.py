"""Means and standard deviations of columns, and sources scaled by them."""

from decimal import Decimal, localcontext
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from helpers.source_problems import RNG, N, X, Y
from helpers.tracked_source import Tracked
from winnowgp.data import ArraySource, Dataset, MaskedMatrix, Standardiser, standardise
from winnowgp.data.scaling import ColumnMoments

COLUMNS = np.stack(
    [
        X[:, 0],
        1e9 + X[:, 1],  # a sum of squares would lose every digit
        1e200 * X[:, 2],  # squares overflow
        1e-200 * X[:, 2],  # squares vanish
        np.linspace(1e-3, 1e3, N) ** 5,  # every part has another magnitude
        np.where(np.arange(N) < 50, 0.0, 1e308),
    ],
    axis=1,
)


def exact_moments(column: Any, weights: Any) -> tuple[float, float]:
    """Mean and standard deviation by definition, in rational numbers."""
    x, w = [Fraction(v) for v in column.tolist()], [Fraction(v) for v in weights.tolist()]
    mean = sum((a * b for a, b in zip(w, x, strict=True)), Fraction()) / sum(w)
    off = sum((a * (b - mean) ** 2 for a, b in zip(w, x, strict=True)), Fraction()) / sum(w)
    with localcontext(prec=60):
        return float(mean), float((Decimal(off.numerator) / Decimal(off.denominator)).sqrt())


@pytest.mark.parametrize("size", [1, 10, N])
@pytest.mark.parametrize("weighted", [False, True])
def test_column_moments_of_merged_parts_are_exact(size: int, weighted: bool) -> None:
    weights = RNG.uniform(0.1, 3, N) if weighted else np.ones(N)
    total = None
    for start in range(0, N, size):
        rows = slice(start, start + size)
        w = torch.tensor(weights[rows]) if weighted else None
        part = ColumnMoments.of(torch.tensor(COLUMNS[rows]), weights=w)
        total = part if total is None else total.merged(part)
    assert total is not None
    for column, mean, sd in zip(COLUMNS.T, total.mean.tolist(), total.sd.tolist(), strict=True):
        true_mean, true_sd = exact_moments(column, weights)
        assert mean == pytest.approx(true_mean, rel=1e-15, abs=1e-14 * true_sd)
        assert sd == pytest.approx(true_sd, rel=1e-13 + 1e-15 * abs(true_mean) / true_sd)


def test_standardiser_weights_count_as_repeated_rows() -> None:
    A = torch.randn(6, 2, generator=torch.Generator().manual_seed(0)).double() * 1e3 + 5
    times = torch.tensor([1, 3, 2, 5, 1, 1])
    scaler = Standardiser.of(A, weights=times.double())
    expected = Standardiser.of(A.repeat_interleave(times, 0))
    torch.testing.assert_close(scaler.shift, expected.shift)
    torch.testing.assert_close(scaler.scale, expected.scale)


def test_standardiser_inverse_restores_the_values() -> None:
    A = torch.randn(50, 3, dtype=torch.float64) * torch.tensor([1.0, 1e6, 1e-6]) + 5
    units = Standardiser.of(A)
    Z = units.forward(A)
    torch.testing.assert_close(Z.mean(0), torch.zeros(3, dtype=A.dtype), atol=1e-8, rtol=0)
    torch.testing.assert_close(Z.std(0, correction=0), torch.ones(3, dtype=A.dtype))
    torch.testing.assert_close(units.inverse(Z), A)


@pytest.mark.parametrize("level", [0.0, 0.1, 1e9])
def test_standardiser_constant_column_is_only_shifted(level: float) -> None:
    A = torch.full((7, 1), level, dtype=torch.float64)
    units = Standardiser.of(A)
    assert units.scale.item() == 1.0
    assert units.forward(A).abs().max() < 1e-6


def test_standardiser_of_entries_ignores_missing_entries() -> None:
    g = torch.Generator().manual_seed(0)
    size = torch.tensor([1.0, 1e200, 1e-200], dtype=torch.float64)
    A = torch.randn(20, 3, generator=g).double() * size
    holed = A.clone()
    holed[::3, 1] = float("nan")
    scaler = Standardiser.of_entries(MaskedMatrix.of(holed))
    for column in range(3):
        observed = A[~holed[:, column].isnan(), column : column + 1]
        expected = Standardiser.of(observed)
        torch.testing.assert_close(
            scaler.shift[column : column + 1], expected.shift, rtol=1e-12, atol=0
        )
        torch.testing.assert_close(
            scaler.scale[column : column + 1], expected.scale, rtol=1e-12, atol=0
        )


def test_standardise_uses_weights_and_shifts_constant_columns() -> None:
    A = np.stack([np.full(N, 0.1), X[:, 0]], axis=1)
    weights = torch.tensor(RNG.uniform(0.5, 2, N))
    data = Dataset.of(torch.tensor(A), torch.tensor(Y), weights=weights)
    scaled = standardise(data)
    direct = Standardiser.of(data.X, weights=weights)
    assert scaled.x_scaler.scale[0] == 1
    assert torch.allclose(scaled.x_scaler.shift, direct.shift, rtol=1e-13)
    assert torch.allclose(scaled.x_scaler.scale, direct.scale, rtol=1e-13)
    chunk = next(scaled.shard(1, 2).chunks(N))
    assert chunk.weights is not None
    assert torch.equal(chunk.weights, weights[51:])


def test_standardise_reads_fewer_rows_of_wide_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("winnowgp.data.scaling._NUMBERS", 5 * (X.shape[1] + 1))
    source = Tracked(Dataset.of(torch.tensor(X), torch.tensor(Y[:, 0])))
    scaled = standardise(source)
    assert source.most <= 2 * 5
    torch.testing.assert_close(scaled.x_scaler.scale, torch.tensor(X).std(0, correction=0))


def test_standardised_source_moves_with_rows_in_memory() -> None:
    meta = torch.device("meta")
    moved = standardise(Dataset.of(torch.tensor(X), torch.tensor(Y))).to(meta)
    part = moved.part(torch.arange(3))
    assert {moved.device, part.X.device, part.Y.device, moved.x_scaler.shift.device} == {meta}
    # Rows of other sources are moved when they are read.
    stays = standardise(ArraySource(X, Y)).to(meta)
    assert next(stays.chunks(3)).X.device.type == stays.device.type == "cpu"
