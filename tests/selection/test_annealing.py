"""The evidence log Σ_Z p(Z) exp L(Z) by annealing, against the sum over all subsets."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.selection_problems import problem
from winnowgp.errors import InputError
from winnowgp.gradients import all_masks
from winnowgp.point_processes import Bernoulli, Budget, Determinantal, SquaredCardinality
from winnowgp.point_processes.bernoulli import PointProcess
from winnowgp.selection import SubsetStatistics, annealing, subset_evidence
from winnowgp.selection.annealing import SubsetEvidence
from winnowgp.selection.chains import Chains

K = 5
RUNS = 1000
PRIOR = SquaredCardinality(K, 0.5)
REFERENCE = Bernoulli(torch.linspace(-1, 1.5, K, dtype=torch.float64))
FEATURES = torch.linspace(-2, 2, 2 * K, dtype=torch.float64).reshape(K, 2)
REPULSIVE = Determinantal(REFERENCE.logits, FEATURES)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@cache
def statistics() -> SubsetStatistics:
    return problem(22, K=K, noise=1.0).statistics


@cache
def log_joint() -> Tensor:
    masks = all_masks(K)
    return statistics().value(masks) + PRIOR.log_prob(masks, like=statistics().empty)


def annealed(samples: Tensor | None = None) -> SubsetEvidence:
    return subset_evidence(
        statistics(),
        prior=PRIOR,
        reference=REFERENCE,
        generator=seeded(4),
        runs=RUNS,
        steps=4,
        samples=samples,
    )


def exact_draws(n: int) -> Tensor:
    at = torch.multinomial(log_joint().softmax(0), n, replacement=True, generator=seeded(9))
    return all_masks(K)[at]


def z_score(weights: Tensor, mean: float = 1.0) -> float:
    return ((weights.mean() - mean) / (weights.std() / len(weights) ** 0.5)).item()


def acceptance_z(evidence: SubsetEvidence) -> float:
    """z-score of E[σ(x)] forward = E[σ(−x)] backward, x = log w − log evidence (Bennett 1976).

    Reciprocal weights have heavy tails, and miss errors that these bounded functions show.
    """
    truth = log_joint().logsumexp(0)
    a, b = (evidence.forward - truth).sigmoid(), (truth - evidence.backward).sigmoid()
    return ((a.mean() - b.mean()) / ((a.var() + b.var()) / RUNS) ** 0.5).item()


@pytest.mark.unchecked
def test_weights_are_unbiased_in_both_directions() -> None:
    truth = log_joint().logsumexp(0)
    evidence = annealed(exact_draws(RUNS))
    # E[w] is the evidence; 1,000 runs each, |z| < 4.
    assert abs(z_score((evidence.forward - truth).exp())) < 4
    assert abs(acceptance_z(evidence)) < 4
    assert evidence.lower < truth < evidence.upper
    assert evidence.lower < evidence.estimate < evidence.upper


@pytest.mark.unchecked
def test_biased_moves_fail_the_same_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def stale(target: Any, chains: Chains, *, generator: torch.Generator, **_: Any) -> None:
        """Decide every candidate by the gains at the start of the sweep."""
        thresholds = torch.rand((RUNS, K), generator=generator, dtype=torch.float64).logit()
        moved = Chains.at(target.objective, thresholds < target.inclusion_logits(chains))
        chains.included, chains.bounds, chains.gains = moved.included, moved.bounds, moved.gains

    monkeypatch.setattr(annealing, "move", stale)
    truth = log_joint().logsumexp(0)
    assert abs(z_score((annealed().forward - truth).exp())) > 4


@pytest.mark.unchecked
def test_backward_runs_from_other_draws_fail_the_same_check() -> None:
    evidence = annealed(REFERENCE.sample(RUNS, generator=seeded(9)))
    assert abs(acceptance_z(evidence)) > 4


@pytest.mark.parametrize("reference", [REFERENCE, REPULSIVE], ids=["independent", "repulsive"])
def test_one_step_is_importance_sampling(reference: PointProcess) -> None:
    evidence = subset_evidence(
        statistics(), prior=PRIOR, reference=reference, generator=seeded(4), runs=20, steps=1
    )
    masks = reference.sample(20, generator=seeded(4))
    expected = log_joint()[masks.long() @ (2 ** torch.arange(K))] - reference.log_prob(masks)
    torch.testing.assert_close(evidence.forward, expected)
    assert evidence.upper == float("inf")


def test_subset_evidence_bad_arguments_raise() -> None:
    given: dict[str, Any] = {"prior": PRIOR, "reference": REFERENCE, "generator": seeded(0)}
    hard = Budget(torch.tensor([0.0] * 3 + [float("-inf")] * 3, dtype=torch.float64))
    certain = Bernoulli(torch.full((K,), float("inf"), dtype=torch.float64))
    with pytest.raises(InputError, match="at least 1"):
        subset_evidence(statistics(), **given, steps=0)
    with pytest.raises(InputError, match="finite penalty"):
        subset_evidence(statistics(), **{**given, "prior": hard})
    with pytest.raises(InputError, match="5 candidates"):
        subset_evidence(statistics(), **{**given, "reference": Bernoulli(REFERENCE.logits[1:])})
    with pytest.raises(InputError, match="finite logits"):
        subset_evidence(statistics(), **{**given, "reference": certain})
