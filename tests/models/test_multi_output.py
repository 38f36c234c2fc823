"""MultiOutputGP and its posterior against the dense joint covariance and against SparseGP."""

from dataclasses import replace

import pytest
import torch
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel
from torch import Tensor
from torch.distributions import MultivariateNormal

from winnowgp.bounds import row_blocks
from winnowgp.data import Dataset
from winnowgp.errors import InputError
from winnowgp.gradients import all_masks
from winnowgp.models import MultiOutputGP, SparseGP

MIXING = torch.tensor([[1.0, 0.3], [-0.5, 1.2], [0.8, 0.0]], dtype=torch.float64)
NOISE = torch.tensor([0.1, 0.3, 0.05], dtype=torch.float64)


def rows(kind: str = "missing", N: int = 14) -> Dataset:
    """Return rows of three targets: complete, with missing ones, with weights, with known noise."""
    g = torch.Generator().manual_seed(1)
    X = 4 * torch.rand(N, 2, generator=g, dtype=torch.float64)
    Y = torch.sin(X[:, :1] + torch.arange(3)) + 0.2 * torch.randn(N, 3, generator=g).double()
    if kind == "missing":
        Y[::2, 0], Y[1::3, 2] = torch.nan, torch.nan
    weights = 0.5 + torch.rand(N, generator=g).double() if kind == "weights" else None
    noise = 0.2 * torch.rand(N, 3, generator=g).double() if kind == "noise" else None
    return Dataset.of(X, Y, weights=weights, noise=noise, missing=True)


def kernels() -> tuple[ScaleKernel, MaternKernel]:
    rbf, matern = ScaleKernel(RBFKernel(ard_num_dims=2)), MaternKernel(1.5)
    rbf.base_kernel.initialize(lengthscale=1.3)
    matern.initialize(lengthscale=0.7)
    return rbf.double(), matern.double()


def model(first: Tensor, second: Tensor, mixing: Tensor = MIXING) -> MultiOutputGP:
    return MultiOutputGP(kernels(), [first, second], mixing=mixing, noise=NOISE)


