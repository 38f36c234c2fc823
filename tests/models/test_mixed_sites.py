"""Several processes with other noise than Gaussian: enumeration, dense oracles, gradients."""

import pytest
import torch
from gpytorch import likelihoods
from gpytorch.kernels import MaternKernel, RBFKernel
from numpy.polynomial.hermite_e import hermegauss
from torch import Tensor

from winnowgp.bounds import row_blocks
from winnowgp.data import Dataset
from winnowgp.errors import InputError
from winnowgp.gradients import all_masks
from winnowgp.models import MultiOutputGP, MultiOutputPosterior, VariationalGP
from winnowgp.models.process_stream import ProcessStream
from winnowgp.models.target_likelihoods import TargetLikelihoods

MIXING = torch.tensor([[1.0, 0.4], [-0.6, 1.1], [0.7, -0.5]], dtype=torch.float64)
OFFSET = torch.tensor([0.2, 0.8, -0.3], dtype=torch.float64)


def rows(N: int = 12) -> Dataset:
    """Return a measurement, a count and a class of each row, some of them missing."""
    g = torch.Generator().manual_seed(2)
    X = 4 * torch.rand(N, 1, generator=g, dtype=torch.float64)
    f = torch.sin(2 * X[:, 0])
    counts = torch.poisson((0.5 + f).exp(), generator=g)
    classes = (f + 0.3 * torch.randn(N, generator=g) > 0).double()
    Y = torch.stack([f + 0.1 * torch.randn(N, generator=g), counts, classes], 1)
    Y[::4, 1], Y[1::5, 2], Y[2, 0] = torch.nan, torch.nan, torch.nan
    weights = 0.5 + torch.rand(N, generator=g, dtype=torch.float64)
    return Dataset.of(X, Y, weights=weights, missing=True)


def model(*Z: Tensor, mixing: Tensor = MIXING) -> MultiOutputGP:
    kernels = [RBFKernel().double(), MaternKernel(1.5).double()]
    kernels[1].initialize(lengthscale=0.6)
    noise = likelihoods.GaussianLikelihood().double()
    noise.noise = torch.tensor(0.05)
    parts = [noise, likelihoods.PoissonLikelihood(), likelihoods.BernoulliLikelihood()]
    gp = MultiOutputGP(kernels, Z, mixing=mixing, likelihoods=parts)
    assert isinstance(gp.likelihood, TargetLikelihoods)
    with torch.no_grad():
        gp.likelihood.offset.copy_(OFFSET)
    return gp


def dense_bound(gp: MultiOutputGP, data: Dataset, m: Tensor, F: Tensor) -> Tensor:
    """Return the uncollapsed bound at q(u) = N(m, F Fᵀ), u of all processes, from dense blocks."""
    pairs = list(zip(gp.kernels, gp.candidate_sets, strict=True))
    Kuu = torch.block_diag(*(k(Z).to_dense() for k, Z in pairs))
    cross = [k(Z, data.X).to_dense() for k, Z in pairs]
    priors = torch.stack([k(data.X).to_dense().diagonal() for k, _ in pairs])
    nodes = [torch.from_numpy(each) for each in hermegauss(60)]
    x, w = nodes[0][:, None], nodes[1][:, None] / nodes[1].sum()
    assert isinstance(gp.likelihood, TargetLikelihoods)
    assert data.weights is not None
    total = torch.zeros((), dtype=torch.float64)
    for p, part in enumerate(gp.likelihood.parts):
        seen = ~torch.isnan(data.Y[:, p])
        Kug = torch.cat([W * K for W, K in zip(gp.mixing[p], cross, strict=True)])[:, seen]
        prior = gp.mixing[p].square() @ priors[:, seen]
        A = torch.linalg.solve(Kuu, Kug)
        mean = gp.likelihood.offset[p] + A.mT @ m
        variance = prior - (Kug * A).sum(0) + (F.mT @ A).square().sum(0)
        f = mean + variance.sqrt() * x
        y = data.Y[seen, p]
        if isinstance(part, likelihoods.BernoulliLikelihood):
            nats = torch.special.log_ndtr((2 * y - 1) * f)
        else:
            nats = part.forward(f).log_prob(y)
        total = total + (data.weights[seen] * (w * nats).sum(0)).sum()
    solved = torch.linalg.solve(Kuu, F)
    kl = 0.5 * (
        (F * solved).sum()
        + m @ torch.linalg.solve(Kuu, m)
        - len(m)
        + torch.logdet(Kuu)
        - 2 * F.diagonal().abs().log().sum()
    )
    return total - kl


