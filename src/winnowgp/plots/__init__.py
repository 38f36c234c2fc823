"""Results in, pictures out. Nothing here computes."""

from winnowgp.plots.illustration import draw_illustration
from winnowgp.plots.posterior_1d import draw_posterior_1d
from winnowgp.plots.style import COLOURS, saved, styled

__all__ = ["COLOURS", "draw_illustration", "draw_posterior_1d", "saved", "styled"]
