"""The processes that work on one fit together."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from winnowgp.errors import LostProcessError

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among those that work together on PyTorch's engine, `torch.distributed`.

    >>> Ranks.alone()
    Ranks(rank=0, of=1)
    """

    rank: int
    """Its number, from 0."""
    of: int
    """How many there are."""

    @classmethod
    def alone(cls) -> "Ranks":
        """One process."""
        return cls(0, 1)

    @classmethod
    def started(cls, device: torch.device | None = None) -> "Ranks":
        """Those that `torchrun` started, introduced to each other; one without it.

        By gloo, or NCCL for a fit on GPUs, unless the caller has already introduced them.
        """
        if not dist.is_initialized():
            if not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys():
                return cls.alone()
            gpu = device is not None and device.type == "cuda"
            if gpu:
                # Processes of one machine must not meet on one card.
                torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
            engine = "cpu:gloo,cuda:nccl" if gpu else "gloo"
            dist.init_process_group(engine, **_meeting_place())
        return cls(dist.get_rank(), dist.get_world_size())

    @property
    def first(self) -> bool:
        """Whether this is the process that writes and speaks for all."""
        return self.rank == 0

    def total(self, *sums: Tensor) -> tuple[Tensor, ...]:
        """Sums over all processes, the same digits in each.

        A power of two of them add up in pairs, so that the digits are those of
        `bounds.pairwise_sum` in one process.
        """
        if self.of == 1 or not sums:
            return sums
        flat = torch.cat([part.reshape(-1) for part in sums])
        place, dtype = flat.device, flat.dtype
        flat = _sendable(flat)
        with _heard():
            if self.of & (self.of - 1):
                dist.all_reduce(flat)
            else:
                flat = self._paired(flat)
        parts = flat.to(device=place, dtype=dtype).split([part.numel() for part in sums])
        return tuple(new.reshape(old.shape) for new, old in zip(parts, sums, strict=True))

    def agreed(self, value: Value) -> Value:
        """That of the first process, for what a clock or chance decides."""
        if self.of == 1:
            return value
        held: list[Any] = [value]
        with _heard():
            dist.broadcast_object_list(held)
        return held[0]

    def decided(self, compute: Callable[[], Value]) -> Value:
        """What `compute` gives the first process; it is not called in the others.

        An error that it raises there is raised in all.
        """
        value, error = None, None
        if self.first:
            try:
                value = compute()
            except Exception as raised:
                error = raised
        value, error = self.agreed((value, error))
        if error is not None:
            raise error
        return value  # pyright: ignore[reportReturnType]

    def gathered(self, value: Value) -> list[Value]:
        """That of every process, in order."""
        if self.of == 1:
            return [value]
        held: list[Any] = [None] * self.of
        with _heard():
            dist.all_gather_object(held, value)
        return held

    def _paired(self, mine: Tensor) -> Tensor:
        distance = 1
        while distance < self.of:
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
    """On the device that the engine talks through."""
    return flat if "nccl" in dist.get_backend_config() else flat.cpu()
