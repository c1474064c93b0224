"""The pure room `retrying`: whether a call that has failed is tried again, and when."""

from __future__ import annotations

import errno
import math
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from towerman import RateLimited, Retry, ToolError
from towerman.policy import TRANSIENT
from towerman.retrying import (
    MOST_ASKED,
    applied_in_all,
    asked_for,
    backoff,
    decide,
    leaves,
    length_of,
    may_pass,
    rate_limited,
)

NEVER = math.inf

NOON = datetime(2026, 10, 21, 12, tzinfo=UTC).timestamp()


def half() -> float:
    """The same chance each time."""
    return 0.5


class Hostile(OSError):
    """Whatever is read of it, it fails."""

    @property
    def retry_after(self) -> float:
        raise ZeroDivisionError

    @property
    def errno(self) -> int:  # type: ignore[override]
        raise ZeroDivisionError


class FlakyTool(ToolError):
    """A handler's word that means: try again."""


def group(*errors: Exception) -> ExceptionGroup[Exception]:
    """Several errors at once, one level down."""
    return ExceptionGroup("g", [ExceptionGroup("h", list(errors))])


CASES: list[tuple[BaseException, bool]] = [
    (ConnectionError(), True),
    (ConnectionResetError(), True),
    (BrokenPipeError(), True),
    (TimeoutError(), True),
    (OSError(errno.ETIMEDOUT, "late"), True),
    (OSError(errno.EHOSTUNREACH, "away"), True),
    (OSError(errno.ENETUNREACH, "away"), True),
    (OSError(errno.ENOSPC, "full"), False),
    (OSError(), False),
    (Hostile(), False),
    (PermissionError(errno.EACCES, "no"), False),
    (ValueError(), False),
    (RateLimited(3), True),
    (RateLimited(), True),
    (ToolError("no such customer"), False),
    (ToolError("nothing done", applied="no"), False),
    (KeyboardInterrupt(), False),
    (SystemExit(), False),
    (GeneratorExit(), False),
    (group(ConnectionError(), RateLimited(1)), True),
    (group(PermissionError("no")), False),
    (group(ConnectionError(), ValueError()), False),
    (BaseExceptionGroup("b", [ConnectionError(), KeyboardInterrupt()]), False),
]


@pytest.mark.parametrize(("error", "passes"), CASES, ids=[repr(error)[:40] for error, _ in CASES])
def test_p77_what_may_pass_by_default(error: BaseException, passes: bool) -> None:
    """P-77, S9: nobody was reached or no answer came in time: tried again. Retry rules look at the leaves of a group,
    and one leaf that would fail again decides; interrupts and the handler's own word never are.
    """
    assert may_pass(Retry(), error) is passes


@pytest.mark.parametrize(
    ("kinds", "error", "passes"),
    [
        ((ValueError,), ValueError(), True),
        ((ValueError,), ConnectionError(), False),
        ((ValueError,), OSError(errno.ENETDOWN, "x"), False),
        ((ValueError,), RateLimited(), True),
        ((), RateLimited(), True),
        ((Exception,), ToolError("said"), False),
        ((Exception,), ValueError(), True),
        ((ToolError,), ToolError("said"), True),
        ((ToolError,), ToolError("said", applied="no"), True),
        ((ToolError,), ToolError("said", applied="unknown"), True),
        ((ToolError,), ToolError("said", applied="yes"), False),
        ((FlakyTool,), FlakyTool("later"), True),
        ((FlakyTool,), ToolError("said"), False),
        ((FlakyTool, Exception), group(FlakyTool("later"), KeyError()), True),
        ((FlakyTool, Exception), group(FlakyTool("later", applied="yes"), KeyError()), False),
    ],
)
def test_r118_what_may_pass_as_declared(kinds: tuple[type[Exception], ...], error: BaseException, passes: bool) -> None:
    """R-118: what a tool names replaces what is usual; a ToolError is tried again only where it is named itself, and
    never when it says that it took effect.
    """
    assert may_pass(Retry(retry_on=kinds), error) is passes


def test_deep_groups_are_opened_without_recursion() -> None:
    """P-77: groups in groups, however deep."""
    error: Exception = ConnectionError()
    for _ in range(10_000):
        error = ExceptionGroup("g", [error])
    assert [type(leaf) for leaf in leaves(error)] == [ConnectionError]
    assert may_pass(Retry(), error)


