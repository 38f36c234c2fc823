"""The summary of a fitted table model, for its file and its report, and the history of its fit."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from time import perf_counter
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray

from winnowgp.data import DataTable, Standardiser
from winnowgp.data.encoding import ColumnEncoding, TableEncoder
from winnowgp.errors import FitWarning
from winnowgp.estimators.base import first_points, total_points
from winnowgp.estimators.classification import ClassTargets
from winnowgp.estimators.deep import DeepEstimator
from winnowgp.estimators.validation import HETEROSCEDASTIC
from winnowgp.models import MixturePosterior
from winnowgp.models.deep_gp import Allocation
from winnowgp.report.summary import (
    Alarm,
    AllocationSummary,
    Choice,
    ColumnSummary,
    Effect,
    IgnoredColumn,
    Importance,
    Moment,
    Summary,
    Training,
    bare_choice,
    counted,
)
from winnowgp.tabular.effects import (
    RankedColumn,
    effect_curves,
    relevances,
    term_effects,
)
from winnowgp.training import Progress
from winnowgp.training.callbacks import SMALLER_MODEL

MOST_EFFECTS = 12

MOST_SNAPSHOTS = 60
"""Steps of a fit that are recorded, about."""


def choice(
    estimator: Any,
    rows: int,
    *,
    asked: str,
    kernel: str | None,
    held_out: tuple[NDArray[np.float64], NDArray[Any]] | None = None,
) -> Choice:
    """Return the number of inducing points, the ELBO, its gaps, the frontier and the kernel.

    Args:
        kernel: the kernel as an expression with the names of columns.
        held_out: inputs and targets by which the allocations of a deep model are scored.
    """
    if isinstance(estimator, DeepEstimator):
        scored = estimator.allocations_
        if held_out is not None:
            scored = estimator.scored_allocations(*held_out)
        return _deep_choice(estimator, rows, scored, asked=asked, kernel=kernel)
    frontier, evidence = estimator.frontier_, estimator.evidence_
    exact = frontier.exact_log_density
    result: Choice = {
        **bare_choice(
            estimator.n_inducing_,
            len(estimator.candidates_),
            asked=asked,
            bound=float(estimator.elbo_),
            elbo_gap=float(estimator.elbo_gap_),
            rows=rows,
        ),
        "alpha": estimator.alpha_,
        "inclusion": [float(f"{p:.4g}") for p in estimator.inclusion_],
        "frontier": [_finite(elbo) for elbo in frontier.envelope.tolist()],
        "log_densities": [_finite(nats) for nats in frontier.log_densities.tolist()],
        "exact_evidence": frontier.evidence,
        "exact_log_density": None if exact is None else _finite(exact),
        "sizes": list(estimator.available_sizes_),
        "kernel": kernel,
        "kernel_evidence": {k: _finite(nats) for k, nats in estimator.kernel_evidence_.items()},
        "evidence": None if evidence is None else (evidence.lower, evidence.upper),
        "evidence_method": None if evidence is None else evidence.method,
        "kl": None if evidence is None else estimator.kl_bounds_,
        "growth_limit": estimator.growth_limit_,
        "last_gain": _finite(estimator.last_doubling_gain_),
        "predictive_gap": _finite(estimator.predictive_gap_),
        "predictive_gap_se": _finite(estimator.predictive_gap_se_),
    }
    if frontier.earlier_gap or rows != frontier.N:
        result["earlier_gap"], result["observations"] = frontier.earlier_gap, frontier.N
    if getattr(estimator, "likelihood", None) == HETEROSCEDASTIC:
        result["noise_points"] = estimator.n_noise_inducing_
    subsets, posterior, mixture = estimator.subset_posterior_, estimator.posterior_, None
    if isinstance(posterior, MixturePosterior):
        mixture = posterior.S
        if posterior.constant_weight:
            result["constant_weight"], mixture = posterior.constant_weight, mixture - 1
    if subsets.kind != "mean-field":
        result["subset_posterior"] = {
            "kind": subsets.kind,
            "credible_size": subsets.credible_size(),
            "r_hat": None if subsets.r_hat is None else _finite(subsets.r_hat),
            "effective_samples": subsets.effective_samples,
            "averaged": mixture if subsets.kind == "gibbs" else None,
        }
    if mixture is not None and subsets.kind != "gibbs":
        result["hyper_posteriors"] = mixture
    return result


def _deep_choice(
    estimator: DeepEstimator,
    rows: int,
    allocations: Sequence[Allocation],
    *,
    asked: str,
    kernel: str | None,
) -> Choice:
    """Return the inducing points of all layers, and the allocations that were compared."""
    result: Choice = {
        **bare_choice(
            total_points(estimator),
            sum(len(points) for points in estimator.candidates_),
            asked=asked,
            bound=float(estimator.elbo_),
            elbo_gap=float(estimator.elbo_gap_),
            rows=rows,
        ),
        "sizes": [sum(sizes) for sizes in estimator.available_sizes_],
        "kernel": kernel,
        "layers": list(estimator.n_inducing_),
        "allocations": [_allocation_summary(each) for each in allocations],
    }
    if (comparison := estimator.comparison_) is not None:
        density, error = comparison.density_gain, comparison.density_gain_error
        both = None if density is None or error is None else (density, error)
        result["shallow"] = {
            "selected": comparison.selected,
            "elbo_gain": comparison.elbo_gain,
            "density_gain": both if both is None or isfinite(both[0]) else None,
        }
    return result


def _allocation_summary(allocation: Allocation) -> AllocationSummary:
    """Return numbers of inducing points, prediction time, ELBO and held-out density."""
    density = allocation.log_density
    return {
        "points": list(allocation.sizes),
        "predict_us": allocation.predict_us,
        "bound": allocation.elbo,
        "elbo_gap": allocation.elbo_gap,
        "log_density": None if density is None else _finite(density),
    }


def _finite(value: float) -> float | None:
    """Return a number that JSON has, or None."""
    return float(value) if isfinite(value) else None


def resized(
    summary: Summary, estimator: Any, encoder: TableEncoder, settings: Mapping[str, str]
) -> Summary:
    """Return the summary of a model that has fewer inducing points than the one summarised.

    What depends on the model is computed again, except for its quality and its history: they need
    rows, and steps that were not recorded.
    """
    before, relevant = summary["choice"], relevances(estimator, encoder)
    largest = before["points"] if before["resized_from"] is None else before["resized_from"]
    after = choice(
        estimator,
        before["rows"],
        asked=counted(total_points(estimator), "point"),
        kernel=before["kernel"],
    )
    if "allocations" in before:
        # Their held-out densities are known.
        after["allocations"] = before["allocations"]
    columns = {column.name: column for column in encoder.columns}
    return {
        **summary,
        "columns": [
            {**column, "relevance": None if relevant is None else relevant[column["name"]]}
            for column in summary["columns"]
        ],
        "noise_sd": noise_sd(estimator),
        "choice": {**after, "resized_from": largest},
        "alarms": [],
        "quality": None,
        "importance": None,
        "effects": [
            {
                **effect_curves(
                    estimator, encoder, columns[effect["column"]], between=_ends(effect)
                ),
                "counts": effect["counts"],
            }
            for effect in summary["effects"]
        ],
        "terms": [],
        "training": {"inputs": summary["training"]["inputs"], "moments": []},
        "timings": {
            **summary["timings"],
            "predict_us": predict_us(estimator, first_points(estimator)),
        },
        "settings": {**summary["settings"], **settings},
    }


def _ends(effect: Effect) -> tuple[float, float] | None:
    """Return the ends of the grid of an effect; None for categories."""
    if effect["kind"] == "category":
        return None
    return float(effect["at"][0]), float(effect["at"][-1])


def alarm_summary(alarm: FitWarning) -> Alarm:
    """Return a warning's class and message."""
    return {"warning": type(alarm).__name__, "message": str(alarm)}


