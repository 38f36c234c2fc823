"""Noise per target, known noise per row and missing targets, against dense matrices."""

from dataclasses import dataclass
from math import log, pi

import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import StudentTLikelihood
from gpytorch.means import ConstantMean
from torch import Tensor

from helpers import oracles
from winnowgp import SparseGP, VariationalGP
from winnowgp.bounds.collapsed import weight_correction
from winnowgp.bounds.row_blocks import RowBlocks
from winnowgp.data import ArraySource, Dataset, standardise
from winnowgp.data.distributed import SINGLE_PROCESS as SINGLE
from winnowgp.data.sharding import ShardedSource
from winnowgp.errors import InputError
from winnowgp.models.closed_forms import ParametricBound
from winnowgp.models.exact_gp import exact_log_density
from winnowgp.models.kernels import covariance, prior_mean
from winnowgp.training.cross_validation import CrossValidation

N, K = 24, 5
NOISE = torch.tensor([0.3, 0.02, 0.7], dtype=torch.float64)


@dataclass(frozen=True)
class Case:
    """Which features the data of a test have."""

    shared: bool = False
    missing: bool = False
    known: bool = False
    weighted: bool = False


CASES = [
    Case(),
    Case(missing=True),
    Case(known=True),
    Case(shared=True, missing=True),
    Case(shared=True, known=True),
    Case(weighted=True),
    Case(missing=True, known=True, weighted=True),
    Case(shared=True, missing=True, known=True, weighted=True),
]
each_case = pytest.mark.parametrize("case", CASES, ids=str)


def rows(case: Case, *, seed: int = 0, count: int = N) -> Dataset:
    g = torch.Generator().manual_seed(seed)
    X = torch.rand(count, 2, generator=g, dtype=torch.float64)
    Y = torch.sin(4 * X @ torch.ones(2, 3, dtype=torch.float64)) + 0.3
    Y = Y + 0.2 * torch.randn(count, 3, generator=g, dtype=torch.float64)
    weights = noise = None
    if case.missing:
        # The first and the last target are missing in the same rows.
        Y[2:7, 0] = Y[2:7, 2] = torch.nan
        Y[9:12, 1] = torch.nan
    if case.known:
        noise = 2 * torch.rand(count, 1, generator=g, dtype=torch.float64).expand(-1, 3).clone()
        noise[:, 1] *= 3
    if case.weighted:
        weights = 0.5 + 2 * torch.rand(count, generator=g, dtype=torch.float64)
    return Dataset.of(X, Y, weights=weights, noise=noise, missing=case.missing)


def model_of(case: Case, data: Dataset) -> SparseGP:
    kernel = ScaleKernel(RBFKernel(ard_num_dims=2))
    kernel.outputscale = 1.4
    kernel.base_kernel.lengthscale = torch.tensor([[0.4, 0.8]])
    mean = ConstantMean()
    mean.initialize(constant=0.2)
    return SparseGP(kernel, data.X[:K], mean=mean, noise=0.3 if case.shared else NOISE)


@dataclass(frozen=True)
class Target:
    """The rows that have one target, with the noise of each."""

    X: Tensor
    y: Tensor
    noise: Tensor
    weights: Tensor | None
    rows: Tensor

    @property
    def variance(self) -> Tensor:
        return self.noise if self.weights is None else self.noise / self.weights

    @property
    def correction(self) -> Tensor | float:
        return 0.0 if self.weights is None else weight_correction(self.weights, self.noise)


def targets_of(gp: SparseGP, data: Dataset) -> list[Target]:
    """The definition: one target after another, in the rows that have it."""
    result = []
    for p in range(data.P):
        at = (~torch.isnan(data.Y[:, p])).nonzero().flatten()
        noise = gp.noise.expand(data.P)[p].expand(len(at))
        if data.noise is not None:
            noise = noise + data.noise[at, p]
        y = (data.Y[at, p] - prior_mean(gp.mean, data.X[at])[:, 0])[:, None]
        weights = None if data.weights is None else data.weights[at]
        result.append(Target(data.X[at], y, noise, weights, at))
    return result


def dense_bound(gp: SparseGP, data: Dataset, Z: Tensor) -> Tensor:
    k, total = gp.kernel, torch.zeros((), dtype=torch.float64)
    for t in targets_of(gp, data):
        Kuu, Kuf, Kff = covariance(k, Z, Z), covariance(k, Z, t.X), covariance(k, t.X, t.X)
        total = total + oracles.collapsed(Kuu, Kuf, Kff, t.y, t.variance) + t.correction
    return total


def dense_evidence(gp: SparseGP, data: Dataset) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for t in targets_of(gp, data):
        A = covariance(gp.kernel, t.X, t.X) + torch.diag(t.variance)
        total = total + oracles.log_normal(t.y, A) + t.correction
    return total


