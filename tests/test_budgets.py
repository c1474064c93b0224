"""The arithmetic of budgets: amounts, accounts, shares, windows. Numbers in, numbers out; nothing here waits.

The random test holds a book against a plain list of what has happened: whatever batches reserve, start, charge, end and
give up, in whatever order, each account has spent and reserved what the list says, and no start goes past a limit.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from towerman import Budget, PolicyError
from towerman.budgets import (
    CALLS,
    MOST,
    ONE_CALL,
    RESERVED,
    SETTLED,
    SPENT,
    Account,
    Asks,
    Book,
    Lack,
    Shares,
    millionths,
    next_window,
    number,
)
from towerman.rates import MICRO, NEVER

DAY = 86_400 * MICRO
DAYS = 86_400.0


def book_of(*accounts: Account, at: int = 0, offset: int = 0) -> tuple[Book, tuple[Account, ...]]:
    """A book with these accounts at this instant."""
    book = Book(offset)
    book.at(at)
    for account in accounts:
        assert book.open(account) is account
    return book, accounts


def account(key: str = "run:1", **limits: float) -> Account:
    """An account with these limits."""
    return Account(key, key.partition(":")[0], {unit: millionths(amount) for unit, amount in limits.items()})


def batch(book: Book, chain: tuple[Account, ...], *asks: Asks | None) -> Shares:
    """Shares of a batch whose calls ask this; nothing is reserved yet."""
    shares = Shares(book, chain, len(asks))
    shares.asks[:] = asks
    return shares


def asks(**amounts: float) -> Asks:
    """What a call asks."""
    return Asks({unit: millionths(amount) for unit, amount in amounts.items()})


# ==================================================================== amounts


@pytest.mark.parametrize(
    ("given", "whole"),
    [
        (0, 0),
        (-0.0, 0),
        (3, 3 * MICRO),
        (0.1 + 0.2, 300_000),
        (0.29, 290_000),
        (1e-7, 1),
        (5e-7, 1),
        (2.5e-6, 3),
        (Decimal("0.000001"), 1),
        (Decimal("19.99"), 19_990_000),
        (Fraction(1, 3), 333_333),
        (10**15, 10**21),
        (1e15, 10**21),
    ],
)
def test_an_amount_is_a_whole_number_of_millionths(given: Any, whole: int) -> None:
    """G9: amounts do not drift: each is the nearest whole number of millionths, and what is not 0 is never nothing."""
    assert millionths(given) == whole


@pytest.mark.parametrize(
    "given",
    [math.nan, math.inf, -math.inf, -1, -1e-9, True, False, "1", b"1", None, [], 1j, Decimal("nan"), Decimal("-inf")],
)
def test_what_is_no_amount_is_refused(given: Any) -> None:
    """G9, DESIGN style 7: no number, a negative one, infinity, NaN and a boolean are refused in words."""
    with pytest.raises(ValueError, match=r"^a number, 0 or more$"):
        millionths(given)


class Odd:
    """Says a ratio that is none."""

    def __init__(self, ratio: Any) -> None:
        self.ratio = ratio

    def as_integer_ratio(self) -> Any:
        if isinstance(self.ratio, Exception):
            raise self.ratio
        return self.ratio


@pytest.mark.parametrize("ratio", [(1, 0), (1, -2), (0.5, 1), (1, 2.0), (1,), None, ZeroDivisionError()])
def test_an_odd_number_is_refused(ratio: Any) -> None:
    """An object that passes for a number, and is none, is refused in the same words."""
    with pytest.raises(ValueError, match="a number, 0 or more"):
        millionths(Odd(ratio))


@pytest.mark.parametrize("given", [10**15 + 1, 1e300, 10**5000], ids=["one more", "float", "monstrous"])
def test_an_amount_that_nobody_means_is_refused(given: Any) -> None:
    """An amount beyond all that can be meant is a mistake."""
    with pytest.raises(ValueError, match="a number, at most 1,000,000,000,000,000"):
        millionths(given)
    assert millionths(MOST) == MOST * MICRO


@given(st.integers(0, 10**15))
def test_millionths_are_shown_as_they_were_given(amount: int) -> None:
    """What is shown of an amount is the amount: a whole number where it is one, else the nearest float."""
    assert number(amount * MICRO) == amount
    assert type(number(amount * MICRO)) is int
    assert number(amount) == amount / 10**6
    assert millionths(number(amount)) == amount or amount > 2**53


@given(st.lists(st.integers(0, 10**9), max_size=30))
def test_sums_do_not_drift(hundredths: list[int]) -> None:
    """G9: what is spent is the sum of what was charged, to the last digit, whatever floats do."""
    book, chain = book_of(account(cost=1))
    for one in hundredths:
        book.charge(chain, {"cost": millionths(one / 100)})
    assert chain[0].spent.get("cost", 0) == sum(hundredths) * MICRO // 100


# ==================================================================== budgets as they are declared


def test_a_budget_is_frozen_and_compares_by_what_it_says() -> None:
    """API section 2: a Budget says its amounts; two that say the same are equal, also after pickling."""
    one = Budget(calls=20, seconds=60, cost=0.1 + 0.2, mails=5, per="day", partial=False)
    assert one == Budget(20, 60.0, cost=Decimal("0.3"), mails=5, per="day", partial=False)
    assert hash(one) == hash(pickle.loads(pickle.dumps(one)))
    assert pickle.loads(pickle.dumps(one)) == one
    assert one != Budget(calls=20)
    assert one != "budget"
    assert str(one) == "20 calls, 0.3 cost, 5 mails, 60 seconds per day, a batch whole or not at all"
    assert repr(one) == "Budget(calls=20, cost=0.3, mails=5, seconds=60.0, per='day', partial=False)"
    assert str(Budget(tokens=5, per=2.5)) == "5 tokens per 2.5 s"
    with pytest.raises(AttributeError, match="a Budget is frozen: cannot set 'partial'"):
        one.partial = True
    with pytest.raises(AttributeError, match="a Budget is frozen: cannot delete 'partial'"):
        del one.partial


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, "Budget: it limits nothing; give calls=, seconds=, tokens=, cost= or a unit of your own"),
        ({"per": "day"}, "Budget: it limits nothing"),
        ({"calls": None}, "Budget: it limits nothing"),
        ({"call": 1}, "Budget: no unit 'call'; did you mean 'calls'?"),
        ({"token": 1}, "Budget: no unit 'token'; did you mean 'tokens'?"),
        ({"a b": 1}, "Budget: a unit's name: 1 to 128 letters, digits"),
        ({"calls": -1}, "Budget.calls: a number, 0 or more; got -1"),
        ({"calls": math.nan}, "Budget.calls: a number, 0 or more; got nan"),
        ({"calls": True}, "Budget.calls: a number, 0 or more; got True"),
        ({"calls": 10**16}, "Budget.calls: a number, at most 1,000,000,000,000,000; got"),
        ({"mails": "5"}, "Budget.mails: a number, 0 or more; got '5'"),
        ({"seconds": 0}, "Budget.seconds: seconds, more than 0; got 0"),
        ({"seconds": math.inf}, "Budget.seconds: a finite number of seconds; got inf"),
        ({"calls": 1, "per": "days"}, "Budget.per: one of 'second', 'minute', 'hour', 'day', 'week', 'month' (did you"),
        ({"calls": 1, "per": 1e-7}, "Budget.per: seconds, a microsecond (1e-6) or more; got 1e-07"),
        ({"calls": 1, "partial": 1}, "Budget.partial: True or False; got 1"),
    ],
)
def test_a_wrong_budget_names_the_place_and_the_fix(given: dict[str, Any], told: str) -> None:
    """DESIGN style 7: a budget that is wrong is refused when it is made, by what is wrong and what is allowed."""
    with pytest.raises(PolicyError) as wrong:
        Budget(**given)
    assert told in str(wrong.value)


def test_what_a_call_asks_compares_by_value() -> None:
    """API section 1: `spends` counts a call of its own unless it says otherwise."""
    assert ONE_CALL.amounts == {CALLS: MICRO}
    assert asks(cost=0.5).amounts == {CALLS: MICRO, "cost": 500_000}
    assert asks(calls=0).some == ()
    assert asks(cost=1) == asks(cost=1.0)
    assert asks(cost=1) != asks(cost=2)
    assert asks() != 1
    assert hash(asks(cost=1, calls=1)) == hash(asks(calls=1, cost=1))
    assert str(asks(cost=0.5)) == "1 calls, 0.5 cost"
    assert repr(asks(cost=0.5)) == "Asks(calls, cost)"  # amounts may be made of arguments


# ==================================================================== the first that find enough


def test_s8_the_first_in_emitted_order_are_eligible() -> None:
    """S8, R-98, G9: of 20 calls with 10 left exactly the first 10 have a share, and the rest is told why."""
    book, chain = book_of(account(calls=10), account("process", calls=100))
    shares = batch(book, chain, *[ONE_CALL] * 20)
    short = shares.reserve()
    assert list(short) == list(range(10, 20))
    assert set(short.values()) == {Lack(chain[0], CALLS)}
    assert shares.state == bytes([RESERVED] * 10 + [0] * 10)
    assert [one.reserved for one in chain] == [{CALLS: 10 * MICRO}] * 2
    assert (shares.open, chain[0].refused, chain[1].refused) == (10, 10, 0)
    book.validate()


def test_the_tightest_account_decides_and_nothing_is_taken_in_part() -> None:
    """G9, R-102: what a call asks is taken from every account on its chain or from none."""
    book, chain = book_of(account(calls=9, cost=9), account("tenant:a", cost=2), account("process", calls=5))
    shares = batch(book, chain, *[asks(cost=0.5)] * 8)
    short = shares.reserve()
    assert (list(short), short[7]) == ([4, 5, 6, 7], Lack(chain[1], "cost"))
    assert all(one.reserved == {CALLS: 4 * MICRO, "cost": 2 * MICRO} for one in chain)
    assert chain[1].left("cost") == 0


def test_a_cheaper_call_does_not_overtake() -> None:
    """S8: the first call that does not find enough of a unit closes it for those behind; calls that ask nothing of it
    go on.
    """
    book, chain = book_of(account(cost=1.0, calls=9))
    dear, cheap, free = asks(cost=0.6), asks(cost=0.1), asks(cost=0)
    shares = batch(book, chain, dear, dear, cheap, free, None, cheap)
    assert set(shares.reserve()) == {1, 2, 5}
    both = batch(*book_of(account(cost=1, tokens=1)), asks(cost=2, tokens=2), asks(cost=1), asks(tokens=1))
    assert set(both.reserve()) == {0, 1, 2}  # all units that it did not find enough of


def test_calls_of_two_batches_share_one_budget() -> None:
    """P-61, R-98: two batches on one budget of 6 have 6 between them."""
    book, chain = book_of(account(calls=6))
    one, other = (batch(book, chain, *[ONE_CALL] * 4) for _ in range(2))
    assert (len(one.reserve()), len(other.reserve())) == (0, 2)
    one.refund(0)
    assert batch(book, chain, ONE_CALL).reserve() == {}


def test_p61_a_batch_whole_or_not_at_all() -> None:
    """P-61: with `partial` False, 8 calls against 6 reserve nothing, and each of them would have fitted alone."""
    book, chain = book_of(account(calls=6))
    chain[0].partial = False
    shares = batch(book, chain, *[ONE_CALL] * 5, None, *[ONE_CALL] * 3)
    short = shares.reserve()
    assert list(short) == [0, 1, 2, 3, 4, 6, 7, 8]
    assert all(lack == Lack(chain[0], CALLS, whole=True) for lack in short.values())
    assert (shares.open, chain[0].left(CALLS), chain[0].refused) == (0, 6 * MICRO, 8)
    assert book.live == {}
    assert batch(book, chain, *[ONE_CALL] * 6).reserve() == {}


def test_whole_or_not_holds_for_all_accounts_of_the_chain() -> None:
    """P-61: an account that is not to run a batch in part is not, whichever account has too little."""
    book, chain = book_of(account(calls=9), account("process", calls=1))
    chain[0].partial = False
    short = batch(book, chain, ONE_CALL, asks(calls=2)).reserve()
    assert [lack.whole for lack in short.values()] == [True, False]  # the second would not have fitted alone
    assert {lack.account for lack in short.values()} == {chain[1]}


def test_what_needs_a_refused_call_asks_nothing() -> None:
    """R-102: a call that will be skipped takes nothing from those behind it; one that needs a later call does."""
    book, chain = book_of(account(calls=2))
    needs = [(), (0,), (1,), (), (5,), (), (3,)]
    shares = batch(book, chain, None, ONE_CALL, ONE_CALL, ONE_CALL, ONE_CALL, ONE_CALL, ONE_CALL)
    assert set(shares.reserve(needs)) == {5, 6}
    assert [state == RESERVED for state in shares.state] == [False, False, False, True, True, False, False]
    assert shares.asks[1:3] == [None, None]


# ==================================================================== starts, ends, charges


def test_a_share_is_reserved_spent_and_settled() -> None:
    """S8, G9: limit = free + reserved + spent, at each step of a call."""
    book, chain = book_of(account(cost=1))
    (run,) = chain
    shares = batch(book, chain, asks(cost=0.5))
    assert shares.reserve() == {}
    assert (run.left("cost"), run.reserved["cost"], run.spent) == (500_000, 500_000, {})
    assert shares.begin(0) is None
    assert shares.begin(0) is None  # it has begun
    assert (run.reserved["cost"], run.spent["cost"], shares.state[0]) == (0, 500_000, SPENT)
    shares.charge(0, {"cost": 200_000})
    assert run.spent["cost"] == 500_000  # until it has ended what it asked counts
    shares.charge(0, {"cost": 100_000, "tokens": 5 * MICRO})
    shares.settle(0)
    shares.settle(0)
    assert (run.spent, shares.state[0]) == ({CALLS: MICRO, "cost": 300_000, "tokens": 5 * MICRO}, SETTLED)
    shares.charge(0, {"cost": 1})  # something that it has left behind goes on
    shares.refund(0)
    assert run.spent["cost"] == 300_001
    book.validate()


def test_what_is_charged_takes_the_place_of_what_was_asked() -> None:
    """S8: a charge above what was asked counts at once, one below it when the work has ended, none changes nothing."""
    book, chain = book_of(account(cost=10))
    (run,) = chain
    shares = batch(book, chain, *[asks(cost=1)] * 3)
    shares.reserve()
    for index in range(3):
        shares.begin(index)
    shares.charge(0, {"cost": 3 * MICRO})
    assert run.spent["cost"] == 5 * MICRO
    shares.charge(1, {"cost": 0})
    for index in range(3):
        shares.settle(index)
    assert run.spent["cost"] == (3 + 0 + 1) * MICRO


def test_what_never_starts_is_refunded() -> None:
    """S8, R-102: reserved or granted, what never begins gives all of it back, once."""
    book, chain = book_of(account(calls=3))
    shares = batch(book, chain, ONE_CALL, ONE_CALL, None)
    shares.reserve()
    shares.begin(1)
    for _ in range(2):
        for index in range(3):
            shares.refund(index)
    assert (chain[0].reserved[CALLS], chain[0].spent[CALLS], shares.state) == (0, 0, b"\0\0\0")
    assert book.live == {}
    shares.charge(0, {CALLS: MICRO})  # what has not begun spends nothing
    shares.charge(2, {CALLS: MICRO})
    shares.spend(0)
    shares.settle(0)
    assert chain[0].spent[CALLS] == 0


def test_g9_nothing_starts_once_a_unit_is_used_up() -> None:
    """G9, R-95: amounts that are known only afterwards go past a limit by what was in flight: of three calls that have
    reserved, the one that waits does not start when the others have used up the tokens, and none comes after it.
    """
    book, chain = book_of(account(tokens=1000, calls=9))
    shares = batch(book, chain, *[ONE_CALL] * 3)
    assert shares.reserve() == {}
    shares.begin(0)
    shares.begin(1)
    for index in range(2):
        shares.charge(index, {"tokens": 700 * MICRO})
    assert shares.begin(2) == Lack(chain[0], "tokens")
    assert (chain[0].refused, shares.state[2]) == (1, RESERVED)
    shares.refund(2)
    assert set(batch(book, chain, ONE_CALL).reserve().values()) == {Lack(chain[0], "tokens")}
    assert chain[0].used_up(0) == "tokens"
    assert chain[0].left("tokens") == -400 * MICRO
    assert book.remaining(chain) == {"tokens": 0, CALLS: 7 * MICRO}


def test_a_tool_may_say_that_it_takes_nothing() -> None:
    """API section 1: a unit with 0 in `spends` is not in the way of a call, though it is used up."""
    book, chain = book_of(account(tokens=0, calls=1))
    assert batch(book, chain, ONE_CALL).reserve() == {0: Lack(chain[0], "tokens")}
    last = batch(book, chain, asks(tokens=0), asks(tokens=0, calls=0), asks(tokens=0, calls=0))
    assert last.reserve() == {}
    assert [last.begin(index) for index in range(3)] == [None] * 3


def test_a_unit_of_ones_own_concerns_those_who_ask_it() -> None:
    """API section 1: searches that are used up keep searches from starting and nothing else, and the run goes on; once
    such a unit has been charged beyond what was asked it stops everything, since nobody knows who charges next.
    """
    book, chain = book_of(account(searches=1, calls=9))
    (run,) = chain
    search = asks(searches=1)
    shares = batch(book, chain, search, ONE_CALL, search)
    assert set(shares.reserve()) == {2}
    assert shares.begin(0) is None
    shares.charge(0, {"searches": MICRO})  # as it has said
    assert shares.begin(1) is None
    assert (run.used_up(0), run.stops("searches")) == (None, False)
    assert batch(book, chain, ONE_CALL).reserve() == {}
    shares.charge(1, {"searches": MICRO})
    assert batch(book, chain, ONE_CALL, asks(searches=0)).reserve() == {0: Lack(run, "searches")}
    assert (run.used_up(0), run.stops("searches")) == ("searches", True)
    assert book.anew().accounts["run:1"].stops("searches")


def test_a_lower_limit_is_met_by_those_who_wait() -> None:
    """R-64: what had reserved under a higher limit starts only as far as the lower one goes."""
    book, chain = book_of(account("process", calls=5))
    shares = batch(book, chain, *[ONE_CALL] * 5)
    shares.reserve()
    shares.begin(0)
    book.change(chain[0], {CALLS: 2 * MICRO}, per=None, partial=False)
    assert shares.begin(4) is None
    assert shares.begin(1) == Lack(chain[0], CALLS)
    assert not chain[0].partial
    assert chain[0].left(CALLS) == -3 * MICRO


def test_a_unit_is_counted_before_it_is_limited() -> None:
    """R-64: a limit that is added knows what was spent of its unit before."""
    book, chain = book_of(account("process", calls=5))
    book.charge(chain, {"tokens": 7 * MICRO, "cost": 0})
    book.change(chain[0], {"tokens": 10 * MICRO}, per=None, partial=True)
    assert book.remaining(chain) == {"tokens": 3 * MICRO}
    assert "cost" not in chain[0].spent


def test_who_comes_again_reserves_again() -> None:
    """S8: what was given back, or spent on an earlier attempt, is reserved once more, or refused."""
    book, chain = book_of(account(calls=2))
    shares = batch(book, chain, ONE_CALL, None)
    shares.reserve()
    assert shares.again(0) is None  # it has its share
    assert shares.again(1) is None
    shares.refund(0)
    assert shares.again(0) is None
    shares.begin(0)
    shares.charge(0, {"cost": MICRO})
    assert shares.again(0) is None  # the second attempt; the first one is settled by that
    assert (chain[0].spent, chain[0].reserved) == ({CALLS: MICRO, "cost": MICRO}, {CALLS: MICRO})
    shares.begin(0)
    shares.settle(0)
    assert shares.again(0) == Lack(chain[0], CALLS)
    assert (chain[0].refused, shares.open, shares.state[0]) == (1, 0, SETTLED)
    book.validate()


def test_r99_nothing_starts_after_its_seconds() -> None:
    """R-99: at the very instant at which the seconds are over nothing is eligible and nothing starts, though it may
    have reserved, and costs nothing.
    """
    book = Book()
    book.at(0)
    run = book.open(Account("run:1", "run", {}, until=10 * MICRO, lasts=10 * MICRO))
    shares = batch(book, (run,), ONE_CALL, ONE_CALL)
    assert shares.reserve() == {}
    book.at(10 * MICRO - 1)
    assert (shares.begin(0), run.used_up(book.now)) == (None, None)
    assert book.remaining((run,)) == {"seconds": 1}
    book.at(10 * MICRO)
    assert shares.begin(1) == Lack(run, "seconds")
    assert batch(book, (run,), asks(calls=0)).reserve() == {0: Lack(run, "seconds")}
    assert shares.again(1) is None
    shares.refund(1)
    assert shares.again(1) == Lack(run, "seconds")
    assert (run.used_up(book.now), book.remaining((run,))) == ("seconds", {"seconds": 0})


def test_what_rode_in_the_run_of_another_is_spent() -> None:
    """S11: a share is spent without a look at what is left, once."""
    book, chain = book_of(account(calls=1))
    shares = batch(book, chain, ONE_CALL)
    shares.reserve()
    book.charge(chain, {CALLS: MICRO})
    for _ in range(2):
        shares.spend(0)
    assert (chain[0].spent, chain[0].reserved, shares.state[0]) == ({CALLS: 2 * MICRO}, {CALLS: 0}, SPENT)


def test_a_refusal_knows_when_there_is_more() -> None:
    """R-95: what renews says when; what does not, and time, which never does, say nothing."""
    book, (daily, plain) = book_of(Account("process", "process", {}, per="day"), account(calls=0), at=DAY // 2)
    assert book.renews(Lack(daily, CALLS)) == DAYS / 2
    assert book.renews(Lack(daily, "seconds")) is None
    assert book.renews(Lack(plain, CALLS)) is None


# ==================================================================== windows


def instant(*day: int) -> int:
    """An instant in UTC as microseconds since 1970."""
    return int(datetime(*day, tzinfo=UTC).timestamp()) * MICRO  # type: ignore[misc,arg-type]


@pytest.mark.parametrize(
    ("per", "now", "end"),
    [
        ("second", 1, MICRO),
        ("second", MICRO, 2 * MICRO),
        ("minute", instant(2026, 12, 31, 23, 59, 59), instant(2027, 1, 1)),
        ("hour", instant(2026, 3, 1, 5, 30), instant(2026, 3, 1, 6)),
        ("day", instant(2026, 2, 28, 12), instant(2026, 3, 1)),
        ("day", instant(2026, 3, 1), instant(2026, 3, 2)),
        ("week", instant(2026, 3, 1, 23), instant(2026, 3, 2)),  # a Sunday, then a Monday
        ("week", instant(2026, 3, 2), instant(2026, 3, 9)),
        ("week", -1, 4 * DAY),
        ("month", instant(2026, 1, 31, 23), instant(2026, 2, 1)),
        ("month", instant(2028, 2, 1), instant(2028, 3, 1)),
        ("month", instant(2026, 12, 1), instant(2027, 1, 1)),
        (2_500_000, 0, 2_500_000),
        (2_500_000, 2_500_000, 5_000_000),
    ],
)
def test_windows_of_the_calendar(per: str | int, now: int, end: int) -> None:
    """R-95: a budget renews when the second, minute, hour, day, week (from Monday) or month ends in UTC."""
    assert next_window(now, per) == end


@given(st.sampled_from(["second", "minute", "hour", "day", "week", "month", 7 * MICRO]), st.integers(0, 4 * 10**15))
def test_a_window_ends_after_now_and_the_next_one_begins_there(per: str | int, now: int) -> None:
    """Windows follow one another without a gap: just before its end a window has the same end, then a later one."""
    end = next_window(now, per)
    assert end > now
    assert next_window(end - 1, per) == end
    assert next_window(end, per) > end


def test_a_window_forgets_what_was_spent_and_keeps_what_is_reserved() -> None:
    """R-95: when a window ends all is there again, but for what waits and will start in the next one."""
    book, chain = book_of(Account("process", "process", {CALLS: 3 * MICRO}, per="day"), at=DAY // 2)
    (whole,) = chain
    shares = batch(book, chain, *[ONE_CALL] * 3)
    shares.reserve()
    shares.begin(0)
    shares.begin(1)
    book.at(DAY)
    assert batch(book, chain, *[ONE_CALL] * 3).reserve().keys() == {2}
    assert (whole.spent, whole.reserved, whole.window, whole.ends) == ({}, {CALLS: 3 * MICRO}, 1, 2 * DAY)
    book.at(40 * DAY)  # windows that nobody has used do not add up
    assert book.remaining(chain) == {CALLS: 0}
    assert whole.window == 2


def test_what_a_past_window_has_spent_is_not_given_back_to_the_next() -> None:
    """G9: a call that began before a window ended takes what it charges beyond what it asked from the present window,
    and gives nothing of the past one back to it.
    """
    book, chain = book_of(Account("process", "process", {"cost": 9 * MICRO}, per="day"))
    (whole,) = chain
    shares = batch(book, chain, *[asks(cost=2)] * 3)
    shares.reserve()
    for index in range(3):
        shares.begin(index)
    book.at(DAY)
    shares.charge(0, {"cost": 3 * MICRO})
    assert whole.spent == {"cost": MICRO}
    shares.charge(1, {"cost": MICRO})
    shares.settle(1)
    shares.refund(2)
    assert whole.spent == {"cost": MICRO}
    book.validate()


@pytest.mark.parametrize("step", [-1, -3600, -DAYS, -40 * DAYS])
def test_a_clock_that_goes_back_neither_locks_out_nor_gives_away(step: float) -> None:
    """G9: when the clock is set back, a window and a run's seconds last as long as they would have, and what is spent
    stays spent.
    """
    begin, us = 100 * DAY + DAY // 4, int(step * MICRO)
    whole = Account("process", "process", {CALLS: MICRO}, per="day")
    run = Account("run:1", "run", {}, until=begin + 60 * MICRO)
    calm = Account("tenant:", "tenant", {CALLS: 9 * MICRO})
    book, chain = book_of(whole, run, calm, at=begin)
    book.charge(chain, {CALLS: MICRO})
    left = whole.ends - begin
    book.at(begin + us)
    assert book.remaining(chain) == {"seconds": 60 * MICRO, CALLS: 0}
    assert calm.ends == NEVER
    book.at(begin + us + 60 * MICRO)
    assert run.used_up(book.now) == "seconds"
    book.at(begin + us + left - 1)
    assert book.remaining([whole]) == {CALLS: 0}
    book.at(begin + us + left)
    assert book.remaining([whole]) == {CALLS: MICRO}


def test_a_clock_that_leaps_renews_once() -> None:
    """G9: a leap forward over many windows gives one of them."""
    book, chain = book_of(Account("process", "process", {CALLS: 2 * MICRO}, per="minute"))
    book.charge(chain, {CALLS: 2 * MICRO})
    book.at(1000 * DAY)
    assert book.remaining(chain) == {CALLS: 2 * MICRO}
    assert chain[0].window == 1


def test_the_calendar_is_told_by_an_offset() -> None:
    """R-95: the zero of the tower's clock means nothing; the offset says where in the calendar it is."""
    noon = instant(2026, 5, 5, 12)
    _, chain = book_of(Account("process", "process", {CALLS: MICRO}, per="day"), at=5 * MICRO, offset=noon)
    assert chain[0].ends == DAY // 2


