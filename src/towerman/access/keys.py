"""One resource has one key, however it is spelled.

Theory. Where the key cannot be known, more is locked, or the call is refused:
- The scheme is the literal text before the first ":" that stands before any "/"; its case does not matter. It comes
  from the template (or from the text that a callable returns), never from a value. The root of a scheme, `ticket:`,
  stands above all its keys: `ticket:/**` is every ticket.
- A key without a scheme, `repo/x`, is the same as `/repo/x` and is written so; a ":" in it means nothing. Nothing
  stands above its first segment.
- `file`: the path as the operating system resolves it at this moment: absolute, links followed as far as they exist,
  normcase. A path that starts with `~/`, a `file:///` URL given as a value, and an absolute value where the template
  expected a relative one (`file:/srv/{name}`) can be read in two ways by a handler: both are locked. Two hard links to
  one file are two keys, a link inside a subtree does not widen it, and a link made after this moment is not seen.
- Any other scheme: "/" nests, also in a value; empty segments and "." are dropped, so `doc:/a//b` is `doc:a/b`. A
  segment ".." is refused: only the tool knows whether it climbs.
- Values: a str as it is, 42 and 42.0 and "42" are one, True is "true", an Enum is its value, an aware datetime its
  instant in UTC, anything else that is hashable and has a `__str__` of its own is that text. Each element of a list,
  tuple or set is a resource of its own. None, "" and blanks name nothing, so the call is refused. Text is compared in
  the normal form NFC; a character that UTF-8 cannot hold is written as an escape.
- "**" in a value is text: such a segment is written "***", so that no node lock looks like a tree lock.
- Keys stay short: a segment over 128 characters is replaced by its SHA-256 digest, and what lies deeper than 64
  segments is locked as its ancestor there.

House rules. Words of a refusal name no value. Nothing learned from the file system is kept: links change.

Not here: where in the arguments a value comes from (declarations).
"""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Collection, Mapping, Sequence, Set
from datetime import UTC, datetime
from decimal import Decimal
from enum import Enum
from typing import Final, Literal

MAX_SEGMENT: Final = 128
"""Longest part of a key between two slashes, in characters; a longer one is replaced by its digest."""

MAX_DEPTH: Final = 64
"""Most segments of a key; what lies deeper is locked as its ancestor at this depth."""

MAX_PATH: Final = 4096
"""Longest path of a file, in characters: the operating system opens no longer one."""

MAX_ACCESSES: Final = 10_000
"""Most resources that one template, or one callable, may name for one call."""

_MAX_MARKS: Final = 32
"""Most combining characters in a row: normalising n of them takes n squared steps (16 seconds for 100,000)."""


class AccessRefused(Exception):
    """What this call touches cannot be told, so it must not run; says why, without any value.

    Args:
        message: names what was declared, the argument and the fix.
        code: `invalid_arguments` when other arguments would help, `policy_error` when the declaration is at fault.
    """

    def __init__(self, message: str, code: Literal["invalid_arguments", "policy_error"] = "invalid_arguments") -> None:
        super().__init__(message)
        self.code = code


MISSING: Final = object()


class Unnameable(Exception):
    """A value gives no text (said in words that follow its name), or a text gives no key (said in a sentence)."""


# Text that is its own canonical segment, or segments: nothing to fold, to normalise, to escape or to shorten.
is_plain: Final = re.compile(r"[A-Za-z0-9_@+-][A-Za-z0-9_@+.:-]{0,127}").fullmatch
_is_plain_path: Final = re.compile(
    r"(?=.{1,128}\Z)[A-Za-z0-9_@+-][\w@+.: -]*(?:/[A-Za-z0-9_@+-][\w@+.: -]*)*", re.A
).fullmatch


def _text(value: object) -> str:
    """The text that a value has in a key; equal values have equal texts."""
    while isinstance(value, Enum):
        value = value.value
    if isinstance(value, str):
        text = str.__str__(value)
        if not text or text.isspace():
            raise Unnameable("is empty")
        return text
    if value is None:
        raise Unnameable("is None")
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        try:
            return str(int(value))
        except ValueError:  # Python writes no decimal text of thousands of digits
            return hex(value)
    if isinstance(value, float):
        value = Decimal(repr(float(value)))
    if isinstance(value, Decimal):
        return _decimal_text(value)
    if isinstance(value, bytes | bytearray):
        return _text(os.fsdecode(bytes(value)))
    if isinstance(value, os.PathLike):
        return _text(os.fsdecode(value).replace(os.sep, "/"))
    kind = type(value)
    # The text that object.__str__ makes tells the address, or the fields of a record: not what the value is called.
    if getattr(kind, "__hash__", None) is None or kind.__str__ is object.__str__:
        raise Unnameable(f"is of type {kind.__name__[:64]}, which is neither text nor a number")
    try:
        if isinstance(value, datetime):
            return (value if value.tzinfo is None else value.astimezone(UTC)).isoformat()
        return _text(str(value))
    except Unnameable:
        raise
    except Exception:
        raise Unnameable(f"is of type {kind.__name__[:64]} and cannot be written as text") from None


def _decimal_text(value: Decimal) -> str:
    if not value.is_finite() or abs(value.adjusted()) > MAX_PATH:
        raise Unnameable("is not a finite number of sensible size")
    if value == value.to_integral_value():
        return _text(int(value))
    return f"{value:f}".rstrip("0")


def _elements(value: object) -> Collection[object] | None:
    """The value itself when it is a list of some kind, each element of which is a resource; else None."""
    if isinstance(value, Sequence | Set) and not isinstance(value, str | bytes | bytearray | memoryview):
        return value
    return None


