"""LaTeX between dollars becomes MathML when the site is built: no script, no network, no fonts."""

import html
import re

from latex2mathml.converter import convert

# What pymdownx.arithmatex leaves: \(...\) in a span, \[...\] in a div.
INLINE = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>', re.S)
DISPLAYED = re.compile(r'<div class="arithmatex">\s*\\\[(.*?)\\\]\s*</div>', re.S)


def with_mathematics(page: str) -> str:
    """The page with every formula in MathML."""
    page = INLINE.sub(lambda found: convert(html.unescape(found.group(1))), page)
    return DISPLAYED.sub(
        lambda found: (
            '<div class="formula">'
            + convert(html.unescape(found.group(1)).strip(), display="block")
            + "</div>"
        ),
        page,
    )
