"""A source that is another one, seen differently."""

from dataclasses import dataclass

import torch

from winnowgp.data.source import Source


@dataclass(frozen=True, slots=True)
class WrappedSource(Source):
    """As many rows and columns as another source has; its children say how they are read."""

    source: Source

    @property
    def N(self) -> int:
        return self.source.N

    @property
    def D(self) -> int:
        return self.source.D

    @property
    def P(self) -> int:
        return self.source.P

    @property
    def dtype(self) -> torch.dtype:
        return self.source.dtype

    @property
    def device(self) -> torch.device:
        return self.source.device

    @property
    def names(self) -> tuple[str, ...] | None:
        return self.source.names

    @property
    def observations(self) -> int | float:
        return self.source.observations
