"""Newton steps with the average information, and the evidence that they maximise."""

from dataclasses import replace
from math import inf
from typing import Any

import pytest
import torch
from gpytorch.kernels import Kernel, LinearKernel, MaternKernel, RBFKernel, ScaleKernel
from torch import Tensor

from winnowgp.data import Dataset
from winnowgp.data.distributed import ProcessGroup
from winnowgp.errors import TrainingError
from winnowgp.models import SparseGP
from winnowgp.models.kernels import copy_module, covariance
from winnowgp.models.priors import add_weak_priors, log_prior
from winnowgp.training import scoring
from winnowgp.training.checkpoint import NO_CHECKPOINT_LOG as LOG
from winnowgp.training.closed_objective import ClosedObjective, closed_objective
from winnowgp.training.coordinates import Coordinates
from winnowgp.training.lbfgs import Stop, maximise_elbo
from winnowgp.training.scoring import Evaluation, maximise_by_scoring, optimise_evidence

KERNELS = {
    "rbf": lambda: ScaleKernel(RBFKernel(ard_num_dims=2)),
    "one lengthscale": lambda: ScaleKernel(RBFKernel()),
    "unscaled": lambda: MaternKernel(nu=1.5, ard_num_dims=2),
    "matern12": lambda: ScaleKernel(MaternKernel(nu=0.5)),
    "matern52 + linear": lambda: (
        ScaleKernel(MaternKernel(nu=2.5, ard_num_dims=2)) + LinearKernel(ard_num_dims=2)
    ),
}


def rows(N: int = 30, P: int = 1, *, weighted: bool = False) -> Dataset:
    g = torch.Generator().manual_seed(0)
    X = 3 * torch.rand(N, 2, generator=g, dtype=torch.float64)
    noise = 0.3 * torch.randn(N, P, generator=g, dtype=torch.float64)
    weights = torch.linspace(0.5, 2, N, dtype=torch.float64) if weighted else None
    data = Dataset.of(X, torch.sin(X @ torch.ones(2, P, dtype=torch.float64)) + noise)
    return replace(data, weights=weights)


def model(kernel: Kernel, data: Dataset) -> SparseGP:
    return SparseGP(kernel, data.X[:0], noise=0.2)


def closed(gp: SparseGP, data: Dataset) -> tuple[ClosedObjective, Coordinates]:
    coordinates = Coordinates(gp, data.X)
    objective = closed_objective(gp, gp.dense_bound(data), coordinates)
    assert objective is not None
    assert objective.has_information
    return objective, coordinates


@torch.no_grad()
def observed_covariance(gp: SparseGP, data: Dataset) -> Tensor:
    variance = gp.noise.expand(data.N) if data.weights is None else gp.noise / data.weights
    return covariance(gp.kernel, data.X, data.X) + torch.diag(variance)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("P", [1, 2])
@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS.keys())
def test_information_equals_dense_average_information(kernel, P, frozen, weighted) -> None:
    data = rows(P=P, weighted=weighted)
    gp = model(kernel(), data)
    if frozen:
        next(gp.kernel.parameters()).requires_grad_(False)
    objective, coordinates = closed(gp, data)
    x = coordinates.read()

    def at(x: Tensor) -> Tensor:
        coordinates.write(x)
        return observed_covariance(gp, data)

    steps = 1e-5 * torch.eye(len(x), dtype=x.dtype)
    derivatives = torch.stack([(at(x + h) - at(x - h)) / 2e-5 for h in steps])
    A = at(x)
    moved = derivatives @ torch.linalg.solve(A, data.Y)
    expected = 0.5 * torch.einsum("inp,jnp->ij", moved, torch.linalg.solve(A, moved))
    _, _, information = objective.informed(x)
    torch.testing.assert_close(information, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS.keys())
