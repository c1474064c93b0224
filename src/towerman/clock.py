"""The only room that reads time.

Theory. Every decision gets `now` handed in, a float of seconds on a monotonic scale whose zero means
nothing. The real clock is `time.monotonic`; the virtual one moves only when a test moves it.

A clock that somebody hands in may be set while calls wait. Forward nobody can tell that from time that passes. Back it
would lock out everybody who waits for an instant: so it is read through a `SteadyClock`.

House rules. Nobody else imports `time` to decide anything. Wall-clock instants (an aware datetime
given as a deadline) are turned into monotonic ones here, once, when they come in.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    """Seconds on a monotonic scale."""

    def now(self) -> float:
        """The present instant in seconds; never goes back."""
        ...  # pragma: no cover - a protocol has no body


class RealClock:
    """The machine's monotonic clock."""

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now = time.monotonic


class VirtualClock:
    """A clock that stands still until `advance` or `set` moves it.

    Args:
        start: the first instant, in seconds.
    """

    __slots__ = ("_now",)

    def __init__(self, start: float = 0.0) -> None:
        self._now = float(start)

    def now(self) -> float:
        """The present virtual instant in seconds."""
        return self._now

    def advance(self, seconds: float) -> float:
        """Move forward and return the new instant.

        Args:
            seconds: how far; not negative.

        Raises:
            ValueError: it is negative.
        """
        if seconds < 0:
            raise ValueError(f"a clock cannot go back: advance({seconds})")
        self._now += seconds
        return self._now

    def set(self, instant: float) -> float:
        """Move forward to an instant and return it.

        Args:
            instant: in seconds; not before the present one.

        Raises:
            ValueError: it is past.
        """
        if instant < self._now:
            raise ValueError(f"a clock cannot go back: set({instant}) at {self._now}")
        self._now = float(instant)  # exactly: now + (instant - now) may be another number
        return self._now


class SteadyClock:
    """Another clock, as one that never goes back: where that one was set back, it goes on from where it was, so that no
    wait and no deadline grows longer, and no rate lets anybody in for it.

    Args:
        clock: may be set at any time, also while several threads read it.
        passing: another clock that nobody sets: what has passed by it since the last reading has passed here, too.
    """

    __slots__ = ("_passing", "_read", "_seen")

    def __init__(self, clock: Clock, passing: Callable[[], float] = time.monotonic) -> None:
        self._read = clock.now
        self._passing = passing
        self._seen = (-math.inf, 0.0, 0.0)  # what was read last, when, and what is added to it

    def now(self) -> float:
        """The present instant in seconds; never goes back."""
        # In this order, and as one row, there is nothing to lock: what was seen is older than what is read now, so a
        # smaller number was set, and whoever finds that out at the same moment comes to the same sum.
        last, then, more = self._seen
        read, present = self._read(), self._passing()
        if read < last:
            more += last - read + max(0.0, present - then)
        self._seen = (read, present, more)
        return read + more


def steady(clock: Clock) -> Clock:
    """The clock itself where it cannot go back, else as a `SteadyClock`."""
    if type(clock) in (RealClock, VirtualClock):
        return clock
    return SteadyClock(clock, lambda: 0.0) if isinstance(clock, VirtualClock) else SteadyClock(clock)


def wall_time() -> float:
    """Unix time in seconds, for records that people place in a day; nothing is decided by it."""
    return time.time()


def calendar(clock: Clock) -> float:
    """Seconds from the zero of a clock to 1970 in UTC, looked up once: where in the calendar its instants are.

    Args:
        clock: a virtual one has its zero there.
    """
    return wall_time() - clock.now() if isinstance(clock, RealClock) else 0.0


def instant_of(deadline: float | datetime, now: float, *, wall: datetime | None = None) -> float:
    """The monotonic instant of a deadline given as seconds from now or as an aware datetime.

    Args:
        deadline: seconds from now (not negative), or a datetime with a time zone.
        now: the present monotonic instant.
        wall: the present wall-clock time; read from the machine when it is not given.

    Raises:
        ValueError: a datetime without a time zone, or seconds that are negative or not a number.
    """
    if isinstance(deadline, datetime):
        if deadline.tzinfo is None:
            raise ValueError("deadline: a datetime needs a time zone, for example datetime.now(UTC)")
        return now + (deadline - (wall or datetime.now(UTC))).total_seconds()
    if isinstance(deadline, bool) or not deadline >= 0:
        told = repr(deadline) if deadline > -1e15 or deadline != deadline else "a number far below 0"
        raise ValueError(f"deadline: seconds from now, 0 or more, or an aware datetime; got {told}")
    try:
        return now + float(deadline)
    except OverflowError:  # a whole number beyond all that floats can hold
        return math.inf
