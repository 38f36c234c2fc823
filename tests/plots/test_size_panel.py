import numpy as np
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure

from winnowgp.plots import ChosenSizes, SizePanel, Trajectory, draw_size_panel, draw_trajectories


def test_a_panel_shows_curve_line_and_dots() -> None:
    chosen = ChosenSizes("chosen", "#ff0000", 12.5, [11, 13, 14], [-3.0, -2.5, -2.0])
    panel = SizePanel("title", [10, 20], [-4, -1], [-5, -2], [-3, 0], "by hand", [chosen])
    ax = Figure().subplots()
    draw_size_panel(panel, ax=ax)
    curve, line = ax.lines
    assert np.asarray(curve.get_ydata()).tolist() == [-4, -1]
    assert np.asarray(line.get_xdata()).tolist() == [12.5, 12.5]
    (dots,) = [c for c in ax.collections if isinstance(c, PathCollection)]
    assert np.asarray(dots.get_offsets()).tolist() == [[11, -3.0], [13, -2.5], [14, -2.0]]
    assert ax.get_title(loc="left") or ax.get_title()


def test_trajectories_have_a_line_and_a_band_each() -> None:
    lines = [
        Trajectory("a", "#ff0000", [1, 2], [0, 1], [-1, 0], [1, 2]),
        Trajectory("b", "#00ff00", [1, 3], [5, 6], [5, 6], [5, 6], dashed=True),
    ]
    ax = Figure().subplots()
    draw_trajectories(lines, ax=ax)
    assert [np.asarray(line.get_xdata()).tolist() for line in ax.lines] == [[1, 2], [1, 3]]
    assert [line.get_linestyle() for line in ax.lines] == ["-", "--"]
    assert len(ax.collections) == 2
