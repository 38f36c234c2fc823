"""The fast schedule of deep GPs on a step function."""

import math
from itertools import pairwise
from typing import Any, final

import pytest
import torch

from helpers.deep_problems import started, step_data
from winnowgp.errors import InputError
from winnowgp.models import DeepGP
from winnowgp.models.deep_gp import estimate_elbo, prediction_cost, prediction_prices
from winnowgp.models.deep_sites import deep_sites
from winnowgp.selection import Frontier
from winnowgp.training import (
    DeepTraining,
    FastSchedule,
    FitResult,
    FixedAlpha,
    MaxCost,
    Progress,
    Tolerance,
    fit,
)
from winnowgp.training.adam import Minibatches
from winnowgp.training.callbacks import SMALLER_MODEL
from winnowgp.training.fast_deep import _DeepSteps, _Fitted, grow_candidates
from winnowgp.training.goals import Goal
from winnowgp.training.layer_training import LayerTraining
from winnowgp.training.schedules import TrainingContext


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def schedule(goal=None, **options) -> FastSchedule:
    rounds = options.pop("rounds", 1)
    training = DeepTraining(**{"layerwise": 5, "pre": 15, "post": 10, **options})
    return FastSchedule(goal or FixedAlpha(0.5), rounds=rounds, inclusion_steps=5, deep=training)


@pytest.fixture
def unpruned(monkeypatch: pytest.MonkeyPatch) -> list[DeepGP]:
    """The models that were pruned, in order."""
    models, prune = [], DeepGP.prune

    def recorded(model: DeepGP, masks) -> DeepGP:
        models.append(model)
        return prune(model, masks)

    monkeypatch.setattr(DeepGP, "prune", recorded)
    return models


def check(fitted: FitResult, sizes: tuple[int, ...]) -> None:
    """Check what holds for every fit."""
    assert tuple(each.M for each in fitted.selections) == fitted.model.sizes == fitted.posterior.M
    assert tuple(each.K for each in fitted.selections) == sizes
    assert tuple(len(each) for each in fitted.candidates) == sizes
    assert min(fitted.model.sizes) > 0
    for each in fitted.selections:
        assert ((each.inclusion >= 0) & (each.inclusion <= 1)).all()
        assert each.alpha is not None
        assert each.frontier is not None
        assert torch.equal(each.mask, each.frontier.best_for_alpha(each.alpha).mask)
        # Inclusion is higher for selected points.
        assert each.inclusion[each.mask].mean() > each.inclusion[~each.mask].sum() / sizes[0]
        assert torch.isfinite(each.trace).all()
    assert math.isfinite(fitted.elbo)
    assert fitted.elbo_gap >= 0


def test_fit_deep_elbo_gap_is_cost_of_pruning(unpruned: list[DeepGP]) -> None:
    """Nothing is trained after pruning; both ELBOs use the same samples."""
    data, model = step_data(), started()
    plan = schedule(FixedAlpha(3.0), layerwise=0, pre=60, post=0)
    fitted = fit(model, data, schedule=plan)
    before, after = (
        estimate_elbo(each, data, generator=seeded(), samples=64)
        for each in (unpruned[-1], fitted.model)
    )
    cost = before - after
    assert cost > 1
    assert fitted.elbo_gap == pytest.approx(cost, rel=0.3)


def test_fit_deep_uneven_rounds_take_all_steps() -> None:
    seen = []
    plan = schedule(layerwise=0, pre=5, post=0, rounds=3)
    fit(started(), step_data(), schedule=plan, callbacks=seen.append)
    assert sum(each.phase == "pre-train" for each in seen) == 5


@pytest.mark.parametrize("hidden_mean", ["identity", pytest.param("zero", marks=pytest.mark.slow)])
def test_fit_deep_selects_few_points_with_high_elbo(hidden_mean: str) -> None:
    data, model = (
        step_data(),
        started(hidden_mean=hidden_mean, skip_connections=hidden_mean == "zero"),
    )
    fitted = fit(model, data, schedule=schedule(pre=40, post=30, natural_rate=0.5))
    check(fitted, (8, 8))
    assert sum(fitted.model.sizes) < 14
    before = estimate_elbo(model, data, generator=seeded())
    assert fitted.elbo > before + 20
    # The posterior is that of the final model, and predicts the data.
    found = fitted.posterior.predict(data.X).mean
    assert torch.equal(found, fitted.model.posterior().predict(data.X).mean)
    assert (found - data.Y).square().mean() < 0.3 * data.Y.var()
    again = estimate_elbo(fitted.model, data, generator=seeded(7), samples=64)
    assert fitted.elbo == pytest.approx(again, abs=4)
    full = fit(model, data, schedule=schedule(FixedAlpha(1e-9), pre=40, post=30, natural_rate=0.5))
    assert fitted.elbo > full.elbo - 0.3 * data.N


