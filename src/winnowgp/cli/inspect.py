"""`winnow info`, `winnow frontier` and `winnow resize`: the content of a model file."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from winnowgp.cli.options import PICTURES, Json, ModelFile, Quiet, checked_output, print_json

if TYPE_CHECKING:
    from winnowgp.report.summary import AllocationSummary, Choice
    from winnowgp.tabular import TabularModel


def info(model: ModelFile, json: Json = False) -> None:
    """Show what a model predicts, from which inputs, how well, and its settings."""
    from winnowgp.cli.options import load_outputs, load_summary
    from winnowgp.cli.outputs import print_outputs
    from winnowgp.cli.summary import print_summary, summary_json

    if (outputs := load_outputs(model)) is not None:
        print_outputs(outputs, model, json=json, details=True)
        return
    summary = load_summary(model)
    if json:
        print_json(summary_json(summary, file=str(model)))
        return
    print_summary(summary)
    for name, value in summary["settings"].items():
        typer.echo(f"{name}: {value}")


def frontier(
    model: ModelFile,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="Where to save a plot (.png, .pdf, .svg)."),
    ] = None,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Show the best ELBO known for each number of inducing points, and of the full GP.

    For a deep model: the allocations of inducing points to layers that the fit has trained. For
    several targets: the points of all processes together, and gaps per observed target.
    """
    if output is not None:
        checked_output(output, PICTURES)
    from winnowgp.cli.options import load_outputs, load_summary
    from winnowgp.cli.outputs import outputs_choice

    outputs = load_outputs(model)
    choice = load_summary(model)["choice"] if outputs is None else outputs_choice(outputs)
    if output is not None:
        from winnowgp.cli.plot import frontier_plot
        from winnowgp.plots.style import save_figure

        save_figure(frontier_plot(choice), output)
    if json:
        print_json(_frontier_json(choice))
    elif not quiet:
        if "allocations" in choice:
            _print_allocations(choice, choice["allocations"])
        else:
            title, unit = "Best ELBO known with at most as many inducing points", "observation"
            if outputs is not None:
                # A fit with fewer points would learn other hyper-parameters.
                title = "ELBO at the hyper-parameters of the fit"
                unit = "observed target"
            _print_frontier(choice, unit=unit, title=title)
        if output is not None:
            typer.echo(f"plot: {output}")


def _frontier_json(choice: "Choice") -> dict[str, Any]:
    """Return the frontier; sizes without a known model are left out."""
    if "allocations" in choice:
        selected = {"selected": choice.get("layers"), "available": choice["sizes"]}
        rows = [
            {
                "inducing_points": each["points"],
                "predict_us": each["predict_us"],
                "elbo_nats": each["bound"],
                "elbo_gap_nats_per_observation": each["elbo_gap"],
                "held_out_nats_per_observation": each["log_density"],
            }
            for each in choice["allocations"]
        ]
        return {**selected, "frontier": rows}
    densities = choice["log_densities"]
    rows = [
        {
            "inducing_points": M,
            "elbo_nats": elbo,
            "held_out_nats_per_observation": None if densities is None else densities[M],
        }
        for M, elbo in enumerate(choice["frontier"] or [])
        if elbo is not None
    ]
    exact = None
    if choice["exact_evidence"] is not None:
        exact = {
            "inducing_points": choice["rows"],
            "log_evidence_nats": choice["exact_evidence"],
            "held_out_nats_per_observation": choice["exact_log_density"],
        }
    return {
        "selected": choice["points"],
        "available": choice["sizes"],
        "frontier": rows,
        "full_gp": exact,
    }


