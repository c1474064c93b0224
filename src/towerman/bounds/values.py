"""What a value is, told by its type: text, one thing that is written as text, or neither.

House rules. A handler's object is told apart by its type, never by what it claims to be.

Not here: containers and objects with fields (reading).
"""

from __future__ import annotations

import os
from base64 import b64encode
from collections import UserString
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from pathlib import PurePath
from typing import Final, cast
from uuid import UUID

_TOLD_BY_STR: Final = frozenset({"fractions", "ipaddress"})  # modules whose values are text, so as not to load them
_own_name: Final = type.__dict__["__name__"].__get__  # a metaclass cannot talk its way around this one


def call_method(value: object, method: str, *arguments: object, **options: object) -> object:
    return cast(object, getattr(value, method)(*arguments, **options))


def type_name(kind: type) -> str:
    return str(_own_name(kind))[:100]


def named_kind(kind: type) -> str:
    name = type_name(kind)
    return f"{'an' if name[:1] in 'AEIOUaeiou' else 'a'} {name} object"


def text_of(value: object, kind: type) -> str | None:
    """The text that a str or UTF-8 bytes of any kind are; None for everything else."""
    if issubclass(kind, str):
        return str.__str__(cast(str, value))
    if issubclass(kind, (bytes, bytearray, memoryview)):
        try:
            return bytes(cast(bytes, value)).decode()
        except UnicodeDecodeError:
            return None
    return UserString.__str__(cast(UserString, value)) if issubclass(kind, UserString) else None


def scalar_of(value: object, kind: type) -> str | None:
    """The text of a value that is one thing; None for numbers, containers and what is not known."""
    if issubclass(kind, (date, time)):  # a datetime is a date
        return cast(datetime, value).isoformat()
    if issubclass(kind, (Decimal, UUID)) or any(base.__module__ in _TOLD_BY_STR for base in kind.__mro__):
        return str(value)
    if issubclass(kind, (PurePath, os.DirEntry)):
        return os.fsdecode(cast("os.PathLike[str]", value))
    if issubclass(kind, timedelta):
        return _duration(cast(timedelta, value))
    if issubclass(kind, (bytes, bytearray, memoryview)):
        return "data:application/octet-stream;base64," + b64encode(bytes(cast(bytes, value))).decode()
    if issubclass(kind, complex):
        return str(complex(cast(complex, value))).strip("()")
    return "**********" if hasattr(kind, "get_secret_value") else None


def _duration(value: timedelta) -> str:
    """A duration of ISO 8601, without years and months: P1DT2H, PT1.5S, -PT1S."""
    sign = "-" if value < timedelta(0) else ""
    value = abs(value)
    hours, seconds = divmod(value.seconds, 3600)
    minutes, seconds = divmod(seconds, 60)
    fraction = f".{value.microseconds:06}".rstrip("0") if value.microseconds else ""
    day = f"{value.days}D" if value.days else ""
    clock = (f"{hours}H" if hours else "") + (f"{minutes}M" if minutes else "")
    clock += f"{seconds}{fraction}S" if seconds or fraction or not (day or clock) else ""
    return f"{sign}P{day}" + (f"T{clock}" if clock else "")
