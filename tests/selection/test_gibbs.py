"""Gibbs sampling of q*(Z) ∝ p(Z) exp L(Z) against the sum over all subsets."""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import Tensor

from helpers.selection_problems import problem
from winnowgp.errors import ConvergenceWarning, InputError
from winnowgp.gradients import all_masks
from winnowgp.point_processes import (
    Bernoulli,
    Budget,
    CardinalityPrior,
    Determinantal,
    SquaredCardinality,
)
from winnowgp.point_processes.bernoulli import PointProcess
from winnowgp.selection import SubsetStatistics, sample_subsets
from winnowgp.selection.chains import Chains
from winnowgp.selection.gibbs import Ladder, TemperedPosterior, gibbs_sweep, relocate
from winnowgp.selection.subset_samples import SubsetSamples

K = 5
DRAWS = 4000


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@dataclass(frozen=True)
class Enumerated:
    """π_β of a small problem, and the probability of each of the 2^K subsets."""

    target: TemperedPosterior
    probabilities: Tensor

    def mean(self, values: Tensor) -> Tensor:
        return self.probabilities @ values


@cache
def small(candidates: int = K) -> SubsetStatistics:
    return problem(22, K=candidates, noise=1.0, duplicates=2).statistics


@cache
def enumerated(beta: float = 1.0, *, budget: bool = False, repulsive: bool = False) -> Enumerated:
    statistics, masks = small(), all_masks(K)
    prior: CardinalityPrior = SquaredCardinality(K, 0.5)
    if budget:
        prior = Budget(torch.tensor([-math.inf, 0.0, 0.2, -0.5, -math.inf, -math.inf]).double())
    reference: PointProcess = Bernoulli(torch.linspace(-1, 1.5, K, dtype=torch.float64))
    if repulsive:
        features = torch.linspace(-2, 2, 2 * K, dtype=torch.float64).reshape(K, 2)
        reference = Determinantal(reference.logits, features)
    log_joint = statistics.value(masks) + prior.log_prob(masks, like=statistics.empty)
    tempered = beta * log_joint + (1 - beta) * reference.log_prob(masks)
    target = TemperedPosterior.of(statistics, prior, chains=1, reference=reference)
    target = target.at(torch.tensor([beta]))
    return Enumerated(target, tempered.softmax(0))


@pytest.mark.parametrize(
    ("beta", "budget", "repulsive"),
    [(1.0, False, False), (1.0, True, False), (0.3, True, False), (0.3, False, True)],
)
def test_inclusion_logits_are_conditional_distributions(
    beta: float, budget: bool, repulsive: bool
) -> None:
    exact = enumerated(beta, budget=budget, repulsive=repulsive)
    masks, eye, code = all_masks(K), torch.eye(K, dtype=torch.bool), 2 ** torch.arange(K)
    for mask, probability in zip(masks, exact.probabilities, strict=True):
        if probability == 0:
            continue
        with_k = (mask | eye).long() @ code
        without_k = (mask & ~eye).long() @ code
        expected = exact.probabilities[with_k].log() - exact.probabilities[without_k].log()
        chains = Chains.at(exact.target.objective, mask[None])
        logits = exact.target.inclusion_logits(chains)[0]
        torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)
        # Places of one more inducing point, relative to the first candidate outside.
        if not budget and not bool(mask.all()):
            places = exact.target.location_logits(chains)[0]
            joint = exact.probabilities[with_k].log()
            torch.testing.assert_close(
                (places - places[~mask][0])[~mask], (joint - joint[~mask][0])[~mask]
            )


Move = Callable[[TemperedPosterior, Chains, torch.Generator], object]


def sweep(target: TemperedPosterior, chains: Chains, generator: torch.Generator) -> None:
    gibbs_sweep(target, chains, generator=generator)


def relocation(target: TemperedPosterior, chains: Chains, generator: torch.Generator) -> None:
    relocate(target, chains, active=torch.ones(DRAWS).bool(), generator=generator)


def stale_sweep(target: TemperedPosterior, chains: Chains, generator: torch.Generator) -> None:
    """A biased twin: every candidate is decided by the gains at the start of the sweep."""
    thresholds = torch.rand((DRAWS, K), generator=generator, dtype=torch.float64).logit()
    chains.included = thresholds < target.inclusion_logits(chains)


