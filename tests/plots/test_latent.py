import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from winnowgp.errors import InputError
from winnowgp.plots.latent import LatentMap, draw_latent_map, save_animation


def embedding(step: int = 0) -> LatentMap:
    g = torch.Generator().manual_seed(step)
    return LatentMap(
        title=f"step {step}",
        latents=torch.randn(12, 2, generator=g),
        deviation=0.1 + torch.rand(12, 2, generator=g),
        candidates=torch.randn(3, 2, generator=g),
        inclusion=torch.tensor([0.0, 0.5, 1.0]),
    )


def test_draw_latent_map_opacity_is_inclusion_probability() -> None:
    ax = Figure().subplots()
    draw_latent_map(embedding(), ["a", "b", "a"] * 4, ax=ax)
    fills = np.asarray(ax.collections[-1].get_facecolor())
    assert fills[:, 3].tolist() == pytest.approx([0, 0.5, 1])
    assert len(ax.patches) == 12
    assert ax.get_legend_handles_labels()[1] == ["a", "b"]


def test_draw_latent_map_without_labels_draws_all_rows() -> None:
    ax = Figure().subplots()
    draw_latent_map(embedding(), None, ax=ax)
    assert len(np.asarray(ax.collections[0].get_offsets())) == 12


def test_draw_latent_map_wrong_number_of_labels_raises() -> None:
    with pytest.raises(InputError, match="one label for each of 12 rows; got 2"):
        draw_latent_map(embedding(), ["a", "b"], ax=Figure().subplots())


@pytest.mark.parametrize("suffix", [".gif", ".html"])
def test_save_animation_writes_all_frames(tmp_path, suffix: str) -> None:
    path = save_animation([embedding(0), embedding(1)], None, tmp_path / f"frames{suffix}")
    content = path.read_bytes()
    assert content[:3] == b"GIF" if suffix == ".gif" else content.count(b"iVBOR") == 2
    assert list(tmp_path.iterdir()) == [path]


def test_save_animation_unknown_suffix_raises(tmp_path) -> None:
    with pytest.raises(InputError, match=r"\.gif or \.html"):
        save_animation([embedding()], None, tmp_path / "frames.mp4")
    assert not list(tmp_path.iterdir())
