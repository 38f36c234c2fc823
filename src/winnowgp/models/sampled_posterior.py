"""Predictions at uncertain inputs by quasi-random places, for any kernel and likelihood."""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from winnowgp.bounds import latent_kl
from winnowgp.data import Entries
from winnowgp.models.latent_posterior import LatentPosterior, nodes_at
from winnowgp.models.observations import Prediction, check_targets, expected_log_prob
from winnowgp.models.posterior import Posterior
from winnowgp.models.row_bound import RowBound
from winnowgp.models.stand_in import valid

# Places that an integral over q(x) is a mean of, while a row is being placed.
PLACING = 8


@final
class SampledPosterior(LatentPosterior):
    """q(f) averaged over q(x) by the same standard places for every row: nothing is random."""

    def predict(
        self,
        mean: Float[Tensor, "N Q"],
        variance: Float[Tensor, "N Q"],
        *,
        observed: bool = False,
    ) -> Prediction:
        """Mean and variance at uncertain inputs: Var y = E Var[y | x] + Var E[y | x]."""
        parts = [self.function.predict(x, observed=observed) for x in nodes_at(mean, variance)]
        means = torch.stack([part.mean for part in parts])
        inner = torch.stack([part.variance for part in parts]).mean(0)
        return Prediction(means.mean(0), inner + means.var(0, correction=0))

    def row_bound(self, table: Entries) -> "SampledRowBound":
        """What each row of a table is worth as a function of its own q(x)."""
        check_targets(self.function.likelihood, valid(table))
        return SampledRowBound(self.function, valid(table), table.observed)


@final
@dataclass(frozen=True, slots=True)
class SampledRowBound(RowBound):
    """Rows under any likelihood, by a mean over places.

    Attributes:
        Y: the table, with something possible where an entry is missing.
        observed: where it is not.
    """

    function: Posterior
    Y: Float[Tensor, "N P"]
    observed: Bool[Tensor, "N P"]

    @property
    def N(self) -> int:
        return len(self.Y)

    def of(self, rows: Int[Tensor, " B"]) -> "SampledRowBound":
        return SampledRowBound(self.function, self.Y[rows], self.observed[rows])

    def __call__(
        self, rows: Int[Tensor, " B"], mean: Float[Tensor, "B Q"], variance: Float[Tensor, "B Q"]
    ) -> Float[Tensor, " B"]:
        Y, observed = self.Y[rows], self.observed[rows]
        places = nodes_at(mean, variance, PLACING)
        nats = torch.stack([self._nats(Y, x) * observed for x in places])
        return nats.mean(0).sum(1) - latent_kl(mean, variance)

    @torch.no_grad()
    def everywhere(
        self, mean: Float[Tensor, "J Q"], variance: Float[Tensor, "J Q"]
    ) -> Float[Tensor, "N J"]:
        """At the centres of the places alone, which is enough to compare them."""
        latent, likelihood = self.function.predict(mean), self.function.likelihood
        columns = []
        for f, v in zip(latent.mean, latent.variance, strict=True):
            size = (self.N, len(f))
            nats = expected_log_prob(likelihood, self.Y, f.expand(size), v.expand(size))
            columns.append((nats * self.observed).sum(1))
        return torch.stack(columns, 1) - latent_kl(mean, variance)

    def _nats(self, Y: Tensor, X: Tensor) -> Tensor:
        latent = self.function.predict(X)
        return expected_log_prob(self.function.likelihood, Y, latent.mean, latent.variance)
