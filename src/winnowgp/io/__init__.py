"""Save and load: one file, tensors and JSON, nothing executed."""

from winnowgp.io.model_file import FORMAT_VERSION, read_packed, write_packed
from winnowgp.io.packed import Packed
from winnowgp.io.packed_state import State, packed_state, state_from
from winnowgp.io.packing import Packing
from winnowgp.io.save import load, save
from winnowgp.io.written_whole import written_whole

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
