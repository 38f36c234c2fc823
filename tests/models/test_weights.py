"""A row of weight w is equivalent to w equal rows, in all methods of all models."""

from collections.abc import Callable

import pytest
import torch
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import (
    BernoulliLikelihood,
    GaussianLikelihood,
    LaplaceLikelihood,
    Likelihood,
    PoissonLikelihood,
    SoftmaxLikelihood,
    StudentTLikelihood,
)
from gpytorch.means import ConstantMean
from torch import Tensor
from torch.distributions import Normal

from helpers.oracles import collapsed, log_normal
from helpers.problems import problem
from winnowgp.data import Dataset
from winnowgp.models import DeepGP, DeepLayer, SparseGP, VariationalGP
from winnowgp.models.base import InducingModel
from winnowgp.models.deep_sites import deep_sites
from winnowgp.models.kernels import covariance, prior_mean
from winnowgp.typing import Scalar

COUNTS = torch.tensor([1, 3, 1, 2, 5, 1, 1, 2, 4, 1, 1, 2])


def weighted(Y: Tensor | None = None, *, fractions: bool = False) -> Dataset:
    """Return a dozen rows with weights of 1 to 5, or of 0.3 to 1.5."""
    rows = problem(N=12, P=2)
    weights = COUNTS.double()
    return Dataset.of(
        rows.X, rows.Y if Y is None else Y, weights=0.3 * weights if fractions else weights
    )


def repeated(data: Dataset) -> Dataset:
    """Return the data with each row repeated as often as its weight."""
    assert data.weights is not None
    times = data.weights.round().long()
    return Dataset.of(data.X.repeat_interleave(times, 0), data.Y.repeat_interleave(times, 0))


def sparse(kernel: type = RBFKernel) -> SparseGP:
    made = SparseGP(
        ScaleKernel(kernel(ard_num_dims=2)), problem(K=5).Z, mean=ConstantMean(), noise=0.3
    )
    made.mean.initialize(constant=0.2)
    return made


def variational(likelihood: Likelihood, targets: int = 1) -> VariationalGP:
    kernel = ScaleKernel(RBFKernel(ard_num_dims=2))
    model = VariationalGP(kernel, problem(K=5).Z, likelihood=likelihood, targets=targets)
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        model.q_mean.copy_(0.3 * torch.randn(model.q_mean.shape, generator=g).double())
    return model


def classes(C: int) -> Tensor:
    return torch.arange(12).remainder(C).double()[:, None]


CASES: dict[str, Callable[[], tuple[InducingModel, Dataset]]] = {
    "gaussian": lambda: (sparse(), weighted()),
    "autograd kernel": lambda: (sparse(MaternKernel), weighted()),
    "variational gaussian": lambda: (variational(GaussianLikelihood(), 2), weighted()),
    "bernoulli": lambda: (variational(BernoulliLikelihood()), weighted(classes(2))),
    "poisson": lambda: (variational(PoissonLikelihood()), weighted(classes(4))),
    "student-t": lambda: (variational(StudentTLikelihood(), 2), weighted()),
    "laplace": lambda: (variational(LaplaceLikelihood(), 2), weighted()),
    "softmax": lambda: (
        variational(SoftmaxLikelihood(num_classes=3, mixing_weights=False)),
        weighted(classes(3)),
    ),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> tuple[InducingModel, Dataset]:
    return CASES[request.param]()


def slopes(model: InducingModel, value: Scalar) -> dict[str, Tensor]:
    model.zero_grad()
    value.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_alike(model: InducingModel, a: Scalar, b: Scalar, tolerance: float = 1e-9) -> None:
    """Check that two functions have the same value and gradient."""
    torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)
    found, wanted = slopes(model, a), slopes(model, b)
    assert found.keys() == wanted.keys() != set()
    for name, slope in wanted.items():
        atol = tolerance * max(1.0, slope.abs().max().item())
        torch.testing.assert_close(found[name], slope, atol=atol, rtol=tolerance, msg=name)


def test_weights_bound_and_gradient_equal_repeated_rows(case) -> None:
    model, data = case
    assert_alike(model, model.bound(data), model.bound(repeated(data)))


def test_weights_optimal_q_equals_repeated_rows(case) -> None:
    model, data = case
    assert model.fixed_bound(data) == pytest.approx(model.fixed_bound(repeated(data)), abs=1e-7)
    assert model.upper_bound(data) == pytest.approx(model.upper_bound(repeated(data)), abs=1e-7)


def test_weights_chunked_bound_equals_repeated_rows(case) -> None:
    model, data = case

    def climbed(rows: Dataset) -> Scalar:
        if isinstance(model, SparseGP):
            return model.chunked_bound(rows)()
        assert isinstance(model, VariationalGP)
        # To convergence, beyond the tolerance of training.
        return model._profiled(rows, model.candidates, gain=1e-12)()

    tolerance = 1e-9 if isinstance(model, SparseGP) else 1e-5
    assert_alike(model, climbed(data), climbed(repeated(data)), tolerance)


