"""The books of those who wait: into a lot and out of it, their clocks, who was passed, what the passed ones claim.

Theory. Whoever is parked stands in one line (lots), has one rank, and at most one clock that runs. Its wait counts from
the instant at which it was handed in, or at which its run last let go of what it waits for; while its run holds some
of that, the clock stands.

Passing. What fits may pass what does not. A waiter is passed when a call of another flow gets some of what it is
parked for, although that call ranks behind it or is of a higher class; and when it is tried in vain and moves on. The
first of a bay is counted, and those behind it are taken to be passed with it. One that was passed 16 times is
promoted: it goes before every unpromoted waiter of its class and claims what it needs, that is hides free capacity
from lower ranks, unless orphans alone would keep it waiting (that could last for ever). Claims compare by order of
promotion alone: one order over the whole tower, or two claimants could wait for each other. Each 16 further passes
raise a promoted waiter's class by one, so that lower classes get on.

Of a rate a claimant hides one start, so that there is one when the rest is free. Whoever waits for a rate itself hides
no place of a pool, which would stand empty for as long as the rate says; of its other rates it hides a start once the
one that it waits for is no further away than a period of theirs, which is as long as a start takes to come back. So
whoever was promoted moves at most once from each thing that is in its way to the next: it is not passed by turns.

House rules. Each way in has its way out, and `validate()` adds everything up again. A line that has lost its last
entry is swept at the end of the event, so that it can be used again within it.

Not here: who is granted or rejected, and when (turns); what a lot looks like (lots).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from heapq import heappush
from typing import Generic, TypeVar

from towerman.calls import COMPATIBLE
from towerman.ledger import Ledger, Loan, Marks, Meter, Node, Pool, State, Wants
from towerman.lots import (
    ENGINE,
    GRANTED,
    HERE,
    NEVER,
    PARKED,
    SLACK,
    UNREACHED,
    Away,
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
from towerman.rates import MICRO

OwnerT = TypeVar("OwnerT")


class Waiting(Generic[OwnerT]):
    """Those who wait, and all that is counted about them.

    Args:
        ledger: where permits and access are held.
        passes: times that a waiter may be passed before it is promoted.

    Attributes:
        wake_at: the instant at which the next wait may be over; may be earlier than needed, never later.
        notes: None, or a list to which ("waiting" | "promoted", entry, label) is appended for whoever traces.
    """

    __slots__ = (
        "_ahead",
        "_changed",
        "_claimants",
        "_closed",
        "_deadlines",
        "_ended",
        "_flows",
        "_late",
        "_marks",
        "_lenders",
        "_number",
        "_orphans",
        "_paced",
        "_parked",
        "_passes",
        "_peak_parked",
        "_promotions",
        "_queued",
        "_suspects",
        "_waiting",
        "ledger",
        "notes",
        "wake_at",
    )

    def __init__(self, ledger: Ledger[Lot[OwnerT]], passes: int) -> None:
        self.ledger = ledger
        self.wake_at: float = NEVER
        self.notes: list[tuple[str, Entry[OwnerT], str]] | None = None
        self._passes = passes
        self._flows: dict[int, Flow[OwnerT]] = {}
        self._closed: list[Flow[OwnerT]] = []  # those of which something may still run
        self._number = 0
        self._promotions = 0
        self._parked = 0
        self._waiting = 0  # flows of which something is parked
        self._peak_parked = 0
        self._late = 0
        self._queued: dict[str, int] = {}
        self._claimants: list[Entry[OwnerT]] = []
        # Promoted, and parked for one of several rates; and of which of the others they claim a start.
        self._paced: list[Entry[OwnerT]] = []
        self._ahead: dict[Entry[OwnerT], tuple[Meter[Lot[OwnerT]], ...]] = {}
        self._orphans: dict[Entry[OwnerT], None] = {}
        self._deadlines: Deadlines[OwnerT] = Deadlines()
        self._lenders: dict[Loan[Lot[OwnerT]], Entry[OwnerT]] = {}
        self._marks: dict[Entry[OwnerT], Marks[Lot[OwnerT]]] = {}  # of granted entries that have some
        # Filled and emptied within one event.
        self._changed: list[State[Lot[OwnerT]]] = []
        self._suspects: list[Entry[OwnerT]] = []  # nested calls that have begun to wait for something else
        self._ended: list[tuple[Flow[OwnerT], Line[OwnerT]]] = []

    # ------------------------------------------------------------------ lots

    @staticmethod
    def _need(state: State[Lot[OwnerT]], wants: Wants[Lot[OwnerT]], away: Away = HERE) -> Need[OwnerT]:
        """What this ask needs of a state that it wants."""
        if isinstance(state, Pool):
            units = next(units for pool, units in wants.pools if pool is state)
            return units, wants.priority > 0, wants.loan, away
        if isinstance(state, Meter):
            return 1, wants.priority > 0, None, away  # nobody can lend a start
        assert isinstance(state, Node)
        return next(mode for key, mode in wants.holds if key == state.key), False, wants.loan, away

    def _line(
        self, flow: Flow[OwnerT], state: State[Lot[OwnerT]], wants: Wants[Lot[OwnerT]], away: Away = HERE
    ) -> Line[OwnerT]:
        """The flow's line among those who need of this state what this ask needs."""
        need = self._need(state, wants, away)
        lot = state.lot
        if lot is None:
            lot = state.lot = Lot()
        bay = lot.bays.get(need)
        if bay is None:
            bay = lot.bays[need] = Bay(state, need)
        line = flow.lines.get(bay)
        if line is None:
            line = flow.lines[bay] = Line(bay)
            flow.away += bool(away)
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
        label = ENGINE if bay.need[3] == UNREACHED else self.ledger.label(bay.state, entry.wants)
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
        if isinstance(bay.state, Meter):
            self._set_alarm(bay.state)

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
        bay = line.bay
        heappush(bay.heap, other.rank)
        if len(bay.heap) > SLACK:
            bay.left()
        del line.parked[entry]
        line.parked[other] = None
        if self.notes is not None:
            self.notes.append(("waiting", other, other.blocked_by[0]))

    def _full(self, wants: Wants[Lot[OwnerT]]) -> bool:
        queued = self._queued
        return any(queued.get(key, 0) >= most for key, most in wants.bounds)

    def _sweep(self) -> None:
        """Forget the lines in which nobody stands, and what was there for them alone."""
        for flow, line in self._ended:
            bay = line.bay
            if line.parked or line.backlog or flow.lines.pop(bay, None) is None:
                continue
            flow.away -= bool(bay.need[3])
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

    # ------------------------------------------------------------------ time

    def _watch(self, entry: Entry[OwnerT], now: float) -> None:
        deadline = self._deadlines.watch(entry, now, self._parked)
        if deadline < self.wake_at:
            self.wake_at = deadline

    def _set_alarm(self, meter: Meter[Lot[OwnerT]]) -> None:
        """Whoever waits for this rate is woken by time."""
        instant = self._deadlines.alarm(meter, self._free_of)
        if instant < self.wake_at:
            self.wake_at = instant

    def _seconds_left(self, meter: Meter[Lot[OwnerT]], priority: int) -> float:
        """How long it is at least until an unpromoted call of that priority may start by this rate: above 0 where it
        may not now, if only since what there is is claimed by others.
        """
        left = meter.seconds_left(priority)
        if left <= 0:
            kept = self._kept(meter, priority, NEVER)
            instant = meter.free_at(priority, kept) if kept else meter.instant
            left = (min(instant, meter.instant + meter.pace.period) - meter.instant) / MICRO
        return left

    def _free_of(self, bay: Bay[OwnerT]) -> int:
        """When those who wait in a bay of a rate may start by it, in microseconds, less what others claim."""
        meter = bay.state
        assert isinstance(meter, Meter)
        high = int(bay.need[1])
        if not (self._claimants or self._paced):
            return meter.free_at(high)
        assert meter.lot is not None
        ranks = [rank for rank in meter.lot.promoted if rank[4].line.bay is bay]
        head = bay.head()
        if head is not None:
            ranks.append(head)
        return min(meter.free_at(high, self._kept(meter, -rank[0], rank[1])) for rank in ranks)

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

    # ------------------------------------------------------------------ passing, promotion, claims

    def _count_passes(self, granted: Entry[OwnerT], key: tuple[int, float, float, int]) -> None:
        """A call got what waiters of other flows wait for who rank before it or below its class: they were passed."""
        flow = granted.flow
        klass = key[0]
        for state in (*self.ledger.states(granted.wants), *granted.wants.meters):
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
        bay = entry.line.bay
        if not bay.barred:
            if entry not in self._claimants:
                insort(self._claimants, entry, key=_promotion)
        elif self._is_paced(entry) and entry not in self._paced:
            insort(self._paced, entry, key=_promotion)
            self._ahead[entry] = self._near(entry)

    @staticmethod
    def _is_paced(entry: Entry[OwnerT]) -> bool:
        """Is it parked for one of several rates?"""
        bay = entry.line.bay
        return isinstance(bay.state, Meter) and not bay.need[3] and len(entry.wants.meters) > 1

    @staticmethod
    def _near(entry: Entry[OwnerT]) -> tuple[Meter[Lot[OwnerT]], ...]:
        """The other rates of which it will need a start soon: what is hidden of them comes back in the meantime."""
        meter = entry.line.bay.state
        assert isinstance(meter, Meter)
        left = meter.free_at(entry.wants.priority) - meter.instant
        return tuple(one for one in entry.wants.meters if one is not meter and left <= one.pace.period)

    def _look_ahead(self) -> None:
        """Time has passed: what waiters for several rates claim is looked at anew."""
        for entry in self._paced:
            before, now = self._ahead[entry], self._near(entry)
            if before != now:
                self._ahead[entry] = now
                self._changed += [meter for meter in before if meter not in now and meter.lot is not None]

    def _unclaim(self, entry: Entry[OwnerT]) -> None:
        """Its claims are lifted: what they hid can be had by others."""
        for claims in (self._claimants, self._paced):
            if entry in claims:
                claims.remove(entry)
                self._ahead.pop(entry, None)
                states = (*self.ledger.states(entry.wants), *entry.wants.meters)
                self._changed += [state for state in states if state.lot is not None]

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
        for meter in wants.meters:
            kept = self._kept(meter, klass, promotion) if meter.enforced else 0
            if kept and meter.free_at(wants.priority, kept) > meter.instant:
                return meter
        return None

    def _kept(self, meter: Meter[Lot[OwnerT]], klass: int, promotion: float) -> int:
        """Starts of a rate that waiters of better rank claim."""
        kept = 0
        for one in (*self._claimants, *self._paced):
            rank, other = one.rank, one.wants
            assert rank is not None
            if rank[1] >= promotion or (promotion == NEVER and -rank[0] < klass) or meter not in other.meters:
                continue
            kept += meter in self._ahead.get(one, other.meters)
        return kept

    # ------------------------------------------------------------------ looking in

    def _each_parked(self) -> Iterator[Entry[OwnerT]]:
        for flow in self._flows.values():
            yield from flow.parked

    def parked_of(self, flow: Flow[OwnerT]) -> list[Entry[OwnerT]]:
        """The parked entries of a run."""
        return flow.parked

    @property
    def anybody(self) -> bool:
        """Is somebody parked? May be asked without the lock."""
        return self._parked > 0

    def orphans(self) -> list[Entry[OwnerT]]:
        """Work that goes on after its result was sealed, the oldest first."""
        return list(self._orphans)

    def queue_lengths(self) -> dict[str, int]:
        """How many parked entries want permits of each pool, by pool key."""
        lengths: dict[str, int] = {}
        for entry in self._each_parked():
            for key, _ in entry.wants.permits:
                lengths[key] = lengths.get(key, 0) + 1
        return lengths

    def waiting_for(self, meter: Meter[Lot[OwnerT]]) -> int:
        """How many are parked for a rate, and would go but for it."""
        return meter.lot.count if meter.lot is not None else 0

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
        assert not (self._changed or self._ended or self._suspects), "an event did not run to its end"
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
        for entry in self._marks:
            assert entry in holders, f"{entry} has marks and holds nothing"
        for meter in self.ledger.meters.values():
            pending = sum(meter is one for marks in self._marks.values() if not marks.begun for one, _ in marks.meters)
            assert pending == meter.pace.pending or not meter.enforced, f"{meter} should have {pending} to begin"

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
                assert len(bay.heap) <= max(2 * bay.count, SLACK) + 1, f"{state} keeps stale ranks"

    def _validate_flows(self) -> None:
        queued: dict[str, int] = {}
        parked = 0
        for flow in self._flows.values():
            assert flow.parked_total == len(flow.parked), f"{flow} miscounts what it parks"
            assert flow.away == sum(bool(bay.need[3]) for bay in flow.lines), f"{flow} miscounts who waits elsewhere"
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
                for row in line.backlog.rows if line.backlog is not None else ():
                    assert line.backlog, f"{flow} has lost a row"
                    assert row.first < row.stop, f"{flow} keeps a row of nobody"
                if line.backlog and not bay.need[3]:
                    # A queue may be full for some of them.
                    bounded = any(one[0].bounds for one in line.backlog.everyone())
                    most = 1 if bounded or flow.holds(bay.state, bay.need[2]) else flow.window
                    assert len(line.parked) >= most, f"{flow} has forgotten a line"
                for entry in line.parked:
                    assert entry.flow is flow and entry.line is line, f"{entry} stands in a wrong line"
                    assert entry.wants.wait or flow.in_turn(bay.state), f"{entry} refuses to wait"
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
        if bay.need[3]:
            assert entry.there is not None and entry not in self._claimants, f"{entry} waits for nobody"
            return
        hidden = self._hidden(entry.wants, -rank[0], rank[1]) if entry.wants.loan is None else None
        assert self.ledger.blocker(entry.wants) is not None or hidden is not None, f"{entry} waits for nothing"
        if hidden is not None:
            self.ledger.sweep(hidden)
        if bay.fits:  # then its state must be claimed, if not only that state
            here: Wants[Lot[OwnerT]] = Wants(0, "", (), (), priority=entry.wants.priority)
            here.pools = tuple(one for one in entry.wants.pools if one[0] is bay.state)
            here.holds = tuple(hold for hold in entry.wants.holds if hold[0] == bay.state.key)
            here.meters = tuple(meter for meter in entry.wants.meters if meter is bay.state)
            assert self._hidden(here, -rank[0], rank[1]) is bay.state, f"{entry} waits in a wrong lot"
        claims = entry in self._claimants
        assert claims == (entry.promoted and not bay.barred), f"{entry} claims, or does not"
        paced = entry.promoted and self._is_paced(entry)
        assert paced == (entry in self._paced), f"{entry} claims a start, or does not"

    def __repr__(self) -> str:
        figures = ", ".join(f"{name}={count}" for name, count in self.statistics().items())
        return f"Gate({figures})"


def _promotion(entry: Entry[OwnerT]) -> float:
    assert entry.rank is not None
    return entry.rank[1]
