"""Checkpoints: files from which an interrupted fit resumes.

A fit is determined by its data, model, schedule and seed. Run again from its beginning it meets the
same long loops, its stages, in the same order. A stage that had ended is not run again: its result
is restored. The stage in progress continues from its last saved state. The computations between
stages take little time and are repeated.
"""

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar, final

import torch
from torch import Tensor

from winnowgp.data.distributed import SINGLE_PROCESS, ProcessGroup
from winnowgp.errors import CheckpointError, CheckpointWarning, InputError, ModelFileError
from winnowgp.io.format import read_archive, write_archive
from winnowgp.io.registry import State, deserialise, serialise
from winnowgp.training.callbacks import Callback, CallbackStates, Stateful, decision_settings
from winnowgp.training.fingerprint import digest, fingerprint

Value = TypeVar("Value")

_KIND = "Checkpoint"


@final
@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A folder in which a fit records its progress.

    The same fit, run again with the same folder, resumes and returns the same result to the last
    bit, as if it had never been interrupted. A fit that had ended is not trained again. Another fit
    is refused until the one in the folder has ended, and then replaces it.

    The file is written to a temporary name and then renamed, so that a process killed at any moment
    leaves the last complete one.

    >>> Checkpoint("runs/energy", every=10)
    Checkpoint(folder='runs/energy', every=10)
    """

    folder: str | os.PathLike[str]
    """Folder of one fit; created if it does not exist."""
    every: float = 30.0
    """Least number of seconds between two writes; 0 writes after every step."""

    def __post_init__(self) -> None:
        if not self.every >= 0:
            raise InputError(f"`every` must be zero or more seconds; got {self.every}.")
        if Path(self.folder).exists() and not Path(self.folder).is_dir():
            raise InputError(
                f"`checkpoint` must be a folder, or a new one; got the file {self.folder}."
            )

    @property
    def path(self) -> Path:
        """The file that holds the fit's progress."""
        return Path(self.folder) / "fit.checkpoint"

    def read(self) -> State | None:
        """Return the last state that was written, or None if there is none.

        Raises:
            CheckpointError: the file is damaged, not a checkpoint, or cannot be read.
        """
        try:
            if not self.path.exists():
                return None
            archive = read_archive(self.path)
            if archive.kind != _KIND:
                raise ModelFileError(f"{self.path} holds a {archive.kind}.")
            state = deserialise(archive)
        except OSError as error:
            raise CheckpointError(
                f"{self.path} must be a file that can be read ({error}); delete it to start again, "
                "or use another folder."
            ) from error
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise self._unusable() from error
        if not isinstance(state, dict) or state.keys() != {"heading", "finished", "entries"}:
            raise self._unusable()
        return state

    def write(self, state: State) -> None:
        """Replace the last state, completely or not at all.

        Raises:
            OSError: the file cannot be written; the last one remains.
        """
        Path(self.folder).mkdir(parents=True, exist_ok=True)
        write_archive(serialise(_KIND, state), self.path)

    def remove_temporary(self) -> None:
        """Remove incomplete files of processes that were killed while writing."""
        for path in Path(self.folder).glob(".*.checkpoint"):
            # If it cannot be removed, writing will raise the error.
            with suppress(OSError):
                path.unlink()

    def _unusable(self) -> CheckpointError:
        return CheckpointError(
            f"{self.path} is not a checkpoint, damaged, or of another version of winnowgp; delete "
            "it to start again, or use another folder."
        )


