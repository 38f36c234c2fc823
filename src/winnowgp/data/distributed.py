"""The process group: the processes that compute one fit together, over `torch.distributed`.

Every exchange between processes goes through `ProcessGroup`. With one process its methods return
what they are given and communicate nothing, so callers need no special case.
"""

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
    """This process and the number of processes that compute together.

    >>> SINGLE_PROCESS.all_gather("a")
    ['a']
    """

    rank: int
    """Number of this process, from 0."""
    world_size: int
    """Number of processes."""

    @classmethod
    def from_environment(cls) -> "ProcessGroup":
        """Return the rank and world size that `torchrun` set, or those of a single process.

        Nothing is initialised: the processes may not be connected yet.
        """
        environ = os.environ
        if not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= environ.keys():
            return SINGLE_PROCESS
        return cls(int(environ["RANK"]), int(environ["WORLD_SIZE"]))

    @classmethod
    def initialise(cls, device: torch.device | None = None) -> "ProcessGroup":
        """Connect the processes that `torchrun` started, unless they are connected already.

        Args:
            device: device of the fit. Processes on GPUs communicate by NCCL, others by gloo.

        Raises:
            InputError: `device` is a GPU and a machine has fewer GPUs than processes.
        """
        if not dist.is_initialized():
            launched = cls.from_environment()
            if launched.world_size == 1:
                return launched
            gpu = device is not None and device.type == "cuda"
            if gpu:
                # NCCL does not allow two processes on one GPU.
                torch.cuda.set_device(_local_gpu())
            backend = "cpu:gloo,cuda:nccl" if gpu else "gloo"
            dist.init_process_group(backend, **_rendezvous())
        return cls(dist.get_rank(), dist.get_world_size())

    @property
    def is_first(self) -> bool:
        """Whether this process has rank 0: it writes files and decides for all."""
        return self.rank == 0

    def all_reduce(self, *sums: Tensor) -> tuple[Tensor, ...]:
        """Return the sums of these tensors over all processes, the same digits in each process.

        If the world size is a power of two, processes add up in pairs, in the order of
        `bounds.row_blocks.pairwise_sum`; the result then has the digits of a single process. A
        different order of summation would change the last digits, and L-BFGS amplifies those to
        about 1e-5 by the end of a fit.
        """
        return self._exchanged(sums, self._summed)

    def broadcast(self, *values: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors of the first process.

        Processes on different hardware round differently. If each decided by its own numbers, they
        would eventually take different branches and wait for each other forever.
        """
        return self._exchanged(values, _broadcast_tensor)

    def broadcast_object(self, value: Value, *, rank: int = 0) -> Value:
        """Return the value of one process, for example a random seed or a time."""
        if self.world_size == 1:
            return value
        values: list[Any] = [value]
        with _lost_process_errors():
            dist.broadcast_object_list(values, src=rank)
        return values[0]

    def broadcast_result(self, compute: Callable[[], Value], *, rank: int = 0) -> Value:
        """Call `compute` in one process only, the first by default, and return its result in all.

        An exception that it raises is raised in all processes.
        """
        result: list[Value] = []
        error: Exception | None = None
        if self.rank == rank:
            try:
                result.append(compute())
            except Exception as raised:  # the others wait for its result, or its error
                error = raised
        result, remote_error = self.broadcast_object(
            (result, None if error is None else _picklable_error(error)), rank=rank
        )
        if error is not None:
            raise error
        if remote_error is not None:
            raise remote_error
        return result[0]

    def all_gather(self, value: Value) -> list[Value]:
        """Return the values of all processes, in the order of their ranks."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        with _lost_process_errors():
            dist.all_gather_object(values, value)
        return values

    def _exchanged(
        self, values: tuple[Tensor, ...], exchange: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, ...]:
        """Exchange tensors of any devices and dtypes in one message."""
        if self.world_size == 1 or not values:
            return values
        flat = torch.cat([value.detach().reshape(-1) for value in values])
        flat = _on_backend_device(flat)
        with _lost_process_errors():
            flat = exchange(flat)
        pairs = zip(flat.split([value.numel() for value in values]), values, strict=True)
        # Copies: views into the message are aligned differently, and so rounded differently.
        return tuple(new.reshape(old.shape).to(old, copy=True) for new, old in pairs)

    def _summed(self, own: Tensor) -> Tensor:
        if self.world_size & (self.world_size - 1):
            dist.all_reduce(own)
            return own
        # Recursive doubling: partners at distance 1, 2, 4, … exchange what they have summed.
        distance = 1
        while distance < self.world_size:
            received, partner = torch.empty_like(own), self.rank ^ distance
            messages = [
                dist.P2POp(dist.isend, own, partner),
                dist.P2POp(dist.irecv, received, partner),
            ]
            for request in dist.batch_isend_irecv(messages):
                request.wait()
            own, distance = own + received, 2 * distance
        return own


SINGLE_PROCESS = ProcessGroup(rank=0, world_size=1)
"""The group of a process that computes alone."""


def _local_gpu() -> int:
    """Return the number of this process's GPU on its machine."""
    number, gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if number >= gpus:
        raise InputError(
            f"each process needs a GPU of its own; got {gpus} for process {number + 1} of this "
            f"machine. Start torchrun with `--nproc-per-node {gpus}`."
        )
    return number


def _rendezvous() -> dict[str, Any]:
    """Return arguments of `init_process_group` that separate restarts from each other.

    After a restart torchrun's store still has the addresses of processes that were killed, and new
    processes may wait for those forever (PyTorch 2.5 and later). On one machine the number of the
    attempt tells them apart; on several it is not the same everywhere, and torchrun makes a new
    store each time if TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1.
    """
    environ = os.environ
    agent_store = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not agent_store or environ.get("GROUP_WORLD_SIZE") != "1":
        return {}
    # Imported here: absent from a PyTorch that was built without `torch.distributed`.
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    store = TCPStore(environ["MASTER_ADDR"], int(environ["MASTER_PORT"]), is_master=False)
    attempt = environ["TORCHELASTIC_RESTART_COUNT"]
    return {
        "store": PrefixStore(f"winnowgp {attempt}", store),
        "rank": int(environ["RANK"]),
        "world_size": int(environ["WORLD_SIZE"]),
    }


def _broadcast_tensor(own: Tensor) -> Tensor:
    dist.broadcast(own, 0)
    return own


def _picklable_error(error: Exception) -> Exception:
    """Return the error, or a `LostProcessError` with its message if it cannot be pickled."""
    try:
        if isinstance(pickle.loads(pickle.dumps(error)), type(error)):
            return error
    except Exception:
        # Unpickling calls the constructor of a class we do not know, which may raise anything.
        pass
    return LostProcessError(f"another process has failed: {type(error).__name__}: {error}")


@contextmanager
def _lost_process_errors() -> Iterator[None]:
    """Raise errors of `torch.distributed` as `LostProcessError`."""
    try:
        yield
    except RuntimeError as error:
        raise LostProcessError(
            "another process of this fit has ended or does not respond; its own output shows the "
            f"reason ({str(error).splitlines()[0]})."
        ) from error


def _on_backend_device(flat: Tensor) -> Tensor:
    """Move a message to a device that the backend sends from: gloo the CPU, NCCL a GPU."""
    backends = dist.get_backend_config()
    if "nccl" not in backends:
        return flat.cpu()
    return flat if "gloo" in backends else flat.cuda()
