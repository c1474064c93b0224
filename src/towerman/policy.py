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

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields
from inspect import iscoroutinefunction
from types import MappingProxyType
from typing import ClassVar, Final, Literal, NamedTuple, NoReturn, Protocol, cast, get_args

from towerman.budgets import CALLS, SECONDS, Asks, millionths, number
from towerman.calls import Result
from towerman.errors import PolicyError
from towerman.rates import Numbers, micros

Declared = str | Sequence[str | Callable[..., object]] | Callable[..., object]
"""What a tool declares for `reads` or `writes`: a template, a callable of the arguments, or a list of these."""

Merge = Callable[[list[dict[str, object]]], Mapping[str, object]]
"""Makes one set of arguments of those of several calls."""

Scope = Literal["process", "run", "tenant", "cluster"]
OnUnavailable = Literal["closed", "open", "local"]
"""Whom a pool counts for."""

WhenBusy = Literal["wait", "reject", "defer"]
"""What a call does when it cannot start at once: wait for a while, be refused, go into the durable queue."""

Undeclared = Literal["ordered", "exclusive", "independent"]
"""What a tool that declares no access is."""

OnExcess = Literal["tell", "queue"]
OnOrphan = Literal["hold", "release"]
OnRefusal = Literal["tell", "end_turn"]
OnDuplicate = Literal["join", "conflict"]
PlaceholderGuard = Literal["refuse", "warn", "off"]
"""What becomes of a call with a placeholder: it is refused, it runs and that is told, nobody looks."""

Mode = Literal["enforce", "observe"]
RunIn = Literal["loop", "thread", "process"]
Preset = Literal["read", "write", "background"]

MIN_RESULT_BYTES: Final = 64
"""Smallest bound of a result: room for the note that says what was cut."""

RESERVED_POOLS: Final = frozenset({"process", "run"})
"""Pool names that Towerman uses for its own limits."""

_NAME: Final = re.compile(r"[A-Za-z0-9_.\-]{1,128}")
_SEPARATOR: Final = re.compile(r"[/\\]")
_OF_A_STORE: Final = ("put", "read", "drop")

KINDS_OF_STORAGE: Final = ("auto", "memory", "journal", "off")
"""Where results are kept that are too large, apart from folders and stores of one's own."""

PRESETS: Final[Mapping[str, Mapping[str, object]]] = {
    "read": {"when_busy": "wait", "max_wait": 10.0},
    "write": {"when_busy": "wait", "max_wait": 30.0},
    "background": {"when_busy": "wait", "max_queued": 100, "max_wait": 60.0},
}
"""The waiting policies by name: short repeatable reads wait with a deadline (R-69); what changes something waits as
long as its approval holds, and is refused at the instant at which that is over (R-70: true of every call that needs
approval; the preset keeps it from being refused before only since somebody else is at work); work of low priority
stands in a bounded queue (R-71). What is given beside a preset wins over it."""


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
        large = isinstance(value, int | float) and MOST_SECONDS <= abs(value) < math.inf
        raise _say(where, value, f"less than {MOST_SECONDS:,.0f} seconds" if large else "a finite number of seconds")
    if value < 0 or (value == 0 and not zero):
        raise _say(where, value, Seconds(zero).allowed)
    return float(value)


def _seconds(where: str, value: object) -> float:
    """The same, where an argument has taken its name."""
    return seconds(where, value)


def flag(where: str, value: object) -> bool:
    """True or False."""
    if not isinstance(value, bool):
        raise _say(where, value, Flag.allowed)
    return value


def word(where: str, value: object, allowed: object) -> str:
    """One of the words of a Literal."""
    words = cast("tuple[str, ...]", get_args(allowed))
    if not isinstance(value, str) or value not in words:
        near = close_to(value, words) if type(value) is str else None
        hint = f" (did you mean {near!r}?)" if near else ""
        raise _say(where, value, f"{Word(allowed).allowed}{hint}")
    return value


