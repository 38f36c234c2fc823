"""The budget of a fit: floating-point operations and, on request, seconds.

Operations decide by default, so that the same seed gives the same fit on a busy machine.
"""

import os
from dataclasses import dataclass
from math import inf
from time import perf_counter
from typing import final

import torch

from winnowgp.bounds.row_blocks import free_memory
from winnowgp.data import Dataset, Source
from winnowgp.models.base import InducingModel

# Operations of a default fit: minutes on two CPU cores, about a minute on a large GPU.
WORK = {"cpu": 8e12, "cuda": 1.5e15}
# Seconds that these operations stand for, where a clock limits the fit.
_SECONDS = {"cpu": 120.0, "cuda": 60.0}
# Share of a wall-clock limit after which no further search for hyper-parameters starts.
_SEARCH = 0.4
# Share of the work that the exact evidence may take, and the evaluations that it is divided by.
_EVIDENCE_SHARE, _EVALUATIONS = 0.4, 50
# Operations of one evaluation of the exact evidence and its gradient, divided by N³.
DENSE = 2.0
# Matrices of K by K that a selection among K candidates holds at once.
_MATRICES = 10


@final
@dataclass(slots=True)
class Budget:
    """Counts the work of a fit, and says which limit prevents more of it.

    Args:
        work: floating-point operations; the default of the device if None.
        seconds: wall-clock limit; none by default.
    """

    device: torch.device
    work: float | None = None
    seconds: float | None = None
    spent: float = 0.0
    _started: float = 0.0

    def __post_init__(self) -> None:
        self._started = perf_counter()
        if self.work is None:
            self.work = WORK.get(self.device.type, WORK["cpu"])
            if self.seconds is not None:
                # A user who sets a clock means the clock.
                self.work = inf

    @property
    def work_limit(self) -> float:
        """Operations of the whole fit; the default of the device where a clock limits it."""
        assert self.work is not None
        return self.work if self.work < inf else WORK.get(self.device.type, WORK["cpu"])

    def spend(self, operations: float) -> None:
        """Count operations."""
        self.spent += operations

    @property
    def remaining(self) -> float:
        """Operations that are left; estimated from the speed so far where a clock limits them."""
        assert self.work is not None
        left = self.work - self.spent
        if self.seconds is not None:
            elapsed = perf_counter() - self._started
            speed = max(self.spent, 1e9) / max(elapsed, 1e-3)
            left = min(left, (self.seconds - elapsed) * speed)
        return max(left, 0.0)

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the wall-clock limit, at least zero; None if there is none."""
        if self.seconds is None:
            return None
        return max(self.seconds - (perf_counter() - self._started), 0.0)

    def expired(self, share: float = 1.0) -> bool:
        """Return whether a share of the wall-clock limit has passed."""
        return self.seconds is not None and perf_counter() - self._started > share * self.seconds

    @property
    def search_expired(self) -> bool:
        """Whether the time for first searches of hyper-parameters has passed."""
        return self.expired(_SEARCH)

    def limit_of(self, operations: float, *, candidates: int = 0) -> str | None:
        """Return the name of the limit that prevents so many operations, or None.

        Args:
            candidates: number of candidates K; a selection holds several K × K matrices.
        """
        if 8 * _MATRICES * candidates**2 > memory(self.device):
            return "memory"
        if operations <= self.remaining:
            return None
        return "work" if self.seconds is None else "max_fit_seconds"

    def dense_rows(self, cost: float = 1.0) -> int:
        """Return the number of rows whose exact evidence can be maximised within its share.

        Args:
            cost: cost of an evaluation relative to Gaussian noise.
        """
        assert self.work is not None
        total = self.work
        if self.seconds is not None:
            device = self.device.type if self.device.type in WORK else "cpu"
            total = min(self.remaining, WORK[device] * min(self.seconds / _SECONDS[device], 1.0))
        each = _EVIDENCE_SHARE * total / (_EVALUATIONS * DENSE * cost)
        fits = (memory(self.device) / (8 * 5)) ** 0.5
        return int(min(each ** (1 / 3), fits))


def memory(device: torch.device) -> float:
    """Return the bytes that a fit may use: half of the free ones of a GPU or of the machine."""
    if device.type == "cuda":
        return 0.5 * free_memory(device)
    try:
        return 0.5 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return 4e9


def dense_work(model: InducingModel, data: Dataset) -> float:
    """Return the operations of the exact evidence of some rows and its gradient."""
    return DENSE * data.N**3 * model.noise_terms(data)


def selection_work(model: InducingModel, data: Source, K: int) -> float:
    """Return the operations of one selection among K candidates: statistics and elimination."""
    return 3.0 * data.N * K**2 + 12.0 * model.noise_terms(data) * K**3
