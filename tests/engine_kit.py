"""The function library on a real server, asked directly: what the conformance suite and the tests of Lua stand on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from towerman.engines.library import Library, keys_of, library, named

CLOCK = "towerman:test-clock"

READING = "  local time = redis.call('TIME')\n  return time[1] * 1000000 + time[2]\n"
"""How the library reads the time; tests load a text that reads a key of theirs instead. What users load cannot."""

EARLY = 1_767_225_600_000_000
"""2026 begins, in microseconds since 1970: instants as large as they are in life."""


def with_clock() -> Library:
    """The library whose time is what a test says."""
    text = library().text.replace(library().name, "towerman_0")
    assert text.count(READING) == 1, "the library reads the time in another place, too"
    return named(text.replace(READING, f"  return tonumber(redis.call('GET', '{CLOCK}'))\n"), 1)


class Direct:
    """One admission group, asked without a client.

    Args:
        client: a connection of redis-py.
        group: its name.
        timed: the test says what time it is.
    """

    def __init__(self, client: Any, group: str, *, timed: bool = True) -> None:
        self.client = client
        self.keys = keys_of(group)
        self.library = with_clock() if timed else library()
        self.timed = timed
        self.now = EARLY
        self.more = 0
        if timed:
            self.at(EARLY)
        client.function_load(self.library.text, replace=True)

    def at(self, us: int) -> None:
        """It is so late."""
        self.now = us
        self.client.set(CLOCK, us)

    def act(self, *ops: Any) -> list[Any]:
        """Ask it several things in one call."""
        head, *answers = self.client.fcall(self.library.act, len(self.keys), *self.keys, json.dumps(ops), 0, 0)
        self.own_now, self.epoch, self.more = int(head[0]), head[1], head[2]
        return [plain(one) for one in answers]

    def one(self, *op: Any) -> Any:
        """Ask it one thing."""
        return self.act(op)[0]

    def look(self, *fields: str) -> list[Any]:
        """What it knows of these states: numbers as numbers."""
        return [numbered(one) for one in self.one("look", list(fields))]

    def forget(self) -> None:
        """Nothing of the group is left."""
        self.client.delete(*self.keys)


def plain(value: Any) -> Any:
    """Bytes as text."""
    if isinstance(value, bytes):
        return value.decode()
    return [plain(one) for one in value] if isinstance(value, list) else value


def numbered(value: Any) -> Any:
    """Texts of numbers as numbers."""
    if isinstance(value, list):
        return [numbered(one) for one in value]
    try:
        return int(value)
    except ValueError:
        return value


def named_values(flat: list[Any]) -> dict[str, Any]:
    """A list of names and values as a mapping."""
    return dict(zip(flat[::2], flat[1::2], strict=True))


def ask(
    pools: list[list[Any]] | None = None,
    holds: list[list[Any]] | None = None,
    rates: list[list[Any]] | None = None,
    breakers: list[list[Any]] | None = None,
    *,
    priority: int = 0,
    share: str = "",
    chain: list[Any] | None = None,
) -> Mapping[str, Any]:
    """An ask as the functions take it."""
    return {
        "p": pools or [],
        "h": holds or [],
        "r": rates or [],
        "b": breakers or [],
        "y": priority,
        "s": share,
        "c": chain or [],
    }
