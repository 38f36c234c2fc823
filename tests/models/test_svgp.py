"""VariationalGP against dense references."""

import pickle
from copy import deepcopy

import numpy as np
import pytest
import torch
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import (
    BernoulliLikelihood,
    GaussianLikelihood,
    Likelihood,
    MultitaskGaussianLikelihood,
    PoissonLikelihood,
    SoftmaxLikelihood,
)
from gpytorch.means import ConstantMean
from torch import Tensor
from torch.distributions import MultivariateNormal, kl_divergence

from winnowgp.data import Dataset
from winnowgp.errors import InputError
from winnowgp.gradients import all_masks
from winnowgp.models import SparseGP, VariationalGP
from winnowgp.models.kernels import covariance, kernel_blocks, prior_mean
from winnowgp.models.likelihoods import observation_model
from winnowgp.models.observations import gaussian_noise, target_noise

SEEN: dict[str, tuple[Likelihood, int]] = {
    "bernoulli": (BernoulliLikelihood(), 1),
    "poisson": (PoissonLikelihood(), 2),
    "softmax": (SoftmaxLikelihood(num_classes=3, mixing_weights=False), 1),
}
battery = pytest.mark.parametrize("seen", SEEN)


def data(seen: str = "bernoulli", N: int = 18, dtype: torch.dtype = torch.float64) -> Dataset:
    g = torch.Generator().manual_seed(7)
    X = 4 * torch.rand(N, 2, generator=g, dtype=torch.float64)
    f = torch.sin(X @ torch.tensor([[1.0, -0.4], [0.5, 1.2]], dtype=torch.float64))
    Y = {
        "bernoulli": (f[:, :1] > 0).double(),
        "poisson": (4 * f + 5).floor(),
        "softmax": (f[:, :1] > -0.3).double() + (f[:, :1] > 0.4).double(),
        "gaussian": f[:, :1],
    }[seen]
    return Dataset.of(X.to(dtype), Y.to(dtype))


def model(seen: str = "bernoulli", K: int = 5, *, random: bool = True) -> VariationalGP:
    """Return a model whose q(u) is neither the prior nor optimal."""
    likelihood, targets = SEEN[seen]
    mean = ConstantMean()
    mean.constant = 0.2
    kernel = ScaleKernel(RBFKernel(ard_num_dims=2))
    gp = VariationalGP(
        kernel, data(seen).X[:K] + 0.1, likelihood=likelihood, targets=targets, mean=mean
    )
    if random:
        g = torch.Generator().manual_seed(8)
        with torch.no_grad():
            gp.q_mean.copy_(torch.randn(gp.q_mean.shape, generator=g, dtype=torch.float64))
            noise = torch.randn(gp.q_factor.shape, generator=g, dtype=torch.float64)
            gp.q_factor.add_(0.3 * noise)
    return gp


def constant(gp: VariationalGP) -> float:
    return prior_mean(gp.mean, torch.zeros(1, 2, dtype=torch.float64)).item()


def dense_q(gp: VariationalGP) -> tuple[Tensor, Tensor, Tensor]:
    """Mean `[K P]` and covariances `[P K K]` of u, and K_uu."""
    with torch.no_grad():
        Kuu = covariance(gp.kernel, gp.candidates, gp.candidates)
        LF = torch.linalg.cholesky(Kuu) @ gp.q_factor.tril()
        return torch.linalg.cholesky(Kuu) @ gp.q_mean, LF @ LF.mT, Kuu


def dense_marginals(gp: VariationalGP, X: Tensor) -> tuple[Tensor, Tensor]:
    """Mean `[N P]` and covariance `[P N N]` of f under q, with matrices in u-space."""
    m, S, Kuu = dense_q(gp)
    with torch.no_grad():
        A = covariance(gp.kernel, X, gp.candidates) @ Kuu.inverse()
        prior = covariance(gp.kernel, X, X)
    return constant(gp) + A @ m, prior - A @ (Kuu - S) @ A.mT


def dense_bound(gp: VariationalGP, rows: Dataset) -> Tensor:
    """Σ E_q log p − Σ_p KL with torch's own KL."""
    mean, cov = dense_marginals(gp, rows.X)
    variance = cov.diagonal(dim1=1, dim2=2).mT
    nats = observation_model(gp.likelihood).expected_log_prob(rows.Y, mean, variance).sum()
    m, S, Kuu = dense_q(gp)
    q, prior = MultivariateNormal(m.mT, S), MultivariateNormal(torch.zeros(gp.K).to(m), Kuu)
    return nats.detach() - kl_divergence(q, prior).sum()


