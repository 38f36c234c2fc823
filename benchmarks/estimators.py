"""Four ways to choose on the same problem: what each reaches, and how long it takes.

The paper's score function scored directly and by statistics, natural all-flip updates, and search.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from problems import ALPHAS, K, Problem, problem
from records import Records, Row, Seconds, mean, recorded, table, timed
from winnowgp.gradients import ScoreFunction
from winnowgp.point_processes import Bernoulli, SquaredCardinality, kl_divergence
from winnowgp.selection import SubsetObjective, SubsetStatistics, fit_inclusion, search_frontier
from winnowgp.selection.frontier import multistart_search
from winnowgp.selection.natural import InclusionFit
from winnowgp.training.adam import Adam

DRAWS = 1000
"""Subsets behind every value of the objective."""
STEPS, SAMPLES, LEARNING_RATE = 600, 4, 0.2
"""The paper's estimator."""
NATURAL_STEPS = (1, 2, 4, 8, 16, 32, 64, 100)
"""Where natural updates are looked at: each a run of its own from the start."""
TIMED_STEPS = 20
"""Steps of direct scoring that are timed where 600 take too long."""
WHOLE_ROWS = 2000
"""With more rows than this, direct scoring is timed on a few steps."""


@dataclass(frozen=True, slots=True)
class Level:
    """The objective E_q[L] − KL[q ‖ p] in nats."""

    mean: float
    error: float
    """Standard error of the mean."""

    def row(self) -> Row:
        """Columns of a row."""
        return {"objective": round(self.mean, 3), "objective_se": round(self.error, 3)}


def level(q: Bernoulli, statistics: SubsetStatistics, prior: SquaredCardinality) -> Level:
    """The objective from draws that do not depend on how q came about."""
    masks = q.sample(DRAWS, generator=torch.Generator().manual_seed(12345))
    values = statistics.value(masks)
    return Level(
        (values.mean() - kl_divergence(q, prior)).item(), (values.std() / DRAWS**0.5).item()
    )


