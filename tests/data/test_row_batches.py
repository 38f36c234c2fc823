from itertools import islice

import pytest
import torch

from winnowgp.data.sources import RowBatches


def test_batches_are_disjoint_until_too_few_rows_are_left(generator) -> None:
    batches = list(islice(RowBatches(10, 3, generator=generator), 30))
    assert all(len(rows) == 3 for rows in batches)
    for i in range(0, 30, 3):
        assert len(torch.cat(batches[i : i + 3]).unique()) == 9


def test_every_row_comes_equally_often(generator) -> None:
    draws = 3000
    batches = islice(RowBatches(10, 3, generator=generator), draws)
    counts = torch.cat(list(batches)).bincount(minlength=10)
    # Each count is binomial with p = 3/10 at the most; six standard deviations.
    expected, sd = draws * 0.3, (draws * 0.3 * 0.7) ** 0.5
    assert ((counts - expected).abs() < 6 * sd).all()


def test_all_rows_in_order_when_there_are_no_more(generator) -> None:
    before = generator.get_state()
    assert next(RowBatches(4, 9, generator=generator)).tolist() == [0, 1, 2, 3]
    assert torch.equal(generator.get_state(), before)


@pytest.mark.parametrize("seen", range(5))
def test_a_second_iterator_goes_on_where_the_first_one_stands(generator, seen: int) -> None:
    first = RowBatches(10, 3, generator=generator)
    for _ in range(seen):
        next(first)
    state = {
        k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in first.state_dict().items()
    }
    randomness = generator.get_state()
    expected = torch.stack(list(islice(first, 7)))
    other = torch.Generator()
    other.set_state(randomness)
    second = RowBatches(10, 3, generator=other)
    second.load_state_dict(state)
    assert torch.equal(torch.stack(list(islice(second, 7))), expected)
