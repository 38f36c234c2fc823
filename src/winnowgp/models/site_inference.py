"""The best q(u) for any likelihood at fixed parameters: sites moved until the bound settles."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from winnowgp.bounds import Sites, SiteSums, WhitenedChunks, marginals, site_sums, whitened_kl
from winnowgp.errors import NotPositiveDefiniteError
from winnowgp.linalg import definite_cholesky

_SHORTEST = 1e-4
_MEMORY = 6

ExpectedLogProb: TypeAlias = Callable[[slice, Tensor, Tensor], Tensor]
"""From rows, means and variances `[B P]` of their centred latents to nats, differentiable."""


@dataclass(frozen=True, slots=True)
class Inferred:
    """q(u) of some sites, and where a natural-gradient step would take them."""

    sites: Sites
    sums: SiteSums
    mean: Float[Tensor, "N P"]
    """Of each row's centred latents under q."""
    variance: Float[Tensor, "N P"]
    better: Sites
    """The sites that the likelihood asks for at these marginals; the same at the optimum."""
    bound: float
    """In nats."""

    def constant(self) -> float:
        """Σ_i c_i: the bound less the evidence of the sites."""
        return self.bound - self.sums.evidence().item()


@torch.no_grad()
def inferred(
    chunks: WhitenedChunks,
    expected: ExpectedLogProb,
    *,
    P: int,
    start: Sites | None = None,
    gain: float,
    most: int = 100,
) -> Inferred:
    """Natural-gradient steps until one gains less than `gain` nats.

    A step to the sites that the likelihood asks for is taken whole where that raises the bound, and
    halved until it does where it does not, or where q would have no covariance (sites of negative
    precision). Two passes over the rows a step.

    Args:
        P: number of latent functions.
        start: sites to begin with, such as those of nearby parameters.
    """
    current = _started(chunks, expected, P, start)
    steps, rate = _Steps(), 1.0
    for _ in range(most):
        proposal = steps.mixed(current, rate)
        plain = proposal is None
        if proposal is None:
            proposal = current.sites.towards(current.better, rate)
        try:
            tried = _evaluated(chunks, expected, proposal)
        except NotPositiveDefiniteError:
            tried = None
        if tried is None or not tried.bound > current.bound:
            # At the optimum whatever is left is rounding.
            if rate < _SHORTEST or (tried and tried.bound > current.bound - 0.1 * gain):
                break
            rate *= 0.5 if plain else 1.0
            steps.forget()
            continue
        gained = tried.bound - current.bound
        steps.take(current, tried)
        current, rate = tried, min(1.0, 1.5 * rate)
        if gained < gain:
            break
    return current


class _Steps:
    """Anderson's mixing: the last few steps, combined so that what is left to do nearly cancels.

    Where sites of several latent functions pull at one another (softmax), plain steps gain a
    constant share of what is left each; mixed ones a growing share.
    """

    def __init__(self) -> None:
        self._moves: list[Tensor] = []
        self._changes: list[Tensor] = []

    def forget(self) -> None:
        """Start again, after a step that did not help."""
        self._moves.clear()
        self._changes.clear()

    def take(self, before: Inferred, after: Inferred) -> None:
        """Remember a step: how far the sites moved, and how the step that they ask for changed."""
        self._moves.append(_flat(after.sites) - _flat(before.sites))
        self._changes.append(_wanted(after) - _wanted(before))
        del self._moves[:-_MEMORY], self._changes[:-_MEMORY]

    def mixed(self, current: Inferred, rate: float) -> Sites | None:
        """The proposal of the steps so far; None where there are none."""
        if not self._moves:
            return None
        R, X, r = torch.stack(self._changes, 1), torch.stack(self._moves, 1), _wanted(current)
        gram = R.mT @ R
        gram.diagonal().add_(1e-10 * gram.diagonal().mean() + torch.finfo(r.dtype).tiny)
        share = torch.linalg.solve(gram, R.mT @ r)
        flat = _flat(current.sites) + rate * r - (X + rate * R) @ share
        linear, precision = flat.chunk(2)
        shape = current.mean.shape
        return Sites(linear.reshape(shape), precision.reshape(shape))


