"""Mean and spread of columns in one pass, against exact fractions."""

from decimal import Decimal, localcontext
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from helpers.source_problems import RNG, N, X, Y
from winnowgp.data import Dataset, Standardiser, standardise
from winnowgp.data.scaling import ColumnMoments


def exact_moments(column: Any, weights: Any) -> tuple[float, float]:
    """Mean and standard deviation by definition, in rational numbers."""
    x, w = [Fraction(v) for v in column.tolist()], [Fraction(v) for v in weights.tolist()]
    mean = sum((a * b for a, b in zip(w, x, strict=True)), Fraction()) / sum(w)
    off = sum((a * (b - mean) ** 2 for a, b in zip(w, x, strict=True)), Fraction()) / sum(w)
    with localcontext(prec=60):
        return float(mean), float((Decimal(off.numerator) / Decimal(off.denominator)).sqrt())


COLUMNS = np.stack(
    [
        X[:, 0],
        1e9 + X[:, 1],  # sums of squares would lose every digit of it
        1e200 * X[:, 2],  # squares overflow
        1e-200 * X[:, 2],  # squares vanish
        np.linspace(1e-3, 1e3, N) ** 5,  # every part has another size
        np.where(np.arange(N) < 50, 0.0, 1e308),
    ],
    axis=1,
)


@pytest.mark.parametrize("size", [1, 10, N])
@pytest.mark.parametrize("weighted", [False, True])
def test_moments_of_parts_are_those_of_the_whole(size: int, weighted: bool) -> None:
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


def test_a_constant_column_is_only_shifted_and_weights_count() -> None:
    A = np.stack([np.full(N, 0.1), X[:, 0]], axis=1)
    weights = torch.tensor(RNG.uniform(0.5, 2, N))
    data = Dataset.of(torch.tensor(A), torch.tensor(Y), weights=weights)
    found = standardise(data)
    direct = Standardiser.of(data.X, weights=weights)
    assert found.x_scaler.scale[0] == 1
    assert torch.allclose(found.x_scaler.shift, direct.shift, rtol=1e-13)
    assert torch.allclose(found.x_scaler.scale, direct.scale, rtol=1e-13)
    chunk = next(found.shard(1, 2).chunks(N))
    assert chunk.weights is not None
    assert torch.equal(chunk.weights, weights[51:])
