"""What was declared: per tool, per pool, for the tower. Checked once, when it is declared.

Theory. Every option has one meaning, one default and one place where it is checked. A mistake is a `PolicyError` that
names the option, what was given, what is allowed and the fix, and it comes when the tool or tower is made, never with
a call.

The options are declared in three tables, `TOWER`, `POOL` and `TOOL`: a kind, which knows what is allowed, and a
sentence. What is checked in code, read from a file or the environment, and printed as JSON schema all comes from them.

House rules. Frozen data; no behaviour beyond checking and explaining itself. Text that came out of the environment is
a `FromEnvironment`, which no message and no `repr` shows.

Not here: where options come from besides the code (config), resource templates (access), argument schemas (arguments),
what is held (ledger).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from inspect import iscoroutinefunction
from typing import ClassVar, Final, Literal, NamedTuple, Protocol, cast, get_args

from towerman.calls import Result
from towerman.errors import PolicyError

Declared = str | Sequence[str | Callable[..., object]] | Callable[..., object]
"""What a tool declares for `reads` or `writes`: a template, a callable of the arguments, or a list of these."""

Merge = Callable[[list[dict[str, object]]], Mapping[str, object]]
"""Makes one set of arguments of those of several calls."""

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
_SEPARATOR: Final = re.compile(r"[/\\]")
_OF_A_STORE: Final = ("put", "read", "drop")

PRESETS: Final[Mapping[str, Mapping[str, object]]] = {
    "read": {"when_busy": "wait", "max_wait": 10.0},
    "background": {"when_busy": "wait", "max_queued": 100, "max_wait": 60.0},
}
"""The waiting policies by name: short repeatable reads wait with a deadline (R-69), work of low priority stands in a
bounded queue (R-71). What is given beside a preset wins over it."""


# -------------------------------------------------------------------------------------------- checks


MOST_SECONDS: Final = 1e15
"""Seconds that no option reaches: more is a mistake, or a number that no clock can be added to."""


VARIABLE: Final = re.compile(r"(?<!\$)\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
"""How a variable of the environment is written in a text: `${NAME}`."""


class FromEnvironment(str):
    """Text with values of environment variables put in. It is the text; what is shown of it is how it was written.

    Args:
        value: the text.
        told: the same with `${NAME}` where a value stands.
    """

    told: str

    def __new__(cls, value: str, told: str) -> FromEnvironment:
        """The text, with what may be shown of it."""
        made = super().__new__(cls, value)
        made.told = told
        return made

    @property
    def variables(self) -> tuple[str, ...]:
        """The names of the variables in it."""
        return tuple(dict.fromkeys(VARIABLE.findall(self.told)))

    def __repr__(self) -> str:
        return repr(self.told)


def shown(given: object) -> str:
    """An option's wrong value for a message: short ones as they are, of others the type. It never fails."""
    if isinstance(given, FromEnvironment):
        return f"a text with {', '.join(given.variables)} of the environment, which is not shown"
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
        raise _say(where, value, Whole(least).allowed)
    return value


def seconds(where: str, value: object, *, zero: bool = False) -> float:
    """A finite number of seconds above 0 (or from 0)."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not -MOST_SECONDS < value < MOST_SECONDS:
        raise _say(where, value, "a finite number of seconds")
    if value < 0 or (value == 0 and not zero):
        raise _say(where, value, Seconds(zero).allowed)
    return float(value)


def flag(where: str, value: object) -> bool:
    """True or False."""
    if not isinstance(value, bool):
        raise _say(where, value, Flag.allowed)
    return value


def word(where: str, value: object, allowed: object) -> str:
    """One of the words of a Literal."""
    words = cast("tuple[str, ...]", get_args(allowed))
    if not isinstance(value, str) or value not in words:
        near = get_close_matches(value, words, 1) if type(value) is str else []
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise _say(where, value, f"{Word(allowed).allowed}{hint}")
    return value


def name_of(where: str, value: object) -> str:
    """A name that every provider's wire and every log takes: 1 to 128 of letters, digits, `_`, `-`, `.`."""
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise _say(where, value, "1 to 128 letters, digits, '_', '-' or '.'")
    return value


