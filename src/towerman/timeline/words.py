"""Text that came from outside, made fit to be shown: on one line, escaped, and as wide as there is room."""

from __future__ import annotations

import unicodedata
from typing import Final

# Characters that are told by their number: they would move, hide or turn what stands around them.
_ESCAPED: Final = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})


def printable(text: str, *, ascii_only: bool = False) -> str:
    """The text on one line, with every character that a terminal would obey written as its number.

    Args:
        text: anything, for example a tool's name or a run's id.
        ascii_only: write every character beyond ASCII as its number too.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(_shown(character, ascii_only) for character in text)


def _shown(character: str, ascii_only: bool) -> str:
    number = ord(character)
    if 32 <= number < 127:
        return character
    variation = 0xFE00 <= number <= 0xFE0F or 0xE0100 <= number <= 0xE01EF
    if not ascii_only and not variation and unicodedata.category(character) not in _ESCAPED:
        return character
    if number < 256:
        return f"\\x{number:02x}"
    return f"\\u{number:04x}" if number < 65536 else f"\\U{number:08x}"


def columns(text: str) -> int:
    """How many terminal columns a printable text takes (East Asian wide characters take two, marks none)."""
    if text.isascii():
        return len(text)
    return sum(map(_columns_of, text))


def _columns_of(character: str) -> int:
    if unicodedata.combining(character) or unicodedata.category(character) in ("Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def fit(text: str, width: int, *, right: bool = False, ascii_only: bool = False) -> str:
    """The text in exactly `width` columns: filled with blanks, or cut with a sign that shows it.

    Args:
        text: printable text.
        width: columns, 0 or more.
        right: put the blanks in front.
        ascii_only: show the cut by `~` instead of an ellipsis.
    """
    taken = columns(text)
    if taken > width:
        sign = "" if width < 1 else "~" if ascii_only else "…"
        taken = end = 0
        while taken + _columns_of(text[end]) <= width - 1:
            taken += _columns_of(text[end])
            end += 1
        text = text[:end] + sign
        taken += len(sign)
    blanks = " " * (width - taken)
    return blanks + text if right else text + blanks
