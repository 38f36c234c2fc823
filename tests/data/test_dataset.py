"""Data sets in memory, and matrices with missing entries."""

import pytest
import torch

from winnowgp.data import Dataset, MaskedMatrix
from winnowgp.errors import InputError

X = torch.zeros(3, 2, dtype=torch.float64)
y = torch.zeros(3, dtype=torch.float64)
NAN = float("nan")


def test_dataset_one_target_becomes_a_column() -> None:
    data = Dataset.of(X, y)
    assert (data.N, data.D, data.P) == (3, 2, 1)


@pytest.mark.parametrize(
    ("inputs", "targets", "message"),
    [
        (X[0], y, r"\[N D\]"),
        (X, y[:2], "3 rows and `y` has 2"),
        (X[:0], y[:0], "no rows"),
        (X, y.float(), "share a float dtype"),
        (X / 0, y, "`X` has 6 entries"),
        (X, y + float("inf"), "`y` has 3 entries"),
    ],
)
def test_dataset_invalid_data_raise_input_error(inputs, targets, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Dataset.of(inputs, targets)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (y[:2] + 1, r"one torch.float64 number per row, \[3\]"),
        (y.float() + 1, "got torch.float32"),
        (y, "must be positive and finite"),
        (y + float("inf"), "must be positive and finite"),
    ],
)
def test_dataset_invalid_weights_raise_input_error(weights, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Dataset.of(X, y, weights=weights)


def test_dataset_joined_keeps_rows_and_weights_in_order() -> None:
    rows = torch.arange(5, dtype=torch.float64)
    for weights in (None, rows + 1):
        data = Dataset.of(rows[:, None], rows, weights=weights)
        joined = Dataset.joined([data.part(slice(2)), data.part(slice(2, None))])
        assert torch.equal(joined.X, data.X)
        assert torch.equal(joined.Y, data.Y)
        assert (joined.weights is None) == (weights is None)
        if weights is not None and joined.weights is not None:
            assert torch.equal(joined.weights, weights)


def test_dataset_merged_does_not_depend_on_the_order_of_rows() -> None:
    rows = torch.tensor([[2.0, 1.0, 5.0], [0.0, 0.0, 1.0], [2.0, 1.0, 6.0]]).double()
    times = torch.tensor([1, 3, 2])
    repeated = rows.repeat_interleave(times, 0)[[4, 0, 2, 5, 1, 3]]
    merged = Dataset.of(repeated[:, :2], repeated[:, 2:]).merged()
    weighted = Dataset.of(rows[:, :2], rows[:, 2:], weights=times.double()).merged()
    for result in (merged, weighted):
        assert result.weights is not None
        assert result.observations == 6
        assert result.X.tolist() == [[0, 0], [2, 1], [2, 1]]
        assert result.Y.tolist() == [[1], [5], [6]]
        assert result.weights.tolist() == [3, 1, 2]


def test_dataset_merged_keeps_rows_of_weight_one_in_place() -> None:
    g = torch.Generator().manual_seed(0)
    X = torch.randint(0, 4, (30, 3), generator=g).double().unique(dim=0).flip(0)
    y = torch.zeros(len(X)).double()
    for weights in (None, torch.ones(len(X)).double()):
        result = Dataset.of(X, y, weights=weights).merged()
        assert result.weights is None
        assert torch.equal(result.X, X)
    halves = Dataset.of(X[[0, 0, 1]], y[:3], weights=torch.tensor([0.5, 0.5, 1.0]).double())
    assert halves.merged().weights is None
    assert halves.merged().N == 2


def test_masked_matrix_columns_observed_alike_share_a_pattern() -> None:
    table = MaskedMatrix.of(torch.tensor([[1.0, NAN, 2.0], [3.0, 4.0, 5.0]]))
    patterns, which = table.patterns()
    assert len(patterns) == 2
    assert torch.equal(patterns[which].mT, table.observed)
    assert (table.count, table.complete) == (5, False)
    assert torch.equal(table.rows(torch.tensor([1])).Y, table.Y[1:])


def test_masked_matrix_batches_visit_every_row_once_per_epoch(generator) -> None:
    batches = MaskedMatrix.of(torch.zeros(7, 2)).batches(3, generator=generator)
    assert len({int(i) for _ in range(2) for i in next(batches)}) == 6
    assert len(next(MaskedMatrix.of(torch.zeros(7, 2)).batches(9, generator=generator))) == 7


@pytest.mark.parametrize(
    ("Y", "message"),
    [
        (torch.zeros(3), r"\[N P\]"),
        (torch.zeros(3, 2, dtype=torch.long), "floating-point"),
        (torch.full((2, 2), float("inf")), "4 infinite"),
        (torch.full((2, 2), NAN), "at least one entry"),
    ],
)
def test_masked_matrix_invalid_values_raise_input_error(Y: torch.Tensor, message: str) -> None:
    with pytest.raises(InputError, match=message):
        MaskedMatrix.of(Y)
