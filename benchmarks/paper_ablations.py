"""Which setting decides where the paper's claims do not hold: one setting changed at a time.

    python benchmarks/paper_ablations.py --jobs 2            # run what has no row yet
    python benchmarks/paper_ablations.py --only "figure 6" --device cuda
    python benchmarks/paper_ablations.py --summary           # print the verdicts as Markdown

Each ablation takes the runs of one kind of an experiment of `winnow reproduce`, changes one
setting, and judges the claim again by the experiment's own rule. Rows are in
docs/results/ablations.jsonl; `paper_page.py` writes the table into docs/paper.md.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from measure import Row, markdown
from winnowgp.experiments.base import Experiment, Scope
from winnowgp.experiments.gplvm import Gplvm
from winnowgp.experiments.gradient_variance import GradientVariance
from winnowgp.experiments.illustration import Illustration
from winnowgp.experiments.kin8nm_deep import Kin8nmDeep
from winnowgp.experiments.real import Real, corrupted
from winnowgp.experiments.runner import make_runs, run_status
from winnowgp.experiments.runs import Runs
from winnowgp.experiments.sizes import SizeStudy, standardised
from winnowgp.experiments.synthetic import Synthetic

FILE = Path(__file__).parents[1] / "docs" / "results" / "ablations.jsonl"


@dataclass(frozen=True, slots=True)
class Ablation:
    """Runs of one kind of an experiment with a setting changed."""

    figure: str
    change: str
    """What is changed, in words; it identifies the ablation in the file of rows."""
    experiment: Experiment
    kind: str
    """The kind of runs that is changed."""
    changed: Callable[[Row], Row]
    """Returns the changed settings of a run."""
    claims: tuple[str, ...]
    """Beginnings of the claims that are judged again."""
    scope: Scope = field(default_factory=Scope)
    keep: Callable[[Row], bool] = lambda row: True
    """Whether a run is part of the ablation."""
    beside: Callable[[Row], bool] = lambda row: row["kind"] in ("fixed", "grid", "time")
    """Whether a stored row of the experiment is part of the comparison."""

    def settings(self) -> list[Row]:
        """Return the settings of its runs."""
        return [
            {**row, **self.changed(row), "figure": self.figure, "change": self.change}
            for row in self.experiment.settings(self.scope, [])
            if row["kind"] == self.kind and self.keep(row)
        ]

    def verdicts(self, rows: Sequence[Row], stored: Sequence[Row]) -> list[str]:
        """Return the claims about the changed runs, judged by the experiment.

        Args:
            rows: all rows of ablations.
            stored: rows of the experiment itself, such as curves of fixed sizes.
        """
        own = [row for row in rows if row["change"] == self.change and row["figure"] == self.figure]
        if not own:
            return []
        lines = self.experiment.claims([*own, *filter(self.beside, stored)])
        return [line for line in lines if line.partition(": ")[2].startswith(self.claims)]


def _steps(row: Row, count: int) -> Row:
    return {"steps": {**row["steps"], "process": count}}


def _is_shaped(row: Row) -> bool:
    """Return whether a run of figure 3 varies smoothness or clustering."""
    return row["condition"] != "noise"


SHAPES = ("fewer inducing points with more smoothness", "fewer inducing points with more clust")
LAST_LAYER = ("more inducing points in the last layer",)
ON_CONCRETE = ("fewer inducing points with more noise on concrete",)
ON_KIN8NM = ("fewer inducing points with more noise on kin8nm",)
CURVE = ("ELBO at least that of the same fixed size",)
RELEASED = Scope(released=True)

ABLATIONS = (
    Ablation(
        "figure 1",
        "900 steps of the point process instead of 300",
        Illustration(),
        "paper",
        lambda row: {"steps": {**row["steps"], "process": 900}},
        ("a small set of highly informative",),
    ),
    Ablation(
        "figure 3",
        "printed settings, data not standardised (initial lengthscale near the true one)",
        Synthetic(),
        "paper",
        lambda row: {"standardise": False},
        SHAPES,
        keep=_is_shaped,
    ),
    Ablation(
        "figure 3",
        "fast schedule, 400 candidates instead of 80",
        Synthetic(),
        "fast",
        lambda row: {"candidates": 400},
        SHAPES,
        keep=_is_shaped,
    ),
    Ablation(
        "figure 3",
        "fast schedule, α = 0.005 instead of 0.05",
        Synthetic(),
        "fast",
        lambda row: {"alpha": 0.005},
        SHAPES,
        keep=_is_shaped,
    ),
    Ablation(
        "figure 3",
        "fast schedule, 400 candidates and α = 0.005",
        Synthetic(),
        "fast",
        lambda row: {"candidates": 400, "alpha": 0.005},
        SHAPES,
        keep=_is_shaped,
    ),
    Ablation(
        "figure 4",
        "fast schedule, then 5,000 steps of Adam as for fixed sizes",
        Real(names=("concrete", "energy")),
        "fast",
        lambda row: {"updates": 5000, "learning_rate": 0.01},
        CURVE,
    ),
    Ablation(
        "figure 4",
        "automatic α on concrete, 300 candidates instead of 100",
        Real(names=("concrete",)),
        "auto",
        lambda row: {"candidates": 300},
        ON_CONCRETE,
    ),
    Ablation(
        "figure 4",
        "automatic α on kin8nm, a tolerance of 0.1 instead of 0.01",
        Real(names=("kin8nm",)),
        "auto",
        lambda row: {"tolerance": 0.1},
        ON_KIN8NM,
    ),
    Ablation(
        "figure 4",
        "automatic α on kin8nm, 2,000 candidates and a tolerance of 0.1",
        Real(names=("kin8nm",)),
        "auto",
        lambda row: {"candidates": 2000, "tolerance": 0.1},
        ON_KIN8NM,
    ),
    Ablation(
        "appendix B.3",
        "3,000 steps instead of 600",
        GradientVariance(),
        "path",
        lambda row: {"marks": [0, 600, 3000]},
        ("score function and relaxed gradient give comparable",),
        keep=lambda row: row["alpha"] < 1 and row["gradient"] in ("score", "relaxed"),
        beside=lambda row: row.get("gradient") == "natural",
    ),
    Ablation(
        "figure 6",
        "released settings, 500 steps of the point process instead of ten",
        Kin8nmDeep(),
        "released",
        lambda row: _steps(row, 500),
        LAST_LAYER,
        scope=RELEASED,
    ),
    Ablation(
        "figure 6",
        "released settings, one α for both layers instead of 8 and 1",
        Kin8nmDeep(),
        "released",
        lambda row: {"weights": (1.0, 1.0)},
        LAST_LAYER,
        scope=RELEASED,
    ),
    Ablation(
        "figure 7",
        "released settings, candidates held on their grid",
        Gplvm(),
        "released",
        lambda row: {"grid_held": True},
        ("further candidates become active",),
        scope=RELEASED,
        keep=lambda row: row["seed"] < 3,
    ),
)


@final
class Ablations(Experiment):
    """The runs of all ablations, or of those of one figure."""

    name = "ablations"
    title = "one setting changed at a time"

    def __init__(self, only: str = "") -> None:
        self.only = only

    def settings(self, scope: Scope, rows: Sequence[Row]) -> list[Row]:
        chosen = [each for each in ABLATIONS if self.only in f"{each.figure}: {each.change}"]
        return [row for each in chosen for row in each.settings()]

    def run(self, settings: Row, scope: Scope) -> Row:
        (ablation,) = (
            each
            for each in ABLATIONS
            if (each.figure, each.change) == (settings["figure"], settings["change"])
        )
        own = {name: settings[name] for name in settings if name not in ("figure", "change")}
        if ablation.figure == "figure 4" and "updates" in own:
            return _with_adam(own, scope)
        return ablation.experiment.run(own, scope)

    def draw(self, rows: Sequence[Row], path: Path) -> Path:
        raise NotImplementedError


def _with_adam(settings: Row, scope: Scope) -> Row:
    """Select inducing points of figure 4 by the fast schedule, and train them by Adam."""
    noisy = corrupted(
        settings["data"], settings["noise"], rows=settings["N"], seed=settings["seed"]
    )
    data = standardised(noisy, scope.device)
    study = SizeStudy(data, settings["seed"])
    (model,), row = study.run(settings)
    study.train(model, settings["updates"], settings["learning_rate"])
    return {**row, "elbo": [round(model.fixed_bound(data), 2)]}


def outcomes(folder: Path = FILE.parent) -> list[tuple[Ablation, str, str, str]]:
    """Return ablation, claim, verdict and evidence of every claim that the rows suffice for."""
    rows, found = list(Runs(folder / FILE.name)), []
    for ablation in ABLATIONS:
        name = ablation.experiment.name + "-released" * ablation.scope.released
        stored = list(Runs(folder / f"{name}.jsonl"))
        found += [(ablation, *_parts(line)) for line in ablation.verdicts(rows, stored)]
    return found


def summary(folder: Path = FILE.parent) -> str:
    """Return the verdicts as a Markdown table: figure, change, claim, verdict and evidence."""
    lines = [[each.figure, each.change, *parts] for each, *parts in outcomes(folder)]
    return markdown(["figure", "change", "claim", "verdict", "evidence"], lines)


def _parts(line: str) -> tuple[str, str, str]:
    """Return claim, verdict and evidence of a line.

    >>> _parts("agrees: fewer points with noise, the fast schedule (9, 5 and 2; mean (all) 5)")
    ('fewer points with noise', 'agrees', '9, 5 and 2')
    """
    verdict, _, text = line.partition(": ")
    statement, _, evidence = text.partition(" (")
    statement = statement.rpartition(", the ")[0] or statement
    return statement, verdict, evidence.rstrip(")").split(";")[0]


def main() -> None:
    """Parse the command line; run what is missing, or print the verdicts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help='part of "figure: change"')
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--file", type=Path, default=FILE)
    parser.add_argument("--summary", action="store_true", help="print the verdicts, run nothing")
    arguments = parser.parse_args()
    if arguments.summary:
        print(summary())
        return

    def show(done: int, total: int, row: dict[str, Any]) -> None:
        sizes = row.get("kept", row.get("sizes"))
        print(f"{done} of {total}: {row['change']}, {json.dumps(sizes)}", flush=True)

    experiment, runs = Ablations(arguments.only), Runs(arguments.file)
    scope = Scope(device=arguments.device)
    make_runs(experiment, runs, scope, jobs=arguments.jobs, on_run=show)
    print(f"missing: {len(run_status(experiment, runs, scope).missing)}")


if __name__ == "__main__":
    main()
