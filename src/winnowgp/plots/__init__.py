"""Results in, pictures out. Nothing here computes."""

from winnowgp.plots.classes_2d import ClassMap, draw_classes_2d
from winnowgp.plots.illustration import draw_illustration
from winnowgp.plots.latent_frames import saved_frames
from winnowgp.plots.latent_map import LatentMap, draw_latent_map
from winnowgp.plots.posterior_1d import draw_posterior_1d
from winnowgp.plots.style import COLOURS, saved, styled

__all__ = [
    "COLOURS",
    "ClassMap",
    "LatentMap",
    "draw_classes_2d",
    "draw_illustration",
    "draw_latent_map",
    "draw_posterior_1d",
    "saved",
    "saved_frames",
    "styled",
]