def nearest(key: str, known: Sequence[str]) -> str:
    """The nearest of the known names as a hint, or all of them."""
    # A hint that is far off, such as 'writes' for 'rate', leads astray: then all the names say more.
    near = get_close_matches(key[:80], known, 1, cutoff=0.65)
    return f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(sorted(known))}"


def only_known(where: str, given: Mapping[str, object], known: Sequence[str]) -> None:
    """Refuse unknown option names and name the nearest right one."""
    for key in given:
        if key not in known:
            raise PolicyError(f"{where}: no option {shown(key)}{nearest(key, known)}")


# -------------------------------------------------------------------------------------------- kinds of options


class Kind(Protocol):
    """What an option may be."""

    @property
    def allowed(self) -> str:
        """The same in words."""

    def check(self, where: str, value: object) -> object:
        """The value, as it is kept.

        Raises:
            PolicyError: it is not allowed; the message begins with `where`.
        """


class Whole(NamedTuple):
    """A whole number."""

    least: int = 1

    @property
    def allowed(self) -> str:
        """In words."""
        return f"a whole number, {self.least} or more"

    def check(self, where: str, value: object) -> object:
        """No boolean, no fraction."""
        return whole(where, value, least=self.least)


class Seconds(NamedTuple):
    """A length of time."""

    zero: bool = False

    @property
    def allowed(self) -> str:
        """In words."""
        return "seconds, 0 or more" if self.zero else "seconds, more than 0"

    def check(self, where: str, value: object) -> object:
        """A finite number."""
        return seconds(where, value, zero=self.zero)


class Flag:
    """Yes or no."""

    __slots__ = ()
    allowed: ClassVar[str] = "True or False"

    def check(self, where: str, value: object) -> object:
        """Nothing that passes for it."""
        return flag(where, value)


class Word(NamedTuple):
    """One of the words of a Literal."""

    literal: object

    @property
    def words(self) -> tuple[str, ...]:
        """The words."""
        return cast("tuple[str, ...]", get_args(self.literal))

    @property
    def allowed(self) -> str:
        """In words."""
        return f"one of {', '.join(map(repr, self.words))}"

    def check(self, where: str, value: object) -> object:
        """With the near one in the message."""
        return word(where, value, self.literal)


class Text:
    """Any text."""

    __slots__ = ()
    allowed: ClassVar[str] = "text"

    def check(self, where: str, value: object) -> object:
        """Of type str."""
        if not isinstance(value, str):
            raise _say(where, value, self.allowed)
        return value


class Function(NamedTuple):
    """A function."""

    of: str = "the handler's value"

    @property
    def allowed(self) -> str:
        """In words."""
        return f"a function of {self.of}"

    def check(self, where: str, value: object) -> object:
        """It can be called."""
        if not callable(value):
            raise _say(where, value, self.allowed)
        return value


class Templates:
    """Resources. They are checked where they are compiled, against the arguments of the tool (access)."""

    __slots__ = ()
    allowed: ClassVar[str] = "a template such as 'ticket:{id}', or a list of them"

    def check(self, where: str, value: object) -> object:
        """As it is."""
        return value


class Shares:
    """Permits of named pools. That the pools exist and are large enough is checked against the tower's."""

    __slots__ = ()
    allowed: ClassVar[str] = "a list of pool names or a mapping of name to permits"

    def check(self, where: str, value: object) -> object:
        """A mapping of name to permits."""
        if isinstance(value, str):
            return {value: 1}
        if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
            return {key: whole(f"{where}.{key[:80]}", units) for key, units in value.items()}
        if isinstance(value, Sequence) and all(isinstance(key, str) for key in value):
            return dict.fromkeys(value, 1)
        raise _say(where, value, self.allowed)


