"""Rows that the allocator selects, their number, and the blocks of the kernel it evaluates."""

from typing import Any

import pytest
import torch
from botorch.models import SingleTaskVariationalGP
from botorch.models.utils.inducing_point_allocators import GreedyVarianceReduction
from gpytorch.kernels import Kernel, MaternKernel, RBFKernel, ScaleKernel
from gpytorch.mlls import VariationalELBO
from torch import Tensor

from helpers import oracles
from winnowgp.errors import InputError
from winnowgp.integrations.botorch import WinnowingAllocator

NONE = torch.Size()


def rows(N: int = 40, D: int = 2, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.rand(N, D, generator=g, dtype=torch.float64)


def kernel(lengthscale: float = 0.4, nu: float = 2.5, batch: torch.Size = NONE) -> Kernel:
    made = ScaleKernel(MaternKernel(nu=nu, batch_shape=batch), batch_shape=batch).double()
    made.initialize(**{"base_kernel.lengthscale": lengthscale, "outputscale": 1.5})
    return made


def standardised(Y: Tensor) -> Tensor:
    return (Y - Y.mean(0)) / Y.std(0)


def which(points: Tensor, X: Tensor) -> list[int]:
    """Return the indices of points that must be rows."""
    matches = (points[:, None] == X[None]).all(-1)
    assert bool(matches.any(1).all())
    return matches.int().argmax(1).tolist()


def allocated(allocator: Any, X: Tensor, k: Kernel, most: int) -> list[int]:
    return which(allocator.allocate_inducing_points(X, k, most, NONE), X)


@torch.no_grad()
def dense_bound(k: Kernel, X: Tensor, chosen: list[int], Y: Tensor, noise: float) -> float:
    Kff = k(X).to_dense()
    return oracles.collapsed(
        Kff[chosen][:, chosen], Kff[chosen], Kff, Y, torch.tensor(noise).double()
    ).item()


@torch.no_grad()
def expected_bound(k: Kernel, X: Tensor, chosen: list[int], noise: float) -> float:
    """E[L] over targets of the exact process: columns of a root of its covariance, as outputs."""
    Kff = k(X).to_dense()
    N = len(X)
    Y = torch.linalg.cholesky(Kff + noise * torch.eye(N).double())
    Q = oracles.explained(Kff[chosen][:, chosen], Kff[chosen]) + noise * torch.eye(N).double()
    constant = oracles.log_normal(torch.zeros(N, 1).double(), Q).item()
    quadratic = -0.5 * (Y * torch.linalg.solve(Q, Y)).sum().item()
    return constant + quadratic - 0.5 * (Kff - Q).trace().item() / noise - 0.5 * N


@pytest.mark.parametrize("tolerance", [0.003, 0.03, 0.3])
def test_allocator_with_targets_stays_within_tolerance(tolerance: float) -> None:
    X, k = rows(), kernel()
    y = torch.sin(9 * X[:, 0]) + X[:, 1]
    allocator = WinnowingAllocator(targets=y, noise=0.02, tolerance=tolerance)
    chosen = allocated(allocator, X, k, 40)
    Y = (y - y.mean())[:, None]
    every = dense_bound(k, X, list(range(40)), Y, 0.02)
    elbo_gap = every - dense_bound(k, X, chosen, Y, 0.02)
    assert elbo_gap <= tolerance * 40 + 1e-6
    # Any subset with one point fewer exceeds the tolerance.
    fewer = [dense_bound(k, X, [c for c in chosen if c != gone], Y, 0.02) for gone in chosen]
    assert every - max(fewer) > tolerance * 40


@pytest.mark.parametrize("tolerance", [0.01, 0.1])
@pytest.mark.parametrize("noise", [0.05, 0.5])
def test_allocator_without_targets_expects_tolerance(tolerance: float, noise: float) -> None:
    X, k = rows(), kernel()
    chosen = allocated(WinnowingAllocator(noise=noise, tolerance=tolerance), X, k, 40)
    every = expected_bound(k, X, list(range(40)), noise)
    assert every - expected_bound(k, X, chosen, noise) <= tolerance * 40 + 1e-6
    fewer = [expected_bound(k, X, [c for c in chosen if c != gone], noise) for gone in chosen]
    assert every - max(fewer) > tolerance * 40


def test_allocator_default_noise_is_hundredth_of_variance() -> None:
    X, k = rows(), kernel()
    expected = allocated(WinnowingAllocator(noise=0.015), X, k, 40)
    assert allocated(WinnowingAllocator(), X, k, 40) == expected
    assert len(allocated(WinnowingAllocator(noise=1.5), X, k, 40)) < len(expected)


def test_allocator_targets_attract_points_to_rough_regions() -> None:
    X = rows(150, 1)
    y = torch.where(X[:, 0] < 0.5, torch.sin(60 * X[:, 0]), 0.0)
    k = kernel(0.05)
    for noise in (0.01, 0.1):
        drawn = X[allocated(WinnowingAllocator(targets=y, noise=noise), X, k, 10)]
        spread = X[allocated(WinnowingAllocator(noise=noise), X, k, 10)]
        assert len(drawn) == len(spread) == 10
        assert (drawn < 0.5).sum() >= 7
        assert (spread < 0.5).sum() == 5


def test_allocator_bound_exceeds_greedy_variance() -> None:
    X, k = rows(120), kernel(0.3)
    y = torch.sin(8 * X[:, 0] * X[:, 1])
    ours = allocated(WinnowingAllocator(targets=y, noise=0.01), X, k, 10)
    theirs = allocated(GreedyVarianceReduction(), X, k, 10)
    assert len(ours) == len(theirs) == 10
    Y = (y - y.mean())[:, None]
    assert dense_bound(k, X, ours, Y, 0.01) > dense_bound(k, X, theirs, Y, 0.01) + 10


def test_allocator_equal_candidates_reduce_to_greedy_variance() -> None:
    """With as many points as candidates, the selection is that of greedy variance."""
    X, k = rows(60), kernel(0.1)
    allocator = WinnowingAllocator(tolerance=0, n_candidates=1)
    theirs = allocated(GreedyVarianceReduction(), X, k, 12)
    assert sorted(allocated(allocator, X, k, 12)) == sorted(theirs)


class Blocks:
    """A kernel that records its largest block, shared by all copies."""

    def __init__(self) -> None:
        self.largest = 0

    def __deepcopy__(self, memo: Any) -> "Blocks":
        return self


class Watched(Kernel):
    def __init__(self, blocks: Blocks) -> None:
        super().__init__()
        self.inner, self.blocks = RBFKernel().double(), blocks
        self.inner.initialize(lengthscale=0.2)

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, *rest: Any, **params: Any) -> Any:
        if not diag:
            self.blocks.largest = max(self.blocks.largest, x1.shape[-2] * x2.shape[-2])
        return self.inner.forward(x1, x2, diag=diag, **params)


