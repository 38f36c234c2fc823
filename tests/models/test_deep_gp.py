"""Deep GPs and the objective of their subsets against dense forward passes."""

import math

import pytest
import torch
from gpytorch.kernels import LinearKernel
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.means import ConstantMean
from torch import Tensor
from torch.distributions import Normal

from helpers.deep_problems import (
    LIKELIHOODS,
    deep,
    dense_bound,
    dense_pass,
    hermite,
    layer,
    normal,
    rows,
)
from winnowgp.data import Dataset
from winnowgp.errors import InputError
from winnowgp.gradients import Enumeration, ScoreFunction, all_masks
from winnowgp.models import DeepGP, DeepLayer, VariationalGP
from winnowgp.models.deep_gp import DeepObjective
from winnowgp.models.deep_layer import propagated
from winnowgp.point_processes import Bernoulli

battery = pytest.mark.parametrize("seen", LIKELIHOODS)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-8)


def shallow(seen: str) -> tuple[DeepGP, VariationalGP]:
    """One layer, and the variational model with the same parameters."""
    likelihood, targets = LIKELIHOODS[seen]
    made = layer(2, 3 if seen == "softmax" else targets, K=5, slope=False)
    mean = ConstantMean()
    mean.constant = 0.4
    gp = VariationalGP(
        made.kernel,
        made.candidates.detach(),
        likelihood=likelihood,
        targets=targets,
        mean=mean,
    )
    with torch.no_grad():
        # A mean is in single precision until it is copied.
        made.level.fill_(torch.tensor(0.4).item())
        gp.q_mean.copy_(made.q_mean)
        gp.q_factor.copy_(made.q_factor)
    return DeepGP([made], likelihood=likelihood, targets=targets), gp


@battery
def test_deep_gp_one_layer_equals_variational_gp(seen: str) -> None:
    model, gp = shallow(seen)
    data, test, masks = rows(seen), rows(seen, N=5, seed=30), all_masks(5)
    close(model.bound(data), gp.bound(data))
    close(model.bound(data, total=50), gp.bound(data, total=50))
    ours, theirs = (each.subset_objective(data, total=50).value(masks) for each in (model, gp))
    close(ours, theirs)
    posterior, other = model.posterior(), gp.posterior(data)
    for observed in (False, True):
        expected = other.predict(test.X, observed=observed)
        for predict in (posterior.predict, posterior.predict_matched):
            found = predict(test.X, observed=observed)
            close(found.mean, expected.mean)
            torch.testing.assert_close(found.variance, expected.variance, rtol=1e-7, atol=1e-9)
    density = other.log_density(test.X, test.Y)
    close(posterior.log_density(test.X, test.Y), density)


@battery
@pytest.mark.parametrize("skip_connections", [False, True])
def test_deep_gp_bound_equals_dense_pass_of_samples(seen: str, skip_connections: bool) -> None:
    model, data = deep(seen, widths=(3,), skip_connections=skip_connections), rows(seen)
    eps = model.base_samples(data.N, 5, seeded())
    ours = model.evaluated(data, eps=eps)
    close(ours.bound.detach(), dense_bound(model, data, eps))
    again = model.bound(data, samples=5, generator=seeded())
    torch.testing.assert_close(again, ours.bound)
    scaled = model.evaluated(data, total=100, eps=eps).bound.detach()
    expected = dense_bound(model, data, eps, scale=100 / data.N)
    close(scaled, expected)
    # The KL of every layer is subtracted once, and not scaled.
    kl = torch.stack([made.points().kl() for made in model.layers]).sum()
    torch.testing.assert_close(ours.fit - ours.bound, kl)
    more = model.evaluated(data, total=100, eps=eps)
    torch.testing.assert_close(more.fit - more.bound, kl)


@pytest.mark.parametrize("skip_connections", [False, True])
def test_deep_gp_three_layers_equal_dense_passes(skip_connections: bool) -> None:
    model = deep(widths=(3, 2), K=(4, 3, 5), skip_connections=skip_connections)
    data = rows()
    eps = model.base_samples(data.N, 4, seeded())
    assert [tuple(each.shape) for each in eps] == [(4, data.N, 3), (4, data.N, 2)]
    found = model.evaluated(data, eps=eps)
    mean, variance = dense_pass(model, data.X, eps)
    close(found.passed.last.mean.detach(), mean)
    close(found.passed.last.variance.detach(), variance)
    close(found.bound.detach(), dense_bound(model, data, eps))
    widths = [each.shape[-1] for each in found.passed.inputs]
    assert widths == ([2, 5, 4] if skip_connections else [2, 3, 2])


