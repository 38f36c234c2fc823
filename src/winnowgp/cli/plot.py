"""`winnow plot`: one picture of a model."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from winnowgp.cli.options import ModelFile, Quiet
from winnowgp.cli.output import PICTURES, checked_output
from winnowgp.errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from winnowgp.report import Findings
    from winnowgp.report.findings import Choice

KINDS = ("effects", "frontier", "inclusion", "trace", "calibration")


def plot(
    model: ModelFile,
    what: Annotated[str, typer.Option("--what", help=f"One of {', '.join(KINDS)}.")] = "effects",
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Where to save it (.png, .pdf, .svg).")
    ] = Path("winnow.png"),
    quiet: Quiet = False,
) -> None:
    """Draw effects of the inputs, the frontier, inclusion, the fit's trace, or calibration."""
    checked_output(output, PICTURES)
    if what not in KINDS:
        raise InputError(f"`--what` must be one of {', '.join(KINDS)}; got {what!r}.")
    from winnowgp.cli.loaded import loaded
    from winnowgp.plots import saved

    findings = loaded(model).findings
    saved(_picture(findings, what), output)
    if not quiet:
        typer.echo(f"picture: {output}")


def _picture(findings: "Findings", what: str) -> "Figure":
    from winnowgp.plots import draw_effects, draw_inclusion, draw_trace

    if what == "frontier":
        return frontier_picture(findings["choice"])
    if what == "calibration":
        return _calibration(findings)
    if what == "effects":
        return draw_effects(findings["effects"], target=findings["target"])
    if what == "inclusion":
        choice = findings["choice"]
        return _alone(lambda ax: draw_inclusion(choice["inclusion"], choice["points"], ax=ax))
    return _alone(lambda ax: draw_trace(findings["training"]["moments"], ax=ax))


def frontier_picture(choice: "Choice") -> "Figure":
    """The frontier with the chosen number of points."""
    from winnowgp.plots import draw_frontier

    return _alone(
        lambda ax: draw_frontier(
            choice["frontier"] or [], choice["points"], rows=choice["rows"], ax=ax
        )
    )


def _calibration(findings: "Findings") -> "Figure":
    from winnowgp.plots import draw_calibration

    quality = findings["quality"]
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
