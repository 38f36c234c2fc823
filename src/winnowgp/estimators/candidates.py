"""Candidates and the goal of a selection, as the parameters of a sparse estimator specify them."""

from copy import deepcopy
from functools import partial

import torch
from gpytorch.kernels import Kernel
from torch import Tensor

from winnowgp import training
from winnowgp.data import Source
from winnowgp.data.row_indices import sampled_rows
from winnowgp.estimators.validation import Parameters
from winnowgp.models import HeteroscedasticGP, greedy_variance
from winnowgp.models.base import InducingModel
from winnowgp.training.checkpoint import CheckpointLog
from winnowgp.training.goals import measured_predict_us, points_within
from winnowgp.training.initialization import kmeans

DRAWN_CANDIDATES = 512
"""Number of cluster centres or random rows for the fast schedule, if the user does not give one."""

MOST_POINTS = 4096
"""Largest number of inducing points that `max_predict_us` may result in."""

CANDIDATE_ROWS = 4_000
"""Rows among which greedy variance and k-means look for candidates."""


def candidate_locations(data: Source, params: Parameters, kernel: Kernel, *, seed: int) -> Tensor:
    """Return standardised candidates `[K D]`; none if the schedule selects them itself."""
    given = params.candidates if params.inducing_points is None else params.inducing_points
    if params.earlier is not None and params.inducing_points is None:
        given = params.earlier_points
    if isinstance(given, Tensor):
        return params.x_scaler.forward(given).to(data.dtype)
    if params.candidates in ("auto", "greedy") and params.schedule == "fast":
        return torch.zeros(0, data.D, dtype=data.dtype)
    K = params.n_candidates or DRAWN_CANDIDATES
    numbers = sampled_rows(data.N, max(CANDIDATE_ROWS, K), torch.Generator().manual_seed(seed))
    X = data.part(numbers).X.cpu()
    subset = X[:CANDIDATE_ROWS]
    if params.candidates == "greedy":
        initial = deepcopy(kernel).to(subset)
        return subset[greedy_variance(initial, subset, K, given=subset[:0])]
    if params.candidates == "kmeans" and len(subset.unique(dim=0)) > K:
        return kmeans(subset, K, seed=seed, max_iter=20)
    return X[:K]


def selection_goal(
    model: InducingModel | HeteroscedasticGP, data: Source, params: Parameters, log: CheckpointLog
) -> training.Goal:
    """Return the rule for the number of inducing points that the parameters specify."""
    if params.inducing_points is not None:
        return training.AllCandidates()
    if params.alpha is not None:
        return training.FixedAlpha(params.alpha)
    limit = None
    if params.max_points is not None:
        limit = training.MaxPoints(params.max_points)
    elif params.max_predict_us is not None:
        assert isinstance(model, InducingModel)
        limit = _fast_enough(model, data, params, log)
    if params.tolerance is not None:
        return training.Tolerance(params.tolerance, limit=limit)
    assert limit is not None
    return limit


def _fast_enough(
    model: InducingModel, data: Source, params: Parameters, log: CheckpointLog
) -> training.MaxPoints:
    """Return the number of points whose predictions take at most `max_predict_us`."""
    # All processes read these rows, and one of them measures; a resumed fit does not measure again.
    most = min(params.n_candidates or MOST_POINTS, data.N)
    rows = data.part(torch.arange(min(data.N, max(1000, most))))
    measured = partial(
        points_within,
        params.max_predict_us,
        predict_us=partial(measured_predict_us, model, rows),
        most=most,
    )
    return training.MaxPoints(log.once(measured))
