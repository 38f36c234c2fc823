"""Results in, pictures out. Nothing here computes."""

from winnowgp.plots.calibration import draw_calibration
from winnowgp.plots.classes_2d import ClassMap, draw_classes_2d
from winnowgp.plots.effects import draw_effect, draw_effects
from winnowgp.plots.frontier import draw_frontier
from winnowgp.plots.illustration import draw_illustration
from winnowgp.plots.inclusion import draw_inclusion
from winnowgp.plots.latent_frames import saved_frames
from winnowgp.plots.latent_map import LatentMap, draw_latent_map
from winnowgp.plots.layers_1d import DensityMap, draw_density, draw_layer_sizes
from winnowgp.plots.posterior_1d import Curve, draw_curve, draw_posterior_1d
from winnowgp.plots.size_panel import ChosenSizes, SizePanel, draw_size_panel
from winnowgp.plots.style import COLOURS, PROCEDURES, saved, styled
from winnowgp.plots.surface_2d import Surface, draw_surface_2d
from winnowgp.plots.trace import draw_trace
from winnowgp.plots.tradeoff import Tradeoff, draw_tradeoff
from winnowgp.plots.trajectory import Trajectory, draw_trajectories

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
