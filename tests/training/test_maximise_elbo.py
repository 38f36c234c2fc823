"""L-BFGS on a model, against SciPy on the same function written out densely."""

from math import exp

import numpy as np
import pytest
import torch
from gpytorch.constraints import GreaterThan
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.means import ConstantMean
from scipy.optimize import minimize

from helpers import oracles
from winnowgp.data import Dataset, hills
from winnowgp.errors import NotPositiveDefiniteError, TrainingError
from winnowgp.models import SparseGP
from winnowgp.training.coordinates import Coordinates
from winnowgp.training.lbfgs import Stop, maximise_elbo
from winnowgp.typing import Scalar

STOP = Stop(gain=1e-9, window=10, iterations=200)


def data() -> Dataset:
    rows = hills()
    return Dataset(rows.X[::4], rows.Y[::4])


def model(rows: Dataset, K: int = 6) -> SparseGP:
    step = rows.N // max(K, 1)
    return SparseGP(ScaleKernel(RBFKernel()), rows.X[::step][:K], noise=0.1)


def test_maximise_elbo_raises_bound_and_sets_parameters() -> None:
    rows = data()
    gp = model(rows)
    objective = gp.chunked_bound(rows)
    before = objective().item()
    told: list[float] = []
    found = maximise_elbo(
        gp, rows.X, objective=objective, stop=STOP, on_step=lambda _, v: told.append(v)
    )
    assert found.value > before + 10
    assert told == sorted(told)
    assert told[-1] == found.value
    assert objective().item() == pytest.approx(found.value, abs=1e-10)
    assert gp.bound(rows).item() == pytest.approx(found.value, abs=1e-3)
    torch.testing.assert_close(Coordinates(gp, rows.X).read(), found.x, rtol=1e-9, atol=1e-9)
    assert all(p.grad is None for p in gp.parameters())


def test_maximise_elbo_evidence_matches_scipy() -> None:
    rows = data()
    gp = model(rows, K=0)
    squared = (rows.X - rows.X.mT).square()

    def negative(x: np.ndarray) -> float:
        variance, lengthscale, noise = (exp(entry) for entry in x)
        K = variance * torch.exp(-0.5 * squared / lengthscale**2)
        K = K + (noise + 1e-6) * torch.eye(rows.N, dtype=torch.float64)
        return -oracles.log_normal(rows.Y, K).item()

    found = maximise_elbo(gp, rows.X, objective=gp.dense_bound(rows), stop=STOP)
    start = np.log([0.7, 0.7, 0.1])
    theirs = minimize(negative, start, method="Nelder-Mead", options={"fatol": 1e-9})
    assert found.value == pytest.approx(-theirs.fun, abs=1e-5)
    np.testing.assert_allclose(found.x.numpy(), theirs.x, atol=1e-2)


def test_maximise_elbo_frozen_candidates_stay() -> None:
    rows = data()
    gp = model(rows)
    gp.candidates.requires_grad_(False)
    places, noise = gp.candidates.clone(), gp.noise.item()
    objective = gp.chunked_bound(rows)
    before = objective().item()
    found = maximise_elbo(gp, rows.X, objective=objective, stop=STOP)
    assert torch.equal(gp.candidates, places)
    assert found.value > before
    assert gp.noise.item() != noise


def test_maximise_elbo_frozen_model_stays() -> None:
    rows = data()
    gp = model(rows).requires_grad_(False)
    value = gp.bound(rows)
    found = maximise_elbo(gp, rows.X, objective=lambda: value.requires_grad_(), stop=STOP)
    assert found.iterations == 0
    assert found.value == value.item()


def test_maximise_elbo_failed_cholesky_shortens_step() -> None:
    """Less noise is better, and the objective cannot be computed below 0.05."""
    rows = data()
    gp = model(rows)

    def objective() -> Scalar:
        if gp.noise < 0.05:
            raise NotPositiveDefiniteError("too little noise")
        return -gp.noise.log()

    found = maximise_elbo(gp, rows.X, objective=objective, stop=STOP)
    assert found.rejected > 0
    assert 0.05 <= gp.noise.item() < 0.0501


