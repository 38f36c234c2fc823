"""Quadrature rules and integrals of likelihoods against dense sums and autograd."""

import numpy as np
import pytest
import torch
from gpytorch.likelihoods import (
    Likelihood,
    NegativeBinomialLikelihood,
    PoissonLikelihood,
    StudentTLikelihood,
)
from scipy.special import log_ndtr
from torch import Tensor, nn
from torch.distributions import Normal

import winnowgp.models.classes as softmax_expectation_module
from helpers.observation_problems import built
from winnowgp.models.classes import (
    SOFTMAX_NODES,
    probit_expectation,
    softmax_coupling,
    softmax_expectation,
)
from winnowgp.models.likelihoods import observation_model
from winnowgp.models.quadrature import graded_nodes, normal_nodes

WIDE = [
    # Count, mean and standard deviation of f, and reference values for Poisson counts.
    (1e6, 9e5, 1e6, -14.74),
    (7.0, -20.0, 100.0, -5.56),
    (0.0, -50.0, 1000.0, -0.654),
    (11973.0, 9636.5, 7788.0, None),
    (1e4, 1e4, 1e3, None),
    (1e4, 3e3, 2e3, None),
    (0.0, 0.0, 1000.0, None),
    (1.0, -3.0, 4.0, None),
    (1e4, 1e4, 0.1, None),
    (3.0, -60.0, 10.0, None),
]
COUNTING = {
    "poisson": built(PoissonLikelihood()),
    "negative binomial": built(NegativeBinomialLikelihood(), probs=0.4),
    "wide negative binomial": built(NegativeBinomialLikelihood(), probs=0.95),
    "failures": built(NegativeBinomialLikelihood(num_failures_param=True), probs=0.4),
}


def log_count(likelihood: Likelihood, y: float, f: Tensor) -> Tensor:
    """log p(y | f) with the rate eᶠ where softplus(f) has no digits left."""
    log_rate = torch.where(f < -30, f, torch.nn.functional.softplus(f.clamp_min(-30)).log())
    if isinstance(likelihood, PoissonLikelihood):
        return y * log_rate - log_rate.exp() - torch.lgamma(f.new_tensor(y + 1))
    assert isinstance(likelihood, NegativeBinomialLikelihood)
    p = likelihood.probs
    size = log_rate.exp() * (1.0 if likelihood.num_failures_param else (1 - p) / p)
    log_size = log_rate + (0.0 if likelihood.num_failures_param else ((1 - p) / p).log())
    # Γ(y + r) / Γ(r) = r Γ(y + r) / Γ(1 + r), which has digits where r has none.
    ways = log_size + torch.lgamma(y + size) - torch.lgamma(1 + size) if y else 0 * size
    return ways - torch.lgamma(f.new_tensor(y + 1)) + y * p.log() + size * torch.log1p(-p)


