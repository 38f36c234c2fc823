from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.contour import QuadContourSet
from matplotlib.figure import Figure

from winnowgp.plots import (
    ClassMap,
    Surface,
    draw_classes_2d,
    draw_illustration,
    draw_surface_2d,
    saved,
)
from winnowgp.plots.paper import Illustration, Midway
from winnowgp.plots.regression import Curve


def illustration() -> Illustration:
    grid = torch.linspace(0, 1, 5)
    curve = Curve(grid, grid, 0.1 + 0 * grid, grid[:3], grid[:3])
    draws = torch.tensor([[True, False], [False, False], [True, True]])
    midway = Midway(7, grid[:2], torch.tensor([0.2, 0.9]), draws)
    return Illustration(grid, grid, curve, midway, curve)


def test_the_illustration_shows_what_it_was_given() -> None:
    left, top, bottom, right = draw_illustration(illustration()).axes
    assert left.get_title(loc="left") == "(a) all candidates"
    assert "after 7 steps" in top.get_title(loc="left")
    assert [t.get_text() for t in bottom.get_yticklabels()] == ["1 points", "0 points", "2 points"]
    legend = right.get_legend()
    assert legend is not None
    assert any("3 inducing points" in t.get_text() for t in legend.get_texts())


def test_a_picture_is_saved_whole_or_not_at_all(tmp_path: Path) -> None:
    path = saved(draw_illustration(illustration()), tmp_path / "a.png")
    assert path.read_bytes().startswith(b"\x89PNG")

    class Breaks(Figure):
        def savefig(self, *args, **kwargs) -> None:
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        saved(Breaks(), tmp_path / "b.png")
    assert [p.name for p in tmp_path.iterdir()] == ["a.png"]


def test_the_map_of_classes_shows_what_it_was_given() -> None:
    x = torch.linspace(0, 1, 6)
    probability = x.expand(4, 6)
    found = ClassMap(x, x[:4], probability, idle=torch.rand(3, 2), points=torch.rand(2, 2))
    ax = Figure().subplots()
    draw_classes_2d(found, torch.rand(10, 2), torch.arange(10) % 2, ax=ax)
    labels = [collection.get_label() for collection in ax.collections]
    assert "3 candidates not kept" in labels
    assert "2 inducing points" in labels
    boundary = [c for c in ax.collections if isinstance(c, QuadContourSet)]
    assert [list(c.levels) for c in boundary] == [[0.5]]


@pytest.mark.parametrize("N", [0, 9])
def test_a_surface_shows_what_it_was_given(N: int) -> None:
    x, y = torch.linspace(0, 1, 6), torch.linspace(5, 7, 4)
    found = Surface(x, y, mean=x.expand(4, 6) + y[:, None], points=torch.rand(3, 2))
    ax = Figure().subplots()
    # One row far above the mean: it must not be taken for one at the top of the surface.
    targets = torch.linspace(5, 20, N)
    draw_surface_2d(found, torch.rand(N, 2), targets, ax=ax)
    contours, *_, points = ax.collections
    assert isinstance(contours, QuadContourSet)
    assert contours.get_clim() == (5.0, 20.0 if N else 8.0)
    assert "3 inducing points" in str(points.get_label())
    assert np.shape(points.get_offsets()) == (3, 2)
    rows = [c for c in ax.collections if c.get_label() == "data"]
    assert [np.shape(c.get_offsets()) for c in rows] == ([(N, 2)] if N else [])
    assert all(c.get_clim() == contours.get_clim() for c in rows)