def _flat(sites: Sites) -> Tensor:
    return torch.cat([sites.linear.flatten(), sites.precision.flatten()])


def _wanted(at: Inferred) -> Tensor:
    """The whole natural-gradient step."""
    return _flat(at.better) - _flat(at.sites)


def _started(
    chunks: WhitenedChunks, expected: ExpectedLogProb, P: int, start: Sites | None
) -> Inferred:
    if start is not None:
        try:
            return _evaluated(chunks, expected, start)
        except NotPositiveDefiniteError:
            pass
    try:
        return _evaluated(chunks, expected, _swept(chunks, expected, P))
    except NotPositiveDefiniteError:
        flat = chunks.L.new_zeros(chunks.N, P)
        return _evaluated(chunks, expected, Sites(flat, flat))


def _swept(chunks: WhitenedChunks, expected: ExpectedLogProb, P: int) -> Sites:
    """Sites from one pass, each chunk seen by the q of those before it; O(P N M²).

    With many chunks this does the work of several steps that look at all rows. Precisions are held
    positive, so that every q on the way has a covariance.
    """
    M = len(chunks.L)
    B = torch.eye(M, dtype=chunks.L.dtype, device=chunks.L.device).repeat(P, 1, 1)
    D = chunks.L.new_zeros(M, P)
    sites = Sites(chunks.L.new_zeros(chunks.N, P), chunks.L.new_zeros(chunks.N, P))
    for part in chunks:
        rows, kff = part.rows, part.t + part.V.square().sum(0)
        q_mean, q_factor = SiteSums(definite_cholesky(B), D, D.new_zeros(P)).posterior()
        mean, variance = marginals(part.V, kff=kff, q_mean=q_mean, q_factor=q_factor)
        _, slope, curvature = _slopes(expected, rows, mean, variance)
        precision = (-2 * curvature).clamp_min(0)
        sites.precision[rows], sites.linear[rows] = precision, slope + precision * mean
        for p in range(P):
            B[p].addmm_(part.V * precision[:, p], part.V.mT)
        D.addmm_(part.V, sites.linear[rows])
    return sites


def _evaluated(chunks: WhitenedChunks, expected: ExpectedLogProb, sites: Sites) -> Inferred:
    """Two passes over the rows, O(P N M²) each."""
    sums = site_sums(chunks, sites)
    q_mean, q_factor = sums.posterior()
    mean, variance = torch.empty_like(sites.linear), torch.empty_like(sites.linear)
    linear, precision = torch.empty_like(mean), torch.empty_like(mean)
    nats = mean.new_zeros(())
    for part in chunks:
        rows = part.rows
        kff = part.t + part.V.square().sum(0)
        mean[rows], variance[rows] = marginals(part.V, kff=kff, q_mean=q_mean, q_factor=q_factor)
        total, slope, curvature = _slopes(expected, rows, mean[rows], variance[rows])
        nats += total
        precision[rows] = -2 * curvature
        linear[rows] = slope + precision[rows] * mean[rows]
    bound = (nats - whitened_kl(q_mean, q_factor)).item()
    better = Sites(linear, precision)
    if not (torch.isfinite(linear).all() and torch.isfinite(precision).all()):
        raise NotPositiveDefiniteError("the likelihood has no finite slope at some rows")
    return Inferred(sites, sums, mean, variance, better, bound)


def _slopes(
    expected: ExpectedLogProb, rows: slice, mean: Tensor, variance: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Σ_i E_i with ∂E_i/∂μ_i and ∂E_i/∂σ_i²."""
    with torch.enable_grad():
        at = mean.detach().requires_grad_(), variance.detach().requires_grad_()
        nats = expected(rows, *at).sum()
        slope, curvature = torch.autograd.grad(nats, at)
    return nats.detach(), slope, curvature
