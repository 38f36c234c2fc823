"""Gibbs sampling of the optimal q(Z), by exact marginal gains.

Without the restriction to independent inclusions, E_q[L] − KL[q ‖ p] is largest for

    q*(Z) ∝ p(Z) exp L(Z),

whose conditional inclusion probabilities follow from the marginal gains:

    logit q*(k ∈ Z | Z₋ₖ) = L(Z ∪ k) − L(Z \\ k) + w(|Z₋ₖ| + 1) − w(|Z₋ₖ|).

A sweep visits the candidates in random order and draws each inclusion given the others. The gains
of all candidates are known at once and hold until one candidate changes, so that a sweep costs
O(K²) for each change, not for each candidate. Chains also relocate inducing points: one of them is
removed and its place is drawn among all candidates outside. This exchanges candidates that can
replace each other, which single changes may not do.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from winnowgp.errors import InputError
from winnowgp.linalg import parallel_map
from winnowgp.point_processes import Bernoulli, CardinalityPrior, Determinantal, PointProcess
from winnowgp.selection.objective import SearchObjective, SearchState
from winnowgp.selection.search import forward_selection
from winnowgp.selection.subset_samples import SubsetSamples, warn_if_poor
from winnowgp.typing import Mask, Masks, SizeTable

_REFRESH = 64  # Moves before a search state is computed afresh: rounding grows with each update.
# One relocation before a sweep for so many inducing points. On concrete and energy (K = 200) more
# took longer than the better samples were worth; candidates that repeat each other need some.
_RELOCATIONS = 16


@final
@dataclass(frozen=True, slots=True)
class TemperedPosterior:
    """The distribution π_β(Z) ∝ r(Z)^(1−β) (p(Z) exp L(Z))^β, from a reference r to q*.

    Attributes:
        objective: L(Z).
        log_weights: w(0..K) of the prior.
        log_normaliser: −log C of the prior.
        reference: r(Z), an independent or determinantal process; None if β is always one.
        beta: inverse temperature β, from 0 (the reference) to 1 (q*).
    """

    objective: SearchObjective
    log_weights: SizeTable
    log_normaliser: float
    reference: PointProcess | None = None
    beta: float = 1.0

    @classmethod
    def of(
        cls,
        objective: SearchObjective,
        prior: CardinalityPrior,
        *,
        reference: PointProcess | None = None,
    ) -> "TemperedPosterior":
        """Return q* of an objective and a prior."""
        like = objective.empty
        if prior.K != objective.K:
            raise InputError(
                f"`prior` must be over the {objective.K} candidates of `statistics`; got one over "
                f"{prior.K}. Build the prior with K={objective.K}."
            )
        return cls(
            objective,
            prior.log_weights(like).cpu(),
            prior.log_normaliser(like).item(),
            None if reference is None else _on_cpu(reference),
        )

    def at(self, beta: float) -> "TemperedPosterior":
        """Return the distribution of another inverse temperature."""
        return replace(self, beta=beta)

    def log_ratio(self, chain: "Chain") -> float:
        """Return log p(Z) + L(Z) − log r(Z), the derivative of log π_β in β, in nats."""
        mask = chain.state.mask.cpu()
        nats = (
            chain.state.bound.item()
            + self.log_weights[int(mask.sum())].item()
            - self.log_normaliser
        )
        if self.reference is None:
            return nats
        return nats - self.reference.log_prob(mask[None])[0].item()

    def inclusion_logits(self, chain: "Chain") -> Float[Tensor, " K"]:
        """Return logit π_β(k ∈ Z | Z₋ₖ) of every candidate, on the CPU."""
        included = chain.included
        size = int(included.sum())
        # w(m + 1) − w(m) with m = |Z₋ₖ|: the size without k is |Z| − 1 inside and |Z| outside.
        below, here, above = (
            self.log_weights[min(max(m, 0), len(included))] for m in (size - 1, size, size + 1)
        )
        slopes = torch.where(included, here - below, above - here)
        return self._tempered(chain, chain.gains + slopes)

    def location_logits(self, chain: "Chain") -> Float[Tensor, " K"]:
        """Return log π_β(Z ∪ k) of every candidate k outside, up to a constant; −∞ inside."""
        return self._tempered(chain, chain.gains).masked_fill(chain.included, -torch.inf)

    def _tempered(self, chain: "Chain", logits: Float[Tensor, " K"]) -> Float[Tensor, " K"]:
        if self.reference is None or self.beta == 1:
            return logits
        own = self.reference.conditional_logits(chain.included[None])[0]
        tempered = self.beta * logits + (1 - self.beta) * own
        # Sizes that the prior forbids stay forbidden at every temperature, also at β = 0.
        return torch.where(logits.isinf(), logits, tempered)


@final
@dataclass(frozen=True, slots=True)
class Chain:
    """The subset of one Markov chain.

    Attributes:
        state: search state of the subset.
        gains: marginal gains of all candidates in nats, on the CPU.
        moves: number of moves since the search state was computed afresh.
    """

    state: SearchState
    gains: Float[Tensor, " K"]
    moves: int = 0

    @classmethod
    def at(cls, objective: SearchObjective, mask: Mask) -> "Chain":
        """Return a chain at a given subset; O(K² M)."""
        state = objective.search_state(mask)
        return cls(state, state.marginal_gains().cpu())

    @property
    def included(self) -> Mask:
        """The subset, on the CPU."""
        return self.state.included.cpu()

    def toggle(self, objective: SearchObjective, index: int) -> "Chain":
        """Return the chain after adding or removing a candidate; O(K²)."""
        state = self.state.toggle(index, gain=self.gains[index].to(self.state.bound))
        if self.moves + 1 >= _REFRESH:
            return Chain.at(objective, state.mask)
        return Chain(state, state.marginal_gains().cpu(), self.moves + 1)


def gibbs_sweep(
    target: TemperedPosterior, chain: Chain, *, generator: torch.Generator
) -> tuple[Chain, Float[Tensor, " K"]]:
    """Draw the inclusion of every candidate given the others, in random order.

    Candidates up to the first one that changes are decided by the same marginal gains; then the
    gains are computed again.

    Returns:
        The chain, and the conditional inclusion logits of all candidates at its last subset.
    """
    K = target.objective.K
    order = torch.randperm(K, generator=generator)
    thresholds = torch.rand(K, generator=generator, dtype=torch.float64).logit()
    logits, position = target.inclusion_logits(chain), 0
    while position < K:
        rest = order[position:]
        # u < λ ⇔ logit u < logit λ
        changed = (thresholds[position:] < logits[rest]) != chain.included[rest]
        first = int(changed.int().argmax())
        if not bool(changed[first]):
            break
        chain = chain.toggle(target.objective, int(rest[first]))
        logits, position = target.inclusion_logits(chain), position + first + 1
    return chain, logits


def relocate(target: TemperedPosterior, chain: Chain, *, generator: torch.Generator) -> Chain:
    """Remove a random inducing point, and draw its place among all candidates outside; O(K²).

    Given the other inducing points, the place is drawn from its conditional distribution: every
    proposal is accepted. The size does not change.
    """
    inside = chain.included.nonzero()[:, 0]
    if len(inside) == 0:
        return chain
    leaving = int(inside[torch.randint(len(inside), (), generator=generator)])
    without = chain.toggle(target.objective, leaving)
    weights = target.location_logits(without).softmax(0)
    entering = int(torch.multinomial(weights, 1, generator=generator))
    return chain if entering == leaving else without.toggle(target.objective, entering)


def move(
    target: TemperedPosterior, chain: Chain, *, relocations: int | None, generator: torch.Generator
) -> tuple[Chain, Float[Tensor, " K"]]:
    """Make relocations, then a Gibbs sweep; both leave π_β as it is.

    Args:
        target: distribution π_β.
        chain: state of the chain.
        relocations: number of relocations; one for sixteen inducing points if None.
        generator: source of randomness.
    """
    if relocations is None:
        relocations = -(-int(chain.included.sum()) // _RELOCATIONS)
    for _ in range(relocations):
        chain = relocate(target, chain, generator=generator)
    return gibbs_sweep(target, chain, generator=generator)


def sample_subsets(
    statistics: SearchObjective,
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

    Each chain makes `burn_in` sweeps that are discarded and `sweeps` that are kept. Chains run at
    the same time if PyTorch has several threads, with the same result. A `ConvergenceWarning` says
    so if the chains disagree or hold too few independent samples.

    With several `betas`, each chain is a ladder of tempered copies that exchange their subsets
    (parallel tempering); only samples of β = 1 are kept. The time grows with the number of betas.

    Args:
        statistics: statistics of the data.
        prior: prior over subsets; sizes may be forbidden.
        generator: source of randomness.
        chains: number of independent chains, at least two for a comparison.
        sweeps: number of samples per chain.
        burn_in: number of sweeps before the first sample; a quarter of `sweeps` if not given.
        start: subset that each chain starts from; by default random subsets whose sizes lie between
            half and twice that of a forward selection.
        relocations: number before each sweep; one for sixteen inducing points if None.
        reference: distribution at β = 0, such as the q of `fit_inclusion`; needed for tempering.
        betas: inverse temperatures of each ladder, from 1 downwards.
    """
    _check(chains=chains, sweeps=sweeps, betas=betas, reference=reference)
    target = TemperedPosterior.of(statistics, prior, reference=reference)
    if start is None:
        start = _dispersed_starts(target, chains=chains, generator=generator)
    _check_starts(target, start, chains=chains)
    seeds = torch.randint(2**62, (chains,), generator=generator, device=generator.device).tolist()
    burn_in = sweeps // 4 if burn_in is None else burn_in

    def run(chain: int) -> SubsetSamples:
        return _run(
            [target.at(beta) for beta in betas],
            start[chain],
            burn_in=burn_in,
            sweeps=sweeps,
            relocations=relocations,
            generator=torch.Generator().manual_seed(seeds[chain]),
        )

    samples = SubsetSamples.concatenate(parallel_map(run, range(chains)))
    warn_if_poor(samples)
    return samples


