"""Checkpoints: files from which an interrupted fit resumes."""

import hashlib
import os
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from importlib.metadata import version
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar, final

import numpy as np
import torch
from torch import Tensor, nn

from winnowgp import __version__
from winnowgp.data import Source, standardise
from winnowgp.data.distributed import SINGLE_PROCESS, ProcessGroup
from winnowgp.data.scaling import StandardisedSource
from winnowgp.errors import CheckpointError, CheckpointWarning, InputError, ModelFileError
from winnowgp.io import State, packed_state, read_packed, state_from, write_packed
from winnowgp.training.callbacks import Randomness, Remembered, Stateful

# Where a fit is remembered on disk, so that it can be killed and go on.


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


# Which rows a fit is of, in things that its checkpoint can tell apart.


FIRST = 1000


def row_identity(data: Source, *, kept: bool) -> dict[str, Any]:
    """The rows themselves where they are in memory; else their number, the first ones, and units.

    Means and deviations of all columns depend on all rows: those of a standardised source are
    known, others are found in a pass over it. Nothing is read for a fit that nobody could take for
    another one.

    Args:
        kept: whether the fit has a checkpoint, which may be that of other rows.
    """
    held = data.as_dataset()
    if held is not None:
        return {"inputs": held.X, "targets": held.Y, "weights": held.weights}
    if not kept and data.process_group.world_size == 1:
        return {"rows": data.N}
    first = data.part(torch.arange(min(data.N, FIRST)))
    if kept and not isinstance(data, StandardisedSource):
        data = standardise(data)
    units = (data.x_scaler, data.y_scaler) if isinstance(data, StandardisedSource) else ()
    return {"rows": data.N, "inputs": first.X, "targets": first.Y, "weights": None, "units": units}


# What makes a fit this fit and no other, in words short enough for an error message.


_PACKAGES = ("torch", "gpytorch", "numpy", "scikit-learn")
# Where PyTorch keeps parameters, parts and hooks of a module.
_OWN = vars(nn.Module()).keys() - {"training"}


def fingerprint(**parts: Any) -> dict[str, str]:
    """Words for each part, and for what decides the last digits of whatever is computed.

    >>> fingerprint(rows=torch.zeros(2, 3))["rows"]
    'torch.float32 [2, 3] on cpu, sha256 bb40f2a9421065bf'
    """
    versions = {name: version(name) for name in _PACKAGES}
    here = {"winnowgp": __version__, **versions, "threads": str(torch.get_num_threads())}
    return {name: described(part) for name, part in parts.items()} | here


def described(part: Any) -> str:
    """A part in words; equal ones in the same words, others in others."""
    if isinstance(part, np.generic):
        part = part.item()
    if isinstance(part, list | tuple):
        # Lists and tuples of the same things ask for the same.
        return f"({', '.join(described(each) for each in part)})"
    if isinstance(part, set | frozenset):
        # In an order that does not depend on the process.
        return f"{{{', '.join(sorted(described(each) for each in part))}}}"
    if isinstance(part, Mapping):
        return f"{{{', '.join(f'{k!r}: {described(v)}' for k, v in part.items())}}}"
    if isinstance(part, np.ndarray) and part.dtype.kind in "biuf":
        part = torch.from_numpy(np.ascontiguousarray(part))
    if isinstance(part, Tensor):
        where = f"{part.dtype} {list(part.shape)} on {part.device.type}"
        return f"{where}, sha256 {digest([part])}"
    if isinstance(part, torch.Generator):
        return f"in the state with sha256 {digest([part.get_state()])}"
    if isinstance(part, np.random.RandomState):
        return f"in a state with sha256 {_short(repr(part.get_state()).encode())}"
    if isinstance(part, nn.Module):
        tensors = [value for _, value in sorted(part.state_dict().items())]
        words = _short(f"{_structure(part)} {digest(tensors)}".encode())
        return (
            f"{type(part).__name__} with {sum(t.numel() for t in tensors)} numbers, sha256 {words}"
        )
    if is_dataclass(part) and not isinstance(part, type):
        held = {field.name: getattr(part, field.name) for field in fields(part)}
        return f"{type(part).__name__}({', '.join(f'{k}={described(v)}' for k, v in held.items())})"
    if type(part).__repr__ is object.__repr__ and hasattr(part, "__dict__"):
        return f"{type(part).__name__}{described(vars(part))}"
    # Where an object lies in memory says nothing about it.
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(part))


