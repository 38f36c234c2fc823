"""Fewer inducing points at other hyper-parameters that keep the tolerance.

The evidence may be highest for a function that varies rapidly and needs many points, and hardly
lower for a smooth one that needs few.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Generic

import torch
from jaxtyping import Float
from torch import Tensor

from winnowgp.data import Dataset
from winnowgp.linalg import threads_for
from winnowgp.models.base import InducingModel, Model
from winnowgp.models.priors import log_prior
from winnowgp.selection.frontier import Frontier
from winnowgp.training.cross_validation import CrossValidation
from winnowgp.training.fast_steps import FastSteps
from winnowgp.training.goals import Tolerance
from winnowgp.training.growth import SmallerModel
from winnowgp.training.initialization import with_unit_weights
from winnowgp.training.lbfgs import Stop
from winnowgp.training.optima import leave_one_out_gap
from winnowgp.training.predictive_gap import relocated
from winnowgp.training.schedules import Growth

# The number of points has settled if it does not fall below this share.
SETTLED = 0.97
# Points are moved if they have fewer coordinates than this many per row. More of them would be
# fitted to the rows, and hardly save points where so many are needed.
MOVED = 0.5
# Share of the points that another optimum may need, and tolerances that it may be below the best
# before an optimisation that ended early is continued.
_FEWER, _NEAR = 0.75, 1.5


@dataclass(frozen=True, slots=True)
class Choice(Generic[Model]):
    """The selected model, and the largest model it is compared with."""

    model: Model
    reference: float
    """Highest ELBO known, or the exact evidence where it was maximised."""
    growth: Growth | None
    exact: bool = False
    """Whether the reference is the exact evidence."""
    frontiers: tuple[Frontier, ...] = ()
    """Frontiers at the hyper-parameters that were visited."""
    largest: Model | None = None
    """The largest model that was fitted."""
    constant: float = -inf
    """ELBO of the constant model."""
    candidates: Model | None = None
    """The pool that the model is a subset of; None if its points have moved since."""
    goal: Tolerance | None = None
    """The tolerance that the ELBO of the model keeps, if that is the goal."""

    @property
    def compared(self) -> Model:
        """The model that the selected one is compared with: the largest, or itself."""
        return self.model if self.largest is None else self.largest

    def held_out_densities(self, held_out: CrossValidation) -> Float[Tensor, " n"]:
        """Return log densities of held-out rows, without which the points are selected again.

        Points that have moved are moved again without them.
        """
        if self.candidates is None:
            return held_out.densities(self.model, relocate=relocated)
        return held_out.densities(self.candidates, self.model.K)


def with_fewer_points(
    steps: FastSteps[Model], chosen: Choice[Model], smaller: Sequence[SmallerModel[Model]]
) -> Choice[Model] | None:
    """Return a choice of fewer points at other hyper-parameters, if these keep the tolerance.

    The evidence may be highest for a function that varies rapidly and needs many points, and hardly
    lower for a smooth one that needs few.
    """
    if chosen.goal is None:
        return None
    nats, within, prior = chosen.goal.nats, [], _log_prior(chosen.model)
    for index, each in enumerate(smaller):
        # Hyper-parameters that are less probable a priori must gain as much.
        reference = chosen.reference + max(prior - _log_prior(each.model), 0.0)
        if each.frontier.bounds.max().item() >= reference - nats * steps.data.observations:
            within.append((each.frontier.smallest(nats, reference=reference), index))
    if not within:
        return None
    M, index = min(within)
    if M >= SETTLED * chosen.model.K:
        return None
    pool, frontier = smaller[index].model, smaller[index].frontier
    frontiers = (*chosen.frontiers, *(each.frontier for each in smaller))
    return _moved(steps, replace(chosen, frontiers=frontiers), pool, frontier, M)


def with_other_optimum(steps: FastSteps[Model], chosen: Choice[Model]) -> Choice[Model] | None:
    """Return a choice of clearly fewer points at another optimum of the exact evidence of all rows.

    Its ELBO keeps the tolerance, measured from the best optimum, and so does the log density of
    rows that are left out: a smoother function of hardly lower evidence may predict much worse.
    Where as many points as were chosen, less a quarter, of greatest conditional variance do not
    keep the tolerance, no points are selected.
    """
    initial = steps.initialization
    if chosen.goal is None or not chosen.exact or initial is None or not initial.complete:
        return None
    if chosen.growth is not None and chosen.growth.limit is not None:
        return None
    data, best, result = steps.data, initial.optima[0], None
    nats = chosen.goal.nats * data.observations
    # With weights, the optima are those of unit weights.
    near = _NEAR * chosen.goal.nats * best.observations
    for optimum in initial.optima[1:]:
        if steps.is_late() or optimum.observations != best.observations:
            break
        most = int(_FEWER * (result or chosen).model.K)
        if most < 1 or optimum.objective < best.objective - near:
            continue
        model = optimum.model
        assert isinstance(data, Dataset)
        rows = with_unit_weights(model, data)
        if not optimum.converged:
            model, _ = steps.maximise_evidence_of(model, rows)
        gap = leave_one_out_gap(best.model, model, rows)
        if gap is not None and gap.nats > chosen.goal.nats:
            continue
        # Hyper-parameters that are less probable a priori must gain as much.
        reference = chosen.reference + max(_log_prior(chosen.model) - _log_prior(model), 0.0)
        with threads_for(10.0 * most**3):
            pool = steps.with_fresh(model, most)
            if steps.shared(pool.fixed_bound(data)) < reference - nats:
                continue
            frontier = steps.frontier(pool.subset_statistics(data))
        M = frontier.smallest(chosen.goal.nats, reference=reference)
        frontiers = (*chosen.frontiers, frontier)
        result = _moved(steps, replace(chosen, frontiers=frontiers), pool, frontier, M)
    return result


def _moved(
    steps: FastSteps[Model], chosen: Choice[Model], pool: Model, frontier: Frontier, M: int
) -> Choice[Model]:
    """Return the choice of M points of a frontier; few of them are moved to raise the ELBO."""
    model = steps.select(pool, frontier.masks[M], frontier.bounds[M].item())
    reference, many = chosen.reference, M * steps.data.D > MOVED * steps.data.N
    if many:
        return replace(chosen, model=model, candidates=pool)
    if M:
        stop = Stop(3e-4 * steps.data.observations, 20, 200)
        model, elbo = steps.optimise(model, stop=stop)
        reference = max(reference, elbo)
    return replace(chosen, model=model, reference=reference, candidates=None)


@torch.no_grad()
def _log_prior(model: InducingModel) -> float:
    return log_prior(model).item()
