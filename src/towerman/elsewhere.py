"""What becomes of a granted call that needs something of an engine, too: it is let in there, waits, or does not start.

Theory (rule S12). Some limits count over many processes, and an engine keeps them. Here they are kept, too, as if this
process were alone: so no process holds more than all may, and whoever is in the way here is not asked about there. A
call that is granted here is asked about, and holds what it has here for that one question. Where the engine says no,
it gives everything back and is parked for what is in its way there, in a bay of its own that no change here can serve:
its clock runs, its wait is bounded, it may be cancelled, like anybody's. When the engine offers it what it wants, it
takes what is local in the same step, or declines and waits for that.

As many calls of one run are asked about for one thing as the run may have running; the others stand behind them, as
behind any sibling.

House rules. As in the rooms below: whoever changes something only notes it, `_settle` is the one tail.

Not here: asking (runner), the engine (engines).
"""

from __future__ import annotations

from towerman.calls import Rejection
from towerman.errors import Code
from towerman.ledger import Meter, State, Wants
from towerman.lots import (
    ELSEWHERE,
    ENGINE,
    GRANTED,
    NEVER,
    PARKED,
    REJECTED,
    UNREACHED,
    Away,
    Entry,
    Line,
    Lot,
    OwnerT,
)
from towerman.turns import Turns