def column_summary(
    table: DataTable,
    column: ColumnEncoding,
    relevant: dict[str, float] | None,
    *,
    note: str = "",
) -> ColumnSummary:
    """Return the summary of an input column, and its relevance to the kernel.

    Args:
        note: what the owner of the table should know about the reading of the column.
    """
    summary = _contents(table, column.name, column.kind, literal=column.literal, note=note)
    if column.kind == "date":
        summary["spread"] = _spread(column.encode(table, impute=True)[:, 0])
    summary["relevance"] = None if relevant is None else relevant[column.name]
    return summary


def ignored_columns(
    table: DataTable,
    drop: Iterable[str],
    id_column: str | None,
    noise_column: str | None = None,
) -> list[IgnoredColumn]:
    """Return the columns of a table that are neither inputs nor the target, in its order."""
    named = {id_column: "identifier", noise_column: "noise variance"}
    kinds = dict.fromkeys(drop, "dropped") | named
    return [
        {"name": name, "kind": kinds[name], "missing": int(table.missing(name).sum())}
        for name in table.names
        if name in kinds
    ]


def target_summary(table: DataTable, target: str, task: str, *, note: str = "") -> ColumnSummary:
    """Return the summary of the target's column."""
    kind = "category" if task == "classification" else "number"
    return _contents(table, target, kind, note=note)