@pytest.mark.parametrize("given", [False, True])
def test_allocator_memory_does_not_grow_with_rows(given: bool) -> None:
    seen = []
    for N in (6_000, 18_000):
        X, blocks = rows(N), Blocks()
        y = torch.sin(5 * X[:, 0]) if given else None
        allocator = WinnowingAllocator(targets=y, n_candidates=40)
        assert len(allocator.allocate_inducing_points(X, Watched(blocks), 30, NONE)) <= 30
        seen.append(blocks.largest)
    assert seen[0] == seen[1] <= 40 * 4096
    # Blocks of BoTorch's own allocator are recorded too.
    blocks = Blocks()
    GreedyVarianceReduction().allocate_inducing_points(rows(300), Watched(blocks), 30, NONE)
    assert blocks.largest == 300**2


def test_allocator_botorch_model_has_selected_points_and_trains() -> None:
    X = rows(100, 1)
    y = standardised(torch.sin(4 * X))
    allocator = WinnowingAllocator(targets=y, noise=0.01)
    model: Any = SingleTaskVariationalGP(
        X, y, learn_inducing_points=False, inducing_points=60, inducing_point_allocator=allocator
    )
    Z = model.model.variational_strategy.inducing_points
    assert 2 <= len(Z) < 15
    which(Z, X)
    elbo = VariationalELBO(model.likelihood, model.model, num_data=100)
    value: Any = elbo(model.model(X), y[:, 0])
    (-value).backward()
    with torch.no_grad():
        assert model.posterior(X[:7]).mean.shape == (7, 1)


def test_allocator_exactly_keeps_number_of_existing_model() -> None:
    X = rows(50, 1)
    chosen = which(WinnowingAllocator().allocate_inducing_points(X, kernel(), 30, NONE), X)
    model: Any = SingleTaskVariationalGP(
        X,
        covar_module=kernel(),
        learn_inducing_points=False,
        inducing_points=30,
        inducing_point_allocator=WinnowingAllocator(exactly=True),
    )
    first = which(model.model.variational_strategy.inducing_points, X)
    assert len(chosen) < 30 == len(set(first))
    assert first[: len(chosen)] == chosen
    other = rows(50, 1, seed=1)
    assert torch.equal(
        model.init_inducing_points(other), model.model.variational_strategy.inducing_points
    )
    which(model.model.variational_strategy.inducing_points, other)


def test_allocator_exactly_repeats_points_of_repeated_rows() -> None:
    X = rows(5).repeat(4, 1)
    Z = WinnowingAllocator(exactly=True).allocate_inducing_points(X, kernel(), 12, NONE)
    assert len(Z) == 12
    assert len(Z.unique(dim=0)) == 5


