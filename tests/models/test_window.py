"""Memories of single batches: a window of a stream against the rows that are left in it."""

import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import BernoulliLikelihood
from gpytorch.means import ConstantMean
from torch import Tensor

from winnowgp.bounds import streaming
from winnowgp.bounds.streaming import Memory, joined
from winnowgp.data import Dataset
from winnowgp.models import SparseGP, VariationalGP
from winnowgp.models.kernels import covariance, prior_mean
from winnowgp.models.online import OnlineGP

BATCHES = [slice(0, 9), slice(9, 14), slice(14, 24)]


def rows(P: int = 1) -> Dataset:
    generator = torch.Generator().manual_seed(5)
    X = 4 * torch.rand(24, 2, generator=generator, dtype=torch.float64)
    Y = torch.stack([torch.sin(X[:, 0] + p) + 0.3 * X[:, 1] for p in range(P)], 1)
    return Dataset.of(X, Y + 0.2 * torch.randn(Y.shape, generator=generator, dtype=torch.float64))


def regression(Z: Tensor, *, lengthscale: float = 1.3) -> SparseGP:
    kernel = ScaleKernel(RBFKernel())
    kernel.initialize(outputscale=1.7, **{"base_kernel.lengthscale": lengthscale})
    model = SparseGP(kernel, Z, mean=ConstantMean(), noise=0.05)
    model.mean.initialize(constant=0.4)
    return model


def window(model: SparseGP | VariationalGP, data: Dataset) -> list[Memory]:
    """Return the memory of each batch, each given those before it."""
    memories: list[Memory] = []
    online = OnlineGP.start(model, outputs=data.P)
    for batch in BATCHES:
        memories.append(online.batch_memory(data.part(batch)))
        online = OnlineGP(model, joined(memories))
    return memories


@pytest.mark.parametrize("R", [2, 3, 6])
def test_observed_combinations_of_several_memories_equal_the_product(
    R: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Joined memories observe more combinations than they have points.
    monkeypatch.setattr(streaming, "_TRIANGULAR", 1)
    generator = torch.Generator().manual_seed(0)
    V = torch.randn(4, 3, generator=generator, dtype=torch.float64).triu()
    A = torch.randn(3, R, generator=generator, dtype=torch.float64).triu()
    B, gram = streaming.observed_combinations(V, A)
    torch.testing.assert_close(B, V @ A)
    torch.testing.assert_close(gram, B @ B.mT)


@pytest.mark.parametrize("P", [1, 2])
def test_window_held_points_equals_rows_that_are_left(P: int) -> None:
    data = rows(P)
    model = regression(data.X[::4])
    left = OnlineGP(model, joined(window(model, data)[1:]))
    recent = data.part(slice(9, 24))
    assert left.remembered_bound() == pytest.approx(model.fixed_bound(recent), abs=1e-9)
    expected = model.posterior(recent).predict(data.X)
    found = left.posterior(*left.remembered_moments())
    torch.testing.assert_close(found.predict(data.X).mean, expected.mean)
    torch.testing.assert_close(found.predict(data.X).variance, expected.variance)
    assert left.memory.N == 15


def test_window_after_many_changes_equals_rows_that_are_left() -> None:
    generator, data = torch.Generator().manual_seed(1), rows()
    memories: list[Memory] = []
    for step in range(40):
        # Other points and lengthscales, until the last batches that the window has.
        last = step >= 36
        Z = data.X[: 8 if last else 5 + step % 4]
        Z = Z if last else Z + 0.1 * torch.rand(Z.shape, generator=generator, dtype=Z.dtype)
        model = regression(Z, lengthscale=1.3 if last else 1 + 0.1 * (step % 5))
        online = OnlineGP.start(model)
        kept = [online.projected(memory) for memory in memories[-3:]]
        memories = [*kept, online.batch_memory(data.part(slice(step % 4 * 6, step % 4 * 6 + 6)))]
    # The last four batches are all rows.
    model = regression(data.X[:8])
    left = OnlineGP(model, joined(memories))
    assert left.remembered_bound() == pytest.approx(model.fixed_bound(data), abs=1e-9)
    assert max(memory.A.shape[2] for memory in memories) <= 6


def dense_projection(memory: Memory, old: SparseGP, new: SparseGP) -> tuple[Tensor, Tensor, Tensor]:
    """E[−½ (‖y − Aᵀa‖² + residual) | u] = −½ uᵀHu + hᵀu + c, by dense conditioning of a on u."""
    a, b = memory.Z, new.candidates.detach()
    with torch.no_grad():
        Kab = covariance(new.kernel, a, b)
        W = torch.linalg.solve(covariance(new.kernel, b, b), Kab.mT).mT
        centre = prior_mean(new.mean, a) - W @ prior_mean(new.mean, b)
        S = covariance(new.kernel, a, a) - W @ Kab.mT
    A, y = memory.A[0], memory.y - memory.A[0].mT @ centre
    G = W.mT @ A
    constant = -0.5 * (y.square().sum() + (A.mT @ S @ A).trace() + memory.residual)
    return G @ G.mT, G @ y, constant


@pytest.mark.parametrize("M", [3, 8])
def test_projected_on_other_points_and_kernel_equals_dense_conditioning(M: int) -> None:
    data = rows()
    old = regression(data.X[::4])
    memory = window(old, data)[2]
    # One of the new points is an old one.
    new = regression(torch.cat([data.X[:1], data.X[1::3][: M - 1]]), lengthscale=0.8)
    found = OnlineGP.start(new).projected(memory)
    H, h, c = dense_projection(memory, old, new)
    A = found.A[0]
    assert A.shape[1] <= min(M, 6)
    torch.testing.assert_close(A @ A.mT, H, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(A @ found.y, h, rtol=1e-6, atol=1e-6)
    constant = -0.5 * (found.y.square().sum() + found.residual)
    torch.testing.assert_close(constant, c, rtol=1e-7, atol=1e-7)


def test_window_of_sites_equals_bound_and_posterior_of_all_batches() -> None:
    data = rows()
    labels = Dataset.of(data.X, (data.Y > 0.5).double())
    kernel = ScaleKernel(RBFKernel())
    model = VariationalGP(kernel, data.X[::4], likelihood=BernoulliLikelihood()).double()
    memories = window(model, labels)
    first, second, third = map(labels.part, BATCHES)
    online = OnlineGP.start(model).after(first).after(second)
    last, online = online.bound(third), online.after(third)
    ring = OnlineGP(model, joined(memories))
    assert ring.remembered_bound() == pytest.approx(last, abs=1e-5)
    torch.testing.assert_close(
        ring.posterior(*ring.remembered_moments()).predict_mean(data.X),
        online.posterior(*online.remembered_moments()).predict_mean(data.X),
        rtol=1e-4,
        atol=1e-4,
    )