def test_deep_gp_shared_eps_equals_repeated_eps() -> None:
    model, data = deep(widths=(3,)), rows()
    shared = normal(4, 1, 3, seed=1)
    found = model.evaluated(data, eps=[shared]).bound
    torch.testing.assert_close(
        found, model.evaluated(data, eps=[shared.expand(4, data.N, 3)]).bound
    )


def line() -> tuple[DeepGP, Dataset]:
    """Two layers with one hidden output, where E over ε is one integral per row."""
    layers = [layer(1, 1, K=3, seed=0), layer(1, 1, K=4, seed=10)]
    model = DeepGP(layers, likelihood=GaussianLikelihood())
    assert isinstance(model.likelihood, GaussianLikelihood)
    model.likelihood.initialize(noise=0.3)
    X = torch.linspace(-2, 2, 9, dtype=torch.float64)[:, None]
    return model, Dataset.of(X, torch.sin(2 * X))


def integrated_bound(model: DeepGP, data: Dataset) -> Tensor:
    """The bound with E over ε by Gauss-Hermite quadrature, row by row."""
    nodes, weights = hermite(100)
    eps = nodes[:, None, None].expand(-1, data.N, 1)
    mean, variance = dense_pass(model, data.X, [eps])
    assert isinstance(model.likelihood, GaussianLikelihood)
    s2 = model.likelihood.noise.detach()
    nats = Normal(mean, s2.sqrt()).log_prob(data.Y) - 0.5 * variance / s2
    kl = torch.stack([made.points().kl() for made in model.layers]).sum().detach()
    return (weights[:, None, None] * nats).sum() - kl


def z_score(samples: Tensor, mean: Tensor) -> float:
    return ((samples.mean() - mean) / (samples.std() / math.sqrt(len(samples)))).item()


def draws(model: DeepGP, data: Dataset, *, sd: float = 1.0) -> Tensor:
    """60 estimates of 400 samples per row."""
    g = seeded(4)
    with torch.no_grad():
        samples = [[sd * e for e in model.base_samples(data.N, 400, g)] for _ in range(60)]
        return torch.stack([model.evaluated(data, eps=eps).bound for eps in samples])


def test_deep_gp_bound_is_unbiased_against_quadrature() -> None:
    model, data = line()
    expected = integrated_bound(model, data)
    # 60 draws of 400; the standard error is a small part of what sampling changes.
    found = draws(model, data)
    assert abs(z_score(found, expected)) < 4
    means_only = model.evaluated(data, eps=[torch.zeros(1, data.N, 1).double()]).bound
    assert abs(means_only.item() - expected) > 10 * found.std() / math.sqrt(60)


def test_deep_gp_unbiasedness_check_rejects_biased_twin() -> None:
    """The biased twin has samples of 1.2 times the standard deviation of q."""
    model, data = line()
    assert abs(z_score(draws(model, data, sd=1.2), integrated_bound(model, data))) > 4


@pytest.mark.parametrize("seen", ["gaussian", "bernoulli"])
def test_deep_gp_minibatches_average_to_bound_and_gradient(seen: str) -> None:
    model, data = deep(seen, skip_connections=True), rows(seen, N=12)
    eps = model.base_samples(12, 3, seeded())
    order = torch.randperm(12, generator=seeded(1))
    values = []
    for index in order.split(4):
        part = Dataset.of(data.X[index], data.Y[index])
        tied = [each[:, index] for each in eps]
        values.append(model.evaluated(part, total=12, eps=tied).bound)
    whole, mean = model.evaluated(data, eps=eps).bound, torch.stack(values).mean()
    assert torch.stack(values).std() > 0.1
    torch.testing.assert_close(mean, whole, rtol=1e-10, atol=1e-10)
    parameters = list(model.parameters())
    for a, b in zip(
        torch.autograd.grad(mean, parameters),
        torch.autograd.grad(whole, parameters),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-8)


