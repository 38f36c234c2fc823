"""The course of a fit: what all of its phases share besides a model and data."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, final

import torch

from winnowgp.data import Ranks
from winnowgp.training.checkpoint import Checkpoint
from winnowgp.training.journal import UNKEPT, Journal
from winnowgp.training.opened import opened
from winnowgp.training.progress import EndPhase

Told = TypeVar("Told")
"""What a watcher is told: `Progress` or `DeepProgress`."""
_ALONE = Ranks.alone()


@final
@dataclass(frozen=True, slots=True)
class Course(Generic[Told]):
    """Where a fit's randomness comes from, who watches it, and where it is written down."""

    generator: torch.Generator
    on_progress: Callable[[Told], None]
    journal: Journal = UNKEPT
    ranks: Ranks = _ALONE
    """The processes that share the fit."""

    def tell_once(self, progress: Told) -> None:
        """Tell of something that happens between stages, unless an earlier run has told of it.

        It is a phase of a single step, which has ended already: `EndPhase` changes nothing.
        """
        if not self.journal.passed:
            with suppress(EndPhase):
                self.on_progress(progress)


@contextmanager
def kept_course(
    checkpoint: Checkpoint | None,
    name: str,
    *,
    generator: torch.Generator,
    on_progress: Callable[[Any], None],
    ranks: Ranks = _ALONE,
    **parts: Any,
) -> Iterator[Course[Any]]:
    """The course of a piece of work, which has ended once the block is left without an error.

    Args:
        checkpoint: where it is written down, if anywhere.
        name: of the file in the checkpoint's folder.
        ranks: the processes that share the work.
        parts: all that the result depends on, besides the generator.
    """
    journal = opened(
        checkpoint, name, generator=generator, watcher=on_progress, ranks=ranks, **parts
    )
    told = on_progress if ranks.of == 1 else _told_together(on_progress, ranks)
    yield Course(generator, told, journal, ranks)
    journal.finish()


def _told_together(on_progress: Callable[[Any], None], ranks: Ranks) -> Callable[[Any], None]:
    """A watcher in each process, of which the first decides when a phase ends."""

    def told(progress: Any) -> None:
        enough = torch.zeros(())
        try:
            on_progress(progress)
        except EndPhase:
            enough = torch.ones(())
        # A watcher may look at a clock, or be in the first process only.
        if bool(ranks.led(enough)[0]):
            raise EndPhase

    return told