@pytest.mark.parametrize(
    "seen", ["bernoulli", "student", pytest.param("softmax", marks=pytest.mark.slow)]
)
def test_fit_deep_other_likelihoods_and_minibatches(seen: str) -> None:
    data, model = step_data(seen), started(seen, K=6)
    fitted = fit(model, data, schedule=schedule(batch_size=16))
    check(fitted, (6, 6))
    assert fitted.elbo > estimate_elbo(model, data, generator=seeded())
    density = fitted.posterior.log_density(data.X, data.Y)
    assert density.mean() > model.posterior().log_density(data.X, data.Y).mean()


@pytest.mark.slow
def test_fit_deep_three_layers() -> None:
    data = step_data()
    fitted = fit(started(widths=(2, 1), K=5, skip_connections=True), data, schedule=schedule())
    check(fitted, (5, 5, 5))
    assert len(fitted.selections) == 3


def test_fit_deep_posterior_has_points_trained_after_pruning() -> None:
    data, model = step_data(), started()
    untouched = fit(model, data, schedule=schedule(post=0))
    trained = fit(model, data, schedule=schedule(post=10))
    assert untouched.model.sizes == trained.model.sizes
    for number, (fitted, kept) in enumerate(
        zip(untouched.candidates, untouched.selections, strict=True)
    ):
        assert torch.equal(untouched.model.layers[number].candidates, fitted[kept.mask])
        assert not torch.equal(trained.model.layers[number].candidates, fitted[kept.mask])


def test_fit_deep_goals_are_met() -> None:
    data, model = step_data(), started()
    budget = fit(model, data, schedule=schedule(MaxCost(20.0), post=0))
    assert sum(each.M**2 for each in budget.selections) <= 20
    tolerance = fit(model, data, schedule=schedule(Tolerance(0.05), post=0))
    # Without further steps the gap is what pruning costs.
    assert 0 < tolerance.elbo_gap <= 0.05 * data.N
    assert sum(tolerance.model.sizes) < sum(model.sizes)
    one_each = fit(model, data, schedule=schedule(FixedAlpha((1e-6, 1e6)), post=2))
    assert [each.alpha for each in one_each.selections] == [1e-6, 1e6]
    assert one_each.model.sizes[1] == 1
    assert one_each.model.sizes[0] > 1


def test_fit_deep_pruning_nothing_keeps_elbo(
    unpruned: list[DeepGP],
) -> None:
    """With all points selected nothing is lost, and q(u) of the last layer is optimal."""
    data, model = step_data(), started()
    fitted = fit(model, data, schedule=schedule(FixedAlpha(1e-12), post=0))
    before = estimate_elbo(unpruned[0], data, generator=seeded(5), samples=200)
    after = estimate_elbo(fitted.model, data, generator=seeded(5), samples=200)
    assert after > before - 0.1


def test_fit_deep_pruned_q_is_the_better_of_two(
    unpruned: list[DeepGP],
) -> None:
    data = step_data()
    plan = schedule(pre=1, post=0)
    fitted = fit(started(), data, schedule=plan)
    full = unpruned[0]
    sites = deep_sites(full, data, eps=full.base_samples(data.N, 16, seeded()))
    marginal = full.prune([each.mask for each in fitted.selections])
    best = [s.improved(layer) for layer, s in zip(marginal.layers, sites, strict=True)]
    ways = [marginal.with_layers([marginal.layers[0], best[1]]), marginal.with_layers(best)]
    found, *bounds = (
        estimate_elbo(each, data, generator=seeded(1), samples=64) for each in (fitted.model, *ways)
    )
    assert max(bounds) - min(bounds) > 1
    assert found > max(bounds) - 0.5


def test_fit_deep_reports_phases_in_order() -> None:
    told: list[Progress] = []
    plan = schedule(layerwise=2, pre=3, post=1)
    fit(started(hidden_mean="zero"), step_data(), schedule=plan, callbacks=told.append)
    assert [(p.phase, p.step, p.steps) for p in told] == [
        ("layer 1", 1, 2),
        ("layer 1", 2, 2),
        ("layer 2", 1, 2),
        ("layer 2", 2, 2),
        ("pre-train", 1, 3),
        ("pre-train", 2, 3),
        ("pre-train", 3, 3),
        ("selection", 1, 1),
        ("post-train", 1, 1),
    ]
    assert all((p.inclusion is not None) == (p.phase == "selection") for p in told)
    (chosen,) = [p.inclusion for p in told if p.inclusion is not None]
    assert [len(each) for each in chosen] == [8, 8]


