"""`winnow plot`, `winnow report` and `winnow export`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from winnowgp.cli.options import PICTURES, Encoding, ModelFile, Quiet, checked_output
from winnowgp.errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from winnowgp.data import DataTable
    from winnowgp.estimators import TabularModel
    from winnowgp.report import Summary
    from winnowgp.report.summary import Choice


# `winnow plot`: one picture of a model.


KINDS = ("effects", "frontier", "inclusion", "trace", "calibration", "surface")


def plot(
    model: ModelFile,
    what: Annotated[str, typer.Option("--what", help=f"One of {', '.join(KINDS)}.")] = "effects",
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Where to save it (.png, .pdf, .svg).")
    ] = Path("winnow.png"),
    data: Annotated[
        Path | None,
        typer.Option("--data", help="Rows to show on a surface: CSV, CSV.gz or Parquet."),
    ] = None,
    encoding: Encoding = "utf-8",
    quiet: Quiet = False,
) -> None:
    """Draw effects of the inputs, the frontier, inclusion, the fit's trace, calibration, or the
    surface over two numeric inputs.

    A model does not hold the rows it was fitted to; to see them on its surface, name their file
    with `--data`.
    """
    checked_output(output, PICTURES)
    if what not in KINDS:
        raise InputError(f"`--what` must be one of {', '.join(KINDS)}; got {what!r}.")
    if data is not None and what != "surface":
        raise InputError("`--data` is for `--what surface`; leave it out.")
    from winnowgp.cli.options import loaded
    from winnowgp.data import read_table
    from winnowgp.plots import save_figure

    fitted = loaded(model)
    if what == "surface":
        table = None if data is None else read_table(data, encoding=encoding)
        picture = _surface(fitted, table)
    else:
        picture = _picture(fitted.summary, what)
    save_figure(picture, output)
    if not quiet:
        typer.echo(f"picture: {output}")


def _picture(summary: "Summary", what: str) -> "Figure":
    from winnowgp.plots import draw_effects, draw_inclusion, draw_trace

    if what == "frontier":
        return frontier_picture(summary["choice"])
    if what == "calibration":
        return _calibration(summary)
    if what == "effects":
        return draw_effects(summary["effects"], target=summary["target"])
    if what == "inclusion":
        choice = summary["choice"]
        return _alone(lambda ax: draw_inclusion(choice["inclusion"], choice["points"], ax=ax))
    return _alone(lambda ax: draw_trace(summary["training"]["moments"], ax=ax))


def frontier_picture(choice: "Choice") -> "Figure":
    """The frontier with the chosen number of points."""
    from winnowgp.plots import draw_frontier

    return _alone(
        lambda ax: draw_frontier(
            choice["frontier"] or [], choice["points"], rows=choice["rows"], ax=ax
        )
    )


def _surface(model: "TabularModel", table: "DataTable | None") -> "Figure":
    import torch

    from winnowgp.estimators.surfaces import numeric_inputs, surface, surface_rows
    from winnowgp.plots import Surface, draw_classes_2d, draw_surface_2d
    from winnowgp.plots.style import plain

    names = numeric_inputs(model)
    found = surface(model)
    nothing = torch.zeros(0, 2), torch.zeros(0)
    X, targets = nothing if table is None else surface_rows(model, table)

    def draw(ax: Any) -> None:
        if isinstance(found, Surface):
            draw_surface_2d(found, X, targets, ax=ax)
        else:
            draw_classes_2d(found, X, targets.long(), ax=ax)
        kept = f"{len(found.points)} inducing points"
        title = f"{plain(model.target)}: {kept}" if isinstance(found, Surface) else _second(model)
        ax.set(xlabel=plain(names[0]), ylabel=plain(names[1]), title=title)

    return _alone(draw)


def _second(model: "TabularModel") -> str:
    """Which class the second colour is for."""
    from winnowgp.plots.style import plain

    other = plain(str(model.summary["classes"][-1]))
    return f"probability that {plain(model.target)} is {other}"


def _calibration(summary: "Summary") -> "Figure":
    from winnowgp.plots import draw_calibration

    quality = summary["quality"]
    if quality is None:
        raise InputError("no rows were held out; fit with `--test-size` above 0 to calibrate.")
    pairs = quality["coverage"] or [
        (bin["probability"], bin["frequency"]) for bin in quality["reliability"]
    ]
    kind = "interval" if quality["coverage"] else "class"
    return _alone(lambda ax: draw_calibration(pairs, kind=kind, ax=ax))


def _alone(draw: Any) -> "Figure":
    """A figure of one panel."""
    from matplotlib.figure import Figure

    from winnowgp.plots import styled

    with styled():
        figure = Figure(figsize=(5.4, 3.8))
        draw(figure.subplots())
    return figure


# `winnow report`: one page about a model.


def report(
    model: ModelFile,
    output: Annotated[Path, typer.Option("-o", "--output", help="Where to save the page.")] = Path(
        "report.html"
    ),
    quiet: Quiet = False,
) -> None:
    """Write a self-contained HTML page: data, choice, quality, effects, settings."""
    checked_output(output, (".html", ".htm"))
    from winnowgp.cli.options import loaded
    from winnowgp.report import save_report

    save_report(loaded(model).summary, output)
    if not quiet:
        typer.echo(f"report: {output}")


# `winnow export`: a model for machines without winnowgp.


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
    from winnowgp.cli.options import loaded
    from winnowgp.estimators import export_numpy, export_onnx

    write = export_onnx if output.suffix.lower() == ".onnx" else export_numpy
    write(loaded(model), output)
    if not quiet:
        typer.echo(f"exported: {output}")
