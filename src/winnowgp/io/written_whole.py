"""Files that appear whole or not at all."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from winnowgp.errors import InputError


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A neighbouring file to write to, renamed to `path` at the end; removed if anything fails.

    An interruption counts as a failure too: what stood at `path` before is untouched.
    """
    if path.exists() and not path.is_file():
        # A rename would put a file in the place of a device such as /dev/null.
        raise InputError(f"{path} is not a plain file; give the path of one, or a new one.")
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=path.suffix)
    os.close(descriptor)
    part = Path(name)
    try:
        yield part
        # mkstemp files are private; give this one the permissions any new file would have.
        umask = os.umask(0)
        os.umask(umask)
        part.chmod(0o666 & ~umask)
        _settle(part)
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _settle(part: Path) -> None:
    """On the disk itself, before the name is: a power cut leaves the old file or the new one."""
    with part.open("rb") as file:
        os.fsync(file.fileno())
