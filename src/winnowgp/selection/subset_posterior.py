"""The posterior over subsets that a model was fitted with, as its user sees it."""

from dataclasses import dataclass
from typing import final

from jaxtyping import Float
from torch import Tensor

from winnowgp.point_processes import Bernoulli, Determinantal
from winnowgp.selection.subset_samples import SubsetSamples, credible_interval
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
        return self.q.pairwise_inclusion()

    def size_probabilities(self) -> SizeTable:
        """Return P(|Z| = m) for m = 0..K."""
        return self.q.count_probs()

    def credible_size(self, level: float = 0.9) -> tuple[int, int]:
        """Return the central credible interval of the number of inducing points.

        Args:
            level: probability of the interval; at most half of the rest lies on either side.
        """
        return credible_interval(self.size_probabilities(), level)

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