def test_allocator_batches_select_independently_and_are_padded() -> None:
    X = torch.stack([rows(40), 0.4 * rows(40, seed=1), rows(40, seed=2)])
    batch = torch.Size([3])
    for k in (kernel(), kernel(batch=batch)):
        Z = WinnowingAllocator().allocate_inducing_points(X, k, 40, batch)
        alone = [allocated(WinnowingAllocator(), X[i], kernel(), 40) for i in range(3)]
        assert len(alone[1]) < len(alone[0])
        assert Z.shape == (3, max(len(a) for a in alone), 2)
        for i in range(3):
            assert which(Z[i], X[i])[: len(alone[i])] == alone[i]
            assert len(set(which(Z[i], X[i]))) == Z.shape[1]
    y = torch.sin(9 * X.sum(-1))
    Z = WinnowingAllocator(targets=y, noise=0.1).allocate_inducing_points(X, kernel(), 40, batch)
    for i in range(3):
        one = allocated(WinnowingAllocator(targets=y[i], noise=0.1), X[i], kernel(), 40)
        assert which(Z[i], X[i])[: len(one)] == one


def test_allocator_outputs_share_union_of_points() -> None:
    X, k = rows(60), kernel(batch=torch.Size([2]))
    k.initialize(**{"base_kernel.lengthscale": torch.tensor([0.3, 0.6])[:, None, None].double()})
    Y = torch.stack([torch.sin(9 * X[:, 0]), X[:, 1]], 1)
    own = [
        allocated(WinnowingAllocator(targets=Y[:, p], noise=0.05), X, k[p], 60) for p in range(2)
    ]
    allocator = WinnowingAllocator(targets=Y, noise=0.05)
    assert allocated(allocator, X, k, 60) == sorted({*own[0], *own[1]})
    # If the union is too large, outputs get equal shares.
    unions = [
        {
            row
            for p in range(2)
            for row in allocated(WinnowingAllocator(targets=Y[:, p], noise=0.05), X, k[p], share)
        }
        for share in range(8, 0, -1)
    ]
    fitting = next(union for union in unions if len(union) <= 8)
    assert allocated(allocator, X, k, 8) == sorted(fitting)
    assert len(allocated(allocator, X, k, 1)) == 1
    assert len(allocated(WinnowingAllocator(), X, k, 60)) >= len(
        allocated(WinnowingAllocator(), X, k[0], 60)
    )
    shared = allocated(allocator, X, kernel(), 60)
    assert len(shared) < 60


def test_allocator_botorch_model_with_two_outcomes() -> None:
    X = rows(30)
    Y = standardised(X)
    model: Any = SingleTaskVariationalGP(
        X,
        Y,
        learn_inducing_points=False,
        inducing_points=20,
        inducing_point_allocator=WinnowingAllocator(targets=Y),
    )
    with torch.no_grad():
        assert model.posterior(X[:4]).mean.shape == (4, 2)


def test_allocator_leaves_kernel_and_accepts_float32() -> None:
    X, k = rows(30).float().requires_grad_(), kernel().float()
    before = {name: value.clone() for name, value in k.state_dict().items()}
    Z = WinnowingAllocator(noise=0.1).allocate_inducing_points(X, k, 10, NONE)
    assert Z.dtype == torch.float32
    assert not Z.requires_grad
    assert all(torch.equal(before[name], value) for name, value in k.state_dict().items())
    assert all(p.grad is None for p in k.parameters())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"noise": 0.0}, "`noise` is a variance"),
        ({"noise": float("nan")}, "`noise` is a variance"),
        ({"tolerance": -1.0}, "`tolerance` must be nats per observation"),
        ({"n_candidates": 0}, "`n_candidates` must be at least 1"),
    ],
)
def test_allocator_invalid_settings_raise(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        WinnowingAllocator(**settings)


def test_allocator_invalid_inputs_raise() -> None:
    X, k = rows(10), kernel()
    with pytest.raises(InputError, match=r"\[10\] or \[10, 'm'\]; got \[9\]"):
        WinnowingAllocator(targets=X[:9, 0]).allocate_inducing_points(X, k, 5, NONE)
    with pytest.raises(InputError, match="`num_inducing` must be at least 1; got 0"):
        WinnowingAllocator().allocate_inducing_points(X, k, 0, NONE)
    with pytest.raises(InputError, match="at least one row"):
        WinnowingAllocator().allocate_inducing_points(X[:0], k, 5, NONE)
    linear: Any = torch.nn.Linear(2, 2)
    with pytest.raises(InputError, match="GPyTorch kernel; got Linear"):
        WinnowingAllocator().allocate_inducing_points(X, linear, 5, NONE)
    with pytest.raises(InputError, match="column for each of the 2 outputs; got 3"):
        WinnowingAllocator(targets=rows(10, 3)).allocate_inducing_points(
            X, kernel(batch=torch.Size([2])), 5, NONE
        )
