from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.contour import QuadContourSet
from matplotlib.dates import ConciseDateFormatter
from matplotlib.figure import Figure

from helpers.figures import scattered
from winnowgp.plots import (
    Curve,
    draw_effects,
    draw_importance,
    draw_posterior_1d,
    draw_processes,
)
from winnowgp.plots.predictions import (
    ClassMap,
    Surface,
    draw_calibration,
    draw_classes_2d,
    draw_surface_2d,
)
from winnowgp.plots.style import save_figure


def test_draw_posterior_1d_shows_data_mean_and_inducing_points() -> None:
    grid = torch.linspace(0, 1, 5)
    curve = Curve(grid, 2 * grid, 0.1 + 0 * grid, grid[1:3], 2 * grid[1:3])
    ax = draw_posterior_1d(curve, grid[:2], grid[3:], ax=Figure().subplots())
    data, points = scattered(ax)
    np.testing.assert_allclose(data, [[0.0, 0.75], [0.25, 1.0]])
    np.testing.assert_allclose(points, [[0.25, 0.5], [0.5, 1.0]])
    assert np.asarray(ax.lines[0].get_ydata()).tolist() == (2 * grid).tolist()


def test_draw_calibration_shows_pairs_and_diagonal() -> None:
    pairs = [(0.5, 0.4), (0.9, 0.8)]
    ax = draw_calibration(pairs, kind="class", ax=Figure().subplots())
    diagonal, model = (np.asarray(line.get_xydata()).tolist() for line in ax.lines)
    assert diagonal == [[0, 0], [1, 1]]
    assert model == [list(pair) for pair in pairs]
    assert ax.get_xlabel() == "predicted probability"


def test_save_figure_failure_leaves_no_file(tmp_path: Path) -> None:
    path = save_figure(Figure(), tmp_path / "a.png")
    assert path.read_bytes().startswith(b"\x89PNG")

    class Breaks(Figure):
        def savefig(self, *args, **kwargs) -> None:
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        save_figure(Breaks(), tmp_path / "b.png")
    assert [p.name for p in tmp_path.iterdir()] == ["a.png"]


def test_draw_classes_2d_shows_boundary_and_points() -> None:
    x = torch.linspace(0, 1, 6)
    probability = x.expand(4, 6)
    classes = ClassMap(x, x[:4], probability, idle=torch.rand(3, 2), points=torch.rand(2, 2))
    ax = Figure().subplots()
    draw_classes_2d(classes, torch.rand(10, 2), torch.arange(10) % 2, ax=ax)
    labels = [collection.get_label() for collection in ax.collections]
    assert "3 candidates not selected" in labels
    assert "2 inducing points" in labels
    boundary = [c for c in ax.collections if isinstance(c, QuadContourSet)]
    assert [list(c.levels) for c in boundary] == [[0.5]]


@pytest.mark.parametrize("N", [0, 9])
def test_draw_surface_2d_shows_contours_rows_and_points(N: int) -> None:
    x, y = torch.linspace(0, 1, 6), torch.linspace(5, 7, 4)
    surface = Surface(x, y, mean=x.expand(4, 6) + y[:, None], points=torch.rand(3, 2))
    ax = Figure().subplots()
    # A target far above the mean must extend the colour scale.
    targets = torch.linspace(5, 20, N)
    draw_surface_2d(surface, torch.rand(N, 2), targets, ax=ax)
    contours, *_, points = ax.collections
    assert isinstance(contours, QuadContourSet)
    assert contours.get_clim() == (5.0, 20.0 if N else 8.0)
    assert "3 inducing points" in str(points.get_label())
    assert np.shape(points.get_offsets()) == (3, 2)
    rows = [c for c in ax.collections if c.get_label() == "data"]
    assert [np.shape(c.get_offsets()) for c in rows] == ([(N, 2)] if N else [])
    assert all(c.get_clim() == contours.get_clim() for c in rows)


EFFECT = {
    "column": "a name that is much too long for the axis of a panel",
    "kind": "number",
    "at": [0.0, 1.0, 2.0],
    "curves": [{"label": "", "mean": [1, 2, 3], "lower": [0, 1, 2], "upper": [2, 3, 4]}],
    "counts": [3, 0, 1, 6],
    "term": "",
    "note": "",
}


def test_draw_effects_shows_density_and_shortens_labels() -> None:
    categorical = {**EFFECT, "kind": "category", "at": ["a", "b" * 30, "c"], "counts": [5, 2, 1]}
    term = {**EFFECT, "term": "periodic", "note": "the last 3 of 9 days are shown", "kind": "date"}
    figure = draw_effects([EFFECT, categorical, term], target="height")
    axes: Any = figure.axes
    first, second, third = axes
    heights = [bar.get_height() for bar in first.containers[0]]
    np.testing.assert_allclose(heights, np.array([3, 0, 1, 6]) / 36)
    assert len(second.containers[-1]) == 3
    assert first.get_xlabel().endswith("…")
    assert len(first.get_xlabel()) == 34
    assert second.get_xticklabels()[1].get_text() == "b" * 13 + "…"
    assert third.get_title(loc="left") == "periodic"
    assert "(the last 3 of 9 days are shown)" in third.get_xlabel()
    assert isinstance(third.xaxis.get_major_formatter(), ConciseDateFormatter)


def test_draw_importance_shows_two_standard_errors() -> None:
    columns = [
        {"column": "x", "loss": 0.8, "standard_error": 0.1},
        {"column": "u", "loss": 0.0, "standard_error": 0.02},
    ]
    importance = {"measure": "R²", "rows": 30, "columns": columns}
    ax: Any = draw_importance(importance, ax=Figure().subplots())
    assert [bar.get_width() for bar in ax.patches] == [0.8, 0.0]
    (errors,) = (c for c in ax.collections)
    ends = [segment[:, 0].tolist() for segment in errors.get_segments()]
    np.testing.assert_allclose(ends, [[0.6, 1.0], [-0.04, 0.04]])
    assert ax.get_xlabel() == "loss of R²"


def test_draw_processes_has_a_curve_a_band_and_marks_for_each() -> None:
    x = np.linspace(0, 1, 5)
    mean, sd = np.column_stack([x, 1 - x]), np.full((5, 2), 0.1)
    ax = draw_processes(
        x, mean, sd, [np.array([0.2]), np.array([0.1, 0.9])], ax=Figure().subplots()
    )
    curves = [np.asarray(line.get_xydata())[:, 1] for line in ax.lines]
    np.testing.assert_allclose(curves, mean.T)
    marks = [np.asarray(each.get_offsets()) for each in ax.collections]
    marks = [each for each in marks if len(each) < 3 and each[0, 1] < -0.2]
    assert [each[:, 0].tolist() for each in marks] == [[0.2], [0.1, 0.9]]
    assert marks[0][0, 1] != marks[1][0, 1]
    _, labels = ax.get_legend_handles_labels()
    assert labels == ["process 1: 1 inducing point", "process 2: 2 inducing points"]