class Storage:
    """Where large results are kept."""

    __slots__ = ()
    allowed: ClassVar[str] = (
        "'memory', 'off', the path of a folder with a separator in it, such as './results', or a ResultStore"
    )

    def check(self, where: str, value: object) -> object:
        """As it is."""
        if isinstance(value, str) and (value in ("memory", "off") or (_SEPARATOR.search(value) and "\0" not in value)):
            return value
        if isinstance(value, os.PathLike):
            path = os.fspath(value)
            if isinstance(path, str) and path and "\0" not in path:
                return value
        elif not isinstance(value, str | type) and all(callable(getattr(value, name, None)) for name in _OF_A_STORE):
            return value
        raise _say(where, value, self.allowed)


class Option(NamedTuple):
    """One declared option: what it may be, and what it is for."""

    kind: Kind
    says: str


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
        for key, option in POOL.items():
            value = getattr(self, key)
            if key != "max_queued" or value is not None:
                option.kind.check(f"Pool.{key}", value)
        check_reserve("Pool.reserve", self.reserve, self.permits)


POOL: Final[Mapping[str, Option]] = {
    "permits": Option(Whole(), "places in it"),
    "max_queued": Option(Whole(0), "how many calls may wait for it; not given: only the tower's bound counts"),
    "scope": Option(
        Word(Scope), "whom it counts for: all runs of the process, the runs of one tenant together, each run alone"
    ),
    "reserve": Option(Whole(0), "permits kept for runs of a priority above 0; below permits"),
}
"""The options of a pool."""


def check_reserve(where: str, reserve: int, permits: int) -> None:
    """Refuse a reserve that leaves nothing to the others."""
    if reserve >= permits:
        raise PolicyError(
            f"{where}: below permits ({permits}), or runs of priority 0 could never start; got {shown(reserve)}"
        )


def pool_name(where: str, name: object) -> str:
    """A name that a pool may have: none of Towerman's own."""
    checked = name_of(where, name)
    if checked in RESERVED_POOLS:
        raise PolicyError(f"{where}.{checked}: this name is taken by Towerman's own limit; choose another")
    return checked


