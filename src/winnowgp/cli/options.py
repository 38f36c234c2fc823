"""Options shared by commands, and checks of output paths."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from winnowgp.errors import InputError

if TYPE_CHECKING:
    from winnowgp.estimators import TabularModel

# Options that several commands share, said once.


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


# Where a result is to go: checked before any work is done.


PICTURES = (".png", ".pdf", ".svg")


def checked_output(output: Path, suffixes: tuple[str, ...] = ()) -> Path:
    """`output`, if a file with one of these endings, or any if none is given, can be written."""
    if suffixes and not output.name.lower().endswith(suffixes):
        raise InputError(
            f"`--output` must end in one of {', '.join(suffixes)}; got {output.name!r}."
        )
    folder = output.absolute().parent
    if not folder.is_dir():
        raise InputError(f"`--output` must be in a folder that exists; {folder} does not.")
    special = output.exists() and not output.is_file()  # a folder, or such as /dev/null
    if special or not os.access(folder, os.W_OK):
        raise InputError(f"`--output` must be a file that can be written; {output} cannot.")
    return output


def checked_folder(output: Path) -> Path:
    """`output`, if it is a folder that can be written to, or can become one."""
    place = output.absolute()
    while not place.exists():
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK):
        raise InputError(f"`--output` must be a folder that can be written to; {output} cannot be.")
    return output


# The model that a file holds, if a command can use it.


def loaded(path: Path) -> "TabularModel":
    """A model that `winnow fit` wrote."""
    # Here, so that `winnow --help` needs no PyTorch.
    from winnowgp.estimators import TabularModel
    from winnowgp.io import load

    if path.is_dir():
        raise InputError(f"{path} is a folder; give a file that `winnow fit` wrote.")
    model = load(path)
    if not isinstance(model, TabularModel):
        raise InputError(
            f"{path} holds a {type(model).__name__}, saved from Python; the command line needs a "
            "file that `winnow fit` wrote. Use `winnowgp.load` in Python."
        )
    return model


# Whether torchrun started the command, and which of its processes this is.


def launched() -> bool:
    """Whether it is one of several that torchrun started, or may have."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def speaks() -> bool:
    """Whether it is the one that prints and writes."""
    return not launched() or os.environ.get("RANK") == "0"


def name() -> str:
    """What it calls itself in messages: processes that are not the first give their number."""
    return "winnow" if speaks() else f"winnow (process {int(os.environ['RANK']) + 1})"
