"""Parquet files as sources of numbers, read in batches of rows; needs pyarrow."""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray

from winnowgp.data.dataset import Dataset, SourceInfo
from winnowgp.data.out_of_core import StreamedSource
from winnowgp.data.readers import ParquetFile
from winnowgp.data.tables import Origin
from winnowgp.errors import InputError

# Largest number of rows, and of numbers, that a source decodes at once.
_BATCH, _NUMBERS = 8192, 2**23


@final
class ParquetSource(StreamedSource):
    """The numeric columns of a Parquet file, or of all files below a folder, as one source.

    Files are read in the order of their paths. Only their footers are read at first; a pass reads
    the selected columns, a batch of rows at a time. Integers, decimals and booleans are converted
    to floating point. Values in the names of folders (`year=2024/`) are not columns.

    Args:
        path: a file or a folder, in which names that begin with a dot or underscore are ignored.
        targets: name or names of the target columns.
        inputs: name or names of the input columns; all other columns if None.
        noise: name or names of columns with the known noise variances of the targets, one for each
            of them, if there are any.
        dtype: dtype of the tensors that rows are converted to.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        targets: str | Sequence[str],
        inputs: str | Sequence[str] | None = None,
        noise: str | Sequence[str] = (),
        dtype: torch.dtype = torch.float64,
    ) -> None:
        paths = _paths(Path(path))
        self.targets, self.noise = _names(targets), _names(noise)
        if inputs is None:
            others = {*self.targets, *self.noise}
            with ParquetFile(paths[0]) as file:
                inputs = [name for name in file.schema.names if name not in others]
        self.inputs = _names(inputs)
        _check_selection(self.inputs, self.targets, self.noise)
        self._files: list[_FileRows] = []
        N = 0
        for each in paths:
            stamp = _stamp(each)
            with ParquetFile(each) as file:
                _check_columns(file, [*self.inputs, *self.targets, *self.noise])
                if file.N:
                    self._files.append(_FileRows(each, N, N + file.N, stamp))
                    N += file.N
        if not N:
            raise InputError(f"{path} has no rows; a fit needs at least one.")
        self._info = SourceInfo(N, len(self.inputs), len(self.targets), dtype, self.inputs)

    @property
    def info(self) -> SourceInfo:
        return self._info

    @property
    def has_noise(self) -> bool:
        return bool(self.noise)

    def between(self, start: int, stop: int) -> Iterator[Dataset]:
        columns = [*self.inputs, *self.targets, *self.noise]
        size = max(1, min(_BATCH, _NUMBERS // len(columns)))
        for rows in self._files:
            if rows.stop <= start or stop <= rows.start:
                continue
            if _stamp(rows.path) != rows.stamp:
                raise InputError(
                    f"{rows.path} has changed since it was opened; every pass must read the same "
                    "rows. Open it again, and do not change it during the fit."
                )
            with ParquetFile(rows.path) as file:
                first, last = start - rows.start, stop - rows.start
                for batch, origin in file.batches(size, start=first, stop=last, columns=columns):
                    yield self._dataset(batch, rows.path, origin)

    def _dataset(self, batch: Any, path: Path, origin: Origin) -> Dataset:
        tensors = [
            torch.from_numpy(
                np.stack([_numbers(batch, name, path, origin) for name in names], axis=1)
            ).to(self.dtype)
            for names in (self.inputs, self.targets, self.noise)
            if names
        ]
        if not all(bool(torch.isfinite(values).all()) for values in tensors):
            raise InputError(
                f"{path}: a number in or after {origin.describe(0)} is too large for {self.dtype}; "
                "use float64, or scale the column."
            )
        if not self.noise:
            return Dataset(*tensors)
        X, Y, noise = tensors
        negative = (noise < 0).nonzero()
        if len(negative):
            row, column = negative[0].tolist()
            raise InputError(
                f"{path}: column {self.noise[column]!r} must have variances of at least 0; got "
                f"{noise[row, column]:g} in {origin.describe(row)}."
            )
        return Dataset(X, Y, noise=noise)


@dataclass(frozen=True, slots=True)
class _FileRows:
    """A file of a source, and the range of its rows among those of all files."""

    path: Path
    start: int
    stop: int
    stamp: tuple[int, int]
    """Size in bytes and time of the last change, to notice a file that changes between passes."""


def _names(names: str | Sequence[str]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def _stamp(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}.") from error
    return status.st_size, status.st_mtime_ns


def _paths(path: Path) -> list[Path]:
    if not path.is_dir():
        if not path.exists():
            raise InputError(f"{path} cannot be read: there is no such file or folder.")
        return [path]
    paths = sorted(
        file
        for file in path.rglob("*")
        if file.is_file() and not any(n[0] in "._" for n in file.relative_to(path).parts)
    )
    if not paths:
        raise InputError(f"{path} is a folder without files; give one that holds Parquet files.")
    return paths


def _check_selection(
    inputs: tuple[str, ...], targets: tuple[str, ...], noise: tuple[str, ...]
) -> None:
    if not inputs or not targets:
        raise InputError(
            f"`inputs` and `targets` must each name a column; got {list(inputs)} and "
            f"{list(targets)}."
        )
    repeated = [name for name, count in Counter([*inputs, *targets, *noise]).items() if count > 1]
    if repeated:
        raise InputError(
            "a column must be named once in `inputs`, `targets` and `noise`; got "
            f"{repeated[0]!r} twice."
        )
    if noise and len(noise) != len(targets):
        raise InputError(
            f"`noise` must name one column for each of {len(targets)} targets; got {list(noise)}."
        )


def _check_columns(file: ParquetFile, names: list[str]) -> None:
    from pyarrow import types

    schema = file.schema
    for name in names:
        indices = schema.get_all_field_indices(name)
        if len(indices) != 1:
            number = "no column" if not indices else "more than one column"
            raise InputError(
                f"{file.path} has {number} {name!r}; its columns are "
                f"{', '.join(map(repr, schema.names[:12]))}."
            )
        kind = schema.field(indices[0]).type
        if not any(
            test(kind)
            for test in (types.is_floating, types.is_integer, types.is_decimal, types.is_boolean)
        ):
            raise InputError(
                f"{file.path}: column {name!r} has type {kind}; a source needs numeric columns. "
                "Leave it out of `inputs`, or encode it first."
            )


def _numbers(batch: Any, name: str, path: Path, origin: Origin) -> NDArray[np.float64]:
    """Convert a numeric column to float64, and raise an error if a value is not finite."""
    import pyarrow

    column = batch.column(name)
    # Nulls become NaN.
    values = column.cast(pyarrow.float64(), safe=False).to_numpy(zero_copy_only=False)
    bad = ~np.isfinite(values)
    if bad.any():
        row = int(bad.argmax())
        value = column[row].as_py()
        raise InputError(
            f"{path}: column {name!r} has {'no value' if value is None else value} in "
            f"{origin.describe(row)}; numbers must be finite. Correct that row, or leave it out."
        )
    return values
