"""`winnow` on models with one function and with many."""

import warnings
from importlib import import_module
from typing import Any, cast

import gpytorch
import pytest
import torch
from gpytorch.likelihoods import (
    BernoulliLikelihood,
    GaussianLikelihood,
    Likelihood,
    PoissonLikelihood,
    SoftmaxLikelihood,
)
from gpytorch.models.deep_gps import DeepGP
from gpytorch.variational import (
    UnwhitenedVariationalStrategy,
    VariationalStrategy,
)
from torch import Tensor

from helpers.gpytorch_models import (
    DISTRIBUTIONS,
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
    three_classes,
    trained,
    untouched,
    with_random_q,
)
from winnowgp.data import Dataset
from winnowgp.errors import ConvergenceWarning
from winnowgp.integrations.gpytorch import winnow
from winnowgp.models import SparseGP


@pytest.mark.parametrize("strategy", [VariationalStrategy, UnwhitenedVariationalStrategy])
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_winnow_keeps_other_parameters_bit_for_bit(strategy: Any, distribution: Any) -> None:
    x, y = curve(50)
    model = Model(points(24), strategy=strategy, distribution=distribution)
    likelihood = gaussian()
    before, noise, random = state(model), state(likelihood), torch.get_rng_state()
    result = winnow(model, likelihood, (x, y))
    assert all(torch.equal(before[n], v) for n, v in state(model).items())
    assert all(torch.equal(noise[n], v) for n, v in state(likelihood).items())
    assert torch.equal(random, torch.get_rng_state())
    after = untouched(result.model)
    assert after
    assert all(torch.equal(before[n], v) for n, v in after.items())
    assert type(result.model) is Model
    assert type(result.model.variational_strategy) is strategy
    assert type(result.model.variational_strategy._variational_distribution) is distribution
    assert 5 < result.n_inducing < 20
    kept = result.model.variational_strategy.inducing_points
    assert torch.equal(kept, points(24)[result.sets[0].selection.mask])


def test_winnow_bound_is_that_of_returned_model() -> None:
    x, y = curve(50)
    model, likelihood = Model(points(24)), gaussian()
    result = winnow(model, likelihood, (x, y))
    smaller = result.model.train()
    bound = 50 * elbo(likelihood, smaller, 50)(smaller(x), y).item()
    assert result.bound == pytest.approx(bound, abs=1e-6)
    ours = SparseGP(model.covar_module, smaller.variational_strategy.inducing_points, noise=0.02)
    centred = Dataset.of(x, y - 0.2)
    assert result.bound == pytest.approx(ours.fixed_bound(centred), abs=5e-3)
    assert result.elbo_gap <= 0.01 * 50
    assert result.original < result.reference


def test_winnow_parameters_determine_number_of_points() -> None:
    x, y = curve(50)
    model, likelihood = Model(points(24)), gaussian()
    weak, strong = (winnow(model, likelihood, (x, y), alpha=a) for a in (0.01, 1.0))
    assert strong.n_inducing < weak.n_inducing < 24
    assert strong.sets[0].selection.alpha == 1.0
    assert winnow(model, likelihood, (x, y), max_points=7).n_inducing == 7
    loose = winnow(model, likelihood, (x, y), tolerance=0.5)
    assert loose.n_inducing < weak.n_inducing
    assert loose.elbo_gap <= 0.5 * 50
    selection = loose.sets[0].selection
    assert selection.frontier is not None
    assert selection.frontier.best_for_alpha(0.01).mask.sum() == weak.n_inducing
    assert loose.inclusion.shape == (24,)
    assert ((loose.inclusion >= 0) & (loose.inclusion <= 1)).all()
    assert loose.inclusion[selection.mask].mean() > loose.inclusion[~selection.mask].mean()
    assert f"{loose.n_inducing} of 24 inducing points selected" in str(loose)


def test_winnow_result_trains_in_user_loop() -> None:
    x, y = curve(50)
    likelihood = gaussian()
    result = winnow(Model(points(24)), likelihood, (x, y), max_points=6)
    model = result.model.train()
    bound = elbo(likelihood, model, 50)
    optimiser = torch.optim.Adam(model.parameters(), lr=0.02)
    losses = []
    for _ in range(25):
        optimiser.zero_grad()
        loss = -bound(model(x), y)
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.05
    fresh = Model(points(6))
    fresh.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(fresh.eval()(x).mean, model.eval()(x).mean)


def test_winnow_keeps_fixed_locations_fixed() -> None:
    x, y = curve(50)
    result = winnow(Model(points(24), learnt=False), gaussian(), (x, y))
    strategy = result.model.variational_strategy
    assert not isinstance(strategy.inducing_points, torch.nn.Parameter)
    assert "variational_strategy.inducing_points" in result.model.state_dict()


def test_winnow_keeps_single_precision() -> None:
    x, y = curve(200, dtype=torch.float32)
    model, likelihood = Model(points(40).float()), gaussian(dtype=torch.float32)
    result = winnow(model, likelihood, (x, y))
    assert {p.dtype for p in result.model.parameters()} == {torch.float32}
    assert result.n_inducing < 20
    smaller = result.model.train()
    bound = 200 * elbo(likelihood, smaller, 200)(smaller(x), y).item()
    assert bound == pytest.approx(result.bound, abs=0.5)


