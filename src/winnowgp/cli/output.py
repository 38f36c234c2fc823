"""Where a result is to go: checked before any work is done."""

import os
from pathlib import Path

from winnowgp.errors import InputError

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