def test_deep_gp_gradient_equals_pathwise_gradient() -> None:
    """With ε held, autograd agrees with finite differences in every parameter."""
    model, data = deep(skip_connections=True, K=(3, 3)), rows(N=5)
    eps = model.base_samples(5, 2, seeded())
    names = [name for name, _ in model.named_parameters()]

    def bound(*values: Tensor) -> Tensor:
        class Bound(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.model = model

            def forward(self) -> Tensor:
                return self.model.evaluated(data, eps=eps).bound

        given = {f"model.{n}": v for n, v in zip(names, values, strict=True)}
        return torch.func.functional_call(Bound(), given)

    start = [p.detach().clone().requires_grad_() for p in model.parameters()]
    assert torch.autograd.gradcheck(bound, start, eps=1e-6, atol=1e-5, rtol=1e-4)


def test_deep_gp_zero_variance_has_finite_gradient() -> None:
    """A linear function without an intercept has no variance at zero."""
    first = DeepLayer(LinearKernel(), normal(2, 2, seed=0), outputs=2)
    model = DeepGP([first, layer(2, 1, seed=10)], likelihood=GaussianLikelihood())
    X = torch.cat([torch.zeros(1, 2, dtype=torch.float64), normal(3, 2, seed=1)])
    data = Dataset.of(X, torch.ones(4, dtype=torch.float64))
    found = model.evaluated(data, eps=model.base_samples(4, 2, seeded()))
    assert (found.passed.outputs[0].variance[:, 0] == 0).all()
    for gradient in torch.autograd.grad(found.bound, list(model.parameters())):
        assert torch.isfinite(gradient).all()


def test_deep_gp_copies_layers_and_likelihood() -> None:
    made, likelihood = layer(2, 2), GaussianLikelihood()
    model = DeepGP([made], likelihood=likelihood, targets=2)
    with torch.no_grad():
        model.layers[0].level.add_(1)
    assert not torch.equal(model.layers[0].level, made.level)
    pruned = model.prune([torch.tensor([True, False, True, False])])
    assert (pruned.sizes, model.sizes) == ((2,), (4,))
    assert pruned.likelihood is not model.likelihood


def test_deep_gp_prune_keeps_skips_likelihood_and_freezing() -> None:
    model = deep(skip_connections=True)
    model.layers[1].candidates.requires_grad_(False)
    masks = [torch.tensor([True, False, True, True]), torch.tensor([False, True, True])]
    pruned = model.prune(masks)
    assert pruned.sizes == (3, 2)
    assert pruned.skip_connections
    assert isinstance(pruned.likelihood, GaussianLikelihood)
    assert pruned.likelihood.noise.item() == pytest.approx(0.15)
    assert [each.candidates.requires_grad for each in pruned.layers] == [True, False]


def test_deep_gp_single_precision_agrees() -> None:
    model, data = deep(skip_connections=True).float(), rows()
    few = Dataset.of(data.X.float(), data.Y.float())
    bound = model.bound(few, samples=2, generator=seeded())
    assert bound.dtype == torch.float32
    eps = model.base_samples(few.N, 2, seeded())
    exact = deep(skip_connections=True).evaluated(data, eps=[e.double() for e in eps]).bound
    assert bound.item() == pytest.approx(exact.item(), rel=1e-3)


def test_deep_gp_propagation_returns_inputs_of_each_layer() -> None:
    model, data = deep(widths=(3,), skip_connections=True), rows()
    eps = model.base_samples(data.N, 2, seeded())
    points = [made.points() for made in model.layers]
    passed = propagated(model.layers, points, data.X, eps=eps, skip_connections=True)
    assert torch.equal(passed.inputs[0], data.X[None])
    first = passed.outputs[0]
    hidden = first.mean + first.variance.sqrt() * eps[0]
    torch.testing.assert_close(passed.inputs[1][..., :3], hidden)
    assert torch.equal(passed.inputs[1][..., 3:], data.X.expand(2, -1, -1))


def test_deep_gp_mismatched_layers_raise() -> None:
    one, two, likelihood = layer(2, 3), layer(3, 1), GaussianLikelihood()
    with pytest.raises(InputError, match="at least one layer"):
        DeepGP([], likelihood=likelihood)
    with pytest.raises(InputError, match=r"layer 2 must have 3 inputs.*it has 2"):
        DeepGP([one, layer(2, 1)], likelihood=likelihood)
    with pytest.raises(InputError, match=r"layer 2 must have 5 inputs .*2 observed inputs.*has 3"):
        DeepGP([one, two], likelihood=likelihood, skip_connections=True)
    with pytest.raises(InputError, match=r"last layer must have 2 outputs.*it has 1"):
        DeepGP([one, two], likelihood=likelihood, targets=2)
    with pytest.raises(InputError, match="softmax needs one column"):
        DeepGP([one], likelihood=LIKELIHOODS["softmax"][0], targets=2)


def test_deep_gp_mismatched_data_raise_in_every_method() -> None:
    model, data = deep("bernoulli"), rows("bernoulli")
    wide = Dataset.of(data.X.repeat(1, 2), data.Y)
    more = Dataset.of(data.X, data.Y.repeat(1, 2))
    for method in (model.bound, model.subset_objective):
        with pytest.raises(InputError, match=r"2 inputs and 2 target columns.*have 4 and 2"):
            method(wide)
        with pytest.raises(InputError, match=r"2 inputs and 2 target columns.*have 2 and 4"):
            method(more)
        with pytest.raises(InputError, match="must be 0 or 1"):
            method(Dataset.of(data.X, data.Y + 1))


def test_deep_gp_accepts_any_kernel() -> None:
    model, data = deep(matern=True, skip_connections=True), rows()
    eps = model.base_samples(data.N, 2, seeded())
    ours = model.evaluated(data, eps=eps).bound.detach()
    torch.testing.assert_close(ours, dense_bound(model, data, eps), rtol=1e-8, atol=1e-8)


def seeded_deep_objective(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def objective(
    model: DeepGP, data: Dataset, *, samples: int = 3, total: int | None = None
) -> DeepObjective:
    return model.subset_objective(
        data, samples=samples, total=total, generator=seeded_deep_objective()
    )


# Masks of four and three candidates: none, one layer empty, all sizes, all.
MASKS = torch.tensor(
    [
        [0, 0, 0, 0, 0, 0, 0],
        [0, 0, 0, 0, 1, 0, 1],
        [1, 0, 1, 1, 0, 0, 0],
        [0, 1, 0, 0, 1, 1, 1],
        [1, 1, 0, 1, 0, 1, 0],
        [1, 1, 1, 1, 0, 0, 1],
        [1, 1, 1, 1, 1, 1, 1],
    ]
).bool()


@pytest.mark.parametrize("seen", ["gaussian", "bernoulli", "softmax"])
@pytest.mark.parametrize("skip_connections", [False, True])
def test_deep_objective_subsets_equal_pruned_models(seen: str, skip_connections: bool) -> None:
    model, data = deep(seen, skip_connections=skip_connections), rows(seen)
    eps = model.base_samples(data.N, 3, seeded_deep_objective())
    subsets = objective(model, data, total=30)
    assert subsets.K == 7
    together = subsets.value(MASKS).detach()
    for mask, value in zip(MASKS, together, strict=True):
        parts = list(mask.split(model.sizes))
        exact = dense_bound(model, data, eps, parts, scale=30 / data.N)
        torch.testing.assert_close(value, exact, rtol=1e-8, atol=1e-8)
        pruned = model.prune(parts)
        assert pruned.sizes == tuple(int(part.sum()) for part in parts)
        bound = pruned.evaluated(data, total=30, eps=eps).bound.detach()
        torch.testing.assert_close(bound, value, rtol=1e-8, atol=1e-8)
    whole = model.evaluated(data, total=30, eps=eps).bound.detach()
    torch.testing.assert_close(together[-1], whole, rtol=1e-9, atol=1e-9)


def test_deep_objective_three_layers_and_any_kernel() -> None:
    model = deep(widths=(2, 3), K=(2, 3, 2), matern=True)
    data = rows()
    eps = model.base_samples(data.N, 3, seeded_deep_objective())
    found = objective(model, data).value(MASKS).detach()
    exact = [dense_bound(model, data, eps, list(mask.split(model.sizes))) for mask in MASKS]
    torch.testing.assert_close(found, torch.stack(exact), rtol=1e-8, atol=1e-8)


def test_deep_objective_value_ignores_rest_of_batch() -> None:
    subsets = objective(deep(), rows())
    alone = torch.cat([subsets.value(mask[None]) for mask in MASKS])
    torch.testing.assert_close(subsets.value(MASKS), alone, rtol=1e-9, atol=1e-9)
    assert subsets.value(MASKS[:0]).shape == (0,)


def test_deep_objective_permuted_candidates_give_equal_values() -> None:
    model, data = deep(), rows()
    order = torch.tensor([2, 0, 3, 1])
    first = model.layers[0]
    with torch.no_grad():
        # The same q(u), whitened in the new order.
        Kuu = first.kernel(first.candidates).to_dense()
        L, again = torch.linalg.cholesky(Kuu), torch.linalg.cholesky(Kuu[order][:, order])
        m = again.inverse() @ (L @ first.q_mean)[order]
        F = again.inverse() @ (L @ first.q_factor.tril())[:, order]
        S = torch.linalg.cholesky(F @ F.mT)
    moved = model.with_layers([first.with_q(first.candidates[order], m, S), *model.layers[1:]])
    columns = torch.cat([order, torch.arange(4, 7)])
    torch.testing.assert_close(
        objective(moved, data).value(MASKS[:, columns]),
        objective(model, data).value(MASKS),
        rtol=1e-8,
        atol=1e-8,
    )


def test_deep_objective_masks_and_calls_share_samples() -> None:
    model, data = deep(), rows()
    subsets = objective(model, data, samples=1)
    twice = subsets.value(MASKS[[4, 4]])
    assert twice[0].item() == pytest.approx(twice[1].item(), rel=1e-12)
    assert torch.equal(subsets.value(MASKS), subsets.value(MASKS))
    other = model.subset_objective(data, generator=seeded_deep_objective(1))
    assert (other.value(MASKS) - subsets.value(MASKS)).abs().min() > 1e-3


def test_deep_objective_is_differentiable_in_all_parameters() -> None:
    model = deep(skip_connections=True)
    objective(model, rows()).value(MASKS[[3, 4]]).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name
        assert parameter.grad.abs().sum() > 0, name


def small() -> tuple[DeepObjective, Tensor, Tensor]:
    """Two layers of two candidates: the objective, logits, and the dense scores of all subsets."""
    model, data = deep(K=(2, 2)), rows(N=8)
    eps = model.base_samples(8, 2, seeded_deep_objective())
    table = [dense_bound(model, data, eps, list(mask.split(2))) for mask in all_masks(4)]
    logits = torch.tensor([0.6, -0.8, 0.2, 1.0], dtype=torch.float64, requires_grad=True)
    return objective(model, data, samples=2), logits, torch.stack(table)


def exact_gradient(logits: Tensor, table: Tensor) -> Tensor:
    """Gradients of Σ_Z q(Z) L(Z) in the logits of both layers."""
    probability = Bernoulli(logits).log_prob(all_masks(4)).exp()
    return torch.autograd.grad((probability * table).sum(), logits)[0]


def test_deep_objective_expectation_equals_enumeration() -> None:
    subsets, logits, table = small()
    found = Enumeration().step(Bernoulli(logits), subsets.value).surrogate
    (gradient,) = torch.autograd.grad(found, logits)
    torch.testing.assert_close(gradient, exact_gradient(logits, table), rtol=1e-8, atol=1e-8)


def z_scores(*, biased: bool = False) -> Tensor:
    """Return z-scores of 1,000 score-function gradients of 4 samples each, for every logit."""
    subsets, logits, table = small()
    with torch.no_grad():
        values = subsets.value(all_masks(4))

    def value(mask: Tensor) -> Tensor:
        # A table of scores, for speed. The biased twin swaps the masks of the layers.
        seen = mask.roll(2, 1) if biased else mask
        return values[(seen * 2 ** torch.arange(4)).sum(1)]

    estimator, g = ScoreFunction(samples=4), seeded_deep_objective(2)
    state, found = estimator.init(), []
    for _ in range(1000):
        step = estimator.step(Bernoulli(logits), value, state=state, generator=g)
        state = step.state
        found.append(torch.autograd.grad(step.surrogate, logits)[0])
    samples = torch.stack(found)
    error = samples.mean(0) - exact_gradient(logits, table)
    return error / (samples.std(0) / math.sqrt(len(samples)))


def test_deep_objective_score_function_is_unbiased() -> None:
    assert (z_scores().abs() < 4).all()


def test_deep_objective_unbiasedness_check_rejects_biased_twin() -> None:
    assert (z_scores(biased=True).abs() > 4).any()