def test_maximise_elbo_failure_at_start_raises() -> None:
    rows = data()
    gp = model(rows)
    before = {name: p.detach().clone() for name, p in gp.named_parameters()}

    def objective() -> Scalar:
        raise NotPositiveDefiniteError("never")

    with pytest.raises(TrainingError, match="initial parameters"):
        maximise_elbo(gp, rows.X, objective=objective, stop=STOP)
    for name, parameter in gp.named_parameters():
        torch.testing.assert_close(parameter.detach(), before[name], rtol=1e-12, atol=1e-12)


def test_maximise_elbo_unbounded_objective_stops_at_range() -> None:
    rows = data()
    gp = model(rows, K=0)
    found = maximise_elbo(gp, rows.X, objective=lambda: gp.noise.log(), stop=STOP)
    assert 25 < found.value <= 30


@pytest.mark.parametrize("units", [1.0, 1e-9, 1e6])
def test_maximise_elbo_lengthscale_has_lower_limit(units: float) -> None:
    rows = data()
    scaled = Dataset(units * rows.X, rows.Y)
    gp = model(scaled, K=0)
    rbf = gp.kernel.base_kernel
    assert isinstance(rbf, RBFKernel)
    rbf.lengthscale = scaled.X.new_tensor([[units]])
    maximise_elbo(gp, scaled.X, objective=lambda: -rbf.lengthscale.log().sum(), stop=STOP)
    shortest = 1e-4 * scaled.X.std(0, correction=0).min().item()
    assert shortest * (1 - 1e-6) <= rbf.lengthscale.min().item() < 1.1 * shortest


def test_maximise_elbo_lengthscale_may_start_below_limit() -> None:
    rows = data()
    far = Dataset(1e6 * rows.X, rows.Y)
    gp = model(far, K=0)
    before = gp.dense_bound(far)().item()
    assert maximise_elbo(gp, far.X, objective=gp.dense_bound(far), stop=STOP).value > before


@pytest.mark.parametrize("limit", [0.5, 1e-5])
def test_maximise_elbo_user_constraint_is_reached(limit: float) -> None:
    """A lengthscale may be close to a user's limit that is longer than the shortest one."""
    rows = data()
    base = RBFKernel(lengthscale_constraint=GreaterThan(limit)).initialize(lengthscale=1.0)
    gp = SparseGP(ScaleKernel(base), rows.X[:0], noise=0.1)
    rbf = gp.kernel.base_kernel
    assert isinstance(rbf, RBFKernel)
    found = maximise_elbo(gp, rows.X, objective=lambda: -rbf.lengthscale.log().sum(), stop=STOP)
    shortest = max(limit, 1e-4 * rows.X.std(0, correction=0).min().item())
    assert shortest * (1 - 1e-6) <= rbf.lengthscale.item() < (1 + 1e-6) * shortest
    assert found.rejected == 0 or limit < shortest


def test_maximise_elbo_works_under_no_grad() -> None:
    rows = data()
    gp = model(rows)
    with torch.no_grad():
        objective = gp.chunked_bound(rows)
        before = gp.bound(rows).item()
        found = maximise_elbo(gp, rows.X, objective=objective, stop=Stop(1e-2, 5, 20))
    assert found.value > before


def test_maximise_elbo_inputs_far_from_zero_converge() -> None:
    rows = data()
    far = Dataset(rows.X + 1000, rows.Y)
    gp = model(far)
    other = model(rows)
    near = maximise_elbo(other, rows.X, objective=other.chunked_bound(rows), stop=Stop(1e-2))
    found = maximise_elbo(gp, far.X, objective=gp.chunked_bound(far), stop=Stop(1e-2))
    assert found.value > near.value - 1


def test_maximise_elbo_mean_far_from_zero_is_learnt() -> None:
    rows = data()
    gp = SparseGP(ScaleKernel(RBFKernel()), rows.X[:0], mean=ConstantMean(), noise=1.0)
    gp.kernel.requires_grad_(False)
    gp.likelihood.requires_grad_(False)
    far = Dataset(rows.X, rows.Y + 100)
    maximise_elbo(gp, far.X, objective=gp.dense_bound(far), stop=STOP)
    assert abs(gp.mean.get_parameter("raw_constant").item() - 100) < 2
