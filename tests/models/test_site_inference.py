"""The best q(u): closed forms for regression, stationary elsewhere, and the profile's gradient."""

from collections.abc import Callable
from functools import partial
from math import inf
from typing import Any

import numpy as np
import pytest
import torch
from gpytorch.constraints import GreaterThan
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import (
    BernoulliLikelihood,
    GaussianLikelihood,
    Likelihood,
    PoissonLikelihood,
    SoftmaxLikelihood,
    StudentTLikelihood,
)
from gpytorch.means import ConstantMean
from scipy.optimize import minimize
from scipy.special import log_ndtr
from torch import Tensor
from torch.distributions import Normal

import winnowgp.models.profiled_bound as profiled_bound
import winnowgp.models.variational_gp as variational_gp
from winnowgp.bounds import Sites, WhitenedChunks
from winnowgp.data import Dataset
from winnowgp.errors import NotPositiveDefiniteError, UnsettledWarning
from winnowgp.gradients import all_masks
from winnowgp.models import LEAST_NOISE, SparseGP, VariationalGP
from winnowgp.models.chunked_bound import KernelChunks
from winnowgp.models.profiled_bound import SETTLED, best_q
from winnowgp.models.site_inference import inferred

N = 24


def rows() -> tuple[Tensor, Tensor]:
    """Inputs on a line, and a smooth function of them."""
    g = torch.Generator().manual_seed(0)
    X = 6 * torch.rand(N, 1, generator=g, dtype=torch.float64)
    return X, torch.sin(1.5 * X) + 0.2 * torch.randn(N, 1, generator=g, dtype=torch.float64)


def student() -> Likelihood:
    likelihood = StudentTLikelihood()
    likelihood.noise, likelihood.deg_free = torch.tensor(0.05), torch.tensor(3.0)
    return likelihood


def softmax() -> Likelihood:
    return SoftmaxLikelihood(num_classes=3, mixing_weights=False)


def mixed() -> Likelihood:
    likelihood = SoftmaxLikelihood(num_features=2, num_classes=3)
    weights = torch.tensor([[1.5, 0.0], [-0.5, 1.0], [0.3, -1.2]])
    likelihood.mixing_weights = torch.nn.Parameter(weights)
    return likelihood


def outliers(f: Tensor) -> Tensor:
    Y = f.clone()
    Y[::6] += 3.0
    return Y


def thirds(f: Tensor) -> Tensor:
    return (f > -0.4).double() + (f > 0.5).double()


CASES: dict[str, tuple[Callable[[], Likelihood], Callable[[Tensor], Tensor]]] = {
    "bernoulli": (BernoulliLikelihood, lambda f: (f > 0).double()),
    "two bernoullis": (BernoulliLikelihood, lambda f: torch.cat([f > 0, f < 0.4], 1).double()),
    "poisson": (PoissonLikelihood, lambda f: (3 * f.exp()).floor()),
    "student": (student, outliers),
    "softmax": (softmax, thirds),
    "mixed softmax": (mixed, thirds),
}
cases = pytest.mark.parametrize("case", CASES)


def built(case: str, K: int = 5, kernel=None) -> tuple[VariationalGP, Dataset]:
    X, f = rows()
    likelihood, targets = CASES[case]
    data = Dataset.of(X, targets(f))
    mean = ConstantMean()
    mean.constant = 0.3
    kernel = ScaleKernel(RBFKernel()) if kernel is None else kernel
    Z = torch.linspace(0.3, 5.7, K, dtype=torch.float64)[:, None]
    return (
        VariationalGP(kernel, Z, likelihood=likelihood(), targets=data.P, mean=mean),
        data,
    )


def regression() -> tuple[SparseGP, VariationalGP, Dataset]:
    X, f = rows()
    data = Dataset.of(X, torch.cat([f, f.square()], 1))
    kernel, mean = ScaleKernel(RBFKernel()), ConstantMean()
    likelihood = GaussianLikelihood(noise_constraint=GreaterThan(LEAST_NOISE)).double()
    mean.constant, likelihood.noise = 0.3, torch.tensor(0.15, dtype=torch.float64)
    Z = torch.linspace(0.3, 5.7, 5, dtype=torch.float64)[:, None]
    return (
        SparseGP(kernel, Z, mean=mean, noise=0.15),
        VariationalGP(kernel, Z, likelihood=likelihood, targets=2, mean=mean),
        data,
    )