def test_weights_dense_bound_equals_repeated_rows(case) -> None:
    model, data = case
    if isinstance(model, SparseGP):
        assert_alike(model, model.dense_bound(data)(), model.dense_bound(repeated(data))(), 1e-7)
        return
    # Equal rows would be duplicate points: distinct rows give the same bound.
    wanted = model.with_candidates(data.X).fixed_bound(repeated(data))
    assert model.dense_bound(data)().item() == pytest.approx(wanted, abs=2e-3)


def test_weights_subsets_and_gains_equal_repeated_rows(case) -> None:
    model, data = case
    masks = torch.rand(6, model.K, generator=torch.Generator().manual_seed(2)) < 0.6
    masks[0] = False
    for function in (
        lambda rows: model.subset_objective(rows).value(masks),
        lambda rows: model.subset_objective(rows).relaxed_value(0.9 * masks.double() + 0.05),
    ):
        torch.testing.assert_close(function(data), function(repeated(data)), atol=1e-8, rtol=1e-8)
    a, b = model.subset_statistics(data), model.subset_statistics(repeated(data))
    loose = 1e-8 if isinstance(model, SparseGP) else 1e-3
    torch.testing.assert_close(a.value(masks), b.value(masks), atol=loose, rtol=loose)
    torch.testing.assert_close(
        a.marginal_gains(masks[1]), b.marginal_gains(masks[1]), atol=loose, rtol=loose
    )
    assert a.N == b.N == COUNTS.sum()


def test_weights_predictions_equal_repeated_rows(case) -> None:
    model, data = case
    rows = problem(N=7, seed=3).X
    a, b = (
        model.with_best_q(d).posterior(d).predict(rows, observed=False)
        for d in (data, repeated(data))
    )
    torch.testing.assert_close(a.mean, b.mean, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(a.variance, b.variance, atol=1e-6, rtol=1e-6)


def test_weights_fractions_are_powers_of_density() -> None:
    """Against dense covariances: N(y | f, σ²)^w is N(y | f, σ²/w) but for a factor."""
    model, data = sparse(), weighted(fractions=True)
    assert data.weights is not None
    noise = model.noise.detach()
    Y = data.Y - prior_mean(model.mean, data.X).detach()
    with torch.no_grad():
        Kuu = covariance(model.kernel, model.candidates, model.candidates)
        Kuf = covariance(model.kernel, model.candidates, data.X)
        Kff = covariance(model.kernel, data.X, data.X)
        once = Normal(0.0, noise.sqrt()).log_prob(torch.zeros(()).double())
        wide = Normal(0.0, (noise / data.weights).sqrt()).log_prob(torch.zeros(12).double())
        factor = 2 * (data.weights * once - wide).sum()
        wanted = collapsed(Kuu, Kuf, Kff, Y, noise / data.weights) + factor
        exact = log_normal(Y, Kff + torch.diag(noise / data.weights)) + factor
        assert model.bound(data).item() == pytest.approx(wanted.item(), abs=1e-8)
        assert model.fixed_bound(data) == pytest.approx(wanted.item(), abs=1e-8)
        assert model.chunked_bound(data)().item() == pytest.approx(wanted.item(), abs=1e-4)
        assert model.dense_bound(data)().item() == pytest.approx(exact.item(), abs=1e-8)
        assert wanted < exact < model.upper_bound(data)


def deep() -> DeepGP:
    X = problem(K=5).Z
    layers = [
        DeepLayer(ScaleKernel(RBFKernel(ard_num_dims=2)), X + 0.1 * number, outputs=outputs)
        for number, outputs in enumerate((2, 1))
    ]
    return DeepGP(layers, likelihood=StudentTLikelihood().double())


def test_weights_deep_gp_equals_repeated_rows() -> None:
    """With the same samples of the hidden layer for equal rows, the bounds are equal."""
    model, data = deep(), weighted(problem(N=12, P=1).Y)
    noise = model.base_samples(12, 3, torch.Generator().manual_seed(0))
    again = [eps.repeat_interleave(COUNTS, 1) for eps in noise]
    a, b = model.evaluated(data, eps=noise), model.evaluated(repeated(data), eps=again)
    torch.testing.assert_close(a.bound, b.bound, atol=1e-9, rtol=1e-9)
    pairs = zip(
        deep_sites(model, data, eps=noise),
        deep_sites(model, repeated(data), eps=again),
        model.layers,
        strict=True,
    )
    for few, many, layer in pairs:
        one, other = few.improved(layer), many.improved(layer)
        torch.testing.assert_close(one.q_mean, other.q_mean, atol=1e-8, rtol=1e-8)
        torch.testing.assert_close(one.q_factor.abs(), other.q_factor.abs(), atol=1e-8, rtol=1e-8)
