"""GPyTorch's own examples, rewritten small from their description."""

from typing import Any

import pytest
import torch
from gpytorch.likelihoods import (
    BernoulliLikelihood,
    GaussianLikelihood,
)
from gpytorch.variational import UnwhitenedVariationalStrategy
from torch import Tensor

from helpers.gpytorch_models import (
    Model,
    elbo,
    trained,
)
from winnowgp.data import Standardiser
from winnowgp.data.catalogue import load_table
from winnowgp.integrations.gpytorch import winnow


def example(batch: int) -> tuple[Any, Any, Any, Any]:
    """SVGP regression with minibatches: model, likelihood, and data for training and testing."""
    torch.manual_seed(0)
    x = torch.rand(700, 2)
    y = torch.sin(6 * x[:, 0]) * torch.cos(4 * x[:, 1]) + 0.1 * torch.randn(700)
    model, likelihood = Model(x[:80].clone()), GaussianLikelihood()
    bound = elbo(likelihood, model, 500)
    optimiser = torch.optim.Adam(bound.parameters(), lr=0.02)
    for _ in range(15):
        for rows in torch.randperm(500).split(batch):
            optimiser.zero_grad()
            (-bound(model(x[rows]), y[rows])).backward()
            optimiser.step()
    return model, likelihood, (x[:500], y[:500]), (x[500:], y[500:])


def log_density(model: Any, likelihood: Any, x: Tensor, y: Tensor) -> float:
    with torch.no_grad():
        return likelihood.eval().log_marginal(y, model.eval()(x)).mean().item()


def test_winnow_regression_example_keeps_density_with_half() -> None:
    model, likelihood, train, test = example(100)
    result = winnow(model, likelihood, train)
    assert result.n_inducing <= 40
    before, after = (log_density(m, likelihood, *test) for m in (model, result.model))
    assert after > before - 0.02


def test_winnow_classification_example_keeps_density_with_half() -> None:
    x, test = torch.linspace(0, 1, 10), torch.linspace(0, 1, 101)
    y, labels = ((torch.cos(4 * torch.pi * v) > 0).float() for v in (x, test))
    torch.manual_seed(0)
    model = Model(x[:, None], strategy=UnwhitenedVariationalStrategy)
    likelihood = BernoulliLikelihood()
    trained(model, elbo(likelihood, model, 10), x[:, None], y, 50)
    result = winnow(model, likelihood, (x, y))
    assert result.n_inducing <= 5
    data = (test[:, None], labels)
    before, after = (log_density(m, likelihood, *data) for m in (model, result.model))
    assert after > before - 0.02


@pytest.mark.slow
def test_winnow_regression_example_on_kin8nm(paper_data: None) -> None:
    """The example of GPyTorch's documentation: 500 points, minibatches of 1,024, four epochs."""
    table = load_table("kin8nm").dataset()
    torch.manual_seed(0)
    order = torch.randperm(table.N)
    x = Standardiser.of(table.X).forward(table.X)[order].float()
    y = Standardiser.of(table.Y).forward(table.Y)[order, 0].float()
    model, likelihood = Model(x[:500].clone()), GaussianLikelihood()
    bound = elbo(likelihood, model, 7000)
    optimiser = torch.optim.Adam(bound.parameters(), lr=0.01)
    for _ in range(4):
        for rows in torch.randperm(7000).split(1024):
            optimiser.zero_grad()
            (-bound(model(x[rows]), y[rows])).backward()
            optimiser.step()
    result = winnow(model, likelihood, (x[:7000], y[:7000]), max_points=250)
    assert result.n_inducing == 250
    data = (x[7000:], y[7000:])
    before, after = (log_density(m, likelihood, *data) for m in (model, result.model))
    assert after > before - 0.02
