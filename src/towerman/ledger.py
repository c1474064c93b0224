"""What is held and spent: permits of pools, access to resources, starts of rate limits. All or nothing.

Theory. A pool is a limit and a count. A resource node is a count for each of four modes (IS, IX, S, X). A meter is a
rate limit, which only time gives back. `blocker` looks at everything that an ask wants and names the first thing that
is in the way; where there is none, `take` takes all of it. Giving back is the same arithmetic with the other sign.
There is no partial state in between, because nothing here waits.

A start is spent by whoever is let in and gives nothing back when it ends; where the call never begins it is taken back
(`Marks`). A breaker that is open is not waited for: `shut` names it.

What an orphan holds (work that goes on after its result was sealed) is counted apart as well: it may never come back,
so nobody should hold others back for its sake.

Loans. A call that waits for calls of its own (nested ones) does nothing meanwhile with what it holds, so it lends it
to them. A borrowed permit is counted once, with the lender; it goes back to the lender. A resource that an ancestor
holds is in nobody's way below that ancestor; what the nested calls hold of it is counted like anything else, so that
they exclude each other.

House rules. No queue, no policy; the time of an event is told with `at` before anything else. Numbers are integers.
`validate()` says what must hold after every step.
Resource keys hold argument values: they stay inside and are never shown, not even by `repr`.

Not here: who goes first, who waits and for how long (gate).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, Generic, TypeVar
from weakref import WeakValueDictionary

from towerman.breaker import Circuit, Verdict
from towerman.calls import COMPATIBLE, Ask, Hold, X
from towerman.rates import MICRO, NEVER, Numbers, Pace, make, micros

LotT = TypeVar("LotT")

UNLIMITED: Final = 1 << 62
"""The limit of a pool that is only watched."""

LATE: Final = MICRO
"""Microseconds that an event may come after later ones: a thread that read the time and then waited for the lock."""


class State(ABC, Generic[LotT]):
    """Something that can be in the way: a pool, a node or a meter.

    `lot` is where the gate parks those who wait for it; the ledger itself never looks into it.
    """

    __slots__ = ("key", "lot")

    def __init__(self, key: str) -> None:
        self.key = key
        self.lot: LotT | None = None

    @abstractmethod
    def fits(self, need: int, priority: int, loan: Loan[LotT] | None = None) -> bool:
        """Could so much be taken now, with what may be borrowed? `need` is permits of a pool, a mode of a node."""

    @abstractmethod
    def barred(self, need: int, priority: int) -> bool:
        """Would orphans alone be in the way of so much, when all others had let go?"""


class Pool(State[LotT]):
    """A concurrency limit.

    Args:
        key: unique in the ledger, for example `pool:crm`.
        label: what people are shown, for example `pool crm`.
        limit: permits, at least 1.
        reserve: permits kept for asks of a priority above 0; below the limit.
        scope: whom it counts for: "process", "run" or "tenant".
        enforced: False for a limit that is only watched: what is held may go past it.

    Attributes:
        declared: the limit as it was given, or last changed.
        ceiling: the most that may be held. Above the limit only after it was lowered, until what was held has come
            down to it.
        held: permits taken.
        peak: the most that were ever held.
        orphaned: permits held by orphans, counted in `held` too.
    """

    __slots__ = ("__weakref__", "ceiling", "declared", "held", "label", "limit", "orphaned", "peak", "reserve", "scope")

    def __init__(
        self, key: str, label: str, limit: int, *, reserve: int = 0, scope: str = "process", enforced: bool = True
    ) -> None:
        super().__init__(key)
        self.label = label
        self.declared = limit
        self.limit = self.ceiling = limit if enforced else UNLIMITED
        self.reserve = reserve
        self.scope = scope
        self.held = 0
        self.peak = 0
        self.orphaned = 0

    def anew(self) -> Pool[LotT]:
        """The same limit with nothing held."""
        enforced = self.limit != UNLIMITED
        return Pool(self.key, self.label, self.declared, reserve=self.reserve, scope=self.scope, enforced=enforced)

    def room(self, priority: int) -> int:
        """Permits that a call of that priority may ever have."""
        return self.limit if priority > 0 else self.limit - self.reserve

    def fits(self, need: int, priority: int, loan: Loan[LotT] | None = None) -> bool:
        """Are so many permits free for that priority, or lent?"""
        if loan is not None:
            need = max(0, need - loan.free(self))
        return not need or self.held + need <= (self.limit if priority > 0 else self.limit - self.reserve)

    def barred(self, need: int, priority: int) -> bool:
        """Do orphans leave less than so many permits?"""
        return self.orphaned + need > self.room(priority)

    def __repr__(self) -> str:
        return f"Pool({self.key!r}, {self.held} of {self.limit} held)"


class Node(State[LotT]):
    """A resource node: how many hold it in each mode, and how many of them are nested calls."""

    __slots__ = ("counts", "nested", "orphaned")

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.counts = [0, 0, 0, 0]
        self.nested = 0
        self.orphaned: list[int] | None = None

    def fits(self, need: int, priority: int = 0, loan: Loan[LotT] | None = None) -> bool:
        """May one more hold it in that mode?"""
        return _compatible(self.counts if loan is None else loan.less(self), need)

    def barred(self, need: int, priority: int = 0) -> bool:
        """Does an orphan hold it in a mode that conflicts?"""
        return self.orphaned is not None and not _compatible(self.orphaned, need)

    @property
    def idle(self) -> bool:
        """Nobody holds it."""
        return not any(self.counts)

    def __repr__(self) -> str:
        return f"Node(IS={self.counts[0]}, IX={self.counts[1]}, S={self.counts[2]}, X={self.counts[3]})"


class Moment:
    """The instant of the event that is dealt with, for all meters and breakers of one ledger.

    Attributes:
        us: in whole microseconds.
    """

    __slots__ = ("us",)

    def __init__(self) -> None:
        self.us = -NEVER


class Meter(State[LotT]):
    """A rate limit.

    Args:
        key: unique in the ledger, for example `rate:tool:search`.
        label: what people are shown, for example `rate of tool search`.
        pace: the rule.
        scope: whom it counts for: "process", "run" or "tenant".
        enforced: False for a rate that is only watched: it holds nobody back.

    Attributes:
        alarm: the instant, in microseconds, at which to look at those who wait for it, as far as that is arranged.
        serial: how many were let in, all told.
    """

    __slots__ = ("__weakref__", "_moment", "alarm", "enforced", "label", "pace", "scope", "serial")

    def __init__(self, key: str, label: str, pace: Pace, *, scope: str = "process", enforced: bool = True) -> None:
        super().__init__(key)
        self.label = label
        self.pace = pace
        self.scope = scope
        self.enforced = enforced
        self.alarm = NEVER
        self.serial = 0
        self._moment = Moment()

    def anew(self) -> Meter[LotT]:
        """The same rate of which nothing is used up."""
        return Meter(self.key, self.label, make(self.pace.numbers), scope=self.scope, enforced=self.enforced)

    def read(self, moment: Moment) -> None:
        """It goes by that time from now on."""
        self._moment = moment

    def free_at(self, priority: int, kept: int = 0) -> int:
        """When a call of that priority may start by this rate, in microseconds; `kept`: so many starts are others'."""
        return self.pace.free_at(self._moment.us, high=priority > 0, kept=kept)

    @property
    def instant(self) -> int:
        """The present instant in microseconds."""
        return self._moment.us

    def fits(self, need: int, priority: int, loan: Loan[LotT] | None = None) -> bool:
        """May one more start? A start cannot be lent."""
        return not self.enforced or self.free_at(priority) <= self._moment.us

    def barred(self, need: int, priority: int) -> bool:
        """Only time gives starts: nobody is to be held back for somebody who waits for them."""
        return True

    def seconds_left(self, priority: int) -> float:
        """How long it is at least until a call of that priority may start."""
        return self.pace.free_in(self._moment.us, high=priority > 0) / MICRO

    def __repr__(self) -> str:
        return f"Meter({self.key!r}, {self.pace!r})"


