"""Who may start now, who waits and for what, who is refused: the state machine of admission.

Theory. Events come in (offer, finish, orphan, cancel, tick), decisions go out: the entries that were granted or
rejected in this step, exactly one decision for each entry. Nothing here waits, and time comes in as a number.

The gate is three rooms, one on top of the other. `waiting` keeps the books of those who wait; `turns` decides what a
change leads to, and has the rules of parking, rank and fair share; this one says what each event changes.

House rules. Every event ends in `_settle` (turns), the one tail. Late events for a decided entry are ignored and
counted. `validate()` says what must hold between events.

Not here: the arithmetic of what is held (ledger), order inside a batch (plan), running anything (runner). No
arguments, no tasks, no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeVar

from towerman.breaker import Verdict
from towerman.elsewhere import Elsewhere
from towerman.errors import Code
from towerman.ledger import Fuse, Ledger, Loan, Meter, Pool, Wants
from towerman.lots import (
    DEADLINE,
    DONE,
    GRANTED,
    NEVER,
    PARKED,
    REJECTED,
    Backlog,
    Entry,
    Flow,
    Lot,
    Offer,
    Row,
    Source,
    Urgency,
)
from towerman.rates import Numbers, micros

__all__ = [
    "DONE",
    "GRANTED",
    "NEVER",
    "PARKED",
    "PASSES",
    "REJECTED",
    "Entry",
    "Flow",
    "Gate",
    "Lot",
    "Offer",
    "Urgency",
]

OwnerT = TypeVar("OwnerT")

PASSES: Final = 16
"""Times that a waiter may be passed before it is promoted."""


class Gate(Elsewhere[OwnerT]):
    """Admission for one process. Whoever calls it holds the tower's lock.

    Args:
        ledger: where permits and access are held.
        passes: times that a waiter may be passed before it is promoted.

    Attributes:
        wake_at: the instant at which `tick` is due; may be earlier than needed, never later.
        notes: None, or a list to which ("waiting" | "promoted", entry, label) is appended for whoever traces.
    """

    __slots__ = ()

    def __init__(self, ledger: Ledger[Lot[OwnerT]], *, passes: int = PASSES) -> None:
        super().__init__(ledger, passes)

    # ------------------------------------------------------------------ runs

    def open_flow(
        self, number: int, window: int, limit: float = NEVER, over: tuple[Code, str] = DEADLINE
    ) -> Flow[OwnerT]:
        """A run begins: `window` calls of it may run at once, none may start at or after `limit`: then `over`
        is told.
        """
        assert number not in self._flows, f"run {number} is open"
        flow: Flow[OwnerT] = Flow(number, window, limit, self._served, over)
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
        first: list[Entry[OwnerT]] = []
        if self.ledger.timed:
            self._at(now)
            first = self._settle(now)  # whoever waited for the time that has come goes before those who come now
        backlog: Backlog[OwnerT] | None = None
        pools: object = None
        for one in offers:
            # Nothing has changed since the last one had to stand behind others for a pool that this one wants as well.
            if backlog is not None and one[0].pools is pools:
                backlog.append(one)
                continue
            backlog, pools = None, one[0].pools
            line = self._enter(flow, one, now, now)
            if line is None:
                continue
            if flow.urgent:
                self._stand(flow, line, one, now)
            else:
                line.behind(one)
                if not self._claimants and isinstance(line.bay.state, Pool | Meter):
                    backlog = line.backlog
        return first + self._settle(now) if first else self._settle(now)

    def offer_row(self, flow: Flow[OwnerT], source: Source[OwnerT], calls: range, now: float) -> list[Entry[OwnerT]]:
        """The same for calls of one batch in emitted order, those of them that want something. While they stand behind
        others they take next to no memory.
        """
        early: list[Entry[OwnerT]] = []
        if self.ledger.timed:
            self._at(now)
            early = self._settle(now)
        wants = source.wants
        index, stop = calls.start, calls.stop
        while index < stop:
            first, want = index, wants[index]
            index += 1
            if want is None:
                continue
            line = self._enter(flow, (want, source.owner(first), now), now, now)
            if line is None:
                continue
            if not self._claimants and isinstance(line.bay.state, Pool | Meter):
                # As above: whoever wants of the same pools comes to stand there, too.
                pools = want.pools
                while index < stop and (want := wants[index]) is not None and want.pools is pools:
                    index += 1
            line.behind_in_row(Row(source, first, index, now))
        return early + self._settle(now) if early else self._settle(now)

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
            urgency: what orders the calls of one run, least first; needed where some are ready. From then on those of
                that run go by it, also those that are parked in several places.
        """
        if urgency is not None:
            self._urgency = urgency
            if not entry.flow.urgent:
                entry.flow.urgent = True
                for line in entry.flow.lines.values():
                    self._lead(entry.flow, line, now)
        if ready:
            return self._finish_and_offer(entry, now, ready, urgency)
        if entry.status != GRANTED:
            self._late += 1
            return []
        if self.ledger.timed:
            self._at(now)
        if entry.loan is not None and entry.loan.out:
            return self._linger(entry, entry.loan, now)
        if entry.wants.marked or entry in self._marks:
            self._unmark(entry)
        entry.status = DONE
        if entry.there is not None:
            entry.there.over()
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

    def _finish_and_offer(
        self,
        entry: Entry[OwnerT],
        now: float,
        ready: Sequence[Offer[OwnerT]],
        urgency: Callable[[OwnerT], Urgency] | None,
    ) -> list[Entry[OwnerT]]:
        """What an end makes ready may go before calls of the same run that were ready earlier: by urgency, not by age.

        Where other runs wait for some of it, or claims hide something, what is given back is dealt out by rank first.
        """
        flow = entry.flow
        if urgency is None or entry.status != GRANTED or entry.loan is not None or entry.wants.loan is not None:
            return self.finish(entry, now) + self.offer(flow, ready, now)
        late: list[Offer[OwnerT]] = []
        if self._claimants or entry.orphan or (self._parked > flow.parked_total and self._others_wait(entry)):
            decided = self.finish(entry, now)
            late.extend(ready)
        elif self._one_for_all(entry, ready, now):
            for line in flow.lines.values():
                for one in ready:
                    self._stand(flow, line, one, now)
            return self.finish(entry, now)  # and the most urgent of all is handed over to
        else:
            if self.ledger.timed:
                self._at(now)
            if entry.wants.marked or entry in self._marks:
                self._unmark(entry)
            entry.status = DONE
            if entry.there is not None:
                entry.there.over()
            del flow.running[entry]
            states = self._give(entry.wants)
            if flow.lines:
                self._note_freed(
                    flow, states, now
                )  # those who are tried before the rest is settled waited for a sibling
            for one in ready:
                # Those of its run that are parked and go before it have what there is first, where that is of use.
                if flow.parked_total:
                    mine = urgency(one[1])
                    if min(urgency(parked.owner) for parked in flow.parked) <= mine:
                        self._pump(self._look_again(), now, mine)
                self._place(flow, one, now)
            if flow.lines:
                self._let_go(flow, states, now)
            decided = self._settle(now)
        for one in late:
            self._place(flow, one, now)
        return decided + self._settle(now)

    def _others_wait(self, entry: Entry[OwnerT]) -> bool:
        """Do calls of other runs wait for some of what this one gives back?"""
        lines = entry.flow.lines
        for state in (*self.ledger.states(entry.wants), *entry.wants.meters):
            lot = state.lot
            if lot is not None and lot.count > sum(len(lines[bay].parked) for bay in lot.bays.values() if bay in lines):
                return True
        return False

    def _one_for_all(self, entry: Entry[OwnerT], ready: Sequence[Offer[OwnerT]], now: float) -> bool:
        """The usual case: all that is ready, and the one that is parked, want what this one gives back and nothing
        else, so that one of them gets it and the others stand.
        """
        flow, pools = entry.flow, entry.wants.pools
        if flow.parked_total != 1 or self.ledger.timed or self.ledger.uneven or flow.limit <= now:
            return False
        ((bay, line),) = flow.lines.items()
        (parked,) = line.parked
        return (
            isinstance(bay.state, Pool)
            and parked.clock == NEVER
            and not (parked.queued or parked.promoted)
            and _plain(entry.wants, pools)
            and _plain(parked.wants, pools)
            and all(_plain(one[0], pools) for one in ready)
        )

    def begun(self, entry: Entry[OwnerT], now: float) -> bool:
        """The first line of a granted entry is next: from now on its start counts in its rates.

        Returns:
            Whether something may be due earlier because of that: then whoever has timers looks at `wake_at`.
        """
        marks = self._marks.get(entry)
        if marks is None or marks.begun:
            return False
        self.ledger.begun(marks, now)
        before = self.wake_at
        for meter, _ in marks.meters:
            if meter.lot is not None:  # it may have waited to know when this one begins
                self._set_alarm(meter)
        return self.wake_at < before

    def verdict(self, entry: Entry[OwnerT], verdict: Verdict, now: float) -> list[Entry[OwnerT]]:
        """How the work of a granted entry came back, for its breakers. The first that is told counts.

        Where one opens by that, those who wait to go through it are rejected.
        """
        marks = self._marks.get(entry)
        if marks is None or not marks.fuses:
            return []
        if entry.there is not None:
            entry.there.told(verdict)
        self._at(now)
        for fuse in self.ledger.verdict(marks, verdict):
            for parked in [one for one in self._each_parked() if fuse in one.wants.fuses]:
                self._reject(parked, "circuit_open", now, fuse)
        return self._settle(now)

    def pause(self, meters: Iterable[Meter[Lot[OwnerT]]], seconds: float, now: float) -> list[Entry[OwnerT]]:
        """Whoever is behind these rates wants to be left alone for so long: nothing that counts in them starts before
        that, and whoever waits for one of them in vain is rejected now (R-122).
        """
        self._at(now)
        until = micros(now + seconds)
        for meter in meters:
            if not meter.pace.pause(until):
                continue
            for parked in [one for one in self._each_parked() if one.line.bay.state is meter]:
                if self._in_vain(parked.wants, meter, self._clock(parked, now), now):
                    self._reject(parked, "rate_limited", now)
            if meter.lot is not None:
                self._changed.append(meter)
        return self._settle(now)

    def _place(self, flow: Flow[OwnerT], one: Offer[OwnerT], now: float) -> None:
        """Let one call in; where it has to stand behind others of its run, it stands there by urgency."""
        line = self._enter(flow, one, now, now)
        if line is not None:
            self._stand(flow, line, one, now)

    def orphan(self, entry: Entry[OwnerT], now: float) -> list[Entry[OwnerT]]:
        """The result of a granted entry is sealed while its work goes on: it keeps what it holds, but is nobody's
        sibling now.
        """
        if entry.status != GRANTED or entry.orphan:
            self._late += 1
            return []
        if self.ledger.timed:
            self._at(now)
        entry.orphan = True
        if entry.there is not None:
            entry.there.orphaned()
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
        if self.ledger.timed:
            self._at(now)
        self._reject(entry, code, now)
        return self._settle(now)

    def withdraw(self, flow: Flow[OwnerT], gone: Callable[[OwnerT], bool]) -> list[OwnerT]:
        """Take calls out of a run's backlog that were never handed in; returns their owners. Decides nothing."""
        out: list[OwnerT] = []
        for line in flow.lines.values():
            if line.backlog is not None:
                out += line.backlog.take_out(gone)
                line.backlog = line.backlog or None
                self._ended.append((flow, line))
        self._sweep()
        return out

    def tick(self, now: float) -> list[Entry[OwnerT]]:
        """Time has passed: those whose wait is over are rejected."""
        decided: list[Entry[OwnerT]] = []
        deadlines = self._deadlines
        if self.ledger.timed:
            self._at(now)
            decided += self._settle(now)  # who may start at the very instant at which its wait is over, does
        while True:
            for flow in deadlines.over(now):
                for entry in flow.parked:
                    self._reject(entry, flow.over[0], now)
                self._refills += [(flow, line, now) for line in flow.lines.values()]
            for entry in deadlines.due(now):
                self._look_at(entry, now)
            if self.ledger.timed:  # whoever came to wait for one at this very instant has set its alarm
                self._look_at_rates()
            decided += self._settle(now)
            self.wake_at = deadlines.first()
            if self.wake_at > now:  # a successor inherits its clock, so it may be over at once
                return decided

    # ------------------------------------------------------------------ nested calls

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
        if self.ledger.timed:
            self._at(now)
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

    # ------------------------------------------------------------------ other limits, new locks

    def reconfigure(
        self,
        limits: Iterable[tuple[Pool[Lot[OwnerT]], int, int, bool]],
        windows: Iterable[tuple[Flow[OwnerT], int]],
        now: float,
        rates: Iterable[tuple[Meter[Lot[OwnerT]], Numbers | None, bool]] = (),
        breakers: Iterable[tuple[Fuse, tuple[int, int, int, int]]] = (),
    ) -> list[Entry[OwnerT]]:
        """Limits change while calls run and wait (R-64).

        Whoever runs goes on, also above a lower limit. Whoever waits is looked at: what fits now is granted, and what
        needs more than there will ever be is rejected.

        Args:
            limits: pools, each with its new permits, the permits of them in reserve, and whether it is enforced.
            windows: runs, each with how many of its calls may run at once.
            now: the present instant.
            rates: meters, each with its new limit, period in microseconds, burst and reserve (None: there is no limit
                any more), and whether it is enforced.
            breakers: breakers, each with its new failures, window and time open in microseconds, and probes.
        """
        self._at(now)
        for meter, numbers, enforced in rates:
            self.ledger.set_pace(meter, numbers)
            meter.enforced = enforced
            if meter.lot is not None:
                self._changed.append(meter)
        for fuse, others in breakers:
            fuse.circuit.set(*others)
        for pool, limit, reserve, enforced in limits:
            self.ledger.set_limit(pool, limit, reserve, enforced=enforced)
            if pool.lot is not None:
                self._changed.append(pool)
        for flow, window in windows:
            flow.window = window
            self._refills += [(flow, line, now) for line in flow.lines.values()]
        for entry in list(self._each_parked()):
            hopeless = self.ledger.hopeless(entry.wants)
            if hopeless is not None:
                if hopeless.label != entry.blocked_by[-1]:
                    entry.blocked_by = (*entry.blocked_by, hopeless.label)
                self._reject(entry, "concurrency_limit", now)
            elif entry.promoted:
                if entry.line.bay.barred:
                    self._unclaim(entry)
                self._claim(entry)
        self._suspects += [entry for entry in self._each_parked() if entry.wants.loan is not None]
        return self._settle(now)

    def expand(self, more: Callable[[Wants[Lot[OwnerT]]], Wants[Lot[OwnerT]]]) -> None:
        """A tool was declared that makes further locks necessary (intentions above nested keys), or was given further
        limits: who is at work takes them, who waits wants them.

        A lock that is added conflicts only with locks that nobody could ask for until now, so it is always free. A
        limit that is added may be less than what is at work: it is then over, as one that was lowered.
        """
        for flow in (*self._flows.values(), *self._closed):
            for entry in flow.running:
                self._widen(entry, more)
            for line in flow.lines.values():
                for entry in line.parked:
                    entry.wants = more(entry.wants)
                if line.backlog is not None:
                    behind = line.backlog.everyone()
                    offers = [(more(wants), owner, ready) for wants, owner, ready in behind]
                    line.backlog = Backlog(offers, line.backlog.since)
        for entry in self._orphans:
            self.ledger.mark_orphan(entry.wants, -1)
            self._widen(entry, more)
            self.ledger.mark_orphan(entry.wants, 1)

    def _widen(self, entry: Entry[OwnerT], more: Callable[[Wants[Lot[OwnerT]]], Wants[Lot[OwnerT]]]) -> None:
        before, pools = set(entry.wants.holds), dict(entry.wants.pools)
        entry.wants = more(entry.wants)
        for pool, units in entry.wants.pools:
            if pool not in pools:
                self.ledger.count_in(pool, units)
                if entry.loan is not None:
                    entry.loan.units[pool] = units
                    if pool.lot is not None:  # whoever waits for it below this call may have it now
                        self._changed.append(pool)
        self.ledger.take_holds(hold for hold in entry.wants.holds if hold not in before)


def _plain(wants: Wants[Lot[OwnerT]], pools: object) -> bool:
    """Does it want permits of these very pools and nothing else?"""
    return wants.pools is pools and not (wants.holds or wants.marked or wants.loan is not None)
