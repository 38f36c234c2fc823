"""Which rows a fit is of, in things that its checkpoint can tell apart."""

from typing import Any

import torch

from winnowgp.data import Source, StandardisedSource, standardised

FIRST = 1000


def row_identity(data: Source, *, kept: bool) -> dict[str, Any]:
    """The rows themselves where they are in memory; else their number, the first ones, and units.

    Means and deviations of all columns depend on all rows: those of a standardised source are
    known, others are found in a pass over it. Nothing is read for a fit that nobody could take for
    another one.

    Args:
        kept: whether the fit has a checkpoint, which may be that of other rows.
    """
    held = data.held()
    if held is not None:
        return {"inputs": held.X, "targets": held.Y, "weights": held.weights}
    if not kept and data.ranks.of == 1:
        return {"rows": data.N}
    first = data.part(torch.arange(min(data.N, FIRST)))
    if kept and not isinstance(data, StandardisedSource):
        data = standardised(data)
    units = (data.x_units, data.y_units) if isinstance(data, StandardisedSource) else ()
    return {"rows": data.N, "inputs": first.X, "targets": first.Y, "weights": None, "units": units}
