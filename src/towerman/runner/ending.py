"""Ends of calls on one loop: they come back, fail, are told to stop, outlive their results.

Theory. Three ends of a running call: it ends by itself; its time is over; it is cancelled. A coroutine is told by a
cancel and has `grace` seconds to end; a thread cannot be told. If the work goes on after its result is sealed, it is an
orphan: counted, shown, and still holding. Calls ordered after it are then offered to the gate, which parks them for
what the orphan holds and clocks them from that seal.

House rules. What must happen at an end happens in a synchronous function, so no cancel can come between. A fault of our
own costs its batch, never its results.

Not here: what results come to (sealer), what gets the caller to wait (shell).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from functools import partial
from typing import Final, cast

from towerman import sealing
from towerman.bounds import Encoded, EncodingError
from towerman.breaker import Verdict
from towerman.calls import Applied, Outcome
from towerman.errors import Code, RateLimited, ToolError
from towerman.gate import GRANTED, Lot
from towerman.ledger import Meter
from towerman.rates import micros
from towerman.runner import intake
from towerman.runner.offering import belongs, count_orphan
from towerman.runner.oversized import Oversized
from towerman.runner.sealer import exit_in, ran_for
from towerman.sealing import REASON_CHARACTERS
from towerman.work import NOT_STARTED, Job, Owner, Slot, Work

LIMITED: Final = (RateLimited, ExceptionGroup)
"""What may say that a service refuses further calls."""

USUAL_PAUSE: Final = 1.0
"""Seconds for which a tool pauses whose service asked for it and did not say how long."""

MOST_PAUSE: Final = 3600.0
"""Seconds for which it pauses at most, whatever the service said."""

NESTED_GRACE: Final = 0.8
"""The part of its caller's time for cleaning up that a nested call has."""


