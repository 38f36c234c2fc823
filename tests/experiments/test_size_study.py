"""Models by hand, by the paper's procedure and by search, from the same rows."""

import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel

from winnowgp.data import Dataset
from winnowgp.experiments.sizes import SizeStudy, standardised
from winnowgp.experiments.synthetic import sampled
from winnowgp.point_processes import SquaredCardinality
from winnowgp.training import FixedAlpha, PaperSchedule, Tolerance, fit


def small(rows: int = 60, condition: str = "smoothness", intensity: float = 8.0) -> Dataset:
    return standardised(sampled(condition, intensity, rows=rows, seed=3), "cpu")


def test_points_set_by_hand_start_at_rows_and_fewer_are_the_beginning_of_more() -> None:
    data = small()
    few, many = (SizeStudy(data, 0).by_hand(M, steps=0).candidates for M in (3, 7))
    assert torch.equal(few, many[:3])
    assert all(bool((point == data.X).all(1).any()) for point in many)
    other = SizeStudy(data, 1).by_hand(7, steps=0).candidates
    assert not torch.equal(other, many)


def test_hyper_parameters_start_at_one_and_every_update_counts() -> None:
    study = SizeStudy(small(), 0)
    start = study.by_hand(5, steps=0)
    assert isinstance(start.kernel, ScaleKernel)
    assert isinstance(start.kernel.base_kernel, RBFKernel)
    assert start.kernel.outputscale.item() == pytest.approx(1)
    assert start.kernel.base_kernel.lengthscale.item() == pytest.approx(1)
    assert start.noise.item() == pytest.approx(1)
    bounds = [study.by_hand(5, steps=n).fixed_bound(study.data) for n in (0, 20, 60)]
    assert bounds[0] < bounds[1] < bounds[2]


def test_the_papers_procedure_is_the_three_phases() -> None:
    data, alpha = small(), 0.05
    study = SizeStudy(data, 0)
    steps = {"pre": 15, "process": 25, "post": 10}
    found = study.by_paper(12, alpha=alpha, steps=steps, draws=4)
    plan = PaperSchedule(SquaredCardinality(12, alpha), pre=15, joint=25, post=0)
    generator = torch.Generator().manual_seed(0)
    twin = fit(study.by_hand(12, steps=0), data, schedule=plan, generator=generator)
    # Pre-training in chunks has a jitter of 1e-8 where the phases have 1e-12.
    assert found.expected == pytest.approx(twin.selection.inclusion.sum().item(), rel=2e-2)
    assert len(found.models) == 4
    assert len({model.K for model in found.models}) > 1
    assert all(model.K <= 12 for model in found.models)


def test_every_draw_is_trained_further() -> None:
    study = SizeStudy(small(), 0)
    before, after = (
        study.by_paper(
            12, alpha=0.05, steps={"pre": 15, "process": 10, "post": post}, draws=3
        ).models
        for post in (0, 30)
    )
    assert [model.K for model in before] == [model.K for model in after]
    for one, other in zip(before, after, strict=True):
        assert other.fixed_bound(study.data) > one.fixed_bound(study.data) + 0.1


def test_search_keeps_to_the_given_rows_and_to_its_goal() -> None:
    study = SizeStudy(small(), 0)
    strong, weak = (study.by_search(10, goal=FixedAlpha(alpha)).models for alpha in (2.0, 0.01))
    assert strong[0].K < weak[0].K <= 10
    own = study.by_search(0, goal=Tolerance(1e-4)).models
    assert own[0].K > 10


def test_a_run_says_how_many_points_it_kept_unless_that_was_set() -> None:
    study = SizeStudy(small(), 0)
    models, row = study.run({"kind": "fixed", "sizes": [3, 6], "updates": 2, "learning_rate": 0.01})
    assert [model.K for model in models] == [3, 6]
    assert row == {}
    models, row = study.run({"kind": "auto", "tolerance": 0.5})
    assert row["kept"] == [models[0].K]
    assert row["expected"] > 0


@pytest.mark.gpu
@pytest.mark.parametrize(
    "kind",
    [
        {"kind": "fixed", "sizes": [5], "updates": 20, "learning_rate": 0.01},
        {
            "kind": "paper",
            "candidates": 12,
            "alpha": 0.05,
            "steps": {"pre": 5, "process": 5, "post": 5},
            "draws": 2,
            "learning_rate": 0.01,
        },
        {"kind": "fast", "candidates": 12, "alpha": 0.05},
        {"kind": "auto", "tolerance": 0.1},
    ],
    ids=lambda kind: kind["kind"],
)
def test_a_gpu_makes_the_same_runs(kind: dict) -> None:
    drawn = sampled("smoothness", 8.0, rows=60, seed=3)
    there, here = (standardised(drawn, device) for device in ("cuda", "cpu"))
    models, _ = SizeStudy(there, 0).run(kind)
    assert all(model.candidates.is_cuda for model in models)
    if kind["kind"] == "fixed":
        twin = SizeStudy(here, 0).run(kind)[0][0].fixed_bound(here)
        # Chunks have a jitter of 1e-8, whole matrices one of 1e-12.
        assert models[0].fixed_bound(there) == pytest.approx(twin, rel=1e-3)
