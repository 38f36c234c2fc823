"""The course of a fit: what all of its phases share besides a model and data."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, final

import torch

from winnowgp.training.checkpoint import Checkpoint
from winnowgp.training.journal import UNKEPT, Journal
from winnowgp.training.opened import opened
from winnowgp.training.progress import EndPhase

Told = TypeVar("Told")
"""What a watcher is told: `Progress` or `DeepProgress`."""


@final
@dataclass(frozen=True, slots=True)
class Course(Generic[Told]):
    """Where a fit's randomness comes from, who watches it, and where it is written down."""

    generator: torch.Generator
    on_progress: Callable[[Told], None]
    journal: Journal = UNKEPT

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
    **parts: Any,
) -> Iterator[Course[Any]]:
    """The course of a piece of work, which has ended once the block is left without an error.

    Args:
        checkpoint: where it is written down, if anywhere.
        name: of the file in the checkpoint's folder.
        parts: all that the result depends on, besides the generator.
    """
    journal = opened(checkpoint, name, generator=generator, watcher=on_progress, **parts)
    yield Course(generator, on_progress, journal)
    journal.finish()