class Fuse:
    """A circuit breaker under its name.

    Args:
        key: unique in the ledger, for example `breaker:tool:search`.
        label: what people are shown, for example `circuit breaker of tool search`.
        circuit: its state.
        scope: whom it counts for.
    """

    __slots__ = ("circuit", "key", "label", "scope")

    def __init__(self, key: str, label: str, circuit: Circuit, scope: str = "process") -> None:
        self.key = key
        self.label = label
        self.circuit = circuit
        self.scope = scope

    def anew(self) -> Fuse:
        """The same breaker, closed."""
        return Fuse(self.key, self.label, Circuit(*self.circuit.numbers), self.scope)

    def __repr__(self) -> str:
        return f"Fuse({self.key!r}, {self.circuit!r})"


class Marks(Generic[LotT]):
    """What a granted call has of meters and breakers, until it is known what became of it.

    Attributes:
        begun: its first line was reached.
    """

    __slots__ = ("begun", "fuses", "meters")

    def __init__(self, meters: tuple[tuple[Meter[LotT], int], ...], fuses: tuple[tuple[Fuse, int], ...]) -> None:
        self.meters = meters
        self.fuses = fuses
        self.begun = False


def _compatible(counts: list[int], mode: int) -> bool:
    compatible = COMPATIBLE[mode]
    return not (
        (counts[0] and not compatible[0])
        or (counts[1] and not compatible[1])
        or (counts[2] and not compatible[2])
        or counts[X]
    )


