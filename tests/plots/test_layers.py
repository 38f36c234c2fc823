import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure

from winnowgp.plots import (
    Curve,
    DensityMap,
    Tradeoff,
    draw_curve,
    draw_density,
    draw_layer_sizes,
    draw_tradeoff,
)


def axes() -> Axes:
    return Figure().subplots()


def dots(ax: Axes) -> list[np.ndarray]:
    """Places of all scattered points, one array a scatter."""
    found = [c for c in ax.collections if isinstance(c, PathCollection)]
    return [np.asarray(c.get_offsets()) for c in found]


def test_a_layer_shows_its_points_on_its_function() -> None:
    grid = torch.linspace(0, 1, 5)
    ax = draw_curve(Curve(grid, 2 * grid, 0.1 + 0 * grid, grid[1:3], 2 * grid[1:3]), ax=axes())
    (points,) = dots(ax)
    np.testing.assert_allclose(points, [[0.25, 0.5], [0.5, 1.0]])
    assert np.asarray(ax.lines[0].get_ydata()).tolist() == (2 * grid).tolist()


def test_a_density_shows_quantiles_and_data() -> None:
    x, y = torch.linspace(0, 1, 4), torch.linspace(-1, 1, 3)
    found = DensityMap(x, y, torch.rand(3, 4), x - 1, x + 1)
    ax = draw_density(found, x[:2], y[:2], ax=axes())
    assert np.asarray(ax.lines[0].get_ydata()).tolist() == (x - 1).tolist()
    assert np.asarray(ax.lines[1].get_ydata()).tolist() == (x + 1).tolist()
    np.testing.assert_allclose(dots(ax)[0], torch.stack([x[:2], y[:2]], 1).numpy())


def test_sizes_are_grouped_by_label_and_layer() -> None:
    sizes = {"weak": [(30, 40), (32, 44)], "strong": [(10, 12), (10, 14)]}
    ax = draw_layer_sizes(sizes, ax=axes())
    heights = [sorted(places[:, 1]) for places in dots(ax)]
    assert heights == [[30, 32], [10, 10], [40, 44], [12, 14]]
    assert [t.get_text() for t in ax.get_xticklabels()] == ["weak", "strong"]
    legend = ax.get_legend()
    assert legend is not None
    assert [t.get_text() for t in legend.get_texts()] == ["layer 1", "layer 2"]


def test_a_tradeoff_shows_the_grid_and_each_procedure() -> None:
    grid = Tradeoff("by hand", [1.0, 2.0], [0.1, 0.2], [])
    ours = Tradeoff("chosen", [1.5], [0.3], ["7, 9"])
    ax = draw_tradeoff(grid, [ours], ax=axes())
    np.testing.assert_allclose(dots(ax)[0], [[1.0, 0.1], [2.0, 0.2]])
    assert np.asarray(ax.lines[0].get_xydata()).tolist() == [[1.5, 0.3]]
    assert [t.get_text() for t in ax.texts] == ["7, 9"]