def gradients(gp: SparseGP, value: Tensor) -> list[Tensor]:
    parameters = [p for p in gp.parameters() if p.requires_grad]
    found = torch.autograd.grad(value, parameters, allow_unused=True)
    zeros = [torch.zeros_like(p) for p in parameters]
    return [z if g is None else g for g, z in zip(found, zeros, strict=True)]


@each_case
def test_bounds_equal_the_sum_of_dense_bounds_of_targets(case: Case) -> None:
    data = rows(case)
    gp = model_of(case, data)
    expected = dense_bound(gp, data, gp.candidates)
    torch.testing.assert_close(gp.bound(data), expected)
    assert gp.fixed_bound(data) == pytest.approx(expected.item(), rel=1e-9)
    torch.testing.assert_close(gp.chunked_bound(data)(), expected, rtol=1e-5, atol=0)
    with torch.no_grad():
        torch.testing.assert_close(gp.chunked_bound(data)(), expected, rtol=1e-5, atol=0)
    everything = torch.ones(1, K, dtype=torch.bool)
    torch.testing.assert_close(gp.subset_statistics(data).value(everything)[0], expected)


@each_case
def test_chunked_gradient_equals_autograd_of_the_dense_bound(case: Case) -> None:
    data = rows(case)
    gp = model_of(case, data)
    found = gradients(gp, gp.chunked_bound(data)())
    for one, other in zip(found, gradients(gp, gp.bound(data)), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-5)


@each_case
def test_evidence_and_its_gradient_equal_dense_ones(case: Case) -> None:
    data = rows(case)
    gp = model_of(case, data)
    expected = dense_evidence(gp, data)
    value = gp.dense_bound(data)()
    torch.testing.assert_close(value, expected)
    evidence = gp.evidence(data)
    assert evidence.exact
    assert evidence.lower == pytest.approx(expected.item(), rel=1e-10)
    for one, other in zip(gradients(gp, value), gradients(gp, expected), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-7)
    assert gp.fixed_bound(data) < expected < gp.upper_bound(data)
    bounds = gp.evidence(data, max_rows=5)
    assert bounds.method == "conjugate-gradient"
    assert bounds.lower - 1e-9 <= expected <= bounds.upper + 1e-9


@each_case
def test_marginal_gains_equal_differences_of_bounds(case: Case) -> None:
    data = rows(case)
    gp = model_of(case, data)
    mask = torch.tensor([True, False, True, True, False])
    gains = gp.subset_statistics(data).marginal_gains(mask)
    objective = gp.subset_objective(data)
    for k in range(K):
        pair = mask.repeat(2, 1)
        pair[0, k], pair[1, k] = True, False
        with_k, without = (dense_bound(gp, data, gp.candidates[each]) for each in pair)
        assert gains[k].item() == pytest.approx((with_k - without).item(), rel=1e-6, abs=1e-8)
        torch.testing.assert_close(objective.value(pair), torch.stack([with_k, without]))


@each_case
def test_posterior_equals_dense_algebra(case: Case) -> None:
    data = rows(case)
    gp = model_of(case, data).requires_grad_(False)
    new = rows(Case(), seed=1, count=6)
    prediction = gp.posterior(data).predict(new.X)
    observed = gp.posterior(data).predict(new.X, observed=True)
    Z, k = gp.candidates, gp.kernel
    Kuu, Kus = covariance(k, Z, Z), covariance(k, Z, new.X)
    for p, t in enumerate(targets_of(gp, data)):
        Kuf = covariance(k, Z, t.X)
        A = torch.linalg.inv(Kuu + Kuf / t.variance @ Kuf.mT)
        mean = prior_mean(gp.mean, new.X)[:, 0] + (Kus.mT @ A @ (Kuf / t.variance) @ t.y)[:, 0]
        explained = Kus.mT @ (torch.linalg.inv(Kuu) - A) @ Kus
        variance = (covariance(k, new.X, new.X) - explained).diagonal()
        torch.testing.assert_close(prediction.mean[:, p], mean)
        torch.testing.assert_close(prediction.variance[:, p], variance)
        noisy = variance + gp.noise.expand(3)[p]
        torch.testing.assert_close(observed.variance[:, p], noisy)


@each_case
def test_held_out_densities_of_all_rows_as_points_are_exact(case: Case) -> None:
    data, new = rows(case), rows(case, seed=1)
    gp = model_of(case, data).requires_grad_(False)
    found = exact_log_density(gp.kernel, data=data, mean=gp.mean, noise=gp.noise, rows=new)
    expected = torch.zeros(N, dtype=torch.float64)
    others = targets_of(gp, new)
    for t, s in zip(targets_of(gp, data), others, strict=True):
        A = covariance(gp.kernel, t.X, t.X) + torch.diag(t.variance)
        k = covariance(gp.kernel, t.X, s.X)
        error = s.y[:, 0] - (k.mT @ torch.linalg.solve(A, t.y))[:, 0]
        prior = covariance(gp.kernel, s.X, s.X).diagonal()
        variance = prior - (k * torch.linalg.solve(A, k)).sum(0) + s.noise
        nats = -0.5 * (error.square() / variance + variance.log() + log(2 * pi))
        expected[s.rows] += nats
    torch.testing.assert_close(found, expected)
    # With every row as a candidate the sparse posterior is the exact one.
    folds = CrossValidation.of(data, torch.arange(N), folds=2)
    sparse = folds.densities(gp.with_candidates(data.X))
    torch.testing.assert_close(sparse, folds.exact_densities(gp), rtol=1e-4, atol=1e-4)


