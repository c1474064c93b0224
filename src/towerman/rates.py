"""How many starts in how long: the arithmetic of rate limits.

Theory. Two rules. A `Window` remembers its last starts and lets another one in when no window of its period, wherever
it is laid, would hold more than its limit (a sliding log: exact, at the price of a number for each start). A `Bucket`
remembers one instant, the one at which all that it has let in would have been used up at an even pace; it lets one in
while that instant is less than its burst ahead (the generic cell rate algorithm, ITU-T I.371: in any stretch of time t
it lets in at most burst + t * limit / period starts, and nothing has to be refilled).

What was let in and has not begun is of the present, however long it takes: a handler that begins late would otherwise
come into the window, or the burst, of those that were let in after it. Both rules count a start from the instant at
which they were told that the first line was reached; until then it stands in the way as if it began now, which is the
worst that it can do: of starts that are still to come, those that come together, at once, leave the least room.

(Why a bucket keeps its bound then. Take any stretch from x to y and, of the starts in it, the one that was let in last,
at n <= y. When it was let in, k of the others had begun, at x or later, so the remembered instant was x + k periods /
limit at least; p had not. It was let in because that instant plus p more was not more than burst - 1 ahead of n. So
there are k + p + 1 <= burst + (y - x) * limit / period starts in the stretch, in whatever order they were told.)

Some starts may be in reserve for calls of a higher class. Others are let in as if the limit were less by so many.

A rate can be told to stand still until an instant, when whoever is behind it has said that it is too much. All that is
free then must not go through together: that would be too much again. A bucket comes out of a pause with its burst used
up, so that calls come at its even pace, and the burst is there again when the rate has rested. A window lets them start
at the same even pace, period / limit apart, until one period has passed; from then on its memory of these keeps them
apart. Where no rate is known, they begin slowly: one in the first second, two in the next, four in the one after, and
so on for ten seconds. The reserve comes through whole at once. A further pause begins all this anew.

House rules. Instants and lengths are whole microseconds, so that nothing drifts and every ledger gives the same answer;
they are on one scale, whose zero means nothing. A scale that goes back is shifted: what was let in a moment ago stays
a moment ago.

Not here: who waits and who goes first (gate), what else a call needs (ledger), what may be declared (policy).
"""

from __future__ import annotations

from bisect import bisect_right, insort
from typing import Final

MICRO: Final = 1_000_000
"""Microseconds in a second."""

NEVER: Final = 1 << 62
"""An instant that nobody lives to see."""

SLOW: Final = 10
"""Seconds for which calls begin slowly after a pause where there is no rate; in each it is twice as many."""


def micros(seconds: float) -> int:
    """Seconds as the nearest whole number of microseconds."""
    return round(seconds * MICRO)