def digest(tensors: Iterable[Tensor]) -> str:
    """The beginning of the SHA-256 of some tensors, their types and shapes."""
    found = hashlib.sha256()
    for tensor in tensors:
        plain = tensor.detach().cpu().contiguous()
        found.update(f"{plain.dtype} {list(plain.shape)} ".encode())
        found.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def _structure(module: nn.Module) -> list[Any]:
    """Kinds of modules with all they hold besides tensors and parts, and what is learnt."""
    parts = [
        (
            name,
            type(part).__name__,
            {k: described(v) for k, v in vars(part).items() if k not in _OWN},
        )
        for name, part in module.named_modules()
    ]
    learnt = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    return [parts, learnt]


def _short(words: bytes) -> str:
    return hashlib.sha256(words).hexdigest()[:16]


# The stages of a fit, and how a fit that was stopped goes on.
#
# A fit is determined by its data, model, plan and seed. Run again from its beginning it meets the
# same long loops, its stages, in the same order. One that had ended is not run again: what it left
# behind is put in its place. The one under way goes on from where it was saved last. What lies
# between stages takes little time, and is computed again.


Value = TypeVar("Value")


@final
class Stage:
    """One long loop: to be run, gone on with, or skipped if `ended`.

    Its memory already stands where it was left.
    """

    def __init__(
        self,
        checkpoint_log: "CheckpointLog",
        *,
        kept: Mapping[str, Stateful],
        scratch: Mapping[str, Stateful],
        start: Sequence[Tensor],
    ) -> None:
        self._checkpoint_log, self._kept, self._scratch = checkpoint_log, kept, scratch
        self._number, found = checkpoint_log.next_entry()
        self._start = digest(start) if checkpoint_log.kept else ""
        self.ended = found is not None and found["ended"]
        """Whether there is nothing left to do."""
        if found is not None:
            self._restore(found)

    def save(self) -> None:
        """Write the memory down, if it is time to; between two steps."""
        if self._checkpoint_log.due():
            self._record(ended=False)
            self._checkpoint_log.write()

    def end(self) -> None:
        """The loop is over: from now on it is skipped, and only what is kept is remembered."""
        if self._checkpoint_log.kept and not self.ended:
            self._record(ended=True)
            self.ended = True
            if self._checkpoint_log.due():
                self._checkpoint_log.write()

    def _record(self, *, ended: bool) -> None:
        parts = self._kept if ended else {**self._kept, **self._scratch}
        memory = {name: _copied(part.state_dict()) for name, part in parts.items()}
        entry = {"ended": ended, "start": self._start, "memory": memory}
        self._checkpoint_log.put(self._number, entry)

    def _restore(self, found: Mapping[str, Any]) -> None:
        if found.get("start") != self._start:
            raise CheckpointError(
                "going on from the checkpoint came to another place than before it was stopped: "
                "another processor, another library or another number of processes rounds "
                "differently. Go on as it was begun, or delete the checkpoint to start again."
            )
        parts = self._kept if self.ended else {**self._kept, **self._scratch}
        try:
            for name, part in parts.items():
                part.load_state_dict(found["memory"][name])
        except (LookupError, TypeError, ValueError, RuntimeError, AttributeError) as error:
            raise _unsuitable() from error


