"""Appendix B.3: the variance of gradient estimators."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import process_time
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor

from winnowgp.data import Dataset
from winnowgp.estimators import kernel_from
from winnowgp.experiments.base import Experiment, Row, Scope, one_thread
from winnowgp.experiments.gradient_figure import draw_gradients, gradient_claims
from winnowgp.experiments.synthetic import ALPHA, CANDIDATES, PROCESS, N, sampled
from winnowgp.gradients import Gradient, Relaxed, ScoreFunction, Temperature
from winnowgp.models import SparseGP
from winnowgp.point_processes import Bernoulli, CardinalityPrior, SquaredCardinality, kl_divergence
from winnowgp.selection import SubsetStatistics, fit_inclusion
from winnowgp.training.adam import Adam
from winnowgp.typing import Scalar, ScoreMasks, ScoreWeights

# How noisy a gradient of E_q[L(Z)] is, at one q.


FORGOTTEN = 50

"""Estimates after which a baseline has forgotten how it began."""


@dataclass(frozen=True, slots=True)
class GradientNoise:
    """Of R estimates of the gradient with respect to the logits of λ, in nats²."""

    variance: float
    """Σ_k Var[g_k]."""
    bias: float
    """‖mean g − reference‖² less what variance alone makes of it; about zero without a bias."""

    @classmethod
    def of(cls, draws: Float[Tensor, "R K"], reference: Float[Tensor, "T K"]) -> "GradientNoise":
        """Of estimates, against others that have no bias."""
        variance = draws.var(0).sum()
        chance = variance / len(draws) + reference.var(0).sum() / len(reference)
        distance = (draws.mean(0) - reference.mean(0)).square().sum()
        return cls(variance.item(), (distance - chance).item())


def gradient_draws(
    gradient: Gradient[Any],
    score: ScoreMasks | ScoreWeights,
    q: Bernoulli,
    *,
    repeats: int,
    generator: torch.Generator,
) -> Float[Tensor, "R K"]:
    """Estimates of ∂E_q[L]/∂logit λ, one after the other at the same q."""
    logits = q.logits.clone().requires_grad_()
    state, draws = gradient.init(), []
    for _ in range(FORGOTTEN + repeats):
        estimate = gradient.step(Bernoulli(logits), score, state=state, generator=generator)
        state = estimate.state
        draws.append(torch.autograd.grad(estimate.surrogate, logits)[0])
    return torch.stack(draws[FORGOTTEN:])


def flip_draws(
    statistics: SubsetStatistics,
    q: Bernoulli,
    *,
    samples: int,
    repeats: int,
    generator: torch.Generator,
) -> Float[Tensor, "R K"]:
    """The same from all flips of S sampled subsets: ∂E_q[L]/∂logit λ_k = λ_k (1 − λ_k) E[ΔL_k].

    ΔL_k = L(Z ∪ k) − L(Z without k) does not depend on whether k was drawn, so a subset from q
    serves every k.
    """
    weight = q.inclusion * torch.sigmoid(-q.logits)
    masks = q.sample(repeats * samples, generator=generator)
    marginal_gains = torch.stack([statistics.marginal_gains(mask) for mask in masks])
    return weight * marginal_gains.reshape(repeats, samples, q.K).mean(1)


# Inclusions on their way up: the objective after so many steps, and what they cost.


LEARNING_RATE = 0.2

"""The paper's, of the logits of λ."""


def objective_of(
    statistics: SubsetStatistics, prior: CardinalityPrior, *, draws: int
) -> Callable[[Bernoulli], float]:
    """E_q[L(Z)] − KL[q ‖ p] in nats, from draws that do not depend on how q came about."""

    def value(q: Bernoulli) -> float:
        generator = torch.Generator(device=q.logits.device).manual_seed(12345)
        masks = q.sample(draws, generator=generator)
        return (statistics.value(masks).mean() - kl_divergence(q, prior)).item()

    return value


@final
class InclusionPath:
    """Steps, CPU seconds and objective at a few marks. Looking takes no time that is counted.

    Args:
        objective: what is looked at.
        marks: numbers of steps after which to look.
    """

    def __init__(self, objective: Callable[[Bernoulli], float], marks: Sequence[int]) -> None:
        self._objective, self.marks = objective, marks
        self.steps: list[int] = []
        self.seconds: list[float] = []
        self.objective: list[float] = []
        self.last: Bernoulli | None = None
        self.restart()

    def restart(self) -> None:
        """Begin to count time anew."""
        self._spent, self._since = 0.0, process_time()

    def look(self, step: int, q: Bernoulli) -> None:
        """At q, reached after so many steps, if that is a mark."""
        if step not in self.marks:
            return
        self._spent += process_time() - self._since
        self.steps.append(step)
        self.seconds.append(self._spent)
        self.objective.append(self._objective(q))
        self.last, self._since = q, process_time()


