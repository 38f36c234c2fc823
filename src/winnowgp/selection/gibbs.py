"""Gibbs sampling of the optimal q(Z), by exact marginal gains.

Without the restriction to independent inclusions, E_q[L] − KL[q ‖ p] is largest for

    q*(Z) ∝ p(Z) exp L(Z),

whose conditional inclusion probabilities follow from the marginal gains:

    logit q*(k ∈ Z | Z₋ₖ) = L(Z ∪ k) − L(Z \\ k) + w(|Z₋ₖ| + 1) − w(|Z₋ₖ|).

A sweep visits the candidates in random order and draws each inclusion given the others. The gains
of all candidates are known at once and hold until one candidate changes, so that a sweep costs
O(K²) for each change, not for each candidate. Chains also relocate inducing points: one of them is
removed and its place is drawn among all candidates outside. This exchanges candidates that can
replace each other, which single changes may not do. All chains move at the same time (`chains`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from winnowgp.errors import InputError
from winnowgp.point_processes import Bernoulli, CardinalityPrior, Determinantal
from winnowgp.point_processes.bernoulli import PointProcess
from winnowgp.selection.chains import Chains
from winnowgp.selection.objective import SubsetStatistics
from winnowgp.selection.search import forward_selection
from winnowgp.selection.subset_samples import SubsetSamples, warn_if_poor
from winnowgp.typing import Masks, Nats, SizeTable

# With a `reference` that `fit_inclusion` had fitted, chains did not leave its maximum on kin8nm
# with 6 or 10 inverse temperatures. With a uniform one, 24 of them down to 0.03 reached better
# subsets than search on kin8nm and protein.

# One relocation before a sweep for so many inducing points. On concrete and energy (K = 200) more
# took longer than the better samples were worth; candidates that repeat each other need some.
# Joint draws of two neighbours were tried too: on energy, 16 of them before a sweep left 3
# independent samples per CPU second instead of 11.
_RELOCATIONS = 16


@final
@dataclass(frozen=True, slots=True)
class TemperedPosterior:
    """The distributions π_β(Z) ∝ r(Z)^(1−β) (p(Z) exp L(Z))^β of C chains, from r to q*.

    Attributes:
        objective: L(Z).
        log_weights: w(0..K) of the prior.
        log_normaliser: −log C of the prior.
        reference: r(Z), an independent or determinantal process; None if β is always one.
        beta: inverse temperature β of each chain, from 0 (the reference) to 1 (q*).
    """

    objective: SubsetStatistics
    log_weights: SizeTable
    log_normaliser: Float[Tensor, ""]
    beta: Float[Tensor, " C"]
    reference: PointProcess | None = None

    @classmethod
    def of(
        cls,
        objective: SubsetStatistics,
        prior: CardinalityPrior,
        *,
        chains: int,
        reference: PointProcess | None = None,
    ) -> "TemperedPosterior":
        """Return q* of an objective and a prior, for every chain."""
        like = objective.empty
        if prior.K != objective.K:
            raise InputError(
                f"`prior` must be over the {objective.K} candidates of `statistics`; got one over "
                f"{prior.K}. Build the prior with K={objective.K}."
            )
        return cls(
            objective,
            prior.log_weights(like),
            prior.log_normaliser(like),
            like.new_ones(chains),
            None if reference is None else _constant(reference, like=like),
        )

    def at(self, beta: Float[Tensor, " C"]) -> "TemperedPosterior":
        """Return the distributions of other inverse temperatures."""
        return replace(self, beta=beta.to(self.beta))

    def log_ratio(self, chains: Chains) -> Nats:
        """Return log p(Z) + L(Z) − log r(Z), the derivative of log π_β in β, in nats."""
        nats = chains.bounds + self.log_weights[chains.sizes] - self.log_normaliser
        if self.reference is None:
            return nats
        return nats - self.reference.log_prob(chains.included)

    def inclusion_logits(self, chains: Chains) -> Float[Tensor, "C K"]:
        """Return logit π_β(k ∈ Z | Z₋ₖ) of every candidate."""
        size, most = chains.sizes[:, None], self.objective.K
        # w(m + 1) − w(m) with m = |Z₋ₖ|: the size without k is |Z| − 1 inside and |Z| outside.
        below, here, above = (self.log_weights[(size + d).clamp(0, most)] for d in (-1, 0, 1))
        slopes = torch.where(chains.included, here - below, above - here)
        return self._tempered(chains, chains.gains + slopes)

    def location_logits(self, chains: Chains) -> Float[Tensor, "C K"]:
        """Return log π_β(Z ∪ k) of every candidate k outside, up to a constant; −∞ inside."""
        return self._tempered(chains, chains.gains).masked_fill(chains.included, -torch.inf)

    def _tempered(self, chains: Chains, logits: Float[Tensor, "C K"]) -> Float[Tensor, "C K"]:
        if self.reference is None:
            return logits
        own = self.reference.conditional_logits(chains.included)
        tempered = self.beta[:, None] * logits + (1 - self.beta[:, None]) * own
        # Sizes that the prior forbids stay forbidden at every temperature, also at β = 0.
        return torch.where(logits.isinf(), logits, tempered)


def gibbs_sweep(
    target: TemperedPosterior, chains: Chains, *, generator: torch.Generator
) -> Float[Tensor, "C K"]:
    """Draw the inclusion of every candidate given the others, in random order, in place.

    Candidates up to the first one that changes are decided by the same marginal gains; then the
    gains are computed again. Chains wait for the one with most changes.

    Returns:
        The conditional inclusion logits of all candidates at the last subset of each chain.
    """
    order = _uniform(chains, generator).argsort(1)
    thresholds = _uniform(chains, generator).logit()
    rank = torch.arange(order.shape[1], device=order.device)
    position = rank.new_zeros(len(order), 1)
    while True:
        logits = target.inclusion_logits(chains)
        # u < λ ⇔ logit u < logit λ
        include = thresholds < logits.gather(1, order)
        changes = (include != chains.included.gather(1, order)) & (rank >= position)
        active = changes.any(1)
        if not bool(active.any()):
            return logits
        first = changes.int().argmax(1, keepdim=True)
        chains.toggle(order.gather(1, first)[:, 0], active=active)
        position = torch.where(active[:, None], first + 1, len(rank))


def relocate(
    target: TemperedPosterior,
    chains: Chains,
    *,
    active: Bool[Tensor, " C"],
    generator: torch.Generator,
) -> None:
    """Remove a random inducing point, and draw its place among all candidates outside; O(C K²).

    Given the other inducing points, the place is drawn from its conditional distribution: every
    proposal is accepted. The size does not change. Chains that are not active or have no inducing
    point stay as they are.
    """
    active = active & chains.included.any(1)
    keys = _uniform(chains, generator)
    chains.toggle(torch.where(chains.included, keys, -1.0).argmax(1), active=active)
    # The largest of logits plus Gumbel noise is a draw of the softmax.
    noise = -(-_uniform(chains, generator).log()).log()
    chains.toggle((target.location_logits(chains) + noise).argmax(1), active=active)


def move(
    target: TemperedPosterior,
    chains: Chains,
    *,
    relocations: int | None,
    generator: torch.Generator,
) -> Float[Tensor, "C K"]:
    """Make relocations, then a Gibbs sweep, in place; both leave π_β as it is.

    Args:
        target: distribution π_β of each chain.
        chains: states of the chains.
        relocations: number of relocations; one for sixteen inducing points if None.
        generator: source of randomness.

    Returns:
        The conditional inclusion logits of all candidates at the last subset of each chain.
    """
    chains.refresh()
    if relocations is None:
        counts = -(-chains.sizes // _RELOCATIONS)
    else:
        counts = torch.full_like(chains.sizes, relocations)
    for number in range(int(counts.max())):
        relocate(target, chains, active=counts > number, generator=generator)
    return gibbs_sweep(target, chains, generator=generator)


def sample_subsets(
    statistics: SubsetStatistics,
    *,
    prior: CardinalityPrior,
    generator: torch.Generator,
    chains: int = 4,
    sweeps: int = 200,
    burn_in: int | None = None,
    start: Masks | None = None,
    relocations: int | None = None,
    reference: PointProcess | None = None,
    betas: Sequence[float] = (1.0,),
) -> SubsetSamples:
    """Sample the optimal q*(Z) ∝ p(Z) exp L(Z) by Gibbs sweeps, in several chains.

    Each chain makes `burn_in` sweeps that are discarded, then one sweep per sample. All chains move
    at once, on the device of the statistics. A `ConvergenceWarning` is issued if the chains
    disagree or hold too few independent samples.

    With several `betas`, each chain is a ladder of tempered copies that exchange their subsets
    (parallel tempering); only samples of β = 1 are returned. The time grows with the number of
    betas.

    Args:
        statistics: statistics of the data.
        prior: prior over subsets; sizes may be forbidden.
        generator: source of randomness.
        chains: number of independent chains, at least two for a comparison.
        sweeps: number of samples per chain.
        burn_in: number of sweeps before the first sample; a quarter of `sweeps` if not given.
        start: subset that each chain starts from; by default random subsets whose sizes lie between
            half and twice that of a forward selection.
        relocations: number of inducing points that are moved to another candidate before each
            sweep; one for sixteen inducing points if None.
        reference: distribution at β = 0, needed for tempering. Give every candidate the same
            probability: the q of `fit_inclusion` is concentrated on one maximum, which chains may
            then not leave.
        betas: inverse temperatures of each ladder, from 1 downwards, such as 24 of them down to
            0.03 in geometric steps.
    """
    _check(chains=chains, sweeps=sweeps, betas=betas, reference=reference)
    B = len(betas)
    target = TemperedPosterior.of(
        statistics, prior, chains=chains * B, reference=reference if B > 1 else None
    )
    if start is None:
        start = _dispersed_starts(target, chains=chains, generator=generator)
    _check_starts(target, start, chains=chains)
    burn_in = sweeps // 4 if burn_in is None else burn_in
    states = Chains.at(statistics, start.repeat_interleave(B, dim=0))
    ladder = Ladder.of(betas, chains=chains, like=statistics.empty)
    masks: list[Masks] = []
    inclusion = statistics.empty.new_zeros(chains, statistics.K)
    for sweep in range(burn_in + sweeps):
        target = target.at(ladder.beta)
        logits = move(target, states, relocations=relocations, generator=generator)
        if sweep >= burn_in:
            cold = ladder.coldest
            masks.append(states.included[cold])
            inclusion += logits[cold].sigmoid()
        if B > 1:
            ladder = ladder.exchanged(
                target.log_ratio(states), first=sweep % 2, generator=generator
            )
    drawn = torch.stack(masks, dim=1)
    # The bounds of chains have rounding errors of many moves, up to 1e-4 nats.
    bounds = statistics.value(drawn.flatten(0, 1)).reshape(drawn.shape[:2])
    samples = SubsetSamples(
        masks=drawn.cpu(),
        bounds=bounds.cpu(),
        conditional_inclusion=(inclusion / sweeps).cpu(),
        log_weights=target.log_weights.cpu(),
    )
    warn_if_poor(samples)
    return samples


@final
@dataclass(frozen=True, slots=True)
class Ladder:
    """Inverse temperatures of G ladders of B chains each, which exchange them.

    Chains keep their subsets and exchange temperatures, which is the same and moves no matrices.

    Attributes:
        betas: inverse temperatures, from 1 downwards.
        chain: chain that has each inverse temperature of each ladder.
    """

    betas: Float[Tensor, " B"]
    chain: Int[Tensor, "G B"]

    @classmethod
    def of(cls, betas: Sequence[float], *, chains: int, like: Tensor) -> "Ladder":
        """Return ladders whose chains follow one another, in the order of `betas`."""
        chain = torch.arange(chains * len(betas), device=like.device)
        return cls(like.new_tensor(list(betas)), chain.reshape(chains, -1))

    @property
    def beta(self) -> Float[Tensor, " C"]:
        """Inverse temperature of each chain."""
        result = self.betas.new_empty(self.chain.numel())
        result[self.chain] = self.betas.expand(self.chain.shape)
        return result

    @property
    def coldest(self) -> Int[Tensor, " G"]:
        """The chain with β = 1 of each ladder."""
        return self.chain[:, 0]

    def exchanged(self, log_ratio: Nats, *, first: int, generator: torch.Generator) -> "Ladder":
        """Propose to exchange neighbouring temperatures, every second pair from the `first`.

        Args:
            log_ratio: log p(Z) + L(Z) − log r(Z) of each chain.
        """
        chain = self.chain.clone()
        for i in range(first, len(self.betas) - 1, 2):
            a, b = chain[:, i].clone(), chain[:, i + 1].clone()
            log_accept = (self.betas[i] - self.betas[i + 1]) * (log_ratio[b] - log_ratio[a])
            u = torch.rand(
                len(a), generator=generator, dtype=torch.float64, device=generator.device
            )
            accepted = u.log().to(log_accept) < log_accept
            chain[:, i], chain[:, i + 1] = torch.where(accepted, b, a), torch.where(accepted, a, b)
        return replace(self, chain=chain)


def _dispersed_starts(
    target: TemperedPosterior, *, chains: int, generator: torch.Generator
) -> Masks:
    """Return random subsets with sizes between half and twice that of a forward selection.

    Chains that start too close to each other would agree before they have explored q*.
    """
    objective, w = target.objective, target.log_weights
    best = int(forward_selection(objective, log_weights=w).best(w).sum())
    allowed = torch.isfinite(w).nonzero()[:, 0].cpu()
    keys = torch.rand((chains, objective.K), generator=generator, device=generator.device).cpu()
    ranks = keys.argsort(1).argsort(1)
    sizes = best * 2 ** torch.linspace(-1, 1, chains) if chains > 1 else torch.tensor([float(best)])
    nearest = allowed[(sizes[:, None] - allowed).abs().argmin(1)]
    return (ranks < nearest[:, None]).to(objective.empty.device)


def _uniform(chains: Chains, generator: torch.Generator) -> Float[Tensor, "C K"]:
    """Return uniform numbers, drawn on the generator's device, on that of the chains."""
    shape = chains.included.shape
    u = torch.rand(shape, generator=generator, dtype=torch.float64, device=generator.device)
    return u.to(chains.included.device)