def close_to(key: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The one of the known words that is most like it, if one is; see difflib.get_close_matches."""
    from difflib import get_close_matches

    near = get_close_matches(key[:80], known, 1, cutoff)
    return near[0] if near else None


def name_of(where: str, value: object) -> str:
    """A name that every provider's wire and every log takes: 1 to 128 of letters, digits, `_`, `-`, `.`."""
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise _say(where, value, "1 to 128 letters, digits, '_', '-' or '.'")
    return value


def nearest(key: str, known: Sequence[str]) -> str:
    """The nearest of the known names as a hint, or all of them."""
    # A hint that is far off, such as 'writes' for 'rate', leads astray: then all the names say more.
    near = close_to(key, known, 0.65)
    return f"; did you mean {near!r}?" if near else f"; known: {', '.join(sorted(known))}"


def only_known(where: str, given: Mapping[str, object], known: Sequence[str]) -> None:
    """Refuse unknown option names and name the nearest right one."""
    for key in given:
        if key not in known:
            raise PolicyError(f"{where}: no option {shown(key)}{nearest(str(key), known)}")


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


class Location:
    """Where the journal is."""

    __slots__ = ()
    allowed: ClassVar[str] = 'the path of a file, ":memory:" or a Journal'

    def check(self, where: str, value: object) -> object:
        """A path as text, or what can be used as a journal; None: there is none."""
        if value is None or (callable(getattr(value, "begin", None)) and callable(getattr(value, "look_up", None))):
            return value
        path = os.fspath(value) if isinstance(value, os.PathLike) else value
        if not isinstance(path, str) or not path.strip() or "\0" in path:
            raise _say(where, value, self.allowed)
        return path


class Secret:
    """What signatures and keyed digests rest on. No message shows it."""

    __slots__ = ()
    allowed: ClassVar[str] = "text or bytes that nobody can guess"

    def check(self, where: str, value: object) -> object:
        """Not empty; None: there is none."""
        if value is None or (isinstance(value, str | bytes) and value.strip()):
            return value
        told = "an empty one" if isinstance(value, str | bytes) else type(value).__name__[:80]
        raise PolicyError(f"{where}: {self.allowed}; got {told}")


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


class FreeText:
    """Arguments that the placeholder guard leaves alone. That there are such is checked where the tool is compiled."""

    __slots__ = ()
    allowed: ClassVar[str] = (
        "True for all arguments, a name such as 'body', a path such as 'mail.body', or a list of these"
    )

    def check(self, where: str, value: object) -> object:
        """True, False, or the names."""
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.strip():
            return (value,)
        named = isinstance(value, Sequence | Set) and not isinstance(value, str | bytes)
        if not named or not all(isinstance(one, str) and one.strip() for one in cast("Sequence[object]", value)):
            raise _say(where, value, self.allowed)
        return tuple(cast("Sequence[str]", value))


class EngineAt:
    """The engine that processes share."""

    __slots__ = ()
    allowed: ClassVar[str] = (
        "the URL of a Redis or Valkey, such as redis://localhost:6379/0, or a table with url, and group, lease, "
        "on_unavailable, replicas, acks"
    )

    def check(self, where: str, value: object) -> object:
        """An `Engine`; None: there is none."""
        return engine_of(where, value)


class Storage:
    """Where large results are kept."""

    __slots__ = ()
    allowed: ClassVar[str] = (
        "'auto', 'memory', 'journal', 'off', the path of a folder with a separator in it, such as './results', or a "
        "ResultStore"
    )

    def check(self, where: str, value: object) -> object:
        """As it is."""
        if isinstance(value, str) and (value in KINDS_OF_STORAGE or (_SEPARATOR.search(value) and "\0" not in value)):
            return value
        if isinstance(value, os.PathLike):
            path = os.fspath(value)
            if isinstance(path, str) and path and "\0" not in path:
                return value
        elif not isinstance(value, str | type) and all(callable(getattr(value, name, None)) for name in _OF_A_STORE):
            return value
        raise _say(where, value, self.allowed)


class RateLimit:
    """How many starts in how long."""

    __slots__ = ()
    allowed: ClassVar[str] = (
        'a rate such as "10/s", "100/min" or "3/5s", or limit, per (seconds), burst and reserve as Rate takes them'
    )

    def check(self, where: str, value: object) -> object:
        """A `Rate`."""
        return rate_of(where, value)


class CircuitBreaker:
    """When to stop calling what keeps failing."""

    __slots__ = ()
    allowed: ClassVar[str] = "True, or failures, window, open_for and probes as Breaker takes them"

    def check(self, where: str, value: object) -> object:
        """A `Breaker`."""
        return breaker_of(where, value)


class Condition:
    """Yes, no, or a function of the arguments that says so."""

    __slots__ = ()
    allowed: ClassVar[str] = "True, False, or a plain function of the arguments that returns one of them"

    def check(self, where: str, value: object) -> object:
        """As it is; the function is looked at where it is compiled, against the arguments of the tool (tools)."""
        if not isinstance(value, bool) and not callable(value):
            raise _say(where, value, self.allowed)
        return value


class Spending:
    """What a call takes of budgets. A function of the arguments is bound to them where the tool is compiled."""

    __slots__ = ()
    allowed: ClassVar[str] = "a number of calls, or units with their amounts such as {tokens = 500, cost = 0.02}"

    def check(self, where: str, value: object) -> object:
        """`Asks`, or the function."""
        return value if isinstance(value, Asks) or callable(value) else asks_of(where, value)


class Repeats:
    """How often the same."""

    __slots__ = ()
    allowed: ClassVar[str] = 'a whole number, 1 or more, or "any"'

    def check(self, where: str, value: object) -> object:
        """A whole number, or the word."""
        if isinstance(value, str) and value == "any":
            return "any"
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise _say(where, value, self.allowed)
        return value


class Attempts:
    """How often a call is tried. Whether its tool may be repeated is checked beside its other options."""

    __slots__ = ()
    allowed: ClassVar[str] = "attempts in all (a whole number, 1 or more), or Retry(max_attempts=3, ...)"

    def check(self, where: str, value: object) -> object:
        """A Retry; a file says it as a table."""
        if isinstance(value, Retry):
            return value
        if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
            only_known(where, value, _RETRY)
            if "retry_on" in value:
                raise PolicyError(f"{where}.retry_on: exception classes, which only code can name: Retry(retry_on=...)")
            try:
                return Retry(**value)
            except PolicyError as wrong:
                raise PolicyError(str(wrong).replace("Retry.", f"{where}.", 1)) from None
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise _say(where, value, self.allowed)
        return Retry(value)


class Option(NamedTuple):
    """One declared option: what it may be, and what it is for."""

    kind: Kind
    says: str


# -------------------------------------------------------------------------------------------- retries


TRANSIENT: Final[tuple[type[Exception], ...]] = (ConnectionError, TimeoutError)
"""What is tried again unless a tool says otherwise: nobody was reached, or no answer came in time."""


@dataclass(frozen=True, slots=True)
class Retry:
    """How a call that has failed is tried again, where repeating it is harmless.

    Between two attempts it holds nothing. The pause before attempt n + 1 is a random part of `initial_delay` times
    2 to the power of n - 1, at most of `max_delay` ("full jitter": M. Brooker, Exponential Backoff And Jitter, AWS
    Architecture Blog, 2015), and never less than the service asked for. Each attempt is admitted like a first one.

    Args:
        max_attempts: how often it is tried at most, the first time included; 1: never again.
        initial_delay: seconds of the longest pause before the second attempt, 0 or more.
        max_delay: seconds of the longest pause at all. A call whose service asks for a longer one is not tried again;
            its result says after how many seconds that makes sense (`Result.retry_after`).
        retry_on: exceptions after which it is tried again: a class or several. A handler that ran out of time counts as
            TimeoutError, an OSError that says that a network or host cannot be reached as ConnectionError. RateLimited
            is always one of them; ToolError, the handler's own word to the model, only where it, or a class below it,
            is named. Of a group of exceptions every one must be among them.

    Raises:
        PolicyError: a number out of its range, or no exception class.
    """

    max_attempts: int = 3
    initial_delay: float = 0.2
    max_delay: float = 5.0
    retry_on: tuple[type[Exception], ...] = TRANSIENT

    def __post_init__(self) -> None:
        whole("Retry.max_attempts", self.max_attempts)
        first = seconds("Retry.initial_delay", self.initial_delay, zero=True)
        most = seconds("Retry.max_delay", self.max_delay, zero=True)
        if first > most:
            raise PolicyError(
                f"Retry.initial_delay: at most max_delay ({most:g} seconds); got {shown(self.initial_delay)}"
            )
        given: object = self.retry_on
        kinds = (given,) if isinstance(given, type) else given
        if not isinstance(kinds, tuple | list) or not all(
            isinstance(kind, type) and issubclass(kind, Exception) for kind in kinds
        ):
            raise _say("Retry.retry_on", given, "subclasses of Exception, for example (ConnectionError, TimeoutError)")
        object.__setattr__(self, "retry_on", tuple(kinds))

    def __str__(self) -> str:
        kinds = ", ".join(kind.__name__ for kind in self.retry_on)
        return f"{shown(self.max_attempts)} attempts, pauses {self.initial_delay:g} to {self.max_delay:g} s, on {kinds}"


_RETRY: Final = tuple(field.name for field in fields(Retry))


# -------------------------------------------------------------------------------------------- pools


_RATE: Final = re.compile(r"\s*(\d{1,9})\s*/\s*(\d{0,9})\s*([a-zA-Z]+)\s*")

_UNITS: Final[Mapping[str, float]] = {
    **dict.fromkeys(("ms", "millisecond", "milliseconds"), 0.001),
    **dict.fromkeys(("s", "sec", "second", "seconds"), 1.0),
    **dict.fromkeys(("m", "min", "minute", "minutes"), 60.0),
    **dict.fromkeys(("h", "hour", "hours"), 3600.0),
    **dict.fromkeys(("d", "day", "days"), 86_400.0),
}

MOST_STARTS: Final = 100_000
"""Most starts in an exact window: each of them is remembered."""


@dataclass(frozen=True, slots=True)
class Rate:
    """How many calls may start in how long. It limits starts, not how many run at once.

    Args:
        limit: starts in each period, 1 or more.
        per: the period in seconds, a microsecond or more.
        burst: None: no window of the period, wherever it is laid, holds more starts than `limit`, counted from the
            first line of the handler; "10/s" says the same. A number: starts come at an even pace of `limit` in a
            period, and after a rest so many may come together (generic cell rate algorithm: at most burst + t * limit /
            per starts are let in in any t seconds).
        reserve: starts of the limit (or of the burst) kept for runs of a priority above 0; less than that.

    Raises:
        PolicyError: a number out of its range.
    """

    limit: int
    per: float = 1.0
    burst: int | None = None
    reserve: int = 0

    def __post_init__(self) -> None:
        whole("Rate.limit", self.limit)
        if seconds("Rate.per", self.per) < 1e-6:
            raise PolicyError(f"Rate.per: seconds, a microsecond (1e-6) or more; got {shown(self.per)}")
        if self.burst is None:
            if self.limit > MOST_STARTS:
                raise PolicyError(
                    f"Rate.limit: an exact window remembers each start, so {MOST_STARTS} at most; give a burst for more"
                )
        else:
            whole("Rate.burst", self.burst)
        whole("Rate.reserve", self.reserve, least=0)
        most, name = (self.limit, "limit") if self.burst is None else (self.burst, "burst")
        if self.reserve >= most:
            raise PolicyError(
                f"Rate.reserve: below {name} ({most}), or runs of priority 0 could never start; "
                f"got {shown(self.reserve)}"
            )

    @property
    def numbers(self) -> Numbers:
        """Limit, period in microseconds, burst and reserve."""
        return (self.limit, micros(self.per), self.burst, self.reserve)

    def __str__(self) -> str:
        return told_rate(*self.numbers)


def rate_of(where: str, value: object) -> Rate:
    """A rate from `Rate`, a text such as "10/s", "100/min", "3/5s", or a mapping of the fields.

    Args:
        where: begins the message.
        value: as above.

    Raises:
        PolicyError: it is none of these.
    """
    if isinstance(value, Rate):
        return value
    if isinstance(value, Mapping):
        only_known(where, value, ("limit", "per", "burst", "reserve"))
        if "limit" not in value:
            raise PolicyError(f"{where}: limit is missing: starts in a period, for example {{limit = 10}}")
        try:
            return Rate(**value)
        except PolicyError as wrong:
            raise PolicyError(f"{where}.{str(wrong).removeprefix('Rate.')}") from None
    found = _RATE.fullmatch(value) if isinstance(value, str) else None
    unit = _UNITS.get(found[3].lower()) if found is not None else None
    if found is None or unit is None or not int(found[1]) or found[2].strip("0") == "" != found[2]:
        raise _say(where, value, RateLimit.allowed)
    try:
        return Rate(int(found[1]), int(found[2] or 1) * unit)
    except PolicyError as wrong:
        raise PolicyError(f"{where}: {str(wrong).partition(': ')[2]}") from None


def told_rate(limit: int, period: int, burst: int | None, reserve: int) -> str:
    """A rate as people write it: `10/s`, `100/min, burst 20, 5 in reserve`.

    Args:
        limit: starts in a period.
        period: microseconds.
        burst: starts that may come together, or None.
        reserve: starts kept for runs of a priority above 0.
    """
    per = next((unit for unit, length in _SAID if period == length), f"{period / 1_000_000:g}s")
    told = [f"{limit}/{per}"]
    if burst is not None:
        told.append(f"burst {burst}")
    if reserve:
        told.append(f"{reserve} in reserve")
    return ", ".join(told)


_SAID: Final = (("s", 1_000_000), ("min", 60_000_000), ("h", 3_600_000_000), ("day", 86_400_000_000))


@dataclass(frozen=True, slots=True)
class Breaker:
    """Stop calling what keeps failing: a circuit breaker, decided in the same step as everything else.

    Args:
        failures: failed calls within the window that open it. A call fails when its handler raises anything but
            `ToolError` or `RateLimited`, or runs into its timeout.
        window: seconds.
        open_for: seconds for which calls are refused, `circuit_open`, before some are tried.
        probes: calls that are tried then, at once; when all of them come back well it closes, with the first that
            fails it is open again.

    Raises:
        PolicyError: a number out of its range.
    """

    failures: int = 5
    window: float = 30.0
    open_for: float = 10.0
    probes: int = 1

    def __post_init__(self) -> None:
        whole("Breaker.failures", self.failures)
        seconds("Breaker.window", self.window)
        seconds("Breaker.open_for", self.open_for)
        whole("Breaker.probes", self.probes)

    def __str__(self) -> str:
        return f"{self.failures} failures in {self.window:g} s, open for {self.open_for:g} s, {self.probes} probes"

    @property
    def numbers(self) -> tuple[int, int, int, int]:
        """Failures, window and time open in microseconds, probes."""
        return (self.failures, micros(self.window), micros(self.open_for), self.probes)


def breaker_of(where: str, value: object) -> Breaker:
    """A breaker from `Breaker`, True (the defaults), or a mapping of the fields.

    Args:
        where: begins the message.
        value: as above.

    Raises:
        PolicyError: it is none of these.
    """
    if isinstance(value, Breaker):
        return value
    if value is True:
        return Breaker()
    if isinstance(value, Mapping):
        only_known(where, value, ("failures", "window", "open_for", "probes"))
        try:
            return Breaker(**value)
        except PolicyError as wrong:
            raise PolicyError(f"{where}.{str(wrong).removeprefix('Breaker.')}") from None
    raise _say(where, value, CircuitBreaker.allowed)


@dataclass(frozen=True, slots=True)
class Pool:
    """A named concurrency limit that tools share.

    Args:
        permits: places in it, 1 or more.
        max_queued: how many calls may wait for it; None: only the tower's bound counts.
        scope: whom it counts for. "process": all runs of this process together; "cluster": all processes that share
            the engine; "tenant": the runs of one tenant together, with an engine in all processes; "run": each run
            alone, which protects nothing that runs share. None (default): "cluster" where the tower has an engine, else
            "process".
        reserve: permits kept for runs of a priority above 0; below `permits`.
        rate: a rate limit over the starts of all its calls: "10/s", or `Rate`.
        breaker: a circuit breaker over all its calls: `Breaker`, or True for the usual numbers.

    Raises:
        PolicyError: a number out of its range.
    """

    permits: int
    max_queued: int | None = None
    scope: Scope | None = None
    reserve: int = 0
    rate: Rate | None = None
    breaker: Breaker | None = None

    def __post_init__(self) -> None:
        for key, option in POOL.items():
            value = getattr(self, key)
            if key not in ("max_queued", "scope", "rate", "breaker") or value is not None:
                checked = option.kind.check(f"Pool.{key}", value)
                if key in ("rate", "breaker"):
                    object.__setattr__(self, key, checked)
        check_reserve("Pool.reserve", self.reserve, self.permits)


@dataclass(frozen=True, slots=True)
class Engine:
    """The engine that processes share: what counts over all of them is counted there.

    Args:
        url: `redis://`, `rediss://` or `unix://`, with user, password and database. No message shows it.
        group: the admission group: towers of one group share their limits. Letters, digits, `-`, `_`, `.`, `:`.
        lease: seconds after which what a dead process held is free again, 0.1 to 3600.
        on_unavailable: what a call does while the engine is not reached. "closed": it waits, and is refused
            (`engine_unavailable`) when its wait is over; "open": it runs by the limits of this process alone, which the
            batch is told; "local": it runs within this process's share of each limit, and what is exclusive waits.
        replicas: for "local": how many processes share the limits.
        acks: replicas of the server that must have heard of the grant of a write before its call starts (WAIT); a
            promoted one then knows of it. Costs a further round trip to them; closes most of the gap, not all of it.

    Raises:
        PolicyError: a value out of its range.
    """

    url: str = field(repr=False)
    group: str = "default"
    lease: float = 15.0
    on_unavailable: OnUnavailable = "closed"
    replicas: int | None = None
    acks: int = 0

    def __post_init__(self) -> None:
        for key, option in ENGINE.items():
            value = getattr(self, key)
            if key != "replicas" or value is not None:
                option.kind.check(f"engine.{key}", value)
        if self.url.partition("://")[0] not in ("redis", "rediss", "unix"):
            raise PolicyError("engine.url: begins with redis://, rediss:// or unix://; its value is not shown")
        if not self.group or not all(one.isalnum() or one in "-_.:" for one in self.group) or len(self.group) > 128:
            raise PolicyError("engine.group: 1 to 128 letters, digits, '-', '_', '.' or ':'")
        if not 0.1 <= self.lease <= 3600.0:
            raise PolicyError(f"engine.lease: from 0.1 to 3,600 seconds; got {self.lease:g}")
        if self.on_unavailable == "local" and self.replicas is None:
            raise PolicyError("engine.replicas: with on_unavailable='local', how many processes share the limits")


ENGINE: Final[Mapping[str, Option]] = {
    "url": Option(Text(), "where it is: redis://, rediss:// or unix://, with user, password and database"),
    "group": Option(Text(), "towers of one group share their limits"),
    "lease": Option(Seconds(), "seconds after which what a dead process held is free again, 0.1 to 3600"),
    "on_unavailable": Option(
        Word(OnUnavailable),
        "while it is not reached: wait, and be refused in the end; run by the limits of this process alone; run within "
        "this process's share of them",
    ),
    "replicas": Option(Whole(), "for on_unavailable = local: how many processes share the limits"),
    "acks": Option(Whole(0), "replicas of the server that must have heard of a write's grant before its call starts"),
}
"""The options of an engine."""


def engine_of(where: str, value: object) -> Engine | None:
    """An engine that was given as a URL or a table.

    Raises:
        PolicyError: naming the key, without the URL.
    """
    if value is None or isinstance(value, Engine):
        return value
    if isinstance(value, str):
        return Engine(value)
    if not isinstance(value, Mapping):
        raise PolicyError(f"{where}: {EngineAt.allowed}; got {type(value).__name__[:80]}")
    only_known(where, value, list(ENGINE))
    if "url" not in value:
        raise PolicyError(f"{where}: url is missing: {ENGINE['url'].says}")
    if not isinstance(value["url"], str):
        raise PolicyError(f"{where}.url: text; got {type(value['url']).__name__[:80]}")
    return Engine(**value)


POOL: Final[Mapping[str, Option]] = {
    "permits": Option(Whole(), "places in it"),
    "max_queued": Option(Whole(0), "how many calls may wait for it; not given: only the tower's bound counts"),
    "scope": Option(
        Word(Scope),
        "whom it counts for: all runs of the process, the runs of one tenant together, each run alone, all processes "
        "that share the engine; not given: the last where there is one, else the first",
    ),
    "reserve": Option(Whole(0), "permits kept for runs of a priority above 0; below permits"),
    "rate": Option(RateLimit(), "how many of its calls may start in how long"),
    "breaker": Option(CircuitBreaker(), "refuse its calls for a while when they keep failing"),
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


# -------------------------------------------------------------------------------------------- budgets


UNITS: Final = (CALLS, SECONDS, "tokens", "cost")
"""The units that everybody knows."""

_SAID_OF_BUDGETS: Final = (*UNITS, "per", "partial")


def unit_of(where: str, unit: object) -> str:
    """The name of a unit; one that is nearly a known name is taken for a slip."""
    name = name_of(f"{where}: a unit's name", unit)
    if name in UNITS:
        return name
    near = close_to(name, _SAID_OF_BUDGETS, 0.85)
    if near:
        raise PolicyError(f"{where}: no unit {name[:40]!r}; did you mean {near!r}?")
    return name


def amount_of(where: str, value: object) -> int:
    """An amount of a unit, in millionths."""
    try:
        return millionths(value)
    except ValueError as wrong:
        raise _say(where, value, str(wrong)) from None


def amounts_of(where: str, given: Mapping[str, object]) -> dict[str, int]:
    """Amounts that are spent, by unit, in millionths.

    Raises:
        PolicyError: no unit, or no amount.
    """
    found = {}
    for key, value in given.items():
        unit = unit_of(where, key)
        if unit == SECONDS:
            raise PolicyError(f"{where}: seconds pass by themselves; nobody can spend them")
        found[unit] = amount_of(f"{where}: {unit}", value)
    return found


def asks_of(where: str, value: object) -> Asks:
    """What a call takes: a number of calls, or a mapping of units to amounts.

    Args:
        where: begins the message.
        value: as above.

    Raises:
        PolicyError: it is neither.
    """
    if isinstance(value, Mapping):
        return Asks(amounts_of(where, value))
    try:
        return Asks({CALLS: millionths(value)})
    except ValueError:
        raise _say(where, value, Spending.allowed) from None


Per = Literal["second", "minute", "hour", "day", "week", "month"]
"""The windows in which a budget renews."""


class Budget:
    """How much may be spent: of calls, of time, of tokens, of money, of units of your own. Frozen.

    Args:
        calls: calls that may start.
        seconds: wall time since the run began; nothing starts after it. Only for a run, and it does not renew.
        tokens: LLM tokens, as `spends` of tools, `Context.charge` and `Run.charge` tell them.
        cost: money, in the same way.
        per: "second", "minute", "hour", "day", "week" or "month" of the calendar in UTC, or a number of seconds: what
            was spent is forgotten when such a window ends. None: never.
        partial: True runs the first calls of a batch for which there is enough, in emitted order. False runs a batch
            whole or not at all.
        units: amounts of units of your own, by name.

    Amounts are numbers of 0 or more (int, float, Decimal, Fraction), counted in whole millionths, so that nothing
    drifts.

    Raises:
        PolicyError: nothing is limited, or an amount or a name is wrong.
    """

    __slots__ = ("limits", "partial", "per", "seconds")

    limits: Mapping[str, int]
    partial: bool
    per: Per | float | None
    seconds: float | None

    def __init__(
        self,
        calls: float | None = None,
        seconds: float | None = None,
        tokens: float | None = None,
        cost: float | None = None,
        *,
        per: Per | float | None = None,
        partial: bool = True,
        **units: float | None,
    ) -> None:
        given = {CALLS: calls, "tokens": tokens, "cost": cost, **units}
        limits = {
            unit_of("Budget", unit): amount_of(f"Budget.{unit[:80]}", amount)
            for unit, amount in given.items()
            if amount is not None
        }
        lasts = None if seconds is None else _seconds("Budget.seconds", seconds)
        if not limits and lasts is None:
            raise PolicyError("Budget: it limits nothing; give calls=, seconds=, tokens=, cost= or a unit of your own")
        if isinstance(per, str):
            word("Budget.per", per, Per)
        elif per is not None and _seconds("Budget.per", per) < 1e-6:
            raise PolicyError(f"Budget.per: seconds, a microsecond (1e-6) or more; got {shown(per)}")
        flag("Budget.partial", partial)
        frozen = MappingProxyType(limits)
        for name, value in (("limits", frozen), ("partial", partial), ("per", per), ("seconds", lasts)):
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"a Budget is frozen: cannot set {name!r}")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"a Budget is frozen: cannot delete {name!r}")

    @property
    def window(self) -> str | int | None:
        """The window in which it renews: its name, or microseconds."""
        return self.per if self.per is None or isinstance(self.per, str) else micros(self.per)

    @property
    def _all(self) -> tuple[object, ...]:
        return (dict(self.limits), self.partial, self.window, self.seconds)

    def __eq__(self, other: object) -> bool:
        return self._all == other._all if isinstance(other, Budget) else NotImplemented

    def __hash__(self) -> int:
        return hash((frozenset(self.limits.items()), self.partial, self.window, self.seconds))

    def __reduce__(self) -> tuple[object, ...]:
        return _budget, (self.given,)

    @property
    def given(self) -> dict[str, object]:
        """What it was made of, less what was left out."""
        told: dict[str, object] = {unit: number(amount) for unit, amount in self.limits.items()}
        if self.seconds is not None:
            told[SECONDS] = self.seconds
        if self.per is not None:
            told["per"] = self.per
        return told if self.partial else {**told, "partial": False}

    def __str__(self) -> str:
        told = [f"{number(amount)} {unit}" for unit, amount in self.limits.items()]
        if self.seconds is not None:
            told.append(f"{self.seconds:g} seconds")
        per = "" if self.per is None else f" per {self.per}" if isinstance(self.per, str) else f" per {self.per:g} s"
        return f"{', '.join(told)}{per}{'' if self.partial else ', a batch whole or not at all'}"

    def __repr__(self) -> str:
        return f"Budget({', '.join(f'{name}={value!r}' for name, value in self.given.items())})"