def test_optimal_q_is_a_stationary_point_of_the_dense_bound() -> None:
    data = rows()
    gp = model(data.X[:3], data.X[4:8])
    posterior = gp.posterior(data)
    L = torch.block_diag(*posterior.factors)
    m = (L @ posterior.q_mean).requires_grad_()
    S = L @ posterior.q_factor @ posterior.q_factor.mT @ L.mT
    F = torch.linalg.cholesky(S).requires_grad_()
    bound = dense_bound(gp, data, m, F.tril())
    assert gp.fixed_bound(data) == pytest.approx(bound.item(), abs=1e-6)
    slopes = torch.autograd.grad(bound, [m, F])
    # In the coordinates of the prior.
    torch.testing.assert_close(L.mT @ slopes[0], torch.zeros_like(m), rtol=0, atol=1e-4)
    torch.testing.assert_close((L.mT @ slopes[1]).tril(), torch.zeros_like(F), rtol=0, atol=1e-3)


def test_chunked_bound_has_the_gradient_of_the_dense_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    data = rows()
    gp = model(data.X[:3], data.X[4:8])
    monkeypatch.setattr(row_blocks, "block_size", lambda *_: 5)
    monkeypatch.setattr(row_blocks, "JITTER", 1e-12)
    posterior = gp.posterior(data)
    L = torch.block_diag(*posterior.factors)
    m, F = L @ posterior.q_mean, L @ posterior.q_factor
    F = torch.linalg.cholesky(F @ F.mT)
    # At the optimum, q(v) may be held fixed in any coordinates.
    names = [name for name, p in gp.named_parameters() if p.requires_grad]
    expected = torch.autograd.grad(dense_bound(gp, data, m, F), list(gp.parameters()))
    value = gp.chunked_bound(data)()
    value.backward()
    for name, parameter, oracle in zip(names, gp.parameters(), expected, strict=True):
        assert parameter.grad is not None, name
        torch.testing.assert_close(
            parameter.grad, oracle, rtol=2e-3, atol=2e-3, msg=lambda text, name=name: name + text
        )


def test_gaussian_parts_equal_gaussian_noise() -> None:
    data = rows()
    two = Dataset.of(data.X, torch.sin(data.X + torch.arange(3)))
    noise = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)
    parts = []
    for each in noise:
        parts.append(likelihoods.GaussianLikelihood().double())
        parts[-1].noise = each
    kernels = [RBFKernel().double(), MaternKernel(1.5).double()]
    Z = [data.X[:3], data.X[4:8]]
    plain = MultiOutputGP(kernels, Z, mixing=MIXING, noise=noise)
    sites = MultiOutputGP(kernels, Z, mixing=MIXING, likelihoods=parts)
    assert sites.fixed_bound(two) == pytest.approx(plain.fixed_bound(two), abs=1e-8)
    one, other = plain.posterior(two), sites.posterior(two)
    for observed in (False, True):
        torch.testing.assert_close(
            one.predict(data.X, observed=observed).variance,
            other.predict(data.X, observed=observed).variance,
        )
    torch.testing.assert_close(one.log_density(two.X, two.Y), other.log_density(two.X, two.Y))


def test_identity_mixing_equals_variational_models() -> None:
    data = rows()
    X, counts = data.X, data.Y[:, 1].nan_to_num(2.0)
    both = torch.stack([counts, counts.flip(0)], 1)
    kernels = [RBFKernel().double(), MaternKernel(1.5).double()]
    Z = [X[:3], X[4:8]]
    parts = [likelihoods.PoissonLikelihood(), likelihoods.PoissonLikelihood()]
    gp = MultiOutputGP(kernels, Z, mixing=torch.eye(2).double(), likelihoods=parts)
    total, predictions = 0.0, []
    for p in range(2):
        one = VariationalGP(kernels[p], Z[p], likelihood=likelihoods.PoissonLikelihood())
        best = one.with_best_q(Dataset.of(X, both[:, p]))
        total += best.fixed_bound(Dataset.of(X, both[:, p]))
        predictions.append(best.posterior(data).predict(X, observed=True).mean)
    joint = Dataset.of(X, both)
    assert gp.fixed_bound(joint) == pytest.approx(total, abs=1e-6)
    mean = gp.posterior(joint).predict(X, observed=True).mean
    torch.testing.assert_close(mean, torch.cat(predictions, 1), rtol=1e-5, atol=1e-5)


def test_statistics_equal_the_objective_for_all_candidates_and_nearly_for_subsets() -> None:
    data, masks = rows(), all_masks(4)
    gp = model(data.X[:2], data.X[4:6])
    exact = gp.subset_objective(data).value(masks)
    surrogate = gp.subset_statistics(data).value(masks)
    assert surrogate[-1].item() == pytest.approx(exact[-1].item(), abs=1e-6)
    # To first order: the differences between subsets are tens of nats.
    torch.testing.assert_close(surrogate, exact, rtol=0, atol=1.0)
    assert torch.equal(surrogate.argsort(), exact.argsort())