@final
class CheckpointLog:
    """The stages of one fit in order of their beginning, and what each had reached.

    Args:
        write: puts a state on disk; None for a journal that is not kept.
        every: seconds between two writings, at least.
        generator: where the fit's randomness comes from; every stage remembers it.
        watcher: who is told of progress; so is this.
        heading: written at the top.
        entries: what an earlier run wrote, by the number of the stage.
        finished: whether that run had ended.
        ranks: the processes that share the fit.
    """

    def __init__(
        self,
        write: Callable[[State], None] | None = None,
        *,
        every: float = 0.0,
        generator: torch.Generator | None = None,
        callback: object = None,
        heading: Mapping[str, str] | None = None,
        entries: Mapping[int, State] | None = None,
        finished: bool = False,
        process_group: ProcessGroup = SINGLE_PROCESS,
    ) -> None:
        self._finished, self.process_group = finished, process_group
        self._write, self._every, self._heading = write, every, dict(heading or {})
        self._generator, self._entries = generator, dict(entries or {})
        self._always: dict[str, Stateful] = {"watcher": Remembered(callback)}
        if generator is not None:
            self._always["generator"] = Randomness(generator)
        self._count, self._written = 0, monotonic()

    @property
    def kept(self) -> bool:
        """Whether anything is written down at all."""
        return self._write is not None

    @property
    def passed(self) -> bool:
        """Whether an earlier run was further than this: watchers have been told of it."""
        # Not only the next one: a stage that could not begin left nothing behind.
        return self._finished or any(number > self._count for number in self._entries)

    def stage(
        self,
        kept: Mapping[str, Stateful],
        *,
        start: Sequence[Tensor] = (),
        scratch: Mapping[str, Stateful] | None = None,
    ) -> Stage:
        """The next long loop, its memory brought to where it was left.

        Args:
            kept: what the loop changes that matters afterwards.
            start: what it starts from: if that differs from last time, going on would be wrong.
                Processes that share the fit all start where the first of them does.
            scratch: what the loop needs to go on, and nobody needs afterwards.
        """
        if self.process_group.world_size > 1:
            for own, first in zip(start, self.process_group.broadcast(*start), strict=True):
                own.detach().copy_(first)
        if self._generator is not None:
            start = [*start, self._generator.get_state()]
        return Stage(self, kept=self._always | dict(kept), scratch=scratch or {}, start=start)

    def once(self, compute: Callable[[], Value]) -> Value:
        """What `compute` gave the first time, for what chance or a clock decides.

        Processes that share a fit all get what it gave the first of them.
        """
        number, found = self.next_entry()
        if found is not None:
            if "value" not in found:
                raise _unsuitable()
            return found["value"]
        value = self.process_group.broadcast_result(compute)
        if self.kept:
            self.put(number, {"ended": True, "value": value})
            self.write()
        return value

    def finish(self) -> None:
        """The fit has ended."""
        if self.kept:
            self.write(finished=True)

    def due(self) -> bool:
        """Whether it is time to write."""
        return self.kept and monotonic() - self._written >= self._every

    def next_entry(self) -> tuple[int, State | None]:
        """The number of the next stage, from one, and what was written of it."""
        if not self.kept:
            return 0, None
        self._count += 1
        return self._count, self._entries.get(self._count)

    def put(self, number: int, entry: State) -> None:
        """Remember this of a stage."""
        self._entries[number] = entry

    def write(self, *, finished: bool = False) -> None:
        """Write everything; where that fails, say so and go on: the last good one stays."""
        assert self._write is not None
        try:
            self._write({"heading": self._heading, "finished": finished, "entries": self._entries})
        except OSError as error:
            warnings.warn(
                f"the checkpoint could not be written ({error}); the fit goes on, and would go on "
                "from the one before.",
                CheckpointWarning,
                stacklevel=2,
            )
        self._written = monotonic()


NO_CHECKPOINT_LOG = CheckpointLog()

"""Of a fit without a checkpoint."""


def _unsuitable() -> CheckpointError:
    return CheckpointError("the checkpoint does not suit this fit; delete it to start again.")


def _copied(state: State) -> State:
    """A state that what it was taken from no longer changes."""
    if isinstance(state, Tensor):
        return state.detach().cpu().clone()
    if isinstance(state, Mapping):
        return {key: _copied(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        parts = [_copied(value) for value in state]
        return parts if isinstance(state, list) else tuple(parts)
    return state
