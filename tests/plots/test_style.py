"""Characters that the usual font lacks, in saved figures."""

import warnings
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from winnowgp.errors import MissingGlyphWarning
from winnowgp.plots.predictions import draw_effects
from winnowgp.plots.style import add_fonts, font_for, plain, save_figure

# matplotlib's DejaVu Sans has Greek and Cyrillic, and its STIXGeneral one of the Kana.
KANA = "\u306e"
# A character of a private area, which no font for text has.
NOWHERE = "\U0010fff0"


def effects(name: str) -> list[dict[str, Any]]:
    curves = [{"label": "", "mean": [1.0, 2.0], "lower": [], "upper": []}]
    return [
        {
            "column": name,
            "kind": "category",
            "at": [name, "b"],
            "curves": curves,
            "counts": [],
            "term": "",
            "note": "",
        }
    ]


def test_font_for_finds_a_font_that_has_the_character() -> None:
    assert font_for("x") == font_for("\u0444") == ""
    assert font_for(KANA)
    assert font_for(NOWHERE) is None


def test_save_figure_draws_characters_that_another_font_has(tmp_path: Path) -> None:
    figure = draw_effects(effects(KANA), target=KANA)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # matplotlib warns of each glyph that is missing
        save_figure(figure, tmp_path / "a.png")
    (ax,) = figure.axes
    labels = [ax.xaxis.label, ax.yaxis.label, *ax.get_xticklabels()]
    assert all(font_for(KANA) in label.get_fontfamily() for label in labels)
    assert [label.get_text() for label in ax.get_xticklabels()] == [KANA, "b"]


def test_save_figure_without_such_characters_keeps_the_font() -> None:
    figure = Figure()
    ax = figure.subplots()
    ax.set_xlabel("x")
    family = ax.xaxis.label.get_fontfamily()
    add_fonts(figure)
    assert ax.xaxis.label.get_fontfamily() == family


def test_plain_replaces_characters_that_no_font_has(tmp_path: Path) -> None:
    with pytest.warns(MissingGlyphWarning, match="no installed font has the characters of"):
        assert plain(f"a{NOWHERE}") == r"a\U0010fff0"
    with pytest.warns(MissingGlyphWarning):
        figure = draw_effects(effects(NOWHERE), target="y")
    # Without warnings of matplotlib.
    save_figure(figure, tmp_path / "a.png")
