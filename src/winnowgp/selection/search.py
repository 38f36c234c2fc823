"""Discrete search over subsets, one exact marginal gain at a time.

Every step reads all marginal gains of a `SearchState` and moves to a neighbour in O(K²). Searches
maximise the score L(Z) + w(|Z|) for a table w(0..K), such as −α m². They are greedy and
deterministic: the result is a local optimum under the moves named, not the best subset.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from winnowgp.errors import InputError
from winnowgp.selection.objective import SearchObjective, SearchState
from winnowgp.typing import SizeTable

_FRESH = 64  # flips between fresh tableaux: rounding grows with each flip

_PATIENCE = 5


@dataclass(frozen=True, slots=True)
class Path:
    """Subsets met on a walk, and their bounds in nats."""

    masks: Bool[Tensor, "T K"]
    bounds: Float[Tensor, " T"]


@dataclass(frozen=True, slots=True)
class SearchResult:
    """A subset, its bound, and its score L(Z) + w(|Z|), in nats."""

    mask: Bool[Tensor, " K"]
    bound: float
    score: float


def backward_elimination(
    statistics: SearchObjective, *, start: Bool[Tensor, " K"] | None = None
) -> Path:
    """Drop the point whose removal costs least until none is left, O(K³) in all.

    Only rows still included are carried, discarded an eighth at a time; the tableau is made afresh
    each time the subset has halved. In between nothing waits for a GPU.
    """
    K, device = statistics.K, statistics.empty.device
    mask = torch.ones(K, dtype=torch.bool, device=device) if start is None else start
    state = statistics.search_state(mask)
    state = state.only(state.included)
    # When each candidate leaves, if ever.
    left = torch.full((K,), K, device=device)
    inside = anchor = size = int(mask.sum())
    bounds = [state.bound]
    while inside:
        worth, at = (
            state.marginal_gains().masked_fill(~state.included, torch.inf).min(0, keepdim=True)
        )
        left.index_fill_(0, state.rows[at], size - inside)
        state = state.drop(at, worth=worth)
        bounds.append(state.bound)
        inside -= 1
        if 2 * inside <= anchor:
            anchor = inside
            state = statistics.search_state(state.mask)
            bounds[-1] = state.bound
        if 8 * inside <= 7 * len(state.rows):
            state = state.only(state.included)
    masks = mask & (left >= torch.arange(size + 1, device=device)[:, None])
    return Path(masks=masks, bounds=torch.stack(bounds))


def forward_selection(
    statistics: SearchObjective,
    *,
    longest: int | None = None,
    log_weights: SizeTable | None = None,
) -> Path:
    """Add the point worth most, from none up to `longest` (all K if not given), O(K²) a step.

    Args:
        statistics: of the data.
        longest: number of points to stop at.
        log_weights: if given, stop too when five additions in a row were not worth
            w(m) − w(m + 1).
    """
    K = statistics.K
    limit = K if longest is None else min(longest, K)
    state = statistics.search_state(
        torch.zeros(K, dtype=torch.bool, device=statistics.empty.device)
    )
    masks, bounds, poor = [state.mask], [state.bound], 0
    for M in range(1, limit + 1):
        worth = state.marginal_gains().masked_fill(state.included, -torch.inf)
        at = int(worth.argmax())
        state = state.flip(at, worth=worth[at])
        if M % _FRESH == 0:
            state = statistics.search_state(state.mask)
        masks.append(state.mask)
        bounds.append(state.bound)
        gain = (
            0.0 if log_weights is None else (worth[at] + log_weights[M] - log_weights[M - 1]).item()
        )
        poor = poor + 1 if gain < 0 else 0
        if poor == _PATIENCE:
            break
    return Path(masks=torch.stack(masks), bounds=torch.stack(bounds))


def swap_search(
    statistics: SearchObjective,
    mask: Bool[Tensor, " K"],
    *,
    sweeps: int = 2,
    tolerance: float = 1e-6,
) -> tuple[Bool[Tensor, " K"], float]:
    """The subset improved by swaps at fixed size, O(K²) a swap tried.

    A sweep tries each included point once, cheapest first: it leaves, and the best point outside
    enters, itself if none is better. Stops when a sweep gains less than `tolerance` nats.

    Returns:
        The subset and its bound, never lower than the start's.
    """
    state = statistics.search_state(mask)
    if not bool(mask.any()) or bool(mask.all()):
        return mask, state.bound.item()
    for _ in range(sweeps):
        before = state.bound.item()
        worth = state.marginal_gains().masked_fill(~state.included, torch.inf)
        order = worth.argsort()[: int(state.included.sum())].tolist()
        for count, at in enumerate(order, start=1):
            state = _swap(state, at)
            if count % _FRESH == 0:
                state = statistics.search_state(state.mask)
        state = statistics.search_state(state.mask)
        if state.bound.item() - before < tolerance:
            break
    return state.mask, state.bound.item()


def _swap(state: SearchState, at: int) -> SearchState:
    """Take row `at` out and put the best row in; the same state when that is `at` again."""
    without = state.flip(at, worth=state.marginal_gains()[at])
    worth = without.marginal_gains().masked_fill(without.included, -torch.inf)
    best = int(worth.argmax())
    return state if best == at else without.flip(best, worth=worth[best])


def oscillating_search(
    statistics: SearchObjective, mask: Bool[Tensor, " K"], *, depth: int
) -> tuple[Bool[Tensor, " K"], float]:
    """The subset improved by adding `depth` points, then dropping as many, as long as that helps.

    The same the other way round, dropping first, is tried when it does not. Moves several points at
    once, which swaps cannot; O(depth·K²) a round.

    Returns:
        The subset, of the size it had, and its bound, never lower than the start's.
    """
    best = statistics.search_state(mask)
    size = int(mask.sum())
    tries = {min(size + depth, len(mask)), max(size - depth, 0)} - {size}
    improved = True
    while improved:
        improved = False
        for turn in sorted(tries, reverse=True):
            there = _resized(statistics, best, size=turn)
            back = statistics.search_state(_resized(statistics, there, size=size).mask)
            if back.bound.item() > best.bound.item() + 1e-6:
                best, improved = back, True
                break
    return best.mask, best.bound.item()


def _resized(statistics: SearchObjective, state: SearchState, *, size: int) -> SearchState:
    """Greedy additions or removals until the subset has `size` points."""
    for step in range(1, abs(int(state.included.sum()) - size) + 1):
        marginal_gains = state.marginal_gains()
        if int(state.included.sum()) < size:
            at = int(marginal_gains.masked_fill(state.included, -torch.inf).argmax())
        else:
            at = int(marginal_gains.masked_fill(~state.included, torch.inf).argmin())
        state = state.flip(at, worth=marginal_gains[at])
        if step % _FRESH == 0:
            state = statistics.search_state(state.mask)
    return state


def local_search(
    statistics: SearchObjective,
    mask: Bool[Tensor, " K"],
    *,
    log_weights: SizeTable,
    rounds: int = 10,
) -> SearchResult:
    """The subset improved by single flips, oscillations of falling depth and swaps, until none
    helps.

    Args:
        statistics: of the data.
        mask: where to start.
        log_weights: w(m) for m = 0..K.
        rounds: at most so many alternations.
    """
    if not torch.isfinite(log_weights[int(mask.sum())]):
        raise InputError(
            f"`mask` has {int(mask.sum())} points, a size that `log_weights` forbids; start at a "
            "size that is allowed."
        )
    best = SearchResult(mask=mask, bound=-torch.inf, score=-torch.inf)
    for _ in range(rounds):
        mask = _flipped(statistics, best.mask, log_weights=log_weights)
        size = int(mask.sum())
        for depth in sorted(
            {max(size // 2, 1), max(size // 5, 1), max(size // 12, 1)}, reverse=True
        ):
            mask, _ = oscillating_search(statistics, mask, depth=depth)
        mask, bound = swap_search(statistics, mask, sweeps=1)
        score = bound + log_weights[int(mask.sum())].item()
        if score <= best.score + 1e-6:
            break
        best = SearchResult(mask=mask, bound=bound, score=score)
    return best


def _flipped(
    statistics: SearchObjective, mask: Bool[Tensor, " K"], *, log_weights: SizeTable
) -> Bool[Tensor, " K"]:
    """Best single flip, taken while it improves the score; at most 4K of them."""
    state = statistics.search_state(mask)
    for step in range(1, 4 * len(mask) + 1):
        size = int(state.included.sum())
        marginal_gains = state.marginal_gains()
        enter = log_weights[min(size + 1, len(mask))] - log_weights[size]
        leave = log_weights[max(size - 1, 0)] - log_weights[size]
        gain = torch.where(state.included, leave - marginal_gains, enter + marginal_gains)
        at = int(gain.argmax())
        if gain[at].item() <= 1e-6:
            break
        state = state.flip(at, worth=marginal_gains[at])
        if step % _FRESH == 0:
            state = statistics.search_state(state.mask)
    return state.mask