@final
class CheckpointLog:
    """The stages of one fit in the order in which they begin, and the last state of each.

    Args:
        write: writes a state to disk; None for a fit without a checkpoint.
        every: least number of seconds between two writes.
        generator: source of the fit's randomness; its state is saved with every stage.
        callbacks: callbacks of the fit; their states are saved with every stage.
        heading: fingerprint of the fit.
        entries: what an earlier run wrote, by the number of the stage.
        finished: whether that run had ended.
        process_group: the processes that share the fit.
    """

    def __init__(
        self,
        write: Callable[[State], None] | None = None,
        *,
        every: float = 0.0,
        generator: torch.Generator | None = None,
        callbacks: Sequence[Callback] = (),
        heading: Mapping[str, str] | None = None,
        entries: Mapping[int, State] | None = None,
        finished: bool = False,
        process_group: ProcessGroup = SINGLE_PROCESS,
    ) -> None:
        self._finished, self.process_group = finished, process_group
        self._write, self._every, self._heading = write, every, dict(heading or {})
        self._generator, self._callbacks = generator, CallbackStates(callbacks)
        self._entries = dict(entries or {})
        self._count, self._written = 0, monotonic()

    @property
    def saved(self) -> bool:
        """Whether the log is written to disk."""
        return self._write is not None

    @property
    def passed(self) -> bool:
        """Whether an earlier run went beyond this point, so that callbacks have been notified."""
        # All later entries count, because a stage that could not begin leaves none.
        return self._finished or any(number > self._count for number in self._entries)

    def attach(self, generator: torch.Generator, callbacks: Sequence[Callback]) -> None:
        """Save the states of a generator and of callbacks with every stage from now on."""
        if self.saved:
            self._generator, self._callbacks = generator, CallbackStates(callbacks)

    def stage(
        self,
        results: Mapping[str, Stateful],
        *,
        start: Sequence[Tensor] = (),
        scratch: Mapping[str, Stateful] | None = None,
    ) -> "Stage":
        """Return the next resumable stage, with its state restored.

        Args:
            results: objects that the loop changes, and that are needed after it.
            start: tensors that the loop starts from, to detect a resumed fit that differs.
                Processes that share the fit all start from those of the first one.
            scratch: objects that are needed to continue the loop, and not after it.
        """
        if self.process_group.world_size > 1:
            for own, first in zip(start, self.process_group.broadcast(*start), strict=True):
                own.detach().copy_(first)
        always: dict[str, Stateful] = {"callbacks": self._callbacks}
        if self._generator is not None:
            start = [*start, self._generator.get_state()]
            always["generator"] = _GeneratorState(self._generator)
        return Stage(self, results=always | dict(results), scratch=scratch or {}, start=start)

    def once(self, compute: Callable[[], Value]) -> Value:
        """Return what `compute` returned the first time, for random draws and measured times.

        Processes that share a fit all get the value of the first of them.
        """
        number, entry = self.next_entry()
        if entry is not None:
            if "value" not in entry:
                raise _unsuitable()
            return entry["value"]
        value = self.process_group.broadcast_result(compute)
        if self.saved:
            self.put(number, {"ended": True, "value": value})
            self.write()
        return value

    def finish(self) -> None:
        """Record that the fit has ended."""
        if self.saved:
            self.write(finished=True)

    def due(self) -> bool:
        """Return whether enough time has passed to write again."""
        return self.saved and monotonic() - self._written >= self._every

    def next_entry(self) -> tuple[int, State | None]:
        """Return the number of the next stage, from one, and its saved entry, if any."""
        if not self.saved:
            return 0, None
        self._count += 1
        return self._count, self._entries.get(self._count)

    def put(self, number: int, entry: State) -> None:
        """Set the entry of a stage."""
        self._entries[number] = entry

    def write(self, *, finished: bool = False) -> None:
        """Write all entries; warn if that fails, because the last complete file remains."""
        assert self._write is not None
        try:
            self._write({"heading": self._heading, "finished": finished, "entries": self._entries})
        except OSError as error:
            warnings.warn(
                f"the checkpoint could not be written ({error}); the fit continues, and would "
                "resume from the previous checkpoint.",
                CheckpointWarning,
                stacklevel=2,
            )
        self._written = monotonic()


NO_CHECKPOINT_LOG = CheckpointLog()

"""The log of a fit without a checkpoint."""


@final
class Stage:
    """A resumable loop of a fit, whose saved state has been restored; skip it if `ended`."""

    def __init__(
        self,
        log: CheckpointLog,
        *,
        results: Mapping[str, Stateful],
        scratch: Mapping[str, Stateful],
        start: Sequence[Tensor],
    ) -> None:
        self._log, self._results, self._scratch = log, results, scratch
        self._number, entry = log.next_entry()
        self._start = digest(start) if log.saved else ""
        self.ended = entry is not None and bool(entry.get("ended"))
        """Whether the loop has ended, in this run or in an earlier one."""
        if entry is not None:
            self._restore(entry)

    def save(self) -> None:
        """Write the state if it is due; to be called between two steps."""
        if self._log.due():
            self._record(ended=False)
            self._log.write()

    def end(self) -> None:
        """Record that the loop has ended; its scratch state is discarded."""
        if self._log.saved and not self.ended:
            self._record(ended=True)
            self.ended = True
            if self._log.due():
                self._log.write()

    def _record(self, *, ended: bool) -> None:
        objects = self._results if ended else {**self._results, **self._scratch}
        memory = {name: _copied(each.state_dict()) for name, each in objects.items()}
        self._log.put(self._number, {"ended": ended, "start": self._start, "memory": memory})

    def _restore(self, entry: Mapping[str, Any]) -> None:
        if entry.get("start") != self._start:
            raise CheckpointError(
                "the resumed fit differs from the interrupted one before this stage: another "
                "processor, library or number of processes rounds differently. Resume it as it was "
                "started, or delete the checkpoint to start again."
            )
        objects = self._results if self.ended else {**self._results, **self._scratch}
        try:
            for name, each in objects.items():
                each.load_state_dict(entry["memory"][name])
        except (LookupError, TypeError, ValueError, RuntimeError, AttributeError) as error:
            raise _unsuitable() from error


