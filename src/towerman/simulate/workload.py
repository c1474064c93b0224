"""A workload: calls with their durations, what they hold, touch and need, and the limits that they came with."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, TypeVar, cast

from towerman.access import AccessRefused, canonical_key
from towerman.access.keys import key_of, split_scheme
from towerman.calls import Access
from towerman.errors import InputError, PolicyError
from towerman.policy import RESERVED_POOLS, Rate, nearest, rate_of, shown

T = TypeVar("T")

KEYS: Final = ("max_concurrency", "pools", "rates", "calls", "notes")
CALL_KEYS: Final = ("id", "tool", "duration", "estimate", "arrival", "run", "pools", "reads", "writes", "needs")

MOST_SECONDS: Final = 10**12
"""Where the clock of a simulation ends, some 30,000 years: far below the last instant that a rate can tell from never,
and still exact to less than a millisecond."""

_NOTHING: Final[Mapping[str, int]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class WorkloadCall:
    """One call of a workload.

    Args:
        id: its name in the workload, no other call's.
        tool: the tool that it calls.
        duration: seconds that its work takes, from 0 on.
        estimate: seconds that it is thought to take beforehand; None: nobody has said.
        arrival: the instant at which its batch comes in, in seconds, from 0 on. Calls of one run that come in at one
            instant are one batch, in the order of the workload.
        run: the run that it belongs to.
        pools: permits that it holds while it runs, by pool.
        accesses: what it touches; nothing, where the workload names nothing.
        needs: ids of calls of its batch that come before it.
    """

    id: str
    tool: str
    duration: float
    estimate: float | None = None
    arrival: float = 0.0
    run: str = ""
    pools: Mapping[str, int] = field(default_factory=dict)
    accesses: tuple[Access, ...] = ()
    needs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Workload:
    """What is simulated.

    Args:
        max_concurrency: calls that may run at once; None: any number.
        pools: permits of each pool; None for one that is only watched.
        rates: how many calls may start in how long, by tool or pool; a name that is both holds for both.
        calls: in emitted order.
        notes: what is to be known of where it comes from, in sentences.
    """

    max_concurrency: int | None = None
    pools: Mapping[str, int | None] = field(default_factory=lambda: MappingProxyType({}))
    rates: Mapping[str, Rate] = field(default_factory=lambda: MappingProxyType({}))
    calls: tuple[WorkloadCall, ...] = ()
    notes: tuple[str, ...] = ()


def read_workload(given: object) -> Workload:
    """Check a workload.

    Args:
        given: a mapping, the path of a file with it as JSON, or a `Workload`.

    Raises:
        InputError: something in it is wrong: the place, what is allowed there, and the nearest right name.
    """
    if isinstance(given, Workload):
        return given
    if isinstance(given, str | os.PathLike):
        given = _from_file(given)
    if not isinstance(given, Mapping):
        raise InputError(f"workload: a mapping with 'calls', or the path of a file with one; got {shown(given)}")
    _only("workload", given, KEYS)
    if "calls" not in given:
        raise InputError("workload: 'calls' is missing: a list of calls, each with id, tool and duration")
    most = given.get("max_concurrency")
    pools = {
        _pool(name): None if permits is None else _whole(f"pools.{name}", permits)
        for name, permits in _mapping("pools", given.get("pools")).items()
    }
    listed = given["calls"]
    if isinstance(listed, str | bytes) or not isinstance(listed, Sequence):
        raise InputError(f"calls: a list of calls; got {shown(listed)}")
    reader = _Calls(pools)
    calls = tuple([reader.call(f"calls[{index}]", index, one) for index, one in enumerate(listed)])
    notes = given.get("notes", ())
    if isinstance(notes, str) or not isinstance(notes, Sequence) or not all(isinstance(one, str) for one in notes):
        raise InputError(f"notes: a list of sentences; got {shown(notes)}")
    return Workload(
        None if most is None else _whole("max_concurrency", most),
        pools,
        {name: _rate(name, rate, pools, calls) for name, rate in _mapping("rates", given.get("rates")).items()},
        calls,
        tuple(notes),
    )


class _Calls:
    """Reads one call after the other; what many of them say alike is looked at once."""

    def __init__(self, pools: Mapping[str, int | None]) -> None:
        self._pools = pools
        self._ids: dict[str, int] = {}
        self._touched: dict[tuple[str, bool], Access] = {}

    def call(self, where: str, index: int, given: object) -> WorkloadCall:
        if not isinstance(given, Mapping):
            raise InputError(f"{where}: a mapping with id, tool and duration; got {shown(given)}")
        for key in given:
            if key not in CALL_KEYS:
                _only(where, given, CALL_KEYS)
        for key in ("tool", "duration"):
            if key not in given:
                raise InputError(f"{where}: {key!r} is missing")
        name = given.get("id", index)
        name = str(name) if isinstance(name, int) and not isinstance(name, bool) else name
        if not isinstance(name, str) or not name:
            raise InputError(f"{where}.id: a text or a whole number; got {shown(name)}")
        if name in self._ids:
            raise InputError(f"{where}.id: {shown(name)} is the id of calls[{self._ids[name]}] already")
        self._ids[name] = index
        estimate = given.get("estimate")
        needs = given.get("needs")
        return WorkloadCall(
            name,
            _text(f"{where}.tool", given["tool"]),
            seconds_of(f"{where}.duration", given["duration"]),
            None if estimate is None else seconds_of(f"{where}.estimate", estimate),
            seconds_of(f"{where}.arrival", given.get("arrival", 0.0)),
            _run(f"{where}.run", given.get("run", "")),
            self._permits(f"{where}.pools", given["pools"]) if given.get("pools") else _NOTHING,
            self._accesses(where, given),
            tuple([_id(f"{where}.needs[{at}]", one) for at, one in enumerate(_list(f"{where}.needs", needs))])
            if needs
            else (),
        )

    def _permits(self, where: str, given: object) -> Mapping[str, int]:
        if isinstance(given, Mapping):
            permits = {name: _whole(f"{where}.{name}", units, least=0) for name, units in given.items()}
        else:
            permits = dict.fromkeys(_list(where, given), 1)
        for name in permits:
            if name not in self._pools:
                raise InputError(f"{where}: there is no pool {shown(name)}{nearest(str(name), list(self._pools))}")
        return {name: units for name, units in permits.items() if units}

    def _accesses(self, where: str, given: Mapping[str, object]) -> tuple[Access, ...]:
        reads, writes = given.get("reads"), given.get("writes")
        if not reads and not writes:
            return ()
        found = [
            self._access(f"{where}.{key}[{at}]", one, write)
            for key, named, write in (("writes", writes, True), ("reads", reads, False))
            for at, one in enumerate(_list(f"{where}.{key}", named) if named else ())
        ]
        return tuple({(one.key, one.subtree): one for one in reversed(found)}.values())

    def _access(self, where: str, text: object, write: bool) -> Access:
        name = _text(where, text)
        known = self._touched.get((name, write))
        if known is not None:
            return known
        subtree = name.endswith("/**")
        plain = name.removesuffix("/**")
        try:
            scheme, path = split_scheme(plain)
            key = canonical_key(plain) if path or not subtree else key_of(scheme, path)
        except Exception as wrong:
            if not isinstance(wrong, AccessRefused) and type(wrong).__name__ != "Unnameable":
                raise
            raise InputError(f"{where}: {str(wrong).removeprefix('resource: ')}") from None
        access = self._touched[name, write] = Access(key, write, subtree, name)
        return access


def _from_file(path: str | os.PathLike[str]) -> object:
    try:
        with open(path, "rb") as file:
            return json.loads(file.read().decode("utf-8-sig"))
    except OSError as error:
        raise InputError(f"workload: {os.fspath(path)}: {error.strerror or type(error).__name__}") from None
    except ValueError as error:
        line = f" (line {error.lineno}, column {error.colno})" if isinstance(error, json.JSONDecodeError) else ""
        raise InputError(f"workload: {os.fspath(path)}: not JSON{line}") from None


def _only(where: str, given: Mapping[object, object], known: Sequence[str]) -> None:
    for key in given:
        if key not in known:
            hint = nearest(key, known) if isinstance(key, str) else ""
            raise InputError(f"{where}: there is no key {shown(key)}{hint}")


def _mapping(where: str, value: object) -> Mapping[str, object]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise InputError(f"{where}: a mapping of names; got {shown(value)}")
    return cast("Mapping[str, object]", value)


def _list(where: str, value: object) -> Sequence[str]:
    """A list of texts; a single text is one of them."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, Iterable) or isinstance(value, bytes | Mapping):
        raise InputError(f"{where}: a list of names; got {shown(value)}")
    return list(value)


