"""Appendix B.3: gradients compared with sums over all subsets."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from winnowgp.data import Dataset
from winnowgp.estimators.kernels import kernel_from
from winnowgp.experiments.base import Scope
from winnowgp.experiments.gradient_estimates import (
    GradientNoise,
    OptimisationPath,
    gradient_draws,
    marginal_gain_draws,
    objective_of,
    optimise_by_gradient,
)
from winnowgp.experiments.gradient_variance import GradientVariance, draw_band
from winnowgp.experiments.runner import make_runs
from winnowgp.experiments.runs import Runs
from winnowgp.gradients import Enumeration, Relaxed, ScoreFunction, Temperature, all_masks
from winnowgp.models import SparseGP
from winnowgp.point_processes import Bernoulli, SquaredCardinality, kl_divergence
from winnowgp.selection import SubsetStatistics


@dataclass(frozen=True)
class Problem:
    """Six candidates so close to each other that their marginal gains depend on the others."""

    model: SparseGP
    data: Dataset
    prior: SquaredCardinality

    @classmethod
    def make(cls) -> "Problem":
        g = torch.Generator().manual_seed(0)
        X = 5 * torch.rand(60, 1, generator=g, dtype=torch.float64)
        y = torch.sin(2 * X[:, 0]) + 0.5 * torch.randn(60, generator=g, dtype=torch.float64)
        model = SparseGP(kernel_from("rbf", 1), X[:6], noise=0.25).requires_grad_(False)
        return cls(model, Dataset.of(X, y), SquaredCardinality(6, 0.5))

    def statistics(self) -> SubsetStatistics:
        return self.model.subset_statistics(self.data)


@pytest.fixture
def q(generator) -> Bernoulli:
    return Bernoulli(torch.randn(6, generator=generator, dtype=torch.float64))


def exact_gradient(problem: Problem, q: Bernoulli) -> torch.Tensor:
    logits = q.logits.clone().requires_grad_()
    estimate = Enumeration().step(Bernoulli(logits), problem.statistics().value)
    return torch.autograd.grad(estimate.surrogate, logits)[0]


def z_scores(draws: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    return (draws.mean(0) - exact) / (draws.std(0) / len(draws) ** 0.5)


@pytest.mark.parametrize("samples", [1, 3])
def test_marginal_gain_draws_and_score_function_are_unbiased(q, generator, samples: int) -> None:
    problem = Problem.make()
    exact = exact_gradient(problem, q)
    # 400 estimates of 6 numbers: |z| of the largest exceeds 4 once in 2,600 times.
    marginal_gains = marginal_gain_draws(
        problem.statistics(), q, samples=samples, repeats=400, generator=generator
    )
    assert marginal_gains.shape == (400, 6)
    assert z_scores(marginal_gains, exact).abs().max() < 4
    score = gradient_draws(
        ScoreFunction(samples),
        problem.statistics().value,
        q,
        repeats=400,
        generator=generator,
    )
    assert z_scores(score, exact).abs().max() < 4
    assert marginal_gains.var(0).sum() < score.var(0).sum()


def test_marginal_gain_draws_variance_equals_sum_over_subsets(q, generator) -> None:
    statistics = Problem.make().statistics()
    masks = all_masks(6)
    weight = q.inclusion * (1 - q.inclusion)
    each = weight * torch.stack([statistics.marginal_gains(mask) for mask in masks])
    p = q.log_prob(masks).exp()[:, None]
    mean = (p * each).sum(0)
    exact = (p * (each - mean).square()).sum().item()
    draws = marginal_gain_draws(statistics, q, samples=4, repeats=300, generator=generator)
    noise = GradientNoise.of(draws, draws)
    assert noise.variance == pytest.approx(exact / 4, rel=0.3)


def test_relaxed_gradient_lower_temperature_less_bias_more_variance(q, generator) -> None:
    problem = Problem.make()
    reference = marginal_gain_draws(
        problem.statistics(), q, samples=1, repeats=500, generator=generator
    )
    blocks = problem.model.subset_objective(problem.data)
    hot, cold = (
        GradientNoise.of(
            gradient_draws(
                Relaxed(8, Temperature(tau, tau, 1)),
                blocks.relaxed_value,
                q,
                repeats=150,
                generator=generator,
            ),
            reference,
        )
        for tau in (1.0, 0.1)
    )
    assert hot.bias > cold.bias
    assert hot.variance < cold.variance


def test_gradient_noise_known_bias_and_variance_recovered(generator) -> None:
    g, R = generator, 20_000
    reference = torch.randn(R, 3, generator=g, dtype=torch.float64)
    shift = torch.tensor([2.0, 0.0, -1.0], dtype=torch.float64)
    draws = 0.5 * torch.randn(R, 3, generator=g, dtype=torch.float64) + shift
    noise = GradientNoise.of(draws, reference)
    assert noise.variance == pytest.approx(0.75, rel=0.05)
    assert noise.bias == pytest.approx(5.0, rel=0.05)
    # ‖mean difference‖² of 100 draws is 3 · 1.25/100 on average by chance, which is subtracted.
    pairs = zip((draws - shift).split(100), reference.split(100), strict=True)
    biases = torch.tensor([GradientNoise.of(*pair).bias for pair in pairs])
    assert abs(biases.mean()) < 4 * biases.std() / len(biases) ** 0.5 < 0.02


def test_objective_of_equals_sum_over_subsets(q) -> None:
    problem = Problem.make()
    masks = all_masks(6)
    exact = (q.log_prob(masks).exp() * problem.statistics().value(masks)).sum()
    exact = (exact - kl_divergence(q, problem.prior)).item()
    draws = 20_000
    estimate = objective_of(problem.statistics(), problem.prior, draws=draws)(q)
    values = problem.statistics().value(masks)
    spread = (q.log_prob(masks).exp() * (values - values.mean()).square()).sum().sqrt().item()
    assert abs(estimate - exact) < 4 * spread / draws**0.5
    shifted = objective_of(problem.statistics(), SquaredCardinality(6, 5.0), draws=draws)(q)
    assert shifted < estimate - 1


def test_optimise_by_gradient_records_path_at_marks(generator) -> None:
    problem, seen = Problem.make(), []

    def objective(q: Bernoulli) -> float:
        seen.append(q.logits)
        return float(len(seen))

    path = OptimisationPath(objective, (0, 1, 3))
    optimise_by_gradient(
        path,
        Enumeration(),
        lambda: problem.statistics().value,
        prior=problem.prior,
        like=problem.data.X,
        generator=generator,
    )
    assert path.steps == [0, 1, 3]
    assert path.seconds == sorted(path.seconds)
    assert torch.equal(seen[0], torch.zeros_like(seen[0]))
    # Adam's first step has the length of the learning rate.
    assert torch.allclose(seen[1].abs(), torch.full_like(seen[1], 0.2), rtol=1e-4)
    assert path.last is not None
    assert torch.equal(path.last.logits, seen[2])


def test_settings_equal_the_papers() -> None:
    settings = GradientVariance().settings(Scope(seeds=1), [])
    assert {(r["N"], r["candidates"]) for r in settings} == {(500, 80)}
    strong = [r["gradient"] for r in settings if r["alpha"] != 0.05]
    assert strong == ["relaxed", "score", "score by statistics"]
    score = [r for r in settings if r["kind"] == "path" and r["gradient"] == "score"]
    assert score[0]["samples"] == 4
    assert score[0]["marks"][-1] == 600


def test_settings_paths_have_five_seeds() -> None:
    settings = GradientVariance().settings(Scope(), [])
    seeds = {
        kind: {r["seed"] for r in settings if r["kind"] == kind} for kind in ("path", "variance")
    }
    assert [len(each) for each in seeds.values()] == [5, 3]
    assert {r["seed"] for r in GradientVariance().settings(Scope(seeds=2), [])} == {0, 1}


def tiny(rows: list[dict]) -> list[dict]:
    """Return the same settings with less of everything."""
    small = {"N": 50, "candidates": 7}
    # Under the paper's α all seven would be included for certain, and no gradient would vary.
    rows = [{**row, "alpha": max(row["alpha"], 0.3)} for row in rows]
    fewer = {"marks": [0, 2, 4], "draws": 20, "repeats": 5, "reference": 10}
    return [{**row, **small, **{k: v for k, v in fewer.items() if k in row}} for row in rows]


def test_run_tiny_settings_gives_figure_and_claims(tmp_path) -> None:
    experiment = GradientVariance()
    settings = tiny(experiment.settings(Scope(quick=True), []))
    rows = [{**each, **experiment.run(each, Scope())} for each in settings]
    for row in rows:
        assert len(row["samples"] if row["kind"] == "variance" else row["steps"]) == len(
            row["variance"] if row["kind"] == "variance" else row["objective"]
        )
    assert experiment.draw(rows, tmp_path / "figure.png").stat().st_size > 10_000
    lines = experiment.claims(rows)
    assert len([line for line in lines if " a step " not in line]) == 5
    assert len([line for line in lines if " a step " in line]) == 2


def test_claims_step_cost_judged_only_if_few_are_included() -> None:
    path = {"kind": "path", "seed": 0, "N": 500, "candidates": 80, "steps": [0, 1, 2]}
    cpu = {"score": 0.006, "relaxed": 0.004, "score by statistics": 0.001}
    rows = [
        {**path, "gradient": name, "alpha": alpha, "expected": expected}
        | {"cpu": [0.0, 1.0, 1.0 + ms / alpha], "objective": [0.0, 0.0, 0.0]}
        for alpha, expected in ((0.05, 40.0), (1.0, 39.9))
        for name, ms in cpu.items()
    ]
    weak, line = GradientVariance().claims(rows)
    assert weak.startswith("cost of a step if the prior is weak: α = 0.05: 120")
    assert line.startswith("does not agree: a step of the score function costs less")
    assert "(α = 1: 6.0 ms with four subsets of 40 candidates on average, 4.0 ms" in line
    assert line.endswith("a ratio of 1.50; 1.0 ms by statistics, a ratio of 0.25)")
    assert GradientVariance().claims(rows[:3]) == [weak]


def verdicts(**objectives: float) -> list[str]:
    """Return the verdicts on paths that end with these objectives."""
    path = {"kind": "path", "seed": 0, "N": 500, "candidates": 80, "expected": 30.0}
    path["alpha"] = 0.05
    cost = {"score": [0.0, 1.0, 3.0], "relaxed": [0.0, 1.0, 2.0], "natural": [0.1, 0.2, 0.3]}
    rows = [
        {**path, "gradient": name, "steps": [0, 1, 2], "cpu": cost[name]}
        | {"objective": [-90.0, -80.0, objectives[name]]}
        for name in cost
    ]
    noise = {"kind": "variance", "seed": 0, "at": "start", "samples": [4], "norm": 4.0}
    rows += [
        {**noise, "gradient": "score", "variance": [8.0], "bias": [0.0]},
        {**noise, "gradient": "flips", "variance": [2.0], "bias": [0.0]},
        {**noise, "gradient": "relaxed", "temperature": 0.1, "variance": [3.0], "bias": [1.0]},
        {**noise, "gradient": "relaxed", "temperature": 1.0, "variance": [1.0], "bias": [4.0]},
    ]
    assert not GradientVariance().claims(rows[1:3] + rows[4:])
    return [line.split(":")[0] for line in GradientVariance().claims(rows)]


def test_claims_judged_by_rows() -> None:
    agrees, disagrees = "agrees", "does not agree"
    # A step of the score function takes two seconds in these rows, a relaxed one takes one.
    assert verdicts(score=-50, relaxed=-53, natural=-40) == [
        *[agrees] * 3,
        disagrees,
        agrees,
        agrees,
    ]
    assert verdicts(score=-50, relaxed=-56, natural=-60)[:4] == [disagrees] * 4


@pytest.mark.slow
def test_make_runs_quick_scope_gives_figure_and_claims(tmp_path) -> None:
    runs, experiment, scope = Runs(tmp_path / "rows.jsonl"), GradientVariance(), Scope(quick=True)
    make_runs(experiment, runs, scope)
    rows = list(runs)
    assert len(rows) == len(experiment.settings(scope, rows))
    assert experiment.draw(rows, tmp_path / "figure.png").stat().st_size > 10_000
    lines = [line for line in experiment.claims(rows) if "beyond the paper" in line]
    assert len(lines) == 3
    assert all(line.startswith("agrees") for line in lines)


def test_draw_band_shows_mean_and_range_of_runs() -> None:
    ax = Figure().subplots()
    draw_band([1, 2], [[0, 2], [1, 5]], name="a", colour="#ff0000", dashed=False, ax=ax)
    draw_band([1, 3], [[5], [6]], name="b", colour="#00ff00", dashed=True, ax=ax)
    assert [np.asarray(line.get_xdata()).tolist() for line in ax.lines] == [[1, 2], [1, 3]]
    assert np.asarray(ax.lines[0].get_ydata()).tolist() == [1, 3]
    assert [line.get_linestyle() for line in ax.lines] == ["-", "--"]
    heights = [np.asarray(band.get_paths()[0].vertices)[:, 1] for band in ax.collections]
    assert [(h.min(), h.max()) for h in heights] == [(0, 5), (5, 6)]