def _contents(
    table: DataTable, name: str, kind: str, *, note: str, literal: bool = False
) -> ColumnSummary:
    """Return the summary of a column, without a relevance."""
    spread, frequent = [], []
    if kind == "category":
        entries = [e for e in table.strings(name, literal=literal) if e is not None]
        categories, counts = np.unique(np.array(entries, dtype=str), return_counts=True)
        order = np.argsort(-counts, kind="stable")[:8]
        frequent = [(str(categories[i]), int(counts[i])) for i in order]
        different = len(categories)
    else:
        values, different = table.numbers(name), table.n_unique(name)
        spread = [] if values is None else _spread(values)
    return {
        "name": name,
        "kind": kind,
        "missing": int(table.missing(name, literal=literal).sum()),
        "spread": spread,
        "categories": frequent,
        "different": different,
        "relevance": None,
        "note": note,
    }


def _spread(values: NDArray[np.float64]) -> list[float]:
    return np.nanquantile(values, [0, 0.25, 0.5, 0.75, 1]).tolist()


def ranked_columns(
    encoder: TableEncoder,
    summaries: list[ColumnSummary],
    X: NDArray[np.float64],
    importance: Importance | None,
) -> list[RankedColumn]:
    """Return columns, the most important or relevant first, for `effects`.

    Curves are drawn between the 1st and the 99th percentile of a column.
    """
    weights = {each["name"]: each["relevance"] or 0.0 for each in summaries}
    if importance is not None:
        weights = {each["column"]: each["loss"] for each in importance["columns"]}
    ranked: list[RankedColumn] = []
    for column, features in zip(encoder.columns, encoder.feature_numbers.values(), strict=True):
        values = X[:, features]
        if column.kind == "category":
            names = np.array(["", *column.categories])
            number = np.where(values.any(1), values.argmax(1) + 1, 0)
            ranked.append(RankedColumn(column, None, names[number]))
        else:
            low, high = np.quantile(values[:, 0], [0.01, 0.99]).tolist()
            ranked.append(RankedColumn(column, (low, high), values[:, 0]))
    return sorted(ranked, key=lambda each: -weights[each.column.name])


def effects(
    estimator: Any, encoder: TableEncoder, ranked: list[RankedColumn], kernel: str
) -> tuple[list[Effect], list[Effect]]:
    """Return the effects of the most important columns, and those of the terms of a sum kernel.

    Args:
        kernel: the kernel as an expression.
    """
    curves = [
        effect_curves(estimator, encoder, each.column, between=each.between, values=each.values)
        for each in ranked[:MOST_EFFECTS]
    ]
    return curves, term_effects(estimator, encoder, kernel, ranked=ranked)


def noise_sd(estimator: Any) -> float | None:
    """Return the standard deviation of the noise in the target's units.

    It is None without noise, where noise depends on the inputs, and for a model of log y, whose
    noise grows with the target.
    """
    noise = getattr(estimator, "noise_", None)
    if noise is None or not np.isfinite(noise[0]) or estimator._takes_logarithm():
        return None
    if estimator.likelihood == HETEROSCEDASTIC and estimator.n_noise_inducing_:
        return None
    return float(np.sqrt(noise[0]))


def predict_us(estimator: Any, X: NDArray[np.float64]) -> float:
    """Return the microseconds per row that the prediction of 1,000 rows takes."""
    # A constant has no inducing points to be predicted at.
    rows = X[np.arange(1000) % len(X)] if len(X) else np.zeros((1000, X.shape[1]))
    classes = isinstance(estimator, ClassTargets)
    seconds = []
    for _ in range(3):
        start = perf_counter()
        estimator.predict_proba(rows) if classes else estimator.predict(rows, return_std=True)
        seconds.append(perf_counter() - start)
    return 1e6 * min(seconds) / len(rows)