def uniform_relocation(
    target: TemperedPosterior, chains: Chains, generator: torch.Generator
) -> None:
    """A biased twin: the place is drawn uniformly."""
    active = chains.included.any(1) & ~chains.included.all(1)
    keys = torch.rand((DRAWS, K), generator=generator, dtype=torch.float64)
    leaving = torch.where(chains.included, keys, -1.0).argmax(1)
    entering = torch.where(chains.included, -1.0, keys).argmax(1)
    for index in (leaving, entering):
        chains.toggle(index, active=active)


def largest_z(exact: Enumerated, move: Move) -> float:
    """The largest |z| of functionals after one move from each of 4,000 exact draws.

    A move that leaves π_β as it is leaves their expectations as they are.
    """
    generator = seeded(3)
    starts = torch.multinomial(exact.probabilities, DRAWS, replacement=True, generator=generator)
    chains = Chains.at(exact.target.objective, all_masks(K)[starts])
    move(exact.target, chains, generator)
    return z_scores(exact, chains.included).abs().max().item()


def z_scores(exact: Enumerated, drawn: Tensor) -> Tensor:
    """z-scores of marginal and pairwise inclusion and of the squared size of independent draws."""
    masks = all_masks(K).double()
    pairs = (masks[:, :, None] * masks[:, None, :]).flatten(1)
    functionals = torch.cat([pairs, masks.sum(1, keepdim=True) ** 2], dim=1)
    values = functionals[drawn.long() @ (2 ** torch.arange(K))]
    error = (values.std(0) / len(drawn) ** 0.5).clamp_min(1e-9)
    return (values.mean(0) - exact.mean(functionals)) / error


@pytest.mark.unchecked
@pytest.mark.parametrize("beta", [1.0, 0.3])
@pytest.mark.parametrize("move", [sweep, relocation])
def test_moves_leave_distribution_unchanged(move: Move, beta: float) -> None:
    assert largest_z(enumerated(beta), move) < 4


@pytest.mark.unchecked
def test_sweep_leaves_distribution_with_forbidden_sizes_unchanged() -> None:
    assert largest_z(enumerated(budget=True), sweep) < 4


def test_tempered_logits_forbid_what_the_prior_forbids() -> None:
    prior = Budget(torch.tensor([0.0, 0.0] + [-math.inf] * (K - 1)).double())
    reference = Bernoulli(torch.ones(K).double())
    target = TemperedPosterior.of(small(), prior, chains=1, reference=reference)
    chains = Chains.at(small(), torch.arange(K)[None] == 0)
    logits = target.at(torch.zeros(1)).inclusion_logits(chains)[0]
    assert logits[0] == 1
    assert (logits[1:] == -math.inf).all()


@pytest.mark.unchecked
@pytest.mark.parametrize("move", [stale_sweep, uniform_relocation])
def test_biased_moves_fail_the_same_check(move: Move) -> None:
    assert largest_z(enumerated(0.3), move) > 4


def exchanged(log_ratio_scale: float) -> list[Tensor]:
    """Subsets at β = 1 and β = 0.2 after one exchange between exact draws of both."""
    generator, masks = seeded(5), all_masks(K)
    starts = [
        torch.multinomial(enumerated(beta).probabilities, DRAWS, True, generator=generator)
        for beta in (1.0, 0.2)
    ]
    before = masks[torch.stack(starts, dim=1).flatten()]  # chains 2i and 2i + 1 are a ladder
    ladder = Ladder.of([1.0, 0.2], chains=DRAWS, like=small().empty)
    ratios = log_ratio_scale * enumerated(1.0).target.log_ratio(Chains.at(small(), before))
    ladder = ladder.exchanged(ratios, first=0, generator=generator)
    assert torch.equal(ladder.beta[ladder.coldest], torch.ones(DRAWS).double())
    assert (ladder.coldest != 2 * torch.arange(DRAWS)).double().mean() > 0.2
    return list(before[ladder.chain].unbind(1))


@pytest.mark.unchecked
def test_exchange_of_temperatures_leaves_both_distributions_unchanged() -> None:
    for beta, drawn in zip((1.0, 0.2), exchanged(1.0), strict=True):
        assert z_scores(enumerated(beta), drawn).abs().max() < 4
    # A biased twin accepts every exchange.
    assert z_scores(enumerated(1.0), exchanged(0.0)[0]).abs().max() > 4


