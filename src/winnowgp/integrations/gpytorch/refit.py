"""q(u) made as good as it gets, with everything else held."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from gpytorch.variational import DeltaVariationalDistribution, MeanFieldVariationalDistribution

from winnowgp.errors import NotPositiveDefiniteError
from winnowgp.integrations.gpytorch.copied import copied
from winnowgp.integrations.gpytorch.evidence import Evidence
from winnowgp.integrations.gpytorch.frame import Frame
from winnowgp.integrations.gpytorch.gaussian_q import GaussianQ
from winnowgp.integrations.gpytorch.site_sums import SiteTotals

# Nats an observation that a step must promise and gain for another one to be tried.
_GAIN = 1e-5
_SHORTEST, _STEPS = 0.05, 30


@final
@dataclass(frozen=True, slots=True)
class Refit:
    """A model with the best q(u) found, its bound in nats, and its sites."""

    evidence: Evidence
    bound: float
    totals: tuple[SiteTotals, ...]


@torch.no_grad()
def refitted(evidence: Evidence, bound: float, *, steps: int = _STEPS) -> Refit:
    """Natural-gradient steps on the q(u) of all strategies at once, while the bound rises.

    A full step goes to the best q(u) for the sites of the present one: with a Gaussian likelihood
    and functions that are seen alone that is the optimum. A step that lowers the bound is tried
    again, shorter; the last one that raised it is kept.

    Args:
        evidence: of a model with some q(u).
        bound: of it.
        steps: at most.
    """
    rate, totals = 1.0, evidence.totals()
    for _ in range(steps):
        best = [each.best_q() for each in totals]
        if _promised(totals, best) < _GAIN * evidence.N:
            break
        tried, rate = _uphill(evidence, best, bound, rate)
        if tried is None:
            break
        gained, (evidence, bound) = tried[1] - bound, tried
        totals, rate = evidence.totals(), min(1.0, 2 * rate)
        if gained < _GAIN * evidence.N:
            break
    return Refit(evidence, bound, totals)


def _promised(totals: Sequence[SiteTotals], best: Sequence[GaussianQ]) -> float:
    """What full steps gain if the sites stay as they are: Σ_f KL[q ‖ best], in nats."""
    total = 0.0
    for each, q in zip(totals, best, strict=True):
        kind, now = each.frame.found.q, each.frame.read()
        if isinstance(kind, MeanFieldVariationalDistribution):
            return float("inf")  # the best full q is not the best diagonal one
        total += each.excess(now, q.mean, point=isinstance(kind, DeltaVariationalDistribution))
    return total


def _uphill(
    evidence: Evidence, best: Sequence[GaussianQ], bound: float, rate: float
) -> tuple[tuple[Evidence, float] | None, float]:
    """As much of a step as raises the bound, and how much that was; None where none does."""
    while rate >= _SHORTEST:
        try:
            stepped = _stepped(evidence, best, rate)
            new = stepped.bound()
        except NotPositiveDefiniteError:
            rate *= 0.5
            continue
        if new > bound:
            return (stepped, new), rate
        rate *= 0.5
    return None, rate


def _stepped(evidence: Evidence, best: Sequence[GaussianQ], rate: float) -> Evidence:
    stepped = evidence.with_model(copied(evidence.model))
    for found, q in zip(stepped.strategies, best, strict=True):
        frame = Frame.of(found)
        point = isinstance(found.q, DeltaVariationalDistribution)
        frame.write(frame.read().towards(q, rate, apart=point or found.roles == 2))
    return stepped
