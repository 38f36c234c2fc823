"""Matplotlib figures of fitted models and of the selection of inducing points.

Functions named `draw_*` draw on the axes they are given and compute nothing.
"""

from winnowgp.plots.predictions import (
    Curve,
    draw_effects,
    draw_importance,
    draw_posterior_1d,
    draw_processes,
)
from winnowgp.plots.selection import (
    draw_allocations,
    draw_frontier,
    draw_inclusion,
    draw_mixing,
)
from winnowgp.plots.streams import (
    StreamFrame,
    draw_point_history,
    draw_stream,
    draw_stream_frame,
    save_stream_animation,
)

__all__ = [
    "Curve",
    "StreamFrame",
    "draw_allocations",
    "draw_effects",
    "draw_frontier",
    "draw_importance",
    "draw_inclusion",
    "draw_mixing",
    "draw_point_history",
    "draw_posterior_1d",
    "draw_processes",
    "draw_stream",
    "draw_stream_frame",
    "save_stream_animation",
]
