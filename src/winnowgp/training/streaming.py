"""Updates of a sparse GP by one batch of a stream: inducing points come and go with the data.

Each batch takes the steps of a fit, on the bound of the batch and of all rows that are remembered
(`models.online`): rows of large conditional variance join the inducing points; the
hyper-parameters are optimised; backward elimination gives the frontier, old points and rows alike,
and the goal picks a size; on request the points are moved. An old point has an exact price, the
nats of batch and memory that are lost without it.

The memory has points of its own, which include those of the model: what it loses is lost for all
later batches and hyper-parameters, and what the model leaves out is not. So the points of the
memory may lose a fifth of a tolerance in all batches together, and little if the tolerance is
large; those of the model may lose the rest, in each batch anew.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf, log, pi
from typing import TypeAlias, final

import torch
from gpytorch.kernels import Kernel, MaternKernel, RBFKernel, RQKernel
from jaxtyping import Bool, Float
from torch import Tensor

from winnowgp.bounds.collapsed import Moments, moment_bound
from winnowgp.bounds.streaming import matches, restrict_moments
from winnowgp.data import Dataset
from winnowgp.errors import NotPositiveDefiniteError, TrainingError
from winnowgp.linalg import threads_for
from winnowgp.models import Posterior, SparseGP
from winnowgp.models.greedy import pivoted_cholesky
from winnowgp.models.observations import target_noise
from winnowgp.models.online import OnlineGP
from winnowgp.models.priors import log_prior
from winnowgp.selection import Frontier, elimination_frontier
from winnowgp.selection.objective import subset_statistics
from winnowgp.selection.search import SHARE
from winnowgp.training.goals import AllCandidates, Goal, Tolerance
from winnowgp.training.lbfgs import Curvature, Stop, maximise_elbo

# Growth of the number of observations after which other lengthscales are tried.
_GROWTH = 1.5

FRESH = 512
"""Largest number of rows of a batch that may become inducing points, unless set otherwise."""

# Share of the tolerance that the memory may lose, and nats per observation that it may at most.
_MEMORY, _MEMORY_NATS = 0.2, 0.007
# Share of those that rows which are no candidates may cost, by their variance; and while shorter
# lengthscales are optimised, which need nearly all rows at first. With a fourth of it, twenty
# batches of concrete take a tenth longer, and end at the same density (seeds 0 to 5).
_UNSEEN, _UNSEEN_SEARCH = 0.25, 1.0
# Largest number of points of the memory, and per point of the model. What the memory loses never
# comes back, but a smaller tolerance is the cheaper way to predict well: with a tolerance of 0.1,
# fifteen batches of kin8nm (seed 60) take 32 CPU s with 1.6 points per point, and 21 s with 1.25;
# the negative log densities are 0.156 and 0.180.
_ALWAYS, _MOST_MEMORY = 512, 1.25
# Contenders of the elimination: with a sixth of those of a fit it takes half the time, and the
# sizes of concrete's tolerances from 0.002 to 0.18 differ by three points of 230 at most. Of few
# points all are contenders, so that half of them leave in one block.
_CONTENDERS, _FEW = 32, 128
# Tolerance from which up to one point in so many leaves with others. This halves the time again; it
# changes the sizes of concrete's tolerances by one point, but costs up to 0.007 nats per
# observation on average where functions are rough.
_LARGE, _LARGE_SHARE = 0.05, 8
# Nats, per remembered observation and at least in total, that the last iterations must gain.
_GAIN, _LEAST_GAIN, _WINDOW = 1e-3, 0.05, 3
# Nats per remembered observation that a step of the hyper-parameters must be expected to gain, by
# the curvature that earlier batches have seen, and the number of steps that are kept of them. Of
# 140 gradients in a stream of twenty batches this leaves 80, at the same density on average
# (concrete, seeds 0 to 5).
_EXPECTED, _STEPS = 1e-3, 10
# Iterations for hyper-parameters, and for locations or a constant. A few in every batch predict
# later batches better than an optimum now and then: rows of a sorted stream are not typical of all.
# With five instead of three, concrete ends at the same density (seeds 0 to 5) after a fifth more
# gradients.
_ITERATIONS, _MOST_ITERATIONS = 3, 30


Steps: TypeAlias = Float[Tensor, "m 2 n"]
"""The latest steps of the hyper-parameters, each with the change of the gradient per observation
beside it: what is known of the curvature of the bound when the next batch arrives."""


@final
@dataclass(frozen=True, slots=True)
class StreamUpdate:
    """A model after one more batch."""

    online: OnlineGP
    """The model at the points of its memory, which contains the batch."""
    posterior: Posterior
    frontier: Frontier
    """ELBO of batch and memory for each number of inducing points."""
    elbo: float
    """Bound of all remembered rows, the batch included, in nats."""
    gap: float
    """ELBO gap of the posterior in nats: that of the memory plus that of its own selection."""
    given_up: float
    """ELBO gap of the memory after all batches, this one included, in nats."""
    moved: int
    kept: Bool[Tensor, " M"]
    """Which points of the old memory are left; they come first in the new one, in order."""
    selected: Bool[Tensor, " K"]
    """Which points of the new memory are the inducing points of the posterior."""
    steps: Steps | None
    """The latest steps of the hyper-parameters."""
    noise_share: Float[Tensor, "*outputs"] | None
    """The noise variance of the posterior, relative to that which the bound has learnt."""


def update(
    online: OnlineGP,
    data: Dataset,
    *,
    goal: Goal | None = None,
    given_up: float = 0.0,
    earlier: float = 0.0,
    fresh: int = FRESH,
    learn: bool = True,
    waiting: float = 0.0,
    steps: Steps | None = None,
    move: bool = False,
) -> StreamUpdate:
    """Return a model that has seen one more batch; `online` stays as it is.

    A tolerance is the largest ELBO gap of all batches together, in nats per observation: that of
    the memory plus that of this selection. The part that is not used is left to later batches.

    Args:
        online: the model, whose candidates are the points of its memory.
        data: the batch, on the device of the model.
        goal: rule for the number of inducing points.
        given_up: ELBO gap of the memory after earlier batches, in nats.
        earlier: number of observations of `data` that are of earlier batches.
        fresh: largest number of rows of the batch that become candidates.
        learn: whether to optimise hyper-parameters.
        waiting: number of earlier observations since hyper-parameters were last optimised.
        steps: the latest steps of the hyper-parameters in earlier batches. With a few of them, one
            gradient shows whether another step would gain enough.
        move: whether to optimise the locations of the selected points as well.

    Raises:
        NotPositiveDefiniteError: a factorisation failed.
    """
    goal = Tolerance() if goal is None else goal
    tolerance = goal.nats if isinstance(goal, Tolerance) else Tolerance().nats
    old = online.model.candidates.detach()
    fixed = isinstance(goal, AllCandidates)

    def pool_of(model: OnlineGP, unseen: float = _UNSEEN, *, shared: bool = True) -> OnlineGP:
        nats = unseen * _memory_nats(tolerance)
        rows = _with_fresh(model, data, old, 0 if fixed else fresh, nats)
        return model.with_candidates(rows, shared=shared)

    # Hyper-parameters are optimised in place. The few iterations hardly change the rows that are
    # needed as candidates.
    pool = pool_of(online, shared=not learn)
    if learn:
        before = online.memory.observations + earlier - waiting
        curvature = _curvature(steps, online, data)
        pool = optimise_hyperparameters(
            pool, data, before=before, pool_of=pool_of, curvature=curvature
        )
        steps = _steps(curvature, online, data)
    try:
        L, moments = pool.moments(data)
    except NotPositiveDefiniteError:
        pool = pool_of(online)
        L, moments = pool.moments(data)
    statistics = subset_statistics(L, *moments)
    reference, lowest = _total(moments), -inf
    if isinstance(goal, Tolerance):
        goal = _within(goal, online, data, reference)
        tolerance = goal.nats
        goal = _remaining(goal, given_up, statistics.N)
        if goal.limit is None:
            lowest = reference - goal.nats * statistics.N
    with threads_for(12.0 * statistics.K**3):
        contenders = statistics.K if statistics.K <= _FEW else _CONTENDERS
        frontier = elimination_frontier(
            statistics,
            lowest=lowest,
            contenders=contenders,
            share=_LARGE_SHARE if tolerance >= _LARGE else SHARE,
        )
    reference = max(reference, frontier.bounds.max().item())
    M = goal.size(frontier, reference=reference)
    # A fit may have given up all of its tolerance; the memory then has that of the batch.
    nats = _memory_nats(tolerance)
    share = max(frontier.N - given_up / nats, data.observations - earlier)
    K = frontier.smallest(nats * share / frontier.N, reference=reference)
    K = pool.model.K if fixed else max(M, min(K, max(int(_MOST_MEMORY * M), _ALWAYS)))
    mask, own = frontier.masks[M], frontier.masks[K]
    selected = pool.with_candidates(pool.model.candidates[mask], shared=True)
    remembering, part = pool.with_candidates(pool.model.candidates[own], shared=True), mask[own]
    L_own, own_moments = restrict_moments(L, moments, own)
    # Subsets of the frontier are nested.
    L, moments = restrict_moments(L_own, own_moments, part)
    elbo, moved = _total(moments), 0
    lost = max(reference - frontier.bounds[K].item(), 0.0)
    if move and M:
        shifted = selected.with_candidates(selected.model.candidates)
        _optimise(shifted, data, move=True)
        try:
            after = shifted.moments(data)
        except NotPositiveDefiniteError:
            after = None
        if after is not None and _total(after[1]) > elbo:
            # The memory moves along.
            (L, moments), moved = after, M
            (L_own, own_moments), own, part = after, mask, mask[mask]
            selected = remembering = shifted
            elbo = _total(moments)
            lost = max(reference - elbo, 0.0)
    if online.memory.fixed is None and not data.has_noise:
        remembering = remembering.remembering(L_own, own_moments)
    else:
        remembering = remembering.after(data)
    # A fit, or an update with all rows at hand, has the noise of the bound.
    learns_noise = _learns_noise(online) and not data.has_noise
    share = remembering.memory.noise_share() if learns_noise else None
    return StreamUpdate(
        online=remembering,
        posterior=selected.posterior(L, moments, noise_share=share),
        frontier=frontier,
        elbo=elbo,
        gap=given_up + max(reference - elbo, 0.0),
        given_up=given_up + lost,
        moved=moved,
        kept=own[: len(old)].cpu(),
        selected=part.cpu(),
        steps=steps,
        noise_share=None if share is None else share.cpu(),
    )


def _learns_noise(online: OnlineGP) -> bool:
    """Return whether the noise variance is learnt from remembered rows, and all noise is learnt."""
    model, memory = online.model, online.memory
    learnt = all(parameter.requires_grad for parameter in model.likelihood.parameters())
    return isinstance(model, SparseGP) and learnt and memory.N > 0 and memory.fixed is None


def _with_fresh(
    online: OnlineGP, data: Dataset, old: Float[Tensor, "M D"], count: int, nats: float
) -> Float[Tensor, "K D"]:
    """Return the old points, and rows of the batch until others could hardly raise the bound.

    A row that is no candidate costs at most ½ (k_ii − q_ii)/σ² nats of the trace.

    Args:
        count: largest number of rows.
        nats: what the other rows may cost, per observation of the batch.
    """
    kernel, X = online.model.kernel, data.X
    noise = 1.0
    if isinstance(online.model, SparseGP):
        variance = online.model.noise if data.noise is None else online.model.noise + data.noise
        noise = 1 / (1 / variance).mean().item()
    stop = 2 * noise * nats * data.observations
    rows = X[pivoted_cholesky(kernel, X, count, given=old, stop=stop).indices]
    return torch.cat([old, rows[matches(old, rows) < 0]])


def _curvature(steps: Steps | None, online: OnlineGP, data: Dataset) -> Curvature:
    """Return the curvature of the bound of all rows that steps in earlier batches have seen.

    There is none if the model has other hyper-parameters than these had.
    """
    numbers = sum(p.numel() for p in online.model.parameters() if p.requires_grad)
    if steps is None or steps.shape[2] != numbers:
        return Curvature(_STEPS)
    N = online.memory.observations + data.observations
    return Curvature.of(steps * steps.new_tensor([1.0, N])[:, None], memory=_STEPS)


def _steps(curvature: Curvature, online: OnlineGP, data: Dataset) -> Steps | None:
    """Return the steps that a curvature has seen, per observation."""
    pairs, N = curvature.pairs(), online.memory.observations + data.observations
    return pairs / pairs.new_tensor([1.0, N])[:, None] if len(pairs) else None


def _memory_nats(tolerance: float) -> float:
    """Return the nats per observation that the memory may lose in all batches together."""
    return min(_MEMORY * tolerance, _MEMORY_NATS)


def optimise_hyperparameters(
    pool: OnlineGP,
    data: Dataset,
    *,
    before: float,
    pool_of: Callable[[OnlineGP, float], OnlineGP] = lambda online, unseen: online,
    stop: Stop | None = None,
    curvature: Curvature | None = None,
) -> OnlineGP:
    """Return the model with optimised hyper-parameters, now and then from shorter lengthscales.

    A column that hardly varied in early batches has a long lengthscale, at which the bound is flat.
    Whenever the number of observations has grown by half, lengthscales are shortened first, with
    the rows as candidates that these need. If that ends below where it began, the hyper-parameters
    are optimised from those of the model.

    Args:
        pool: the model, whose parameters change in place.
        data: the batch.
        before: number of observations when hyper-parameters were last optimised.
        pool_of: returns a model with the candidates that its hyper-parameters need, given the share
            of the nats of the memory that other rows may cost.
        stop: stopping rule; that of a stream if None.
        curvature: curvature of the bound along earlier steps, to which those of this optimisation
            are added.
    """
    after = pool.memory.observations + data.observations
    if before and int(log(after, _GROWTH)) > int(log(before, _GROWTH)):
        shorter = pool.with_candidates(pool.model.candidates)
        if _shorten(shorter.model.kernel, torch.cat([data.X, pool.memory.Z])):
            shorter = pool_of(shorter, _UNSEEN_SEARCH)
            value = _optimise(shorter, data, move=False, stop=stop, curvature=curvature)
            if value >= _objective(pool, data):
                # Optimised lengthscales are longer, and need fewer candidates.
                return pool_of(shorter, _UNSEEN)
    _optimise(pool, data, move=False, stop=stop, curvature=curvature)
    return pool


def _objective(online: OnlineGP, data: Dataset) -> float:
    """Return the bound and the log prior of the hyper-parameters, in nats."""
    return online.bound(data) + log_prior(online.model).item()


@torch.no_grad()
def _shorten(kernel: Kernel, X: Float[Tensor, "N D"]) -> bool:
    """Limit lengthscales to √D standard deviations of their column; return whether one changed.

    Frozen lengthscales stay.
    """
    changed = False
    for part in kernel.modules():
        stationary = isinstance(part, RBFKernel | MaternKernel | RQKernel)
        if stationary and part.raw_lengthscale.requires_grad:
            columns = X[:, part.active_dims] if isinstance(part.active_dims, Tensor) else X
            spread, before = columns.std(0, correction=0), part.lengthscale.clone()
            spread = spread if before.numel() > 1 else spread.amax()
            longest = torch.where(spread > 0, columns.shape[1] ** 0.5 * spread, torch.inf)
            part.initialize(lengthscale=torch.minimum(before, longest))
            changed |= not torch.equal(part.lengthscale, before)
    return changed


def _optimise(
    online: OnlineGP,
    data: Dataset,
    *,
    move: bool,
    stop: Stop | None = None,
    curvature: Curvature | None = None,
) -> float:
    """Optimise hyper-parameters, and locations if `move`, in place; they stay if that fails.

    Returns: the bound and the log prior, in nats; −∞ after a failure.
    """
    model = online.model
    model.candidates.requires_grad_(move)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    N = online.memory.observations + data.observations
    if stop is None:
        gain = max(_GAIN * N, _LEAST_GAIN)
        expected = None if move else max(_EXPECTED * N, _LEAST_GAIN)
        # A constant is cheap to optimise.
        iterations = _ITERATIONS if model.K and not move else _MOST_ITERATIONS
        stop = Stop(gain, _WINDOW, iterations, expected=expected)
    try:
        with threads_for(10.0 * model.K**3):
            value = maximise_elbo(
                model,
                torch.cat([data.X, online.memory.Z]),
                objective=online.objective(data),
                stop=stop,
                curvature=curvature,
            ).value
    except TrainingError:
        model.load_state_dict(before)
        value = -inf
    model.candidates.requires_grad_(False)
    return value + log_prior(model).item()


def _within(goal: Tolerance, online: OnlineGP, data: Dataset, reference: float) -> Tolerance:
    """Return the tolerance for rows on which the largest model gains little over a constant."""
    if not isinstance(online.model, SparseGP):
        return goal
    N = online.memory.observations + data.observations
    return goal.within(reference - _constant_bound(online, data), N=N)


def _remaining(goal: Tolerance, given_up: float, N: float) -> Tolerance:
    """Return the tolerance that earlier batches have left, per observation that is remembered."""
    # Points that cost nothing but rounding errors may always leave.
    return replace(goal, nats=max(goal.nats - given_up / N, 1e-9))


@torch.no_grad()
def _constant_bound(online: OnlineGP, data: Dataset) -> float:
    """Return the log-likelihood of all rows under the best constant, in nats.

    It has the noise of the model, multiplied by the best factor. What is remembered of known noise
    is not multiplied.
    """
    memory, P = online.memory, online.memory.P
    noise = target_noise(online.model.likelihood)
    variance = noise if data.noise is None else noise + data.noise
    square = (memory.y.square() / noise).sum() + (memory.residual / noise).sum()
    square = square + data.weighted(data.Y.square() / variance).sum()
    scale = data.weighted((2 * pi * variance).log().expand_as(data.Y)).sum()
    scale = scale + memory.N * (2 * pi * noise).log().expand(P).sum()
    count = (memory.N + data.observations) * P
    bound = -0.5 * (scale.item() + count * (log(max(square.item() / count, 1e-300)) + 1))
    if memory.fixed is not None:
        bound -= 0.5 * (memory.fixed.y.square().sum() + memory.fixed.residual).item()
    return bound


def _total(moments: list[Moments]) -> float:
    return torch.stack([moment_bound(m) for m in moments]).sum().item()