def _run(
    ladder: list[TemperedPosterior],
    start: Mask,
    *,
    burn_in: int,
    sweeps: int,
    relocations: int | None,
    generator: torch.Generator,
) -> SubsetSamples:
    """Run one chain, or one ladder of tempered chains."""
    chains = [Chain.at(target.objective, start) for target in ladder]
    masks: list[Bool[Tensor, " K"]] = []
    bounds: list[Tensor] = []
    inclusion = torch.zeros(len(start), dtype=torch.float64)
    for sweep in range(burn_in + sweeps):
        logits = inclusion
        for index in reversed(range(len(ladder))):
            chains[index], logits = move(
                ladder[index], chains[index], relocations=relocations, generator=generator
            )
        if sweep >= burn_in:
            masks.append(chains[0].state.mask.cpu())
            bounds.append(chains[0].state.bound.cpu())
            inclusion = inclusion + logits.sigmoid() / sweeps
        _exchange(ladder, chains, first=sweep % 2, generator=generator)
    return SubsetSamples(
        masks=torch.stack(masks)[None],
        bounds=torch.stack(bounds)[None],
        conditional_inclusion=inclusion[None],
        log_weights=ladder[0].log_weights,
    )


def _exchange(
    ladder: list[TemperedPosterior], chains: list[Chain], *, first: int, generator: torch.Generator
) -> None:
    """Propose to exchange the subsets of neighbouring temperatures, every second pair, in place."""
    for i in range(first, len(ladder) - 1, 2):
        ratios = [target.log_ratio(chain) for target, chain in zip(ladder, chains, strict=True)]
        log_accept = (ladder[i].beta - ladder[i + 1].beta) * (ratios[i + 1] - ratios[i])
        if torch.rand((), generator=generator, dtype=torch.float64).log().item() < log_accept:
            chains[i], chains[i + 1] = chains[i + 1], chains[i]


