"""`winnow plot`, `winnow report` and `winnow export`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from winnowgp.cli.options import PICTURES, Encoding, ModelFile, Quiet, checked_output
from winnowgp.errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from winnowgp.data import DataTable
    from winnowgp.report.summary import Choice, Summary
    from winnowgp.tabular import TabularModel


KINDS = (
    "effects",
    "terms",
    "importance",
    "frontier",
    "inclusion",
    "trace",
    "calibration",
    "surface",
    "mixing",
)


def plot(
    model: ModelFile,
    what: Annotated[
        str | None,
        typer.Option(
            "--what",
            help=f"One of {', '.join(KINDS)}. For several targets: mixing or frontier.",
            show_default="effects, or mixing for several targets",
        ),
    ] = None,
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Where to save it (.png, .pdf, .svg).")
    ] = Path("winnow.png"),
    data: Annotated[
        Path | None,
        typer.Option("--data", help="Rows to show on a surface: CSV, CSV.gz, Excel or Parquet."),
    ] = None,
    encoding: Encoding = "utf-8",
    quiet: Quiet = False,
) -> None:
    """Plot effects of columns, terms of a sum kernel, importance of columns, frontier, inclusion
    probabilities, training history, calibration, or a surface over two numeric inputs; for several
    targets the mixing of the processes.

    A model file does not contain its training rows; give their file with `--data` to show them on a
    surface.
    """
    checked_output(output, PICTURES)
    if what is not None and what not in KINDS:
        raise InputError(f"`--what` must be one of {', '.join(KINDS)}; got {what!r}.")
    if data is not None and what != "surface":
        raise InputError("`--data` is for `--what surface`; leave it out.")
    from winnowgp.cli.options import load_outputs, load_summary, load_table_model
    from winnowgp.cli.outputs import outputs_plot
    from winnowgp.data import read_table
    from winnowgp.plots.style import save_figure

    if (outputs := load_outputs(model)) is not None:
        figure = outputs_plot(outputs, what or "mixing")
    elif what == "mixing":
        raise InputError("`--what mixing` needs a model of several targets; plot effects instead.")
    elif what == "surface":
        fitted = load_table_model(model)
        table = None if data is None else read_table(data, encoding=encoding)
        figure = _surface(fitted, table)
    else:
        figure = _plot_of(load_summary(model), what or "effects")
    save_figure(figure, output)
    if not quiet:
        typer.echo(f"plot: {output}")


def _plot_of(summary: "Summary", what: str) -> "Figure":
    from winnowgp.plots import draw_effects, draw_importance, draw_inclusion
    from winnowgp.plots.selection import draw_trace

    if what == "frontier":
        return frontier_plot(summary["choice"])
    if what == "calibration":
        return _calibration(summary)
    if what == "effects":
        return draw_effects(summary["effects"], target=summary["target"])
    if what == "terms":
        if not summary["terms"]:
            raise InputError(
                "`--what terms` needs a model whose kernel is a sum, such as `--kernel 'rbf + "
                "linear'`; this one has one term, or was resized. Plot effects instead."
            )
        return draw_effects(summary["terms"], target=f"part of {summary['target']}")
    if what == "importance":
        if (importance := summary["importance"]) is None:
            raise InputError(
                "`--what importance` needs a model with held-out rows; this one has none, or was "
                "resized. Fit it with `--test-size` above 0."
            )
        return _single_panel(lambda ax: draw_importance(importance, ax=ax))
    if what == "inclusion":
        choice = summary["choice"]
        if not choice["inclusion"]:
            raise InputError(
                "`--what inclusion` needs inclusion probabilities, which neither a resized nor a "
                "deep model has. Use the model that it was resized from; for a deep model use "
                "`--what frontier`."
            )
        return _single_panel(
            lambda ax: draw_inclusion(choice["inclusion"], choice["points"], ax=ax)
        )
    if not summary["training"]["moments"]:
        raise InputError(
            "`--what trace` needs a training history, which neither a resized nor an updated model "
            "has. Use the file of the fit."
        )
    return _single_panel(lambda ax: draw_trace(summary["training"]["moments"], ax=ax))


def frontier_plot(choice: "Choice") -> "Figure":
    """Return a figure of the frontier with the selected number of inducing points."""
    from winnowgp.plots import draw_allocations, draw_frontier

    if "allocations" in choice:
        allocations = choice["allocations"]
        return _single_panel(
            lambda ax: draw_allocations(allocations, choice.get("layers", []), ax=ax)
        )
    return _single_panel(
        lambda ax: draw_frontier(
            choice["frontier"] or [],
            choice["points"],
            rows=choice["rows"],
            ax=ax,
            evidence=choice["exact_evidence"],
            sizes=choice["sizes"],
        )
    )


def _surface(model: "TabularModel", table: "DataTable | None") -> "Figure":
    import torch

    from winnowgp.plots.predictions import (
        Surface,
        date_axis,
        draw_classes_2d,
        draw_surface_2d,
        shortened,
    )
    from winnowgp.plots.style import plain
    from winnowgp.report.summary import counted
    from winnowgp.tabular.surfaces import numeric_inputs, surface, surface_rows

    names = numeric_inputs(model)
    drawn = surface(model)
    nothing = torch.zeros(0, 2), torch.zeros(0)
    X, targets = nothing if table is None else surface_rows(model, table)

    def draw(ax: Any) -> None:
        if isinstance(drawn, Surface):
            draw_surface_2d(drawn, X, targets, ax=ax)
        else:
            draw_classes_2d(drawn, X, targets.long(), ax=ax)
        size = counted(len(drawn.points))
        title = (
            f"{plain(model.target)}: {size}" if isinstance(drawn, Surface) else _class_title(model)
        )
        ax.set(xlabel=shortened(names[0]), ylabel=shortened(names[1]), title=title)
        for axis, column in zip((ax.xaxis, ax.yaxis), model.encoder.columns, strict=True):
            if column.kind == "date":
                date_axis(axis)

    return _single_panel(draw)


def _class_title(model: "TabularModel") -> str:
    """Return the title of a class surface: the class of the second colour."""
    from winnowgp.plots.style import plain

    other = plain(str(model.summary["classes"][-1]))
    return f"probability that {plain(model.target)} is {other}"


def _calibration(summary: "Summary") -> "Figure":
    from winnowgp.plots.predictions import draw_calibration

    quality = summary["quality"]
    if quality is None:
        raise InputError(
            "`--what calibration` needs a model with held-out rows; this one has none, or was "
            "resized. Fit it with `--test-size` above 0."
        )
    pairs = quality["coverage"] or [
        (bin["probability"], bin["frequency"]) for bin in quality["reliability"]
    ]
    kind = "interval" if quality["coverage"] else "class"
    return _single_panel(lambda ax: draw_calibration(pairs, kind=kind, ax=ax))


def _single_panel(draw: Any) -> "Figure":
    """Return a figure with one panel."""
    from matplotlib.figure import Figure

    from winnowgp.plots.style import styled

    with styled():
        figure = Figure(figsize=(5.4, 3.8))
        draw(figure.subplots())
    return figure


def report(
    model: ModelFile,
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Where to save the report.")
    ] = Path("report.html"),
    quiet: Quiet = False,
) -> None:
    """Write a self-contained HTML page: data, selection, quality, effects, settings."""
    checked_output(output, (".html", ".htm"))
    from winnowgp.cli.options import load_summary
    from winnowgp.report import save_report

    save_report(load_summary(model), output)
    if not quiet:
        typer.echo(f"report: {output}")


def export(
    model: ModelFile,
    output: Annotated[
        Path,
        typer.Option(
            "-o", "--output", help="model.onnx for ONNX, model.py for a file that needs only numpy."
        ),
    ],
    quiet: Quiet = False,
) -> None:
    """Write the predictor, preprocessing included, as ONNX or as one numpy file."""
    checked_output(output, (".onnx", ".py"))
    from winnowgp.cli.options import load_predictor
    from winnowgp.tabular import export_numpy, export_onnx

    write = export_onnx if output.suffix.lower() == ".onnx" else export_numpy
    write(load_predictor(model), output)
    if not quiet:
        typer.echo(f"exported: {output}")
