"""Whether a call that has failed is tried again, and when.

Theory. A retry has to be harmless, likely to help, and in time. Harmless: only tools that may be repeated declare one
(policy), and an attempt that says that it took effect is never repeated. Likely to help: what was raised is of the
kinds that the tool names; of a group every leaf has to be, since one that is not would fail again. In time: within the
attempts that the tool has, not later than the run's deadline, and no sooner than the service asked for.

The pause is the random one with "full jitter" (M. Brooker, Exponential Backoff And Jitter, AWS Architecture Blog,
2015): uniform between 0 and min(max_delay, initial_delay * 2 ** (n - 1)) after attempt n. Calls that failed together do
not come back together. Where the service says how long to wait, that comes first and what is random is added, as far
as max_delay lets it; where it asks for more than max_delay, the call is not tried again, since sooner is no use and
later is more than was declared.

House rules. Pure: the instant and the chance are handed in. Whatever hangs on a foreign exception is looked at with
care: reading it may fail, and it may be anything.

Not here: which tools may be repeated (policy), what an attempt gives back and how it is offered again (runner, gate).
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Final, Literal, TypeGuard

from towerman.calls import Applied
from towerman.errors import RateLimited, ToolError
from towerman.policy import Retry

if TYPE_CHECKING:
    from decimal import Decimal
    from fractions import Fraction

Why = Literal["cause", "attempts", "retry_after", "deadline"]
"""Why there is no further attempt: it would not help, there were enough, the service asks for a pause that is too long,
the run is over before."""

MOST_ASKED: Final = 31_536_000.0
"""Seconds (a year): whoever asks for more is taken to ask for this."""

MOST_TEXT: Final = 1_000
"""Characters of a text that is read as a length of time."""

_UNREACHABLE: Final = frozenset({errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH})
"""Errors of the system that say what ConnectionError says, and have no class of their own."""

_SEVERAL: Final = (RateLimited, BaseExceptionGroup)

_DOUBLINGS: Final = 1000
"""More would leave the range of floats; the longest pause is met long before."""


def decide(
    retry: Retry,
    attempt: int,
    error: BaseException | None,
    now: float,
    limit: float,
    chance: Callable[[], float],
    wall: float = 0.0,
) -> float | Why:
    """When to try a call again whose attempt has failed, or why not.

    Args:
        retry: what its tool declares.
        attempt: which attempt has failed, from 1.
        error: what it raised; None: its time was over.
        now: the present instant in seconds.
        limit: the instant of the run's deadline.
        chance: gives a random number from 0 up to 1.
        wall: the present Unix time in seconds, for a service that names an instant.

    Returns:
        The instant of the next attempt; or the reason why there is none.
    """
    if not (may_pass(retry, error) if error is not None else issubclass(TimeoutError, retry.retry_on)):
        return "cause"
    if attempt >= retry.max_attempts:
        return "attempts"
    asked = asked_for(error, wall) if error is not None else None
    pause = backoff(retry, attempt, asked, chance())
    if pause is None:
        return "retry_after"
    return now + pause if now + pause < limit else "deadline"


def backoff(retry: Retry, attempt: int, asked: float | None, chance: float) -> float | None:
    """The pause after an attempt in seconds; None: longer than the tool waits.

    Args:
        retry: what the tool declares.
        attempt: which attempt has failed, from 1.
        asked: seconds that the service asks for, or None.
        chance: from 0 up to 1.
    """
    least = asked or 0.0
    if least > retry.max_delay:
        return None
    most = min(retry.max_delay - least, retry.initial_delay * 2.0 ** min(attempt - 1, _DOUBLINGS))
    return least + chance * most


def may_pass(retry: Retry, error: BaseException) -> bool:
    """Is everything that was raised of the kinds after which the tool's calls are tried again?"""
    return all(_passes(retry.retry_on, leaf) for leaf in leaves(error))


