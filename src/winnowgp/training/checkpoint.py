"""Where a fit is remembered on disk, so that it can be killed and go on."""

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import final

from winnowgp.errors import CheckpointError, InputError, ModelFileError
from winnowgp.io import State, packed_state, read_packed, state_from, write_packed

_KIND = "Checkpoint"


@final
@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A folder that a fit writes down in how far it has come.

    The same fit, run again with the same folder, goes on from there and ends with the same answer
    to the last bit, as if it had never been stopped. A fit that had ended is not trained again.
    Another fit is refused until the one in the folder has ended, and then takes its place.

    Files are written whole and then renamed: killed at any moment, the last good one stays.

    >>> Checkpoint("runs/energy", every=10)
    Checkpoint(folder='runs/energy', every=10)
    """

    folder: str | os.PathLike[str]
    """Made if it does not exist; one for each fit."""
    every: float = 30.0
    """Seconds between two writings at least; what is lost at the most. 0 writes at every step."""

    def __post_init__(self) -> None:
        if not self.every >= 0:
            raise InputError(f"`every` must be zero or more seconds; got {self.every}.")
        if Path(self.folder).exists() and not Path(self.folder).is_dir():
            raise InputError(
                f"`checkpoint` must be a folder, or a new one; got the file {self.folder}."
            )

    def path(self, name: str) -> Path:
        """The file in which one part of the work is remembered."""
        return Path(self.folder) / f"{name}.checkpoint"

    def read(self, name: str) -> State | None:
        """What was written last; None if nothing was.

        Raises:
            CheckpointError: the file is damaged, not a checkpoint, or cannot be read.
        """
        path = self.path(name)
        try:
            if not path.exists():
                return None
            packed = read_packed(path)
            if packed.kind != _KIND:
                raise ModelFileError(f"{path} holds a {packed.kind}.")
            return state_from(packed)
        except OSError as error:
            raise CheckpointError(
                f"{path} must be a file that can be read ({error}); delete it to start again, or "
                "give another folder."
            ) from error
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise self.unusable(name) from error

    def unusable(self, name: str) -> CheckpointError:
        """For a file that holds something else than a fit writes down."""
        return CheckpointError(
            f"{self.path(name)} is not a checkpoint, damaged, or of another version of winnowgp; "
            "delete it to start again, or give another folder."
        )

    def tidy(self) -> None:
        """Remove what a process that was killed while it wrote has left half written."""
        for path in Path(self.folder).glob(".*.checkpoint"):
            # Where it cannot be removed, writing will say so.
            with suppress(OSError):
                path.unlink()

    def write(self, name: str, state: State) -> None:
        """Put a state in the place of the last one, whole or not at all.

        Raises:
            OSError: it cannot be written; the last one stays.
        """
        Path(self.folder).mkdir(parents=True, exist_ok=True)
        write_packed(packed_state(_KIND, state), self.path(name))