def texts_of(value: object) -> tuple[str, ...]:
    """The texts of a value: one, or one for each element of a list; a set's are sorted, so that they have an order."""
    if type(value) is str or (elements := _elements(value)) is None:
        return (_text(value),)
    if len(elements) > MAX_ACCESSES:
        raise Unnameable(f"has more than {MAX_ACCESSES} elements")
    try:
        texts = dict.fromkeys(map(_text, elements))
    except Unnameable as reason:
        raise Unnameable(f"has an element that {reason}") from None
    return tuple(sorted(texts) if isinstance(elements, Set) else texts)


def reached(value: object, steps: tuple[str, ...]) -> object:
    """Follow `.field` and `[key]` into mappings, sequences and objects; a field of a list is that of each element."""
    for place, step in enumerate(steps):
        name = step[1:]
        if value is None:
            raise Unnameable("is None")
        if isinstance(value, Mapping):
            if name in value:
                value = value[name]
                continue
            if name.isdecimal() and int(name) in value:
                value = value[int(name)]
                continue
        elif step[0] == "[" and name.isdecimal() and isinstance(value, Sequence):
            if int(name) < len(value):
                value = value[int(name)]
                continue
        elif (elements := _elements(value)) is not None and not hasattr(value, "_fields"):  # a named tuple is a record
            inner = [reached(element, steps[place:]) for element in elements]
            texts = [text for found in inner for text in texts_of(found)]
            return set(texts) if isinstance(elements, Set) else texts
        elif step[0] == ".":
            value = getattr(value, name, MISSING)
            if value is not MISSING:
                continue
        raise Unnameable("is missing")
    return value


def _normal(text: str) -> str:
    """The text in NFC and in characters that UTF-8 can hold."""
    if text.isascii():
        return text
    if len(text) > 8 * _MAX_MARKS:
        marks = 0
        for character in text:
            marks = marks + 1 if unicodedata.combining(character) else 0
            if marks > _MAX_MARKS:
                raise Unnameable(f"the name has more than {_MAX_MARKS} combining characters in a row")
    return unicodedata.normalize("NFC", text).encode("utf-8", "backslashreplace").decode()


def _fold(path: str) -> str:
    """The canonical path: no empty segment, no ".", no "**", none too long, not too deep; "" is the root."""
    if _is_plain_path(path):
        return path
    if "\0" in path:
        raise Unnameable("the name holds a null character")
    segments = []
    for segment in _normal(path).split("/"):
        if not segment or segment == ".":
            continue
        if segment == "..":
            raise Unnameable("the name holds the segment '..'; only file: follows it, so write it without")
        if segment == "**":
            segment = "***"
        elif len(segment) > MAX_SEGMENT:
            from hashlib import sha256

            segment = sha256(segment.encode()).hexdigest()
        segments.append(segment)
    return "/".join(segments[:MAX_DEPTH])


def key_of(scheme: str, path: str) -> str:
    """The canonical key of a path in a scheme that is no file's; scheme "" is that of keys without one."""
    folded = _fold(path)
    if scheme:
        return f"{scheme}:{folded}"
    if not folded:
        raise Unnameable("the name is empty")
    return "/" + folded


def file_key(path: str) -> str:
    """The canonical key of a file, there or not, as its path leads now."""
    if len(path) > MAX_PATH:
        raise Unnameable(f"the path is longer than {MAX_PATH} characters")
    try:
        real = os.path.normcase(os.path.realpath(path))
    except (OSError, ValueError):
        raise Unnameable("the path cannot be resolved on this machine") from None
    folded = _fold(real.replace(os.sep, "/"))
    return f"file:/{folded}" if folded else "file:"


def url_path(rest: str) -> str | None:
    """The path of a file URL, given without its "file:"; None when it names another machine."""
    from urllib.parse import unquote

    if rest.startswith("//"):
        host, slash, path = rest[2:].partition("/")
        if host.lower() not in ("", "localhost"):
            return None
        rest = slash + path
    return unquote(re.split("[?#]", rest, maxsplit=1)[0])


def home_path(path: str) -> str | None:
    """The path below the home directory that a shell would see, or None."""
    return os.path.expanduser(path) if path == "~" or path.startswith("~/") else None


def split_scheme(text: str) -> tuple[str, str]:
    """Scheme, folded, and path; the scheme is "" when there is none."""
    head, colon, path = text.partition(":")
    if not colon or "/" in head:
        return "", text
    if not head or head.isspace():
        raise Unnameable("the name has nothing before its ':'")
    if len(head) > MAX_SEGMENT or "\0" in head:
        raise Unnameable(f"the name has a null character, or over {MAX_SEGMENT} characters, before its ':'")
    return _normal(head).casefold(), path


def keys_of(text: str) -> list[str]:
    """The keys that a whole resource name can mean: mostly one, the plain reading first."""
    if not text or text.isspace():
        raise Unnameable("the name is empty")
    scheme, path = split_scheme(text)
    if not path or scheme != "file":
        return [key_of(scheme, path)]
    readings = (path, home_path(path), url_path(path) if path.startswith("//") else None)
    return [file_key(reading) for reading in readings if reading]


def canonical_key(text: str) -> str:
    """The one key of the resource that `text` names, scheme and all.

    Args:
        text: for example `file:../a.txt`, `ticket:42`, `repo/x`. It names one node: a final `/**` is text too.

    Raises:
        AccessRefused: it names nothing (empty, nothing after the scheme), or cannot be resolved.
    """
    try:
        return keys_of(text)[0]
    except Unnameable as reason:
        raise AccessRefused(f"resource: {reason}") from None
