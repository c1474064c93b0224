"""One ledger, written twice: the same random histories asked of the Python rooms and of the functions on a server.

After each step every decision (who is let in, what is in the way, how long it lasts) and every count (held, orphaned,
begun, spent, reserved, to the last millionth) is compared. The server's clock is the history's: the text of the library
that is loaded here reads a key instead of the time, which the text that users load cannot do.

`SPOILED` is the test of the test: one comparison of the functions is broken at a time, and the suite has to notice.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from engine_kit import EARLY, Direct, ask, named_values, plain, with_clock
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from servers import Server

from towerman.breaker import Circuit
from towerman.budgets import CALLS, Account, Asks, Book, Shares, next_window
from towerman.calls import IS, IX, S, X
from towerman.engines.library import named
from towerman.ledger import LATE, Fuse, Ledger, Marks, Meter, Node, Pool, Wants
from towerman.rates import MICRO, NEVER, Bucket, Numbers, Window, make

redis = pytest.importorskip("redis", reason="no redis-py: pip install 'towerman[redis]'")

LEASE = 3_600 * MICRO
GROUPS = itertools.count()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """One server for all histories of this file."""
    one = Server()
    try:
        yield one.start()
    finally:
        one.remove()


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Any]:
    """A connection to it."""
    with redis.Redis.from_url(server.url) as one:
        yield one


# ==================================================================== permits, access, rates, breakers


POOLS = {"P": (4, 1), "Q": (2, 0)}
NODES = ("a", "b", "c")
HIGH = 1 << 52


@dataclass
class Held:
    """What one grant is on the Python side."""

    wants: Wants[Any]
    marks: Marks[Any]
    orphan: bool = False


@dataclass
class World:
    """Both ledgers, and what is compared of them.

    Args:
        direct: the functions.
        rates: numbers by key, as they are declared now.
        breakers: the same of breakers.
    """

    direct: Direct
    rates: dict[str, Numbers | None]
    breakers: dict[str, tuple[int, int, int, int]]
    us: int = 0
    ledger: Ledger[Any] = field(default_factory=Ledger)
    held: dict[str, Held] = field(default_factory=dict)
    shift: int = 0
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        for key, (limit, reserve) in POOLS.items():
            self.ledger.add_pool(Pool(key, key, limit, reserve=reserve))
        self.ledger.at(0.0)
        for key in self.rates:  # the functions learn of numbers by the first claim
            self.ledger.add_meter(Meter(key, key, make(None)))
        for key, four in self.breakers.items():
            self.ledger.add_fuse(Fuse(key, key, Circuit(*four)))

    # ---------------------------------------------------------------- steps

    def advance(self, us: int) -> None:
        """Time goes on, or the clock is set back."""
        self.us += us
        self.direct.at(EARLY + self.us)

    def at(self) -> None:
        self.ledger.at(self.us / MICRO)

    def claim(self, permits: dict[str, int], holds: dict[str, int], timed: tuple[str, ...], priority: int) -> None:
        """One claim, asked of both."""
        self.at()
        name = f"lease{next(self.numbers)}"
        rates = tuple(key for key in timed if key in self.rates)
        fuses = tuple(key for key in timed if key in self.breakers)
        wants: Wants[Any] = self.ledger.look_up(
            Wants(
                0,
                "t",
                tuple(permits.items()),
                tuple(sorted(holds.items())),
                priority=priority,
                rates=rates,
                breakers=fuses,
            )
        )
        for key in rates:  # new numbers come into force with the next claim
            pace = self.ledger.meters[key].pace
            if pace.numbers != self.rates[key]:
                if isinstance(pace, Window):  # what its old rule does not need is forgotten, not only may be
                    pace._let_in(self.ledger.instant)
                self.ledger.set_pace(self.ledger.meters[key], self.rates[key])
        for key in fuses:
            if self.ledger.fuses[key].circuit.numbers != self.breakers[key]:
                self.ledger.fuses[key].circuit.set(*self.breakers[key])
        asked = ask(
            [[key, units, *POOLS[key]] for key, units in permits.items()],
            [[key, mode] for key, mode in sorted(holds.items())],
            [[key, *_wire(self.rates[key]), 1] for key in rates],
            [[key, *self.breakers[key]] for key in fuses],
            priority=priority,
        )
        answer = self.direct.one("claim", name, LEASE, asked, 0)
        shut = self.ledger.shut(wants)
        if shut is not None:
            left = shut.circuit.retry_after(self.ledger.instant)
            assert answer == [0, "b", fuses.index(shut.key) + 1, left]
            return
        hopeless = self.ledger.hopeless(wants)
        if hopeless is not None:
            assert answer == [0, "h", list(permits).index(hopeless.key) + 1, 0]
            return
        blocker = self.ledger.claim(wants)
        if blocker is None:
            assert answer[0] == 1, "the functions refuse what the ledger grants"
            assert answer[1] == self.direct.epoch
            self.held[name] = Held(wants, self.ledger.let_in(wants))
        elif isinstance(blocker, Pool):
            assert answer == [0, "p", list(permits).index(blocker.key) + 1, 0]
        elif isinstance(blocker, Node):
            assert answer == [0, "n", sorted(holds).index(blocker.key) + 1, 0]
        else:
            assert isinstance(blocker, Meter)
            left = blocker.pace.free_in(self.ledger.instant, high=priority > 0)
            assert answer == [0, "m", rates.index(blocker.key) + 1, left]

    def begun(self, name: str) -> None:
        self.at()
        one = self.held[name]
        if not one.marks.begun:
            self.ledger.begun(one.marks, self.us / MICRO)
        assert self.direct.one("begun", name) == [1]

    def verdict(self, name: str, verdict: Any) -> None:
        self.at()
        one = self.held[name]
        places = [fuse.key for fuse, _ in one.marks.fuses]
        opened = self.ledger.verdict(one.marks, verdict)
        assert self.direct.one("verdict", name, verdict) == [1, [places.index(fuse.key) + 1 for fuse in opened]]

    def orphan(self, name: str) -> None:
        self.at()
        one = self.held[name]
        if one.marks.begun:
            one.orphan = not one.orphan
            self.ledger.mark_orphan(one.wants, 1 if one.orphan else -1)
            assert self.direct.one("orphan", name, 1 if one.orphan else -1) == [1]

    def release(self, name: str, began: bool, verdict: Any) -> None:
        self.at()
        one = self.held.pop(name)
        if one.orphan:
            self.ledger.mark_orphan(one.wants, -1)
        if not one.marks.begun and began:
            self.ledger.begun(one.marks, self.us / MICRO)
        elif not one.marks.begun:
            self.ledger.take_back(one.marks)
        self.ledger.verdict(one.marks, verdict)
        self.ledger.give(one.wants)
        assert self.direct.one("release", name, int(began), verdict) == [1]
        assert self.direct.one("release", name, int(began), verdict) == [0]

    def die(self, name: str) -> None:
        """The lease is over; its holder may have begun, so it counts as begun now."""
        self.at()
        one = self.held.pop(name)
        if one.orphan:
            self.ledger.mark_orphan(one.wants, -1)
        if not one.marks.begun:
            self.ledger.begun(one.marks, self.us / MICRO)
        self.ledger.verdict(one.marks, "nothing")
        self.ledger.give(one.wants)
        self.direct.client.zadd(self.direct.keys[3], {name: 1})
        assert self.direct.one("renew", LEASE, [name]) == [1]

    def pause(self, key: str, length: int) -> None:
        self.at()
        later = self.ledger.meters[key].pace.pause(self.ledger.instant + length)
        assert self.direct.one("pause", key, length) == [int(later)]

    # ---------------------------------------------------------------- what both know

    def compare(self) -> None:
        """Every count of both, instants as seen from now."""
        self.at()
        self.ledger.validate()
        now = self.ledger.instant
        fields = [f"p{key}" for key in POOLS] + [f"n{key}" for key in NODES]
        timed = [f"m{key}" for key in self.rates] + [f"b{key}" for key in self.breakers]
        # Before the call that looks, since it may forget what is of no use any more.
        ring = {plain(name): int(value) for name, value in self.direct.client.hgetall(self.direct.keys[1]).items()}
        looked = dict(zip([*fields, *timed], self.direct.look(*fields, *timed), strict=True))
        own = self.direct.own_now
        for key in POOLS:
            pool = self.ledger.pools[key]
            assert (looked[f"p{key}"] or [0, 0]) == [pool.held, pool.orphaned]
        for key in NODES:
            node = self.ledger.node(key)
            counts, orphaned = ([0] * 4, [0] * 4) if node is None else (node.counts, node.orphaned or [0] * 4)
            there = looked[f"n{key}"] or [0] * 4
            assert (there + [0] * 4)[:8] == counts + orphaned
        for key in self.rates:
            self.compare_meter(key, looked[f"m{key}"], ring, now, own)
        for key in self.breakers:
            self.compare_fuse(key, looked[f"b{key}"], ring, now, own)
        self.forget()

    def compare_meter(self, key: str, there: list[int], ring: dict[str, int], now: int, own: int) -> None:
        meter = self.ledger.meters[key]
        pace = meter.pace
        if not there:
            assert pace.rested(now), "a rate that remembers something was forgotten"
            return
        limit, period, burst, reserve, until, pending, _, _, first, second, _, calm, rest, _ = there
        assert ((limit, period, None if burst < 0 else burst, reserve) if limit else None) == pace.numbers
        assert pending == pace.pending
        assert (until > 0) == (pace.until > -NEVER)
        if until > 0:  # also when it is over: it is felt for a while, and numbers may change meanwhile
            assert until - own == pace.until - now
            assert (calm - own) * pace.limit + rest == pace._calm - now * pace.limit
        if isinstance(pace, Window):
            starts = [ring[f"m{key}\0{index}"] - own for index in range(first, second)]
            starts = [start for start in starts if start > -period]  # others may be forgotten at any time
            assert starts == [start - now for start in pace._starts if start > now - period]
        elif isinstance(pace, Bucket):
            even = (first - own) * limit + second
            assert max(even, 0) == max(pace._even - now * limit, 0)

    def forget(self) -> None:
        """What the functions have forgotten, the ledger may forget as well: rates that change later begin anew."""
        keys = list(self.rates)
        left = self.direct.client.hmget(self.direct.keys[0], [f"m{key}" for key in keys])
        for key, state in zip(keys, left, strict=True):
            meter = self.ledger.meters[key]
            if state is None and meter.pace.numbers is not None:
                assert meter.pace.rested(self.ledger.instant), "a rate that remembers something was forgotten"
                meter.pace = make(None)

    def compare_fuse(self, key: str, there: list[int], ring: dict[str, int], now: int, own: int) -> None:
        circuit = self.ledger.fuses[key].circuit
        if not there:
            assert circuit.rested(now), "a breaker that remembers something was forgotten"
            return
        if tuple(there[:4]) != circuit.numbers:
            return
        until, generation, probing, well, opened, first, last, _ = there[4:]
        assert (generation, probing, well, opened) == (
            circuit.generation,
            circuit.probing,
            circuit._well,
            circuit.opened,
        )
        assert (until < 0) == (circuit._until is None)
        if circuit._until is not None:
            assert until - own == circuit._until - now
        failures = [ring[f"b{key}\0{index}"] - own for index in range(first, last)]
        assert failures == [instant - now for instant in circuit._failed]


def _wire(numbers: Numbers | None) -> list[int]:
    if numbers is None:
        return [0, 0, -1, 0]
    limit, period, burst, reserve = numbers
    return [limit, period, -1 if burst is None else burst, reserve]


@st.composite
def rate_numbers(draw: st.DrawFn) -> Numbers:
    """Limit, period, burst and reserve; short periods and long ones, with rests and without.

    Instants times the larger limits are far beyond 2^53, and the rests are as large as they can be.
    """
    small = st.integers(1, 5)
    limit = draw(st.one_of(small, small, small, st.sampled_from([999_983, 9_999_999])))
    burst = draw(st.one_of(st.none(), st.integers(1, 4)))
    period = draw(st.one_of(st.integers(1, 30), st.just(86_400 * MICRO)))
    most = limit if burst is None else burst
    return limit, period, burst, draw(st.integers(0, most - 1))


breaker_numbers = st.tuples(st.integers(1, 3), st.integers(1, 40), st.integers(1, 20), st.integers(1, 2))

none: dict[str, int] = {}
claims = st.tuples(
    st.just("claim"),
    st.one_of(st.just(none), st.dictionaries(st.sampled_from(sorted(POOLS)), st.integers(1, 4), max_size=2)),
    st.one_of(st.just(none), st.dictionaries(st.sampled_from(NODES), st.sampled_from([IS, IX, S, X]), max_size=3)),
    st.sampled_from([(), ("W",), ("B",), ("W",), ("B",), ("F",), ("N",), ("F", "W"), ("B", "F", "N", "W")]),
    st.integers(-1, 1),
)
others = st.tuples(
    st.sampled_from(["begun", "begun", "verdict", "orphan", "release", "release", "release", "die"]),
    st.integers(0, 9),
    st.booleans(),
    st.sampled_from(["well", "failed", "nothing"]),
)
lengths = st.one_of(
    st.integers(0, 25), st.integers(0, 25), st.sampled_from([250_000, MICRO - 1, MICRO, MICRO + 1, 3 * MICRO])
)
times = st.one_of(
    st.tuples(st.sampled_from(["wait", "wait", "wait", "back"]), lengths),
    st.tuples(st.just("pause"), lengths, st.sampled_from(["W", "B", "N"])),
)
changes = st.one_of(
    st.tuples(st.just("rate"), st.sampled_from(["W", "B"]), rate_numbers()),
    st.tuples(st.just("rate"), st.sampled_from(["W", "B", "N"]), st.one_of(st.none(), rate_numbers())),
    st.tuples(st.just("breaker"), st.just("F"), breaker_numbers),
)
step = st.one_of(claims, claims, claims, others, others, others, times, changes)
histories = st.lists(step, min_size=1, max_size=40)
long_histories = st.lists(step, min_size=25, max_size=40)


def replay(
    direct: Direct,
    rates: dict[str, Numbers | None],
    breakers: dict[str, tuple[int, int, int, int]],
    steps: list[Any],
) -> None:
    """One history, asked of both."""
    direct.at(EARLY)
    world = World(direct, {**rates, "N": None}, dict(breakers))
    for step in steps:
        kind = step[0]
        names = list(world.held)
        if kind == "claim":
            world.claim(step[1], step[2], step[3], step[4])
        elif kind == "wait":
            world.advance(step[1])
        elif kind == "back":
            world.advance(-step[1])
        elif kind == "pause":
            world.pause(step[2], step[1])
        elif kind == "rate":
            world.rates[step[1]] = step[2]
        elif kind == "breaker":
            world.breakers[step[1]] = step[2]
        elif names:
            name = names[step[1] % len(names)]
            if kind == "begun":
                world.begun(name)
            elif kind == "verdict":
                world.verdict(name, step[3] if world.held[name].marks.begun else "nothing")
            elif kind == "orphan":
                world.orphan(name)
            elif kind == "die":
                world.die(name)
            else:
                began = step[2] or world.held[name].marks.begun
                world.release(name, began, step[3] if began else "nothing")
        world.compare()
    for name in list(world.held):
        world.release(name, True, "well")
    world.compare()
    assert world.ledger.counts() == (0, 0)
    meta = named_values(direct.look("#")[0])
    assert (meta["records"], meta["waiting"]) == (0, 0)


@given(
    rates=st.fixed_dictionaries({"W": rate_numbers(), "B": rate_numbers()}),
    breakers=st.fixed_dictionaries({"F": breaker_numbers}),
    steps=histories,
)
@settings(max_examples=150)
def test_g3_the_functions_decide_as_the_ledger_does(client: Any, rates: Any, breakers: Any, steps: Any) -> None:
    """G2, G3, S7, R-58: permits, access modes, exact windows, buckets and breakers decide and count the same."""
    direct = Direct(client, f"c{next(GROUPS)}")
    try:
        replay(direct, rates, breakers, steps)
    finally:
        direct.forget()


# ==================================================================== budgets


UNITS = (CALLS, "tokens", "gb")
amounts = st.one_of(
    st.integers(0, 4).map(lambda whole: whole * MICRO),
    st.sampled_from([1, 999_999, 10**15 - 1, 10**15, 10**15 + 1, 10**20, 10**21]),
)
WINDOWS: dict[Any, int] = {None: 0, "month": -1, "week": -2, "day": 86_400 * MICRO, 7_000_001: 7_000_001}
limits = st.dictionaries(st.sampled_from(UNITS), amounts, min_size=1, max_size=3)
accounts = st.tuples(limits, st.sampled_from(list(WINDOWS)), st.booleans())
asked = st.one_of(st.none(), st.dictionaries(st.sampled_from(UNITS), amounts, max_size=3))
budget_steps = st.lists(
    st.one_of(
        st.tuples(
            st.just("batch"),
            st.lists(st.tuples(asked, st.lists(st.integers(0, 5), max_size=2)), min_size=1, max_size=6),
            st.booleans(),
        ),
        st.tuples(
            st.sampled_from(["begin", "begin", "again", "refund", "settle", "charge"]),
            st.integers(0, 30),
            st.dictionaries(st.sampled_from(UNITS), amounts, max_size=2),
        ),
        st.tuples(st.just("wait"), st.sampled_from([1, MICRO, 7_000_001, 3_600 * MICRO, 26 * 86_400 * MICRO])),
        st.tuples(st.just("limits"), st.integers(0, 1), accounts),
    ),
    min_size=1,
    max_size=25,
)


class Purse:
    """Both books, and what is compared of them.

    Args:
        direct: the functions.
        declared: limits, window and `partial` of each account.
    """

    def __init__(self, direct: Direct, declared: list[Any]) -> None:
        self.direct = direct
        self.book = Book(EARLY)
        self.us = 0
        self.book.at(0)
        self.accounts: list[Account] = []
        for index, (limit, per, partial) in enumerate(declared):
            account = Account(f"tenant:{index}", "tenant", limit, per=per, partial=partial)
            self.accounts.append(self.book.open(account))
        self.calls: list[tuple[Shares, int, str]] = []
        self.charges = 0

    def chain(self) -> list[Any]:
        return [
            [
                account.key,
                WINDOWS[account.per],
                int(account.partial),
                *[[unit, str(limit)] for unit, limit in account.limits.items()],
            ]
            for account in self.accounts
        ]

    def batch(self, calls: list[Any], plain_batch: bool) -> None:
        """A batch reserves."""
        number = len(self.calls)
        shares = Shares(self.book, tuple(self.accounts), len(calls))
        shares.asks[:] = [None if one is None else Asks(one) for one, _ in calls]
        needs = (
            None if plain_batch else [[need for need in one if need < place] for place, (_, one) in enumerate(calls)]
        )
        wire = [
            [
                f"share{number}:{place}",
                False if asks is None else [[unit, str(amount)] for unit, amount in asks.amounts.items()],
                [] if plain_batch else [need + 1 for need in needs[place]],
            ]
            for place, asks in enumerate(shares.asks)
        ]
        short = shares.reserve(None if plain_batch else needs)
        answer = self.direct.one("reserve", self.chain(), LEASE, *wire)
        found = {
            place - 1: (self.accounts[account - 1].key, unit, bool(whole)) for place, account, unit, whole in answer
        }
        assert found == {place: (lack.account.key, lack.unit, lack.whole) for place, lack in short.items()}
        self.calls += [(shares, place, wire[place][0]) for place in range(len(calls))]

    def step(self, kind: str, number: int, charged: dict[str, int]) -> None:
        if not self.calls:
            return
        shares, place, name = self.calls[number % len(self.calls)]
        known = shares.asks[place] is not None and self.direct.look(f"={name}")[0]
        if not known:
            return
        if kind in ("begin", "again"):
            lack = shares.begin(place) if kind == "begin" else shares.again(place)
            answer = self.direct.one(kind, name, self.chain())
            if lack is None:
                assert answer[0] == 1
            else:
                assert answer == [0, "a", self.accounts.index(lack.account) + 1, lack.unit]
        elif kind == "charge":
            shares.charge(place, charged)
            listed = [[unit, str(amount)] for unit, amount in charged.items()]
            self.charges += 1
            for _ in range(2):  # the second time its answer was lost
                assert self.direct.one("charge", name, listed, self.charges)[0] == 1
        else:
            getattr(shares, kind)(place)
            assert self.direct.one(kind, name)[0] == 1
        assert int(named_values(self.direct.look(f"={name}")[0])["t"]) == shares.state[place]

    def compare(self) -> None:
        self.book.roll(self.accounts)
        for account, there in zip(
            self.accounts, self.direct.look(*[f"a{account.key}" for account in self.accounts]), strict=True
        ):
            if not there:  # it is as if it were opened anew
                assert not any([*account.spent.values(), *account.reserved.values(), *account.loose])
                continue
            values = named_values(there)
            units = named_values(values["u"]) if values["u"] else {}
            for name in UNITS:
                parts = units.get(name, [0, 0, 0, 0])
                spent, reserved = parts[0] * 10**15 + parts[1], parts[2] * 10**15 + parts[3]
                assert spent == account.spent.get(name, 0), f"spent {name}"
                assert reserved == account.reserved.get(name, 0), f"reserved {name}"
            if account.per is not None:
                assert values["e"] - self.direct.own_now == account.ends - self.book.now
            assert ({"gb"} & account.loose) == ({"gb"} & set(named_values(values["l"]) if values["l"] else {}))


def spend(direct: Direct, declared: list[Any], steps: list[Any]) -> None:
    """One history of budgets, asked of both."""
    direct.at(EARLY)
    purse = Purse(direct, declared)
    for step in steps:
        if step[0] == "batch":
            purse.batch(step[1], step[2])
        elif step[0] == "wait":
            purse.us += step[1]
            purse.book.at(purse.us)
            direct.at(EARLY + purse.us)
            for _, _, name in purse.calls:  # whoever lives renews
                if direct.client.hexists(direct.keys[2], name):
                    direct.client.zadd(direct.keys[3], {name: EARLY + purse.us + LEASE})
        elif step[0] == "limits":
            limit, per, partial = step[2]
            account = purse.accounts[step[1] % len(purse.accounts)]
            purse.book.roll(purse.accounts)
            purse.book.change(account, limit, per=per, partial=partial)
            direct.one("reserve", purse.chain(), LEASE)
        else:
            purse.step(*step)
        purse.compare()
    purse.book.validate()


@given(declared=st.lists(accounts, min_size=1, max_size=2), steps=budget_steps)
@settings(max_examples=150)
def test_g9_the_functions_count_as_the_book_does(client: Any, declared: Any, steps: Any) -> None:
    """G9, S8, R-102: who may spend what, and what is spent and reserved, is the same to the last millionth."""
    direct = Direct(client, f"b{next(GROUPS)}")
    try:
        spend(direct, declared, steps)
    finally:
        direct.forget()


# ==================================================================== the test of the test


SPOILED = {
    "a pool of one less": ("(pool and pool[1] or 0) + one[2] > one[3]", "(pool and pool[1] or 0) + one[2] >= one[3]"),
    "a reserve for all": ("> one[3] - (high and 0 or one[4])", "> one[3] - (high and 0 or 0)"),
    "IX beside S": ("return counts[2] == 0", "return true"),
    "two readers": (
        "elseif mode == 2 then\n    return counts[2] == 0",
        "elseif mode == 2 then\n    return counts[3] == 0",
    ),
    "a window of a microsecond less": (
        "instant = start(field, m[9] + over) + m[2]",
        "instant = start(field, m[9] + over) + m[2] - 1",
    ),
    "a bucket a microsecond late": ("(rest > less_rest and 1 or 0)", "(rest >= less_rest and 1 or 0)"),
    "a bucket that forgets a rest": ("rest, whole = rest - limit, whole + 1", "rest = rest - limit"),
    "any start is refunded": ("if m[3] >= 0 and m[8] ~= mark[2] then", "if false then"),
    "no start is refunded": ("if m[3] >= 0 and m[8] ~= mark[2] then", "if m[3] >= 0 then"),
    "a bucket that does not count what is to begin": ("m[3] - m[4]) - 1 - m[6]", "m[3] - m[4]) - 1"),
    "a bucket that counts what is to begin from long ago": (
        "      whole, rest = at_least(whole, rest, now)\n    end\n    instant = minus",
        "    end\n    instant = minus",
    ),
    "a window that does not count what is to begin": ("local over = count + m[6] - (", "local over = count - ("),
    "a pause that leaves nothing": ("if gap == 0 then", "if true then"),
    "a pause that leaves a bucket full": (
        "m[5], m[12], m[13] = instant, instant, 0\n  meter_use_up(m, instant)",
        "m[5], m[12], m[13] = instant, instant, 0",
    ),
    "a pause that takes the reserve": ("m[3] - m[4] - 1, m[2])", "m[3] - 1, m[2])"),
    "a pause after which nobody has the reserve": ("local room = (high and m[4] or 0) - m[6]", "local room = -m[6]"),
    "a pause after which many come together": (
        "and now >= m[5] then\n    local whole",
        "and false then\n    local whole",
    ),
    "a pause that is felt too long": ("return instant < m[5] + m[2] and", "return instant <= m[5] + m[2] and"),
    "a slow start that is too fast": ("floor(MICRO / 2 ^", "floor(MICRO / 3 ^"),
    "a pause that is over with new numbers": ("if felt then", "if false then"),
    "a pause that is rounded down": (
        "if m[13] > 0 then -- rounded up\n    m[12], m[13] = m[12] + 1, 0",
        "if m[13] > 0 then\n    m[13] = 0",
    ),
    "new numbers that forget a bucket": ("used = bucket_used(m)\n", "used = 0\n"),
    "a little late is set back": ("if now < meta.last - LATE then", "if true then"),
    "a breaker open for longer": ("(now >= f[5] and", "(now > f[5] and"),
    "a failure too long ago": ("start(field, f[10]) <= now - f[2]", "start(field, f[10]) < now - f[2]"),
    "who dies has not begun": ("      if r.g == 0 then -- whether", "      if false then -- whether"),
}
BUDGETS_SPOILED = {
    "a carry that is missed": ("if low >= BASE then", "if low > BASE then"),
    "a millionth too many": (
        "if less(left_high, left_low, asked[1], asked[2]) then",
        "if not less(asked[1], asked[2], left_high, left_low) then",
    ),
    "the cheaper overtakes": ("if closed and closed[index .. ' ' .. name] then", "if false then"),
    "what was charged is not all": ("local from = less(had[1]", "local from = not less(had[1]"),
    "weeks from Thursdays": ("(wall - 4 * DAY) % (7 * DAY)", "wall % (7 * DAY)"),
    "a leap year too many": ("- floor(year / 100)", ""),
}


QUICK = {
    "a pool of one less",
    "a bucket a microsecond late",
    "a bucket that forgets a rest",
    "a pause that leaves nothing",
    "a pause that leaves a bucket full",
    "a pause that takes the reserve",
    "a pause that is over with new numbers",
    "new numbers that forget a bucket",
    "a little late is set back",
    "a millionth too many",
    "the cheaper overtakes",
    "weeks from Thursdays",
    "a leap year too many",
}
"""Those that are found at once; the others take many histories."""


def marked(names: Iterable[str]) -> list[Any]:
    """Each name, the slow ones for the long tier."""
    return [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.long]) for name in names]


def spoiled(client: Any, before: str, after: str) -> Direct:
    """A group whose library has one comparison wrong."""
    right = with_clock()
    text = right.text.replace(right.name, "towerman_0")
    assert text.count(before) == 1, f"{before!r} is there {text.count(before)} times"
    direct = Direct(client, f"s{next(GROUPS)}")
    direct.library = named(text.replace(before, after), 1)
    client.function_load(direct.library.text, replace=True)
    return direct


def is_noticed(check: Callable[[], None]) -> None:
    """A check of random histories fails."""
    with pytest.raises(AssertionError):
        check()


HARD = settings(
    max_examples=2_000, database=None, derandomize=True, phases=[Phase.generate], report_multiple_bugs=False
)


@pytest.mark.parametrize("name", marked(SPOILED))
def test_a_spoiled_function_is_noticed(client: Any, name: str) -> None:
    """The test of the test: one comparison broken in the functions is found by the random histories."""
    direct = spoiled(client, *SPOILED[name])

    @given(
        rates=st.fixed_dictionaries({"W": rate_numbers(), "B": rate_numbers()}),
        breakers=st.fixed_dictionaries({"F": breaker_numbers}),
        steps=long_histories,
    )
    @HARD
    def check(rates: Any, breakers: Any, steps: Any) -> None:
        direct.forget()
        replay(direct, rates, breakers, steps)

    is_noticed(check)
    client.function_delete(direct.library.name)


@pytest.mark.parametrize("name", marked(BUDGETS_SPOILED))
def test_a_spoiled_budget_is_noticed(client: Any, name: str) -> None:
    """The test of the test, for what is spent."""
    direct = spoiled(client, *BUDGETS_SPOILED[name])

    @given(declared=st.lists(accounts, min_size=1, max_size=2), steps=budget_steps)
    @HARD
    def check(declared: Any, steps: Any) -> None:
        direct.forget()
        spend(direct, declared, steps)

    is_noticed(check)
    client.function_delete(direct.library.name)


@given(
    day=st.integers(1, 60_000),
    us=st.integers(0, 86_400 * MICRO - 1),
    per=st.sampled_from(["week", "month", "day"]),
    late=st.sampled_from([0, 1, LATE]),
)
@settings(max_examples=150)
def test_g9_windows_of_the_calendar_end_when_the_book_says(client: Any, day: int, us: int, per: str, late: int) -> None:
    """G9: weeks, months and days end at the same instant, in any year up to 2134; what comes late counts as now."""
    direct = Direct(client, "calendar")
    instant = day * 86_400 * MICRO + us
    direct.at(instant)
    direct.look()
    direct.at(instant - late)
    try:
        chain = [["tenant:a", WINDOWS[per], 1, [CALLS, str(MICRO)]]]
        assert direct.one("reserve", chain, LEASE, ["one", [[CALLS, str(MICRO)]], []]) == []
        there = named_values(direct.look("atenant:a")[0])
        assert there["e"] == next_window(instant, per)
    finally:
        direct.forget()
