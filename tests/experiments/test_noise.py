import json
from pathlib import Path

import pytest
import torch
from torch.distributions import MultivariateNormal

from winnowgp.experiments.base import Row, Scope
from winnowgp.experiments.noise import SIGMAS, Noise, observed

FEW = {"pre": 2, "process": 3, "post": 2}


def rbf(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.exp(-0.5 * (a[:, None] - b) ** 2)


def run_row(kind: str, sigma: float, *, seed: int = 0, N: int = 100) -> Row:
    experiment, scope = Noise(), Scope(quick=True)
    wanted = next(
        s
        for s in experiment.settings(scope, [])
        if (s["kind"], s["sigma"], s["seed"]) == (kind, sigma, seed)
    )
    settings = {**wanted, "N": N}
    if kind == "paper":
        settings["steps"] = FEW
    return json.loads(json.dumps({**settings, **experiment.run(settings, scope)}))


def test_run_exact_equals_dense_posterior() -> None:
    row, problem = run_row("exact", 0.3), observed(0, 0.3)
    x, y, grid = problem.data.X[:, 0], problem.data.Y[:, 0], problem.grid[:, 0]
    K = rbf(x, x) + 0.09 * torch.eye(len(x))
    k = rbf(grid, x)
    mean = k @ torch.linalg.solve(K, y)
    variance = 1 - (k * torch.linalg.solve(K, k.mT).mT).sum(1)
    torch.testing.assert_close(torch.tensor(row["curve"]["mean"]), mean.float(), atol=2e-3, rtol=0)
    sd = variance.sqrt()
    torch.testing.assert_close(torch.tensor(row["curve"]["sd"]), sd.float(), atol=2e-3, rtol=0)
    assert row["mean_sd"] == pytest.approx(sd.mean().item(), abs=2e-4)


def test_run_fast_kl_equals_evidence_minus_dense_bound() -> None:
    sigma = 0.3
    row, problem = run_row("fast", sigma), observed(0, sigma)
    x, y = problem.data.X[:, 0], problem.data.Y[:, 0]
    Z = torch.tensor(row["curve"]["points"], dtype=torch.float64)
    noise = sigma**2 * torch.eye(len(x), dtype=x.dtype)
    Q = rbf(x, Z) @ torch.linalg.solve(rbf(Z, Z), rbf(Z, x))
    evidence = MultivariateNormal(torch.zeros_like(y), rbf(x, x) + noise).log_prob(y)
    bound = MultivariateNormal(torch.zeros_like(y), Q + noise).log_prob(y)
    bound = bound - (len(x) - Q.trace()) / (2 * sigma**2)
    # The row holds the inducing points to three decimals, around an optimum.
    assert row["kl"] == pytest.approx((evidence - bound).item(), abs=1e-3)
    assert row["kl"] > 0.1


def test_observed_same_seed_only_noise_scale_changes() -> None:
    low, high = observed(3, SIGMAS[0]), observed(3, SIGMAS[2])
    torch.testing.assert_close(low.data.X, high.data.X)
    torch.testing.assert_close(low.truth, high.truth)
    # y = f + σ ε with the same ε: differences of y are proportional to differences of σ.
    y = [observed(3, sigma).data.Y for sigma in SIGMAS]
    first, second = (SIGMAS[1] - SIGMAS[0], SIGMAS[2] - SIGMAS[1])
    torch.testing.assert_close((y[1] - y[0]) / first, (y[2] - y[1]) / second)


@pytest.mark.usefixtures("quickly")
def test_draw_rows_of_one_seed_gives_figure(tmp_path: Path) -> None:
    rows = [run_row(kind, sigma) for sigma in SIGMAS for kind in ("exact", "paper", "fast")]
    assert Noise().draw(rows, tmp_path / "noise.png").stat().st_size > 10_000
    assert "curve" not in run_row("fast", 1.0, seed=1)


@pytest.mark.parametrize(("points", "word"), [((9, 5, 3), "agrees"), ((9, 5, 6), "does not agree")])
def test_claims_judged_by_rows(points, word: str) -> None:
    rows: list[Row] = []
    for sigma, count in zip(SIGMAS, points, strict=True):
        rows.append({"kind": "exact", "seed": 0, "sigma": sigma, "mean_sd": 1.0 / count})
        rows += [
            {"kind": kind, "seed": 0, "sigma": sigma, "points": count, "kl": 0.1}
            for kind in ("paper", "fast")
        ]
    assert [line.split(":")[0] for line in Noise().claims(rows)] == [word] * 3