@pytest.mark.parametrize(
    ("given_length", "seconds"),
    [
        (0, 0.0),
        (2, 2.0),
        (0.5, 0.5),
        ("30", 30.0),
        (" 1.5 ", 1.5),
        (timedelta(minutes=1), 60.0),
        (timedelta(seconds=-1), None),
        (Decimal("2.5"), 2.5),
        (Fraction(1, 2), 0.5),
        (b"3", 3.0),
        (None, None),
        (True, None),
        (-1, None),
        (-0.001, None),
        (-(10**400), None),
        (float("nan"), None),
        (Decimal("NaN"), None),
        (float("inf"), MOST_ASKED),
        (float("-inf"), None),
        (10**400, MOST_ASKED),
        (MOST_ASKED + 1, MOST_ASKED),
        (timedelta.max, MOST_ASKED),
        ("9" * 50, MOST_ASKED),
        ("9" * 999, MOST_ASKED),
        ("0" * 40 + "7", 7.0),
        ("9" * 10_000, None),
        ("-3", None),
        ("+3", None),
        ("1e3", None),
        ("1.2.3", None),
        ("nan", None),
        ("inf", None),
        (".", None),
        ("", None),
        ("\u0663", None),
        (b"\xff", None),
        ([3], None),
        (object(), None),
    ],
)
def test_r51_what_a_service_asks_for(given_length: Any, seconds: float | None) -> None:
    """R-51: numbers, their text and lengths of time are understood and bounded, whatever else counts as not known."""
    assert length_of(given_length, NOON) == seconds
    assert asked_for(RateLimited(given_length), NOON) == seconds


@pytest.mark.parametrize(
    ("named", "seconds"),
    [
        ("Wed, 21 Oct 2026 12:00:30 GMT", 30.0),
        ("Wednesday, 21-Oct-26 12:00:30 GMT", 30.0),  # the form of RFC 850
        ("Wed Oct 21 12:00:30 2026", 30.0),  # the form of asctime
        (" wed, 21 oct 2026 12:00:30 gmt ", 30.0),
        (b"Wed, 21 Oct 2026 12:00:30 GMT", 30.0),
        ("Wed, 21 Oct 2026 14:00:30 +0200", 30.0),
        ("Wed, 21 Oct 2026 11:59:59 GMT", 0.0),
        ("Sun, 06 Nov 1994 08:49:37 GMT", 0.0),
        ("Fri, 31 Dec 9999 23:59:59 GMT", MOST_ASKED),
        ("Wed, 99 Oct 2026 12:00:30 GMT", "anything"),
        ("Wed, 21 Foo 2026 12:00:30 GMT", None),
        ("Wed, 21 Oct 2026 12:00", "anything"),
        ("Wed", None),
        ("2026-10-21T12:00:30Z", None),  # no form of a header
        (datetime(2026, 10, 21, 12, 1, tzinfo=UTC), 60.0),
        (datetime(2026, 10, 21, 14, 1, tzinfo=timezone(timedelta(hours=2))), 60.0),
        (datetime(2026, 10, 21, 11, tzinfo=UTC), 0.0),
        (datetime.max.replace(tzinfo=UTC), MOST_ASKED),
        (datetime(2026, 10, 21, 12, 1, tzinfo=UTC).replace(tzinfo=None), None),
        (NOON, NOON if NOON < MOST_ASKED else MOST_ASKED),  # a number is a length, whatever its size
    ],
)
def test_s9_an_instant_that_a_service_names(named: Any, seconds: float | str | None) -> None:
    """S9, R-51: a Retry-After header has two forms; an instant is counted from the wall clock that is handed in."""
    found = length_of(named, NOON)
    if seconds == "anything":
        assert found is None or 0 <= found <= MOST_ASKED
    else:
        assert found == seconds


@given(st.one_of(st.text(), st.binary(), st.floats(), st.integers(), st.timedeltas(), st.datetimes(), st.decimals()))
def test_r51_no_answer_of_a_service_breaks_anything(given_length: Any) -> None:
    """R-51: whatever it is, it is a bounded length or not known."""
    for whatever in (given_length, f"Wed, {given_length} GMT"):
        found = length_of(whatever, NOON)
        assert found is None or 0.0 <= found <= MOST_ASKED


def test_the_longest_of_several_is_waited_for() -> None:
    """Retry-After of any exception that has one; one that does not let itself be read is left out."""
    error = ConnectionError()
    error.retry_after = 7  # type: ignore[attr-defined]
    assert asked_for(group(error, RateLimited(3), RateLimited("x"), Hostile()), NOON) == 7.0
    assert asked_for(Hostile(), NOON) is None


def test_rate_limited_is_said_where_nothing_else_was_raised() -> None:
    """R-122: a group is a rate limit when each of its leaves is one."""
    assert rate_limited(RateLimited(1))
    assert rate_limited(group(RateLimited(1), RateLimited()))
    assert not rate_limited(group(RateLimited(1), ValueError()))
    assert not rate_limited(ValueError())


