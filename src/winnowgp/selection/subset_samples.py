"""The posterior q(Z) over subsets that a model was fitted with, and samples of it.

R-hat and the effective sample size are those of Vehtari et al. (2021, "Rank-normalization, folding,
and localization"), with split chains and without rank normalisation.
"""

import warnings
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from winnowgp.errors import ConvergenceWarning, InputError
from winnowgp.point_processes import Bernoulli, Determinantal
from winnowgp.selection.search import SearchResult
from winnowgp.typing import Masks, SizeTable

_LARGEST_R_HAT = 1.05
_SMALLEST_SAMPLE = 50.0


@final
@dataclass(frozen=True, slots=True)
class SubsetSamples:
    """Subsets sampled by C chains, T from each, in the order of sampling.

    Attributes:
        masks: the subsets.
        bounds: L(Z) of each, in nats.
        conditional_inclusion: mean of q*(k ∈ Z | Z₋ₖ) over the samples of each chain.
        log_weights: w(0..K) of the prior.
    """

    masks: Bool[Tensor, "C T K"]
    bounds: Float[Tensor, "C T"]
    conditional_inclusion: Float[Tensor, "C K"]
    log_weights: SizeTable

    @property
    def pooled(self) -> Masks:
        """The subsets of all chains, one after another."""
        return self.masks.flatten(0, 1)

    @property
    def sizes(self) -> Int[Tensor, "C T"]:
        """Number of inducing points of each subset."""
        return self.masks.sum(2)

    @property
    def inclusion(self) -> Float[Tensor, " K"]:
        """Marginal inclusion probabilities P(k ∈ Z), as means of conditional probabilities.

        The mean of q*(k ∈ Z | Z₋ₖ) has a smaller error than the share of samples that contain k
        (Rao-Blackwell), most of all for probabilities close to zero or one.
        """
        return self.conditional_inclusion.mean(0)

    @property
    def best(self) -> SearchResult:
        """The sampled subset with the highest score L(Z) + w(|Z|)."""
        scores = (self.bounds + self.log_weights[self.sizes]).flatten()
        at = int(scores.argmax())
        return SearchResult(self.pooled[at], self.bounds.flatten()[at].item(), scores[at].item())

    def pairwise_inclusion(self) -> Float[Tensor, "K K"]:
        """Return the share of samples that contain both of two candidates, for every pair.

        The diagonal has the inclusion probabilities. Far below P(j ∈ Z) P(k ∈ Z), either of the two
        can replace the other.
        """
        masks = self.pooled.to(self.bounds.dtype)
        pairs = masks.mT @ masks / len(masks)
        return pairs.diagonal_scatter(self.inclusion)

    def count_probs(self) -> SizeTable:
        """Return the share of samples with m = 0..K inducing points."""
        counts = torch.bincount(self.sizes.flatten(), minlength=self.masks.shape[2] + 1)
        return counts.to(self.bounds) / counts.sum()

    def credible_size(self, level: float = 0.9) -> tuple[int, int]:
        """Return the central credible interval of the number of inducing points."""
        return credible_interval(self.count_probs(), level)

    @property
    def mixed(self) -> bool:
        """Whether the chains agree, and hold enough independent samples."""
        return (
            max(self.r_hat.values()) <= _LARGEST_R_HAT
            and min(self.effective_samples.values()) >= _SMALLEST_SAMPLE
        )

    @property
    def monitored(self) -> dict[str, Float[Tensor, "C T"]]:
        """Quantities by which chains are compared.

        The number of inducing points, the bound, and the number of candidates in which a subset
        differs from the best one. The last tells chains apart that hold different but equivalent
        subsets.
        """
        dtype = self.bounds.dtype
        distance = (self.masks != self.best.mask).sum(2)
        return {"size": self.sizes.to(dtype), "bound": self.bounds, "distance": distance.to(dtype)}

    @property
    def r_hat(self) -> dict[str, float]:
        """R-hat of each monitored quantity; 1 if the chains agree."""
        return {name: r_hat(draws) for name, draws in self.monitored.items()}

    @property
    def effective_samples(self) -> dict[str, float]:
        """Effective number of independent samples of each monitored quantity."""
        return {name: effective_samples(draws) for name, draws in self.monitored.items()}