@battery
def test_variational_bound_equals_dense_definition(seen: str) -> None:
    gp, rows = model(seen), data(seen)
    ours = gp.bound(rows).detach()
    torch.testing.assert_close(ours, dense_bound(gp, rows), rtol=1e-9, atol=1e-9)
    # The upper triangle of a factor is ignored.
    with torch.no_grad():
        gp.q_factor.add_(torch.ones_like(gp.q_factor).triu(1))
    torch.testing.assert_close(gp.bound(rows).detach(), ours)


@battery
def test_variational_gp_starts_at_prior(seen: str) -> None:
    gp, rows = model(seen, random=False), data(seen)
    prediction = gp.posterior(rows).predict(rows.X)
    torch.testing.assert_close(prediction.mean, torch.full_like(prediction.mean, constant(gp)))
    variance = kernel_blocks(gp.kernel, rows.X, rows.X).kff.detach()
    torch.testing.assert_close(prediction.variance, variance[:, None].expand(-1, gp.P))


def parts(rows: Dataset, size: int) -> list[Dataset]:
    order = torch.randperm(rows.N, generator=torch.Generator().manual_seed(9))
    return [Dataset.of(rows.X[i], rows.Y[i]) for i in order.split(size)]


def gradients(value: Tensor, gp: VariationalGP) -> list[Tensor]:
    return list(torch.autograd.grad(value, [*gp.parameters()], retain_graph=True))


@battery
def test_variational_minibatches_average_to_bound_and_gradient(seen: str) -> None:
    gp, rows = model(seen), data(seen)
    batches = parts(rows, 6)
    assert len(batches) == 3
    whole = gp.bound(rows)
    values = torch.stack([gp.bound(batch, total=rows.N) for batch in batches])
    assert values.std() > 0.1
    torch.testing.assert_close(values.mean(), whole, rtol=1e-10, atol=1e-10)
    for ours, theirs in zip(gradients(values.mean(), gp), gradients(whole, gp), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-8)


