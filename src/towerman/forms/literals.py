"""Arguments that are written as in a call of Python: texts, numbers, lists, objects, names, and references.

Theory. A planner that writes `3. math("x + y", [$1, '$2'], unit=None)` writes Python or what looks like it, and JSON's
words for constants among it. Read by hand, not by Python's parser: a reference without quotes is no Python, and what
is written may be of any size and depth.

House rules. Whatever is written, the only exception is `Malformed`, with the place as an offset.

Not here: what a reference is (llmcompiler).
"""

from __future__ import annotations

import math
import re
from typing import Final

MAX_DEPTH: Final = 64
"""Lists and objects inside each other that are read."""

_BLANK: Final = re.compile(r"\s*")
_STRING: Final = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"", re.DOTALL)
_NUMBER: Final = re.compile(r"[+-]?(?:(?:0|[1-9]\d*)(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?(?![\w.])", re.ASCII)
_WHOLE: Final = re.compile(r"[+-]?\d{1,4000}", re.ASCII)
_ESCAPE: Final = re.compile(
    r"\\(?:u([dD][89abAB][0-9a-fA-F]{2})\\u([dD][c-fC-F][0-9a-fA-F]{2})"
    r"|(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8}))|([0-7]{1,3})|(\r\n|.))",
    re.DOTALL,
)
_SIGNS: Final = {
    "\n": "",
    "\r\n": "",
    "\\": "\\",
    "'": "'",
    '"': '"',
    "a": "\a",
    "b": "\b",
    "f": "\f",
    "n": "\n",
    "r": "\r",
    "t": "\t",
    "v": "\v",
}
_REFERENCE: Final = re.compile(r"\$\d+(?!\w)|\$\{\d+\}", re.ASCII)
_NAME: Final = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_CONSTANTS: Final = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_TRIPLE: Final = ("'''", '"""')


class Malformed(Exception):
    """What is wrong, and where in the text."""

    def __init__(self, told: str, place: int) -> None:
        super().__init__(told)
        self.told = told
        self.place = place


class Reader:
    """Reads values from a text, from a place on.

    Args:
        text: the whole text.
        place: where to begin; afterwards, where reading has come to.
    """

    __slots__ = ("place", "text")

    def __init__(self, text: str, place: int) -> None:
        self.text = text
        self.place = place

    def arguments(self) -> tuple[list[object], dict[str, object]]:
        """The arguments up to a closing bracket, which is read too.

        Returns:
            Those without names, and those with.

        Raises:
            Malformed: it is not that.
        """
        given: list[object] = []
        named: dict[str, object] = {}
        while not self._sign(")"):
            if (given or named) and not self._sign(","):
                raise Malformed("',' or ')' is wanted", self.place)
            if (given or named) and self._sign(")"):
                break
            start = self.place
            name = self._keyword()
            if name is not None:
                if name in named:
                    raise Malformed("a name stands twice", start)
                named[name] = self._value(0)
            elif named:
                raise Malformed("an argument without a name behind one with a name", start)
            else:
                given.append(self._value(0))
        return given, named

    def _keyword(self) -> str | None:
        """A name and a `=`, or nothing."""
        match = _NAME.match(self.text, self.place)
        if match is None:
            return None
        before, self.place = self.place, match.end()
        if self._sign("=") and not self.text.startswith("=", self.place):
            return match[0]
        self.place = before
        return None

    def _sign(self, sign: str) -> bool:
        """Whether this sign comes next; then it is read. Blanks before it are."""
        match = _BLANK.match(self.text, self.place)
        self.place = self.place if match is None else match.end()
        if self.text.startswith(sign, self.place):
            self.place += len(sign)
            match = _BLANK.match(self.text, self.place)
            self.place = self.place if match is None else match.end()
            return True
        return False

    def _value(self, depth: int) -> object:
        """One value."""
        text, start = self.text, self.place
        sign = text[start : start + 1]
        if depth > MAX_DEPTH:
            raise Malformed(f"nested more than {MAX_DEPTH} deep", start)
        if sign in ("'", '"') and sign:
            return self._text()
        if sign == "[" or sign == "(":
            return self._list("]" if sign == "[" else ")", depth)
        if sign == "{":
            return self._object(depth)
        for pattern in (_REFERENCE, _NUMBER, _NAME):
            match = pattern.match(text, start)
            if match is None:
                continue
            self.place = match.end()
            if pattern is _REFERENCE:
                return match[0]
            if pattern is _NAME:
                if match[0] in _CONSTANTS:
                    return _CONSTANTS[match[0]]
                break
            if _WHOLE.fullmatch(match[0]):
                return int(match[0])
            value = float(match[0])
            if not math.isfinite(value):
                raise Malformed("a number that is too large", start)
            return value
        raise Malformed("a value is wanted: text in quotes, a number, a list, an object or a reference", start)

    def _text(self) -> str:
        start = self.place
        if self.text.startswith(_TRIPLE, start):
            end = self.text.find(self.text[start] * 3, start + 3)
            if end < 0:
                raise Malformed("a text without its closing quotes", start)
            self.place = end + 3
            raw = self.text[start + 3 : end]
            if "\\" not in raw:
                return raw
            raise Malformed("a text in three quotes with a '\\' in it; write it in simple quotes", start)
        match = _STRING.match(self.text, start)
        if match is None:
            raise Malformed("a text without its closing quote", start)
        self.place = match.end()
        raw = match[0][1:-1]
        if "\\" not in raw:
            return raw
        try:
            return _ESCAPE.sub(_sign_of, raw)
        except ValueError:
            raise Malformed("a text with a '\\' that means nothing", start) from None

    def _list(self, end: str, depth: int) -> list[object]:
        start = self.place
        self._sign("[" if end == "]" else "(")
        found: list[object] = []
        while not self._sign(end):
            if found and not self._sign(","):
                raise Malformed(f"',' or '{end}' is wanted", self.place)
            if found and self._sign(end):
                return found
            found.append(self._value(depth + 1))
        if end == ")" and len(found) == 1:
            raise Malformed("a value in brackets of its own; take them away, or write a list", start)
        return found

    def _object(self, depth: int) -> dict[str, object]:
        self._sign("{")
        found: dict[str, object] = {}
        while not self._sign("}"):
            if found and not self._sign(","):
                raise Malformed("',' or '}' is wanted", self.place)
            if found and self._sign("}"):
                break
            start = self.place
            if self.text[start : start + 1] not in ("'", '"') or start >= len(self.text):
                raise Malformed("a key is text in quotes", start)
            key = self._text()
            if key in found:
                raise Malformed("a key stands twice", start)
            if not self._sign(":"):
                raise Malformed("':' is wanted behind a key", self.place)
            found[key] = self._value(depth + 1)
        return found


def _sign_of(match: re.Match[str]) -> str:
    """What an escape in a text means, as in Python: one that is none is itself, so that patterns stay what they are.

    Raises:
        ValueError: a number of no character, or a character by its name.
    """
    high, low, *digits, octal, sign = match.groups()
    if high is not None:  # one character as JSON writes it
        return chr(0x10000 + ((int(high, 16) - 0xD800) << 10) + int(low, 16) - 0xDC00)
    if sign is None:
        code = int(octal, 8) if octal is not None else int(next(filter(None, digits)), 16)
        if 0xD800 <= code < 0xE000:
            raise ValueError("half a character")
        return chr(code)
    if sign in "NxuU":
        raise ValueError("a character by its name, or too few digits")
    return _SIGNS.get(sign, match[0])
