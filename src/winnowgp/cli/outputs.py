"""Models of several targets on the command line: their fit, summary, quality and frontier."""

from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from winnowgp.cli.options import print_json, with_options
from winnowgp.errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from winnowgp.data import DataTable
    from winnowgp.report.summary import Choice
    from winnowgp.tabular.outputs import MultiOutputTable


def fit_outputs(
    table: "DataTable",
    targets: list[str],
    output: Path,
    *,
    folds: int | None,
    quiet: bool,
    json: bool,
    **options: Any,
) -> None:
    """Fit, save and print a model of several targets.

    Args:
        folds: folds of a cross-validation; None for held-out rows.
        options: arguments of `fit_outputs_table`.
    """
    from rich.console import Console

    from winnowgp.cli.summary import PhaseBars
    from winnowgp.tabular import cross_validate_outputs, fit_outputs_table

    with PhaseBars(Console(stderr=True), quiet=quiet or json) as bars:
        if folds is None:
            model = fit_outputs_table(table, targets, callbacks=bars.update, **options)
        else:
            del options["test_size"]
            model, _ = cross_validate_outputs(
                table, targets, folds=folds, callbacks=bars.update, **options
            )
    model.save(output)
    if json or not quiet:
        print_outputs(model, output, json=json, folds=folds)


def update_outputs(
    model: "MultiOutputTable",
    table: "DataTable",
    output: Path,
    settings: dict[str, str],
    *,
    quiet: bool,
    json: bool,
    **options: Any,
) -> None:
    """Update, save and print a model of several targets.

    Args:
        options: further arguments of `update_outputs_table`.
    """
    from winnowgp.tabular import update_outputs_table

    result = update_outputs_table(model, table, settings=settings, **options)
    result.model.save(output)
    points = result.model.estimator.n_inducing_
    if json:
        values = {
            "file": str(output),
            "rows": result.rows,
            "held_out": result.held_out,
            "inducing_points_before": result.points_before,
            "inducing_points": points,
            "log_density_before": result.density_before,
            "log_density": result.density,
        }
        print_json(values)
    elif not quiet:
        held = f", after {result.held_out} of them were held out" if result.held_out else ""
        typer.echo(f"new rows: {result.rows} learnt{held}")
        before, now = (" + ".join(map(str, each)) for each in (result.points_before, points))
        typer.echo(f"inducing points of the processes: {before} before, {now} now")
        if result.density is not None:
            typer.echo(
                f"log density of the new rows held out: {result.density_before:.4g} before, "
                f"{result.density:.4g} now (nats per target)"
            )
        typer.echo(f"model: {output}")


def print_outputs(
    model: "MultiOutputTable",
    file: Path,
    *,
    json: bool,
    folds: int | None = None,
    details: bool = False,
) -> None:
    """Print targets, inputs, inducing points of the processes, and the quality of each target.

    Args:
        folds: folds of the cross-validation that measured the quality, if there were any.
        details: whether to print the settings instead of the file.
    """
    estimator = model.estimator
    counts, names = list(estimator.n_inducing_), list(model.encoder.features)
    if json:
        content = {
            "file": str(file),
            "targets": model.targets,
            "likelihoods": likelihood_names(model),
            "inputs": names,
            "inducing_points": counts,
            "elbo_gap_nats_per_target": estimator.elbo_gap_,
            "mixing": estimator.mixing_.tolist(),
            "quality": model.quality,
            "alarms": model.alarms,
        }
        if details:
            content["settings"] = model.settings
        print_json(content)
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    kinds = likelihood_names(model)
    named = [
        target if kind == "gaussian" else f"{target} ({kind})" for target, kind in kinds.items()
    ]
    table.add_row("targets", ", ".join(named))
    table.add_row("inputs", ", ".join(column.name for column in model.encoder.columns))
    points = ", ".join(map(str, counts))
    table.add_row("processes", f"{len(counts)}, with {points} inducing points")
    update = " of the last update" if "updates" in model.settings else ""
    table.add_row("ELBO gap", f"{estimator.elbo_gap_:.4f} nats per observed target{update}")
    Console(markup=False).print(table)
    for alarm in model.alarms if details else ():  # A fit has printed them.
        note = f"note: {with_options(alarm['message'])}"
        Console(markup=False).print(note, style="bold", soft_wrap=True, highlight=False)
    title = "Held-out rows" if folds is None else f"Mean of {folds} folds"
    if details:
        # A model file does not say how its quality was measured.
        title = "Rows that were not fitted"
        if "updates" in model.settings:
            title = "Rows held out of the last update, before the model learnt them too"
    print_output_quality(model.quality, title=title)
    if not details:
        typer.echo(f"model: {file}")
    for name, value in model.settings.items() if details else ():
        typer.echo(f"{name}: {value}")


