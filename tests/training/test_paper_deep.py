"""The paper's schedule of deep GPs."""

import math
from dataclasses import dataclass
from typing import ClassVar, final

import pytest
import torch

from helpers.deep_problems import started, step_data
from winnowgp.errors import InputError
from winnowgp.gradients import Estimate, Gradient, Relaxed, ScoreFunction, all_masks
from winnowgp.models import DeepGP
from winnowgp.models.deep_gp import estimate_elbo
from winnowgp.training import PaperSchedule, Progress, fit


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def schedule(alpha: float | tuple[float, ...] = 0.3, **options) -> PaperSchedule:
    given = {
        "layerwise": 3,
        "pre": 10,
        "joint": 15,
        "post": 10,
        "learning_rate": 0.03,
        "gradient": ScoreFunction(samples=2),
        **options,
    }
    return PaperSchedule(alpha, **given)


@pytest.mark.parametrize(
    ("seen", "size"), [("gaussian", None), ("gaussian", 16), ("bernoulli", 16), ("student", None)]
)
def test_paper_deep_selects_in_every_layer(seen: str, size: int | None) -> None:
    data, model = step_data(seen), started(seen, K=6, hidden_mean="zero", skip_connections=True)
    fitted = fit(model, data, schedule=schedule(batch_size=size))
    sizes = tuple(each.M for each in fitted.selections)
    assert sizes == fitted.model.sizes == fitted.posterior.M
    assert tuple(each.K for each in fitted.selections) == (6, 6)
    assert [tuple(each.shape) for each in fitted.candidates] == [(6, 1), (6, 2)]
    for each in fitted.selections:
        assert each.alpha == 0.3
        assert each.trace.shape == (15,)
        assert torch.isfinite(each.trace).all()
        assert each.inclusion.shape == (6,)
    assert math.isfinite(fitted.elbo)
    assert fitted.elbo_gap >= 0
    assert fitted.elbo > estimate_elbo(model, data, generator=seeded())
    found = fitted.posterior.predict(data.X).mean
    assert torch.equal(found, fitted.model.posterior().predict(data.X).mean)


@pytest.mark.unchecked
def test_paper_deep_stronger_prior_selects_fewer_points() -> None:
    data, model = step_data(), started(K=6)
    plan = {"layerwise": 5, "pre": 15, "joint": 60, "post": 0}
    weak, strong, mixed = (
        [
            each.inclusion.sum().item()
            for each in fit(model, data, schedule=schedule(alpha, **plan)).selections
        ]
        for alpha in (0.01, 100.0, (100.0, 0.01))
    )
    assert sum(strong) < 1 < sum(weak) / 3
    assert mixed[0] < 1
    assert mixed[1] > 2 * mixed[0]


@final
@dataclass(frozen=True, slots=True)
class Indifferent(Gradient[None]):
    """A gradient that scores nothing, so that the objective is the prior's alone."""

    scores_weights: ClassVar[bool] = False

    def init(self) -> None:
        return None

    def step(self, q, score, *, state=None, generator=None) -> Estimate[None]:
        nothing = 0.0 * q.logits.sum()
        return Estimate(nothing, torch.zeros(1, dtype=q.logits.dtype), None)


def enumerated_kl(K: int, inclusion: float, alpha: float) -> float:
    """KL[q(Z) ‖ p(Z)] by all 2^K subsets."""
    sizes = all_masks(K).double().sum(1)
    log_q = sizes * math.log(inclusion) + (K - sizes) * math.log(1 - inclusion)
    log_p = (-alpha * sizes.square()).log_softmax(0)
    return (log_q.exp() * (log_q - log_p)).sum().item()


def test_paper_deep_objective_subtracts_kl_of_every_layer() -> None:
    plan = schedule(
        (0.2, 0.7),
        layerwise=0,
        pre=0,
        joint=8,
        post=0,
        gradient=Indifferent(),
        initial_inclusion=0.4,
    )
    fitted = fit(started(K=5), step_data(), schedule=plan)
    trace = fitted.selections[0].trace
    expected = -enumerated_kl(5, 0.4, 0.2) - enumerated_kl(5, 0.4, 0.7)
    assert trace[0].item() == pytest.approx(expected)
    assert (trace.diff() > 0).all()
    assert [each.alpha for each in fitted.selections] == [0.2, 0.7]
    # Without data the stronger prior excludes more.
    assert fitted.selections[1].inclusion.sum() < fitted.selections[0].inclusion.sum() < 5 * 0.4