def credible_interval(probabilities: SizeTable, level: float) -> tuple[int, int]:
    """Return the central credible interval of a number with probabilities of 0..K.

    Args:
        level: probability of the interval; at most half of the rest lies on either side.
    """
    if not 0 < level < 1:
        raise InputError(f"`level` must lie between 0 and 1; got {level}.")
    # Rounding must not push a sum that reaches a tail below it.
    below = probabilities.cumsum(0) + 1e-12
    low, high = ((below >= tail).int().argmax() for tail in (0.5 - level / 2, 0.5 + level / 2))
    return int(low), int(high)


def r_hat(draws: Float[Tensor, "C T"]) -> float:
    """Return the split R-hat of draws of C chains: 1 if halves of chains agree with each other.

        R̂² = ((n − 1)/n W + B) / W

    with the mean W of the variances within half-chains of n draws, and the variance B of their
    means. Draws that never change have R-hat one if all are equal, and infinity otherwise.
    """
    halves = _halves(draws)
    n = halves.shape[1]
    within, between = halves.var(1).mean(), halves.mean(1).var()
    if within == 0:
        return 1.0 if between == 0 else float("inf")
    return (((n - 1) / n * within + between) / within).sqrt().item()


def effective_samples(draws: Float[Tensor, "C T"]) -> float:
    """Return the number of independent draws whose mean has the same variance.

        C T / (1 + 2 Σ_t ρ_t),

    with autocorrelations ρ_t of half-chains against the variance of all draws, summed in pairs
    while these sums are positive and decreasing (Geyer 1992). At most C T log₁₀ C T.
    """
    halves = _halves(draws)
    m, n = halves.shape
    centred = halves - halves.mean(1, keepdim=True)
    # Autocovariances by a Fourier transform, padded so that it does not wrap around.
    spectrum = torch.fft.rfft(centred, n=2 * n).abs().square()
    covariance = torch.fft.irfft(spectrum, n=2 * n)[:, :n] / n
    within = halves.var(1).mean()
    total = (n - 1) / n * within + halves.mean(1).var()
    if total == 0:
        return float(m * n)
    correlation = 1 - (within - covariance.mean(0) * n / (n - 1)) / total
    correlation[0] = 1.0
    pairs = correlation[: n - n % 2].unflatten(0, (-1, 2)).sum(1)
    positive = (pairs > 0).int().cumprod(0).bool()
    pairs = torch.where(positive, pairs.cummin(0).values, 0.0)
    time = -1 + 2 * pairs.sum().item()
    most = m * n * torch.tensor(float(m * n)).log10().item()
    return min(m * n / max(time, 1e-12), most)


def warn_if_poor(samples: SubsetSamples) -> None:
    """Warn if the chains disagree, or if there are few independent samples."""
    if samples.mixed:
        return
    worst, fewest = max(samples.r_hat.values()), min(samples.effective_samples.values())
    warnings.warn(
        f"the chains have not mixed: R-hat is {worst:.2f} (at most {_LARGEST_R_HAT} is good) and "
        f"{fewest:.0f} samples are independent (at least {_SMALLEST_SAMPLE:.0f} are needed). "
        "Inclusion probabilities and sizes may be wrong. Increase `sweeps`, or pass a `reference` "
        "and `betas` for tempering.",
        ConvergenceWarning,
        stacklevel=3,
    )


def _halves(draws: Float[Tensor, "C T"]) -> Float[Tensor, "H n"]:
    """Return each half of each chain as a row; the middle draw of an odd number is left out."""
    n = draws.shape[1] // 2
    return torch.cat([draws[:, :n], draws[:, -n:]])


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
