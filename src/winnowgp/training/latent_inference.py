"""Inference of latent positions of a GP-LVM, row by row, by batched BFGS."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from winnowgp.models.gplvm_posterior import RowELBO

# Number of rows inferred at once: bounds memory at this many times the pairs of inducing points.
ROWS = 512

Problems: TypeAlias = Callable[[Tensor, Tensor], Tensor]

"""A differentiable function of the numbers of B problems and their vectors `[B n]` that returns
nats `[B]`."""

_BACKTRACKS = 10
# Largest norm of a step. Where data have little noise, a row may start hundreds of its standard
# deviations away.
_LONGEST = 32.0
# What rounding may hide, relative to a value; and a gradient too small to restart for.
_ROUNDING, _SMALL = 1e-11, 1e-3


@dataclass(frozen=True, slots=True)
class LatentPositions:
    """q(x_i) = N(mean_i, diag variance_i) of some rows, and the bound of each row there."""

    mean: Float[Tensor, "N Q"]
    variance: Float[Tensor, "N Q"]
    nats: Float[Tensor, " N"]


def infer_latents(
    bound: RowELBO,
    *,
    anchors: tuple[Float[Tensor, "J Q"], Float[Tensor, "J Q"]],
    starts: int = 3,
    flat: float = 1e-6,
) -> LatentPositions:
    """Return the best q(x_i) for each row, independently of the other rows.

    BFGS starts at the anchors with the highest bound that are not close to each other, and the best
    of its results is returned.

    Args:
        bound: bound of each row as a function of q(x_i).
        anchors: means and variances to start from, such as those of training rows.
        starts: number of starts per row.
        flat: largest slope of a solution, in nats per standard deviation.
    """
    chunks = torch.arange(bound.N, device=anchors[0].device).split(ROWS)
    results = [_infer_chunk(bound, rows, anchors, starts=starts, flat=flat) for rows in chunks]
    return LatentPositions(
        torch.cat([each.mean for each in results]),
        torch.cat([each.variance for each in results]),
        torch.cat([each.nats for each in results]),
    )


def _infer_chunk(
    bound: RowELBO,
    rows: Int[Tensor, " B"],
    anchors: tuple[Tensor, Tensor],
    *,
    starts: int,
    flat: float,
) -> LatentPositions:
    nats = bound.of(rows).everywhere(*anchors)
    best: LatentPositions | None = None
    for _ in range(starts):
        nearest = nats.argmax(1)
        result = optimise_positions(
            bound, rows, anchors[0][nearest], anchors[1][nearest], flat=flat
        )
        best = result if best is None else _better(best, result)
        # Anchors within half a prior standard deviation lead to the same optimum.
        near = torch.cdist(anchors[0][nearest], anchors[0]) < 0.5
        nats = nats.masked_fill(near, -torch.inf)
        if bool(torch.isinf(nats).all()):
            break
    assert best is not None
    return best


def optimise_positions(
    bound: RowELBO,
    rows: Int[Tensor, " B"],
    mean: Float[Tensor, "B Q"],
    variance: Float[Tensor, "B Q"],
    *,
    flat: float = 1e-6,
) -> LatentPositions:
    """Return the local optimum of each row's q(x) that BFGS reaches from the one given."""
    Q, spread = mean.shape[1], variance.sqrt()

    def nats(which: Tensor, x: Tensor) -> Tensor:
        at = x[:, :Q] * spread[which]
        # Variances beyond e^±30 would overflow; the prior keeps them far from there.
        return bound(rows[which], at, x[:, Q:].clamp(-30, 30).exp())

    start = torch.cat([mean / spread, variance.log()], 1)
    x, value = maximise_each(nats, start, flat=flat)
    return LatentPositions(x[:, :Q] * spread, x[:, Q:].exp(), value)


def _better(a: LatentPositions, b: LatentPositions) -> LatentPositions:
    wins = b.nats > a.nats
    return LatentPositions(
        torch.where(wins[:, None], b.mean, a.mean),
        torch.where(wins[:, None], b.variance, a.variance),
        torch.where(wins, b.nats, a.nats),
    )


