"""A fitted latent-variable model, asked about rows whose place is uncertain."""

from abc import ABC, abstractmethod
from math import log

import torch
from jaxtyping import Float
from torch import Tensor, nn

from winnowgp.data import Entries
from winnowgp.models.normal_nodes import normal_nodes
from winnowgp.models.observations import Prediction, check_targets
from winnowgp.models.posterior import Posterior
from winnowgp.models.row_bound import RowBound

# Quasi-random nodes for integrals over a place; each counts twice, as itself and reflected.
NODES = 64


class LatentPosterior(nn.Module, ABC):
    """q(f) of a latent-variable model, averaged over q(x).

    Args:
        function: q(f) given the inputs.
    """

    def __init__(self, function: Posterior) -> None:
        super().__init__()
        self.function = function

    @property
    def Q(self) -> int:
        """Number of latent dimensions."""
        return self.function.Z.shape[1]

    @abstractmethod
    def predict(
        self,
        mean: Float[Tensor, "N Q"],
        variance: Float[Tensor, "N Q"],
        *,
        observed: bool = False,
    ) -> Prediction:
        """Mean and variance of the functions where x ~ N(mean, diag variance).

        Args:
            observed: whether they are those of an entry, noise included.
        """

    @abstractmethod
    def row_bound(self, table: Entries) -> RowBound:
        """What each row of a table is worth as a function of its own q(x)."""

    @torch.no_grad()
    def log_density(
        self,
        Y: Float[Tensor, "N P"],
        mean: Float[Tensor, "N Q"],
        variance: Float[Tensor, "N Q"],
    ) -> Float[Tensor, "N P"]:
        """log ∫ p(y | x) q(x) dx of each entry, in nats, by 128 quasi-random places a row."""
        check_targets(self.function.likelihood, Y)
        places = nodes_at(mean, variance)
        nats = torch.stack([self.function.log_density(x, Y) for x in places])
        return nats.logsumexp(0) - log(len(places))


def nodes_at(
    mean: Float[Tensor, "N Q"], variance: Float[Tensor, "N Q"], count: int = NODES
) -> Float[Tensor, "T N Q"]:
    """Places of equal weight under q(x) of each row, the same standard ones for every row."""
    return mean + variance.sqrt() * normal_nodes(count, mean.shape[1]).to(mean)[:, None]