@pytest.mark.parametrize("name", ["classes", "softmax", "counts", "own"])
def test_winnow_other_likelihoods_lose_little(name: str) -> None:
    x, y = curve(80)

    class Own(Likelihood):
        """A likelihood that GPyTorch integrates by sampling."""

        def forward(self, f: Tensor, *args: Any, **kwargs: Any) -> torch.distributions.Normal:
            return torch.distributions.Normal(f.tanh(), 0.3)

    cases: dict[str, Any] = {
        "classes": (BernoulliLikelihood(), (y > 0).double()),
        "softmax": (
            SoftmaxLikelihood(num_features=3, num_classes=4),
            three_classes(y),
        ),
        "counts": (PoissonLikelihood(), y.exp().round()),
        "own": (Own(), y),
    }
    likelihood, targets = cases[name]
    kwargs: Any = {"batch": [3], "around": independent} if name == "softmax" else {}
    model = Model(points(20), **kwargs)
    result = winnow(model, likelihood, (x, targets))
    assert result.original < result.reference
    assert result.n_inducing <= 16
    assert result.elbo_gap <= 0.01 * 80


@pytest.mark.parametrize("tolerance", [0.05, 0.5])
def test_winnow_tolerance_holds_for_first_order_scores(tolerance: float) -> None:
    """Sites promise that five points, and one, will do; the pruned models lose more than that."""
    x, y = curve(80)
    labels = (y > 0).double()
    result = winnow(Model(points(20)), BernoulliLikelihood(), (x, labels), tolerance=tolerance)
    assert result.n_inducing < 20
    assert result.elbo_gap <= tolerance * 80


def test_winnow_exceeded_tolerance_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sites promise that five points lose 0.05 nats a row; one try is not enough."""
    module = import_module("winnowgp.integrations.gpytorch.selection")
    monkeypatch.setattr(module, "_TRIES", 1)
    x, y = curve(80)
    labels = (y > 0).double()
    with pytest.warns(
        ConvergenceWarning, match=r"0\.05 nats .* the best of 1 tries, the ELBO gap is 0\."
    ) as warned:
        result = winnow(Model(points(20)), BernoulliLikelihood(), (x, labels), tolerance=0.05)
    assert result.elbo_gap > 0.05 * 80
    assert f"with {result.n_inducing} inducing points" in str(warned[0].message)


def test_winnow_rows_equal_to_points_are_ordinary_rows() -> None:
    """GPyTorch's unwhitened strategy has a special case for them, with another jitter in its KL."""
    x, y = curve(20)
    kinds: Any = (VariationalStrategy, UnwhitenedVariationalStrategy)
    whitened, plain = (winnow(Model(x, strategy=s), gaussian(0.1), (x, y)) for s in kinds)
    assert plain.reference == pytest.approx(whitened.reference, abs=0.01)
    assert plain.bound == pytest.approx(whitened.bound, abs=0.01)
    assert plain.bound <= plain.reference


def test_winnow_unwhitened_state_is_returned_whitened() -> None:
    """GPyTorch whitens the q(u) of an old file at the first call; it is not whitened again."""
    x, y = curve(50)
    model, likelihood = with_random_q(Model(points(12))), gaussian()
    model.variational_strategy.updated_strategy.fill_(False)
    with warnings.catch_warnings():
        # GPyTorch warns about it.
        warnings.simplefilter("ignore")
        result = winnow(model, likelihood, (x, y))
        smaller = result.model.train()
        bound = 50 * elbo(likelihood, smaller, 50)(smaller(x), y).item()
    assert result.bound == pytest.approx(bound, abs=1e-6)
    assert not bool(model.variational_strategy.updated_strategy)


@pytest.mark.parametrize("prior", [[], [3]])
@pytest.mark.parametrize("own", [False, True])
def test_winnow_tasks_share_points_or_have_equal_numbers(prior: list[int], own: bool) -> None:
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
    # With independent tasks sites are exact, and one step reaches the optimum.
    assert result.bound == pytest.approx(60 * bound(smaller(x), Y).sum().item(), abs=1e-5)


def test_winnow_tasks_with_own_points_select_own_sets() -> None:
    x, Y = tasks(60)
    model = Model(points(20).repeat(3, 1, 1), batch=[3], prior=[3], around=independent)
    result = winnow(model, task_noise(), (x, Y), max_points=8)
    masks = [each.selection.mask for each in result.sets]
    assert len({tuple(mask.tolist()) for mask in masks}) > 1
    kept = result.model.variational_strategy.base_variational_strategy.inducing_points
    for Z, each in zip(kept, result.sets, strict=True):
        assert torch.equal(Z, each.candidates[each.selection.mask])
    assert [each.name[-3:] for each in result.sets] == ["[0]", "[1]", "[2]"]


def test_winnow_mixed_tasks_lose_little() -> None:
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
    """Use two samples per row instead of eight."""
    monkeypatch.setattr("winnowgp.integrations.gpytorch.sites._MOST_SAMPLES", 2)


def test_winnow_generator_makes_it_reproducible(few_samples: None) -> None:
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


def test_winnow_deep_model_prunes_all_layers(few_samples: None) -> None:
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


def test_winnow_latent_model_prunes_all_columns(few_samples: None) -> None:
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