def _budget(given: Mapping[str, object]) -> Budget:
    return Budget(**given)  # type: ignore[arg-type]  # checked there


def budget_of(where: str, value: object) -> Budget:
    """A budget from `Budget` or a mapping of its arguments.

    Args:
        where: begins the message.
        value: as above.

    Raises:
        PolicyError: it is neither.
    """
    if isinstance(value, Budget):
        return value
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise _say(where, value, "a Budget, such as Budget(calls=20, seconds=60)")
    try:
        return _budget(value)
    except PolicyError as wrong:
        told = str(wrong)
        raise PolicyError(f"{where}{told.removeprefix('Budget')}") from None


BUDGETS: Final = ("batch", "run", "tenant", "process")
"""For whom a tower may have a budget; `tenant:NAME` is that of one tenant."""


def budget_name(where: str, name: object) -> str:
    """For whom a budget counts: one of `BUDGETS`, or `tenant:NAME`."""
    if isinstance(name, str):
        if name in BUDGETS:
            return name
        scope, colon, tenant = name.partition(":")
        if colon and scope == "tenant":
            return f"tenant:{name_of(f'{where}: the name of a tenant', tenant)}"
    near = close_to(name, BUDGETS) if type(name) is str else None
    hint = f" (did you mean {near!r}?)" if near else ""
    raise _say(where, name, f"a budget is for 'batch', 'run', 'tenant', 'process' or 'tenant:NAME'{hint}")


