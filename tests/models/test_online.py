"""The bound of a stream against Bui's formula and against all rows at once."""

import math
from dataclasses import replace

import pytest
import torch
from gpytorch.kernels import Kernel, MaternKernel, RBFKernel, RQKernel, ScaleKernel
from gpytorch.likelihoods import BernoulliLikelihood, SoftmaxLikelihood, StudentTLikelihood
from gpytorch.means import ConstantMean
from torch import Tensor

from helpers.oracles import log_normal
from winnowgp.bounds.collapsed import moment_bound
from winnowgp.bounds.streaming import joined, restrict_moments
from winnowgp.data import Dataset
from winnowgp.errors import InputError
from winnowgp.models import SparseGP, VariationalGP
from winnowgp.models.kernels import covariance, prior_mean
from winnowgp.models.online import OnlineGP
from winnowgp.selection.objective import subset_statistics

FIRST, SECOND = slice(0, 13), slice(13, 30)


def rows(P: int = 1, *, weighted: bool = False) -> Dataset:
    generator = torch.Generator().manual_seed(3)
    X = 4 * torch.rand(30, 2, generator=generator, dtype=torch.float64)
    Y = torch.stack([torch.sin(X[:, 0] + p) + 0.3 * X[:, 1] for p in range(P)], 1)
    Y = Y + 0.2 * torch.randn(Y.shape, generator=generator, dtype=torch.float64)
    weights = torch.rand(30, generator=generator, dtype=torch.float64) + 0.5
    return Dataset.of(X, Y, weights=weights if weighted else None)


def regression(*, lengthscale: float = 1.3, noise: float | Tensor = 0.05, M: int = 7) -> SparseGP:
    kernel = ScaleKernel(MaternKernel(2.5))
    kernel.initialize(outputscale=1.7, **{"base_kernel.lengthscale": lengthscale})
    model = SparseGP(kernel, rows().X[1::4][:M], mean=ConstantMean(), noise=noise)
    model.mean.initialize(constant=0.4)
    return model


