"""Where calls wait: entries, runs, lots, and the instants at which a wait is over.

Theory. Whoever cannot start is parked in the lot of one state (a pool or a resource node) that is in its way, in the
bay of those who need the same of it: they fit or do not fit together. What one run has in one bay is a line: some of
its entries are parked, the calls behind them are its backlog. A line keeps its bay alive, a bay its lot, and a lot
its node; when the line ends, all that is not needed by others goes.

A batch of thousands stands in a backlog as rows: from which call to which. Only those whose turn is near are there as
offers of their own.

A bay keeps its waiters in a heap of ranks. Whoever leaves does not search the heap: its rank is stale from then on,
and stale ranks are dropped when they come to the top or outnumber the others. Deadlines are kept the same way: a
first-in-first-out lane for each length of wait, since those who come later are due later, and a heap for the rest.

House rules. Nothing is decided here. Nothing is kept of one who has left: a rank points to its entry and the entry to
its rank, so the tie is cut when it leaves.

Not here: the books of those who wait (waiting), who goes first (turns), what is held (ledger).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from typing import Final, Generic, Literal, Protocol, TypeVar

from towerman.breaker import Verdict
from towerman.calls import Rejection
from towerman.errors import Code
from towerman.ledger import Loan, Meter, Node, Pool, State, Wants
from towerman.rates import MICRO
from towerman.rates import NEVER as RATE_NEVER

OwnerT = TypeVar("OwnerT")

PARKED: Final = 1
GRANTED: Final = 2
REJECTED: Final = 3
DONE: Final = 4
Status = Literal[1, 2, 3, 4]

NEVER: Final = float("inf")

SLACK: Final = 64
"""Stale records that are not worth a clean-up."""

NEAR: Final = 32
"""How many calls of a row become offers at a time."""

DEADLINE: Final[tuple[Code, str]] = ("deadline_exceeded", "run deadline")
"""What is told of a run of which nothing may start any more, unless something else is."""

Away = Literal[0, 1, 2]
"""Where it is decided whether somebody may go on: here; at the engine; at the engine, which is not reached."""

HERE: Final = 0
ELSEWHERE: Final = 1
UNREACHED: Final = 2

ENGINE: Final = "engine"
"""What people are shown of a wait for an engine that is not reached."""

Need = tuple[int, bool, "Loan[Lot[OwnerT]] | None", Away]
"""What of a state is needed: (permits, may use the reserve, on what loan) of a pool, (mode, False, loan) of a node, (1,
may use the reserve, None) of a meter; and where that is decided.
"""

Rank = tuple[int, float, float, int, "Entry[OwnerT]"]
"""(class with its sign turned, order of promotion or NEVER, start tag, number, entry); the least goes first."""

Urgency = tuple[object, ...]
"""What orders the calls of one run: longest remaining path first, as the plan tells it; least goes first. Only ever
compared.
"""

Offer = tuple[Wants["Lot[OwnerT]"], OwnerT, float]
"""A ready call that is no entry yet: what it wants, its owner, the instant it was offered."""


Kind = tuple[int, str | None]
"""Whose limits are the same ones: the very pools, or the loan and the tool."""


def kind_of(wants: Wants[Lot[OwnerT]]) -> Kind:
    """Those of one tool and one run, or of one tool below one call, are alike but for what they hold."""
    return (id(wants.pools), None) if wants.loan is None else (id(wants.loan), wants.tool)


class There(Protocol):
    """What a call has, or waits for, at the engine that processes share. None of this waits, or raises."""

    @property
    def unreached(self) -> bool:
        """The engine does not answer."""
        ...  # pragma: no cover - a protocol has no body

    @property
    def fence(self) -> int | None:
        """Greater than that of every earlier grant of the engine; None without one."""
        ...  # pragma: no cover - a protocol has no body

    def begun(self) -> None:
        """Its first line is next; from any thread."""
        ...  # pragma: no cover - a protocol has no body

    def over(self) -> None:
        """It has ended, or does not start: what it has there goes back. Any number of times, from any thread."""
        ...  # pragma: no cover - a protocol has no body

    def orphaned(self) -> None:
        """Its work goes on after its result was sealed."""
        ...  # pragma: no cover - a protocol has no body

    def told(self, verdict: Verdict) -> None:
        """How it came back, for its breakers."""
        ...  # pragma: no cover - a protocol has no body


class Entry(Generic[OwnerT]):
    """One ready call in the gate, from the moment it is handed in to its release; its identity for life.

    Attributes:
        wants: what it needs, all at once.
        owner: whatever the shell knows it by; never looked at here.
        flow: the run it belongs to.
        status: PARKED, GRANTED, REJECTED or DONE.
        since: the instant it was handed in, or from which it waits behind one that waited in vain.
        orphan: its result was sealed while its work goes on.
        loan: what it lends to calls that it waits for, or has waited for; None for nothing.
        there: what it has, or waits for, at the engine; None for nothing.
        watched: the end of its wait is on record, perhaps from when it was parked before.
        rejection: why not, once it is rejected.
        blocked_by: what it was parked for, first to last, as people are shown it.
    """

    __slots__ = (
        "blocked_by",
        "clock",
        "deadline",
        "flow",
        "line",
        "loan",
        "orphan",
        "owner",
        "passes",
        "queued",
        "rank",
        "rejection",
        "since",
        "status",
        "there",
        "wants",
        "watched",
    )

    def __init__(
        self, wants: Wants[Lot[OwnerT]], owner: OwnerT, flow: Flow[OwnerT], since: float, status: Status
    ) -> None:
        self.wants = wants
        self.owner = owner
        self.flow = flow
        self.since = since
        self.status: Status = status
        self.orphan = False
        self.loan: Loan[Lot[OwnerT]] | None = None
        self.there: There | None = None
        self.watched = False
        self.blocked_by: tuple[str, ...] = ()
        self.rank: Rank[OwnerT] | None = None

    # Set while it is parked.
    line: Line[OwnerT]
    clock: float  # the instant from which its wait counts; NEVER while it waits for its own siblings
    deadline: float  # when to look whether its wait is over
    passes: int  # less what its bay had counted before it came
    queued: bool  # counted against the bounds of its queues
    # Set once it is rejected.
    rejection: Rejection

    @property
    def promoted(self) -> bool:
        """It has waited its share and goes before the unpromoted of its class."""
        return self.rank is not None and self.rank[1] != NEVER

    def __repr__(self) -> str:
        word = ("", "parked", "granted", "rejected", "done")[self.status]
        return f"Entry({self.wants.tool!r} of run {self.wants.run}, {word})"


class Source(Protocol[OwnerT]):
    """Where calls come from that are offered in a row: a batch."""

    @property
    def wants(self) -> Sequence[Wants[Lot[OwnerT]] | None]:
        """What each call wants, by index; None, then or later, for one that is not to start."""
        ...  # pragma: no cover - a protocol has no body

    def owner(self, index: int) -> OwnerT:
        """Whatever that call is known by."""
        ...  # pragma: no cover - a protocol has no body


class Row(Generic[OwnerT]):
    """Calls of one source that stand in a backlog one after the other: those from `first` on, before `stop`."""

    __slots__ = ("first", "ready", "source", "stop")

    def __init__(self, source: Source[OwnerT], first: int, stop: int, ready: float) -> None:
        self.source = source
        self.first = first
        self.stop = stop
        self.ready = ready

    def offers(self, stop: int) -> list[Offer[OwnerT]]:
        """Those before `stop`, less those that are not to start any more."""
        owner, ready = self.source.owner, self.ready
        wants = self.source.wants[self.first : stop]
        return [(one, owner(index), ready) for index, one in enumerate(wants, self.first) if one is not None]


class Backlog(deque[Offer[OwnerT]]):
    """Ready calls that stand behind parked ones, in order: the next of them, and rows of those behind.

    While there are rows it is not empty, so it can be asked like any deque whether somebody is there, and who is next.

    Attributes:
        rows: those behind who are no offers yet.
        kinds: one of each kind of those who have come here, whether it is still here or not.
        since: the instant until which all of them have had nothing but siblings before them.
        ordered: they stand by urgency, and there are no rows.
    """

    __slots__ = ("kinds", "ordered", "rows", "since")

    def __init__(self, offers: Iterable[Offer[OwnerT]] = (), since: float = -NEVER) -> None:
        super().__init__(offers)
        self.rows: list[Row[OwnerT]] = []
        self.ordered = not self
        self.since = since
        self.kinds: dict[Kind, Wants[Lot[OwnerT]]] = {kind_of(one[0]): one[0] for one in self}

    def note(self, wants: Wants[Lot[OwnerT]]) -> None:
        """One who wants this comes here; not needed for the next of a kind that was noted."""
        self.kinds.setdefault(kind_of(wants), wants)

    def insert(self, place: int, one: Offer[OwnerT]) -> None:
        """One comes in between."""
        self.note(one[0])
        super().insert(place, one)

    def next(self) -> Offer[OwnerT]:
        """Take out the first."""
        one = self.popleft()
        if not self:
            self.come_near()
        return one

    def come_near(self) -> None:
        """After the last offer was taken out: the next of a row become offers."""
        while self.rows and not self:
            row = self.rows[0]
            near = min(row.first + NEAR, row.stop)
            self.extend(row.offers(near))
            row.first = near
            if near == row.stop:
                del self.rows[0]

    def add(self, row: Row[OwnerT]) -> None:
        """The calls of a row come last."""
        self.ordered = False
        self.rows.append(row)
        if not self:
            self.come_near()

    def everyone(self) -> Iterator[Offer[OwnerT]]:
        """Each of them, as an offer."""
        yield from self
        for row in self.rows:
            yield from row.offers(row.stop)

    def take_out(self, gone: Callable[[OwnerT], bool]) -> list[OwnerT]:
        """Take out those of certain owners, and return these."""
        near, rows, self.rows = list(self), self.rows, []
        self.clear()
        out: list[OwnerT] = []
        for one in near:
            if gone(one[1]):
                out.append(one[1])
            else:
                self.append(one)
        for row in rows:
            some = [*filter(gone, map(row.source.owner, range(row.first, row.stop)))]
            if not some:
                self.add(row)
            elif len(some) < row.stop - row.first:
                self.spread()
                self.extend(one for one in row.offers(row.stop) if not gone(one[1]))
            out += some
        return out

    def spread(self) -> None:
        """Make every row offers, so that others can come among and behind them."""
        for row in self.rows:
            self.extend(row.offers(row.stop))
        self.rows.clear()

    @property
    def size(self) -> int:
        """How many stand here, in rows too."""
        return len(self) + sum(row.stop - row.first for row in self.rows)


class Line(Generic[OwnerT]):
    """What one run has in one bay.

    Attributes:
        bay: where.
        parked: its entries there, as they came.
        standing: how many of them wait for their own siblings, so that their clocks stand.
        backlog: ready calls that wait behind them, unclocked; None for none.
        freed: when the run last let go of the state while it had this line.
    """

    __slots__ = ("backlog", "bay", "freed", "parked", "standing")

    def __init__(self, bay: Bay[OwnerT]) -> None:
        self.bay = bay
        self.parked: dict[Entry[OwnerT], None] = {}
        self.standing = 0
        self.backlog: Backlog[OwnerT] | None = None
        self.freed = -NEVER

    def behind(self, one: Offer[OwnerT]) -> Backlog[OwnerT]:
        """Add a call to the backlog, and return that."""
        backlog = self.backlog
        if backlog is None:
            backlog = self.backlog = Backlog()
        elif backlog.rows:
            backlog.spread()
        backlog.note(one[0])
        backlog.append(one)
        backlog.ordered = False
        return backlog

    def behind_in_row(self, row: Row[OwnerT]) -> None:
        """Add a row of calls to the backlog."""
        if self.backlog is None:
            self.backlog = Backlog()
        wants = row.source.wants[row.first]
        assert wants is not None, "a row begins with one that is to start"
        self.backlog.note(wants)
        self.backlog.add(row)


class Flow(Generic[OwnerT]):
    """The calls of one run, as the gate sees them.

    Attributes:
        number: the run's number.
        window: how many of its calls may run at once.
        limit: the instant after which none of its calls may start.
        over: the code with which they are refused then, and what has passed, as people are shown it.
        tag: the start tag of its next entry, if what is being served has not gone past it.
        running: granted entries whose results are not sealed.
        lines: what waits of it, by bay.
        parked_total: how many of its entries are parked.
        away: how many of its lines wait for the engine.
        timed: whether its limit is being watched.
        urgent: its calls go by their urgency, not as they came.
        closed: it will offer nothing more.
    """

    __slots__ = (
        "away",
        "closed",
        "limit",
        "lines",
        "number",
        "over",
        "parked_total",
        "running",
        "tag",
        "timed",
        "urgent",
        "window",
    )

    def __init__(self, number: int, window: int, limit: float, tag: float, over: tuple[Code, str] = DEADLINE) -> None:
        self.number = number
        self.window = window
        self.limit = limit
        self.over = over
        self.tag = tag
        self.running: dict[Entry[OwnerT], None] = {}
        self.lines: dict[Bay[OwnerT], Line[OwnerT]] = {}
        self.parked_total = 0
        self.away = 0
        self.timed = False
        self.urgent = False
        self.closed = False

    def holds(self, state: State[Lot[OwnerT]], loan: Loan[Lot[OwnerT]] | None = None) -> bool:
        """Does a running call of this flow hold some of it, one that does not lend it on that loan?"""
        running: Iterable[Entry[OwnerT]] = self.running
        if loan is not None:
            lenders = tuple(loan.chain())
            running = [entry for entry in running if entry.loan not in lenders]
        if isinstance(state, Node):
            key = state.key
            return any(key == held for entry in running for held, _ in entry.wants.holds)
        if isinstance(state, Meter):  # what has started gives nothing back
            return False
        return any(state in entry.wants.pool_states for entry in running)

    def in_turn(self, state: State[Lot[OwnerT]]) -> bool:
        """Is it the run's own pool, full of its own calls? Then even those who refuse to wait are only not yet their
        turn.
        """
        return isinstance(state, Pool) and state.scope == "run" and self.holds(state)

    @property
    def parked(self) -> list[Entry[OwnerT]]:
        """Its parked entries."""
        return [entry for line in self.lines.values() for entry in line.parked]

    @property
    def behind(self) -> int:
        """Calls in the backlog."""
        return sum(line.backlog.size for line in self.lines.values() if line.backlog)

    def __repr__(self) -> str:
        return f"Flow({self.number}, running={len(self.running)}, parked={self.parked_total}, behind={self.behind})"


class Bay(Generic[OwnerT]):
    """Those parked for one state who need the same of it.

    Attributes:
        state: what is in their way.
        need: what of it they need.
        heap: ranks of the unpromoted, some of them stale.
        count: how many are parked, the promoted too.
        lines: how many runs have a line here.
        passes: how often the first of the unpromoted was passed, all told.
    """

    __slots__ = ("count", "heap", "lines", "need", "passes", "state")

    def __init__(self, state: State[Lot[OwnerT]], need: Need[OwnerT]) -> None:
        self.state = state
        self.need = need
        self.heap: list[Rank[OwnerT]] = []
        self.count = 0
        self.lines = 0
        self.passes = 0

    @property
    def fits(self) -> bool:
        """Could the state serve this need now? Where the engine decides, no change here can."""
        need, high, loan, away = self.need
        return not away and self.state.fits(need, high, loan)

    @property
    def barred(self) -> bool:
        """Would it be in vain to wait until all but orphans have let go?"""
        return bool(self.need[3]) or self.state.barred(self.need[0], self.need[1])

    def head(self) -> Rank[OwnerT] | None:
        """The best rank of the unpromoted."""
        heap = self.heap
        while heap:
            rank = heap[0]
            if rank[4].rank is rank:
                return rank
            heappop(heap)
        return None

    def left(self) -> None:
        """Somebody left: drop the stale ranks when they are the greater part."""
        heap = self.heap
        if not self.count:
            heap.clear()
        elif len(heap) > SLACK and len(heap) > 2 * self.count:
            heap[:] = [rank for rank in heap if rank[4].rank is rank]
            heapify(heap)


class Lot(Generic[OwnerT]):
    """All who are parked for one state: a bay for each need, and the ranks of the promoted ones apart."""

    __slots__ = ("bays", "count", "promoted")

    def __init__(self) -> None:
        self.bays: dict[Need[OwnerT], Bay[OwnerT]] = {}
        self.promoted: list[Rank[OwnerT]] = []
        self.count = 0


class Deadlines(Generic[OwnerT]):
    """When whose wait is over: a record for each parked entry whose clock runs and for each waiting run with a limit.

    A record is stale once its entry is parked no more.
    """

    __slots__ = ("_alarms", "_lanes", "_limits", "_number", "_odd", "records")

    def __init__(self) -> None:
        self._alarms: list[tuple[int, int, Meter[Lot[OwnerT]]]] = []
        self._lanes: dict[float, deque[Entry[OwnerT]]] = {}
        self._odd: list[tuple[float, int, Entry[OwnerT]]] = []
        self._limits: list[tuple[float, int, Flow[OwnerT]]] = []
        self._number = 0
        self.records = 0

    def watch(self, entry: Entry[OwnerT], now: float, parked: int) -> float:
        """The entry's clock runs; returns when to look at it.

        Args:
            entry: parked, without a record.
            now: the present instant.
            parked: how many are parked in all; there are not many more records than that.
        """
        wait = entry.wants.max_wait
        deadline = entry.deadline = entry.clock + wait
        if deadline == NEVER:
            return NEVER
        if self.records > 2 * parked + SLACK:
            self._drop_stale()
        self.records += 1
        entry.watched = True
        if entry.clock == now:
            lane = self._lanes.get(wait)
            if lane is None:
                lane = self._lanes[wait] = deque()
            lane.append(entry)
        else:
            self._number += 1
            heappush(self._odd, (deadline, self._number, entry))
        return deadline

    def watch_limit(self, flow: Flow[OwnerT], flows: int) -> float:
        """Something of the flow waits; returns its limit."""
        flow.timed = True
        limits = self._limits
        if len(limits) > 2 * flows + SLACK:
            limits[:] = [one for one in limits if not one[2].closed]
            heapify(limits)
        self._number += 1
        heappush(limits, (flow.limit, self._number, flow))
        return flow.limit

    def due(self, now: float) -> list[Entry[OwnerT]]:
        """Take out the entries that are to be looked at."""
        found: list[Entry[OwnerT]] = []
        for wait, lane in list(self._lanes.items()):
            while lane and (lane[0].status != PARKED or lane[0].deadline <= now):
                found.append(lane.popleft())
            if not lane:
                del self._lanes[wait]
        odd = self._odd
        while odd and (odd[0][0] <= now or odd[0][2].status != PARKED):
            found.append(heappop(odd)[2])
        self.records -= len(found)
        for entry in found:
            entry.watched = False
        return [entry for entry in found if entry.status == PARKED]

    def over(self, now: float) -> list[Flow[OwnerT]]:
        """Take out the flows whose limit has come."""
        found: list[Flow[OwnerT]] = []
        limits = self._limits
        while limits and (limits[0][0] <= now or limits[0][2].closed):
            flow = heappop(limits)[2]
            flow.timed = False
            found.append(flow)
        return found

    def alarm(self, meter: Meter[Lot[OwnerT]], free_of: Callable[[Bay[OwnerT]], int]) -> float:
        """Somebody waits for a rate: look at it when it is free again; returns that instant.

        Args:
            meter: the rate.
            free_of: when those who wait in a bay may start by it, in microseconds.
        """
        lot = meter.lot
        if lot is None or not lot.count:
            return NEVER
        free = min((free_of(bay) for bay in lot.bays.values() if bay.count and not bay.need[3]), default=RATE_NEVER)
        if free < meter.alarm:
            meter.alarm = free
            self._number += 1
            heappush(self._alarms, (free, self._number, meter))
        return free / MICRO if free < RATE_NEVER else NEVER

    def shift_alarms(self, by: int) -> None:
        """The clock was set by so many microseconds."""
        live = [(instant, number, meter) for instant, number, meter in self._alarms if instant == meter.alarm]
        self._alarms = [(instant + by, number, meter) for instant, number, meter in live]
        for instant, _, meter in self._alarms:
            meter.alarm = instant

    def rates_due(self, now: int) -> list[Meter[Lot[OwnerT]]]:
        """Take out the rates that are to be looked at by this instant, in microseconds."""
        found: list[Meter[Lot[OwnerT]]] = []
        alarms = self._alarms
        while alarms and alarms[0][0] <= now:
            instant, _, meter = heappop(alarms)
            if instant == meter.alarm:
                meter.alarm = RATE_NEVER
                found.append(meter)
        return found

    def first(self) -> float:
        """The next instant at which something is due; after `due` and `over`, exactly."""
        firsts = [lane[0].deadline for lane in self._lanes.values()]
        if self._odd:
            firsts.append(self._odd[0][0])
        if self._limits:
            firsts.append(self._limits[0][0])
        if self._alarms:
            firsts.append(self._alarms[0][0] / MICRO)
        return min(firsts, default=NEVER)

    def clear(self) -> None:
        """Nobody is parked: every record of an entry is stale."""
        for entry in self._recorded():
            entry.watched = False
        self._lanes.clear()
        self._odd.clear()
        self.records = 0

    def _recorded(self) -> Iterator[Entry[OwnerT]]:
        for lane in self._lanes.values():
            yield from lane
        yield from (one[2] for one in self._odd)

    def _drop_stale(self) -> None:
        for entry in self._recorded():
            entry.watched = entry.status == PARKED
        for wait, lane in list(self._lanes.items()):
            self._lanes[wait] = deque(entry for entry in lane if entry.status == PARKED)
            if not self._lanes[wait]:
                del self._lanes[wait]
        self._odd = [one for one in self._odd if one[2].status == PARKED]
        heapify(self._odd)
        self.records = sum(map(len, self._lanes.values())) + len(self._odd)

    def watched(self) -> Iterator[Entry[OwnerT]]:
        """The entries that have a record."""
        return (entry for entry in self._recorded() if entry.status == PARKED)
