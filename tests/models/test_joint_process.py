"""q(f) in batches and conditioned, against the dense joint normal of everything."""

import pytest
import torch
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel
from gpytorch.means import ConstantMean
from torch import Tensor

from winnowgp.models import JointPosterior, Posterior, SparseGP


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


KERNELS = {"rbf": lambda: ScaleKernel(RBFKernel()), "matern": lambda: MaternKernel(nu=1.5)}
kernels = pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS.keys())


def fitted(kernel, *, P: int = 2, own_factors: bool = False) -> Posterior:
    mean = ConstantMean().double()
    mean.initialize(constant=-0.5)
    model = SparseGP(kernel(), 2 * draw(6, 2), mean=mean, noise=0.1)
    factors = 0.4 * draw(P if own_factors else 1, 6, 6, seed=2).tril()
    return Posterior(
        model.kernel,
        model.candidates.detach(),
        mean=model.mean,
        likelihood=model.likelihood,
        q_mean=draw(6, P, seed=3),
        q_factor=factors,
    )


def dense(q: Posterior, X: Tensor) -> tuple[Tensor, Tensor]:
    """Mean `[P n]` and covariance `[P n n]` of rows that are written below each other."""
    K, Kuf = q.kernel(X).to_dense(), q.kernel(q.Z, X).to_dense()
    V = torch.linalg.solve(q.L, Kuf)
    mean = -0.5 + V.mT @ q.q_mean
    inner = torch.eye(6).double() - q.q_factor @ q.q_factor.mT
    return mean.mT, (K - V.mT @ inner @ V).expand(q.P, -1, -1)


def conditional(
    q: Posterior, X: Tensor, *, seen: Tensor, Y: Tensor, noise: Tensor
) -> tuple[Tensor, Tensor]:
    """The textbook conditional of a joint normal over observed and new rows."""
    n = len(seen)
    mean, cov = dense(q, torch.cat([seen, X]))
    S = cov[:, :n, :n] + torch.diag_embed(noise.mT)
    gain = cov[:, n:, :n] @ S.inverse()
    new = mean[:, n:] + (gain @ (Y.mT - mean[:, :n])[..., None])[..., 0]
    return new, cov[:, n:, n:] - gain @ cov[:, :n, n:]


@kernels
@pytest.mark.parametrize("own_factors", [False, True])
@pytest.mark.parametrize("q", [1, 3])
def test_each_batch_is_joint_over_its_rows(kernel, own_factors: bool, q: int) -> None:
    posterior = fitted(kernel, own_factors=own_factors)
    X = 2 * draw(4, 5, q, 2, seed=7)
    mean, cov = JointPosterior(posterior)(X)
    assert mean.shape == (4, 5, 2, q)
    assert cov.shape == (4, 5, 2, q, q)
    for i in range(4):
        wanted = dense(posterior, X[i, 2])
        torch.testing.assert_close(mean[i, 2], wanted[0])
        torch.testing.assert_close(cov[i, 2], wanted[1])


@kernels
@pytest.mark.parametrize("own_factors", [False, True])
@pytest.mark.parametrize("q", [1, 3])
def test_observed_rows_count_as_in_a_joint_normal(kernel, own_factors: bool, q: int) -> None:
    """Rows in three batches, four fantasies of each, noise of each row and output."""
    posterior = fitted(kernel, own_factors=own_factors)
    seen, Y = 2 * draw(3, 5, 2, seed=8), draw(4, 3, 5, 2, seed=9)
    noise = 0.05 + draw(3, 5, 2, seed=10).square()
    process = JointPosterior(posterior).condition_on(seen, Y, noise=noise)
    assert process.batch_shape == (4, 3)
    X = 2 * draw(4, 3, q, 2, seed=11)
    mean, cov = process(X)
    for i, j in ((0, 0), (3, 1), (2, 2)):
        wanted = conditional(posterior, X[i, j], seen=seen[j], Y=Y[i, j], noise=noise[j])
        torch.testing.assert_close(mean[i, j], wanted[0])
        torch.testing.assert_close(cov[i, j], wanted[1])
    everywhere = process(X[0, 0])
    wanted = conditional(posterior, X[0, 0], seen=seen[2], Y=Y[1, 2], noise=noise[2])
    assert everywhere[1].shape == (4, 3, 2, q, q)
    torch.testing.assert_close(everywhere[0][1, 2], wanted[0])


def test_conditioning_twice_is_conditioning_on_both() -> None:
    process = JointPosterior(fitted(KERNELS["matern"]))
    X, Y, noise = draw(5, 2, seed=8), draw(5, 2, seed=9), torch.full((5, 2), 0.2).double()
    once = process.condition_on(X, Y, noise=noise)
    first = process.condition_on(X[:2], Y[:2], noise=noise[:2])
    twice = first.condition_on(X[2:], Y[2:], noise=noise[2:])
    T = draw(3, 4, 2, seed=12)
    for one, two in zip(once(T), twice(T), strict=True):
        torch.testing.assert_close(one, two)


def test_nothing_observed_in_batches_is_the_process_in_batches() -> None:
    process = JointPosterior(fitted(KERNELS["rbf"]))
    empty = process.condition_on(draw(0, 2), draw(7, 0, 2), noise=draw(0, 2))
    assert empty.batch_shape == (7,)
    T = draw(4, 2, seed=12)
    mean, cov = empty(T)
    torch.testing.assert_close(mean, process(T)[0].expand(7, 2, 4))
    torch.testing.assert_close(cov, process(T)[1].expand(7, 2, 4, 4))


def test_gradients_reach_new_rows_observed_rows_and_observations() -> None:
    posterior = fitted(KERNELS["rbf"])
    noise = torch.full((2, 2), 0.2).double()

    def outcome(T: Tensor, X: Tensor, Y: Tensor) -> tuple[Tensor, Tensor]:
        return JointPosterior(posterior, X=X, Y=Y, noise=noise)(T)

    arguments = (draw(3, 2, 2, seed=1), draw(2, 2, seed=2), draw(2, 2, seed=3))
    assert torch.autograd.gradcheck(outcome, [a.requires_grad_() for a in arguments])


def test_it_follows_its_parts_to_another_dtype() -> None:
    noise = torch.full((5, 2), 0.2).double()
    process = JointPosterior(fitted(KERNELS["rbf"])).condition_on(
        draw(5, 2), draw(5, 2), noise=noise
    )
    T = draw(3, 2, seed=4)
    mean = process(T)[0]
    single = process.float()(T.float())[0]
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), mean, rtol=1e-3, atol=1e-3)
