import numpy as np
import pytest
from matplotlib.figure import Figure

from helpers.figures import scattered
from winnowgp.plots import draw_frontier, draw_inclusion, draw_mixing
from winnowgp.plots.selection import draw_trace


def test_draw_frontier_shows_gap_per_observation() -> None:
    ax = draw_frontier([-30.0, -12.0, -10.0], 1, rows=2, ax=Figure().subplots())
    gaps = np.asarray(ax.lines[0].get_ydata())
    # The best bound has no gap, which a logarithmic axis shows as 1e-5.
    assert gaps == pytest.approx([10.0, 1.0, 1e-5])
    assert scattered(ax)[0].tolist() == [[1, 1.0]]


def test_draw_frontier_measures_gap_from_full_gp() -> None:
    elbos = [-30.0, None, -12.0, -10.0]
    ax = draw_frontier(elbos, 3, rows=2, ax=Figure().subplots(), evidence=-9.0, sizes=[2, 3])
    curve, full = ax.lines
    # A size without a known model is skipped.
    assert np.asarray(curve.get_xydata()).tolist() == [[0, 10.5], [2, 1.5], [3, 0.5]]
    assert np.asarray(full.get_ydata()).tolist() == pytest.approx([0.5 / 3] * 2)
    assert full.get_linestyle() == "--"
    available, selected = (offsets.tolist() for offsets in scattered(ax))
    assert (available, selected) == ([[2, 1.5]], [[3, 0.5]])


def test_draw_inclusion_sorts_selected_and_other_candidates() -> None:
    ax = draw_inclusion([0.7, 0.9, 0.1, 0.4], 2, ax=Figure().subplots())
    selected, others = (offsets.tolist() for offsets in scattered(ax))
    assert selected == [[0, 0.9], [1, 0.7]]
    assert others == [[2, 0.4], [3, 0.1]]


def test_draw_trace_shows_objective_and_number_of_points() -> None:
    moments = [
        {"step": 0, "objective": None, "phase": "initialisation", "x": []},
        {"step": 1, "objective": -5.0, "phase": "initialisation", "x": [0.0, 1.0]},
        {"step": 2, "objective": -4.0, "phase": "selection", "x": [0.0]},
    ]
    ax = draw_trace(moments, ax=Figure().subplots())
    assert np.asarray(ax.lines[0].get_xydata()).tolist() == [[1, -5.0], [2, -4.0]]
    _, counts = ax.figure.axes
    assert np.asarray(counts.lines[0].get_ydata()).tolist() == [2, 1]


def test_draw_mixing_scales_rows_and_counts_points() -> None:
    ax = draw_mixing([[2.0, -1.0], [0.0, 0.5]], [3, 1], ax=Figure().subplots(), targets=["a", "b"])
    assert np.asarray(ax.images[0].get_array()).tolist() == [[1.0, -0.5], [0.0, 1.0]]
    labels = [label.get_text() for label in ax.get_xticklabels()]
    assert labels == ["process 1\n3 inducing points", "process 2\n1 inducing point"]
    assert [text.get_text() for text in ax.texts] == ["2", "-1", "0", "0.5"]
