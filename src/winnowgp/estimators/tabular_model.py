"""A model of a table: what `winnow fit` makes, and what a file of it holds."""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import numpy as np

from winnowgp.data import Columns, TableEncoder, regrouped
from winnowgp.estimators.inducing_estimator import ROWS, predicting_on
from winnowgp.estimators.predictive import predictive
from winnowgp.estimators.sparse_gp_classifier import SparseGPClassifier
from winnowgp.estimators.sparse_gp_regressor import SparseGPRegressor
from winnowgp.io import save
from winnowgp.report.findings import Findings

TASKS = ("regression", "classification", "counts")


def prediction_names(task: str, classes: Iterable[Any]) -> set[str]:
    """Names of the columns that a model predicts; no column of names of rows may be called so."""
    if task == "classification":
        return {"class", *(f"p_{c}" for c in classes)}
    return {"mean", "sd", "lower", "upper"}


@final
@dataclass(frozen=True, slots=True)
class TabularModel:
    """An encoder, an estimator, and everything worth knowing about the fit.

    >>> from winnowgp.estimators import fit_table
    >>> x = np.linspace(0, 6, 60)
    >>> table = Columns.of({"x": x, "side": ["left", "right"] * 30, "y": np.sin(x)})
    >>> model = fit_table(table, "y", test_size=0.2)
    >>> sorted(model.predict(table))
    ['lower', 'mean', 'sd', 'upper']
    """

    encoder: TableEncoder
    estimator: SparseGPRegressor | SparseGPClassifier
    id_column: str | None
    findings: Findings

    @property
    def target(self) -> str:
        """Name of the column that is predicted."""
        return self.findings["target"]

    @property
    def task(self) -> str:
        """ "regression", "classification" or "counts"."""
        return self.findings["task"]

    def predict(self, table: Columns, *, level: float = 0.95) -> dict[str, np.ndarray[Any, Any]]:
        """Columns of predictions, the column of names of rows first where there is one.

        Mean, standard deviation and a central interval of a new observation; or the most probable
        class and the probability of each.

        Args:
            level: probability that the interval holds.
        """
        X = self.encoder.encode(table)
        found: dict[str, np.ndarray[Any, Any]] = {}
        if self.id_column is not None and self.id_column in table.values:
            found[self.id_column] = table.words(self.id_column)
        if isinstance(self.estimator, SparseGPClassifier):
            probability = self.estimator.predict_proba(X)
            classes = self.estimator.classes_
            found["class"] = classes[probability.argmax(1)]
            return found | {f"p_{c}": p for c, p in zip(classes, probability.T, strict=True)}
        ahead = predictive(self.estimator, X)
        lower, upper = ahead.interval(level)
        return found | {"mean": ahead.mean, "sd": ahead.sd, "lower": lower, "upper": upper}

    def predict_blocks(
        self, blocks: Iterable[Columns], *, level: float = 0.95, device: str = "cpu"
    ) -> Iterator[dict[str, np.ndarray[Any, Any]]]:
        """`predict` for a table that comes in parts, such as `column_blocks` of a large file.

        The answers are those for the whole table, to the last bit, however it was cut: rows are
        gathered to be predicted as many at a time as `predict` itself takes. Memory is that of
        these rows and one block.

        Args:
            level: probability that the interval holds.
            device: where to compute: "cpu" or "cuda", or "auto" for a GPU if there is one.
        """
        there = replace(self, estimator=predicting_on(device, self.estimator))
        for rows in regrouped(blocks, ROWS):
            yield there.predict(rows, level=level)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write to a file that `winnowgp.load` reads; its size grows with M, not with N."""
        return save(self, path)
