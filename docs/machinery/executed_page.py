"""A page whose python blocks are run in order, as a reader would run them.

What a block prints, and the pictures it draws with matplotlib, follow it on the page. All blocks of
a page share their names and an empty folder; a block that raises or warns fails the page.
"""

import contextlib
import io
import os
import re
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent, indent
from typing import Any

FENCE = re.compile(r"^(?P<indent> *)```python\n(?P<code>.*?)^(?P=indent)```$", re.M | re.S)
PICTURE = re.compile(r"<!-- picture (\d+) -->")


class ExampleError(Exception):
    """An example on a page does not run."""


@dataclass(frozen=True, slots=True)
class ExecutedPage:
    """Markdown with results in it, and the pictures that its comments stand for."""

    markdown: str
    printed: str
    pictures: tuple[str, ...]

    def with_pictures(self, html: str) -> str:
        """The rendered page with each picture in its place."""
        return PICTURE.sub(lambda found: self.pictures[int(found.group(1))], html)


def executed_page(
    markdown: str, *, name: str, given: Callable[[], Mapping[str, Any]] = dict
) -> ExecutedPage:
    """The page after all of its python blocks have run.

    Args:
        markdown: the page.
        name: what to call it in errors.
        given: makes the names that the page takes for granted, in the folder the blocks run in.
    """
    if FENCE.search(markdown) is None:
        return ExecutedPage(markdown, "", ())
    printed: list[str] = []
    pictures: list[str] = []
    with _fresh_folder(), _ink():
        names = {"__name__": f"page {name}", **given()}

        def run(fence: re.Match[str]) -> str:
            line = markdown.count("\n", 0, fence.start()) + 2
            said, drawn = _run(dedent(fence["code"]), names, where=f"{name}, line {line}")
            shown = [f"<!-- picture {len(pictures) + i} -->" for i in range(len(drawn))]
            printed.append(said)
            pictures.extend(drawn)
            text = [f"```{{.text .printed}}\n{said.rstrip()}\n```"] if said.strip() else []
            after = "".join(f"\n\n{indent(part, fence['indent'])}" for part in [*text, *shown])
            return fence.group() + after

        markdown = FENCE.sub(run, markdown)
    return ExecutedPage(markdown, "".join(printed), tuple(pictures))


def _run(code: str, names: dict[str, Any], *, where: str) -> tuple[str, list[str]]:
    """What a block prints and draws."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), warnings.catch_warnings():
            warnings.simplefilter("error")
            # linear_operator still scripts a function when it is imported.
            warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated")
            exec(compile(code, where, "exec"), names)
            drawn = _drawn()
    except Exception as error:
        raise ExampleError(f"{where}: the example fails.\n{traceback.format_exc()}") from error
    return said.getvalue(), drawn


def _drawn() -> list[str]:
    """Every open figure as an inline SVG in the page's own ink, and all of them closed."""
    import matplotlib.pyplot as plt

    pictures = []
    for number in plt.get_fignums():
        figure, file = plt.figure(number), io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
        titles = [ax.get_title("left") or ax.get_title() for ax in figure.axes]
        label = "; ".join(title for title in titles if title) or "picture"
        svg = file.getvalue()[file.getvalue().index("<svg") :]
        # Matplotlib leaves out a fill that is black, so the whole picture inherits the ink.
        svg = svg.replace("#000000", "currentColor")
        svg = svg.replace("#ffffff", "var(--md-default-bg-color)")
        svg = svg.replace("<svg", f'<svg role="img" aria-label="{label}" fill="currentColor"', 1)
        pictures.append(f'<figure class="picture">{svg}</figure>')
    plt.close("all")
    return pictures


@contextlib.contextmanager
def _ink() -> Iterator[None]:
    """The house style of pictures, drawn without a screen."""
    import matplotlib

    from winnowgp.plots import styled

    before = matplotlib.get_backend()
    matplotlib.use("agg")
    try:
        with styled(), matplotlib.rc_context({"svg.hashsalt": "winnowgp"}):
            yield
    finally:
        matplotlib.use(before)


@contextlib.contextmanager
def _fresh_folder() -> Iterator[None]:
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)