@pytest.mark.parametrize("name", COUNTING)
@pytest.mark.parametrize(("y", "m", "s", "known"), WIDE)
def test_counts_wide_latents_equal_dense_integral(
    name: str, y: float, m: float, s: float, known: float | None
) -> None:
    """Against 200,000 trapezia; the logarithm of a density to 1e-4 nats, measured 2e-5."""
    likelihood = COUNTING[name]
    z = torch.linspace(-14, 14, 200_001, dtype=torch.float64)
    log_weight = Normal(0.0, 1.0).log_prob(z) + (z[1] - z[0]).log()
    log_p = log_count(likelihood, y, m + s * z)
    Y, mean, variance = (torch.full((1, 1), v, dtype=torch.float64) for v in (y, m, s**2))
    density = observation_model(likelihood).log_density(Y, mean, variance).item()
    assert density == pytest.approx((log_weight + log_p).logsumexp(0).item(), abs=1e-4)
    if known is not None and name == "poisson":
        assert density == pytest.approx(known, abs=5e-3)
    nats = observation_model(likelihood).expected_log_prob(Y, mean, variance).item()
    assert nats == pytest.approx((log_weight.exp() * log_p).sum().item(), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("name", COUNTING)
@pytest.mark.parametrize(("y", "m", "s"), [(40.0, 10.0, 30.0), (0.0, -5.0, 8.0), (3.0, 2.0, 0.4)])
def test_counts_gradients_equal_central_differences(
    name: str, y: float, m: float, s: float
) -> None:
    likelihood, Y = COUNTING[name], torch.full((1, 1), y, dtype=torch.float64)
    mean, variance = (
        torch.full((1, 1), v, dtype=torch.float64, requires_grad=True) for v in (m, s**2)
    )
    model = observation_model(likelihood)
    for call in (model.expected_log_prob, model.log_density):
        slopes = torch.autograd.grad(call(Y, mean, variance).sum(), (mean, variance))
        for moved, slope in zip((mean, variance), slopes, strict=True):
            h = 1e-4 * moved.abs().item()
            ends = []
            with torch.no_grad():
                for step in (h, -h):
                    moved += step
                    ends.append(call(Y, mean, variance).item())
                    moved -= step
            assert slope.item() == pytest.approx((ends[0] - ends[1]) / (2 * h), rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("shift", [-4.0, 0.0, 3.0])
def test_graded_nodes_have_gaussian_moments(shift: float, scale: float) -> None:
    """For any centre within a few standard deviations of the mean."""
    mean, deviation = (torch.full((2, 1), v, dtype=torch.float64) for v in (5.0, 20.0))
    centre = mean + shift * deviation
    nodes = graded_nodes(
        mean, deviation, centre=centre, scale=torch.full_like(mean, scale), count=256
    )
    weight = nodes.log_weight.exp()
    for power, moment in ((0, 1.0), (1, 0.0), (2, 1.0), (4, 3.0)):
        found = (weight * nodes.z**power).sum(0)
        torch.testing.assert_close(found, torch.full_like(mean, moment), rtol=0, atol=1e-8)


@pytest.mark.parametrize("width", [1e-3, 1.0, 1e4])
def test_graded_nodes_resolve_narrow_bump(width: float) -> None:
    """∫ N(f; 0, 100²) N(c; f, w²) df = N(c; 0, 100² + w²)."""
    zero = torch.zeros(1, dtype=torch.float64)
    deviation, centre = zero + 100, zero + 150
    nodes = graded_nodes(zero, deviation, centre=centre, scale=zero + width, count=256)
    bump = torch.distributions.Normal(centre, width).log_prob(deviation * nodes.z)
    found = (nodes.log_weight + bump).logsumexp(0)
    wide = torch.distributions.Normal(zero, (deviation**2 + width**2).sqrt())
    torch.testing.assert_close(found, wide.log_prob(centre), rtol=0, atol=1e-8)


class Expectation(nn.Module):
    def __init__(self, noise: float, Y: Tensor) -> None:
        super().__init__()
        self.likelihood, self.Y = StudentTLikelihood().double(), Y
        self.likelihood.noise = Y.new_tensor(noise)

    def forward(self, mean: Tensor, variance: Tensor) -> Tensor:
        return observation_model(self.likelihood).expected_log_prob(self.Y, mean, variance)


@pytest.mark.parametrize("noise", [1e-4, 0.7, 50.0])
def test_student_gradients_equal_central_differences(
    noise: float, generator: torch.Generator
) -> None:
    Y = torch.randn(6, 2, generator=generator, dtype=torch.float64)
    mean, variance = torch.randn(2, 3, 6, 2, generator=generator, dtype=torch.float64)
    model = Expectation(noise, Y)
    names = [name for name, _ in model.named_parameters()]
    parameters = [parameter.detach().clone() for parameter in model.parameters()]

    def nats(mean: Tensor, variance: Tensor, *values: Tensor) -> Tensor:
        named = dict(zip(names, values, strict=True))
        return torch.func.functional_call(model, named, (mean, variance))

    inputs = [part.requires_grad_() for part in (mean, variance.exp(), *parameters)]
    assert len(names) == 2
    assert torch.autograd.gradcheck(nats, inputs)


def problem() -> tuple[Tensor, Tensor, Tensor]:
    """Signs, means and variances; some far out, where Φ underflows."""
    sign = torch.tensor([1.0, -1, 1, -1, 1, -1], dtype=torch.float64)
    mean = torch.tensor([0.3, 0.3, -2.0, 1.5, -60.0, -60.0], dtype=torch.float64)
    variance = torch.tensor([0.5, 2.0, 0.1, 4.0, 1.0, 9.0], dtype=torch.float64)
    return sign, mean, variance


def rule(T: int) -> dict[str, Tensor]:
    """Nodes and weights of N(0, 1)."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(T)
    return {
        "nodes": torch.from_numpy(nodes),
        "weights": torch.from_numpy(weights / weights.sum()),
    }


def test_probit_value_and_gradients_equal_sum_over_nodes() -> None:
    sign, mean, variance = problem()
    how = rule(20)
    ours_at = mean.clone().requires_grad_(), variance.clone().requires_grad_()
    ours = probit_expectation(sign, *ours_at, **how)
    at = mean.clone().requires_grad_(), variance.clone().requires_grad_()
    f = at[0] + at[1].sqrt() * how["nodes"][:, None]
    expected = (how["weights"][:, None] * torch.special.log_ndtr(sign * f)).sum(0)
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)
    scale = torch.arange(1.0, 7.0, dtype=torch.float64)
    for a, b in zip(
        torch.autograd.grad(ours @ scale, ours_at),
        torch.autograd.grad(expected @ scale, at),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_probit_value_and_gradients_equal_integral() -> None:
    """A fine grid, and its central differences."""
    sign, mean, variance = problem()
    z = np.linspace(-12, 12, 20_001)
    weight = np.exp(-0.5 * z**2)
    weight /= weight.sum()

    def integral(m: Tensor, v: Tensor) -> Tensor:
        f = m.numpy() + np.sqrt(v.numpy()) * z[:, None]
        return torch.from_numpy((weight[:, None] * log_ndtr(sign.numpy() * f)).sum(0))

    at = mean.clone().requires_grad_(), variance.clone().requires_grad_()
    ours = probit_expectation(sign, *at, **rule(40))
    slopes = torch.autograd.grad(ours.sum(), at)
    torch.testing.assert_close(ours.detach(), integral(mean, variance), rtol=1e-6, atol=1e-6)
    h = 1e-4
    by_mean = (integral(mean + h, variance) - integral(mean - h, variance)) / (2 * h)
    by_variance = (integral(mean, variance + h) - integral(mean, variance - h)) / (2 * h)
    torch.testing.assert_close(slopes[0], by_mean, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(slopes[1], by_variance, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_probit_certain_latent_has_finite_gradients(dtype: torch.dtype) -> None:
    sign, mean, variance = (part.to(dtype) for part in problem())
    at = mean.requires_grad_(), (0 * variance).requires_grad_()
    nats = probit_expectation(sign, *at, **{k: v.to(dtype) for k, v in rule(20).items()})
    torch.testing.assert_close(nats, torch.special.log_ndtr(sign * mean))
    slopes = torch.autograd.grad(nats.sum(), at)
    assert all(slope.isfinite().all() for slope in slopes)
    assert (slopes[1] == 0).all()


@pytest.mark.parametrize("mean", [-1e3, -1e5, -1e8])
def test_probit_gradients_are_accurate_in_the_tails(mean: float) -> None:
    """h(z) = −z − 1/z + 2/z³ − …, and E h is h of the mean if f is nearly certain."""
    at = torch.tensor([mean], dtype=torch.float64, requires_grad=True)
    certain = torch.tensor([1e-20], dtype=torch.float64)
    nats = probit_expectation(torch.ones_like(certain), at, certain, **rule(20))
    (slope,) = torch.autograd.grad(nats.sum(), at)
    assert slope.item() == pytest.approx(-mean - 1 / mean + 2 / mean**3, rel=1e-12)


def problem_softmax_expectation(N: int = 7, C: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """Classes, means and variances; the first row far out."""
    g = torch.Generator().manual_seed(0)
    mean = 2 * torch.randn(N, C, generator=g, dtype=torch.float64)
    mean[0] *= 300
    variance = 0.05 + 3 * torch.rand(N, C, generator=g, dtype=torch.float64)
    return torch.randint(C, (N,), generator=g), mean, variance


def slow(classes: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """Return the sum over the same nodes, for automatic differentiation."""
    nodes = normal_nodes(SOFTMAX_NODES, mean.shape[1])
    f = mean + variance.sqrt() * nodes[:, None]
    chosen = f.log_softmax(-1).gather(-1, classes.expand(len(nodes), -1)[..., None])
    return chosen[..., 0].mean(0)


@pytest.mark.parametrize("rows", [3, 512])
@pytest.mark.parametrize("C", [2, 3, 10])
def test_softmax_value_and_gradients_equal_sum_over_nodes(
    C: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(softmax_expectation_module, "_ROWS", rows)
    classes, mean, variance = problem_softmax_expectation(C=C)
    ours_at = mean.clone().requires_grad_(), variance.clone().requires_grad_()
    at = mean.clone().requires_grad_(), variance.clone().requires_grad_()
    ours, expected = softmax_expectation(classes, *ours_at), slow(classes, *at)
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)
    scale = torch.arange(1.0, 8.0, dtype=torch.float64)
    for a, b in zip(
        torch.autograd.grad(ours @ scale, ours_at),
        torch.autograd.grad(expected @ scale, at),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)
    with torch.no_grad():
        torch.testing.assert_close(softmax_expectation(classes, mean, variance), ours.detach())


def test_softmax_two_classes_equal_fine_grid() -> None:
    """Only the difference of two latents matters: one integral, and its central differences."""
    classes, mean, variance = problem_softmax_expectation(C=2)
    keep = slice(1, None)
    classes, mean, variance = classes[keep], 0.5 * mean[keep], 0.3 * variance[keep]
    z = np.linspace(-12, 12, 20_001)
    weight = np.exp(-0.5 * z**2)
    weight /= weight.sum()

    def integral(m: Tensor, v: Tensor) -> Tensor:
        sign = 1.0 - 2.0 * classes.numpy()
        gap = sign * (m[:, 0] - m[:, 1]).numpy() + np.sqrt(v.sum(1).numpy()) * z[:, None]
        return torch.from_numpy(-(weight[:, None] * np.logaddexp(0, -gap)).sum(0))

    at = mean.clone().requires_grad_(), variance.clone().requires_grad_()
    slopes = torch.autograd.grad(softmax_expectation(classes, *at).sum(), at)
    h = 1e-4
    for c in range(2):
        step = torch.zeros_like(mean)
        step[:, c] = h
        by_mean = (integral(mean + step, variance) - integral(mean - step, variance)) / (2 * h)
        by_variance = (integral(mean, variance + step) - integral(mean, variance - step)) / (2 * h)
        # 128 nodes in two dimensions: three digits.
        torch.testing.assert_close(slopes[0][:, c], by_mean, rtol=0, atol=3e-3)
        torch.testing.assert_close(slopes[1][:, c], by_variance, rtol=0, atol=5e-3)


@pytest.mark.parametrize("rows", [3, 512])
def test_softmax_coupling_equals_second_derivative(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(softmax_expectation_module, "_ROWS", rows)
    classes, mean, variance = problem_softmax_expectation()
    ours = softmax_coupling(mean, variance)
    for i in range(len(mean)):
        row = slice(i, i + 1)
        expected = -torch.autograd.functional.hessian(
            lambda m, row=row: slow(classes[row], m[None], variance[row]).sum(), mean[i]
        )
        torch.testing.assert_close(ours[i], expected, rtol=1e-9, atol=1e-11)


def test_softmax_certain_latent_has_finite_gradients() -> None:
    classes, mean, variance = problem_softmax_expectation()
    at = mean.clone().requires_grad_(), (0 * variance).requires_grad_()
    nats = softmax_expectation(classes, *at)
    chosen = mean.log_softmax(1).gather(1, classes[:, None])[:, 0]
    torch.testing.assert_close(nats.detach(), chosen)
    slopes = torch.autograd.grad(nats.sum(), at)
    assert all(slope.isfinite().all() for slope in slopes)
    assert (slopes[1] == 0).all()