class Elsewhere(Turns[OwnerT]):
    """Decides what follows from the answers of an engine."""

    __slots__ = ()

    def turned_away(
        self, entry: Entry[OwnerT], what: State[Lot[OwnerT]] | str, now: float, *, unreached: bool = False
    ) -> list[Entry[OwnerT]]:
        """The engine lets a granted call wait: it gives back what it has here, and is parked for that state.

        Args:
            entry: granted, and its first line was not reached; one that is parked stays where it is, unless it is now
                known that the engine is not reached, or is again.
            what: what is in its way there, a pool, a rate or the key of a resource; it wants some of it.
            now: the present instant.
            unreached: the engine does not answer.
        """
        away: Away = UNREACHED if unreached else ELSEWHERE
        flow, wants = entry.flow, entry.wants
        if entry.status == PARKED:
            bay = entry.line.bay
            if not bay.need[3] or bay.need[3] == away:
                return []
            clock = self._clock(entry, now)
            line = entry.line
            if line.backlog:
                self._refills.append((flow, line, clock))
            rank = entry.rank
            assert rank is not None
            self._unpark(entry)
            entry.rank = (*rank[:4], entry)
        elif entry.status == GRANTED and not entry.orphan:
            if self.ledger.timed:
                self._at(now)
            self._unmark(entry)
            del flow.running[entry]
            flow.tag -= wants.weight
            states = self._give(wants)
            if flow.lines:
                self._let_go(flow, states, now)
            if flow.closed or now >= flow.limit:
                return self._turned_down(entry, *(("run_closed", "") if flow.closed else flow.over), now)
            if wants.bounds and self._full(wants):
                return self._turned_down(entry, "queue_full", self.shown(what, wants), now)
            if not wants.wait:
                code: Code = "engine_unavailable" if unreached else "concurrency_limit"
                return self._turned_down(entry, code, ENGINE if unreached else self.shown(what, wants), now)
            entry.status = PARKED
            entry.queued = bool(wants.bounds)
            for key, _ in wants.bounds:
                self._queued[key] = self._queued.get(key, 0) + 1
            entry.passes = 0
            number = self._number = self._number + 1
            entry.rank = (-wants.priority, NEVER, self._tag(flow, wants), number, entry)
            self._parked += 1
            self._peak_parked = max(self._peak_parked, self._parked)
            if not flow.parked_total:
                self._waiting += 1
                self._watch_limit(flow)
            flow.parked_total += 1
            clock = entry.since
        else:
            self._late += 1
            return []
        state = self.ledger.node_for(what) if isinstance(what, str) else what
        self._park_there(entry, self._line(flow, state, wants, away), clock, now)
        return self._settle(now)

    def shown(self, what: State[Lot[OwnerT]] | str, wants: Wants[Lot[OwnerT]]) -> str:
        """A pool, a rate or the key of a resource that a call wants, as people are shown it."""
        if isinstance(what, str):
            return f"resource {wants.labels.get(what, 'shared by others')}"
        return self.ledger.label(what, wants)

    def _park_there(self, entry: Entry[OwnerT], line: Line[OwnerT], clock: float, now: float) -> None:
        """Park it in a line of its run; its wait counts from `clock`, unless it waits for its own siblings."""
        flow = entry.flow
        if flow.holds(line.bay.state, entry.wants.loan) and not entry.watched:
            entry.clock = entry.deadline = NEVER
            self._park(entry, line)
            line.standing += 1
            return
        entry.clock = max(clock, line.freed)
        self._park(entry, line)
        if not entry.watched:  # else it is looked at when its wait was to be over before
            self._watch(entry, now)

    def turned_down(
        self, entry: Entry[OwnerT], code: Code, label: str, now: float, retry_after: float | None = None
    ) -> list[Entry[OwnerT]]:
        """The engine says for good that a call does not start, granted here or parked for it.

        Args:
            entry: whose first line was not reached.
            code: why.
            label: what is in its way, as people are shown it.
            now: the present instant.
            retry_after: seconds after which trying again can help, where that is known.
        """
        if self.ledger.timed:
            self._at(now)
        if entry.status == PARKED:
            if label not in entry.blocked_by:
                entry.blocked_by = (*entry.blocked_by, label)
            self._reject(entry, code, now)
            entry.rejection = Rejection(code, label, retry_after)
            return self._settle(now)
        if entry.status != GRANTED or entry.orphan:
            self._late += 1
            return []
        flow = entry.flow
        self._unmark(entry)
        del flow.running[entry]
        flow.tag -= entry.wants.weight
        states = self._give(entry.wants)
        if flow.lines:
            self._let_go(flow, states, now)
        return self._turned_down(entry, code, label, now, retry_after)

    def _turned_down(
        self, entry: Entry[OwnerT], code: Code, label: str, now: float, retry_after: float | None = None
    ) -> list[Entry[OwnerT]]:
        """It holds nothing here any more."""
        entry.status = REJECTED
        if entry.there is not None:
            entry.there.over()
        self._refuse(entry, code, label, retry_after)
        return self._settle(now)

    def let_in(self, entry: Entry[OwnerT], now: float) -> tuple[bool, list[Entry[OwnerT]]]:
        """The engine offers a call what it wants there: does it have what it wants here, too?

        It is granted if it was parked and nothing is in its way here; that is told by the answer alone, and not in the
        list. If something is, it waits for that from now on, where it stood in its class.

        Returns:
            Whether it is granted; the entries decided in this step.
        """
        if entry.status == GRANTED:
            return True, []
        if entry.status != PARKED or not entry.line.bay.need[3]:
            return False, []
        if self.ledger.timed:
            self._at(now)
        flow, line, wants, rank = entry.flow, entry.line, entry.wants, entry.rank
        assert rank is not None
        if flow.limit <= now:
            self._reject(entry, flow.over[0], now)
            return False, self._settle(now)
        fuse = self.ledger.shut(wants) if wants.fuses else None
        if fuse is not None:
            self._reject(entry, "circuit_open", now, fuse)
            return False, self._settle(now)
        blocker = self.ledger.blocker(wants)
        if blocker is None and (self._claimants or self._paced) and wants.loan is None:
            blocker = self._hidden(wants, -rank[0], rank[1])
        clock = self._clock(entry, now)
        if line.backlog:
            self._refills.append((flow, line, clock))
        if blocker is None:
            self._leave(entry)
            self.ledger.take(wants)
            self._grant(entry, *rank[:4])
            self._decided.remove(entry)
            return True, self._settle(now)
        if isinstance(blocker, Meter) and self._in_vain(wants, blocker, clock, now):
            self._reject_for(entry, blocker, now)
            return False, self._settle(now)
        self._unpark(entry)
        entry.rank = (*rank[:4], entry)
        self._park_there(entry, self._line(flow, blocker, wants), clock, now)
        return False, self._settle(now)

    def _unmark(self, entry: Entry[OwnerT]) -> None:
        """What it had of rates and breakers is told: a start that did not take place is free again."""
        marks = self._marks.pop(entry, None)
        if marks is None:
            return
        if not marks.begun:
            self.ledger.take_back(marks)
            self._changed += [meter for meter, _ in marks.meters if meter.lot is not None]
        self.ledger.verdict(marks, "nothing")
