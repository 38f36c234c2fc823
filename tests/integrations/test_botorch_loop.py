"""Bayesian optimisation from a start that is far off: both doors find the top."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("botorch", reason="needs winnowgp[botorch]")

from botorch.acquisition.logei import qLogExpectedImprovement
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskVariationalGP
from botorch.models.model import Model
from botorch.optim import optimize_acqf
from botorch.sampling import SobolQMCNormalSampler
from gpytorch.kernels import Kernel
from gpytorch.mlls import VariationalELBO

from winnowgp import SparseGPRegressor
from winnowgp.integrations.botorch import SparseGPModel, WinnowingAllocator


def hill(X: Tensor) -> Tensor:
    """Highest, with value 1, at (0.7, 0.2); a lower hill is elsewhere.

    Too low a hill to stay on, by chance of the last digits, for as long as the loops below last.
    """
    top = X.new_tensor([0.7, 0.2])
    low = X.new_tensor([0.2, 0.8])
    return torch.exp(-6 * (X - top).square().sum(-1)) + 0.3 * torch.exp(
        -12 * (X - low).square().sum(-1)
    )


def proposed(model: Model, best: Tensor) -> Tensor:
    function = qLogExpectedImprovement(
        model, best, sampler=SobolQMCNormalSampler(torch.Size([32]), seed=0)
    )
    cube = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
    return optimize_acqf(function, cube, q=2, num_restarts=3, raw_samples=32)[0]


def start() -> tuple[Tensor, Tensor]:
    """Rows around the lower hill and in the corners, none near the top."""
    sobol = torch.quasirandom.SobolEngine(2, scramble=True, seed=3)
    X = sobol.draw(64, dtype=torch.float64)
    X = X[(X - X.new_tensor([0.7, 0.2])).norm(dim=-1) > 0.35][:10]
    assert hill(X).max() < 0.7
    return X, hill(X)


@pytest.mark.slow
def test_a_loop_with_a_fitted_regressor_finds_the_top() -> None:
    torch.manual_seed(0)
    X, y = start()
    for _ in range(5):
        # Units of the user's: outcomes far from zero and in thousands.
        model = SparseGPModel.of(
            SparseGPRegressor(random_state=0).fit(X.numpy(), 5e3 + 1e3 * y.numpy())
        )
        new = proposed(model, 5e3 + 1e3 * y.max())
        X, y = torch.cat([X, new]), torch.cat([y, hill(new)])
    assert y.max() > 0.98


@pytest.mark.slow
def test_a_loop_with_the_allocator_finds_the_top() -> None:
    torch.manual_seed(0)
    X, y = start()
    kernel: Kernel | None = None
    noise: float | None = None
    for _ in range(5):
        z = (y - y.mean()) / y.std()
        model: Any = SingleTaskVariationalGP(
            X,
            z[:, None],
            covar_module=deepcopy(kernel),
            learn_inducing_points=False,
            inducing_points=len(X) - 2,
            inducing_point_allocator=WinnowingAllocator(targets=z, noise=noise),
        )
        assert len(model.model.variational_strategy.inducing_points) <= len(X) - 2
        elbo = VariationalELBO(model.likelihood, model.model, num_data=len(X))
        fit_gpytorch_mll(elbo, optimizer_kwargs={"options": {"maxiter": 100}})
        kernel, noise = model.model.covar_module, model.likelihood.noise.item()
        new = proposed(model, z.max())
        X, y = torch.cat([X, new]), torch.cat([y, hill(new)])
    assert y.max() > 0.95