# ==================================================================== the book


def test_accounts_come_and_go() -> None:
    """R-102: an account is there once, changes where it is, and is forgotten only when it remembers nothing."""
    book, chain = book_of(account("tenant:a", calls=5))
    assert book.open(account("tenant:a", calls=9)) is chain[0]
    book.change(chain[0], {CALLS: 9 * MICRO}, per="day", partial=True)
    assert (chain[0].per, chain[0].ends) == ("day", DAY)
    book.charge(chain, {CALLS: MICRO})
    assert not book.drop("tenant:a", unused=True)
    book.at(DAY)
    shares = batch(book, chain, ONE_CALL)
    shares.reserve()
    assert not book.drop("tenant:a", unused=True)
    shares.refund(0)
    assert book.drop("tenant:a", unused=True)
    assert book.drop("tenant:a")
    assert book.drop("tenant:b", unused=True)
    assert book.accounts == {}
    assert repr(book) == "Book(0 accounts, 0 batches have reserved)"


def test_a_copy_has_what_is_spent_and_nobody_at_work() -> None:
    """R-140: what is tried on a copy changes nothing here."""
    book, chain = book_of(Account("process", "process", {CALLS: 5 * MICRO}, per="day", partial=False), at=7)
    shares = batch(book, chain, *[ONE_CALL] * 3)
    shares.reserve()
    shares.begin(0)
    other = book.anew()
    copy = other.accounts["process"]
    assert (copy.spent, copy.reserved, copy.ends, copy.partial) == ({CALLS: MICRO}, {}, DAY, False)
    assert other.now == 7
    other.charge([copy], {CALLS: MICRO})
    assert chain[0].spent == {CALLS: MICRO}
    other.validate()


