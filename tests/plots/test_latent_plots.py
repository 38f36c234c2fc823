import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from winnowgp.errors import InputError
from winnowgp.plots import LatentMap, draw_latent_map, saved_frames


def a_map(step: int = 0) -> LatentMap:
    g = torch.Generator().manual_seed(step)
    return LatentMap(
        title=f"step {step}",
        latents=torch.randn(12, 2, generator=g),
        deviation=0.1 + torch.rand(12, 2, generator=g),
        candidates=torch.randn(3, 2, generator=g),
        inclusion=torch.tensor([0.0, 0.5, 1.0]),
    )


def test_points_are_filled_as_far_as_they_are_probable() -> None:
    ax = Figure().subplots()
    draw_latent_map(a_map(), ["a", "b", "a"] * 4, ax=ax)
    fills = np.asarray(ax.collections[-1].get_facecolor())
    assert fills[:, 3].tolist() == pytest.approx([0, 0.5, 1])
    assert len(ax.patches) == 12
    assert ax.get_legend_handles_labels()[1] == ["a", "b"]


def test_rows_need_no_labels() -> None:
    ax = Figure().subplots()
    draw_latent_map(a_map(), None, ax=ax)
    assert len(np.asarray(ax.collections[0].get_offsets())) == 12


@pytest.mark.parametrize("suffix", [".gif", ".html"])
def test_frames_are_written_whole(tmp_path, suffix: str) -> None:
    path = saved_frames([a_map(0), a_map(1)], None, tmp_path / f"frames{suffix}")
    content = path.read_bytes()
    assert content[:3] == b"GIF" if suffix == ".gif" else content.count(b"iVBOR") == 2
    assert list(tmp_path.iterdir()) == [path]


def test_other_files_are_refused(tmp_path) -> None:
    with pytest.raises(InputError, match=r"\.gif or \.html"):
        saved_frames([a_map()], None, tmp_path / "frames.mp4")
    assert not list(tmp_path.iterdir())
