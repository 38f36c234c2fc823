"""The bound of a model as a function of the locations of its inducing points."""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from winnowgp.data import Dataset
from winnowgp.models.sgpr import SparseGP
from winnowgp.selection import SubsetStatistics
from winnowgp.typing import Scalar


@final
@dataclass(frozen=True, slots=True, eq=False)
class ModelLocations:
    """L(Z) of a `SparseGP` at fixed hyper-parameters, for `winnowgp.selection.sample_locations`.

    Attributes:
        model: the model; its candidates are not used.
        data: the rows.
    """

    model: SparseGP
    data: Dataset

    @torch.no_grad()
    def statistics(self, Z: Float[Tensor, "K D"]) -> SubsetStatistics:
        """Return the bounds of all subsets of some locations; O(N K²)."""
        return self.model.with_candidates(Z).subset_statistics(self.data)

    def bound_and_gradient(self, Z: Float[Tensor, "M D"]) -> tuple[Scalar, Float[Tensor, "M D"]]:
        """Return L(Z) in nats, and its gradient in the locations; O(N M²)."""
        model = self.model.with_candidates(Z).requires_grad_(False)
        model.candidates.requires_grad_(True)
        with torch.enable_grad():
            bound = model.chunked_bound(self.data)()
            if not len(Z):
                return bound.detach(), torch.zeros_like(Z)
            (gradient,) = torch.autograd.grad(bound, model.candidates)
        return bound.detach(), gradient
