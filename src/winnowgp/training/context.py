"""The training context: generator, callback, checkpoint log and process group."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import inf
from typing import Any, final

import torch

from winnowgp.data import ProcessGroup
from winnowgp.errors import CheckpointError, InputError, NotShardedWarning
from winnowgp.io.registry import State, serialise
from winnowgp.training.callbacks import (
    Callback,
    Callbacks,
    CallbackStates,
    EndPhase,
    Progress,
    as_callbacks,
    decision_settings,
    notify,
)
from winnowgp.training.checkpoint import NO_CHECKPOINT_LOG, Checkpoint, CheckpointLog, fingerprint

# The journal of a piece of work that has a checkpoint.


_ALONE = ProcessGroup.alone()


def open_checkpoint(
    checkpoint: Checkpoint | None,
    name: str,
    *,
    generator: torch.Generator | None = None,
    callbacks: Sequence[Callback] = (),
    process_group: ProcessGroup = _ALONE,
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
    heading = fingerprint(**parts, callbacks=decision_settings(callbacks))
    _check_same(process_group.all_gather(heading))
    if checkpoint is None:
        return CheckpointLog(process_group=process_group)
    found = process_group.broadcast_result(lambda: _found(checkpoint, name, heading, callbacks))
    return CheckpointLog(
        (lambda state: checkpoint.write(name, state)) if process_group.first else _unwritten,
        every=checkpoint.every if process_group.first else inf,
        generator=generator,
        callbacks=callbacks,
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
        for name in [name for name in first if name not in ("callbacks", "threads")]:
            if heading.get(name) != first[name]:
                raise InputError(
                    f"all processes must be given the same fit; `{name}` is {_short(first[name])} "
                    f"in the first and {_short(heading.get(name))} in number {number + 1}."
                )


def _found(
    checkpoint: Checkpoint, name: str, heading: dict[str, str], callbacks: Sequence[Callback]
) -> State | None:
    """What was written of this work before; a new journal is begun if nothing was."""
    # What a file has no words for is found out now rather than at the first writing.
    serialise("Checkpoint", CallbackStates(callbacks).state_dict())
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


@final
@dataclass(frozen=True, slots=True)
class TrainingContext:
    """The generator, callbacks, checkpoint log and process group that all phases of a fit share."""

    generator: torch.Generator
    callbacks: tuple[Callback, ...] = ()
    checkpoint_log: CheckpointLog = NO_CHECKPOINT_LOG
    process_group: ProcessGroup = _ALONE
    """The processes that share the fit."""

    def notify(self, progress: Progress) -> None:
        """Call the callbacks with a step.

        Where several processes share the fit, the callbacks of the first decide when a phase ends:
        a callback may depend on a clock, or exist in the first process only.

        Raises:
            EndPhase: a callback ends the phase.
        """
        if self.process_group.world_size == 1:
            notify(self.callbacks, progress)
            return
        end = torch.zeros(())
        try:
            notify(self.callbacks, progress)
        except EndPhase:
            end = torch.ones(())
        if bool(self.process_group.broadcast(end)[0]):
            raise EndPhase

    def notify_once(self, progress: Progress) -> None:
        """Call the callbacks with the only step of a phase, unless an earlier run has done so.

        The phase has ended already, so `EndPhase` has no effect.
        """
        if not self.checkpoint_log.passed:
            with suppress(EndPhase):
                self.notify(progress)


@contextmanager
def training_context(
    checkpoint: Checkpoint | None,
    name: str,
    *,
    generator: torch.Generator,
    callbacks: Callbacks = (),
    process_group: ProcessGroup = _ALONE,
    **parts: Any,
) -> Iterator[TrainingContext]:
    """Open the context of a fit; its checkpoint is complete once the block ends without an error.

    Args:
        checkpoint: where the fit is recorded, if anywhere.
        name: name of the file in the checkpoint's folder.
        process_group: the processes that share the fit.
        parts: all that the result depends on, besides the generator.
    """
    callbacks = as_callbacks(callbacks)
    checkpoint_log = open_checkpoint(
        checkpoint,
        name,
        generator=generator,
        callbacks=callbacks,
        process_group=process_group,
        **parts,
    )
    yield TrainingContext(generator, callbacks, checkpoint_log, process_group)
    checkpoint_log.finish()


# What is said where several processes do the same work.


def warn_not_sharded(process_group: ProcessGroup, why: str) -> None:
    """Say, in the first of several processes, that each does all the work of a fit.

    Args:
        why: and what to do, a clause.
    """
    if process_group.world_size > 1 and process_group.first:
        warnings.warn(
            f"each of {process_group.world_size} processes repeats the work of this fit: {why}.",
            NotShardedWarning,
            stacklevel=3,
        )