def _constant(q: PointProcess, *, like: Tensor) -> PointProcess:
    """Return a process without gradients, on the device of the chains."""
    logits = q.logits.detach().to(like)
    if isinstance(q, Determinantal):
        return Determinantal(logits, q.features.detach().to(like))
    return Bernoulli(logits)


def _check(
    *, chains: int, sweeps: int, betas: Sequence[float], reference: PointProcess | None
) -> None:
    if chains < 1 or sweeps < 4:
        raise InputError(
            "`chains` must be at least 1 and `sweeps` at least 4; got "
            f"chains={chains}, sweeps={sweeps}."
        )
    decreasing = all(a > b >= 0 for a, b in pairwise(betas))
    if not betas or betas[0] != 1 or not decreasing:
        raise InputError(
            "`betas` must start at 1 and decrease, none below 0; got "
            f"{[float(beta) for beta in betas]}."
        )
    if len(betas) > 1 and reference is None:
        raise InputError(
            "tempering needs a `reference`, the distribution at β = 0; pass a `Bernoulli` with the "
            "same probability for every candidate."
        )


def _check_starts(target: TemperedPosterior, start: Masks, *, chains: int) -> None:
    K = target.objective.K
    if start.shape != (chains, K):
        raise InputError(
            f"`start` must have one subset of {K} candidates for each of {chains} chains; got "
            f"shape {list(start.shape)}."
        )
    if not torch.isfinite(target.log_weights[start.sum(1).to(target.log_weights.device)]).all():
        raise InputError(
            "`start` must have sizes that `prior` allows; got "
            f"{start.sum(1).tolist()} inducing points. Start from other subsets."
        )
