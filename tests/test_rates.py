"""The arithmetic of rate limits beside naive models, on numbers alone."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from towerman.rates import MICRO, NEVER, Bucket, Pace, Window, make, micros


class Slow:
    """An exact window, the plain way: every start that ever was, and those that are about to begin."""

    def __init__(self, limit: int, period: int, reserve: int) -> None:
        self.limit, self.period, self.reserve = limit, period, reserve
        self.starts: list[int] = []
        self.pending = 0

    def fits(self, instant: int, *, high: bool) -> bool:
        """Would one more start at that instant, and nothing before it, leave every window as it must be?"""
        room = self.limit if high else self.limit - self.reserve
        inside = [start for start in self.starts if instant - self.period < start]
        return len(inside) + self.pending < room

    def free_at(self, now: int, *, high: bool) -> int:
        later = sorted({now, *(start + self.period for start in self.starts if start + self.period > now)})
        return next((instant for instant in later if self.fits(instant, high=high)), NEVER)


def most_in_a_window(starts: list[int], period: int) -> int:
    """The most starts that any half-open window of that length holds."""
    return max((sum(first <= start < first + period for start in starts) for first in starts), default=0)


STEPS = st.lists(
    st.tuples(st.sampled_from(["in", "in", "in high", "begin", "back", "wait", "jump"]), st.integers(0, 25)),
    max_size=60,
)


@given(limit=st.integers(1, 5), period=st.integers(1, 20), data=st.data(), steps=STEPS)
@settings(max_examples=400, deadline=None)
def test_s7_a_window_is_exact(limit: int, period: int, data: st.DataObject, steps: list[tuple[str, int]]) -> None:
    """S7, R-91: whatever comes, begins late or is taken back, no window ever holds more starts than the limit, nobody
    is told to wait longer than he must, and calls of the usual class leave the reserve alone.
    """
    reserve = data.draw(st.integers(0, limit - 1))
    fast, slow = Window(limit, period, reserve), Slow(limit, period, reserve)
    now = 0
    for step, number in steps:
        if step == "wait":
            now += number
        elif step == "jump":
            free = fast.free_at(now, high=bool(number % 2))
            now = free if free != NEVER else now
        elif step == "begin" and slow.pending:
            fast.begun(now)
            slow.pending -= 1
            slow.starts.append(now)
        elif step == "back" and slow.pending:
            fast.take_back(now, newest=bool(number % 2))
            slow.pending -= 1
        elif step in ("in", "in high") and fast.free_at(now, high=step == "in high") <= now:
            fast.let_in(now)
            slow.pending += 1
        for high in (False, True):
            free = slow.free_at(now, high=high)
            assert fast.free_at(now, high=high) == free
            assert fast.free_in(now, high=high) == (free - now if free != NEVER else period)
        fast.validate(now)
        assert (fast.pending, fast.started) == (slow.pending, len(slow.starts))
    assert most_in_a_window(slow.starts, period) <= limit
    assert fast.rested(now) == (not slow.pending and all(start + period <= now for start in slow.starts))


class Leaky:
    """A bucket, the plain way: every start that ever was, those that are about to begin, and those that were lost."""

    def __init__(self, limit: int, period: int, burst: int, reserve: int) -> None:
        self.limit, self.period, self.burst, self.reserve = limit, period, burst, reserve
        self.starts: list[int] = []  # and what counts like one
        self.open: list[int] = []  # the numbers of those that are about to begin

    def fits(self, instant: int, *, high: bool) -> bool:
        """If all that are about to begin, and one more, began at that instant: would each stretch hold few enough?"""
        starts = sorted([*self.starts, *[instant] * (len(self.open) + 1)])
        room = self.burst if high else self.burst - self.reserve
        last = max(starts)
        return all(
            (len(starts) - first - room) * self.period <= (last - start) * self.limit
            for first, start in enumerate(starts)
            if start <= instant
        )

    def free_at(self, now: int, *, high: bool) -> int:
        room = self.burst if high else self.burst - self.reserve
        if len(self.open) >= room:
            return NEVER
        return next(instant for instant in range(now, now + 10_000) if self.fits(instant, high=high))


BUCKET_STEPS = st.lists(
    st.tuples(
        st.sampled_from(["in", "in", "in", "in high", "begin", "begin", "back", "newest", "wait", "jump", "early"]),
        st.integers(0, 25),
    ),
    max_size=60,
)


@given(
    limit=st.integers(1, 7),
    period=st.integers(1, 30),
    burst=st.integers(1, 6),
    data=st.data(),
    steps=BUCKET_STEPS,
)
@example(limit=1, period=10, burst=2, data=None, steps=[("in", 0), ("in", 0), ("wait", 19), ("begin", 0), ("begin", 0)])
@settings(max_examples=400, deadline=None)
def test_s7_a_bucket_keeps_its_bound(
    limit: int, period: int, burst: int, data: st.DataObject | None, steps: list[tuple[str, int]]
) -> None:
    """S7, R-91: whatever comes, begins late, in any order, or is taken back, no stretch of t holds more than burst +
    t * limit / period starts, counted from the first line; of the burst, calls of the usual class leave the reserve
    alone; one more comes in at the very instant that was told, and not a microsecond before.
    """
    reserve = data.draw(st.integers(0, burst - 1)) if data is not None else 0
    bucket, slow = Bucket(limit, period, burst, reserve), Leaky(limit, period, burst, reserve)
    began: list[tuple[int, bool]] = []
    classes: list[bool] = []
    now = 0
    for step, number in steps:
        if step == "wait":
            now += number
        elif step == "jump":
            free = bucket.free_at(now, high=bool(number % 2))
            now = free if free != NEVER else now
        elif step in ("begin", "early") and slow.open:
            one = slow.open.pop(number % len(slow.open))
            at = now + number if step == "early" else now  # on another thread, whose clock was read later
            bucket.begun(at)
            slow.starts.append(at)
            began.append((at, classes[one]))
        elif step == "back" and slow.open:
            one = slow.open.pop(number % len(slow.open))
            newest = one == len(classes) - 1
            bucket.take_back(now, newest=newest)
            if not newest:
                slow.starts.append(now)
        elif step == "newest" and slow.open and slow.open[-1] == len(classes) - 1:
            slow.open.pop()
            bucket.take_back(now, newest=True)
        elif step in ("in", "in high") and bucket.free_at(now, high=step == "in high") <= now:
            bucket.let_in(now)
            slow.open.append(len(classes))
            classes.append(step == "in high")
        bucket.validate(now)
        assert (bucket.pending, bucket.started) == (len(slow.open), len(began))
        if slow.starts == sorted(slow.starts) and (not slow.starts or slow.starts[-1] <= now):
            for high in (False, True):
                free = slow.free_at(now, high=high)
                assert bucket.free_at(now, high=high) == free
                if free != NEVER:
                    assert bucket.free_in(now, high=high) == free - now
                else:
                    then = Leaky(limit, period, burst, reserve)
                    then.starts = [*slow.starts, *[now] * len(slow.open)]
                    assert bucket.free_in(now, high=high) == then.free_at(now, high=high) - now
            assert bucket.rested(now) == (not slow.open and free_again(bucket, now))
    began.sort()
    for first, (since, _) in enumerate(began):
        for last in range(first, len(began)):
            stretch = began[last][0] - since
            assert (last - first + 1 - burst) * period <= stretch * limit, "more than the burst and the pace"
            usual = [one for one in began[first : last + 1] if not one[1]]
            if len(usual) == last - first + 1:
                assert (len(usual) - (burst - reserve)) * period <= stretch * limit, "into the reserve"


def free_again(bucket: Bucket, now: int) -> bool:
    """Has a bucket its whole burst?"""
    copy = bucket.changed(now, bucket.numbers)
    fits = 0
    while copy.free_at(now, high=True) <= now:
        copy.let_in(now)
        fits += 1
    return fits == bucket.burst


def test_s7_r91_a_burst_counts_from_the_first_line() -> None:
    """S7, R-91: two that were let in at 0 and come to their first lines at 19 are the burst of 19, and nobody comes in
    beside them; counted from the grant, two more would be let in at 20.
    """
    bucket = Bucket(1, 10, 2)
    for _ in range(2):
        assert bucket.free_at(0, high=False) <= 0
        bucket.let_in(0)
    assert bucket.free_at(15, high=False) == NEVER
    assert bucket.free_in(15, high=False) == 10
    bucket.begun(19)
    assert bucket.free_at(19, high=False) == 29
    bucket.begun(19)
    assert bucket.free_at(20, high=False) == 29


def test_s7_only_the_newest_of_a_bucket_leaves_no_trace() -> None:
    """S7: a start that does not take place is given back if it was the last one that was let in; an earlier one is used
    up, as if it had begun.
    """
    bucket = Bucket(1, 10, 2)
    bucket.let_in(0)
    bucket.let_in(0)
    assert bucket.free_at(0, high=False) == NEVER
    bucket.take_back(0, newest=True)
    assert bucket.free_at(0, high=False) <= 0
    bucket.let_in(0)
    bucket.take_back(0, newest=False)
    assert bucket.free_at(0, high=False) == 10
    assert (bucket.pending, bucket.started) == (1, 0)


@given(
    numbers=st.sampled_from([(2, 10, None, 0), (3, 7, None, 1), (2, 10, 3, 0), (3, 7, 4, 1), None]),
    by=st.integers(-1000, 1000),
    ins=st.lists(st.integers(0, 30), max_size=8).map(sorted),
)
def test_s7_a_clock_that_is_set_neither_locks_out_nor_gives_away(
    numbers: tuple[int, int, int | None, int] | None, by: int, ins: list[int]
) -> None:
    """P-40, S7: when the scale moves, everything moves with it: what is free, and in how long, is what it was."""
    still, moved = make(numbers), make(numbers)
    for pace in (still, moved):
        pace.pause(5)
        for instant in ins:
            pace.let_in(instant)
            pace.begun(instant)
    moved.shift(by)
    for high in (False, True):
        assert moved.free_at(30 + by, high=high) == still.free_at(30, high=high) + by
    assert moved.rested(30 + by) == still.rested(30)


def test_r122_a_pause_holds_back_everybody_and_the_longest_counts() -> None:
    """R-122: before the instant nothing starts, of whatever class; an earlier one does not shorten it."""
    for numbers in ((2, 10, None, 0), (2, 10, 2, 0), None):
        pace = make(numbers)
        assert pace.pause(50)
        assert not pace.pause(40)
        assert pace.free_at(0, high=True) == pace.free_at(0, high=False) == 50
        assert pace.free_at(60, high=False) == 60
        assert (pace.free_in(0, high=True), pace.free_in(45, high=False), pace.free_in(60, high=False)) == (50, 5, 0)
        assert not pace.rested(49)
        assert pace.rested(50)


@pytest.mark.parametrize(
    ("before", "after", "free"),
    [
        ((2, 10, None, 0), (3, 10, None, 0), 5),
        ((2, 10, None, 0), (2, 20, None, 0), 20),
        ((2, 10, None, 0), (1, 10, None, 0), 14),
        ((2, 10, None, 0), (2, 10, 2, 0), 5),
        ((2, 10, None, 0), None, 5),
        ((2, 10, 2, 0), (2, 10, 4, 0), 5),
        ((2, 10, 2, 0), (2, 10, None, 0), 5),
        ((2, 10, 2, 0), (1, 10, None, 0), 15),
        (None, (2, 10, None, 0), 5),
    ],
)
def test_r64_a_rate_changes_and_keeps_its_past(
    before: tuple[int, int, int | None, int] | None, after: tuple[int, int, int | None, int] | None, free: int
) -> None:
    """R-64: what has started counts under the new numbers too, as far as the old rule remembers it."""
    pace = make(before)
    for instant in (0, 4):
        pace.let_in(instant)
        pace.begun(instant)
    pace.pause(3)
    other = pace.changed(5, after)
    assert other.numbers == after
    assert (other.started, other.until) == (2, 3)
    assert other.free_at(5, high=False) == free


def test_r64_who_is_about_to_begin_counts_after_a_change() -> None:
    """R-64: one that was let in and has not begun is in the way of the new rule as it was in that of the old."""
    for numbers in ((1, 10, None, 0), (1, 10, 1, 0), None):
        pace = make(numbers)
        pace.let_in(0)
        window = pace.changed(2, (1, 10, None, 0))
        assert window.pending == 1
        assert window.free_at(2, high=False) == NEVER
        window.begun(3)
        assert window.free_at(4, high=False) == 13
        bucket = pace.changed(2, (1, 10, 1, 0))
        assert (bucket.pending, bucket.free_at(2, high=False)) == (1, NEVER)
        bucket.begun(3)
        assert bucket.free_at(4, high=False) == 13


@given(seconds=st.floats(-1e9, 1e9, allow_nan=False))
@example(3.0000000000000004)
def test_seconds_become_whole_microseconds_and_back(seconds: float) -> None:
    """An instant that was told in seconds is the same when it comes back."""
    whole = micros(seconds)
    assert micros(whole / MICRO) == whole
    assert abs(whole - seconds * MICRO) <= 0.51


def test_what_is_shown_of_a_rate() -> None:
    """Numbers only; and more taken back than let in is noticed."""
    assert repr(make((2, 10, None, 0))) == "Window(2 in 10 us, 0 to begin)"
    assert repr(make((2, 10, 5, 0))) == "Bucket(2 in 10 us, burst 5, 0 to begin)"
    pace = Pace(1, 1, None, 0)
    pace.take_back(0, newest=True)
    with pytest.raises(AssertionError, match="taken back too many"):
        pace.validate(0)