def test_with_gaussian_noise_every_answer_is_that_of_sparse_regression() -> None:
    sparse, gp, data = regression()
    best = gp.with_best_q(data)
    expected = sparse.bound(data).detach()
    torch.testing.assert_close(best.bound(data).detach(), expected, rtol=0, atol=1e-6)
    assert gp.fixed_bound(data) == pytest.approx(expected.item(), abs=1e-6)
    X = torch.linspace(-1, 7, 15, dtype=torch.float64)[:, None]
    for observed in (False, True):
        ours = best.posterior(data).predict(X, observed=observed)
        theirs = sparse.posterior(data).predict(X, observed=observed)
        torch.testing.assert_close(ours.mean, theirs.mean, rtol=0, atol=1e-6)
        torch.testing.assert_close(ours.variance, theirs.variance, rtol=0, atol=1e-6)
    torch.testing.assert_close(
        best.posterior(data).log_density(data.X, data.Y),
        sparse.posterior(data).log_density(data.X, data.Y),
        rtol=0,
        atol=1e-6,
    )
    masks = all_masks(5)
    ours, theirs = gp.subset_statistics(data), sparse.subset_statistics(data)
    torch.testing.assert_close(ours.value(masks), theirs.value(masks), rtol=0, atol=1e-6)
    for mask in masks[::4]:
        torch.testing.assert_close(ours.flips(mask), theirs.flips(mask), rtol=0, atol=1e-6)


def test_with_gaussian_noise_the_profile_has_the_gradient_of_sparse_regression() -> None:
    sparse, gp, data = regression()
    for model in (sparse, gp):
        model.chunked_bound(data)().backward()
    theirs = dict(sparse.named_parameters())
    for name, parameter in gp.named_parameters():
        if name in ("q_mean", "q_factor"):
            assert parameter.grad is None
        else:
            ours, expected = parameter.grad, theirs[name].grad
            torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-6, msg=name)


@cases
def test_the_best_q_is_stationary_and_optimisers_find_no_better(case: str) -> None:
    gp, data = built(case)
    best = gp.with_best_q(data)
    start = best.bound(data)
    assert start.item() == pytest.approx(gp.fixed_bound(data), abs=1e-9)
    q = [best.q_mean, best.q_factor]
    for slope in torch.autograd.grad(start, q):
        # A last step of 1e-9 nats a row leaves slopes of about the root of that.
        torch.testing.assert_close(slope, torch.zeros_like(slope), rtol=0, atol=2e-4)
    optimiser = torch.optim.LBFGS(
        q, max_iter=60, line_search_fn="strong_wolfe", tolerance_grad=1e-9, tolerance_change=0
    )

    def loss() -> Tensor:
        optimiser.zero_grad()
        value = -best.bound(data)
        value.backward()
        return value

    optimiser.step(loss)
    assert best.bound(data).item() <= start.item() + 1e-7


@cases
def test_optimisers_from_the_prior_arrive_at_the_best_q(case: str) -> None:
    gp, data = built(case)
    expected = gp.fixed_bound(data)
    optimiser = torch.optim.LBFGS(
        [gp.q_mean, gp.q_factor], max_iter=80, line_search_fn="strong_wolfe", history_size=30
    )

    def loss() -> Tensor:
        optimiser.zero_grad()
        value = -gp.bound(data)
        value.backward()
        return value

    optimiser.step(loss)
    assert gp.bound(data).item() == pytest.approx(expected, abs=1e-3)
    assert gp.bound(data).item() <= expected + 1e-7


@torch.no_grad()
def found(case: str, **arguments):
    gp, data = built(case)
    blocks, _ = KernelChunks.of(data.X)(gp.kernel, gp.candidates)
    chunks = WhitenedChunks.for_values(blocks, data.N, **arguments)
    return best_q(chunks, data, mean=gp.mean, likelihood=gp.likelihood, gain=SETTLED)


@cases
def test_chunks_change_the_way_but_not_the_end(case: str) -> None:
    whole, parts = found(case), found(case, chunk=5, keep=0)
    assert parts.bound == pytest.approx(whole.bound, abs=1e-6)
    torch.testing.assert_close(parts.mean, whole.mean, rtol=0, atol=1e-4)
    torch.testing.assert_close(parts.variance, whole.variance, rtol=0, atol=1e-4)


