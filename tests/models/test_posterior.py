"""Posteriors against dense conditioning: predictions, joint distributions and updates."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from gpytorch.kernels import (
    AdditiveKernel,
    Kernel,
    LinearKernel,
    MaternKernel,
    RBFKernel,
    ScaleKernel,
)
from gpytorch.likelihoods import GaussianLikelihood, PoissonLikelihood
from gpytorch.means import ConstantMean, ZeroMean
from torch import Tensor

from winnowgp.data import Dataset
from winnowgp.errors import InputError
from winnowgp.models import Posterior, SparseGP
from winnowgp.models.kernels import covariance, cross_covariance, prior_variance
from winnowgp.models.posterior import JointPosterior


def data(P: int) -> Dataset:
    g = torch.Generator().manual_seed(4)
    X = 6 * torch.rand(15, 1, generator=g, dtype=torch.float64)
    return Dataset.of(X, torch.cos(X + torch.arange(P)))


def fitted(P: int = 1, K: int = 15) -> tuple[SparseGP, Dataset, Posterior]:
    rows = data(P)
    mean = ConstantMean()
    mean.initialize(constant=0.7)
    gp = SparseGP(ScaleKernel(RBFKernel()), rows.X[:K], mean=mean, noise=0.05)
    return gp, rows, gp.posterior(rows)


def exact_prediction(gp: SparseGP, rows: Dataset, X: Tensor) -> tuple[Tensor, Tensor]:
    """The dense GP's posterior mean `[N P]` and covariance `[N N]`."""
    with torch.no_grad():
        K, k = gp.kernel(rows.X).to_dense(), gp.kernel(X, rows.X).to_dense()
        gain = k @ (K + gp.noise * torch.eye(rows.N)).inverse()
        return 0.7 + gain @ (rows.Y - 0.7), gp.kernel(X).to_dense() - gain @ k.mT


