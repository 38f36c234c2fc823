"""From findings to one HTML page that needs nothing else."""

import json
from importlib.resources import files
from pathlib import Path

from winnowgp.io.format import atomic_write
from winnowgp.report.summary import Summary


def report_page(summary: Summary) -> str:
    """The page: style, script and numbers inside, no address of anything outside.

    Everything that came from a user's table is JSON, and set as text by the script.
    """
    room = files("winnowgp.report")
    parts = {name: (room / name).read_text(encoding="utf-8") for name in _FILES}
    # "</script>" and "<!--" inside a string would end the element that holds it.
    numbers = json.dumps(summary, allow_nan=False).replace("<", "\\u003c")
    page = parts["page.html"]
    for mark, text in (
        ("/*STYLE*/", parts["page.css"]),
        ("/*SCRIPT*/", parts["page.js"]),
        ("/*FINDINGS*/", numbers),
    ):
        before, after = page.split(mark)
        page = before + text + after
    return page


def save_report(summary: Summary, path: Path) -> Path:
    """Write the page whole or not at all."""
    with atomic_write(path) as part:
        part.write_text(report_page(summary), encoding="utf-8")
    return path


_FILES = ("page.html", "page.css", "page.js")
