"""Draw the figures of the rows in docs/results, and write their claims into docs/paper.md.

    python benchmarks/paper_page.py

Each experiment has a section on the page between `<!-- NAME -->` and `<!-- end -->`, which is
replaced by its figure and claims; the section `verdicts` has a table of all claims. Run
`winnow reproduce NAME -o docs/results` first, and `winnow reproduce NAME --as released -o
docs/results` for the runs with the released settings.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from measure import Row, markdown, replace_section
from paper_ablations import outcomes
from paper_ablations import summary as ablation_table
from winnowgp.errors import InputError
from winnowgp.experiments.base import (
    PROCEDURE_NAMES,
    RELEASED_NAMES,
    Experiment,
    Scope,
    group_rows,
)
from winnowgp.experiments.deep import TRADEOFF_NAMES as DEEP_NAMES
from winnowgp.experiments.runner import (
    Reproduction,
    RunStatus,
    draw_experiment,
    run_status,
    select_experiments,
)
from winnowgp.experiments.runs import Runs
from winnowgp.experiments.sizes import SELECTION_NAMES

DOCS = Path(__file__).parents[1] / "docs"


COLUMNS = {
    PROCEDURE_NAMES["paper"]: "printed settings",
    RELEASED_NAMES["released"]: "released settings",
    PROCEDURE_NAMES["fast"]: "fast schedule",
    SELECTION_NAMES["auto"]: "fast schedule, other α",
    DEEP_NAMES["weighed"]: "fast schedule, other α",
}
"""Columns of the table of verdicts, by the procedure that a claim names."""
UNNAMED = {"square-wave": "fast schedule", "kin8nm-deep": "fast schedule"}
"""Columns of claims that name no procedure, by experiment; "printed settings" for the others."""
PRINTED = Scope()
ENOUGH = 5
"""Number of seeds or folds from which on a verdict needs no remark."""

_LEVEL = (
    "beyond the paper, and not shown: the gain is smaller than two standard errors, and the "
    "initialisations are level."
)
_SPREAD = (
    "beyond the paper, and not shown: most models without selection are higher, a few end "
    "far below, and the mean gain is smaller than two standard errors."
)
EXPLANATIONS: dict[tuple[str, str], str] = {
    ("illustration", "a small set of highly informative inducing points remains"): (
        "300 steps of the sampled gradient do not converge from every seed: in one of five runs "
        "more than half of the candidates remain, whose inclusion probabilities still fall."
    ),
    ("synthetic", "fewer inducing points with more smoothness"): (
        "80 candidates cannot represent the roughest functions, for which automatic α selects "
        "about 147, so that more of them gain less than they cost. The released settings have as "
        "many candidates, and do not agree either."
    ),
    ("synthetic", "fewer inducing points with more clustering"): (
        "80 candidates cannot represent the least clustered functions, for which automatic α "
        "selects about 215, so that more of them gain less than they cost. The released settings "
        "have as many candidates, and do not agree either."
    ),
    ("synthetic", "KL at most that of the same fixed size"): (
        "the KL is log p(y) − ELBO at each model's own hyper-parameters. log p(y) of selected "
        "models is at least that of fixed sizes, within the margin, at every setting and by every "
        "procedure (figure 3): a larger KL means better hyper-parameters, not a lower bound."
    ),
    ("real", "fewer inducing points with more noise on concrete"): (
        "the paper's procedure and the fast schedule agree; automatic α does not, because its "
        "tolerance needs more than the 100 candidates, all of which it selects at the lowest noise "
        "levels. With 300 candidates it agrees."
    ),
    ("real", "fewer inducing points with more noise on kin8nm"): (
        "the paper's procedure and the fast schedule agree; the claim does not hold for automatic "
        "α, which selects all 100 candidates at every noise level. That its tolerance needs more "
        "candidates is not the whole reason: of 2,000 it selects 1,595, 1,283 and, with the most "
        "noise, all. Where candidates are too few for the hyper-parameters of the exact GP, a fit "
        "keeps all of them if they predict held-out rows better than models with a higher ELBO, "
        "and nothing is selected then."
    ),
    ("real", "ELBO at least that of the same fixed size"): (
        "the lines of figure 4 name the settings. On concrete and energy the fast schedule agrees, "
        "before and after 5,000 further steps of Adam, so that the optimiser does not decide there."
    ),
    ("square-wave", "fewer inducing points in deeper layers"): (
        "the claim does not hold for search: with the same α it selects fewer points in every "
        "layer than the paper's procedure, and the fewest in the second."
    ),
    (
        "square-wave",
        "beyond the paper: selected inducing points beat as many random rows in every layer",
    ): _SPREAD,
    (
        "square-wave",
        "beyond the paper: selected inducing points beat as many k-means centres in every layer",
    ): _SPREAD,
    (
        "kin8nm-deep",
        "beyond the paper: selected inducing points beat as many k-means centres in every layer",
    ): _LEVEL,
    (
        "kin8nm-deep",
        "the selected sizes lie on the frontier of accuracy and prediction time of 20 fixed sizes",
    ): (
        "the claim does not hold for our grid, with printed or released settings and either way of "
        "timing. The grid has models with many points in the first layer and few in the second, "
        "which are cheap for rows in batches, because only the second layer is evaluated for every "
        "sample; and it is trained like our models, which are more accurate than the released ones "
        "with as many points. With layers priced by their prediction time, no pair of a "
        "like grid is as quick and better than any of five settings (see the page on deep GPs)."
    ),
    ("kin8nm-deep", "more inducing points in the last layer"): (
        "with one α for both layers the printed settings divide the points evenly. The released "
        "settings (α of 8 and 1, ten steps of the point process) agree in all five folds, with 36 "
        "and 92 points on average; the paper's figure has 53 and 92. With 500 steps, "
        "5 or 6 and 19 to 21 points remain (three folds): ten steps decide the numbers, and not "
        "which layer has more. With one α for both layers and ten steps (two folds), the last has "
        "nine more points in one and as many in the other: the weights of 8 and 1 make most of the "
        "difference."
    ),
    ("gplvm", "further candidates become active as the latent positions move"): (
        "the released settings train the point process for 200 steps after 1,000 epochs, when the "
        "latent positions have settled: 24 to 32 candidates become active in the first tenth of "
        "the steps, and at most one in the last two thirds. Whether candidates are free to follow "
        "the positions does not decide."
    ),
    ("estimators", "score function and relaxed gradient give comparable results"): (
        "not converged after 600 steps, where the relaxed gradient is higher with every seed. "
        "After 3,000 the score function is the higher one with every seed, by 0.004 to 0.016 nats "
        "per observation with four of five, and by 0.116 with one, where the relaxed gradient has "
        "lost what it had gained."
    ),
}
"""Why a claim does not agree for some procedure, by experiment and statement."""


def section(result: Reproduction, released: Reproduction | None = None) -> str:
    """Return the figure, the claims and the number of missing runs as Markdown."""
    lines = [f"![{result.title}](results/{Path(result.figure).name})", "", *_lines(result)]
    if released is not None:
        lines += ["", "With the released settings:", "", *_lines(released)]
    return "\n".join(lines)


def _lines(result: Reproduction) -> list[str]:
    lines = [f"- {line}" for line in result.claims]
    if result.missing:
        lines.append(f"- missing: {result.missing} of {result.rows + result.missing} runs")
    return lines


def parsed_claim(line: str) -> tuple[str, str, str] | None:
    """Return statement, procedure and verdict of a claim; None if it names no procedure."""
    found = re.match(r"(agrees|does not agree): (.*)", line)
    if found is None:
        return None
    verdict, text = found.groups()
    for procedure in sorted(COLUMNS, key=len, reverse=True):
        statement, comma, evidence = text.partition(f", {procedure} (")
        if comma and evidence:
            return statement, procedure, verdict
    return None


def verdict_lines(
    experiment: Experiment, result: Reproduction, released: Reproduction | None
) -> list[list[str]]:
    """Return a line of the table for each claim, with the verdict for each procedure.

    A released verdict is "not run" without the rows that the claim needs, and "–" where no released
    settings are known. "of N runs" marks verdicts from a part of the runs.
    """
    columns = list(dict.fromkeys(COLUMNS.values()))
    verdicts: dict[str, dict[str, str]] = {}
    for source in (result, released):
        if source is None:
            continue
        total = source.rows + source.missing
        part = f" ({source.rows} of {total} runs)" if source.missing else ""
        for line in source.claims:
            if parsed := parsed_claim(line):
                statement, procedure, verdict = parsed
                column = COLUMNS[procedure]
            elif found := re.match(r"(agrees|does not agree): (.*?) \(", line):
                verdict, statement = found.groups()
                column = UNNAMED.get(experiment.name, "printed settings")
            else:
                continue
            verdicts.setdefault(statement, {})[column] = verdict + part
    partial = released is None or released.missing > 0
    lacking = {"released settings": "not run"} if experiment.has_released and partial else {}
    return [
        [f"`{experiment.name}`", statement, *({**lacking, **own}.get(c, "–") for c in columns)]
        for statement, own in verdicts.items()
    ]


def few_seeds(
    experiment: Experiment, rows: Sequence[Row], scope: Scope = PRINTED
) -> list[list[str]]:
    """Return a line for each kind of runs that has fewer than `ENOUGH` seeds or folds.

    Args:
        experiment: the experiment.
        rows: rows of the experiment; those that measure times have neither.
        scope: the scope of the rows.
    """
    lines = []
    names = {**SELECTION_NAMES, **DEEP_NAMES, "fixed": "fixed sizes"}
    repeated = [row for row in rows if "seed" in row or "fold" in row]
    for members in group_rows(repeated, "data", "kind"):
        first = members[0]
        count = len({row.get("seed", row.get("fold")) for row in members})
        if count < ENOUGH:
            runs = names.get(first["kind"], first["kind"])
            of_table = f" on {first['data']}" if "data" in first else ""
            seconds = median(row["cpu_seconds"] for row in members)
            on = " with a GPU" if any(row["device"] == "cuda" for row in members) else ""
            settings = ", released" * (scope.released and first["kind"] != "released")
            cells = [f"{runs}{of_table}{settings}", str(count), f"{seconds:.0f}{on}"]
            lines.append([f"`{experiment.name}`", *cells])
    return lines


def disagreements(results: list[Reproduction]) -> dict[tuple[str, str], None]:
    """Return experiment and statement of every claim that some procedure does not agree with."""
    found: dict[tuple[str, str], None] = {}
    for result in results:
        for line in result.claims:
            if line.startswith("does not agree: "):
                parsed = parsed_claim(line)
                text = line.removeprefix("does not agree: ").partition(" (")[0]
                found[result.name, parsed[0] if parsed else text] = None
    return found


def explanations(results: list[Reproduction]) -> list[str]:
    """Return a line for each disagreement; one without a sentence raises an error."""
    found = disagreements(results)
    lacking = [key for key in found if key not in EXPLANATIONS]
    if lacking:
        raise InputError(f"`EXPLANATIONS` must have a sentence for {lacking}.")
    ablations: dict[tuple[str, str], list[str]] = {}
    for ablation, claim, verdict, _ in outcomes():
        text = f"Ablation, {ablation.change}: {verdict}."
        ablations.setdefault((ablation.experiment.name, claim), []).append(text)
    sentences = {key: " ".join([EXPLANATIONS[key], *ablations.get(key, [])]) for key in found}
    return [f"- `{name}`, {claim}: {text}" for (name, claim), text in sentences.items()]


def stored_rows(experiment: Experiment, scope: Scope) -> RunStatus:
    """Return the rows in docs/results, and the runs that are missing there."""
    suffix = "-released" * scope.released
    runs = Runs(DOCS / "results" / f"{experiment.name}{suffix}.jsonl")
    return run_status(experiment, runs, scope)


def drawn(experiment: Experiment, scope: Scope) -> Reproduction | None:
    """Draw the figure of an experiment; None if there are too few rows."""
    try:
        result = draw_experiment(experiment, scope, DOCS / "results")
    except InputError as error:
        print(error)
        return None
    # Rows that other runs share, such as a grid of fixed sizes, support no claim by themselves.
    return result if result.claims else None


def main() -> None:
    """Update every section of the page."""
    path = DOCS / "paper.md"
    page = path.read_text(encoding="utf-8")
    table: list[list[str]] = []
    results: list[Reproduction] = []
    few: list[list[str]] = []
    for experiment in select_experiments("all"):
        result = drawn(experiment, Scope())
        if result is None:
            continue
        released = drawn(experiment, Scope(released=True)) if experiment.has_released else None
        page = replace_section(page, experiment.name, section(result, released))
        table += verdict_lines(experiment, result, released)
        results += [each for each in (result, released) if each is not None]
        scopes = (Scope(), Scope(released=True)) if experiment.has_released else (Scope(),)
        for scope in scopes:
            few += few_seeds(experiment, stored_rows(experiment, scope).rows, scope)
        print(f"{experiment.name}: {len(result.claims)} claims")
    header = ["experiment", "claim", *dict.fromkeys(COLUMNS.values())]
    page = replace_section(page, "verdicts", markdown(header, table))
    few_header = ["experiment", "runs", ">seeds", ">CPU s of a run"]
    page = replace_section(page, "few-seeds", markdown(few_header, few))
    page = replace_section(page, "explanations", "\n".join(explanations(results)))
    page = replace_section(page, "ablations", ablation_table())
    path.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
