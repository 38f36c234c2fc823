"""A user's model with one function goes through the door and comes out smaller."""

import warnings
from importlib import import_module
from typing import Any

import pytest
import torch
from gpytorch.likelihoods import (
    BernoulliLikelihood,
    Likelihood,
    PoissonLikelihood,
    SoftmaxLikelihood,
)
from gpytorch.variational import (
    UnwhitenedVariationalStrategy,
    VariationalStrategy,
)
from torch import Tensor

from helpers.gpytorch_models import (
    DISTRIBUTIONS,
    Model,
    curve,
    elbo,
    gaussian,
    independent,
    points,
    state,
    three_classes,
    untouched,
    with_random_q,
)
from winnowgp.data import Dataset
from winnowgp.errors import ToleranceWarning
from winnowgp.integrations.gpytorch import winnow
from winnowgp.models import SparseGP


@pytest.mark.parametrize("strategy", [VariationalStrategy, UnwhitenedVariationalStrategy])
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_kernel_mean_and_likelihood_stay_bit_for_bit(strategy: Any, distribution: Any) -> None:
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


def test_the_bound_is_that_of_the_model_that_comes_out() -> None:
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


def test_words_say_how_many() -> None:
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
    assert f"24 points, {loose.n_inducing} kept" in str(loose)


def test_the_users_own_loop_trains_what_comes_out() -> None:
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


def test_locations_that_are_not_learnt_stay_so() -> None:
    x, y = curve(50)
    result = winnow(Model(points(24), learnt=False), gaussian(), (x, y))
    strategy = result.model.variational_strategy
    assert not isinstance(strategy.inducing_points, torch.nn.Parameter)
    assert "variational_strategy.inducing_points" in result.model.state_dict()


def test_single_precision_stays_single() -> None:
    x, y = curve(200, dtype=torch.float32)
    model, likelihood = Model(points(40).float()), gaussian(dtype=torch.float32)
    result = winnow(model, likelihood, (x, y))
    assert {p.dtype for p in result.model.parameters()} == {torch.float32}
    assert result.n_inducing < 20
    smaller = result.model.train()
    bound = 200 * elbo(likelihood, smaller, 200)(smaller(x), y).item()
    assert bound == pytest.approx(result.bound, abs=0.5)


@pytest.mark.parametrize("name", ["classes", "softmax", "counts", "own"])
def test_other_likelihoods_lose_little(name: str) -> None:
    x, y = curve(80)

    class Own(Likelihood):
        """One that GPyTorch integrates by sampling."""

        def forward(self, f: Tensor, *args: Any, **words: Any) -> torch.distributions.Normal:
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
    words: Any = {"batch": [3], "around": independent} if name == "softmax" else {}
    model = Model(points(20), **words)
    result = winnow(model, likelihood, (x, targets))
    assert result.original < result.reference
    assert result.n_inducing <= 16
    assert result.elbo_gap <= 0.01 * 80


@pytest.mark.parametrize("tolerance", [0.05, 0.5])
def test_a_tolerance_is_kept_where_scores_are_of_first_order(tolerance: float) -> None:
    """Sites promise that five points, and one, will do; the pruned models lose more than that."""
    x, y = curve(80)
    labels = (y > 0).double()
    result = winnow(Model(points(20)), BernoulliLikelihood(), (x, labels), tolerance=tolerance)
    assert result.n_inducing < 20
    assert result.elbo_gap <= tolerance * 80


def test_a_tolerance_that_is_not_kept_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sites promise that five points lose 0.05 nats a row; one try is not enough."""
    module = import_module("winnowgp.integrations.gpytorch.selection")
    monkeypatch.setattr(module, "_TRIES", 1)
    x, y = curve(80)
    labels = (y > 0).double()
    with pytest.warns(
        ToleranceWarning, match=r"0\.05 nats .* the best of 1 tries, the ELBO gap is 0\."
    ) as said:
        result = winnow(Model(points(20)), BernoulliLikelihood(), (x, labels), tolerance=0.05)
    assert result.elbo_gap > 0.05 * 80
    assert f"with {result.n_inducing} inducing points" in str(said[0].message)


def test_rows_that_are_the_points_are_rows_like_others() -> None:
    """GPyTorch's unwhitened strategy takes another way there, with another jitter in its KL."""
    x, y = curve(20)
    kinds: Any = (VariationalStrategy, UnwhitenedVariationalStrategy)
    whitened, plain = (winnow(Model(x, strategy=s), gaussian(0.1), (x, y)) for s in kinds)
    assert plain.reference == pytest.approx(whitened.reference, abs=0.01)
    assert plain.bound == pytest.approx(whitened.bound, abs=0.01)
    assert plain.bound <= plain.reference


def test_a_model_of_before_whitening_comes_out_whitened() -> None:
    """As from an old file: GPyTorch whitens its q(u) at the first call, and ours only once."""
    x, y = curve(50)
    model, likelihood = with_random_q(Model(points(12))), gaussian()
    model.variational_strategy.updated_strategy.fill_(False)
    with warnings.catch_warnings():
        # GPyTorch says that it does so.
        warnings.simplefilter("ignore")
        result = winnow(model, likelihood, (x, y))
        smaller = result.model.train()
        bound = 50 * elbo(likelihood, smaller, 50)(smaller(x), y).item()
    assert result.bound == pytest.approx(bound, abs=1e-6)
    assert not bool(model.variational_strategy.updated_strategy)