def test_another_process_has_nobody_at_work() -> None:
    """After a fork nothing is reserved in the child, what is spent stays spent, and what is left of the parent's
    batches gives nothing back.
    """
    book, chain = book_of(account(calls=5))
    shares = batch(book, chain, *[ONE_CALL] * 3)
    shares.reserve()
    shares.begin(0)
    book.reset()
    shares.forsake()
    assert (chain[0].reserved, chain[0].spent) == ({}, {CALLS: MICRO})
    book.validate()


def test_validate_tells_what_is_out_of_balance() -> None:
    """A book whose sums do not add up says so."""
    for spoil in SPOILT:
        book, chain = book_of(account(calls=5))
        shares = batch(book, chain, ONE_CALL, None)
        shares.reserve()
        book.validate()
        spoil(chain[0], shares)
        with pytest.raises(AssertionError, match=r"Account\(|Shares\("):
            book.validate()


def _spoil_reserved(one: Account, shares: Shares) -> None:
    one.reserved[CALLS] += 1


def _spoil_spent(one: Account, shares: Shares) -> None:
    one.spent[CALLS] = -1


def _spoil_count(one: Account, shares: Shares) -> None:
    shares.open += 1


def _spoil_state(one: Account, shares: Shares) -> None:
    shares.state[1] = RESERVED


