"""Save and load: one file, tensors and JSON, nothing executed."""

from winnowgp.io.format import (
    FORMAT_VERSION,
    Packed,
    Packing,
    State,
    packed_state,
    read_packed,
    state_from,
    write_packed,
    written_whole,
)
from winnowgp.io.models import load, save

__all__ = [
    "FORMAT_VERSION",
    "Packed",
    "Packing",
    "State",
    "load",
    "packed_state",
    "read_packed",
    "save",
    "state_from",
    "write_packed",
    "written_whole",
]
