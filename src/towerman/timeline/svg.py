"""Pieces of SVG that every drawing is made of.

House rules. A drawing stands alone: no script, no font, no address that is fetched. Colours are classes with a second
set for dark pages, in plain rules that every viewer knows. All text goes through `safe`.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Final

from towerman.timeline.words import columns, fit, printable

CHARACTER: Final = 0.55
"""Width of a character as a share of the size of its letters, in the widest of the fonts that may be there."""

STYLE: Final = (
    'svg{font-family:system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans",sans-serif;font-size:12px}'
    ".page{fill:#fff}text{fill:#1a2027}.soft{fill:#5a6572}.head{font-size:15px;font-weight:600}"
    ".strong{font-weight:600}.code{fill:#b3261e}.num{font-variant-numeric:tabular-nums}"
)
STYLE_DARK: Final = ".page{fill:#14181d}text{fill:#e8ecf0}.soft{fill:#a3afbc}.code{fill:#ff9a92}"


def safe(text: str) -> str:
    """Printable text, escaped for an element or an attribute."""
    return escape(printable(text), quote=True)


def wide(text: str, size: float = 12) -> float:
    """About how wide a text is, rather too much than too little."""
    return columns(printable(text)) * size * CHARACTER


def head_width(words: str) -> float:
    """About how wide a headline is: its letters are larger and bold."""
    return wide(words, 15.5)


def text(x: float, y: float, words: str, kind: str = "", *, end: bool = False) -> str:
    """A line of text that begins at (x, y), or ends there."""
    anchor = ' text-anchor="end"' if end else ""
    told = f' class="{kind}"' if kind else ""
    return f'<text{told} x="{x:g}" y="{y:g}"{anchor}>{safe(words)}</text>'


def short(x: float, y: float, words: str, kind: str, room: float, size: float = 12) -> str:
    """A line of text that is cut to the room; the whole of it shows when one points at it."""
    whole = printable(words)
    most = max(1, int(room / (size * CHARACTER) + 1e-6))
    if columns(whole) <= most:
        return text(x, y, whole, kind)
    cut = escape(fit(whole, most).rstrip())
    return f'<text class="{kind}" x="{x:g}" y="{y:g}">{cut}<title>{escape(whole)}</title></text>'


def document(
    width: float, height: float, title: str, about: str, style: str, dark: str, defs: str, body: Sequence[str]
) -> str:
    """The whole file.

    Args:
        width: in pixels; the drawing scales with its frame.
        height: in pixels.
        title: what it shows, in one line.
        about: how to read it, for who cannot see it.
        style: rules beside the common ones.
        dark: those that differ on dark pages.
        defs: what the body refers to.
        body: elements, from back to front.
    """
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
            f'viewBox="0 0 {width:g} {height:g}" role="img" aria-labelledby="tm-title tm-about">',
            f'<title id="tm-title">{safe(title)}</title>',
            f'<desc id="tm-about">{safe(about)}</desc>',
            f"<style>{STYLE}{style}@media (prefers-color-scheme:dark){{{STYLE_DARK}{dark}}}</style>",
            f"<defs>{defs}</defs>",
            f'<rect class="page" width="{width:g}" height="{height:g}"/>',
            *body,
            "</svg>\n",
        ]
    )
