"""Selection as the parameters of a sparse estimator specify it, and warnings about its result.

Candidates and the goal; averages over hyper-parameters (`hyper`) and over subsets (`posterior`):
which fits take them, and which uses of a model allow them.
"""

from copy import deepcopy
from functools import partial
from typing import Any

import torch
from gpytorch.kernels import Kernel
from gpytorch.means import ConstantMean, ZeroMean
from torch import Tensor

from winnowgp import training
from winnowgp.data import Source
from winnowgp.data.row_indices import sampled_rows
from winnowgp.errors import (
    AllCandidatesWarning,
    FitWarning,
    GrowthLimitWarning,
    InputError,
    NoInducingPointsWarning,
)
from winnowgp.estimators.base import goal_within, most_points
from winnowgp.estimators.validation import HETEROSCEDASTIC, TOLERANCE, Parameters
from winnowgp.models import MixturePosterior, greedy_variance
from winnowgp.models.base import InducingModel
from winnowgp.models.heteroscedastic import HeteroscedasticGP
from winnowgp.report.summary import growth_sentence
from winnowgp.training.checkpoint import CheckpointLog
from winnowgp.training.goals import measured_predict_us, points_within
from winnowgp.training.initialization import kmeans
from winnowgp.training.laplace import MOST_ROWS

DRAWN_CANDIDATES = 512
"""Number of cluster centres or random rows for the fast schedule, if the user does not give one."""

MOST_POINTS = 4096
"""Largest number of inducing points that `max_predict_us` may result in."""

CANDIDATE_ROWS = 4_000
"""Rows among which greedy variance and k-means look for candidates."""

HYPER = ("auto", "point", "laplace")
"""Values of `hyper`: average over hyper-parameters if rows are few, never, or always."""

AVERAGED_ROWS = 500
"""Rows up to which `hyper="auto"` averages over hyper-parameters."""

OUTLIER_GAIN = 0.01
"""Nats per held-out row that an average with a constant must gain with 501 to 2,000 rows."""

# Rows below which a constant is the model to expect, and from which a model with nearly as many
# inducing points is worth a warning.
_TOO_FEW_ROWS, _MANY_ROWS = 10, 50
# What to do about each limit that may end the growth of the candidates.
_ADVICE = {
    "work": "To go on, give it more time with `max_fit_seconds` or use a GPU with `device='cuda'`",
    "memory": "To go on, use a device with more memory",
    "max_fit_seconds": "To go on, raise `max_fit_seconds` or use a GPU with `device='cuda'`",
    "n_candidates": "To go on, raise `n_candidates` or leave it out",
    "precision": "Targets with so little noise need a rougher kernel, such as `kernel='matern32'`",
}


def candidate_locations(data: Source, params: Parameters, kernel: Kernel) -> Tensor:
    """Return standardised candidates `[K D]`; none if the schedule selects them itself."""
    given = params.candidates if params.inducing_points is None else params.inducing_points
    if params.earlier is not None and params.inducing_points is None:
        given = params.earlier_points
    if isinstance(given, Tensor):
        return params.x_scaler.forward(given).to(data.dtype)
    if params.candidates in ("auto", "greedy") and params.schedule == "fast":
        return torch.zeros(0, data.D, dtype=data.dtype)
    K, seed = params.n_candidates or DRAWN_CANDIDATES, params.generator.initial_seed()
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
    if params.max_predict_us is None:
        return goal_within(params, most_points(params))
    assert isinstance(model, InducingModel)
    return goal_within(params, _fast_enough(model, data, params, log))


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