def likelihood_names(model: "MultiOutputTable") -> dict[str, str]:
    """Return the name of the likelihood of each target."""
    likelihood = model.estimator.likelihood
    if isinstance(likelihood, str):
        return dict.fromkeys(model.targets, likelihood)
    names = [each if isinstance(each, str) else type(each).__name__ for each in likelihood]
    return dict(zip(model.targets, names, strict=True))


def outputs_plot(model: "MultiOutputTable", what: str) -> "Figure":
    """Return a figure of the mixing matrix, or of the frontier."""
    from matplotlib.figure import Figure

    from winnowgp.cli.plot import frontier_plot
    from winnowgp.plots import draw_mixing
    from winnowgp.plots.style import plain, styled

    if what == "frontier":
        return frontier_plot(outputs_choice(model))
    if what != "mixing":
        raise InputError(
            "`--what` must be mixing or frontier for a model of several targets; got "
            f"{what!r}. Fit one target for other plots."
        )
    estimator = model.estimator
    P, Q = estimator.mixing_.shape
    with styled():
        figure = Figure(figsize=(2.0 + 1.5 * Q, 1.4 + 0.45 * P))
        draw_mixing(
            estimator.mixing_.tolist(),
            estimator.n_inducing_,
            ax=figure.subplots(),
            targets=[plain(target) for target in model.targets],
        )
    return figure


def print_output_quality(quality: Mapping[str, Mapping[str, float]], *, title: str) -> None:
    """Print the measures of each target; nothing if none was measured."""
    if not quality:
        return
    from rich.console import Console

    from winnowgp.cli.summary import titled_table
    from winnowgp.report.summary import rounded

    names = ("target", "rows", "RMSE", "R²", "log density (nats)")
    table = titled_table(title, *names, left="target")
    for target, scores in quality.items():
        values = [rounded(scores[n]) if n in scores else "" for n in ("rmse", "r2", "log_density")]
        # Files of earlier versions do not have the number of rows.
        table.add_row(target, f"{scores['rows']:.0f}" if "rows" in scores else "", *values)
    Console(markup=False).print(table)


def outputs_choice(model: "MultiOutputTable") -> "Choice":
    """Return what `winnow frontier` shows: the points of all processes, and gaps per target."""
    from winnowgp.report.summary import bare_choice

    estimator, frontier = model.estimator, model.estimator.frontier_
    evidence = estimator.evidence_
    return {
        **bare_choice(
            sum(estimator.n_inducing_),
            sum(map(len, estimator.candidates_)),
            asked="",
            bound=estimator.elbo_,
            elbo_gap=estimator.elbo_gap_,
            rows=round(frontier.N),
        ),
        "alpha": estimator.alpha_,
        # The evidence is that of the last hyper-parameters, and other sizes had others: it is no
        # point of the frontier.
        "frontier": [elbo if isfinite(elbo) else None for elbo in frontier.envelope.tolist()],
        "evidence": None if evidence is None else (evidence.lower, evidence.upper),
        "evidence_method": None if evidence is None else evidence.method,
    }