def test_targets_that_a_likelihood_forbids_are_refused() -> None:
    data = rows()
    gp = model(data.X[:3], data.X[4:8])
    wrong = data.Y.clone()
    wrong[0, 2] = 3.0
    with pytest.raises(InputError, match=r"target 2 \(counted from 0\): Bernoulli targets"):
        gp.bound(Dataset.of(data.X, wrong, missing=True))
    noisy = Dataset.of(data.X, data.Y, noise=torch.ones_like(data.Y), missing=True)
    with pytest.raises(InputError, match="known noise variances need Gaussian noise"):
        gp.posterior(data).condition_on(noisy)
    with pytest.raises(InputError, match="samples of observations need Gaussian noise"):
        gp.posterior(data).sample(data.X[:2], 1, observed=True)
    with pytest.raises(InputError, match="pass `noise` for Gaussian noise, or `likelihoods`"):
        MultiOutputGP(gp.kernels, gp.candidate_sets, mixing=MIXING)


def prior(gp: MultiOutputGP, *, like: MultiOutputPosterior) -> MultiOutputPosterior:
    """Return the posterior of no rows."""
    return MultiOutputPosterior(
        gp.kernels,
        gp.candidate_sets,
        mixing=gp.mixing.detach(),
        likelihood=gp.likelihood,
        q_mean=torch.zeros_like(like.q_mean),
        q_factor=torch.eye(like.M).double(),
    )


def test_prior_conditioned_on_all_rows_is_the_optimal_posterior() -> None:
    data = rows()
    gp = model(data.X[:3], data.X[4:8])
    expected = gp.posterior(data)
    none = prior(gp, like=expected)
    assert none.log_predictive(data).item() == pytest.approx(gp.fixed_bound(data), abs=1e-5)
    conditioned = none.condition_on(data)
    for new, old in zip(conditioned.processes(data.X), expected.processes(data.X), strict=True):
        torch.testing.assert_close(new, old, rtol=0, atol=2e-3)


def test_conditioned_posterior_is_a_stationary_point_given_earlier_rows() -> None:
    """The dense bound with the earlier posterior in place of the prior."""
    data = rows()
    first, second = data.part(torch.arange(7)), data.part(torch.arange(7, 12))
    gp = model(data.X[:3], data.X[4:8])
    before = gp.posterior(first)
    after = before.condition_on(second)
    eye = torch.eye(before.M).double()

    def bound(m: Tensor, F: Tensor) -> Tensor:
        q = torch.distributions.MultivariateNormal(m, scale_tril=F.tril())
        S = before.q_factor @ before.q_factor.mT
        p = torch.distributions.MultivariateNormal(before.q_mean, S)
        L = torch.block_diag(*before.factors)
        # `dense_bound` subtracts the divergence from the prior, N(0, I) of whitened values.
        whitened = torch.distributions.MultivariateNormal(torch.zeros_like(m), eye)
        kl = torch.distributions.kl_divergence
        return dense_bound(gp, second, L @ m, L @ F.tril()) + kl(q, whitened) - kl(q, p)

    m = after.q_mean.clone().requires_grad_()
    F = torch.linalg.cholesky(after.q_factor @ after.q_factor.mT).requires_grad_()
    value = bound(m, F)
    assert before.log_predictive(second).item() == pytest.approx(value.item(), abs=1e-5)
    slopes = torch.autograd.grad(value, [m, F])
    torch.testing.assert_close(slopes[0], torch.zeros_like(m), rtol=0, atol=2e-3)
    torch.testing.assert_close(slopes[1].tril(), torch.zeros_like(F), rtol=0, atol=2e-3)


def test_stream_of_sites_has_the_surrogate_of_all_candidates() -> None:
    data = rows()
    first, second = data.part(torch.arange(7)), data.part(torch.arange(7, 12))
    posterior = model(data.X[:3], data.X[4:7]).posterior(first)
    stream = ProcessStream.of(posterior, second, [data.X[8:9], data.X[10:11]])
    assert (
        pytest.approx(float(second.weighted((~torch.isnan(second.Y)).double()).sum()))
        == stream.moments.N
    )
    whole = stream.selected(torch.ones(8, dtype=torch.bool))
    expected = stream.posterior.condition_on(second)
    for new, old in zip(whole.processes(data.X), expected.processes(data.X), strict=True):
        torch.testing.assert_close(new, old, rtol=0, atol=1e-4)
    # Its bound is that of the likelihoods.
    values = stream.statistics().value(torch.ones(1, 8, dtype=torch.bool))
    density = stream.posterior.log_predictive(second).item()
    assert values.item() == pytest.approx(density, abs=1e-5)
