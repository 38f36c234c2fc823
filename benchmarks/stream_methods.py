"""Other ways to select the inducing points of a stream, under the bound and kernel of ours.

`Vips` (Pescador-Barrios, Filippi and van der Wilk 2025), `Oips` (Galy-Fajou and Opper 2021) and
`ConditionalVariance` (Burt et al. 2020) add rows of a batch by their own rules and remove none.
After each selection they learn hyper-parameters by L-BFGS: until it converges, as in the code of
Pescador-Barrios et al. (SciPy's defaults), or with the starts and the early stopping of
`partial_fit`. Batch bounds have about one nat per row, by which convergence is measured.

`Vips` selects the rows that its authors' code selects (`src/init_methods/VIPS.py` of
`guiomarpescador/vips`), but in less time: that code factorises the matrices of the bound again for
each row that it adds, and `prefix_bounds` only once. Its gradients are ours as well.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from math import log, pi
from typing import final

import torch
from gpytorch.kernels import Kernel
from torch import Tensor

from winnowgp.bounds.collapsed import Moments
from winnowgp.data import Dataset
from winnowgp.linalg import definite_cholesky, solve_lower
from winnowgp.models import Posterior, SparseGP
from winnowgp.models.greedy import pivoted_cholesky
from winnowgp.models.kernels import covariance, prior_variance
from winnowgp.models.online import OnlineGP
from winnowgp.training.lbfgs import Stop
from winnowgp.training.streaming import optimise_hyperparameters

# SciPy's defaults: L-BFGS ends after an iteration that gains a smaller share of the objective, in
# the code of VIPS the bound of the batch alone, or after so many.
_LEAST_SHARE, _MOST_ITERATIONS = 2.2e-9, 15_000


@dataclass
class Selector(ABC):
    """A stream whose inducing points are only added to."""

    kernel: Kernel
    converge: bool = True
    """Whether L-BFGS converges from the parameters of the batch before."""
    online: OnlineGP | None = field(init=False, default=None)
    posterior: Posterior | None = field(init=False, default=None)

    @abstractmethod
    def rows(self, online: OnlineGP, data: Dataset) -> Tensor:
        """Return the rows of a batch that become inducing points."""

    def learn(self, data: Dataset) -> None:
        """Select rows of a batch, then optimise the hyper-parameters."""
        if self.online is None:
            # Hyper-parameters of the exact evidence of the first batch.
            model = SparseGP(self.kernel, data.X, noise=0.1)
            model.candidates.requires_grad_(False)
            start = self._optimised(OnlineGP.start(model), data)
            online = start.with_candidates(data.X[:0])
        else:
            online = self.online
        points = torch.cat([online.model.candidates.detach(), self.rows(online, data)])
        online = self._optimised(online.with_candidates(points), data)
        L, moments = online.moments(data)
        self.online, self.posterior = online.remembering(L, moments), online.posterior(L, moments)

    def _optimised(self, online: OnlineGP, data: Dataset) -> OnlineGP:
        if self.converge:
            stop = Stop(_LEAST_SHARE * data.N, 1, _MOST_ITERATIONS)
            return optimise_hyperparameters(online, data, before=0, stop=stop)
        return optimise_hyperparameters(online, data, before=online.memory.observations)


def prefix_bounds(moments: Moments) -> Tensor:
    """Return the bound with the first k candidates, for each k, from one factorisation."""
    C = moments.C
    LB = definite_cholesky(C + torch.eye(len(C)).to(C))
    gains = 0.5 * (solve_lower(LB, moments.D)[:, 0].square() + C.diagonal())
    gains = gains - LB.diagonal().log()
    none = moments.constant - 0.5 * (moments.square + moments.diagonal)
    return torch.cat([none[None], none + gains.cumsum(0)])


@final
@dataclass
class Vips(Selector):
    """Add rows of greatest conditional variance until the bound is within a share of its range.

    The range is from a constant prediction to the bound with all rows of the batch.
    """

    delta: float = 0.05
    seen: list[Tensor] = field(default_factory=list)

    def rows(self, online: OnlineGP, data: Dataset) -> Tensor:
        old = online.model.candidates.detach()
        order = pivoted_cholesky(online.model.kernel, data.X, data.N, given=old).indices
        pool = online.with_candidates(torch.cat([old, data.X[order]]))
        _, moments = pool.moments(data)
        bounds = prefix_bounds(moments[0])[len(old) :]
        # Mean and variance of all targets so far, as three sums.
        self.seen.append(torch.stack([data.Y.new_tensor(data.N), data.Y.sum(), (data.Y**2).sum()]))
        N, first, second = torch.stack(self.seen).sum(0).tolist()
        mean, variance = first / N, (second - first**2 / N) / max(N - 1, 1)
        noise = -0.5 * data.N * log(2 * pi * variance)
        noise -= 0.5 * ((data.Y - mean) ** 2).sum().item() / variance
        # The bound of the stream has the earlier rows as well; they are the same in both.
        earlier = online.remembered_bound()
        highest = bounds[-1].item() - earlier
        enough = bounds - earlier >= highest - self.delta * abs(highest - noise)
        return data.X[order[: int(enough.int().argmax())]]


@final
@dataclass
class Oips(Selector):
    """Add a row if its correlation with every inducing point is below ρ."""

    rho: float = 0.96

    def rows(self, online: OnlineGP, data: Dataset) -> Tensor:
        points = online.model.candidates.detach()
        count, kernel = len(points), online.model.kernel
        with torch.no_grad():
            least = self.rho * prior_variance(kernel, data.X[:1]).item()
            for x in data.X.split(1):
                if not len(points) or covariance(kernel, x, points).max().item() < least:
                    points = torch.cat([points, x])
        return points[count:]


@final
@dataclass
class ConditionalVariance(Selector):
    """Add rows of greatest conditional variance until their sum over the batch is below η."""

    eta: float = 0.01

    def rows(self, online: OnlineGP, data: Dataset) -> Tensor:
        old = online.model.candidates.detach()
        chosen = pivoted_cholesky(online.model.kernel, data.X, data.N, given=old, stop=self.eta)
        return data.X[chosen.indices]
