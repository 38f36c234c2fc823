"""What is worth knowing of a model of a table, gathered for its file and its report."""

from dataclasses import dataclass
from math import isfinite
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from winnowgp.data import ColumnEncoding, Columns, TableEncoder
from winnowgp.estimators.effects import column_effect
from winnowgp.estimators.film import Film
from winnowgp.estimators.sparse_gp_classifier import SparseGPClassifier
from winnowgp.report.findings import Choice, ColumnSummary, Effect, Training

MOST_EFFECTS = 12


def choice(estimator: Any, rows: int, *, asked: str) -> Choice:
    """Which points were kept, and what that cost."""
    gap = getattr(estimator, "evidence_gap_", np.inf)
    return {
        "points": estimator.n_inducing_,
        "candidates": len(estimator.candidates_),
        "asked": asked,
        "alpha": estimator.alpha_,
        "bound": float(estimator.elbo_),
        "evidence_gap": float(gap) if isfinite(gap) else None,
        "given_up": float(estimator.given_up_),
        "rows": rows,
        "inclusion": [float(f"{p:.4g}") for p in estimator.inclusion_],
        "frontier": estimator.frontier_.bounds.tolist(),
    }


@dataclass(frozen=True, slots=True)
class _Seen:
    """What is in a column, whatever it will be used for."""

    missing: int
    values: NDArray[np.float64] | None
    words: list[tuple[str, int]]
    different: int


def _seen(table: Columns, name: str, *, as_words: bool) -> _Seen:
    missing = int(table.missing(name).sum())
    if not as_words:
        return _Seen(missing, table.numbers(name), [], table.different(name))
    words = [word for word in table.words(name) if word is not None]
    found, counts = np.unique(np.array(words, dtype=str), return_counts=True)
    order = np.argsort(-counts, kind="stable")[:8]
    return _Seen(missing, None, [(str(found[i]), int(counts[i])) for i in order], len(found))


def column_summary(
    table: Columns, column: ColumnEncoding, relevant: dict[str, float] | None
) -> ColumnSummary:
    """What is in an input column, and how much it matters."""
    seen = _seen(table, column.name, as_words=column.kind == "words")
    values = seen.values
    if column.kind == "date":
        values = column.encode(table, impute=True)[:, 0]
    return {
        "name": column.name,
        "kind": column.kind,
        "missing": seen.missing,
        "spread": [] if values is None else _spread(values),
        "words": seen.words,
        "different": seen.different,
        "relevance": None if relevant is None else relevant[column.name],
    }


def target_summary(table: Columns, target: str, task: str) -> ColumnSummary:
    """What is in the target's column."""
    classes = task == "classification"
    seen = _seen(table, target, as_words=classes)
    return {
        "name": target,
        "kind": "words" if classes else "number",
        "missing": seen.missing,
        "spread": [] if seen.values is None else _spread(seen.values),
        "words": seen.words,
        "different": seen.different,
        "relevance": None,
    }


def _spread(values: NDArray[np.float64]) -> list[float]:
    return np.nanquantile(values, [0, 0.25, 0.5, 0.75, 1]).tolist()


def effects(
    estimator: Any,
    encoder: TableEncoder,
    summaries: list[ColumnSummary],
    X: NDArray[np.float64],
) -> list[Effect]:
    """Of the most relevant columns, between the 1st and the 99th percentile."""
    ranked = sorted(
        zip(encoder.columns, summaries, strict=True),
        key=lambda pair: -(pair[1]["relevance"] or 0.0),
    )
    starts = {}
    place = 0
    for column in encoder.columns:
        starts[column.name] = place
        place += len(column.features)
    found = []
    for column, _ in ranked[:MOST_EFFECTS]:
        between = None
        if column.kind != "words":
            low, high = np.quantile(X[:, starts[column.name]], [0.01, 0.99])
            between = (float(low), float(high))
        found.append(column_effect(estimator, encoder, column, between=between))
    return found


def training(
    film: Film, estimator: Any, encoder: TableEncoder, relevant: dict[str, float] | None
) -> Training:
    """The fit as a film, seen along the two features that matter most."""
    owners = [column.name for column in encoder.columns for _ in column.features]
    weights = [0.0 if relevant is None else relevant[name] for name in owners]
    best: list[int] = []
    for place in sorted(range(len(owners)), key=lambda i: -weights[i]):
        if owners[place] not in [owners[b] for b in best]:
            best.append(place)
    chosen = best[:2]
    return {
        "inputs": [encoder.features[i] for i in chosen],
        "moments": film.moments(estimator._x_units, chosen),
    }


def noise_sd(estimator: Any) -> float | None:
    """Standard deviation of the noise, in the target's units; None if there is no such thing."""
    noise = getattr(estimator, "noise_", None)
    return None if noise is None or not np.isfinite(noise[0]) else float(np.sqrt(noise[0]))


def predict_us(estimator: Any, X: NDArray[np.float64]) -> float:
    """Microseconds a row, of 1,000 rows at once."""
    rows = X[np.arange(1000) % len(X)]
    classes = isinstance(estimator, SparseGPClassifier)
    seconds = []
    for _ in range(3):
        start = perf_counter()
        estimator.predict_proba(rows) if classes else estimator.predict(rows, return_std=True)
        seconds.append(perf_counter() - start)
    return 1e6 * min(seconds) / len(rows)
