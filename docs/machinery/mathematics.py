"""LaTeX between dollars becomes MathML when the site is built: no script and no network.

Browsers set it with a font that has a table of mathematics; the part of STIX Two Math that formulas
need travels with the site, for readers whose machine has none.
"""

import html
import re
from pathlib import Path

import ziamath
from fontTools import subset
from latex2mathml.converter import convert

# What pymdownx.arithmatex leaves: \(...\) in a span, \[...\] in a div.
INLINE = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>', re.S)
DISPLAYED = re.compile(r'<div class="arithmatex">\s*\\\[(.*?)\\\]\s*</div>', re.S)

# Latin, accents, Greek, punctuation, letters like ℒ, arrows, operators, brackets, italics.
LETTERS = (
    (0x20, 0x7E),
    (0xA0, 0xFF),
    (0x300, 0x36F),
    (0x370, 0x3FF),
    (0x2000, 0x206F),
    (0x2100, 0x22FF),
    (0x27E6, 0x27EB),
    (0x1D400, 0x1D7FF),
)


# Bars that know their sides, so that they stand close to what they enclose.
BARS = {r"\lvert": r"\left|", r"\rvert": r"\right|", r"\lVert": r"\left\|", r"\rVert": r"\right\|"}
FUNCTION = re.compile(r"<mi>(log|exp|det)</mi>(?!<mo[^>]*>&#x00028;|<mrow><mo[^>]*>&#x00028;)")


def with_mathematics(page: str) -> str:
    """The page with every formula in MathML."""
    page = INLINE.sub(lambda found: _mathml(found.group(1), "inline"), page)
    return DISPLAYED.sub(
        lambda found: f'<div class="formula">{_mathml(found.group(1), "block")}</div>', page
    )


def _mathml(latex: str, display: str) -> str:
    latex = html.unescape(latex).strip()
    for name, bar in BARS.items():
        latex = latex.replace(name, bar)
    mathml = convert(latex, display=display)
    return FUNCTION.sub(r'<mspace width="0.17em"/><mi>\1</mi><mspace width="0.17em"/>', mathml)


def write_font(path: Path) -> None:
    """The part of STIX Two Math that formulas need (SIL Open Font License), from `ziamath`."""
    whole = Path(ziamath.__file__).parent / "fonts" / "STIXTwoMath-Regular.ttf"
    options = subset.Options(flavor="woff", layout_features=["*"], name_IDs=["*"])
    font = subset.load_font(str(whole), options)
    subsetter = subset.Subsetter(options)
    subsetter.populate(unicodes=[u for low, high in LETTERS for u in range(low, high + 1)])
    subsetter.subset(font)
    path.parent.mkdir(parents=True, exist_ok=True)
    subset.save_font(font, str(path), options)
