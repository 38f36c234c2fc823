"""The stages of a fit, and how a fit that was stopped goes on.

A fit is determined by its data, model, plan and seed. Run again from its beginning it meets the
same long loops, its stages, in the same order. One that had ended is not run again: what it left
behind is put in its place. The one under way goes on from where it was saved last. What lies
between stages takes little time, and is computed again.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from time import monotonic
from typing import Any, TypeVar, final

import torch
from torch import Tensor

from winnowgp.data import Ranks
from winnowgp.errors import CheckpointError, CheckpointWarning
from winnowgp.io import State
from winnowgp.training.fingerprint import digest
from winnowgp.training.stateful import Randomness, Remembered, Stateful

Value = TypeVar("Value")
_ALONE = Ranks.alone()


@final
class Stage:
    """One long loop: to be run, gone on with, or skipped if `ended`.

    Its memory already stands where it was left.
    """

    def __init__(
        self,
        journal: "Journal",
        *,
        kept: Mapping[str, Stateful],
        scratch: Mapping[str, Stateful],
        start: Sequence[Tensor],
    ) -> None:
        self._journal, self._kept, self._scratch = journal, kept, scratch
        self._number, found = journal.next_entry()
        self._start = digest(start) if journal.kept else ""
        self.ended = found is not None and found["ended"]
        """Whether there is nothing left to do."""
        if found is not None:
            self._restore(found)

    def save(self) -> None:
        """Write the memory down, if it is time to; between two steps."""
        if self._journal.due():
            self._record(ended=False)
            self._journal.write()

    def end(self) -> None:
        """The loop is over: from now on it is skipped, and only what is kept is remembered."""
        if self._journal.kept and not self.ended:
            self._record(ended=True)
            self.ended = True
            if self._journal.due():
                self._journal.write()

    def _record(self, *, ended: bool) -> None:
        parts = self._kept if ended else {**self._kept, **self._scratch}
        memory = {name: _copied(part.state_dict()) for name, part in parts.items()}
        entry = {"ended": ended, "start": self._start, "memory": memory}
        self._journal.put(self._number, entry)

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
class Journal:
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
        watcher: object = None,
        heading: Mapping[str, str] | None = None,
        entries: Mapping[int, State] | None = None,
        finished: bool = False,
        ranks: Ranks = _ALONE,
    ) -> None:
        self._finished, self.ranks = finished, ranks
        self._write, self._every, self._heading = write, every, dict(heading or {})
        self._generator, self._entries = generator, dict(entries or {})
        self._always: dict[str, Stateful] = {"watcher": Remembered(watcher)}
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
        if self.ranks.of > 1:
            for own, first in zip(start, self.ranks.led(*start), strict=True):
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
        value = self.ranks.decided(compute)
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


UNKEPT = Journal()
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