def paper_path(
    objective: SubsetObjective, prior: SquaredCardinality, *, steps: int, seed: int, start: Tensor
) -> Tensor:
    """Logits before each step of the paper's estimator and after the last, `[steps + 1, K]`."""
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
    """One data set: its statistics, its prior, and a file of rows."""

    def __init__(self, given: Problem) -> None:
        self.problem, self.alpha = given, ALPHAS[given.name]
        self.prior = SquaredCardinality(K, self.alpha)
        self.statistics, self.set_up = timed(lambda: given.model.subset_statistics(given.data))
        self.records = Records(f"selection/{given.name}")
        self.half = given.data.X.new_zeros(K)

    def add(self, method: str, seconds: Seconds, **columns: object) -> Row:
        """One row."""
        return self.records.add(
            data=self.problem.name,
            N=self.problem.data.N,
            K=K,
            alpha=self.alpha,
            hyper_parameters=self.problem.note,
            method=method,
            **seconds.row(),
            **columns,
        )

    def paper(self, seed: int) -> tuple[Bernoulli, Level]:
        """The paper's estimator by statistics; direct scoring is timed for the first seed."""
        path, seconds = timed(
            lambda: paper_path(self.statistics, self.prior, steps=STEPS, seed=seed, start=self.half)
        )
        q = Bernoulli(path[-1])
        end = level(q, self.statistics, self.prior)
        common = {"seed": seed, "steps": STEPS, **end.row(), "size": q.mean_count().item()}
        self.add("paper, statistics", self.set_up + seconds, **self.set_up.row("set_up_"), **common)
        if seed == 0:
            self._direct(path, common)
        return q, end

    def _direct(self, path: Tensor, common: Row) -> None:
        """Time of the same path with direct scoring: all of it, or steps spread evenly over it."""
        given = self.problem
        objective, set_up = timed(lambda: given.model.subset_objective(given.data))
        if given.data.N <= WHOLE_ROWS:
            again, seconds = timed(
                lambda: paper_path(objective, self.prior, steps=STEPS, seed=0, start=self.half)
            )
            end = level(Bernoulli(again[-1]), self.statistics, self.prior)
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

    def natural(self, seed: int, target: Level) -> Bernoulli:
        """Natural updates as a user calls them, then looked at after each number of steps."""
        chosen, seconds = timed(lambda: self._naturally(seed, None))
        end = level(chosen.q, self.statistics, self.prior)
        self.add(
            "natural",
            self.set_up + seconds,
            **self.set_up.row("set_up_"),
            seed=seed,
            steps=len(chosen.trace),
            settled=chosen.converged,
            **end.row(),
            size=chosen.q.mean_count().item(),
            target=round(target.mean, 3),
        )
        for steps in NATURAL_STEPS:
            if steps > len(chosen.trace):
                break
            part, taken = timed(lambda steps=steps: self._naturally(seed, steps))
            here = level(part.q, self.statistics, self.prior)
            self.add(
                "natural, after",
                self.set_up + taken,
                seed=seed,
                steps=steps,
                **here.row(),
                size=part.q.mean_count().item(),
                target=round(target.mean, 3),
            )
        return chosen.q

    def _naturally(self, seed: int, steps: int | None) -> InclusionFit:
        generator = torch.Generator().manual_seed(seed)
        if steps is None:
            return fit_inclusion(self.statistics, prior=self.prior, generator=generator)
        return fit_inclusion(
            self.statistics, prior=self.prior, generator=generator, max_steps=steps
        )

    def search(self, processes: dict[str, Bernoulli]) -> None:
        """One set by search, against the best of 100 draws of each process."""
        log_weights = self.prior.log_weights(self.half)
        found, seconds = timed(
            lambda: multistart_search(
                self.statistics, search_frontier(self.statistics), log_weights=log_weights
            )[0]
        )
        self.add(
            "search",
            self.set_up + seconds,
            **self.set_up.row("set_up_"),
            score=round(found.score, 3),
            size=int(found.mask.sum()),
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
    """Measure, and write a file of rows for each data set."""
    for name in names:
        comparison = Comparison(problem(name))
        ends: dict[str, Bernoulli] = {}
        for seed in range(seeds):
            paper, target = comparison.paper(seed)
            natural = comparison.natural(seed, target)
            ends = ends or {"paper": paper, "natural": natural}
        comparison.search(ends)
        print(f"{name}: {len(comparison.records.rows)} rows", flush=True)


def reached(rows: list[Row]) -> tuple[Row | None, Row | None]:
    """First look at or above the target, and first from which on all are, the end included."""
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
        mine = [row for row in rows if row["data"] == name]
        direct = next((row for row in mine if row["method"] == "paper, direct"), None)
        for paper in (row for row in mine if row["method"] == "paper, statistics"):
            same = [row for row in mine if row.get("seed") == paper["seed"]]
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
    """How many times sooner, both clocks started `less` seconds later."""
    return f"{(slow['cpu_s'] - less) / (fast['cpu_s'] - less):.0f}" if fast else "-"


def report() -> None:
    """Tables of what the files hold."""
    rows = recorded("selection/*")
    print("\nObjective in nats (mean of 1,000 draws ± standard error), CPU seconds, one thread.")
    print("'first' and 'stays': natural updates reach, and keep above, the paper's end, s@steps.")
    print("Times sooner, first/stays: than direct (d), than statistics (s), and than those with")
    print("their set-up counted for neither (n). '!' marks a run that did not settle.\n")
    header = ["data", "seed", "paper L~", "natural L~", "direct s", "stat. s", "natural s"]
    header += ["set-up s", "first", "stays", *("d1", "d2", "s1", "s2", "n1", "n2"), "steps"]
    print(table(header, _lines(rows)))
    print("\nOne set: L(Z) - alpha |Z|^2, size, CPU seconds with statistics.\n")
    methods = ("search", "best of 100 draws, paper", "best of 100 draws, natural")
    lines = []
    for name in ALPHAS:
        found = {row["method"]: row for row in rows if row["data"] == name and "score" in row}
        if len(found) == len(methods):
            cells = [f"{found[m]['score']:.1f} ({found[m]['size']})" for m in methods]
            lines.append([name, *cells, f"{found['search']['cpu_s']:.2f}"])
    print(table(["data", *methods, "search s"], lines))
    gains = [row["objective"] - row["target"] for row in rows if row["method"] == "natural"]
    if gains:
        print(
            f"\nnatural less paper at the end: mean {mean(gains):.1f}, least {min(gains):.1f} nats"
        )
