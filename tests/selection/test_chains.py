"""Chains of subsets that move in place, against bounds and gains of the same subsets."""

import warnings
from itertools import cycle, islice

import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel

from helpers.selection_problems import problem
from winnowgp.data import Dataset
from winnowgp.errors import ConvergenceWarning, InputError
from winnowgp.models import SparseGP
from winnowgp.point_processes import Bernoulli, SquaredCardinality
from winnowgp.selection import SubsetStatistics, chains, sample_subsets
from winnowgp.selection.chains import Chains

K = 7


def one_kernel() -> SubsetStatistics:
    return problem(5, K=K, noise=0.3).statistics


def two_kernels() -> SubsetStatistics:
    return SubsetStatistics((*one_kernel().terms, *problem(6, K=K, noise=0.1).statistics.terms))


def check(moved: Chains) -> None:
    """Compare with search states of the same subsets, computed one by one."""
    objective = moved.objective
    torch.testing.assert_close(moved.bounds, objective.value(moved.included), atol=1e-6, rtol=1e-9)
    for mask, gains in zip(moved.included, moved.gains, strict=True):
        torch.testing.assert_close(gains, objective.marginal_gains(mask), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("objective", [one_kernel(), two_kernels()], ids=["one", "two"])
def test_toggle_equals_fresh_states(objective: SubsetStatistics) -> None:
    generator = torch.Generator().manual_seed(0)
    masks = torch.rand(5, K, generator=generator) < 0.5
    masks[3], masks[4] = False, True  # none and all
    moved = Chains.at(objective, masks)
    check(moved)
    for _ in range(12):
        index = torch.randint(K, (5,), generator=generator)
        active = torch.rand(5, generator=generator) < 0.7
        before = moved.included.clone()
        moved.toggle(index, active=active)
        changed = moved.included != before
        assert torch.equal(changed.sum(1), active.long())
        assert changed[active, index[active]].all()
        check(moved)


def test_refresh_after_many_moves_computes_afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chains, "_REFRESH", 4)
    moved = Chains.at(one_kernel(), torch.zeros(2, K, dtype=torch.bool))
    on = torch.ones(2, dtype=torch.bool)
    for index in islice(cycle([1, 4, 2]), 4):
        moved.toggle(torch.tensor([index, index]), active=on)
    moved.gains, moved.bounds = moved.gains + 1, moved.bounds + 1  # errors that a refresh removes
    moved.refresh()
    check(moved)
    moved.gains = moved.gains + 1
    moved.refresh()  # too early
    assert not torch.allclose(moved.gains[0], one_kernel().marginal_gains(moved.included[0]))


@pytest.mark.unchecked
def test_other_objective_raises() -> None:
    class Other:
        K, empty = 3, torch.zeros(())

    with pytest.raises(InputError, match="Other"):
        Chains.at(Other(), torch.zeros(1, 3, dtype=torch.bool))  # pyright: ignore[reportArgumentType]


@pytest.mark.gpu
def test_samples_on_a_gpu_equal_those_on_the_cpu() -> None:
    x = torch.linspace(0, 5, 60, dtype=torch.float64)[:, None]
    samples = []
    for device in (torch.device("cpu"), torch.device("cuda")):
        model = SparseGP(ScaleKernel(RBFKernel()), x[::4], noise=0.1).requires_grad_(False)
        statistics = model.to(device).subset_statistics(Dataset(x, torch.sin(3 * x)).to(device))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            samples.append(
                sample_subsets(
                    statistics,
                    prior=SquaredCardinality(15, 0.1),
                    generator=torch.Generator().manual_seed(0),
                    sweeps=6,
                    reference=Bernoulli(torch.zeros(15, dtype=torch.float64)),
                    betas=(1.0, 0.5),
                )
            )
    assert torch.equal(samples[0].masks, samples[1].masks)
    torch.testing.assert_close(samples[0].inclusion, samples[1].inclusion)
