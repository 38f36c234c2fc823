import pytest
import torch

from winnowgp.data import MaskedMatrix
from winnowgp.errors import InputError

NAN = float("nan")


def test_columns_observed_in_the_same_rows_share_a_pattern() -> None:
    table = MaskedMatrix.of(torch.tensor([[1.0, NAN, 2.0], [3.0, 4.0, 5.0]]))
    patterns, which = table.patterns()
    assert len(patterns) == 2
    assert torch.equal(patterns[which].mT, table.observed)
    assert (table.count, table.complete) == (5, False)
    assert torch.equal(table.rows(torch.tensor([1])).Y, table.Y[1:])


def test_batches_see_every_row_once_before_any_twice(generator) -> None:
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
def test_tables_that_cannot_be_used_are_refused(Y: torch.Tensor, message: str) -> None:
    with pytest.raises(InputError, match=message):
        MaskedMatrix.of(Y)