def open_checkpoint(
    checkpoint: Checkpoint | None,
    *,
    generator: torch.Generator | None = None,
    callbacks: Sequence[Callback] = (),
    process_group: ProcessGroup = SINGLE_PROCESS,
    **identity: Any,
) -> CheckpointLog:
    """Return the log of a fit: a new one, or that of the same fit interrupted before.

    Only the first of the processes that share a fit reads and writes; the others resume from what
    it has read.

    Args:
        identity: values that determine the result, besides the generator and the callbacks.

    Raises:
        CheckpointError: the folder holds another fit that has not ended, or a file that is not a
            checkpoint, or cannot be written to.
        InputError: processes that share the fit were given different ones.
        NotSaveableError: the state of a callback cannot be saved.
    """
    if checkpoint is None and process_group.world_size == 1:
        return NO_CHECKPOINT_LOG
    if generator is not None:
        identity["generator"] = generator
    heading = fingerprint(**identity, callbacks=decision_settings(callbacks))
    check_same(process_group.all_gather(heading))
    if checkpoint is None:
        return CheckpointLog(process_group=process_group)
    state = process_group.broadcast_result(lambda: _resume(checkpoint, heading, callbacks))
    return CheckpointLog(
        checkpoint.write if process_group.is_first else lambda state: None,
        every=checkpoint.every if process_group.is_first else inf,
        generator=generator,
        callbacks=callbacks,
        heading=heading,
        entries=state["entries"],
        finished=state["finished"],
        process_group=process_group,
    )


def check_same(headings: Sequence[Mapping[str, str]]) -> None:
    """Raise an error unless all processes were given the same fit, or they would deadlock."""
    first = headings[0]
    for number, heading in enumerate(headings):
        # Callbacks and numbers of threads may differ: those of the first process decide.
        for name in [name for name in first if name not in ("callbacks", "threads")]:
            if heading.get(name) != first[name]:
                raise InputError(
                    f"all processes must be given the same fit; `{name}` is {_short(first[name])} "
                    f"in the first and {_short(heading.get(name))} in number {number + 1}."
                )


def _resume(
    checkpoint: Checkpoint, heading: dict[str, str], callbacks: Sequence[Callback]
) -> State:
    """Return the state of the same fit; write and return an empty one if there is none."""
    # A callback whose state cannot be saved is an error now, not at the first write.
    serialise("Callbacks", CallbackStates(callbacks).state_dict())
    checkpoint.remove_temporary()
    state = checkpoint.read()
    if state is not None and state["heading"] == heading:
        return state
    if state is not None and not state["finished"]:
        raise _other_fit(checkpoint, state["heading"], heading)
    empty = {"heading": heading, "finished": False, "entries": {}}
    try:
        checkpoint.write(empty)
    except OSError as error:
        raise CheckpointError(
            f"`checkpoint` must be a folder that can be written to; {checkpoint.folder} cannot: "
            f"{error}."
        ) from error
    return empty


def _other_fit(
    checkpoint: Checkpoint, before: Mapping[str, str], now: Mapping[str, str]
) -> CheckpointError:
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    changes = "; ".join(
        f"`{name}` was {_short(before.get(name))} and is {_short(now.get(name))}" for name in names
    )
    return CheckpointError(
        f"{checkpoint.path} belongs to another fit, which has not ended: {changes}. Run that fit "
        "again, use another folder, or delete this one to start again."
    )


def _unsuitable() -> CheckpointError:
    return CheckpointError("the checkpoint does not suit this fit; delete it to start again.")


def _short(description: str | None) -> str:
    description = "nothing" if description is None else description
    return description if len(description) <= 160 else f"{description[:157]}..."


@final
class _GeneratorState:
    """The state of a random generator as a stateful object."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def state_dict(self) -> dict[str, Any]:
        return {"state": self._generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._generator.set_state(state["state"])


def _copied(state: State) -> State:
    """Return a copy that no longer changes with its source."""
    if isinstance(state, Tensor):
        return state.detach().cpu().clone()
    if isinstance(state, Mapping):
        return {key: _copied(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        values = [_copied(value) for value in state]
        return values if isinstance(state, list) else tuple(values)
    return state