def check_budget(where: str, name: str, budget: Budget) -> Budget:
    """Refuse what a budget cannot mean for whom it counts."""
    if budget.seconds is not None and name != "run":
        raise PolicyError(f"{where}: seconds count from the beginning of a run; give them to the budget of a run")
    if budget.per is not None and name == "batch":
        raise PolicyError(f"{where}: per: a batch has its budget once, and nothing to renew; leave per out")
    return budget


def budgets_of(given: object) -> dict[str, Budget | None]:
    """`budgets={"run": Budget(calls=20), "tenant": Budget(cost=5, per="day")}` as checked budgets by name; None for one
    that is taken away.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise PolicyError('budgets: a mapping of whom it counts for to Budget, for example {"run": Budget(calls=20)}')
    out: dict[str, Budget | None] = {}
    for key, value in given.items():
        name = budget_name("budgets", key)
        where = f"budgets.{name}"
        out[name] = None if value is None else check_budget(where, name, budget_of(where, value))
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
    retry: Retry | None = None
    pools: tuple[tuple[str, int], ...] = ()
    weight: int = 1
    max_concurrency: int | None = None
    rate: Rate | None = None
    breaker: Breaker | None = None
    spends: Asks | Callable[..., object] | None = None
    max_repeats: int | Literal["any"] | None = None
    timeout: float | None = None
    max_wait: float | None = None
    max_queued: int | None = None
    when_busy: WhenBusy | None = None
    on_refusal: OnRefusal = "tell"
    max_result_bytes: int | None = None
    encode: Callable[[object], object] | None = None
    summarize: Callable[[object], object] | None = None
    protect: bool = False
    share_identical: bool = False
    merge: Merge | None = None
    run_in: RunIn | None = None
    own_task: bool = True
    on_duplicate: OnDuplicate | None = None
    free_text: bool | tuple[str, ...] = ()
    requires_approval: bool | Callable[..., object] = False
    still_valid: Callable[..., object] | None = None

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
    "retry": Option(Attempts(), "how often its calls are tried; only for a tool that is read_only or idempotent"),
    "pools": Option(Shares(), "named pools that it takes permits of: names, or name to permits"),
    "weight": Option(Whole(), "permits of the process-wide limit"),
    "max_concurrency": Option(Whole(), "a limit of this tool's own"),
    "rate": Option(RateLimit(), "how many of its calls may start in how long"),
    "breaker": Option(CircuitBreaker(), "refuse its calls for a while when they keep failing"),
    "spends": Option(Spending(), "what one of its calls takes of budgets; default: one call"),
    "max_repeats": Option(Repeats(), "turns, one after the other, in which a run may make the same call of it"),
    "timeout": Option(Seconds(), "seconds one call may run"),
    "max_wait": Option(Seconds(), "seconds one call may wait"),
    "max_queued": Option(Whole(0), "calls of this tool that may wait"),
    "when_busy": Option(
        Word(WhenBusy), "wait in a bounded queue, with a deadline; be answered at once; or go into the journal's queue"
    ),
    "on_refusal": Option(Word(OnRefusal), "tell the model that a limit refused a call, or have the host end the turn"),
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
    "on_duplicate": Option(
        Word(OnDuplicate), "a call that is at work elsewhere by the same key: wait for its answer, or be refused"
    ),
    "free_text": Option(
        FreeText(), "arguments that hold free text or templates, which the placeholder guard leaves alone; true: all"
    ),
    "requires_approval": Option(
        Condition(), "its calls wait for a person's approval; in code also a function of the arguments"
    ),
    "still_valid": Option(Function("the arguments"), "asked again when an approved call is about to start"),
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


def check_retry(where: str, policy: ToolPolicy) -> None:
    """Refuse to repeat what may not be repeated (R-118, R-120)."""
    if policy.retry is not None and policy.retry.max_attempts > 1 and not policy.repeatable:
        raise PolicyError(
            f"{where}: retry repeats a call, and it is not said that this does no harm; say idempotent=True if a "
            "repeat changes nothing more, read_only=True if the tool has no effect, or leave retry out"
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
            near = close_to(key, pools)
            hint = f"did you mean {near!r}?" if near else f'declare it: Tower(pools={{"{key[:40]}": 4}})'
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
    policy = ToolPolicy(name=name, **given)  # type: ignore[arg-type]  # every value was checked above
    check_retry(where, policy)
    return policy


def check_deferring(where: str, journal: object) -> None:
    """Refuse `when_busy="defer"` where no journal keeps what is deferred.

    Args:
        where: begins the message.
        journal: the tower's, or None.

    Raises:
        PolicyError: there is none, or it stores no arguments.
    """
    if journal is None:
        raise PolicyError(
            f"{where}calls are deferred into the journal, and the tower has none; say "
            "Tower(journal='towerman.db'), or when_busy='wait' or 'reject'"
        )
    if not getattr(journal, "keeps_arguments", True):
        raise PolicyError(
            f"{where}calls are deferred into the journal, and this one stores no arguments; say "
            "Journal(..., arguments=True), or when_busy='wait' or 'reject'"
        )


def check_strict(policy: ToolPolicy) -> None:
    """`strict=True`: a tool must say its access, a limit and whether it may be repeated (R-25).

    Raises:
        PolicyError: naming everything that is missing.
    """
    missing = []
    if not policy.declares_access:
        missing.append("access (reads=, writes=, independent=True or sequential=True)")
    if not policy.pools and policy.max_concurrency is None and policy.rate is None:
        missing.append("a limit (pools=, max_concurrency= or rate=)")
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
    budgets: Mapping[str, Budget] = field(default_factory=dict)
    max_calls_per_batch: int = 25
    max_repeats: int | Literal["any"] = "any"
    on_excess: OnExcess = "tell"
    undeclared: Undeclared = "ordered"
    when_busy: WhenBusy = "wait"
    max_wait: float = 30.0
    max_queued: int = 1000
    timeout: float = 300.0
    grace: float = 5.0
    on_orphan: OnOrphan = "hold"
    approval_lifetime: float = 3600.0
    max_result_bytes: int = 32_768
    max_batch_bytes: int = 131_072
    results: object = "auto"
    result_lifetime: float = 3600.0
    max_stored_bytes: int = 67_108_864
    count_tokens: Callable[[str], int] | None = None
    placeholder_guard: PlaceholderGuard = "refuse"
    mode: Mode = "enforce"
    debug: bool = False
    strict: bool = False
    on_duplicate: OnDuplicate = "join"
    engine: Engine | None = None
    journal: object = None
    secret: str | bytes | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        engine = engine_of("engine", self.engine)
        object.__setattr__(self, "engine", engine)
        for name, pool in self.pools.items():
            if pool.scope == "cluster" and engine is None:
                raise PolicyError(
                    f"pool {name!r}: scope='cluster' counts over all processes, for which they need an engine that "
                    "they share: Tower(engine='redis://...')"
                )
        for key, option in TOWER.items():
            value = getattr(self, key)
            if value is not None or not isinstance(option.kind, Function):
                option.kind.check(key, value)
        if self.when_busy == "defer":
            check_deferring("when_busy='defer': ", self.journal)

    def scope_of(self, pool: Pool) -> Scope:
        """Whom a pool counts for."""
        return pool.scope or self.usual_scope

    @property
    def usual_scope(self) -> Scope:
        """Whom limits count for that do not say so."""
        return "process" if self.engine is None else "cluster"


TOWER: Final[Mapping[str, Option]] = {
    "max_concurrency": Option(Whole(), "calls that may run at once in this process, over all runs"),
    "run_concurrency": Option(Whole(), "calls of one run that may run at once"),
    "max_calls_per_batch": Option(Whole(), "calls that are run for one response"),
    "max_repeats": Option(Repeats(), "turns, one after the other, in which a run may make the same call"),
    "on_excess": Option(Word(OnExcess), "run the first calls and answer the rest call_cap, or run all, slower"),
    "undeclared": Option(Word(Undeclared), "what a tool that declares no access is"),
    "when_busy": Option(
        Word(WhenBusy), "wait in a bounded queue, with a deadline; be answered at once; or go into the journal's queue"
    ),
    "max_wait": Option(Seconds(), "seconds a call may wait"),
    "max_queued": Option(Whole(0), "calls that may wait at once"),
    "timeout": Option(Seconds(), "seconds a call may run"),
    "grace": Option(Seconds(zero=True), "seconds a call that was told to stop has for cleaning up"),
    "on_orphan": Option(Word(OnOrphan), "what a call that goes on after its result was sealed does with its permits"),
    "approval_lifetime": Option(Seconds(), "seconds for which a call waits for a person's approval"),
    "max_result_bytes": Option(Whole(MIN_RESULT_BYTES), "bound of one result's content, in UTF-8 bytes"),
    "max_batch_bytes": Option(Whole(MIN_RESULT_BYTES), "bound of all contents of one batch together"),
    "results": Option(
        Storage(),
        "where results are kept whole that are too large: memory, journal, a folder's path, off; auto: the journal if "
        "there is one, else memory",
    ),
    "result_lifetime": Option(Seconds(), "seconds that such a result is kept"),
    "max_stored_bytes": Option(Whole(0), "bytes that all of them together may take; the oldest goes first"),
    "count_tokens": Option(Function("a text"), "gives the tokens that a text takes; default: its bytes / 4"),
    "placeholder_guard": Option(
        Word(PlaceholderGuard), "refuse calls with a placeholder in place of a value, run them and warn, or do not look"
    ),
    "mode": Option(Word(Mode), "observe: pools and concurrency limits hold nobody back, and are only watched"),
    "debug": Option(Flag(), "print tracebacks of handlers to stderr"),
    "strict": Option(Flag(), "refuse, when it is declared, a tool without access, limit or retry class"),
    "on_duplicate": Option(
        Word(OnDuplicate), "a call that is at work elsewhere by the same key: wait for its answer, or be refused"
    ),
    "engine": Option(EngineAt(), "keeps what counts over several processes: the URL of a Redis or Valkey, or a table"),
    "journal": Option(Location(), "the file that remembers what was begun and what came of it; ':memory:' for tests"),
    "secret": Option(Secret(), "what signatures and keyed digests rest on; never shown"),
}
"""The options of a tower, apart from its pools and budgets."""

TOWER_OPTIONS: Final = tuple(field.name for field in fields(TowerPolicy))

OnResult = Callable[[Result], None]
"""Sees each result as it is sealed."""
