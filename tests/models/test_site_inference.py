"""Site inference against dense optima, and Newton steps of the means against dense solves."""

from functools import partial
from typing import Any

import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import (
    Likelihood,
    PoissonLikelihood,
)
from gpytorch.means import ConstantMean
from torch import Tensor
from torch.distributions import Normal

import winnowgp.models.site_inference as mean_step_module
import winnowgp.models.site_updates as site_updates
from helpers.site_problems import CASES, N, built, regression
from winnowgp.bounds.row_blocks import RowBlocks, WhitenedChunks
from winnowgp.bounds.sites import Sites
from winnowgp.data import Dataset
from winnowgp.errors import ConvergenceWarning, NotPositiveDefiniteError
from winnowgp.gradients import all_masks
from winnowgp.models import VariationalGP
from winnowgp.models.chunked_kernels import chunked_kernel
from winnowgp.models.site_inference import infer_sites, mean_step
from winnowgp.models.svgp import FINAL_GAIN, best_q

cases = pytest.mark.parametrize("case", CASES)


def test_infer_sites_gaussian_equals_sparse_regression() -> None:
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
        torch.testing.assert_close(
            ours.marginal_gains(mask), theirs.marginal_gains(mask), rtol=0, atol=1e-6
        )


@cases
def test_infer_sites_optimum_is_stationary(case: str) -> None:
    gp, data = built(case)
    best = gp.with_best_q(data)
    start = best.bound(data)
    assert start.item() == pytest.approx(gp.fixed_bound(data), abs=1e-9)
    q = [best.q_mean, best.q_factor]
    for slope in torch.autograd.grad(start, q):
        # A last step of 1e-9 nats per row leaves slopes of about the square root of that.
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
def test_infer_sites_equals_optimiser_from_prior(case: str) -> None:
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
def whitened(
    gp: VariationalGP, data: Dataset, *, chunk: int | None = None, keep: int | None = None
) -> WhitenedChunks:
    blocks = RowBlocks.of(data, size=chunk)
    kernel, _ = chunked_kernel(gp.kernel, gp.candidates, blocks)
    return WhitenedChunks.for_values(kernel, blocks, keep=keep)


@torch.no_grad()
def found(case: str, **arguments):
    gp, data = built(case)
    chunks = whitened(gp, data, **arguments)
    return best_q(chunks, data, mean=gp.mean, likelihood=gp.likelihood, gain=FINAL_GAIN)


@cases
def test_infer_sites_chunks_do_not_change_optimum(case: str) -> None:
    whole, parts = found(case), found(case, chunk=5, keep=0)
    assert parts.bound == pytest.approx(whole.bound, abs=1e-6)
    torch.testing.assert_close(parts.mean, whole.mean, rtol=0, atol=1e-4)
    torch.testing.assert_close(parts.variance, whole.variance, rtol=0, atol=1e-4)


@cases
def test_infer_sites_optimum_has_implied_sites(case: str) -> None:
    at = found(case)
    torch.testing.assert_close(at.implied.precision, at.sites.precision, rtol=0, atol=1e-4)
    torch.testing.assert_close(at.implied.linear, at.sites.linear, rtol=0, atol=1e-4)
    # The bound is the evidence of the sites and what is left, which statistics add.
    assert at.sums.evidence().item() + at.constant() == pytest.approx(at.bound, abs=1e-9)


def test_infer_sites_heavy_tails_have_negative_precisions() -> None:
    precision = found("student").sites.precision
    assert (precision[::6] < 0).any()
    assert (precision > 0).any()


@cases
def test_site_statistics_all_candidates_equal_bound(case: str) -> None:
    gp, data = built(case)
    everything = torch.ones(1, 5, dtype=torch.bool)
    value = gp.subset_statistics(data).value(everything).item()
    # Statistics use the tolerance of training, 1e-5 nats per row.
    assert value == pytest.approx(gp.fixed_bound(data), abs=1e-5 * N)