def _dispersed_starts(
    target: TemperedPosterior, *, chains: int, generator: torch.Generator
) -> Masks:
    """Return random subsets with sizes between half and twice that of a forward selection.

    Chains that start too close to each other would agree before they have explored q*.
    """
    objective, log_weights = target.objective, target.log_weights
    w = log_weights.to(objective.empty)
    best = int(forward_selection(objective, log_weights=w).best(w).sum())
    allowed = torch.isfinite(log_weights).nonzero()[:, 0]
    keys = torch.rand((chains, objective.K), generator=generator, device=generator.device).cpu()
    ranks = keys.argsort(1).argsort(1)
    sizes = best * 2 ** torch.linspace(-1, 1, chains) if chains > 1 else torch.tensor([float(best)])
    nearest = allowed[(sizes[:, None] - allowed).abs().argmin(1)]
    return (ranks < nearest[:, None]).to(objective.empty.device)


def _on_cpu(q: PointProcess) -> PointProcess:
    """Return a process without gradients on the CPU, where chains are decided."""
    logits = q.logits.detach().cpu()
    if isinstance(q, Determinantal):
        return Determinantal(logits, q.features.detach().cpu())
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
            "tempering needs a `reference`, the distribution at β = 0; pass the q of "
            "`fit_inclusion`, or a flatter Bernoulli."
        )


def _check_starts(target: TemperedPosterior, start: Masks, *, chains: int) -> None:
    K = target.objective.K
    if start.shape != (chains, K):
        raise InputError(
            f"`start` must have one subset of {K} candidates for each of {chains} chains; got "
            f"shape {list(start.shape)}."
        )
    if not torch.isfinite(target.log_weights[start.sum(1).cpu()]).all():
        raise InputError(
            "`start` must have sizes that `prior` allows; got "
            f"{start.sum(1).tolist()} inducing points. Start from other subsets."
        )