def test_paper_deep_joint_phase_trains_all_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    model, trained, prune = started(K=5), [], DeepGP.prune
    monkeypatch.setattr(
        DeepGP, "prune", lambda self, masks: (trained.append(self), prune(self, masks))[1]
    )
    plan = schedule(layerwise=0, pre=0, joint=6, post=0)
    events: list[Progress] = []
    fit(model, step_data(), schedule=plan, callbacks=events.append)
    after = dict(trained[0].named_parameters())
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert not torch.equal(after[name], parameter), name
    first, last = events[0].inclusion, events[-1].inclusion
    assert first is not None
    assert last is not None
    assert all(not torch.equal(a, b) for a, b in zip(first, last, strict=True))


def test_paper_deep_best_of_draws_is_selected() -> None:
    data, model = step_data(), started(K=6)
    sizes = []
    for draws in (1, 200):
        plan = schedule(50.0, layerwise=0, pre=0, joint=0, post=0, draws=draws)
        fitted = fit(model, data, schedule=plan, generator=seeded(3))
        sizes.append(sum(M**2 for M in fitted.model.sizes))
    # At this strength the prior dominates.
    assert sizes[0] >= 8
    assert sizes[1] <= 4


def test_paper_deep_draws_are_scored_by_elbo() -> None:
    """With a negligible prior, the best of many draws is better than their average."""
    data, model = step_data(), started(K=4)
    model = fit(
        model,
        data,
        schedule=schedule(1e-6, layerwise=15, pre=5, joint=0, post=0, initial_inclusion=1 - 1e-9),
    ).model
    assert model.sizes == (4, 4)
    plan = schedule(1e-9, layerwise=0, pre=0, joint=0, post=0, draws=60, samples=4)
    best = fit(model, data, schedule=plan, generator=seeded(3)).elbo
    singles = [
        fit(
            model,
            data,
            schedule=schedule(1e-9, layerwise=0, pre=0, joint=0, post=0),
            generator=seeded(seed),
        ).elbo
        for seed in range(6)
    ]
    assert best > max(singles) - 1
    assert best > sum(singles) / 6 + 5


def test_paper_deep_empty_selection_predicts() -> None:
    data = step_data()
    plan = schedule(1e6, pre=0, joint=60, post=2)
    fitted = fit(started(K=5), data, schedule=plan)
    assert fitted.posterior.M == (0, 0)
    assert torch.isfinite(fitted.posterior.predict(data.X).variance).all()


def test_paper_deep_same_seed_same_result() -> None:
    data, model = step_data(), started(K=5)
    plan = schedule(layerwise=2, pre=2, joint=5, post=2, batch_size=16)
    first, second, other = (fit(model, data, schedule=plan, generator=seeded(s)) for s in (1, 1, 2))
    assert first.elbo == second.elbo
    for a, b, c in zip(first.selections, second.selections, other.selections, strict=True):
        assert torch.equal(a.inclusion, b.inclusion)
        assert not torch.equal(a.inclusion, c.inclusion)


def test_paper_deep_reports_phases_in_order() -> None:
    events: list[Progress] = []
    plan = schedule(layerwise=1, pre=2, joint=2, post=1, initial_inclusion=0.999)
    fit(started(hidden_mean="zero"), step_data(), schedule=plan, callbacks=events.append)
    assert [(p.phase, p.step, p.steps) for p in events] == [
        ("layer 1", 1, 1),
        ("layer 2", 1, 1),
        ("pre-train", 1, 2),
        ("pre-train", 2, 2),
        ("inclusion", 1, 2),
        ("inclusion", 2, 2),
        ("post-train", 1, 1),
    ]
    assert all((p.inclusion is not None) == (p.phase == "inclusion") for p in events)
    last = events[5].inclusion
    assert last is not None
    assert [len(each) for each in last] == [8, 8]


def test_paper_deep_invalid_settings_raise() -> None:
    for bad in ({"layerwise": -1}, {"pre": -1}, {"joint": -1}, {"post": -1}):
        with pytest.raises(InputError, match="must be zero or more steps"):
            schedule(**bad)
    with pytest.raises(InputError, match="`draws` must be at least 1; got 0"):
        schedule(draws=0)
    with pytest.raises(InputError, match=r"must score subsets, not weights.*`ScoreFunction`"):
        fit(started(), step_data(), schedule=schedule(gradient=Relaxed()))
    with pytest.raises(InputError, match="one for each of 2 layers"):
        fit(started(), step_data(), schedule=schedule((0.1, 0.2, 0.3)))


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        ({"initial_inclusion": 1.0}, "`initial_inclusion`"),
        ({"initial_inclusion": 0.0}, "`initial_inclusion`"),
        ({"batch_size": 0}, "`batch_size`"),
        ({"samples": 0}, "`samples`"),
        ({"alpha": -1.0}, "`alpha`"),
        ({"alpha": (0.1, 0.0)}, "`alpha`"),
    ],
)
def test_paper_deep_invalid_numbers_raise(bad, named: str) -> None:
    with pytest.raises(InputError, match=named):
        schedule(**bad)
