"""The ELBO of subsets of a GPyTorch model against dense references of every strategy."""

from math import log, pi
from typing import Any

import gpytorch
import pytest
import torch
from gpytorch.kernels import RBFKernel
from gpytorch.likelihoods import (
    BernoulliLikelihood,
    FixedNoiseGaussianLikelihood,
    Likelihood,
    SoftmaxLikelihood,
    StudentTLikelihood,
)
from gpytorch.variational import (
    BatchDecoupledVariationalStrategy,
    DeltaVariationalDistribution,
    LargeBatchVariationalStrategy,
    MeanFieldVariationalDistribution,
    UnwhitenedVariationalStrategy,
    VariationalStrategy,
)
from torch import Tensor

from helpers.gpytorch_models import (
    DISTRIBUTIONS,
    Deep,
    Latent,
    Model,
    curve,
    elbo,
    gaussian,
    independent,
    mixed,
    state,
    task_noise,
    tasks,
    three_classes,
    with_random_q,
)
from winnowgp.gradients import ScoreFunction, all_masks
from winnowgp.integrations.gpytorch import subset_objective
from winnowgp.integrations.gpytorch.distribution import prune_model
from winnowgp.point_processes import Bernoulli

K, N = 5, 14
STRATEGIES = [
    VariationalStrategy,
    LargeBatchVariationalStrategy,
    UnwhitenedVariationalStrategy,
    BatchDecoupledVariationalStrategy,
]
PAIRS = [
    (s, d)
    for s in STRATEGIES
    for d in DISTRIBUTIONS
    if not (s is BatchDecoupledVariationalStrategy and d is DeltaVariationalDistribution)
]
pairs = pytest.mark.parametrize(("strategy", "distribution"), PAIRS)


def single(strategy: Any, distribution: Any) -> Model:
    x, _ = curve(K, seed=5)
    prior = (1,) if strategy is BatchDecoupledVariationalStrategy else ()
    return with_random_q(Model(x, strategy=strategy, distribution=distribution, prior=prior))


def kernel(model: Model, A: Tensor, B: Tensor) -> Tensor:
    scale = model.covar_module.base_kernel.lengthscale.flatten()
    squared = ((A[:, None] - B[None]) / scale).square().sum(-1)
    return model.covar_module.outputscale.flatten() * torch.exp(-0.5 * squared)


def dense_elbo(model: Model, x: Tensor, y: Tensor, noise: float, mask: Tensor) -> Tensor:
    """E[log N(y | f, σ²)] − KL[q(u_I) ‖ p(u_I)] with q(u_I) a sub-vector and a sub-matrix of q(u*).

    Means and covariances have points of their own, if the strategy says so.
    """
    strategy = model.variational_strategy
    whitened = not isinstance(strategy, UnwhitenedVariationalStrategy)
    Z = strategy.inducing_points.detach()
    Zm, Zs = (Z[0], Z[1]) if Z.dim() == 3 else (Z, Z)
    centre = model.mean_module.constant.detach().flatten()
    q = strategy._variational_distribution()
    point = isinstance(q, gpytorch.distributions.Delta)
    m, S = q.mean.detach(), torch.zeros(K, K).double() if point else q.covariance_matrix.detach()
    jitter = strategy.jitter_val * torch.eye(K).double()
    Km, Ks = kernel(model, Zm, Zm) + jitter, kernel(model, Zs, Zs) + jitter
    if whitened:
        Lm, Ls = torch.linalg.cholesky(Km), torch.linalg.cholesky(Ks)
        m, S = centre + Lm @ m, Ls @ S @ Ls.mT
    m, S = m[mask], S[mask][:, mask]
    Km, Ks = Km[mask][:, mask], Ks[mask][:, mask]
    if isinstance(strategy._variational_distribution, MeanFieldVariationalDistribution):
        L = torch.linalg.cholesky(Ks) if whitened else torch.eye(len(Ks)).double()
        inner = torch.linalg.solve(L, torch.linalg.solve(L, S).mT)
        S = L @ torch.diag(1 / torch.linalg.inv(inner).diagonal()) @ L.mT
    A, B = (
        torch.linalg.solve(Kuu, kernel(model, Zr[mask], x)).mT for Kuu, Zr in ((Km, Zm), (Ks, Zs))
    )
    mean = centre + A @ (m - centre)
    prior = model.covar_module.outputscale.flatten() + (strategy.jitter_val if whitened else 0.0)
    variance = prior - (B @ Ks * B).sum(1) + (B @ S * B).sum(1)
    nats = -0.5 * (log(2 * pi * noise) + ((y - mean).square() + variance) / noise).sum()
    off = m - centre
    kl = 0.5 * off @ torch.linalg.solve(Km, off)
    if not point:
        ratio = torch.linalg.solve(Ks, S)
        kl = kl + 0.5 * (ratio.trace() - len(ratio) - torch.linalg.slogdet(ratio).logabsdet)
    return nats - kl