class Ending(Oversized):
    """The ends of one loop's calls."""

    def rest(self) -> None:
        """A run was closed: if nothing runs and nothing waits, leave no timer behind."""
        raise NotImplementedError  # pragma: no cover - the shell's

    def _pause_there(self, meters: tuple[Meter[Lot[Owner]], ...], seconds: float) -> None:
        """Whoever is behind these rates wants to be left alone for so long, by all processes."""
        raise NotImplementedError  # pragma: no cover - of leases

    def _defer(self, work: Work, index: int, entry: Slot, waited: float, waited_for: tuple[str, ...]) -> bool:
        """A call for which there is no room now: does it go into the durable queue?"""
        raise NotImplementedError  # pragma: no cover - of what is deferred

    def _hand_down(self, work: Work, sealed: Iterable[int]) -> None:
        """Calls are sealed: what comes behind those in the durable queue knows that."""
        raise NotImplementedError  # pragma: no cover - of what is deferred

    def _release(self, work: Work) -> None:
        """A batch that is written down has ended: another one may go on with it."""
        raise NotImplementedError  # pragma: no cover - filing's

    def _is_handed(self, work: Work, index: int, reason: str | None = None) -> bool:
        """Is a call being put into the durable queue, and can that not be called off any more?"""
        raise NotImplementedError  # pragma: no cover - of what is deferred

    # ================================================================ ends

    def _finished(
        self, job: Job, value: object, error: BaseException | None, encoded: Encoded | EncodingError | None = None
    ) -> None:
        """The work of a call has ended, one way or another; on the loop, once."""
        try:
            if job.after is not None and job.ended:
                self._form_too_late(job, encoded)
                return
            if error is None and not job.sealed and job.why is None:
                if encoded is None:
                    tool = job.tool
                    usual = self._kept_for is self.core.policy and not tool.reads_results
                    try:
                        keep = self._at_once if usual else self._kept(tool, patient=False)
                        encoded = sealing.encoded(tool, value, keep)
                    except BaseException as wrong:  # of the tool's own encoder: as if its handler had raised it
                        value, error = None, wrong
                if encoded is not None and (type(encoded) is not Encoded or encoded.cut):
                    encoded = self._too_large(job, value, encoded)
                    if encoded is None:
                        return
            self._end(job, value, error, encoded)
        except Exception as fault:
            self._faulty(job.work, job.index, job.entry, fault, job, ended=True)

    def _faulty(
        self, work: Work, index: int, entry: Slot, fault: Exception, job: Job | None = None, *, ended: bool = False
    ) -> None:
        """A fault of Towerman's own in dealing with a call: the batch is ended, sealed and told; nobody waits on.

        Args:
            entry: what the gate knows the call by.
            job: the call, if it was granted.
            ended: its work is over.
        """
        core = self.core
        work.error = work.error or fault
        job = work.jobs.pop(index, job)
        goes_on = False
        if job is not None:
            job.sealed = True
            goes_on = not ended and job.outcome is None and not self._called_off(job)
            if job.outcome is not None and work.results[index] is None:
                self._seal(work, index, job.outcome, core.now())
        if work.results[index] is None:
            tool, started, attempts = work.tools[index], ended or goes_on, 1
            again = work.again.get(index) if work.again is not None else None
            if again is not None:
                self._up(again)
                # A fault may come between the count of an attempt and its end.
                attempts = max(again.attempts, job.attempt if job is not None and started else 1)
                started = True
            applied: Applied = "unknown" if started and (tool is None or not tool.effect_free) else "no"
            call = work.calls[index]
            result = sealing.faulty(index, call, started, applied, still_running=goes_on, attempts=attempts)
            self._seal(work, index, result, core.now())
        try:
            if goes_on:
                with core.lock:
                    decided = []
                    if entry.status == GRANTED and not entry.orphan:  # or it was one before the fault
                        decided = core.gate.orphan(entry, core.now())
                    if job is not None:
                        count_orphan(core, job, 1)
                self._take(decided)
            else:
                if job is not None:
                    with core.lock:
                        job.ended = True
                        count_orphan(core, job, 0)
                self._give_back(entry)
            if job is not None and job.nested:
                self._end_nested(job)
        except Exception as another:  # of the gate: those who wait for their results come first
            work.error.add_note(f"and then: {type(another).__name__}")
        self._close(work, "cancelled", "cancelled", f"Towerman failed ({type(fault).__name__})")
        if work.groups is not None:  # if the batch was being ended before, calls may still hang on this one's run
            self._seal_rest(work, 0)
        self._hand_on(work)

    @staticmethod
    def _called_off(job: Job) -> bool:
        """Keep a granted call from its first line, or tell it to stop if it is past it; was it before?"""
        if job.ticket is not None:
            return job.ticket.take()
        if job.task is not None:
            cast("asyncio.Task[None]", job.task).cancel()
        return job.started == NOT_STARTED

    def _end(
        self, job: Job, value: object, error: BaseException | None, encoded: Encoded | EncodingError | None
    ) -> None:
        core = self.core
        now = core.now()
        work, index = job.work, job.index
        if work.shares is not None:
            self._settle_share(job)
        if job.entry.wants.fuses:
            self._tell_fuses(job, error, now)
        if error is not None and isinstance(error, LIMITED) and job.why is None and not job.sealed:
            self._hear_limit(job, error)  # which may end this batch, so it comes before the seal
        if job.sealed:
            self._late(job, error, now)
            self._keep_letter(job, value, error, encoded, now)
        else:
            job.sealed = True
            del work.jobs[index]
            if error is None and job.why is None:
                assert encoded is not None, "it was encoded before"
                self._seal_value(job, value, encoded, now)
            else:
                if job.tool.retry is not None and self._try_again(job, error, now):
                    return
                if job.why is not None and (error is None or exit_in(error) is None):
                    self._seal_stopped(job, now, still_running=False)
                    self._keep_letter(job, value, error, encoded, now)
                elif error is not None:
                    self._seal_error(job, error, now)
        gate = core.gate
        if work.plan.trivial or job.outcome is not None:  # the plan is told once the outcome is written down
            with core.lock:
                job.ended = True
                decided = gate.finish(job.entry, now)
                notes = self._notes() if gate.notes else ()
        else:
            result = work.results[index]
            ready = self._ready(work, self._follow(work, index, result is not None and result.ok))
            with core.lock:
                job.ended = True
                if work.generation != core.generation:
                    ready = self._renewed(work, ready)
                decided = gate.finish(job.entry, now, ready, _urgency)
                notes = self._notes() if gate.notes else ()
        if job.nested:
            self._end_nested(job)
        job.task = None  # whose context knows the job: no cycle is left for the collector
        if len(decided) == 1 and not (self._draining or notes) and decided[0].owner[0].shell is self:
            # The usual case, a call that hands over to the next one, without a detour over the queue.
            entry = decided[0]
            self._draining = True  # an eager task may end while it is made: what that decides stands behind it
            try:
                self._carry_out(entry)
            finally:
                self._draining = False
            if self._todo:
                self._drain()
            due = self._due() if core.crowded else gate.wake_at
            if due < self._timer_at:
                self._arm(due)
        elif decided or notes or gate.wake_at < self._timer_at:
            self._take(decided, notes)
        if self._refused:
            self._settle_refused()
        if not work.left and work.waiters:
            self._hand_on(work)

    def _tell_fuses(self, job: Job, error: BaseException | None, now: float) -> None:
        """How a call came back, for its circuit breakers."""
        with self.core.lock:
            decided = self.core.gate.verdict(job.entry, verdict_of(job.why, error), now)
            notes = self._notes()
        self._take(decided, notes)

    def _rate_limited(self, job: Job, seconds: float | None) -> None:
        """A handler was told by its service to slow down: so are all calls that count in the rates of its tool (R-122).

        Args:
            job: whose handler said so.
            seconds: for how long; None: it did not say.
        """
        core, work = self.core, job.work
        pause = min(USUAL_PAUSE if seconds is None else max(0.0, seconds), MOST_PAUSE)
        with core.lock:
            now = core.now()
            meters = job.entry.wants.meters
            if not meters:
                core.pause(job.tool.name)
                meters = tuple(one for one in [core.gate.ledger.meters.get(f"rate:tool:{job.tool.name}")] if one)
            until = micros(now + pause)
            later = [meter for meter in meters if meter.pace.until < until]
            decided = core.gate.pause(meters, pause, now)
            notes = self._notes()
        self._pause_there(meters, pause)
        if pause and any(meter.enforced for meter in later):
            own = f"rate:tool:{job.tool.name}"
            told = sealing.paused(job.tool.name, pause, alone=all(meter.key == own for meter in later))
            work.paused = {**(work.paused or {}), job.tool.name: told}
        for meter in later if core.emit is not None else ():
            self._tell(work, job.index, "paused", pause=pause, waiting_for=meter.label)
        self._take(decided, notes)

    def _late(self, job: Job, error: BaseException | None, now: float) -> None:
        """An orphan has ended: what it brings is dropped and counted."""
        core, work, index = self.core, job.work, job.index
        work.ended[index] = now
        with core.lock:
            count_orphan(core, job, 0)
            core.late_results += error is None
        leaving = exit_in(error) if error is not None else None
        if leaving is not None and work.left:
            self._interrupt(work, leaving)
        if core.emit is not None:
            if error is None:
                self._tell(work, index, "late_result", ran=now - job.started)
            self._tell(work, index, "ended", ran=now - job.started)

    def _rejected(self, entry: Slot) -> None:
        """The gate said no to a call that waited, or could not wait."""
        work, index = entry.owner
        if work.results[index] is not None:
            return
        waited = self.core.now() - entry.since if entry.blocked_by else 0.0
        if work.closing is not None:
            self._seal_closed(work, index, waited=waited, waited_for=entry.blocked_by)
        else:
            if work.gated is not None and self._taken_before(work, index):
                return
            code, blocker = entry.rejection.code, entry.rejection.blocker
            waited_for = work.waited_for.get(index, ()) + (entry.blocked_by or (blocker,))
            if code == "budget_exhausted":
                waited_for = tuple(dict.fromkeys((*waited_for, self._late_for(work))))
            if entry.wants.of.defer and self._defer(work, index, entry, waited, waited_for):  # type: ignore[attr-defined]
                return
            never = code == "concurrency_limit" and self.core.gate.ledger.hopeless(entry.wants) is not None
            left = entry.rejection.retry_after
            message = sealing.refusal(code, blocker, entry.wants.max_wait, never=never, retry_after=left)
            self._refuse(
                work, index, code, message, waited=waited, waited_for=waited_for, never=never, retry_after=left
            )
        self._settle(work, index, False)

    def _settle(self, work: Work, index: int, ok: bool) -> None:
        """A call is sealed: let the plan go on, and the caller if it was the last."""
        if not work.plan.trivial:
            self._settle_in_plan(work, index, ok)
        if not work.left:
            self._hand_on(work)

    def _settle_in_plan(self, work: Work, index: int, ok: bool) -> None:
        """A call is sealed that gives nothing back now: offer what is ready because of that."""
        ready = self._follow(work, index, ok)
        if ready:
            self._offer_ready(work, ready)

    def _follow(self, work: Work, index: int, ok: bool) -> list[int]:
        """Tell the plan that a call is sealed, and seal what is skipped for it; returns what is ready now.

        Its work counts as ended: what an orphan holds is kept by the ledger.
        """
        ready = self._tell_plan(work, index, ok)
        if work.groups is not None:
            ready = self._answered(work, index, ready)
        return ready if work.closing is None else []

    def _tell_plan(self, work: Work, index: int, ok: bool) -> list[int]:
        ready, skipped = work.plan.seal(index, ok)
        for one, culprit in skipped:
            message = sealing.unneeded(culprit, work.calls[culprit])
            self._refuse(work, one, "dependency_failed", message, "skipped", waited_for=work.waited_for.get(one, ()))
        if work.deferral is not None:
            self._hand_down(work, [index, *(one for one, _ in skipped)])
        return [*ready, *work.plan.end(index)]

    def _soon(self, work: Work, ready: Iterable[int]) -> None:
        self.loop.call_soon(self._go_on, work, ready)

    def _hand_on(self, work: Work) -> None:
        """If every call is sealed, the batch is at work no more: wake whoever waits for that."""
        if not work.left:
            # Here and not when the caller wakes: whoever closes the run may wake first.
            run, parent = work.run, work.parent
            run.works.pop(work, None)
            self.works.pop(work, None)
            self._busy.pop(work, None)
            if parent is not None and parent.nested is not None and work in parent.nested:
                with self.core.lock:
                    del parent.nested[work]
                    decided = self.core.gate.lent_back(parent.entry, self.core.now())
                self._take(decided)
            if run.gone and not run.works:
                with self.core.lock:
                    self.core.gate.close_flow(run.flow)
                self.loop.call_soon(self.rest)  # whoever closed the run could not: the batch was still at work
            if work.attempt:
                self._release(work)
            for wake in work.waiters:
                wake()
            work.waiters.clear()

    # ================================================================ stopping

    def _close(self, work: Work, code: Code, outcome: Outcome, reason: str) -> None:
        """End a batch early: what waits is sealed in slices, what runs is told to stop and has `grace` seconds.

        After a sibling's failure only what has no side effect is told to stop; what writes goes on to its end.
        """
        reason = sealing.clean(reason[:REASON_CHARACTERS])
        if work.closing is not None:
            if code != "sibling_failed":  # what a failure has spared does not keep a caller who gives up
                for job in list(work.jobs.values()):
                    self._stop(job, "cancelled", reason)
            return
        work.closing = (code, outcome, reason)
        if work.asking:
            self._stop_asking(work)
        try:
            self._take_back(work, code)
        except Exception as fault:  # what is left in the gate is taken out at the end
            work.error = work.error or fault
            work.given_up = True
        for job in list(work.jobs.values()):
            if code != "sibling_failed":
                self._stop(job, "cancelled", reason)
            elif job.tool.effect_free:
                self._stop(job, code, reason)
        self._seal_rest(work, 0)

    def _seal_rest(self, work: Work, start: int) -> None:
        """Seal what never started, a slice at a time."""
        core = self.core
        turn = core.now() + intake.SLICE
        for index in range(start, len(work.calls)):
            self._seal_open(work, index)
            if work.again is not None and work.groups is not None and index in work.again:
                group = work.groups.get(index)
                if group is not None and group.source == index:
                    for one in group.inside:  # who hung on what its last attempt came to
                        self._seal_open(work, one)
            if not index & 15 and core.now() > turn:
                self.loop.call_soon(self._seal_rest, work, index + 1)
                return
        self._hand_on(work)

    def _seal_open(self, work: Work, index: int) -> None:
        """Seal a call of a batch that is being ended, unless it is at work, or the run of another one answers it."""
        if work.results[index] is None and index not in work.jobs:
            try:
                if work.deferral is not None and self._is_handed(work, index):
                    return
                if work.groups is None or not self._tied(work, index):
                    self._seal_closed(work, index)
            except Exception as fault:
                self._seal_plain(work, index, fault)

    def _stop(self, job: Job, why: Code, reason: str) -> None:
        """Tell a granted call to stop. It is sealed at once where telling is no use, or where it never started."""
        if job.why is not None or job.sealed or job.outcome is not None:
            return
        try:
            if job.after is not None:  # its handler has returned: the value is its answer, in whatever form
                self._finished(job, job.after.value, None, self._cut_short(job))
                return
            self._tell_to_stop(job, why, reason)
        except Exception as fault:
            self._faulty(job.work, job.index, job.entry, fault, job)

    def _tell_to_stop(self, job: Job, why: Code, reason: str) -> None:
        core = self.core
        now = core.now()
        job.why = why
        job.reason = reason
        if job.ticket is not None:
            if job.ticket.take():
                job.ticket = None  # whatever fails from here on, its thread will not come to it
                self._give_up(job)
                return
            if job.tool.address is None:
                self._orphan(job, now)
                return
            core.processes.kill(job)
        task = cast("asyncio.Task[None] | None", job.task)
        if job.started == NOT_STARTED and job.ticket is None:
            if task is not None:
                task.cancel()
            self._give_up(job)
            return
        job.due = now + min(core.policy.grace, core.most_grace)
        parent = job.work.parent
        if parent is not None and parent.why is not None:
            # Its caller was told to stop, too: it is to have its answer while it still has time itself.
            job.due = min(job.due, now + NESTED_GRACE * max(0.0, parent.due - now))
        if job.due < self._timer_at:
            self._arm(job.due)
        if task is not None:
            task.cancel()

    def _give_up(self, job: Job) -> None:
        """Told to stop between its grant and its first line."""
        if job.why in ("handler_timeout", "deadline_exceeded"):
            self._never_started(job, "deadline_exceeded", "Not started: its time was over.", "rejected")
        else:
            self._never_started(job, "cancelled", f"Not started: {job.reason}.", "cancelled")

    def _never_started(self, job: Job, code: Code, message: str, outcome: Outcome) -> None:
        """A granted call that has not reached its first line: it never will."""
        work, index, entry = job.work, job.index, job.entry
        job.sealed = True
        work.jobs.pop(index, None)
        waited = job.granted - entry.since
        if work.closing is not None:
            self._seal_closed(work, index, waited=waited, waited_for=entry.blocked_by)
        self._refuse(work, index, code, message, outcome, waited=waited, waited_for=entry.blocked_by)
        self._give_back(entry)
        self._settle(work, index, False)

    def _orphan(self, job: Job, now: float) -> None:
        """Seal a call whose work goes on. It keeps what it holds, unless the operator chose otherwise."""
        core, work, index = self.core, job.work, job.index
        job.sealed = True
        work.jobs.pop(index, None)
        self._seal_stopped(job, now, still_running=True)
        if job.entry.wants.fuses:
            self._tell_fuses(job, None, now)
        with core.lock:
            if core.policy.on_orphan == "hold":
                decided = core.gate.orphan(job.entry, now)
            else:
                decided = core.gate.finish(job.entry, now)
                core.orphans_released += 1
            count_orphan(core, job, 1)
            notes = self._notes()
        if core.emit is not None:
            self._tell(work, index, "orphaned", ran=ran_for(job, now))
        self._take(decided, notes)
        if job.nested:
            self._end_nested(job)
        self._settle(work, index, False)

    def cancel_work(self, work: Work, reason: str) -> None:
        """Cancel a whole batch; on its own loop."""
        if work.left:
            self._close(work, "cancelled", "cancelled", reason)

    def _take_back(self, work: Work, code: Code = "cancelled") -> None:
        """Take out of the gate what is left there of a batch that starts nothing more."""
        core = self.core
        with core.lock:
            gate, flow = core.gate, work.run.flow
            gate.withdraw(flow, partial(belongs, work))
            decided: list[Slot] = []
            for entry in gate.parked_of(flow):
                if entry.owner[0] is work:
                    decided += gate.cancel(entry, core.now(), code)
            notes = self._notes()
        self._take(decided, notes)

    def cancel_call(self, work: Work, index: int, reason: str) -> None:
        """Cancel one call of a batch; on its own loop. Ignored once it is sealed."""
        if work.results[index] is not None:
            return
        reason = sealing.clean(reason[:REASON_CHARACTERS])
        job = work.jobs.get(index)
        if job is None or job.why is None:
            work.reasons[index] = reason
        if job is not None:
            self._stop(job, "cancelled", reason)
            return
        if work.deferral is not None and self._is_handed(work, index, reason):
            return
        if work.groups is not None and self._rides(work, index):
            self._get_off(work, index, reason)
            self._settle(work, index, False)
            return
        if work.asking:
            self._stop_asking(work, index)
        if work.again is not None and index in work.again and work.again[index].resting:
            self._refuse(work, index, "cancelled", f"Not started: {reason}.", "cancelled")
            self._settle(work, index, False)
            return
        core = self.core
        now = core.now()
        waited, waited_for = 0.0, work.waited_for.get(index, ())
        with core.lock:
            gate, flow = core.gate, work.run.flow
            decided: list[Slot] = []
            for entry in gate.parked_of(flow):
                if entry.owner[0] is work and entry.owner[1] == index:
                    waited = now - entry.since
                    waited_for += entry.blocked_by
                    decided = gate.cancel(entry, now)
                    break
            else:  # looking for it in a long backlog would take long: what it is granted it gives back unused
                work.given_up = True
            notes = self._notes()
        message = f"Not started: {reason}."
        self._refuse(work, index, "cancelled", message, "cancelled", waited=waited, waited_for=waited_for)
        self._take(decided, notes)
        self._settle(work, index, False)


def verdict_of(why: Code | None, error: BaseException | None) -> Verdict:
    """What the end of a call says of whatever is behind its tool: `why` it was told to stop, what it raised.

    A `ToolError` is an answer; a request to slow down is for the rate. What was cancelled says nothing.
    """
    if why is not None:
        return "failed" if why == "handler_timeout" else "nothing"
    if error is None or isinstance(error, ToolError):
        return "well"
    if isinstance(error, RateLimited):
        return "nothing"
    if isinstance(error, BaseExceptionGroup):
        leaves = {verdict_of(None, one) for one in error.exceptions}
        return next((verdict for verdict in ("failed", "nothing") if verdict in leaves), "well")
    return "failed" if isinstance(error, Exception) else "nothing"


def _urgency(owner: Owner) -> tuple[object, ...]:
    """What orders the calls of a run (S6): batches as they came, in each of them the plan's own order."""
    work, index = owner
    return work.number, work.plan.key(index)