def test_site_statistics_subset_equals_evidence_of_sites() -> None:
    """To first order: less than a tenth of a nat from the optimal q of the subset here."""
    gp, data = built("bernoulli")
    masks = all_masks(5)[[0b11110, 0b01111, 0b10111]]
    values = gp.subset_statistics(data).value(masks)
    own = [gp.prune(mask).fixed_bound(data) for mask in masks]
    assert (values - torch.tensor(own, dtype=torch.float64)).abs().max().item() < 0.1


def test_infer_sites_invalid_start_is_ignored() -> None:
    gp, data = built("bernoulli")
    with torch.no_grad():
        chunks = whitened(gp, data)
        bad = torch.full((N, 1), -9.0, dtype=torch.float64)
        at = best_q(
            chunks,
            data,
            mean=gp.mean,
            likelihood=gp.likelihood,
            gain=FINAL_GAIN,
            start=Sites(bad, bad),
        )
    assert at.bound == pytest.approx(gp.fixed_bound(data), abs=1e-7)


@pytest.mark.parametrize("case", ["softmax", "bernoulli"])
@pytest.mark.parametrize("scale", [1e6, 1e80, 1e155])
def test_infer_sites_distant_start_takes_few_evaluations(
    case: str, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    gp, data = built(case)
    with torch.no_grad():
        chunks = whitened(gp, data)
        search = partial(
            best_q, chunks, data, mean=gp.mean, likelihood=gp.likelihood, gain=FINAL_GAIN
        )
        anew = search()
        distant = Sites(scale * (anew.sites.linear + 1), anew.sites.precision)
        problem = mean_step_module._SeparateFunctions
        count, evaluate = 0, problem.evaluate

        def counted(*arguments: Any) -> mean_step_module.SiteInference:
            nonlocal count
            count += 1
            return evaluate(*arguments)

        monkeypatch.setattr(problem, "evaluate", counted)
        at = search(start=distant)
    assert at.converged
    assert at.bound == pytest.approx(anew.bound, abs=1e-6)
    assert count < 30


def test_infer_sites_infinite_slopes_raise() -> None:
    gp, data = built("bernoulli")
    with torch.no_grad():
        chunks = whitened(gp, data)
    with pytest.raises(NotPositiveDefiniteError):
        infer_sites(
            chunks, lambda rows, mean, variance: (0 * mean * variance).sqrt(), P=1, gain=1e-6
        )


class Rough(PoissonLikelihood):
    """Counts by Gauss-Hermite quadrature, which misses features between its nodes."""

    def expected_log_prob(self, observations: Tensor, function_dist: Any, *args: Any, **_: Any):
        def log_prob(f: Tensor) -> Tensor:
            near = f.clamp_min(-30.0)
            return self.forward(near).log_prob(observations) + (f - near)

        return self.quadrature(log_prob, function_dist)


def large_counts(
    level: float, every: int, likelihood: Likelihood
) -> tuple[VariationalGP, Dataset, Sites]:
    """Counts far above a prior mean of zero, and sites of Gaussian noise to start from."""
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
def test_infer_sites_far_from_prior_ignores_start(
    level: float, every: int, likelihood: Likelihood
) -> None:
    gp, data, near = large_counts(level, every, likelihood)
    with torch.no_grad():
        chunks = whitened(gp, data)
        search = partial(
            best_q, chunks, data, mean=gp.mean, likelihood=gp.likelihood, gain=FINAL_GAIN
        )
        far, close = search(), search(start=near)
    assert far.converged
    assert close.converged
    assert far.bound == pytest.approx(close.bound, rel=1e-8)


def test_best_q_without_convergence_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    gp, data, _ = large_counts(1e3, 2, PoissonLikelihood())
    monkeypatch.setattr(site_updates, "_ROUNDS", 2)
    with pytest.warns(ConvergenceWarning, match=r"has not converged.*kernel variance"):
        gp.fixed_bound(data)
    # `ProfiledBound` does not warn.
    gp.chunked_bound(data)()


class UserGaussian(Likelihood):
    """A user-defined likelihood with its own expectation: Gaussian noise of variance 0.15."""

    def forward(self, function_samples: Tensor, *args: Any, **kwargs: Any):
        return Normal(function_samples, 0.15**0.5)

    def expected_log_prob(self, observations: Tensor, function_dist: Any, *args: Any, **_: Any):
        nats = Normal(function_dist.mean, 0.15**0.5).log_prob(observations)
        return nats - function_dist.variance / 0.3


def test_best_q_user_likelihood_needs_expectation_only() -> None:
    sparse, gp, data = regression()
    ours = VariationalGP(
        gp.kernel, gp.candidates, likelihood=UserGaussian(), targets=2, mean=gp.mean
    )
    assert ours.fixed_bound(data) == pytest.approx(sparse.fixed_bound(data), abs=1e-6)
    found = ours.with_best_q(data).posterior(data).predict(data.X, observed=True)
    expected = sparse.posterior(data).predict(data.X, observed=True)
    torch.testing.assert_close(found.mean, expected.mean, rtol=0, atol=1e-6)
    torch.testing.assert_close(found.variance, expected.variance, rtol=0, atol=1e-6)


ROWS, M, P = 11, 4, 3


@torch.no_grad()
def chunks(chunk: int) -> WhitenedChunks:
    g = torch.Generator().manual_seed(0)
    X = torch.randn(ROWS, 2, generator=g, dtype=torch.float64)
    kernel = ScaleKernel(RBFKernel()).double()
    blocks = RowBlocks.of(Dataset(X, X), size=chunk)
    chunked, _ = chunked_kernel(kernel, X[:M], blocks)
    return WhitenedChunks.for_values(chunked, blocks)


def parts() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Precisions, positive-definite couplings with them on the diagonal, slopes and α."""
    g = torch.Generator().manual_seed(1)
    A = torch.randn(ROWS, P, P, generator=g, dtype=torch.float64)
    H = 4 * A @ A.mT
    slope, pull = torch.randn(2, ROWS, P, generator=g, dtype=torch.float64)
    return H.diagonal(dim1=1, dim2=2).clone(), H, slope, pull


def step_of(coupled: bool, chunk: int):
    whitened = chunks(chunk)
    V = torch.cat([part.V for part in whitened], 1)
    precision, H, slope, pull = parts()
    B = torch.stack([torch.eye(M).to(V) + (V * precision[:, p]) @ V.mT for p in range(P)])
    step = mean_step(
        whitened,
        roots=torch.linalg.cholesky(B),
        precision=precision,
        residual=slope - pull,
        lifted=V @ (slope - pull),
        coupling=H if coupled else None,
    )
    return V, step


@pytest.mark.parametrize("chunk", [ROWS, 4])
@pytest.mark.parametrize("coupled", [False, True])
def test_mean_step_solves_newton_equations(
    coupled: bool, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mean_step_module, "_PRECISE", 1e-10)
    V, step = step_of(coupled, chunk)
    precision, H, slope, pull = parts()
    if not coupled:
        H = torch.diag_embed(precision)
    # Over (point, latent function) pairs: I + Σ_i v_i v_iᵀ ⊗ H_i.
    A = torch.einsum("mi,ni,ipq->mpnq", V, V, H).reshape(M * P, M * P)
    A += torch.eye(M * P).to(A)
    expected = torch.linalg.solve(A, (V @ (slope - pull)).flatten()).reshape(M, P)
    torch.testing.assert_close(step.q_mean, expected, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("precise", [0.5, 1e-10])
@pytest.mark.parametrize("coupled", [False, True])
def test_mean_step_inexact_has_form_of_sites(
    coupled: bool, precise: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mean_step_module, "_PRECISE", precise)
    V, step = step_of(coupled, 4)
    torch.testing.assert_close(step.q_mean, V @ step.alpha, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(step.mean, V.mT @ step.q_mean, rtol=1e-9, atol=1e-9)