def check_hyper(params: Parameters, likelihood: Any) -> None:
    """Raise an `InputError` if other parameters cannot be used with `hyper="laplace"`.

    With such parameters, and with a limit on the cost of predictions, "auto" becomes "point".

    Args:
        likelihood: the likelihood as it was passed to the estimator.
    """
    if params.hyper == "point":
        return
    others: dict[str, tuple[Any, Any, str]] = {
        "likelihood": (likelihood, "gaussian", "members of the mixture have Gaussian noise"),
        "batch_size": (params.batch_size, None, "all rows are used"),
        "schedule": (params.schedule, "fast", "the paper's ends before the maximum"),
        "log_target": (params.log_target, False, "pass log y instead"),
        "max_predict_us": (params.max_predict_us, None, "set `max_points` instead"),
    }
    for name, (value, allowed, why) in others.items():
        if value == allowed:
            continue
        if params.hyper == "laplace":
            raise InputError(
                f"`{name}` must be {allowed!r} for `hyper='laplace'`: {why}; got {value!r}."
            )
        params.hyper = "point"
        return
    if params.hyper == "auto" and params.max_points is not None:
        params.hyper = "point"


def resolve_hyper_by_rows(params: Parameters, data: Source) -> None:
    """Resolve `hyper="auto"` by the number of rows; refuse too many rows for "laplace".

    "auto" becomes "laplace" with up to 500 rows and "point" with more. With up to 2,000,
    `params.robust` says that predictions are averaged with a constant if held-out rows gain by it.
    """
    params.robust = params.hyper == "auto" and AVERAGED_ROWS < data.N <= MOST_ROWS
    if params.hyper == "point":
        return
    if params.hyper == "auto":
        params.hyper = "laplace" if data.N <= AVERAGED_ROWS else "point"
        return
    if data.N > MOST_ROWS:
        raise InputError(
            f"`hyper='laplace'` is for at most {MOST_ROWS:,} different rows; got {data.N:,}. So "
            "many rows determine the hyper-parameters: leave it out."
        )


def gaussian_posterior(posterior: Any, *, hyper: str, subsets: str, what: str) -> Any:
    """Return a posterior that is Gaussian: of a mixture, that of the most probable values.

    Raises:
        InputError: an average over hyper-parameters or subsets was asked for, which `what` cannot
            represent.
    """
    if not isinstance(posterior, MixturePosterior):
        return posterior
    if subsets == "gibbs":
        raise InputError(
            f"{what} cannot represent predictions that are averaged over subsets; fit with "
            "`posterior='determinantal'` or 'mean-field', or save the model with `save`."
        )
    if hyper == "laplace":
        raise InputError(
            f"{what} cannot represent predictions that are averaged over hyper-parameters; fit "
            "with `hyper='point'`, or save the model with `save`."
        )
    return posterior.mode


def check_subset_posterior(params: Parameters, likelihood: Any) -> None:
    """Raise an `InputError` if other parameters cannot be used with such a posterior.

    "gibbs" averages predictions over subsets, so that `hyper="auto"` becomes "point".

    Args:
        likelihood: the likelihood as it was passed to the estimator; None for classes.
    """
    kind = params.posterior
    if kind == "mean-field":
        return
    none = {
        "schedule": (params.schedule, "fast", "the paper's learns independent inclusion"),
        "inducing_points": (params.inducing_points, None, "there is nothing to select"),
    }
    averaged = {
        "log_target": (getattr(params, "log_target", False), False, "pass log y instead"),
        "max_predict_us": (params.max_predict_us, None, "predictions average over subsets"),
    }
    if kind == "gibbs" and getattr(params, "hyper", "point") == "laplace":
        raise InputError(
            "`hyper` must be 'auto' or 'point' for `posterior='gibbs'`: one average at a time; got "
            "'laplace'."
        )
    if likelihood == HETEROSCEDASTIC:
        raise InputError(
            f"`likelihood` must not be 'heteroscedastic' for `posterior={kind!r}`: function and "
            "noise have candidates of their own. Leave `posterior` out."
        )
    others = none | (averaged if kind == "gibbs" else {})
    for name, (value, allowed, why) in others.items():
        if value is allowed or (isinstance(value, str) and value == allowed):
            continue
        raise InputError(
            f"`{name}` must be {allowed!r} for `posterior={kind!r}`: {why}; got {value!r}."
        )
    if kind == "gibbs" and getattr(params, "hyper", None) == "auto":
        params.hyper = "point"


def refuse_stream(posterior: str) -> None:
    """Raise an `InputError` if `partial_fit` cannot go on with such a posterior."""
    if posterior != "mean-field":
        raise InputError(
            "`posterior` must be 'mean-field' to learn from further batches; got "
            f"{posterior!r}: these do not sample subsets. Fit all rows together, or leave it out."
        )


