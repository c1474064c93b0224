"""Checked arguments as something that can be compared: equal for two calls that cannot be told apart, else not.

Theory. Two calls are identical when their handler could not see a difference between them. So types count (1, 1.0 and
true differ), and so does everything of a value that code can look at: how a decimal is spelled, the time zone of an
instant, which fields of a model were given. Only the order of the keys of an object does not count.

House rules. Where it is not certain that two values are the same there is no identity, and the call stands for itself.
An identity holds argument values: it lives while a batch is prepared and is never shown. Some objects in it stand for
themselves by their number, so the arguments outlive it.

Not here: which calls may share a run (plan).
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Final, cast

from towerman.arguments.contract import MAX_DEPTH

MAX_VALUES: Final = 10_000
"""Most values in the arguments of one call that has an identity: to compare more takes longer than it is worth."""

_THEMSELVES: Final = frozenset({str, int, bool, bytes, type(None)})
"""Types whose values are equal only if nobody can tell them apart."""

_BUILT_IN: Final = (str, int, float, complex, bytes, bytearray, list, tuple, dict, set, frozenset)

_OWN_SLOTS: Final = frozenset(
    {"__dict__", "__weakref__", "__pydantic_fields_set__", "__pydantic_extra__", "__pydantic_private__"}
)


class _Uncertain(Exception):
    """Nobody can say whether two such values are the same."""


def identity(arguments: Mapping[str, object]) -> Hashable | None:
    """What is equal for calls with identical arguments only, or None where that is not certain.

    Args:
        arguments: checked keyword arguments; they have to outlive what is returned.
    """
    try:
        return _Reader().entries(cast("Mapping[object, object]", arguments), 1)
    except Exception:  # uncertain, or an object that does not let itself be looked at
        return None


def mark(key: bytes, tool: str, arguments: Mapping[str, object]) -> bytes | None:
    """A keyed digest of a call: equal for calls of one tool with identical arguments, in this process; it can be kept
    and says nothing of the arguments. None where there is no identity.

    Args:
        key: 16 to 64 random bytes.
        tool: the name.
        arguments: checked keyword arguments.
    """
    same = identity(arguments)
    return None if same is None else _digest(key, (tool, same))


def _digest(key: bytes, same: object) -> bytes:
    """What an identity is made of, each part with its kind and length before it."""
    from hashlib import blake2b

    if isinstance(same, tuple | frozenset):
        parts = [_digest(key, part) for part in same]
        told = b"".join(sorted(parts) if isinstance(same, frozenset) else parts)
    elif isinstance(same, type):
        told = str(id(same)).encode()
    elif isinstance(same, bytes):
        told = same
    else:
        told = str(same).encode("utf-8", "surrogatepass")
    return blake2b(f"{type(same).__name__} {len(told)} ".encode() + told, digest_size=16, key=key).digest()


@cache
def _spelled() -> frozenset[type]:
    """Types whose text says all of a value; some of them call values equal that are spelled differently."""
    from datetime import date, timedelta
    from decimal import Decimal
    from fractions import Fraction
    from ipaddress import IPv4Address, IPv4Interface, IPv4Network, IPv6Address, IPv6Interface, IPv6Network
    from pathlib import PosixPath, PurePosixPath, PureWindowsPath, WindowsPath
    from uuid import UUID

    numbers = {float, complex, Decimal, Fraction, UUID, date, timedelta}
    networks = {IPv4Address, IPv4Interface, IPv4Network, IPv6Address, IPv6Interface, IPv6Network}
    return frozenset({*numbers, *networks, PosixPath, PurePosixPath, PureWindowsPath, WindowsPath})


class _Reader:
    """Goes through the arguments of one call, as far as `MAX_VALUES`, which also ends cycles and shared bulk."""

    __slots__ = ("_left",)

    def __init__(self) -> None:
        self._left = MAX_VALUES

    def entries(self, given: Mapping[object, object], depth: int) -> Hashable:
        """Keys and values in any order."""
        return frozenset([(self._value(key, depth), self._value(value, depth)) for key, value in given.items()])

    def _value(self, given: object, depth: int) -> Hashable:
        """One value with all that is in it."""
        self._left -= 1
        if self._left < 0 or depth > MAX_DEPTH:
            raise _Uncertain
        kind = type(given)
        if kind in _THEMSELVES:
            return kind, given
        if kind is dict:
            return kind, self.entries(cast("dict[object, object]", given), depth + 1)
        if kind is list or kind is tuple:
            return kind, tuple([self._value(item, depth + 1) for item in cast("list[object]", given)])
        if kind is set or kind is frozenset:
            return kind, frozenset([self._value(item, depth + 1) for item in cast("set[object]", given)])
        if kind in _spelled():
            return kind, str(given)
        if issubclass(kind, Enum):
            return Enum, id(given)  # each of its members is there once
        return id(kind), self._record(given, kind, depth)

    def _record(self, given: object, kind: type, depth: int) -> Hashable:
        """A point in time, a model of pydantic, a dataclass or a named tuple: all that it holds."""
        from datetime import datetime, time

        if kind is datetime or kind is time:
            instant = cast("datetime", given)
            return instant.isoformat(), instant.fold, _zone(instant.tzinfo)
        held = _held(given, kind)
        pydantic = sys.modules.get("pydantic")  # nobody has a model of it where it was not imported
        if pydantic is not None and issubclass(kind, pydantic.BaseModel):
            names = ("__pydantic_extra__", "__pydantic_private__", "__pydantic_fields_set__")
            parts = [held, *[object.__getattribute__(given, name) for name in names]]
        elif issubclass(kind, tuple) and hasattr(kind, "_fields") and not held:
            parts = [*cast("tuple[object, ...]", given)]
        elif is_dataclass(kind) and not issubclass(kind, _BUILT_IN):
            own = [field.name for field in fields(kind) if field.name not in held]
            parts = [held, *[object.__getattribute__(given, name) for name in own]]
        else:
            raise _Uncertain
        return tuple([self._value(part, depth + 1) for part in parts])


def _held(given: object, kind: type) -> dict[object, object]:
    """An object's attributes, if all of them are in its dictionary or are fields of a dataclass."""
    known = {field.name for field in fields(kind)} if is_dataclass(kind) else set()
    known |= _OWN_SLOTS
    for one in kind.__mro__:
        slots = one.__dict__.get("__slots__", ())
        if not known.issuperset((slots,) if isinstance(slots, str) else slots):
            raise _Uncertain
    try:
        return dict(object.__getattribute__(given, "__dict__"))
    except AttributeError:
        return {}


def _zone(zone: object) -> Hashable:
    """A time zone: a fixed offset by what it says, any other by being the same object."""
    from datetime import timezone

    if type(zone) is timezone or type(zone).__module__.startswith("pydantic_core."):
        return repr(zone)
    return id(zone)
