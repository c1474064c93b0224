"""Who may start now, who waits and for what, who is refused: the state machine of admission.

Theory. Events come in (offer, finish, orphan, cancel, tick), decisions go out: the entries that were granted or
rejected in this step, exactly one decision for each entry. A grant is recorded in the same step that picks the
waiter, so there is no moment in which a permit belongs to nobody and none in which it belongs to two. Nothing here
waits, and time comes in as a number.

Parking. Whoever cannot start is parked for the first thing that is in its way (lots). A change looks only at the lots
of the states that changed. The head of a bay that could be served is tried: it is granted, or it moves to the lot of
what blocks it now. So every waiter stands where the next change that concerns it is noticed.

A run is a flow. Its ready calls are offered in the order in which it wants them started. While one of them is parked
in a bay, those behind it that would come to the same bay stay in the line's backlog: unclocked, counted against no
queue bound. Where the run itself holds some of that state, one entry is parked and its clock stands, since it waits
for its own siblings; where only others hold it, as many are parked and clocked as the run may have running. The
successor of one that waited in vain inherits its clock.

Rank = class (priority), promoted before unpromoted, order of promotion, start tag, order of coming. The start tag is
fair share between flows (start-time fair queueing): an entry starts one weight after the flow's last one that was not
refused, and never before what is being served. What is being served is the latest tag that was granted. A grant that
does not move it on, while others wait, still adds half of its weight over the number of flows that wait: or else a
stream of new runs, who all start at that same tag, would hold it where it is and keep an old run's second call
waiting.

Passing. What fits may pass what does not. A waiter is passed when a call of another flow gets some of what it is
parked for, although that call ranks behind it or is of a higher class; and when it is tried in vain and moves on. The
first of a bay is counted, and those behind it are taken to be passed with it. One that was passed 16 times is
promoted: it goes before every unpromoted waiter of its class and claims what it needs, that is hides free capacity
from lower ranks, unless orphans alone would keep it waiting (that could last for ever). Claims compare by order of
promotion alone: one order over the whole tower, or two claimants could wait for each other. Each 16 further passes
raise a promoted waiter's class by one, so that lower classes get on.

House rules. Every event ends in `_settle`, the one tail. Late events for a decided entry are ignored and counted.
`validate()` says what must hold between events.

Not here: the arithmetic of what is held (ledger), order inside a batch (plan), running anything (runner). No
arguments, no tasks, no clock.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heappush
from typing import Final, Generic, TypeVar

from towerman.calls import COMPATIBLE, Rejection
from towerman.deadlock import may_go_on, stuck
from towerman.errors import Code
from towerman.ledger import Ledger, Loan, Node, Pool, State, Wants
from towerman.lots import (
    DONE,
    GRANTED,
    NEVER,
    PARKED,
    REJECTED,
    Bay,
    Deadlines,
    Entry,
    Flow,
    Line,
    Lot,
    Need,
    Offer,
    Rank,
)

__all__ = ["DONE", "GRANTED", "NEVER", "PARKED", "PASSES", "REJECTED", "Entry", "Flow", "Gate", "Lot", "Offer"]

OwnerT = TypeVar("OwnerT")

Urgency = tuple[float, int, int]
"""What orders the calls of one run: longest remaining path first, as the plan tells it; least goes first."""

PASSES: Final = 16
"""Times that a waiter may be passed before it is promoted."""


class Gate(Generic[OwnerT]):
    """Admission for one process. Whoever calls it holds the tower's lock.

    Args:
        ledger: where permits and access are held.
        passes: times that a waiter may be passed before it is promoted.

    Attributes:
        wake_at: the instant at which `tick` is due; may be earlier than needed, never later.
        notes: None, or a list to which ("waiting" | "promoted", entry, label) is appended for whoever traces.
    """

    __slots__ = (
        "_changed",
        "_claimants",
        "_closed",
        "_deadlines",
        "_decided",
        "_ended",
        "_flows",
        "_late",
        "_lenders",
        "_number",
        "_orphans",
        "_parked",
        "_passes",
        "_peak_parked",
        "_promotions",
        "_queued",
        "_refills",
        "_served",
        "_suspects",
        "_waiting",
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
        self._closed: list[Flow[OwnerT]] = []  # those of which something may still run
        self._served = 0.0
        self._number = 0
        self._promotions = 0
        self._parked = 0
        self._waiting = 0  # flows of which something is parked
        self._peak_parked = 0
        self._late = 0
        self._queued: dict[str, int] = {}
        self._claimants: list[Entry[OwnerT]] = []
        self._orphans: dict[Entry[OwnerT], None] = {}
        self._deadlines: Deadlines[OwnerT] = Deadlines()
        self._lenders: dict[Loan[Lot[OwnerT]], Entry[OwnerT]] = {}
        # Filled and emptied within one event.
        self._decided: list[Entry[OwnerT]] = []
        self._changed: list[State[Lot[OwnerT]]] = []
        self._suspects: list[Entry[OwnerT]] = []  # nested calls that have begun to wait for something else
        self._refills: list[tuple[Flow[OwnerT], Line[OwnerT], float]] = []
        self._ended: list[tuple[Flow[OwnerT], Line[OwnerT]]] = []

    # ------------------------------------------------------------------ runs

    def open_flow(self, number: int, window: int, limit: float = NEVER) -> Flow[OwnerT]:
        """A run begins: `window` calls of it may run at once, none may start at or after `limit`."""
        assert number not in self._flows, f"run {number} is open"
        flow: Flow[OwnerT] = Flow(number, window, limit, self._served)
        self._flows[number] = flow
        return flow

    def close_flow(self, flow: Flow[OwnerT]) -> None:
        """A run has ended: nothing of it waits. What still runs of it may finish later."""
        assert not flow.lines, f"{flow} still waits"
        flow.closed = True
        if self._flows.pop(flow.number, None) is flow:
            self._closed = [one for one in [*self._closed, flow] if one.running]

    # ------------------------------------------------------------------ events in, decisions out

    def offer(self, flow: Flow[OwnerT], offers: Iterable[Offer[OwnerT]], now: float) -> list[Entry[OwnerT]]:
        """Ready calls of a run, in the order in which it wants them started. Returns the entries decided in this
        step.
        """
        line: Line[OwnerT] | None = None
        before: Wants[Lot[OwnerT]] | None = None
        for one in offers:
            # Nothing has changed since the last one had to stand behind others for a pool that this one wants as well.
            if line is not None and before is not None and one[0].pools is before.pools:
                line.behind(one)
            else:
                before = one[0]
                line = self._enter(flow, one, now, now)
                if line is not None and (self._claimants or not isinstance(line.bay.state, Pool)):
                    line = None
        return self._settle(now)

    def finish(
        self,
        entry: Entry[OwnerT],
        now: float,
        ready: Sequence[Offer[OwnerT]] = (),
        urgency: Callable[[OwnerT], Urgency] | None = None,
    ) -> list[Entry[OwnerT]]:
        """The work of a granted entry has ended: it gives back all it holds. A second time is ignored and counted.

        Args:
            entry: whose work has ended.
            now: the present instant.
            ready: calls of its run that are ready because of that end; they are offered in the same step.
            urgency: what orders the calls of one run, least first; needed where some are ready.
        """
        if ready:
            return self._finish_and_offer(entry, now, ready, urgency)
        if entry.status != GRANTED:
            self._late += 1
            return []
        if entry.loan is not None and entry.loan.out:
            return self._linger(entry, entry.loan, now)
        entry.status = DONE
        wants = entry.wants
        if entry.loan is not None or wants.loan is not None:
            return self._finish_loans(entry, now)
        ledger = self.ledger
        if entry.orphan:
            del self._orphans[entry]
            ledger.mark_orphan(wants, -1)
            for state in self._give(wants):
                lot = state.lot
                for rank in lot.promoted if lot is not None else ():
                    self._claim(rank[4])  # those whom only this orphan barred
        else:
            flow = entry.flow
            del flow.running[entry]
            if self._parked and not self._claimants and self._hand_over(entry, now):
                return self._settle(now)
            states = self._give(wants)
            if flow.lines:
                self._let_go(flow, states, now)
        return self._settle(now)

    def lend(self, entry: Entry[OwnerT]) -> Loan[Lot[OwnerT]]:
        """A running call begins to wait for calls of its own, and lends them what it holds."""
        loan = entry.loan
        if loan is None:
            loan = entry.loan = Loan(entry.wants, entry.wants.loan)
            self._lenders[loan] = entry
        loan.waits += 1
        return loan

    def lent_back(self, entry: Entry[OwnerT], now: float) -> list[Entry[OwnerT]]:
        """A batch of nested calls is answered: its caller goes on."""
        assert entry.loan is not None
        entry.loan.waits -= 1
        return self._settle(now)

    def _linger(self, entry: Entry[OwnerT], loan: Loan[Lot[OwnerT]], now: float) -> list[Entry[OwnerT]]:
        """A lender has ended and some of what it lent is still with borrowers: it goes back with the last of them."""
        if not loan.gone:
            loan.gone = True
            return self.orphan(entry, now) if not entry.orphan else []
        self._late += 1
        return []

    def _finish_loans(self, entry: Entry[OwnerT], now: float) -> list[Entry[OwnerT]]:
        """The end of a call that lends or borrows: what it borrowed goes back to its lenders, who may have waited for
        that.
        """
        flow, wants = entry.flow, entry.wants
        if entry.loan is not None:
            entry.loan.over = True
            self._lenders.pop(entry.loan, None)
        if entry.orphan:
            del self._orphans[entry]
            self.ledger.mark_orphan(wants, -1)
        else:
            del flow.running[entry]
        states = self._give(wants)
        if entry.orphan:
            for state in states:
                for rank in state.lot.promoted if state.lot is not None else ():
                    self._claim(rank[4])
        elif flow.lines:
            self._let_go(flow, states, now)
        decided = self._settle(now)
        for loan in list(wants.loan.chain()) if wants.loan is not None else ():
            if loan.gone and not loan.out and loan in self._lenders:
                decided += self.finish(self._lenders[loan], now)
        return decided

    def _finish_and_offer(
        self,
        entry: Entry[OwnerT],
        now: float,
        ready: Sequence[Offer[OwnerT]],
        urgency: Callable[[OwnerT], Urgency] | None,
    ) -> list[Entry[OwnerT]]:
        """What an end makes ready may go before calls of the same run that were ready earlier: by urgency, not by age.

        Where other runs wait, or claims hide something, what is given back is dealt out by rank first.
        """
        flow = entry.flow
        if urgency is None or entry.status != GRANTED or entry.loan is not None or entry.wants.loan is not None:
            return self.finish(entry, now) + self.offer(flow, ready, now)
        late: list[Offer[OwnerT]] = []
        if self._parked > flow.parked_total or self._claimants or entry.orphan:
            decided = self.finish(entry, now)
            late.extend(ready)
        else:
            entry.status = DONE
            del flow.running[entry]
            states = self._give(entry.wants)
            first = min((urgency(one.owner) for one in flow.parked), default=None)
            for one in ready:
                if first is None or urgency(one[1]) < first:
                    self._place(flow, one, now, urgency)
                else:
                    late.append(one)
            if flow.lines:
                self._let_go(flow, states, now)
            decided = self._settle(now)
        for one in late:
            self._place(flow, one, now, urgency)
        return decided + self._settle(now)

    def _place(self, flow: Flow[OwnerT], one: Offer[OwnerT], now: float, urgency: Callable[[OwnerT], Urgency]) -> None:
        """Let one call in; where it has to stand behind others of its run, it stands there by urgency."""
        line = self._enter(flow, one, now, now)
        if line is None:
            return
        backlog = line.backlog
        assert backlog is not None
        mine = urgency(one[1])
        backlog.pop()
        place = bisect_right(backlog, mine, key=lambda other: urgency(other[1]))
        backlog.insert(place, one)
        if place or len(line.parked) != 1:
            return
        (parked,) = line.parked
        rank = parked.rank
        assert rank is not None
        if parked.clock == NEVER and not (parked.queued or parked.promoted) and mine < urgency(parked.owner):
            # It waits for its own siblings only, as this one does: nothing but the order between the two is at stake.
            backlog[0] = (parked.wants, parked.owner, parked.since)
            number = self._number = self._number + 1
            self._replace(parked, one, (*rank[:3], number, parked), now)
            parked.status = DONE

    def _replace(self, entry: Entry[OwnerT], one: Offer[OwnerT], rank: Rank[OwnerT], now: float) -> None:
        """Another call of the run, which wants of the bay what this parked one wants, takes its place: no count
        changes.
        """
        wants, owner, ready = one
        line = entry.line
        other: Entry[OwnerT] = Entry(wants, owner, entry.flow, now if now >= ready else ready, PARKED)
        if wants.loan is not None:
            self._suspects.append(other)
        other.line = line
        other.clock = other.deadline = NEVER
        other.passes = entry.passes
        other.queued = False
        other.blocked_by = entry.blocked_by[-1:]
        other.rank = (rank[0], rank[1], rank[2], rank[3], other)
        entry.rank = None
        heappush(line.bay.heap, other.rank)
        line.bay.left()
        del line.parked[entry]
        line.parked[other] = None
        if self.notes is not None:
            self.notes.append(("waiting", other, other.blocked_by[0]))

    def orphan(self, entry: Entry[OwnerT], now: float) -> list[Entry[OwnerT]]:
        """The result of a granted entry is sealed while its work goes on: it keeps what it holds, but is nobody's
        sibling now.
        """
        if entry.status != GRANTED or entry.orphan:
            self._late += 1
            return []
        entry.orphan = True
        flow = entry.flow
        del flow.running[entry]
        self._orphans[entry] = None
        self.ledger.mark_orphan(entry.wants, 1)
        if flow.lines:
            self._let_go(flow, self.ledger.states(entry.wants), now)
        for claimant in [one for one in self._claimants if one.line.bay.barred]:
            self._unclaim(claimant)
        return self._settle(now)

    def cancel(self, entry: Entry[OwnerT], now: float, code: Code = "cancelled") -> list[Entry[OwnerT]]:
        """A parked entry is given up: it is rejected and never starts. Ignored and counted once it was decided."""
        if entry.status != PARKED:
            self._late += 1
            return []
        self._reject(entry, code, now)
        return self._settle(now)

    def withdraw(self, flow: Flow[OwnerT], gone: Callable[[OwnerT], bool]) -> list[OwnerT]:
        """Take calls out of a run's backlog that were never handed in; returns their owners. Decides nothing."""
        out: list[OwnerT] = []
        for line in flow.lines.values():
            if line.backlog is not None:
                kept: deque[Offer[OwnerT]] = deque()
                for one in line.backlog:
                    if gone(one[1]):
                        out.append(one[1])
                    else:
                        kept.append(one)
                line.backlog = kept or None
                self._ended.append((flow, line))
        self._sweep()
        return out

    def tick(self, now: float) -> list[Entry[OwnerT]]:
        """Time has passed: those whose wait is over are rejected."""
        decided: list[Entry[OwnerT]] = []
        deadlines = self._deadlines
        while True:
            for flow in deadlines.over(now):
                for entry in flow.parked:
                    self._reject(entry, "deadline_exceeded", now)
                self._refills += [(flow, line, now) for line in flow.lines.values()]
            for entry in deadlines.due(now):
                self._look_at(entry, now)
            decided += self._settle(now)
            self.wake_at = deadlines.first()
            if self.wake_at > now:  # a successor inherits its clock, so it may be over at once
                return decided

    def expand(self, more: Callable[[Wants[Lot[OwnerT]]], Wants[Lot[OwnerT]]]) -> None:
        """A tool was declared that makes further locks necessary (intentions above nested keys): take them in flight.

        What is added conflicts only with locks that nobody could ask for until now, so it is always free.
        """
        for flow in (*self._flows.values(), *self._closed):
            for entry in flow.running:
                self._widen(entry, more)
            for line in flow.lines.values():
                for entry in line.parked:
                    entry.wants = more(entry.wants)
                if line.backlog is not None:
                    line.backlog = deque((more(wants), owner, ready) for wants, owner, ready in line.backlog)
        for entry in self._orphans:
            self.ledger.mark_orphan(entry.wants, -1)
            self._widen(entry, more)
            self.ledger.mark_orphan(entry.wants, 1)

    def _widen(self, entry: Entry[OwnerT], more: Callable[[Wants[Lot[OwnerT]]], Wants[Lot[OwnerT]]]) -> None:
        before = set(entry.wants.holds)
        entry.wants = more(entry.wants)
        self.ledger.take_holds(hold for hold in entry.wants.holds if hold not in before)

    # ------------------------------------------------------------------ coming in

    def _enter(
        self, flow: Flow[OwnerT], one: Offer[OwnerT], clock: float, now: float, *, again: bool = False
    ) -> Line[OwnerT] | None:
        """Grant it, park it, reject it, or put it into the backlog of the line that is returned.

        Full queues refuse those who come, not those who have stood behind siblings (`again`).
        """
        wants, owner, _ = one
        if now >= flow.limit:
            self._refuse(Entry(wants, owner, flow, now, REJECTED), "deadline_exceeded", "run deadline")
            return None
        ledger = self.ledger
        state = ledger.blocker(wants)
        if state is None and self._claimants and wants.loan is None:
            state = self._hidden(wants, wants.priority, NEVER)
        if state is None:
            entry: Entry[OwnerT] = Entry(wants, owner, flow, now, GRANTED)
            ledger.take(wants)
            self._grant(entry, -wants.priority, NEVER, self._tag(flow, wants), self._number + 1)
            return None
        if wants.hopeless is not None:
            self._refuse(Entry(wants, owner, flow, now, REJECTED), "concurrency_limit", wants.hopeless.label)
        elif wants.wait or _in_turn(flow, state):
            line = self._line(flow, state, wants)
            standing = flow.holds(state, wants.loan)
            full = bool(wants.bounds) and not standing and self._full(wants)
            if line.parked and (len(line.parked) >= (1 if standing else flow.window) or (full and again)):
                line.behind(one)
                return line
            if full and not again:
                self._refuse(Entry(wants, owner, flow, now, REJECTED), "queue_full", ledger.label(state, wants))
            else:
                self._hand_in(flow, one, line, clock, now, standing=standing, counted=not (standing or full))
            return None
        else:
            self._refuse(Entry(wants, owner, flow, now, REJECTED), "concurrency_limit", ledger.label(state, wants))
        ledger.sweep(state)
        return None

    def _hand_in(
        self,
        flow: Flow[OwnerT],
        one: Offer[OwnerT],
        line: Line[OwnerT],
        clock: float,
        now: float,
        *,
        standing: bool,
        counted: bool,
    ) -> None:
        """Make it an entry that waits: counted and clocked unless it waits for its own siblings."""
        wants, owner, ready = one
        # Before that it was not ready, or its run held what it stood in line for.
        since = max(clock, ready, line.freed)
        entry: Entry[OwnerT] = Entry(wants, owner, flow, since, PARKED)
        entry.queued = counted and bool(wants.bounds)
        if entry.queued:
            queued = self._queued
            for key, _ in wants.bounds:
                queued[key] = queued.get(key, 0) + 1
        entry.passes = 0
        number = self._number = self._number + 1
        entry.rank = (-wants.priority, NEVER, self._tag(flow, wants), number, entry)
        self._parked += 1
        if self._parked > self._peak_parked:
            self._peak_parked = self._parked
        if not flow.parked_total:
            self._waiting += 1
            self._watch_limit(flow)
        flow.parked_total += 1
        entry.clock = entry.deadline = NEVER
        self._park(entry, line)
        if standing:
            line.standing += 1
        else:
            entry.clock = entry.since
            self._watch(entry, now)

    def _full(self, wants: Wants[Lot[OwnerT]]) -> bool:
        queued = self._queued
        return any(queued.get(key, 0) >= most for key, most in wants.bounds)

    def _tag(self, flow: Flow[OwnerT], wants: Wants[Lot[OwnerT]]) -> float:
        tag = flow.tag if flow.tag > self._served else self._served
        flow.tag = tag + wants.weight
        return tag

    def _refuse(self, entry: Entry[OwnerT], code: Code, blocker: str) -> None:
        entry.status = REJECTED
        entry.rejection = Rejection(code, blocker)
        self._decided.append(entry)

    # ------------------------------------------------------------------ waiting

    def _line(self, flow: Flow[OwnerT], state: State[Lot[OwnerT]], wants: Wants[Lot[OwnerT]]) -> Line[OwnerT]:
        """The flow's line among those who need of this state what this ask needs."""
        if isinstance(state, Pool):
            need: Need[OwnerT] = (
                next(units for pool, units in wants.pools if pool is state),
                wants.priority > 0,
                wants.loan,
            )
        else:
            assert isinstance(state, Node)
            need = (next(mode for key, mode in wants.holds if key == state.key), False, wants.loan)
        lot = state.lot
        if lot is None:
            lot = state.lot = Lot()
        bay = lot.bays.get(need)
        if bay is None:
            bay = lot.bays[need] = Bay(state, need)
        line = flow.lines.get(bay)
        if line is None:
            line = flow.lines[bay] = Line(bay)
            bay.lines += 1
            self._ended.append((flow, line))  # it ends at once when nobody comes to stand in it
        return line

    def _park(self, entry: Entry[OwnerT], line: Line[OwnerT]) -> None:
        bay, rank = line.bay, entry.rank
        lot = bay.state.lot
        assert lot is not None and rank is not None
        lot.count += 1
        bay.count += 1
        entry.line = line
        line.parked[entry] = None
        label = self.ledger.label(bay.state, entry.wants)
        if label not in entry.blocked_by:
            entry.blocked_by = (*entry.blocked_by, label)
        if entry.wants.loan is not None:
            self._suspects.append(entry)
        if self.notes is not None:
            self.notes.append(("waiting", entry, label))
        if rank[1] != NEVER:
            insort(lot.promoted, rank)
            self._claim(entry)
        else:
            entry.passes -= bay.passes
            heappush(bay.heap, rank)

    def _unpark(self, entry: Entry[OwnerT]) -> None:
        """Out of its lot; its rank, if it stays in the heap, is stale from now on."""
        line, rank = entry.line, entry.rank
        bay = line.bay
        lot = bay.state.lot
        assert lot is not None and rank is not None
        lot.count -= 1
        bay.count -= 1
        if rank[1] != NEVER:
            lot.promoted.remove(rank)
            self._unclaim(entry)
        else:
            entry.passes += bay.passes
        entry.rank = None
        bay.left()
        if entry.clock == NEVER:
            line.standing -= 1
        del line.parked[entry]
        if not line.parked:
            self._ended.append((entry.flow, line))

    def _leave(self, entry: Entry[OwnerT]) -> None:
        """It waits no more."""
        self._unpark(entry)
        self._parked -= 1
        flow = entry.flow
        flow.parked_total -= 1
        if not flow.parked_total:
            self._waiting -= 1
        if entry.queued:
            queued = self._queued
            for key, _ in entry.wants.bounds:
                if queued[key] == 1:
                    del queued[key]
                else:
                    queued[key] -= 1
            entry.queued = False

    def _reject(self, entry: Entry[OwnerT], code: Code, now: float) -> None:
        """A parked entry is refused; whoever stands behind it inherits its clock, and its run pays nothing for it."""
        flow, line = entry.flow, entry.line
        flow.tag -= entry.wants.weight
        if line.backlog:
            self._refills.append((flow, line, self._clock(entry, now)))
        self._leave(entry)
        self._refuse(entry, code, entry.blocked_by[-1])

    # ------------------------------------------------------------------ time

    def _watch(self, entry: Entry[OwnerT], now: float) -> None:
        deadline = self._deadlines.watch(entry, now, self._parked)
        if deadline < self.wake_at:
            self.wake_at = deadline

    def _watch_limit(self, flow: Flow[OwnerT]) -> None:
        if flow.limit != NEVER and not flow.timed:
            limit = self._deadlines.watch_limit(flow, len(self._flows))
            if limit < self.wake_at:
                self.wake_at = limit

    def _clock(self, entry: Entry[OwnerT], now: float) -> float:
        """From when its wait counts: not before the flow last let go of what it waits for."""
        line = entry.line
        if entry.clock == NEVER or entry.flow.holds(line.bay.state, entry.wants.loan):
            return now
        return line.freed if line.freed > entry.clock else entry.clock

    def _look_at(self, entry: Entry[OwnerT], now: float) -> None:
        """Its deadline has come: its wait is over, or its clock stands, or there is a later deadline."""
        if entry.flow.holds(entry.line.bay.state, entry.wants.loan):
            entry.clock = entry.deadline = NEVER
            entry.line.standing += 1
            return
        entry.clock = self._clock(entry, now)
        if entry.clock + entry.wants.max_wait <= now:
            self._reject(entry, "wait_timeout", now)
        else:
            self._watch(entry, now)

    def _let_go(self, flow: Flow[OwnerT], states: Iterable[State[Lot[OwnerT]]], now: float) -> None:
        """A running call of the flow let go. Where it was the last one, the flow waits for others now: its clocks
        start.
        """
        for state in states:
            lot = state.lot
            if lot is None:
                continue
            for bay in lot.bays.values():
                line = flow.lines.get(bay)
                if line is None or flow.holds(state, bay.need[2]):
                    continue
                line.freed = now
                if line.standing:
                    line.standing = 0
                    for entry in line.parked:
                        if entry.clock == NEVER:
                            entry.clock = now
                            self._watch(entry, now)
                self._refills.append((flow, line, now))

    # ------------------------------------------------------------------ going on

    def _grant(self, entry: Entry[OwnerT], klass: int, promotion: float, tag: float, number: int) -> None:
        """What it wants has been taken for it."""
        entry.status = GRANTED
        flow = entry.flow
        flow.running[entry] = None
        self._decided.append(entry)
        others = self._parked > flow.parked_total
        if tag > self._served:
            self._served = tag
        elif others:
            self._served += entry.wants.weight / (2 * self._waiting + 2)
        if others:
            self._count_passes(entry, (klass, promotion, tag, number))

    def _give(self, wants: Wants[Lot[OwnerT]]) -> tuple[State[Lot[OwnerT]], ...]:
        """Give back what it holds; those who wait for it are looked at."""
        states = self.ledger.states(wants)
        self.ledger.give(wants)
        self._changed += [state for state in states if state.lot is not None]
        return states

    def _hand_over(self, entry: Entry[OwnerT], now: float) -> bool:
        """The one waiter that could use what is given back wants the same permits: it gets them, and no count
        changes.
        """
        wants = entry.wants
        found: Lot[OwnerT] | None = None
        for state in self.ledger.states(wants):
            if state.lot is not None:
                if found is not None:
                    return False
                found = state.lot
        if found is None or found.promoted or len(found.bays) != 1:
            return False
        (bay,) = found.bays.values()
        rank = bay.head()
        assert rank is not None
        heir = rank[4]
        flow = heir.flow
        if heir.wants.pools is not wants.pools or heir.deadline <= now or flow.limit <= now:
            return False
        if heir.wants is not wants:
            if not isinstance(bay.state, Pool):
                return False
            self.ledger.give_holds(wants.holds)
            if not self.ledger.open(heir.wants.holds):
                self.ledger.take_holds(wants.holds)
                return False
            self.ledger.take_holds(heir.wants.holds)
        line = heir.line
        backlog = line.backlog
        if (
            len(line.parked) == 1
            and heir.clock == NEVER
            and not heir.queued
            and backlog
            and backlog[0][0].pools is wants.pools
        ):
            # The usual case: its next sibling takes its place. The same as below, less what would be done again.
            one = backlog.popleft()
            if self._parked == flow.parked_total:
                heir.status = GRANTED
                flow.running[heir] = None
                self._decided.append(heir)
                if rank[2] > self._served:
                    self._served = rank[2]
            else:
                self._grant(heir, *rank[:4])
            number = self._number = self._number + 1
            heir.passes = -bay.passes
            self._replace(heir, one, (rank[0], NEVER, self._tag(flow, one[0]), number, heir), now)
            return True
        self._leave(heir)
        self._grant(heir, *rank[:4])
        if backlog:
            self._succeed(flow, line, now)
        return True

    def _succeed(self, flow: Flow[OwnerT], line: Line[OwnerT], now: float) -> None:
        """Park whoever stands behind the one that was just granted, so that it takes part by its rank."""
        if line.backlog and not line.parked:
            self._hand_in(flow, line.backlog.popleft(), line, now, now, standing=True, counted=False)

    def _refill(self, flow: Flow[OwnerT], line: Line[OwnerT], clock: float, now: float) -> None:
        """Hand in from the backlog what may be handed in now; whoever refuses to wait has no turn to wait for any
        more.
        """
        state = line.bay.state
        for entry in [entry for entry in line.parked if not (entry.wants.wait or _in_turn(flow, state))]:
            self._reject(entry, "concurrency_limit", now)
        backlog, line.backlog = line.backlog, None
        self._ended.append((flow, line))
        while backlog:
            one = backlog.popleft()
            # Until that instant it had nothing but siblings before it, which whoever it stands behind next may not
            # know.
            later = one if one[2] >= clock else (one[0], one[1], clock)
            if self._enter(flow, later, clock, now, again=True) is line:  # it is where it was
                backlog.appendleft(one)
                line.backlog = backlog
                return

    def _settle(self, now: float) -> list[Entry[OwnerT]]:
        """The one tail: look at what changed until nothing changes any more, then hand out the decisions."""
        while self._changed or self._refills or self._suspects:
            if self._changed:
                states = list(dict.fromkeys(self._changed))
                self._changed.clear()
                self._pump(states, now)
            elif self._refills:
                self._refill(*self._refills.pop(0), now)
            else:
                self._break_deadlock(now)
        if self._ended:
            self._sweep()
        decided = self._decided
        if not decided:
            return []  # never the list that the next event fills
        self._decided = []
        return decided

    def _break_deadlock(self, now: float) -> None:
        """Nested calls have begun to wait: where they wait for one another in a circle, the youngest is refused."""
        suspects = [one for one in self._suspects if one.status == PARKED]
        self._suspects.clear()
        if not suspects:
            return
        flows = (*self._flows.values(), *self._closed)
        holders = [*(entry for flow in flows for entry in flow.running), *self._orphans]
        if all(may_go_on(one, holders) for one in suspects):
            return
        behind = [one[0] for flow in flows for line in flow.lines.values() for one in line.backlog or ()]
        left = stuck(holders, list(self._each_parked()), behind)
        if left:
            self._reject(max(left, key=_number), "would_deadlock", now)
            self._suspects = [one for one in left if one.status == PARKED]

    def _sweep(self) -> None:
        """Forget the lines in which nobody stands, and what was there for them alone."""
        for flow, line in self._ended:
            bay = line.bay
            if line.parked or line.backlog or flow.lines.pop(bay, None) is None:
                continue
            bay.lines -= 1
            if not bay.lines:
                lot = bay.state.lot
                assert lot is not None
                del lot.bays[bay.need]
                if not lot.bays:
                    bay.state.lot = None
                    self.ledger.sweep(bay.state)
        self._ended.clear()
        if not self._parked and self._deadlines.records:
            self._deadlines.clear()

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
                    if rank[4] not in stuck and (best is None or rank < best) and rank[4].line.bay.fits:
                        best = rank
                for bay in lot.bays.values():
                    if bay.count and bay not in stuck and bay.fits:
                        head = bay.head()
                        if head is not None and (best is None or head < best):
                            best = head
            if best is None:
                return
            klass, promotion, tag, number, entry = best
            flow, line, wants = entry.flow, entry.line, entry.wants
            if flow.limit <= now:
                self._reject(entry, "deadline_exceeded", now)
                continue
            if entry.deadline <= now and self._clock(entry, now) + wants.max_wait <= now:
                self._reject(entry, "wait_timeout", now)
                continue
            blocker = self.ledger.blocker(wants)
            if blocker is None and self._claimants and wants.loan is None:
                blocker = self._hidden(wants, -klass, promotion)
            if blocker is None:
                self._leave(entry)
                self.ledger.take(wants)
                self._grant(entry, klass, promotion, tag, number)
                if line.backlog:
                    self._succeed(flow, line, now)
            elif blocker is line.bay.state:
                stuck.add(line.bay if promotion == NEVER else entry)
            elif wants.wait or _in_turn(flow, blocker):
                self._move(entry, blocker, now)
            else:
                entry.blocked_by = (*entry.blocked_by, self.ledger.label(blocker, wants))
                self._reject(entry, "concurrency_limit", now)
                self.ledger.sweep(blocker)

    def _move(self, entry: Entry[OwnerT], blocker: State[Lot[OwnerT]], now: float) -> None:
        """Something else is in its way now. It is passed: what it was parked for goes to others."""
        flow, line, rank = entry.flow, entry.line, entry.rank
        assert rank is not None
        clock = self._clock(entry, now)
        standing = entry.clock == NEVER
        if line.backlog:
            self._refills.append((flow, line, clock))
        self._unpark(entry)
        held = flow.holds(blocker, entry.wants.loan)
        if not held:
            entry.passes += 1
        entry.rank = (*rank[:4], entry)
        if entry.passes >= self._passes:
            entry.rank = self._better(entry, rank)
        to = self._line(flow, blocker, entry.wants)
        entry.clock = NEVER if standing and held else clock
        self._park(entry, to)
        if entry.clock == NEVER:
            to.standing += 1
        elif standing:
            self._watch(entry, now)

    # ------------------------------------------------------------------ passing, promotion, claims

    def _count_passes(self, granted: Entry[OwnerT], key: tuple[int, float, float, int]) -> None:
        """A call got what waiters of other flows wait for who rank before it or below its class: they were passed."""
        flow = granted.flow
        klass = key[0]
        for state in self.ledger.states(granted.wants):
            lot = state.lot
            if lot is None or not lot.count:
                continue
            for rank in tuple(lot.promoted):
                waiter = rank[4]
                if waiter.flow is not flow and (klass < rank[0] or rank[:4] < key):
                    waiter.passes += 1
                    if waiter.passes >= self._passes:
                        lot.promoted.remove(rank)
                        waiter.rank = self._better(waiter, rank)
                        insort(lot.promoted, waiter.rank)
            for bay in lot.bays.values():
                head = bay.head()
                if head is not None and head[4].flow is not flow and (klass < head[0] or head[:4] < key):
                    bay.passes += 1
                    waiter = head[4]
                    if waiter.passes + bay.passes >= self._passes:
                        waiter.rank = self._better(waiter, head)
                        insort(lot.promoted, waiter.rank)
                        self._claim(waiter)

    def _better(self, entry: Entry[OwnerT], rank: Rank[OwnerT]) -> Rank[OwnerT]:
        """It was passed often enough: promoted, or, if it was before, raised by a class."""
        entry.passes = 0
        if rank[1] != NEVER:
            return (rank[0] - 1, rank[1], rank[2], rank[3], entry)
        self._promotions += 1
        if self.notes is not None:
            self.notes.append(("promoted", entry, entry.blocked_by[-1]))
        return (rank[0], float(self._promotions), rank[2], rank[3], entry)

    def _claim(self, entry: Entry[OwnerT]) -> None:
        """Hide what it needs from lower ranks, unless orphans bar its way."""
        if not entry.line.bay.barred and entry not in self._claimants:
            insort(self._claimants, entry, key=_promotion)

    def _unclaim(self, entry: Entry[OwnerT]) -> None:
        """Its claims are lifted: what they hid can be had by others."""
        if entry in self._claimants:
            self._claimants.remove(entry)
            self._changed += [state for state in self.ledger.states(entry.wants) if state.lot is not None]

    def _hidden(self, wants: Wants[Lot[OwnerT]], klass: int, promotion: float) -> State[Lot[OwnerT]] | None:
        """What is free by count but claimed by a waiter of better rank.

        Among claimants only the order of promotion counts; an unpromoted call gives way to claimants of its class or a
        higher one.
        """
        totals = {pool: pool.held + units for pool, units in wants.pools}
        rooms = {pool: pool.room(wants.priority) for pool in totals}
        for one in self._claimants:
            rank, other = one.rank, one.wants
            assert rank is not None
            if rank[1] >= promotion:
                break
            if promotion == NEVER and -rank[0] < klass:
                continue
            for pool, units in other.pools:
                if pool in totals:
                    totals[pool] += units
                    rooms[pool] = min(rooms[pool], pool.room(other.priority))
                    if totals[pool] > rooms[pool]:
                        return pool
            for key, mode in wants.holds:
                if any(key == that and not COMPATIBLE[mode][more] for that, more in other.holds):
                    return self.ledger.node_for(key)
        return None

    # ------------------------------------------------------------------ looking in

    def _each_parked(self) -> Iterator[Entry[OwnerT]]:
        for flow in self._flows.values():
            yield from flow.parked

    def parked_of(self, flow: Flow[OwnerT]) -> list[Entry[OwnerT]]:
        """The parked entries of a run."""
        return flow.parked

    def queue_lengths(self) -> dict[str, int]:
        """How many parked entries want permits of each pool, by pool key."""
        lengths: dict[str, int] = {}
        for entry in self._each_parked():
            for key, _ in entry.wants.permits:
                lengths[key] = lengths.get(key, 0) + 1
        return lengths

    def statistics(self) -> dict[str, int]:
        """Counts: flows, running, parked, most parked at once, behind (backlogs), orphans, claimants, promotions,
        late events.
        """
        flows = self._flows.values()
        return {
            "flows": len(flows),
            "running": sum(len(flow.running) for flow in (*flows, *self._closed)),
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
        self.ledger.validate(lambda lot: len(lot.bays))
        assert not (self._decided or self._changed or self._refills or self._ended or self._suspects), (
            "an event did not run to its end"
        )
        running = [entry for flow in (*self._flows.values(), *self._closed) for entry in flow.running]
        self._validate_holds([*running, *self._orphans])
        self._validate_lots()
        self._validate_flows()
        for parked in self._each_parked():
            self._validate_parked(parked)
        promotions = [_promotion(one) for one in self._claimants]
        assert promotions == sorted(promotions), "claims are out of order"
        if self._claimants:
            first = self._claimants[0]
            assert self.ledger.blocker(first.wants) is not None, f"{first} claims what it could have"
        watched = list(self._deadlines.watched())
        assert len(watched) == len(set(watched)) <= self._deadlines.records, "deadlines are miscounted"
        running_clocks = {one for one in self._each_parked() if one.clock + one.wants.max_wait < NEVER}
        assert set(watched) == running_clocks, "a clock is not watched, or one that stands is"
        assert self._deadlines.first() >= self.wake_at, "something would be woken too late"

    def _validate_holds(self, holders: list[Entry[OwnerT]]) -> None:
        permits: dict[str, int] = {}
        nodes: dict[tuple[str, int], int] = {}
        for entry in holders:
            assert entry.status == GRANTED, f"{entry} holds"
            assert entry.rank is None, f"{entry} holds and is ranked"
            assert entry.orphan is (entry in self._orphans), f"{entry} is an orphan, or not"
            for pool, units in self.ledger.own(entry.wants):
                permits[pool.key] = permits.get(pool.key, 0) + units
            for hold in entry.wants.holds:
                nodes[hold] = nodes.get(hold, 0) + 1
        for key, pool in self.ledger.pools.items():
            assert pool.held == permits.get(key, 0), f"{pool} should hold {permits.get(key, 0)}"
        for (key, mode), count in nodes.items():
            node = self.ledger.node(key)
            assert node is not None and node.counts[mode] == count, f"{node} should be held by {count} in mode {mode}"
        assert self.ledger.counts()[1] == len({key for key, _ in nodes}), "a node is held by nobody"
        self._validate_loans(holders)

    def _validate_loans(self, holders: list[Entry[OwnerT]]) -> None:
        lent: dict[tuple[Loan[Lot[OwnerT]], Pool[Lot[OwnerT]]], int] = {}
        out: dict[Loan[Lot[OwnerT]], int] = {}
        for entry in holders:
            if entry.wants.loan is None:
                continue
            for loan in entry.wants.loan.chain():
                out[loan] = out.get(loan, 0) + 1
                assert loan in self._lenders, f"{entry} borrows of one who has gone"
            for loan, pool, part in entry.wants.borrowed:
                lent[loan, pool] = lent.get((loan, pool), 0) + part
            for key, mode in entry.wants.holds:  # siblings exclude each other, ancestors exclude nobody below them
                above = list(entry.wants.loan.chain())
                for other in holders:
                    below = list(other.wants.loan.chain()) if other.wants.loan is not None else []
                    if other is entry or other.loan in above or (entry.loan is not None and entry.loan in below):
                        continue
                    for that, held in other.wants.holds:
                        assert that != key or COMPATIBLE[mode][held], f"{entry} and {other} hold one thing"
        for loan, entry in self._lenders.items():
            assert entry.loan is loan and entry in holders, f"{entry} lends what it does not hold"
            assert loan.out == out.get(loan, 0), f"{loan} has lost a borrower"
            for pool, part in loan.lent.items():
                assert 0 <= part == lent.get((loan, pool), 0) <= loan.units[pool], f"{loan} has lent what it has not"

    def _validate_lots(self) -> None:
        for state in self.ledger.states_with_lots():
            lot = state.lot
            assert lot is not None and lot.bays, f"{state} keeps an empty lot"
            assert lot.count == sum(bay.count for bay in lot.bays.values()), f"{state} miscounts its lot"
            assert lot.promoted == sorted(lot.promoted), f"{state} has its promoted out of order"
            for need, bay in lot.bays.items():
                assert (bay.state, bay.need) == (state, need), f"{state} has lost a bay"
                lines = [flow.lines[bay] for flow in self._flows.values() if bay in flow.lines]
                assert bay.lines == len(lines) > 0, f"{state} keeps a bay for nobody"
                parked = {entry for line in lines for entry in line.parked}
                first = {rank[4] for rank in lot.promoted if rank[4].line.bay is bay}
                live = [rank[4] for rank in bay.heap if rank[4].rank is rank]
                assert bay.count == len(parked) == len(live) + len(first), f"{state} miscounts a bay"
                assert parked == first | set(live), f"{state} has lost somebody"
                assert len(bay.heap) <= max(2 * bay.count, 64) + 1, f"{state} keeps stale ranks"

    def _validate_flows(self) -> None:
        queued: dict[str, int] = {}
        parked = 0
        for flow in self._flows.values():
            assert flow.parked_total == len(flow.parked), f"{flow} miscounts what it parks"
            parked += flow.parked_total
            for bay, line in flow.lines.items():
                lot = bay.state.lot
                assert line.bay is bay and lot is not None and lot.bays[bay.need] is bay, f"{flow} waits in no lot"
                assert line.parked, f"{flow} keeps an empty line"
                standing = [entry for entry in line.parked if entry.clock == NEVER]
                assert line.standing == len(standing), f"{flow} miscounts who stands"
                assert not standing or flow.holds(bay.state, bay.need[2]), (
                    f"{flow} waits for others with clocks that stand"
                )
                if line.backlog:
                    bounded = any(one[0].bounds for one in line.backlog)  # a queue may be full for some of them
                    most = 1 if bounded or flow.holds(bay.state, bay.need[2]) else flow.window
                    assert len(line.parked) >= most, f"{flow} has forgotten a line"
                for entry in line.parked:
                    assert entry.flow is flow and entry.line is line, f"{entry} stands in a wrong line"
                    assert entry.wants.wait or _in_turn(flow, bay.state), f"{entry} refuses to wait"
                    for key, _ in entry.wants.bounds if entry.queued else ():
                        queued[key] = queued.get(key, 0) + 1
            assert not flow.lines or flow.timed or flow.limit == NEVER, f"{flow} is not stopped at its limit"
        assert parked == self._parked, f"{self._parked} parked by count, {parked} in lines"
        assert self._waiting == sum(flow.parked_total > 0 for flow in self._flows.values()), "flows are miscounted"
        assert queued == self._queued, "queues are miscounted"

    def _validate_parked(self, entry: Entry[OwnerT]) -> None:
        rank, bay = entry.rank, entry.line.bay
        assert entry.status == PARKED, f"{entry} stands in a lot"
        assert entry not in entry.flow.running, f"{entry} holds and waits"
        assert rank is not None and rank[4] is entry, f"{entry} has no rank"
        hidden = self._hidden(entry.wants, -rank[0], rank[1]) if entry.wants.loan is None else None
        assert self.ledger.blocker(entry.wants) is not None or hidden is not None, f"{entry} waits for nothing"
        if hidden is not None:
            self.ledger.sweep(hidden)
        if bay.fits:  # then its state must be claimed, if not only that state
            here: Wants[Lot[OwnerT]] = Wants(0, "", (), (), priority=entry.wants.priority)
            here.pools = tuple(one for one in entry.wants.pools if one[0] is bay.state)
            here.holds = tuple(hold for hold in entry.wants.holds if hold[0] == bay.state.key)
            assert self._hidden(here, -rank[0], rank[1]) is bay.state, f"{entry} waits in a wrong lot"
        claims = entry in self._claimants
        assert claims == (entry.promoted and not bay.barred), f"{entry} claims, or does not"

    def __repr__(self) -> str:
        figures = ", ".join(f"{name}={count}" for name, count in self.statistics().items())
        return f"Gate({figures})"


def _in_turn(flow: Flow[OwnerT], state: State[Lot[OwnerT]]) -> bool:
    """Is it the run's own pool, full of its own calls? Then even those who refuse to wait are only not yet their
    turn.
    """
    return isinstance(state, Pool) and state.scope == "run" and flow.holds(state)


def _number(entry: Entry[OwnerT]) -> int:
    assert entry.rank is not None
    return entry.rank[3]


def _promotion(entry: Entry[OwnerT]) -> float:
    assert entry.rank is not None
    return entry.rank[1]