class Loan(Generic[LotT]):
    """What a running call lends to the calls that it waits for.

    Args:
        wants: what the lender holds.
        above: the loan that it lives on itself, or None.

    Attributes:
        lent: permits that are with a borrower now, by pool.
        out: calls at work below it, at any depth.
        waits: batches of nested calls that the lender waits for.
        gone: its own work has ended; what it holds goes back with the last borrower.
        over: it went back.
    """

    __slots__ = ("above", "gone", "holds", "lent", "out", "over", "units", "waits")

    def __init__(self, wants: Wants[LotT], above: Loan[LotT] | None) -> None:
        self.above = above
        self.units = dict(wants.pools)
        self.holds = dict(wants.holds)
        self.lent: dict[Pool[LotT], int] = {}
        self.out = 0
        self.waits = 0
        self.gone = False
        self.over = False

    def chain(self) -> Iterator[Loan[LotT]]:
        """This loan and those above it, nearest first."""
        loan: Loan[LotT] | None = self
        while loan is not None:
            yield loan
            loan = loan.above

    def most(self, pool: Pool[LotT]) -> int:
        """Permits of a pool that may ever be borrowed at once."""
        return sum(loan.units.get(pool, 0) for loan in self.chain() if not loan.over)

    def free(self, pool: Pool[LotT]) -> int:
        """Permits of a pool that may be borrowed now."""
        return sum(loan.units.get(pool, 0) - loan.lent.get(pool, 0) for loan in self.chain() if not loan.over)

    def less(self, node: Node[LotT]) -> list[int]:
        """Who holds a node, not counting the lenders."""
        counts = list(node.counts)
        for loan in self.chain():
            mode = loan.holds.get(node.key)
            if mode is not None and not loan.over:
                counts[mode] -= 1
        return counts

    def __repr__(self) -> str:
        return f"Loan({self.waits} batches, {self.out} calls below)"


class Wants(Ask, Generic[LotT]):
    """An ask whose pools have been looked up, ready to be claimed again and again.

    Attributes:
        pools: (pool, permits) pairs. Asks that share the very tuple are of one tool and one run, and differ in what
            they hold alone.
        pool_states: the pools alone.
        weight: what it costs its run's fair share: its permits of the first pool.
        loan: what the call that waits for it lends to it; None for a call that nobody waits for. Then these wants are
            of that one call alone.
        borrowed: what it has borrowed, while it runs.
        meters: the rate limits in which its start counts.
        fuses: the circuit breakers that it goes through.
        marked: there is one of either.
    """

    __slots__ = ("borrowed", "fuses", "loan", "marked", "meters", "pool_states", "pools", "weight")

    pools: tuple[tuple[Pool[LotT], int], ...]
    meters: tuple[Meter[LotT], ...]
    fuses: tuple[Fuse, ...]
    marked: bool
    pool_states: tuple[State[LotT], ...]
    weight: int
    loan: Loan[LotT] | None
    borrowed: list[tuple[Loan[LotT], Pool[LotT], int]]


