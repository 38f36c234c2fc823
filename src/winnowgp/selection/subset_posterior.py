"""The posterior over subsets that a model was fitted with, as its user sees it."""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from winnowgp.errors import InputError
from winnowgp.point_processes import Bernoulli, Determinantal
from winnowgp.selection.subset_samples import SubsetSamples
from winnowgp.typing import SizeTable

KINDS = ("mean-field", "determinantal", "gibbs")
"""Independent inclusion, inclusion with repulsion, and samples of the optimal q*(Z)."""


@final
@dataclass(frozen=True, slots=True)
class SubsetPosterior:
    """q(Z): which candidates are inducing points, and how many.

    Attributes:
        q: an independent process (`posterior="mean-field"`), a determinantal one, or samples of the
            optimal q*(Z) ("gibbs").
    """

    q: Bernoulli | Determinantal | SubsetSamples

    @property
    def kind(self) -> str:
        """The value of `posterior` that gives such a q."""
        kinds = dict(zip((Bernoulli, Determinantal, SubsetSamples), KINDS, strict=True))
        return kinds[type(self.q)]

    @property
    def inclusion(self) -> Float[Tensor, " K"]:
        """Marginal probability P(k ∈ Z) of each candidate."""
        return self.q.inclusion

    def pairwise_inclusion(self) -> Float[Tensor, "K K"]:
        """Return P(j ∈ Z and k ∈ Z) of every pair, and P(k ∈ Z) on the diagonal.

        Far below P(j ∈ Z) P(k ∈ Z), either of the two can replace the other.
        """
        if isinstance(self.q, Bernoulli):
            pairs = self.q.inclusion[:, None] * self.q.inclusion
        else:
            pairs = self.q.pairwise_inclusion()
        return pairs - torch.diag(pairs.diagonal()) + torch.diag(self.inclusion)

    def size_probabilities(self) -> SizeTable:
        """Return P(|Z| = m) for m = 0..K."""
        if not isinstance(self.q, SubsetSamples):
            return self.q.count_probs()
        counts = torch.bincount(self.q.sizes.flatten(), minlength=self.q.masks.shape[2] + 1)
        return counts.to(self.q.bounds) / counts.sum()

    def credible_size(self, level: float = 0.9) -> tuple[int, int]:
        """Return the central credible interval of the number of inducing points.

        Args:
            level: probability of the interval; at most half of the rest lies on either side.
        """
        if not 0 < level < 1:
            raise InputError(f"`level` must lie between 0 and 1; got {level}.")
        # Rounding must not push a sum that reaches a tail below it.
        below = self.size_probabilities().cumsum(0) + 1e-12
        low, high = ((below >= tail).int().argmax() for tail in (0.5 - level / 2, 0.5 + level / 2))
        return int(low), int(high)

    @property
    def r_hat(self) -> float | None:
        """Largest R-hat of the chains, one if they agree; None if q was not sampled."""
        return max(self.q.r_hat.values()) if isinstance(self.q, SubsetSamples) else None

    @property
    def effective_samples(self) -> float | None:
        """Smallest effective number of independent samples; None if q was not sampled."""
        if not isinstance(self.q, SubsetSamples):
            return None
        return min(self.q.effective_samples.values())
