"""The training context: generator, callbacks, checkpoint log and process group of a fit."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, final

import torch

from winnowgp.data.distributed import SINGLE_PROCESS, ProcessGroup
from winnowgp.errors import NotShardedWarning
from winnowgp.training.callbacks import (
    Callback,
    Callbacks,
    EndPhase,
    Progress,
    as_callbacks,
    notify,
)
from winnowgp.training.checkpoint import (
    NO_CHECKPOINT_LOG,
    Checkpoint,
    CheckpointLog,
    open_checkpoint,
)


@final
@dataclass(frozen=True, slots=True)
class TrainingContext:
    """The generator, callbacks, checkpoint log and process group of a fit."""

    generator: torch.Generator
    callbacks: tuple[Callback, ...] = ()
    checkpoint_log: CheckpointLog = NO_CHECKPOINT_LOG
    process_group: ProcessGroup = SINGLE_PROCESS
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
    checkpoint: Checkpoint | CheckpointLog | None,
    *,
    generator: torch.Generator,
    callbacks: Callbacks = (),
    process_group: ProcessGroup = SINGLE_PROCESS,
    **identity: Any,
) -> Iterator[TrainingContext]:
    """Open the context of a fit; its checkpoint is complete once the block ends without an error.

    Args:
        checkpoint: where the fit is recorded, if anywhere; a log that is open already is continued,
            and remains open.
        process_group: the processes that share the fit.
        identity: values that determine the result, besides generator and callbacks; not used if a
            log is open.
    """
    callbacks = as_callbacks(callbacks)
    if isinstance(checkpoint, CheckpointLog):
        checkpoint.attach(generator, callbacks)
        yield TrainingContext(generator, callbacks, checkpoint, process_group)
        return
    log = open_checkpoint(
        checkpoint,
        generator=generator,
        callbacks=callbacks,
        process_group=process_group,
        **identity,
    )
    yield TrainingContext(generator, callbacks, log, process_group)
    log.finish()


def warn_not_sharded(process_group: ProcessGroup, reason: str) -> None:
    """Warn, in the first of several processes, that each of them repeats all work of a fit.

    Args:
        reason: a clause that gives the reason, and what to do.
    """
    if process_group.world_size > 1 and process_group.is_first:
        warnings.warn(
            f"each of {process_group.world_size} processes repeats the work of this fit: {reason}.",
            NotShardedWarning,
            stacklevel=3,
        )