def _text(where: str, value: object) -> str:
    if not isinstance(value, str) or not value or value.isspace():
        raise InputError(f"{where}: a text that is not empty; got {shown(value)}")
    return value


def _pool(name: object) -> str:
    told_name = _text("pools", name)
    if told_name in RESERVED_POOLS:
        raise InputError(f"pools.{told_name}: this name is taken by a limit of Towerman's own; choose another")
    return told_name


def _id(where: str, value: object) -> str:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else _text(where, value)


def _run(where: str, value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise InputError(f"{where}: the name of a run; got {shown(value)}")
    return value


def _whole(where: str, value: object, *, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InputError(f"{where}: a whole number from {least} on; got {shown(value)}")
    return value


def seconds_of(where: str, value: object) -> float:
    """A length of time, or an instant.

    Raises:
        InputError: it is none.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MOST_SECONDS:
        raise InputError(
            f"{where}: seconds from 0 to {MOST_SECONDS:,}, where the clock of a simulation ends; got {shown(value)}"
        )
    return float(value)


def _rate(name: str, value: object, pools: Mapping[str, int | None], calls: Sequence[WorkloadCall]) -> Rate:
    if name not in pools:
        tools = {call.tool for call in calls}
        if name not in tools:
            known = [*pools, *tools]
            raise InputError(f"rates: there is no tool and no pool {shown(name)}{nearest(str(name), known)}")
    return told(lambda: rate_of(f"rates.{name}", value))


def told(read: Callable[[], T]) -> T:
    """The same, with what is wrong told as a mistake in the workload."""
    try:
        return read()
    except PolicyError as wrong:
        raise InputError(str(wrong)) from None