@pytest.mark.parametrize("P", [1, 3])
def test_posterior_points_at_data_equal_exact_gp(P: int) -> None:
    gp, rows, posterior = fitted(P)
    X = torch.linspace(-1, 7, 20, dtype=torch.float64)[:, None]
    mean, covariance = exact_prediction(gp, rows, X)
    prediction = posterior.predict(X)
    torch.testing.assert_close(prediction.mean, mean, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(posterior.predict_mean(X), mean, rtol=1e-6, atol=1e-7)
    variance = covariance.diagonal()[:, None].expand(-1, P)
    torch.testing.assert_close(prediction.variance, variance, rtol=1e-6, atol=1e-7)
    full = posterior.covariance(X)
    assert full.shape == (P, 20, 20)
    torch.testing.assert_close(full[-1], covariance, rtol=1e-6, atol=1e-7)


def test_posterior_observed_adds_noise() -> None:
    gp, rows, posterior = fitted(K=6)
    latent, observed = posterior.predict(rows.X), posterior.predict(rows.X, observed=True)
    torch.testing.assert_close(observed.variance - latent.variance, gp.noise.expand(15, 1))
    full = posterior.covariance(rows.X, observed=True)[0].diagonal()
    torch.testing.assert_close(full[:, None], observed.variance)


def test_posterior_log_density_is_normal() -> None:
    _, rows, posterior = fitted(P=2, K=6)
    p = posterior.predict(rows.X, observed=True)
    expected = torch.distributions.Normal(p.mean, p.variance.sqrt()).log_prob(rows.Y)
    torch.testing.assert_close(posterior.log_density(rows.X, rows.Y), expected)


def test_posterior_samples_have_its_moments(generator: torch.Generator) -> None:
    _, _, posterior = fitted(P=2, K=6)
    X = torch.tensor([[0.5], [2.0], [9.0]], dtype=torch.float64)
    draws = posterior.sample(X, 20_000, generator=generator)
    p, covariance = posterior.predict(X), posterior.covariance(X)
    # 20,000 draws, |z| < 4 for six means; covariances to 5 %.
    z = (draws.mean(0) - p.mean) / (p.variance / 20_000).sqrt()
    assert (z.abs() < 4).all()
    for output in range(2):
        torch.testing.assert_close(
            draws[..., output].mT.cov(), covariance[output], rtol=0.05, atol=0.01
        )


def test_posterior_owns_copies() -> None:
    gp, rows, posterior = fitted(K=6)
    before = posterior.predict(rows.X).mean
    with torch.no_grad():
        for parameter in gp.parameters():
            parameter.add_(1.0)
    torch.testing.assert_close(posterior.predict(rows.X).mean, before)
    assert not any(p.requires_grad for p in posterior.parameters())


def test_posterior_ignores_train_and_eval_mode() -> None:
    _, rows, posterior = fitted(K=6)
    first = posterior.train().predict(rows.X)
    second = posterior.eval().predict(rows.X)
    assert torch.equal(first.mean, second.mean)
    assert torch.equal(first.variance, second.variance)


def test_posterior_has_gradients_in_inputs() -> None:
    _, _, posterior = fitted(K=6)
    X = torch.tensor([[0.5], [2.0]], dtype=torch.float64, requires_grad=True)
    posterior.predict(X).variance.sum().backward()
    assert X.grad is not None
    assert X.grad.abs().sum() > 0


def test_posterior_without_points_is_prior() -> None:
    gp, rows, _ = fitted()
    empty = gp.prune(torch.zeros(15, dtype=torch.bool)).posterior(rows)
    p = empty.predict(rows.X)
    torch.testing.assert_close(p.mean, torch.full_like(p.mean, 0.7))
    variance = prior_variance(gp.kernel, rows.X)[:, None].detach()
    torch.testing.assert_close(p.variance, variance)
    assert torch.isfinite(empty.sample(rows.X, 2)).all()


def test_posterior_variances_are_clipped_by_rounding_only() -> None:
    """Thirty points on a short line: k − ‖V‖² + ‖FᵀV‖² is negative by rounding at the most."""
    X = torch.linspace(0, 1, 30, dtype=torch.float64)[:, None]
    gp = SparseGP(RBFKernel(), X, noise=1e-4)
    posterior = gp.posterior(Dataset.of(X, torch.sin(X[:, 0])))
    raw = posterior.covariance(X)[0].diagonal()
    assert raw.min() > -1e-9
    assert (posterior.predict(X).variance >= 0).all()


def test_posterior_wrong_columns_raise() -> None:
    _, _, posterior = fitted()
    with pytest.raises(InputError, match="1 columns"):
        posterior.predict(torch.zeros(3, 2, dtype=torch.float64))


@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_cross_covariance_equals_kernel(offset: float) -> None:
    kernel: Any = ScaleKernel(RBFKernel(ard_num_dims=3)).double()
    starts: Any = {"outputscale": 2.5, "base_kernel.lengthscale": torch.tensor([[0.6, 0.8, 1.1]])}
    kernel.initialize(**starts)
    generator = torch.Generator().manual_seed(0)
    rows, points = (
        offset + torch.randn(n, 3, dtype=torch.float64, generator=generator) for n in (9, 5)
    )
    scaled = (rows[:, None] - points) / kernel.base_kernel.lengthscale
    dense = 2.5 * torch.exp(-0.5 * scaled.square().sum(-1))
    k, kff = cross_covariance(kernel, points)(rows)
    # Differences of numbers around 1e4 carry twelve digits.
    torch.testing.assert_close(k, dense, rtol=1e-12 if offset == 0 else 1e-9, atol=0)
    torch.testing.assert_close(kff, torch.full((9,), 2.5, dtype=torch.float64))
    other, _ = cross_covariance(kernel, points)(rows.requires_grad_())
    torch.testing.assert_close(other, dense)
    assert torch.autograd.grad(other.sum(), rows)[0].abs().sum() > 0


CROSS: dict[str, Callable[[], Kernel]] = {
    "matern32": lambda: ScaleKernel(MaternKernel(nu=1.5, ard_num_dims=3)),
    "matern52": lambda: ScaleKernel(MaternKernel(nu=2.5)),
    "columns": lambda: ScaleKernel(MaternKernel(nu=1.5, ard_num_dims=2, active_dims=(2, 0))),
    "linear": lambda: LinearKernel(ard_num_dims=3),
    "linear column": lambda: LinearKernel(active_dims=(1,)),
    "sum": lambda: AdditiveKernel(
        ScaleKernel(RBFKernel()), LinearKernel(), ScaleKernel(MaternKernel(nu=0.5))
    ),
    "product": lambda: ScaleKernel(RBFKernel()) * LinearKernel(),
}


@pytest.mark.parametrize("kernel", CROSS.values(), ids=CROSS)
def test_cross_covariance_of_any_kernel_equals_gpytorch(kernel: Callable[[], Kernel]) -> None:
    k = kernel().double()
    g = torch.Generator().manual_seed(0)
    for parameter in k.parameters():
        parameter.requires_grad_(False).add_(torch.randn(parameter.shape, generator=g))
    X, Z = (3 + torch.randn(n, 3, dtype=torch.float64, generator=g) for n in (9, 5))
    # Rows that coincide with inducing points are as accurate as others.
    X[:2] = Z[:2]
    expected, variances = covariance(k, X, Z), prior_variance(k, X)
    for rows in (X, X.clone().requires_grad_(), X[:1], X[:0]):
        found, kff = cross_covariance(k, Z)(rows)
        assert found.requires_grad == rows.requires_grad
        torch.testing.assert_close(found, expected[: len(rows)], rtol=1e-10, atol=1e-13)
        torch.testing.assert_close(kff, variances[: len(rows)], rtol=1e-12, atol=0)
    empty, _ = cross_covariance(k, Z[:0])(X)
    assert empty.shape == (9, 0)


@pytest.mark.parametrize("wide", [0.1, 1.7])
def test_posterior_variances_equal_definition_for_wide_q(
    wide: float,
) -> None:
    generator = torch.Generator().manual_seed(1)
    Z, new = (torch.randn(n, 2, dtype=torch.float64, generator=generator) for n in (6, 11))
    factor = wide * torch.randn(3, 6, 6, dtype=torch.float64, generator=generator)
    kernel: Any = ScaleKernel(RBFKernel()).double()
    posterior = Posterior(
        kernel,
        Z,
        mean=ZeroMean(),
        likelihood=GaussianLikelihood(),
        q_mean=torch.randn(6, 3, dtype=torch.float64, generator=generator),
        q_factor=factor,
    )
    V = torch.linalg.solve_triangular(posterior.L, covariance(kernel, Z, new), upper=False)
    expected = torch.stack(
        [
            kernel.outputscale - V.square().sum(0) + (F.mT @ V).square().sum(0)
            for F in posterior.q_factor
        ],
        1,
    )
    found = posterior.predict(new)
    torch.testing.assert_close(found.variance, expected)
    torch.testing.assert_close(found.mean, V.mT @ posterior.q_mean)
    assert bool((posterior.signs < 0).any()) == (wide > 1)


@pytest.mark.parametrize(("D", "lengthscale", "noise"), [(1, 1.0, 1e-2), (2, 1.0, 1e-4)])
def test_posterior_single_precision_product_equals_solve(
    D: int, lengthscale: float, noise: float
) -> None:
    """128 points so close that cond(K_uu) is 1e13: what limits both is k(x, Z) in seven digits.

    The truth is the same numbers in double precision.
    """
    generator = torch.Generator().manual_seed(0)
    X = 4 * torch.rand(600, D, dtype=torch.float64, generator=generator) - 2
    kernel: Any = ScaleKernel(RBFKernel())
    kernel.initialize(**{"base_kernel.lengthscale": lengthscale, "outputscale": 1.0})
    rows = Dataset.of(X.float(), torch.sin(2 * X[:, 0]).float())
    single = SparseGP(kernel, rows.X[:128], noise=noise).posterior(rows)
    new = (4 * torch.rand(500, D, dtype=torch.float64, generator=generator) - 2).float()
    double = deepcopy(single).double()
    parts: Any = {n: getattr(double, n) for n in ("mean", "likelihood", "q_mean", "q_factor", "L")}
    truth = Posterior(double.kernel, double.Z, **parts).predict(new.double())
    V = torch.linalg.solve_triangular(
        single.L, covariance(single.kernel, single.Z, new), upper=False
    )
    FV = single.q_factor.mT @ V
    solved = prior_variance(single.kernel, new) - V.square().sum(0) + FV.square().sum(1)[0]
    found = single.predict(new)
    errors = [
        (a.double() - truth.variance[:, 0]).abs().max().item()
        for a in (found.variance[:, 0], solved)
    ]
    assert errors[0] < 5 * errors[1]
    assert errors[0] < 2e-5
    assert (found.mean.double() - truth.mean).abs().max() < 3e-3


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


KERNELS = {"rbf": lambda: ScaleKernel(RBFKernel()), "matern": lambda: MaternKernel(nu=1.5)}
kernels = pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS.keys())


