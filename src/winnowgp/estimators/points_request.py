"""What a user said about points, checked, and turned into locations and a plan."""

from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from numbers import Integral
from typing import Any, final

import torch
from gpytorch.kernels import Kernel
from torch import Tensor

from winnowgp.data import Source, Standardiser, sampled_rows
from winnowgp.errors import InputError
from winnowgp.estimators.arguments import positive, whole
from winnowgp.estimators.tensors import tensor
from winnowgp.models import InducingModel, greedy_variance
from winnowgp.point_processes import SquaredCardinality
from winnowgp.training import (
    Fast,
    FixedAlpha,
    Goal,
    Journal,
    MaxPoints,
    Schedule,
    ThreePhases,
    Tolerance,
    measured_predict_us,
    points_within,
)

SCHEDULES = ("fast", "paper")
CANDIDATES = ("auto", "greedy", "kmeans", "random")
PAPER_CANDIDATES = 100
# Rows that candidates are looked for in, where that takes more than drawing them.
MOST_ROWS = 4_000


@final
@dataclass(frozen=True, slots=True)
class PointsRequest:
    """The arguments of an estimator that concern inducing points."""

    alpha: float | None
    """None for "auto"."""
    tolerance: float
    max_points: int | None
    max_predict_us: float | None
    candidates: str | Tensor
    n_candidates: int
    schedule: str
    epochs: tuple[int, int, int]
    batch_size: int | None

    @classmethod
    def checked(
        cls,
        *,
        alpha: Any,
        tolerance: Any,
        max_points: Any,
        max_predict_us: Any,
        candidates: Any,
        n_candidates: Any,
        schedule: Any,
        epochs: Any,
        batch_size: Any,
        default_candidates: int,
    ) -> "PointsRequest":
        """The request, if it makes sense; an error that says what to do if not."""
        if not isinstance(schedule, str) or schedule not in SCHEDULES:
            raise InputError(f"`schedule` must be 'fast' or 'paper'; got {schedule!r}.")
        automatic = isinstance(alpha, str) and alpha == "auto"
        strength = None if automatic else positive("alpha", alpha, hint=_ALPHA_HINT)
        most = None if max_points is None else whole("max_points", max_points)
        slowest = None if max_predict_us is None else positive("max_predict_us", max_predict_us)
        if sum(said is not None for said in (strength, most, slowest)) > 1:
            raise InputError(
                "say how many points in one way only: a number for `alpha`, `max_points` or "
                "`max_predict_us`."
            )
        if schedule == "paper" and strength is None:
            raise InputError(
                "`schedule='paper'` needs a number for `alpha`, such as 0.05; the paper has no "
                "other way to say how many points."
            )
        if batch_size is not None and schedule != "paper":
            raise InputError(
                "`batch_size` is for `schedule='paper'`; the fast schedule looks at all rows, in "
                "chunks that fit into memory."
            )
        usual = PAPER_CANDIDATES if schedule == "paper" else default_candidates
        count = usual if n_candidates is None else n_candidates
        return cls(
            alpha=strength,
            tolerance=positive("tolerance", tolerance, hint="It is in nats per observation."),
            max_points=most,
            max_predict_us=slowest,
            candidates=_checked_candidates(candidates),
            n_candidates=whole("n_candidates", count),
            schedule=schedule,
            epochs=_checked_epochs(epochs),
            batch_size=None if batch_size is None else whole("batch_size", batch_size),
        )

    def locations(self, data: Source, units: Standardiser, *, kernel: Kernel, seed: int) -> Tensor:
        """Where points may be, in standard units; none if the schedule is to look for itself."""
        if isinstance(self.candidates, Tensor):
            if self.candidates.shape[1] != data.D:
                raise InputError(
                    f"`candidates` must be [K {data.D}], one column for each of `X`; "
                    f"got shape {list(self.candidates.shape)}."
                )
            return units.forward(self.candidates).to(data.dtype)
        if self.candidates in ("auto", "greedy") and self.schedule == "fast":
            return torch.zeros(0, data.D, dtype=data.dtype)
        generator = torch.Generator().manual_seed(seed)
        count = max(MOST_ROWS, self.n_candidates)
        rows = data.part(sampled_rows(data.N, count, generator)).X.cpu()
        part = rows[:MOST_ROWS]
        if self.candidates == "greedy":
            start = deepcopy(kernel).to(part)
            return part[greedy_variance(start, part, self.n_candidates, given=part[:0])]
        if self.candidates == "kmeans" and len(part.unique(dim=0)) > self.n_candidates:
            from sklearn.cluster import KMeans  # half a second that not all fits need

            clusters = KMeans(self.n_candidates, n_init="auto", max_iter=20, random_state=seed)
            return torch.from_numpy(clusters.fit(part.numpy()).cluster_centers_)
        return rows[: self.n_candidates]

    def plan(self, model: InducingModel, data: Source, journal: Journal) -> Schedule:
        """The schedule that does what was asked for; what a clock decides is in the journal."""
        if self.schedule == "paper":
            assert self.alpha is not None
            pre, process, post = self.epochs
            prior = SquaredCardinality(model.K, self.alpha)
            return ThreePhases(
                prior, pre=pre, process=process, post=post, batch_size=self.batch_size
            )
        return Fast(self._goal(model, data, journal), n_candidates=self.n_candidates)

    def _goal(self, model: InducingModel, data: Source, journal: Journal) -> Goal:
        if self.alpha is not None:
            return FixedAlpha(self.alpha)
        if self.max_points is not None:
            return MaxPoints(self.max_points)
        if self.max_predict_us is not None:
            # Read by all processes, and measured by one of them.
            some = data.part(torch.arange(min(data.N, max(1000, self.n_candidates))))
            measured = partial(
                points_within,
                self.max_predict_us,
                predict_us=partial(measured_predict_us, model, some),
                most=min(self.n_candidates, data.N),
            )
            return MaxPoints(journal.once(measured))
        return Tolerance(self.tolerance)


_ALPHA_HINT = "Larger values keep fewer points; 'auto' derives it from `tolerance`."


def _checked_candidates(candidates: Any) -> str | Tensor:
    if isinstance(candidates, str):
        if candidates not in CANDIDATES:
            raise InputError(
                f"`candidates` must be one of {', '.join(CANDIDATES)} or locations [K D]; "
                f"got {candidates!r}."
            )
        return candidates
    try:
        points = tensor(candidates)
    except (TypeError, ValueError) as error:
        raise InputError(f"`candidates` must be numbers [K D]; {error}.") from error
    if points.dim() != 2 or points.shape[0] == 0:
        raise InputError(
            f"`candidates` must be [K D] with K of at least 1; got shape {list(points.shape)}."
        )
    if not torch.isfinite(points).all():
        raise InputError("`candidates` must be finite; drop those with NaN or infinity.")
    return points


def _checked_epochs(epochs: Any) -> tuple[int, int, int]:
    steps = tuple(epochs) if isinstance(epochs, tuple | list) else ()
    if len(steps) != 3 or not all(isinstance(n, Integral) and int(n) >= 0 for n in steps):
        raise InputError(f"`epochs` must be three whole numbers of steps; got {epochs!r}.")
    return (int(steps[0]), int(steps[1]), int(steps[2]))
