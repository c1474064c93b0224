"""What was declared: per tool, per pool, for the tower. Checked once, when it is declared.

Theory. Every option has one meaning, one default and one place where it is checked. A mistake is a `PolicyError` that
names the option, what was given, what is allowed and the fix, and it comes when the tool or tower is made, never with
a call.

House rules. Frozen data; no behaviour beyond checking and explaining itself.

Not here: resource templates (access), argument schemas (arguments), what is held (ledger).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Final, Literal, TypeVar, cast, get_args

from towerman.calls import Result
from towerman.errors import PolicyError

Declared = str | Sequence[str | Callable[..., object]] | Callable[..., object]
"""What a tool declares for `reads` or `writes`: a template, a callable of the arguments, or a list of these."""

Scope = Literal["process", "run", "tenant"]
"""Whom a pool counts for."""

WhenBusy = Literal["wait", "reject"]
"""What a call does when it cannot start at once."""

Undeclared = Literal["ordered", "exclusive", "independent"]
"""What a tool that declares no access is."""

OnExcess = Literal["tell", "queue"]
OnOrphan = Literal["hold", "release"]
Mode = Literal["enforce", "observe"]
RunIn = Literal["loop", "thread", "process"]
Preset = Literal["read", "background"]

MIN_RESULT_BYTES: Final = 64
"""Smallest bound of a result: room for the note that says what was cut."""

RESERVED_POOLS: Final = frozenset({"process", "run"})
"""Pool names that Towerman uses for its own limits."""

_NAME: Final = re.compile(r"[A-Za-z0-9_.\-]{1,128}")

PRESETS: Final[Mapping[str, Mapping[str, object]]] = {
    "read": {"when_busy": "wait", "max_wait": 10.0},
    "background": {"when_busy": "wait", "max_queued": 100, "max_wait": 60.0},
}
"""The waiting policies by name: short repeatable reads wait with a deadline (R-69), work of low priority stands in a
bounded queue (R-71). What is given beside a preset wins over it."""


# -------------------------------------------------------------------------------------------- checks


MOST_SECONDS: Final = 1e15
"""Seconds that no option reaches: more is a mistake, or a number that no clock can be added to."""


def shown(given: object) -> str:
    """An option's wrong value for a message: short ones as they are, of others the type. It never fails."""
    if isinstance(given, int) and abs(given) >= 10**20:
        return "a number of more than 20 digits"
    if type(given) in (str, int, float, bool) or given is None:
        return repr(given)[:80]
    return type(given).__name__[:80]


def _say(where: str, given: object, allowed: str) -> PolicyError:
    return PolicyError(f"{where}: {allowed}; got {shown(given)}")


def whole(where: str, value: object, *, least: int = 1) -> int:
    """An integer of at least `least`; no boolean, no fraction (R-51)."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise _say(where, value, f"a whole number, {least} or more")
    return value


def seconds(where: str, value: object, *, zero: bool = False) -> float:
    """A finite number of seconds above 0 (or from 0)."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not -MOST_SECONDS < value < MOST_SECONDS:
        raise _say(where, value, "a finite number of seconds")
    if value < 0 or (value == 0 and not zero):
        raise _say(where, value, "seconds, 0 or more" if zero else "seconds, more than 0")
    return float(value)


def flag(where: str, value: object) -> bool:
    """True or False."""
    if not isinstance(value, bool):
        raise _say(where, value, "True or False")
    return value


_WordT = TypeVar("_WordT")


def word(where: str, value: object, allowed: object) -> str:
    """One of the words of a Literal."""
    words = cast("tuple[str, ...]", get_args(allowed))
    if not isinstance(value, str) or value not in words:
        near = get_close_matches(value, words, 1) if isinstance(value, str) else []
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise _say(where, value, f"one of {', '.join(map(repr, words))}{hint}")
    return value


def name_of(where: str, value: object) -> str:
    """A name that every provider's wire and every log takes: 1 to 128 of letters, digits, `_`, `-`, `.`."""
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise _say(where, value, "1 to 128 letters, digits, '_', '-' or '.'")
    return value


def only_known(where: str, given: Mapping[str, object], known: Sequence[str]) -> None:
    """Refuse unknown option names and name the nearest right one."""
    for key in given:
        if key not in known:
            near = get_close_matches(key, known, 1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(sorted(known))}"
            raise PolicyError(f"{where}: no option {key!r}{hint}")


# -------------------------------------------------------------------------------------------- pools


