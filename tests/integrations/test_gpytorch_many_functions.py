"""Tasks, layers and latent columns go through the door, each with points of their own."""

from typing import Any, cast

import gpytorch
import pytest
import torch
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.models.deep_gps import DeepGP

from helpers.gpytorch_models import (
    Deep,
    Latent,
    Model,
    curve,
    elbo,
    gaussian,
    independent,
    mixed,
    points,
    state,
    task_noise,
    tasks,
    trained,
    untouched,
    with_random_q,
)
from winnowgp.integrations.gpytorch import winnow


@pytest.mark.parametrize("prior", [[], [3]])
@pytest.mark.parametrize("own", [False, True])
def test_tasks_share_their_points_or_have_as_many_each(prior: list[int], own: bool) -> None:
    x, Y = tasks(60)
    Z = points(20)
    Z = torch.stack([Z, Z + 0.1, Z - 0.1]) if own else Z
    model = Model(Z, batch=[3], prior=prior, around=independent)
    result = winnow(model, task_noise(), (x, Y))
    kept = result.model.variational_strategy.base_variational_strategy.inducing_points
    M = result.sets[0].n_inducing
    assert kept.shape == ((3, M, 1) if own else (M, 1))
    assert len(result.sets) == (3 if own else 1)
    assert 5 < M < 16
    assert result.elbo_gap <= 0.01 * 60
    smaller = result.model.train()
    bound = elbo(task_noise(), smaller, 60)
    # Where tasks are independent, sites are exact and one step is the optimum.
    assert result.bound == pytest.approx(60 * bound(smaller(x), Y).sum().item(), abs=1e-5)


def test_tasks_with_their_own_points_keep_their_own_sets() -> None:
    x, Y = tasks(60)
    model = Model(points(20).repeat(3, 1, 1), batch=[3], prior=[3], around=independent)
    result = winnow(model, task_noise(), (x, Y), max_points=8)
    masks = [each.selection.mask for each in result.sets]
    assert len({tuple(mask.tolist()) for mask in masks}) > 1
    kept = result.model.variational_strategy.base_variational_strategy.inducing_points
    for Z, each in zip(kept, result.sets, strict=True):
        assert torch.equal(Z, each.candidates[each.selection.mask])
    assert [each.name[-3:] for each in result.sets] == ["[0]", "[1]", "[2]"]


def test_mixed_tasks_lose_little() -> None:
    x, Y = tasks(60)
    model = Model(points(20).repeat(3, 1, 1), batch=[3], prior=[3], around=mixed)
    result = winnow(model, task_noise(), (x, Y))
    assert result.original < result.reference
    assert result.sets[0].n_inducing < 18
    assert result.elbo_gap <= 0.01 * 60
    same = result.model.variational_strategy.lmc_coefficients
    assert torch.equal(same, model.variational_strategy.lmc_coefficients)


@pytest.fixture
def few_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of each row, where eight are drawn by default."""
    monkeypatch.setattr("winnowgp.integrations.gpytorch.sites._MOST_SAMPLES", 2)


def test_a_generator_makes_it_repeatable(few_samples: None) -> None:
    model, (x, y) = with_random_q(Deep(3)), curve(4)
    runs = [
        winnow(
            model,
            gaussian(1.0),
            (x, y),
            max_points=2,
            generator=torch.Generator().manual_seed(seed),
        )
        for seed in (0, 0, 1)
    ]
    assert runs[0].bound == runs[1].bound != runs[2].bound
    assert torch.equal(runs[0].inclusion, runs[1].inclusion)


def test_layers_of_a_deep_model_lose_points(few_samples: None) -> None:
    x, y = curve(30)
    model, likelihood = Deep(6), gaussian(0.05)
    bound = elbo(likelihood, model, 30)
    trained(model, bound, x - 3, y, 60)
    before = untouched(model)
    result = winnow(model, likelihood, (x - 3, y))
    names = [each.name for each in result.sets]
    assert names == [
        "hidden.variational_strategy[0]",
        "hidden.variational_strategy[1]",
        "last.variational_strategy",
    ]
    sizes = [each.n_inducing for each in result.sets]
    assert sizes[0] == sizes[1] < 6
    assert sizes[2] < 6
    assert result.model.hidden.variational_strategy.inducing_points.shape == (2, sizes[0], 1)
    assert all(torch.equal(before[n], v) for n, v in untouched(result.model).items())
    assert result.elbo_gap <= 0.01 * 30
    assert isinstance(result.model, DeepGP)
    with torch.no_grad(), gpytorch.settings.num_likelihood_samples(50):
        torch.manual_seed(0)
        f, g = (any_model(x - 3).mean.mean(0) for any_model in cast(Any, [model, result.model]))
    assert (f - g).abs().max() < 0.3


def test_columns_of_a_latent_model_lose_points(few_samples: None) -> None:
    x, Y = tasks(60)
    model = Latent(x / 3 - 1, 3, 15)
    likelihood = GaussianLikelihood(batch_shape=torch.Size([3])).double()
    bound = elbo(likelihood, model, 60)
    trained(model, bound, None, Y.mT, 60)
    before = state(model)
    result = winnow(model, likelihood, Y)
    assert torch.equal(result.model.X.q_mu, model.X.q_mu)
    assert all(torch.equal(before[n], v) for n, v in state(model).items())
    M = result.sets[0].n_inducing
    assert result.model.variational_strategy.inducing_points.shape == (3, M, 1)
    assert M < 12
    assert result.elbo_gap <= 0.01 * 60
