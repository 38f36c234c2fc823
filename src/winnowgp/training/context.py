"""The training context: generator, callback, checkpoint log and process group."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import inf
from typing import Any, Generic, TypeVar, final

import torch

from winnowgp.data.distributed import SINGLE_PROCESS, ProcessGroup
from winnowgp.errors import CheckpointError, InputError, NotShardedWarning
from winnowgp.io import State, packed_state
from winnowgp.training.callbacks import EndPhase, Remembered, decided_by
from winnowgp.training.checkpoint import NO_CHECKPOINT_LOG, Checkpoint, CheckpointLog, fingerprint

# The journal of a piece of work that has a checkpoint.


def open_checkpoint(
    checkpoint: Checkpoint | None,
    name: str,
    *,
    generator: torch.Generator | None = None,
    callback: object = None,
    process_group: ProcessGroup = SINGLE_PROCESS,
    **parts: Any,
) -> CheckpointLog:
    """The journal of a piece of work: a new one, or that of the same work stopped before.

    Of processes that share the work only the first one reads and writes; the others go on from what
    it has read.

    Args:
        name: of the file in the checkpoint's folder.
        generator: where the work's randomness comes from.
        watcher: reminded of what it remembered, if it is stateful.
        ranks: the processes that share the work.
        parts: all that the result depends on.

    Raises:
        CheckpointError: the folder holds other work that has not ended, or something that is not
            the journal of any, or cannot be written to.
        InputError: processes share the work, and not all are given the same.
        NotSaveableError: the watcher remembers something that a file has no words for.
    """
    if checkpoint is None and process_group.world_size == 1:
        return NO_CHECKPOINT_LOG
    if generator is not None:
        parts["generator"] = generator
    heading = fingerprint(**parts, on_progress=decided_by(callback))
    _check_same(process_group.all_gather(heading))
    if checkpoint is None:
        return CheckpointLog(process_group=process_group)
    found = process_group.broadcast_result(lambda: _found(checkpoint, name, heading, callback))
    return CheckpointLog(
        (lambda state: checkpoint.write(name, state)) if process_group.is_first else _unwritten,
        every=checkpoint.every if process_group.is_first else inf,
        generator=generator,
        callback=callback,
        heading=heading,
        entries=found["entries"] if found else {},
        finished=bool(found and found["finished"]),
        process_group=process_group,
    )


def _unwritten(state: State) -> None:
    """The first process writes for all."""


def _check_same(headings: list[dict[str, str]]) -> None:
    """Processes that share a fit must do the same, or they wait for each other in vain."""
    first = headings[0]
    for number, heading in enumerate(headings):
        # Who watches and how many threads round the last digits may differ: the first decides.
        for name in [name for name in first if name not in ("on_progress", "threads")]:
            if heading.get(name) != first[name]:
                raise InputError(
                    f"all processes must be given the same fit; `{name}` is {_short(first[name])} "
                    f"in the first and {_short(heading.get(name))} in number {number + 1}."
                )


def _found(
    checkpoint: Checkpoint, name: str, heading: dict[str, str], callback: object
) -> State | None:
    """What was written of this work before; a new journal is begun if nothing was."""
    # What a file has no words for is found out now rather than at the first writing.
    packed_state("Watcher", Remembered(callback).state_dict())
    checkpoint.tidy()
    found = checkpoint.read(name)
    if found is not None and not _is_journal(found):
        raise checkpoint.unusable(name)
    if found is not None and found["heading"] != heading:
        if not found["finished"]:
            raise _other_work(checkpoint, name, found["heading"], heading)
        found = None
    if found is None:
        _begin(checkpoint, name, heading)
    return found


def _is_journal(found: State) -> bool:
    """Whether a state is what a journal writes: a file may say anything under its checksum."""
    if not isinstance(found, dict) or found.keys() != {"heading", "finished", "entries"}:
        return False
    heading, entries = found["heading"], found["entries"]
    return (
        isinstance(heading, dict)
        and all(isinstance(words, str) for pair in heading.items() for words in pair)
        and isinstance(found["finished"], bool)
        and isinstance(entries, dict)
        and all(type(number) is int and _is_entry(entry) for number, entry in entries.items())
    )


def _is_entry(found: State) -> bool:
    """Whether a state is what a journal writes of a stage, or of what was decided once."""
    if not isinstance(found, dict) or not isinstance(found.get("ended"), bool):
        return False
    if found.keys() == {"ended", "value"}:
        return True
    stage = found.keys() == {"ended", "start", "memory"}
    return stage and isinstance(found["start"], str) and isinstance(found["memory"], dict)


def _begin(checkpoint: Checkpoint, name: str, heading: dict[str, str]) -> None:
    """Write an empty journal, to find out now rather than later if that is possible."""
    try:
        checkpoint.write(name, {"heading": heading, "finished": False, "entries": {}})
    except OSError as error:
        raise CheckpointError(
            f"`checkpoint` must be a folder that can be written to; {checkpoint.folder} cannot: "
            f"{error}."
        ) from error


def _other_work(
    checkpoint: Checkpoint, name: str, before: Mapping[str, str], now: Mapping[str, str]
) -> CheckpointError:
    names = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    changes = "; ".join(
        f"`{key}` was {_short(before.get(key))} and is {_short(now.get(key))}" for key in names
    )
    return CheckpointError(
        f"{checkpoint.path(name)} belongs to another fit, which has not ended: {changes}. Run "
        "that one again as it was, give another folder, or delete this one to start again."
    )


def _short(words: str | None) -> str:
    words = "nothing" if words is None else words
    return words if len(words) <= 160 else f"{words[:157]}..."


# The course of a fit: what all of its phases share besides a model and data.


Told = TypeVar("Told")

"""What a watcher is told: `Progress` or `DeepProgress`."""


@final
@dataclass(frozen=True, slots=True)
class TrainingContext(Generic[Told]):
    """Where a fit's randomness comes from, who watches it, and where it is written down."""

    generator: torch.Generator
    on_progress: Callable[[Told], None]
    checkpoint_log: CheckpointLog = NO_CHECKPOINT_LOG
    process_group: ProcessGroup = SINGLE_PROCESS
    """The processes that share the fit."""

    def notify_once(self, progress: Told) -> None:
        """Tell of something that happens between stages, unless an earlier run has told of it.

        It is a phase of a single step, which has ended already: `EndPhase` changes nothing.
        """
        if not self.checkpoint_log.passed:
            with suppress(EndPhase):
                self.on_progress(progress)


