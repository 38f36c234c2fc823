"""Run the Python blocks of the documentation pages, and insert what they print and draw.

The blocks of a page run in order, share their names, and start in an empty folder. A block that
raises an exception or a warning fails the page. `conf.py` runs all pages when the site is built;
`tests/test_docs_pages.py` runs them in the test suite.
"""

import contextlib
import hashlib
import io
import json
import multiprocessing
import os
import re
import tempfile
import traceback
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from textwrap import dedent, indent
from typing import Any
from unittest import mock

PACKAGE = Path(__file__).parents[1] / "src" / "winnowgp"
FENCE = re.compile(r"^(?P<indent> *)```python\n(?P<code>.*?)^(?P=indent)```$", re.M | re.S)
DEPENDENCIES = ("torch", "gpytorch", "numpy", "scikit-learn", "matplotlib")


class ExampleError(Exception):
    """A Python block of a page raised an exception or a warning."""


@dataclass(frozen=True, slots=True)
class Output:
    """The text that one block printed, and its matplotlib figures as SVG elements."""

    text: str
    figures: tuple[str, ...]


def run_page(markdown: str, name: str) -> list[Output]:
    """Run the Python blocks of a page in order and return the output of each.

    Args:
        markdown: the text of the page.
        name: the page's name in error messages.

    Raises:
        ExampleError: a block raised an exception or a warning.
    """
    import matplotlib

    from winnowgp.plots.style import styled

    matplotlib.use("agg")
    ids = matplotlib.rc_context({"svg.hashsalt": "winnowgp"})  # the same in every build
    outputs = []
    folder = tempfile.TemporaryDirectory()
    with folder, contextlib.chdir(folder.name), styled(), ids, mock.patch.dict(os.environ):
        names: dict[str, Any] = {"__name__": f"page {name}"}
        for block in FENCE.finditer(markdown):
            line = markdown.count("\n", 0, block.start()) + 2
            outputs.append(_run_block(dedent(block["code"]), names, f"{name}, line {line}"))
    return outputs


def with_outputs(markdown: str, outputs: Sequence[Output]) -> str:
    """Return the page, in MyST Markdown, with each block followed by its output."""
    remaining = iter(outputs)

    def block_and_output(block: re.Match[str]) -> str:
        output = next(remaining)
        parts = [f"````{{raw}} html\n{figure}\n````" for figure in output.figures]
        if output.text.strip():
            text = output.text.rstrip()
            parts.insert(0, f"````{{code-block}} text\n:class: output\n\n{text}\n````")
        return block.group() + "".join(f"\n\n{indent(part, block['indent'])}" for part in parts)

    return FENCE.sub(block_and_output, markdown)


def run_pages(
    pages: Mapping[str, str], *, cache: Path, processes: int = 2
) -> dict[str, list[Output]]:
    """Run several pages in parallel, and return the outputs of each by name.

    Outputs are kept in `cache`. A page is run again only if its text, the source of winnowgp or
    of this module, or the version of a dependency has changed.
    """
    cache.mkdir(parents=True, exist_ok=True)
    environment = _environment_digest()
    keys = {name: (environment + name + text).encode() for name, text in pages.items()}
    files = {name: cache / f"{hashlib.sha256(key).hexdigest()}.json" for name, key in keys.items()}
    stale = {name: text for name, text in pages.items() if not files[name].exists()}
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=spawn) as pool:
        # One page at a time needs no other process.
        run = map if min(processes, len(stale)) <= 1 else pool.map
        for name, outputs in zip(stale, run(run_page, stale.values(), stale), strict=True):
            files[name].write_text(json.dumps([asdict(output) for output in outputs]))
    for file in set(cache.glob("*.json")) - set(files.values()):
        file.unlink()
    return {
        name: [
            Output(each["text"], tuple(each["figures"])) for each in json.loads(file.read_text())
        ]
        for name, file in files.items()
    }


def _run_block(code: str, names: dict[str, Any], where: str) -> Output:
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), warnings.catch_warnings():
            warnings.simplefilter("error")
            # linear_operator scripts a function when it is imported.
            warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated")
            exec(compile(code, where, "exec"), names)
            figures = _open_figures()
    except Exception as error:
        raise ExampleError(f"{where}: the example fails.\n{traceback.format_exc()}") from error
    return Output(printed.getvalue(), figures)


def _open_figures() -> tuple[str, ...]:
    """Close all open figures and return them as SVG, in the colours of the page's theme."""
    import matplotlib.pyplot as plt

    figures = []
    for number in plt.get_fignums():
        figure, file = plt.figure(number), io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
        titles = [ax.get_title("left") or ax.get_title() for ax in figure.axes]
        label = "; ".join(title for title in titles if title) or "figure"
        svg = file.getvalue()[file.getvalue().index("<svg") :].replace("#000000", "currentColor")
        svg = svg.replace("<svg", f'<svg role="img" aria-label="{label}" fill="currentColor"', 1)
        figures.append(f'<figure class="drawn">{svg}</figure>')
        plt.close(figure)
    return tuple(figures)


def _environment_digest() -> str:
    """Hash what the output of every page depends on, besides its text."""
    digest = hashlib.sha256(" ".join(version(name) for name in DEPENDENCIES).encode())
    for file in [Path(__file__), *sorted(PACKAGE.rglob("*.py"))]:
        digest.update(file.read_bytes())
    return digest.hexdigest()
