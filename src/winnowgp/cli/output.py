"""Where a picture is to go: checked before any work is done."""

import os
from pathlib import Path

from winnowgp.errors import InputError

PICTURE_FORMATS = (".png", ".pdf", ".svg")


def checked_picture(output: Path) -> Path:
    """`output`, if a picture can be written there."""
    if output.suffix.lower() not in PICTURE_FORMATS:
        raise InputError(
            f"`--output` must end in one of {', '.join(PICTURE_FORMATS)}; got {output.name!r}."
        )
    folder = output.absolute().parent
    if not folder.is_dir():
        raise InputError(f"`--output` must be in a folder that exists; {folder} does not.")
    if output.is_dir() or not os.access(folder, os.W_OK):
        raise InputError(f"`--output` must be a file that can be written; {output} cannot.")
    return output