@pairs
def test_subset_objective_equals_dense_bound(strategy: Any, distribution: Any) -> None:
    model, (x, y) = single(strategy, distribution), curve(N)
    masks = all_masks(K)
    values = subset_objective(model, gaussian(0.3), (x, y)).value(masks)
    dense = torch.stack([dense_elbo(model, x, y, 0.3, mask) for mask in masks[1:]])
    torch.testing.assert_close(values[1:], dense, rtol=1e-6, atol=1e-5)


@pairs
def test_subset_objective_empty_set_is_prior(strategy: Any, distribution: Any) -> None:
    model, (x, y) = single(strategy, distribution), curve(N)
    value = subset_objective(model, gaussian(0.3), (x, y)).value(all_masks(K)[:1]).item()
    variance = model.covar_module.outputscale.flatten()
    off = (y - model.mean_module.constant.flatten()).square() + variance
    prior = -0.5 * (log(2 * pi * 0.3) + off / 0.3).sum().item()
    assert value == pytest.approx(prior, abs=1e-3)


@pairs
def test_prune_model_keeping_all_predicts_the_same(strategy: Any, distribution: Any) -> None:
    model, (x, _) = single(strategy, distribution), curve(N)
    sets = model.variational_strategy.inducing_points.shape[:-2].numel()
    same = prune_model(model, [torch.ones(sets, K, dtype=torch.bool)])
    with torch.no_grad():
        before, after = model.eval()(x), same.eval()(x)
    torch.testing.assert_close(after.mean, before.mean, rtol=0, atol=1e-9)
    torch.testing.assert_close(after.covariance_matrix, before.covariance_matrix, rtol=0, atol=1e-9)
    assert type(same) is type(model)


def three(around: Any, **kwargs: Any) -> Model:
    x, _ = curve(3 * K, seed=5)
    return with_random_q(Model(x.reshape(3, K, 1), batch=[3], around=around, **kwargs))


def shared(**kwargs: Any) -> Model:
    x, _ = curve(K, seed=5)
    return with_random_q(Model(x, batch=[3], around=independent, **kwargs))


def noisy() -> Likelihood:
    return task_noise(0.7)


MANY: dict[str, Any] = {
    "own points, own kernels": (
        lambda: three(independent, prior=[3]),
        noisy,
        tasks(N),
    ),
    "own points, one kernel": (lambda: three(independent), noisy, tasks(N)),
    "shared points, own kernels": (lambda: shared(prior=[3]), noisy, tasks(N)),
    "shared points, one kernel": (lambda: shared(), noisy, tasks(N)),
    "mixed": (lambda: three(mixed, prior=[3]), noisy, tasks(N)),
    "batch": (lambda: three(lambda s: s, prior=[3]), gaussian, (tasks(N)[0], tasks(N)[1].mT)),
    "unwhitened batch": (
        lambda: three(lambda s: s, prior=[3], strategy=UnwhitenedVariationalStrategy),
        gaussian,
        (tasks(N)[0], tasks(N)[1].mT),
    ),
    "classes": (lambda: single(*PAIRS[0]), BernoulliLikelihood, (curve(N)[0], curve(N)[1].gt(0))),
    "heavy tails": (lambda: single(*PAIRS[0]), StudentTLikelihood, curve(N)),
    "known noise": (
        lambda: single(*PAIRS[0]),
        lambda: FixedNoiseGaussianLikelihood(torch.linspace(0.1, 0.3, N).double()),
        curve(N),
    ),
}


@pytest.mark.parametrize("name", MANY)
def test_subset_objective_equals_gpytorch_bound_of_pruned_model(name: str) -> None:
    made, likelihood, (x, y) = MANY[name]
    model, likelihood = made(), likelihood().double()
    y = y.double()
    mask = torch.tensor([True, False, True, True, False])
    value = subset_objective(model, likelihood, (x, y)).value(mask[None]).item()
    sets = model.variational_strategy
    Z = getattr(sets, "base_variational_strategy", sets).inducing_points
    smaller = prune_model(model, [mask.expand(Z.shape[:-2].numel(), -1)])
    bound = elbo(likelihood, smaller, N)
    # Each function of a batch has a bound of its own.
    expected = N * bound(smaller(x), y).sum().item()
    assert value == pytest.approx(expected, abs=1e-6)


def test_subset_objective_softmax_uses_fixed_nodes() -> None:
    """GPyTorch draws samples, whose mean converges to the fixed nodes."""
    x, y = curve(N)
    labels = three_classes(y)
    likelihood = SoftmaxLikelihood(num_features=3, num_classes=3, mixing_weights=False)
    model = shared()
    value = subset_objective(model, likelihood, (x, labels)).value(torch.ones(1, K).bool()).item()
    draws = sampled_bounds(model, likelihood, x, labels, samples=100_000)
    z = (value - draws.mean()) / (draws.std() / 10)
    assert abs(z) < 4


