"""A self-contained HTML report of a fitted table model."""

import json
import os
from importlib.resources import files
from pathlib import Path

from winnowgp.io.format import atomic_write
from winnowgp.report.summary import Summary, selection_lines

__all__ = ["save_report"]


def report_page(summary: Summary) -> str:
    """Return the report as an HTML page that loads nothing from elsewhere.

    All text from the user's table is JSON inside the page, and displayed as text by the script.
    """
    folder = files(__name__)
    page, style, script = (
        (folder / f"page.{suffix}").read_text(encoding="utf-8") for suffix in ("html", "css", "js")
    )
    # "</script>" and "<!--" inside a string would end the element that contains it.
    content = {**summary, "lines": selection_lines(summary["choice"])}
    data = json.dumps(content, allow_nan=False).replace("<", "\\u003c")
    for mark, text in (("/*STYLE*/", style), ("/*SCRIPT*/", script), ("/*SUMMARY*/", data)):
        before, after = page.split(mark)
        page = before + text + after
    return page


def save_report(summary: Summary, path: str | os.PathLike[str]) -> Path:
    """Write the report of a fitted table model to an HTML file, completely or not at all.

    Args:
        summary: `TabularModel.summary`.
        path: the file to write.
    """
    path = Path(path)
    with atomic_write(path) as temporary:
        temporary.write_text(report_page(summary), encoding="utf-8")
    return path
