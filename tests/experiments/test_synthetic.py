from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal, kl_divergence

from winnowgp.data import Dataset
from winnowgp.estimators.kernels import kernel_from
from winnowgp.experiments.base import Scope
from winnowgp.experiments.runner import make_runs
from winnowgp.experiments.runs import Runs
from winnowgp.experiments.synthetic import (
    EVIDENCE_CLAIM,
    PROCESS,
    RANGES,
    Synthetic,
    divergence,
    intensities,
    sampled,
)
from winnowgp.models import SparseGP


def rbf(A: Tensor, B: Tensor, lengthscale: float) -> Tensor:
    return torch.exp(-0.5 * ((A - B.mT) / lengthscale) ** 2)


def test_divergence_equals_kl_of_dense_posteriors() -> None:
    """The reference is KL[q(f, u) ‖ p(f, u | y)] with q(f, u) = p(f | u) q(u), as dense normals."""
    g = torch.Generator().manual_seed(1)
    X = torch.linspace(0, 5, 9, dtype=torch.float64)[:, None]
    Z = torch.tensor([[0.8], [2.2], [4.1]], dtype=torch.float64)
    y = torch.sin(2 * X[:, 0]) + 0.1 * torch.randn(9, generator=g, dtype=torch.float64)
    lengthscale, noise = 0.7, 0.2
    kernel = kernel_from("rbf", 1).initialize(**{"base_kernel.lengthscale": lengthscale})
    model = SparseGP(kernel, Z, noise=noise)

    Kuu, Kuf, Kff = (rbf(A, B, lengthscale) for A, B in ((Z, Z), (Z, X), (X, X)))
    precision = Kuu + Kuf @ Kuf.mT / noise
    m = Kuu @ torch.linalg.solve(precision, Kuf @ y / noise)
    S = Kuu @ torch.linalg.solve(precision, Kuu)
    A = torch.linalg.solve(Kuu, Kuf).mT
    both = torch.cat([A, torch.eye(3, dtype=torch.float64)])  # f and u given u
    prior = torch.cat([torch.cat([Kff, Kuf.mT], 1), torch.cat([Kuf, Kuu], 1)])
    free = prior - both @ Kuu @ both.mT
    q = MultivariateNormal(both @ m, free + both @ S @ both.mT)
    gain = torch.linalg.solve(Kff + noise * torch.eye(9, dtype=torch.float64), prior[:9]).mT
    p = MultivariateNormal(gain @ y, prior - gain @ prior[:9])

    kl = divergence(model, Dataset.of(X, y))
    assert kl == pytest.approx(kl_divergence(q, p).item(), rel=1e-6)
    assert kl > 0.1


def test_divergence_inducing_point_at_every_row_is_zero() -> None:
    data = sampled("noise", 0.5, rows=20, seed=0)
    assert divergence(SparseGP(kernel_from("rbf", 1), data.X), data) == pytest.approx(0, abs=1e-6)


def test_intensities_are_log_spaced() -> None:
    for condition, (low, high) in RANGES.items():
        values = intensities(condition)
        assert (values[0], values[-1]) == (low, high)
        ratios = [b / a for a, b in pairwise(values)]
        assert ratios == pytest.approx([(high / low) ** 0.25] * 4, rel=2e-3)


def test_sampled_noise_is_a_standard_deviation() -> None:
    quiet, loud = (sampled("noise", sigma, rows=400, seed=0) for sigma in (0.2, 0.7))
    assert torch.equal(quiet.X, loud.X)
    assert 0 <= quiet.X.min() < 1
    assert 99 < quiet.X.max() <= 100
    difference = (loud.Y - quiet.Y).std().item()
    # The standard deviation of 400 draws is known to 3.5 %.
    assert difference == pytest.approx(0.5, rel=0.15)


def test_sampled_smoothness_matches_the_kernel() -> None:
    # E(y_i − y_j)² = 2 (1 − exp(−½ d²/γ²)) + 2 σ² with σ = 0.1, for pairs of neighbours.
    for gamma in (0.8, 2.5):
        squares, expected = [], []
        for seed in range(5):
            data = sampled("smoothness", gamma, rows=400, seed=seed)
            order = data.X[:, 0].argsort()
            x, y = data.X[order, 0], data.Y[order, 0]
            squares.append((y[::2] - y[1::2]).square())
            expected.append(2 - 2 * torch.exp(-0.5 * ((x[::2] - x[1::2]) / gamma) ** 2) + 0.02)
        mean = torch.cat(squares).mean().item()
        assert mean == pytest.approx(torch.cat(expected).mean().item(), rel=0.15)