def test_equal_rows_with_equal_noise_are_merged_exactly() -> None:
    case = Case(missing=True, known=True)
    data = rows(case)
    twice = Dataset.joined([data, data.part(slice(0, 10))])
    merged = twice.merged()
    assert merged.N == N
    gp = model_of(case, data)
    torch.testing.assert_close(gp.bound(merged), gp.bound(twice))
    # Rows that differ in their noise only are different observations.
    other = Dataset(data.X, data.Y, None, 2 * data.noise if data.noise is not None else None)
    assert Dataset.joined([data, other]).merged().N == 2 * N


def test_noise_of_other_number_of_targets_raises() -> None:
    data = rows(Case())
    gp = model_of(Case(), data)
    with pytest.raises(InputError, match="noise variances for 3 targets"):
        gp.bound(Dataset(data.X, data.Y[:, :2]))


@pytest.mark.parametrize(
    ("noise", "message"),
    [(-torch.ones(N, 3), "at least 0"), (torch.ones(N), "for each target")],
)
def test_dataset_bad_noise_raises(noise: Tensor, message: str) -> None:
    data = rows(Case())
    with pytest.raises(InputError, match=message):
        Dataset.of(data.X, data.Y, noise=noise.double())


def test_dataset_row_without_any_target_raises() -> None:
    Y = torch.zeros(3, 2).double()
    Y[1] = torch.nan
    with pytest.raises(InputError, match="1 rows without any target"):
        Dataset.of(torch.zeros(3, 1).double(), Y, missing=True)


def test_other_models_refuse_missing_targets_and_known_noise() -> None:
    likelihood = StudentTLikelihood()
    gp = VariationalGP(RBFKernel(), torch.zeros(1, 2).double(), likelihood=likelihood, targets=3)
    for case in (Case(missing=True), Case(known=True)):
        with pytest.raises(InputError, match="use `SparseGP`"):
            gp.bound(rows(case))
        data = rows(Case())
        with pytest.raises(InputError, match="`condition_on` needs"):
            model_of(Case(), data).posterior(data).condition_on(rows(case))


def test_known_noise_in_chunks_gives_the_bound_of_all_rows() -> None:
    case = Case(known=True)
    data = rows(case)
    assert data.noise is not None
    gp = model_of(case, data)
    source = ArraySource(data.X.numpy(), data.Y.numpy(), noise=data.noise.numpy())
    assert gp.fixed_bound(source) == pytest.approx(gp.fixed_bound(data), rel=1e-12)
    blocks = [RowBlocks.of(each, size=7) for each in (data, source, ShardedSource(source, SINGLE))]
    bounds = [ParametricBound(gp, b)() for b in blocks]
    for bound in bounds:
        torch.testing.assert_close(bound, gp.chunked_bound(data)())
    # Scaling targets scales variances by squares.
    scaled = standardise(source)
    noise = next(scaled.chunks(N)).noise
    assert noise is not None
    torch.testing.assert_close(noise * data.Y.var(0, correction=0), data.noise)
    part = ShardedSource(source, SINGLE).part(torch.tensor([3, 1])).noise
    assert part is not None
    assert torch.equal(part, data.noise[[3, 1]])
    with pytest.raises(InputError, match="at least 0"):
        next(ArraySource(data.X.numpy(), data.Y.numpy(), noise=-data.noise.numpy()).chunks(3))


def test_target_that_no_row_has_adds_nothing() -> None:
    """A sample of the rows, or a fold, may have none of a rare target."""
    data = rows(Case())
    Y = data.Y.clone()
    Y[:, 1] = torch.nan
    some, others = Dataset(data.X, Y), Dataset(data.X, data.Y[:, [0, 2]])
    gp = model_of(Case(), data)
    two = SparseGP(gp.kernel, gp.candidates.detach(), mean=gp.mean, noise=NOISE[[0, 2]])
    for one, other in zip(
        (gp.bound(some), gp.chunked_bound(some)(), gp.dense_bound(some)()),
        (two.bound(others), two.chunked_bound(others)(), two.dense_bound(others)()),
        strict=True,
    ):
        torch.testing.assert_close(one, other)
    assert gp.evidence(some).lower == pytest.approx(two.evidence(others).lower, rel=1e-12)
    variance = gp.posterior(some).predict(data.X).variance[:, 1]
    torch.testing.assert_close(variance, torch.full_like(variance, 1.4))
