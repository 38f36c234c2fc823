"""Results in, pictures out. Nothing here computes."""

from winnowgp.plots.latent import LatentMap, draw_latent_map, saved_frames
from winnowgp.plots.paper import (
    ChosenSizes,
    DensityMap,
    SizePanel,
    Tradeoff,
    Trajectory,
    draw_density,
    draw_illustration,
    draw_layer_sizes,
    draw_size_panel,
    draw_tradeoff,
    draw_trajectories,
)
from winnowgp.plots.regression import (
    ClassMap,
    Curve,
    Surface,
    draw_calibration,
    draw_classes_2d,
    draw_curve,
    draw_effect,
    draw_effects,
    draw_posterior_1d,
    draw_surface_2d,
)
from winnowgp.plots.selections import draw_frontier, draw_inclusion, draw_trace
from winnowgp.plots.style import COLOURS, PROCEDURES, saved, styled

__all__ = [
    "COLOURS",
    "PROCEDURES",
    "ChosenSizes",
    "ClassMap",
    "Curve",
    "DensityMap",
    "LatentMap",
    "SizePanel",
    "Surface",
    "Tradeoff",
    "Trajectory",
    "draw_calibration",
    "draw_classes_2d",
    "draw_curve",
    "draw_density",
    "draw_effect",
    "draw_effects",
    "draw_frontier",
    "draw_illustration",
    "draw_inclusion",
    "draw_latent_map",
    "draw_layer_sizes",
    "draw_posterior_1d",
    "draw_size_panel",
    "draw_surface_2d",
    "draw_trace",
    "draw_tradeoff",
    "draw_trajectories",
    "saved",
    "saved_frames",
    "styled",
]