def short_chains(alpha: float, betas: tuple[float, ...]) -> SubsetSamples:
    """Four samples of each of 1,000 independent chains; K = 5 needs few sweeps of burn-in."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return sample_subsets(
            small(),
            prior=SquaredCardinality(K, alpha),
            generator=seeded(1),
            chains=1000,
            sweeps=4,
            burn_in=10,
            reference=Bernoulli(torch.linspace(-1, 1.5, K, dtype=torch.float64)),
            betas=betas,
        )


@pytest.mark.unchecked
@pytest.mark.parametrize("betas", [(1.0,), (1.0, 0.4)], ids=["plain", "tempered"])
def test_sample_subsets_match_enumeration(betas: tuple[float, ...]) -> None:
    exact, samples = enumerated(1.0), short_chains(0.5, betas)
    assert z_scores(exact, samples.masks[:, -1]).abs().max() < 4
    # Means of conditional probabilities of a chain are independent of those of the others.
    each = samples.conditional_inclusion
    truth = exact.mean(all_masks(K).double())
    assert ((samples.inclusion - truth) / (each.std(0) / 1000**0.5)).abs().max() < 4
    sizes = torch.bincount(all_masks(K).sum(1), weights=exact.probabilities).cumsum(0)
    assert samples.credible_size(0.8) == tuple(int((sizes < t).sum()) for t in (0.1, 0.9))
    scores = exact.target.objective.value(all_masks(K)) - 0.5 * all_masks(K).sum(1) ** 2
    assert samples.best.score == pytest.approx(scores.max().item(), abs=1e-6)
    torch.testing.assert_close(samples.bounds.flatten(), small().value(samples.pooled))


@pytest.mark.unchecked
def test_sample_subsets_of_another_prior_fail_the_same_check() -> None:
    assert z_scores(enumerated(1.0), short_chains(0.65, (1.0,)).masks[:, -1]).abs().max() > 4


@pytest.mark.filterwarnings("ignore::winnowgp.errors.ConvergenceWarning")
def test_sample_subsets_same_seed_same_result() -> None:
    first, second = (
        sample_subsets(small(), prior=SquaredCardinality(K, 0.5), generator=seeded(1), sweeps=8)
        for _ in "ab"
    )
    assert torch.equal(first.masks, second.masks)


def test_sample_subsets_certain_candidate_has_inclusion_of_one() -> None:
    """Means of 100 ones must not be rounded above one: their logits would not be numbers."""
    log_weights = torch.tensor([-800.0, -800.0, 0.0], dtype=torch.float64)
    statistics = problem(3, K=2, noise=1.0).statistics
    start = torch.ones(2, 2, dtype=torch.bool)
    samples = sample_subsets(
        statistics,
        prior=Budget(log_weights),
        generator=seeded(0),
        chains=2,
        sweeps=100,
        start=start,
    )
    assert samples.inclusion.tolist() == [1.0, 1.0]


def test_sample_subsets_without_relocations_of_duplicates_warns() -> None:
    """Two copies of a candidate that exclude each other: no path of likely single changes."""
    log_weights = torch.tensor([-60.0, 0.0, -60.0], dtype=torch.float64)
    statistics = problem(3, K=2, duplicates=1, noise=0.01).statistics
    arguments = {"prior": Budget(log_weights), "generator": seeded(1), "sweeps": 60, "chains": 2}
    start = torch.tensor([[True, False], [False, True]])
    with pytest.warns(ConvergenceWarning, match="not mixed"):
        stuck = sample_subsets(statistics, **arguments, start=start, relocations=0)
    moved = sample_subsets(statistics, **arguments, start=start)
    assert stuck.masks.double().mean(1).tolist() == [[1, 0], [0, 1]]
    assert (moved.masks.double().mean((0, 1)) - 0.5).abs().max() < 0.2


def test_sample_subsets_bad_arguments_raise() -> None:
    prior, statistics, generator = SquaredCardinality(K, 0.5), small(), seeded(0)
    with pytest.raises(InputError, match="`reference`"):
        sample_subsets(statistics, prior=prior, generator=generator, betas=(1.0, 0.5))
    with pytest.raises(InputError, match="start at 1"):
        sample_subsets(statistics, prior=prior, generator=generator, betas=(0.5, 0.2))
    with pytest.raises(InputError, match="at least 4"):
        sample_subsets(statistics, prior=prior, generator=generator, sweeps=3)
    start = torch.ones(3, K, dtype=torch.bool)
    with pytest.raises(InputError, match="one subset of 5"):
        sample_subsets(statistics, prior=prior, generator=generator, start=start)
    with pytest.raises(InputError, match="K=5"):
        sample_subsets(statistics, prior=SquaredCardinality(4, 0.5), generator=generator)
    hard = Budget(torch.tensor([0.0, 0.0] + [-math.inf] * 4, dtype=torch.float64))
    with pytest.raises(InputError, match="`prior` allows"):
        sample_subsets(statistics, prior=hard, generator=generator, chains=3, start=start)
