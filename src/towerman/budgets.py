"""Who may spend how much of what: the arithmetic of budgets.

Theory. An account is what one scope may spend (a batch, a run, a tenant, the process): a limit for each unit, what is
spent of it and what is reserved. A call is on a chain of accounts, and what it asks is taken from all of them or from
none. It goes through three steps. *Reserved*, when its batch is handed in: nobody else can have that any more.
*Spent*, when it starts. *Settled*, when its work has ended: of a unit that its handler has charged, what was charged
takes the place of what was asked. What never starts is refunded. So at every instant, for each unit of each account:

    limit = free + reserved + spent        (free is below 0 where charges have gone past the limit)

Amounts known before the start are exact: no start ever brings spent above the limit. Others are known only afterwards:
they are charged, by calls that did not name the unit or have taken more than they said. Charges may go past a limit, by
what was in flight and no more: once such a unit is used up nothing starts any more, what had reserved before and still
waits included, but for calls whose tool says that they take 0 of it. Tokens and cost are such units from the beginning;
a unit of somebody's own is one from its first charge beyond what was asked. Until then it concerns those alone that
ask some of it.

In emitted order (rule S8) each call takes what it asks if that is there; the first that does not find enough of a unit
closes that unit of that account for the calls behind it in its batch, so that a cheaper one does not overtake it. An
account with `partial` False takes a batch whole or not at all.

An account that renews has windows of the calendar in UTC: at the end of each, what was spent is forgotten, and what is
reserved stays reserved. The wall clock is read once, when the book is opened; from then on the tower's own clock says
where in the calendar it is, so that a wall clock that is set neither locks out nor gives away. If the tower's own clock
goes back, the ends of windows go back with it.

House rules. Amounts are whole millionths, instants whole microseconds: nothing drifts. Whoever changes something holds
the lock of the core and has told the time with `Book.at`. Nothing here waits. Amounts may be made of arguments, so
none of them goes into a message; names of units and limits do.

Not here: what tools ask and budgets allow (policy), who is refused and told what (runner, sealing).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Final, NamedTuple

from towerman.rates import MICRO, NEVER

CALLS: Final = "calls"
"""The unit of which every call takes one, unless its tool says otherwise."""

SECONDS: Final = "seconds"
"""The unit that passes by itself."""

EVERYBODYS: Final = frozenset({CALLS, SECONDS, "tokens", "cost"})
"""Units that stop everything when they are used up."""

MOST: Final = 10**15
"""An amount that no budget reaches: more is a mistake."""

PERIODS: Final[Mapping[str, int]] = {
    "second": MICRO,
    "minute": 60 * MICRO,
    "hour": 3_600 * MICRO,
    "day": 86_400 * MICRO,
    "week": 604_800 * MICRO,
    "month": 0,
}
"""Windows by name, with their lengths in microseconds; months have different ones."""

_MONDAY: Final = 4 * PERIODS["day"]  # the first one after 1970 began, on a Thursday


def millionths(amount: object) -> int:
    """An amount as the nearest whole number of millionths; one above 0 is never less than one of them.

    Args:
        amount: a number of 0 or more that can say its exact ratio: int, float, Decimal, Fraction.

    Raises:
        ValueError: it is none of these, or of no size that anybody means; the text says what is allowed.
    """
    try:
        above, below = amount.as_integer_ratio()  # type: ignore[attr-defined]  # what has none is no number
        if isinstance(amount, bool) or type(above) is not int or type(below) is not int or below < 1:
            raise ValueError
    except Exception:  # no number, or one of those that are no amounts: infinity, NaN
        raise ValueError("a number, 0 or more") from None
    if not 0 <= above <= MOST * below:
        raise ValueError("a number, 0 or more" if above < 0 else f"a number, at most {MOST:,}")
    whole = (2 * above * MICRO + below) // (2 * below)
    return whole or int(above > 0)


def number(amount: int) -> int | float:
    """Millionths as people write the amount."""
    whole, rest = divmod(amount, MICRO)
    return amount / MICRO if rest else whole


def next_window(wall: int, per: str | int) -> int:
    """When the window of the calendar that an instant is in ends.

    Args:
        wall: the instant, in microseconds since 1970 began in UTC.
        per: one of `PERIODS`, or the length of each window in microseconds.
    """
    if per == "month":
        day = datetime.fromtimestamp(wall // MICRO, UTC)
        year, month = divmod(day.year * 12 + day.month, 12)
        return int(datetime(year, month + 1, 1, tzinfo=UTC).timestamp()) * MICRO
    length = PERIODS[per] if isinstance(per, str) else per
    first = _MONDAY if per == "week" else 0
    return ((wall - first) // length + 1) * length + first


class Asks:
    """What a call asks before it starts: an amount of each unit that its tool names. Frozen; compared by value.

    Attributes:
        amounts: by unit, in millionths. A unit with 0 is one of which it takes nothing, for sure.
        some: those of more than 0.
    """

    __slots__ = ("amounts", "some")

    def __init__(self, amounts: Mapping[str, int]) -> None:
        self.amounts = {CALLS: MICRO, **amounts}
        self.some = tuple((unit, amount) for unit, amount in self.amounts.items() if amount)

    def __eq__(self, other: object) -> bool:
        return self.amounts == other.amounts if isinstance(other, Asks) else NotImplemented

    def __hash__(self) -> int:
        return hash(frozenset(self.amounts.items()))

    def __str__(self) -> str:
        return ", ".join(f"{number(amount)} {unit}" for unit, amount in self.amounts.items())

    def __repr__(self) -> str:
        return f"Asks({', '.join(self.amounts)})"


ONE_CALL: Final = Asks({})
"""What a call asks whose tool says nothing."""


class Account:
    """What one scope may spend.

    Args:
        key: unique in the book: `run:7`, `tenant:billing`, `process`.
        scope: whom it counts for: "batch", "run", "tenant" or "process".
        limits: by unit, in millionths.
        per: None, or the window in which it renews: one of `PERIODS`, or microseconds.
        partial: a batch may be run in part.
        until: the instant in microseconds from which on nothing starts.
        lasts: seconds from its beginning to that instant, in millionths, for messages; 0 for none.

    Attributes:
        spent: by unit, also of units without a limit.
        reserved: the same of calls that wait.
        ends: when the present window ends.
        window: how many windows have ended.
        loose: units of somebody's own that have been charged beyond what was asked.
        refused: calls that it has refused.
    """

    __slots__ = (
        "ends",
        "key",
        "lasts",
        "limits",
        "loose",
        "partial",
        "per",
        "refused",
        "reserved",
        "scope",
        "spent",
        "until",
        "window",
    )

    def __init__(
        self,
        key: str,
        scope: str,
        limits: Mapping[str, int],
        *,
        per: str | int | None = None,
        partial: bool = True,
        until: int = NEVER,
        lasts: int = 0,
    ) -> None:
        self.key = key
        self.scope = scope
        self.limits = dict(limits)
        self.per = per
        self.partial = partial
        self.until = until
        self.lasts = lasts
        self.spent: dict[str, int] = {}
        self.reserved: dict[str, int] = {}
        self.ends = NEVER
        self.window = 0
        self.loose: set[str] = set()
        self.refused = 0

    def stops(self, unit: str) -> bool:
        """Does nothing start any more once this unit is used up?"""
        return unit in EVERYBODYS or unit in self.loose

    def left(self, unit: str) -> int:
        """What is neither spent nor reserved of a limited unit; below 0 where charges have gone past its limit."""
        return self.limits[unit] - self.spent.get(unit, 0) - self.reserved.get(unit, 0)

    def used_up(self, us: int) -> str | None:
        """A unit for want of which nothing starts any more at that instant, or None."""
        if us >= self.until:
            return SECONDS
        limits, spent = self.limits.items(), self.spent
        return next((unit for unit, limit in limits if spent.get(unit, 0) >= limit and self.stops(unit)), None)

    def fitting(self, asks: Asks, count: int, us: int, closed: set[tuple[Account, str]]) -> tuple[int, str]:
        """How many of so many calls that ask this can have it now, and the unit that is in the way of more.

        Args:
            asks: what each of them asks.
            count: of calls.
            us: the present instant.
            closed: units of which those behind get nothing more.
        """
        if us >= self.until:
            return 0, SECONDS
        amounts, short = asks.amounts, ""
        for unit, limit in self.limits.items():
            amount = amounts.get(unit)
            if amount:
                most = 0 if (self, unit) in closed else max(0, self.left(unit)) // amount
            elif amount is None and self.spent.get(unit, 0) >= limit and self.stops(unit):
                most = 0
            else:
                continue
            if most < count:
                count, short = most, unit
        return count, short

    def in_the_way(self, asks: Asks, us: int) -> str | None:
        """A call has reserved what it asks and is about to start: the unit of which there is too little after all."""
        if us >= self.until:
            return SECONDS
        amounts, spent = asks.amounts, self.spent
        for unit, limit in self.limits.items():
            amount = amounts.get(unit)
            if amount:
                if spent.get(unit, 0) + amount > limit:
                    return unit
            elif amount is None and spent.get(unit, 0) >= limit and self.stops(unit):
                return unit
        return None

    def __repr__(self) -> str:
        return f"Account({self.key!r}, {', '.join(self.limits) or 'no limit'})"


class Lack(NamedTuple):
    """Why a call does not get what it asks.

    Args:
        account: the one that has too little.
        unit: of this; "seconds" when its time is over.
        whole: the call alone would have got it, but an account on its chain takes a batch whole or not at all.
    """

    account: Account
    unit: str
    whole: bool = False


RESERVED: Final = 1
SPENT: Final = 2
SETTLED: Final = 3


class Shares:
    """What the calls of one batch have of the accounts on its chain, in columns: a place for each call.

    Args:
        book: that the accounts are in.
        chain: the accounts, without repeats.
        size: calls of the batch.

    Attributes:
        asks: what each call asks; None for one that asks nothing, since it does not start.
        state: 0 for nothing, RESERVED, SPENT or SETTLED.
        open: calls that have reserved and not started.
    """

    __slots__ = ("_charged", "_windows", "asks", "book", "chain", "open", "state")

    def __init__(self, book: Book, chain: tuple[Account, ...], size: int) -> None:
        self.book = book
        self.chain = chain
        self.asks: list[Asks | None] = [None] * size
        self.state = bytearray(size)
        self.open = 0
        self._windows: dict[int, tuple[int, ...]] = {}
        self._charged: dict[int, dict[str, int]] = {}

    def reserve(self, needs: Sequence[Sequence[int]] | None = None) -> dict[int, Lack]:
        """Reserve, in emitted order, what the calls of the batch ask, each of them whole or not at all.

        Args:
            needs: for each call those that it needs. One that needs an earlier call that will not start asks nothing.

        Returns:
            By index, why not.
        """
        asks, us, chain = self.asks, self.book.roll(self.chain), self.chain
        short: dict[int, Lack] = {}
        closed: set[tuple[Account, str]] = set()
        index, size = 0, len(asks)
        while index < size:
            first, one = index, asks[index]
            index += 1
            if one is None:
                continue
            if needs is not None:
                if any(need < first and (asks[need] is None or need in short) for need in needs[first]):
                    asks[first] = None
                    continue
            else:  # those that ask the same are one step
                while index < size and asks[index] is one:
                    index += 1
            count, lack = index - first, None
            for account in chain:
                fits, unit = account.fitting(one, count, us, closed)
                if fits < count:
                    count, lack = fits, Lack(account, unit)
            self._take(one, first, count)
            if lack is not None:
                short.update(dict.fromkeys(range(first + count, index), lack))
                closed.update(
                    (account, unit)
                    for account in chain
                    for unit, amount in one.some
                    if unit in account.limits and account.left(unit) < amount
                )
        if short and not all(account.partial for account in chain):
            short = self._none(short)
        for lack in short.values():
            lack.account.refused += 1
        return short

    def _take(self, asks: Asks, first: int, count: int) -> None:
        if not count:
            return
        for account in self.chain:
            for unit, amount in asks.some:
                account.reserved[unit] = account.reserved.get(unit, 0) + amount * count
        self.state[first : first + count] = bytes([RESERVED]) * count
        self.open += count
        self.book.live[self] = None

    def _none(self, short: Mapping[int, Lack]) -> dict[int, Lack]:
        """The batch is not run in part: nobody gets anything, and each is told what was in the way of the first."""
        first = next(iter(short.values()))
        none = dict(short)
        for index, state in enumerate(self.state):
            if state == RESERVED:
                self.refund(index)
                none[index] = first
        return {
            index: lack._replace(whole=self.alone(index)) for index, lack in sorted(none.items()) if self.asks[index]
        }

    def alone(self, index: int) -> bool:
        """Would the call fit if nobody else had reserved anything?"""
        asks, us = self.asks[index], self.book.now
        return asks is not None and all(account.in_the_way(asks, us) is None for account in self.chain)

    def again(self, index: int) -> Lack | None:
        """Reserve for one call once more, which has given back its share, or has spent it on an earlier attempt.

        Returns:
            Why not; None: it has its share.
        """
        asks = self.asks[index]
        if asks is None or self.state[index] == RESERVED:
            return None
        self.settle(index)
        us = self.book.roll(self.chain)
        for account in self.chain:
            fits, unit = account.fitting(asks, 1, us, set())
            if not fits:
                account.refused += 1
                return Lack(account, unit)
        self._take(asks, index, 1)
        return None

    def begin(self, index: int) -> Lack | None:
        """The call is about to start: what it had reserved is spent. Or there is too little after all, and it keeps it.

        Returns:
            Why it may not start; None: it may.
        """
        asks = self.asks[index]
        if asks is None or self.state[index] != RESERVED:
            return None
        us = self.book.roll(self.chain)
        for account in self.chain:
            unit = account.in_the_way(asks, us)
            if unit is not None:
                account.refused += 1
                return Lack(account, unit)
        self._spend(index, asks)
        return None

    def spend(self, index: int) -> None:
        """What a call had reserved is spent, whatever is left."""
        asks = self.asks[index]
        if asks is not None and self.state[index] == RESERVED:
            self.book.roll(self.chain)
            self._spend(index, asks)

    def _spend(self, index: int, asks: Asks) -> None:
        self.state[index] = SPENT
        some, windows = asks.some, 0
        for account in self.chain:
            spent, reserved = account.spent, account.reserved
            for unit, amount in some:
                reserved[unit] -= amount
                spent[unit] = spent.get(unit, 0) + amount
            windows += account.window
        self._one_less()
        if windows:  # else none has ended yet, and whatever has none now is of the first
            self._windows[index] = tuple([account.window for account in self.chain])

    def refund(self, index: int) -> None:
        """The call does not start: all that it has goes back."""
        asks, state = self.asks[index], self.state[index]
        if asks is None:
            return
        if state == RESERVED:
            self._give(asks)
            self.state[index] = 0
        elif state == SPENT:
            self.state[index] = 0
            for unit, amount in asks.some:
                self._unspend(index, unit, amount)
            self._windows.pop(index, None)

    def settle(self, index: int) -> None:
        """The work of the call has ended: of what it has charged, only that much is spent."""
        asks = self.asks[index]
        if asks is None or self.state[index] != SPENT:
            return
        self.state[index] = SETTLED
        for unit, charged in self._charged.pop(index, {}).items():
            over = asks.amounts.get(unit, 0) - charged
            if over > 0:
                self._unspend(index, unit, over)
        self._windows.pop(index, None)

    def charge(self, index: int, amounts: Mapping[str, int]) -> None:
        """The handler of the call has spent so much."""
        asks, state = self.asks[index], self.state[index]
        if asks is None:
            return
        if state != SPENT:  # it has ended, and what it has left behind goes on
            if state == SETTLED:
                self.book.charge(self.chain, amounts)
            return
        before = self._charged.setdefault(index, {})
        more: dict[str, int] = {}
        for unit, amount in amounts.items():
            asked, had = asks.amounts.get(unit, 0), before.get(unit, 0)
            before[unit] = had + amount
            more[unit] = max(had + amount, asked) - max(had, asked)
        self.book.charge(self.chain, more)

    def forsake(self) -> None:
        """Nothing of the batch will start any more."""
        for index, state in enumerate(self.state):
            if state == RESERVED:
                self.refund(index)

    def _give(self, asks: Asks) -> None:
        """What a call had reserved is reserved no more."""
        for account in self.chain:
            for unit, amount in asks.some:
                account.reserved[unit] -= amount
        self._one_less()

    def _one_less(self) -> None:
        self.open -= 1
        if not self.open:
            del self.book.live[self]

    def _unspend(self, index: int, unit: str, amount: int) -> None:
        """So much was not spent after all. A window that has ended has forgotten it."""
        windows = self._windows.get(index)
        for place, account in enumerate(self.chain):
            if (windows[place] if windows is not None else 0) == account.window:
                account.spent[unit] -= amount

    def __repr__(self) -> str:
        return f"Shares({self.open} of {len(self.state)} calls have reserved)"


class Book:
    """All accounts of one tower in this process.

    Args:
        offset: microseconds from the zero of the tower's clock to 1970, that is the wall clock less the tower's.

    Attributes:
        accounts: by key, without those of batches.
        live: batches of which some calls have reserved and not started.
        now: the instant of the step that is dealt with, in microseconds.
    """

    __slots__ = ("accounts", "live", "now", "offset")

    def __init__(self, offset: int = 0) -> None:
        self.offset = offset
        self.accounts: dict[str, Account] = {}
        self.live: dict[Shares, None] = {}
        self.now = -NEVER

    def at(self, us: int) -> None:
        """A step comes at this instant. A clock that goes back takes with it what is to come."""
        step, self.now = us - self.now, us
        if step < 0:
            for account in self.accounts.values():
                account.until += step if account.until < NEVER else 0
                account.ends += step if account.ends < NEVER else 0

    def roll(self, chain: Iterable[Account]) -> int:
        """Windows that are over end; returns the present instant."""
        us = self.now
        for account in chain:
            if us >= account.ends:
                account.ends = self._end_of(account.per)
                account.window += 1
                account.spent.clear()
        return us

    def _end_of(self, per: str | int | None) -> int:
        return NEVER if per is None else next_window(self.now + self.offset, per) - self.offset

    def charge(self, chain: Iterable[Account], amounts: Mapping[str, int]) -> None:
        """So much was spent of these accounts, whatever their limits are."""
        self.roll(chain)
        for account in chain:
            for unit, amount in amounts.items():
                if amount:
                    account.spent[unit] = account.spent.get(unit, 0) + amount
                    if unit not in EVERYBODYS:
                        account.loose.add(unit)

    def renews(self, lack: Lack) -> float | None:
        """Seconds until there is more again of what was too little, if that is known."""
        ends = lack.account.ends
        return None if ends >= NEVER or lack.unit == SECONDS else max(0, ends - self.now) / MICRO

    def remaining(self, chain: Iterable[Account]) -> dict[str, int]:
        """What is left on a chain of accounts, in millionths, by limited unit, never below 0; of its time as
        `seconds`.
        """
        us = self.roll(chain)
        left: dict[str, int] = {}
        for account in chain:
            if account.until < NEVER:
                left[SECONDS] = min(left.get(SECONDS, NEVER), max(0, account.until - us))
            for unit in account.limits:
                left[unit] = min(left.get(unit, NEVER), max(0, account.left(unit)))
        return left

    def open(self, account: Account) -> Account:
        """Add an account, or return the one that has its key."""
        known = self.accounts.setdefault(account.key, account)
        if known is account:
            account.ends = self._end_of(account.per)
        return known

    def change(self, account: Account, limits: Mapping[str, int], *, per: str | int | None, partial: bool) -> None:
        """Other limits. What is spent stays spent, what is reserved stays reserved."""
        account.limits = dict(limits)
        account.partial = partial
        if per != account.per:
            account.per = per
            account.ends = self._end_of(per)

    def drop(self, key: str, *, unused: bool = False) -> bool:
        """Forget an account; who is on it already goes on. Says whether it is gone.

        Args:
            key: the account's.
            unused: only if it would be the same when it were opened anew.
        """
        account = self.accounts.get(key)
        if account is not None and unused:
            self.roll([account])
            if any(account.spent.values()) or any(account.reserved.values()):
                return False
        self.accounts.pop(key, None)
        return True

    def anew(self) -> Book:
        """The same accounts and what is spent of them, with nobody at work."""
        other = Book(self.offset)
        other.now = self.now
        for account in self.accounts.values():
            copy = Account(
                account.key,
                account.scope,
                account.limits,
                per=account.per,
                partial=account.partial,
                until=account.until,
                lasts=account.lasts,
            )
            copy.spent = dict(account.spent)
            copy.loose = set(account.loose)
            copy.ends, copy.window = account.ends, account.window
            other.accounts[copy.key] = copy
        return other

    def reset(self) -> None:
        """In another process: what was at work is not here; what was spent stays spent."""
        for shares in self.live:
            shares.state = shares.state.replace(bytes([RESERVED]), b"\0")
            shares.open = 0
        self.live.clear()
        for account in self.accounts.values():
            account.reserved.clear()

    def validate(self) -> None:
        """Raise AssertionError when what is reserved is not what batches have reserved, or something is below 0."""
        reserved: dict[Account, dict[str, int]] = {account: {} for account in self.accounts.values()}
        for shares in self.live:
            count = 0
            for asks, state in zip(shares.asks, shares.state, strict=True):
                if state == RESERVED:
                    assert asks is not None, f"{shares} has reserved for nobody"
                    count += 1
                    for account in shares.chain:
                        sums = reserved.setdefault(account, {})
                        for unit, amount in asks.some:
                            sums[unit] = sums.get(unit, 0) + amount
            assert shares.open == count > 0, f"{shares} has {count} open"
        for account, sums in reserved.items():
            held = {unit: amount for unit, amount in account.reserved.items() if amount}
            assert held == sums, f"{account} is out of balance"
            assert all(amount >= 0 for amount in account.spent.values()), f"{account} has spent less than nothing"

    def __repr__(self) -> str:
        return f"Book({len(self.accounts)} accounts, {len(self.live)} batches have reserved)"
