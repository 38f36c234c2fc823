"""Matplotlib figures of fitted models and of the selection of inducing points.

Functions named `draw_*` draw on the axes they are given and compute nothing.
"""

from winnowgp.plots.latent import LatentMap, draw_latent_map, save_animation
from winnowgp.plots.predictions import (
    ClassMap,
    Curve,
    Surface,
    draw_calibration,
    draw_classes_2d,
    draw_effects,
    draw_posterior_1d,
    draw_surface_2d,
)
from winnowgp.plots.selection import draw_frontier, draw_inclusion, draw_trace
from winnowgp.plots.style import save_figure, styled

__all__ = [
    "ClassMap",
    "Curve",
    "LatentMap",
    "Surface",
    "draw_calibration",
    "draw_classes_2d",
    "draw_effects",
    "draw_frontier",
    "draw_inclusion",
    "draw_latent_map",
    "draw_posterior_1d",
    "draw_surface_2d",
    "draw_trace",
    "save_animation",
    "save_figure",
    "styled",
]
