"""Four selection methods on the same problem: objective and CPU time.

The methods are the paper's score function with direct scoring and with subset statistics, natural
updates by marginal gains, and search. A part of benchmarks/selection.py; results are in
benchmarks/results/selection.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from measure import Row, Seconds, mean, new_results, read_results, table, timed
from selection_problems import ALPHAS, K, Problem, problem
from winnowgp.gradients import ScoreFunction
from winnowgp.point_processes import Bernoulli, SquaredCardinality, kl_divergence
from winnowgp.selection import SubsetObjective, SubsetStatistics, fit_inclusion, search_frontier
from winnowgp.selection.frontier import multistart_search
from winnowgp.selection.natural import InclusionFit
from winnowgp.training.adam import Adam

DRAWS = 1000
"""Number of subsets for every value of the objective."""
STEPS, SAMPLES, LEARNING_RATE = 600, 4, 0.2
"""Settings of the paper's estimator."""
NATURAL_STEPS = (1, 2, 4, 8, 16, 32, 64, 100)
"""Numbers of natural updates that are measured, each in a run from the start."""
TIMED_STEPS = 20
"""Number of steps of direct scoring that are timed if all 600 take too long."""
WHOLE_ROWS = 2000
"""With more rows than this, only TIMED_STEPS of direct scoring are timed."""


@dataclass(frozen=True, slots=True)
class ObjectiveEstimate:
    """An estimate of the objective E_q[L] − KL[q ‖ p] in nats."""

    mean: float
    error: float
    """Standard error of the mean."""

    def row(self) -> Row:
        """Return the columns of a row."""
        return {"objective": round(self.mean, 3), "objective_se": round(self.error, 3)}


def objective_of(
    q: Bernoulli, statistics: SubsetStatistics, prior: SquaredCardinality
) -> ObjectiveEstimate:
    """Estimate the objective with a seed of its own."""
    masks = q.sample(DRAWS, generator=torch.Generator().manual_seed(12345))
    values = statistics.value(masks)
    return ObjectiveEstimate(
        (values.mean() - kl_divergence(q, prior)).item(), (values.std() / DRAWS**0.5).item()
    )


def paper_path(
    objective: SubsetObjective, prior: SquaredCardinality, *, steps: int, seed: int, start: Tensor
) -> Tensor:
    """Return logits before each step of the paper's estimator and after the last one."""
    generator = torch.Generator().manual_seed(seed)
    logits = start.clone().requires_grad_(True)
    gradient, states, path = ScoreFunction(samples=SAMPLES), [], []
    states.append(gradient.init())

    @torch.no_grad()
    def score(masks: Tensor) -> Tensor:
        return objective.value(masks)

    def surrogate() -> Tensor:
        path.append(logits.detach().clone())
        q = Bernoulli(logits)
        estimate = gradient.step(q, score, state=states[-1], generator=generator)
        states[:] = [estimate.state]
        return estimate.surrogate - kl_divergence(q, prior)

    groups = [([logits], LEARNING_RATE)]
    Adam(steps).maximise(surrogate, groups, scale=1.0, on_step=lambda step, value: None)
    return torch.stack([*path, logits.detach().clone()])


