"""What an engine knows of an admission group, for people: what is held, who waits, whether the server is fit for it.

Theory. Everything here reads, but for `release`. A group may hold many records: they are read some at a time, by a
cursor of the server, so what is told is no snapshot of one instant.

House rules. Keys of resources are digests here as there. No message has the URL or what a server says beyond its code.

Not here: the rules (claim.lua), the words of the command line (cli).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, get_args

from towerman.clock import RealClock, wall_time
from towerman.engines.library import keys_of, library
from towerman.engines.line import is_missing, options, told
from towerman.engines.words import MICROS
from towerman.errors import EngineUnavailable

PAGE: Final = 100
"""Records and states that are read in one call."""

TRIALS: Final = 50
"""Claims with which the doctor measures how long one takes."""

State = Literal["held", "offered", "waiting", "refused", "share", "settled"]

_STATES: Final[dict[str, State]] = {"h": "held", "o": "offered", "w": "waiting", "x": "refused", "s": "share"}
_MODES: Final = ("IS", "IX", "S", "X")
_LEAST: Final = 7
_now: Final = RealClock().now
_RESERVED, _SPENT = 1, 2


@dataclass(frozen=True, slots=True)
class Held:
    """A record of a group.

    Args:
        id: its name: sixteen digits for the process, then a number.
        state: `held`, `offered`, `waiting`, `refused` (and not told yet), `share` (what a call has reserved, or
            spends), `settled` (a share that is over, and is remembered for a while).
        seconds: until it is over unless it is renewed.
        fence: of a grant; None for others.
        pools: permits by pool.
        resources: digests of resource keys, with their modes.
        rates, breakers, accounts: names of those that it counts in.
        orphan: its work goes on after its result was sealed.
    """

    id: str
    state: State
    seconds: float
    fence: int | None = None
    pools: dict[str, int] = field(default_factory=dict)
    resources: tuple[tuple[str, str], ...] = ()
    rates: tuple[str, ...] = ()
    breakers: tuple[str, ...] = ()
    accounts: tuple[str, ...] = ()
    orphan: bool = False

    @property
    def process(self) -> str:
        """The process that it belongs to."""
        return self.id[:16]


@dataclass(frozen=True, slots=True)
class Overview:
    """A group, and the server that it is on.

    Args:
        server: name and version.
        role: `master` or `slave` of its replication.
        offset: seconds that the server's clock is ahead of this machine's.
        round_trip: seconds of a question, the least of some.
        epoch: which one of the group's data; it goes up when something may have been forgotten.
        layout: of the data.
        quarantine: seconds for which exclusive grants are held back still.
        held, offered, waiting, shares: records by state.
        pools: permits held, by pool.
        resources: how many are held.
        rates: starts all told, of each that is remembered.
        breakers: `closed`, `open`, or `half-open`.
        accounts: by account and unit, what is spent and what is reserved, in millionths.
    """

    server: str
    role: str
    offset: float
    round_trip: float
    epoch: int
    layout: int
    quarantine: float
    held: int
    offered: int
    waiting: int
    shares: int
    pools: dict[str, int]
    resources: int
    rates: dict[str, int]
    breakers: dict[str, str]
    accounts: dict[str, dict[str, tuple[int, int]]]


@dataclass(frozen=True, slots=True)
class Check:
    """Something that a server should have.

    Args:
        what: in a word or two.
        verdict: `ok`, `warn` or `fail`.
        found: what there is.
        fix: what to do about it; empty where it is ok.
    """

    what: str
    verdict: Literal["ok", "warn", "fail"]
    found: str
    fix: str = ""


class Looker:
    """Looks at one admission group.

    Args:
        url: `redis://`, `rediss://` or `unix://`.
        group: the admission group.
        timeout: seconds for a connection, and for an answer.

    Raises:
        PolicyError: redis-py is not there, or the URL is none.
    """

    __slots__ = ("_connection", "_group", "_keys", "_maker")

    def __init__(self, url: str, group: str = "default", timeout: float = 5.0) -> None:
        self._group = group
        self._keys = keys_of(group)
        self._maker = options(url, timeout, False)
        self._connection: Any = None

    def close(self) -> None:
        """The connection ends."""
        if self._connection is not None:
            self._connection.disconnect()
            self._connection = None

    # ------------------------------------------------------------------ asking

    def _raw(self, *command: Any) -> Any:
        if self._connection is None:
            connection = self._maker.make_connection()
            connection.connect()
            self._connection = connection
        self._connection.send_command(*command)
        return self._connection.read_response()

    def _ask(self, *command: Any) -> Any:
        """Ask the server something.

        Raises:
            EngineUnavailable: it does not answer, or refuses.
        """
        try:
            return self._raw(*command)
        except Exception as error:
            raise told(error) from None

    def _act(self, *questions: Sequence[object], keys: Sequence[str] = ()) -> list[Any]:
        command = ("FCALL", library().act, len(self._keys), *(keys or self._keys), json.dumps(questions), 0, 0)
        try:
            try:
                answer: list[Any] = self._raw(*command)
            except Exception as error:
                if not is_missing(error):
                    raise
                self._raw("FUNCTION", "LOAD", "REPLACE", library().text)
                answer = self._raw(*command)
        except Exception as error:
            raise told(error) from None
        return answer[1:]

    # ------------------------------------------------------------------ a group

    def records(self, *states: State, most: int = 1_000) -> list[Held]:
        """What is held, offered, waited for or reserved, up to a number."""
        found: list[Held] = []
        for ids in self._pages(self._keys[2]):
            rows = self._act(["look", [f"={id}" for id in ids]])[0]
            now = self._now() + int(_by_name(self._act(["look", ["#"]])[0][0]).get("ahead", 0))
            ends = self._ask("ZMSCORE", self._keys[3], *ids)
            for id, row, end in zip(ids, rows, ends, strict=True):
                one = _record(id, _by_name(row), end, now)
                if one is not None and (not states or one.state in states):
                    found.append(one)
                    if len(found) == most:
                        return found
        return found

    def _pages(self, key: str) -> Iterator[list[str]]:
        """The fields of a hash, some at a time."""
        cursor = 0
        while True:
            answer = self._ask("HSCAN", key, cursor, "COUNT", PAGE)
            cursor = int(answer[0])
            fields = [_text(one) for one in answer[1][::2]]
            for first in range(0, len(fields), PAGE):
                yield fields[first : first + PAGE]
            if not cursor:
                return

    def _now(self) -> int:
        seconds, micros = self._ask("TIME")
        return int(seconds) * MICROS + int(micros)

    def overview(self) -> Overview:
        """The group and its server.

        Raises:
            EngineUnavailable: the server does not answer, or refuses.
        """
        server = self._info("server")
        offset, round_trip = self._clock()
        meta = _by_name(self._act(["look", ["#"]])[0][0])
        states = dict.fromkeys(get_args(State), 0)
        for one in self.records(most=1_000_000):
            states[one.state] += 1
        pools: dict[str, int] = {}
        rates: dict[str, int] = {}
        breakers: dict[str, str] = {}
        accounts: dict[str, dict[str, tuple[int, int]]] = {}
        resources = 0
        now = self._now() + int(meta.get("ahead", 0))
        for fields in self._pages(self._keys[0]):
            fields = [one for one in fields if one != "#"]
            for name, row in zip(fields, self._act(["look", fields])[0] if fields else (), strict=True):
                kind, key = name[0], name[1:]
                if kind == "p":
                    pools[key] = int(row[0])
                elif kind == "n":
                    resources += any(int(count) for count in row[:4])
                elif kind == "m":
                    rates[key] = int(row[6])
                elif kind == "b":
                    until = int(row[4])
                    breakers[key] = "closed" if until < 0 else "open" if now < until else "half-open"
                elif kind == "a":
                    accounts[key] = _units(_by_name(row).get("u", []))
        return Overview(
            f"{'Valkey' if 'valkey_version' in server else 'Redis'} {_version(server)}",
            self._info("replication").get("role", "?"),
            offset,
            round_trip,
            int(meta.get("epoch", 0)),
            int(meta.get("layout", 0)),
            max(0.0, (int(meta.get("quiet", 0)) - now) / MICROS),
            states["held"],
            states["offered"],
            states["waiting"],
            states["share"],
            dict(sorted(pools.items())),
            resources,
            dict(sorted(rates.items())),
            dict(sorted(breakers.items())),
            dict(sorted(accounts.items())),
        )

    def release(self, id: str) -> Held | None:
        """Give a record back by its id; whoever holds it is told at its next heartbeat that it is lost.

        Returns:
            What it was; None: there is none of that id.
        """
        (row,) = self._act(["look", [f"={id}"]])[0]
        one = _record(id, _by_name(row), self._ask("ZSCORE", self._keys[3], id), self._now())
        if one is None:
            return None
        self._act(
            ["drop" if one.state == "share" else "release", id, *([] if one.state == "share" else [1, "nothing"])]
        )
        return one

    def _clock(self) -> tuple[float, float]:
        """How far the server's clock is ahead of this machine's, and the shortest round trip."""
        best = (0.0, float("inf"))
        for _ in range(5):
            sent = wall_time()
            there = self._now() / MICROS
            came = wall_time()
            if came - sent < best[1]:
                best = (there - (sent + came) / 2, came - sent)
        return best

    def _info(self, section: str) -> dict[str, str]:
        text = _text(self._ask("INFO", section))
        return dict(line.split(":", 1) for line in text.splitlines() if ":" in line and not line.startswith("#"))

    # ------------------------------------------------------------------ a server

    def doctor(self) -> list[Check]:
        """Is this server fit to be an engine? What it is asked leaves nothing behind."""
        try:
            server = self._info("server")
        except EngineUnavailable as gone:
            return [Check("reached", "fail", gone.reason, "start the server, or correct url, user, password, network")]
        checks = [Check("reached", "ok", "yes")]
        name, version = "Valkey" if "valkey_version" in server else "Redis", _version(server)
        if int(version.partition(".")[0]) < _LEAST:
            return [
                *checks,
                Check("version", "fail", f"{name} {version}", "Redis 7, Valkey 7.2 or later: it has functions"),
            ]
        checks.append(Check("version", "ok", f"{name} {version}"))
        checks += [self._may(), *self._memory(), self._persistence(), *self._shape(), self._time()]
        if checks[2].verdict == "ok":
            checks.append(self._speed())
        return checks

    def _may(self) -> Check:
        """May the user do what an engine's user has to?"""
        scratch = keys_of(f"{self._group}:doctor")
        lacking = []
        for what, command in (
            ("FUNCTION LIST", ("FUNCTION", "LIST", "LIBRARYNAME", library().name)),
            ("FUNCTION LOAD", ("FUNCTION", "LOAD", "REPLACE", library().text)),
            ("FCALL", ("FCALL", library().act, len(scratch), *scratch, '[["poll","none",1]]', 0, 0)),
            ("PUBLISH", ("PUBLISH", f"towerman:{{{self._group}:doctor}}:hint:none", "none")),
            ("TIME", ("TIME",)),
            ("UNLINK", ("UNLINK", *scratch)),
        ):
            try:
                self._ask(*command)
            except EngineUnavailable:
                lacking.append(what)
        if lacking:
            return Check(
                "rights",
                "fail",
                f"this user may not, or the server cannot: {', '.join(lacking)}",
                "ACL SETUSER NAME on >PASSWORD resetkeys ~towerman:* resetchannels &towerman:* -@all +@connection "
                "+@hash +@sortedset +fcall +function +publish +subscribe +unsubscribe +unlink +time +info +wait",
            )
        return Check("rights", "ok", "functions, keys and channels towerman:*")

    def _memory(self) -> list[Check]:
        memory = self._info("memory")
        policy, most = memory.get("maxmemory_policy", "?"), int(memory.get("maxmemory", 0))
        if most and policy != "noeviction":
            return [
                Check(
                    "memory",
                    "fail",
                    f"maxmemory-policy {policy}: it may forget grants",
                    "CONFIG SET maxmemory-policy noeviction",
                )
            ]
        return [Check("memory", "ok", "no limit" if not most else f"{most:,} bytes, noeviction")]

    def _persistence(self) -> Check:
        kept = self._info("persistence")
        if kept.get("aof_enabled") == "1":
            return Check("persistence", "ok", "append-only file")
        return Check(
            "persistence",
            "warn",
            "no append-only file: a restart forgets grants, and exclusive ones are held back for one lease",
            "appendonly yes, where that matters",
        )

    def _shape(self) -> Iterator[Check]:
        replication = self._info("replication")
        if replication.get("role") != "master":
            yield Check("role", "fail", "a replica, which may not be written to", "the address of its primary")
        copies = int(replication.get("connected_slaves", 0))
        if copies:
            yield Check(
                "replicas",
                "warn",
                f"{copies}: one that is promoted may have forgotten the last grants",
                "acks = 1, so that a write starts once a replica knows of it",
            )
        if self._info("cluster").get("cluster_enabled") == "1":
            yield Check("cluster", "ok", "yes: a group is on one primary, all its keys share a hash tag")

    def _time(self) -> Check:
        offset, round_trip = self._clock()
        told_offset = f"{abs(offset):.3f} s {'ahead of' if offset > 0 else 'behind'} this machine's"
        return Check("clock", "ok", f"{told_offset}, which does not matter; round trip {1_000 * round_trip:.2f} ms")

    def _speed(self) -> Check:
        """A claim and its release, in a group of its own."""
        scratch = keys_of(f"{self._group}:doctor")
        ask = {"p": [["doctor", 1, 1, 0]], "h": [], "r": [], "b": [], "y": 0, "s": "", "c": []}
        took = []
        try:
            for number in range(TRIALS):
                before = _now()
                self._act(["claim", f"doctor{number}", MICROS, ask, 0], keys=scratch)
                self._act(["release", f"doctor{number}", 1, "well"], keys=scratch)
                took.append(_now() - before)
        except EngineUnavailable as gone:
            return Check("speed", "fail", gone.reason, "see above")
        finally:
            try:
                self._ask("UNLINK", *scratch)
            except EngineUnavailable:
                pass
        took.sort()
        middle, late = took[len(took) // 2], took[-1]
        verdict: Literal["ok", "warn"] = "warn" if middle > 0.02 else "ok"
        fix = "a server nearer to the processes: each call takes two such trips" if verdict == "warn" else ""
        return Check(
            "speed", verdict, f"claim and release: median {1e3 * middle:.2f} ms, longest {1e3 * late:.2f} ms", fix
        )

    def __repr__(self) -> str:
        return f"Looker(group={self._group!r})"


def _text(raw: Any) -> str:
    return raw.decode("utf-8", "replace") if isinstance(raw, bytes) else str(raw)


def _version(server: dict[str, str]) -> str:
    return server.get("valkey_version") or server.get("redis_version", "?")


def _by_name(flat: Any) -> dict[str, Any]:
    """A table of the server, told as a list of names and values."""
    return {_text(name): value for name, value in zip(flat[::2], flat[1::2], strict=False)}


def _units(flat: Any) -> dict[str, tuple[int, int]]:
    units = {}
    for unit, row in _by_name(flat).items():
        numbers = [int(one) for one in row]
        units[unit] = numbers[0] * 10**15 + numbers[1], numbers[2] * 10**15 + numbers[3]
    return units


def _record(id: str, row: dict[str, Any], end: Any, now: int) -> Held | None:
    """A record as it is told; None: it is gone."""
    state = _STATES.get(_text(row.get("k", "")))
    if state is None:
        return None
    seconds = max(0.0, (float(end or 0) - now) / MICROS)
    if state == "share":
        over = int(row.get("t", 0)) not in (_RESERVED, _SPENT)
        accounts = tuple(_text(one[0]) for one in row.get("c", []))
        return Held(id, "settled" if over else state, seconds, accounts=accounts)
    asked = _by_name(row["a"]) if row.get("a") else {}
    fence = int(row["e"]) << 32 | int(row["n"]) if row.get("e") and row.get("n") else None
    return Held(
        id,
        state,
        seconds,
        fence,
        {_text(one[0]): int(one[1]) for one in row.get("p", [])},
        tuple((_text(one[0]), _MODES[int(one[1])]) for one in row.get("h", [])),
        tuple(_text(one[0]) for one in row.get("m") or asked.get("r") or []),
        tuple(_text(one[0]) for one in row.get("b") or asked.get("b") or []),
        orphan=int(row.get("o", 0) or 0) > 0,
    )
