"""Files that appear whole or not at all."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from stat import S_IMODE

from winnowgp.errors import InputError


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A neighbouring file to write to, renamed to `path` at the end; removed if anything fails.

    An interruption counts as a failure too: what stood at `path` before is untouched. The new file
    has the permissions of the one it replaces. A symbolic link stays one: what it leads to is
    replaced.
    """
    # A rename would put a file in the place of the link itself.
    place = Path(os.path.realpath(path))
    if place.is_symlink() or (path.exists() and not path.is_file()):
        # Or in the place of a device such as /dev/null; links that lead in a circle lead nowhere.
        raise InputError(f"{path} is not a plain file; give the path of one, or a new one.")
    if path.is_symlink() and not place.parent.is_dir():
        raise InputError(f"{path} leads to {place}, whose folder does not exist; make it first.")
    descriptor, name = tempfile.mkstemp(dir=place.parent, prefix=".", suffix=path.suffix)
    os.close(descriptor)
    part = Path(name)
    try:
        yield part
        part.chmod(_permissions(place))
        _settle(part)
        part.replace(place)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _permissions(place: Path) -> int:
    """Those of the file that is there, else those of any new file: mkstemp's are private."""
    if place.exists():
        return S_IMODE(place.stat().st_mode)
    umask = os.umask(0)
    os.umask(umask)
    return 0o666 & ~umask


def _settle(part: Path) -> None:
    """On the disk itself, before the name is: a power cut leaves the old file or the new one."""
    with part.open("rb") as file:
        os.fsync(file.fileno())