@cases
def test_at_the_end_the_likelihood_asks_for_the_sites_it_has(case: str) -> None:
    at = found(case)
    torch.testing.assert_close(at.better.precision, at.sites.precision, rtol=0, atol=1e-4)
    torch.testing.assert_close(at.better.linear, at.sites.linear, rtol=0, atol=1e-4)
    # The bound is the evidence of the sites and what is left, which statistics add.
    assert at.sums.evidence().item() + at.constant() == pytest.approx(at.bound, abs=1e-9)


def test_outliers_of_a_heavy_tail_have_negative_precision() -> None:
    precision = found("student").sites.precision
    assert (precision[::6] < 0).any()
    assert (precision > 0).any()


@cases
def test_statistics_give_all_candidates_the_true_bound(case: str) -> None:
    gp, data = built(case)
    everything = torch.ones(1, 5, dtype=torch.bool)
    value = gp.subset_statistics(data).value(everything).item()
    # Statistics are made while climbing: to 1e-5 nats a row.
    assert value == pytest.approx(gp.fixed_bound(data), abs=1e-5 * N)


def test_a_subset_is_worth_the_evidence_at_the_same_sites() -> None:
    """To first order: less than a tenth of a nat from the subset's own best q here."""
    gp, data = built("bernoulli")
    masks = all_masks(5)[[0b11110, 0b01111, 0b10111]]
    values = gp.subset_statistics(data).value(masks)
    own = [gp.prune(mask).fixed_bound(data) for mask in masks]
    assert (values - torch.tensor(own, dtype=torch.float64)).abs().max().item() < 0.1


def test_starting_sites_without_a_covariance_are_forgotten() -> None:
    gp, data = built("bernoulli")
    with torch.no_grad():
        blocks, _ = KernelChunks.of(data.X)(gp.kernel, gp.candidates)
        chunks = WhitenedChunks.for_values(blocks, data.N)
        bad = torch.full((N, 1), -9.0, dtype=torch.float64)
        at = best_q(
            chunks,
            data,
            mean=gp.mean,
            likelihood=gp.likelihood,
            gain=SETTLED,
            start=Sites(bad, bad),
        )
    assert at.bound == pytest.approx(gp.fixed_bound(data), abs=1e-7)


def test_a_likelihood_without_finite_slopes_is_an_error() -> None:
    gp, data = built("bernoulli")
    with torch.no_grad():
        blocks, _ = KernelChunks.of(data.X)(gp.kernel, gp.candidates)
        chunks = WhitenedChunks.for_values(blocks, data.N)
    with pytest.raises(NotPositiveDefiniteError):
        inferred(chunks, lambda rows, mean, variance: (0 * mean * variance).sqrt(), P=1, gain=1e-6)


PROFILED = {
    **{case: (case, lambda: ScaleKernel(RBFKernel())) for case in CASES},
    "matern": ("bernoulli", lambda: ScaleKernel(MaternKernel(nu=2.5))),
}


