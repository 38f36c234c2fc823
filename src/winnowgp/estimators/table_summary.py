"""Summary of a fitted table model."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import isfinite
from time import perf_counter
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray

from winnowgp.data import DataTable, Standardiser, TableEncoder
from winnowgp.data.encoding import ColumnEncoding
from winnowgp.estimators.classification import SparseGPClassifier
from winnowgp.estimators.effects import column_effect
from winnowgp.report.summary import Choice, ColumnSummary, Effect, Moment, Training
from winnowgp.training import Progress

# A fit remembered as a short film, whatever its length.


MOST_MOMENTS = 60


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    """One step."""

    number: int
    phase: str
    objective: float
    points: NDArray[np.float64]
    begins: bool
    """Whether it is the first of its phase."""

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {**asdict(self), "points": torch.from_numpy(self.points)}

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> "_Kept":
        """From a checkpoint."""
        return cls(**{**state, "points": state["points"].numpy()})


@final
class Film:
    """A callback that keeps about `MOST_MOMENTS` moments.

    The first step of each phase is always kept: there the number of points changes.
    """

    def __init__(self) -> None:
        self._kept: list[_Kept] = []
        self._seen, self._stride, self._phase = 0, 1, ""
        self._last: _Kept | None = None

    def __call__(self, progress: Progress) -> None:
        """Remember this step, perhaps."""
        points = progress.candidates[0].detach().cpu().numpy().copy()
        begins = progress.phase != self._phase
        self._last = _Kept(self._seen, progress.phase, progress.objective, points, begins)
        self._phase = progress.phase
        if begins or self._seen % self._stride == 0:
            self._kept.append(self._last)
        if sum(not kept.begins for kept in self._kept) > MOST_MOMENTS:
            self._stride *= 2
            self._kept = [k for k in self._kept if k.begins or k.number % self._stride == 0]
        self._seen += 1

    def state_dict(self) -> dict[str, Any]:
        """All that was kept."""
        return {
            "kept": [kept.state_dict() for kept in self._kept],
            "last": None if self._last is None else self._last.state_dict(),
            "place": (self._seen, self._stride, self._phase),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another film stood."""
        self._kept = [_Kept.of(kept) for kept in state["kept"]]
        self._last = None if state["last"] is None else _Kept.of(state["last"])
        if self._last is not None and self._kept and self._kept[-1].number == self._last.number:
            self._last = self._kept[-1]
        self._seen, self._stride, self._phase = state["place"]

    def moments(self, units: Standardiser, features: list[int]) -> list[Moment]:
        """What was kept, and the last step, seen along one or two features in the user's units."""
        kept = list(self._kept)
        if self._last is not None and self._last not in kept[-1:]:
            kept.append(self._last)
        shift, scale = units.shift.numpy(), units.scale.numpy()
        return [
            {
                "phase": moment.phase,
                "step": moment.number + 1,
                "objective": (
                    float(f"{moment.objective:.8g}") if isfinite(moment.objective) else None
                ),
                "x": _short(moment.points, shift, scale, features[0]),
                "y": _short(moment.points, shift, scale, features[1]) if features[1:] else [],
            }
            for moment in kept
        ]


def _short(
    points: NDArray[np.float64],
    shift: NDArray[np.float64],
    scale: NDArray[np.float64],
    feature: int,
) -> list[float]:
    """Coordinates with five digits: a film is looked at, not computed with."""
    values = points[:, feature] * scale[feature] + shift[feature]
    return [float(f"{value:.5g}") for value in values]


# What is worth knowing of a model of a table, gathered for its file and its report.


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
        "given_up": float(estimator.elbo_gap_),
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


def _seen(table: DataTable, name: str, *, as_words: bool) -> _Seen:
    missing = int(table.missing(name).sum())
    if not as_words:
        return _Seen(missing, table.numbers(name), [], table.n_unique(name))
    words = [word for word in table.strings(name) if word is not None]
    found, counts = np.unique(np.array(words, dtype=str), return_counts=True)
    order = np.argsort(-counts, kind="stable")[:8]
    return _Seen(missing, None, [(str(found[i]), int(counts[i])) for i in order], len(found))


def column_summary(
    table: DataTable, column: ColumnEncoding, relevant: dict[str, float] | None
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


def target_summary(table: DataTable, target: str, task: str) -> ColumnSummary:
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
        "moments": film.moments(estimator._x_scaler, chosen),
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
