"""Leave-one-out densities of models, against fits without each row."""

import pytest
import torch
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel
from gpytorch.means import ConstantMean

from helpers.problems import problem
from helpers.site_problems import CASES, built, regression
from winnowgp.bounds import row_blocks
from winnowgp.data import ArraySource, Dataset, Source
from winnowgp.errors import InputError
from winnowgp.models import SparseGP, VariationalGP
from winnowgp.models.base import InducingModel
from winnowgp.models.kernels import prior_mean
from winnowgp.models.likelihoods import observation_model
from winnowgp.models.sgpr import exact_leave_one_out

N = 12


def data(*, weighted: bool = False) -> Dataset:
    p = problem(N=N, P=2)
    weights = 0.3 + torch.arange(N).remainder(4).double() if weighted else None
    return Dataset.of(p.X, p.Y, weights=weights)


def sparse(kernel: type = RBFKernel) -> SparseGP:
    mean = ConstantMean()
    mean.constant = 0.4
    return SparseGP(ScaleKernel(kernel(ard_num_dims=2)), problem(K=5).Z, mean=mean, noise=0.2)


def without(rows: Dataset, i: int) -> Dataset:
    return rows.part(torch.arange(rows.N)[torch.arange(rows.N) != i])


def refitted(model: InducingModel, rows: Dataset) -> torch.Tensor:
    """Density of each row under the optimal posterior of all others."""
    densities = []
    for i in range(rows.N):
        others, row = without(rows, i), rows.part(slice(i, i + 1))
        posterior = model.with_best_q(others).posterior(others)
        densities.append(posterior.log_density(row.X, row.Y).sum())
    return torch.stack(densities)


weighted = pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])


@weighted
@pytest.mark.parametrize("kernel", [RBFKernel, MaternKernel])
def test_sparse_leave_one_out_equals_refits(
    kernel: type, weighted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_blocks, "CHUNK", 5)
    model, rows = sparse(kernel), data(weighted=weighted)
    found = model.leave_one_out(rows)
    assert not found.requires_grad
    torch.testing.assert_close(found, refitted(model, rows), rtol=1e-8, atol=1e-8)


@weighted
@pytest.mark.parametrize("kernel", [RBFKernel, MaternKernel])
def test_exact_leave_one_out_equals_sparse_with_all_rows(kernel: type, weighted: bool) -> None:
    rows = data(weighted=weighted)
    model = sparse(kernel).with_candidates(rows.X)
    exact = exact_leave_one_out(model.kernel, data=rows, mean=model.mean, noise=model.noise)
    torch.testing.assert_close(model.leave_one_out(rows), exact, rtol=1e-7, atol=1e-7)


def test_sparse_leave_one_out_of_streamed_rows_equals_rows_in_memory(monkeypatch) -> None:
    monkeypatch.setattr(row_blocks, "CHUNK", 5)
    model, rows = sparse(), data()
    source: Source = ArraySource(rows.X.numpy(), rows.Y.numpy())
    assert source.as_dataset() is None
    torch.testing.assert_close(model.leave_one_out(source), model.leave_one_out(rows))


def test_gaussian_variational_leave_one_out_equals_sparse() -> None:
    sgpr, svgp, rows = regression()
    expected = sgpr.leave_one_out(rows)
    torch.testing.assert_close(svgp.leave_one_out(rows), expected, rtol=1e-6, atol=1e-6)
    weights = 0.5 + torch.arange(rows.N).remainder(3).double()
    rows = Dataset.of(rows.X, rows.Y, weights=weights)
    expected = sgpr.leave_one_out(rows)
    torch.testing.assert_close(svgp.leave_one_out(rows), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_variational_leave_one_out_equals_posterior_without_each_site(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the dense posterior of the other rows' sites."""
    monkeypatch.setattr(row_blocks, "CHUNK", 9)
    model, rows = built(case)
    chunks, inference = model._infer(rows, gain=1e-11)
    V = torch.cat([chunk.V for chunk in chunks], 1)
    t = torch.cat([chunk.t for chunk in chunks])
    observations = observation_model(model.likelihood)
    expected = []
    with torch.no_grad():
        for i in range(rows.N):
            others = torch.arange(rows.N) != i
            U, v, moments = V[:, others], V[:, i], []
            for p in range(model.P):
                w = inference.sites.precision[others, p]
                B = torch.eye(model.K).double() + (U * w) @ U.mT
                mean = v @ torch.linalg.solve(B, U @ inference.sites.linear[others, p])
                moments.append((mean, t[i] + v @ torch.linalg.solve(B, v)))
            mean, variance = (torch.stack(m)[None] for m in zip(*moments, strict=True))
            row = rows.part(slice(i, i + 1))
            mean = mean + prior_mean(model.mean, row.X)
            expected.append(observations.log_density(row.Y, mean, variance).sum())
    found = model.leave_one_out(rows)
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("case", ["bernoulli", "poisson", "softmax"])
def test_variational_leave_one_out_is_close_to_refits(case: str) -> None:
    """Fits without each row infer the other sites again, which changes densities a little."""
    model, rows = built(case)
    expected = refitted(model, rows)
    found = model.leave_one_out(rows)
    inside = model.with_best_q(rows).posterior(rows).log_density(rows.X, rows.Y).sum(1)
    # Most of the way from the density of rows that were fitted.
    assert (found - expected).abs().mean() < 0.2 * (inside - expected).abs().mean()


def test_variational_leave_one_out_of_streamed_rows_raises() -> None:
    _, model, rows = regression()
    source = ArraySource(rows.X.numpy(), rows.Y.numpy())
    assert isinstance(model, VariationalGP)
    with pytest.raises(InputError, match="`VariationalGP` needs all 24 rows in memory"):
        model.leave_one_out(source)