@dataclass(frozen=True, slots=True)
class Pool:
    """A named concurrency limit that tools share.

    Args:
        permits: places in it, 1 or more.
        max_queued: how many calls may wait for it; None: only the tower's bound counts.
        scope: whom it counts for. "process" (default): all runs of this process together; "tenant": the runs of one
            tenant together; "run": each run alone, which protects nothing that runs share.
        reserve: permits kept for runs of a priority above 0; below `permits`.

    Raises:
        PolicyError: a number out of its range.
    """

    permits: int
    max_queued: int | None = None
    scope: Scope = "process"
    reserve: int = 0

    def __post_init__(self) -> None:
        whole("Pool.permits", self.permits)
        if self.max_queued is not None:
            whole("Pool.max_queued", self.max_queued, least=0)
        word("Pool.scope", self.scope, Scope)
        whole("Pool.reserve", self.reserve, least=0)
        if self.reserve >= self.permits:
            raise PolicyError(
                f"Pool.reserve: below permits ({self.permits}), or runs of priority 0 could never start; "
                f"got {shown(self.reserve)}"
            )


def pools_of(given: object) -> dict[str, Pool]:
    """`pools={"crm": 2, "db": Pool(1, scope="tenant")}` as checked pools by name."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise PolicyError('pools: a mapping of name to permits or Pool, for example {"crm": 2}')
    out: dict[str, Pool] = {}
    for key, value in given.items():
        name = name_of("pools", key)
        if name in RESERVED_POOLS:
            raise PolicyError(f"pools.{name}: this name is taken by Towerman's own limit; choose another")
        out[name] = value if isinstance(value, Pool) else Pool(whole(f"pools.{name}", value))
    return out


# -------------------------------------------------------------------------------------------- tools


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolPolicy:
    """What one tool declares; see `Tower.tool` for the options. Fields that are None take the tower's value."""

    name: str
    description: str = ""
    reads: Declared | None = None
    writes: Declared | None = None
    independent: bool = False
    sequential: bool = False
    only_call: bool = False
    read_only: bool | None = None
    idempotent: bool | None = None
    pools: tuple[tuple[str, int], ...] = ()
    weight: int = 1
    max_concurrency: int | None = None
    timeout: float | None = None
    max_wait: float | None = None
    max_queued: int | None = None
    when_busy: WhenBusy | None = None
    max_result_bytes: int | None = None
    encode: Callable[[object], object] | None = None
    summarize: Callable[[object], object] | None = None
    run_in: RunIn | None = None
    own_task: bool = True

    @property
    def declares_access(self) -> bool:
        """It says what it touches, or that it touches nothing shared, or that order is all it needs."""
        return self.reads is not None or self.writes is not None or self.independent or self.sequential

    @property
    def effect_free(self) -> bool:
        """It has no side effect: said so, or it only reads."""
        if self.read_only is not None:
            return self.read_only
        return self.reads is not None and self.writes is None and not self.sequential

    @property
    def repeatable(self) -> bool:
        """Repeating it is harmless."""
        return self.effect_free or bool(self.idempotent)


TOOL_OPTIONS: Final = tuple(field.name for field in fields(ToolPolicy))


def tool_policy(
    name: str, options: Mapping[str, object], pools: Mapping[str, Pool], *, max_concurrency: int
) -> ToolPolicy:
    """Check the options of one tool against the tower's pools.

    Args:
        name: the tool's name.
        options: keyword options of `Tower.tool`, without `name`; None means "not given".
        pools: the tower's pools by name.
        max_concurrency: permits of the process-wide limit, which a weight may not exceed.

    Raises:
        PolicyError: naming the tool, the option and the fix.
    """
    where = f"tool {name_of('tool name', name)!r}"
    only_known(where, options, [*TOOL_OPTIONS, "preset"])
    given = {key: value for key, value in options.items() if value is not None}
    preset = given.pop("preset", None)
    if preset is not None:
        given = {**PRESETS[word(f"{where}: preset", preset, Preset)], **given}
    for key in ("independent", "sequential", "only_call", "read_only", "idempotent", "own_task"):
        if key in given:
            flag(f"{where}: {key}", given[key])
    for key in ("timeout", "max_wait"):
        if key in given:
            given[key] = seconds(f"{where}: {key}", given[key])
    if "weight" in given and whole(f"{where}: weight", given["weight"]) > max_concurrency:
        raise PolicyError(
            f"{where}: weight {shown(given['weight'])} is more than the tower's max_concurrency {max_concurrency}: "
            "it could never run"
        )
    if "max_concurrency" in given:
        whole(f"{where}: max_concurrency", given["max_concurrency"])
    if "max_queued" in given:
        whole(f"{where}: max_queued", given["max_queued"], least=0)
    if "max_result_bytes" in given:
        whole(f"{where}: max_result_bytes", given["max_result_bytes"], least=MIN_RESULT_BYTES)
    if "when_busy" in given:
        word(f"{where}: when_busy", given["when_busy"], WhenBusy)
    if "run_in" in given:
        word(f"{where}: run_in", given["run_in"], RunIn)
    for key in ("encode", "summarize"):
        if key in given and not callable(given[key]):
            raise _say(f"{where}: {key}", given[key], "a function of the handler's value")
    if "description" in given and not isinstance(given["description"], str):
        raise _say(f"{where}: description", given["description"], "text")
    given["pools"] = _tool_pools(where, given.get("pools", ()), pools)
    policy = ToolPolicy(name=name, **given)  # type: ignore[arg-type]  # every value was checked above
    if policy.independent and (policy.reads is not None or policy.writes is not None or policy.sequential):
        raise PolicyError(f"{where}: independent=True contradicts reads, writes and sequential; leave one of them out")
    if policy.read_only and policy.writes is not None:
        raise PolicyError(f"{where}: read_only=True contradicts writes; a tool that writes has an effect")
    return policy


