"""`TabularModel`: a fitted model of a table, and warnings about rows unlike its training rows."""

import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from pathlib import Path
from typing import Any, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from winnowgp.data import DataTable
from winnowgp.data.encoding import TableEncoder
from winnowgp.data.out_of_core import rechunk
from winnowgp.data.tables import TableLike
from winnowgp.errors import ExtrapolationWarning, InputError
from winnowgp.estimators.base import rows_at_once, total_points
from winnowgp.estimators.classification import ClassTargets
from winnowgp.io import save
from winnowgp.report.summary import Summary, counted
from winnowgp.tabular import table_summary
from winnowgp.tabular.quality import TableEstimator, predictive
from winnowgp.tabular.targets import known_noise

Columns: TypeAlias = dict[str, np.ndarray[Any, Any]]
"""Columns of predictions by name."""

# Unseen categories that are remembered per column, however large the table is.
_MOST_UNSEEN = 1000


def prediction_names(task: str, classes: Iterable[Any]) -> set[str]:
    """Return the names of the columns that a model predicts; the id column needs another name."""
    if task == "classification":
        return {"class", *(f"p_{c}" for c in classes)}
    return {"mean", "sd", "lower", "upper"}


@dataclass(frozen=True, slots=True)
class TableModel(ABC):
    """A fitted model of one column of a table, or of several: its encoder and its estimator."""

    encoder: TableEncoder
    estimator: Any
    id_column: str | None

    def predict_blocks(
        self,
        blocks: Iterable[DataTable],
        *,
        level: float = 0.95,
        quantiles: Sequence[float] = (),
        device: str = "cpu",
    ) -> Iterator[Columns]:
        """Return `predict` of a table that is read in blocks, such as those of a large file.

        The predictions do not depend on the blocks: rows are regrouped into chunks of the size that
        `predict` uses. Memory holds one chunk and one block.

        Args:
            level: probability that the interval contains the observation.
            quantiles: probabilities of further columns, for models of one target.
            device: device of the predictions: "cpu", "cuda", or "auto" for a GPU if there is one.
        """
        moved = replace(self, estimator=self.estimator.predicting_on(device))
        extrapolation = self.extrapolation()
        for rows in rechunk(blocks, repeat(rows_at_once(self.estimator.posterior_))):
            yield moved._predicted(rows, level, quantiles, extrapolation)
        for warning in extrapolation.warnings():
            warnings.warn(warning, stacklevel=2)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the model to a file that `winnowgp.load` reads.

        The file grows with the number of inducing points, not with the number of rows.
        """
        return save(self, path)

    @abstractmethod
    def extrapolation(self) -> "Extrapolation":
        """Return a counter of rows to predict that are unlike the training rows."""

    @abstractmethod
    def _columns(
        self, table: DataTable, X: NDArray[np.float64], level: float, quantiles: Sequence[float]
    ) -> Columns:
        """Return columns of predictions of encoded rows."""

    def _predicted(
        self,
        table: DataTable,
        level: float,
        quantiles: Sequence[float],
        extrapolation: "Extrapolation",
    ) -> Columns:
        """Return the id column, if there is one, and columns of predictions."""
        X = self.encoder.encode(table)
        extrapolation.add(table, X)
        columns: Columns = {}
        if self.id_column is not None and self.id_column in table.values:
            columns[self.id_column] = table.strings(self.id_column, literal=True)
        return columns | self._columns(table, X, level, quantiles)

    def _warned(self, table: DataTable, level: float, quantiles: Sequence[float]) -> Columns:
        """Return predictions, and warn of rows that are unlike the training rows."""
        extrapolation = self.extrapolation()
        predictions = self._predicted(table, level, quantiles, extrapolation)
        for warning in extrapolation.warnings():
            warnings.warn(warning, stacklevel=3)
        return predictions


@final
@dataclass(frozen=True, slots=True)
class TabularModel(TableModel):
    """A fitted model of a table: the encoder of its columns, the estimator, and a summary.

    >>> from winnowgp.tabular import fit_table
    >>> x = np.linspace(0, 6, 60)
    >>> table = DataTable.of({"x": x, "side": ["left", "right"] * 30, "y": np.sin(x)})
    >>> model = fit_table(table, "y", kernel="rbf", tolerance=0.1)
    >>> sorted(model.predict(table))
    ['lower', 'mean', 'sd', 'upper']
    """

    estimator: TableEstimator
    summary: Summary

    def __repr__(self) -> str:
        columns = [column.name for column in self.encoder.columns]
        return f"TabularModel(target={self.target!r}, {columns=}, estimator={self.estimator!r})"

    @property
    def target(self) -> str:
        """Name of the column that the model predicts."""
        return self.summary["target"]

    @property
    def task(self) -> str:
        """The task: "regression", "classification" or "counts"."""
        return self.summary["task"]

    @property
    def noise_column(self) -> str | None:
        """Name of the column with known noise variances, if the model was fitted with one."""
        return self.summary["settings"].get("noise_column")

    def noise_variance(self, table: DataTable) -> NDArray[np.float64] | None:
        """Return the known noise variances of the rows of a table; None if it has none."""
        if self.noise_column is None or self.noise_column not in table.values:
            return None
        return known_noise(table, self.noise_column)

    def predict(
        self, table: TableLike, *, level: float = 0.95, quantiles: Sequence[float] = ()
    ) -> Columns:
        """Return columns of predictions, after the id column if there is one.

        They are mean, standard deviation and a central interval of a new observation; or the most
        probable class and the probability of each class. An observation has the noise of the
        `noise_column`, if there is one and the table has it, and the learnt noise. An
        `ExtrapolationWarning` says that rows lie far outside the training rows, or have categories
        that no training row has.

        Args:
            table: a `DataTable`, a data frame of pandas, polars or pyarrow, or a dictionary of
                columns.
            level: probability that the interval contains the observation.
            quantiles: probabilities of further columns: the 0.05-quantile is called `q0.05`.
        """
        return self._warned(DataTable.of(table), level, quantiles)

    def extrapolation(self) -> "Extrapolation":
        """Return a counter of rows to predict that are unlike the training rows."""
        columns = [column for column in self.summary["columns"] if column["spread"]]
        ranges = {c["name"]: (c["spread"][0], c["spread"][-1]) for c in columns}
        return Extrapolation(self.encoder, ranges)

    def _columns(
        self, table: DataTable, X: NDArray[np.float64], level: float, quantiles: Sequence[float]
    ) -> Columns:
        if isinstance(self.estimator, ClassTargets):
            if quantiles:
                raise InputError("classes have no quantiles; leave `quantiles` out.")
            probability = self.estimator.predict_proba(X)
            classes = self.estimator.classes_
            best = classes[probability.argmax(1)]
            each = zip(classes, probability.T, strict=True)
            return {"class": best, **{f"p_{c}": p for c, p in each}}
        noise_variance = self.noise_variance(table)
        observation = predictive(self.estimator, X, noise_variance=noise_variance)
        lower, upper = observation.interval(level)
        mean, sd = observation.mean, observation.sd
        columns = {"mean": mean, "sd": sd, "lower": lower, "upper": upper}
        if not quantiles:
            return columns
        names = [f"q{p:g}" for p in quantiles]
        if len({*names, *columns}) < len(names) + len(columns) or self.id_column in names:
            raise InputError(
                f"`quantiles` must differ from each other and from other columns; got {names}."
            )
        return columns | dict(zip(names, observation.quantiles(quantiles), strict=True))

    def resized(self, points: int, *, settings: dict[str, str] | None = None) -> "TabularModel":
        """Return the model with fewer inducing points, which the fit has optimised already.

        No rows are needed. Effects and relevances are those of the smaller model. Its quality on
        held-out rows is not known, since the model does not keep them.

        Args:
            points: number of inducing points, one of `estimator.available_sizes_`; for a deep model
                their sum over the layers.
            settings: settings to replace or add, such as the command that made it.
        """
        estimator = self.estimator.resized(points)
        if points == total_points(self.estimator):
            return self
        summary = table_summary.resized(self.summary, estimator, self.encoder, settings or {})
        return replace(self, estimator=estimator, summary=summary)


@final
class Extrapolation:
    """Counts the rows to predict that are unlike the training rows, block by block.

    A row is far outside if a number or a date is beyond the training rows by more than half of
    their range. A category is unseen if no training row has it.

    Args:
        encoder: encoder of the training table.
        ranges: least and largest entry of each column of numbers or dates in the training rows.
    """

    def __init__(self, encoder: TableEncoder, ranges: Mapping[str, tuple[float, float]]) -> None:
        self._encoder, self._ranges = encoder, ranges
        self._rows = 0
        self._far: dict[str, tuple[int, int, float]] = {}
        self._unseen: dict[str, set[str]] = {}

    def add(self, table: DataTable, X: NDArray[np.float64]) -> None:
        """Count the far rows and unseen categories of the next block.

        Args:
            X: the encoded rows.
        """
        for name, numbers in self._encoder.feature_numbers.items():
            if name in self._ranges:
                self._add_numbers(name, X[:, numbers[0]])
        for name, categories in self._encoder.unseen(table).items():
            known = self._unseen.setdefault(name, set())
            known.update(sorted(set(categories) - known)[: _MOST_UNSEEN - len(known)])
        self._rows += table.N

    def _add_numbers(self, name: str, values: NDArray[np.float64]) -> None:
        low, high = self._ranges[name]
        far = np.maximum(low - values, values - high) > 0.5 * (high - low)
        if not far.any():
            return
        count, row, value = self._far.get(name, (0, -1, 0.0))
        if row < 0:
            row = int(far.argmax())
            row, value = self._rows + row, float(values[row])
        self._far[name] = (count + int(far.sum()), row, value)

    def warnings(self) -> list[ExtrapolationWarning]:
        """Return a warning of far rows, which names their column, and one per unseen column."""
        far = [] if not self._far else [self._far_warning()]
        return far + [self._unseen_warning(*item) for item in self._unseen.items()]

    def _far_warning(self) -> ExtrapolationWarning:
        name, (count, row, value) = max(self._far.items(), key=lambda item: item[1][0])
        given, least, most = (self._text(name, each) for each in (value, *self._ranges[name]))
        others = (
            f" (and {counted(len(self._far) - 1, 'other column')})" if len(self._far) > 1 else ""
        )
        return ExtrapolationWarning(
            f"{count} of {counted(self._rows, 'row')} lie far outside the training rows: column "
            f"{name!r} is {given} in row {row + 1}, and was {least} to {most} in training{others}. "
            "Predictions there rest on the kernel alone; fit again with such rows."
        )

    def _unseen_warning(self, name: str, categories: set[str]) -> ExtrapolationWarning:
        examples = ", ".join(repr(category[:30]) for category in sorted(categories)[:5])
        more = "or more " if len(categories) == _MOST_UNSEEN else ""
        values, that = ("value", "was") if len(categories) == 1 else ("values", "were")
        return ExtrapolationWarning(
            f"column {name!r} has {len(categories)} {more}{values} that {that} not in the training "
            f"rows ({examples}). Such rows are predicted as if the column were empty, and their "
            "intervals may be too narrow; fit again with such rows."
        )

    def _text(self, name: str, value: float) -> str:
        if name in self._encoder.dates:
            return str(np.array(value).astype("datetime64[D]"))
        return f"{value:.6g}"
