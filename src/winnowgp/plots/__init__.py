"""Results in, pictures out. Nothing here computes."""

from winnowgp.plots.classes_2d import ClassMap, draw_classes_2d
from winnowgp.plots.illustration import draw_illustration
from winnowgp.plots.posterior_1d import draw_posterior_1d
from winnowgp.plots.style import COLOURS, saved, styled

__all__ = [
    "COLOURS",
    "ClassMap",
    "draw_classes_2d",
    "draw_illustration",
    "draw_posterior_1d",
    "saved",
    "styled",
]
