"""Configuration of the documentation: Sphinx with MyST Markdown pages.

Build it with `python -m sphinx -W --keep-going docs site`.
"""

import re
import sys
from pathlib import Path

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS), str(DOCS.parent / "src")]

from run_pages import FENCE, run_pages, with_outputs
from winnowgp import __version__

project = "winnowgp"
author = "The winnowgp authors"
release = version = __version__
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
exclude_patterns = ["results"]

# Markdown: GitHub's dialect, with $…$ and $$…$$ for formulas and anchors for headings.
myst_enable_extensions = ["dollarmath", "amsmath"]
myst_dmath_double_inline = True
myst_heading_anchors = 4

# The reference: names in `__all__`, in the order of the source, with types as they are written.
autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_class_signature = "mixed"
maximum_signature_line_length = 88
python_use_unqualified_type_names = True
add_module_names = False
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
toc_object_entries_show_parents = "hide"

html_theme = "pydata_sphinx_theme"
html_title = "winnowgp"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_theme_options = {
    "navigation_with_keys": False,
    "show_prev_next": True,
    "header_links_before_dropdown": 6,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "show_nav_level": 2,
}
copyright = author
copybutton_exclude = ".linenos, .gp, .go"
copybutton_selector = "div:not(.output) > div.highlight > pre"

CODE = re.compile(r"``[^`]+``|`[^`\n]+`")
_CALLBACK = r"~?[\w.]*Callable\[\[[^\]]*Progress\], None\]"
# What Sphinx writes for a type alias, and what the reference shows instead.
ALIASES = {
    rf"{_CALLBACK} \| ~?[\w.]*Sequence\[{_CALLBACK}\] \| None": "~winnowgp.training.Callbacks",
    r"~?[\w.]*\b_Buffer \|.*?_NestedSequence\[complex \| bytes \| str\]": "ArrayLike",
}


def page_text(docname: str, text: str) -> str:
    """Return the text of a page; the page on contributing is the file in the repository's root."""
    if docname == "contributing":
        return (DOCS.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    return text


def run_examples(app) -> None:
    """Run the Python blocks of all pages before the first page is read."""
    texts = {
        path.stem: page_text(path.stem, path.read_text(encoding="utf-8"))
        for path in sorted(DOCS.glob("*.md"))
    }
    pages = {f"{name}.md": text for name, text in texts.items() if FENCE.search(text)}
    outputs = run_pages(pages, cache=Path(app.doctreedir) / "examples")
    app.example_pages = {
        name.removesuffix(".md"): with_outputs(pages[name], each) for name, each in outputs.items()
    }


def outdated_pages(app, env, added, changed, removed) -> list[str]:
    """Return the pages with examples: outputs change with the package, not only with the text."""
    return list(app.example_pages)


def insert_outputs(app, docname: str, source: list[str]) -> None:
    """Replace a page by the text whose Python blocks were run, with what they print and draw."""
    source[0] = app.example_pages.get(docname) or page_text(docname, source[0])


def escape_docstring(app, what, name, obj, options, lines: list[str]) -> None:
    """Let docstrings be plain text: only backticks and doctests are markup.

    reStructuredText would read |Z| as a substitution, `inducing_points_` as a link and
    `*` as emphasis, and takes double backticks for code.
    """

    def escaped(line: str) -> str:
        parts, end = [], 0
        for code in CODE.finditer(line):
            parts += [_escaped(line[end : code.start()]), f"``{code.group().strip('`')}``"]
            end = code.end()
        return "".join([*parts, _escaped(line[end:])])

    if what in {"attribute", "data", "property"}:
        # Napoleon takes what precedes a colon in the first line for a type.
        lines[:0] = ["..", ""]
    doctest = False
    for number, line in enumerate(lines):
        doctest = line.lstrip().startswith(">>>") or (doctest and bool(line.strip()))
        if not doctest and not line.lstrip().startswith(("..", ":")):
            lines[number] = escaped(line)


def shorten_signature(app, what, name, obj, options, signature, returns):
    """Write type aliases by name: Python expands them when it evaluates annotations."""
    if signature is None:
        return None
    for expanded, alias in ALIASES.items():
        signature = re.sub(expanded, alias, signature)
    return signature, returns


def _escaped(text: str) -> str:
    return re.sub(r"(?<!\\)([|*]|_(?=\W|$))", r"\\\1", text)


def setup(app) -> None:
    """Connect the functions above to the build."""
    app.connect("builder-inited", run_examples)
    app.connect("env-get-outdated", outdated_pages)
    app.connect("source-read", insert_outputs)
    # Before napoleon, which writes reStructuredText of its own.
    app.connect("autodoc-process-docstring", escape_docstring, priority=100)
    app.connect("autodoc-process-signature", shorten_signature)
