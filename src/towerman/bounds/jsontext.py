"""JSON text: written compactly, measured in UTF-8 bytes, and read back where nothing would be lost.

House rules. No number that JSON does not have is written. What is read back must come out the same when it is written
anew: a repeated key, or a number that a float cannot hold, is no document.

Not here: values that are no plain data (values, reading).
"""

from __future__ import annotations

import json
import json.encoder
from collections.abc import Callable
from decimal import Decimal
from typing import Final, NoReturn

from towerman.bounds.values import scalar_of

MISSING: Final = object()


def _textual(value: object) -> str:
    text = scalar_of(value, type(value))
    if text is None:  # an object that slipped in after the value was looked at
        raise TypeError("not plain data")
    return text


_encoder: Final = json.JSONEncoder(
    ensure_ascii=False, check_circular=False, allow_nan=False, separators=(",", ":"), default=_textual
)
quoted: Final = _encoder.encode


def _fast_dumps() -> Callable[[object], str]:
    """`_quote` without its set-up on each call (two thirds of its time for a small dict), where that can be had."""
    make = getattr(json.encoder, "c_make_encoder", None)
    quote = getattr(json.encoder, "encode_basestring", None)
    if make is None or quote is None:
        return quoted
    chunks = make(None, _textual, quote, None, ":", ",", False, False, False)
    join = "".join
    return lambda value: join(chunks(value, 0))


dumps: Final = _fast_dumps()


def utf8_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def quoted_bytes(text: str) -> int:
    return utf8_bytes(quoted(text)) - 2


def clean(text: str) -> str:
    """Valid UTF-8: surrogate pairs become the character that they stand for, lone ones U+FFFD."""
    try:
        utf8_bytes(text)
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _pairs(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is repeated")
    return found


def _float(digits: str) -> float:
    number = float(digits)
    if Decimal(digits) != Decimal(repr(number)):
        raise ValueError("a number that a float cannot hold")
    return number


def _constant(name: str) -> NoReturn:
    raise ValueError("not a number")


_decode: Final = json.JSONDecoder(object_pairs_hook=_pairs, parse_float=_float, parse_constant=_constant).decode


def read_json(text: str) -> object:
    """The data of a JSON document that nothing would be lost of by writing it anew; else _MISSING."""
    try:
        return _decode(text)
    except (ValueError, ArithmeticError, RecursionError):
        return MISSING
