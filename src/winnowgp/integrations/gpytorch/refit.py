"""q(u) made as good as it gets, with everything else held."""

from collections.abc import Sequence

import torch
from gpytorch.variational import DeltaVariationalDistribution

from winnowgp.errors import NotPositiveDefiniteError
from winnowgp.integrations.gpytorch.copied import copied
from winnowgp.integrations.gpytorch.evidence import Evidence
from winnowgp.integrations.gpytorch.frame import Frame
from winnowgp.integrations.gpytorch.gaussian_q import GaussianQ

# Nats an observation that a step must gain for another one to be tried, and the shortest step.
_GAIN, _SHORTEST = 1e-6, 0.02


@torch.no_grad()
def refitted(evidence: Evidence, *, steps: int) -> tuple[Evidence, float]:
    """Natural-gradient steps on the q(u) of all strategies at once, while the bound rises.

    A full step goes to the best q(u) for the sites of the present one: with a Gaussian likelihood
    and functions that are seen alone that is the optimum. A step that lowers the bound is tried
    again, shorter; the last one that raised it is kept.

    Args:
        evidence: of a model with some q(u).
        steps: at most.

    Returns: the model with its new q(u), and its bound in nats.
    """
    bound, rate = evidence.bound(), 1.0
    for _ in range(steps):
        with torch.enable_grad():
            best = [totals.best_q() for totals in evidence.totals()]
        tried, rate = _uphill(evidence, best, bound, rate)
        if tried is None:
            break
        gained, (evidence, bound) = tried[1] - bound, tried
        rate = min(1.0, 2 * rate)
        if gained < _GAIN * evidence.N:
            break
    return evidence, bound


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