def test_fit_deep_frozen_points_stay() -> None:
    model, data = started(), step_data()
    for layer in model.layers:
        layer.candidates.requires_grad_(False)
    fitted = fit(model, data, schedule=schedule(pre=3, post=3))
    for number, (layer, kept) in enumerate(zip(model.layers, fitted.selections, strict=True)):
        assert torch.equal(fitted.model.layers[number].candidates, layer.candidates[kept.mask])


def test_fit_deep_invalid_settings_raise() -> None:
    for bad in ({"layerwise": -1}, {"smaller_models": -1}, {"post": -1}, {"samples": 0}):
        with pytest.raises(InputError, match=r"zero or more, and `samples` at least one"):
            schedule(**bad)
    with pytest.raises(InputError, match="`rounds` and `iterations` must be at least 1"):
        schedule(rounds=0)
    with pytest.raises(InputError, match="`batch_size` must be at least 1; got 0"):
        DeepTraining(batch_size=0)
    with pytest.raises(InputError, match="one for each of 2 layers"):
        fit(started(), step_data(), schedule=schedule(FixedAlpha((0.1, 0.2, 0.3)), pre=1))


def test_fit_deep_rounds_prune_towards_goal() -> None:
    told: list[Progress] = []
    plan = schedule(layerwise=2, pre=9, post=1, rounds=3)
    fitted = fit(started(), step_data(), schedule=plan, callbacks=told.append)
    phases = [(p.phase, p.step) for p in told if p.phase in ("pre-train", "selection")]
    assert phases == [("pre-train", 1), ("pre-train", 2), ("pre-train", 3), ("selection", 1)] * 3
    sizes = [tuple(map(len, p.candidates)) for p in told if p.phase == "selection"]
    assert all(a >= b for one, two in pairwise(sizes) for a, b in zip(one, two, strict=True))
    assert sizes[0] < (8, 8)
    assert sizes[-1] == fitted.model.sizes
    # The last selection is among the points that earlier rounds kept.
    assert tuple(each.K for each in fitted.selections) == sizes[1]