def _passes(kinds: tuple[type[Exception], ...], leaf: BaseException) -> bool:
    if isinstance(leaf, RateLimited):
        return True
    if isinstance(leaf, ToolError):
        # Said on purpose: what is meant for any exception does not mean it.
        kinds = tuple([kind for kind in kinds if kind is not Exception])
        applied: object = _read(leaf, "applied")
        if isinstance(applied, str) and applied == "yes":
            return False
    if isinstance(leaf, kinds):
        return True
    if not isinstance(leaf, OSError) or ConnectionError not in kinds:
        return False
    number = _read(leaf, "errno")
    return type(number) is int and number in _UNREACHABLE


def _read(leaf: BaseException, name: str) -> object:
    """What hangs on an exception, or None where it does not let itself be read."""
    try:
        found: object = getattr(leaf, name, None)
    except Exception:
        return None
    return found


def leaves(error: BaseException) -> Iterator[BaseException]:
    """The exception itself; of a group those in it, groups in it opened."""
    stack = [error]
    while stack:
        one = stack.pop()
        if isinstance(one, BaseExceptionGroup):
            stack.extend(reversed(one.exceptions))
        else:
            yield one


def rate_limited(error: BaseException) -> bool:
    """Does it say that a service refuses further calls, and nothing else?"""
    if not isinstance(error, _SEVERAL):  # the usual case, told at a glance
        return False
    return all(isinstance(leaf, RateLimited) for leaf in leaves(error))


def asked_for(error: BaseException, wall: float) -> float | None:
    """Seconds to wait, as the service says (the attribute `retry_after` of what was raised), the longest of several.

    Args:
        error: what was raised.
        wall: the present Unix time in seconds, for what names an instant.
    """
    if not isinstance(error, BaseExceptionGroup):
        return length_of(_read(error, "retry_after"), wall)
    found = None
    for leaf in leaves(error):
        length = length_of(_read(leaf, "retry_after"), wall)
        if length is not None and (found is None or length > found):
            found = length
    return found


def length_of(given: object, wall: float) -> float | None:
    """A length of time in seconds, at most `MOST_ASKED`; None for whatever says none.

    Both forms of a Retry-After header (RFC 9110, section 10.2.3): seconds, with decimals too, and an HTTP-date in each
    of its three notations (section 5.6.7); and what programs make of these: numbers, a timedelta, a datetime with a
    time zone. An instant that is over is 0 seconds away. Negative, no number, no time zone: it says nothing.

    Args:
        given: whatever was given.
        wall: the present Unix time in seconds.
    """
    try:
        found = _seconds_of(given, wall)
    except Exception:  # of a date that is none, or of an object that does not let itself be read
        return None
    if found is None or not found >= 0:  # a number that is none is not
        return None
    return min(found, MOST_ASKED)


def _seconds_of(given: object, wall: float) -> float | None:
    if isinstance(given, bytes | bytearray):
        given = given[:MOST_TEXT].decode("ascii")
    if isinstance(given, str):
        return _seconds_in(given.strip(), wall)
    if isinstance(given, timedelta):
        return given.total_seconds()
    if isinstance(given, datetime):
        return None if given.utcoffset() is None else max(0.0, given.timestamp() - wall)
    if isinstance(given, bool) or not (isinstance(given, int | float) or _is_exact(given)):
        return None
    if given > MOST_ASKED:  # it may be more than a float can hold
        return MOST_ASKED
    return float(given)


def _is_exact(given: object) -> TypeGuard[Decimal | Fraction]:
    from decimal import Decimal  # not needed by most programs
    from fractions import Fraction

    return isinstance(given, Decimal | Fraction)


def _seconds_in(text: str, wall: float) -> float | None:
    if len(text) > MOST_TEXT or not text.isascii():
        return None
    if text.replace(".", "", 1).isdigit():  # no sign, no exponent, no words for numbers
        return float(text)
    if not text[:1].isalpha():  # a date of a header begins with the day of the week
        return None
    from email.utils import mktime_tz, parsedate_tz

    named = parsedate_tz(text)
    return None if named is None else max(0.0, float(mktime_tz(named)) - wall)


def applied_in_all(before: Applied, last: Applied) -> Applied:
    """Whether the effect took place in any of several attempts."""
    if "yes" in (before, last):
        return "yes"
    return "unknown" if "unknown" in (before, last) else "no"