def climb_gradient(
    path: InclusionPath,
    gradient: Gradient[Any],
    score: Callable[[], ScoreMasks | ScoreWeights],
    *,
    prior: CardinalityPrior,
    like: torch.Tensor,
    generator: torch.Generator,
    learning_rate: float = LEARNING_RATE,
) -> None:
    """From λ = ½ by Adam, as the paper does, up to the last mark.

    Args:
        score: makes what scores subsets; part of what is timed.
        like: for dtype and device.
    """
    logits = like.new_zeros(prior.K).requires_grad_()
    state, step = gradient.init(), 0
    # A process's first optimiser loads modules for a second.
    torch.optim.Adam([logits])
    path.restart()
    answer = score()

    def surrogate() -> Scalar:
        nonlocal state, step
        path.look(step, Bernoulli(logits.detach().clone()))
        estimate = gradient.step(Bernoulli(logits), answer, state=state, generator=generator)
        state, step = estimate.state, step + 1
        return estimate.surrogate - kl_divergence(Bernoulli(logits), prior)

    most = max(path.marks)
    groups = [([logits], learning_rate)]
    Adam(most).maximise(surrogate, groups, scale=1.0, on_step=lambda step, value: None)
    path.look(most, Bernoulli(logits.detach()))


def climb_naturally(
    path: InclusionPath,
    statistics: Callable[[], SubsetStatistics],
    *,
    prior: CardinalityPrior,
    generator: Callable[[], torch.Generator],
) -> None:
    """By natural all-flip updates, a run of its own to each mark: what a caller would wait for.

    Args:
        statistics: makes them; part of what is timed.
        generator: makes one, the same for every run.
    """
    for steps in path.marks:
        path.restart()
        found = fit_inclusion(statistics(), prior=prior, generator=generator(), max_steps=steps)
        path.look(steps, found.q)
        if found.converged:
            return


# Appendix B.3 of the paper: score function against relaxed draws, and against all flips.
#
# One problem of figure 3 (500 rows, σ = 0.3, the process that made them known, 80 random rows as
# candidates, α = 0.05), so that only λ is learnt. Two kinds of runs:
#
# - `path`: the objective over steps and CPU seconds, at that α and, for what a step costs under a
#   strong prior, at α = 1. The score function with four subsets and the
#   relaxed gradient with one draw score straight from the kernel blocks, as the paper does; the
# score
#   function scores by statistics as well, natural all-flip updates only so.
# - `variance`: of each gradient at the same λ, for several numbers of draws.


SIGMA, SEEDS = 0.3, 3

STRONG = 1.0

"""α under which fewer than half of the candidates are kept: where a step's cost is judged."""

MARKS = (0, 1, 2, 5, 10, 20, 50, 100, 200, 300, 400, 500, 600)

NATURAL_MARKS = (0, 1, 2, 5, 10, 20, 50, 100)

DRAWS = 500

"""Subsets behind every value of the objective."""

REFERENCE = 1000

"""Subsets behind the gradient that biases are measured against."""

PLACES = ("start", "midway", "end")

"""λ = ½, half the logits that natural updates end with, and those."""


@final
class Problem:
    """Rows, the process that made them, and statistics of the candidates."""

    def __init__(self, settings: Row, device: str) -> None:
        sigma, process = settings["sigma"], settings["process"]
        how = {"rows": settings["N"], "seed": settings["seed"], "process": process}
        drawn = sampled("noise", sigma, **how)
        self.data = Dataset(drawn.X.to(device), drawn.Y.to(device))
        kernel = kernel_from("rbf", 1).initialize(**{"base_kernel.lengthscale": process["gamma"]})
        # Rows are drawn independently: the first are as random as any.
        candidates = self.data.X[: settings["candidates"]]
        self.model = SparseGP(kernel, candidates, noise=sigma**2).requires_grad_(False)
        self.prior = SquaredCardinality(self.model.K, settings["alpha"])
        self.seed = settings["seed"]

    def statistics(self) -> SubsetStatistics:
        """Of the candidates, from a pass over the rows."""
        return self.model.subset_statistics(self.data)

    def generator(self) -> torch.Generator:
        """The same at every call."""
        return torch.Generator(device=self.data.X.device).manual_seed(self.seed)

    def place(self, name: str) -> Bernoulli:
        """One of `PLACES`."""
        share = PLACES.index(name) / 2
        found = fit_inclusion(
            self.statistics(), prior=self.prior, generator=self.generator(), max_steps=100
        )
        return Bernoulli(share * found.q.logits)