def maximise_each(
    problems: Problems, start: Float[Tensor, "N n"], *, iterations: int = 200, flat: float = 1e-6
) -> tuple[Float[Tensor, "N n"], Float[Tensor, " N"]]:
    """Maximise many small problems at once by BFGS, each with its own matrix and step lengths.

    The result of a problem does not depend on the others that are solved beside it.

    Args:
        iterations: largest number of iterations.
        flat: a problem is solved when its gradient is at most this large in every coordinate.

    Returns:
        The maximisers, never lower than the start, and the nats there.
    """
    search = _BatchedBFGS(problems, start)
    for _ in range(iterations):
        moving = (search.gradient.abs().amax(1) > flat) & ~search.stuck
        if not bool(moving.any()):
            break
        search.step(torch.nonzero(moving)[:, 0])
    return search.x, search.value


@final
class _BatchedBFGS:
    """The current point and inverse Hessian of every problem."""

    def __init__(self, problems: Problems, start: Float[Tensor, "N n"]) -> None:
        N, n = start.shape
        self._problems = problems
        self.x = start.detach().clone()
        self.value, self.gradient = self._evaluate(torch.arange(N, device=start.device), self.x)
        self._eye = torch.eye(n, dtype=start.dtype, device=start.device)
        # The first step has about unit length.
        size = self.gradient.norm(dim=1).clamp_min(1.0)
        self._H = self._eye / size[:, None, None]
        self.stuck: Bool[Tensor, " N"] = ~torch.isfinite(self.value)

    def step(self, rows: Int[Tensor, " B"]) -> None:
        """Take one iteration of the problems in `rows`."""
        g = self.gradient[rows]
        direction = (self._H[rows] @ g[:, :, None])[:, :, 0]
        direction = direction / (direction.norm(dim=1, keepdim=True) / _LONGEST).clamp_min(1.0)
        x, value, gradient, moved = self._line_search(rows, direction)
        s, y = x - self.x[rows], g - gradient
        self.x[rows], self.value[rows], self.gradient[rows] = x, value, gradient
        self._update(rows[moved], s[moved], y[moved])
        failed = rows[~moved]
        # If the line search fails along the gradient, stop; otherwise reset the inverse Hessian.
        scale = self.gradient[failed].norm(dim=1).clamp_min(1.0)
        plain = self._eye / scale[:, None, None]
        fresh = (self._H[failed] - plain).abs().amax((1, 2)) < 1e-12
        self.stuck[failed] = fresh | (self.gradient[failed].abs().amax(1) < _SMALL)
        self._H[failed] = plain

    def _line_search(
        self, rows: Int[Tensor, " B"], direction: Float[Tensor, "B n"]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Backtrack along each direction until the gain is sufficient, up to rounding."""
        x, value, gradient = self.x[rows].clone(), self.value[rows].clone(), self.gradient[rows]
        gradient, start = gradient.clone(), x.clone()
        slope = (direction * gradient).sum(1)
        least = value - _ROUNDING * (1 + value.abs())
        step, moved = torch.ones_like(value), torch.zeros_like(value, dtype=torch.bool)
        for _ in range(_BACKTRACKS):
            active = torch.nonzero(~moved)[:, 0]
            if not len(active):
                break
            trial = start[active] + step[active, None] * direction[active]
            new, slope_at = self._evaluate(rows[active], trial)
            enough = new >= least[active] + 1e-4 * step[active] * slope[active]
            enough &= slope[active] > 0
            done = active[enough]
            x[done], value[done], gradient[done] = trial[enough], new[enough], slope_at[enough]
            moved[done] = True
            step[active] *= 0.3
        return x, value, gradient, moved

    def _update(self, rows: Tensor, s: Tensor, y: Tensor) -> None:
        """Set H ← (I − ρ s yᵀ) H (I − ρ y sᵀ) + ρ s sᵀ where the curvature along s is positive."""
        sy = (s * y).sum(1)
        good = sy > 1e-12 * s.norm(dim=1) * y.norm(dim=1)
        rows, s, y, sy = rows[good], s[good], y[good], sy[good]
        left = self._eye - s[:, :, None] * y[:, None, :] / sy[:, None, None]
        self._H[rows] = (
            left @ self._H[rows] @ left.mT + s[:, :, None] * s[:, None, :] / (sy[:, None, None])
        )

    def _evaluate(self, rows: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            at = x.detach().requires_grad_()
            value = self._problems(rows, at)
            gradient = torch.autograd.grad(value.sum(), at)[0]
        unusable = ~(torch.isfinite(value) & torch.isfinite(gradient).all(1))
        return value.detach().masked_fill(unusable, -torch.inf), gradient.nan_to_num(0.0)
