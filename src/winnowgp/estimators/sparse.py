"""The base class of estimators with one set of inducing points: candidates, schedule, results."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from gpytorch.kernels import Kernel
from numpy.typing import ArrayLike
from torch import Tensor

from winnowgp import training
from winnowgp.data import Source
from winnowgp.data.dataset import sampled_rows
from winnowgp.errors import InputError
from winnowgp.estimators.base import BaseGP, check_kernel, cpu_frontier
from winnowgp.estimators.kernels import KernelExpression, kernel_from, parse_kernel
from winnowgp.estimators.validation import PARAMETERS, Constraint, locations, step_counts
from winnowgp.models import greedy_variance
from winnowgp.models.base import InducingModel
from winnowgp.point_processes import SquaredCardinality
from winnowgp.training.checkpoint import CheckpointLog
from winnowgp.training.goals import measured_predict_us, points_within

PAPER_CANDIDATES = 100
"""Number of candidates of the paper's schedule, if the user does not give one."""

CANDIDATE_ROWS = 4_000
"""Rows among which greedy variance and k-means look for candidates."""

_CANDIDATES = partial(locations, options=("auto", "greedy", "kmeans", "random"))
_PHASES = ("all candidates", "learning inclusion", "selected points")


@dataclass(kw_only=True, eq=False, repr=False)
class SparseEstimator(BaseGP, ABC):
    """The base class of estimators with one set of inducing points."""

    kernel: str | Kernel | KernelExpression = field(default="rbf", kw_only=False)
    alpha: str | float = "auto"
    max_points: int | None = None
    max_predict_us: float | None = None
    candidates: str | ArrayLike = "auto"
    epochs: tuple[int, int, int] = (200, 600, 200)

    _constraints: ClassVar[Mapping[str, Constraint]] = {
        **PARAMETERS,
        "candidates": partial(_CANDIDATES, shape=("K", "D")),
        "epochs": partial(step_counts, phases=_PHASES),
    }
    _default_candidates: ClassVar[int]

    @abstractmethod
    def _model(
        self, kernel: Kernel, candidates: Tensor, data: Source, params: SimpleNamespace
    ) -> InducingModel:
        """Return a model for standardised inputs, on the device of the data."""

    def _check_combination(self, params: SimpleNamespace) -> None:
        if params.batch_size is not None and params.schedule == "fast":
            raise InputError(
                f"`batch_size` is for `schedule='paper'`; got {self.batch_size} with the fast "
                "schedule, which uses all rows, in chunks that fit into memory. Leave it out."
            )
        if params.n_candidates is None:
            fast = params.schedule == "fast"
            params.n_candidates = self._default_candidates if fast else PAPER_CANDIDATES

    def _check_columns(self, params: SimpleNamespace, D: int) -> None:
        if isinstance(params.kernel, str):
            names = getattr(self, "feature_names_in_", ())
            columns = {str(name): [number] for number, name in enumerate(names)}
            params.kernel = parse_kernel(params.kernel, D, columns=columns)
        check_kernel(kernel_from(params.kernel, D, scale=torch.ones(D)), D)
        _CANDIDATES("candidates", params.candidates, shape=("K", D))

    def _initial_model(
        self, data: Source, params: SimpleNamespace, generator: torch.Generator, log: CheckpointLog
    ) -> InducingModel:
        del log
        kernel = kernel_from(params.kernel, data.D, scale=params.x_scaler.scale)
        candidates = _candidate_locations(data, params, kernel, seed=generator.initial_seed())
        return self._model(kernel, candidates, data, params)

    def _training_schedule(
        self, model: InducingModel, data: Source, params: SimpleNamespace, log: CheckpointLog
    ) -> training.Schedule:
        if params.schedule == "fast":
            return training.FastSchedule(
                _goal(model, data, params, log), n_candidates=params.n_candidates
            )
        pre, joint, post = params.epochs
        prior = SquaredCardinality(model.K, params.alpha)
        return training.PaperSchedule(
            prior, pre=pre, joint=joint, post=post, batch_size=params.batch_size
        )

    def _set_fitted(self, result: training.FitResult[Any], observations: float) -> None:
        """Set the attributes of the inducing points, in the user's units."""
        selection = result.selection
        self.posterior_ = result.posterior.cpu().double()
        self.kernel_ = self.posterior_.kernel
        self.elbo_ = result.elbo
        self.elbo_gap_ = result.elbo_gap / observations
        self.alpha_ = selection.alpha
        self.frontier_ = cpu_frontier(selection.frontier)
        self.n_inducing_ = self.posterior_.M
        self.inducing_points_ = self._x_scaler.inverse(self.posterior_.Z).numpy()
        self.candidates_ = self._x_scaler.inverse(result.candidates[0].cpu().double()).numpy()
        self.inclusion_ = selection.inclusion.cpu().numpy()


def _candidate_locations(
    data: Source, params: SimpleNamespace, kernel: Kernel, *, seed: int
) -> Tensor:
    """Return standardised candidates `[K D]`; none if the schedule selects them itself."""
    if isinstance(params.candidates, Tensor):
        return params.x_scaler.forward(params.candidates).to(data.dtype)
    if params.candidates in ("auto", "greedy") and params.schedule == "fast":
        return torch.zeros(0, data.D, dtype=data.dtype)
    K = params.n_candidates
    numbers = sampled_rows(data.N, max(CANDIDATE_ROWS, K), torch.Generator().manual_seed(seed))
    X = data.part(numbers).X.cpu()
    subset = X[:CANDIDATE_ROWS]
    if params.candidates == "greedy":
        initial = deepcopy(kernel).to(subset)
        return subset[greedy_variance(initial, subset, K, given=subset[:0])]
    if params.candidates == "kmeans" and len(subset.unique(dim=0)) > K:
        # Importing scikit-learn's clustering takes half a second, which not every fit needs.
        from sklearn.cluster import KMeans

        clusters = KMeans(K, n_init="auto", max_iter=20, random_state=seed)
        return torch.from_numpy(clusters.fit(subset.numpy()).cluster_centers_)
    return X[:K]


def _goal(
    model: InducingModel, data: Source, params: SimpleNamespace, log: CheckpointLog
) -> training.Goal:
    if params.alpha is not None:
        return training.FixedAlpha(params.alpha)
    if params.max_points is not None:
        return training.MaxPoints(params.max_points)
    if params.max_predict_us is None:
        return training.Tolerance(params.tolerance)
    # All processes read these rows, and one of them measures; a resumed fit does not measure again.
    rows = data.part(torch.arange(min(data.N, max(1000, params.n_candidates))))
    measured = partial(
        points_within,
        params.max_predict_us,
        predict_us=partial(measured_predict_us, model, rows),
        most=min(params.n_candidates, data.N),
    )
    return training.MaxPoints(log.once(measured))
