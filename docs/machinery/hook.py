"""What mkdocs does with our pages: runs their examples, sets formulas, writes the reference."""

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from executed_page import ExecutedPage, executed_page
from given import given
from mathematics import with_mathematics, write_font
from room_pages import room_page, rooms

ROOT = Path(__file__).parents[2]
EXECUTED: dict[str, ExecutedPage] = {}


def on_config(config: Any) -> Any:
    """What searches a page that is opened from a folder; it must come before Material's own."""
    config.extra["polyfills"] = ["folder_search.js"]
    return config


def on_files(files: Files, *, config: Any) -> Files:
    """Pages that are made from the code, and the one that lies where contributors look for it."""
    made = {f"reference/{room}.md": room_page(room) for room in rooms()}
    made["contributing.md"] = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for name, content in made.items():
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """The page with what its examples print and draw."""
    name = page.file.src_uri
    if name.startswith("reference/"):
        return markdown
    EXECUTED[name] = executed_page(markdown, name=name, given=given)
    return EXECUTED[name].markdown


def on_page_content(html: str, *, page: Any, **_: Any) -> str:
    """The page with its formulas, then its pictures, whose numbers are nobody's formulas."""
    html = with_mathematics(html)
    executed = EXECUTED.get(page.file.src_uri)
    return html if executed is None else executed.with_pictures(html)


def on_post_build(*, config: Any) -> None:
    """The font of formulas, and what a page that is opened from a folder needs to be searched."""
    site = Path(config.site_dir)
    write_font(site / "assets" / "mathematics.woff")
    index = (site / "search" / "search_index.json").read_text(encoding="utf-8")
    (site / "search" / "search_index.js").write_text(f"var __index = {index}", encoding="utf-8")
