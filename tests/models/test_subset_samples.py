"""Samples of q*(Z) for every model with exact marginal gains, against the sum over all subsets."""

from collections.abc import Callable

import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import BernoulliLikelihood

from helpers.deep_problems import deep, rows
from winnowgp.data import Dataset
from winnowgp.gradients import all_masks
from winnowgp.models import SparseGP, VariationalGP
from winnowgp.models.deep_sites import deep_sites
from winnowgp.point_processes import Bernoulli, SquaredCardinality
from winnowgp.selection import SubsetStatistics, fit_inclusion, sample_subsets, subset_evidence

X = torch.linspace(0, 3, 14, dtype=torch.float64)[:, None]
CANDIDATES = X[::4] + 0.1


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def outputs_with_own_noise() -> SubsetStatistics:
    Y = torch.cat([torch.sin(2 * X), torch.cos(3 * X)], 1)
    noise = torch.tensor([0.3, 0.8], dtype=torch.float64)
    model = SparseGP(ScaleKernel(RBFKernel()), CANDIDATES, noise=noise).requires_grad_(False)
    return model.subset_statistics(Dataset(X, Y))


def classes() -> SubsetStatistics:
    model = VariationalGP(
        ScaleKernel(RBFKernel()), CANDIDATES, likelihood=BernoulliLikelihood()
    ).requires_grad_(False)
    return model.subset_statistics(Dataset(X, (torch.sin(2 * X) > 0).to(X)))


def deep_layer(number: int) -> SubsetStatistics:
    model, data = deep("bernoulli", widths=(2,), K=(4, 3)), rows("bernoulli", N=8)
    sites = deep_sites(model, data, eps=model.base_samples(8, 3, seeded(0)))[number]
    return sites.statistics(model.layers[number], bound=-9.0, N=8)


def two_kernels() -> SubsetStatistics:
    return SubsetStatistics((*classes().terms, *classes().terms))


@pytest.mark.unchecked
@pytest.mark.parametrize(
    "build",
    [
        outputs_with_own_noise,
        classes,
        lambda: deep_layer(0),
        lambda: deep_layer(1),
        two_kernels,
    ],
    ids=["outputs", "classes", "hidden layer", "last layer", "two kernels"],
)
def test_samples_and_evidence_match_enumeration(build: Callable[[], SubsetStatistics]) -> None:
    statistics = build()
    prior, masks = SquaredCardinality(statistics.K, 0.2), all_masks(statistics.K)
    log_joint = statistics.value(masks) + prior.log_prob(masks, like=statistics.empty)
    exact = log_joint.softmax(0)
    samples = sample_subsets(
        statistics, prior=prior, generator=seeded(0), chains=40, sweeps=12, burn_in=4
    )
    shares = samples.pooled.double().mean(0)
    truth = exact @ masks.double()
    error = (truth * (1 - truth) / min(samples.effective_samples.values())).sqrt()
    assert ((shares - truth).abs() < 4 * error + 1e-3).all()
    assert ((samples.inclusion - truth).abs() < 4 * error + 1e-3).all()
    field = fit_inclusion(statistics, prior=prior, generator=seeded(1)).q
    evidence = subset_evidence(
        statistics,
        prior=prior,
        reference=Bernoulli(field.logits.clamp(-4, 4)),
        generator=seeded(2),
        runs=100,
        steps=3,
    )
    weights = (evidence.forward - log_joint.logsumexp(0)).exp()
    # E[w] is the evidence: |z| < 4 with 100 runs.
    assert abs((weights.mean() - 1) / (weights.std() / 10)) < 4
