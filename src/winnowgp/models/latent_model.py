"""What every latent-variable model can do."""

from abc import ABC, abstractmethod
from typing import TypeVar

import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood
from jaxtyping import Int
from torch import Tensor, nn

from winnowgp.data import Entries
from winnowgp.errors import InputError
from winnowgp.models.latent_posterior import LatentPosterior
from winnowgp.models.latents import Latents
from winnowgp.selection import RelaxedObjective
from winnowgp.typing import Mask, Scalar

_Same = TypeVar("_Same", bound=nn.Module)


class LatentModel(nn.Module, ABC):
    """A table seen as functions of a few unknown inputs a row, through K candidate points.

    Where an `InducingModel` is given its inputs, a latent model holds q(X) itself: it is asked
    about a table alone.
    """

    kernel: Kernel
    likelihood: Likelihood
    latents: Latents
    candidates: nn.Parameter

    @property
    def K(self) -> int:
        """Number of candidates."""
        return self.candidates.shape[0]

    @abstractmethod
    def bound(
        self,
        table: Entries,
        *,
        rows: Int[Tensor, " B"] | None = None,
        generator: torch.Generator | None = None,
    ) -> Scalar:
        """Lower bound on log p(Y) with all candidates, in nats, differentiable.

        Args:
            rows: if given, only these rows are looked at, and the result is an unbiased estimate
                of the bound of all of them where they were drawn at random.
            generator: for draws of the latents, where the model needs any; the result is then an
                unbiased estimate too.
        """

    @abstractmethod
    def subset_objective(
        self,
        table: Entries,
        *,
        rows: Int[Tensor, " B"] | None = None,
        generator: torch.Generator | None = None,
    ) -> RelaxedObjective:
        """What is the bound, in nats, if only this subset of the candidates is used?"""

    @abstractmethod
    def prune(self: _Same, mask: Mask) -> _Same:
        """A new model with the same parameters and only the candidates that `mask` keeps."""

    @abstractmethod
    def posterior(self, table: Entries) -> LatentPosterior:
        """q(f), small and independent of the table from then on."""

    def check(self, table: Entries) -> None:
        """An error where the model was made for another table."""
        if table.N != self.latents.N:
            raise InputError(
                f"the model has latents for {self.latents.N} rows and the table has {table.N}; "
                "make them alike."
            )
        if table.Y.dtype != self.candidates.dtype or table.Y.device != self.candidates.device:
            raise InputError(
                f"the model is {self.candidates.dtype} on {self.candidates.device} and the table "
                f"{table.Y.dtype} on {table.Y.device}; make them alike."
            )


Latent = TypeVar("Latent", bound=LatentModel)
"""The kind of latent-variable model that goes into a fit and comes out of it."""