def dense(gp: MultiOutputGP, data: Dataset, X: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the covariance of observed targets, with X's targets `[N P]`, and their noise."""
    seen = (~torch.isnan(data.Y)).flatten()
    prior = [k(torch.cat([data.X, X])).to_dense() for k in gp.kernels]
    terms = zip(prior, gp.mixing.mT, strict=True)
    joint = torch.stack([torch.einsum("ij,p,s->ipjs", K, w, w) for K, w in terms]).sum(0)
    n, P = data.N, gp.P
    everything = joint[:n, :, :n].reshape(n * P, n * P)[seen][:, seen]
    cross = joint[:n, :, n:].reshape(n * P, len(X), P)[seen]
    noise = gp.noise.expand(n, P) + (0.0 if data.noise is None else data.noise)
    if data.weights is not None:
        noise = noise / data.weights[:, None]
    return everything, cross, noise.flatten()[seen]


@pytest.mark.parametrize("kind", ["complete", "missing", "noise"])
def test_bound_with_all_rows_is_dense_joint_density(kind: str) -> None:
    data = rows(kind)
    gp = model(data.X, data.X)
    K, _, noise = dense(gp, data, data.X[:0])
    y = data.Y.flatten()
    y = y[~torch.isnan(y)]
    evidence = MultivariateNormal(torch.zeros_like(y), K + noise.diag()).log_prob(y)
    torch.testing.assert_close(gp.bound(data), evidence, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gp.dense_bound(data)(), evidence, rtol=1e-9, atol=1e-9)
    assert gp.evidence(data).lower == pytest.approx(evidence.item(), abs=1e-6)
    few = model(data.X[:5], data.X[:3])
    bounds = few.evidence(data, max_rows=0)
    assert bounds.lower < evidence.item() < bounds.upper


@pytest.mark.parametrize("kind", ["complete", "missing", "noise"])
def test_bound_of_few_points_is_dense_collapsed_bound(kind: str) -> None:
    data = rows(kind)
    gp = model(data.X[:4], data.X[3:9])
    K, _, noise = dense(gp, data, data.X[:0])
    blocks = []
    for kernel, Z, w in zip(gp.kernels, gp.candidate_sets, gp.mixing.mT, strict=True):
        Kuf = kernel(Z, data.X).to_dense()
        explained = Kuf.mT @ torch.linalg.solve(kernel(Z).to_dense(), Kuf)
        blocks.append(torch.einsum("ij,p,s->ipjs", explained, w, w))
    seen = (~torch.isnan(data.Y)).flatten()
    Q = torch.stack(blocks).sum(0).reshape(3 * data.N, -1)[seen][:, seen]
    y = data.Y.flatten()[seen]
    density = MultivariateNormal(torch.zeros_like(y), Q + noise.diag()).log_prob(y)
    expected = density - 0.5 * ((K - Q).diagonal() / noise).sum()
    torch.testing.assert_close(gp.bound(data), expected, rtol=1e-8, atol=1e-8)
    assert gp.fixed_bound(data) == pytest.approx(expected.item(), abs=1e-8)


def test_weights_count_as_repeated_rows() -> None:
    data = rows("missing")
    twice = replace(data, weights=torch.full((data.N,), 2.0, dtype=torch.float64))
    repeated = Dataset.joined([data, data])
    gp = model(data.X[:4], data.X[:6])
    torch.testing.assert_close(gp.bound(twice), gp.bound(repeated))
    torch.testing.assert_close(
        gp.dense_bound(twice)(), gp.dense_bound(repeated)(), rtol=1e-6, atol=1e-6
    )


def test_subset_statistics_and_objective_equal_pruned_bounds() -> None:
    data, masks = rows(), all_masks(6)
    gp = model(data.X[:4], data.X[6:8])
    pruned = torch.stack([gp.prune(mask.split([4, 2])).bound(data) for mask in masks])
    torch.testing.assert_close(gp.subset_objective(data).value(masks), pruned)
    statistics = gp.subset_statistics(data)
    torch.testing.assert_close(statistics.value(masks), pruned.detach(), rtol=1e-8, atol=1e-8)
    half = masks[21]
    gains = statistics.marginal_gains(half)
    for k in range(6):
        both = half.repeat(2, 1)
        both[0, k], both[1, k] = True, False
        one, other = statistics.value(both)
        torch.testing.assert_close(gains[k], one - other, rtol=1e-7, atol=1e-7)


def value_and_gradient(gp: MultiOutputGP, value: Tensor) -> list[Tensor]:
    gp.zero_grad()
    value.backward()
    return [value.detach(), *(1 * p.grad for p in gp.parameters() if p.grad is not None)]


@pytest.mark.parametrize("mixing", [MIXING, MIXING * torch.tensor([[1.0, 0], [1, 0], [0, 1]])])
@pytest.mark.parametrize("kind", ["complete", "missing", "weights", "noise"])
def test_chunked_bound_has_the_gradient_of_autograd(
    kind: str, mixing: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = rows(kind)
    # One kernel has a closed form and the other has not; some blocks lack no target.
    learnt = mixing != 0
    gp = MultiOutputGP(
        kernels(), [data.X[:4], data.X[:6]], mixing=mixing, learnt=learnt, noise=NOISE
    )
    monkeypatch.setattr(row_blocks, "JITTER", 1e-12)
    monkeypatch.setattr(row_blocks, "block_size", lambda *_: 3)
    closed = value_and_gradient(gp, gp.chunked_bound(data)())
    oracle = value_and_gradient(gp, gp.bound(data))
    for one, other in zip(closed, oracle, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("keep", [0, 2**29])
def test_blocks_of_rows_change_neither_bound_nor_gradient(
    keep: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = rows("complete")
    gp = model(data.X[:4], data.X[:6])
    monkeypatch.setattr(row_blocks, "KEEP", keep)
    # Rows with weights have a matrix A each, by another path.
    ones = replace(data, weights=torch.ones(data.N, dtype=torch.float64))
    values = []
    for size, each in ((100, data), (5, data), (5, ones)):
        monkeypatch.setattr(row_blocks, "block_size", lambda *_, size=size: size)
        values.append(value_and_gradient(gp, gp.chunked_bound(each)()))
    for one, *others in zip(*values, strict=True):
        for other in others:
            torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)


def test_identity_mixing_equals_independent_models() -> None:
    data = rows("missing")
    two = Dataset.of(data.X, data.Y[:, :2], missing=True)
    gp = MultiOutputGP(
        kernels(), [data.X[:4], data.X[:6]], mixing=torch.eye(2).double(), noise=NOISE[:2]
    )
    parts = []
    for p, (kernel, Z) in enumerate(zip(kernels(), [data.X[:4], data.X[:6]], strict=True)):
        seen = ~torch.isnan(data.Y[:, p])
        own = Dataset.of(data.X[seen], data.Y[seen, p])
        one = SparseGP(kernel, Z, noise=NOISE[p].item())
        parts.append((one.bound(own), one.posterior(own).predict(data.X, observed=True)))
    torch.testing.assert_close(gp.bound(two), parts[0][0] + parts[1][0])
    prediction = gp.posterior(two).predict(data.X, observed=True)
    for name in ("mean", "variance"):
        expected = torch.cat([getattr(each, name) for _, each in parts], 1)
        torch.testing.assert_close(getattr(prediction, name), expected)


def test_posterior_with_all_rows_is_dense_conditional() -> None:
    data, X = rows(), rows("complete", N=17).X[14:]
    gp = model(data.X, data.X)
    K, cross, noise = dense(gp, data, X)
    y = data.Y.flatten()
    y = y[~torch.isnan(y)]
    weights = torch.linalg.solve(K + noise.diag(), cross.flatten(1))
    pairs = zip(gp.kernels, gp.mixing.mT, strict=True)
    terms = [torch.einsum("ij,p,s->ipjs", k(X).to_dense(), w, w) for k, w in pairs]
    prior = torch.stack(terms).sum(0).reshape(9, 9)
    joint = prior - cross.flatten(1).mT @ weights
    posterior = gp.posterior(data)
    prediction = posterior.predict(X, observed=True)
    torch.testing.assert_close(prediction.mean.flatten(), y @ weights, rtol=1e-5, atol=1e-5)
    expected = joint.diagonal() + NOISE.repeat(3)
    torch.testing.assert_close(prediction.variance.flatten(), expected, rtol=1e-5, atol=1e-5)
    each = torch.stack([joint[p::3, p::3] + NOISE[p] * torch.eye(3) for p in range(3)])
    torch.testing.assert_close(posterior.covariance(X, observed=True), each, rtol=1e-5, atol=1e-5)
    g = torch.Generator().manual_seed(0)
    samples = posterior.sample(X, 20_000, generator=g).flatten(1)
    # Covariances of 20,000 draws: standard errors are at most 1.0 · √(2/20,000) = 0.01.
    torch.testing.assert_close(torch.cov(samples.mT), joint, rtol=0, atol=0.04)
    processes, _ = posterior.processes(X)
    torch.testing.assert_close(processes @ MIXING.mT, prediction.mean)
    # Nothing is left to draw at inducing points, nor at rows that are repeated.
    again = posterior.sample(torch.cat([data.X, data.X]), 2, generator=g)
    torch.testing.assert_close(again[:, : data.N], again[:, data.N :], rtol=0, atol=1e-2)


@pytest.mark.parametrize("kind", ["complete", "missing", "noise"])
def test_condition_on_equals_posterior_of_all_rows(kind: str) -> None:
    data = rows(kind)
    first, more = data.part(slice(0, 9)), data.part(slice(9, None))
    gp = model(data.X[:4], data.X[3:9])
    together, after = gp.posterior(data), gp.posterior(first).condition_on(more)
    for name in ("mean", "variance"):
        one, other = (getattr(each.predict(data.X), name) for each in (after, together))
        torch.testing.assert_close(one, other)
    torch.testing.assert_close(after.covariance(data.X), together.covariance(data.X))
    # What the rows add to the collapsed bound.
    gained = gp.bound(data).detach() - gp.bound(first).detach()
    torch.testing.assert_close(gp.posterior(first).log_predictive(more), gained)
    with pytest.raises(InputError, match="must have 3 target columns; got 1"):
        after.condition_on(Dataset.of(data.X, data.X[:, 0]))


def test_fixed_entries_of_the_mixing_have_no_gradient() -> None:
    data = rows()
    learnt = torch.tensor([[False, True], [True, True], [True, False]])
    gp = MultiOutputGP(
        kernels(), [data.X[:4], data.X[:6]], mixing=MIXING, learnt=learnt, noise=NOISE
    )
    gp.bound(data).backward()
    assert gp.raw_mixing.numel() == 4
    assert gp.raw_mixing.grad is not None
    assert bool((gp.raw_mixing.grad != 0).all())
    with torch.no_grad():
        gp.raw_mixing.add_(1)
    torch.testing.assert_close(gp.mixing, MIXING + learnt.double())


def test_shapes_that_do_not_match_are_refused() -> None:
    data = rows()
    with pytest.raises(InputError, match="`mixing` must have a row for each target"):
        MultiOutputGP(kernels(), [data.X], mixing=MIXING, noise=NOISE)
    square = torch.ones(2, 2, dtype=torch.bool)
    with pytest.raises(InputError, match=r"`learnt` must have the shape of `mixing`, \[3, 2\]"):
        MultiOutputGP(kernels(), [data.X] * 2, mixing=MIXING, learnt=square, noise=NOISE)
    with pytest.raises(InputError, match="the model has 3 targets; the data have 1"):
        model(data.X, data.X).bound(Dataset.of(data.X, data.X[:, 0]))
