"""Figures of streams: which points moved, arrived and left."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from helpers.figures import scattered
from winnowgp.errors import InputError
from winnowgp.estimators.stream_records import BatchRecord
from winnowgp.plots import (
    StreamFrame,
    draw_point_history,
    draw_stream,
    draw_stream_frame,
    save_stream_animation,
)

# Point 0 moves, point 1 leaves, point 2 arrives.
HISTORY = [np.array([[0.0], [1.0]]), np.array([[0.2], [3.0]])]
IDS = [np.array([0, 1]), np.array([0, 2])]


def test_draw_point_history_moved_point_is_not_gone() -> None:
    ax = draw_point_history(HISTORY, IDS, ax=Figure().subplots())
    _, none, points, left = (offsets.tolist() for offsets in scattered(ax))
    assert none == []
    assert points == [[2, 0.2], [2, 3.0]]
    assert left == [[2, 1.0]]
    assert [np.asarray(line.get_xydata()).tolist() for line in ax.lines] == [[[1, 0], [2, 0.2]]]


def test_draw_stream_labels_fit_into_a_narrow_figure() -> None:
    figure = Figure(figsize=(3.2, 4.2))
    FigureCanvasAgg(figure)
    batches = [BatchRecord(40, 9, 1, 0, 0, -10.0, 0.01, -0.5 - n, 0.1) for n in range(3)]
    axes = draw_stream(batches, tuple(figure.subplots(3, 1, sharex=True)))
    figure.tight_layout()
    figure.draw_without_rendering()
    for ax in axes:
        label, own = ax.yaxis.label.get_window_extent(), ax.get_window_extent()
        assert label.x0 >= 0
        assert label.height <= 1.15 * own.height
    assert np.asarray(axes[1].lines[0].get_ydata()).tolist() == [-0.5, -1.5, -2.5]


def model(number: int, D: int) -> SimpleNamespace:
    """The attributes of an estimator that a frame reads."""
    points = np.repeat(HISTORY[number], D, axis=1)
    return SimpleNamespace(
        inducing_points_=points,
        point_ids_=IDS[number],
        batches_=[SimpleNamespace(log_density=float("nan") if number == 0 else -1.5)],
        predict=lambda X, return_std=False: (X[:, 0], X[:, 0]) if return_std else 10 * X[:, 0],
    )


def frames(D: int) -> list[StreamFrame]:
    X, grid = np.full((4, D), 2.0), np.linspace(0, 3, 5) if D == 1 else None
    return [StreamFrame.of(model(n, D), X, np.arange(4.0), grid=grid) for n in (0, 1)]


def test_draw_stream_frame_shows_what_the_batch_changed() -> None:
    ax, density = Figure().subplots(2, 1)
    draw_stream_frame(frames(1), 1, (ax, density))
    rows, kept, added, dropped = (offsets.tolist() for offsets in scattered(ax))
    assert rows == [[2, 0], [2, 1], [2, 2], [2, 3]]
    # Of one input column, points are drawn on the predicted mean.
    assert (kept, added, dropped) == ([[0.2, 2]], [[3, 30]], [[1, 10]])
    assert ax.get_title() == "batch 2: 2 inducing points"
    assert np.asarray(density.lines[0].get_ydata()).tolist()[1:] == [-1.5]


def test_draw_stream_frame_of_two_columns_has_no_targets() -> None:
    ax, density = Figure().subplots(2, 1)
    draw_stream_frame(frames(2), 0, (ax, density))
    rows, kept, added, dropped = (offsets.tolist() for offsets in scattered(ax))
    assert (rows, kept, dropped) == ([[2, 2]] * 4, [], [])
    assert added == [[0, 0], [1, 1]]
    assert ax.get_ylabel() == "input 2"


@pytest.mark.parametrize("suffix", [".gif", ".html"])
def test_save_stream_animation_writes_all_frames(tmp_path: Path, suffix: str) -> None:
    path = save_stream_animation(frames(1), tmp_path / f"stream{suffix}")
    content = path.read_bytes()
    assert content[:3] == b"GIF" if suffix == ".gif" else content.count(b"iVBOR") == 2
    assert list(tmp_path.iterdir()) == [path]


def test_save_stream_animation_bad_input_raises(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"\.gif or \.html"):
        save_stream_animation(frames(1), tmp_path / "stream.mp4")
    with pytest.raises(InputError, match="at least one frame"):
        save_stream_animation([], tmp_path / "stream.gif")
    assert not list(tmp_path.iterdir())
