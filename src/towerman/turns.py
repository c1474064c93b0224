"""Whose turn it is: who comes in, who goes on, who moves to another lot, until nothing changes any more.

Parking. Whoever cannot start is parked for the first thing that is in its way (lots). A change looks only at the lots
of the states that changed. The head of a bay that could be served is tried: it is granted, or it moves to the lot of
what blocks it now. So every waiter stands where the next change that concerns it is noticed. A grant is recorded in the
same step that picks the waiter, so there is no moment in which a permit belongs to nobody and none in which it belongs
to two.

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

House rules. Whoever changes something only notes it; `_settle`, the one tail, looks at what was noted. Exactly one
decision for each entry.

Not here: what the events are (gate), the books of those who wait (waiting), who can never start (deadlock).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from heapq import heappush
from typing import Final, TypeVar

from towerman.calls import Rejection
from towerman.deadlock import may_go_on, stuck
from towerman.errors import Code
from towerman.ledger import Fuse, Ledger, Meter, Node, Pool, State, Wants
from towerman.lots import (
    DONE,
    GRANTED,
    NEVER,
    PARKED,
    REJECTED,
    SLACK,
    Backlog,
    Bay,
    Entry,
    Flow,
    Kind,
    Line,
    Lot,
    Offer,
    Rank,
    Urgency,
    kind_of,
)
from towerman.waiting import Waiting

OwnerT = TypeVar("OwnerT")

KINDS: Final = 256
"""Kinds of calls that are looked at to move a backlog as one; where there are more, each call is looked at."""


class Turns(Waiting[OwnerT]):
    """Decides, on top of the books, what a change leads to."""

    __slots__ = ("_decided", "_refills", "_served", "_urgency")

    def __init__(self, ledger: Ledger[Lot[OwnerT]], passes: int) -> None:
        super().__init__(ledger, passes)
        self._served = 0.0
        self._urgency: Callable[[OwnerT], Urgency] | None = None
        # Filled and emptied within one event.
        self._decided: list[Entry[OwnerT]] = []
        self._refills: list[tuple[Flow[OwnerT], Line[OwnerT], float]] = []

    # ------------------------------------------------------------------ time

    def _at(self, now: float) -> None:
        """An event comes at this instant: rates whose time has come are looked at in it."""
        by = self.ledger.at(now)
        if by:
            self._deadlines.shift_alarms(by)
            self.wake_at = min(self.wake_at, self._deadlines.first())
        if self._paced:
            self._look_ahead()
        self._look_at_rates()

    def _look_at_rates(self) -> None:
        """Rates whose time has come are looked at in this event."""
        due = self._deadlines.rates_due(self.ledger.instant)
        self._changed += [meter for meter in due if meter.lot is not None]

    # ------------------------------------------------------------------ coming in

    def _enter(
        self, flow: Flow[OwnerT], one: Offer[OwnerT], clock: float, now: float, *, again: bool = False
    ) -> Line[OwnerT] | None:
        """Grant it, park it, reject it, or return the line in whose backlog it has to stand.

        Full queues refuse those who come, not those who have stood behind siblings (`again`).
        """
        wants, owner, _ = one
        if now >= flow.limit:
            self._refuse(Entry(wants, owner, flow, now, REJECTED), *flow.over)
            return None
        ledger = self.ledger
        if wants.fuses:
            fuse = ledger.shut(wants)
            if fuse is not None:
                self._shut_out(Entry(wants, owner, flow, now, REJECTED), fuse)
                return None
        state = ledger.blocker(wants)
        if state is None and (self._claimants or self._paced) and wants.loan is None:
            state = self._hidden(wants, wants.priority, NEVER)
        if state is None and flow.away and wants.wait:
            crowd = self._crowd(flow, wants)
            if crowd is not None:
                return crowd
        if state is None:
            entry: Entry[OwnerT] = Entry(wants, owner, flow, now, GRANTED)
            ledger.take(wants)
            self._grant(entry, -wants.priority, NEVER, self._tag(flow, wants), self._number + 1)
            return None
        hopeless = ledger.hopeless(wants)
        if hopeless is not None:
            self._refuse(Entry(wants, owner, flow, now, REJECTED), "concurrency_limit", hopeless.label)
        elif isinstance(state, Meter) and (not wants.wait or self._in_vain(wants, state, clock, now)):
            left = self._seconds_left(state, wants.priority)
            self._refuse(Entry(wants, owner, flow, now, REJECTED), "rate_limited", state.label, left)
        elif wants.wait or flow.in_turn(state):
            line = self._line(flow, state, wants)
            standing = flow.holds(state, wants.loan)
            full = bool(wants.bounds) and not standing and self._full(wants)
            if line.parked and (len(line.parked) >= (1 if standing else flow.window) or (full and again)):
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

    def _crowd(self, flow: Flow[OwnerT], wants: Wants[Lot[OwnerT]]) -> Line[OwnerT] | None:
        """The line of those of its run who wait for the engine's answer about what it wants, too, if they are so many
        that it is no use to ask for one more.
        """
        for bay, line in flow.lines.items():
            need, state = bay.need, bay.state
            if not need[3] or not line.parked:
                continue
            if isinstance(state, Pool):
                wanted = (state, need[0]) in wants.pools
            elif isinstance(state, Node):
                wanted = (state.key, need[0]) in wants.holds
            else:
                wanted = state in wants.meters
            if not wanted or need[2] is not wants.loan:
                continue
            if len(line.parked) >= (1 if flow.holds(state, wants.loan) else flow.window):
                return line
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

    def _stand(self, flow: Flow[OwnerT], line: Line[OwnerT], one: Offer[OwnerT], now: float) -> None:
        """It has to stand behind others of its run: as they came, or by urgency."""
        urgency = self._urgency
        if not flow.urgent or urgency is None:
            line.behind(one)
            return
        backlog = line.backlog
        if backlog is None:
            backlog = line.backlog = Backlog()
        self._put_in_order(backlog, urgency)
        mine = urgency(one[1])
        place, end = 0, len(backlog)
        while place < end:  # as bisect_right does it, less a call for each that is looked at
            middle = (place + end) // 2
            if mine < urgency(backlog[middle][1]):
                end = middle
            else:
                place = middle + 1
        backlog.insert(place, one)
        if not place:
            self._lead(flow, line, now)

    @staticmethod
    def _put_in_order(backlog: Backlog[OwnerT], urgency: Callable[[OwnerT], Urgency]) -> None:
        """Those who came before their run went by urgency go by it, too."""
        if not backlog.ordered:
            backlog.spread()
            ordered = sorted(backlog, key=lambda one: urgency(one[1]))
            backlog.clear()
            backlog.extend(ordered)
            backlog.ordered = True

    def _lead(self, flow: Flow[OwnerT], line: Line[OwnerT], now: float) -> None:
        """The first of those who stand behind may be more urgent than one who is parked before them."""
        backlog, urgency = line.backlog, self._urgency
        if not backlog or urgency is None:
            return
        self._put_in_order(backlog, urgency)
        one = backlog[0]
        mine = urgency(one[1])
        # Who waits for its own siblings only, as this one does, changes places with it: nothing but the order between
        # the two is at stake. So whoever is parked is no less urgent than those behind.
        late: Entry[OwnerT] | None = None
        most = mine
        for parked in line.parked if not line.bay.need[3] else ():  # the engine knows who stands there
            other = urgency(parked.owner)
            if other > most and parked.clock == NEVER and not (parked.queued or parked.promoted):
                late, most = parked, other
        if late is None:
            return
        rank = late.rank
        assert rank is not None
        del backlog[0]
        place = bisect_left(backlog, most, key=lambda other: urgency(other[1]))  # it came before its equals
        backlog.insert(place, (late.wants, late.owner, late.since))
        number = self._number = self._number + 1
        self._replace(late, one, (*rank[:3], number, late), now)
        late.status = DONE

    def _tag(self, flow: Flow[OwnerT], wants: Wants[Lot[OwnerT]]) -> float:
        tag = flow.tag if flow.tag > self._served else self._served
        flow.tag = tag + wants.weight
        return tag

    @staticmethod
    def _in_vain(wants: Wants[Lot[OwnerT]], meter: Meter[Lot[OwnerT]], clock: float, now: float) -> bool:
        """Would its wait be over before the rate lets anybody in?"""
        return meter.seconds_left(wants.priority) > clock + wants.max_wait - now

    def _refuse(self, entry: Entry[OwnerT], code: Code, blocker: str, retry_after: float | None = None) -> None:
        entry.status = REJECTED
        entry.rejection = Rejection(code, blocker, retry_after)
        self._decided.append(entry)

    def _shut_out(self, entry: Entry[OwnerT], fuse: Fuse) -> None:
        self._refuse(entry, "circuit_open", fuse.label, self.ledger.reopens(fuse))

    def _reject(self, entry: Entry[OwnerT], code: Code, now: float, fuse: Fuse | None = None) -> None:
        """A parked entry is refused; whoever stands behind it inherits its clock, and its run pays nothing for it.

        `fuse`: the breaker that does not let it through.
        """
        flow, line = entry.flow, entry.line
        flow.tag -= entry.wants.weight
        if line.backlog:
            self._refills.append((flow, line, self._clock(entry, now)))
        state = line.bay.state
        left = self._seconds_left(state, entry.wants.priority) if isinstance(state, Meter) else None
        self._leave(entry)
        if entry.there is not None:
            if code == "wait_timeout" and entry.there.unreached:
                code = "engine_unavailable"
            entry.there.over()
        if fuse is not None:
            self._shut_out(entry, fuse)
        else:
            self._refuse(entry, code, entry.blocked_by[-1], left)

    # ------------------------------------------------------------------ going on

    def _grant(self, entry: Entry[OwnerT], klass: int, promotion: float, tag: float, number: int) -> None:
        """What it wants has been taken for it."""
        entry.status = GRANTED
        flow = entry.flow
        flow.running[entry] = None
        self._decided.append(entry)
        if entry.wants.marked:
            self._marks[entry] = self.ledger.let_in(entry.wants)
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
        if wants.marked:
            return False  # time may be in its heir's way
        if self.ledger.uneven and not all(pool.held <= pool.room(wants.priority) for pool, _ in wants.pools):
            return False  # more is held than those who wait now may have
        found: Lot[OwnerT] | None = None
        for state in self.ledger.states(wants) if wants.holds else wants.pool_states:
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
        if flow.away:  # it may have to stand behind those of its run who wait for the engine, or be one of them
            return False
        if flow.urgent and flow.parked_total > 1:
            return False  # another one of its run may be more urgent
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
            if not backlog:
                backlog.come_near()
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
        if isinstance(line.bay.state, Meter):  # which a run never holds: as many stand there as it may have running
            self._refills.append((flow, line, now))
        elif line.backlog and (not line.parked or (flow.urgent and self._leads(line, line.backlog[0]))):
            self._hand_in(flow, line.backlog.next(), line, now, now, standing=True, counted=False)

    def _leads(self, line: Line[OwnerT], one: Offer[OwnerT]) -> bool:
        """Is one that stands behind more urgent than all who are parked there, who came from elsewhere?"""
        urgency = self._urgency
        assert urgency is not None
        mine = urgency(one[1])
        return all(mine < urgency(parked.owner) for parked in line.parked)

    def _refill(self, flow: Flow[OwnerT], line: Line[OwnerT], clock: float, now: float) -> None:
        """Hand in from the backlog what may be handed in now; whoever refuses to wait has no turn to wait for any
        more.
        """
        state = line.bay.state
        if isinstance(state, Pool) and state.scope == "run":  # only there those wait who refuse to
            for entry in [entry for entry in line.parked if not (entry.wants.wait or flow.in_turn(state))]:
                self._reject(entry, "concurrency_limit", now)
        backlog, line.backlog = line.backlog, None
        if backlog is None:
            return
        self._ended.append((flow, line))
        places: dict[Kind, Backlog[OwnerT]] = {}
        # Until then they had nothing but siblings before them, which whoever they stand behind next may not know.
        since = max(clock, backlog.since)
        while backlog:
            one = backlog.next()
            later = one if one[2] >= since else (one[0], one[1], since)
            kind = kind_of(one[0])
            place = places.get(kind)
            if place is not None:  # nothing has changed since one of its kind came to stand there
                place.append(later)
                continue
            to = self._enter(flow, later, clock, now, again=True)
            if to is line:  # it is where it was
                backlog.appendleft(one)
                line.backlog = backlog
                if flow.urgent:
                    self._lead(flow, line, now)  # one that came meanwhile may be parked there
                return
            if to is None:
                continue
            if flow.urgent:
                alone = not to.backlog
                self._stand(flow, to, later, now)
                there = to.backlog
                if there is None or not alone or there[0] is not later:
                    continue  # others stand there, or it has changed places with the one that is parked
            else:
                there = to.behind(later)
            if self._claimants or isinstance(to.bay.state, Node):
                continue
            if backlog and there.size == 1 and self._all_wait(backlog, to, clock, now):
                # Whatever is in their way, that is, too: they move as one, since they may be thousands.
                backlog.appendleft(there[0])
                backlog.since = since
                to.backlog = backlog
                return
            if not flow.urgent:
                places[kind] = there

    def _all_wait(self, backlog: Backlog[OwnerT], line: Line[OwnerT], clock: float, now: float) -> bool:
        """Is that line's state the first limit in the way of all of these, and may each of them wait for it?"""
        state, (units, high, loan, away) = line.bay.state, line.bay.need
        if away or len(backlog.kinds) > KINDS:
            return False
        for wants in backlog.kinds.values():
            if not wants.wait or wants.fuses or (wants.priority > 0) is not high:
                return False
            if self.ledger.hopeless(wants) is not None or self.ledger.limit_in_the_way(wants) is not state:
                return False
            if isinstance(state, Meter):
                if self._in_vain(wants, state, clock, now):
                    return False
            elif wants.loan is not loan or (state, units) not in wants.pools:
                return False
        return True

    def _note_freed(self, flow: Flow[OwnerT], states: Iterable[State[Lot[OwnerT]]], now: float) -> None:
        """Until now the flow has held these, so nobody of it has waited for others there."""
        for bay, line in flow.lines.items():
            if bay.state in states and not flow.holds(bay.state, bay.need[2]):
                line.freed = now

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

    # ------------------------------------------------------------------ until nothing changes

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

    def _look_again(self) -> list[State[Lot[OwnerT]]]:
        """What has changed so far in this event; it stays noted."""
        states = self._changed = list(dict.fromkeys(self._changed))
        return list(states)

    def _most_urgent(self, first: Entry[OwnerT], stuck: set[Bay[OwnerT] | Entry[OwnerT]]) -> Entry[OwnerT]:
        """Of a run whose turn it is, the most urgent one that could be served: its turn is the run's, not a call's."""
        urgency, rank = self._urgency, first.rank
        assert urgency is not None and rank is not None
        found, least = first, urgency(first.owner)
        for bay, line in first.flow.lines.items():
            if bay in stuck or not bay.fits:
                continue
            for one in line.parked:
                other = one.rank
                assert other is not None
                if one is first or one in stuck or other[:2] != rank[:2]:
                    continue
                mine = urgency(one.owner)
                if mine < least:
                    found, least = one, mine
        return found

    def _give_way(self, first: Rank[OwnerT], entry: Entry[OwnerT]) -> None:
        """A more urgent one of its run goes in its turn: it has that one's turn for it."""
        rank, late = entry.rank, first[4]
        assert rank is not None
        number = self._number = self._number + 1
        late.rank = (*rank[:3], number, late)
        bay = late.line.bay
        heappush(bay.heap, late.rank)
        if len(bay.heap) > SLACK:
            bay.left()

    def _pump(self, states: list[State[Lot[OwnerT]]], now: float, before: Urgency | None = None) -> None:
        """Try those parked for these states, best rank first, until none of them can be served.

        `before`: only those who are no less urgent than that; then all who are parked are of one run.
        """
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
                break
            klass, promotion, tag, number, entry = best
            flow = entry.flow
            if flow.urgent and promotion == NEVER and flow.parked_total > 1:
                entry = self._most_urgent(entry, stuck)
            if before is not None and self._urgency is not None and self._urgency(entry.owner) > before:
                break
            line, wants = entry.line, entry.wants
            if flow.limit <= now:
                self._reject(entry, flow.over[0], now)
                continue
            if entry.deadline <= now and self._clock(entry, now) + wants.max_wait <= now:
                self._reject(entry, "wait_timeout", now)
                continue
            fuse = self.ledger.shut(wants) if wants.fuses else None
            if fuse is not None:
                self._reject(entry, "circuit_open", now, fuse)
                continue
            blocker = self.ledger.blocker(wants)
            if blocker is None and (self._claimants or self._paced) and wants.loan is None:
                blocker = self._hidden(wants, -klass, promotion)
            if blocker is None and flow.away and wants.wait and entry.there is None:
                crowd = self._crowd(flow, wants)
                if crowd is not None:
                    self._stand_behind(entry, crowd, now)
                    continue
            if blocker is None:
                if entry is not best[4]:
                    self._give_way(best, entry)
                self._leave(entry)
                self.ledger.take(wants)
                self._grant(entry, klass, promotion, tag, number)
                if line.backlog:
                    self._succeed(flow, line, now)
            elif blocker is line.bay.state:
                stuck.add(line.bay if promotion == NEVER else entry)
            elif isinstance(blocker, Meter) and (
                not wants.wait or self._in_vain(wants, blocker, self._clock(entry, now), now)
            ):
                self._reject_for(entry, blocker, now)
            elif (hopeless := self.ledger.hopeless(wants)) is not None:  # a limit was lowered while it stood behind
                entry.blocked_by = (*entry.blocked_by, hopeless.label)
                self._reject(entry, "concurrency_limit", now)
                self.ledger.sweep(blocker)
            elif wants.wait or flow.in_turn(blocker):
                self._move(entry, blocker, now)
            else:
                entry.blocked_by = (*entry.blocked_by, self.ledger.label(blocker, wants))
                self._reject(entry, "concurrency_limit", now)
                self.ledger.sweep(blocker)
        for state in states:
            if isinstance(state, Meter):
                self._set_alarm(state)

    def _reject_for(self, entry: Entry[OwnerT], meter: Meter[Lot[OwnerT]], now: float) -> None:
        """A rate that it comes to now will not let it in before its wait is over."""
        if meter.label not in entry.blocked_by:
            entry.blocked_by = (*entry.blocked_by, meter.label)
        self._reject(entry, "rate_limited", now)
        entry.rejection = Rejection("rate_limited", meter.label, self._seconds_left(meter, entry.wants.priority))

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
        full = to.parked and (held or len(to.parked) >= flow.window)  # no more of its run take part there
        if flow.urgent and standing and full and not (entry.queued or entry.promoted):
            self._stand_back(entry, to, now)
        else:
            entry.clock = NEVER if standing and held else clock
            self._park(entry, to)
            if entry.clock == NEVER:
                to.standing += 1
            elif standing:
                self._watch(entry, now)
        if flow.urgent and line.backlog and not line.parked and flow.holds(line.bay.state, entry.wants.loan):
            # Before a less urgent one of its run, which is parked elsewhere, is tried.
            self._hand_in(flow, line.backlog.next(), line, now, now, standing=True, counted=False)

    def _stand_back(self, entry: Entry[OwnerT], line: Line[OwnerT], now: float) -> None:
        """It has waited for its own siblings only, and stands behind others of them now: it is no entry any more, as if
        it had come here in the first place.
        """
        flow, wants = entry.flow, entry.wants
        self._parked -= 1
        flow.parked_total -= 1
        flow.tag -= wants.weight
        entry.status, entry.rank = DONE, None
        if self.notes is not None:
            self.notes.append(("waiting", entry, self.ledger.label(line.bay.state, wants)))
        self._stand(flow, line, (wants, entry.owner, entry.since), now)

    def _stand_behind(self, entry: Entry[OwnerT], line: Line[OwnerT], now: float) -> None:
        """Those of its run who want the same wait for the engine: it stands behind them, and is no entry any more."""
        flow, wants, before = entry.flow, entry.wants, entry.line
        if before.backlog:
            self._refills.append((flow, before, self._clock(entry, now)))
        self._leave(entry)
        flow.tag -= wants.weight
        entry.status = DONE
        if self.notes is not None:
            self.notes.append(("waiting", entry, self.ledger.label(line.bay.state, wants)))
        self._stand(flow, line, (wants, entry.owner, entry.since), now)

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
        backlogs = [line.backlog for flow in flows for line in flow.lines.values() if line.backlog]
        behind = [one[0] for backlog in backlogs for one in backlog.everyone()]
        left = stuck(holders, list(self._each_parked()), behind)
        if left:
            self._reject(max(left, key=_number), "would_deadlock", now)
            self._suspects = [one for one in left if one.status == PARKED]

    # ------------------------------------------------------------------ looking in

    def validate(self) -> None:
        """Raise AssertionError, with the story, when something that must hold between events does not."""
        super().validate()
        assert not (self._decided or self._refills), "an event did not run to its end"


def _number(entry: Entry[OwnerT]) -> int:
    assert entry.rank is not None
    return entry.rank[3]