class Ledger(Generic[LotT]):
    """Who holds how much, in this process.

    Attributes:
        uneven: what one gives back need not fit the next who wants the same.
        timed: there are meters or breakers, so it is to be told the time.
    """

    __slots__ = ("_dropped", "_fuses", "_meters", "_moment", "_nodes", "_pools", "timed", "uneven")

    def __init__(self) -> None:
        self.timed = False
        self._moment = Moment()
        self._meters: dict[str, Meter[LotT]] = {}
        self._fuses: dict[str, Fuse] = {}
        # More may be held than some of those who wait could have: a limit was lowered, or a part is in reserve.
        self.uneven = False
        self._pools: dict[str, Pool[LotT]] = {}
        self._dropped: WeakValueDictionary[str, Pool[LotT]] = WeakValueDictionary()
        self._nodes: dict[str, Node[LotT]] = {}

    # ------------------------------------------------------------------ pools and nodes

    @property
    def pools(self) -> Mapping[str, Pool[LotT]]:
        """Every pool by its key."""
        return self._pools

    def add_pool(self, pool: Pool[LotT]) -> Pool[LotT]:
        """Add a pool, or return the one that has its key."""
        self.uneven = self.uneven or pool.reserve > 0
        return self._pools.setdefault(pool.key, pool)

    def drop_pool(self, key: str) -> bool:
        """Forget a pool that nobody holds and nobody waits for; say whether it is gone."""
        pool = self._pools.get(key)
        if pool is None:
            return True
        if pool.held or pool.lot is not None:
            return False
        self._dropped[key] = self._pools.pop(key)
        return True

    def bring_back(self, key: str) -> Pool[LotT] | None:
        """A pool that was forgotten and that asks not yet claimed still name, or None: two pools of one key would
        count apart.
        """
        pool = self._dropped.pop(key, None)
        return None if pool is None else self.add_pool(pool)

    # ------------------------------------------------------------------ meters and breakers

    @property
    def meters(self) -> Mapping[str, Meter[LotT]]:
        """Every rate limit by its key."""
        return self._meters

    @property
    def fuses(self) -> Mapping[str, Fuse]:
        """Every circuit breaker by its key."""
        return self._fuses

    @property
    def instant(self) -> int:
        """The instant of the event that is dealt with, in microseconds."""
        return self._moment.us

    def add_meter(self, meter: Meter[LotT]) -> Meter[LotT]:
        """Add a rate limit, or return the one that has its key."""
        self.timed = True
        meter.read(self._moment)
        return self._meters.setdefault(meter.key, meter)

    def add_fuse(self, fuse: Fuse) -> Fuse:
        """Add a circuit breaker, or return the one that has its key."""
        self.timed = True
        return self._fuses.setdefault(fuse.key, fuse)

    def drop_meter(self, key: str, *, for_good: bool = False) -> bool:
        """Forget a rate limit that nobody waits for and that remembers nothing; say whether it is gone.

        `for_good`: what it remembers concerns nobody any more.
        """
        meter = self._meters.get(key)
        if meter is not None:
            rested = not meter.pace.pending if for_good else meter.pace.rested(self._moment.us)
            if meter.lot is not None or not rested:
                return False
        self._meters.pop(key, None)
        return True

    def drop_fuse(self, key: str, *, for_good: bool = False) -> bool:
        """Forget a circuit breaker that remembers nothing; say whether it is gone. `for_good` as above."""
        fuse = self._fuses.get(key)
        if fuse is not None and not for_good and not fuse.circuit.rested(self._moment.us):
            return False
        self._fuses.pop(key, None)
        return True

    def at(self, now: float) -> int:
        """An event comes at this instant, in seconds. Returns by how many microseconds the clock was set, usually 0.

        An event that comes a little late is taken to come now: what has started since then stays as late as it was. A
        clock that goes back by more has been set: what was a moment ago stays a moment ago, so that nobody is locked
        out until it has caught up, and nobody is let in for it.
        """
        us, moment = micros(now), self._moment
        by = 0
        if us < moment.us:
            if us >= moment.us - LATE:
                return 0
            by = us - moment.us
            for meter in self._meters.values():
                meter.pace.shift(by)
            for fuse in self._fuses.values():
                fuse.circuit.shift(by)
        moment.us = us
        return by

    def set_pace(self, meter: Meter[LotT], numbers: Numbers | None) -> None:
        """Change a rate: limit, period, burst, reserve; None: no limit. What has started stays started."""
        meter.pace = meter.pace.changed(self._moment.us, numbers)

    def shut(self, wants: Wants[LotT]) -> Fuse | None:
        """The first breaker that does not let the call through, or None."""
        us = self._moment.us
        for fuse in wants.fuses:
            if not fuse.circuit.lets(us):
                fuse.circuit.refused += 1
                return fuse
        return None

    def let_in(self, wants: Wants[LotT]) -> Marks[LotT]:
        """Take what only time gives back, together with what `take` takes."""
        us = self._moment.us
        meters: list[tuple[Meter[LotT], int]] = []
        for meter in wants.meters:
            meter.pace.let_in(us)
            meter.serial += 1
            meters.append((meter, meter.serial))
        return Marks(tuple(meters), tuple((fuse, fuse.circuit.go()) for fuse in wants.fuses))

    def begun(self, marks: Marks[LotT], now: float) -> None:
        """The call reaches its first line at this instant, in seconds. That is no event: nobody is looked at for it."""
        marks.begun = True
        us = max(micros(now), self._moment.us)
        for meter, _ in marks.meters:
            meter.pace.begun(us)

    def take_back(self, marks: Marks[LotT]) -> None:
        """The call will not begin: its starts are free again, as far as the rule allows (S7)."""
        for meter, serial in marks.meters:
            meter.pace.take_back(self._moment.us, newest=serial == meter.serial)

    def verdict(self, marks: Marks[LotT], verdict: Verdict) -> list[Fuse]:
        """How the call came back; returns the breakers that have opened by that. It is heard once."""
        fuses, marks.fuses = marks.fuses, ()
        return [fuse for fuse, generation in fuses if fuse.circuit.back(generation, verdict, self._moment.us)]

    def reopens(self, fuse: Fuse) -> float | None:
        """Seconds after which a breaker lets somebody through again; None: when its probes have come back."""
        left = fuse.circuit.retry_after(self._moment.us)
        return left / MICRO if left else None

    # ------------------------------------------------------------------ asks

    def look_up(self, wants: Wants[LotT]) -> Wants[LotT]:
        """Bind an ask to this ledger's pools, meters and breakers.

        Raises:
            KeyError: it names one that does not exist.
        """
        wants.meters = tuple(self._meters[key] for key in wants.rates)
        wants.fuses = tuple(self._fuses[key] for key in wants.breakers)
        wants.marked = bool(wants.meters or wants.fuses)
        wants.pools = tuple((self._pools[key], units) for key, units in wants.permits)
        wants.pool_states = tuple(pool for pool, _ in wants.pools)
        wants.weight = wants.permits[0][1] if wants.permits else 1
        wants.loan = None
        return wants

    def hopeless(self, wants: Wants[LotT]) -> Pool[LotT] | None:
        """A pool that can never serve an ask, whoever gives back, or None."""
        priority, loan = wants.priority, wants.loan
        for pool, units in wants.pools:
            if units > (pool.limit if priority > 0 else pool.limit - pool.reserve) and (
                loan is None or units > loan.most(pool)
            ):
                return pool
        return None

    def set_limit(self, pool: Pool[LotT], limit: int, reserve: int = 0, *, enforced: bool = True) -> None:
        """Change a limit. What is held stays held, also above a lower one."""
        pool.declared = limit
        pool.limit = limit if enforced else UNLIMITED
        pool.reserve = reserve
        pool.ceiling = max(pool.limit, pool.held)
        self.uneven = self.uneven or pool.held > pool.limit or reserve > 0

    def states(self, wants: Wants[LotT]) -> tuple[State[LotT], ...]:
        """Everything that an ask touches and that exists now."""
        if not wants.holds:
            return wants.pool_states
        nodes = self._nodes
        return wants.pool_states + tuple(nodes[key] for key, _ in wants.holds if key in nodes)

    def node(self, key: str) -> Node[LotT] | None:
        """The node of a flat key, if somebody holds it or waits for it."""
        return self._nodes.get(key)

    def node_for(self, key: str) -> Node[LotT]:
        """The node of a flat key, made when there is none."""
        node = self._nodes.get(key)
        if node is None:
            node = self._nodes[key] = Node(key)
        return node

    def states_with_lots(self) -> list[State[LotT]]:
        """Every pool, node and meter for which somebody waits."""
        found: list[State[LotT]] = [pool for pool in self._pools.values() if pool.lot is not None]
        found += [node for node in self._nodes.values() if node.lot is not None]
        found += [meter for meter in self._meters.values() if meter.lot is not None]
        return found

    def sweep(self, state: State[LotT]) -> None:
        """Forget a node that nobody holds and nobody waits for any more."""
        if isinstance(state, Node) and state.lot is None and state.idle and self._nodes.get(state.key) is state:
            del self._nodes[state.key]

    def count_in(self, pool: Pool[LotT], units: int) -> None:
        """Somebody at work holds so many permits of a limit that is new, whether they fit or not."""
        pool.held += units
        pool.peak = max(pool.peak, pool.held)
        pool.ceiling = max(pool.ceiling, pool.held)
        self.uneven = self.uneven or pool.held > pool.limit

    # ------------------------------------------------------------------ taking and giving

    def blocker(self, wants: Wants[LotT]) -> State[LotT] | None:
        """The first thing in the way, or None if all of it is free now."""
        priority = wants.priority
        for pool, units in wants.pools:
            if pool.held + units > (pool.limit if priority > 0 else pool.limit - pool.reserve) and (
                wants.loan is None or not pool.fits(units, priority, wants.loan)
            ):
                return pool
        nodes = self._nodes
        for key, mode in wants.holds:
            node = nodes.get(key)
            if (
                node is not None
                and not _compatible(node.counts, mode)
                and (wants.loan is None or not node.fits(mode, 0, wants.loan))
            ):
                return node
        for meter in wants.meters:  # last, so that only those wait for time alone who have everything else
            if not meter.fits(1, priority):
                return meter
        return None

    def limit_in_the_way(self, wants: Wants[LotT]) -> State[LotT] | None:
        """The first limit in the way, whatever happens to resources, or None."""
        for pool, units in wants.pools:
            if not pool.fits(units, wants.priority, wants.loan):
                return pool
        return next((meter for meter in wants.meters if not meter.fits(1, wants.priority)), None)

    def claim(self, wants: Wants[LotT]) -> State[LotT] | None:
        """Take all of it and return None, or take nothing and return the first thing in the way."""
        blocker = self.blocker(wants)
        if blocker is None:
            self.take(wants)
        return blocker

    def take(self, wants: Wants[LotT]) -> None:
        """Take what `blocker` has just found free."""
        if wants.loan is not None:
            self._borrow(wants, wants.loan)
            return
        for pool, units in wants.pools:
            held = pool.held = pool.held + units
            if held > pool.peak:
                pool.peak = held
        if wants.holds:
            self.take_holds(wants.holds)

    def _borrow(self, wants: Wants[LotT], loan: Loan[LotT]) -> None:
        """The same for a nested call: of the nearest lender first, and free permits for what nobody lends."""
        borrowed = wants.borrowed = []
        for lender in loan.chain():
            lender.out += 1
        for pool, units in wants.pools:
            for lender in loan.chain():
                free = 0 if lender.over else lender.units.get(pool, 0) - lender.lent.get(pool, 0)
                part = min(units, free)
                if part:
                    lender.lent[pool] = lender.lent.get(pool, 0) + part
                    borrowed.append((lender, pool, part))
                    units -= part
            held = pool.held = pool.held + units
            if held > pool.peak:
                pool.peak = held
        for key, mode in wants.holds:
            node = self.node_for(key)
            node.counts[mode] += 1
            node.nested += 1

    def own(self, wants: Wants[LotT]) -> list[tuple[Pool[LotT], int]]:
        """Permits that a call holds of the pools themselves, less what it has borrowed."""
        if wants.loan is None:
            return list(wants.pools)
        parts = dict(wants.pools)
        for _, pool, part in wants.borrowed:
            parts[pool] -= part
        return list(parts.items())

    def take_holds(self, holds: Iterable[Hold]) -> None:
        """Take the resource part alone."""
        for key, mode in holds:
            self.node_for(key).counts[mode] += 1

    def give(self, wants: Wants[LotT]) -> None:
        """Give all of it back. Whoever calls this makes sure that it is called once for each take."""
        if wants.loan is not None:
            for pool, units in self.own(wants):
                pool.held -= units
            for lender, pool, part in wants.borrowed:
                lender.lent[pool] -= part
            wants.borrowed = []
            for lender in wants.loan.chain():
                lender.out -= 1
            for key, _ in wants.holds:
                self._nodes[key].nested -= 1
            self.give_holds(wants.holds)
            return
        for pool, units in wants.pools:
            pool.held -= units
        if wants.holds:
            self.give_holds(wants.holds)

    def give_holds(self, holds: Iterable[Hold]) -> None:
        """Give the resource part alone back."""
        nodes = self._nodes
        for key, mode in holds:
            node = nodes[key]
            node.counts[mode] -= 1
            if node.lot is None and node.idle:
                del nodes[key]

    def open(self, holds: Iterable[Hold]) -> bool:
        """Is nothing in the way of the resource part?"""
        nodes = self._nodes
        for key, mode in holds:
            node = nodes.get(key)
            if node is not None and not _compatible(node.counts, mode):
                return False
        return True

    def mark_orphan(self, wants: Wants[LotT], step: int) -> None:
        """What a running call holds is held by an orphan from now on (+1), or no longer (-1)."""
        for pool, units in wants.pools if wants.loan is None else self.own(wants):
            pool.orphaned += step * units
        for key, mode in wants.holds:
            node = self._nodes[key]
            if node.orphaned is None:
                node.orphaned = [0, 0, 0, 0]
            node.orphaned[mode] += step

    # ------------------------------------------------------------------ looking in

    def label(self, state: State[LotT], wants: Ask) -> str:
        """What a person is shown for something in the way: `pool crm`, `resource file:{path}`; never a key."""
        if isinstance(state, Pool | Meter):
            return state.label
        assert isinstance(state, Node)
        return f"resource {wants.labels.get(state.key, 'shared by others')}"

    def counts(self) -> tuple[int, int]:
        """Permits held over all pools; nodes held."""
        return sum(pool.held for pool in self._pools.values()), sum(not node.idle for node in self._nodes.values())

    def validate(self, parked: Callable[[LotT], int] | None = None) -> None:
        """Raise AssertionError when what is held breaks a limit or a mode, or is remembered for nothing.

        Args:
            parked: says how many stand in a lot; without it lots are not looked at.
        """
        for pool in self._pools.values():
            assert pool.held >= 0, f"{pool} holds less than nothing"
            pool.ceiling = max(pool.limit, min(pool.ceiling, pool.held))
            assert pool.held <= pool.ceiling, f"{pool} is over its limit"
            assert 0 <= pool.orphaned <= pool.held, f"{pool} has {pool.orphaned} permits with orphans"
        for meter in self._meters.values():
            if meter.enforced:
                meter.pace.validate(self._moment.us)
        for fuse in self._fuses.values():
            fuse.circuit.validate()
        for node in self._nodes.values():
            held = [mode for mode in range(4) if node.counts[mode]]
            orphaned = node.orphaned or [0, 0, 0, 0]
            assert min(node.counts) >= 0, f"{node} holds less than nothing"
            if not node.nested:  # or some of them may hold it by leave of others; who may is known above (gate)
                assert node.counts[X] <= 1, f"{node} is held for writing twice"
                fit = all(COMPATIBLE[a][b] for a in held for b in held if a != b)
                assert fit, f"{node} is held in modes that conflict"
            assert 0 <= node.nested <= sum(node.counts), f"{node} miscounts nested calls"
            assert all(0 <= a <= b for a, b in zip(orphaned, node.counts, strict=True)), f"{node} miscounts orphans"
            assert held or node.lot is not None, f"{node} is idle and was not forgotten"
            assert parked is None or node.lot is None or parked(node.lot), f"{node} keeps an empty lot"

    def __repr__(self) -> str:
        permits, nodes = self.counts()
        return f"Ledger({len(self._pools)} pools, {permits} permits held, {nodes} resource nodes held)"