class Comparison:
    """The methods on one data set."""

    def __init__(self, given: Problem) -> None:
        self.problem, self.alpha = given, ALPHAS[given.name]
        self.prior = SquaredCardinality(K, self.alpha)
        self.statistics, self.set_up = timed(lambda: given.model.subset_statistics(given.data))
        self.results = new_results(f"selection/{given.name}")
        self.half = given.data.X.new_zeros(K)

    def add(self, method: str, seconds: Seconds, **columns: object) -> Row:
        """Write one row."""
        return self.results.add(
            {
                "data": self.problem.name,
                "N": self.problem.data.N,
                "K": K,
                "alpha": self.alpha,
                "hyper_parameters": self.problem.note,
                "method": method,
                **seconds.row(),
                **columns,
            }
        )

    def paper(self, seed: int) -> tuple[Bernoulli, ObjectiveEstimate]:
        """Measure the paper's estimator by statistics, and direct scoring for the first seed."""
        path, seconds = timed(
            lambda: paper_path(self.statistics, self.prior, steps=STEPS, seed=seed, start=self.half)
        )
        q = Bernoulli(path[-1])
        end = objective_of(q, self.statistics, self.prior)
        common = {"seed": seed, "steps": STEPS, **end.row(), "size": q.mean_count().item()}
        self.add("paper, statistics", self.set_up + seconds, **self.set_up.row("set_up_"), **common)
        if seed == 0:
            self._direct(path, common)
        return q, end

    def _direct(self, path: Tensor, common: Row) -> None:
        """Time direct scoring on the same path: all steps, or some spread evenly over it."""
        given = self.problem
        objective, set_up = timed(lambda: given.model.subset_objective(given.data))
        if given.data.N <= WHOLE_ROWS:
            again, seconds = timed(
                lambda: paper_path(objective, self.prior, steps=STEPS, seed=0, start=self.half)
            )
            end = objective_of(Bernoulli(again[-1]), self.statistics, self.prior)
            self.add("paper, direct", set_up + seconds, **{**common, **end.row()}, note="measured")
            return
        spread = torch.linspace(0, STEPS - 1, TIMED_STEPS).round().long().tolist()
        seconds = Seconds(0.0, 0.0)
        for step in spread:
            start = path[step]
            _, taken = timed(
                lambda start=start, step=step: paper_path(
                    objective, self.prior, steps=1, seed=step, start=start
                )
            )
            seconds = seconds + taken
        self.add(
            "paper, direct",
            set_up + seconds.times(STEPS / TIMED_STEPS),
            **common,
            note=f"time extrapolated from {TIMED_STEPS} steps spread evenly over the path; "
            "objective taken from the same path scored by statistics",
        )

    def natural(self, seed: int, target: ObjectiveEstimate) -> Bernoulli:
        """Measure natural updates with their defaults, then after each number of steps."""
        selection, seconds = timed(lambda: self._naturally(seed, None))
        end = objective_of(selection.q, self.statistics, self.prior)
        self.add(
            "natural",
            self.set_up + seconds,
            **self.set_up.row("set_up_"),
            seed=seed,
            steps=len(selection.trace),
            settled=selection.converged,
            **end.row(),
            size=selection.q.mean_count().item(),
            target=round(target.mean, 3),
        )
        for steps in NATURAL_STEPS:
            if steps > len(selection.trace):
                break
            part, taken = timed(lambda steps=steps: self._naturally(seed, steps))
            here = objective_of(part.q, self.statistics, self.prior)
            self.add(
                "natural, after",
                self.set_up + taken,
                seed=seed,
                steps=steps,
                **here.row(),
                size=part.q.mean_count().item(),
                target=round(target.mean, 3),
            )
        return selection.q

    def _naturally(self, seed: int, steps: int | None) -> InclusionFit:
        generator = torch.Generator().manual_seed(seed)
        if steps is None:
            return fit_inclusion(self.statistics, prior=self.prior, generator=generator)
        return fit_inclusion(
            self.statistics, prior=self.prior, generator=generator, max_steps=steps
        )

    def search(self, processes: dict[str, Bernoulli]) -> None:
        """Measure one set by search, and the best of 100 draws from each point process."""
        log_weights = self.prior.log_weights(self.half)
        best_set, seconds = timed(
            lambda: multistart_search(
                self.statistics, search_frontier(self.statistics), log_weights=log_weights
            )[0]
        )
        self.add(
            "search",
            self.set_up + seconds,
            **self.set_up.row("set_up_"),
            score=round(best_set.score, 3),
            size=int(best_set.mask.sum()),
        )
        for name, q in processes.items():
            masks = q.sample(100, generator=torch.Generator().manual_seed(54321))
            values, taken = timed(lambda masks=masks: self.statistics.value(masks))
            scores = values - self.alpha * masks.sum(dim=1) ** 2
            best = int(scores.argmax())
            self.add(
                f"best of 100 draws, {name}",
                taken,
                score=round(scores[best].item(), 3),
                size=int(masks[best].sum()),
            )


