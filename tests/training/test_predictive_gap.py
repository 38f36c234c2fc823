"""Held-out densities of moved points and of averages with a constant, against explicit ones."""

import pytest
import torch
from gpytorch.kernels import MaternKernel, ScaleKernel

from winnowgp.data import Dataset
from winnowgp.models import SparseGP
from winnowgp.training.cross_validation import CrossValidation
from winnowgp.training.predictive_gap import averaged_densities, relocatable, relocated

N, M = 40, 5


def rows() -> Dataset:
    g = torch.Generator().manual_seed(1)
    X = torch.randn(N, 1, generator=g, dtype=torch.float64)
    eps = torch.randn(N, 1, generator=g, dtype=torch.float64)
    return Dataset.of(X, (2 * X).sin() + 0.3 * eps)


def sparse() -> SparseGP:
    return SparseGP(ScaleKernel(MaternKernel(nu=2.5)), rows().X[:M] + 0.3, noise=0.1)


def folds(count: int = 10) -> CrossValidation:
    return CrossValidation.of(rows(), torch.arange(N), folds=count)


def test_relocated_points_maximise_the_bound_of_the_rows() -> None:
    model, data = sparse(), rows().part(slice(30))
    moved = relocated(model, data)
    assert isinstance(moved, SparseGP)
    torch.testing.assert_close(moved.kernel.state_dict(), model.kernel.state_dict())
    assert moved.noise == model.noise
    assert moved.fixed_bound(data) > model.fixed_bound(data) + 0.1
    torch.testing.assert_close(model.candidates, sparse().candidates)


def test_densities_without_a_fold_use_points_that_have_not_seen_it() -> None:
    held_out, model = folds(2), sparse()
    densities, parts = held_out.densities(model, relocate=relocated), []
    for held in held_out.folds:
        rest = rows().part(torch.tensor([i for i in range(N) if i not in held.tolist()]))
        posterior = relocated(model, rest).posterior(rest)
        parts.append(posterior.log_density(rows().X[held], rows().Y[held]).sum(1))
    torch.testing.assert_close(densities, torch.cat(parts))
    assert not torch.allclose(densities, held_out.densities(model))


@pytest.mark.parametrize("frozen", [False, True])
def test_points_that_do_not_move_stay(frozen: bool) -> None:
    model = sparse().with_candidates(rows().X[: M * frozen])
    model.candidates.requires_grad_(not frozen)
    assert relocated(model, rows()) is model


@pytest.mark.parametrize(("affordable", "count"), [(1e12, 10), (3.5, 3), (0.0, 1)])
def test_folds_are_limited_by_the_work(affordable: float, count: int) -> None:
    work = affordable * 10 * sparse().chunked_cost(rows())
    assert len(relocatable(sparse(), folds(), work=work).folds) == count


@pytest.mark.parametrize("weight", [0.0, 0.3])
def test_average_with_a_constant_is_a_mixture_of_densities(weight: float) -> None:
    held_out, model = folds(), sparse()
    own = held_out.densities(model)
    # A zero mean, and noise that is the mean square of the targets.
    deviation = rows().Y.square().mean().sqrt()
    Y = rows().Y[torch.cat(held_out.folds), 0]
    constant = torch.distributions.Normal(0.0, deviation).log_prob(Y)
    expected = ((1 - weight) * own.exp() + weight * constant.exp()).log()
    averaged = averaged_densities(own, model, held_out, weight=weight)
    torch.testing.assert_close(averaged, expected, rtol=0, atol=1e-5)