@final
class Estimators(Experiment):
    """Objective over time, and variance of the gradient."""

    name = "estimators"
    title = "appendix B.3: score function, relaxed and all-flip gradients; objective and variance"

    def settings(self, scope: Scope, rows: Sequence[Row]) -> list[Row]:
        seeds = range(scope.seeds or (1 if scope.quick else SEEDS))
        problem = {"N": N, "sigma": SIGMA, "candidates": CANDIDATES, "process": PROCESS}
        weak, strong = ({**problem, "alpha": alpha} for alpha in (ALPHA, STRONG))
        paths = _paths(scope)
        costly = [path for path in paths if path["gradient"] != "natural"]
        return [
            {**run, "seed": seed}
            for run in (
                *({**variance, **weak} for variance in _variances(scope)),
                *({**path, **weak} for path in paths),
                *({**path, **strong} for path in costly),
            )
            for seed in seeds
        ]

    def alone(self, settings: Row) -> bool:
        return settings["kind"] == "path"

    def measured(self, settings: Row, scope: Scope) -> Row:
        problem = Problem(settings, scope.device)
        if settings["kind"] == "path":
            with one_thread():
                return _path(problem, settings)
        return _variance(problem, settings)

    def draw(self, rows: Sequence[Row], path: Path) -> Path:
        return draw_gradients(rows, path)

    def claims(self, rows: Sequence[Row]) -> list[str]:
        return gradient_claims(rows)


def _paths(scope: Scope) -> list[Row]:
    """Settings of what is looked at on its way up."""
    marks = [mark for mark in MARKS if mark <= 100] if scope.quick else list(MARKS)
    drawn = {"marks": marks, "draws": DRAWS, "learning_rate": LEARNING_RATE}
    return [
        {"kind": "path", "gradient": "relaxed", "samples": 1, **drawn},
        {"kind": "path", "gradient": "score", "samples": 4, **drawn},
        {"kind": "path", "gradient": "score by statistics", "samples": 4, **drawn},
        {"kind": "path", "gradient": "natural", "marks": list(NATURAL_MARKS), "draws": DRAWS},
    ]


def _variances(scope: Scope) -> list[Row]:
    """Settings of gradients that are estimated many times at the same place."""
    few, many = ([1, 4], [1, 4]) if scope.quick else ([1, 4, 16], [1, 4, 16, 64])
    gradients: list[Row] = [
        {"gradient": "relaxed", "temperature": 1.0, "samples": few},
        {"gradient": "relaxed", "temperature": 0.1, "samples": few},
        {"gradient": "flips", "samples": few},
        {"gradient": "score", "samples": many},
    ]
    how = {"repeats": 100 if scope.quick else 200, "reference": REFERENCE}
    return [
        {"kind": "variance", **gradient, "at": place, **how}
        for gradient in gradients
        for place in PLACES[:: 2 if scope.quick else 1]
    ]


def _path(problem: Problem, settings: Row) -> Row:
    objective = objective_of(problem.statistics(), problem.prior, draws=settings["draws"])
    path = InclusionPath(objective, settings["marks"])
    if settings["gradient"] == "natural":
        climb_naturally(path, problem.statistics, prior=problem.prior, generator=problem.generator)
    else:
        relaxed = settings["gradient"] == "relaxed"
        climb_gradient(
            path,
            Relaxed(settings["samples"]) if relaxed else ScoreFunction(settings["samples"]),
            lambda: _score(problem, settings["gradient"]),
            prior=problem.prior,
            learning_rate=settings["learning_rate"],
            like=problem.data.X,
            generator=problem.generator(),
        )
    assert path.last is not None
    return {
        "steps": path.steps,
        "cpu": [round(seconds, 4) for seconds in path.seconds],
        "objective": [round(value, 2) for value in path.objective],
        "expected": round(path.last.mean_count().item(), 2),
    }


def _score(problem: Problem, name: str) -> ScoreMasks | ScoreWeights:
    """What answers a gradient's questions."""
    if name == "score by statistics":
        return problem.statistics().value
    blocks = problem.model.subset_objective(problem.data)
    return blocks.relaxed_value if name == "relaxed" else blocks.value


def _variance(problem: Problem, settings: Row) -> Row:
    q, statistics, generator = (
        problem.place(settings["at"]),
        problem.statistics(),
        problem.generator(),
    )
    reference = flip_draws(
        statistics, q, samples=1, repeats=settings["reference"], generator=generator
    )
    blocks, repeats = problem.model.subset_objective(problem.data), settings["repeats"]
    found = []
    for samples in settings["samples"]:
        if settings["gradient"] == "flips":
            draws = flip_draws(statistics, q, samples=samples, repeats=repeats, generator=generator)
        else:
            relaxed = settings["gradient"] == "relaxed"
            draws = gradient_draws(
                _relaxed(samples, settings["temperature"]) if relaxed else ScoreFunction(samples),
                blocks.relaxed_value if relaxed else statistics.value,
                q,
                repeats=repeats,
                generator=generator,
            )
        found.append(GradientNoise.of(draws, reference))
    return {
        "variance": [_short(noise.variance) for noise in found],
        "bias": [_short(noise.bias) for noise in found],
        "norm": _short(reference.mean(0).square().sum().item()),
    }


def _relaxed(samples: int, temperature: float) -> Relaxed:
    return Relaxed(samples, Temperature(temperature, temperature, 1))


def _short(value: float) -> float:
    return float(f"{value:.4g}")
