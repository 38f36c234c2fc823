"""Held-out densities by cross-validation, against explicit splits."""

import math
from collections.abc import Sequence

import pytest
import torch
from gpytorch.kernels import MaternKernel, ScaleKernel
from gpytorch.means import ConstantMean
from torch import Tensor
from torch.distributions import MultivariateNormal

from helpers.problems import problem
from helpers.site_problems import CASES, built
from winnowgp.data import Dataset
from winnowgp.errors import InputError
from winnowgp.models import SparseGP
from winnowgp.models.kernels import covariance, prior_mean
from winnowgp.selection import elimination_frontier
from winnowgp.training.cross_validation import CrossValidation, PredictiveGap

N = 23


def rows(*, weighted: bool = False) -> Dataset:
    p = problem(N=N, P=2)
    weights = 0.3 + torch.arange(N).remainder(4).double() if weighted else None
    return Dataset.of(p.X, p.Y, weights=weights)


def sparse(Z: Tensor) -> SparseGP:
    mean = ConstantMean()
    mean.constant = 0.4
    return SparseGP(ScaleKernel(MaternKernel(ard_num_dims=2)), Z, mean=mean, noise=0.2)


def split(data: Dataset, held: list[int]) -> tuple[Dataset, Dataset]:
    rest = [i for i in range(data.N) if i not in held]
    return data.part(torch.tensor(rest)), data.part(torch.tensor(held))


def order(data: Dataset) -> Tensor:
    return torch.randperm(data.N, generator=torch.Generator().manual_seed(1))


weighted = pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])


@weighted
def test_folds_are_tenths_of_the_rows_and_disjoint(weighted: bool) -> None:
    data = rows(weighted=weighted)
    folds = CrossValidation.of(data, order(data), folds=10)
    assert [len(fold) for fold in folds.folds] == [3] * 7 + [2]
    assert sorted(torch.cat(folds.folds).tolist()) == list(range(N))
    some = CrossValidation.of(data, order(data), folds=2)
    assert len(some.folds) == 2
    assert len(CrossValidation.of(data, order(data), folds=0).folds) == 1
    if weighted:
        assert data.weights is not None
        assert some.weights is not None
        assert torch.equal(some.weights, data.weights[torch.cat(some.folds)])
        w = some.weights / some.weights.sum()
        values = torch.arange(6).double()
        assert some.mean(values) == pytest.approx((w * values).sum().item())


@weighted
def test_densities_equal_posteriors_without_the_fold(weighted: bool) -> None:
    data = rows(weighted=weighted)
    model = sparse(problem(K=5).Z)
    folds = CrossValidation.of(data, order(data), folds=3)
    expected = []
    for held in folds.folds:
        rest, fold = split(data, held.tolist())
        expected.append(model.posterior(rest).log_density(fold.X, fold.Y).sum(1))
    torch.testing.assert_close(folds.densities(model), torch.cat(expected))


