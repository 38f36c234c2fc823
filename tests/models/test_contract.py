"""What every subset objective owes, whatever the model behind it."""

import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel

from problems import problem
from winnowgp.data import Dataset
from winnowgp.models import SparseGP
from winnowgp.selection import FlipObjective, RelaxedObjective, SubsetObjective


def model(order: torch.Tensor) -> tuple[SparseGP, Dataset]:
    p = problem()
    return SparseGP(ScaleKernel(RBFKernel()), p.Z[order], noise=0.2), Dataset.of(p.X, p.Y)


def direct(order: torch.Tensor) -> SubsetObjective:
    gp, data = model(order)
    return gp.subset_objective(data)


def statistics(order: torch.Tensor) -> SubsetObjective:
    gp, data = model(order)
    return gp.subset_statistics(data)


OBJECTIVES = {"direct": direct, "statistics": statistics}
battery = pytest.mark.parametrize("build", OBJECTIVES.values(), ids=OBJECTIVES.keys())
STILL = torch.arange(6)


@battery
def test_one_value_a_mask_whatever_else_is_in_the_batch(build, generator) -> None:
    objective = build(STILL)
    masks = torch.rand(9, objective.K, generator=generator) < 0.5
    together = objective.value(masks)
    alone = torch.cat([objective.value(mask[None]) for mask in masks])
    assert together.shape == (9,)
    torch.testing.assert_close(together, alone, rtol=1e-9, atol=1e-9)


@battery
def test_empty_full_and_no_masks_have_values(build) -> None:
    objective = build(STILL)
    empty = torch.zeros(1, objective.K, dtype=torch.bool)
    assert torch.isfinite(objective.value(empty)).all()
    assert objective.value(~empty) > objective.value(empty)
    assert objective.value(empty[:0]).shape == (0,)


@battery
def test_permuting_candidates_changes_nothing(build, generator) -> None:
    order = torch.tensor([4, 2, 5, 0, 1, 3])
    masks = torch.rand(9, 6, generator=generator) < 0.5
    torch.testing.assert_close(
        build(STILL).value(masks), build(order).value(masks[:, order]), rtol=1e-9, atol=1e-9
    )


@battery
def test_relaxed_values_agree_at_the_corners(build, generator) -> None:
    objective = build(STILL)
    if not isinstance(objective, RelaxedObjective):
        return
    masks = torch.rand(9, objective.K, generator=generator) < 0.5
    torch.testing.assert_close(
        objective.relaxed_value(masks.double()), objective.value(masks), rtol=1e-9, atol=1e-9
    )


@battery
def test_flips_are_differences_of_values(build, generator) -> None:
    objective = build(STILL)
    if not isinstance(objective, FlipObjective):
        return
    for mask in torch.rand(5, objective.K, generator=generator) < 0.5:
        with_k, without_k = mask.repeat(objective.K, 1), mask.repeat(objective.K, 1)
        with_k.fill_diagonal_(True)
        without_k.fill_diagonal_(False)
        expected = objective.value(with_k) - objective.value(without_k)
        torch.testing.assert_close(objective.flips(mask), expected, rtol=1e-7, atol=1e-7)
