"""Regressors of several processes that learn from rows in batches: `partial_fit`."""

from abc import ABC
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

import torch
from torch import Tensor

from winnowgp.data import Dataset
from winnowgp.errors import InputError
from winnowgp.estimators.processes import ProcessEstimator
from winnowgp.models import MultiOutputPosterior, greedy_variance
from winnowgp.models.fidelity_posterior import (
    FidelityModel,
    FidelityPosterior,
    NonlinearFidelityPosterior,
)
from winnowgp.models.multi_output_posterior import ProcessMixture
from winnowgp.models.process_stream import ProcessStream
from winnowgp.selection import Frontier, SizeFrontier, elimination_frontier
from winnowgp.training import MaxPoints, Tolerance

Function: TypeAlias = MultiOutputPosterior | ProcessMixture

# Fresh candidates of a process: at least so many, and as many as it has points.
_FRESH = 32
# Rows of a batch at most; more are several batches.
_ROWS = 4096


@dataclass(kw_only=True, eq=False, repr=False)
class StreamedProcesses(ProcessEstimator, ABC):
    """The base class of regressors of several processes that can be updated by more rows."""

    def partial_fit(self, X: Any, y: Any, *, noise_variance: Any = None) -> Self:
        """Learn from more rows; the first call is a `fit`.

        Earlier rows are not needed. Inducing points of each process are added where the rows need
        them, and dropped where they are no longer needed: both are priced in nats by the streaming
        bound (Bui et al. 2017), and `tolerance` is per target of the new rows. Hyper-parameters,
        mixing, noise and scaling stay those of the first call, and so do `candidates_` and
        `inclusion_`. `elbo_` and `elbo_gap_` are those of the streaming bound of the rows of this
        call, given what the posterior holds of earlier rows; `frontier_` is that of the last 4,096
        of them at most, and `evidence_` is None. O(M² N + M³) for N rows and the
        M inducing points of all processes; O(M² N P) for P targets of other likelihoods than
        Gaussian noise.

        Args:
            X: inputs `[N D]`.
            y: targets `[N]` or `[N P]`; some of several may be missing.
            noise_variance: known noise variances, as in `fit`.
        """
        if not hasattr(self, "posterior_"):
            return self.fit(X, y, noise_variance=noise_variance)
        params = self._validate()
        if params.alpha is not None:
            raise InputError(
                f"`partial_fit` needs `alpha='auto'`; got {self.alpha!r}. Set `tolerance` or "
                "`max_points` instead."
            )
        inputs = self._inputs(X)
        targets = self._y_scaler.standardise(y, self.likelihood_, inputs=inputs)
        known = self._known_noise(noise_variance, len(inputs), targets=targets)
        keep = ~torch.isnan(targets).all(1)
        rows = Dataset(inputs, targets, None, known).part(keep.nonzero().flatten())
        limit = None if params.max_points is None else MaxPoints(params.max_points)
        goal = Tolerance(0.01 if params.tolerance is None else params.tolerance, limit=limit)
        posterior = self.posterior_

        searches: dict[Function, tuple[Frontier, int]] = {}

        def update(function: Function, batch: Dataset) -> Function:
            updated, frontier, size = _updated(function, batch, goal)
            searches[function] = frontier, size
            return updated

        batches: list[list[tuple[Frontier, int] | None]] = []
        for batch in rows.chunks(_ROWS):
            searches.clear()
            functions = _functions(posterior)
            if isinstance(posterior, FidelityModel):
                posterior = posterior.updated(batch, update)
            else:
                posterior = update(posterior, batch)
            batches.append([searches.get(each) for each in functions])
        self.posterior_ = posterior
        self._set_searches(batches)
        self._set_processes()
        return self

    def _set_searches(self, batches: Sequence[Sequence[tuple[Frontier, int] | None]]) -> None:
        """Set what the searches of all batches have found; None for functions without rows."""
        found = [search for batch in batches for search in batch if search is not None]
        # Streaming bounds of one batch after another add up.
        self.elbo_ = sum(frontier.bounds[size].item() for frontier, size in found)
        best = sum(frontier.bounds.max().item() for frontier, _ in found)
        self.elbo_gap_ = (best - self.elbo_) / sum(frontier.N for frontier, _ in found)
        self.evidence_ = None
        searches = batches[-1]
        frontiers: Any = self.frontier_
        if isinstance(frontiers, tuple):
            # One for each fidelity of a nonlinear relation.
            frontiers = tuple(
                before if search is None else SizeFrontier.of(search[0], N=search[0].N)
                for before, search in zip(frontiers, searches, strict=True)
            )
        else:
            frontiers = SizeFrontier.of(found[-1][0], N=found[-1][0].N)
        self.frontier_ = frontiers


def _functions(posterior: Function | FidelityModel) -> list[Function]:
    """Return the functions that rows update, each with a search of its own."""
    if isinstance(posterior, NonlinearFidelityPosterior):
        return list(posterior.functions)
    if isinstance(posterior, FidelityPosterior):
        return [posterior.function]
    assert not isinstance(posterior, FidelityModel)
    return [posterior]


@torch.no_grad()
def _updated(function: Function, rows: Dataset, goal: Tolerance) -> tuple[Function, Frontier, int]:
    """Return a posterior after more rows, the frontier of the search, and the number it selects.

    A mixture has the inducing points that suit its mode.
    """
    mode = function.mode if isinstance(function, ProcessMixture) else function
    fresh = _fresh(mode, rows)
    stream = ProcessStream.of(mode, rows, fresh)
    frontier = elimination_frontier(stream.statistics())
    size = goal.size(frontier, reference=frontier.bounds.max().item())
    mask = frontier.masks[size]
    if not isinstance(function, ProcessMixture):
        return stream.selected(mask), frontier, size
    members = [ProcessStream.of(member, rows, fresh) for member in function.members]
    # All candidates explain the rows to members with any lengthscale.
    nats = torch.stack([member.posterior.log_predictive(rows) for member in members])
    mixture = ProcessMixture(
        stream.selected(mask),
        [member.selected(mask) for member in members],
        member_weights=(function.member_weights.log() + nats).softmax(0),
    )
    return mixture, frontier, size


def _fresh(posterior: MultiOutputPosterior, rows: Dataset) -> list[Tensor]:
    """Return candidates of each process among the rows that observe it."""
    observed = (~torch.isnan(rows.Y)).to(rows.Y)
    seen = (observed @ (posterior.mixing != 0).to(rows.Y)) > 0
    fresh = []
    for q, (kernel, Z) in enumerate(zip(posterior.kernels, posterior.inducing_points, strict=True)):
        own = rows.X[seen[:, q]]
        fresh.append(own[greedy_variance(kernel, own, max(_FRESH, len(Z)), given=Z)])
    return fresh
