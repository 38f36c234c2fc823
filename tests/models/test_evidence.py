"""The evidence that models report: exact, by conjugate gradients, or by the old bounds."""

import math

import pytest
import torch
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel
from gpytorch.means import ConstantMean

from helpers.oracles import log_normal
from helpers.problems import problem
from helpers.site_problems import built
from winnowgp.bounds import evidence
from winnowgp.bounds.collapsed import weight_correction
from winnowgp.data import ArraySource, Dataset, shard
from winnowgp.models import SparseGP
from winnowgp.models.kernels import covariance

N = 40
KERNELS = {
    "rbf": lambda: ScaleKernel(RBFKernel(ard_num_dims=2)),
    "matern": lambda: ScaleKernel(MaternKernel(nu=1.5, ard_num_dims=2)),
    "sum": lambda: ScaleKernel(RBFKernel()) + ScaleKernel(MaternKernel(nu=0.5)),
}


def data(*, weighted: bool = False) -> Dataset:
    p = problem(N=N, P=2)
    weights = 0.3 + torch.arange(N).remainder(4).double() if weighted else None
    return Dataset.of(p.X, p.Y, weights=weights)


def sparse(kernel: str = "rbf", K: int = 10) -> SparseGP:
    mean = ConstantMean()
    mean.constant = 0.4
    return SparseGP(KERNELS[kernel](), problem(K=K).Z, mean=mean, noise=0.2)


@torch.no_grad()
def oracle(model: SparseGP, rows: Dataset) -> float:
    noise = model.noise.expand(rows.N) if rows.weights is None else model.noise / rows.weights
    K = covariance(model.kernel, rows.X, rows.X) + torch.diag(noise)
    nats = log_normal(rows.Y - 0.4, K)
    if rows.weights is not None:
        nats = nats + rows.P * weight_correction(rows.weights, model.noise)
    return nats.item()


weighted = pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])


@weighted
@pytest.mark.parametrize("kernel", KERNELS)
def test_evidence_of_few_rows_is_exact(kernel: str, weighted: bool) -> None:
    model, rows = sparse(kernel), data(weighted=weighted)
    result = model.evidence(rows)
    assert result.exact
    # GPyTorch's Matérn-1/2 rounds small distances to 1e-8.
    assert result.lower == result.upper == pytest.approx(oracle(model, rows), abs=1e-6)
    assert result.lower == pytest.approx(model.dense_bound(rows)().item(), abs=1e-6)


@weighted
@pytest.mark.parametrize("kernel", KERNELS)
def test_evidence_of_more_rows_is_bounded_by_conjugate_gradients(
    kernel: str, weighted: bool
) -> None:
    model, rows = sparse(kernel), data(weighted=weighted)
    result, exact = model.evidence(rows, max_rows=N - 1), oracle(model, rows)
    assert result.method == "conjugate-gradient"
    assert model.fixed_bound(rows) < result.lower < exact < result.upper
    assert result.upper < model.upper_bound(rows)


def test_evidence_beyond_limits_is_bounded_by_elbo_and_trace(monkeypatch) -> None:
    model, rows = sparse(), data()
    monkeypatch.setattr(evidence, "MOST_ROWS", N - 1)
    result = model.evidence(rows, max_rows=N - 1)
    assert result.method == "trace"
    assert result.lower == model.fixed_bound(rows)
    assert result.upper == model.upper_bound(rows)


def test_evidence_of_streamed_rows_is_bounded_by_elbo_and_trace() -> None:
    model, rows = sparse(), data()
    result = model.evidence(ArraySource(rows.X.numpy(), rows.Y.numpy()))
    assert result.method == "trace"
    assert result.lower < oracle(model, rows) < result.upper


def test_evidence_of_sharded_rows_in_memory_is_exact() -> None:
    model, rows = sparse(), data()
    assert model.evidence(shard(rows)) == model.evidence(rows)


def test_evidence_of_singular_covariance_is_bounded_by_elbo_and_trace() -> None:
    """Noise far below the rounding of the kernel: no factorisation of K̂ exists."""
    model, rows = sparse(), data()
    repeated = Dataset.of(rows.X.repeat(2, 1), rows.Y.repeat(2, 1))
    with torch.no_grad():
        model.kernel.initialize(outputscale=1e18)
    result = model.evidence(repeated)
    assert result.method == "trace"
    assert result.lower <= result.upper


def test_evidence_of_single_precision_model_uses_double_precision() -> None:
    model, rows = sparse(), data()
    single = sparse().float()
    few = Dataset.of(rows.X.float(), rows.Y.float())
    for limit in (N, N - 1):
        a, b = single.evidence(few, max_rows=limit), model.evidence(rows, max_rows=limit)
        assert (a.lower, a.upper) == pytest.approx((b.lower, b.upper), abs=1e-3)
    assert next(single.parameters()).dtype == torch.float32


def test_variational_evidence_is_elbo_without_upper_bound() -> None:
    model, rows = built("bernoulli")
    result = model.evidence(rows)
    assert (result.lower, result.upper, result.method) == (
        model.fixed_bound(rows),
        math.inf,
        "none",
    )
    assert not result.exact
