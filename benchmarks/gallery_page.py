"""Run the commands of docs/gallery.md, and write what they print into the page.

    python benchmarks/gallery_page.py

The `console` blocks of the page run in order in an empty folder. Below each line that begins with
`$`, what its command prints on stdout and stderr replaces what the page has. Figures of the page
that the commands save, `NAME.png`, are copied to where the page shows them. Lines are wrapped as in
a terminal of 100 columns; progress bars are left out.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from textwrap import wrap

DOCS = Path(__file__).parents[1] / "docs"
BLOCK = re.compile(r"^```console\n(?P<lines>.*?)^```$", re.M | re.S)
FIGURE = re.compile(r"!\[[^\]]*\]\((?P<path>[^)]+\.png)\)")
WIDTH = 100


class CommandError(Exception):
    """A command of the page crashed."""


def run_commands(markdown: str, folder: Path) -> str:
    """Return the page with the present output below each command, run in `folder`."""

    def with_output(block: re.Match[str]) -> str:
        commands = [line for line in block["lines"].splitlines() if line.startswith("$ ")]
        parts = [f"{line}\n{_output(line[2:], folder)}" for line in commands]
        return f"```console\n{''.join(parts)}```"

    return BLOCK.sub(with_output, markdown)


def copy_figures(markdown: str, folder: Path, docs: Path) -> list[str]:
    """Copy the page's figures that are in `folder` to the page's own, and return their names."""
    figures = [docs / match["path"] for match in FIGURE.finditer(markdown)]
    drawn = [figure for figure in figures if (folder / figure.name).is_file()]
    for figure in drawn:
        figure.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(folder / figure.name, figure)
    return [figure.name for figure in drawn]


def _output(command: str, folder: Path) -> str:
    print(f"$ {command}", flush=True)
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    run = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        cwd=folder,
        env=os.environ | {"PATH": programs, "COLUMNS": str(WIDTH), "NO_COLOR": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    # 2: the input is wrong, which a page may show.
    if run.returncode not in (0, 2):
        raise CommandError(f"{command!r} ends with {run.returncode}:\n{run.stdout}")
    lines = [line.rstrip() for line in run.stdout.strip("\n").splitlines() if "━━ " not in line]
    wrapped = [wrap(line, WIDTH) if len(line) > WIDTH else [line] for line in lines]
    return "".join(f"{part}\n" for parts in wrapped for part in parts)


def main() -> None:
    """Replace the outputs and the figures of the page."""
    page = DOCS / "gallery.md"
    with tempfile.TemporaryDirectory() as folder:
        text = run_commands(page.read_text(encoding="utf-8"), Path(folder))
        figures = copy_figures(text, Path(folder), page.parent)
    page.write_text(text, encoding="utf-8")
    print(f"{page}: {len(figures)} figures")


if __name__ == "__main__":
    main()