def test_information_of_targets_with_their_own_covariance_is_fisher_information(kernel) -> None:
    # The columns y_p of the Cholesky factor of A have Σ_p y_p y_pᵀ = A = E yyᵀ.
    data = rows(20)
    gp = model(kernel(), data)
    A = observed_covariance(gp, data)
    objective, coordinates = closed(gp, Dataset.of(data.X, torch.linalg.cholesky(A)))
    x = coordinates.read()
    _, _, information = objective.informed(x)
    derivatives = []
    for h in 1e-5 * torch.eye(len(x), dtype=x.dtype):
        coordinates.write(x + h)
        higher = observed_covariance(gp, data)
        coordinates.write(x - h)
        derivatives.append(torch.linalg.solve(A, higher - observed_covariance(gp, data)) / 2e-5)
    fisher = [[0.5 * (a * b.mT).sum() for b in derivatives] for a in derivatives]
    torch.testing.assert_close(information, x.new_tensor(fisher), rtol=1e-5, atol=1e-6)


def test_information_of_priors_is_their_curvature() -> None:
    data = rows()
    gp, plain = model(KERNELS["rbf"](), data), model(KERNELS["rbf"](), data)
    add_weak_priors(gp)
    objective, coordinates = closed(gp, data)
    x = coordinates.read()
    _, _, information = objective.informed(x)
    _, _, alone = closed(plain, data)[0].informed(x)

    def slope(at: Tensor) -> Tensor:
        coordinates.write(at)
        gp.zero_grad()
        log_prior(gp).backward()
        return coordinates.gradient()

    steps = 1e-5 * torch.eye(len(x), dtype=x.dtype)
    curvature = torch.stack([(slope(x - h) - slope(x + h)) / 2e-5 for h in steps])
    assert information is not None
    assert alone is not None
    # Up to the lower limit of the noise, beside which its logarithm is taken.
    torch.testing.assert_close(information - alone, curvature, rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("kernel", ["rbf", "one lengthscale", "matern12", "matern52 + linear"])
def test_optimise_evidence_reaches_the_maximum_of_lbfgs(kernel: str) -> None:
    data = rows(250)
    gp = model(KERNELS[kernel](), data)
    add_weak_priors(gp)
    other = copy_module(gp)
    maximum = optimise_evidence(gp, data, Stop(1e-6, 20, 400), LOG)
    slow = maximise_elbo(other, data.X, objective=other.dense_bound(data), stop=Stop(1e-7, 30, 500))
    assert maximum.converged
    assert maximum.value + log_prior(gp).item() == pytest.approx(
        slow.value + log_prior(other).item(), abs=1e-4
    )
    assert maximum.value == pytest.approx(gp.dense_bound(data)().item(), rel=1e-8)


def rosenbrock(x: Tensor) -> Evaluation:
    """Return −½ ‖r‖² with r = [10 (y − x²), 1 − x], its gradient and the Gauss-Newton matrix."""
    a, b = x
    residuals = torch.stack([10 * (b - a.square()), 1 - a])
    J = x.new_tensor([[-20 * a, 10.0], [-1.0, 0.0]])
    return -0.5 * residuals.square().sum().item(), -(J.mT @ residuals), J.mT @ J


def test_scoring_rosenbrock_reaches_maximum() -> None:
    start = torch.tensor([-1.2, 1.0], dtype=torch.float64)
    maximum = maximise_by_scoring(rosenbrock, start, stop=Stop(1e-10, 50, 400))
    torch.testing.assert_close(maximum.x, torch.ones_like(start), rtol=1e-4, atol=1e-4)
    assert maximum.converged


@pytest.mark.parametrize("factor", [0.01, 0.1, 10.0, 100.0])
def test_scoring_wrong_information_never_decreases(factor: float) -> None:
    values = []

    def wrong(x: Tensor) -> Evaluation:
        value, gradient, information = rosenbrock(x)
        values.append(value)
        return value, gradient, factor * information

    start = torch.tensor([-1.2, 1.0], dtype=torch.float64)
    maximum = maximise_by_scoring(wrong, start, stop=Stop(1e-8, 60, 120))
    assert maximum.value == max(values) > values[0]
    assert maximum.value == rosenbrock(maximum.x)[0]


def test_scoring_failing_region_is_left_out() -> None:
    def limited(x: Tensor) -> Evaluation | None:
        return None if x[0] > 0.5 else rosenbrock(x)

    start = torch.tensor([-1.2, 1.0], dtype=torch.float64)
    maximum = maximise_by_scoring(limited, start, stop=Stop(1e-8, 60, 400))
    assert maximum.rejected > 0
    assert 0 < maximum.x[0] <= 0.5
    with pytest.raises(TrainingError, match="initial parameters"):
        maximise_by_scoring(lambda x: None, start, stop=Stop())


def test_scoring_rejected_steps_do_not_end_it() -> None:
    # Steps are far too long until three of them were rejected.
    def steep(x: Tensor) -> Evaluation:
        value, gradient, information = rosenbrock(x)
        return value, gradient, 1e-3 * information

    start = torch.tensor([-1.2, 1.0], dtype=torch.float64)
    maximum = maximise_by_scoring(steep, start, stop=Stop(1e-3, 2, 400))
    assert maximum.value > rosenbrock(start)[0]


def test_scoring_every_process_has_the_point_of_the_first(monkeypatch) -> None:
    first = torch.tensor([-1.2, 1.0], dtype=torch.float64)

    def received(self: ProcessGroup, value: Tensor, x: Tensor, *others: Tensor) -> Any:
        return (value, first, *others)

    monkeypatch.setattr(ProcessGroup, "broadcast", received)
    path = scoring._Path(first + 1e-12, ProcessGroup(rank=1, world_size=2))
    path.begin(rosenbrock)
    assert torch.equal(path.x, first)


@pytest.mark.parametrize(("iterations", "most"), [(1, 1), (5, 5), (12, 12), (20, 12), (26, 13)])
def test_scoring_iterations_are_half_of_those_of_lbfgs_after_twelve(
    iterations: int, most: int
) -> None:
    start = torch.tensor([-1.2, 1.0], dtype=torch.float64)
    maximum = maximise_by_scoring(rosenbrock, start, stop=Stop(1e-300, 50, iterations))
    assert (maximum.iterations, maximum.converged) == (most, False)
    assert maximum.last_gain == pytest.approx(maximum.value - rosenbrock(start)[0])


def test_scoring_long_steps_are_limited() -> None:
    # −(x − 50)²/2
    def far(x: Tensor) -> Evaluation:
        return -0.5 * (x - 50).square().sum().item(), 50 - x, torch.eye(1, dtype=x.dtype)

    maximum = maximise_by_scoring(far, torch.zeros(1, dtype=torch.float64), stop=Stop(1e-6, 9, 3))
    assert maximum.x.item() == pytest.approx(6.0)


def test_optimise_evidence_that_cannot_be_computed_is_minus_infinity() -> None:
    data = rows(250)
    gp = model(ScaleKernel(RBFKernel()), data)
    gp.kernel.get_parameter("base_kernel.raw_lengthscale").data.fill_(float("nan"))
    assert optimise_evidence(gp, data, Stop(), LOG).value == -inf


@pytest.mark.parametrize(("N", "newton"), [(249, False), (250, True)])
def test_optimise_evidence_takes_newton_steps_with_many_rows(monkeypatch, N, newton) -> None:
    data, taken = rows(N), []
    maximise = scoring.maximise_by_scoring
    monkeypatch.setattr(
        scoring, "maximise_by_scoring", lambda *a, **k: taken.append(1) or maximise(*a, **k)
    )
    optimise_evidence(model(KERNELS["rbf"](), data), data, Stop(1.0, 2, 4), LOG)
    assert bool(taken) == newton
