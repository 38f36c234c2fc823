"""A latent-variable model as a function of the subset: each score from the psi statistics."""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from winnowgp.bounds import Columns, Psi, Subset, latent_bound, masked_blocks
from winnowgp.selection import RelaxedObjective
from winnowgp.typing import Masks, Nats, Scalar, Weights


@final
@dataclass(frozen=True, slots=True)
class LatentObjective(RelaxedObjective):
    """The collapsed bound of any subset, differentiable in latents, kernel, noise and locations.

    Psi statistics are evaluated once for all candidates, O(N K² Q); a subset then costs O(M³) for
    each pattern of missing entries, whatever N.
    """

    Kuu: Float[Tensor, "K K"]
    psi: Psi
    columns: Columns
    kl: Scalar
    """KL of the latents, the same for every subset."""

    @property
    def K(self) -> int:
        return self.Kuu.shape[0]

    def value(self, mask: Masks) -> Nats:
        subset = Subset.of(mask)
        return self._bound(
            subset.square(self.Kuu), subset.rows(self.psi.psi1), subset.block(self.psi.psi2)
        )

    def relaxed_value(self, weights: Weights) -> Nats:
        Kuu, psi1 = masked_blocks(self.Kuu, self.psi.psi1, weights)
        outer = (weights[:, :, None] * weights[:, None, :]).unsqueeze(1)
        return self._bound(Kuu, psi1, outer * self.psi.psi2)

    def _bound(self, Kuu: Tensor, psi1: Tensor, psi2: Tensor) -> Nats:
        bound = latent_bound(Kuu, psi1, psi2, psi0=self.psi.psi0, columns=self.columns)
        return torch.sub(bound, self.kl)
