"""Where a block of rows stands in its file."""

from bisect import bisect_right
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Origin:
    """How to name the rows of a block as a reader of the whole file would.

    >>> Origin(before=100).place(0)
    'row 101'
    >>> Origin(before=100, groups=(60, 120)).place(0)
    'row 101 (row group 1, counted from 0)'
    """

    before: int
    """Rows of the file that come first."""
    groups: tuple[int, ...] = ()
    """Of a Parquet file: rows up to the end of each row group."""

    def place(self, row: int) -> str:
        """Words for a row of the block, counted from 0: its number in the file, from 1."""
        row += self.before
        group = f" (row group {bisect_right(self.groups, row)}, counted from 0)"
        return f"row {row + 1}{group if self.groups else ''}"

    def after(self, rows: int) -> "Origin":
        """Of what is left when the block's first rows are taken away."""
        return Origin(self.before + rows, self.groups)
