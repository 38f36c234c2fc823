"""Pooled repeated measurements against the rows themselves: bounds, gradients, predictions."""

from typing import Any

import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from torch import Tensor

from winnowgp.data import Dataset
from winnowgp.data.noise import measured_repeatedly, pooled
from winnowgp.models import SparseGP, VariationalGP
from winnowgp.models.heteroscedastic import HeteroscedasticGP, LogVarianceLikelihood

G = torch.Generator().manual_seed(0)
# Seven settings, measured 1, 2, 3, 5, 8, 8 and 13 times, in random order.
SETTINGS = torch.repeat_interleave(torch.arange(7), torch.tensor([1, 2, 3, 5, 8, 8, 13]))
SETTINGS = SETTINGS[torch.randperm(len(SETTINGS), generator=G)]
Z = torch.randn(5, 2, generator=G, dtype=torch.float64)
X = torch.randn(7, 2, generator=G, dtype=torch.float64)[SETTINGS]
Y = torch.stack([X[:, 0].sin(), X.prod(1)], 1)
Y = Y + 0.3 * torch.randn(Y.shape, generator=G, dtype=torch.float64)
WEIGHTS = 0.5 + torch.rand(len(X), generator=G, dtype=torch.float64)
NOISE = 0.1 + torch.rand(Y.shape, generator=G, dtype=torch.float64)
SAME = NOISE[SETTINGS]


def gp(noise: Tensor | float) -> SparseGP:
    return SparseGP(ScaleKernel(RBFKernel()), Z, noise=noise)


def assert_equal(model: Any, rows: Dataset, fewer: Dataset) -> None:
    assert fewer.N <= 14
    assert fewer.observations == pytest.approx(rows.observations)
    bounds, gradients, predictions = [], [], []
    for data in (rows, fewer):
        model.zero_grad()
        bound = model.bound(data)
        bound.backward()
        bounds.append(bound.detach())
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        predictions.append(model.posterior(data).predict(X + 0.2, observed=True))
    torch.testing.assert_close(bounds[0], bounds[1], rtol=1e-10, atol=1e-9)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-8, atol=1e-9)
    for moment in ("mean", "variance"):
        first, second = (getattr(prediction, moment) for prediction in predictions)
        torch.testing.assert_close(first, second, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("weights", [None, WEIGHTS])
@pytest.mark.parametrize("noise", [None, SAME])
def test_pooled_rows_have_the_bound_of_all_rows_if_noise_is_learnt(weights, noise) -> None:
    rows = Dataset.of(X, Y, weights=weights, noise=noise)
    assert_equal(gp(torch.tensor([0.1, 0.3]).double()), rows, pooled(rows))


@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_pooled_rows_of_different_known_noise_have_the_bound_of_all_rows(weights) -> None:
    rows = Dataset.of(X, Y, weights=weights, noise=NOISE)
    model = gp(1e-3)
    model.likelihood.requires_grad_(False)
    assert_equal(model, rows, pooled(rows, known=1e-3))
    # A learnt part of the noise would make the weights of the rows depend on it.
    assert pooled(rows) is rows


def test_pooled_rows_with_missing_targets_have_the_bound_of_all_rows() -> None:
    missing = Y.clone()
    missing[SETTINGS == 6, 0] = torch.nan
    missing[SETTINGS == 3, 1] = torch.nan
    rows = Dataset.of(X, missing, missing=True)
    assert_equal(gp(torch.tensor([0.1, 0.3]).double()), rows, pooled(rows))


def test_pooled_rows_have_the_bound_of_all_rows_if_noise_depends_on_the_inputs() -> None:
    log_noise = VariationalGP(ScaleKernel(RBFKernel()), Z[:3], likelihood=LogVarianceLikelihood())
    model = HeteroscedasticGP(gp(0.2), log_noise)
    rows = Dataset.of(X, Y[:, :1])
    assert_equal(model, rows, pooled(rows))
    best = [model.with_best_q(data, gain=1e-12).fixed_bound(data) for data in (rows, pooled(rows))]
    assert best[0] == pytest.approx(best[1], abs=1e-6)


def test_few_repeats_are_left_as_they_are() -> None:
    rows = Dataset.of(X[:14], Y[:14])
    assert pooled(rows) is rows


def test_rows_measured_repeatedly_are_those_with_others_at_their_inputs() -> None:
    rows = pooled(Dataset.of(X, Y))
    assert measured_repeatedly(rows)
    assert not measured_repeatedly(Dataset.of(X, Y))
    # Rows of equal observations alone: one of each pair.
    _, index = torch.unique(rows.X, dim=0, return_inverse=True)
    ones = [int((index == i).nonzero()[0, 0]) for i in index.unique()]
    assert not measured_repeatedly(rows.part(torch.tensor(ones)))


@pytest.mark.parametrize(("alone", "expected"), [(3, True), (4, False)])
def test_measured_repeatedly_allows_observations_that_agree(alone: int, expected: bool) -> None:
    # One of the rows of weight two has another one at its inputs, and the others have none.
    inputs = torch.cat([torch.zeros(2), 1 + torch.arange(alone)])[:, None]
    weights = torch.tensor([2.0, 1.0, *[2.0] * alone])
    rows = Dataset.of(inputs, torch.arange(2.0 + alone), weights=weights)
    assert measured_repeatedly(rows) is expected