@final
class TrainingHistory:
    """A callback that records about `MOST_SNAPSHOTS` steps of a fit, whatever its length.

    The first step of each phase is always recorded, because the number of points changes there.
    """

    def __init__(self) -> None:
        self._snapshots: list[_Snapshot] = []
        self._seen, self._stride, self._phase = 0, 1, ""
        self._last: _Snapshot | None = None

    def __call__(self, progress: Progress) -> None:
        """Record the step if it is due; those of smaller models are left out."""
        if progress.phase == SMALLER_MODEL:
            return
        points = progress.candidates[0].detach().cpu().numpy().copy()
        first = progress.phase != self._phase
        self._last = _Snapshot(self._seen, progress.phase, progress.objective, points, first)
        self._phase = progress.phase
        if first or self._seen % self._stride == 0:
            self._snapshots.append(self._last)
        if sum(not snapshot.begins for snapshot in self._snapshots) > MOST_SNAPSHOTS:
            self._stride *= 2
            self._snapshots = [
                each for each in self._snapshots if each.begins or each.number % self._stride == 0
            ]
        self._seen += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the recorded steps, for a checkpoint."""
        return {
            "kept": [snapshot.state_dict() for snapshot in self._snapshots],
            "last": None if self._last is None else self._last.state_dict(),
            "place": (self._seen, self._stride, self._phase),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the recorded steps from a checkpoint."""
        self._snapshots = [_Snapshot.of(snapshot) for snapshot in state["kept"]]
        self._last = None if state["last"] is None else _Snapshot.of(state["last"])
        last = self._snapshots[-1:]
        if self._last is not None and last and last[0].number == self._last.number:
            self._last = last[0]
        self._seen, self._stride, self._phase = state["place"]

    def moments(self, x_scaler: Standardiser, features: list[int]) -> list[Moment]:
        """Return the recorded steps and the last one, with points along one or two features.

        Args:
            x_scaler: scaler of the inputs; locations are in the user's units.
        """
        snapshots = list(self._snapshots)
        if self._last is not None and self._last not in snapshots[-1:]:
            snapshots.append(self._last)
        shift, scale = x_scaler.shift.numpy(), x_scaler.scale.numpy()
        return [
            {
                "phase": each.phase,
                "step": each.number + 1,
                "objective": float(f"{each.objective:.8g}") if isfinite(each.objective) else None,
                "x": _coordinates(each.points, shift, scale, features[0]),
                "y": _coordinates(each.points, shift, scale, features[1]) if features[1:] else [],
            }
            for each in snapshots
        ]


def training_summary(
    history: TrainingHistory,
    estimator: Any,
    encoder: TableEncoder,
    relevant: dict[str, float] | None,
) -> Training:
    """Return the training history along the two most relevant features."""
    owners = [column.name for column in encoder.columns for _ in column.features]
    weights = [0.0 if relevant is None else relevant[name] for name in owners]
    best: list[int] = []
    for feature in sorted(range(len(owners)), key=lambda i: -weights[i]):
        if owners[feature] not in [owners[b] for b in best]:
            best.append(feature)
    return {
        "inputs": [encoder.features[i] for i in best[:2]],
        "moments": history.moments(estimator._x_scaler, best[:2]),
    }


@dataclass(frozen=True, slots=True, eq=False)
class _Snapshot:
    """A recorded step of a fit."""

    number: int
    phase: str
    objective: float
    points: NDArray[np.float64]
    begins: bool
    """Whether the step is the first one of its phase."""

    def state_dict(self) -> dict[str, Any]:
        return {**asdict(self), "points": torch.from_numpy(self.points)}

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> "_Snapshot":
        return cls(**{**state, "points": state["points"].numpy()})


def _coordinates(
    points: NDArray[np.float64],
    shift: NDArray[np.float64],
    scale: NDArray[np.float64],
    feature: int,
) -> list[float]:
    """Return coordinates with seven digits, which is enough for a plot of dates and hours."""
    values = points[:, feature] * scale[feature] + shift[feature]
    return [float(f"{value:.7g}") for value in values]