def test_sampled_clustering_has_five_normals_of_given_precision() -> None:
    root = 0.5  # √β, so a standard deviation of 2
    x = sampled("clustering", root, rows=400, seed=0).X[:, 0]
    off = x[:, None] - torch.linspace(0, 100, 5, dtype=x.dtype)
    nearest = off.abs().argmin(1)
    assert torch.bincount(nearest).min() > 50
    assert off.gather(1, nearest[:, None]).std().item() == pytest.approx(1 / root, rel=0.15)


def test_settings_equal_the_papers() -> None:
    settings = Synthetic().settings(Scope(seeds=1), [])
    assert len(settings) == 3 * 5 * 4
    by = {row["kind"]: row for row in settings}
    assert by["fixed"]["sizes"] == list(range(20, 81, 5))
    assert by["fixed"]["updates"] == 1000
    assert by["paper"]["steps"] == {"pre": 200, "process": 600, "post": 200}
    assert by["paper"]["draws"] == 10
    assert {row["alpha"] for row in settings if "alpha" in row} == {0.05}
    assert {row["candidates"] for row in settings if "candidates" in row} == {80}
    assert {row["N"] for row in settings} == {500}
    quick = Synthetic().settings(Scope(quick=True), [])
    assert len(quick) < len(settings)


@pytest.mark.parametrize(
    "kind",
    [
        {"kind": "fixed", "sizes": [4, 8], "updates": 3, "learning_rate": 0.01},
        {
            "kind": "paper",
            "candidates": 8,
            "alpha": 0.05,
            "steps": {"pre": 2, "process": 2, "post": 2},
            "draws": 2,
            "learning_rate": 0.01,
        },
        {"kind": "fast", "candidates": 8, "alpha": 0.05},
        {"kind": "auto", "tolerance": 0.1},
    ],
    ids=lambda kind: kind["kind"],
)
@pytest.mark.usefixtures("quickly")
def test_run_every_kind_gives_one_divergence_per_set(kind: dict) -> None:
    settings = {
        **kind,
        "condition": "noise",
        "intensity": 0.5,
        "N": 40,
        "seed": 0,
        "process": PROCESS,
    }
    row = Synthetic().run(settings, Scope())
    sizes = settings["sizes"] if kind["kind"] == "fixed" else row["kept"]
    assert len(row["kl"]) == len(row["elbo"]) == len(sizes)
    assert min(row["kl"]) > -1e-3
    assert not row.keys() & settings.keys()
    assert row == Synthetic().run(settings, Scope())


def test_claims_judge_the_evidence_as_elbo_plus_kl() -> None:
    shared = {"condition": "noise", "intensity": 0.5, "N": 100, "seed": 0}
    fixed = {"kind": "fixed", "sizes": [10, 20], "kl": [4.0, 4.0], "elbo": [-90.0, -90.0]}
    # A larger KL and a larger ELBO: log p(y) is higher by 0.06 nats per observation.
    fast = {"kind": "fast", "kept": [15], "kl": [6.0], "elbo": [-86.0]}
    lines = Synthetic().claims([fixed | shared, fast | shared])
    verdicts = {line.partition(": ")[2].partition(",")[0]: line for line in lines}
    assert verdicts["KL at most that of the same fixed size"].startswith("does not agree")
    evidence = verdicts[EVIDENCE_CLAIM]
    assert evidence.startswith("agrees")
    assert "mean difference +0.060 to +0.060" in evidence


@pytest.mark.slow
def test_make_runs_quick_scope_gives_figure_and_claims(tmp_path) -> None:
    runs, experiment, scope = Runs(tmp_path / "rows.jsonl"), Synthetic(), Scope(quick=True)
    make_runs(experiment, runs, scope)
    rows = list(runs)
    assert len(rows) == len(experiment.settings(scope, rows))
    assert experiment.draw(rows, tmp_path / "figure.png").stat().st_size > 10_000
    claims = experiment.claims(rows)
    assert any(line.startswith("agrees: fewer inducing points with more noise") for line in claims)
    assert runs.path.stat().st_size < 30_000