SPOILT: list[Callable[[Account, Shares], None]] = [_spoil_reserved, _spoil_spent, _spoil_count, _spoil_state]


def test_g8_no_amount_is_shown() -> None:
    """G8: what a call asks may be made of its arguments; no `repr` has an amount."""
    book, chain = book_of(account("tenant:secret", calls=5))
    shares = batch(book, chain, asks(cost=1234567))
    shares.reserve()
    told = [repr(one) for one in (book, chain[0], shares, shares.asks[0], Account("process", "process", {}))]
    assert told[2] == "Shares(1 of 1 calls have reserved)"
    assert told[4] == "Account('process', no limit)"
    assert not [text for text in told if "1234567" in text]


# ==================================================================== everything at once, against a plain list


UNITS = (CALLS, "cost", "mails")


@dataclass
class One:
    """A call as the list knows it."""

    asks: Asks
    chain: tuple[Account, ...]
    state: str = "refused"
    windows: dict[str, int] = field(default_factory=dict)
    charged: dict[str, int] = field(default_factory=dict)


class Ledger(RuleBasedStateMachine):
    """Batches on chains of accounts, one of which renews."""

    @initialize(
        limits=st.lists(
            st.dictionaries(st.sampled_from(UNITS), st.integers(0, 8), max_size=3).map(
                lambda one: {unit: amount * MICRO for unit, amount in one.items()}
            ),
            min_size=3,
            max_size=3,
        ),
        whole=st.booleans(),
    )
    def begin(self, limits: list[dict[str, int]], whole: bool) -> None:
        self.book = Book()
        self.now = 0
        self.book.at(0)
        self.all = (
            self.book.open(Account("run:1", "run", limits[0], partial=not whole)),
            self.book.open(Account("run:2", "run", limits[1])),
            self.book.open(Account("process", "process", limits[2], per="minute")),
        )
        self.batches: list[tuple[Shares, list[One]]] = []
        # What was spent: (account, its window, unit, amount), of whatever sign.
        self.spent: list[tuple[str, int, str, int]] = []
        self.loose: set[tuple[str, str]] = set()  # units of our own that were charged, by account
        self.changed = False

    def window(self, one: Account) -> int:
        """By the list, without asking the account: how many minutes have begun since the first."""
        return self.minutes[one.key] if one.per else 0

    @property
    def minutes(self) -> dict[str, int]:
        return {"process": self.now // (60 * MICRO)}

    def sum(self, one: Account, unit: str) -> int:
        here = self.window(one)
        return sum(amount for key, when, what, amount in self.spent if (key, when, what) == (one.key, here, unit))

    def held(self, one: Account, unit: str) -> int:
        calls = [call for _, calls in self.batches for call in calls if call.state == "reserved" and one in call.chain]
        return sum(call.asks.amounts.get(unit, 0) for call in calls)

    def stops(self, one: Account, unit: str) -> bool:
        return unit != "mails" or (one.key, unit) in self.loose

    def pay(self, call: One, unit: str, amount: int, *, back: bool = False, asked: bool = False) -> None:
        for one in call.chain:
            if amount and not back and not asked:
                self.loose.add((one.key, unit))
            when = call.windows.get(one.key, self.window(one)) if back else self.window(one)
            self.spent.append((one.key, when, unit, -amount if back else amount))

    def free(self, call: One) -> bool:
        """By the list: may a call with these wishes come in now?"""
        for one in call.chain:
            for unit, limit in one.limits.items():
                amount = call.asks.amounts.get(unit)
                if amount and self.sum(one, unit) + self.held(one, unit) + amount > limit:
                    return False
                if amount is None and self.sum(one, unit) >= limit and self.stops(one, unit):
                    return False
        return True

    wishes = st.dictionaries(st.sampled_from(UNITS), st.integers(0, 3), max_size=3).map(
        lambda one: Asks({unit: amount * MICRO for unit, amount in one.items()})
    )

    @rule(
        which=st.sampled_from([(0,), (0, 2), (1, 2), (2,), (0, 1, 2)]), wishes=st.lists(wishes, min_size=1, max_size=6)
    )
    def hand_in(self, which: tuple[int, ...], wishes: list[Asks]) -> None:
        chain = tuple(self.all[place] for place in which)
        shares = batch(self.book, chain, *wishes)
        calls = [One(one, chain) for one in wishes]
        self.batches.append((shares, calls))
        short = shares.reserve()
        for index, call in enumerate(calls):
            fits = self.free(call)
            if index not in short:
                assert fits, "it took what was not there"
                call.state = "reserved"
            elif all(one.partial for one in chain):
                # Refused for itself, or for one before it that did not find enough of the same.
                assert not fits or any(self.shares_a_unit(call, calls[one]) for one in short if one < index)
        if not all(one.partial for one in chain):
            assert len(short) in (0, len(calls))

    @staticmethod
    def shares_a_unit(call: One, other: One) -> bool:
        return any(call.asks.amounts.get(unit) for unit, _ in other.asks.some)

    def pick(self, data: st.DataObject, *states: str) -> tuple[Shares, int, One] | None:
        found = [
            (shares, index, call)
            for shares, calls in self.batches
            for index, call in enumerate(calls)
            if call.state in states
        ]
        return data.draw(st.sampled_from(found)) if found else None

    @rule(data=st.data())
    def start(self, data: st.DataObject) -> None:
        if (picked := self.pick(data, "reserved")) is None:
            return
        shares, index, call = picked
        lack = shares.begin(index)
        over = [
            unit
            for one in call.chain
            for unit, limit in one.limits.items()
            if (
                self.sum(one, unit) + call.asks.amounts[unit] > limit
                if call.asks.amounts.get(unit)
                else call.asks.amounts.get(unit) is None and self.sum(one, unit) >= limit and self.stops(one, unit)
            )
        ]
        assert (lack is not None) == bool(over)
        if lack is None:
            call.state = "spent"
            call.windows = {one.key: self.window(one) for one in call.chain}
            for unit, amount in call.asks.some:
                self.pay(call, unit, amount, asked=True)
            tame = not self.changed and not any(one.charged for _, calls in self.batches for one in calls)
            for one in call.chain if tame else ():
                assert all(self.sum(one, unit) <= limit for unit, limit in one.limits.items()), "G9"

    @rule(data=st.data(), unit=st.sampled_from(UNITS), amount=st.integers(0, 5))
    def charge(self, data: st.DataObject, unit: str, amount: int) -> None:
        if (picked := self.pick(data, "spent", "settled", "refused", "reserved")) is None:
            return
        shares, index, call = picked
        shares.charge(index, {unit: amount * MICRO})
        if call.state == "settled":
            self.pay(call, unit, amount * MICRO)
            call.charged[unit] = call.charged.get(unit, 0) + amount * MICRO
        elif call.state == "spent":
            asked, had = call.asks.amounts.get(unit, 0), call.charged.get(unit, 0)
            call.charged[unit] = had + amount * MICRO
            self.pay(call, unit, max(asked, had + amount * MICRO) - max(asked, had))

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        if (picked := self.pick(data, "spent")) is None:
            return
        shares, index, call = picked
        shares.settle(index)
        call.state = "settled"
        for unit, charged in call.charged.items():
            self.pay(call, unit, max(0, call.asks.amounts.get(unit, 0) - charged), back=True)

    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        if (picked := self.pick(data, "reserved", "refused")) is None:
            return
        shares, index, call = picked
        shares.refund(index)
        call.state = "refused"

    @rule(data=st.data())
    def never_begins(self, data: st.DataObject) -> None:
        if (picked := self.pick(data, "spent")) is None:
            return
        shares, index, call = picked
        if call.charged:  # its handler has begun
            return
        shares.refund(index)
        call.state = "refused"
        for unit, amount in call.asks.some:
            self.pay(call, unit, amount, back=True)

    @rule(data=st.data())
    def come_again(self, data: st.DataObject) -> None:
        if (picked := self.pick(data, "settled", "refused")) is None:
            return
        shares, index, call = picked
        fits = self.free(call)
        assert (shares.again(index) is None) == fits
        if fits:
            call.state, call.charged, call.windows = "reserved", {}, {}

    @rule(data=st.data())
    def be_thrown_away(self, data: st.DataObject) -> None:
        if (picked := self.pick(data, "reserved")) is None:
            return
        shares, _, _ = picked
        shares.forsake()
        calls = next(calls for one, calls in self.batches if one is shares)
        for call in calls:
            call.state = "refused" if call.state == "reserved" else call.state

    @rule(seconds=st.sampled_from([0.5, 20, 61, 300]))
    def wait(self, seconds: float) -> None:
        self.now += int(seconds * MICRO)
        self.book.at(self.now)

    @rule(unit=st.sampled_from(UNITS), amount=st.integers(0, 8), place=st.integers(0, 2))
    def set_limit(self, unit: str, amount: int, place: int) -> None:
        one = self.all[place]
        self.changed = True
        self.book.change(one, {**one.limits, unit: amount * MICRO}, per=one.per, partial=one.partial)

    @precondition(lambda self: hasattr(self, "book"))
    @invariant()
    def adds_up(self) -> None:
        self.book.validate()
        self.book.roll(self.all)
        for one in self.all:
            for unit in UNITS:
                assert one.spent.get(unit, 0) == self.sum(one, unit), f"{one} has spent {unit} wrongly"
                assert one.reserved.get(unit, 0) == self.held(one, unit), f"{one} has reserved {unit} wrongly"
                if unit in one.limits:
                    spent, reserved = self.sum(one, unit), self.held(one, unit)
                    assert one.limits[unit] == one.left(unit) + reserved + spent


TestLedger = Ledger.TestCase
TestLedger.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