def _print_frontier(choice: "Choice", *, unit: str, title: str) -> None:
    from rich.console import Console

    from winnowgp.cli.summary import titled_table

    elbos, densities = choice["frontier"] or [], choice["log_densities"]
    exact, rows = choice["exact_evidence"], choice["rows"]
    N = choice.get("observations", rows)
    measured = exact is not None or any(nats is not None for nats in densities or ())
    names = ("inducing points", "ELBO (nats)", "gap", *(["held-out"] if measured else []), "")
    table = titled_table(title, *names)
    known = {M: elbo for M, elbo in enumerate(elbos) if elbo is not None}
    best = max(v for v in (*known.values(), exact) if v is not None) + choice.get(
        "earlier_gap", 0.0
    )
    shown = {*_sizes(len(elbos) - 1, choice["points"]), *choice["sizes"]}
    for M in sorted(shown & known.keys()):
        selected = choice["points"] == M
        note = "<- selected" if selected else "available" if M in choice["sizes"] else ""
        density = None if densities is None else densities[M]
        table.add_row(
            str(M),
            f"{known[M]:.2f}",
            f"{(best - known[M]) / N:.4f}",
            *([_number(density)] if measured else []),
            note,
            style="bold" if selected else None,
        )
    if exact is not None:
        row = (f"{exact:.2f}", f"{(best - exact) / N:.4f}", _number(choice["exact_log_density"]))
        table.add_row(str(rows), *row, "full GP")
    console = Console()
    console.print(table)
    units = "gap and held-out log density" if measured else "gap"
    console.print(f"{units}: nats per {unit}, of standardised targets")
    if exact is not None:
        gain = max(exact - choice["bound"], 0.0) / N
        console.print(
            f"the full GP would gain {gain:.4f} nats per observation; each of its predictions "
            f"would use all {rows} rows"
        )


def _print_allocations(choice: "Choice", allocations: "list[AllocationSummary]") -> None:
    from rich.console import Console

    from winnowgp.cli.summary import titled_table
    from winnowgp.report.summary import listed

    names = ("layers", "in all", "µs per row", "ELBO (nats)", "gap", "held-out", "")
    table = titled_table("Allocations of inducing points to layers", *names)
    for each in allocations:
        total, selected = sum(each["points"]), each["points"] == choice.get("layers")
        table.add_row(
            listed(each["points"]),
            str(total),
            f"{each['predict_us']:.1f}",
            f"{each['bound']:.2f}",
            f"{each['elbo_gap']:.4f}",
            _number(each["log_density"]),
            "<- selected" if selected else "available" if total in choice["sizes"] else "",
            style="bold" if selected else None,
        )
    console = Console()
    console.print(table)
    console.print("gap: nats per observation; held-out log density: in the units of the target")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _sizes(K: int, M: int) -> list[int]:
    """Return 0, powers of two, the neighbourhood of M, and K.

    >>> _sizes(30, 12)
    [0, 1, 2, 4, 8, 10, 11, 12, 13, 14, 16, 30]
    """
    doubling = {2**i for i in range(20) if 2**i <= K}
    near = {m for m in range(M - 2, M + 3) if 0 <= m <= K}
    return sorted({0, K} | doubling | near)


def resize(
    model: ModelFile,
    points: Annotated[
        int | None,
        typer.Option(help="Number of inducing points; without it, the sizes are listed."),
    ] = None,
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Where to save the smaller model.")
    ] = Path("resized.winnow"),
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Save a model with fewer inducing points, which the fit has optimised already.

    No rows are needed. Without `--points` the command lists the sizes in the file and writes
    nothing.
    """
    from winnowgp.cli.options import load_table_model

    if points is None:
        _list_sizes(load_table_model(model), quiet=quiet, json=json)
        return
    checked_output(output)
    fitted = load_table_model(model)
    command = shlex.join(["winnow", "resize", model.name, "--points", str(points)])
    before = fitted.summary["settings"].get("command")
    settings = {"command": command if before is None else f"{before} && {command}"}
    smaller = fitted.resized(points, settings=settings)
    smaller.save(output)
    from winnowgp.cli.summary import print_summary, summary_json

    if json:
        print_json(summary_json(smaller.summary, file=str(output)))
    elif not quiet:
        print_summary(smaller.summary)
        typer.echo(f"model: {output}")


def _list_sizes(model: "TabularModel", *, quiet: bool, json: bool) -> None:
    """Print the sizes of the models in a file."""
    from winnowgp.estimators.base import total_points

    estimator = model.estimator
    models = [estimator.resized(points) for points in model.summary["choice"]["sizes"]]
    if json:
        rows = [
            {
                "inducing_points": total_points(each),
                "elbo_nats": each.elbo_,
                "elbo_gap_nats_per_observation": each.elbo_gap_,
            }
            for each in models
        ]
        print_json({"available": rows})
    elif not quiet:
        from rich.console import Console

        from winnowgp.cli.summary import titled_table

        names = ("inducing points", "ELBO (nats)", "gap per observation (nats)")
        table = titled_table("Models in the file", *names)
        for each in models:
            points, layers = str(total_points(each)), each.n_inducing_
            if isinstance(layers, tuple):
                points = f"{points} = {' + '.join(map(str, layers))}"
            table.add_row(points, f"{each.elbo_:.2f}", f"{each.elbo_gap_:.4f}")
        Console().print(table)