def pools_of(given: object) -> dict[str, Pool]:
    """`pools={"crm": 2, "db": Pool(1, scope="tenant")}` as checked pools by name."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise PolicyError('pools: a mapping of name to permits or Pool, for example {"crm": 2}')
    out: dict[str, Pool] = {}
    for key, value in given.items():
        name = pool_name("pools", key)
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
    protect: bool = False
    share_identical: bool = False
    merge: Merge | None = None
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

TOOL: Final[Mapping[str, Option]] = {
    "description": Option(Text(), "what the model is told of it; default: the docstring's text"),
    "reads": Option(Templates(), 'resources that it reads: templates over its arguments, such as "file:{path}"'),
    "writes": Option(Templates(), "resources that it may change"),
    "independent": Option(Flag(), "it touches nothing that calls share (says nothing about effects)"),
    "sequential": Option(Flag(), "alone (beside independent calls only) and in emitted order within its run"),
    "only_call": Option(Flag(), "may not share a batch with other calls"),
    "read_only": Option(Flag(), "no side effect; default: true for a tool that only reads"),
    "idempotent": Option(Flag(), "repeating it is harmless"),
    "pools": Option(Shares(), "named pools that it takes permits of: names, or name to permits"),
    "weight": Option(Whole(), "permits of the process-wide limit"),
    "max_concurrency": Option(Whole(), "a limit of this tool's own"),
    "timeout": Option(Seconds(), "seconds one call may run"),
    "max_wait": Option(Seconds(), "seconds one call may wait"),
    "max_queued": Option(Whole(0), "calls of this tool that may wait"),
    "when_busy": Option(Word(WhenBusy), "wait in a bounded queue, with a deadline, or be answered at once"),
    "preset": Option(Word(Preset), "a waiting policy in one word; what is given beside it wins"),
    "max_result_bytes": Option(Whole(MIN_RESULT_BYTES), "bound of its results, in UTF-8 bytes"),
    "encode": Option(Function(), "gives text, or a value that is encoded in its place"),
    "summarize": Option(Function(), "takes an oversized value, on a thread, gives a shorter one"),
    "protect": Option(Flag(), "its results are trimmed last where a batch of results is too large"),
    "share_identical": Option(Flag(), "identical calls of one batch, with no conflicting call between them, run once"),
    "merge": Option(
        Function("a list of argument mappings"),
        "takes the arguments of neighbouring calls on one resource, gives those of one run",
    ),
    "run_in": Option(Word(RunIn), "where its handler runs; default: loop for coroutine functions, thread for others"),
    "own_task": Option(Flag(), "false lets several calls of one batch run in one task while its context is unchanged"),
}
"""The options of a tool."""


def tool_options(where: str, options: Mapping[str, object], known: Sequence[str] = tuple(TOOL)) -> dict[str, object]:
    """Check options of tools, each by itself and beside the others.

    Args:
        where: begins the messages.
        options: by name; None means "not given".
        known: the names that may be given.

    Returns:
        What was given, a preset written out.

    Raises:
        PolicyError: naming the option and the fix.
    """
    only_known(where, options, known)
    given = {key: TOOL[key].kind.check(f"{where}: {key}", value) for key, value in options.items() if value is not None}
    check_contradictions(where, given)
    return with_preset(given)


def with_preset(given: Mapping[str, object]) -> dict[str, object]:
    """Options with their preset, a known one, written out; what is given beside it wins."""
    preset = given.get("preset")
    beside = {key: value for key, value in given.items() if key != "preset"}
    return beside if preset is None else {**PRESETS[cast("str", preset)], **beside}


def check_contradictions(where: str, given: Mapping[str, object]) -> None:
    """Refuse checked options that cannot both be meant."""
    touches = given.get("reads") is not None or given.get("writes") is not None or given.get("sequential")
    if given.get("independent") and touches:
        raise PolicyError(f"{where}: independent=True contradicts reads, writes and sequential; leave one of them out")
    if given.get("read_only") and given.get("writes") is not None:
        raise PolicyError(f"{where}: read_only=True contradicts writes; a tool that writes has an effect")
    if given.get("share_identical") and given.get("merge") is not None:
        raise PolicyError(
            f"{where}: share_identical=True contradicts merge, which gets identical calls too; leave one of them out, "
            "or say share_identical=False"
        )


def check_merge(where: str, given: Mapping[str, object]) -> None:
    """Refuse a merge function that could never be used."""
    merge = given.get("merge")
    if merge is None:
        return
    if iscoroutinefunction(merge) or iscoroutinefunction(type(merge).__call__):
        raise PolicyError(f"{where}: merge: a plain function, which is called just before a run starts, not async")
    if given.get("reads") is None and given.get("writes") is None:
        raise PolicyError(
            f"{where}: merge joins calls on one resource, and the tool declares none; say reads= or writes=, or leave "
            "merge out"
        )


def check_limits(
    where: str, given: Mapping[str, object], pools: Mapping[str, Pool], max_concurrency: int, *, must_fit: bool = True
) -> None:
    """Refuse checked options of tools that the tower's limits could never serve.

    Args:
        where: begins the messages.
        given: checked options by name.
        pools: the tower's pools by name.
        max_concurrency: permits of the process-wide limit, which a weight may not exceed.
        must_fit: False asks only that the pools exist.
    """
    weight = cast("int", given.get("weight", 1))
    if weight > max_concurrency and must_fit:
        raise PolicyError(
            f"{where}: weight {shown(weight)} is more than the tower's max_concurrency {max_concurrency}: "
            "it could never run"
        )
    for key, units in cast("Mapping[str, int]", given.get("pools", {})).items():
        pool = pools.get(key)
        if pool is None:
            if isinstance(key, FromEnvironment):
                raise PolicyError(f"{where}: no pool {shown(key)}; known: {', '.join(sorted(pools)) or 'none'}")
            near = get_close_matches(key, pools, 1)
            hint = f"did you mean {near[0]!r}?" if near else f'declare it: Tower(pools={{"{key[:40]}": 4}})'
            raise PolicyError(f"{where}: no pool {shown(key)}; {hint}")
        if units > pool.permits - pool.reserve and must_fit:
            raise PolicyError(
                f"{where}: pools.{key}: {shown(units)} permits of a pool that has {pool.permits}"
                f"{f' less {pool.reserve} in reserve' if pool.reserve else ''}: it could never run"
            )


def tool_policy(
    name: str,
    options: Mapping[str, object],
    pools: Mapping[str, Pool],
    *,
    max_concurrency: int,
    must_fit: bool = True,
) -> ToolPolicy:
    """Check the options of one tool against the tower's pools.

    Args:
        name: the tool's name.
        options: keyword options of `Tower.tool`, without `name`; None means "not given".
        pools: the tower's pools by name.
        max_concurrency: permits of the process-wide limit, which a weight may not exceed.
        must_fit: False lets it need more than there is.

    Raises:
        PolicyError: naming the tool, the option and the fix.
    """
    where = f"tool {name_of('tool name', name)!r}"
    given = tool_options(where, options)
    check_merge(where, given)
    check_limits(where, given, pools, max_concurrency, must_fit=must_fit)
    given["pools"] = tuple(cast("Mapping[str, int]", given.get("pools", {})).items())
    return ToolPolicy(name=name, **given)  # type: ignore[arg-type]  # every value was checked above


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
    results: object = "memory"
    result_lifetime: float = 3600.0
    max_stored_bytes: int = 67_108_864
    count_tokens: Callable[[str], int] | None = None
    mode: Mode = "enforce"
    debug: bool = False
    strict: bool = False

    def __post_init__(self) -> None:
        for key, option in TOWER.items():
            value = getattr(self, key)
            if value is not None or not isinstance(option.kind, Function):
                option.kind.check(key, value)


TOWER: Final[Mapping[str, Option]] = {
    "max_concurrency": Option(Whole(), "calls that may run at once in this process, over all runs"),
    "run_concurrency": Option(Whole(), "calls of one run that may run at once"),
    "max_calls_per_batch": Option(Whole(), "calls that are run for one response"),
    "on_excess": Option(Word(OnExcess), "run the first calls and answer the rest call_cap, or run all, slower"),
    "undeclared": Option(Word(Undeclared), "what a tool that declares no access is"),
    "when_busy": Option(Word(WhenBusy), "wait in a bounded queue, with a deadline, or be answered at once"),
    "max_wait": Option(Seconds(), "seconds a call may wait"),
    "max_queued": Option(Whole(0), "calls that may wait at once"),
    "timeout": Option(Seconds(), "seconds a call may run"),
    "grace": Option(Seconds(zero=True), "seconds a call that was told to stop has for cleaning up"),
    "on_orphan": Option(Word(OnOrphan), "what a call that goes on after its result was sealed does with its permits"),
    "max_result_bytes": Option(Whole(MIN_RESULT_BYTES), "bound of one result's content, in UTF-8 bytes"),
    "max_batch_bytes": Option(Whole(MIN_RESULT_BYTES), "bound of all contents of one batch together"),
    "results": Option(Storage(), "where results are kept whole that are too large: memory, off, or a folder's path"),
    "result_lifetime": Option(Seconds(), "seconds that such a result is kept"),
    "max_stored_bytes": Option(Whole(0), "bytes that all of them together may take; the oldest goes first"),
    "count_tokens": Option(Function("a text"), "gives the tokens that a text takes; default: its bytes / 4"),
    "mode": Option(Word(Mode), "observe: pools and concurrency limits hold nobody back, and are only watched"),
    "debug": Option(Flag(), "print tracebacks of handlers to stderr"),
    "strict": Option(Flag(), "refuse, when it is declared, a tool without access, limit or retry class"),
}
"""The options of a tower, apart from its pools."""

TOWER_OPTIONS: Final = tuple(field.name for field in fields(TowerPolicy))

OnResult = Callable[[Result], None]
"""Sees each result as it is sealed."""
