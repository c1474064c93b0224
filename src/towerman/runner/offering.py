"""Offers and decisions of one loop: what is ready goes to the gate, what the gate decides to whoever carries it out.

Theory. The gate is told and asked under the tower's lock; what it decides may be for calls of any loop, so each
decision is carried out here or posted to the loop that it belongs to. A decision may bring about others before it is
done with: they stand in a row, so that nothing recurses. A loop may be gone when something is posted to it; then
whatever it was granted goes back.

House rules. Deciding happens under the lock, effects outside it. One timer for each loop.

Not here: what becomes of a grant (shell), what follows from an end (ending), who may start (gate).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final

from towerman import sealing
from towerman.core import Core
from towerman.gate import GRANTED, NEVER, Entry, Offer
from towerman.runner.sharing import Sharing
from towerman.threads import Port
from towerman.work import NOT_STARTED, Again, Handing, Job, Join, Owner, Slot, Work

LOOK_SECONDS: Final = 1.0
"""How often a loop on which calls wait looks whether another loop of the tower was closed over what it held."""


Notes = Sequence[tuple[str, Entry[Owner], str]]


class Offering(Sharing):
    """What is ready on one loop, and what was decided about it.

    Args:
        core: what it shares with the other loops of its tower.
        loop: the event loop.
        look: looks whether another loop was closed.
    """

    def __init__(self, core: Core, loop: asyncio.AbstractEventLoop, look: Callable[[], None]) -> None:
        super().__init__(core)
        self.loop = loop
        self._look_at_loops = look
        self.port: Port[Job] = Port(loop.call_soon_threadsafe, self._thread_done, self._lost)
        self.works: dict[Work, None] = {}
        self._busy: dict[Work, None] = {}  # those with calls at work, and some that had some
        self._resting: list[Again] = []  # a heap: calls that wait to be tried again
        self._joins: dict[Join, None] = {}
        self._handings: dict[Handing, None] = {}
        self._todo: deque[Slot] = deque()
        self._inbox: deque[Slot] = deque()
        self._draining = False
        self._passing = False
        self._timer: asyncio.Handle | None = None
        self._timer_at = NEVER

    def _start(self, entry: Slot) -> None:
        """Start the handler of a granted call."""
        raise NotImplementedError  # pragma: no cover - the shell's

    def _thread_done(self, job: Job, value: object, error: BaseException | None) -> None:
        """On the loop: a worker thread has ended its call."""
        raise NotImplementedError  # pragma: no cover - the shell's

    def end_soon(self, work: Work, reason: str) -> None:
        """Cancel a whole batch; from any loop or thread."""
        raise NotImplementedError  # pragma: no cover - the shell's

    def _rejected(self, entry: Slot) -> None:
        """The gate said no."""
        raise NotImplementedError  # pragma: no cover - of the ends

    def _faulty(
        self, work: Work, index: int, entry: Slot, fault: Exception, job: Job | None = None, *, ended: bool = False
    ) -> None:
        """A fault of Towerman's own."""
        raise NotImplementedError  # pragma: no cover - of the ends

    def _on_timer(self) -> None:
        """The timer has fired."""
        raise NotImplementedError  # pragma: no cover - the shell's

    # ================================================================ offers, grants, refusals

    def _ready(self, work: Work, ready: Iterable[int]) -> list[Offer[Owner]]:
        """The offers of calls that are ready."""
        now = self.core.now()
        gated = work.gated
        offers: list[Offer[Owner]] = []
        for index in ready:
            want = work.wants[index]
            if want is not None and work.results[index] is None:
                if work.open and index in work.open:
                    if not self._bind(work, index):
                        continue
                    want = work.wants[index]
                    assert want is not None
                    gated = work.gated
                if work.deferral is not None and self._diverted(work, index):
                    continue
                if gated is not None and index in gated and not gated[index].cleared:
                    self._ask_soon(work, index)
                else:
                    offers.append((want, (work, index), now))
            elif work.joins and index in work.joins:
                work.joins[index].ready = True
        return offers

    def _offer_ready(self, work: Work, ready: Iterable[int]) -> None:
        offers = self._ready(work, ready)
        if offers:
            self._offer(work, offers)
        if self._refused:
            self._settle_refused()

    def _offer(self, work: Work, offers: list[Offer[Owner]]) -> None:
        core = self.core
        with core.lock:
            decided = gather(core) if core.strays else []
            if work.generation != core.generation:
                offers = self._renewed(work, offers)
            decided += core.gate.offer(work.run.flow, offers, core.now())
            notes = self._notes()
        self._take(decided, notes)

    def _renewed(self, work: Work, offers: list[Offer[Owner]]) -> list[Offer[Owner]]:
        """The same offers with what they want since options have changed; under the lock."""
        self.core.renew(work)
        wants = work.wants
        return [(wants[owner[1]] or want, owner, ready) for want, owner, ready in offers]

    def _offer_row(self, work: Work, calls: range) -> None:
        core = self.core
        if work.joins:
            for index in work.joins.keys() & calls:
                work.joins[index].ready = True
        if work.deferral is not None:
            for index in calls:
                if work.wants[index] is not None and work.results[index] is None:
                    self._diverted(work, index)
        with core.lock:
            decided = gather(core) if core.strays else []
            if work.generation != core.generation:
                core.renew(work)
            decided += core.gate.offer_row(work.run.flow, work, calls, core.now())
            notes = self._notes()
        self._take(decided, notes)

    def _notes(self) -> Notes:
        """What the gate noted for the trace; under the lock."""
        gate = self.core.gate
        notes = gate.notes
        if not notes:
            return ()
        gate.notes = []
        return notes

    def _take(self, decided: list[Slot], notes: Notes = ()) -> None:
        """Carry out decisions: here, or on the loop that the call belongs to."""
        for kind, entry, label in notes:
            work, index = entry.owner
            self._tell(work, index, "promoted" if kind == "promoted" else "waiting", waiting_for=label)
        for entry in decided:
            shell = entry.owner[0].shell
            if shell is self:
                self._todo.append(entry)
            else:
                shell.post(entry)
        if not self._draining:
            self._drain()
        due = self._due() if self.core.crowded else self.core.gate.wake_at
        if due < self._timer_at and self.core.gate.anybody:  # else it was due for somebody who waits no more
            self._arm(due)

    def _drain(self) -> None:
        todo = self._todo
        self._draining = True
        try:
            while todo:
                self._carry_out(todo.popleft())
        finally:
            self._draining = False

    def _carry_out(self, entry: Slot) -> None:
        """One decision of the gate: start the call, or seal it."""
        try:
            if entry.status == GRANTED:
                self._start(entry)
            else:
                self._rejected(entry)
        except Exception as fault:
            self._faulty(*entry.owner, entry, fault)

    def post(self, entry: Slot) -> None:
        """From another loop: a decision for a call of this one."""
        self._inbox.append(entry)
        try:
            self.loop.call_soon_threadsafe(self._receive)
        except RuntimeError:
            self._pass_on()

    def _pass_on(self) -> None:
        """This loop is gone: nobody can run its calls, so they give back what they got."""
        # What one gives back may be granted to the next call of this very loop, which comes here again: no recursion.
        while self._inbox and not self._passing:
            self._passing = True
            try:
                while self._inbox:
                    self._give_back(self._inbox.popleft(), here=False)
            finally:
                self._passing = False

    def _receive(self) -> None:
        decided = []
        while self._inbox:
            decided.append(self._inbox.popleft())
        self._take(decided)

    def _lost(self, job: Job) -> None:
        """On a worker thread: the loop of an ended call is gone; what the call held goes back."""
        self._stray(job)

    def _stray(self, lost: Job | Work) -> None:
        """What belonged to a coroutine that was thrown away, or to a loop that is gone, is free again.

        The collector throws away at any moment, also while this thread holds the lock: then whoever comes next does it.
        """
        core = self.core
        core.strays.append(lost)
        if core.lock.acquire(blocking=False):
            try:
                decided = gather(core)
            finally:
                core.lock.release()
            for entry in decided:
                entry.owner[0].shell.post(entry)

    def bury(self) -> None:
        """The loop is closed: nothing of it goes on but what its threads are at."""
        for work in list(self.works):
            self._stray(work)
        self.works.clear()
        self._busy.clear()
        self._resting.clear()
        self.port.lose()
        self._pass_on()

    def _give_back(self, entry: Slot, *, here: bool = True) -> None:
        """What an entry was granted is free again; `here`: on this shell's own loop."""
        core = self.core
        if entry.status != GRANTED:
            return
        with core.lock:
            decided = core.gate.finish(entry, core.now())
            notes = self._notes()
        if here:
            self._take(decided, notes)
        else:
            for one in decided:
                one.owner[0].shell.post(one)

    def _arm(self, instant: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = instant
        self._timer = self.loop.call_later(max(0.0, instant - self.core.now()), self._on_timer)

    def _due(self) -> float:
        """When the gate is due, or other loops are to be looked at."""
        core = self.core
        due = core.gate.wake_at
        if core.crowded and core.gate.anybody:
            due = min(due, core.now() + LOOK_SECONDS)
        return due

    def look(self) -> None:
        """Limits have changed: something may be due earlier, and the gate may have noted something."""
        with self.core.lock:
            notes = self._notes()
        self._take([], notes)


def gather(core: Core) -> list[Slot]:
    """Under the lock: give back what strays held, withdraw what waited. Returns the entries decided."""
    gate = core.gate
    now = core.now()
    decided: list[Slot] = []
    while core.strays:
        lost = core.strays.popleft()
        if isinstance(lost, Work):
            run = lost.run
            gate.withdraw(run.flow, partial(belongs, lost))
            for entry in gate.parked_of(run.flow):
                if entry.owner[0] is lost:
                    decided += gate.cancel(entry, now)
            # A thread goes on, and hands back what it held when it ends.
            jobs = [job for job in lost.jobs.values() if job.ticket is None or job.ticket.take()]
            if lost.asking:
                core.asking -= len(lost.asking)
                lost.asking.clear()
            for again in lost.again.values() if lost.again is not None else ():
                core.backing_off -= again.resting
                again.resting = False
            if lost.gated is not None:
                leave_records(core, lost)
            if lost.shares is not None:
                lost.shares.forsake()
            if lost.there and core.engine is not None:
                core.engine.forsake(list(lost.there.values()))
            run.works.pop(lost, None)
            parent = lost.parent
            if parent is not None and parent.nested is not None and lost in parent.nested:
                del parent.nested[lost]
                decided += gate.lent_back(parent.entry, now)
            if run.gone and not run.works:
                gate.close_flow(run.flow)
        else:
            jobs = [lost]
        for job in jobs:
            abandon(core, job)
            if job.entry.status == GRANTED:
                count_orphan(core, job, 0)
                job.sealed = job.ended = True
                decided += gate.finish(job.entry, now)
    return decided


def leave_records(core: Core, lost: Work) -> None:
    """A batch is lost with its loop: what it has begun stays begun, and the rest is for whoever goes on with it."""
    for index, record in (lost.gated or {}).items():
        if record.holder is not lost:
            continue
        group = lost.groups.get(index) if lost.groups is not None else None
        job = lost.jobs.get(group.source if group is not None and index in group.inside else index)
        again = lost.again is not None and index in lost.again
        tool = lost.tools[index]
        if tool is not None and (again or (job is not None and _has_begun(job))):
            core.book.settle(record, sealing.forsaken(index, lost.calls[index], tool))
        else:
            record.release()


def _has_begun(job: Job) -> bool:
    """Has a call of a loop that is gone reached its first line? Of one that a thread has taken, it may have."""
    return job.started != NOT_STARTED or (job.ticket is not None and not job.ticket.take())


def abandon(core: Core, job: Job) -> None:
    """Nobody will hear how a call ends: tell the journal that its effect is unknown, or that it never began."""
    if job.work.filed is None or core.journal is None:
        return
    if job.intending:
        for one in job.work.filed.values():  # its own, and those of calls that were merged into its run
            if one.token and not one.begun:
                core.journal.withdraw(one.token)
    filed = job.work.filed.get(job.index)
    if filed is None or not filed.begun or filed.told:
        return
    filed.told = True
    if job.started == NOT_STARTED:
        core.journal.withdraw(filed.token)
    else:
        core.journal.finish(filed.token, sealing.abandoned())
    if filed.key is not None:
        core.flights.pop(filed.key, None)


def count_orphan(core: Core, job: Job, goes_on: int) -> None:
    """Count an orphan, or count it out, once; under the lock."""
    core.orphans += goes_on - job.orphan
    job.orphan = goes_on
    if not core.orphans and core.when_alone:
        for wake in core.when_alone:
            wake()
        core.when_alone.clear()


def belongs(work: Work, owner: Owner) -> bool:
    return owner[0] is work