def run(names: Iterable[str], *, seeds: int) -> None:
    """Measure every data set and write its results."""
    for name in names:
        comparison = Comparison(problem(name))
        ends: dict[str, Bernoulli] = {}
        for seed in range(seeds):
            paper, target = comparison.paper(seed)
            natural = comparison.natural(seed, target)
            ends = ends or {"paper": paper, "natural": natural}
        comparison.search(ends)
        print(f"{name}: {len(list(comparison.results))} rows", flush=True)


def reached(rows: list[Row]) -> tuple[Row | None, Row | None]:
    """Return the first row at or above the target, and the first from which all rows are."""
    above = [row["objective"] >= row["target"] for row in rows]
    first = next((row for row, is_above in zip(rows, above, strict=True) if is_above), None)
    stays = None
    for row, is_above in zip(reversed(rows), reversed(above), strict=True):
        if not is_above:
            break
        stays = row
    return first, stays


def _lines(rows: list[Row]) -> Iterator[list[object]]:
    for name in ALPHAS:
        members = [row for row in rows if row["data"] == name]
        direct = next((row for row in members if row["method"] == "paper, direct"), None)
        for paper in (row for row in members if row["method"] == "paper, statistics"):
            same = [row for row in members if row.get("seed") == paper["seed"]]
            ends = [row for row in same if row["method"] == "natural"]
            if direct is None or not ends:
                continue
            looks = [row for row in same if row["method"] == "natural, after"]
            pair = reached([*looks, *ends])
            yield [
                name,
                paper["seed"],
                *(f"{row['objective']:.1f}±{row['objective_se']:.1f}" for row in (paper, ends[0])),
                f"{direct['cpu_s']:.1f}",
                *(f"{row['cpu_s']:.2f}" for row in (paper, ends[0])),
                f"{paper['set_up_cpu_s']:.2f}",
                *(f"{row['cpu_s']:.2f}@{row['steps']}" if row else "-" for row in pair),
                *(_ratio(direct, row) for row in pair),
                *(_ratio(paper, row) for row in pair),
                *(_ratio(paper, row, less=paper["set_up_cpu_s"]) for row in pair),
                f"{ends[0]['steps']}{'' if ends[0]['settled'] else '!'}",
            ]


def _ratio(slow: Row, fast: Row | None, *, less: float = 0.0) -> str:
    """Return the ratio of CPU times, both reduced by `less` seconds."""
    return f"{(slow['cpu_s'] - less) / (fast['cpu_s'] - less):.0f}" if fast else "-"


def report() -> None:
    """Print the results."""
    rows = read_results("selection/*")
    print("\nObjective in nats (mean of 1,000 draws ± standard error), CPU seconds, one thread.")
    print("'first', 'stays': natural updates reach, and stay above, the paper's result, s@steps.")
    print(
        "Speed-up, first/stays: over direct scoring (d), over statistics (s), and over statistics"
    )
    print("without the set-up of either (n). '!' marks a run that did not converge.\n")
    header = ["data", "seed", "paper L~", "natural L~", "direct s", "stat. s", "natural s"]
    header += ["set-up s", "first", "stays", *("d1", "d2", "s1", "s2", "n1", "n2"), "steps"]
    print(table(header, _lines(rows)))
    print("\nOne set: L(Z) - alpha |Z|^2, size, CPU seconds with statistics.\n")
    methods = ("search", "best of 100 draws, paper", "best of 100 draws, natural")
    lines = []
    for name in ALPHAS:
        by_method = {row["method"]: row for row in rows if row["data"] == name and "score" in row}
        if len(by_method) == len(methods):
            cells = [f"{by_method[m]['score']:.1f} ({by_method[m]['size']})" for m in methods]
            lines.append([name, *cells, f"{by_method['search']['cpu_s']:.2f}"])
    print(table(["data", *methods, "search s"], lines))
    gains = [row["objective"] - row["target"] for row in rows if row["method"] == "natural"]
    if gains:
        print(
            f"\nnatural minus paper at the end: mean {mean(gains):.1f}, least {min(gains):.1f} nats"
        )