@pytest.fixture
def spoilt(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Let the training of pruned models lose 100 nats; the sizes of these models, in order."""
    sizes: list[tuple[int, ...]] = []
    run = LayerTraining.run

    def spoiling(self, model: DeepGP, batches, phase: str, **options) -> None:
        run(self, model, batches, phase, **options)
        if phase == "post-train":
            sizes.append(model.sizes)
            with torch.no_grad():
                model.layers[-1].q_mean[0] += math.sqrt(200)

    monkeypatch.setattr(LayerTraining, "run", spoiling)
    return sizes


def test_fit_deep_tolerance_missed_after_training_returns_the_points(
    spoilt: list[tuple[int, ...]],
) -> None:
    data, model = step_data(), started()
    fitted = fit(model, data, schedule=schedule(Tolerance(0.05), pre=40, post=9, rounds=3))
    # Fewer points are removed after every round that missed the tolerance.
    totals = [sum(sizes) for sizes in spoilt]
    assert len(totals) >= 2
    assert totals == sorted(totals)
    assert sum(fitted.model.sizes) > totals[0]
    again = estimate_elbo(fitted.model, data, generator=seeded(7), samples=64)
    assert fitted.elbo == pytest.approx(again, abs=4)
    assert fitted.elbo_gap <= 0.05 * data.N + 2


def test_fit_deep_tolerance_met_after_training_keeps_the_smaller_model() -> None:
    data, model = step_data(), started()
    seen = []
    plan = schedule(Tolerance(0.5), pre=40, post=30, rounds=2)
    fitted = fit(model, data, schedule=plan, callbacks=seen.append)
    check_sizes = [tuple(len(z) for z in p.candidates) for p in seen if p.phase == "post-train"]
    assert fitted.model.sizes in check_sizes
    assert sum(fitted.model.sizes) < 16
    assert fitted.elbo_gap <= 0.5 * data.N


def test_grow_candidates_keeps_the_elbo() -> None:
    data, model = step_data(), started(hidden_mean="zero", skip_connections=True)
    fit_briefly = LayerTraining(0.03, natural_rate=0.5)
    fit_briefly.run(
        model, Minibatches(data, None, seeded()), "x", steps=5, context=TrainingContext(seeded())
    )
    grown = grow_candidates(model, data, 12, seeded())
    # The eight points leave little variance along the single input.
    assert all(8 < K <= 12 for K in grown.sizes)
    for before, after in zip(model.layers, grown.layers, strict=True):
        assert torch.equal(before.candidates, after.candidates[:8])
        assert len(after.candidates.detach().unique(dim=0)) == after.K
    before, after = (estimate_elbo(each, data, generator=seeded()) for each in (model, grown))
    assert after == pytest.approx(before, abs=1e-4)


def test_fit_deep_smaller_models_are_a_frontier() -> None:
    data = step_data()
    tolerance, seen = 0.05, []
    result = fit(
        started(data=data, K=12),
        data,
        schedule=schedule(
            Tolerance(tolerance), pre=60, post=60, rounds=2, smaller_models=2, predict_samples=8
        ),
        callbacks=seen.append,
        generator=seeded(),
    )
    # Each smaller model has all steps; the rounds of the selected one share them.
    assert {p.steps for p in seen if p.phase == SMALLER_MODEL} == {60}
    assert {p.steps for p in seen if p.phase == "post-train"} == {30}
    others = [(each.posterior, each.elbo) for each in result.allocations]
    models = sorted(
        [*others, (result.posterior, result.elbo)],
        key=lambda pair: prediction_cost(pair[0].layers, samples=8),
    )
    assert len(models) > 1
    assert all(before[1] < after[1] for before, after in pairwise(models))
    # The quickest model within the tolerance of the best one is selected.
    best = max(elbo for _, elbo in models)
    within = [posterior for posterior, elbo in models if elbo >= best - tolerance * data.N]
    assert within[0] is result.posterior
    assert result.elbo_gap == pytest.approx(best - result.elbo)


def test_alphas_are_priced_at_the_selected_sizes() -> None:
    @final
    class Recorded(Goal):
        """A goal with one α for all layers, which records the prices."""

        def __init__(self) -> None:
            self.prices: list[tuple[float, ...]] = []

        def size(self, frontier: Frontier, *, reference: float) -> int:
            raise NotImplementedError

        def best(self, fits: Any, *, N: float) -> int:
            raise NotImplementedError

        def alphas(self, frontiers: Any, prices: Any = None) -> tuple[float, ...]:
            self.prices.append(tuple(prices))
            return tuple(0.1 * price for price in prices)

    model, goal = started(), Recorded()
    # Concave in M, so that every size is the best for some α.
    masks = torch.arange(8) < torch.arange(9)[:, None]
    frontiers = [
        Frontier(scale * torch.arange(9.0, dtype=torch.float64).sqrt(), masks, 10)
        for scale in (1.0, 40.0)
    ]
    training = DeepTraining(predict_samples=4)
    steps = _DeepSteps(step_data(), training, 1, 5, TrainingContext(seeded()))
    alphas = steps.alphas(model, goal, frontiers)
    assert alphas == tuple(0.1 * price for price in goal.prices[-1])
    sizes = list(model.sizes)
    for prices in goal.prices:
        assert prices == pytest.approx(prediction_prices(model.layers, sizes, samples=4))
        sizes = [
            int(frontier.best_for_alpha(0.1 * price).mask.sum())
            for frontier, price in zip(frontiers, prices, strict=True)
        ]
    assert len(goal.prices) > 1
    assert goal.prices[0] != goal.prices[-1]


def test_fit_deep_training_is_repeated_while_it_gains() -> None:
    def phases(tolerance: float) -> int:
        told: list[Progress] = []
        plan = schedule(Tolerance(tolerance), pre=15, post=0, most_repeats=2)
        fit(started(), step_data(), schedule=plan, callbacks=told.append, generator=seeded())
        return sum(p.phase == "pre-train" and p.step == 1 for p in told)

    # The second phase gains less than ten nats per observation, and more than nothing.
    assert phases(10.0) == 2
    assert phases(1e-6) == 3


def test_allocations_leave_out_another_model_of_the_chosen_sizes() -> None:
    """Where nothing may be removed, two models have all candidates."""
    steps = _DeepSteps(step_data(), DeepTraining(), 1, 5, TrainingContext(seeded()))
    model = started()
    small = model.prune([torch.arange(8) < 2] * 2)
    chosen = _Fitted(model, -2.0, None)
    steps.trained = [_Fitted(model, -1.0, None), chosen, _Fitted(small, -3.0, None)]
    assert [each.posterior.M for each in steps.allocations(chosen)] == [(2, 2)]
