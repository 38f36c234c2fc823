"""More rows through the same points, against refitting all of them and against dense Bayes."""

import pytest
import torch
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood, PoissonLikelihood
from gpytorch.means import ConstantMean
from torch import Tensor

from winnowgp.data import Dataset
from winnowgp.errors import InputError
from winnowgp.models import Posterior, SparseGP


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def model(P: int = 2) -> tuple[SparseGP, Dataset, Dataset]:
    X = 2 * draw(40, 2)
    Y = torch.sin(X @ draw(2, P, seed=1)) + 0.5 + 0.1 * draw(40, P, seed=2)
    mean = ConstantMean().double()
    mean.initialize(constant=0.25)
    made = SparseGP(ScaleKernel(MaternKernel(nu=1.5)), X[:7] + 0.1, mean=mean, noise=0.05)
    made.kernel.initialize(outputscale=1.7)
    return made, Dataset(X[:30], Y[:30]), Dataset(X[30:], Y[30:])


@pytest.mark.parametrize("P", [1, 2])
def test_it_is_the_fit_of_all_rows(P: int) -> None:
    made, first, more = model(P)
    together = Dataset(torch.cat([first.X, more.X]), torch.cat([first.Y, more.Y]))
    found = made.posterior(first).condition_on(more)
    # K_*u (K_uu + K_uf K_fu/σ²)⁻¹ K_uf (y − mean)/σ², and the covariance likewise, by dense solves.
    T, s2 = 3 * draw(9, 2, seed=5), made.noise.detach()
    with torch.no_grad():
        k = made.kernel
        Kuu, Kuf = k(made.candidates).to_dense(), k(made.candidates, together.X).to_dense()
        Kut, Ktt = k(made.candidates, T).to_dense(), k(T).to_dense()
    inner = Kuu + Kuf @ Kuf.mT / s2
    mean = 0.25 + Kut.mT @ torch.linalg.solve(inner, Kuf @ (together.Y - 0.25)) / s2
    cov = Ktt - Kut.mT @ torch.linalg.solve(Kuu, Kut) + Kut.mT @ torch.linalg.solve(inner, Kut)
    torch.testing.assert_close(found.predict(T).mean, mean, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(found.covariance(T)[0], cov, rtol=1e-7, atol=1e-7)


def test_each_output_may_have_a_covariance_of_its_own() -> None:
    """Against Bayes' rule for u with u's own covariance matrices, output by output."""
    made, _, more = model(2)
    M = made.K
    factors = torch.stack([torch.eye(M).double() * 0.5, 0.3 * draw(M, M, seed=3).tril()])
    factors[1].diagonal().copy_(torch.full((M,), 0.6))
    q = Posterior(
        made.kernel,
        made.candidates.detach(),
        mean=made.mean,
        likelihood=made.likelihood,
        q_mean=draw(M, 2, seed=4),
        q_factor=factors,
    )
    found = q.condition_on(more)
    V = torch.linalg.solve(q.L, q.kernel(q.Z, more.X).to_dense())
    for p in range(2):
        prior = factors[p] @ factors[p].mT
        S = V.mT @ prior @ V + made.noise.detach() * torch.eye(len(more.X)).double()
        gain = prior @ V @ S.inverse()
        mean = q.q_mean[:, p] + gain @ (more.Y[:, p] - 0.25 - V.mT @ q.q_mean[:, p])
        torch.testing.assert_close(found.q_mean[:, p], mean, rtol=1e-8, atol=1e-8)
        factor = found.q_factor[p]
        torch.testing.assert_close(factor @ factor.mT, prior - gain @ V.mT @ prior)


def test_in_two_steps_as_in_one() -> None:
    made, first, more = model(1)
    whole = made.posterior(first).condition_on(more)
    half = made.posterior(first).condition_on(Dataset(more.X[:4], more.Y[:4]))
    steps = half.condition_on(Dataset(more.X[4:], more.Y[4:]))
    torch.testing.assert_close(whole.q_mean, steps.q_mean)
    torch.testing.assert_close(whole.gain.abs().sum(), steps.gain.abs().sum())


def test_what_cannot_be_updated_says_so() -> None:
    made, first, more = model(1)
    q = made.posterior(first)
    with pytest.raises(InputError, match="must have 1 target columns; got 2"):
        q.condition_on(Dataset(more.X, more.Y.expand(-1, 2)))
    counts = Posterior(
        RBFKernel().double(),
        q.Z,
        mean=q.mean,
        likelihood=PoissonLikelihood(),
        q_mean=q.q_mean,
        q_factor=q.q_factor,
    )
    with pytest.raises(InputError, match="PoissonLikelihood"):
        counts.condition_on(more)
    assert isinstance(q.likelihood, GaussianLikelihood)