@pytest.mark.parametrize(("case", "kernel"), PROFILED.values(), ids=PROFILED.keys())
def test_the_gradient_of_the_profile_is_that_of_central_differences(
    case: str, kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(variational_gp, "CLIMBING", 1e-13)
    gp, data = built(case, K=3, kernel=kernel())
    bound = gp.chunked_bound(data)
    bound().backward()
    h = 1e-4
    for name, parameter in gp.named_parameters():
        if name in ("q_mean", "q_factor"):
            assert parameter.grad is None
            continue
        flat = parameter.data.view(-1)
        expected = torch.empty_like(flat)
        for i in range(len(flat)):
            at = flat[i].item()
            ends = []
            for step in (h, -h):
                flat[i] = at + step
                ends.append(bound().item())
            flat[i] = at
            expected[i] = (ends[0] - ends[1]) / (2 * h)
        assert parameter.grad is not None, name
        ours = parameter.grad.view(-1)
        torch.testing.assert_close(ours, expected, rtol=2e-5, atol=2e-5, msg=f"{name}: {ours}")


def test_an_optimiser_that_moves_gets_the_values_of_one_that_does_not() -> None:
    """Values do not depend on the calls before, but to 1e-5 nats a row."""
    gp, data = built("softmax")
    bound = gp.chunked_bound(data)
    bound()
    with torch.no_grad():
        gp.kernel.initialize(outputscale=1.5)
    assert bound().item() == pytest.approx(gp.fixed_bound(data), abs=1e-5 * N)
    with torch.no_grad():
        gp.kernel.initialize(outputscale=40.0)
    assert bound().item() == pytest.approx(gp.fixed_bound(data), abs=1e-5 * N)


def test_an_optimiser_that_moves_gets_the_gradient_of_where_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(variational_gp, "CLIMBING", 1e-13)
    gp, data = built("bernoulli")
    moving = gp.chunked_bound(data)
    moving()
    with torch.no_grad():
        gp.kernel.initialize(outputscale=3.0)
    parameters = [*gp.kernel.parameters(), *gp.mean.parameters(), gp.candidates]
    ours = torch.autograd.grad(moving(), parameters)
    fresh = torch.autograd.grad(gp.chunked_bound(data)(), parameters)
    for a, b in zip(ours, fresh, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def two_rows() -> tuple[VariationalGP, Dataset]:
    X = torch.tensor([[0.0], [0.7]], dtype=torch.float64)
    data = Dataset.of(X, torch.tensor([1.0, 0.0], dtype=torch.float64))
    kernel = ScaleKernel(RBFKernel())
    kernel.outputscale = 2.0
    mean = ConstantMean()
    mean.constant = 0.4
    gp = VariationalGP(kernel, X[:1], likelihood=BernoulliLikelihood(), mean=mean)
    return gp, data


def prior(gp: VariationalGP, data: Dataset) -> tuple[np.ndarray, np.ndarray]:
    """Covariance of two rows, and which sign each has."""
    K = gp.kernel(data.X).to_dense().detach().numpy()
    return K, 2 * data.Y[:, 0].numpy() - 1


def test_with_every_row_a_point_the_bound_is_the_best_of_all_gaussians(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two rows: a maximum over mean and covariance, with expectations on a grid."""
    monkeypatch.setattr(variational_gp, "WARMING", 1e-9)
    gp, data = two_rows()
    K, sign = prior(gp, data)
    z = np.linspace(-9, 9, 4001)
    weight = np.exp(-0.5 * z**2)
    weight /= weight.sum()

    def loss(theta: np.ndarray) -> float:
        m = theta[:2]
        F = np.array([[np.exp(theta[2]), 0.0], [theta[3], np.exp(theta[4])]])
        S = F @ F.T
        f = 0.4 + m + np.sqrt(S.diagonal()) * z[:, None]
        nats = (weight[:, None] * log_ndtr(sign * f)).sum()
        inside = np.linalg.solve(K, S).trace() + m @ np.linalg.solve(K, m) - 2
        kl = 0.5 * (inside + np.linalg.slogdet(K)[1] - np.linalg.slogdet(S)[1])
        return kl - nats

    best = -minimize(loss, np.zeros(5), method="BFGS", options={"gtol": 1e-7}).fun
    assert gp.dense_bound(data)().item() == pytest.approx(best, abs=1e-5)
    assert gp.with_candidates(data.X).fixed_bound(data) == pytest.approx(best, abs=1e-7)


def test_the_bound_is_below_the_evidence_of_a_grid() -> None:
    gp, data = two_rows()
    K, sign = prior(gp, data)
    axis = np.linspace(-12, 12, 801)
    f = np.stack(np.meshgrid(axis, axis, indexing="ij"), -1)
    log_p = -0.5 * np.einsum("abi,ij,abj->ab", f, np.linalg.inv(K), f)
    p = np.exp(log_p) / np.exp(log_p).sum()
    evidence = np.log((p * np.exp(log_ndtr(sign * (0.4 + f)).sum(-1))).sum())
    gap = evidence - gp.dense_bound(data)().item()
    assert 0 < gap < 0.05
    assert gp.fixed_bound(data) < gp.dense_bound(data)().item()


class Rough(PoissonLikelihood):
    """Counts by quadrature that does not see what happens between its nodes."""

    def expected_log_prob(self, observations: Tensor, function_dist: Any, *args: Any, **_: Any):
        def log_prob(f: Tensor) -> Tensor:
            near = f.clamp_min(-30.0)
            return self.forward(near).log_prob(observations) + (f - near)

        return self.quadrature(log_prob, function_dist)


def large_counts(
    level: float, every: int, likelihood: Likelihood
) -> tuple[VariationalGP, Dataset, Sites]:
    """Counts far above a prior mean of zero, and sites as if they were seen with Gaussian noise."""
    X = torch.linspace(0, 6, 40, dtype=torch.float64)[:, None]
    Y = (level * (2 + torch.sin(2 * X))).round()
    kernel, mean = ScaleKernel(RBFKernel()), ConstantMean()
    kernel.outputscale = level**2
    gp = VariationalGP(kernel, X[::every], likelihood=likelihood, mean=mean)
    return gp, Dataset.of(X, Y), Sites(torch.ones_like(Y), 1 / Y)


@pytest.mark.parametrize(
    ("level", "every", "likelihood"),
    [
        (1e3, 2, PoissonLikelihood()),
        (1e4, 4, PoissonLikelihood()),
        (3e4, 2, PoissonLikelihood()),
        # Precisions must take tiny steps at first, and long ones again once the means have moved.
        (1e3, 2, Rough()),
        (5e4, 3, Rough()),
    ],
)
def test_far_from_the_prior_the_best_q_does_not_depend_on_the_start(
    level: float, every: int, likelihood: Likelihood
) -> None:
    gp, data, near = large_counts(level, every, likelihood)
    with torch.no_grad():
        blocks, _ = KernelChunks.of(data.X)(gp.kernel, gp.candidates)
        chunks = WhitenedChunks.for_values(blocks, data.N)
        search = partial(best_q, chunks, data, mean=gp.mean, likelihood=gp.likelihood, gain=SETTLED)
        far, close = search(), search(start=near)
    assert far.settled
    assert close.settled
    assert far.bound == pytest.approx(close.bound, rel=1e-8)


def test_a_search_that_runs_out_of_rounds_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    gp, data, _ = large_counts(1e3, 2, PoissonLikelihood())
    monkeypatch.setattr(profiled_bound, "inferred", partial(inferred, most=2))
    with pytest.warns(UnsettledWarning, match=r"the best q\(u\) was not found.*kernel variance"):
        gp.fixed_bound(data)
    # An optimiser on its way does not.
    gp.chunked_bound(data)()


@pytest.mark.parametrize("draw", range(4))
def test_where_the_kernel_overflows_a_climb_takes_a_shorter_step(draw: int) -> None:
    """Exponents of an RBF kernel are differences of numbers as large as x²/ℓ²: here 1e19."""
    g = torch.Generator().manual_seed(draw)
    X = 4 * torch.rand(20, 1, generator=g, dtype=torch.float64) - 2
    data = Dataset.of(X, torch.poisson(50 * (1.5 + torch.sin(3 * X)), generator=g))
    kernel, mean = ScaleKernel(RBFKernel()), ConstantMean()
    kernel.initialize(outputscale=1e3)
    mean.initialize(constant=75.0)
    gp = VariationalGP(kernel, X[:0], likelihood=PoissonLikelihood(), mean=mean)
    bound = gp.dense_bound(data)
    start = bound().item()
    gp.kernel.initialize(**{"base_kernel.lengthscale": 2e-10})
    try:
        value = bound().item()
    except NotPositiveDefiniteError:
        # Of most draws: an entry, and with it q(f), is infinite.
        value = -inf
    assert value < start
    # The sites of before are still good where the kernel is.
    gp.kernel.initialize(**{"base_kernel.lengthscale": 0.6931})
    assert bound().item() == pytest.approx(start, abs=1e-2)


class Told(Likelihood):
    """A user's own that defines its expectation: Gaussian noise of variance 0.15."""

    def forward(self, function_samples: Tensor, *args: Any, **kwargs: Any):
        return Normal(function_samples, 0.15**0.5)

    def expected_log_prob(self, observations: Tensor, function_dist: Any, *args: Any, **_: Any):
        nats = Normal(function_dist.mean, 0.15**0.5).log_prob(observations)
        return nats - function_dist.variance / 0.3


def test_a_likelihood_of_ones_own_that_defines_its_expectation_is_enough() -> None:
    sparse, gp, data = regression()
    ours = VariationalGP(gp.kernel, gp.candidates, likelihood=Told(), targets=2, mean=gp.mean)
    assert ours.fixed_bound(data) == pytest.approx(sparse.fixed_bound(data), abs=1e-6)
    found = ours.with_best_q(data).posterior(data).predict(data.X, observed=True)
    expected = sparse.posterior(data).predict(data.X, observed=True)
    torch.testing.assert_close(found.mean, expected.mean, rtol=0, atol=1e-6)
    torch.testing.assert_close(found.variance, expected.variance, rtol=0, atol=1e-6)
