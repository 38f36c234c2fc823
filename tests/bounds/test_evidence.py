"""The exact evidence and its two-sided bounds, against dense covariances."""

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from helpers.oracles import explained, log_normal
from helpers.problems import Problem, problem
from winnowgp.bounds import evidence
from winnowgp.bounds.collapsed import weight_correction
from winnowgp.bounds.evidence import (
    Evidence,
    ExplainedCovariance,
    GaussianRows,
    ResidualMoments,
    affordable_iterations,
    conjugate_gradient_evidence,
    exact_evidence,
    exact_rows,
    log_det_bounds,
    quadratic_bounds,
    residual_moments,
    residual_trace,
)
from winnowgp.errors import NotPositiveDefiniteError

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluate the covariance in blocks of a few rows, the last one shorter."""
    monkeypatch.setattr(evidence, "_ELEMENTS", {"cpu": 200})


def gaussian_rows(p: Problem, *, weights: Tensor | None = None) -> GaussianRows:
    return GaussianRows(p.X, p.Y, kff=p.kff, noise=p.noise, covariance=p.kernel, weights=weights)


def some_weights(N: int) -> Tensor:
    return 0.3 + torch.arange(N).remainder(4).double()


def oracle(p: Problem, weights: Tensor | None = None) -> float:
    """log p(Y) through the dense covariance of all observations."""
    if weights is None:
        return log_normal(p.Y, p.Kff + p.noise * torch.eye(len(p.X)).double()).item()
    K = p.Kff + torch.diag(p.noise / weights)
    return (log_normal(p.Y, K) + p.Y.shape[1] * weight_correction(weights, p.noise)).item()


def dense_residual(p: Problem, rows: GaussianRows) -> Tensor:
    """A = Q̂^{-½} (K_ff − Q_ff) Q̂^{-½}."""
    Q = explained(p.Kuu, p.Kuf)
    root = torch.linalg.cholesky(Q + torch.diag(rows.variances())).inverse()
    return root @ (p.Kff - Q) @ root.mT


weighted = pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])


@weighted
@pytest.mark.parametrize("P", [1, 3])
def test_exact_evidence_equals_dense_normal(P: int, weighted: bool) -> None:
    p = problem(N=25, P=P)
    weights = some_weights(25) if weighted else None
    result = exact_evidence(gaussian_rows(p, weights=weights))
    assert result.exact
    assert result.lower == result.upper == pytest.approx(oracle(p, weights), abs=1e-9)


def test_factor_is_lower_and_reproduces_covariance() -> None:
    p, weights = problem(), some_weights(25)
    L = gaussian_rows(p, weights=weights).factor()
    assert torch.equal(L, L.tril())
    torch.testing.assert_close(L @ L.mT, p.Kff + torch.diag(p.noise / weights))


def test_factor_of_indefinite_covariance_raises() -> None:
    p = problem()
    rows = GaussianRows(p.X, p.Y, p.kff, p.noise, covariance=lambda A, B: 9 * p.kernel(A, B))
    with pytest.raises(NotPositiveDefiniteError, match="25 observations could not be factorised"):
        rows.factor()


def test_factor_with_pivot_below_noise_raises() -> None:
    """Errors of the covariance that are as large as the noise: the factor would be meaningless."""
    X, noise = torch.zeros(2, 1).double(), torch.tensor(0.01).double()
    rows = GaussianRows(X, X, X[:, 0] + 1, noise, covariance=lambda A, B: 1.008 * (A + B.mT + 1))
    with pytest.raises(NotPositiveDefiniteError, match="2 observations could not be factorised"):
        rows.factor()


def test_product_equals_dense_product() -> None:
    p, weights = problem(), some_weights(25)
    v = torch.randn(25, 4, generator=torch.Generator().manual_seed(1)).double()
    expected = (p.Kff + torch.diag(p.noise / weights)) @ v
    torch.testing.assert_close(gaussian_rows(p, weights=weights).product(v), expected)


def test_product_and_factor_use_exact_variances() -> None:
    """The diagonal of a covariance between blocks may be rounded."""
    p = problem()

    def rounded(A: Tensor, B: Tensor) -> Tensor:
        K = p.kernel(A, B)
        return torch.where(K == 1.7, K - 0.01, K)

    rows = GaussianRows(p.X, p.Y, p.kff, p.noise, covariance=rounded)
    dense = p.Kff + p.noise * torch.eye(25).double()
    torch.testing.assert_close(rows.product(torch.eye(25).double()), dense)
    L = rows.factor()
    torch.testing.assert_close(L @ L.mT, dense)
    torch.testing.assert_close(
        residual_moments(rows, ExplainedCovariance.of(gaussian_rows(p), p.Z)).trace,
        dense_residual(p, rows).trace().item(),
        rtol=1e-8,
        atol=0,
    )


@weighted
def test_explained_covariance_solves_and_has_determinant(weighted: bool) -> None:
    p = problem()
    rows = gaussian_rows(p, weights=some_weights(25) if weighted else None)
    low_rank = ExplainedCovariance.of(rows, p.Z)
    Q = explained(p.Kuu, p.Kuf) + torch.diag(rows.variances())
    torch.testing.assert_close(
        low_rank.solve(p.Y), torch.linalg.solve(Q, p.Y), rtol=1e-8, atol=1e-8
    )
    assert low_rank.log_det() == pytest.approx(torch.logdet(Q).item(), abs=1e-8)


@weighted
def test_residual_moments_equal_those_of_dense_matrix(weighted: bool) -> None:
    p = problem()
    rows = gaussian_rows(p, weights=some_weights(25) if weighted else None)
    low_rank, A = ExplainedCovariance.of(rows, p.Z), dense_residual(p, rows)
    moments = residual_moments(rows, low_rank)
    assert moments.trace == pytest.approx(A.trace().item(), rel=1e-8)
    assert moments.square == pytest.approx(A.square().sum().item(), rel=1e-8)
    S = (p.Kff - explained(p.Kuu, p.Kuf)) / (rows.variances()[:, None] * rows.variances()).sqrt()
    assert moments.largest == pytest.approx(S.abs().sum(1).max().item(), rel=1e-8)
    assert moments.largest >= torch.linalg.eigvalsh(A).max().item()
    whole = residual_trace(rows, low_rank)
    assert whole.trace == pytest.approx(S.trace().item(), rel=1e-8)
    assert whole.trace >= moments.trace


def spectrum(seed: int) -> Tensor:
    """Forty non-negative eigenvalues of very different sizes; some are zero."""
    g = torch.Generator().manual_seed(seed)
    values = (4 * torch.randn(40, generator=g, dtype=torch.float64)).exp()
    return torch.where(torch.rand(40, generator=g) < 0.2, 0.0, values / 10**seed)


@pytest.mark.parametrize("seed", range(8))
def test_log_det_bounds_enclose_determinant_and_improve_on_jensen(seed: int) -> None:
    values = spectrum(seed)
    exact = values.log1p().sum().item()
    t, f = values.sum().item(), values.square().sum().item()
    _, jensen = log_det_bounds(40, ResidualMoments(t))
    assert jensen == pytest.approx(40 * math.log1p(t / 40))
    for largest in (values.max().item(), 3 * values.max().item(), math.inf):
        lower, upper = log_det_bounds(40, ResidualMoments(t, f, largest))
        assert 0 < lower <= exact * (1 + 1e-12)
        assert exact * (1 - 1e-12) <= upper <= jensen


def test_log_det_bounds_are_exact_for_two_eigenvalues() -> None:
    """A rule with a node at 0 or β is exact if all eigenvalues are nodes."""
    t, f = 7 * 0.6, 7 * 0.6**2
    exact = 7 * math.log1p(0.6)
    assert log_det_bounds(40, ResidualMoments(t, f, 0.6)) == pytest.approx((exact, exact))
    assert log_det_bounds(7, ResidualMoments(t, f, 0.6)) == pytest.approx((exact, exact))
    t, f = 7 * 0.6 + 33 * 0.1, 7 * 0.6**2 + 33 * 0.1**2
    exact += 33 * math.log1p(0.1)
    assert log_det_bounds(40, ResidualMoments(t, f, 0.6))[1] == pytest.approx(exact)


def test_log_det_bounds_of_zero_matrix_are_zero() -> None:
    assert log_det_bounds(5, ResidualMoments(0.0, 0.0, 0.0)) == (0.0, 0.0)


@pytest.mark.parametrize("iterations", [0, 1, 2, 4, 60])
def test_quadratic_bounds_enclose_quadratic_form(iterations: int) -> None:
    p = problem(N=40, K=4, P=3)
    rows = gaussian_rows(p)
    low_rank = ExplainedCovariance.of(rows, p.Z)
    K = p.Kff + p.noise * torch.eye(40).double()
    exact = (p.Y * torch.linalg.solve(K, p.Y)).sum().item()
    fit, slack = quadratic_bounds(rows, low_rank, max_iterations=iterations, tolerance=1e-13)
    assert fit - 1e-9 <= exact <= fit + slack + 1e-9
    if iterations == 60:
        assert slack < 1e-9
        assert fit == pytest.approx(exact, abs=1e-9)
    if iterations == 0:
        Q = explained(p.Kuu, p.Kuf) + p.noise * torch.eye(40).double()
        assert (fit, slack) == pytest.approx((0, (p.Y * torch.linalg.solve(Q, p.Y)).sum().item()))


def test_quadratic_bounds_stop_at_tolerance() -> None:
    p = problem(N=40, K=4)
    rows = gaussian_rows(p)
    low_rank, products = ExplainedCovariance.of(rows, p.Z), []

    def counted(A: Tensor, B: Tensor) -> Tensor:
        products.append(len(B))
        return p.kernel(A, B)

    rows = GaussianRows(p.X, p.Y, p.kff, p.noise, covariance=counted)
    counts = []
    for tolerance in (1e3, 0.5, 1e-6):
        products.clear()
        _, slack = quadratic_bounds(rows, low_rank, max_iterations=99, tolerance=tolerance)
        counts.append(products.count(40))
        assert 0.5 * slack <= tolerance * (1 + 1e-6)
    # One product evaluates the final residual.
    assert counts[0] == 1 < counts[1] < counts[2]


@weighted
@pytest.mark.parametrize("K", [0, 1, 6, 15])
@pytest.mark.parametrize("moments", [False, True], ids=["trace", "moments"])
def test_conjugate_gradient_bounds_enclose_evidence(K: int, moments: bool, weighted: bool) -> None:
    p = problem(N=30, K=K, P=2)
    weights = some_weights(30) if weighted else None
    rows, exact = gaussian_rows(p, weights=weights), oracle(p, weights)
    for iterations in (0, 1, 3, 100):
        bound = conjugate_gradient_evidence(rows, p.Z, max_iterations=iterations, moments=moments)
        assert bound.lower <= exact <= bound.upper
        assert bound.method == "conjugate-gradient"
        assert not bound.exact


@weighted
@pytest.mark.parametrize("moments", [False, True], ids=["trace", "moments"])
def test_conjugate_gradient_bounds_with_all_rows_equal_evidence(
    moments: bool, weighted: bool
) -> None:
    p = problem(N=30)
    weights = some_weights(30) if weighted else None
    rows = gaussian_rows(p, weights=weights)
    bound = conjugate_gradient_evidence(rows, p.X, tolerance=1e-12, moments=moments)
    exact = oracle(p, weights)
    assert (bound.lower, bound.upper) == pytest.approx((exact, exact), abs=1e-6)


def test_conjugate_gradient_bounds_equal_dense_terms() -> None:
    """At convergence only the determinant is uncertain."""
    p = problem(N=30, K=8)
    rows = gaussian_rows(p)
    bound = conjugate_gradient_evidence(rows, p.Z, tolerance=1e-14)
    A, K = dense_residual(p, rows), p.Kff + p.noise * torch.eye(30).double()
    S = (p.Kff - explained(p.Kuu, p.Kuf)) / p.noise
    known = ResidualMoments(A.trace().item(), A.square().sum().item(), S.abs().sum(1).max().item())
    Q_det = torch.logdet(K) - torch.logdet(A + torch.eye(30).double())
    fit = (p.Y * torch.linalg.solve(K, p.Y)).sum()
    upper, lower = (
        (-0.5 * (2 * (30 * math.log(2 * math.pi) + Q_det + term) + fit)).item()
        for term in log_det_bounds(30, known)
    )
    assert (bound.lower, bound.upper) == pytest.approx((lower, upper), abs=1e-7)
    exact = oracle(p)
    plain = conjugate_gradient_evidence(rows, p.Z, tolerance=1e-14, moments=False)
    assert plain.lower < bound.lower < exact < bound.upper < plain.upper


def test_bounds_of_nearly_singular_covariance_enclose_evidence() -> None:
    """Close and repeated rows under a smooth kernel, with little noise."""
    p = problem(N=60, K=20, D=1, P=1, lengthscale=3.0)
    X = torch.cat([p.X[:30], p.X[:30]])
    p = Problem(p.Z, X, torch.sin(X), noise=torch.tensor(1e-5).double(), lengthscale=3.0)
    assert torch.linalg.cond(p.Kff) > 1e14
    rows, exact = gaussian_rows(p), oracle(p)
    assert exact_evidence(rows).lower == pytest.approx(exact, abs=1e-5)
    bound = conjugate_gradient_evidence(rows, p.Z)
    assert bound.lower - 1e-4 <= exact <= bound.upper + 1e-4
    assert bound.upper - bound.lower < 1.0


def test_exact_rows_and_iterations_follow_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    assert exact_rows(CPU) == evidence.EXACT_ROWS["cpu"]
    rows = gaussian_rows(problem())
    assert affordable_iterations(rows, 6) == evidence._MOST_ITERATIONS
    monkeypatch.setattr(evidence, "_WORK", {"cpu": 2 * 25**2 * 54 * 20.5})
    assert affordable_iterations(rows, 6) == 20
    monkeypatch.setattr(evidence, "_WORK", {"cpu": 2 * 25**2 * 54 * 9.5})
    assert affordable_iterations(rows, 6) == 0
    monkeypatch.undo()
    monkeypatch.setattr(evidence, "MOST_ROWS", 24)
    assert affordable_iterations(rows, 6) == 0


def test_conjugate_gradient_determinant_follows_work(monkeypatch: pytest.MonkeyPatch) -> None:
    p = problem()
    bounds = partial(conjugate_gradient_evidence, gaussian_rows(p), p.Z)
    assert bounds() == bounds(moments=True) != bounds(moments=False)
    monkeypatch.setattr(evidence, "_WORK", {"cpu": 1.0})
    assert bounds() == bounds(moments=False)


def test_evidence_is_exact_by_method_only() -> None:
    assert Evidence(1.0, 1.0, "exact").exact
    assert not Evidence(1.0, 1.0, "trace").exact