@battery
def test_variational_minibatches_average_to_subset_scores(seen: str) -> None:
    gp, rows, masks = model(seen), data(seen), all_masks(5)[::4]
    whole = gp.subset_objective(rows)
    batches = [gp.subset_objective(batch, total=rows.N) for batch in parts(rows, 6)]
    mean = torch.stack([batch.value(masks) for batch in batches]).mean(0)
    torch.testing.assert_close(mean, whole.value(masks), rtol=1e-10, atol=1e-10)
    ours, theirs = (gradients(v.sum(), gp) for v in (mean, whole.value(masks)))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)
    weights = torch.rand(4, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    mean = torch.stack([batch.relaxed_value(weights) for batch in batches]).mean(0)
    torch.testing.assert_close(mean, whole.relaxed_value(weights), rtol=1e-10, atol=1e-10)


@battery
def test_uncollapsed_objective_subset_equals_pruned_bound(seen: str) -> None:
    gp, rows, masks = model(seen, K=4), data(seen), all_masks(4)
    together = gp.subset_objective(rows).value(masks).detach()
    for mask, value in zip(masks, together, strict=True):
        pruned = gp.prune(mask)
        assert int(mask.sum()) == pruned.K
        torch.testing.assert_close(pruned.bound(rows).detach(), value, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(together[-1], gp.bound(rows).detach(), rtol=1e-10, atol=1e-10)
    weighted = gp.subset_objective(rows).relaxed_value(masks.double()).detach()
    torch.testing.assert_close(weighted, together, rtol=1e-9, atol=1e-9)


def test_variational_prune_keeps_marginal_of_u() -> None:
    gp, mask = model("poisson"), torch.tensor([True, False, True, True, False])
    m, S, _ = dense_q(gp)
    pruned_m, pruned_S, _ = dense_q(gp.prune(mask))
    torch.testing.assert_close(pruned_m, m[mask], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(pruned_S, S[:, mask][:, :, mask], rtol=1e-9, atol=1e-9)


def test_uncollapsed_objective_is_differentiable() -> None:
    gp, rows = model(), data()
    masks = all_masks(5)[[0b10110, 0b01000]]
    gp.subset_objective(rows).value(masks).sum().backward()
    for name, parameter in gp.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


@battery
def test_with_candidates_keeps_process_at_new_locations(seen: str) -> None:
    gp = model(seen)
    Z = 4 * torch.rand(4, 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    moved = gp.with_candidates(Z)
    mean, cov = dense_marginals(gp, Z)
    m, S, _ = dense_q(moved)
    torch.testing.assert_close(constant(gp) + m, mean, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(S, cov, rtol=1e-8, atol=1e-8)
    before, after = (g.posterior(data(seen)).predict(Z) for g in (gp, moved))
    torch.testing.assert_close(after.mean, before.mean, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(after.variance, before.variance, rtol=1e-8, atol=1e-8)


@battery
def test_with_candidates_permutation_keeps_bound(seen: str) -> None:
    gp, rows = model(seen), data(seen)
    for order in (torch.arange(5), torch.tensor([3, 0, 4, 1, 2])):
        same = gp.with_candidates(gp.candidates.detach()[order])
        torch.testing.assert_close(same.bound(rows), gp.bound(rows), rtol=1e-8, atol=1e-8)


def test_with_candidates_superset_keeps_process() -> None:
    gp, rows = model(), data()
    more = gp.with_candidates(torch.cat([gp.candidates.detach(), rows.X[9:12]]))
    X = 4 * torch.rand(6, 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    before, after = (g.posterior(rows).covariance(X) for g in (gp, more))
    torch.testing.assert_close(after, before, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(more.bound(rows), gp.bound(rows), rtol=1e-7, atol=1e-7)


@battery
def test_variational_posterior_equals_dense_one(seen: str) -> None:
    gp, rows = model(seen), data(seen)
    posterior = gp.posterior(rows)
    mean, cov = dense_marginals(gp, rows.X)
    ours = posterior.predict(rows.X)
    torch.testing.assert_close(ours.mean, mean, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(posterior.predict_mean(rows.X), mean, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(posterior.covariance(rows.X), cov, rtol=1e-8, atol=1e-8)
    assert not any(p.requires_grad for p in posterior.parameters())
    with pytest.raises(InputError, match="no Gaussian noise"):
        posterior.covariance(rows.X, observed=True)
    seen_p = posterior.predict(rows.X, observed=True)
    if seen == "softmax":
        assert seen_p.mean.shape == (rows.N, 3)
        chosen = seen_p.mean.gather(1, rows.Y.long())
        density = posterior.log_density(rows.X, rows.Y).exp()
        torch.testing.assert_close(density, chosen, rtol=1e-9, atol=0)


@battery
def test_variational_derived_models_are_independent(seen: str) -> None:
    gp, rows = model(seen), data(seen)
    before = gp.bound(rows).item()
    gp.candidates.requires_grad_(False)
    made = [
        gp.prune(torch.tensor([True, False, True, True, False])),
        gp.with_candidates(rows.X[:3]),
        gp.with_best_q(rows),
    ]
    for other in made:
        assert not other.candidates.requires_grad
        for name in ("q_mean", "q_factor"):
            parameter = getattr(other, name)
            assert isinstance(parameter, torch.nn.Parameter)
            assert parameter.requires_grad
            # Optimisers of torch flatten by views.
            assert parameter.is_contiguous(), name
        assert torch.equal(other.q_factor, other.q_factor.tril())
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.add_(0.1)
    assert gp.bound(rows).item() == before


@battery
def test_variational_gp_survives_pickle_and_deepcopy(seen: str) -> None:
    gp, rows = model(seen), data(seen)
    gp.bound(rows).backward()
    for other in (pickle.loads(pickle.dumps(gp)), deepcopy(gp)):
        torch.testing.assert_close(other.bound(rows), gp.bound(rows), rtol=1e-10, atol=1e-12)
        assert other.fixed_bound(rows) == gp.fixed_bound(rows)
        assert other.targets == gp.targets
    posterior = gp.with_best_q(rows).posterior(rows)
    again = pickle.loads(pickle.dumps(posterior))
    torch.testing.assert_close(
        again.log_density(rows.X, rows.Y),
        posterior.log_density(rows.X, rows.Y),
        rtol=1e-10,
        atol=1e-12,
    )


@battery
def test_variational_gp_state_dict_round_trip(seen: str) -> None:
    gp, rows = model(seen), data(seen)
    fresh = model(seen, random=False)
    fresh.load_state_dict(gp.state_dict())
    torch.testing.assert_close(fresh.bound(rows), gp.bound(rows), rtol=1e-10, atol=1e-12)


@battery
def test_variational_single_precision_agrees(seen: str) -> None:
    double, rows = model(seen, random=False), data(seen)
    likelihood, targets = SEEN[seen]
    kernel = ScaleKernel(RBFKernel(ard_num_dims=2))
    mean = ConstantMean()
    mean.constant = 0.2
    single = VariationalGP(
        kernel,
        double.candidates.detach().float(),
        likelihood=likelihood,
        targets=targets,
        mean=mean,
    )
    few = data(seen, dtype=torch.float32)
    assert {p.dtype for p in single.parameters()} == {torch.float32}
    best = single.with_best_q(few)
    assert best.bound(few).dtype == torch.float32
    assert best.bound(few).item() == pytest.approx(double.fixed_bound(rows), abs=1e-3)
    masks = all_masks(5)
    ours, theirs = single.subset_statistics(few), double.subset_statistics(rows)
    torch.testing.assert_close(ours.value(masks).double(), theirs.value(masks), rtol=2e-4, atol=0)
    single.chunked_bound(few)().backward()
    double.chunked_bound(rows)().backward()
    for (name, a), b in zip(single.named_parameters(), double.parameters(), strict=True):
        if a.grad is not None:
            torch.testing.assert_close(a.grad.double(), b.grad, rtol=0.02, atol=0.02, msg=name)
    gp = single.prune(masks[21]).with_candidates(few.X[:2])
    assert torch.isfinite(gp.posterior(few).log_density(few.X, few.Y)).all()
    relaxed = best.subset_objective(few).relaxed_value(0.5 * masks.float())
    assert torch.isfinite(relaxed).all()


def test_variational_no_points_is_prior() -> None:
    rows = data()
    gp = model().prune(torch.zeros(5, dtype=torch.bool))
    assert gp.K == 0
    variance = kernel_blocks(gp.kernel, rows.X, rows.X).kff[:, None].detach()
    mean = torch.full_like(variance, constant(gp))
    nats = observation_model(gp.likelihood).expected_log_prob(rows.Y, mean, variance).sum()
    torch.testing.assert_close(gp.bound(rows).detach(), nats)
    assert gp.fixed_bound(rows) == pytest.approx(nats.item())
    assert gp.with_best_q(rows).K == 0
    torch.testing.assert_close(gp.chunked_bound(rows)().detach(), nats)
    back = gp.with_candidates(rows.X[:3])
    torch.testing.assert_close(back.bound(rows).detach(), nats)


def test_variational_bound_grows_with_points() -> None:
    rows, gp = data(), model()
    few, all_rows = gp.fixed_bound(rows), gp.dense_bound(rows)().item()
    assert few < all_rows < 0
    assert gp.upper_bound(rows) == np.inf
    assert gp.chunked_cost(rows) > 0


def test_variational_gp_accepts_any_kernel() -> None:
    rows = data()
    gp = VariationalGP(MaternKernel(nu=1.5), rows.X[:4], likelihood=BernoulliLikelihood())
    best = gp.with_best_q(rows)
    assert best.bound(rows) > gp.bound(rows)
    gp.chunked_bound(rows)().backward()
    assert gp.candidates.grad is not None
    assert torch.isfinite(gp.candidates.grad).all()


def test_variational_frozen_locations_get_no_gradient() -> None:
    rows, gp = data(), model()
    gp.candidates.requires_grad_(False)
    gp.chunked_bound(rows)().backward()
    assert gp.candidates.grad is None
    assert gp.mean.raw_constant.grad is not None


def test_variational_gp_copies_its_parts() -> None:
    kernel, mean, likelihood = ScaleKernel(RBFKernel()), ConstantMean(), GaussianLikelihood()
    Z = torch.zeros(2, 1, dtype=torch.float64)
    gp = VariationalGP(kernel, Z, likelihood=likelihood, mean=mean)
    for part in (kernel, mean, likelihood):
        assert all(p.dtype == torch.float32 for p in part.parameters())
    with torch.no_grad():
        gp.candidates.add_(1.0)
    assert (Z == 0).all()


def test_variational_gp_invalid_arguments_raise() -> None:
    Z = torch.zeros(3, 2, dtype=torch.float64)
    with pytest.raises(InputError, match=r"`likelihood`.*MultitaskGaussianLikelihood"):
        VariationalGP(RBFKernel(), Z, likelihood=MultitaskGaussianLikelihood(num_tasks=2))
    with pytest.raises(InputError, match="`candidates`"):
        VariationalGP(RBFKernel(), Z * float("nan"), likelihood=BernoulliLikelihood())
    with pytest.raises(InputError, match="batch shape"):
        VariationalGP(RBFKernel(batch_shape=torch.Size([2])), Z, likelihood=BernoulliLikelihood())
    with pytest.raises(InputError, match="one column of class numbers"):
        VariationalGP(RBFKernel(), Z, likelihood=SEEN["softmax"][0], targets=2)


QUESTIONS = {
    "bound": lambda gp, rows: gp.bound(rows),
    "subset_objective": lambda gp, rows: gp.subset_objective(rows),
    "subset_statistics": lambda gp, rows: gp.subset_statistics(rows),
    "fixed_bound": lambda gp, rows: gp.fixed_bound(rows),
    "chunked_bound": lambda gp, rows: gp.chunked_bound(rows),
    "dense_bound": lambda gp, rows: gp.dense_bound(rows),
    "with_best_q": lambda gp, rows: gp.with_best_q(rows),
}


@pytest.mark.parametrize("ask", QUESTIONS.values(), ids=QUESTIONS.keys())
def test_variational_mismatched_data_raise_in_every_method(ask) -> None:
    rows = data()
    with pytest.raises(InputError, match="has 1 target columns and the data have 2"):
        ask(model(), Dataset.of(rows.X, rows.Y.repeat(1, 2)))
    with pytest.raises(InputError, match="must be 0 or 1; got 2"):
        ask(model(), Dataset.of(rows.X, rows.Y + 1))


def known_noise() -> tuple[VariationalGP, Dataset]:
    """A Gaussian model with noise for each of two targets, and rows with more, some missing."""
    g = torch.Generator().manual_seed(4)
    rows = data("poisson")
    Y = rows.Y / 4 - 1
    Y[2, 0] = Y[5:8, 1] = torch.nan
    known = torch.rand(Y.shape, generator=g, dtype=torch.float64)
    weights = torch.linspace(0.5, 2.0, rows.N, dtype=torch.float64)
    gp = VariationalGP(
        ScaleKernel(RBFKernel()),
        rows.X[:5],
        likelihood=gaussian_noise(torch.tensor([0.1, 0.3], dtype=torch.float64)),
        targets=2,
    )
    with torch.no_grad():
        gp.q_mean.copy_(torch.randn(gp.q_mean.shape, generator=g, dtype=torch.float64))
        gp.q_factor.mul_(0.7)
    return gp, Dataset.of(rows.X, Y, weights=weights, noise=known, missing=True)


def test_variational_bound_with_known_noise_equals_dense_definition() -> None:
    gp, rows = known_noise()
    mean, cov = dense_marginals(gp, rows.X)
    assert rows.noise is not None
    assert rows.weights is not None
    noise = rows.noise + torch.tensor([0.1, 0.3]).double()
    square = (rows.Y - mean).square() + cov.diagonal(dim1=1, dim2=2).mT
    nats = -0.5 * (2 * torch.pi * noise).log() - 0.5 * square / noise
    m, S, Kuu = dense_q(gp)
    kl = kl_divergence(
        MultivariateNormal(m.mT, S), MultivariateNormal(torch.zeros(gp.K).to(m), Kuu)
    ).sum()
    dense = (rows.weights[:, None] * nats).nansum() - kl
    torch.testing.assert_close(gp.bound(rows).detach(), dense)
    batches = [rows.part(i) for i in torch.arange(rows.N).split(6)]
    average = torch.stack([gp.bound(batch, total=rows.N) for batch in batches]).mean()
    torch.testing.assert_close(average.detach(), dense)


def test_variational_optimum_with_known_noise_is_the_collapsed_bound() -> None:
    gp, rows = known_noise()
    collapsed = SparseGP(
        gp.kernel, gp.candidates.detach(), noise=target_noise(gp.likelihood).detach()
    )
    best, theirs = gp.with_best_q(rows), collapsed.posterior(rows).predict(rows.X)
    expected = collapsed.bound(rows)
    torch.testing.assert_close(best.bound(rows), expected, rtol=1e-9, atol=1e-9)
    ours = best.posterior(rows).predict(rows.X)
    torch.testing.assert_close(ours.mean, theirs.mean, rtol=1e-7, atol=1e-8)
    torch.testing.assert_close(ours.variance, theirs.variance, rtol=1e-7, atol=1e-8)
    # Envelope theorem: the gradient of the best q's bound is that of the collapsed bound.
    gp.chunked_bound(rows)().backward()
    expected.backward()
    for own, other in zip(
        gp.likelihood.parameters(), collapsed.likelihood.parameters(), strict=True
    ):
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-6, atol=1e-8)


def test_variational_known_noise_of_other_likelihoods_raises() -> None:
    rows = data()
    with pytest.raises(InputError, match="without known noise"):
        model().check(Dataset.of(rows.X, rows.Y, noise=torch.ones_like(rows.Y)))