@pytest.mark.parametrize(
    ("attempt", "most"), [(1, 0.2), (2, 0.4), (3, 0.8), (4, 1.6), (5, 3.2), (6, 5.0), (7, 5.0), (10**30, 5.0)]
)
def test_full_jitter_exactly(attempt: int, most: float) -> None:
    """S9: full jitter: uniform from 0 to min(max_delay, initial_delay * 2 ** (n - 1)) after attempt n."""
    retry = Retry(10**40)
    assert backoff(retry, attempt, None, 0.0) == 0.0
    assert backoff(retry, attempt, None, 0.5) == pytest.approx(most / 2)
    assert backoff(retry, attempt, None, 1.0) == pytest.approx(most)


@pytest.mark.parametrize(
    ("asked", "chance", "pause"), [(2.0, 0.0, 2.0), (2.0, 1.0, 2.2), (4.9, 1.0, 5.0), (5.0, 1.0, 5.0), (5.1, 0.0, None)]
)
def test_retry_after_comes_first(asked: float, chance: float, pause: float | None) -> None:
    """S9: never sooner than the service asks for, never later than max_delay; where these part, not at all."""
    assert backoff(Retry(), 1, asked, chance) == (None if pause is None else pytest.approx(pause))


def test_no_pause_where_none_is_wanted() -> None:
    """Retry(initial_delay=0): at once; a service that asks for a pause is then not asked again."""
    retry = Retry(initial_delay=0, max_delay=0)
    assert decide(retry, 1, ConnectionError(), 3.0, NEVER, half) == 3.0
    assert decide(retry, 1, RateLimited(1), 3.0, NEVER, half) == "retry_after"


@pytest.mark.parametrize(
    ("attempt", "error", "limit", "decision"),
    [
        (1, ConnectionError(), NEVER, 10.1),
        (2, ConnectionError(), NEVER, 10.2),
        (3, ConnectionError(), NEVER, "attempts"),
        (4, ConnectionError(), NEVER, "attempts"),
        (1, ValueError(), NEVER, "cause"),
        (1, None, NEVER, 10.1),
        (1, RateLimited(2), NEVER, 12.1),
        (1, RateLimited(6), NEVER, "retry_after"),
        (1, RateLimited(2), 12.2, 12.1),
        (1, RateLimited(2), 12.1, "deadline"),
        (1, ConnectionError(), 10.0, "deadline"),
    ],
)
def test_r119_decisions(attempt: int, error: BaseException | None, limit: float, decision: object) -> None:
    """S9, G12: attempts are counted, Retry-After and the run's deadline are honoured; each no has its reason."""
    found = decide(Retry(), attempt, error, 10.0, limit, half)
    assert found == (pytest.approx(decision) if isinstance(decision, float) else decision)


def test_a_timeout_is_tried_again_where_timeouts_are() -> None:
    """S9: a handler that ran out of time counts as TimeoutError."""
    assert decide(Retry(retry_on=(OSError,)), 1, None, 0.0, NEVER, half) == 0.1
    assert decide(Retry(retry_on=(ConnectionError,)), 1, None, 0.0, NEVER, half) == "cause"
    assert (ConnectionError, TimeoutError) == TRANSIENT


@given(
    retry=st.builds(
        lambda attempts, first, more: Retry(attempts, initial_delay=first, max_delay=first + more),
        st.integers(1, 10**6),
        st.floats(0, 1e6),
        st.floats(0, 1e6),
    ),
    attempt=st.integers(1, 10**7),
    asked=st.one_of(st.none(), st.floats(0, 3e6)),
    chance=st.floats(0, 1, exclude_max=True),
)
def test_every_pause_is_within_its_bounds(retry: Retry, attempt: int, asked: float | None, chance: float) -> None:
    """G12, S9: a pause is never negative, never above max_delay, never below what the service asked for."""
    pause = backoff(retry, attempt, asked, chance)
    if pause is None:
        assert asked is not None and asked > retry.max_delay
    else:
        assert (asked or 0.0) <= pause <= retry.max_delay * (1 + 1e-12)


@pytest.mark.parametrize(
    ("before", "last", "both"),
    [
        ("no", "no", "no"),
        ("unknown", "no", "unknown"),
        ("no", "unknown", "unknown"),
        ("unknown", "yes", "yes"),
        ("yes", "no", "yes"),
    ],
)
def test_g10_the_effect_of_all_attempts(before: Any, last: Any, both: str) -> None:
    """G10: what any attempt may have done, the call may have done."""
    assert applied_in_all(before, last) == both


def test_rate_limited_travels() -> None:
    """It comes back from another process as it was raised there."""
    import pickle

    back: Callable[[bytes], Any] = pickle.loads
    assert back(pickle.dumps(RateLimited("3"))).retry_after == "3"
