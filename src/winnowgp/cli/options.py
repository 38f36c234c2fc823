"""Options that several commands share, said once."""

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

Quiet: TypeAlias = Annotated[
    bool, typer.Option("--quiet", "-q", help="Say nothing but errors: no bars, no tables.")
]
Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
Seed: TypeAlias = Annotated[
    int, typer.Option("--seed", min=0, max=2**32 - 1, help="Where randomness starts.")
]
Encoding: TypeAlias = Annotated[
    str, typer.Option("--encoding", help="Of a CSV file, such as latin-1.")
]
Device: TypeAlias = Annotated[
    str,
    typer.Option("--device", help="Where to compute: cpu or cuda, or auto for a GPU if any."),
]
ModelFile: TypeAlias = Annotated[
    Path, typer.Argument(help="A file that `winnow fit` wrote.", show_default=False)
]