def sampled_bounds(model: Any, likelihood: Any, x: Tensor, labels: Tensor, samples: int) -> Tensor:
    """GPyTorch's bound a hundred times."""
    bound = elbo(likelihood, model, N)
    torch.manual_seed(0)
    with torch.no_grad(), gpytorch.settings.num_likelihood_samples(samples // 100):
        return torch.stack([N * bound(model(x), labels).sum() for _ in range(100)])


@pytest.mark.parametrize("kind", ["softmax", "own"])
def test_subset_objective_mixed_tasks_sample_as_in_training(kind: str) -> None:
    """GPyTorch's bound takes the tasks of a row to be independent; in eval mode it does not."""

    class Own(Likelihood):
        def forward(self, f: Tensor, *args: Any, **kwargs: Any) -> torch.distributions.Normal:
            return torch.distributions.Normal((f[..., 0] - f[..., 1]).tanh(), 1.0)

    x, y = curve(N)
    labels = three_classes(y)
    softmax = SoftmaxLikelihood(num_features=3, num_classes=3, mixing_weights=False)
    model = three(mixed, prior=[3])
    model.variational_strategy.lmc_coefficients.data = 2 * torch.ones(3, 3).double()
    likelihood: Any = softmax if kind == "softmax" else Own()
    value = subset_objective(model, likelihood, (x, labels)).value(torch.ones(1, K).bool()).item()
    draws = sampled_bounds(model, likelihood, x, labels, samples=6400)
    # The objective uses 64 samples too, or fixed nodes.
    assert abs(value - draws.mean()) < 4 * draws.std()


@pytest.mark.parametrize("skip", [False, True])
def test_subset_objective_deep_equals_pruned_model(skip: bool) -> None:
    model, (x, y) = with_random_q(Deep(K, skip=skip)), curve(N)
    likelihood = gaussian()
    mask = torch.tensor([1, 0, 1, 1, 0, 0, 1, 1, 1, 1]).bool()
    objective = subset_objective(model, likelihood, (x, y), seed=3)
    value = objective.value(mask[None]).item()
    smaller = prune_model(model, [mask[None, :K].expand(2, -1), mask[None, K:]])
    assert smaller.hidden.variational_strategy.inducing_points.shape == (2, 3, 1)
    assert smaller.last.variational_strategy.inducing_points.shape[0] == 4
    bound = elbo(likelihood, smaller, N)
    torch.manual_seed(3)
    with torch.no_grad(), gpytorch.settings.num_likelihood_samples(1):
        draws = [N * bound(smaller(x), y).item() for _ in range(objective.elbo.passes)]
    assert objective.elbo.passes == 8
    assert value == pytest.approx(sum(draws) / 8, abs=1e-6)


def test_subset_objective_latent_equals_pruned_model() -> None:
    _, Y = tasks(N)
    model = with_random_q(Latent(curve(N)[0] / 3 - 1, 3, K))
    likelihood = gpytorch.likelihoods.GaussianLikelihood(batch_shape=torch.Size([3])).double()
    mask = torch.tensor([True, False, True, True, False])
    objective = subset_objective(model, likelihood, Y, seed=3)
    value = objective.value(mask[None]).item()
    smaller = prune_model(model, [mask.expand(3, -1)])
    torch.manual_seed(3)
    total = 0.0
    with torch.no_grad():
        for _ in range(objective.elbo.passes):
            f = smaller(smaller.sample_latent_variable())
            nats = likelihood.expected_log_prob(Y.mT, f).sum()
            total += (nats - smaller.variational_strategy.kl_divergence().sum()).item()
    assert value == pytest.approx(total / objective.elbo.passes, abs=1e-6)


def test_subset_objective_score_function_learns(generator: torch.Generator) -> None:
    model, (x, y) = single(*PAIRS[0]), curve(N)
    objective = subset_objective(model, gaussian(), (x, y))
    logits = torch.zeros(K, dtype=torch.float64, requires_grad=True)
    gradient = ScoreFunction(samples=4)
    q = Bernoulli(logits)
    gradient.step(
        q, objective.value, state=gradient.init(), generator=generator
    ).surrogate.backward()
    assert logits.grad is not None
    assert logits.grad.abs().max() > 0


def test_subset_objective_leaves_arguments() -> None:
    model, (x, y) = single(*PAIRS[0]), curve(N)
    likelihood = gaussian()
    before, random = state(model), torch.get_rng_state()
    # As after a training step, when GPyTorch caches tensors with a history.
    model.train()
    elbo(likelihood, model, N)(model(x), y).backward()
    subset_objective(model, likelihood, (x, y)).value(all_masks(K)[:3])
    assert all(torch.equal(before[name], value) for name, value in state(model).items())
    assert torch.equal(random, torch.get_rng_state())
    assert model.training
    assert isinstance(model.covar_module.base_kernel, RBFKernel)
