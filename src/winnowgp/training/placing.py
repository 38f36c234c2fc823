"""Where rows lie in the latent space of a fitted model."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from winnowgp.models import RowBound
from winnowgp.training.small_problems import maximise_each

# Rows placed at once: bounds memory at this many times the pairs of points.
ROWS = 512


@dataclass(frozen=True, slots=True)
class Places:
    """q(x_i) = N(mean_i, diag variance_i) of some rows, and each row's bound there."""

    mean: Float[Tensor, "N Q"]
    variance: Float[Tensor, "N Q"]
    nats: Float[Tensor, " N"]


def placed(
    bound: RowBound,
    *,
    anchors: tuple[Float[Tensor, "J Q"], Float[Tensor, "J Q"]],
    starts: int = 3,
    flat: float = 1e-6,
) -> Places:
    """The best q(x_i) found for each row, independently of the other rows.

    Each row starts at the anchors (means and variances, those of training rows for example) that
    suit it best and are not close to each other; BFGS climbs from each until no slope exceeds
    `flat` nats a standard deviation, and the best end counts.
    """
    parts = torch.arange(bound.N, device=anchors[0].device).split(ROWS)
    found = [_placed(bound, rows, anchors, starts=starts, flat=flat) for rows in parts]
    return Places(
        torch.cat([p.mean for p in found]),
        torch.cat([p.variance for p in found]),
        torch.cat([p.nats for p in found]),
    )


def _placed(
    bound: RowBound,
    rows: Int[Tensor, " B"],
    anchors: tuple[Tensor, Tensor],
    *,
    starts: int,
    flat: float,
) -> Places:
    nats = bound.of(rows).everywhere(*anchors)
    best: Places | None = None
    for _ in range(starts):
        chosen = nats.argmax(1)
        ended = climbed(bound, rows, anchors[0][chosen], anchors[1][chosen], flat=flat)
        best = ended if best is None else _better(best, ended)
        # Anchors within half a prior standard deviation lead to the same place.
        near = torch.cdist(anchors[0][chosen], anchors[0]) < 0.5
        nats = nats.masked_fill(near, -torch.inf)
        if bool(torch.isinf(nats).all()):
            break
    assert best is not None
    return best


def climbed(
    bound: RowBound,
    rows: Int[Tensor, " B"],
    mean: Float[Tensor, "B Q"],
    variance: Float[Tensor, "B Q"],
    *,
    flat: float = 1e-6,
) -> Places:
    """Each row's q(x) climbed from the one given."""
    Q, spread = mean.shape[1], variance.sqrt()

    def nats(which: Tensor, x: Tensor) -> Tensor:
        at = x[:, :Q] * spread[which]
        # Variances beyond e^±30 would overflow; the prior keeps them far from there.
        return bound(rows[which], at, x[:, Q:].clamp(-30, 30).exp())

    start = torch.cat([mean / spread, variance.log()], 1)
    x, value = maximise_each(nats, start, flat=flat)
    return Places(x[:, :Q] * spread, x[:, Q:].exp(), value)


def _better(a: Places, b: Places) -> Places:
    wins = b.nats > a.nats
    return Places(
        torch.where(wins[:, None], b.mean, a.mean),
        torch.where(wins[:, None], b.variance, a.variance),
        torch.where(wins, b.nats, a.nats),
    )