class Pace:
    """A rule of how many starts may be how close together; this one has no limit but its pauses.

    Args:
        limit: starts in a period, 1 or more.
        period: microseconds, 1 or more.
        reserve: starts of the limit (or of the burst) kept for calls of a higher class; less than that.

    Attributes:
        burst: starts that may come together after a rest; None where a window is exact.
        until: the instant before which nothing starts at all.
        pending: those that were let in and have not begun.
        started: those that have begun, all told.
    """

    __slots__ = ("_calm", "burst", "limit", "pending", "period", "reserve", "started", "until")

    def __init__(self, limit: int, period: int, burst: int | None, reserve: int) -> None:
        self.limit = limit
        self.period = period
        self.burst = burst
        self.reserve = reserve
        self.until = -NEVER
        self._calm = -NEVER * limit  # after a pause, when the next one may start, times the limit
        self.pending = 0
        self.started = 0

    def free_at(self, now: int, *, high: bool, kept: int = 0) -> int:
        """The earliest instant, not before now, at which one more may start, by what is known now; `NEVER` while that
        depends on when others begin.

        Args:
            now: the present instant.
            high: a call of a higher class, which may use the reserve.
            kept: so many more starts are kept for others.
        """
        return max(self._free_at(now, high=high, kept=kept), self._eased_at(now, high=high), self.until, now)

    def free_in(self, now: int, *, high: bool) -> int:
        """How long it is at least until one more may start: that long if those that were let in begin now."""
        instant = self._free_at(now, high=high, kept=0)
        if instant >= NEVER:
            instant = self._free_then(now, high=high)
        return max(instant, self._eased_at(now, high=high), self.until, now) - now

    def let_in(self, now: int) -> None:
        """One more is about to start."""
        self.pending += 1
        self._let_in(now)

    def begun(self, now: int) -> None:
        """One of those that were let in has begun."""
        self.pending -= 1
        self.started += 1
        self._begun(now)
        if now >= self.until > -NEVER:
            self._calm = max(self._calm, now * self.limit) + self._gap(now)

    def take_back(self, now: int, *, newest: bool) -> None:
        """One of those that were let in will not start; `newest`: nobody was let in after it."""
        self.pending -= 1
        if not newest:
            self._lost(now)

    def pause(self, until: int) -> bool:
        """Nothing starts before that instant; says whether that is later than it was."""
        later = until > self.until
        if later:
            self.until = until
            self._calm = until * self.limit
            self._use_up(until)
        return later

    def shift(self, by: int) -> None:
        """All instants are so much later, or earlier, than they were thought to be."""
        self.until = max(self.until + by, -NEVER)
        self._calm += by * self.limit
        self._shift(by)

    def changed(self, now: int, numbers: Numbers | None) -> Pace:
        """The rule with another limit, period, burst and reserve (None: no limit), and with the same past as far as it
        can have it.

        What is longer ago than the old rule remembers does not count under a new one with a longer period.
        """
        other = make(numbers)
        other.until, other.pending, other.started = self.until, self.pending, self.started
        other._calm = -(-self._calm // self.limit) * other.limit  # rounded up
        for start in self._starts_of(now):
            other._let_in(start)
            other._begun(start)
        if self.until > now or self._gap(now):
            other._use_up(max(self.until, now))
        for _ in range(self.pending):
            other._let_in(now)
        return other

    @property
    def numbers(self) -> Numbers | None:
        """Limit, period, burst and reserve; None: there is no limit."""
        return None if type(self) is Pace else (self.limit, self.period, self.burst, self.reserve)

    def rested(self, now: int) -> bool:
        """Is it as if nothing had ever started?"""
        return not self.pending and self.until <= now and not self._gap(now) and self._idle(now)

    def _eased_at(self, now: int, *, high: bool) -> int:
        """The earliest instant at which one more may start by what the last pause has left."""
        after = max(now, self.until)
        gap = self._gap(after) if self.until > -NEVER else 0
        if not gap:
            return -NEVER
        room = (self.reserve if high else 0) - self.pending
        over = self.until + self._easing()
        return over if room < 0 else min(over, -((room * gap - self._calm) // self.limit))

    def _easing(self) -> int:
        """For how long a pause is felt after its end."""
        return SLOW * MICRO

    def _gap(self, now: int) -> int:
        """How far apart starts are at that instant for the sake of the last pause, times the limit; 0: not any more."""
        passed = (now - self.until) // MICRO
        return MICRO >> max(0, passed) if passed < SLOW else 0

    def _use_up(self, until: int) -> None:
        """A pause ends at that instant: whatever may come together then is used up."""

    def _free_at(self, now: int, *, high: bool, kept: int) -> int:
        """The same, whatever is paused."""
        return now

    def _free_then(self, now: int, *, high: bool) -> int:
        """The same where it depends on others, if they all begin now."""
        return now + self.period

    def _idle(self, now: int) -> bool:
        """Is nothing of what it remembers of any use?"""
        return True

    def _let_in(self, now: int) -> None:
        """One more is about to start."""

    def _begun(self, now: int) -> None:
        """One has begun."""

    def _lost(self, now: int) -> None:
        """One will not start that is not the newest."""

    def _shift(self, by: int) -> None:
        """Instants that the rule remembers."""

    def _starts_of(self, now: int) -> list[int]:
        """Starts that explain what the rule remembers, earliest first, without those to begin."""
        return []

    def validate(self, now: int) -> None:
        """Raise AssertionError when the past cannot be."""
        assert self.pending >= 0, f"{self} has taken back too many"

    def __repr__(self) -> str:
        burst = "" if self.burst is None else f", burst {self.burst}"
        return f"{type(self).__name__}({self.limit} in {self.period} us{burst}, {self.pending} to begin)"


class Window(Pace):
    """No window of the period ever holds more starts than the limit."""

    __slots__ = ("_starts",)

    def __init__(self, limit: int, period: int, reserve: int = 0) -> None:
        super().__init__(limit, period, None, reserve)
        self._starts: list[int] = []  # those that may still be in a window, earliest first

    def _free_at(self, now: int, *, high: bool, kept: int) -> int:
        starts = self._starts
        more = len(starts) + self.pending - (self.limit if high else self.limit - self.reserve) + kept
        if more < 0:
            return now
        # Of the oldest so many and one must be out of the window first.
        return starts[more] + self.period if more < len(starts) else NEVER

    def _let_in(self, now: int) -> None:
        # Starts that no window of the present or the future holds are of no use.
        starts = self._starts
        if starts and starts[0] + self.period <= now:
            del starts[: bisect_right(starts, now - self.period)]

    def _begun(self, now: int) -> None:
        insort(self._starts, now)

    def _easing(self) -> int:
        return self.period

    def _gap(self, now: int) -> int:
        return self.period if now < self.until + self.period else 0

    def _idle(self, now: int) -> bool:
        return not self._starts or self._starts[-1] + self.period <= now

    def _shift(self, by: int) -> None:
        self._starts = [start + by for start in self._starts]

    def _starts_of(self, now: int) -> list[int]:
        return self._starts

    def validate(self, now: int) -> None:
        """Raise AssertionError when a window holds more than it may, or the past cannot be."""
        super().validate(now)
        starts = self._starts
        assert starts == sorted(starts), f"{self} has its starts out of order"


class Bucket(Pace):
    """At most `burst` at once, and `limit` in a period at an even pace.

    Args:
        limit: starts in a period, 1 or more.
        period: microseconds, 1 or more.
        burst: starts that may come together after a rest, 1 or more.
        reserve: starts of the burst kept for calls of a higher class; less than the burst.

    Instants are kept times the limit, so that the distance of two starts, period / limit, is a whole number.
    """

    __slots__ = ("_even",)

    burst: int

    def __init__(self, limit: int, period: int, burst: int, reserve: int = 0) -> None:
        super().__init__(limit, period, burst, reserve)
        self._even = -NEVER * limit  # when what has begun would be used up, times the limit

    def _free_at(self, now: int, *, high: bool, kept: int) -> int:
        room = (self.burst if high else self.burst - self.reserve) - 1 - self.pending - kept
        if room < 0:
            return NEVER
        return -((room * self.period - self._even) // self.limit)  # rounded up

    def _free_then(self, now: int, *, high: bool) -> int:
        room = (self.burst if high else self.burst - self.reserve) - 1 - self.pending
        return -((room * self.period - max(self._even, now * self.limit)) // self.limit)

    def _begun(self, now: int) -> None:
        self._even = max(self._even, now * self.limit) + self.period

    def _lost(self, now: int) -> None:
        # Only the newest leaves no trace (S7): an earlier one is used up, as if it had begun.
        self._begun(now)

    def _gap(self, now: int) -> int:
        return 0  # its even pace is enough

    def _use_up(self, until: int) -> None:
        self._even = max(self._even, until * self.limit + (self.burst - self.reserve - 1) * self.period)

    def _idle(self, now: int) -> bool:
        return self._even <= now * self.limit

    def _shift(self, by: int) -> None:
        self._even += by * self.limit

    def _starts_of(self, now: int) -> list[int]:
        used = -((now * self.limit - self._even) // self.period)  # rounded up
        return [now] * max(0, min(used, self.burst))  # more only after a pause, which is told otherwise


Numbers = tuple[int, int, int | None, int]
"""Limit, period in microseconds, burst (None: an exact window) and reserve of a rate."""


def make(numbers: Numbers | None) -> Pace:
    """The rule of these numbers: a `Bucket` where a burst is given, else a `Window`; None: no limit."""
    if numbers is None:
        return Pace(1, 1, None, 0)
    limit, period, burst, reserve = numbers
    return Window(limit, period, reserve) if burst is None else Bucket(limit, period, burst, reserve)