def fitted_joint_process(kernel, *, P: int = 2, own_factors: bool = False) -> Posterior:
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
def test_joint_posterior_batches_are_joint_over_rows(kernel, own_factors: bool, q: int) -> None:
    posterior = fitted_joint_process(kernel, own_factors=own_factors)
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
def test_joint_posterior_conditioning_equals_joint_normal(
    kernel, own_factors: bool, q: int
) -> None:
    """Rows in three batches, four fantasies of each, noise of each row and output."""
    posterior = fitted_joint_process(kernel, own_factors=own_factors)
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


def test_joint_posterior_conditioning_twice_equals_once() -> None:
    process = JointPosterior(fitted_joint_process(KERNELS["matern"]))
    X, Y, noise = draw(5, 2, seed=8), draw(5, 2, seed=9), torch.full((5, 2), 0.2).double()
    once = process.condition_on(X, Y, noise=noise)
    first = process.condition_on(X[:2], Y[:2], noise=noise[:2])
    twice = first.condition_on(X[2:], Y[2:], noise=noise[2:])
    T = draw(3, 4, 2, seed=12)
    for one, two in zip(once(T), twice(T), strict=True):
        torch.testing.assert_close(one, two)


def test_joint_posterior_no_observations_keeps_batches() -> None:
    process = JointPosterior(fitted_joint_process(KERNELS["rbf"]))
    empty = process.condition_on(draw(0, 2), draw(7, 0, 2), noise=draw(0, 2))
    assert empty.batch_shape == (7,)
    T = draw(4, 2, seed=12)
    mean, cov = empty(T)
    torch.testing.assert_close(mean, process(T)[0].expand(7, 2, 4))
    torch.testing.assert_close(cov, process(T)[1].expand(7, 2, 4, 4))


