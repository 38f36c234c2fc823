"""`winnow demo`: the paper's first figure and a short table."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from winnowgp.cli.options import PICTURES, Quiet, Seed, checked_output

if TYPE_CHECKING:
    from rich.table import Table

    from winnowgp.experiments.illustration import IllustrationResult


def demo(
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Where to save the plot (.png, .pdf, .svg).")
    ] = Path("winnow-demo.png"),
    quiet: Quiet = False,
    seed: Seed = 0,
) -> None:
    """Select inducing points for a small data set, and plot before, during and after."""
    checked_output(output, PICTURES)
    import torch
    from rich.console import Console

    from winnowgp.cli.progress import PhaseBars
    from winnowgp.experiments.illustration import draw_panels, illustrate
    from winnowgp.plots.style import save_figure

    # The data set is small: a second thread would only wait for the first.
    torch.set_num_threads(1)
    console = Console(quiet=quiet)
    with PhaseBars(console, quiet=quiet) as bars:
        result = illustrate(callbacks=(bars.update,), seed=seed)
    save_figure(draw_panels(result.panels), output)
    console.print(_table(result))
    console.print(f"plot: {output}")


def _table(result: "IllustrationResult") -> "Table":
    from rich.table import Table

    table = Table(title="Inducing points selected by the model", title_justify="left")
    table.add_column("")
    table.add_column("inducing points", justify="right")
    table.add_column("ELBO (nats)", justify="right")
    before, fitted = result.panels.before, result.fit
    table.add_row("all candidates", str(len(before.points)), f"{result.full_bound:.2f}")
    table.add_row(
        "expected under q(Z)", f"{fitted.selection.inclusion.sum().item():.1f}", "", style="dim"
    )
    table.add_row("selected and refitted", str(fitted.posterior.M), f"{fitted.elbo:.2f}")
    return table
