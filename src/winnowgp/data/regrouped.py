"""Blocks of rows of one size, whatever size they came in."""

from collections.abc import Iterable, Iterator

from winnowgp.data.columns import Columns


def regrouped(blocks: Iterable[Columns], size: int) -> Iterator[Columns]:
    """The same rows in the same order, `size` at a time and what is left at the end.

    Holds fewer than `size` rows and one block.

    >>> parts = [Columns.of({"a": [1, 2]}), Columns.of({"a": [3, 4, 5]})]
    >>> [block.numbers("a").tolist() for block in regrouped(parts, 2)]
    [[1.0, 2.0], [3.0, 4.0], [5.0]]
    """
    held: list[Columns] = []
    count = 0
    for block in blocks:
        held.append(block)
        count += block.N
        if count < size:
            continue
        joined, full = Columns.joined(held), count - count % size
        held, count = [joined.between(full, count)] if count > full else [], count - full
        for start in range(0, full, size):
            yield joined.between(start, start + size)
    if held:
        yield Columns.joined(held)
