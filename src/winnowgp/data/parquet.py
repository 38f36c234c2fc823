"""Rows in Parquet files, one row group after another; needs pyarrow."""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray

from winnowgp.data.dataset import Dataset
from winnowgp.data.out_of_core import StreamedSource
from winnowgp.data.readers import ParquetFile
from winnowgp.data.tables import Origin
from winnowgp.errors import InputError

# Rows decoded at once, however large a row group is, and numbers: fewer rows of wide tables.
_BATCH, _NUMBERS = 8192, 2**23


@dataclass(frozen=True, slots=True)
class _Part:
    """One file, and where its rows are among those of all files."""

    path: Path
    before: int
    group_ends: tuple[int, ...]
    stamp: tuple[int, int]
    """Bytes, and when it was written: passes over a file that changes would not agree."""

    @property
    def stop(self) -> int:
        return self.before + self.group_ends[-1]


@final
class ParquetSource(StreamedSource):
    """A file, or all files below a folder in the order of their paths, as one table of numbers.

    At first only the footers are read; a pass reads the columns asked for, some rows of one row
    group at a time. Whole numbers, decimals and booleans become floats. Words in the names of
    folders (`year=2024/`) are not columns.

    Args:
        path: a file or a folder; what begins with a dot or an underscore in it is passed over.
        targets: names of the columns to predict, or the name of one.
        inputs: the same of those to predict from; all others if None.
        dtype: of the tensors that rows become.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        targets: str | Sequence[str],
        inputs: str | Sequence[str] | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        files = _files(Path(path))
        self.targets, self._dtype = _names(targets), dtype
        if inputs is None:
            with ParquetFile(files[0]) as file:
                inputs = [name for name in file.schema.names if name not in self.targets]
        self.inputs = _names(inputs)
        _check_choice(self.inputs, self.targets)
        self._parts: list[_Part] = []
        for name in files:
            stamp = _stamp(name)
            with ParquetFile(name) as file:
                _check_columns(file, [*self.inputs, *self.targets])
                before = self._parts[-1].stop if self._parts else 0
                if any(file.group_ends):
                    self._parts.append(_Part(name, before, file.group_ends, stamp))
        if not self._parts:
            raise InputError(f"{path} has no rows; a fit needs at least one.")

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    @property
    def names(self) -> tuple[str, ...]:
        return self.inputs

    @property
    def N(self) -> int:
        return self._parts[-1].stop

    @property
    def D(self) -> int:
        return len(self.inputs)

    @property
    def P(self) -> int:
        return len(self.targets)

    def between(self, start: int, stop: int) -> Iterator[Dataset]:
        for part in self._parts:
            if part.before < stop and start < part.stop:
                yield from self._rows(part, start - part.before, stop - part.before)

    def _rows(self, part: _Part, start: int, stop: int) -> Iterator[Dataset]:
        """Those of one file; row groups that hold none of them are not touched."""
        columns = [*self.inputs, *self.targets]
        size = max(1, min(_BATCH, _NUMBERS // len(columns)))
        if _stamp(part.path) != part.stamp:
            raise InputError(
                f"{part.path} has changed since it was opened; passes over it must agree. Open it "
                "again, and leave it alone until the fit has ended."
            )
        with ParquetFile(part.path) as file:
            first = 0
            for group, end in enumerate(part.group_ends):
                if first < stop and start < end:
                    row = first
                    for batch in file.batches(group, size, columns=columns):
                        skipped = min(max(start - row, 0), batch.num_rows)
                        wanted = batch.slice(skipped, max(stop - row - skipped, 0))
                        if wanted.num_rows:
                            yield self._dataset(wanted, part, row + skipped)
                        row += batch.num_rows
                        if row >= stop:
                            return
                first = end

    def _dataset(self, batch: Any, part: _Part, row: int) -> Dataset:
        origin = Origin(row, part.group_ends)
        X, Y = (
            torch.from_numpy(
                np.stack([_numbers(batch, name, part.path, origin) for name in names], axis=1)
            )
            for names in (self.inputs, self.targets)
        )
        X, Y = X.to(self._dtype), Y.to(self._dtype)
        if not bool(torch.isfinite(X).all() and torch.isfinite(Y).all()):
            raise InputError(
                f"{part.path}: some number from {origin.place(0)} on is too large for "
                f"{self._dtype}; use float64, or scale the column."
            )
        return Dataset(X, Y)


def _names(said: str | Sequence[str]) -> tuple[str, ...]:
    return (said,) if isinstance(said, str) else tuple(said)


def _stamp(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}.") from error
    return found.st_size, found.st_mtime_ns


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        if not path.exists():
            raise InputError(f"{path} cannot be read: there is no such file or folder.")
        return [path]
    found = sorted(
        file
        for file in path.rglob("*")
        if file.is_file() and not any(n[0] in "._" for n in file.relative_to(path).parts)
    )
    if not found:
        raise InputError(f"{path} is a folder without files; give one that holds Parquet files.")
    return found


def _check_choice(inputs: tuple[str, ...], targets: tuple[str, ...]) -> None:
    if not inputs or not targets:
        raise InputError(
            f"`inputs` and `targets` must each name a column; got {list(inputs)} and "
            f"{list(targets)}."
        )
    twice = [name for name, count in Counter([*inputs, *targets]).items() if count > 1]
    if twice:
        raise InputError(
            f"a column must be named once in `inputs` and `targets`; got {twice[0]!r} twice."
        )


def _check_columns(file: ParquetFile, names: list[str]) -> None:
    from pyarrow import types

    schema = file.schema
    for name in names:
        found = schema.get_all_field_indices(name)
        if len(found) != 1:
            number = "no column" if not found else "more than one column"
            raise InputError(
                f"{file.path} has {number} {name!r}; its columns are "
                f"{', '.join(map(repr, schema.names[:12]))}."
            )
        kind = schema.field(found[0]).type
        if not any(
            test(kind)
            for test in (types.is_floating, types.is_integer, types.is_decimal, types.is_boolean)
        ):
            raise InputError(
                f"{file.path}: column {name!r} holds {kind}; a source takes numbers. Leave it "
                "out of `inputs`, or encode it first."
            )


def _numbers(batch: Any, name: str, path: Path, origin: Origin) -> NDArray[np.float64]:
    """A column as float64; an error where it is empty or not finite."""
    import pyarrow

    column = batch.column(name)
    # Nulls become NaN.
    values = column.cast(pyarrow.float64(), safe=False).to_numpy(zero_copy_only=False)
    bad = ~np.isfinite(values)
    if bad.any():
        row = int(bad.argmax())
        found = column[row].as_py()
        raise InputError(
            f"{path}: column {name!r} has {'no value' if found is None else found} in "
            f"{origin.place(row)}; numbers must be finite. Mend that row, or leave it out."
        )
    return values
