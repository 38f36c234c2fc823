"""A linear term of the kernel: where the evidence gains and rows that are left out do not lose."""

import pytest
import torch
from gpytorch.kernels import Kernel, LinearKernel, MaternKernel, RBFKernel, ScaleKernel

from winnowgp.data import Dataset, Standardiser
from winnowgp.data.catalogue import load_table
from winnowgp.models import SparseGP
from winnowgp.models.exact_gp import exact_log_density
from winnowgp.training import hyperparameters, optima
from winnowgp.training.budget import Budget
from winnowgp.training.hyperparameters import Initialization, maximise_evidence


def compared(
    table: Dataset, *kernels: Kernel, rows: int | None = None, linear_term: bool = True
) -> Initialization[SparseGP]:
    return maximise_evidence(
        [SparseGP(kernel, table.X[:0], noise=0.1) for kernel in kernels],
        table,
        order=torch.randperm(table.N, generator=torch.Generator().manual_seed(0)),
        rows=rows or table.N,
        linear_term=linear_term,
        budget=Budget(table.X.device),
    )


def has_linear_term(gp: SparseGP) -> bool:
    return any(isinstance(part, LinearKernel) for part in gp.kernel.modules())


def test_evidence_linear_term_is_added_where_it_pays() -> None:
    g = torch.Generator().manual_seed(3)
    X = torch.rand(60, 3, generator=g, dtype=torch.float64)
    noise = 0.1 * torch.randn(60, generator=g, dtype=torch.float64)
    trend = X @ torch.tensor([20.0, -10.0, 5.0], dtype=torch.float64)
    rows = Dataset.of(X, trend + torch.sin(9 * X[:, 0]) + noise)
    kernel = ScaleKernel(RBFKernel(ard_num_dims=3))
    with_term, without = (compared(rows, kernel, linear_term=flag) for flag in (True, False))
    assert without.linear_gain is None
    assert with_term.linear_gain is not None
    assert with_term.linear_gain > 0.01
    assert has_linear_term(with_term.best)
    assert not has_linear_term(without.best)
    gained = with_term.optima[0].evidence - without.optima[0].evidence
    assert with_term.linear_gain == pytest.approx(gained / 60, abs=5e-3)


def test_evidence_linear_term_is_not_added_to_a_stationary_draw() -> None:
    for seed in range(3):
        g = torch.Generator().manual_seed(seed)
        X = 10 * torch.rand(100, 1, generator=g, dtype=torch.float64)
        eps = torch.randn(2, 100, generator=g, dtype=torch.float64)
        K = torch.exp(-0.5 * (X - X.mT).square()) + 1e-9 * torch.eye(100)
        rows = Dataset.of(X, torch.linalg.cholesky(K) @ eps[0] + 0.1 * eps[1])
        found = compared(rows, ScaleKernel(RBFKernel()))
        assert found.linear_gain is None
        assert not has_linear_term(found.best)


def test_evidence_linear_term_is_decided_again_with_all_rows(monkeypatch) -> None:
    monkeypatch.setattr(hyperparameters, "STAGES", (20, 30, 40))
    g = torch.Generator().manual_seed(0)
    X = 10 * torch.rand(150, 2, generator=g, dtype=torch.float64)
    noise = torch.randn(150, generator=g, dtype=torch.float64)
    rows = Dataset.of(X, torch.sin(4 * X[:, 0]) + 0.3 * (X[:, 1] - 5) + 0.3 * noise)
    kernel = ScaleKernel(RBFKernel(ard_num_dims=2))
    part, whole = (compared(rows, kernel, rows=n) for n in (30, 150))
    assert part.linear_gain is None
    assert whole.linear_gain is not None
    without = compared(rows, kernel, linear_term=False)
    gain = whole.optima[0].evidence - without.optima[0].evidence
    assert whole.linear_gain * 150 == pytest.approx(gain, abs=0.5)


def repeated_measurements(seed: int) -> tuple[Dataset, Dataset]:
    """Thirty plants, numbered in a row, each measured at five times; four fifths of the rows."""
    g = torch.Generator().manual_seed(seed)
    plant = torch.arange(30).repeat_interleave(5)
    X = torch.stack([plant.double(), torch.arange(5.0).double().repeat(30)], 1)
    X = (X - X.mean(0)) / X.std(0)
    size = 0.5 * torch.randn(30, generator=g, dtype=torch.float64)[plant]
    noise = 0.05 * torch.randn(150, generator=g, dtype=torch.float64)
    y = size + 0.8 * X[:, 1] - 0.15 * X[:, 1].square() + noise
    rows = Dataset.of(X, (y - y.mean()) / y.std())
    order = torch.randperm(150, generator=g)
    return rows.part(order[:120]), rows.part(order[120:])


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_evidence_linear_term_that_predicts_worse_is_not_added(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """The slope explains the growth of a plant that the rows of this plant explain better."""
    rows, fresh = repeated_measurements(seed)
    kernel = ScaleKernel(MaternKernel(nu=1.5, ard_num_dims=2))
    chosen = compared(rows, kernel)
    assert chosen.linear_gain is None
    assert not has_linear_term(chosen.best)
    monkeypatch.setattr(optima, "_CLEAR", float("inf"))
    by_evidence = compared(rows, kernel)
    assert by_evidence.linear_gain is not None
    assert by_evidence.linear_gain > 0.05
    densities = [
        exact_log_density(gp.kernel, data=rows, mean=gp.mean, noise=gp.noise, rows=fresh).mean()
        for gp in (chosen.best, by_evidence.best)
    ]
    assert densities[0] > densities[1]


def test_evidence_linear_term_is_tried_with_the_best_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With all rows, too, it may pay with the second kernel and not with the first."""
    monkeypatch.setattr(hyperparameters, "STAGES", (20, 30, 60))
    tried: list[set[int]] = []
    linear_term = hyperparameters._Search.linear_term

    def spied(self, ranked, bases, count):
        tried.append({base.kernel for base in bases})
        return linear_term(self, ranked, bases, count)

    monkeypatch.setattr(hyperparameters._Search, "linear_term", spied)
    g = torch.Generator().manual_seed(0)
    X = torch.rand(50, 1, generator=g, dtype=torch.float64)
    y = torch.sin(9 * X[:, 0]) + 0.1 * torch.randn(50, generator=g, dtype=torch.float64)
    compared(Dataset.of(X, y), ScaleKernel(RBFKernel()), ScaleKernel(MaternKernel(nu=1.5)))
    assert tried == [{0, 1}]


def test_evidence_with_a_linear_term_reaches_its_maximum(paper_data: None) -> None:
    """The slope takes over slowly: half as many iterations end 0.006 nats per row lower."""
    table = load_table("concrete").dataset()
    table = table.part(torch.randperm(table.N, generator=torch.Generator().manual_seed(1))[:600])
    rows = Dataset(*(Standardiser.of(part).forward(part) for part in (table.X, table.Y)))
    found = compared(rows, ScaleKernel(MaternKernel(nu=1.5, ard_num_dims=8)))
    assert has_linear_term(found.best)
    assert found.optima[0].converged
