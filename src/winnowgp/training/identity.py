"""Which rows a fit is of, in things that its checkpoint can tell apart."""

from typing import Any

import torch

from winnowgp.data import Source, StandardisedSource

_ROWS = 1000


def identity(data: Source) -> dict[str, Any]:
    """The rows themselves where they are in memory; else their number, the first ones, and units.

    The units of a standardised source depend on all of its rows.
    """
    held = data.held()
    if held is not None:
        return {"inputs": held.X, "targets": held.Y, "weights": held.weights}
    first = data.part(torch.arange(min(data.N, _ROWS)))
    units = (data.x_units, data.y_units) if isinstance(data, StandardisedSource) else ()
    return {"rows": data.N, "inputs": first.X, "targets": first.Y, "weights": None, "units": units}