def selection_alarms(estimator: Any) -> list[FitWarning]:
    """Return the alarms about the number of inducing points of a fitted sparse estimator."""
    M, frontier = estimator.n_inducing_, estimator.frontier_
    few = frontier is not None and frontier.N < _TOO_FEW_ROWS
    constant = getattr(estimator, "_constant_targets", ())  # Regressors alone have it.
    if len(constant) == estimator.posterior_.P:
        return [
            NoInducingPointsWarning(
                "the target has the same value in all training rows: the model predicts it for "
                "every row. Check the target, or add rows with other values."
            )
        ]
    if M == 0 and not isinstance(estimator.posterior_.mean, ZeroMean | ConstantMean):
        return []  # The mean alone explains the target.
    if M == 0 and few:
        return []  # Of so few rows, a constant is the model to expect.
    if M == 0:
        constant = "no inducing points were selected: the model predicts the same for every row"
        if estimator.alpha != "auto":
            return [
                NoInducingPointsWarning(
                    f"{constant}, because the prior outweighs what they gain. Lower `alpha` "
                    f"(`--alpha`), which is {estimator.alpha:g}."
                )
            ]
        kernel = "name a kernel such as `kernel='rbf + linear'` (`--kernel`)"
        if estimator.kernel != "auto":
            kernel = "compare kernels with `kernel='auto'`"
        reason = "gain no more than they would by chance"
        if estimator.growth_limit_ == "held_out":
            reason = "predict held-out rows no better than a constant"
        return [
            NoInducingPointsWarning(
                f"{constant}, because models with inducing points {reason}. Check that the inputs "
                f"have to do with the target, add columns or rows, or {kernel}."
            )
        ]
    goals = (estimator.max_points, estimator.max_predict_us)
    if any(goal is not None for goal in goals):
        return []
    given = estimator.candidates if not isinstance(estimator.candidates, str) else None
    offered = estimator.n_candidates if given is None else len(given)
    # With a tolerance, a `GrowthLimitWarning` says so where more candidates would pay.
    if estimator.alpha != "auto" and offered is not None and offered <= M:
        return [
            AllCandidatesWarning(
                f"all {M} candidates were selected, so more inducing points may pay. Raise "
                "`n_candidates`, or give more `candidates`."
            )
        ]
    rows = 0 if frontier is None else frontier.N
    if rows >= _MANY_ROWS and 0.95 * rows <= M:
        return [
            AllCandidatesWarning(
                f"{M} of {rows:g} training rows became inducing points: the model is hardly "
                "smaller than an exact Gaussian process. Leave out columns that identify rows "
                "with `drop` (`--drop`), or accept fewer points with a larger `tolerance` "
                "(`--tolerance`) or `max_points` (`--max-points`)."
            )
        ]
    return []


def growth_alarms(estimator: Any) -> list[FitWarning]:
    """Return the alarm about a limit that ended the growth of the candidates too early."""
    limit, frontier = estimator.growth_limit_, estimator.frontier_
    goals = (estimator.max_points, estimator.max_predict_us)
    tolerance = estimator.alpha == "auto" and all(goal is None for goal in goals)
    if limit in (None, "chance", "held_out") or not tolerance:
        return []  # The alarm about a model without inducing points says more.
    full = frontier is not None and frontier.evidence is not None
    if full and estimator.elbo_gap_ <= (estimator.tolerance or TOLERANCE):
        return []  # The full GP would gain no more: the limit did no harm.
    growth = growth_sentence(limit, estimator.last_doubling_gain_)
    growth = growth.replace("ended", "The search for candidates ended", 1)
    return [
        GrowthLimitWarning(
            f"{growth}. The ELBO is {estimator.elbo_gap_:.2g} nats per observation below "
            f"{'the exact evidence' if full else 'that of the largest model'}. "
            f"{_ADVICE.get(limit, 'To go on, raise this limit')}; or accept fewer inducing points "
            "with a larger `tolerance`."
        )
    ]