@contextmanager
def training_context(
    checkpoint: Checkpoint | None,
    name: str,
    *,
    generator: torch.Generator,
    on_progress: Callable[[Any], None],
    process_group: ProcessGroup = SINGLE_PROCESS,
    **parts: Any,
) -> Iterator[TrainingContext[Any]]:
    """The course of a piece of work, which has ended once the block is left without an error.

    Args:
        checkpoint: where it is written down, if anywhere.
        name: of the file in the checkpoint's folder.
        ranks: the processes that share the work.
        parts: all that the result depends on, besides the generator.
    """
    checkpoint_log = open_checkpoint(
        checkpoint,
        name,
        generator=generator,
        callback=on_progress,
        process_group=process_group,
        **parts,
    )
    told = (
        on_progress if process_group.world_size == 1 else _told_together(on_progress, process_group)
    )
    yield TrainingContext(generator, told, checkpoint_log, process_group)
    checkpoint_log.finish()


def _told_together(
    on_progress: Callable[[Any], None], process_group: ProcessGroup
) -> Callable[[Any], None]:
    """A watcher in each process, of which the first decides when a phase ends."""

    def told(progress: Any) -> None:
        enough = torch.zeros(())
        try:
            on_progress(progress)
        except EndPhase:
            enough = torch.ones(())
        # A watcher may look at a clock, or be in the first process only.
        if bool(process_group.broadcast(enough)[0]):
            raise EndPhase

    return told


# What is said where several processes do the same work.


def warn_not_sharded(process_group: ProcessGroup, why: str) -> None:
    """Say, in the first of several processes, that each does all the work of a fit.

    Args:
        why: and what to do, a clause.
    """
    if process_group.world_size > 1 and process_group.is_first:
        warnings.warn(
            f"each of {process_group.world_size} processes repeats the work of this fit: {why}.",
            NotShardedWarning,
            stacklevel=3,
        )