def float64(values: Sequence[Sequence[float]]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def replaced(model: SparseGP, rest: Dataset, fold: Dataset) -> Tensor:
    """Return the candidates, those at rows of the fold as the most correlated other rows."""
    points = [tuple(z) for z in model.candidates.tolist()]
    gone = {tuple(x) for x in fold.X.tolist()} - {tuple(x) for x in rest.X.tolist()}
    free = [x for x in rest.X.tolist() if tuple(x) not in points]
    Z = [point for point in points if point not in gone]
    for point in points:
        if point in gone:
            correlation = covariance(model.kernel, float64([point]), float64(free))
            Z.append(tuple(free[int(correlation.argmax())]))
    return float64(list(dict.fromkeys(Z)))


def test_points_at_held_out_rows_give_way_to_neighbours() -> None:
    """A point stays if another row has the same inputs, or if it is at no row."""
    data = rows()
    X = data.X.clone()
    X[1] = X[0]
    data = Dataset.of(X, data.Y)
    Z = torch.cat([X[[0, 2, 3, 9]], problem(K=2).Z])
    folds = CrossValidation(data, (torch.tensor([0, 2, 5]),))
    rest, fold = split(data, [0, 2, 5])
    points = replaced(sparse(Z), rest, fold)
    assert torch.equal(points[:5], Z[[0, 2, 3, 4, 5]])
    assert len(points) == 6
    expected = sparse(points).posterior(rest).log_density(fold.X, fold.Y).sum(1)
    torch.testing.assert_close(folds.densities(sparse(Z)), expected)


def test_points_at_held_out_rows_are_left_out_if_all_rows_are_candidates() -> None:
    data = rows()
    folds = CrossValidation(data, (torch.tensor([0, 2, 5]),))
    rest, fold = split(data, [0, 2, 5])
    expected = sparse(rest.X).posterior(rest).log_density(fold.X, fold.Y).sum(1)
    torch.testing.assert_close(folds.densities(sparse(data.X)), expected)


def test_path_selects_again_without_the_fold() -> None:
    data = rows()
    model = sparse(data.X[::2])
    folds = CrossValidation.of(data, order(data), folds=2)
    expected = []
    for held in folds.folds:
        rest, fold = split(data, held.tolist())
        pool = sparse(replaced(model, rest, fold))
        frontier = elimination_frontier(pool.subset_statistics(rest))
        selected = pool.prune(frontier.masks[4])
        expected.append(selected.posterior(rest).log_density(fold.X, fold.Y).sum(1))
    path = folds.path(model, [4, model.K])
    torch.testing.assert_close(path[0], torch.cat(expected))
    torch.testing.assert_close(path[1], folds.densities(model))
    torch.testing.assert_close(path[0], folds.densities(model, 4))


@weighted
def test_exact_densities_equal_conditioned_normal(weighted: bool) -> None:
    data = rows(weighted=weighted)
    model = sparse(data.X[:0])
    folds = CrossValidation.of(data, order(data), folds=2)
    K = covariance(model.kernel, data.X, data.X).detach()
    noise = model.noise.detach()
    w = torch.ones(N).double() if data.weights is None else data.weights
    residual = (data.Y - prior_mean(model.mean, data.X)).detach()
    expected = []
    for held in folds.folds:
        rest = torch.tensor([i for i in range(N) if i not in held.tolist()])
        inverse = torch.linalg.inv(K[rest][:, rest] + torch.diag(noise / w[rest]))
        for i in held.tolist():
            gain = K[i, rest] @ inverse
            variance = (K[i, i] - gain @ K[rest, i] + noise)[None, None]
            normals = [MultivariateNormal(m[None], variance) for m in gain @ residual[rest]]
            expected.append(
                sum(n.log_prob(y[None]) for n, y in zip(normals, residual[i], strict=True))
            )
    torch.testing.assert_close(folds.exact_densities(model), torch.stack(expected))


@pytest.mark.parametrize("case", CASES)
def test_densities_of_other_likelihoods_infer_the_sites_again(case: str) -> None:
    model, data = built(case)
    folds = CrossValidation.of(data, order(data), folds=1)
    rest, fold = split(data, folds.folds[0].tolist())
    posterior = model.with_best_q(rest).posterior(rest)
    expected = posterior.log_density(fold.X, fold.Y).sum(1).detach()
    torch.testing.assert_close(folds.densities(model), expected, rtol=1e-6, atol=1e-6)


def test_smallest_stops_at_the_first_size_beyond_the_tolerance(monkeypatch) -> None:
    data = rows()
    model = sparse(data.X[:10])
    folds = CrossValidation.of(data, order(data), folds=10)
    losses = {10: 0.0, 8: 0.001, 6: 0.05, 4: 0.002, 2: 0.3}
    monkeypatch.setattr(
        CrossValidation,
        "path",
        lambda self, model, sizes: torch.stack([torch.full((N,), -losses[M]) for M in sizes]),
    )
    sizes = [2, 4, 6, 8]
    assert folds.smallest(model, sizes, tolerance=0.01) == 8
    assert folds.smallest(model, sizes, tolerance=0.1) == 4
    assert folds.smallest(model, sizes, tolerance=1e-4) == 10


def test_predictive_gap_is_paired_mean_and_standard_error() -> None:
    g = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 50, generator=g, dtype=torch.float64)
    gap = PredictiveGap.of(a, b)
    assert gap.nats == pytest.approx((a - b).mean().item())
    assert gap.standard_error == pytest.approx((a - b).std().item() / math.sqrt(50))
    assert PredictiveGap.of(b, a).nats == pytest.approx(-gap.nats)


def test_predictive_gap_with_weights_is_weighted_mean() -> None:
    a, b = torch.tensor([1.0, 4.0, 2.0]).double(), torch.tensor([0.0, 1.0, 2.0]).double()
    weights = torch.tensor([2.0, 1.0, 1.0]).double()
    gap = PredictiveGap.of(a, b, weights=weights)
    assert gap.nats == pytest.approx(5 / 4)
    # N/(N − 1) Σ w² (d − mean)² / (Σ w)²
    scatter = 4 * (1 - 1.25) ** 2 + (3 - 1.25) ** 2 + (0 - 1.25) ** 2
    assert gap.standard_error == pytest.approx(math.sqrt(1.5 * scatter / 16))
    scaled = PredictiveGap.of(a, b, weights=7 * weights)
    assert (scaled.nats, scaled.standard_error) == pytest.approx((gap.nats, gap.standard_error))


def test_predictive_gap_of_one_row_has_no_standard_error() -> None:
    one = torch.ones(1).double()
    assert PredictiveGap.of(2 * one, one) == PredictiveGap(1.0, math.inf)


def test_predictive_gap_without_rows_raises() -> None:
    nothing = torch.ones(0).double()
    with pytest.raises(InputError, match=r"same rows, at least one; got \[0\] and \[0\]"):
        PredictiveGap.of(nothing, nothing)
