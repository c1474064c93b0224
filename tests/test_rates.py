"""The arithmetic of rate limits beside naive models, on numbers alone."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from towerman.rates import MICRO, NEVER, Bucket, Numbers, Pace, Window, make, micros


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
        assert not pace.rested(50)
        assert pace.rested(50 + 10 * MICRO)


class Eased:
    """What may start after a pause, the plain way: every start since, and those that are about to begin."""

    def __init__(self, numbers: Numbers | None, until: int) -> None:
        self.numbers, self.until = numbers, until
        self.starts: list[int] = []
        self.open = 0

    def fits(self, instant: int, *, high: bool) -> bool:
        """Is it far enough from what has started, and from what starts at that instant at the latest?"""
        if instant < self.until:
            return False
        limit, period, _, reserve = self.numbers or (1, 0, None, 0)
        room = reserve if high else 0
        if self.numbers is None:
            passed = (instant - self.until) // MICRO
            if passed >= 10:
                return True
            return not self.open and all(
                instant - start >= MICRO >> ((start - self.until) // MICRO) for start in self.starts
            )
        if instant >= self.until + period:
            return True
        starts = sorted([*self.starts, *[instant] * (self.open + 1)])
        return all(
            (len(starts) - first - 1 - room) * period <= (instant - start) * limit for first, start in enumerate(starts)
        )


@given(
    numbers=st.one_of(
        st.none(),
        st.tuples(st.integers(1, 7), st.integers(1, 40), st.none(), st.just(0)),
        st.tuples(st.integers(3, 7), st.integers(1, 40), st.none(), st.integers(0, 2)),
        st.tuples(st.integers(1, 7), st.integers(1, 40), st.integers(3, 6), st.integers(0, 2)),
    ),
    before=st.lists(st.integers(0, 30), max_size=12),
    until=st.integers(31, 90),
    steps=st.lists(
        st.tuples(st.sampled_from(["in", "in", "in high", "begin", "wait", "jump", "jump"]), st.integers(0, 20)),
        max_size=50,
    ),
    shift=st.integers(-50, 50),
)
@settings(max_examples=300, deadline=None)
def test_r122_s7_what_a_pause_has_kept_back_does_not_come_at_once(
    numbers: Numbers | None, before: list[int], until: int, steps: list[tuple[str, int]], shift: int
) -> None:
    """R-122, S7: when a pause ends, calls of the usual class start at the even pace of the rate, for a period of a
    window and until a burst has rested; without a rate, one in the first second, two in the next, and so on for ten.
    The reserve is there at once. A scale that is set moves all of it.
    """
    pace = make(numbers)
    for instant in sorted(before):
        if pace.free_at(instant, high=True) <= instant:
            pace.let_in(instant)
            pace.begun(instant)
    assert pace.pause(until)
    pace.shift(shift)
    plain = Eased(numbers, until)
    scale = MICRO // 4 if numbers is None else 1
    now, usual = 30, list[int]()
    classes: list[bool] = []
    for step, number in steps:
        if step == "wait":
            now += number * scale
        elif step == "jump":
            free = pace.free_at(now + shift, high=bool(number % 2)) - shift
            now = free if free < NEVER // 2 else now
        elif step == "begin" and classes:
            high = classes.pop(number % len(classes))
            pace.begun(now + shift)
            plain.open -= 1
            plain.starts.append(now)
            if not high:
                usual.append(now)
        elif step in ("in", "in high"):
            high = step == "in high"
            if pace.free_at(now + shift, high=high) <= now + shift:
                if numbers is None or numbers[2] is None:
                    assert plain.fits(now, high=high), "too early"
                pace.let_in(now + shift)
                plain.open += 1
                classes.append(high)
            elif numbers is None:
                assert not plain.fits(now, high=high), "too late"
        pace.validate(now + shift)
        assert pace.free_in(now + shift, high=True) >= max(0, until - now)
    assert all(start >= until for start in plain.starts)
    if numbers is not None and numbers[2] is not None:
        limit, period, _, _ = numbers
        for place, start in enumerate(usual, 1):  # of the usual class alone: an even pace from the end of the pause on
            assert (place - 1) * period <= (start - until) * limit, "into the burst"


@pytest.mark.parametrize(
    ("numbers", "usual", "high"),
    [
        ((4, 8, None, 0), [100, 102, 104, 106, 108, 110, 112], 1),
        ((4, 8, None, 2), [100, 102, 108, 110], 3),
        ((4, 8, 3, 0), [100, 102, 104, 106, 108, 110, 112], 1),
        ((4, 8, 3, 2), [100, 102, 104, 106, 108, 110, 112], 3),
    ],
)
def test_r122_r93_after_a_pause_a_rate_goes_at_its_even_pace(numbers: Numbers, usual: list[int], high: int) -> None:
    """R-122, R-93: four in eight: after a pause one every two, though the window, or the burst, is free; those of a
    higher class have the whole reserve and one at once. A further pause begins that anew, an earlier one does nothing.
    """
    pace = make(numbers)
    for end in (100, 500):
        assert pace.pause(end)
        assert not pace.pause(end - 1)
        now, starts = 50, []
        for _ in usual:
            now = pace.free_at(now, high=False)
            pace.let_in(now)
            pace.begun(now)
            starts.append(now - end + 100)
        assert starts == usual
    other = make(numbers)
    other.pause(100)
    count = 0
    while other.free_at(100, high=True) <= 100:
        other.let_in(100)
        other.begun(100)
        count += 1
    assert count == high


def test_r122_without_a_rate_calls_begin_slowly_after_a_pause() -> None:
    """R-122: one in the first second after a pause, two in the next, four, eight; after ten there is no limit."""
    pace = make(None)
    pace.pause(5 * MICRO)
    starts, now = [], 0
    while now < 9 * MICRO:
        now = pace.free_at(now, high=False)
        pace.let_in(now)
        pace.begun(now)
        starts.append(now / MICRO)
    assert [sum(5 + second <= start < 6 + second for start in starts) for second in range(4)] == [1, 2, 4, 8]
    pace.let_in(now)
    assert pace.free_at(now, high=True) == 15 * MICRO  # it waits to know when that one begins, and no longer than this
    pace.begun(16 * MICRO)  # the next event is told then: until then nobody is free who was told to wait
    assert pace.free_at(now, high=True) == 15 * MICRO
    for _ in range(100):
        pace.let_in(15 * MICRO)
        assert pace.free_at(15 * MICRO, high=False) == 15 * MICRO


@pytest.mark.parametrize("before", [(4, 8, None, 0), (4, 8, 3, 0), None])
@pytest.mark.parametrize("after", [(4, 8, None, 0), (4, 8, 3, 0), (1, 100, 2, 0), None])
def test_r64_r122_a_rate_that_changes_goes_on_pausing(before: Numbers | None, after: Numbers | None) -> None:
    """R-64, R-122: a pause holds under the new numbers, and what is free when it ends does not come at once; a long one
    of a large burst costs no more than a short one.
    """
    pace = make(before)
    pace.pause(3600 * MICRO)
    other = pace.changed(0, after)
    now = other.free_at(0, high=False)
    assert now == 3600 * MICRO
    other.let_in(now)
    other.begun(now)
    assert other.free_at(now, high=False) == now + {None: MICRO}.get(after, 100 if after == (1, 100, 2, 0) else 2)


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
