"""Results in, pictures out. Nothing here computes."""

from winnowgp.plots.calibration import draw_calibration
from winnowgp.plots.classes_2d import ClassMap, draw_classes_2d
from winnowgp.plots.effects import draw_effect, draw_effects
from winnowgp.plots.frontier import draw_frontier
from winnowgp.plots.illustration import draw_illustration
from winnowgp.plots.inclusion import draw_inclusion
from winnowgp.plots.posterior_1d import draw_posterior_1d
from winnowgp.plots.style import COLOURS, saved, styled
from winnowgp.plots.trace import draw_trace

__all__ = [
    "COLOURS",
    "ClassMap",
    "draw_calibration",
    "draw_classes_2d",
    "draw_effect",
    "draw_effects",
    "draw_frontier",
    "draw_illustration",
    "draw_inclusion",
    "draw_posterior_1d",
    "draw_trace",
    "saved",
    "styled",
]
