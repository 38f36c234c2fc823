"""How a kind of thing goes into a file and comes out again."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from winnowgp.io.packed import Packed


@dataclass(frozen=True, slots=True)
class Packing:
    """Two functions that undo each other.

    A new model becomes saveable by a pair of these and a line in `winnowgp.io.save`.
    """

    pack: Callable[[Any], Packed]
    unpack: Callable[[Packed], Any]
