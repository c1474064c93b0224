"""What an approval holds for, as a digest: the tool, what the model wrote, and what came of that when it was checked.

Theory. A person looks at checked arguments, defaults included. The yes is for exactly these. So what the model wrote
and what it was checked to are spelled out in one way each (names in order, types told apart) and go through a keyed
hash with the tool's name. Where the same call is looked over again, in this process or in another one, and comes to
something else, the digest differs: the schema, a default or the arguments have changed, and the approval is for
another call.

An object that has no one spelling counts with the name of its type; what the model wrote is spelled out all the same.

House rules. Types go by their own names and not by those of their modules: a script's module is called otherwise where
it is imported. Nothing here fails, whatever the values are.

Not here: keys (core), identity for sharing a run, which may go by the identity of objects (arguments).
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Final, cast

from towerman.records import keyed

MAX_DEPTH: Final = 200
"""Levels that are spelled out; checked arguments have 64 at most, and models in them a few more."""

_SCALARS: Final = frozenset({str, int, bool, type(None)})

_WORDS: Final = frozenset({"description", "title", "examples", "$comment"})
"""Keywords of a schema that say nothing about which values it takes."""


def binding(key: bytes, tool: str, emitted: Mapping[str, object] | str, keywords: Mapping[str, object]) -> str:
    """The digest of a call: 32 hexadecimal digits of an HMAC-SHA256.

    Args:
        key: under which it is made.
        tool: the tool's declared name.
        emitted: the arguments as they came.
        keywords: the arguments as they were checked.
    """
    return keyed(key, "approval", tool, _text(_loaded(emitted)), _text(keywords)).hex()[:32]


def shape(schema: Mapping[str, object]) -> str:
    """A digest of what a tool's schema takes; words for readers do not count."""
    told = json.dumps(_bare(schema), sort_keys=True, default=str)
    return hashlib.sha256(told.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _bare(schema: object) -> object:
    if isinstance(schema, Mapping):
        # A property that is called like a keyword has a schema of its own, not a text.
        return {
            str(key): _bare(value)
            for key, value in schema.items()
            if key not in _WORDS or not isinstance(value, str | list)
        }
    if isinstance(schema, list | tuple):
        return [_bare(one) for one in schema]
    return schema


def _loaded(emitted: Mapping[str, object] | str) -> object:
    """What text says, however it is spaced and ordered."""
    if not isinstance(emitted, str):
        return emitted
    try:
        return json.loads(emitted) if emitted.strip() else {}
    except (ValueError, RecursionError):
        return emitted


def _text(value: object) -> str:
    try:
        return json.dumps(_spelled(value, 0))
    except Exception:  # of an object that does not let itself be looked at, or a number that cannot be printed
        return f"?{type(value).__name__}"


def _spelled(value: object, depth: int) -> object:
    """The value in lists, each with its kind in front, and plain scalars: no two values are spelled alike."""
    kind = type(value)
    if kind in _SCALARS:
        return value
    if kind is float:
        return ["float", repr(value)]
    if depth > MAX_DEPTH:
        return ["deep"]
    depth += 1
    if isinstance(value, Enum):
        return [kind.__qualname__, value.name]
    if isinstance(value, Mapping):
        return ["object", _entries(value, depth)]
    if kind is list or kind is tuple:
        return ["list", *[_spelled(one, depth) for one in cast("list[object]", value)]]
    if isinstance(value, set | frozenset):
        return ["set", *sorted(_text_at(one, depth) for one in value)]
    if isinstance(value, bytes | bytearray):
        return ["bytes", bytes(value).hex()]
    return [kind.__qualname__, _inside(value, kind, depth)]


def _entries(given: Mapping[object, object], depth: int) -> list[object]:
    return [list(pair) for pair in sorted((_text_at(key, depth), _text_at(one, depth)) for key, one in given.items())]


def _text_at(value: object, depth: int) -> str:
    return json.dumps(_spelled(value, depth))


def _inside(value: object, kind: type, depth: int) -> object:
    """What is in an object that is no container, or nothing where that has no one spelling."""
    pydantic = sys.modules.get("pydantic")  # nobody has a model of it where it was not imported
    if pydantic is not None and issubclass(kind, pydantic.BaseModel):
        extra = getattr(value, "__pydantic_extra__", None) or {}
        return _entries(dict([*vars(value).items(), *extra.items()]), depth)
    if is_dataclass(kind):
        return _entries({one.name: getattr(value, one.name, None) for one in fields(kind)}, depth)
    if isinstance(value, tuple):
        return [_spelled(one, depth) for one in value]
    if isinstance(value, str | int | float):
        return [_spelled(base(value), depth) for base in (str, int, float) if isinstance(value, base)]
    return str(value) if _has_one_spelling(kind) else None


def _has_one_spelling(kind: type) -> bool:
    from datetime import date, time, timedelta, tzinfo
    from decimal import Decimal
    from fractions import Fraction
    from ipaddress import IPv4Address, IPv4Interface, IPv4Network, IPv6Address, IPv6Interface, IPv6Network
    from pathlib import PurePath
    from uuid import UUID

    numbers = (complex, Decimal, Fraction, UUID)
    times = (date, time, timedelta, tzinfo)  # of which a datetime is one
    networks = (IPv4Address, IPv4Interface, IPv4Network, IPv6Address, IPv6Interface, IPv6Network)
    return issubclass(kind, (*numbers, *times, *networks, PurePath))
