"""Who may start now, who waits and for what, who is refused: the state machine of admission.

Theory. Events come in (offer, finish, orphan, cancel, tick), decisions go out: the entries that were granted or rejected in this
step, exactly one decision for each entry. A grant is recorded in the same step that picks the waiter, so there is no moment in
which a permit belongs to nobody and none in which it belongs to two. Nothing here waits, and time comes in as a number.

Parking. Whoever cannot start is parked in the lot of one state (a pool or a resource node) that is in its way, the first one found,
in the bay of those who need the same of it: they fit or do not fit together. A change looks only at the lots of the states
that changed. The head of a bay that could be served is tried: it is granted, or it moves to the lot of what blocks it
now. So every waiter stands where the next change that concerns it is noticed.

A run is a flow. Its ready calls are offered in the order in which it wants them started. While one of them is parked in a bay, those
behind it that would come to the same bay stay in the flow's backlog: unclocked, counted against no queue bound. Where the run
itself holds some of that state, one entry is parked and its clock stands still, since it waits for its own siblings;
where only others hold it, as many are parked and clocked as the run may have running. The successor of one that
waited in vain inherits its clock.

Rank = class (priority), promoted before unpromoted, order of promotion, start tag (fair share between flows: an entry starts one weight
after the flow's last one, never before what is being served), order of coming. What fits may pass what does not. A waiter that
calls of other flows have passed 16 times is promoted: it goes before every unpromoted waiter of its class and claims what it needs,
that is hides free capacity from lower ranks, unless an orphan stands in its way (that could last for ever). Claims compare by order
of promotion alone: one order over the whole tower, or two claimants could wait for each other. Each 16 further passes raise a
promoted waiter's class by one, so that lower classes get on.

House rules. Every event ends in `_settle`, the one tail. Late events for a decided entry are ignored and counted. `validate()` says what
must hold between events.

Not here: the arithmetic of what is held (ledger), order inside a batch (plan), running anything (runner). No arguments, no tasks,
no clock.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from heapq import heappop, heappush
from typing import Final, Generic, Literal, TypeVar

from towerman.calls import COMPATIBLE, Rejection
from towerman.errors import Code
from towerman.ledger import Ledger, Node, Pool, State, Wants

OwnerT = TypeVar("OwnerT")

NEW: Final = 0
PARKED: Final = 1
GRANTED: Final = 2
REJECTED: Final = 3
DONE: Final = 4
Status = Literal[0, 1, 2, 3, 4]

PASSES: Final = 16
"""Times that calls of other flows may pass a waiter before it is promoted."""

NEVER: Final = float("inf")

Need = tuple[int, bool]
"""What of a state is needed: (permits, may use the reserve) of a pool, (mode, False) of a node."""

Rank = tuple[int, float, float, int, "Entry[OwnerT]"]
"""(class with its sign turned, order of promotion or infinity, start tag, number, entry); the least goes first."""

Offer = tuple[Wants["Lot[OwnerT]"], OwnerT, float]
"""A ready call that is no entry yet: what it wants, its owner, the instant it was offered."""


class Entry(Generic[OwnerT]):
    """One ready call in the gate, from the moment it is handed in to its release; its identity for life.

    Attributes:
        wants: what it needs, all at once.
        owner: whatever the shell knows it by; never looked at here.
        flow: the run it belongs to.
        status: NEW, PARKED, GRANTED, REJECTED or DONE.
        since: the instant it was handed in.
        orphan: its result was sealed while its work goes on.
        rejection: why not, once it is rejected.
        blocked_by: what it was parked for, first to last, as people are shown it.
    """

    __slots__ = (
        "bay",
        "blocked_by",
        "clock",
        "deadline",
        "flow",
        "orphan",
        "owner",
        "passes",
        "queued",
        "rank",
        "rejection",
        "since",
        "status",
        "wants",
    )

    def __init__(self, wants: Wants[Lot[OwnerT]], owner: OwnerT, flow: Flow[OwnerT], since: float) -> None:
        self.wants = wants
        self.owner = owner
        self.flow = flow
        self.since = since
        self.status: Status = NEW
        self.orphan = False
        self.blocked_by: tuple[str, ...] = ()
        self.rank: Rank[OwnerT] | None = None

    # Set while it is parked.
    bay: Bay[OwnerT]
    clock: float
    deadline: float
    passes: int
    queued: bool
    # Set once it is rejected.
    rejection: Rejection

    @property
    def promoted(self) -> bool:
        """It has waited its share and goes before the unpromoted of its class."""
        return self.rank is not None and self.rank[1] != NEVER

    def __repr__(self) -> str:
        word = ("new", "parked", "granted", "rejected", "done")[self.status]
        return f"Entry({self.wants.tool!r} of run {self.wants.run}, {word})"


class Flow(Generic[OwnerT]):
    """The calls of one run, as the gate sees them.

    Attributes:
        number: the run's number.
        window: how many of its calls may run at once.
        limit: the instant after which none of its calls may start.
        running: granted entries whose results are not sealed.
        parked: how many of its entries stand in each bay.
        backlog: ready calls that wait behind a parked one, by the bay they would come to.
        freed: when the flow last let go of a state while an entry of it was parked there.
    """

    __slots__ = ("backlog", "freed", "limit", "number", "parked", "parked_total", "running", "tag", "window")

    def __init__(self, number: int, window: int, limit: float) -> None:
        self.number = number
        self.window = window
        self.limit = limit
        self.tag = 0.0
        self.running: dict[Entry[OwnerT], None] = {}
        self.parked: dict[Bay[OwnerT], int] = {}
        self.parked_total = 0
        self.backlog: dict[Bay[OwnerT], deque[Offer[OwnerT]]] = {}
        self.freed: dict[State[Lot[OwnerT]], float] = {}

    def holds(self, state: State[Lot[OwnerT]]) -> bool:
        """Does a running call of this flow hold some of it?"""
        if isinstance(state, Node):
            key = state.key
            return any(key == held for entry in self.running for held, _ in entry.wants.holds)
        return any(state in entry.wants.pool_states for entry in self.running)

    @property
    def behind(self) -> int:
        """Calls in the backlog."""
        return sum(map(len, self.backlog.values()))

    def __repr__(self) -> str:
        return f"Flow({self.number}, running={len(self.running)}, parked={self.parked_total}, behind={self.behind})"


class Bay(Generic[OwnerT]):
    """Those parked for one state who need the same of it: a heap of ranks, some of them stale."""

    __slots__ = ("count", "heap", "need", "passes", "state")

    def __init__(self, state: State[Lot[OwnerT]], need: Need) -> None:
        self.state = state
        self.need = need
        self.heap: list[Rank[OwnerT]] = []
        self.count = 0
        self.passes = 0

    @property
    def fits(self) -> bool:
        """Could the state serve this need now?"""
        state = self.state
        if isinstance(state, Pool):
            return state.fits(self.need[0], self.need[1])
        assert isinstance(state, Node)
        return state.fits(self.need[0])

    def head(self) -> Rank[OwnerT] | None:
        """The best rank of the unpromoted."""
        heap = self.heap
        while heap:
            rank = heap[0]
            if rank[4].rank is rank:
                return rank
            heappop(heap)
        return None

    def push(self, rank: Rank[OwnerT]) -> None:
        """Add a rank; drop the stale ones when they are the greater part."""
        heap = self.heap
        if len(heap) > 64 and len(heap) > 2 * self.count:
            heap[:] = sorted(one for one in heap if one[4].rank is one)
        heappush(heap, rank)


class Lot(Generic[OwnerT]):
    """All who are parked for one state: a bay for each need, and the ranks of the promoted ones apart."""

    __slots__ = ("bays", "count", "promoted")

    def __init__(self) -> None:
        self.bays: dict[Need, Bay[OwnerT]] = {}
        self.promoted: list[Rank[OwnerT]] = []
        self.count = 0


class Gate(Generic[OwnerT]):
    """Admission for one process. Whoever calls it holds the tower's lock.

    Args:
        ledger: where permits and access are held.
        passes: times that calls of other flows may pass a waiter before it is promoted.

    Attributes:
        wake_at: the instant at which `tick` is due; may be earlier than needed, never later.
        notes: None, or a list to which ("waiting" | "promoted", entry, label) is appended for whoever traces.
    """

    __slots__ = (
        "_claimants",
        "_decided",
        "_dirty",
        "_flows",
        "_lanes",
        "_late",
        "_number",
        "_odd",
        "_orphans",
        "_parked",
        "_passes",
        "_peak_parked",
        "_promotions",
        "_queued",
        "_refills",
        "_served",
        "ledger",
        "notes",
        "wake_at",
    )

    def __init__(self, ledger: Ledger[Lot[OwnerT]], *, passes: int = PASSES) -> None:
        self.ledger = ledger
        self.wake_at: float = NEVER
        self.notes: list[tuple[str, Entry[OwnerT], str]] | None = None
        self._passes = passes
        self._flows: dict[int, Flow[OwnerT]] = {}
        self._served = 0.0
        self._number = 0
        self._promotions = 0
        self._parked = 0
        self._peak_parked = 0
        self._late = 0
        self._queued: dict[str, int] = {}
        self._claimants: list[Entry[OwnerT]] = []
        self._orphans: dict[Entry[OwnerT], None] = {}
        self._lanes: dict[float, deque[Entry[OwnerT]]] = {}
        self._odd: list[tuple[float, int, Entry[OwnerT]]] = []
        self._decided: list[Entry[OwnerT]] = []
        self._dirty: list[State[Lot[OwnerT]]] = []
        self._refills: list[tuple[Flow[OwnerT], Bay[OwnerT], float]] = []

    # ------------------------------------------------------------------ runs

    def open_flow(self, number: int, window: int, limit: float = NEVER) -> Flow[OwnerT]:
        """A run begins: `window` calls of it may run at once, none may start at or after `limit`."""
        flow: Flow[OwnerT] = Flow(number, window, limit)
        flow.tag = self._served
        self._flows[number] = flow
        return flow

    def close_flow(self, flow: Flow[OwnerT]) -> None:
        """A run has ended: nothing of it waits. What still runs of it may finish later."""
        assert not flow.parked_total and not flow.backlog, f"{flow} still waits"
        self._flows.pop(flow.number, None)

    # ------------------------------------------------------------------ events in, decisions out

    def offer(self, flow: Flow[OwnerT], offers: Iterable[Offer[OwnerT]], now: float) -> list[Entry[OwnerT]]:
        """Ready calls of a run, in the order in which it wants them started. Returns the entries decided in this step."""
        for one in offers:
            self._enter(flow, one, now, now)
        return self._settle(now)

    def finish(self, entry: Entry[OwnerT], now: float) -> list[Entry[OwnerT]]:
        """The work of a granted entry has ended: it gives back all it holds. A second time is ignored and counted."""
        if entry.status != GRANTED:
            self._late += 1
            return []
        entry.status = DONE
        wants = entry.wants
        flow = entry.flow
        if entry.orphan:
            del self._orphans[entry]
            self.ledger.mark_orphan(wants, -1)
        else:
            del flow.running[entry]
            if not self._claimants and self._hand_over(entry, now):
                return self._settle(now)
        states = self.ledger.states(wants)
        self.ledger.give(wants)
        for state in states:
            lot = state.lot
            if lot is not None and lot.count:
                self._dirty.append(state)
                if entry.orphan and not state.orphans:
                    for rank in lot.promoted:  # nothing stands in their way for ever now
                        self._claim(rank[4])
        if not entry.orphan:
            self._unhold(flow, states, now)
        return self._settle(now)

    def orphan(self, entry: Entry[OwnerT], now: float) -> list[Entry[OwnerT]]:
        """The result of a granted entry is sealed while its work goes on: it keeps what it holds, but is nobody's sibling now."""
        if entry.status != GRANTED or entry.orphan:
            self._late += 1
            return []
        entry.orphan = True
        del entry.flow.running[entry]
        self._orphans[entry] = None
        self.ledger.mark_orphan(entry.wants, 1)
        self._unhold(entry.flow, self.ledger.states(entry.wants), now)
        for claimant in [one for one in self._claimants if one.bay.state.orphans]:
            self._unclaim(claimant)
        return self._settle(now)

    def cancel(self, entry: Entry[OwnerT], now: float, code: Code = "cancelled") -> list[Entry[OwnerT]]:
        """A parked entry is given up: it is rejected and never starts. Ignored and counted once it was decided."""
        if entry.status != PARKED:
            self._late += 1
            return []
        self._reject(entry, code)
        return self._settle(now)

    def withdraw(self, flow: Flow[OwnerT], gone: Callable[[OwnerT], bool]) -> list[OwnerT]:
        """Take calls out of a run's backlog that were never handed in; returns their owners. Decides nothing."""
        out: list[OwnerT] = []
        for bay, line in list(flow.backlog.items()):
            kept = deque(one for one in line if not gone(one[1]))
            if len(kept) < len(line):
                out += [one[1] for one in line if gone(one[1])]
                if kept:
                    flow.backlog[bay] = kept
                else:
                    del flow.backlog[bay]
        return out

    def tick(self, now: float) -> list[Entry[OwnerT]]:
        """Time has passed: those whose wait is over are rejected."""
        decided: list[Entry[OwnerT]] = []
        while True:
            for lane in self._lanes.values():
                while lane and (lane[0].status != PARKED or lane[0].deadline <= now):
                    entry = lane.popleft()
                    if entry.status == PARKED:
                        self._expire(entry, now)
            odd = self._odd
            while odd and odd[0][0] <= now:
                deadline, _, entry = heappop(odd)
                if entry.status == PARKED and entry.deadline == deadline:
                    self._expire(entry, now)
            decided += self._settle(now)
            self.wake_at = self._next_deadline()
            if self.wake_at > now:  # a successor inherits its clock, so it may be over at once
                return decided

    def expand(self, more: Callable[[Wants[Lot[OwnerT]]], Wants[Lot[OwnerT]]]) -> None:
        """A tool was declared that makes further locks necessary (intentions above nested keys): take them for all in flight.

        What is added conflicts only with locks that nobody could ask for until now, so it is always free.
        """
        for flow in self._flows.values():
            for entry in flow.running:
                self._widen(entry, more)
            for line in flow.backlog.values():
                for place, (wants, owner, ready) in enumerate(line):
                    line[place] = (more(wants), owner, ready)
        for entry in self._orphans:
            self.ledger.mark_orphan(entry.wants, -1)
            self._widen(entry, more)
            self.ledger.mark_orphan(entry.wants, 1)
        for entry in self._each_parked():
            entry.wants = more(entry.wants)

    def _widen(self, entry: Entry[OwnerT], more: Callable[[Wants[Lot[OwnerT]]], Wants[Lot[OwnerT]]]) -> None:
        before = set(entry.wants.holds)
        entry.wants = more(entry.wants)
        self.ledger.take_holds(tuple(hold for hold in entry.wants.holds if hold not in before))

    # ------------------------------------------------------------------ coming in

    def _enter(self, flow: Flow[OwnerT], one: Offer[OwnerT], now: float, clock: float) -> Bay[OwnerT] | None:
        """Grant it, park it, reject it, or put it into the backlog of the bay that is returned."""
        wants, owner, _ = one
        if now >= flow.limit:
            self._refuse(Entry(wants, owner, flow, now), "deadline_exceeded", "run deadline")
            return None
        state = self.ledger.blocker(wants)
        if state is None and self._claimants:
            state = self._hidden(wants, wants.priority, NEVER)
        if state is None:
            entry: Entry[OwnerT] = Entry(wants, owner, flow, now)
            self.ledger.take(wants)
            self._grant(entry, -wants.priority, NEVER, self._tag(flow, wants))
            return None
        if wants.wait:
            bay = self._bay(state, wants)
            if flow.parked and flow.parked.get(bay, 0) >= (1 if flow.holds(state) else flow.window):
                flow.backlog.setdefault(bay, deque()).append(one)
                return bay
            self._hand_in(flow, one, bay, clock, now)
            return None
        if isinstance(state, Pool) and state.scope == "run" and flow.holds(state):
            bay = self._bay(state, wants)
            flow.backlog.setdefault(bay, deque()).append(one)
            return bay
        self._refuse(Entry(wants, owner, flow, now), "concurrency_limit", self.ledger.label(state, wants))
        return None

    def _hand_in(self, flow: Flow[OwnerT], one: Offer[OwnerT], bay: Bay[OwnerT], clock: float, now: float) -> None:
        """Make it an entry that waits: counted and clocked unless it waits for its own siblings."""
        wants, owner, ready = one
        entry: Entry[OwnerT] = Entry(wants, owner, flow, clock if clock >= ready else ready)
        entry.clock = entry.since
        entry.queued = False
        if wants.bounds and not flow.holds(bay.state):
            queued = self._queued
            for key, most in wants.bounds:
                if queued.get(key, 0) >= most:
                    self._refuse(entry, "queue_full", self.ledger.label(bay.state, wants))
                    return
            for key, _ in wants.bounds:
                queued[key] = queued.get(key, 0) + 1
            entry.queued = True
        entry.passes = 0
        number = self._number = self._number + 1
        entry.rank = (-wants.priority, NEVER, self._tag(flow, wants), number, entry)
        entry.status = PARKED
        self._parked += 1
        flow.parked_total += 1
        if self._parked > self._peak_parked:
            self._peak_parked = self._parked
        self._park(entry, bay)
        self._set_deadline(entry, entry.clock + wants.max_wait, in_order=entry.clock == now)

    def _tag(self, flow: Flow[OwnerT], wants: Wants[Lot[OwnerT]]) -> float:
        tag = flow.tag if flow.tag > self._served else self._served
        flow.tag = tag + (wants.permits[0][1] if wants.permits else 1)
        return tag

    def _refuse(self, entry: Entry[OwnerT], code: Code, blocker: str) -> None:
        entry.status = REJECTED
        entry.rejection = Rejection(code, blocker)
        self._decided.append(entry)

    # ------------------------------------------------------------------ waiting

    def _bay(self, state: State[Lot[OwnerT]], wants: Wants[Lot[OwnerT]]) -> Bay[OwnerT]:
        """Where those stand who need of this state what this ask needs."""
        if isinstance(state, Pool):
            need: Need = (next(units for pool, units in wants.pools if pool is state), wants.priority > 0)
        else:
            assert isinstance(state, Node)
            need = (next(mode for key, mode in wants.holds if key == state.key), False)
        lot = state.lot
        if lot is None:
            lot = state.lot = Lot()
        bay = lot.bays.get(need)
        if bay is None:
            bay = lot.bays[need] = Bay(state, need)
        return bay

    def _park(self, entry: Entry[OwnerT], bay: Bay[OwnerT]) -> None:
        lot = bay.state.lot
        assert lot is not None and entry.rank is not None
        lot.count += 1
        bay.count += 1
        entry.bay = bay
        parked = entry.flow.parked
        parked[bay] = parked.get(bay, 0) + 1
        label = self.ledger.label(bay.state, entry.wants)
        if label not in entry.blocked_by:
            entry.blocked_by = (*entry.blocked_by, label)
        if self.notes is not None:
            self.notes.append(("waiting", entry, label))
        if entry.rank[1] != NEVER:
            insort(lot.promoted, entry.rank)
            self._claim(entry)
        else:
            entry.passes -= bay.passes  # while it is parked: less what had been counted here before it came
            bay.push(entry.rank)

    def _unpark(self, entry: Entry[OwnerT]) -> Rank[OwnerT]:
        """Out of its lot; its rank, if it stays in the heap, is stale from now on."""
        bay, rank = entry.bay, entry.rank
        state = bay.state
        lot = state.lot
        assert lot is not None and rank is not None
        lot.count -= 1
        bay.count -= 1
        if rank[1] != NEVER:
            lot.promoted.remove(rank)
            self._unclaim(entry)
        else:
            entry.passes += bay.passes
        entry.rank = None
        if not lot.count and isinstance(state, Node):
            state.lot = None
            self.ledger.sweep(state)
        parked = entry.flow.parked
        if parked[bay] == 1:
            del parked[bay]
            if not parked:
                entry.flow.freed.clear()
        else:
            parked[bay] -= 1
        return rank

    def _leave(self, entry: Entry[OwnerT]) -> None:
        """It waits no more."""
        self._unpark(entry)
        self._parked -= 1
        entry.flow.parked_total -= 1
        if entry.queued:
            queued = self._queued
            for key, _ in entry.wants.bounds:
                if queued[key] == 1:
                    del queued[key]
                else:
                    queued[key] -= 1
            entry.queued = False

    def _reject(self, entry: Entry[OwnerT], code: Code) -> None:
        """A parked entry is refused; whoever stands behind it inherits its clock."""
        flow, bay, blocker = entry.flow, entry.bay, entry.blocked_by[-1]
        self._leave(entry)
        self._refuse(entry, code, blocker)
        if bay in flow.backlog:
            self._refills.append((flow, bay, entry.clock))

    def _set_deadline(self, entry: Entry[OwnerT], deadline: float, *, in_order: bool) -> None:
        limit = entry.flow.limit
        if limit < deadline:
            deadline, in_order = limit, False
        entry.deadline = deadline
        if in_order:
            lane = self._lanes.get(entry.wants.max_wait)
            if lane is None:
                lane = self._lanes[entry.wants.max_wait] = deque()
            for _ in (1, 2):  # two looked at for one that comes: a lane is seldom longer than the line of those who wait
                if lane and lane[0].status != PARKED:
                    lane.popleft()
            lane.append(entry)
        else:
            self._number += 1
            heappush(self._odd, (deadline, self._number, entry))
        if deadline < self.wake_at:
            self.wake_at = deadline

    def _expire(self, entry: Entry[OwnerT], now: float) -> None:
        """Its deadline has come, and with it the end of its wait, or a new deadline."""
        code = self._over(entry, now)
        if code is not None:
            self._reject(entry, code)
        else:
            self._set_deadline(entry, entry.clock + entry.wants.max_wait, in_order=False)

    def _over(self, entry: Entry[OwnerT], now: float) -> Code | None:
        """Is its wait over? It counts only while nobody of its own flow holds what it waits for."""
        if now >= entry.flow.limit:
            return "deadline_exceeded"
        self._set_clock(entry, now)
        return "wait_timeout" if entry.clock + entry.wants.max_wait <= now else None

    def _set_clock(self, entry: Entry[OwnerT], now: float) -> None:
        flow, state = entry.flow, entry.bay.state
        if flow.holds(state):
            entry.clock = now
        else:
            freed = flow.freed.get(state)
            if freed is not None and freed > entry.clock:
                entry.clock = freed

    def _next_deadline(self) -> float:
        first = NEVER
        for lane in self._lanes.values():
            while lane and lane[0].status != PARKED:
                lane.popleft()
            if lane and lane[0].deadline < first:
                first = lane[0].deadline
        odd = self._odd
        while odd and (odd[0][2].status != PARKED or odd[0][2].deadline != odd[0][0]):
            heappop(odd)
        return min(first, odd[0][0]) if odd else first

    # ------------------------------------------------------------------ going on

    def _grant(self, entry: Entry[OwnerT], klass: int, promotion: float, tag: float) -> None:
        """What it wants has been taken for it."""
        entry.status = GRANTED
        flow = entry.flow
        flow.running[entry] = None
        self._decided.append(entry)
        if tag > self._served:
            self._served = tag
        if self._parked > flow.parked_total:
            self._count_passes(entry, (klass, promotion, tag))

    def _hand_over(self, entry: Entry[OwnerT], now: float) -> bool:
        """The one waiter that could use what is given back wants exactly the same: it gets it, and no count changes."""
        found: Lot[OwnerT] | None = None
        wants = entry.wants
        for state in wants.pool_states if not wants.holds else self.ledger.states(wants):
            lot = state.lot
            if lot is not None and lot.count:
                if found is not None:
                    return False
                found = lot
        if found is None or found.promoted or len(found.bays) != 1:
            return False
        (bay,) = found.bays.values()
        rank = bay.head()
        assert rank is not None, "a lot that counts somebody has nobody"
        heir = rank[4]
        if heir.wants is not wants or heir.deadline <= now:
            return False
        self._leave(heir)
        self._grant(heir, rank[0], NEVER, rank[2])
        if bay in heir.flow.backlog:
            self._succeed(heir.flow, bay, now)
        return True

    def _succeed(self, flow: Flow[OwnerT], bay: Bay[OwnerT], now: float) -> None:
        """Park whoever stands behind the one that was just granted, so that it takes part by its rank."""
        line = flow.backlog[bay]
        if line[0][0].wait:
            if not flow.parked.get(bay, 0):
                one = line.popleft()
                if not line:
                    del flow.backlog[bay]
                self._hand_in(flow, one, bay, now, now)
        else:
            self._refills.append((flow, bay, now))

    def _unhold(self, flow: Flow[OwnerT], states: Iterable[State[Lot[OwnerT]]], now: float) -> None:
        """A running call of the flow let go. Where it was the last one, the flow waits for others now: its clocks start."""
        if not flow.parked and not flow.backlog:
            return
        for state in states:
            lot = state.lot
            if lot is None:
                continue
            let_go = not flow.holds(state)
            for bay in lot.bays.values():
                if bay in flow.parked:
                    if let_go:
                        flow.freed[state] = now
                        if bay in flow.backlog:
                            self._refills.append((flow, bay, now))
                elif bay in flow.backlog:  # only calls that refuse to wait stand there with nobody parked before them
                    self._refills.append((flow, bay, now))

    def _refill(self, flow: Flow[OwnerT], bay: Bay[OwnerT], clock: float, now: float) -> None:
        """Hand in from the backlog what may be handed in now."""
        line = flow.backlog.pop(bay, None)
        while line:
            one = line.popleft()
            to = self._enter(flow, one, now, clock)
            if to is not None and to.state is bay.state and to.need == bay.need:  # it is where it was
                rest = flow.backlog[to]
                rest.pop()
                line.appendleft(one)
                rest.extend(line)
                return

    def _settle(self, now: float) -> list[Entry[OwnerT]]:
        """The one tail: look at what changed until nothing changes any more, then hand out the decisions."""
        while self._dirty or self._refills:
            if self._dirty:
                states = list(dict.fromkeys(self._dirty))
                self._dirty.clear()
                self._pump(states, now)
            else:
                flow, bay, clock = self._refills.pop(0)
                self._refill(flow, bay, clock, now)
        decided = self._decided
        if decided:
            self._decided = []
        return decided

    def _pump(self, states: list[State[Lot[OwnerT]]], now: float) -> None:
        """Try those parked for these states, best rank first, until none of them can be served."""
        stuck: set[Bay[OwnerT] | Entry[OwnerT]] = set()
        while True:
            best: Rank[OwnerT] | None = None
            for state in states:
                lot = state.lot
                if lot is None or not lot.count:
                    continue
                for rank in lot.promoted:
                    if rank[4] not in stuck and (best is None or rank < best) and rank[4].bay.fits:
                        best = rank
                for bay in lot.bays.values():
                    if bay.count and bay not in stuck and bay.fits:
                        head = bay.head()
                        if head is not None and (best is None or head < best):
                            best = head
            if best is None:
                return
            entry = best[4]
            bay = entry.bay
            flow = entry.flow
            wants = entry.wants
            if entry.deadline <= now:
                code = self._over(entry, now)
                if code is not None:
                    self._reject(entry, code)
                    continue
            blocker = self.ledger.blocker(wants)
            if blocker is None and self._claimants:
                blocker = self._hidden(wants, -best[0], best[1])
            if blocker is None:
                self._leave(entry)
                self.ledger.take(wants)
                self._grant(entry, best[0], best[1], best[2])
                if bay in flow.backlog:
                    self._succeed(flow, bay, now)
            elif blocker is bay.state:
                stuck.add(bay if best[1] == NEVER else entry)
            else:
                self._set_clock(entry, now)
                self._unpark(entry)
                entry.rank = (*best[:4], entry)
                self._park(entry, self._bay(blocker, wants))
                if bay in flow.backlog:
                    self._refills.append((flow, bay, entry.clock))

    # ------------------------------------------------------------------ passing, promotion, claims

    def _count_passes(self, granted: Entry[OwnerT], rank: tuple[int, float, float]) -> None:
        """A call got what waiters of other flows with a better rank wait for: they were passed."""
        flow = granted.flow
        for state in self.ledger.states(granted.wants):
            lot = state.lot
            if lot is None or not lot.count:
                continue
            for one in list(lot.promoted):
                waiter = one[4]
                if waiter.flow is not flow:
                    waiter.passes += 1
                    if waiter.passes >= self._passes:
                        waiter.passes = 0
                        lot.promoted.remove(one)
                        waiter.rank = (one[0] - 1, one[1], one[2], one[3], waiter)
                        insort(lot.promoted, waiter.rank)
            for bay in lot.bays.values():
                head = bay.head()
                if head is not None and head[4].flow is not flow and head[:3] < rank:
                    bay.passes += 1
                    if bay.passes + head[4].passes >= self._passes:
                        self._promote(head[4])

    def _promote(self, entry: Entry[OwnerT]) -> None:
        rank, lot = entry.rank, entry.bay.state.lot
        assert rank is not None and lot is not None
        self._promotions += 1
        entry.passes = 0
        entry.rank = (rank[0], float(self._promotions), rank[2], rank[3], entry)
        insort(lot.promoted, entry.rank)
        self._claim(entry)
        if self.notes is not None:
            self.notes.append(("promoted", entry, entry.blocked_by[-1]))

    def _claim(self, entry: Entry[OwnerT]) -> None:
        """Hide what it needs from lower ranks, unless an orphan stands in its way."""
        if not entry.bay.state.orphans and entry not in self._claimants:
            insort(self._claimants, entry, key=_promotion)

    def _unclaim(self, entry: Entry[OwnerT]) -> None:
        """Its claims are lifted: what they hid can be had by others."""
        if entry in self._claimants:
            self._claimants.remove(entry)
            self._dirty += [state for state in self.ledger.states(entry.wants) if state.lot is not None]

    def _hidden(self, wants: Wants[Lot[OwnerT]], klass: int, promotion: float) -> State[Lot[OwnerT]] | None:
        """What is free by count but claimed by a waiter of better rank.

        Among claimants only the order of promotion counts; an unpromoted call gives way to claimants of its class or a higher one.
        """
        before = [
            claimant.wants
            for claimant in self._claimants
            if claimant.rank is not None
            and claimant.rank[1] < promotion
            and (promotion != NEVER or -claimant.rank[0] >= klass)
        ]
        if not before:
            return None
        for pool, units in wants.pools:
            claimed = sum(more for other in before for that, more in other.pools if that is pool)
            if claimed and not pool.fits(units + claimed, wants.priority):
                return pool
        for key, mode in wants.holds:
            if any(key == that and not COMPATIBLE[mode][other] for one in before for that, other in one.holds):
                return self.ledger.node_for(key)
        return None

    # ------------------------------------------------------------------ looking in

    def _each_parked(self) -> Iterator[Entry[OwnerT]]:
        for state in self.ledger.states_with_lots():
            lot = state.lot
            assert lot is not None
            for bay in lot.bays.values():
                yield from (rank[4] for rank in bay.heap if rank[4].rank is rank)
            yield from (rank[4] for rank in lot.promoted)

    def parked_of(self, flow: Flow[OwnerT]) -> list[Entry[OwnerT]]:
        """The parked entries of a run."""
        if not flow.parked_total:
            return []
        return [entry for entry in self._each_parked() if entry.flow is flow]

    def queue_lengths(self) -> dict[str, int]:
        """How many parked entries want permits of each pool, by pool key."""
        lengths: dict[str, int] = {}
        for entry in self._each_parked():
            for key, _ in entry.wants.permits:
                lengths[key] = lengths.get(key, 0) + 1
        return lengths

    def statistics(self) -> dict[str, int]:
        """Counts: flows, running, parked, most parked at once, behind (backlogs), orphans, claimants, promotions, late events."""
        flows = self._flows.values()
        return {
            "flows": len(self._flows),
            "running": sum(len(flow.running) for flow in flows),
            "parked": self._parked,
            "peak_parked": self._peak_parked,
            "behind": sum(flow.behind for flow in flows),
            "orphans": len(self._orphans),
            "claimants": len(self._claimants),
            "promotions": self._promotions,
            "late_events": self._late,
        }

    def validate(self) -> None:
        """Raise AssertionError, with the story, when something that must hold between events does not."""
        self.ledger.validate(lambda state: state.lot.count if state.lot is not None else 0)
        parked = list(self._each_parked())
        assert len(parked) == self._parked, f"{self._parked} parked by count, {len(parked)} in lots"
        assert len(set(parked)) == len(parked), "an entry is parked twice"
        assert not self._decided and not self._dirty and not self._refills, "an event did not run to its end"
        bays: dict[Bay[OwnerT], int] = {}
        for entry in parked:
            assert entry.status == PARKED, f"{entry} stands in a lot"
            assert entry not in entry.flow.running, f"{entry} holds and waits"
            bays[entry.bay] = bays.get(entry.bay, 0) + 1
            rank = entry.rank
            assert rank is not None
            free = self.ledger.blocker(entry.wants) is None
            assert not free or self._hidden(entry.wants, -rank[0], rank[1]) is not None, f"{entry} waits for nothing"
            assert not entry.bay.fits or self._claimants, f"{entry} waits in a wrong lot"
            assert entry.deadline >= self.wake_at, f"{entry} would be woken too late"
        for bay, count in bays.items():
            lot = bay.state.lot
            assert bay.count == count, f"{bay.state} miscounts a bay"
            assert lot is not None and lot.bays[bay.need] is bay, f"{bay.state} has lost a bay"
            assert lot.count == sum(one.count for one in lot.bays.values()), f"{bay.state} miscounts its lot"
        held: dict[str, int] = {}
        for entry in [*self._orphans, *(one for flow in self._flows.values() for one in flow.running)]:
            assert entry.status == GRANTED, f"{entry} holds"
            for key, units in entry.wants.permits:
                held[key] = held.get(key, 0) + units
        for key, pool in self.ledger.pools.items():
            assert pool.held == held.get(key, 0), f"{pool} should hold {held.get(key, 0)}"
        for flow in self._flows.values():
            own = [entry for entry in parked if entry.flow is flow]
            assert len(own) == flow.parked_total == sum(flow.parked.values()), f"{flow} miscounts what it parks"
            for bay, line in flow.backlog.items():
                assert line, f"{flow} keeps an empty line"
                waits = any(one[0].wait for one in line)
                assert flow.parked.get(bay) or (not waits and flow.holds(bay.state)), f"{flow} has forgotten a line"
        assert [one.rank[1] for one in self._claimants if one.rank] == sorted(
            one.rank[1] for one in self._claimants if one.rank
        ), "claims are out of order"
        for claimant in self._claimants:
            assert claimant.status == PARKED and claimant.promoted, f"{claimant} claims"

    def __repr__(self) -> str:
        figures = ", ".join(f"{name}={count}" for name, count in self.statistics().items())
        return f"Gate({figures})"


def _promotion(entry: Entry[OwnerT]) -> float:
    assert entry.rank is not None
    return entry.rank[1]