def old_posterior(model: SparseGP, data: Dataset) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and covariance of the optimal q(a) and the prior covariance, dense."""
    Kaa = covariance(model.kernel, model.candidates, model.candidates).detach()
    Kaf = covariance(model.kernel, model.candidates, data.X).detach() / model.noise.detach()
    A = torch.linalg.inv(Kaa + Kaf @ covariance(model.kernel, data.X, model.candidates).detach())
    Y = data.Y - prior_mean(model.mean, data.X).detach()
    return Kaa @ A @ Kaf @ Y, Kaa @ A @ Kaa, Kaa


def bui(old: SparseGP, first: Dataset, new: SparseGP, second: Dataset) -> Tensor:
    """The bound of Bui, Nguyen and Turner (2017), their equation 5, with dense matrices."""
    (m, S, K_old), a, b = old_posterior(old, first), old.candidates, new.candidates
    # The new prior mean is another constant: a − new mean has another mean under q.
    shift = (prior_mean(old.mean, a) - prior_mean(new.mean, a)).detach()
    m = m + shift
    S_inverse = S.inverse()
    D = (S_inverse - K_old.inverse()).inverse()
    # q(a)/p(a | θ_old) = exp(−½ aᵀD⁻¹a + cᵀa + …), where p has the mean `shift`.
    c = S_inverse @ m - K_old.inverse() @ shift
    X = torch.cat([second.X, a.detach()])
    Kbb, KbX = covariance(new.kernel, b, b), covariance(new.kernel, b, X)
    Q = KbX.mT @ torch.linalg.solve(Kbb, KbX)
    N, M = second.N, len(a)
    Y = torch.cat([second.Y - prior_mean(new.mean, second.X), D @ c])
    Sigma = torch.block_diag(new.noise * torch.eye(N, dtype=torch.float64), D)
    trace = (covariance(new.kernel, second.X, second.X) - Q[:N, :N]).trace() / new.noise
    left = covariance(new.kernel, a, a) - Q[N:, N:]
    delta = (
        -0.5 * (torch.logdet(S) - torch.logdet(K_old) - torch.logdet(D))
        + 0.5 * (c.mT @ D @ c - m.mT @ S_inverse @ m).squeeze()
        + 0.5 * (shift.mT @ K_old.inverse() @ shift).squeeze()
        - 0.5 * (D.inverse() @ left).trace()
        + 0.5 * M * math.log(2 * math.pi)
    )
    return log_normal(Y, Q + Sigma) - 0.5 * trace + delta


def test_bound_new_hyperparameters_equals_bui() -> None:
    data = rows()
    first, second = data.part(FIRST), data.part(SECOND)
    old = regression(M=4)
    new = regression(lengthscale=0.9, M=0).with_candidates(data.X[2::5])
    new.mean.initialize(constant=-0.3)
    new.kernel.initialize(outputscale=1.2)
    online = OnlineGP.start(old).after(first)
    streamed = OnlineGP(new, online.memory)
    with torch.no_grad():
        expected = bui(old, first, new, second).item() + old.fixed_bound(first)
    assert streamed.bound(second) == pytest.approx(expected, abs=1e-8)
    assert streamed.objective(second)().item() == pytest.approx(expected, abs=1e-4)


OWN = torch.tensor([1.0, 4.0], dtype=torch.float64)
"""Factors of the noise variances of two targets."""


@pytest.mark.parametrize(("P", "own"), [(1, 1.0), (2, 1.0), (2, OWN)])
def test_bound_held_points_and_other_noise_equals_all_rows(P: int, own: float | Tensor) -> None:
    data = rows(P, weighted=True)
    online = OnlineGP.start(regression(noise=0.3 * own), outputs=P).after(data.part(FIRST))
    # The noise is not frozen with the batch that was seen under it.
    later = OnlineGP(regression(noise=0.04 / own), online.memory)
    L, moments = later.moments(data.part(SECOND))
    batch = later.model.posterior(data)
    streamed = later.posterior(L, moments).predict(data.X)
    assert later.bound(data.part(SECOND)) == pytest.approx(later.model.fixed_bound(data), abs=1e-9)
    torch.testing.assert_close(streamed.mean, batch.predict(data.X).mean)
    torch.testing.assert_close(streamed.variance, batch.predict(data.X).variance)
    assert abs(later.remembering(L, moments).memory.N - data.observations) < 1e-9


def with_known_noise(data: Dataset) -> Dataset:
    # Some rows without, some with hardly any other noise.
    variances = torch.tensor([0.0, 0.02, 3.0], dtype=torch.float64).repeat(data.N // 3)
    return replace(data, noise=variances[:, None].expand(data.N, data.P).contiguous())


@pytest.mark.parametrize(
    ("P", "own", "known"), [(1, 1.0, 1.0), (2, 1.0, 1.0), (2, OWN, 1.0), (2, 1.0, OWN)]
)
def test_known_noise_held_points_equals_all_rows(
    P: int, own: float | Tensor, known: float | Tensor
) -> None:
    data = with_known_noise(rows(P, weighted=True))
    assert data.noise is not None
    data = replace(data, noise=data.noise * known)
    first, middle, last = (data.part(torch.arange(n, n + 10)) for n in (0, 10, 20))
    model = regression(noise=0.05 * own)
    assert first.noise is not None
    assert last.noise is not None
    # The second batch has no known noise, so that the memory has both kinds of rows.
    middle = replace(middle, noise=None)
    assert data.noise is not None
    noise = data.noise.clone()
    noise[10:20] = 0.0
    every = replace(data, noise=noise)
    online = OnlineGP.start(model, outputs=P).after(first).after(middle)
    assert online.memory.observations == pytest.approx(first.observations + middle.observations)
    L, moments = online.moments(last)
    assert online.bound(last) == pytest.approx(model.fixed_bound(every), abs=1e-8)
    batch, streamed = model.posterior(every), online.posterior(L, moments)
    torch.testing.assert_close(streamed.predict(data.X).mean, batch.predict(data.X).mean)
    torch.testing.assert_close(streamed.predict(data.X).variance, batch.predict(data.X).variance)
    # At other points, by way of the memory at all of those before.
    wider = online.with_candidates(torch.cat([model.candidates, data.X[4:7]]))
    memory = wider.projected(online.memory)
    assert replace(wider, memory=memory).bound(last) == pytest.approx(wider.bound(last), abs=1e-7)
    assert wider.after(last).remembered_bound() == pytest.approx(wider.bound(last), abs=1e-7)


def test_known_noise_is_remembered_to_first_order_in_the_learnt_one() -> None:
    data = with_known_noise(rows(weighted=True))
    first, second = data.part(FIRST), data.part(SECOND)
    memory = OnlineGP.start(regression(noise=0.05)).after(first).memory

    def errors(noise: float) -> tuple[float, float]:
        model = regression(noise=noise)
        exact, before = model.fixed_bound(data), regression(noise=0.05).fixed_bound(data)
        return OnlineGP(model, memory).bound(second) - exact, exact - before

    (low, _), (high, change) = errors(0.05 * 0.99), errors(0.05 * 1.01)
    # Without the first order, the error would be of the size of the change.
    assert max(abs(low), abs(high)) < 0.02 * abs(change)
    assert abs(low - high) < 0.002 * abs(change)


def test_of_fitted_posterior_equals_memory_of_rows() -> None:
    data, model = rows(2), regression()
    first, second = data.part(FIRST), data.part(SECOND)
    online = OnlineGP.start(model, outputs=2).after(first)
    fitted = OnlineGP.of(model, model.posterior(first), elbo=model.fixed_bound(first), N=first.N)
    assert fitted.bound(second) == pytest.approx(online.bound(second), abs=1e-8)
    assert fitted.memory.residual.item() == pytest.approx(online.memory.residual.item(), abs=1e-8)


def test_of_posterior_with_noise_per_target_is_refused() -> None:
    model, data = regression(noise=0.05 * OWN), rows(2)
    with pytest.raises(InputError, match="noise variance for each target"):
        OnlineGP.of(model, model.posterior(data), elbo=0.0, N=data.N)


def test_marginal_gains_of_old_and_new_points_equal_differences() -> None:
    data = rows()
    online = OnlineGP.start(regression()).after(data.part(FIRST))
    pool = online.with_candidates(torch.cat([online.memory.Z, data.X[14:20]]))
    pool.model.kernel.initialize(**{"base_kernel.lengthscale": 1.0})
    batch = data.part(SECOND)
    L, moments = pool.moments(batch)
    statistics = subset_statistics(L, *moments)
    mask = torch.arange(statistics.K) % 3 > 0
    gains = statistics.marginal_gains(mask)
    for k in range(statistics.K):
        bounds = []
        for inside in (True, False):
            subset = mask.clone()
            subset[k] = inside
            bounds.append(pool.with_candidates(pool.model.candidates[subset]).bound(batch))
        assert gains[k].item() == pytest.approx(bounds[0] - bounds[1], abs=1e-6)


def test_restrict_moments_equals_moments_of_the_subset() -> None:
    data = rows()
    online = OnlineGP.start(regression()).after(data.part(FIRST))
    pool = online.with_candidates(torch.cat([online.memory.Z, data.X[14:20]]))
    mask = torch.arange(pool.model.K) % 4 > 0
    L, moments = pool.moments(data.part(SECOND))
    T, small = restrict_moments(L, moments, mask)
    kept = pool.with_candidates(pool.model.candidates[mask])
    assert moment_bound(small[0]).item() == pytest.approx(kept.bound(data.part(SECOND)), abs=1e-7)
    a = kept.posterior(T, small).predict(data.X)
    b = kept.posterior(*kept.moments(data.part(SECOND))).predict(data.X)
    torch.testing.assert_close(a.mean, b.mean)
    torch.testing.assert_close(a.variance, b.variance)


def test_forget_equals_weights_of_the_old_rows() -> None:
    data = rows()
    weights = torch.where(torch.arange(30) < 13, 0.25, 1.0).double()
    online = OnlineGP.start(regression()).after(data.part(FIRST))
    online = OnlineGP(online.model, online.memory.forget(0.25))
    weighted = Dataset(data.X, data.Y, weights)
    expected = online.model.fixed_bound(weighted)
    assert online.bound(data.part(SECOND)) == pytest.approx(expected, abs=1e-9)


LIKELIHOODS = {
    "bernoulli": BernoulliLikelihood(),
    "softmax": SoftmaxLikelihood(num_classes=3, mixing_weights=False),
    "student-t": StudentTLikelihood(),
}


def classified(name: str) -> tuple[Dataset, VariationalGP]:
    data = rows()
    Y = data.Y
    if name != "student-t":
        Y = (Y > 0.5).double() + (Y > 1.0).double() * (name == "softmax")
    data = Dataset(data.X, Y)
    kernel = ScaleKernel(RBFKernel())
    model = VariationalGP(kernel, data.X[1::4], likelihood=LIKELIHOODS[name]).double()
    model.mean.initialize(constant=0.2)
    return data, model


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_sites_fixed_by_the_first_batch_have_the_bound_of_the_fit(name: str) -> None:
    data, model = classified(name)
    online = OnlineGP.start(model)
    assert online.bound(data) == pytest.approx(model.fixed_bound(data), abs=1e-6)
    best = model.with_best_q(data)
    fitted = OnlineGP.of(best, best.posterior(data), elbo=best.fixed_bound(data), N=data.N)
    L, moments = online.moments(data)
    seen = online.remembering(L, moments)
    second = data.part(slice(0, 5))
    assert fitted.bound(second) == pytest.approx(seen.bound(second), abs=1e-5)
    a, b = online.posterior(L, moments).predict(data.X), best.posterior(data).predict(data.X)
    torch.testing.assert_close(a.mean, b.mean, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(a.variance, b.variance, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["gaussian", *LIKELIHOODS])
@pytest.mark.parametrize("moving", [False, True])
def test_objective_gradient_equals_differences(name: str, moving: bool) -> None:
    if name == "gaussian":
        data, model = rows(), regression()
    else:
        data, model = classified(name)
    online = OnlineGP.start(model).after(data.part(FIRST))
    later = online.with_candidates(torch.cat([online.memory.Z, data.X[15:18]]))
    later.model.candidates.requires_grad_(moving)
    objective = later.objective(data.part(SECOND))
    value = objective()
    parameters = [p for n, p in later.model.named_parameters() if not n.startswith("q_")]
    parameters = [p for p in parameters if p.requires_grad]
    gradients = torch.autograd.grad(value, parameters, allow_unused=True)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        assert gradient is not None
        direction = torch.ones_like(parameter)
        sides = []
        for step in (1e-4, -2e-4):
            with torch.no_grad():
                parameter += step * direction
                sides.append(later.objective(data.part(SECOND))().item())
        with torch.no_grad():
            parameter += 1e-4 * direction
        slope = (sides[0] - sides[1]) / 2e-4
        assert gradient.sum().item() == pytest.approx(slope, rel=2e-3, abs=2e-3)


@pytest.mark.parametrize(
    ("P", "kernel", "seen"),
    [(1, RBFKernel, 15), (3, RBFKernel, 15), (1, RQKernel, 15), (2, RBFKernel, 0)],
)
def test_closed_gradient_equals_autograd_of_the_moments(
    P: int, kernel: type[Kernel], seen: int
) -> None:
    generator = torch.Generator().manual_seed(1)
    X = 6 * torch.rand(30, 2, generator=generator, dtype=torch.float64)
    Y = torch.randn(30, P, generator=generator, dtype=torch.float64)
    weights = torch.rand(30, generator=generator, dtype=torch.float64)
    online = OnlineGP.start(SparseGP(ScaleKernel(kernel()), X[:8], noise=0.2), outputs=P)
    if seen:
        online = online.after(Dataset(X[:seen], Y[:seen]))
    # Points of the memory are between others, in another order, and under other lengthscales.
    Z = torch.cat([X[20:23], online.memory.Z.flip(0), X[24:26]])
    online = online.with_candidates(Z)
    online.model.candidates.requires_grad_(False)
    online.model.kernel.initialize(**{"base_kernel.lengthscale": 0.9})
    batch = Dataset(X[seen:], Y[seen:], weights[seen:])
    closed = online.objective(batch)()
    moments = online._gaussian(batch, online._jittered())
    dense = torch.stack([moment_bound(m) for m in moments]).sum()
    assert type(closed.grad_fn).__name__ == "WithGradientBackward"
    torch.testing.assert_close(closed, dense, rtol=1e-10, atol=0)
    parameters = [p for p in online.model.parameters() if p.requires_grad]
    expected = torch.autograd.grad(dense, parameters)
    for own, other in zip(torch.autograd.grad(closed, parameters), expected, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("ordered", [True, False])
def test_memory_of_many_points_equals_all_rows(ordered: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    X = torch.randn(400, 4, generator=generator, dtype=torch.float64)
    data = Dataset.of(X, X.sum(1).sin())
    online = OnlineGP.start(SparseGP(ScaleKernel(RBFKernel()), X[:150], noise=0.2))
    online = online.after(data.part(slice(0, 250)))
    A, Z = online.memory.A[0], online.memory.Z
    assert A.shape == (150, 150)
    assert not A.tril(-1).any()
    # In their order the old points have factors that are multiplied as triangles.
    fresh = torch.cat([Z if ordered else Z.flip(0), X[300:310]])
    online = OnlineGP(online.model.with_candidates(fresh), online.memory)
    online.model.candidates.requires_grad_(False)
    held = OnlineGP(online.model.with_candidates(Z), online.memory)
    later = data.part(slice(250, 400))
    expected = held.model.fixed_bound(data)
    assert held.bound(later) == pytest.approx(expected, abs=1e-7)
    assert held.after(later).remembered_bound() == pytest.approx(expected, abs=1e-7)
    closed, moments = online.objective(later)(), online._gaussian(later, online._jittered())
    dense = torch.stack([moment_bound(m) for m in moments]).sum()
    torch.testing.assert_close(closed, dense, rtol=1e-10, atol=0)
    parameters = [p for p in online.model.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(dense, parameters)
    for own, other in zip(torch.autograd.grad(closed, parameters), gradients, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-8, atol=1e-8)


def test_lost_variance_equals_dense_conditional_variance_of_all_rows() -> None:
    data, model = rows(), regression()
    first, second = data.part(FIRST), data.part(SECOND)
    online = OnlineGP.start(model).after(first)
    assert online.memory.lost is not None
    K = covariance(model.kernel, data.X, data.X).detach()
    Kzf = covariance(model.kernel, model.candidates, data.X).detach()
    Kzz = covariance(model.kernel, model.candidates, model.candidates).detach()
    conditional = (K - Kzf.mT @ torch.linalg.solve(Kzz, Kzf)).diagonal()
    assert online.memory.lost.item() == pytest.approx(conditional[FIRST].sum().item(), rel=1e-5)
    online = online.after(second)
    assert online.memory.lost is not None
    assert online.memory.lost.item() == pytest.approx(conditional.sum().item(), rel=1e-5)
    # Fewer points lose more: what the memory says of the points that left, given the others.
    fewer = online.with_candidates(model.candidates[:4].detach())
    memory = fewer.projected(online.memory)
    a = model.candidates.detach()
    rest = covariance(model.kernel, a[:4], a).detach()
    left = Kzz - rest.mT @ torch.linalg.solve(Kzz[:4, :4], rest)
    expected = online.memory.lost + (online.memory.A[0].mT @ left @ online.memory.A[0]).trace()
    assert memory.lost is not None
    assert memory.lost.item() == pytest.approx(expected.item(), rel=1e-5)
    half, twice = memory.forget(0.5).lost, joined([memory, memory]).lost
    assert half is not None
    assert twice is not None
    assert half.item() == pytest.approx(0.5 * expected.item(), rel=1e-5)
    assert twice.item() == pytest.approx(2 * expected.item(), rel=1e-5)


def test_noise_share_of_points_that_leave_out_noise_free_variance_is_at_least_one_half() -> None:
    memory = OnlineGP.start(regression(M=2)).after(rows()).memory
    assert memory.lost is not None
    squares = memory.residual - memory.lost
    share = memory.noise_share()
    assert share is not None
    assert share.item() == pytest.approx(max((squares / memory.residual).item(), 0.5))
    assert replace(memory, lost=memory.residual).noise_share() == 0.5
    assert replace(memory, lost=None).noise_share() is None


@pytest.mark.parametrize("P", [1, 2])
def test_posterior_of_a_noise_share_equals_that_of_the_smaller_noise(P: int) -> None:
    data, share = rows(P), torch.tensor([0.6, 0.9], dtype=torch.float64)[:P]
    noise = torch.tensor([0.05, 0.2], dtype=torch.float64)
    model = regression(noise=0.05 if P == 1 else noise)
    share = share[0] if P == 1 else share
    L, moments = OnlineGP.start(model, outputs=P).after(data).remembered_moments()
    online = OnlineGP.start(model, outputs=P)
    found = online.posterior(L, moments, noise_share=share)
    smaller = regression(noise=0.05 * share.item() if P == 1 else noise * share)
    expected = OnlineGP.start(smaller, outputs=P).after(data)
    expected = expected.posterior(*expected.remembered_moments())
    torch.testing.assert_close(found.predict(data.X).mean, expected.predict(data.X).mean)
    torch.testing.assert_close(found.predict(data.X).variance, expected.predict(data.X).variance)
    torch.testing.assert_close(online.model.noise, model.noise)


def test_held_points_after_many_batches_lose_nothing() -> None:
    data = rows()
    close = torch.cat([data.X[:6], data.X[:6] + 1e-5])
    model = SparseGP(ScaleKernel(RBFKernel()), close, noise=0.01)
    online = OnlineGP.start(model)
    for _ in range(30):
        for start in range(0, 30, 10):
            online = online.after(data.part(slice(start, start + 10)))
    weighted = Dataset(data.X, data.Y, torch.full((30,), 31.0, dtype=torch.float64))
    assert online.bound(data) == pytest.approx(model.fixed_bound(weighted), rel=1e-7)