def _tool_pools(where: str, given: object, pools: Mapping[str, Pool]) -> tuple[tuple[str, int], ...]:
    if isinstance(given, str):
        given = [given]
    if isinstance(given, Mapping) and all(isinstance(key, str) for key in given):
        wanted = dict(given)
    elif isinstance(given, Sequence) and all(isinstance(key, str) for key in given):
        wanted = dict.fromkeys(given, 1)
    else:
        raise _say(f"{where}: pools", given, "a list of pool names or a mapping of name to permits")
    for key, units in wanted.items():
        pool = pools.get(key)
        if pool is None:
            near = get_close_matches(key, pools, 1)
            hint = f"; did you mean {near[0]!r}?" if near else f'; declare it: Tower(pools={{"{key[:40]}": 4}})'
            raise PolicyError(f"{where}: no pool {shown(key)}{hint}")
        if whole(f"{where}: pools.{key}", units) > pool.permits - pool.reserve:
            raise PolicyError(
                f"{where}: pools.{key}: {shown(units)} permits of a pool that has {pool.permits}"
                f"{f' less {pool.reserve} in reserve' if pool.reserve else ''}: it could never run"
            )
    return tuple(wanted.items())


def check_strict(policy: ToolPolicy) -> None:
    """`strict=True`: a tool must say its access, a limit and whether it may be repeated (R-25).

    Raises:
        PolicyError: naming everything that is missing.
    """
    missing = []
    if not policy.declares_access:
        missing.append("access (reads=, writes=, independent=True or sequential=True)")
    if not policy.pools and policy.max_concurrency is None:
        missing.append("a limit (pools= or max_concurrency=)")
    if policy.read_only is None and policy.idempotent is None and not policy.effect_free:
        missing.append("a retry class (read_only= or idempotent=, True or False)")
    if missing:
        raise PolicyError(f"tool {policy.name!r}: strict=True asks for {'; '.join(missing)}")


# -------------------------------------------------------------------------------------------- the tower


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerPolicy:
    """What holds for the whole tower; see `Tower` for the options."""

    max_concurrency: int = 32
    run_concurrency: int = 8
    pools: Mapping[str, Pool]
    max_calls_per_batch: int = 25
    on_excess: OnExcess = "tell"
    undeclared: Undeclared = "ordered"
    when_busy: WhenBusy = "wait"
    max_wait: float = 30.0
    max_queued: int = 1000
    timeout: float = 300.0
    grace: float = 5.0
    on_orphan: OnOrphan = "hold"
    max_result_bytes: int = 32_768
    max_batch_bytes: int = 131_072
    mode: Mode = "enforce"
    debug: bool = False
    strict: bool = False

    def __post_init__(self) -> None:
        for key in ("max_concurrency", "run_concurrency", "max_calls_per_batch"):
            whole(key, getattr(self, key))
        whole("max_queued", self.max_queued, least=0)
        for key in ("max_wait", "timeout"):
            seconds(key, getattr(self, key))
        seconds("grace", self.grace, zero=True)
        for key in ("max_result_bytes", "max_batch_bytes"):
            whole(key, getattr(self, key), least=MIN_RESULT_BYTES)
        word("on_excess", self.on_excess, OnExcess)
        word("undeclared", self.undeclared, Undeclared)
        word("when_busy", self.when_busy, WhenBusy)
        word("on_orphan", self.on_orphan, OnOrphan)
        word("mode", self.mode, Mode)
        flag("debug", self.debug)
        flag("strict", self.strict)


TOWER_OPTIONS: Final = tuple(field.name for field in fields(TowerPolicy))

OnResult = Callable[[Result], None]
"""Sees each result as it is sealed."""
