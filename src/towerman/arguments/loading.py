"""Arguments as they came become a fresh dictionary within the limits, or are refused; nothing is repaired.

Theory. Text is looked over before it is parsed (length, depth), and while it is (names, numbers), so that no text can
keep the parser busy or overflow its stack. A mapping is copied under the same limits; objects and lists in it are
fresh, other Python objects are passed on. The usual dict, a few short values that are no containers, is known to be
within all limits after one look at each.

House rules. What the parser says may quote the input, so it is told in our own words. No exception that holds the text
hangs on to the refusal.

Not here: whether the arguments fit the tool (signatures, schemas).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from typing import Final, cast

from towerman.arguments.contract import MAX_ARGUMENT_BYTES, MAX_DEPTH, MAX_DIGITS, ArgumentsRefused

_WHITESPACE: Final = " \t\n\r"

_TOO_LONG: Final = f"The arguments are longer than {MAX_ARGUMENT_BYTES:,} bytes: send less, or split the call."
_TOO_DEEP: Final = "The arguments are nested too deep: send a flatter value, of at most {} levels."
_BIG_NUMBER: Final = f"The arguments hold a whole number of more than {MAX_DIGITS} digits: send a smaller one, or text."
_NO_NUMBER: Final = "The arguments hold a number that is not finite or too large: send a finite number, null or text."
_HALF_CHARACTER: Final = (
    "The arguments hold half of a surrogate pair, which is no character: send the whole character, "
    "or both halves of its escape."
)
_EMPTY: Final = "The arguments are empty, but the tool has required arguments: send them as one JSON object."
_UNREADABLE: Final = "The arguments could not be read: send one plain JSON object."

# What the parser of the standard library reports -> what the model is told. The original texts may
# quote the input, so only these go out.
_SYNTAX: Final[tuple[tuple[str, str], ...]] = (
    ("Expecting property name", "expected a name in double quotes"),
    ("Illegal trailing comma", "a comma stands before the end of an object or list"),
    ("Expecting ':'", "expected ':' after a name"),
    ("Expecting ','", "expected ',' or the end of the object or list"),
    ("Expecting value", "expected a value"),
    ("Unterminated string", "a string does not end; it starts"),
    ("Invalid control", "a raw control character in a string (write a line break as \\n)"),
    ("Invalid \\", "a wrong escape in a string"),
    ("Unexpected UTF-8 BOM", "a byte order mark, which JSON does not have,"),
    ("Extra data", "text after the end of the value"),
)
INT64: Final = 1 << 63
FEW: Final = 32  # names of a dict that is taken at the first look
SHORT: Final = 4096  # characters of a name or a text in it
_HUGE: Final = 10**MAX_DIGITS


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ArgumentsRefused("The arguments give one name twice in the same object: give each name once.")
    return out


def _float(text: str) -> float:
    value = float(text)
    if isfinite(value):
        return value
    raise ArgumentsRefused(_NO_NUMBER)


def _constant(_: str) -> float:
    raise ArgumentsRefused(_NO_NUMBER)


def _int(text: str) -> int:
    if len(text.lstrip("-")) > MAX_DIGITS:
        raise ArgumentsRefused(_BIG_NUMBER)
    return int(text)


_Scan = Callable[[str, int], tuple[object, int]]


def _scanner(parse_int: Callable[[str], int] | None) -> _Scan:
    decoder = json.JSONDecoder(
        object_pairs_hook=_unique, parse_float=_float, parse_constant=_constant, parse_int=parse_int
    )
    return cast(_Scan, decoder.scan_once)  # type: ignore[attr-defined]


# A text of MAX_DIGITS characters cannot hold too long a number, so the usual text is read without a call per number.
_scan_short: Final = _scanner(None)
_scan_long: Final = _scanner(_int)

# Possessive, and with an end for the open string too: it never steps back, so it is linear on any text.
_STRINGS: Final = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
_NO_BRACKETS: Final = re.compile(r"[^\[\]]+")
_ONE_KIND: Final = {ord("{"): "[", ord("}"): "]"}


def load_arguments(raw: object, *, any_required: bool) -> dict[str, object]:
    """Read arguments as they came into a fresh dictionary, or refuse them.

    Args:
        raw: JSON text, UTF-8 bytes of it, or a mapping.
        any_required: the tool has required arguments, so empty text is refused instead of meaning {}.

    Returns:
        Names to values. Objects and lists in it are fresh; other Python objects of a mapping are passed on.

    Raises:
        ArgumentsRefused: what was given is not one JSON object within the limits.
    """
    return load(raw, _EMPTY if any_required else "", MAX_DEPTH)[0]


def load(raw: object, empty: str, depth: int) -> tuple[dict[str, object], bool]:
    """The loaded arguments, and whether there may be a bool among them."""
    if isinstance(raw, str):
        return _from_text(raw, empty, depth), "true" in raw or "false" in raw
    if type(raw) is dict:
        return _flat(raw) or copied(raw, depth)
    if isinstance(raw, Mapping):
        return copied(raw, depth)
    if isinstance(raw, bytes | bytearray):
        if len(raw) > MAX_ARGUMENT_BYTES:
            raise ArgumentsRefused(_TOO_LONG)
        text = raw.decode("utf-8", "replace")
        if text.encode() != raw:
            raise ArgumentsRefused("The arguments are not UTF-8 text: send one JSON object in UTF-8.")
        return load(text, empty, depth)
    raise ArgumentsRefused(_not_an_object(raw))


def _from_text(text: str, empty: str, depth: int) -> dict[str, object]:
    """Parse JSON text. `empty` is the refusal of blank text, or "" where blank means {}."""
    if len(text) > MAX_ARGUMENT_BYTES or (not text.isascii() and _utf8_bytes(text) > MAX_ARGUMENT_BYTES):
        raise ArgumentsRefused(_TOO_LONG)
    start = 0
    if not text.startswith("{"):
        if not text or text.isspace():
            if empty:
                raise ArgumentsRefused(empty)
            return {}
        if text.startswith("\ufeff"):
            raise ArgumentsRefused(_syntax(text, "Unexpected UTF-8 BOM", 0))
        start = len(text) - len(text.lstrip(_WHITESPACE))
    if len(text) > depth and text.count("{") + text.count("[") > depth and _deep(text, depth):
        raise ArgumentsRefused(_TOO_DEEP.format(depth))
    try:
        value, end = (_scan_short if len(text) <= MAX_DIGITS else _scan_long)(text, start)
        if end == len(text) or not text[end:].strip(_WHITESPACE):
            if type(value) is dict:
                if "\\u" in text and _halved(value):
                    raise ArgumentsRefused(_HALF_CHARACTER)
                return value
            told = _not_an_object(value)
        else:
            told = _syntax(text, "Extra data", end + len(text[end:]) - len(text[end:].lstrip(_WHITESPACE)))
    except StopIteration as stop:
        told = _syntax(text, "Expecting value", cast(int, stop.value))
    except json.JSONDecodeError as error:
        told = _syntax(text, error.msg, error.pos)
    except ValueError:  # the interpreter was told to read fewer digits than we would
        told = _BIG_NUMBER
    except RecursionError:  # little stack was left where we were called
        told = _TOO_DEEP.format(depth)
    # Raised out here so that no exception that holds the text hangs on to it.
    raise ArgumentsRefused(told)


def _utf8_bytes(text: str) -> int:
    size = len(text.encode("utf-8", "replace"))
    if size < len(text) or _halved(text):
        raise ArgumentsRefused(_HALF_CHARACTER)
    return size


def _halved(value: object) -> bool:
    """Is there a lone surrogate anywhere in a JSON value?"""
    try:
        (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)).encode()
    except UnicodeEncodeError:
        return True
    return False


def _deep(text: str, depth: int) -> bool:
    """Is the text nested too deep? Decided before parsing, since deep recursion ends differently on every Python."""
    brackets = _NO_BRACKETS.sub("", _STRINGS.sub("", text).translate(_ONE_KIND))
    for _ in range(depth):
        if "[]" not in brackets:
            break
        brackets = brackets.replace("[]", "")
    return "[]" in brackets or brackets.count("[") > depth


def _syntax(text: str, report: str, position: int) -> str:
    found = next((said for start, said in _SYNTAX if report.startswith(start)), "something unexpected")
    line = text.count("\n", 0, position) + 1
    column = position - text.rfind("\n", 0, position)
    early = "" if position < len(text.rstrip()) else ", where the text ends: it may have been cut off"
    return (
        f"The arguments are not valid JSON: {found} at line {line}, column {column}{early}. Send one whole JSON object."
    )


def frozen(given: object) -> object:
    """The same arguments, which nobody changes any more by changing the object that was handed in.

    Objects and lists are copied; other Python objects in them are the same ones. What is no mapping within the limits
    is returned as it is: whoever loads it refuses it.
    """
    if isinstance(given, bytearray):
        return bytes(given)
    if not isinstance(given, Mapping):
        return given
    try:
        return load(given, "", MAX_DEPTH)[0]
    except ArgumentsRefused:
        return given


_KINDS: Final[tuple[tuple[type | tuple[type, ...], str], ...]] = (
    (bool, "true or false"),
    ((int, float), "a number"),
    (str, "a string (send the object itself, not JSON inside a string)"),
    ((list, tuple), "a list"),
    (type(None), "null"),
)


def _not_an_object(value: object) -> str:
    kind = next((word for kinds, word in _KINDS if isinstance(value, kinds)), "something else")
    return f'The arguments must be one JSON object, such as {{"name": "value"}}: got {kind}.'


class _Left:
    """What a mapping may still hold; it also ends cycles and shared bulk."""

    __slots__ = ("bools", "depth", "size")

    def __init__(self, depth: int) -> None:
        self.size = MAX_ARGUMENT_BYTES
        self.depth = depth
        self.bools = False

    def take(self, size: int) -> None:
        self.size -= size
        if self.size < 0:
            raise ArgumentsRefused(_TOO_LONG)


def is_short(value: object, kind: type) -> bool:
    """Is it a value of one of the plain types, short and of a size that is no matter? `kind` is its type.

    Nothing of the value's own is called before its type is known to be a plain one.
    """
    if kind is str:
        return len(value) <= SHORT and value.isascii()  # type: ignore[arg-type,attr-defined]  # it is text
    if kind is int:
        return -INT64 <= value < INT64  # type: ignore[operator]  # it is a number
    if kind is float:
        return isfinite(value)  # type: ignore[arg-type]  # it is a number
    return kind is bool or value is None


def _flat(given: dict[str, object]) -> tuple[dict[str, object], bool] | None:
    """What `copied` gives for few names and short values that are no containers; None for anything else."""
    if len(given) > FEW:
        return None
    out, bools = given.copy(), False
    for name, value in out.items():
        if type(name) is not str or len(name) > SHORT or not name.isascii():
            return None
        kind = type(value)
        if not is_short(value, kind):
            return None
        bools = bools or kind is bool
    return out, bools


def copied(given: Mapping[object, object], depth: int) -> tuple[dict[str, object], bool]:
    left = _Left(depth)
    try:
        return _object(given, 1, left), left.bools
    except ArgumentsRefused:
        raise
    except Exception as error:  # a mapping of somebody's own, or one that changes while it is read
        told = _TOO_DEEP.format(depth) if isinstance(error, RecursionError) else _UNREADABLE
    raise ArgumentsRefused(told)


def _object(given: Mapping[object, object], depth: int, left: _Left) -> dict[str, object]:
    """A fresh copy within the limits."""
    if depth > left.depth:
        raise ArgumentsRefused(_TOO_DEEP.format(left.depth))
    size = len(given)
    left.take(size)
    out: dict[str, object] = {}
    for name, value in given.items():
        if not isinstance(name, str):
            raise ArgumentsRefused("The arguments hold a name that is not text: all names must be strings.")
        size = len(name) if name.isascii() else _utf8_bytes(name)
        if type(value) is str and value.isascii():
            size += len(value)
        elif type(value) is not int or not -INT64 <= value < INT64:
            value = _value(value, depth, left)
        left.take(size)
        out[name] = value
    return out


def _value(value: object, depth: int, left: _Left) -> object:
    kind = type(value)
    if kind is dict:
        return _object(cast(dict[object, object], value), depth + 1, left)
    if kind is list or kind is tuple:
        return _list(cast(Sequence[object], value), depth + 1, left)
    if isinstance(value, str):
        left.take(len(value) if value.isascii() else _utf8_bytes(value))
    elif isinstance(value, float):
        if not isfinite(value):
            raise ArgumentsRefused(_NO_NUMBER)
    elif isinstance(value, int):
        left.bools = left.bools or kind is bool
        if not -_HUGE < value < _HUGE:
            raise ArgumentsRefused(_BIG_NUMBER)
    elif isinstance(value, Mapping):
        return _object(value, depth + 1, left)
    elif value is not None:  # a Python object of a native call is passed on as it is
        left.bools = True
        left.take(len(value) if isinstance(value, bytes | bytearray) else 0)
    return value


def _list(given: Sequence[object], depth: int, left: _Left) -> object:
    if depth > left.depth:
        raise ArgumentsRefused(_TOO_DEEP.format(left.depth))
    left.take(len(given))
    items = [_value(item, depth, left) for item in given]
    return items if type(given) is list else tuple(items)
