"""The processes that work on one fit together."""

import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from winnowgp.errors import InputError, LostProcessError

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class ProcessGroup:
    """This process among those that work together on PyTorch's engine, `torch.distributed`.

    >>> ProcessGroup.alone()
    ProcessGroup(rank=0, world_size=1)
    """

    rank: int
    """Its number, from 0."""
    world_size: int
    """How many there are."""

    @classmethod
    def alone(cls) -> "ProcessGroup":
        """One process."""
        return cls(0, 1)

    @classmethod
    def launched(cls) -> "ProcessGroup":
        """Those that `torchrun` started, not yet introduced to each other; one without it."""
        here = os.environ
        if not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= here.keys():
            return cls.alone()
        return cls(int(here["RANK"]), int(here["WORLD_SIZE"]))

    @classmethod
    def started(cls, device: torch.device | None = None) -> "ProcessGroup":
        """Those that `torchrun` started, introduced to each other; one without it.

        By gloo, or NCCL for a fit on GPUs, unless the caller has already introduced them.
        """
        if not dist.is_initialized():
            found = cls.launched()
            if found.world_size == 1:
                return found
            gpu = device is not None and device.type == "cuda"
            if gpu:
                # Processes of one machine must not meet on one card.
                torch.cuda.set_device(_own_card())
            engine = "cpu:gloo,cuda:nccl" if gpu else "gloo"
            dist.init_process_group(engine, **_meeting_place())
        return cls(dist.get_rank(), dist.get_world_size())

    @property
    def first(self) -> bool:
        """Whether this is the process that writes and speaks for all."""
        return self.rank == 0

    def all_reduce(self, *sums: Tensor) -> tuple[Tensor, ...]:
        """Sums over all processes, the same digits in each.

        A power of two of them add up in pairs, so that the digits are those of
        `bounds.pairwise_sum` in one process.
        """
        return self._exchanged(sums, self._summed)

    def broadcast(self, *values: Tensor) -> tuple[Tensor, ...]:
        """Those of the first process, for what another machine may round differently.

        Processes that decide by numbers which differ in their last digits part sooner or later, and
        then wait for each other in vain.
        """
        return self._exchanged(values, _of_first)

    def broadcast_object(self, value: Value) -> Value:
        """That of the first process, for what a clock or chance decides."""
        if self.world_size == 1:
            return value
        held: list[Any] = [value]
        with _heard():
            dist.broadcast_object_list(held)
        return held[0]

    def broadcast_result(self, compute: Callable[[], Value]) -> Value:
        """What `compute` gives the first process; it is not called in the others.

        An error that it raises there is raised in all.
        """
        found: list[Value] = []
        error: Exception | None = None
        if self.first:
            try:
                found.append(compute())
            except Exception as raised:
                error = raised
        found, told = self.broadcast_object(
            (found, None if error is None else _sendable_error(error))
        )
        if error is not None:
            raise error
        if told is not None:
            raise told
        return found[0]

    def all_gather(self, value: Value) -> list[Value]:
        """That of every process, in order."""
        if self.world_size == 1:
            return [value]
        held: list[Any] = [None] * self.world_size
        with _heard():
            dist.all_gather_object(held, value)
        return held

    def _exchanged(
        self, values: tuple[Tensor, ...], exchange: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, ...]:
        """In one message, whatever devices and dtypes they have."""
        if self.world_size == 1 or not values:
            return values
        flat = torch.cat([value.detach().reshape(-1) for value in values])
        flat = _sendable(flat)
        with _heard():
            flat = exchange(flat)
        parts = zip(flat.split([value.numel() for value in values]), values, strict=True)
        # Copies: where in a message a tensor lay must not decide how it is aligned, and so rounded.
        return tuple(new.reshape(old.shape).to(old, copy=True) for new, old in parts)

    def _summed(self, mine: Tensor) -> Tensor:
        if self.world_size & (self.world_size - 1):
            dist.all_reduce(mine)
            return mine
        return self._paired(mine)

    def _paired(self, mine: Tensor) -> Tensor:
        distance = 1
        while distance < self.world_size:
            theirs, partner = torch.empty_like(mine), self.rank ^ distance
            sent = [
                dist.P2POp(dist.isend, mine, partner),
                dist.P2POp(dist.irecv, theirs, partner),
            ]
            for request in dist.batch_isend_irecv(sent):
                request.wait()
            # a + b and b + a are the same number.
            mine, distance = mine + theirs, 2 * distance
        return mine


def _own_card() -> int:
    """The number of the GPU of this process, one of several on its machine."""
    number, cards = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if number >= cards:
        raise InputError(
            f"each process needs a GPU of its own; got {cards} for process {number + 1} of this "
            f"machine. Start torchrun with `--nproc-per-node {cards}`."
        )
    return number


def _meeting_place() -> dict[str, Any]:
    """Where processes leave their addresses: what the environment says, or a place for each try.

    After a restart torchrun's store still has the addresses of processes that were killed, and
    those that are new may wait for them for ever (PyTorch 2.5 and later). On one machine the number
    of the try tells them apart; on several it is not the same everywhere, and torchrun makes a new
    store each time if TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1.
    """
    here = os.environ
    agent = here.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not agent or here.get("GROUP_WORLD_SIZE") != "1":
        return {}
    # Not in a PyTorch that was built without its engine.
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    store = TCPStore(here["MASTER_ADDR"], int(here["MASTER_PORT"]), is_master=False)
    attempt = here["TORCHELASTIC_RESTART_COUNT"]
    return {
        "store": PrefixStore(f"winnowgp {attempt}", store),
        "rank": int(here["RANK"]),
        "world_size": int(here["WORLD_SIZE"]),
    }


def _of_first(mine: Tensor) -> Tensor:
    dist.broadcast(mine, 0)
    return mine


def _sendable_error(error: Exception) -> Exception:
    """The error, or one that says the same where others could not read it."""
    try:
        if isinstance(pickle.loads(pickle.dumps(error)), type(error)):
            return error
    except Exception:
        # Whatever an error of somebody else's needs to be made again.
        pass
    return LostProcessError(f"the first process has failed: {type(error).__name__}: {error}")


@contextmanager
def _heard() -> Iterator[None]:
    """Errors of the engine in our words."""
    try:
        yield
    except RuntimeError as error:
        raise LostProcessError(
            "another process that shares this fit has ended or does not answer; what it said last "
            f"is the reason ({str(error).splitlines()[0]})."
        ) from error


def _sendable(flat: Tensor) -> Tensor:
    """On a device that the engine talks through: gloo does from the CPU, NCCL from a GPU."""
    engines = dist.get_backend_config()
    if "nccl" not in engines:
        return flat.cpu()
    return flat if "gloo" in engines else flat.cuda()
