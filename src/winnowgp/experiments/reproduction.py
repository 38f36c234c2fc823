"""An experiment from first run to figure, in a folder."""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from winnowgp.data.catalogue import find_table, table_folders
from winnowgp.errors import DataNotFoundError, InputError
from winnowgp.experiments.cuts import quick_cuts
from winnowgp.experiments.experiment import Experiment, Scope, counted
from winnowgp.experiments.reproduce import asked, make_runs
from winnowgp.experiments.runs import Row, Runs


@dataclass(frozen=True, slots=True)
class Reproduction:
    """What came of an experiment."""

    name: str
    title: str
    results: str
    """The file of rows."""
    figure: str
    """The picture that was drawn of them."""
    rows: int
    """That the figure and the claims rest on."""
    missing: int
    """Runs still to be made."""
    cuts: str
    """What a quick look left out; empty for a full one."""
    claims: list[str]
    """What the paper says of the figure, and whether these rows agree."""

    def as_json(self) -> str:
        """One object on one line."""
        return json.dumps(asdict(self), ensure_ascii=False)


def reproduced(
    experiment: Experiment,
    scope: Scope,
    folder: Path,
    *,
    jobs: int | None = None,
    on_run: Callable[[int, int, Row], None] = lambda done, total, row: None,
) -> Reproduction:
    """Make the runs that are missing in `folder`, then draw and judge.

    Args:
        jobs: runs at once; None for one a core, or one on a GPU.
    """
    check_tables([experiment], scope, folder)
    if jobs is None:
        jobs = (os.cpu_count() or 1) if scope.device == "cpu" else 1
    make_runs(
        experiment, Runs(_results(experiment, scope, folder)), scope, jobs=jobs, on_run=on_run
    )
    return drawn(experiment, scope, folder)


def check_tables(experiments: Sequence[Experiment], scope: Scope, folder: Path) -> None:
    """Refuse to begin where runs that are still to be made need data sets that are not here."""
    lacking = {each.name: _lacking(each, scope, folder) for each in experiments}
    tables = list(dict.fromkeys(table for names in lacking.values() for table in names))
    if not tables:
        return
    files = ", ".join(f"{table}.csv.gz" for table in tables)
    folders = ", ".join(map(str, table_folders()))
    needy = ", ".join(name for name, names in lacking.items() if names)
    free = " ".join(name for name, names in lacking.items() if not names)
    raise DataNotFoundError(
        f"{needy}: no {files} in {folders}; put what is missing there, or point WINNOWGP_DATA at "
        "the folder that holds it (`winnow data` says where each comes from). Nothing was run."
        + (f" Without them: winnow reproduce {free}" if free else "")
    )


def _lacking(experiment: Experiment, scope: Scope, folder: Path) -> list[str]:
    """Its data sets that are not on this machine, if there is anything left to run on them."""
    runs = Runs(_results(experiment, scope, folder))
    if not experiment.tables or not asked(experiment, runs, scope).missing:
        return []
    return [table for table in experiment.tables if not _present(table)]


def _present(table: str) -> bool:
    try:
        find_table(table)
    except DataNotFoundError:
        return False
    return True


def drawn(experiment: Experiment, scope: Scope, folder: Path) -> Reproduction:
    """Draw and judge the rows there are, and make none."""
    results = _results(experiment, scope, folder)
    found = asked(experiment, Runs(results), scope)
    if not found.rows:
        raise InputError(f"{results} has no rows of these settings; make the runs first.")
    try:
        claims = experiment.claims(found.rows)
        figure = experiment.draw(found.rows, results.with_suffix(".png"))
    except (LookupError, ArithmeticError, ValueError) as error:
        if not found.missing:
            raise
        raise InputError(
            f"{results} has too few rows to draw: {counted(len(found.missing), 'run')} missing; "
            "make the rest first."
        ) from error
    return Reproduction(
        name=experiment.name,
        title=experiment.title,
        results=str(results),
        figure=str(figure),
        rows=len(found.rows),
        missing=len(found.missing),
        cuts=quick_cuts(experiment, scope) if scope.quick else "",
        claims=claims,
    )


def _results(experiment: Experiment, scope: Scope, folder: Path) -> Path:
    """Quick rows never lie among full ones."""
    return folder / f"{experiment.name}{'-quick' if scope.quick else ''}.jsonl"