def test_joint_posterior_gradients_reach_all_inputs() -> None:
    posterior = fitted_joint_process(KERNELS["rbf"])
    noise = torch.full((2, 2), 0.2).double()

    def outcome(T: Tensor, X: Tensor, Y: Tensor) -> tuple[Tensor, Tensor]:
        return JointPosterior(posterior, X=X, Y=Y, noise=noise)(T)

    arguments = (draw(3, 2, 2, seed=1), draw(2, 2, seed=2), draw(2, 2, seed=3))
    assert torch.autograd.gradcheck(outcome, [a.requires_grad_() for a in arguments])


def test_joint_posterior_follows_dtype() -> None:
    noise = torch.full((5, 2), 0.2).double()
    process = JointPosterior(fitted_joint_process(KERNELS["rbf"])).condition_on(
        draw(5, 2), draw(5, 2), noise=noise
    )
    T = draw(3, 2, seed=4)
    mean = process(T)[0]
    single = process.float()(T.float())[0]
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), mean, rtol=1e-3, atol=1e-3)


def draw_updated_posterior(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def model(P: int = 2) -> tuple[SparseGP, Dataset, Dataset]:
    X = 2 * draw_updated_posterior(40, 2)
    Y = (
        torch.sin(X @ draw_updated_posterior(2, P, seed=1))
        + 0.5
        + 0.1 * draw_updated_posterior(40, P, seed=2)
    )
    mean = ConstantMean().double()
    mean.initialize(constant=0.25)
    made = SparseGP(ScaleKernel(MaternKernel(nu=1.5)), X[:7] + 0.1, mean=mean, noise=0.05)
    made.kernel.initialize(outputscale=1.7)
    return made, Dataset(X[:30], Y[:30]), Dataset(X[30:], Y[30:])


@pytest.mark.parametrize("P", [1, 2])
def test_condition_on_equals_fit_of_all_rows(P: int) -> None:
    made, first, more = model(P)
    together = Dataset(torch.cat([first.X, more.X]), torch.cat([first.Y, more.Y]))
    found = made.posterior(first).condition_on(more)
    # K_*u (K_uu + K_uf K_fu/σ²)⁻¹ K_uf (y − mean)/σ², and the covariance likewise, by dense solves.
    T, s2 = 3 * draw_updated_posterior(9, 2, seed=5), made.noise.detach()
    with torch.no_grad():
        k = made.kernel
        Kuu, Kuf = k(made.candidates).to_dense(), k(made.candidates, together.X).to_dense()
        Kut, Ktt = k(made.candidates, T).to_dense(), k(T).to_dense()
    inner = Kuu + Kuf @ Kuf.mT / s2
    mean = 0.25 + Kut.mT @ torch.linalg.solve(inner, Kuf @ (together.Y - 0.25)) / s2
    cov = Ktt - Kut.mT @ torch.linalg.solve(Kuu, Kut) + Kut.mT @ torch.linalg.solve(inner, Kut)
    torch.testing.assert_close(found.predict(T).mean, mean, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(found.covariance(T)[0], cov, rtol=1e-7, atol=1e-7)


def test_condition_on_outputs_with_own_covariances() -> None:
    """Against Bayes' rule for u with u's own covariance matrices, output by output."""
    made, _, more = model(2)
    M = made.K
    factors = torch.stack(
        [torch.eye(M).double() * 0.5, 0.3 * draw_updated_posterior(M, M, seed=3).tril()]
    )
    factors[1].diagonal().copy_(torch.full((M,), 0.6))
    q = Posterior(
        made.kernel,
        made.candidates.detach(),
        mean=made.mean,
        likelihood=made.likelihood,
        q_mean=draw_updated_posterior(M, 2, seed=4),
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


def test_condition_on_two_steps_equal_one() -> None:
    made, first, more = model(1)
    whole = made.posterior(first).condition_on(more)
    half = made.posterior(first).condition_on(Dataset(more.X[:4], more.Y[:4]))
    steps = half.condition_on(Dataset(more.X[4:], more.Y[4:]))
    torch.testing.assert_close(whole.q_mean, steps.q_mean)
    torch.testing.assert_close(whole.gain.abs().sum(), steps.gain.abs().sum())


def test_condition_on_unsupported_raise() -> None:
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


@pytest.mark.parametrize(("scale", "wider"), [(0.9, False), (1.0, False), (1.5, True)])
def test_posterior_variances_equal_the_covariance_diagonal(scale: float, wider: bool) -> None:
    """With q narrower than the prior, equal to it (I − F Fᵀ = 0), and wider."""
    made, _, more = model(1)
    factor = scale * torch.eye(made.K, dtype=torch.float64)
    factor[0, 0] = 0.1
    q = Posterior(
        made.kernel,
        made.candidates.detach(),
        mean=made.mean,
        likelihood=made.likelihood,
        q_mean=draw_updated_posterior(made.K, 1, seed=4),
        q_factor=factor[None],
    )
    assert bool((q.signs < 0).any()) == wider
    dense = q.covariance(more.X)[0].diagonal()
    torch.testing.assert_close(q.predict(more.X).variance[:, 0], dense, rtol=0, atol=1e-11)
