from typing import Any

import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from torch import Tensor

from winnowgp import fit
from winnowgp.data import Dataset, hills
from winnowgp.errors import InputError
from winnowgp.gradients import LeaveOneOut, Relaxed, ScoreFunction, Temperature, all_masks
from winnowgp.models import SparseGP
from winnowgp.point_processes import Bernoulli, LinearCardinality, SquaredCardinality
from winnowgp.training import PaperSchedule, Progress
from winnowgp.training.paper import Estimates


def model(data: Dataset, K: int = 20) -> SparseGP:
    return SparseGP(ScaleKernel(RBFKernel()), data.X[:: data.N // K][:K], noise=0.1)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.unchecked
def test_paper_selects_few_points_with_high_elbo() -> None:
    data = hills()
    gp = model(data)
    schedule = PaperSchedule(
        SquaredCardinality(20, alpha=0.1), pre=150, joint=250, post=150, learning_rate=0.05
    )
    fitted = fit(gp, data, schedule=schedule, generator=seeded())
    full = fit(
        gp,
        data,
        schedule=PaperSchedule(
            LinearCardinality(20, 1e-9),
            pre=500,
            joint=0,
            post=0,
            initial_inclusion=1 - 1e-12,
            learning_rate=0.05,
        ),
    )
    assert full.posterior.M == 20
    assert fitted.posterior.M < 18
    assert fitted.elbo > full.elbo - 0.05 * data.N
    # The last quarter of the objective is above its first.
    trace = fitted.selection.trace
    assert trace.shape == (250,)
    assert trace[-60:].mean() > trace[:60].mean()


def test_paper_best_of_draws_is_selected() -> None:
    """So many draws that they include each of the 64 subsets."""
    data, K = hills().part(slice(None, None, 5)), 6
    gp, prior = model(data, K), SquaredCardinality(K, alpha=5.0)
    schedule = PaperSchedule(prior, pre=0, joint=0, post=0, draws=500, initial_inclusion=0.5)
    fitted = fit(gp, data, schedule=schedule, generator=seeded())
    masks = all_masks(K)
    with torch.no_grad():
        bounds = torch.stack([gp.prune(mask).bound(data) for mask in masks])
    best = masks[torch.argmax(bounds + prior.log_prob(masks, like=bounds))]
    assert torch.equal(fitted.selection.mask, best)
    # Neither ELBO nor prior decides alone.
    assert not torch.equal(best, masks[bounds.argmax()])
    assert best.any()


@pytest.mark.unchecked
def test_paper_stronger_prior_selects_fewer_points() -> None:
    data = hills()
    gp = model(data)
    kept = [
        fit(
            gp,
            data,
            schedule=PaperSchedule(
                SquaredCardinality(20, alpha), pre=40, joint=60, post=0, learning_rate=0.05
            ),
        ).selection.inclusion.sum()
        for alpha in (0.02, 0.5, 10.0)
    ]
    assert kept[0] > kept[1] > kept[2]


def test_paper_joint_phase_trains_all_parameters() -> None:
    data = hills()
    gp = model(data)
    schedule = PaperSchedule(SquaredCardinality(20, 0.05), pre=0, joint=15, post=0)
    fitted = fit(gp, data, schedule=schedule)
    for name, parameter in fitted.model.named_parameters():
        if name != "candidates":
            assert not torch.equal(parameter, gp.get_parameter(name)), name
    assert not torch.equal(fitted.candidates[0], gp.candidates.detach())


def test_paper_frozen_locations_stay() -> None:
    data = hills()
    gp = model(data)
    gp.candidates.requires_grad_(False)
    schedule = PaperSchedule(SquaredCardinality(20, 0.05), pre=5, joint=5, post=5)
    fitted = fit(gp, data, schedule=schedule)
    assert torch.equal(fitted.candidates[0], gp.candidates)
    assert torch.equal(fitted.posterior.Z, gp.candidates[fitted.selection.mask])


@pytest.mark.parametrize(
    "gradient",
    [
        ScoreFunction(samples=2, baseline=LeaveOneOut()),
        Relaxed(temperature=Temperature(steps=100)),
    ],
    ids=["leave-one-out", "relaxed"],
)
def test_paper_other_gradients(gradient) -> None:
    data = hills()
    schedule = PaperSchedule(
        SquaredCardinality(20, 2.0),
        pre=40,
        joint=150,
        post=5,
        gradient=gradient,
        learning_rate=0.05,
    )
    fitted = fit(model(data), data, schedule=schedule)
    assert 4 < fitted.selection.inclusion.sum() < 16
    assert torch.isfinite(torch.tensor(fitted.elbo))


def test_paper_same_seed_same_result_and_input_unchanged() -> None:
    data = hills()
    gp = model(data)
    before = {name: p.detach().clone() for name, p in gp.named_parameters()}
    schedule = PaperSchedule(SquaredCardinality(20, 0.1), pre=5, joint=20, post=5)
    first, second, other = (
        fit(gp, data, schedule=schedule, generator=seeded(s)) for s in (1, 1, 2)
    )
    assert first.elbo == second.elbo
    assert torch.equal(first.selection.inclusion, second.selection.inclusion)
    assert not torch.equal(first.selection.inclusion, other.selection.inclusion)
    for name, parameter in gp.named_parameters():
        assert torch.equal(parameter, before[name]), name


def test_paper_more_draws_are_never_worse() -> None:
    data = hills()
    gp, prior = model(data), SquaredCardinality(20, 0.1)
    values = []
    for draws in (1, 200):
        schedule = PaperSchedule(prior, pre=0, joint=3, post=0, draws=draws)
        fitted = fit(gp, data, schedule=schedule, generator=seeded())
        M = fitted.selection.M
        values.append(fitted.elbo - 0.1 * M**2)
    assert values[1] > values[0]


def test_paper_reports_phases_steps_and_inclusion() -> None:
    data = hills()
    events: list[Progress] = []
    schedule = PaperSchedule(SquaredCardinality(20, 0.1), pre=2, joint=3, post=1)
    fit(model(data), data, schedule=schedule, callbacks=events.append)
    assert [(p.phase, p.step, p.steps) for p in events] == [
        ("pre-train", 1, 2),
        ("pre-train", 2, 2),
        ("inclusion", 1, 3),
        ("inclusion", 2, 3),
        ("inclusion", 3, 3),
        ("post-train", 1, 1),
    ]
    assert all((p.inclusion is not None) == (p.phase == "inclusion") for p in events)


def test_paper_empty_selection_predicts() -> None:
    data = hills()
    schedule = PaperSchedule(SquaredCardinality(20, 1e6), pre=0, joint=300, post=2)
    fitted = fit(model(data), data, schedule=schedule)
    assert fitted.posterior.M == 0
    assert torch.isfinite(fitted.posterior.predict(data.X).variance).all()


def test_paper_invalid_settings_raise() -> None:
    data = hills()
    with pytest.raises(
        InputError, match=r"`prior` must be over as many candidates as the model has, \[20\]"
    ):
        fit(model(data), data, schedule=PaperSchedule(SquaredCardinality(5, 0.1)))
    with pytest.raises(InputError, match="zero or more steps"):
        PaperSchedule(SquaredCardinality(5, 0.1), pre=-1)
    with pytest.raises(InputError, match="initial_inclusion"):
        PaperSchedule(SquaredCardinality(5, 0.1), initial_inclusion=1.0)


def test_estimates_nan_score_leaves_state_unchanged(generator: torch.Generator) -> None:
    estimates = Estimates(ScoreFunction(), generator)
    q = Bernoulli(torch.zeros(3, dtype=torch.float64))

    def fine(masks: Tensor) -> Tensor:
        return masks.double().sum(1)

    def broken(masks: Tensor) -> Tensor:
        return torch.full((len(masks),), torch.nan, dtype=torch.float64)

    estimates.next(q, fine)
    before = estimates.state_dict()["state"]
    assert torch.isnan(estimates.next(q, broken))
    assert estimates.state_dict()["state"] is before
    assert torch.isfinite(estimates.next(q, fine))
    assert estimates.state_dict()["state"] is not before


def test_paper_number_stands_for_squared_cardinality() -> None:
    data = hills()
    short: dict[str, Any] = {"pre": 2, "joint": 4, "post": 2}
    priors = (0.1, (0.1,), SquaredCardinality(20, 0.1))
    fits = [fit(model(data), data, schedule=PaperSchedule(prior, **short)) for prior in priors]
    assert fits[0].elbo == fits[1].elbo == fits[2].elbo
    assert [each.selection.alpha for each in fits] == [0.1, 0.1, 0.1]
